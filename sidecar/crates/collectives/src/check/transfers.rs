//! The form of plans: what exists, what matches, and what the closed form says.

use std::collections::BTreeMap;

use ronde_wire::{Member, limits};

use super::{At, Bucket, Violation};
use crate::algorithms::Predicted;
use crate::plan::{Plan, REGISTERS_MAX, Register, Round, Span, Step, Transfer, WorkKind};

/// Strands, lanes and windows are equal; every span, register and peer exists.
pub(super) fn check_shape(bucket: &Bucket<'_>) -> Result<(), Violation> {
    let first = &bucket.plans[0];
    for (member, plan) in bucket.members() {
        if plan.window != usize::from(bucket.tuning.window) || plan.window > limits::WINDOW_MAX {
            return Err(Violation::Window { member, window: plan.window });
        }
        if plan.strands.len() != first.strands.len() {
            return Err(Violation::StrandsDiffer { member, strand: plan.strands.len().min(first.strands.len()) });
        }
        for (index, (strand, reference)) in plan.strands.iter().zip(&first.strands).enumerate() {
            if strand.lane != reference.lane || strand.lane.0 >= bucket.tuning.lanes {
                return Err(Violation::StrandsDiffer { member, strand: index });
            }
            for (round, content) in strand.rounds.iter().enumerate() {
                check_round(bucket, At { member, strand: index, round }, content)?;
            }
        }
    }
    Ok(())
}

fn check_round(bucket: &Bucket<'_>, at: At, round: &Round) -> Result<(), Violation> {
    let reduces = bucket.work.kind == WorkKind::AllReduce;
    for step in &round.steps {
        let (registers, span) = operands(step);
        registers.into_iter().try_for_each(|register| check_register(at, register))?;
        check_span(bucket, at, span)?;
        match step {
            Step::Reduce { .. } | Step::Finish { .. } if !reduces => return Err(Violation::NothingToReduce { at }),
            Step::Reduce { left, right, into, .. } if into != left && into != right => {
                return Err(Violation::Target { at });
            }
            _ => {}
        }
    }
    let mut sends = Vec::new();
    let mut receives = Vec::new();
    for transfer in &round.transfers {
        let (peers, peer, register, span) = match *transfer {
            Transfer::Send { to, from, span, .. } => (&mut sends, to, from, span),
            Transfer::Receive { from, into, span, .. } => (&mut receives, from, into, span),
        };
        check_register(at, register)?;
        check_span(bucket, at, span)?;
        if peer == at.member || peer.index() >= bucket.plans.len() || peers.contains(&peer) {
            return Err(Violation::Peer { at, peer });
        }
        peers.push(peer);
    }
    check_clashes(at, round)
}

fn operands(step: &Step) -> ([Register; 3], Span) {
    match *step {
        Step::Contribute { into, span } | Step::ContributeEach { into, span } | Step::MeasureOwn { into, span } => {
            ([into; 3], span)
        }
        Step::Reduce { left, right, into, span } => ([left, right, into], span),
        Step::ReduceN { first, into, span } | Step::MeasureAll { first, into, span } => ([first, into, into], span),
        Step::Finish { register, span } | Step::Encode { register, span } | Step::Decode { register, span } => {
            ([register; 3], span)
        }
        Step::Conclude { first } => ([first; 3], Span { start: 0, len: 0 }),
        Step::Publish { from, span } => ([from; 3], span),
    }
}

fn check_register(at: At, register: Register) -> Result<(), Violation> {
    if register.0 < REGISTERS_MAX { Ok(()) } else { Err(Violation::NoRegister { at, register }) }
}

fn check_span(bucket: &Bucket<'_>, at: At, span: Span) -> Result<(), Violation> {
    let chunk = u64::from(bucket.tuning.chunk_bytes / bucket.work.element_bytes);
    let inside = span.start.checked_add(span.len).is_some_and(|end| end <= bucket.plans[0].layout.elements);
    if span.len <= chunk && inside { Ok(()) } else { Err(Violation::Span { at, span }) }
}

