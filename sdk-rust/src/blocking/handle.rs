//! [`Handle`]: an operation in flight of the blocking client.

use std::marker::PhantomData;
use std::time::Duration;

use ronde_gpu::{Arrival, CallerStream, DeviceSpan};
use ronde_shm::ForkSafe;
use ronde_wire::{DType, Detail, Shape};

use super::SLICE;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::outcome::{Outcome, Output};
use crate::result_data::ResultData;

/// An operation in flight that gives a `T`. Dropping it withdraws the operation unless it is complete.
#[derive(Debug)]
pub struct Handle<T = Output> {
    in_flight: ForkSafe<InFlight>,
    output: PhantomData<fn() -> T>,
}

/// Whether a wait has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The operation is complete or has failed: reading it returns at once.
    Ready,
    /// It is still in flight.
    NotReady,
}

impl<T: Outcome> Handle<T> {
    pub(super) fn new(in_flight: InFlight) -> Self {
        Self { in_flight: ForkSafe::new(in_flight), output: PhantomData }
    }

    /// The same operation with another type of result.
    pub(super) fn typed<U: Outcome>(self) -> Handle<U> {
        Handle { in_flight: self.in_flight, output: PhantomData }
    }

    /// Whether the operation is complete or has failed.
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

    /// Waits at most `slice`.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`]. The method that reads the result returns the failure of the operation.
    pub fn wait_timeout(&mut self, slice: Duration) -> Result<Progress, Error> {
        let is_ready = self.in_flight.get_mut()?.wait_timeout(slice);
        Ok(if is_ready { Progress::Ready } else { Progress::NotReady })
    }

    /// Whether this rank gets a tensor in the end: only the root of a reduce does, and no rank of a barrier.
    ///
    /// # Errors
    /// [`Error::UsedAfterFork`].
    pub fn has_result(&self) -> Result<bool, Error> {
        Ok(self.in_flight.get()?.has_result())
    }

    /// The shape of the result, once it is [`Progress::Ready`]; `[0]` when there is none.
    ///
    /// # Errors
    /// The operation's failure; [`Error::Argument`] before it is ready.
    pub fn shape(&self) -> Result<&Shape, Error> {
        Ok(&self.result()?.shape)
    }

    /// The type of the result, once it is [`Progress::Ready`].
    ///
    /// # Errors
    /// Those of [`Handle::shape`].
    pub fn dtype(&self) -> Result<DType, Error> {
        Ok(self.result()?.dtype)
    }

    /// Further information about the result, once it is [`Progress::Ready`].
    ///
    /// # Errors
    /// Those of [`Handle::shape`].
    pub fn detail(&self) -> Result<&Detail, Error> {
        Ok(&self.result()?.detail)
    }

    fn result(&self) -> Result<&ResultData, Error> {
        let result = self.in_flight.get()?.result()?;
        result.ok_or_else(|| Error::argument("the operation is still in flight; wait for it first"))
    }

    /// Copies the result into `target`, which has exactly its length. Once only.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::Argument`] when it is not ready or the target has another length.
    pub fn read_into(&mut self, target: &mut [u8]) -> Result<(), Error> {
        self.result()?;
        self.in_flight.get_mut()?.read_into(target)
    }

    /// Whether tensors travel inside messages. Then [`Handle::deliver`] fails.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        self.in_flight.get().is_ok_and(InFlight::is_inline)
    }

    /// Starts to copy the result to device memory, once it is [`Progress::Ready`]. Returns at once. The copy is ordered after
    /// the present work of `stream`, a stream of the target's device. With `at_submission`, and if the input was on the same
    /// device and stream, it is ordered after the work that the stream had when the operation was submitted. Work that uses the memory must be ordered after the [`Arrival`]. Once only.
    ///
    /// # Errors
    /// The operation's failure; [`Error::Argument`] when it is not ready or the target has another length;
    /// [`Error::Device`] for memory of another device, and when the driver fails.
    pub fn deliver(&mut self, target: DeviceSpan, stream: CallerStream, at_submission: bool) -> Result<Arrival, Error> {
        self.result()?;
        self.in_flight.get_mut()?.deliver(target, stream, at_submission)
    }

    /// Takes the result if it stays in shared memory, once it is [`Progress::Ready`]; `None` leaves it to be read.
    ///
    /// # Errors
    /// Those of [`Handle::shape`].
    pub fn take_mapped(&mut self) -> Result<Option<Buffer>, Error> {
        self.result()?;
        self.in_flight.get_mut()?.take_mapped()
    }

    /// [`crate::Handle::wait_buffer`], blocking.
    ///
    /// # Errors
    /// Those of [`crate::Handle::wait_buffer`].
    pub fn wait_buffer(mut self) -> Result<Buffer, Error> {
        self.ready()?.take_buffer()
    }

    /// Waits for the result and copies it out.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait(mut self) -> Result<T, Error> {
        T::of(self.ready()?.take_output()?)
    }

    /// Waits for the result and copies it into `target`, which has exactly its length.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::Argument`] when the target has another length.
    pub fn wait_into(mut self, target: &mut [u8]) -> Result<Shape, Error> {
        self.ready()?;
        let shape = self.shape()?.clone();
        self.read_into(target)?;
        Ok(shape)
    }

    /// Waits until the operation is complete or has failed.
    fn ready(&mut self) -> Result<&mut InFlight, Error> {
        let in_flight = self.in_flight.get_mut()?;
        while !in_flight.wait_timeout(SLICE) {}
        Ok(in_flight)
    }
}
