//! [`Client`]: the client over gRPC-Web.

use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use ronde_rpc::{EpochView, v1};
use ronde_wire::SetId;
use tokio::sync::oneshot;
use tonic::Status;

use super::channel::{Caller, Channel};
use super::handle::Handle;
use super::link;
use super::options::Options;
use super::platform::within;
use super::session::Session;
use crate::error::{Error, describe};
use crate::methods::{for_each_group, for_each_operation, groups, operations};
use crate::operation::{Label, Operation, ReduceOptions, Site};
use crate::outcome::{Exchanged, ProcessSet, Received};
use crate::tensor::{Tensor, TensorRef};

/// A worker's session with its sidecar over gRPC-Web, in an epoch that has begun.
///
/// Calls take `&self` and may overlap. Dropping the client ends the session in order; [`Client::close`] also waits for it.
pub struct Client {
    session: Rc<Session>,
    view: EpochView,
    ask_status: AskStatus,
    ended: Option<oneshot::Receiver<()>>,
}

/// Asks for the status; a client does not show what its calls go over.
type AskStatus = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<v1::StatusAnswer, Status>>>>>;

impl Client {
    /// Reaches the sidecar with the platform's `fetch`, claims the rank and waits until all ranks have attached.
    ///
    /// # Errors
    /// [`Error::WebConnect`] and [`Error::WebClaim`] when the sidecar cannot be reached or does not accept this worker;
    /// [`Error::Start`] when not all ranks attach within the start timeout; [`Error::Failure`] when the job fails before it
    /// starts.
    #[cfg(target_arch = "wasm32")]
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let channel = tonic_web_wasm_client::Client::new(options.url.clone());
        Self::connect_over(channel, options).await
    }

    /// The same over a channel.
    pub(super) async fn connect_over(channel: Channel, options: Options) -> Result<Self, Error> {
        let caller = Caller::new(channel, &options.token())?;
        let (claimed, incoming) = link::open(&caller, &options).await?;
        let ((began, begins), (ending, ended)) = (oneshot::channel(), oneshot::channel());
        let identity = (options.url, options.rank);
        let (session, queue) = Session::new(identity, claimed, options.operation_timeout, began);
        link::start(&session, caller.clone(), incoming, queue, ending);
        let ask_status: AskStatus = Box::new(move || {
            let (mut client, request) = caller.call(v1::StatusRequest {});
            Box::pin(async move { client.status(request).await.map(tonic::Response::into_inner) })
        });
        match begin(&session, begins, options.start_timeout).await {
            Ok(view) => Ok(Self { session, view, ask_status, ended: Some(ended) }),
            Err(error) => {
                part(&session, ended).await;
                Err(error)
            }
        }
    }

    /// The state of the job as the sidecar sees it: what its page `/status` shows, a JSON object.
    ///
    /// # Errors
    /// [`Error::WebConnect`] when the sidecar does not answer.
    pub async fn status(&self) -> Result<String, Error> {
        let refuse = |reason| Error::WebConnect { url: self.session.url.clone(), reason };
        match within(STATUS_TIMEOUT, (self.ask_status)()).await {
            Some(Ok(answer)) => Ok(answer.json),
            Some(Err(status)) => Err(refuse(describe(&status))),
            None => Err(refuse(format!("no answer within {} s", STATUS_TIMEOUT.as_secs()))),
        }
    }

    /// Dissolves a process set; operations on it that are pending fail. All ranks of the world call it. False, without asking
    /// anybody, for the set of all ranks and for one that there is not.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub async fn remove_process_set(&self, set: SetId) -> Result<bool, Error> {
        if set == SetId::WORLD || !self.session.knows_set(set)? {
            return Ok(false);
        }
        self.submit(&Operation::remove_process_set(set)).await?.typed::<()>().wait().await?;
        Ok(true)
    }

    /// Submits any operation, with its bytes. Operations without a name are numbered in the order in which these calls are
    /// first polled. When a limit refuses it here, it fails on the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub async fn submit(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        self.session.submit(operation)
    }

    /// Submits operations of one kind on one set that become ready together: none of them begins before all are there on all
    /// ranks. The label names all of them. When one is refused, none of them completes.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub async fn submit_group<'a>(
        &self,
        label: impl Into<Label<'a>>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Handle>, Error> {
        self.session.submit_group(label.into(), operations)
    }

    /// Ends the session in order and waits until the sidecar has heard of it. Whoever still waits gets [`Error::Closed`].
    pub async fn close(mut self) {
        if let Some(ended) = self.ended.take() {
            part(&self.session, ended).await;
        }
    }

    /// The rank, sizes and positions in the epoch.
    #[must_use]
    pub fn view(&self) -> &EpochView {
        &self.view
    }

    /// This worker's number in the job.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.view.rank.0
    }

    /// The number of workers in the job.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.view.size
    }

    /// Why nothing can be submitted any more: the epoch's failure, the sidecar's end, or the client's own.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        self.session.why_over()
    }

    /// The sidecar's messages for people since the last call, such as which rank is late.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.session.take_notices()
    }
}

for_each_operation!(operations);
for_each_group!(groups);

impl Drop for Client {
    fn drop(&mut self) {
        self.session.close(CLOSED);
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("view", &self.view).field("session", &self.session).finish_non_exhaustive()
    }
}

async fn begin(
    session: &Session,
    begins: oneshot::Receiver<Result<EpochView, Error>>,
    waits: Duration,
) -> Result<EpochView, Error> {
    match within(waits, begins).await {
        Some(Ok(outcome)) => outcome,
        Some(Err(_)) => Err(session.why_over().unwrap_or(Error::Closed)),
        None => {
            let missing = session.take_notices().pop().unwrap_or_else(|| {
                "other ranks have not attached; see whether all workers and sidecars of the job are running".to_owned()
            });
            Err(Error::Start { waited: waits, missing })
        }
    }
}

/// Says goodbye and waits until the sidecar has ended the session, but not for ever.
async fn part(session: &Session, ended: oneshot::Receiver<()>) {
    session.close(CLOSED);
    if within(CLOSE_TIMEOUT, ended).await.is_none() {
        session.end(&Error::Closed);
    }
}

const CLOSED: &str = "the client was closed";
/// How long the sidecar may take to part.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long it may take to tell its state.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
