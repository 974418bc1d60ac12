//! [`Handle`]: an operation in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_rpc::Place;
use ronde_shm::ForkSafe;
use ronde_wire::{Cause, DType, Failure, RequestId, Shape, TensorName};

use crate::error::Error;
use crate::promise::Promise;
use crate::session::Session;
use crate::tensor::Tensor;

/// An operation in flight. Dropping it withdraws the operation unless it is complete: if it is not ordered yet, it then
/// fails on all ranks.
#[derive(Debug)]
pub struct Handle {
    flight: ForkSafe<Flight>,
}

#[derive(Debug)]
struct Flight {
    session: Arc<Session>,
    request: RequestId,
    name: TensorName,
    /// The type of the result; `None` when there is none.
    dtype: Option<DType>,
    promise: Promise<Arrived>,
    deadline: Option<Instant>,
    timeout: Duration,
    /// The answer, once it has been taken from the promise and until it is read.
    arrived: Option<Result<Arrived, Error>>,
    /// The answer has been read: the promise will give no other.
    is_read: bool,
}

impl Handle {
    pub(crate) fn new(
        session: Arc<Session>,
        request: RequestId,
        (name, dtype): (TensorName, Option<DType>),
        promise: Promise<Arrived>,
        timeout: Option<Duration>,
    ) -> Self {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let timeout = timeout.unwrap_or_default();
        let flight =
            Flight { session, request, name, dtype, promise, deadline, timeout, arrived: None, is_read: false };
        Self { flight: ForkSafe::new(flight) }
    }

    /// Whether waiting would return at once: the operation is complete or has failed.
    #[must_use]
    pub fn poll(&self) -> bool {
        // In a child there is nothing to wait for: the call that waits says so.
        self.flight.get().map_or(true, |flight| flight.is_answered() || flight.promise.is_ready())
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
    pub async fn wait(mut self) -> Result<Tensor, Error> {
        self.arrival().await?;
        let flight = self.flight.get_mut()?;
        let mut arrived = flight.take()?;
        arrived.fetch(&flight.session).await?;
        flight.tensor(&mut arrived)
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
        flight.arrived = flight.promise.wait_timeout(left);
        if flight.arrived.is_none() && flight.deadline.is_some_and(|deadline| now >= deadline) {
            flight.arrived = Some(Err(flight.give_up()));
        }
        Ok(flight.arrived.is_some())
    }

    /// The shape of the result, once it has arrived and until it is read.
    pub(crate) fn shape(&self) -> Result<Option<&Shape>, Error> {
        let flight = self.flight.get()?;
        match &flight.arrived {
            None if flight.is_read => Err(read_already()),
            None => Ok(None),
            Some(Ok(arrived)) => Ok(Some(&arrived.shape)),
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

    /// Takes the result, which has arrived, as a tensor of its own. Once only.
    pub(crate) fn read(&mut self) -> Result<Tensor, Error> {
        let flight = self.flight.get_mut()?;
        let mut arrived = flight.take()?;
        flight.tensor(&mut arrived)
    }
}

impl Flight {
    /// Whether the promise has given its answer, read since or not.
    fn is_answered(&self) -> bool {
        self.is_read || self.arrived.is_some()
    }

    fn take(&mut self) -> Result<Arrived, Error> {
        let arrived = self.arrived.take();
        self.is_read |= arrived.is_some();
        let arrived = arrived.unwrap_or_else(|| Err(read_already()))?;
        let element_bytes = self.dtype.map_or(0, DType::size_bytes) as u64;
        if arrived.bytes() != arrived.shape.elements() * element_bytes {
            let (bytes, shape) = (arrived.bytes(), &arrived.shape);
            let reason =
                format!("{}: a result of {bytes} bytes for shape {shape}, {element_bytes} bytes each", self.name);
            return Err(Error::Protocol { reason });
        }
        Ok(arrived)
    }

    fn tensor(&self, arrived: &mut Arrived) -> Result<Tensor, Error> {
        let bytes = arrived.take_bytes(&self.session)?;
        match self.dtype {
            Some(dtype) => Ok(Tensor { dtype, shape: arrived.shape.dimensions().to_vec(), bytes }),
            None => Ok(Tensor { dtype: DType::U8, shape: vec![0], bytes }),
        }
    }

    /// The waiter's own deadline has passed.
    fn give_up(&self) -> Error {
        let reason = format!(
            "{} did not complete within {:?}, the operation timeout of this rank; look for ranks that did not submit it",
            self.name, self.timeout
        );
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
pub(crate) struct Arrived {
    pub(crate) shape: Shape,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Segment { segment: u32, offset: u64, bytes: u64, _release: Release },
    Own(Vec<u8>),
}

impl Arrived {
    /// A result of `shape` at `place`, or in `parts` that came before; both are checked against the shape.
    pub(crate) fn new(
        session: &Arc<Session>,
        request: RequestId,
        (shape, place): (Shape, Place),
        parts: Vec<u8>,
    ) -> Self {
        let source = match place {
            Place::Arena { segment, offset, bytes } => {
                let release = Release { session: Arc::clone(session), request };
                Source::Segment { segment, offset, bytes, _release: release }
            }
            Place::Inline(data) => Source::Own(data.into()),
            Place::None => Source::Own(parts),
        };
        Self { shape, source }
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

/// The failure of everybody who waits on a sidecar that is gone.
pub(crate) fn sidecar_gone(directory: &std::path::Path, how: &str) -> Failure {
    let reason = format!("the sidecar at {} is gone: {how}", directory.display());
    Failure::new(Cause::SidecarLost, reason)
}
