//! [`OpenSession`]: connects a session and ends it in order.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{EpochView, v1};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::connect;
use crate::device::{LevelOptions, check_levels};
use crate::error::Error;
use crate::memory::Memory;
use crate::options::{Options, Transfer};
use crate::pending::BeginOutcome;
use crate::session::{Session, SessionOptions};
use crate::task::SessionTask;
use crate::timeline::Recorder;

/// A session with its background task. Dropping it ends the session in order; in a forked child `ForkSafe` forgets it
/// instead.
#[derive(Debug)]
pub(crate) struct OpenSession {
    pub(crate) session: Arc<Session>,
    task: Option<JoinHandle<()>>,
}

impl OpenSession {
    /// Connects to the sidecar, claims the rank and waits until the epoch begins, unless `cancelled` completes first.
    ///
    /// # Errors
    /// Those of [`crate::Client::connect`]; [`Error::Closed`] when it was cancelled.
    pub(crate) async fn connect(
        options: Options,
        cancelled: impl Future<Output = ()>,
    ) -> Result<(Self, EpochView), Error> {
        let token = options.read_token()?;
        let mut cancelled = pin!(cancelled);
        let attached = tokio::select! {
            attached = connect::attach(&options, token) => attached?,
            () = &mut cancelled => return Err(Error::Closed),
        };
        let (start_timeout, timeline) = (options.start_timeout, options.timeline.clone());
        let is_possible = check_levels(options.gpu_levels, attached.claimed.device_bytes_max);
        let (open, begun, ring_taken) = Self::start(options, attached).await?;
        if let Err(error) = is_possible {
            // The other ranks receive the reason.
            open.session.close(&error.to_string());
            open.end().await;
            return Err(error);
        }
        let begun = tokio::select! {
            begun = open.begin(begun, ring_taken, start_timeout) => begun,
            () = &mut cancelled => Err(Error::Closed),
        };
        let begun = match (begun, timeline) {
            (Ok(view), Some(timeline)) => open.session.start_timeline(timeline).await.map(|()| view),
            (begun, _) => begun,
        };
        match begun {
            Ok(view) => Ok((open, view)),
            Err(error) => {
                open.end().await;
                Err(error)
            }
        }
    }

    /// Starts the background task of a claimed rank. The receivers resolve when the epoch begins and when the sidecar uses
    /// the ring.
    async fn start(
        options: Options,
        attached: connect::Attached,
    ) -> Result<(Self, oneshot::Receiver<BeginOutcome>, oneshot::Receiver<()>), Error> {
        let memory = match options.transfer {
            Transfer::Inline => None,
            Transfer::Arena => Some(Arc::new(Memory::new(connect::MemSocket::of(&options), &attached.claimed)?)),
        };
        let ring = connect::attach_ring(&options, &attached.claimed).await;
        let session = Arc::new(Session::new(
            (options.socket_dir, options.rank),
            attached.outgoing,
            attached.claimed,
            (memory, ring),
            Recorder::new(Some(attached.client)),
            SessionOptions {
                operation_timeout: options.operation_timeout,
                mapped: options.mapped,
                levels: LevelOptions { choice: options.gpu_levels, nccl_folders: options.nccl_folders },
            },
        ));
        let begun = session.pending.on_begin();
        let (report_taken, ring_taken) = oneshot::channel();
        let task = SessionTask::new(Arc::clone(&session), attached.incoming, report_taken)?;
        if session.ring().is_some() {
            session.send_on_stream(Message::RingReady(v1::RingReady {}))?;
        }
        Ok((Self { session, task: Some(tokio::spawn(task.run())) }, begun, ring_taken))
    }

    /// Waits until the epoch has begun and the sidecar uses the ring.
    async fn begin(
        &self,
        begun: oneshot::Receiver<BeginOutcome>,
        ring_taken: oneshot::Receiver<()>,
        start_timeout: Duration,
    ) -> BeginOutcome {
        let begun = async {
            let view = begun.await;
            if let (Ok(Ok(_)), Some(_)) = (&view, self.session.ring()) {
                // Fails only when the session ends, which the first call then reports.
                let _ = ring_taken.await;
            }
            view
        };
        self.session.pending.begin_outcome(timeout(start_timeout, begun).await.ok(), start_timeout)
    }

    /// Ends the session in order and waits until the sidecar has closed the stream.
    pub(crate) async fn end(mut self) {
        self.session.close(CLOSED);
        if let Some(task) = self.task.take() {
            // Fails only when the task was cancelled with its runtime.
            let _ = task.await;
        }
    }

    /// The background task, for the thread that runs the runtime until the task ends.
    pub(crate) fn take_task(&mut self) -> Option<JoinHandle<()>> {
        self.task.take()
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        self.session.close(CLOSED);
    }
}

const CLOSED: &str = "the client was closed";
