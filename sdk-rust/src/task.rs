//! [`SessionTask`]: the background task of a session. It owns the incoming stream, sends heartbeats, and reads the ring while
//! no thread waits. When the stream ends, it ends the session: every waiter gets the reason, and so does every later call.

use std::sync::Arc;
use std::time::Duration;

use ronde_rpc::v1;
use ronde_rpc::v1::{client_message, server_message};
use ronde_shm::ForkSafe;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Streaming;

use crate::error::{Error, end_of_stream, sidecar_gone};
use crate::ring::Ring;
use crate::session::Session;

/// The background task of a session.
pub(crate) struct SessionTask {
    session: Arc<Session>,
    incoming: Streaming<v1::ServerMessage>,
    /// Notified when the sidecar uses the ring.
    taken: Option<oneshot::Sender<()>>,
    /// `None` without a ring, and once the sidecar has closed it.
    bell: Option<ForkSafe<pipe::Receiver>>,
}

impl SessionTask {
    /// A task for a session. Call it in the runtime in which the task will run.
    ///
    /// # Errors
    /// [`Error::Thread`] when the runtime cannot register the ring's bell.
    pub(crate) fn new(
        session: Arc<Session>,
        incoming: Streaming<v1::ServerMessage>,
        taken: oneshot::Sender<()>,
    ) -> Result<Self, Error> {
        let bell = session.ring().map(listen).transpose()?;
        Ok(Self { session, incoming, taken: Some(taken), bell })
    }

    /// Runs until the stream ends, or until a timeout after the session was closed.
    pub(crate) async fn run(mut self) {
        let why = self.listen().await;
        let session = &self.session;
        if let Some(ring) = session.ring() {
            ring.finish(&|message| session.receive(message));
        }
        session.release_results(&why);
        session.end(&why);
        self.finish_timeline().await;
    }

    /// Writes the rest of the recording, which the sidecar has ended with the session.
    async fn finish_timeline(&self) {
        match tokio::time::timeout(TIMELINE_TIMEOUT, self.session.recorder.finish()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(target: "ronde", "{error}"),
            Err(_) => {
                let reason =
                    "the sidecar did not send the end of the timeline in time; the file is valid but incomplete";
                tracing::warn!(target: "ronde", "{reason}");
            }
        }
    }

    /// Receives until the session ends. Returns the reason.
    async fn listen(&mut self) -> Error {
        let session = Arc::clone(&self.session);
        let mut heartbeat = tokio::time::interval(Duration::from_millis(session.claimed.heartbeat_ms.into()));
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut closes_at: Option<Instant> = None;
        let mut liveness = Liveness::new(Duration::from_millis(session.claimed.peer_timeout_ms.into()));
        loop {
            tokio::select! {
                biased;
                message = self.incoming.message() => match message {
                    Ok(Some(message)) => {
                        liveness.refresh();
                        if let Err(error) = self.receive(message) { return error }
                    }
                    Ok(None) => return self.sidecar_gone("it ended the session"),
                    Err(status) => return self.sidecar_gone(&end_of_stream(&status)),
                },
                _ = heartbeat.tick(), if closes_at.is_none() => {
                    if liveness.is_expired() {
                        let timeout = liveness.timeout.as_secs_f64();
                        return self.sidecar_gone(&format!("it has been silent for {timeout:.1} s, the peer timeout"));
                    }
                    // A full queue means that the sidecar does not read. It will not miss this heartbeat.
                    let _ = session.send_on_stream(client_message::Message::Heartbeat(v1::Heartbeat {}));
                    session.report_gpus();
                    if let Err(error) = self.drive_ring() { return error }
                }
                () = session.closing.notified() => closes_at = Some(Instant::now() + CLOSE_TIMEOUT),
                () = sleep_until(closes_at) => return Error::Closed,
                ended = rung(self.bell.as_mut()) => {
                    self.bell = self.bell.take().filter(|_| !ended);
                    if let Err(error) = self.drive_ring() { return error }
                }
                () = task_wanted(session.ring()) => {
                    if let Err(error) = self.drive_ring() { return error }
                }
            }
        }
    }

