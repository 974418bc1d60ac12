//! [`Client`]: the asynchronous client.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ronde_rpc::{EpochView, paths};
use ronde_shm::ForkSafe;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::connect;
use crate::error::Error;
use crate::handle::Handle;
use crate::memory::Memory;
use crate::operation::{AllReduceOptions, Operation};
use crate::options::{Options, Transfer};
use crate::session::{Input, Listener, Session};
use crate::tensor::{Tensor, TensorRef};

/// A worker's session with its sidecar, in an epoch that has begun.
///
/// Calls take `&self` and may overlap. Dropping the client ends the session in order; [`Client::close`] also waits for it.
#[derive(Debug)]
pub struct Client {
    open: ForkSafe<Open>,
    view: EpochView,
}

impl Client {
    /// Reaches the sidecar, claims the rank and waits until all ranks have attached.
    ///
    /// # Errors
    /// [`Error::Connect`], [`Error::Claim`], [`Error::Token`] when the sidecar cannot be reached or does not accept this
    /// worker; [`Error::Start`] when not all ranks attach within the start timeout; [`Error::Failure`] when the job fails
    /// before it starts.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        Self::connect_until(options, std::future::pending()).await
    }

    /// [`Client::connect`] that gives up, in order, when `cancelled` completes.
    pub(crate) async fn connect_until(options: Options, cancelled: impl Future<Output = ()>) -> Result<Self, Error> {
        let token = options.read_token()?;
        let mut cancelled = pin!(cancelled);
        let attached = tokio::select! {
            attached = connect::attach(&options, token) => attached?,
            () = &mut cancelled => return Err(Error::Closed),
        };
        let memory = match options.transfer {
            Transfer::Inline => None,
            Transfer::Arena => {
                let socket = paths::mem_socket(&options.socket_dir);
                Some(Arc::new(Memory::connect(&socket, &attached.claimed)?))
            }
        };
        let session = Arc::new(Session::new(
            options.socket_dir,
            attached.outgoing,
            attached.claimed,
            memory,
            options.operation_timeout,
        ));
        let (began, begins) = oneshot::channel();
        let listener = Listener { session: Arc::clone(&session), incoming: attached.incoming, began: Some(began) };
        let open = Open { session, listener: Some(tokio::spawn(listener.run())) };
        let begun = tokio::select! {
            begun = begin(&open.session, begins, options.start_timeout) => begun,
            () = &mut cancelled => Err(Error::Closed),
        };
        match begun {
            Ok(view) => Ok(Self { open: ForkSafe::new(open), view }),
            Err(error) => {
                open.end().await;
                Err(error)
            }
        }
    }

    /// Reduces a tensor over all ranks of the set; every rank gets the result.
    ///
    /// # Errors
    /// [`Error::Argument`] and [`Error::Limit`] at once; [`Error::Failure`] with the culprit when it fails.
    pub async fn allreduce<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
        options: AllReduceOptions,
    ) -> Result<Tensor, Error> {
        self.allreduce_async(name, tensor, options).await?.wait().await
    }

    /// [`Client::allreduce`] that returns when the tensor has been handed over.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub async fn allreduce_async<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
        options: AllReduceOptions,
    ) -> Result<Handle, Error> {
        let tensor = tensor.into();
        self.submit(&Operation::allreduce(name.into(), tensor, options), tensor.bytes).await
    }

    /// Concatenates the tensors of all ranks along the first dimension, in rank order; first dimensions may differ.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub async fn allgather<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
    ) -> Result<Tensor, Error> {
        self.allgather_async(name, tensor).await?.wait().await
    }

    /// [`Client::allgather`] that returns when the tensor has been handed over.
    ///
    /// # Errors
    /// Those of [`Client::allreduce_async`].
    pub async fn allgather_async<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
    ) -> Result<Handle, Error> {
        let tensor = tensor.into();
        self.submit(&Operation::allgather(name.into(), tensor), tensor.bytes).await
    }

    /// Gives every rank the tensor of rank `root`.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub async fn broadcast<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
        root: u32,
    ) -> Result<Tensor, Error> {
        self.broadcast_async(name, tensor, root).await?.wait().await
    }

    /// [`Client::broadcast`] that returns when the tensor has been handed over.
    ///
    /// # Errors
    /// Those of [`Client::allreduce_async`].
    pub async fn broadcast_async<'a>(
        &self,
        name: impl Into<Option<&'a str>>,
        tensor: impl Into<TensorRef<'a>>,
        root: u32,
    ) -> Result<Handle, Error> {
        let tensor = tensor.into();
        self.submit(&Operation::broadcast(name.into(), tensor, root), tensor.bytes).await
    }

    /// Waits until every rank has called it.
    ///
    /// # Errors
    /// Those of [`Client::allreduce`].
    pub async fn barrier<'a>(&self, name: impl Into<Option<&'a str>>) -> Result<(), Error> {
        self.submit_from(&Operation::barrier(name.into()), &[])?.wait().await.map(drop)
    }

    /// Submits any operation. A slot of shared memory is leased and the bytes are copied into it; growing the arena, which
    /// takes about 1 ms a MiB, happens on a blocking thread. Operations without a name are numbered in the order in which
    /// these calls are first polled.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub async fn submit(&self, operation: &Operation<'_>, bytes: &[u8]) -> Result<Handle, Error> {
        let session = &self.open.get()?.session;
        let draft = operation.draft(bytes.len())?;
        // One that waits until the arena has grown would otherwise be numbered behind later ones, and not so on other ranks.
        let _turn = if draft.number_of().is_some() { Some(session.turn.lock().await) } else { None };
        let length = bytes.len() as u64;
        if let Some(memory) = session.memory.as_ref().filter(|_| !bytes.is_empty())
            && memory.try_lease(length)?.is_none()
        {
            let memory = Arc::clone(memory);
            let grown = tokio::task::spawn_blocking(move || memory.lease(length)).await;
            let slot = grown.unwrap_or_else(|error| Err(Error::Thread { reason: error.to_string() }))?;
            slot.write(bytes)?;
            return session.submit(draft, Input::Leased(slot));
        }
        session.submit(draft, Input::Bytes(bytes))
    }

    /// Submits any operation from the calling thread, which blocks while the arena grows. An operation without a name may
    /// get its number before that of a [`Client::submit`] which is under way.
    ///
    /// # Errors
    /// Those of [`Client::submit`].
    pub fn submit_from(&self, operation: &Operation<'_>, bytes: &[u8]) -> Result<Handle, Error> {
        let session = &self.open.get()?.session;
        let draft = operation.draft(bytes.len())?;
        session.submit(draft, Input::Bytes(bytes))
    }

    /// Ends the session in order and waits until the sidecar has heard of it. Whoever still waits gets [`Error::Closed`].
    pub async fn close(self) {
        if let Ok(open) = self.open.into_inner() {
            open.end().await;
        }
    }

    /// The session's task, for whoever keeps the runtime going until it ends.
    pub(crate) fn take_listener(&mut self) -> Option<JoinHandle<()>> {
        self.open.get_mut().ok().and_then(|open| open.listener.take())
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
        match self.open.get() {
            Ok(open) => open.session.over(),
            Err(error) => Some(error.into()),
        }
    }

    /// The sidecar's messages for people since the last call, such as which rank is late.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.open.get().map(|open| open.session.take_notices()).unwrap_or_default()
    }
}

/// A session that ends in order when dropped; in a forked child `ForkSafe` forgets it instead.
#[derive(Debug)]
struct Open {
    session: Arc<Session>,
    listener: Option<JoinHandle<()>>,
}

impl Open {
    /// Ends the session in order and waits until the sidecar has heard of it.
    async fn end(mut self) {
        self.session.close(CLOSED);
        if let Some(listener) = self.listener.take() {
            // Fails only when the task was cancelled with its runtime.
            let _ = listener.await;
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.session.close(CLOSED);
    }
}

async fn begin(
    session: &Session,
    begins: oneshot::Receiver<Result<EpochView, Error>>,
    waits: Duration,
) -> Result<EpochView, Error> {
    match timeout(waits, begins).await {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => Err(session.over().unwrap_or(Error::Closed)),
        Err(_) => {
            let missing = session.take_notices().pop().unwrap_or_else(|| {
                "other ranks have not attached; see whether all workers and sidecars of the job are running".to_owned()
            });
            Err(Error::Start { waited: waits, missing })
        }
    }
}

const CLOSED: &str = "the client was closed";
