//! Measures the cost model: how long operations take that are performed alone, against what their plans send.

use std::collections::VecDeque;

use ronde_collectives::plan::{Plan, Step, Transfer};
use ronde_wire::Seq;

use crate::event::Time;

/// The operations that were performed alone.
#[derive(Debug, Default)]
pub(crate) struct Calibration {
    /// The operation that was admitted while no other one was in flight, and when; `None` once another one follows.
    alone: Option<(Seq, Time, Traffic)>,
    samples: VecDeque<Sample>,
}

/// What a member sends in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Traffic {
    /// The rounds of its longest sub-schedule.
    rounds: u64,
    bytes: u64,
    /// Bytes that it reduces while it sends nothing: those of one sub-schedule, as the others send meanwhile.
    reduced_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Sample {
    traffic: Traffic,
    us: f64,
}

/// Latency in microseconds, and microseconds for each byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LinkCost {
    pub(crate) alpha_us: f64,
    pub(crate) beta_us_per_byte: f64,
}

impl Calibration {
    /// An operation is admitted; `alone` says whether no other one is in flight.
    pub(crate) fn admitted(&mut self, now: Time, seq: Seq, plan: &Plan, element_bytes: u64, alone: bool) {
        let traffic = Traffic::of(plan, element_bytes);
        self.alone = (alone && traffic.bytes > 0).then_some((seq, now, traffic));
    }

    /// An operation is performed, or dropped.
    pub(crate) fn performed(&mut self, now: Time, seq: Seq) {
        let Some((_, began, traffic)) = self.alone.take_if(|(alone, ..)| *alone == seq) else { return };
        if self.samples.len() == SAMPLES_MAX {
            self.samples.pop_front();
        }
        let us = now.0.saturating_sub(began.0).max(1) as f64;
        self.samples.push_back(Sample { traffic, us });
    }

    /// The costs that fit the samples best, by their relative errors, given the time of a reduced byte, which is none of
    /// theirs. `None` while there are too few samples, or all are of about the same size.
    pub(crate) fn fit(&self, gamma_us_per_byte: f64) -> Option<LinkCost> {
        let bytes = || self.samples.iter().map(|sample| sample.traffic.bytes);
        let (least, most) = (bytes().min()?, bytes().max()?);
        if self.samples.len() < SAMPLES_LEAST || most < SIZES_APART * least {
            return None;
        }
        // The median of equal operations: one that was interrupted takes many times as long.
        let mut by_traffic: Vec<Sample> = self.samples.iter().copied().collect();
        by_traffic.sort_by(|a, b| a.key().cmp(&b.key()).then(a.us.total_cmp(&b.us)));
        let medians: Vec<Sample> =
            by_traffic.chunk_by(|a, b| a.traffic == b.traffic).map(|equal| equal[equal.len() / 2]).collect();
        Some(least_squares(&medians, gamma_us_per_byte))
    }
}

impl Sample {
    fn key(&self) -> (u64, u64, u64) {
        (self.traffic.rounds, self.traffic.bytes, self.traffic.reduced_bytes)
    }
}

impl Traffic {
    fn of(plan: &Plan, element_bytes: u64) -> Self {
        let rounds = plan.sub_schedules.iter().map(|sub_schedule| sub_schedule.rounds.len() as u64).max().unwrap_or(0);
        let transfers = plan.sub_schedules.iter().flat_map(|each| &each.rounds).flat_map(|round| &round.transfers);
        let sent = transfers.map(|transfer| match transfer {
            Transfer::Send { span, .. } => span.len,
            Transfer::Receive { .. } => 0,
        });
        let steps = plan.sub_schedules.iter().flat_map(|each| &each.rounds).flat_map(|round| &round.steps);
        let reduced: u64 = steps.map(reduced_elements).sum();
        Self {
            rounds,
            bytes: sent.sum::<u64>().saturating_mul(element_bytes),
            reduced_bytes: reduced.saturating_mul(element_bytes) / (plan.sub_schedules.len() as u64).max(1),
        }
    }
}

fn reduced_elements(step: &Step) -> u64 {
    match step {
        Step::Reduce { span, .. } => span.len,
        _ => 0,
    }
}

/// Minimizes the sum of `((rounds alpha + bytes beta + reduced bytes gamma) / us - 1)^2` for a given gamma. A cost that would not be positive is the least one, and
/// the other follows from it alone.
fn least_squares(samples: &[Sample], gamma_us_per_byte: f64) -> LinkCost {
    let (mut rr, mut rb, mut bb, mut r, mut b) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for Sample { traffic, us } in samples {
        let (rounds, bytes) = (traffic.rounds as f64 / us, traffic.bytes as f64 / us);
        rr += rounds * rounds;
        rb += rounds * bytes;
        bb += bytes * bytes;
        let rest = 1.0 - traffic.reduced_bytes as f64 * gamma_us_per_byte / us;
        r += rounds * rest;
        b += bytes * rest;
    }
    let determinant = rr * bb - rb * rb;
    let (alpha, beta) = ((r * bb - b * rb) / determinant, (b * rr - r * rb) / determinant);
    let (alpha_us, beta_us_per_byte) = match (alpha > ALPHA_US_LEAST, beta > BETA_US_LEAST) {
        (true, true) => (alpha, beta),
        (false, _) => (ALPHA_US_LEAST, (b / bb).max(BETA_US_LEAST)),
        (true, false) => ((r / rr).max(ALPHA_US_LEAST), BETA_US_LEAST),
    };
    LinkCost { alpha_us, beta_us_per_byte }
}

