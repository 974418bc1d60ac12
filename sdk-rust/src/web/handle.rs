//! [`Handle`]: an operation in flight.

use std::marker::PhantomData;
use std::rc::Rc;
use std::time::Duration;

use ronde_rpc::Completion;
use ronde_wire::{Collective, RequestId, TensorName};
use tokio::sync::oneshot;

use super::platform::within;
use super::session::Session;
use crate::error::{Error, overdue};
use crate::outcome::{Outcome, Output};
use crate::tensor::Tensor;

/// An operation in flight that gives a `T`. Dropping it withdraws the operation unless it is complete: if it is not ordered
/// yet, it then fails on all ranks. A join cannot be taken back: the rank stays joined.
#[derive(Debug)]
pub struct Handle<T = Output> {
    flight: Flight,
    gives: PhantomData<fn() -> T>,
}

#[derive(Debug)]
struct Flight {
    session: Rc<Session>,
    request: RequestId,
    name: TensorName,
    collective: Collective,
    answer: Answer,
    timeout: Option<Duration>,
    is_answered: bool,
}

/// What comes in the end.
pub(super) type Answer = oneshot::Receiver<Result<ResultData, Error>>;

/// A result.
#[derive(Debug)]
pub(super) struct ResultData {
    /// What was said of it.
    pub(super) completion: Completion,
    /// Its bytes.
    pub(super) bytes: Vec<u8>,
}

impl Handle {
    pub(super) fn new(
        session: Rc<Session>,
        request: RequestId,
        (name, collective): (TensorName, Collective),
        answer: Answer,
    ) -> Self {
        // A join waits for the slowest rank of the job, and cannot be taken back.
        let timeout = session.operation_timeout.filter(|_| collective != Collective::Join);
        let flight = Flight { session, request, name, collective, answer, timeout, is_answered: false };
        Self { flight, gives: PhantomData }
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
        !self.flight.answer.is_empty()
    }

    /// The operation's name, as the ranks know it.
    #[must_use]
    pub fn name(&self) -> &str {
        self.flight.name.as_str()
    }

    /// Waits for the result. The operation timeout counts from here.
    ///
    /// # Errors
    /// [`Error::Failure`] with the culprit when the operation or the epoch failed or the timeout passed.
    pub async fn wait(mut self) -> Result<T, Error> {
        let flight = &mut self.flight;
        let answer = match flight.timeout {
            None => (&mut flight.answer).await,
            Some(timeout) => match within(timeout, &mut flight.answer).await {
                Some(answer) => answer,
                None => {
                    flight.is_answered = true;
                    let reason = overdue(&flight.name, timeout);
                    flight.session.withdraw(flight.request, &reason);
                    return Err(Error::timed_out(reason));
                }
            },
        };
        flight.is_answered = true;
        // The session answers all of its requests before it goes.
        let arrived = answer.unwrap_or(Err(Error::Closed))?;
        T::of(flight.output(arrived)?)
    }
}

impl Flight {
    fn output(&self, arrived: ResultData) -> Result<Output, Error> {
        let ResultData { completion: Completion { dtype, shape, detail, .. }, bytes } = arrived;
        let tensor = if self.collective.has_result(self.session.me) {
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

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.is_answered && self.answer.is_empty() {
            self.session.withdraw(self.request, "its waiter gave it up");
        }
    }
}
