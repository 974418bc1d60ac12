//! [`Handle`]: an operation in flight.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_rpc::{Completion, Place};
use ronde_shm::{ForkSafe, LeasedSlot};
use ronde_wire::{Collective, DType, Detail, RequestId, Shape, TensorName};

use crate::buffer::Buffer;
use crate::completions::NotifyFlag;
use crate::error::{Error, overdue};
use crate::outcome::{Outcome, Output};
use crate::promise::Promise;
use crate::session::Session;
use crate::tensor::Tensor;

/// An operation in flight that gives a `T`. Dropping it withdraws the operation unless it is complete: if it is not ordered
/// yet, it then fails on all ranks. A join cannot be taken back: the rank stays joined.
#[derive(Debug)]
pub struct Handle<T = Output> {
    flight: ForkSafe<Flight>,
    gives: PhantomData<fn() -> T>,
}

#[derive(Debug)]
struct Flight {
    session: Arc<Session>,
    request: RequestId,
    name: TensorName,
    collective: Collective,
    promise: Promise<ResultData>,
    deadline: Option<Instant>,
    timeout: Duration,
    /// How long the answer is looked for before a wait sleeps.
    spin: Duration,
    notify_flag: NotifyFlag,
    /// The answer, once it has been taken from the promise and until it is read.
    arrived: Option<Result<ResultData, Error>>,
    /// The answer has been read: the promise will give no other.
    is_read: bool,
}

impl Handle {
    pub(crate) fn new(
        session: Arc<Session>,
        request: RequestId,
        (name, collective): (TensorName, Collective),
        (promise, spin, notify_flag): (Promise<ResultData>, Duration, NotifyFlag),
    ) -> Self {
        // A join waits for the slowest rank of the job, and cannot be taken back.
        let timeout = session.operation_timeout.filter(|_| collective != Collective::Join);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let timeout = timeout.unwrap_or_default();
        let flight = Flight {
            session,
            request,
            name,
            collective,
            promise,
            deadline,
            timeout,
            spin,
            notify_flag,
            arrived: None,
            is_read: false,
        };
        Self { flight: ForkSafe::new(flight), gives: PhantomData }
    }

    /// The same operation, of which another type of result is made.
    pub(crate) fn typed<T: Outcome>(self) -> Handle<T> {
        Handle { flight: self.flight, gives: PhantomData }
    }
}

impl<T: Outcome> Handle<T> {
    /// Whether waiting would return at once: the operation is complete or has failed.
    #[must_use]
    pub fn poll(&self) -> bool {
        // In a child there is nothing to wait for: the call that waits says so.
        self.flight.get().map_or(true, |flight| flight.is_answered() || flight.session.poll(&flight.promise))
    }

