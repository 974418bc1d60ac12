//! A Unix socket in a directory that only this user can enter, and for this user and root only. Each connection asks once:
//! one JSON object in a line each way.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::geteuid;
use ronde_bootstrap::exit::notice;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{sleep, timeout};

/// A request, and where its answer goes.
pub(crate) type Asked<Q, A> = (Q, oneshot::Sender<A>);

/// The socket. Dropping it removes its directory.
pub(crate) struct PrivateSocket<Q, A> {
    directory: PathBuf,
    path: PathBuf,
    asked: mpsc::Receiver<Asked<Q, A>>,
}

impl<Q: DeserializeOwned + Send + 'static, A: Serialize + Send + 'static> PrivateSocket<Q, A> {
    /// Makes the directory `<base>/<prefix><pid>-<attempt>` with the socket `file`, and accepts requests. `invalid` is the
    /// answer to a line that is no request.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn open(
        base: &Path,
        (prefix, file): (&str, &str),
        invalid: fn(&serde_json::Error) -> A,
    ) -> anyhow::Result<Self> {
        let directory = make_fresh(base, prefix)?;
        let (sender, asked) = mpsc::channel(REQUESTS_MAX);
        let made = Self { path: directory.join(file), directory, asked };
        let listener =
            UnixListener::bind(&made.path).with_context(|| format!("cannot listen at {}", made.path.display()))?;
        tokio::spawn(accept(listener, sender, invalid));
        Ok(made)
    }

    /// The next request.
    pub(crate) async fn next(&mut self) -> Asked<Q, A> {
        match self.asked.recv().await {
            Some(asked) => asked,
            // The task that accepts never ends by itself.
            None => std::future::pending().await,
        }
    }

    /// Its directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The path of the socket.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl<Q, A> Drop for PrivateSocket<Q, A> {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            notice(&format!("cannot remove the directory {}: {error}", self.directory.display()));
        }
    }
}

/// Creates a directory that only this user can enter.
fn make_fresh(base: &Path, prefix: &str) -> anyhow::Result<PathBuf> {
    let path = |attempt: u32| base.join(format!("{prefix}{}-{attempt}", std::process::id()));
    let mut made = Err(io::Error::from(io::ErrorKind::AlreadyExists));
    for attempt in 0..ATTEMPTS_MAX {
        made = DirBuilder::new().mode(PRIVATE).create(path(attempt)).map(|()| path(attempt));
        // A process that was killed may have had the same process id.
        if !made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists) {
            break;
        }
    }
    made.with_context(|| format!("cannot create a directory in {}", base.display()))
}

/// Accepts connections for as long as the process runs.
async fn accept<Q: DeserializeOwned + Send + 'static, A: Serialize + Send + 'static>(
    listener: UnixListener,
    sender: mpsc::Sender<Asked<Q, A>>,
    invalid: fn(&serde_json::Error) -> A,
) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) if is_allowed(&stream) => {
                let sender = sender.clone();
                tokio::spawn(async move {
                    // Whoever asks and leaves, or sends nothing, gets no answer.
                    let _ = timeout(CONNECTION_LIMIT, serve(stream, sender, invalid)).await;
                    drop(place);
                });
            }
            Ok(_) => {}
            // For want of descriptors, for example, which an immediate retry would meet again.
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Whether the kernel reports this user, or root, at the other end.
fn is_allowed(stream: &UnixStream) -> bool {
    let uid = getsockopt(stream, sockopt::PeerCredentials).map(|credentials| credentials.uid());
    uid.is_ok_and(|uid| uid == geteuid().as_raw() || uid == 0)
}

async fn serve<Q: DeserializeOwned, A: Serialize>(
    stream: UnixStream,
    sender: mpsc::Sender<Asked<Q, A>>,
    invalid: fn(&serde_json::Error) -> A,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = Vec::new();
    tokio::io::BufReader::new(reader).take(REQUEST_BYTES_MAX).read_until(b'\n', &mut line).await?;
    let answer = match serde_json::from_slice(&line) {
        Ok(request) => {
            let (reply, answer) = oneshot::channel();
            let is_sent = sender.send((request, reply)).await.is_ok();
            // Without an answer the process is ending, and the connection with it.
            let Some(answer) = answer.await.ok().filter(|_| is_sent) else { return Ok(()) };
            answer
        }
        Err(error) => invalid(&error),
    };
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

const PRIVATE: u32 = 0o700;
/// Directories of killed processes with the same process id.
const ATTEMPTS_MAX: u32 = 16;
/// Requests that wait for the process.
const REQUESTS_MAX: usize = 4;
const CONNECTIONS_MAX: usize = 16;
/// The most bytes of a request.
const REQUEST_BYTES_MAX: u64 = 16 << 10;
/// A process answers within milliseconds.
pub(crate) const CONNECTION_LIMIT: Duration = Duration::from_secs(10);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    type Doubling = PrivateSocket<u32, String>;

    fn open(base: &Path) -> Doubling {
        Doubling::open(base, ("ronde-test-", "test.sock"), ToString::to_string).expect("it can be made")
    }

    async fn answer_to(path: &Path, text: &str) -> String {
        let mut stream = UnixStream::connect(path).await.expect("it listens");
        stream.write_all(text.as_bytes()).await.expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("it answers");
        answer
    }

    #[tokio::test]
    async fn a_request_is_answered_in_a_directory_of_one_user() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let mut socket = open(base.path());
        let (directory, path) = (socket.directory().to_owned(), socket.path().to_owned());
        let mode = fs::metadata(&directory).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let asking = tokio::spawn(async move { answer_to(&path, "21\n").await });
        let (request, reply) = socket.next().await;
        reply.send((2 * request).to_string()).expect("it waits");
        assert_eq!(asking.await.expect("ended"), "\"42\"\n");
        drop(socket);
        assert!(!directory.exists());
    }

    #[tokio::test]
    async fn what_is_no_request_is_refused_and_silence_keeps_nobody_out() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let socket = open(base.path());
        let idle: Vec<_> =
            (1..CONNECTIONS_MAX).map(|_| std::os::unix::net::UnixStream::connect(socket.path())).collect();
        assert!(idle.iter().all(Result::is_ok));
        for text in ["nonsense\n", "-1\n", "\n", "{}\n"] {
            let answer = answer_to(socket.path(), text).await;
            assert!(answer.starts_with('"') && answer.contains(" at line "), "{text}: {answer}");
        }
    }

    #[test]
    fn a_directory_of_another_process_is_not_used() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let first = make_fresh(base.path(), "ronde-test-").expect("it can be made");
        assert_ne!(first, make_fresh(base.path(), "ronde-test-").expect("it can be made"));
        let error = make_fresh(&base.path().join("missing"), "x").expect_err("there is no such directory");
        assert!(error.to_string().contains("cannot create a directory in"), "{error}");
    }
}
