//! Runs all members' plans together, round by round, on expressions instead of numbers.

use ronde_wire::Member;

use super::expression::{Expression, Expressions, Refused};
use super::{At, Bucket, Run, Violation};
use crate::plan::{REGISTERS_MAX, Register, Round, Source, Span, Step, Transfer, WorkKind};

pub(super) fn check(bucket: &Bucket<'_>) -> Result<(Vec<Run>, Expressions), Violation> {
    let mut run = Execution::new(bucket);
    for strand in 0..bucket.strands() {
        run.strand(strand)?;
    }
    run.check_outputs()?;
    Ok((run.results(), run.expressions))
}

struct Execution<'a> {
    bucket: Bucket<'a>,
    expressions: Expressions,
    /// All borders of spans, ascending: interval `i` is `borders[i]..borders[i + 1]`.
    borders: Vec<u64>,
    /// What each interval's input is, by member.
    contributions: Vec<Vec<Option<Expression>>>,
    /// What each member has published, by interval.
    outputs: Vec<Vec<Option<Expression>>>,
    /// For each member the members of whose arrival it has heard.
    heard: Vec<Vec<bool>>,
}

/// What a register holds: a value for each interval of the span.
#[derive(Clone)]
struct Held {
    span: Span,
    values: Vec<Expression>,
    read: bool,
}

type Registers = Vec<Option<Held>>;

impl<'a> Execution<'a> {
    fn new(bucket: &Bucket<'a>) -> Self {
        let borders = borders(bucket);
        let intervals = borders.len().saturating_sub(1);
        let members = bucket.plans.len();
        let mut run = Self {
            bucket: *bucket,
            expressions: Expressions::new(bucket.topology),
            borders,
            contributions: Vec::new(),
            outputs: vec![vec![None; intervals]; members],
            heard: (0..members).map(|me| (0..members).map(|other| me == other).collect()).collect(),
        };
        run.contributions = (0..).map(Member).take(members).map(|member| run.contributions_of(member)).collect();
        run
    }

    /// What a member contributes to each interval; `None` where the source is not local.
    fn contributions_of(&mut self, member: Member) -> Vec<Option<Expression>> {
        let ranks = self.bucket.ranks_of(member);
        let whole = self.expressions.contribution(ranks, member);
        let mut values = Vec::new();
        for slice in &self.bucket.plans[0].layout.slices {
            let value = match slice.source {
                Source::EveryRank => Some(whole),
                Source::One(rank) if ranks.contains(&rank) => Some(self.expressions.rank(rank, member)),
                Source::One(_) => None,
            };
            let intervals = self.intervals(slice.span);
            values.resize(intervals.end, value);
        }
        values
    }

    fn intervals(&self, span: Span) -> std::ops::Range<usize> {
        let at = |border: u64| self.borders.partition_point(|other| *other < border);
        at(span.start)..at(span.end())
    }

    fn strand(&mut self, strand: usize) -> Result<(), Violation> {
        let mut registers: Vec<Registers> =
            self.bucket.plans.iter().map(|_| vec![None; usize::from(REGISTERS_MAX)]).collect();
        let plans = self.bucket.plans;
        let rounds = self.bucket.rounds(strand);
        let content = |member: Member, round: usize| plans[member.index()].strands[strand].rounds.get(round);
        for round in 0..rounds {
            for (member, own) in (0..).map(Member).zip(&mut registers) {
                let at = At { member, strand, round };
                for step in content(member, round).map_or(&[][..], |content| &content.steps) {
                    self.step(at, own, step)?;
                }
            }
            self.transfers(strand, round, &mut registers)?;
        }
        for (member, own) in (0..).map(Member).zip(&registers) {
            for (register, held) in (0..).map(Register).zip(own) {
                check_read(At { member, strand, round: rounds }, register, held.as_ref())?;
            }
        }
        Ok(())
    }

