//! [`Recorder`]: records what happens to each tensor in a file that Perfetto and chrome://tracing open; docs/TIMELINE.md
//! describes it.
//!
//! Rank 0 records for all ranks. Its sidecar streams events, and a task writes them. Starts and stops are serialized, and the end
//! of a session stops its recording.

mod file;
mod trace;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use ronde_rpc::v1;
use ronde_rpc::v1::ronde_client::RondeClient;
use ronde_wire::Rank;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::error::{Error, describe};
use crate::session::Session;
use file::TraceFile;

/// The file and the contents of a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineOptions {
    /// The file, which is overwritten.
    pub path: PathBuf,
    /// Whether to mark the times at which the coordinator issues orders.
    pub mark_cycles: bool,
}

impl Session {
    /// Starts to record a timeline, on rank 0. Call it in the session's runtime.
    ///
    /// # Errors
    /// [`Error::Timeline`], or why the session is over.
    pub(crate) async fn start_timeline(&self, options: TimelineOptions) -> Result<(), Error> {
        drop(self.open()?);
        if self.pending.me() != RECORDING_RANK {
            return Ok(());
        }
        self.recorder.start(self.claimed.session_token, options).await
    }

    /// Stops the recording, if there is one.
    ///
    /// # Errors
    /// [`Error::Timeline`].
    pub(crate) async fn stop_timeline(&self) -> Result<(), Error> {
        self.fork_guard.check()?;
        self.recorder.stop().await
    }
}

/// Returns the contents of a timeline's file with these events, which are in the order of their times: the recording
/// began so many microseconds after the Unix epoch.
#[must_use]
pub fn timeline_text(since_epoch_us: u64, events: v1::TimelineBatch) -> String {
    let mut trace = trace::Trace::default();
    trace.begin(since_epoch_us);
    trace.add(events);
    trace.finish();
    format!("[\n{}\n]\n", trace.take_lines().join(",\n"))
}

/// The timeline recorder of a session.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// The gRPC client; `None` once the session is over.
    client: Mutex<Option<RondeClient<Channel>>>,
    /// The recording, until it is stopped.
    running: tokio::sync::Mutex<Option<Running>>,
    /// Ends the recording when it is dropped.
    stop: Mutex<Option<oneshot::Sender<()>>>,
}

#[derive(Debug)]
struct Running {
    path: PathBuf,
    task: JoinHandle<Result<(), Error>>,
    /// The outcome of the task.
    outcome: Option<Result<(), Error>>,
}

impl Recorder {
    /// A recorder without a recording. Without a client none can start.
    pub(crate) fn new(client: Option<RondeClient<Channel>>) -> Self {
        Self { client: Mutex::new(client), running: tokio::sync::Mutex::default(), stop: Mutex::default() }
    }

    /// Starts a recording, after it ends the previous one. Call it in the session's runtime.
    ///
    /// # Errors
    /// [`Error::Timeline`], or [`Error::Closed`].
    pub(crate) async fn start(&self, token: [u8; 16], options: TimelineOptions) -> Result<(), Error> {
        let mut running = self.running.lock().await;
        self.end(&mut running).await?;
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed)?;
        let path = options.path.clone();
        let begun = timeout(ANSWER_TIMEOUT, Recording::begin(client, token, options)).await;
        let recording = begun.unwrap_or_else(|_| Err(refused(&path, "the sidecar does not answer")))?;
        let (stop, stopped) = oneshot::channel();
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = Some(stop);
        *running = Some(Running { path, task: tokio::spawn(recording.run(stopped)), outcome: None });
        Ok(())
    }

    /// Ends the recording, if there is one, and completes the file.
    ///
    /// # Errors
    /// [`Error::Timeline`]; the file is valid nevertheless.
    pub(crate) async fn stop(&self) -> Result<(), Error> {
        self.end(&mut *self.running.lock().await).await
    }

    /// Stops the recording because the session is about to end.
    pub(crate) fn close(&self) {
        drop(self.stop.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.client.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Writes the rest of the recording after the session has ended.
    ///
    /// # Errors
    /// [`Error::Timeline`], which a later stop returns, too.
    pub(crate) async fn finish(&self) -> Result<(), Error> {
        self.close();
        match &mut *self.running.lock().await {
            Some(running) => running.finish().await.clone(),
            None => Ok(()),
        }
    }

    async fn end(&self, running: &mut Option<Running>) -> Result<(), Error> {
        drop(self.stop.lock().unwrap_or_else(PoisonError::into_inner).take());
        let Some(mut running) = running.take() else { return Ok(()) };
        running.finish().await.clone()
    }
}

impl Running {
    /// Waits for the end of the task; later calls return the same outcome.
    async fn finish(&mut self) -> &Result<(), Error> {
        let outcome = match self.outcome.take() {
            Some(outcome) => outcome,
            None => match timeout(REST_TIMEOUT, &mut self.task).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => Err(Error::Thread { reason: error.to_string() }),
                Err(_) => {
                    self.task.abort();
                    Err(refused(&self.path, "the sidecar did not send the rest in time"))
                }
            },
        };
        self.outcome.insert(outcome)
    }
}