    /// Handles a message of the stream.
    fn receive(&mut self, message: v1::ServerMessage) -> Result<(), Error> {
        let taken = matches!(message.message, Some(server_message::Message::RingTaken(_)));
        self.session.receive(message)?;
        let Some(ring) = self.session.ring().filter(|_| taken) else { return Ok(()) };
        ring.open();
        if let Some(taken) = self.taken.take() {
            // The receiver is gone when `connect` was cancelled.
            let _ = taken.send(());
        }
        self.drive_ring()
    }

    /// Reads the ring, if no thread does.
    ///
    /// # Errors
    /// Why the ring broke.
    fn drive_ring(&self) -> Result<(), Error> {
        let Some(ring) = self.session.ring() else { return Ok(()) };
        ring.drive(&|message| self.session.receive(message));
        ring.take_broken().map_or(Ok(()), Err)
    }

    fn sidecar_gone(&self, how: &str) -> Error {
        Error::Failure(sidecar_gone(self.session.directory.display(), how))
    }
}

/// Answers every waiter, also when the task panics or its runtime is dropped.
impl Drop for SessionTask {
    fn drop(&mut self) {
        // In a forked child, a thread that does not exist there may hold the lock.
        if !self.session.fork_guard.is_child() {
            if let Some(ring) = self.session.ring() {
                // The messages that are left in it are discarded.
                ring.finish(&|_| Err(Error::Closed));
            }
            self.session.release_results(&Error::Closed);
            self.session.end(&Error::Closed);
        }
    }
}

/// Detects a silent sidecar. It is checked with every heartbeat: a long time between two checks means that this process itself
/// was stopped, and then the sidecar gets the full timeout again.
struct Liveness {
    timeout: Duration,
    last_message: Instant,
    last_check: Instant,
}

impl Liveness {
    fn new(timeout: Duration) -> Self {
        let now = Instant::now();
        Self { timeout, last_message: now, last_check: now }
    }

    fn refresh(&mut self) {
        self.last_message = Instant::now();
    }

    fn is_expired(&mut self) -> bool {
        let now = Instant::now();
        if now - self.last_check > PROCESS_PAUSE {
            self.last_message = now;
        }
        self.last_check = now;
        now - self.last_message > self.timeout
    }
}

/// Registers the ring's bell with this runtime.
fn listen(ring: &Ring) -> Result<ForkSafe<pipe::Receiver>, Error> {
    // As a pipe, so that the runtime waits for readability only; see `Bell::listen`.
    let receiver = pipe::Receiver::from_owned_fd_unchecked(ring.bell().listen()?.into());
    Ok(ForkSafe::with_fd(receiver.map_err(|error| Error::Thread { reason: error.to_string() })?)?)
}

/// Waits for the ring's bell, forever without one. Returns whether the sidecar has closed it. Cancel-safe.
async fn rung(bell: Option<&mut ForkSafe<pipe::Receiver>>) -> bool {
    let Some(Ok(bell)) = bell.map(ForkSafe::get_mut) else { return std::future::pending().await };
    !matches!(bell.read(&mut [0; RUNG_MAX]).await, Ok(1..))
}

async fn task_wanted(ring: Option<&Ring>) {
    match ring {
        Some(ring) => ring.task_wanted().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Two heartbeats that are further apart than this mean that this process was stopped.
const PROCESS_PAUSE: Duration = Duration::from_secs(1);
/// How long the task receives after the Goodbye.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the end of a timeline may take; less than a blocking client waits for the end of its session.
const TIMELINE_TIMEOUT: Duration = Duration::from_millis(800);
/// Wake-ups read at once; the next turn reads more.
const RUNG_MAX: usize = 1_024;
