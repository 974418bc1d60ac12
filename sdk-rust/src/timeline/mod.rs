//! Recording what happens to each tensor, in a file that Perfetto and chrome://tracing open; docs/TIMELINE.md describes it.
//!
//! Rank 0 records for all. Its sidecar streams what happens; a task writes it. Starts and stops come one after the other, and a
//! session that ends stops its recording.

mod file;
mod trace;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use ronde_rpc::v1;
use ronde_rpc::v1::ronde_client::RondeClient;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::error::{Error, describe};
use file::TraceFile;

/// What is recorded, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelineOptions {
    /// The file; made anew.
    pub path: PathBuf,
    /// Whether the moments are marked at which the coordinator issues orders.
    pub mark_cycles: bool,
}

/// What a session records.
#[derive(Debug)]
pub(crate) struct Recorder {
    /// The way to the sidecar; `None` once the session is over.
    client: Mutex<Option<RondeClient<Channel>>>,
    /// The recording, while it is not stopped.
    running: tokio::sync::Mutex<Option<Running>>,
    /// Ends the recording when it is dropped.
    stop: Mutex<Option<oneshot::Sender<()>>>,
}

#[derive(Debug)]
struct Running {
    path: PathBuf,
    task: JoinHandle<Result<(), Error>>,
    /// What the task gave.
    outcome: Option<Result<(), Error>>,
}

impl Recorder {
    /// A recorder without a recording; without a client there will be none.
    pub(crate) fn new(client: Option<RondeClient<Channel>>) -> Self {
        Self { client: Mutex::new(client), running: tokio::sync::Mutex::default(), stop: Mutex::default() }
    }

    /// Records from now on, in the place of what was recorded before. To be called in the session's runtime.
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

    /// Ends the recording, if there is one; the file is complete then.
    ///
    /// # Errors
    /// [`Error::Timeline`]; what is in the file is valid all the same.
    pub(crate) async fn stop(&self) -> Result<(), Error> {
        self.end(&mut *self.running.lock().await).await
    }

    /// The session is about to end.
    pub(crate) fn close(&self) {
        drop(self.stop.lock().unwrap_or_else(PoisonError::into_inner).take());
        drop(self.client.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The session is over: what is left of the recording is written.
    ///
    /// # Errors
    /// [`Error::Timeline`], also told to whoever stops it.
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
    /// Waits for the end of the task, once.
    async fn finish(&mut self) -> &Result<(), Error> {
        let outcome = match self.outcome.take() {
            Some(outcome) => outcome,
            None => match timeout(REST_TIMEOUT, &mut self.task).await {
                Ok(Ok(outcome)) => outcome,
                Ok(Err(error)) => Err(Error::Thread { reason: error.to_string() }),
                Err(_) => {
                    self.task.abort();
                    Err(refused(&self.path, "the sidecar has not sent the rest in time"))
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
    /// Its end tells the sidecar to stop.
    requests: Option<mpsc::Sender<v1::TimelineRequest>>,
    incoming: Streaming<v1::TimelineBatch>,
}

impl Recording {
    async fn begin(
        mut client: RondeClient<Channel>,
        token: [u8; 16],
        TimelineOptions { path, mark_cycles }: TimelineOptions,
    ) -> Result<Self, Error> {
        let trace_file = written(&path, {
            let path = path.clone();
            move || TraceFile::create(&path)
        })
        .await?;
        let (requests, receiver) = mpsc::channel(1);
        let request = v1::TimelineRequest { session_token: Bytes::copy_from_slice(&token), mark_cycles };
        // The queue is new and has room for one.
        drop(requests.try_send(request));
        let answered = async {
            let mut incoming = client.timeline(ReceiverStream::new(receiver)).await?.into_inner();
            incoming.message().await.map(|first| (first, incoming))
        };
        let (first, incoming) = answered.await.map_err(|status| refused(&path, &describe(&status)))?;
        if first.is_none() {
            return Err(refused(&path, "the sidecar ended it at once; see its log"));
        }
        let trace_file = written(&path, move || trace_file.begin()).await?;
        Ok(Self { path, trace_file, requests: Some(requests), incoming })
    }

    /// Writes what comes until the sidecar ends it.
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) -> Result<(), Error> {
        let Self { path, mut trace_file, .. } = self;
        let outcome = loop {
            tokio::select! {
                batch = self.incoming.message() => match batch {
                    Ok(Some(batch)) => trace_file = written(&path, move || trace_file.add(batch)).await?,
                    Ok(None) => break Ok(()),
                    Err(status) => break Err(refused(&path, &describe(&status))),
                },
                // By its end, not by a message.
                _ = &mut stopped, if self.requests.is_some() => drop(self.requests.take()),
            }
        };
        written(&path, move || trace_file.finish()).await?;
        outcome
    }
}

/// Does something with the file beside the runtime.
async fn written<T: Send + 'static>(
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
/// How long the rest of a recording may take to come.
const REST_TIMEOUT: Duration = Duration::from_secs(10);