/// A recording that the sidecar has begun.
struct Recording {
    path: PathBuf,
    trace_file: TraceFile,
    /// Dropping it notifies the sidecar to stop.
    requests: Option<mpsc::Sender<v1::TimelineRequest>>,
    incoming: Streaming<v1::TimelineBatch>,
}

impl Recording {
    async fn begin(
        mut client: RondeClient<Channel>,
        token: [u8; 16],
        TimelineOptions { path, mark_cycles }: TimelineOptions,
    ) -> Result<Self, Error> {
        let trace_file = on_blocking_thread(&path, {
            let path = path.clone();
            move || TraceFile::create(&path)
        })
        .await?;
        let (requests, receiver) = mpsc::channel(1);
        let request = v1::TimelineRequest { session_token: Bytes::copy_from_slice(&token), mark_cycles };
        // Cannot fail: the queue is new and has room for one message.
        drop(requests.try_send(request));
        let answered = async {
            let mut incoming = client.timeline(ReceiverStream::new(receiver)).await?.into_inner();
            incoming.message().await.map(|first| (first, incoming))
        };
        let (first, incoming) = answered.await.map_err(|status| refused(&path, &describe(&status)))?;
        if first.is_none() {
            return Err(refused(&path, "the sidecar ended the recording at once; see its log for the reason"));
        }
        let trace_file = on_blocking_thread(&path, move || trace_file.begin()).await?;
        Ok(Self { path, trace_file, requests: Some(requests), incoming })
    }

    /// Writes batches until the sidecar ends the recording.
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) -> Result<(), Error> {
        let Self { path, mut trace_file, .. } = self;
        let outcome = loop {
            tokio::select! {
                batch = self.incoming.message() => match batch {
                    Ok(Some(batch)) => trace_file = on_blocking_thread(&path, move || trace_file.add(batch)).await?,
                    Ok(None) => break Ok(()),
                    Err(status) => break Err(refused(&path, &describe(&status))),
                },
                // Signalled by the drop of the sender.
                _ = &mut stopped, if self.requests.is_some() => drop(self.requests.take()),
            }
        };
        on_blocking_thread(&path, move || trace_file.finish()).await?;
        outcome
    }
}

/// Works with the file on a blocking thread.
async fn on_blocking_thread<T: Send + 'static>(
    path: &Path,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| refused(path, &error.to_string())),
        Err(error) => Err(Error::Thread { reason: error.to_string() }),
    }
}

fn refused(path: &Path, reason: &str) -> Error {
    Error::Timeline { path: path.to_owned(), reason: reason.to_owned() }
}

/// How long the sidecar may take to begin a recording.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the sidecar may take to send the rest of a recording.
const REST_TIMEOUT: Duration = Duration::from_secs(10);
/// The rank that records timelines.
pub(crate) const RECORDING_RANK: Rank = Rank(0);
