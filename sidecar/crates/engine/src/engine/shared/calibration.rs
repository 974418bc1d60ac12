//! Measures the cost model: how long operations take that are performed alone, against what their plans send.

use std::collections::VecDeque;

use ronde_collectives::plan::{Plan, Round, Step, SubSchedule, Transfer};
use ronde_wire::Seq;

use super::status::CostStatus;
use crate::event::Time;

/// The operations that were performed alone.
#[derive(Debug)]
pub(crate) struct Calibration {
    /// The time of a reduced byte, which is none of theirs.
    gamma_us_per_byte: f64,
    /// The operation that was admitted while no other one was in flight, and when; `None` once another one follows.
    alone: Option<(Seq, Time, Traffic)>,
    samples: VecDeque<Sample>,
}

/// What a member sends in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Traffic {
    /// The rounds of its longest sub-schedule, as the cost model counts them.
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

impl Calibration {
    pub(crate) fn new(gamma_us_per_byte: f64) -> Self {
        Self { gamma_us_per_byte, alone: None, samples: VecDeque::new() }
    }

    /// Drops all samples: operations take another time from now on.
    pub(crate) fn restart(&mut self) {
        *self = Self::new(self.gamma_us_per_byte);
    }

    /// An operation is admitted; `alone` says whether no other one is in flight, and all ranks are ready for it.
    pub(crate) fn admitted(&mut self, now: Time, seq: Seq, plan: &Plan, element_bytes: u64, alone: bool) {
        // A member that only sends is done when its connection has accepted the bytes: it does not wait for the network.
        let is_sample = alone && receives(plan);
        let traffic = is_sample.then(|| Traffic::of(plan, element_bytes));
        self.alone = traffic.filter(|traffic| traffic.bytes > 0).map(|traffic| (seq, now, traffic));
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

    /// The costs that fit the samples best, by their relative errors. `None` while there are too few samples, or all are of
    /// about the same size.
    pub(crate) fn fit(&self) -> Option<CostStatus> {
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
        Some(least_squares(&medians, self.gamma_us_per_byte))
    }
}

impl Sample {
    fn key(&self) -> (u64, u64, u64) {
        (self.traffic.rounds, self.traffic.bytes, self.traffic.reduced_bytes)
    }
}

impl Traffic {
    fn of(plan: &Plan, element_bytes: u64) -> Self {
        let sub_schedules = plan.sub_schedules.iter().enumerate();
        let rounds = sub_schedules.map(|(index, each)| rounds_of(each, plan.prelude && index == 0)).max().unwrap_or(0);
        let sent = transfers(plan).map(|transfer| match transfer {
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

fn transfers(plan: &Plan) -> impl Iterator<Item = &Transfer> {
    plan.sub_schedules.iter().flat_map(|each| &each.rounds).flat_map(|round| &round.transfers)
}

fn receives(plan: &Plan) -> bool {
    transfers(plan).any(|transfer| matches!(transfer, Transfer::Receive { .. }))
}

/// The rounds up to the last one with a transfer: a later one only finishes and publishes, which takes no round trip. For the
/// same reason a prelude counts from its first transfer on.
fn rounds_of(sub_schedule: &SubSchedule, is_prelude: bool) -> u64 {
    let has_transfers = |round: &Round| !round.transfers.is_empty();
    let Some(last) = sub_schedule.rounds.iter().rposition(has_transfers) else { return 0 };
    let first = if is_prelude { sub_schedule.rounds.iter().position(has_transfers).unwrap_or(0) } else { 0 };
    (last + 1 - first) as u64
}

fn reduced_elements(step: &Step) -> u64 {
    match step {
        Step::Reduce { span, .. } => span.len,
        _ => 0,
    }
}

/// Minimizes the sum of `((rounds alpha + bytes beta + reduced bytes gamma) / us - 1)^2` for a given gamma. A cost that would
/// not be positive is the least one, and the other follows from it alone.
fn least_squares(samples: &[Sample], gamma_us_per_byte: f64) -> CostStatus {
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
    CostStatus { alpha_us, beta_us_per_byte, gamma_us_per_byte }
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
    use ronde_collectives::plan::{Work, WorkKind};
    use ronde_wire::{Algorithm, Member, Rank, SetId, SidecarIndex, Tuning, World};

    use super::*;

    /// Operations that reduce half of what they send.
    fn calibration(gamma: f64, samples: impl IntoIterator<Item = (u64, u64, f64)>) -> Calibration {
        let sample = |(rounds, bytes, us)| Sample { traffic: traffic(rounds, bytes), us };
        Calibration { samples: samples.into_iter().map(sample).collect(), ..Calibration::new(gamma) }
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
            let found = calibration(gamma, samples).fit().expect("enough operations");
            prop_assert!((found.alpha_us / alpha - 1.0).abs() < 0.3, "{found:?}, alpha {alpha}");
            prop_assert!((found.beta_us_per_byte / beta - 1.0).abs() < 0.3, "{found:?}, beta {beta}");
        }

        #[test]
        fn costs_are_positive_whatever_was_measured(samples in prop::collection::vec((1..9_u64, 1..1_u64 << 40, 1.0..1e9_f64), 12..40)) {
            if let Some(found) = calibration(1e-4, samples).fit() {
                prop_assert!(found.alpha_us >= ALPHA_US_LEAST && found.alpha_us.is_finite(), "{found:?}");
                prop_assert!(found.beta_us_per_byte >= BETA_US_LEAST && found.beta_us_per_byte.is_finite(), "{found:?}");
            }
        }
    }

    /// The plan of member 0 of so many sidecars with a rank each, and the rounds that the cost model predicts.
    fn planned(sidecars: u32, kind: WorkKind, algorithm: Algorithm, elements: u64) -> (Plan, u32) {
        let world = World::new((0..sidecars).map(SidecarIndex).collect()).expect("a world");
        let topology = world.topology(SetId::WORLD).expect("the set of all ranks");
        let work = Work { kind, element_bytes: 4, tensors: vec![vec![elements]] };
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 1 };
        let predicted = ronde_collectives::planner::predicted(&topology, &work, &tuning).expect("a prediction");
        let plan = ronde_collectives::plan(Member(0), &topology, &work, &tuning).expect("a plan");
        (plan, predicted.rounds)
    }

    #[test]
    fn a_plan_has_the_rounds_of_one_sub_schedule_and_the_bytes_of_all() {
        let (plan, rounds) = planned(4, WorkKind::AllReduce, Algorithm::Ring, 8_192);
        // Two chunks for each of four shards of 8 KiB: each member sends six shards and reduces three.
        assert_eq!(plan.sub_schedules.len(), 2);
        let found = Traffic::of(&plan, 4);
        assert_eq!((found.bytes, found.reduced_bytes), (6 * 8_192, 3 * 8_192 / 2));
        assert_eq!((found.rounds, rounds), (6, 6));
        let algorithms = [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling];
        for (algorithm, sidecars) in algorithms.into_iter().flat_map(|algorithm| [(algorithm, 2), (algorithm, 8)]) {
            let (plan, rounds) = planned(sidecars, WorkKind::AllReduce, algorithm, 8_192);
            assert_eq!(Traffic::of(&plan, 4).rounds, u64::from(rounds), "{algorithm:?}, {sidecars} sidecars");
        }
    }

    #[test]
    fn a_prelude_counts_from_its_first_transfer_on() {
        for kind in [WorkKind::AllReduceTwoPass { measures: 1 }, WorkKind::AllReduceAdaptive] {
            let (plan, rounds) = planned(4, kind, Algorithm::Direct, 8_192);
            assert!(plan.prelude);
            assert_eq!(Traffic::of(&plan, 4).rounds, u64::from(rounds));
        }
    }

    #[test]
    fn an_operation_is_a_sample_where_it_sends_and_receives() {
        for (kind, algorithm, samples) in [
            (WorkKind::Broadcast { root: Rank(0) }, Algorithm::BinomialTree, 0),
            (WorkKind::Broadcast { root: Rank(1) }, Algorithm::BinomialTree, 0),
            (WorkKind::AllReduce, Algorithm::RecursiveDoubling, 1),
        ] {
            let (plan, _) = planned(2, kind.clone(), algorithm, 8_192);
            let mut calibration = Calibration::new(0.0);
            calibration.admitted(Time(1), Seq(1), &plan, 4, true);
            calibration.performed(Time(2), Seq(1));
            assert_eq!(calibration.samples.len(), samples, "{kind:?}");
            calibration.restart();
            assert_eq!(calibration.samples.len(), 0);
        }
    }

    #[test]
    fn too_few_operations_or_sizes_give_no_model() {
        assert_eq!(calibration(0.0, []).fit(), None);
        assert_eq!(calibration(0.0, (0..11).map(|at| (1, 1_000 << at, 10.0))).fit(), None);
        assert_eq!(calibration(0.0, (0..100).map(|_| (1, 1_000, 10.0))).fit(), None);
    }

    #[test]
    fn an_operation_counts_only_when_no_other_one_overlaps_it() {
        let alone = Some((Seq(1), Time(5), traffic(1, 8)));
        let mut calibration = Calibration { alone, ..Calibration::new(0.0) };
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