/// The newest operations count.
const SAMPLES_MAX: usize = 1_024;
const SAMPLES_LEAST: usize = 12;
/// How many times as large as the smallest operation the largest one is, at least, to tell latency from bandwidth.
const SIZES_APART: u64 = 16;
/// A tenth of a microsecond a round, and 100 GB/s: less is not measured but noise.
const ALPHA_US_LEAST: f64 = 0.1;
const BETA_US_LEAST: f64 = 1e-5;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Operations that reduce half of what they send.
    fn calibration(samples: impl IntoIterator<Item = (u64, u64, f64)>) -> Calibration {
        let sample = |(rounds, bytes, us)| Sample { traffic: traffic(rounds, bytes), us };
        Calibration { alone: None, samples: samples.into_iter().map(sample).collect() }
    }

    fn traffic(rounds: u64, bytes: u64) -> Traffic {
        Traffic { rounds, bytes, reduced_bytes: bytes / 2 }
    }

    /// Operations of several sizes, three of each, in so many rounds.
    fn operations() -> impl Iterator<Item = (u64, u64)> {
        (10..25_u64).flat_map(|exponent| [(2 + exponent % 3, 1 << exponent); 3])
    }

    proptest! {
        #[test]
        fn the_costs_of_operations_are_found_again(
            alpha in 5.0..500.0_f64,
            gigabytes in 0.1..20.0_f64,
            gamma in 0.0..1e-3_f64,
            errors in prop::collection::vec(-0.03..0.03_f64, 45),
        ) {
            let beta = 1e-3 / gigabytes;
            let us = |(rounds, bytes): (u64, u64), error: f64| {
                let reduced = (bytes / 2) as f64 * gamma;
                (rounds as f64 * alpha + bytes as f64 * beta) * (1.0 + error) + reduced
            };
            let samples = operations().zip(&errors).map(|(operation, error)| (operation.0, operation.1, us(operation, *error)));
            let found = calibration(samples).fit(gamma).expect("enough operations");
            prop_assert!((found.alpha_us / alpha - 1.0).abs() < 0.3, "{found:?}, alpha {alpha}");
            prop_assert!((found.beta_us_per_byte / beta - 1.0).abs() < 0.3, "{found:?}, beta {beta}");
        }

        #[test]
        fn costs_are_positive_whatever_was_measured(samples in prop::collection::vec((1..9_u64, 1..1_u64 << 40, 1.0..1e9_f64), 12..40)) {
            if let Some(found) = calibration(samples).fit(1e-4) {
                prop_assert!(found.alpha_us >= ALPHA_US_LEAST && found.alpha_us.is_finite(), "{found:?}");
                prop_assert!(found.beta_us_per_byte >= BETA_US_LEAST && found.beta_us_per_byte.is_finite(), "{found:?}");
            }
        }
    }

    #[test]
    fn a_plan_has_the_rounds_of_one_sub_schedule_and_the_bytes_of_all() {
        use ronde_collectives::plan::{Work, WorkKind};
        use ronde_wire::{Algorithm, SetId, SidecarIndex, Tuning, World};

        let world = World::new((0..4).map(SidecarIndex).collect()).expect("a world");
        let topology = world.topology(SetId::WORLD).expect("the set of all ranks");
        let work = Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors: vec![vec![8_192]] };
        let tuning = Tuning { algorithm: Algorithm::Ring, chunk_bytes: 4_096, lanes: 1, window: 1 };
        let plan = ronde_collectives::plan(ronde_wire::Member(0), &topology, &work, &tuning).expect("a plan");
        // Two chunks for each of four shards of 8 KiB: each member sends six shards and reduces three.
        assert_eq!(plan.sub_schedules.len(), 2);
        let found = Traffic::of(&plan, 4);
        assert_eq!((found.bytes, found.reduced_bytes), (6 * 8_192, 3 * 8_192 / 2));
    }

    #[test]
    fn too_few_operations_or_sizes_give_no_model() {
        assert_eq!(calibration([]).fit(0.0), None);
        assert_eq!(calibration((0..11).map(|at| (1, 1_000 << at, 10.0))).fit(0.0), None);
        assert_eq!(calibration((0..100).map(|_| (1, 1_000, 10.0))).fit(0.0), None);
    }

    #[test]
    fn an_operation_counts_only_when_no_other_one_overlaps_it() {
        let alone = Some((Seq(1), Time(5), traffic(1, 8)));
        let mut calibration = Calibration { alone, ..Calibration::default() };
        calibration.performed(Time(9), Seq(2));
        assert_eq!(calibration.samples.len(), 0);
        calibration.performed(Time(9), Seq(1));
        assert_eq!(calibration.samples.len(), 1);
        let plan = Plan {
            layout: ronde_collectives::Layout { slices: Vec::new(), elements: 0 },
            sub_schedules: Vec::new(),
            prelude: false,
            window: 1,
        };
        calibration.alone = Some((Seq(3), Time(5), traffic(1, 8)));
        calibration.admitted(Time(6), Seq(4), &plan, 4, false);
        calibration.performed(Time(7), Seq(3));
        assert_eq!(calibration.samples.len(), 1, "another operation was admitted meanwhile");
    }
}
