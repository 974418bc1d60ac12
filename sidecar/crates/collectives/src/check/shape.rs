//! Checks the shape of plans: existence and bounds of spans, registers and peers, and which steps are allowed where.

use std::collections::BTreeSet;

use ronde_wire::{Member, limits};

use super::{Bucket, PlanPosition, Violation};
use crate::plan::{Form, Plan, REGISTERS_MAX, Register, Round, Span, Step, Transfer, WorkKind};

/// Checks that sub-schedules, lanes and windows are equal, and that every span, register and peer exists.
pub(super) fn check(bucket: &Bucket<'_>) -> Result<(), Violation> {
    let first = &bucket.plans[0];
    for (member, plan) in bucket.members() {
        if plan.window != usize::from(bucket.tuning.window) || plan.window > limits::WINDOW_MAX {
            return Err(Violation::Window { member, window: plan.window });
        }
        if plan.sub_schedules.len() != first.sub_schedules.len() {
            return Err(Violation::SubSchedulesDiffer {
                member,
                sub_schedule: plan.sub_schedules.len().min(first.sub_schedules.len()),
            });
        }
        check_prelude(bucket, member, plan)?;
        for (index, (sub_schedule, reference)) in plan.sub_schedules.iter().zip(&first.sub_schedules).enumerate() {
            if sub_schedule.lane != reference.lane || sub_schedule.lane.0 >= bucket.tuning.lanes {
                return Err(Violation::SubSchedulesDiffer { member, sub_schedule: index });
            }
            for (round, content) in sub_schedule.rounds.iter().enumerate() {
                check_round(bucket, PlanPosition { member, sub_schedule: index, round }, content)?;
            }
        }
    }
    Ok(())
}

/// Checks that there is a prelude if and only if the work measures, on the lane of all sub-schedules, and that its last step
/// concludes.
fn check_prelude(bucket: &Bucket<'_>, member: Member, plan: &Plan) -> Result<(), Violation> {
    if plan.prelude != (bucket.work.kind.measures() && plan.layout.elements > 0) {
        return Err(Violation::PreludeMissing { member });
    }
    if !plan.prelude {
        return Ok(());
    }
    let Some(prelude) = plan.sub_schedules.first() else { return Err(Violation::PreludeMissing { member }) };
    if let Some(sub_schedule) = plan.sub_schedules.iter().position(|sub_schedule| sub_schedule.lane != prelude.lane) {
        return Err(Violation::SubSchedulesDiffer { member, sub_schedule });
    }
    let steps = prelude.rounds.iter().flat_map(|round| &round.steps);
    let concluded = steps.clone().position(|step| matches!(step, Step::Conclude { .. }));
    if concluded.is_some_and(|index| index + 1 != steps.count()) {
        let at = PlanPosition { member, sub_schedule: 0, round: prelude.rounds.len().saturating_sub(1) };
        return Err(Violation::Prelude { at, step: "conclude" });
    }
    Ok(())
}

fn check_round(bucket: &Bucket<'_>, at: PlanPosition, round: &Round) -> Result<(), Violation> {
    for step in &round.steps {
        check_step(bucket, at, step)?;
    }
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for transfer in &round.transfers {
        let (peers, peer, register, span, form, source) = match *transfer {
            Transfer::Send { to, from, span, form } => (&mut sends, to, from, span, form, at.member),
            Transfer::Receive { from, into, span, form } => (&mut receives, from, into, span, form, from),
        };
        check_register(at, register)?;
        if peer == at.member || peer.index() >= bucket.plans.len() || peers.contains(&peer) {
            return Err(Violation::Peer { at, peer });
        }
        check_span(bucket, at, span, form, source)?;
        peers.push(peer);
    }
    check_clashes(at, round)
}

fn check_step(bucket: &Bucket<'_>, at: PlanPosition, step: &Step) -> Result<(), Violation> {
    let kind = &bucket.work.kind;
    let Described { name, registers, span, form, needs, measures } = Described::of(step);
    registers.into_iter().try_for_each(|register| check_register(at, register))?;
    match form {
        Some(form) => check_span(bucket, at, span, form, at.member)?,
        None => check_inside(bucket, at, span)?,
    }
    let allowed = match needs {
        Needs::Nothing => true,
        Needs::Contributions => !kind.is_nary(),
        Needs::Pairs => kind.reduces() && !kind.is_nary(),
        Needs::Reduction => kind.reduces(),
        Needs::AllRanks => kind.is_nary(),
        Needs::Codec => bucket.is_coded(),
        Needs::OwnMeasures => matches!(kind, WorkKind::AllReduceTwoPass { .. }),
        Needs::CommonMeasures => matches!(kind, WorkKind::AllReduceAdaptive),
        Needs::Measures => kind.measures(),
    };
    if !allowed {
        return Err(Violation::Step { at, step: name, kind: kind.name() });
    }
    let in_prelude = at.sub_schedule == 0 && bucket.plans[at.member.index()].prelude;
    if measures.is_some_and(|measures| measures != in_prelude) {
        return Err(Violation::Prelude { at, step: name });
    }
    match step {
        Step::Reduce { left, right, into, .. } if into != left && into != right => Err(Violation::Target { at }),
        _ => Ok(()),
    }
}

