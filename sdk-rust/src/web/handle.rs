//! [`Handle`]: an operation in flight.

use std::marker::PhantomData;
use std::rc::Rc;
use std::time::Duration;

use ronde_rpc::Completion;
use ronde_wire::{Collective, RequestId, TensorName};

use super::platform::within;
use super::session::Session;
use crate::error::{Error, overdue};
use crate::outcome::{Outcome, Output};
use crate::promise::Promise;
use crate::tensor::Tensor;

/// An operation in flight that gives a `T`. Dropping it withdraws the operation unless it is complete: if it is not ordered
/// yet, it then fails on all ranks. A join cannot be withdrawn: the rank stays joined.
#[derive(Debug)]
pub struct Handle<T = Output> {
    in_flight: InFlight,
    output: PhantomData<fn() -> T>,
}

#[derive(Debug)]
struct InFlight {
    session: Rc<Session>,
    request: RequestId,
    name: TensorName,
    collective: Collective,
    promise: Promise<WebResult>,
    timeout: Option<Duration>,
    is_answered: bool,
}

/// The result of an operation before a handle reads it.
#[derive(Debug)]
pub(super) struct WebResult {
    pub(super) completion: Completion,
    pub(super) bytes: Vec<u8>,
}

impl Handle {
    pub(super) fn new(
        session: Rc<Session>,
        request: RequestId,
        (name, collective): (TensorName, Collective),
        promise: Promise<WebResult>,
    ) -> Self {
        // A join waits for the slowest rank of the job and cannot be withdrawn.
        let timeout = session.operation_timeout.filter(|_| collective != Collective::Join);
        let in_flight = InFlight { session, request, name, collective, promise, timeout, is_answered: false };
        Self { in_flight, output: PhantomData }
    }

    /// The same operation with another type of result.
    pub(crate) fn typed<T: Outcome>(self) -> Handle<T> {
        Handle { in_flight: self.in_flight, output: PhantomData }
    }
}

impl<T: Outcome> Handle<T> {
    /// Whether waiting would return at once: the operation is complete or has failed.
    #[must_use]
    pub fn poll(&self) -> bool {
        self.in_flight.promise.is_ready()
    }

    /// The operation's name, as the ranks know it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.in_flight.name.as_str()
    }

    /// Waits for the result. The operation timeout counts from here.
    ///
    /// # Errors
    /// [`Error::Failure`], which names the failed rank, when the operation or the epoch failed or the timeout passed.
    pub async fn wait(mut self) -> Result<T, Error> {
        let in_flight = &mut self.in_flight;
        let result = match in_flight.timeout {
            None => (&mut in_flight.promise).await,
            Some(timeout) => match within(timeout, &mut in_flight.promise).await {
                Some(result) => result,
                None => {
                    in_flight.is_answered = true;
                    let reason = overdue(&in_flight.name, timeout);
                    in_flight.session.withdraw(in_flight.request, &reason);
                    return Err(Error::timed_out(reason));
                }
            },
        };
        in_flight.is_answered = true;
        T::of(in_flight.output(result?)?)
    }
}

impl InFlight {
    fn output(&self, result: WebResult) -> Result<Output, Error> {
        let WebResult { completion: Completion { dtype, shape, detail, .. }, bytes } = result;
        let tensor = if self.collective.has_result(self.session.pending.me()) {
            let wanted = shape.elements() * dtype.size_bytes() as u64;
            if bytes.len() as u64 != wanted {
                let (name, given) = (&self.name, bytes.len());
                let reason =
                    format!("{name}: a result of {given} bytes for type {dtype} and shape {shape}, which has {wanted}");
                return Err(Error::Protocol { reason });
            }
            Some(Tensor { dtype, shape: shape.dimensions().to_vec(), bytes })
        } else {
            None
        };
        Ok(Output::new(tensor, detail, self.collective.clone()))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.is_answered && !self.promise.is_ready() {
            self.session.withdraw(self.request, "its handle was dropped");
        }
    }
}
