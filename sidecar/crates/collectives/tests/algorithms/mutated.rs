//! Plans that are correct, and ways to spoil them.

#![allow(dead_code, reason = "each test binary uses its part")]

use ronde_collectives::check::{PlanPosition, Proof, Violation};
use ronde_collectives::{Plan, Round, Step, Work, WorkKind, check};
use ronde_wire::{Algorithm, Member, SetTopology, Tuning};

use crate::worlds::{flat, plans, work};

/// Correct plans, to be mutated.
pub(crate) struct Case {
    pub(crate) topology: SetTopology,
    pub(crate) work: Work,
    pub(crate) tuning: Tuning,
    pub(crate) plans: Vec<Plan>,
}

impl Case {
    pub(crate) fn new(topology: SetTopology, algorithm: Algorithm, kind: WorkKind, tensors: Vec<Vec<u64>>) -> Self {
        let work = work(kind, tensors);
        let tuning = Tuning { algorithm, chunk_bytes: 4 << 10, lanes: 2, window: 2 };
        let plans = plans(&topology, &work, &tuning);
        Self { topology, work, tuning, plans }
    }

    pub(crate) fn ring() -> Self {
        Self::new(flat(4), Algorithm::Ring, WorkKind::AllReduce, vec![vec![101], vec![30]])
    }

    pub(crate) fn doubling() -> Self {
        Self::new(flat(5), Algorithm::RecursiveDoubling, WorkKind::AllReduce, vec![vec![50]])
    }

    pub(crate) fn round(&mut self, at: PlanPosition) -> &mut Round {
        &mut self.plans[at.member.index()].sub_schedules[at.sub_schedule].rounds[at.round]
    }

    pub(crate) fn check(&self) -> Result<Proof, Violation> {
        check(&self.topology, &self.work, &self.tuning, &self.plans)
    }

    /// The violation of a plan that was correct.
    pub(crate) fn violation(&self) -> Violation {
        self.check().err().unwrap_or_else(|| panic!("the mutated plans passed"))
    }

    /// Where a member's first step of some sort stands: its round, and its index there.
    pub(crate) fn step(&self, member: u32, wanted: impl Fn(&Step) -> bool) -> (PlanPosition, usize) {
        let sub_schedules = self.plans[member as usize].sub_schedules.iter().enumerate();
        let mut rounds = sub_schedules.flat_map(|(sub_schedule, content)| {
            content.rounds.iter().enumerate().map(move |(round, content)| (sub_schedule, round, content))
        });
        let found = rounds.find_map(|(sub_schedule, round, content)| {
            content.steps.iter().position(&wanted).map(|index| (at(member, sub_schedule, round), index))
        });
        found.expect("the plan has such a step")
    }
}

pub(crate) fn at(member: u32, sub_schedule: usize, round: usize) -> PlanPosition {
    PlanPosition { member: Member(member), sub_schedule, round }
}

/// Spoils one round of the plans and expects a violation.
macro_rules! mutated {
    ($name:ident, $case:expr, $at:expr, |$round:ident| $change:expr, $violation:pat $(if $guard:expr)?) => {
        #[test]
        fn $name() {
            let mut case = $case;
            case.check().expect("the plans are correct before they are mutated");
            let $round = case.round($at);
            $change;
            let violation = case.violation();
            assert!(matches!(violation, $violation $(if $guard)?), "{violation}: {violation:?}");
        }
    };
}

/// Spoils the round in which a member's first step of some sort stands, and expects a violation.
macro_rules! mutated_step {
    ($name:ident, $case:expr, $member:expr, $step:pat, |$round:ident, $index:ident| $change:expr, $violation:pat $(if $guard:expr)?) => {
        #[test]
        fn $name() {
            let mut case = $case;
            case.check().expect("the plans are correct before they are mutated");
            let (place, $index) = case.step($member, |step| matches!(step, $step));
            let $round = case.round(place);
            $change;
            let violation = case.violation();
            assert!(matches!(violation, $violation $(if $guard)?), "{violation}: {violation:?}");
        }
    };
}

pub(crate) use {mutated, mutated_step};