/// What a step requires of the work.
enum Needs {
    Nothing,
    Contributions,
    Pairs,
    Reduction,
    AllRanks,
    Codec,
    OwnMeasures,
    CommonMeasures,
    Measures,
}

/// The properties of a step that the common checks use.
struct Described {
    name: &'static str,
    registers: [Register; 2],
    span: Span,
    /// The representation that it stores in a register of the span's length.
    form: Option<Form>,
    needs: Needs,
    /// Whether it is allowed in preludes only, or never; `None` if everywhere.
    measures: Option<bool>,
}

impl Described {
    fn of(step: &Step) -> Self {
        let described =
            |name, registers, span, form, needs, measures| Self { name, registers, span, form, needs, measures };
        let (values, each, rest) = (Some(Form::Values), Some(Form::EachRank), Some(false));
        match *step {
            Step::Contribute { into, span } => {
                described("contribute", [into; 2], span, values, Needs::Contributions, rest)
            }
            Step::ContributeEach { into, span } => {
                described("contribute each", [into; 2], span, each, Needs::AllRanks, None)
            }
            Step::Reduce { left, right, span, .. } => {
                described("reduce", [left, right], span, values, Needs::Pairs, rest)
            }
            Step::ReduceN { first, into, span } => {
                described("reduce all", [first, into], span, values, Needs::AllRanks, rest)
            }
            Step::Finish { register, span } => described("finish", [register; 2], span, values, Needs::Reduction, rest),
            Step::Encode { register, span } => described("encode", [register; 2], span, values, Needs::Codec, rest),
            Step::Decode { register, span } => described("decode", [register; 2], span, values, Needs::Codec, rest),
            Step::MeasureOwn { into, span } => {
                described("measure own", [into; 2], span, None, Needs::OwnMeasures, Some(true))
            }
            Step::MeasureAll { first, into, span } => {
                described("measure all", [first, into], span, None, Needs::CommonMeasures, Some(true))
            }
            Step::Conclude { first } => {
                let nothing = Span { start: 0, len: 0 };
                described("conclude", [first; 2], nothing, None, Needs::Measures, Some(true))
            }
            Step::Publish { from, span } => described("publish", [from; 2], span, values, Needs::Nothing, rest),
        }
    }
}

fn check_register(at: PlanPosition, register: Register) -> Result<(), Violation> {
    if register.0 < REGISTERS_MAX { Ok(()) } else { Err(Violation::NoRegister { at, register }) }
}

/// Checks that a span is within the bucket and fits a chunk. A prelude's chunks do not depend on the tuning.
fn check_span(bucket: &Bucket<'_>, at: PlanPosition, span: Span, form: Form, source: Member) -> Result<(), Violation> {
    if form == Form::Measures {
        let expected = Span { start: 0, len: bucket.measures_of(source) };
        let fits = bucket.bytes(source, span, form) <= limits::CHUNK_BYTES_MAX as u64;
        return if span == expected && fits { Ok(()) } else { Err(Violation::Span { at, span }) };
    }
    check_inside(bucket, at, span)?;
    let in_prelude = at.sub_schedule == 0 && bucket.plans[at.member.index()].prelude;
    let chunk = if in_prelude { limits::CHUNK_BYTES_MAX as u64 } else { u64::from(bucket.tuning.chunk_bytes) };
    let fits = span.len <= 1 || bucket.bytes(source, span, form) <= chunk;
    if fits { Ok(()) } else { Err(Violation::Span { at, span }) }
}

fn check_inside(bucket: &Bucket<'_>, at: PlanPosition, span: Span) -> Result<(), Violation> {
    let inside = span.start.checked_add(span.len).is_some_and(|end| end <= bucket.plans[0].layout.elements);
    if inside { Ok(()) } else { Err(Violation::Span { at, span }) }
}

fn check_clashes(at: PlanPosition, round: &Round) -> Result<(), Violation> {
    for (index, transfer) in round.transfers.iter().enumerate() {
        let Transfer::Receive { into, .. } = *transfer else { continue };
        let mut others = round.transfers.iter().enumerate().filter(|(other, _)| *other != index);
        if others.any(|(_, other)| register(other) == into) {
            return Err(Violation::Clash { at, register: into });
        }
    }
    Ok(())
}

fn register(transfer: &Transfer) -> Register {
    match *transfer {
        Transfer::Send { from, .. } => from,
        Transfer::Receive { into, .. } => into,
    }
}

/// Checks that a sub-schedule names at most two registers more than the chunks that it holds for its peers.
pub(super) fn check_register_count(member: Member, plan: &Plan, held_chunks: u64) -> Result<(), Violation> {
    let allowed = held_chunks + 2;
    for (index, sub_schedule) in plan.sub_schedules.iter().enumerate() {
        let mut named = BTreeSet::new();
        for round in &sub_schedule.rounds {
            named.extend(round.steps.iter().flat_map(|step| Described::of(step).registers));
            named.extend(round.transfers.iter().map(register));
        }
        let found = named.len() as u64;
        if found > allowed {
            return Err(Violation::Registers { member, sub_schedule: index, found, allowed });
        }
    }
    Ok(())
}
