//! Limits how many warnings and errors one place in the code logs: peers and workers can cause such lines as fast as they
//! can be refused. Lines of the other levels are not limited, because whoever wants them asks for a line for each event.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ronde_bootstrap::streams;
use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// The lines of each place.
#[derive(Default)]
pub(super) struct LogLimit {
    places: Mutex<HashMap<Identifier, Place>>,
}

/// Whether a line is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admitted {
    /// It is, and says how many lines of its place were left out before it, and whether most of the next ones will be.
    Yes { left_out: u64, is_last: bool },
    /// It is not.
    No,
}

impl LogLimit {
    /// Decides about a line, and counts it if it is left out.
    pub(super) fn admit(&self, metadata: &Metadata<'_>) -> Admitted {
        if *metadata.level() > Level::WARN {
            return Admitted::Yes { left_out: 0, is_last: false };
        }
        // No code panics while it holds the lock.
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let admitted = places.entry(metadata.callsite()).or_insert_with(|| Place::new(now)).admit(now);
        if admitted == Admitted::No {
            streams::count_limited();
        }
        admitted
    }
}

/// A token bucket.
struct Place {
    lines_left: u64,
    left_out: u64,
    /// When the last line was added to `lines_left`.
    filled: Instant,
}

impl Place {
    fn new(now: Instant) -> Self {
        Self { lines_left: BURST, left_out: 0, filled: now }
    }

    fn admit(&mut self, now: Instant) -> Admitted {
        let added = now.saturating_duration_since(self.filled).as_secs() / INTERVAL.as_secs();
        self.lines_left = self.lines_left.saturating_add(added).min(BURST);
        self.filled += INTERVAL * u32::try_from(added).unwrap_or(u32::MAX);
        if self.lines_left == 0 {
            self.left_out += 1;
            return Admitted::No;
        }
        self.lines_left -= 1;
        Admitted::Yes { left_out: std::mem::take(&mut self.left_out), is_last: self.lines_left == 0 }
    }
}

/// Lines that one place may log at once: each of 64 local workers, or of 100 peers, can be refused once without a loss.
const BURST: u64 = 100;
/// After that, it logs one line in this time: 86,400 a day, about 20 MB.
const INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_logged_then_a_line_each_second_with_the_number_left_out() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut place = Place::new(start);
        for number in 1..=BURST {
            assert_eq!(place.admit(start), Admitted::Yes { left_out: 0, is_last: number == BURST });
        }
        assert!((0..50).all(|_| place.admit(at(999)) == Admitted::No));
        assert_eq!(place.admit(at(1_001)), Admitted::Yes { left_out: 50, is_last: true });
        assert_eq!(place.admit(at(1_999)), Admitted::No);
        assert_eq!(place.admit(at(2_500)), Admitted::Yes { left_out: 1, is_last: true });
        // A quiet time allows another burst, and no larger one.
        let later = at(1_000_000);
        assert!((0..BURST).all(|_| place.admit(later) != Admitted::No) && place.admit(later) == Admitted::No);
    }
}
