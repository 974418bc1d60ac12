//! A value that one side will deliver and the other waits for, blocking or not. Whoever waits always gets an answer: a
//! [`Fulfil`] that is dropped delivers [`Error::Closed`].

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::error::Error;

/// The two sides of a value to come.
pub(crate) fn promise<T>() -> (Fulfil<T>, Promise<T>) {
    let cell = Arc::new(Cell { state: Mutex::new(State { outcome: None, waker: None }), ready: Condvar::new() });
    (Fulfil { cell: Some(Arc::clone(&cell)) }, Promise { cell })
}

/// The waiting side.
#[derive(Debug)]
pub(crate) struct Promise<T> {
    cell: Arc<Cell<T>>,
}

impl<T> Promise<T> {
    /// Whether the value is there and not yet taken.
    pub(crate) fn is_ready(&self) -> bool {
        self.cell.lock().outcome.is_some()
    }

    /// Takes the value, waiting for it at most `slice`; `None` when it is not there yet.
    pub(crate) fn wait_timeout(&self, slice: Duration) -> Option<Result<T, Error>> {
        let state = self.cell.lock();
        let waiting = |state: &mut State<T>| state.outcome.is_none();
        let outcome = self.cell.ready.wait_timeout_while(state, slice, waiting);
        outcome.unwrap_or_else(PoisonError::into_inner).0.outcome.take()
    }
}

impl<T> Future for Promise<T> {
    type Output = Result<T, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.cell.lock();
        if let Some(outcome) = state.outcome.take() {
            return Poll::Ready(outcome);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

/// The delivering side.
#[derive(Debug)]
pub(crate) struct Fulfil<T> {
    cell: Option<Arc<Cell<T>>>,
}

impl<T> Fulfil<T> {
    /// Delivers.
    pub(crate) fn with(mut self, outcome: Result<T, Error>) {
        if let Some(cell) = self.cell.take() {
            cell.deliver(outcome);
        }
    }
}

impl<T> Drop for Fulfil<T> {
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            cell.deliver(Err(Error::Closed));
        }
    }
}

#[derive(Debug)]
struct Cell<T> {
    state: Mutex<State<T>>,
    ready: Condvar,
}

#[derive(Debug)]
struct State<T> {
    outcome: Option<Result<T, Error>>,
    waker: Option<Waker>,
}

impl<T> Cell<T> {
    /// A panic elsewhere leaves the state whole: it is only ever replaced.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, outcome: Result<T, Error>) {
        let waker = {
            let mut state = self.lock();
            state.outcome = Some(outcome);
            state.waker.take()
        };
        self.ready.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
