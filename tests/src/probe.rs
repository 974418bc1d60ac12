//! A probe of how late this machine runs its threads: tests add what it measures to their limits of time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A thread that sleeps for 10 ms again and again and records by how much a sleep was too long. It ends when the probe is
/// dropped.
#[derive(Debug)]
pub struct Probe {
    begin: Instant,
    measured: Arc<Measured>,
}

#[derive(Debug, Default)]
struct Measured {
    /// The worst oversleep so far, in nanoseconds.
    worst: AtomicU64,
    /// When the present sleep began, in nanoseconds after the probe's begin.
    asleep_since: AtomicU64,
}

impl Probe {
    /// Starts to measure.
    #[must_use]
    pub fn start() -> Self {
        let (begin, measured) = (Instant::now(), Arc::new(Measured::default()));
        let of_thread = Arc::downgrade(&measured);
        std::thread::spawn(move || {
            while let Some(measured) = of_thread.upgrade() {
                let since = begin.elapsed();
                measured.asleep_since.store(nanoseconds(since), Ordering::Relaxed);
                std::thread::sleep(PERIOD);
                let oversleep = begin.elapsed().saturating_sub(since + PERIOD);
                measured.worst.fetch_max(nanoseconds(oversleep), Ordering::Relaxed);
            }
        });
        Self { begin, measured }
    }

    /// Returns the worst oversleep so far, that of the present sleep included.
    #[must_use]
    pub fn worst(&self) -> Duration {
        let worst = Duration::from_nanos(self.measured.worst.load(Ordering::Relaxed));
        // The machine may run the caller before the thread of the probe.
        let since = Duration::from_nanos(self.measured.asleep_since.load(Ordering::Relaxed));
        worst.max(self.begin.elapsed().saturating_sub(since + PERIOD))
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// How long the thread sleeps at a time.
const PERIOD: Duration = Duration::from_millis(10);
