//! How long others have waited for a rank.

use crate::event::Time;

/// Separate waits that are kept to compare later ones with. A wait that began before the oldest of them ended may count
/// a second time.
const KEPT: usize = 16;

/// The waits for one rank. Tensors are in flight together: a microsecond in which several wait for the rank counts once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Waits {
    /// Begin and end of waits that do not overlap, those that were changed last at the end.
    kept: Vec<(Time, Time)>,
}

impl Waits {
    /// Adds a wait. Returns the microseconds of it that no earlier wait contains.
    pub(crate) fn add(&mut self, since: Time, until: Time) -> u64 {
        let until = until.max(since);
        let (mut merged, mut counted_us) = ((since, until), 0);
        self.kept.retain(|(begin, end)| {
            let is_apart = *end < since || until < *begin;
            if !is_apart {
                counted_us += end.0 - begin.0;
                merged = (merged.0.min(*begin), merged.1.max(*end));
            }
            is_apart
        });
        if self.kept.len() == KEPT {
            self.kept.remove(0);
        }
        self.kept.push(merged);
        merged.1.0 - merged.0.0 - counted_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(waits: &mut Waits, since: u64, until: u64) -> u64 {
        waits.add(Time(since), Time(until))
    }

    #[test]
    fn tensors_that_wait_at_the_same_time_count_once() {
        let mut waits = Waits::default();
        assert_eq!(add(&mut waits, 100, 200), 100);
        assert_eq!(add(&mut waits, 100, 200), 0);
        assert_eq!(add(&mut waits, 150, 250), 50);
        assert_eq!(add(&mut waits, 300, 310), 10, "apart");
        assert_eq!(add(&mut waits, 0, 400), 240, "a long wait around short ones");
        assert_eq!(add(&mut waits, 20, 30), 0, "inside");
        assert_eq!(add(&mut waits, 400, 400), 0);
        assert_eq!(add(&mut waits, 500, 90), 0, "a clock that went back");
    }

    #[test]
    fn the_sum_is_the_number_of_microseconds_that_some_wait_contains() {
        let mut state = 7_u64;
        let mut drawn = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let (mut waits, mut contained, mut sum) = (Waits::default(), [false; 64], 0);
            for _ in 0..KEPT {
                let since = drawn(64);
                let until = since + drawn(64 - since);
                contained[usize::try_from(since).unwrap()..usize::try_from(until).unwrap()].fill(true);
                sum += add(&mut waits, since, until);
            }
            assert_eq!(sum, contained.iter().filter(|is| **is).count() as u64);
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut waits = Waits::default();
        let sum: u64 = (0..1_000).map(|at| add(&mut waits, at * 10, at * 10 + 5)).sum();
        assert_eq!((sum, waits.kept.len()), (5_000, KEPT));
    }
}
