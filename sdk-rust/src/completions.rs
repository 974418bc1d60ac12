//! [`Completions`]: how one thread learns that operations have completed for which no thread waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A count of the operations submitted with [`crate::Operation::notify`] that have completed or failed while no thread waited for
/// them. Independent of the client that it comes from: it may be waited on while the session ends, and that wakes the thread.
#[derive(Clone, Debug, Default)]
pub struct Completions(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Completions {
    /// Waits at most `timeout` until the count is no longer `seen`. Returns the count.
    #[must_use]
    pub fn wait(&self, seen: u64, timeout: Duration) -> u64 {
        let changed = self.0.changed.wait_timeout_while(self.lock(), timeout, |count| *count == seen);
        *changed.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Wakes those who wait, as a completion does.
    pub fn wake(&self) {
        self.add();
    }

    /// Counts an operation, and wakes those who wait.
    pub(crate) fn add(&self) {
        *self.lock() += 1;
        self.0.changed.notify_all();
    }

    /// A panic elsewhere leaves the count whole.
    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.count.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the completion of an operation is counted: while no thread waits for it, if that was asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct NotifyFlag(Option<Arc<AtomicBool>>);

impl NotifyFlag {
    /// Of an operation that no thread waits for yet.
    pub(crate) fn new(notify: bool) -> Self {
        Self(notify.then(|| Arc::new(AtomicBool::new(true))))
    }

    /// Whether the completion is to be counted.
    pub(crate) fn is_set(&self) -> bool {
        self.0.as_ref().is_some_and(|missing| missing.load(Ordering::SeqCst))
    }

    /// A thread begins or ends to wait. One that ends without an answer looks for it once more after this call.
    pub(crate) fn set(&self, is_set: bool) {
        if let Some(missing) = &self.0 {
            missing.store(is_set, Ordering::SeqCst);
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
