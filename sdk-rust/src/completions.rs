//! [`Completions`]: counts the completions of operations that no thread waits for, so that one thread can wait for any of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A count of the operations submitted with [`crate::Operation::notify`] that completed or failed while no thread waited for
/// them. It outlives its client: the end of the session wakes the threads that wait on it.
#[derive(Clone, Debug, Default)]
pub struct Completions(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Completions {
    /// Waits at most `timeout` until the count differs from `seen`. Returns the count.
    #[must_use]
    pub fn wait(&self, seen: u64, timeout: Duration) -> u64 {
        let changed = self.0.changed.wait_timeout_while(self.lock(), timeout, |count| *count == seen);
        *changed.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes the waiting threads, as a completion does.
    pub fn wake(&self) {
        self.add();
    }

    /// Counts an operation, and wakes the waiting threads.
    pub(crate) fn add(&self) {
        *self.lock() += 1;
        self.0.changed.notify_all();
    }

    /// Ignores poisoning: a panic elsewhere leaves the count valid.
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the completion of an operation is counted: if the operation requested it and no thread waits.
#[derive(Clone, Debug, Default)]
pub(crate) struct NotifyFlag(Option<Arc<AtomicBool>>);

impl NotifyFlag {
    /// The flag of an operation that no thread waits for yet.
    pub(crate) fn new(notify: bool) -> Self {
        Self(notify.then(|| Arc::new(AtomicBool::new(true))))
    }

    /// Whether the completion is to be counted.
    pub(crate) fn is_set(&self) -> bool {
        self.0.as_ref().is_some_and(|flag| flag.load(Ordering::SeqCst))
    }

    /// Clears the flag when a thread begins to wait, and sets it when the thread stops. A thread that stops without a result
    /// checks for it once more after this call.
    pub(crate) fn set(&self, is_set: bool) {
        if let Some(flag) = &self.0 {
            flag.store(is_set, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_ends_when_the_count_changes_or_time_is_up() {
        let completions = Completions::default();
        assert_eq!(completions.wait(0, Duration::from_millis(1)), 0);
        let other = completions.clone();
        let waiter = std::thread::spawn(move || other.wait(0, Duration::from_secs(60)));
        completions.add();
        assert_eq!(waiter.join().expect("no panic"), 1);
        assert_eq!(completions.wait(0, Duration::from_secs(60)), 1, "it has changed already");
    }

    #[test]
    fn only_completions_without_a_waiting_thread_are_counted() {
        assert!(!NotifyFlag::new(false).is_set());
        let notify_flag = NotifyFlag::new(true);
        let same = notify_flag.clone();
        assert!(same.is_set());
        notify_flag.set(false);
        assert!(!same.is_set());
    }
}
