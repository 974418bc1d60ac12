//! [`InFlight`]: a submitted operation, which both native clients' handles contain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_gpu::{Arrival, CallerStream, DeviceSpan};
use ronde_wire::{Collective, RequestId, TensorName};

use crate::buffer::Buffer;
use crate::completions::NotifyFlag;
use crate::device::Submitted;
use crate::error::{Error, overdue};
use crate::outcome::Output;
use crate::promise::Promise;
use crate::result_data::{Order, ResultData, Source};
use crate::session::Session;
use crate::tensor::Tensor;
use crate::usage;

/// A submitted operation. Dropping it withdraws the operation unless it is complete.
#[derive(Debug)]
pub(crate) struct InFlight {
    session: Arc<Session>,
    request: RequestId,
    name: TensorName,
    collective: Collective,
    promise: Promise<ResultData>,
    deadline: Option<Instant>,
    timeout: Duration,
    /// How long a wait spins before it parks the thread.
    spin: Duration,
    notify_flag: NotifyFlag,
    /// The result, from when it is taken from the promise until it is read.
    result: Option<Result<ResultData, Error>>,
    /// Whether the result has been read. The promise gives no other one.
    is_read: bool,
    /// The caller's stream at the time of the submission, if the input is in device memory.
    submitted: Option<Submitted>,
}

impl InFlight {
    pub(crate) fn new(
        session: Arc<Session>,
        request: RequestId,
        (name, collective): (TensorName, Collective),
        (promise, spin, notify_flag): (Promise<ResultData>, Duration, NotifyFlag),
    ) -> Self {
        // A join waits for the slowest rank of the job and cannot be withdrawn.
        let timeout = session.options.operation_timeout.filter(|_| collective != Collective::Join);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let timeout = timeout.unwrap_or_default();
        Self {
            session,
            request,
            name,
            collective,
            promise,
            deadline,
            timeout,
            spin,
            notify_flag,
            result: None,
            is_read: false,
            submitted: None,
        }
    }

    /// The operation with the caller's stream at the time of its submission.
    pub(crate) fn submitted_after(mut self, submitted: Submitted) -> Self {
        self.submitted = Some(submitted);
        self
    }

    /// When the result came; the default for a failure.
    pub(crate) fn order(&mut self) -> Order {
        self.wait_timeout(Duration::ZERO);
        self.result.as_ref().and_then(|result| result.as_ref().ok()).map_or_else(Order::default, |result| result.order)
    }

    /// Withdraws the operation for a reason, and waits on: it fails if it was not ordered yet, and completes otherwise.
    pub(crate) fn ask_to_withdraw(&self, reason: &str) {
        if !self.is_answered() {
            self.session.ask_to_withdraw(self.request, reason);
        }
    }

    /// The operation's name.
    pub(crate) fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Whether this rank gets a tensor.
    pub(crate) fn has_result(&self) -> bool {
        self.collective.has_result(self.session.pending.me())
    }

    /// Whether waiting would return at once.
    pub(crate) fn poll(&self) -> bool {
        self.is_answered() || self.session.poll(&self.promise)
    }

    /// Whether the result has been taken from the promise.
    fn is_answered(&self) -> bool {
        self.is_read || self.result.is_some()
    }

    // === Waiting ===

    /// Waits until the result is there and its segment is mapped.
    pub(crate) async fn ready(&mut self) -> Result<(), Error> {
        if !self.is_answered() {
            let begin = Instant::now();
            let result = match self.deadline {
                None => (&mut self.promise).await,
                Some(deadline) => match tokio::time::timeout_at(deadline.into(), &mut self.promise).await {
                    Ok(result) => result,
                    Err(_) => Err(self.time_out()),
                },
            };
            usage::count_wait(begin.elapsed());
            self.result = Some(result);
        }
        match &self.result {
            Some(Ok(result)) => result.fetch(&self.session).await,
            _ => Ok(()),
        }
    }

    /// Waits at most `slice`. Returns whether the operation is complete or has failed.
    pub(crate) fn wait_timeout(&mut self, slice: Duration) -> bool {
        if self.is_answered() {
            return true;
        }
        let now = Instant::now();
        let left = self.deadline.map_or(slice, |deadline| deadline.saturating_duration_since(now).min(slice));
        self.notify_flag.set(false);
        self.result = self.session.wait(&self.promise, (left, self.spin));
        usage::count_wait(now.elapsed());
        if self.result.is_none() && self.deadline.is_some_and(|deadline| now >= deadline) {
            self.result = Some(Err(self.time_out()));
        }
        if self.result.is_none() {
            self.notify_flag.set(true);
            self.result = self.promise.take();
        }
        self.result.is_some()
    }