    fn step(&mut self, at: At, registers: &mut Registers, step: &Step) -> Result<(), Violation> {
        match *step {
            Step::Contribute { into, span } => {
                let values = self.contribute(at, span)?;
                write(at, registers, into, Held { span, values, read: false })
            }
            Step::Reduce { left, right, into, span } => {
                let a = read(at, registers, left, span)?;
                let b = read(at, registers, right, span)?;
                let reduced = a.iter().zip(&b).map(|(a, b)| self.expressions.reduce(*a, *b));
                let values = reduced.collect::<Result<_, _>>().map_err(|refused| refusal(at, refused))?;
                write(at, registers, into, Held { span, values, read: false })
            }
            Step::Finish { register, span } => {
                let values = read(at, registers, register, span)?;
                let finished = values.iter().map(|value| self.expressions.finish(*value));
                let values = finished.collect::<Result<_, _>>().map_err(|refused| refusal(at, refused))?;
                write(at, registers, register, Held { span, values, read: false })
            }
            Step::Publish { from, span } => {
                let values = read(at, registers, from, span)?;
                self.publish(at, span, &values)
            }
            Step::ContributeEach { span, .. }
            | Step::ReduceN { span, .. }
            | Step::Encode { span, .. }
            | Step::Decode { span, .. }
            | Step::MeasureOwn { span, .. }
            | Step::MeasureAll { span, .. } => Err(Violation::Span { at, span }),
            Step::Conclude { .. } => Err(Violation::Span { at, span: Span { start: 0, len: 0 } }),
        }
    }

    fn contribute(&self, at: At, span: Span) -> Result<Vec<Expression>, Violation> {
        let own = &self.contributions[at.member.index()];
        let value = |interval: usize| {
            own[interval].ok_or_else(|| {
                let start = self.borders[interval];
                let slice = self.bucket.plans[0].layout.within(Span { start, len: 1 }).next();
                match slice.map(|slice| slice.source) {
                    Some(Source::One(rank)) => Violation::NotLocal { at, rank },
                    _ => Violation::Span { at, span },
                }
            })
        };
        self.intervals(span).map(value).collect()
    }

    fn publish(&mut self, at: At, span: Span, values: &[Expression]) -> Result<(), Violation> {
        let reduces = self.bucket.work.kind == WorkKind::AllReduce;
        for (interval, value) in self.intervals(span).zip(values) {
            if reduces {
                self.expressions.complete(*value).map_err(|refused| refusal(at, refused))?;
                if !self.expressions.is_finished(*value) {
                    return Err(Violation::Unfinished { at });
                }
            }
            let element = self.borders[interval];
            let output = &mut self.outputs[at.member.index()][interval];
            if output.replace(*value).is_some() {
                return Err(Violation::PublishedTwice { at, element });
            }
        }
        Ok(())
    }

    /// Everything that is sent in a round, then everything that is received.
    fn transfers(&mut self, strand: usize, round: usize, registers: &mut [Registers]) -> Result<(), Violation> {
        let plans = self.bucket.plans;
        let before = self.heard.clone();
        let content = |member: usize| plans[member].strands[strand].rounds.get(round);
        let mut moved = Vec::new();
        for (member, own) in (0..).map(Member).zip(registers.iter_mut()) {
            let at = At { member, strand, round };
            for transfer in content(member.index()).map_or(&[][..], |content| &content.transfers) {
                if let Transfer::Send { to, from, span, .. } = *transfer {
                    moved.push((member, to, span, read(at, own, from, span)?));
                }
            }
        }
        for (from, to, span, values) in moved {
            let at = At { member: to, strand, round };
            let into = content(to.index()).and_then(|content| receiving_register(content, from));
            let Some(into) = into else { return Err(Violation::UnmatchedReceive { at, from }) };
            write(at, &mut registers[to.index()], into, Held { span, values, read: false })?;
            let news = self.heard[to.index()].iter_mut().zip(&before[from.index()]);
            news.for_each(|(heard, told)| *heard |= told);
        }
        Ok(())
    }

