//! When a slot or a host may be used again after failures. Pure.
//!
//! A slot whose worker fails is refilled at once. After [`QUICK_FAILURES_MAX`] quick failures in a row it is excluded: for
//! a cool-down with `--blacklist-cooldown-range`, and for the rest of the job without. A host whose agent or sidecar is lost
//! is excluded for a cool-down in both cases, because the discovery script, or the user's list, still names it. Each
//! further exclusion doubles the cool-down, which is random by up to a quarter, within the range.

use std::time::Duration;

/// The time since the launcher's start.
pub type Time = Duration;

/// The shortest and the longest cool-down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CooldownRange {
    /// The first one.
    pub min: Duration,
    /// What doubling leads to.
    pub max: Duration,
}

impl CooldownRange {
    /// The cool-down of hosts without `--blacklist-cooldown-range`.
    pub(super) const HOST: Self = Self { min: Duration::from_secs(2), max: Duration::from_secs(300) };
    /// The cool-down of a host that others cannot reach: each attempt to use it again stops the training for the start timeout.
    pub(super) const UNREACHABLE: Self = Self { min: Duration::from_secs(60), max: Duration::from_secs(3_600) };

    /// The cool-down after so many exclusions, the first being 1. `seed` chooses its random part.
    fn after(self, exclusions: u32, seed: u64) -> Duration {
        let doubled = self.min.saturating_mul(1 << exclusions.saturating_sub(1).min(16));
        let random = u32::try_from(mixed(seed.wrapping_add(exclusions.into())) % 1_024).expect("less than 1,024");
        (doubled + doubled / 4 * random / 1_024).clamp(self.min, self.max)
    }
}

/// The failures of a slot or host.
#[derive(Clone, Debug, Default)]
pub(super) struct Exclusion {
    quick_failures: u32,
    exclusions: u32,
    last: Option<Time>,
    state: Usable,
}

/// Whether a slot or host can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Usable {
    /// Now.
    #[default]
    Now,
    /// From this time on.
    From(Time),
    /// Not in this job.
    Never,
}

impl Exclusion {
    /// Whether it can be used.
    pub(super) fn usable(&self, now: Time) -> bool {
        match self.state {
            Usable::Now => true,
            Usable::From(time) => time <= now,
            Usable::Never => false,
        }
    }

    /// Whether it can be used now or later.
    pub(super) fn is_usable_ever(&self) -> bool {
        self.state != Usable::Never
    }

    /// When it can be used again, if that is later.
    pub(super) fn usable_from(&self, now: Time) -> Option<Time> {
        match self.state {
            Usable::From(time) if time > now => Some(time),
            _ => None,
        }
    }

    /// A worker in the slot failed after it had run for `ran`. Returns whether the slot is excluded now.
    pub(super) fn worker_failed(&mut self, now: Time, ran: Duration, range: Option<CooldownRange>, seed: u64) -> bool {
        self.quick_failures = if ran < QUICK { self.quick_failures + 1 } else { 1 };
        let is_excluded = self.quick_failures >= QUICK_FAILURES_MAX;
        if is_excluded {
            self.exclude(now, range, seed);
        }
        is_excluded
    }

    /// Excludes it: without a range for ever.
    pub(super) fn exclude(&mut self, now: Time, range: Option<CooldownRange>, seed: u64) {
        let is_recent = self.last.is_some_and(|last| now.saturating_sub(last) < FORGOTTEN_AFTER);
        self.exclusions = if is_recent { self.exclusions.saturating_add(1) } else { 1 };
        self.last = Some(now);
        self.state = range.map_or(Usable::Never, |range| Usable::From(now + range.after(self.exclusions, seed)));
    }
}

/// The number after `seed` of SplitMix64.
fn mixed(seed: u64) -> u64 {
    let mut number = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// Quick failures in a row after which a slot is excluded.
pub(super) const QUICK_FAILURES_MAX: u32 = 3;
/// A worker that failed after less time failed quickly.
const QUICK: Duration = Duration::from_secs(60);
/// An exclusion so long ago does not lengthen the next cool-down.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(3_600);

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const RANGE: CooldownRange = CooldownRange { min: seconds(10), max: seconds(100) };

    #[test]
    fn a_slot_is_excluded_after_three_quick_failures() {
        let mut slot = Exclusion::default();
        assert!(!slot.worker_failed(seconds(1), seconds(1), None, 0) && slot.usable(seconds(1)));
        assert!(!slot.worker_failed(seconds(2), seconds(1), None, 0));
        assert!(slot.worker_failed(seconds(3), seconds(1), None, 0));
        assert!(!slot.usable(seconds(1_000_000)) && !slot.is_usable_ever(), "for ever without a range");
    }

    #[test]
    fn a_worker_that_ran_long_begins_a_new_count() {
        let mut slot = Exclusion::default();
        for time in 0..20 {
            assert!(!slot.worker_failed(seconds(100 * time), seconds(90), None, 0), "{time}");
        }
    }

    #[test]
    fn cool_downs_double_within_the_range() {
        let mut slot = Exclusion::default();
        let mut delays = Vec::new();
        let mut now = seconds(0);
        for seed in 0..6 {
            slot.exclude(now, Some(RANGE), seed);
            let from = slot.usable_from(now).expect("it is excluded");
            delays.push(from - now);
            assert!(!slot.usable(from - Duration::from_nanos(1)) && slot.usable(from));
            now = from;
        }
        let expected = [10, 20, 40, 80, 100, 100].map(seconds);
        for (delay, expected) in delays.iter().zip(expected) {
            assert!((expected..=(expected * 5 / 4).min(RANGE.max)).contains(delay), "{delays:?}");
        }
        slot.exclude(now + FORGOTTEN_AFTER, Some(RANGE), 0);
        let from = slot.usable_from(now + FORGOTTEN_AFTER).expect("it is excluded");
        assert!(from - now - FORGOTTEN_AFTER <= seconds(13), "an old exclusion does not count");
    }

    #[test]
    fn cool_downs_of_several_hosts_differ() {
        let delays: std::collections::BTreeSet<Duration> = (0..50).map(|seed| RANGE.after(2, seed)).collect();
        assert!(delays.len() > 20, "{delays:?}");
    }
}
