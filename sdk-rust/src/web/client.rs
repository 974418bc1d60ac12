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
use crate::methods::{
    async_groups, async_operations, async_set_removal, epoch_methods, for_each_group, for_each_operation,
};
use crate::operation::{Label, Operation, ReduceOptions, Site};
use crate::outcome::{Exchanged, ProcessSet, Received};
use crate::tensor::{Tensor, TensorRef};

/// A worker's session with its sidecar over gRPC-Web, in an epoch that has begun.
///
/// Calls take `&self` and may overlap. Dropping the client ends the session in order; [`Client::close`] also waits for it.
pub struct Client {
    session: Rc<Session>,
    view: EpochView,
    request_status: RequestStatus,
    ended: Option<oneshot::Receiver<()>>,
}

/// Requests the status. It hides the type of the channel.
type RequestStatus = Box<dyn Fn() -> Pin<Box<dyn Future<Output = Result<v1::StatusAnswer, Status>>>>>;

impl Client {
    /// Connects to the sidecar with the platform's `fetch`, claims the rank and waits until all ranks have attached.
    ///
    /// # Errors
    /// [`Error::WebConnect`] and [`Error::WebClaim`] when the sidecar cannot be reached or rejects this worker;
    /// [`Error::Start`] when not all ranks attach within the start timeout; [`Error::Failure`] when the job fails before it
    /// starts.
    #[cfg(target_arch = "wasm32")]
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let channel = tonic_web_wasm_client::Client::new(options.url.clone());
        Self::connect_over(channel, options).await
    }

    /// Connects over a channel.
    pub(super) async fn connect_over(channel: Channel, options: Options) -> Result<Self, Error> {
        let caller = Caller::new(channel, &options.token())?;
        let (claimed, incoming) = link::open(&caller, &options).await?;
        let (session, queue) = Session::new((options.url, options.rank), claimed, options.operation_timeout);
        let begun = session.pending.on_begin();
        let (report_end, ended) = oneshot::channel();
        link::start(&session, caller.clone(), incoming, queue, report_end);
        let request_status: RequestStatus = Box::new(move || {
            let (mut client, request) = caller.call(v1::StatusRequest {});
            Box::pin(async move { client.status(request).await.map(tonic::Response::into_inner) })
        });
        let received = within(options.start_timeout, begun).await;
        match session.pending.begin_outcome(received, options.start_timeout) {
            Ok(view) => Ok(Self { session, view, request_status, ended: Some(ended) }),
            Err(error) => {
                end(&session, ended).await;
                Err(error)
            }
        }
    }

    /// The state of the job as the sidecar sees it: the JSON object of its page `/status`.
    ///
    /// # Errors
    /// [`Error::WebConnect`] when the sidecar does not answer.
    pub async fn status(&self) -> Result<String, Error> {
        let unreachable = |reason| Error::WebConnect { url: self.session.url.clone(), reason };
        match within(STATUS_TIMEOUT, (self.request_status)()).await {
            Some(Ok(answer)) => Ok(answer.json),
            Some(Err(status)) => Err(unreachable(describe(&status))),
            None => Err(unreachable(format!("no answer within {} s", STATUS_TIMEOUT.as_secs()))),
        }
    }

    /// Submits any operation, with its bytes. Operations without a name are numbered in the order in which these calls are
    /// first polled. When a limit rejects the operation here, it fails on the other ranks.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub async fn submit(&self, operation: &Operation<'_>) -> Result<Handle, Error> {
        self.session.submit(operation)
    }

    /// Submits operations of one kind on one process set that become ready together: none of them begins before all are
    /// there on all ranks. The label names all of them. When one is rejected, none of them completes.
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

    /// Whether this rank knows a process set of this number.
    ///
    /// # Errors
    /// Why the session is over.
    pub fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        Ok(self.session.pending.open()?.names.knows_set(set))
    }

    /// Ends the session in order and waits until the sidecar has closed it. Every waiter gets [`Error::Closed`].
    pub async fn close(mut self) {
        if let Some(ended) = self.ended.take() {
            end(&self.session, ended).await;
        }
    }

    /// Why nothing can be submitted any more: the epoch's failure, the sidecar's end, or the client's own.
    #[must_use]
    pub fn over(&self) -> Option<Error> {
        self.session.pending.over()
    }

    /// The sidecar's messages for people since the last call, such as which rank is late.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.session.pending.take_notices()
    }
}

epoch_methods!();
async_set_removal!();
for_each_operation!(async_operations);
for_each_group!(async_groups);

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

/// Closes the session and waits, with a timeout, until the sidecar has ended it.
async fn end(session: &Session, ended: oneshot::Receiver<()>) {
    session.close(CLOSED);
    if within(CLOSE_TIMEOUT, ended).await.is_none() {
        session.end(&Error::Closed);
    }
}

const CLOSED: &str = "the client was closed";
/// How long the sidecar may take to end the session.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the sidecar may take to send its status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);
