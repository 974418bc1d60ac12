//! [`promise`]: a value that one side delivers and the other waits for, blocking or asynchronously. Every waiter gets an answer:
//! a [`Fulfil`] that is dropped delivers [`Error::Closed`].

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
#[cfg(not(target_arch = "wasm32"))]
use std::time::Duration;

use crate::error::Error;

/// Makes the two sides of a future value.
pub(crate) fn promise<T>() -> (Fulfil<T>, Promise<T>) {
    let cell = Arc::new(Cell {
        state: Mutex::new(State { outcome: None, waker: None, unparked: false, sleepers: 0 }),
        ready: Condvar::new(),
    });
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
}

/// Blocking waits, which WebAssembly does not have.
#[cfg(not(target_arch = "wasm32"))]
impl<T> Promise<T> {
    /// Takes the value, if it is there.
    pub(crate) fn take(&self) -> Option<Result<T, Error>> {
        self.cell.lock().outcome.take()
    }

    /// Takes the value, waiting for it at most `slice`; `None` when it is not there yet.
    pub(crate) fn wait_timeout(&self, slice: Duration) -> Option<Result<T, Error>> {
        self.cell.sleep(slice, |state| state.outcome.is_none()).outcome.take()
    }

    /// Parks the thread at most `slice` until the value is there or an [`Unpark`], which is then used up. Does not take the
    /// value.
    pub(crate) fn park_timeout(&self, slice: Duration) {
        self.cell.sleep(slice, |state| state.outcome.is_none() && !state.unparked).unparked = false;
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + 'static> Promise<T> {
    /// What ends [`Promise::park_timeout`].
    pub(crate) fn unparker(&self) -> Arc<dyn Unpark> {
        Arc::clone(&self.cell) as Arc<dyn Unpark>
    }
}

/// Wakes a thread that is parked on a promise, without a value.
#[cfg(not(target_arch = "wasm32"))]
pub(crate) trait Unpark: Send + Sync {
    /// Wakes the thread, now or when it parks next.
    fn unpark(&self);
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
    /// Delivers the value and wakes the waiter.
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
    #[cfg_attr(target_arch = "wasm32", expect(dead_code, reason = "no thread parks in WebAssembly"))]
    unparked: bool,
    /// Threads that wait for `ready`. Without any, the system call is skipped.
    sleepers: usize,
}

impl<T> Cell<T> {
    /// Ignores poisoning: a panic elsewhere leaves the state whole, because it is only replaced.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps while `waiting`, at most for `slice`.
    #[cfg(not(target_arch = "wasm32"))]
    fn sleep(&self, slice: Duration, waiting: impl Fn(&State<T>) -> bool) -> MutexGuard<'_, State<T>> {
        let mut state = self.lock();
        if !waiting(&state) {
            return state;
        }
        state.sleepers += 1;
        let woken = self.ready.wait_timeout_while(state, slice, |state| waiting(state));
        let mut state = woken.unwrap_or_else(PoisonError::into_inner).0;
        state.sleepers -= 1;
        state
    }

    fn deliver(&self, outcome: Result<T, Error>) {
        let (waker, sleepers) = {
            let mut state = self.lock();
            state.outcome = Some(outcome);
            (state.waker.take(), state.sleepers)
        };
        if sleepers > 0 {
            self.ready.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl<T: Send> Unpark for Cell<T> {
    fn unpark(&self) {
        let sleepers = {
            let mut state = self.lock();
            state.unparked = true;
            state.sleepers
        };
        if sleepers > 0 {
            self.ready.notify_all();
        }
    }
}