    /// The operation's name, as the ranks know it.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn name(&self) -> Result<&str, Error> {
        Ok(self.flight.get()?.name.as_str())
    }

    /// Waits for the result and copies it out.
    ///
    /// # Errors
    /// [`Error::Failure`] with the culprit when the operation or the epoch failed or the deadline passed.
    pub async fn wait(mut self) -> Result<T, Error> {
        self.arrival().await?;
        let flight = self.flight.get_mut()?;
        let arrived = flight.take()?;
        arrived.fetch(&flight.session).await?;
        T::of(flight.output(arrived)?)
    }

    /// Waits for the result and copies it into `target`, which has exactly its length.
    ///
    /// # Errors
    /// Those of [`Handle::wait`], and [`Error::Argument`] when the target has another length.
    pub async fn wait_into(mut self, target: &mut [u8]) -> Result<Shape, Error> {
        self.arrival().await?;
        let flight = self.flight.get_mut()?;
        let arrived = flight.take()?;
        arrived.fetch(&flight.session).await?;
        arrived.read_into(&flight.session, target)?;
        Ok(arrived.shape.clone())
    }

    /// Waits for the result and takes it as it lies there: in shared memory if the operation was
    /// [`mapped`](crate::Operation::mapped) and there was room, else as a copy.
    ///
    /// # Errors
    /// Those of [`Handle::wait`]; [`Error::Argument`] for an operation without a result on this rank.
    pub async fn wait_buffer(mut self) -> Result<Buffer, Error> {
        self.arrival().await?;
        let flight = self.flight.get_mut()?;
        let arrived = flight.take()?;
        arrived.fetch(&flight.session).await?;
        flight.registered(arrived)
    }

    /// Waits until the answer has been taken over from the session's task.
    async fn arrival(&mut self) -> Result<(), Error> {
        let flight = self.flight.get_mut()?;
        if flight.is_answered() {
            return Ok(());
        }
        let outcome = match flight.deadline {
            None => (&mut flight.promise).await,
            Some(deadline) => match tokio::time::timeout_at(deadline.into(), &mut flight.promise).await {
                Ok(outcome) => outcome,
                Err(_) => Err(flight.give_up()),
            },
        };
        flight.arrived = Some(outcome);
        Ok(())
    }

    /// Waits at most `slice`. Says whether the answer is there, good or bad.
    pub(crate) fn wait_timeout(&mut self, slice: Duration) -> Result<bool, Error> {
        let flight = self.flight.get_mut()?;
        if flight.is_answered() {
            return Ok(true);
        }
        let now = Instant::now();
        let left = flight.deadline.map_or(slice, |deadline| deadline.saturating_duration_since(now).min(slice));
        flight.notify_flag.set(false);
        flight.arrived = flight.session.wait(&flight.promise, (left, flight.spin));
        if flight.arrived.is_none() && flight.deadline.is_some_and(|deadline| now >= deadline) {
            flight.arrived = Some(Err(flight.give_up()));
        }
        if flight.arrived.is_none() {
            flight.notify_flag.set(true);
            flight.arrived = flight.promise.take();
        }
        Ok(flight.arrived.is_some())
    }

    /// What has arrived, until it is read.
    pub(crate) fn arrived(&self) -> Result<Option<&ResultData>, Error> {
        let flight = self.flight.get()?;
        match &flight.arrived {
            None if flight.is_read => Err(read_already()),
            None => Ok(None),
            Some(Ok(arrived)) => Ok(Some(arrived)),
            Some(Err(error)) => Err(error.clone()),
        }
    }

    /// Copies the result, which has arrived, into `target`. Once only.
    pub(crate) fn read_into(&mut self, target: &mut [u8]) -> Result<(), Error> {
        let flight = self.flight.get_mut()?;
        if let Some(Ok(arrived)) = &flight.arrived {
            arrived.check_length(target)?;
        }
        let arrived = flight.take()?;
        arrived.read_into(&flight.session, target)
    }

    /// Whether this rank gets a tensor in the end.
    pub(crate) fn has_result(&self) -> Result<bool, Error> {
        Ok(self.flight.get()?.has_result())
    }

    /// Takes the result, which has arrived, if it stays in shared memory; else it is still to be read.
    pub(crate) fn take_mapped(&mut self) -> Result<Option<Buffer>, Error> {
        let flight = self.flight.get_mut()?;
        if !matches!(&flight.arrived, Some(Ok(ResultData { source: Source::Output(_), .. }))) {
            return Ok(None);
        }
        let arrived = flight.take()?;
        flight.buffer(arrived).map(Some)
    }

    /// Takes the result, which has arrived, as it lies there. Once only.
    pub(crate) fn read_buffer(&mut self) -> Result<Buffer, Error> {
        let flight = self.flight.get_mut()?;
        let arrived = flight.take()?;
        flight.registered(arrived)
    }

    /// Takes the result, which has arrived. Once only.
    pub(crate) fn read(&mut self) -> Result<T, Error> {
        let flight = self.flight.get_mut()?;
        let arrived = flight.take()?;
        T::of(flight.output(arrived)?)
    }
}

impl Flight {
    /// Whether the promise has given its answer, read since or not.
    fn is_answered(&self) -> bool {
        self.is_read || self.arrived.is_some()
    }

    fn take(&mut self) -> Result<ResultData, Error> {
        let arrived = self.arrived.take();
        self.is_read |= arrived.is_some();
        let arrived = arrived.unwrap_or_else(|| Err(read_already()))?;
        let element_bytes = arrived.dtype.size_bytes() as u64;
        if arrived.bytes() != arrived.shape.elements() * element_bytes {
            let (bytes, shape) = (arrived.bytes(), &arrived.shape);
            let reason =
                format!("{}: a result of {bytes} bytes for shape {shape}, {element_bytes} bytes each", self.name);
            return Err(Error::Protocol { reason });
        }
        Ok(arrived)
    }

    fn has_result(&self) -> bool {
        self.collective.has_result(self.session.me())
    }

    /// The result as it lies there, which may be submitted from there, as it cannot be written meanwhile.
    fn registered(&self, arrived: ResultData) -> Result<Buffer, Error> {
        let buffer = self.buffer(arrived)?;
        if let (Some(slot), Some(memory)) = (buffer.slot(), &self.session.memory) {
            memory.register(slot);
        }
        Ok(buffer)
    }

    /// The result as it lies there; a copy where it does not stay in shared memory.
    fn buffer(&self, mut arrived: ResultData) -> Result<Buffer, Error> {
        if !self.has_result() {
            return Err(Error::argument(format!("{} gives this rank no result", self.name)));
        }
        let (dtype, shape) = (arrived.dtype, arrived.shape.dimensions().to_vec());
        match arrived.source {
            Source::Output(slot) => Ok(Buffer::in_slot(dtype, shape, slot)),
            _ => Ok(Buffer::copied(Tensor { dtype, shape, bytes: arrived.take_bytes(&self.session)? })),
        }
    }