fn check_clashes(at: At, round: &Round) -> Result<(), Violation> {
    let register = |transfer: &Transfer| match *transfer {
        Transfer::Send { from, .. } => from,
        Transfer::Receive { into, .. } => into,
    };
    for (index, transfer) in round.transfers.iter().enumerate() {
        let Transfer::Receive { into, .. } = *transfer else { continue };
        let mut others = round.transfers.iter().enumerate().filter(|(other, _)| *other != index);
        if others.any(|(_, other)| register(other) == into) {
            return Err(Violation::Clash { at, register: into });
        }
    }
    Ok(())
}

/// Every send has its receive, in the same strand and round, with the same span.
pub(super) fn check_matching(bucket: &Bucket<'_>) -> Result<(), Violation> {
    for strand in 0..bucket.strands() {
        for round in 0..bucket.rounds(strand) {
            check_round_matching(bucket, strand, round)?;
        }
    }
    Ok(())
}

fn check_round_matching(bucket: &Bucket<'_>, strand: usize, round: usize) -> Result<(), Violation> {
    let mut expected: BTreeMap<(Member, Member), Span> = BTreeMap::new();
    for (member, transfer) in transfers(bucket, strand, round) {
        if let Transfer::Receive { from, span, .. } = *transfer {
            expected.insert((from, member), span);
        }
    }
    for (member, transfer) in transfers(bucket, strand, round) {
        let Transfer::Send { to, span: sent, .. } = *transfer else { continue };
        let at = At { member, strand, round };
        match expected.remove(&(member, to)) {
            None => return Err(Violation::UnmatchedSend { at, to }),
            Some(expected) if expected != sent => return Err(Violation::SpansDiffer { at, to, sent, expected }),
            Some(_) => {}
        }
    }
    match expected.into_keys().next() {
        Some((from, member)) => Err(Violation::UnmatchedReceive { at: At { member, strand, round }, from }),
        None => Ok(()),
    }
}

fn transfers<'a>(bucket: &'a Bucket<'_>, strand: usize, round: usize) -> impl Iterator<Item = (Member, &'a Transfer)> {
    bucket.members().flat_map(move |(member, plan)| {
        let content = plan.strands[strand].rounds.get(round);
        content.into_iter().flat_map(move |content| content.transfers.iter().map(move |transfer| (member, transfer)))
    })
}

/// Rounds, strands, bytes sent and bytes reduced are those of the algorithm's closed form.
pub(super) fn check_closed_form(bucket: &Bucket<'_>, form: &Predicted) -> Result<(u32, Vec<u64>), Violation> {
    let element_bytes = u64::from(bucket.work.element_bytes);
    let chunk_elements = u64::from(bucket.tuning.chunk_bytes) / element_bytes;
    let mut rounds_most = 0;
    let mut sent_bytes = Vec::new();
    for (member, plan) in bucket.members() {
        let equal = |what, found: u64, predicted: u64| {
            if found == predicted { Ok(()) } else { Err(Violation::ClosedForm { what, member, found, predicted }) }
        };
        let counted = Counted::of(plan);
        rounds_most = rounds_most.max(counted.rounds);
        sent_bytes.push(counted.sent * element_bytes);
        equal("strands", plan.strands.len() as u64, form.strands(chunk_elements))?;
        equal("bytes sent", counted.sent * element_bytes, form.sent_bytes[member.index()])?;
        equal("bytes reduced", counted.reduced * element_bytes, form.reduced_bytes[member.index()])?;
    }
    let (found, predicted) = (rounds_most as u64, u64::from(form.rounds));
    if found != predicted {
        return Err(Violation::ClosedForm { what: "rounds", member: Member(0), found, predicted });
    }
    Ok((form.rounds, sent_bytes))
}

/// What a plan does, counted.
#[derive(Default)]
struct Counted {
    rounds: usize,
    sent: u64,
    reduced: u64,
}

impl Counted {
    fn of(plan: &Plan) -> Self {
        let mut counted = Self::default();
        for (index, round) in plan.strands.iter().flat_map(|strand| strand.rounds.iter().enumerate()) {
            if !round.transfers.is_empty() {
                counted.rounds = counted.rounds.max(index + 1);
            }
            for transfer in &round.transfers {
                if let Transfer::Send { span, .. } = transfer {
                    counted.sent += span.len;
                }
            }
            for step in &round.steps {
                if let Step::Reduce { span, .. } = step {
                    counted.reduced += span.len;
                }
            }
        }
        counted
    }
}
