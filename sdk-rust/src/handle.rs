//! [`Handle`]: an operation in flight.

use std::marker::PhantomData;

use ronde_shm::ForkSafe;
use ronde_wire::Shape;

use crate::buffer::Buffer;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::outcome::{Outcome, Output};

/// An operation in flight that gives a `T`. Dropping it withdraws the operation unless it is complete: if it is not ordered
/// yet, it then fails on all ranks. A join cannot be withdrawn: the rank stays joined.
#[derive(Debug)]
pub struct Handle<T = Output> {
    in_flight: ForkSafe<InFlight>,
    output: PhantomData<fn() -> T>,
}

impl<T: Outcome> Handle<T> {
    pub(crate) fn new(in_flight: InFlight) -> Self {
        Self { in_flight: ForkSafe::new(in_flight), output: PhantomData }
    }

    /// The same operation with another type of result.
    pub(crate) fn typed<U: Outcome>(self) -> Handle<U> {
        Handle { in_flight: self.in_flight, output: PhantomData }
    }

    /// Whether waiting would return at once: the operation is complete or has failed.
    #[must_use]
    pub fn poll(&self) -> bool {
        // In a forked child there is nothing to wait for; the call that waits returns the error.
        self.in_flight.get().map_or(true, InFlight::poll)
    }

    /// The operation's name, as the ranks know it.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn name(&self) -> Result<&str, Error> {
        Ok(self.in_flight.get()?.name())
    }

    /// Waits for the result and copies it out.
    ///
    /// # Errors
    /// [`Error::Failure`], which names the failed rank, when the operation or the epoch failed or the deadline passed.
    pub async fn wait(mut self) -> Result<T, Error> {
        let in_flight = self.in_flight.get_mut()?;
        in_flight.ready().await?;
        T::of(in_flight.take_output()?)
    }

    /// Waits for the result and copies it into `target`, which has exactly its length.
    ///
    /// # Errors
    /// Those of [`Handle::wait`], and [`Error::Argument`] when the target has another length.
    pub async fn wait_into(mut self, target: &mut [u8]) -> Result<Shape, Error> {
        let in_flight = self.in_flight.get_mut()?;
        in_flight.ready().await?;
        Ok(in_flight.take_into(target)?.shape.clone())
    }

    /// Waits for the result and takes it without a copy if the operation was [`mapped`](crate::Operation::mapped) and there
    /// was room in shared memory; else as a copy.
    ///
    /// # Errors
    /// Those of [`Handle::wait`]; [`Error::Argument`] for an operation without a result on this rank.
    pub async fn wait_buffer(mut self) -> Result<Buffer, Error> {
        let in_flight = self.in_flight.get_mut()?;
        in_flight.ready().await?;
        in_flight.take_buffer()
    }
}
