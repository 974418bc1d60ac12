//! Checks that sends match receives, and that traffic equals the closed form.

use std::collections::BTreeMap;

use ronde_wire::Member;

use super::{Bucket, PlanPosition, Violation, shape};
use crate::algorithms::Predicted;
use crate::plan::{Form, Span, Step, Transfer};

/// Checks that every send has its receive in the same sub-schedule and round, with the same span.
pub(super) fn check_matching(bucket: &Bucket<'_>) -> Result<(), Violation> {
    for sub_schedule in 0..bucket.sub_schedules() {
        for round in 0..bucket.rounds(sub_schedule) {
            check_round_matching(bucket, sub_schedule, round)?;
        }
    }
    Ok(())
}

fn check_round_matching(bucket: &Bucket<'_>, sub_schedule: usize, round: usize) -> Result<(), Violation> {
    let mut expected: BTreeMap<(Member, Member), (Span, Form)> = BTreeMap::new();
    for (member, transfer) in transfers(bucket, sub_schedule, round) {
        if let Transfer::Receive { from, span, form, .. } = *transfer {
            expected.insert((from, member), (span, form));
        }
    }
    for (member, transfer) in transfers(bucket, sub_schedule, round) {
        let Transfer::Send { to, span: sent, form, .. } = *transfer else { continue };
        let at = PlanPosition { member, sub_schedule, round };
        match expected.remove(&(member, to)) {
            None => return Err(Violation::UnmatchedSend { at, to }),
            Some((expected, _)) if expected != sent => return Err(Violation::SpansDiffer { at, to, sent, expected }),
            Some((_, expected)) if expected != form => {
                return Err(Violation::FormsDiffer { at, to, sent: form, expected });
            }
            Some(_) => {}
        }
    }
    match expected.into_keys().next() {
        Some((from, member)) => {
            Err(Violation::UnmatchedReceive { at: PlanPosition { member, sub_schedule, round }, from })
        }
        None => Ok(()),
    }
}

fn transfers<'a>(
    bucket: &'a Bucket<'_>,
    sub_schedule: usize,
    round: usize,
) -> impl Iterator<Item = (Member, &'a Transfer)> {
    bucket.members().flat_map(move |(member, plan)| {
        let content = plan.sub_schedules[sub_schedule].rounds.get(round);
        content.into_iter().flat_map(move |content| content.transfers.iter().map(move |transfer| (member, transfer)))
    })
}

/// Checks rounds, sub-schedules, registers, bytes sent and bytes reduced against the algorithm's closed form.
pub(super) fn check_closed_form(bucket: &Bucket<'_>, form: &Predicted) -> Result<(), Violation> {
    let chunk_elements = u64::from(bucket.tuning.chunk_bytes / bucket.work.element_bytes);
    for (member, plan) in bucket.members() {
        let equal = |what, found: u64, predicted: u64| {
            if found == predicted { Ok(()) } else { Err(Violation::ClosedForm { what, member, found, predicted }) }
        };
        let counted = Counted::of(bucket, member);
        equal("sub-schedules", plan.sub_schedules.len() as u64, form.sub_schedules(chunk_elements))?;
        equal("bytes sent", counted.sent, form.sent_bytes[member.index()])?;
        equal("bytes reduced", counted.reduced, form.reduced_bytes[member.index()])?;
        shape::check_register_count(member, plan, u64::from(form.held_chunks))?;
    }
    let longest = (0..bucket.sub_schedules()).map(|sub_schedule| rounds_of(bucket, sub_schedule)).max().unwrap_or(0);
    let (found, predicted) = (longest as u64, u64::from(form.rounds));
    if found != predicted {
        return Err(Violation::ClosedForm { what: "rounds", member: Member(0), found, predicted });
    }
    Ok(())
}

/// The rounds of a sub-schedule up to the last one with transfers. A prelude counts from its first one with transfers on,
/// because local measuring costs no round trip.
fn rounds_of(bucket: &Bucket<'_>, sub_schedule: usize) -> usize {
    let mut used =
        (0..bucket.rounds(sub_schedule)).filter(|round| transfers(bucket, sub_schedule, *round).next().is_some());
    let first = used.next();
    let last = used.next_back().or(first);
    let skipped = if bucket.plans[0].prelude && sub_schedule == 0 { first.unwrap_or(0) } else { 0 };
    last.map_or(0, |last| last + 1 - skipped)
}

/// The bytes that a plan sends and reduces.
#[derive(Default)]
struct Counted {
    sent: u64,
    reduced: u64,
}

impl Counted {
    fn of(bucket: &Bucket<'_>, member: Member) -> Self {
        let mut counted = Self::default();
        let sub_schedules = &bucket.plans[member.index()].sub_schedules;
        let ranks = bucket.topology.size() as u64;
        for round in sub_schedules.iter().flat_map(|sub_schedule| &sub_schedule.rounds) {
            for transfer in &round.transfers {
                if let Transfer::Send { span, form, .. } = *transfer {
                    counted.sent += bucket.bytes(member, span, form);
                }
            }
            for step in &round.steps {
                counted.reduced += match *step {
                    Step::Reduce { span, .. } => bucket.bytes(member, span, Form::Values),
                    Step::ReduceN { span, .. } => bucket.bytes(member, span, Form::Values) * ranks,
                    _ => 0,
                };
            }
        }
        counted
    }
}
