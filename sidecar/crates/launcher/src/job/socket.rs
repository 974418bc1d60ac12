//! The socket of an elastic job: the launcher's end, and a request to it.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, ensure};
use nix::sys::socket::{getsockopt, sockopt};
use ronde_bootstrap::codes::Code;
use ronde_wire::JobName;

use super::messages::{ANSWER_BYTES_MAX, Answer, Request};
use crate::private_socket::{self, CONNECTION_LIMIT, PrivateSocket};

/// The launcher's end.
pub(crate) type JobSocket = PrivateSocket<Request, Answer>;
/// A request, and where its answer goes.
pub(crate) type Asked = private_socket::Asked<Request, Answer>;

/// Makes `<base>/ronde-job-<pid>-<attempt>` with the socket and the job's name, and accepts requests.
///
/// # Errors
/// When it cannot be made.
pub(crate) fn open(base: &Path, job: &JobName) -> anyhow::Result<JobSocket> {
    let socket = JobSocket::open(base, (PREFIX, SOCKET_FILE), |error| Answer::Refused {
        reason: format!("the launcher cannot parse the request ({error}); use the `ronde` that started the job"),
    })?;
    let name = socket.directory().join(NAME_FILE);
    // Last, so that whoever finds a name finds a socket.
    fs::write(&name, format!("{job}\n")).with_context(|| format!("cannot write {}", name.display()))?;
    Ok(socket)
}

/// Sends a request to the launcher whose socket is in a directory of the user `owner`, and returns its answer.
///
/// # Errors
/// When it does not answer, or another user does.
pub(super) fn ask(directory: &Path, owner: u32, request: &Request) -> anyhow::Result<Answer> {
    let path = directory.join(SOCKET_FILE);
    let exchange = || -> anyhow::Result<Answer> {
        let mut stream = UnixStream::connect(&path)?;
        let uid = getsockopt(&stream, sockopt::PeerCredentials)?.uid();
        ensure!(uid == owner, "a process of uid {uid} listens there, but the directory belongs to uid {owner}");
        stream.set_read_timeout(Some(CONNECTION_LIMIT))?;
        stream.set_write_timeout(Some(CONNECTION_LIMIT))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = Vec::new();
        BufReader::new(stream).take(ANSWER_BYTES_MAX).read_until(b'\n', &mut answer)?;
        ensure!(!answer.is_empty(), "it has closed the connection without an answer, so the job is ending");
        Ok(serde_json::from_slice(&answer)?)
    };
    let answer = exchange()
        .with_context(|| format!("the launcher at {} does not answer; see whether the job still runs", path.display()));
    answer.context(Code::JobUnreachable)
}

/// The beginning of a directory's name.
pub(super) const PREFIX: &str = "ronde-job-";
/// The file with the job's name.
pub(super) const NAME_FILE: &str = "job";
/// The socket.
pub(super) const SOCKET_FILE: &str = "job.sock";

#[cfg(test)]
mod tests {
    use nix::unistd::geteuid;

    use super::*;

    #[tokio::test]
    async fn a_launcher_answers() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let mut socket = open(base.path(), &JobName::new("digits").expect("a name")).expect("it can be made");
        let directory = socket.directory().to_owned();
        assert_eq!(fs::read_to_string(directory.join(NAME_FILE)).expect("written"), "digits\n");
        let owner = geteuid().as_raw();
        let answered = tokio::task::spawn_blocking(move || ask(&directory, owner, &Request::Scale { workers: 3 }));
        let (request, reply) = socket.next().await;
        assert_eq!(request, Request::Scale { workers: 3 });
        reply.send(Answer::Done { text: "done".into() }).expect("it waits");
        assert_eq!(answered.await.expect("ended").expect("answered"), Answer::Done { text: "done".into() });
    }

    #[test]
    fn another_users_socket_and_one_without_a_launcher_are_errors() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let error = ask(base.path(), geteuid().as_raw(), &Request::Status).expect_err("nobody listens");
        assert_eq!(error.downcast_ref::<Code>(), Some(&Code::JobUnreachable));
        assert!(format!("{error:#}").contains("does not answer"), "{error:#}");
        let _listener = std::os::unix::net::UnixListener::bind(base.path().join(SOCKET_FILE)).expect("it can be made");
        let error = ask(base.path(), geteuid().as_raw() + 1, &Request::Status).expect_err("the owner differs");
        assert!(format!("{error:#}").contains("but the directory belongs to uid"), "{error:#}");
    }
}