    fn check_outputs(&self) -> Result<(), Violation> {
        for (member, outputs) in (0..).map(Member).zip(&self.outputs) {
            for (interval, output) in outputs.iter().enumerate() {
                let element = self.borders[interval];
                if output.is_none() {
                    return Err(Violation::NotPublished { member, element });
                }
                if *output != self.expected(interval) {
                    return Err(Violation::ResultsDiffer { member, element });
                }
            }
        }
        let passes = self.bucket.work.kind == WorkKind::Barrier;
        for (member, heard) in (0..).map(Member).zip(&self.heard) {
            if let Some(other) = heard.iter().position(|heard| !heard).filter(|_| passes) {
                let other = Member(u32::try_from(other).unwrap_or(u32::MAX));
                return Err(Violation::NotAwaited { member, other });
            }
        }
        Ok(())
    }

    /// Member 0's result where all ranks contribute, the one input otherwise.
    fn expected(&self, interval: usize) -> Option<Expression> {
        if self.bucket.work.kind == WorkKind::AllReduce {
            return self.outputs[0][interval];
        }
        self.contributions.iter().find_map(|own| own[interval])
    }

    fn results(&self) -> Vec<Run> {
        let layout = &self.bucket.plans[0].layout;
        let mut runs = Vec::new();
        for (interval, border) in self.borders.windows(2).enumerate() {
            let span = Span { start: border[0], len: border[1] - border[0] };
            for slice in layout.within(span) {
                let output = Span { start: slice.output_start, len: slice.span.len };
                let value = self.outputs[0][interval].expect("check_outputs found every element published");
                runs.push(Run { tensor: slice.tensor, output, value });
            }
        }
        runs
    }
}

fn receiving_register(round: &Round, peer: Member) -> Option<Register> {
    round.transfers.iter().find_map(|transfer| match *transfer {
        Transfer::Receive { from, into, .. } if from == peer => Some(into),
        _ => None,
    })
}

fn read(at: At, registers: &mut Registers, register: Register, span: Span) -> Result<Vec<Expression>, Violation> {
    match &mut registers[usize::from(register.0)] {
        Some(held) if held.span == span => {
            held.read = true;
            Ok(held.values.clone())
        }
        _ => Err(Violation::Stale { at, register, span }),
    }
}

fn write(at: At, registers: &mut Registers, register: Register, held: Held) -> Result<(), Violation> {
    let place = &mut registers[usize::from(register.0)];
    check_read(at, register, place.as_ref())?;
    *place = Some(held);
    Ok(())
}

/// A value that nobody reads is a sign of a wrong register; a barrier's tokens have no value.
fn check_read(at: At, register: Register, held: Option<&Held>) -> Result<(), Violation> {
    match held {
        Some(held) if !held.read && !held.span.is_empty() => Err(Violation::Unread { at, register }),
        _ => Ok(()),
    }
}

fn refusal(at: At, refused: Refused) -> Violation {
    match refused {
        Refused::Twice(rank) => Violation::CountedTwice { at, rank },
        Refused::Order => Violation::OperandOrder { at },
        Refused::Finished => Violation::FinishedBefore { at },
        Refused::Missing(rank) => Violation::Missing { at, rank },
    }
}

fn borders(bucket: &Bucket<'_>) -> Vec<u64> {
    let mut borders = vec![0, bucket.plans[0].layout.elements];
    let mut add = |span: Span| borders.extend([span.start, span.end()]);
    bucket.plans[0].layout.slices.iter().for_each(|slice| add(slice.span));
    for round in bucket.plans.iter().flat_map(|plan| &plan.strands).flat_map(|strand| &strand.rounds) {
        for step in &round.steps {
            match *step {
                Step::Contribute { span, .. }
                | Step::Reduce { span, .. }
                | Step::Finish { span, .. }
                | Step::Publish { span, .. }
                | Step::ContributeEach { span, .. }
                | Step::ReduceN { span, .. }
                | Step::Encode { span, .. }
                | Step::Decode { span, .. }
                | Step::MeasureOwn { span, .. }
                | Step::MeasureAll { span, .. } => add(span),
                Step::Conclude { .. } => {}
            }
        }
        for transfer in &round.transfers {
            match *transfer {
                Transfer::Send { span, .. } | Transfer::Receive { span, .. } => add(span),
            }
        }
    }
    borders.sort_unstable();
    borders.dedup();
    borders
}