    fn output(&self, mut arrived: ResultData) -> Result<Output, Error> {
        let tensor = if self.has_result() {
            let bytes = arrived.take_bytes(&self.session)?;
            Some(Tensor { dtype: arrived.dtype, shape: arrived.shape.dimensions().to_vec(), bytes })
        } else {
            None
        };
        Ok(Output::new(tensor, arrived.detail.clone(), self.collective.clone()))
    }

    /// The waiter's own deadline has passed.
    fn give_up(&self) -> Error {
        let reason = overdue(&self.name, self.timeout);
        self.session.withdraw(self.request, &reason);
        Error::timed_out(reason)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Never runs in a forked child: `ForkSafe` forgets it there.
        if !self.is_answered() {
            self.session.withdraw(self.request, "its waiter gave it up");
        }
    }
}

/// A result that lies ready. Dropping it gives its memory back to the sidecar.
#[derive(Debug)]
pub(crate) struct ResultData {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    pub(crate) detail: Detail,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Segment { segment: u32, offset: u64, bytes: u64, _release: Release },
    Output(LeasedSlot),
    Own(Vec<u8>),
}

impl ResultData {
    /// What a completion speaks of, where `parts` of the result came before it.
    pub(crate) fn new(session: &Arc<Session>, completion: Completion, parts: Vec<u8>) -> Self {
        let Completion { request, dtype, shape, result, detail, .. } = completion;
        let source = match result {
            Place::Arena { segment, offset, bytes } => {
                let release = Release { session: Arc::clone(session), request };
                Source::Segment { segment, offset, bytes, _release: release }
            }
            Place::Inline(data) => Source::Own(data.into()),
            Place::None => Source::Own(parts),
        };
        Self { dtype, shape, detail, source }
    }

    /// What a completion speaks of that lies where the session wanted it.
    pub(crate) fn in_output(completion: Completion, output: LeasedSlot) -> Self {
        let Completion { dtype, shape, detail, .. } = completion;
        Self { dtype, shape, detail, source: Source::Output(output) }
    }

    /// Makes sure that its segment is mapped, on a blocking thread when that takes a while.
    async fn fetch(&self, session: &Arc<Session>) -> Result<(), Error> {
        let Source::Segment { segment, .. } = self.source else { return Ok(()) };
        let memory = session.memory_of_result(segment)?;
        if memory.knows_result(segment) {
            return Ok(());
        }
        let memory = Arc::clone(memory);
        let fetched = tokio::task::spawn_blocking(move || memory.result(segment).map(drop)).await;
        fetched.unwrap_or_else(|error| Err(Error::Thread { reason: error.to_string() }))
    }

    fn check_length(&self, target: &[u8]) -> Result<(), Error> {
        let bytes = self.bytes();
        if bytes != target.len() as u64 {
            return Err(Error::argument(format!(
                "the result of shape {} has {bytes} bytes, but the target has {}",
                self.shape,
                target.len()
            )));
        }
        Ok(())
    }

    /// Copies it into `target`, whose content means nothing after an error.
    fn read_into(&self, session: &Session, target: &mut [u8]) -> Result<(), Error> {
        self.check_length(target)?;
        match &self.source {
            Source::Own(data) => target.copy_from_slice(data),
            Source::Output(slot) => slot.read(target)?,
            Source::Segment { segment, offset, .. } => {
                session.memory_of_result(*segment)?.result(*segment)?.copy_to(*offset, target)?;
                // After the copy: the sidecar may lease the slot again as soon as the session's stream ends, and what was
                // copied since then is another tensor.
                session.check_results_held()?;
            }
        }
        Ok(())
    }

    /// The result's bytes, by copy unless they are private already.
    fn take_bytes(&mut self, session: &Session) -> Result<Vec<u8>, Error> {
        if let Source::Own(data) = &mut self.source {
            return Ok(std::mem::take(data));
        }
        let length = usize::try_from(self.bytes()).map_err(|error| Error::Limit { reason: error.to_string() })?;
        let mut bytes = vec![0; length];
        self.read_into(session, &mut bytes)?;
        Ok(bytes)
    }

    /// Its length.
    pub(crate) fn bytes(&self) -> u64 {
        match &self.source {
            Source::Segment { bytes, .. } => *bytes,
            Source::Output(slot) => slot.slot().len,
            Source::Own(data) => data.len() as u64,
        }
    }
}

/// Tells the sidecar, when dropped, that a result has been read.
#[derive(Debug)]
struct Release {
    session: Arc<Session>,
    request: RequestId,
}

impl Drop for Release {
    fn drop(&mut self) {
        self.session.release(self.request);
    }
}

fn read_already() -> Error {
    Error::argument("the result of this operation was read already")
}