    /// Withdraws the operation because the deadline of this rank has passed.
    fn time_out(&self) -> Error {
        let reason = overdue(&self.name, self.timeout);
        self.session.withdraw(self.request, &reason);
        Error::timed_out(reason)
    }

    // === Reading the result, once ===

    /// The result, if it is there and has not been read.
    pub(crate) fn result(&self) -> Result<Option<&ResultData>, Error> {
        match &self.result {
            None if self.is_read => Err(read_already()),
            None => Ok(None),
            Some(Ok(result)) => Ok(Some(result)),
            Some(Err(error)) => Err(error.clone()),
        }
    }

    /// Takes the result.
    pub(crate) fn take(&mut self) -> Result<ResultData, Error> {
        let result = self.result.take();
        self.is_read |= result.is_some();
        let result = result.unwrap_or_else(|| Err(read_already()))?;
        let element_bytes = result.dtype.size_bytes() as u64;
        if result.bytes() != result.shape.elements() * element_bytes {
            let (bytes, shape) = (result.bytes(), &result.shape);
            let reason =
                format!("{}: a result of {bytes} bytes for shape {shape}, {element_bytes} bytes each", self.name);
            return Err(Error::Protocol { reason });
        }
        Ok(result)
    }

    /// Copies the result into `target`. A target of another length leaves the result to be read.
    pub(crate) fn read_into(&mut self, target: &mut [u8]) -> Result<(), Error> {
        if let Some(Ok(result)) = &self.result {
            result.check_length(target)?;
        }
        self.take_into(target).map(drop)
    }

    /// Takes the result and copies it into `target`.
    pub(crate) fn take_into(&mut self, target: &mut [u8]) -> Result<ResultData, Error> {
        let result = self.take()?;
        result.read_into(&self.session, target)?;
        Ok(result)
    }

    /// Whether tensors travel inside messages, so that there is no shared memory from which a device could copy.
    pub(crate) fn is_inline(&self) -> bool {
        self.session.memory.is_none()
    }

    /// Takes the result and starts to copy it to device memory, after the present work of `stream`; with `at_submission`, and
    /// if the input is of the same stream, after its work at the submission.
    pub(crate) fn deliver(
        &mut self,
        target: DeviceSpan,
        stream: CallerStream,
        at_submission: bool,
    ) -> Result<Arrival, Error> {
        if let Some(Ok(result)) = &self.result {
            result.check_bytes(target.bytes() as u64)?;
        }
        let result = self.take()?;
        self.session.deliver(result, target, (stream, self.submitted.as_ref().filter(|_| at_submission)))
    }

    /// Takes the result if it stays in shared memory; `None` leaves it to be read.
    pub(crate) fn take_mapped(&mut self) -> Result<Option<Buffer>, Error> {
        if !matches!(&self.result, Some(Ok(ResultData { source: Source::Output(_), .. }))) {
            return Ok(None);
        }
        let result = self.take()?;
        self.buffer(result).map(Some)
    }

    /// Takes the result as a buffer. It can be submitted without a copy, because it cannot be written meanwhile.
    pub(crate) fn take_buffer(&mut self) -> Result<Buffer, Error> {
        let result = self.take()?;
        let buffer = self.buffer(result)?;
        if let (Some(slot), Some(memory)) = (buffer.slot(), &self.session.memory) {
            memory.register(slot);
        }
        Ok(buffer)
    }

    fn buffer(&self, mut result: ResultData) -> Result<Buffer, Error> {
        if !self.has_result() {
            return Err(Error::argument(format!("{} gives this rank no result", self.name)));
        }
        let (dtype, shape) = (result.dtype, result.shape.dimensions().to_vec());
        match result.source {
            Source::Output(slot) => Ok(Buffer::in_slot(dtype, shape, slot)),
            _ => Ok(Buffer::copied(Tensor { dtype, shape, bytes: result.take_bytes(&self.session)? })),
        }
    }

    /// Takes a copy of the result.
    pub(crate) fn take_output(&mut self) -> Result<Output, Error> {
        let mut result = self.take()?;
        let tensor = if self.has_result() {
            let bytes = result.take_bytes(&self.session)?;
            Some(Tensor { dtype: result.dtype, shape: result.shape.dimensions().to_vec(), bytes })
        } else {
            None
        };
        Ok(Output::new(tensor, result.detail.clone(), self.collective.clone()))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // Never runs in a forked child: `ForkSafe` forgets it there.
        if !self.is_answered() {
            self.session.withdraw(self.request, "its handle was dropped");
        }
    }
}

fn read_already() -> Error {
    Error::argument("the result of this operation was read already")
}
