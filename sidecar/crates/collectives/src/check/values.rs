//! Runs all members' plans together, round by round, on expressions instead of numbers.

use ronde_wire::Member;

use super::expression::{CombineError, Expression, Expressions};
use super::registers::{Content, Measured, Registers};
use super::{Bucket, PlanPosition, Run, Violation};
use crate::plan::{Form, Register, Round, Slice, Source, Span, Step, Target, Transfer, WorkKind};

/// The results of all members' plans.
pub(super) struct Computed {
    pub(super) results: Vec<Run>,
    pub(super) expressions: Expressions,
    /// By member, the spans that it measures in a prelude, in order.
    pub(super) measured: Vec<Measured>,
}

pub(super) fn check(bucket: &Bucket<'_>) -> Result<Computed, Violation> {
    let mut run = Execution::new(bucket);
    for sub_schedule in 0..bucket.sub_schedules() {
        run.sub_schedule(sub_schedule)?;
    }
    run.check_outputs()?;
    run.check_encoded()?;
    run.check_concluded()?;
    Ok(Computed { results: run.results(), expressions: run.expressions, measured: run.measured })
}

pub(super) struct Execution<'a> {
    pub(super) bucket: Bucket<'a>,
    pub(super) expressions: Expressions,
    /// All borders of spans, ascending: interval `i` is `borders[i]..borders[i + 1]`.
    pub(super) borders: Vec<u64>,
    /// The slice of each interval.
    slices: Vec<Slice>,
    /// Each member's contribution.
    pub(super) whole: Vec<Expression>,
    /// Each interval's input, by member.
    contributions: Vec<Vec<Option<Expression>>>,
    /// Each member's published values, by interval.
    outputs: Vec<Vec<Option<Expression>>>,
    /// For each member, which members' arrival it knows of.
    arrivals: Vec<Vec<bool>>,
    /// How often each interval was encoded: by each member as a source, then as a result. Empty without a codec.
    pub(super) encoded: Vec<Vec<u32>>,
    /// The members that have concluded, and their measures.
    pub(super) concluded: Vec<bool>,
    pub(super) measured: Vec<Measured>,
}

impl<'a> Execution<'a> {
    fn new(bucket: &Bucket<'a>) -> Self {
        let borders = borders(bucket);
        let intervals = borders.len().saturating_sub(1);
        let members = bucket.plans.len();
        let layout = &bucket.plans[0].layout;
        let slice = |start: &u64| layout.within(Span { start: *start, len: 1 }).next();
        let slices = borders[..intervals].iter().filter_map(slice).collect();
        let stages = if bucket.is_coded() { members + 1 } else { 0 };
        let mut run = Self {
            bucket: *bucket,
            expressions: Expressions::new(bucket.topology),
            borders,
            slices,
            whole: Vec::new(),
            contributions: Vec::new(),
            outputs: vec![vec![None; intervals]; members],
            arrivals: (0..members).map(|me| (0..members).map(|other| me == other).collect()).collect(),
            encoded: vec![vec![0; intervals]; stages],
            concluded: vec![false; members],
            measured: Vec::new(),
        };
        for (member, _) in bucket.members() {
            let whole = run.expressions.contribution(bucket.ranks_of(member), member);
            run.whole.push(whole);
        }
        run.contributions = (0..).map(Member).take(members).map(|member| run.contributions_of(member)).collect();
        run
    }

    /// A member's contribution to each interval; `None` where the source is not local.
    fn contributions_of(&mut self, member: Member) -> Vec<Option<Expression>> {
        let (bucket, whole) = (self.bucket, self.whole[member.index()]);
        let ranks = bucket.ranks_of(member);
        let mut values = Vec::with_capacity(self.slices.len());
        for slice in &self.slices {
            values.push(match slice.source {
                Source::EveryRank => Some(whole),
                Source::One(rank) if ranks.contains(&rank) => Some(self.expressions.rank(rank, member)),
                Source::One(_) => None,
            });
        }
        values
    }

    pub(super) fn intervals(&self, span: Span) -> std::ops::Range<usize> {
        let at = |border: u64| self.borders.partition_point(|other| *other < border);
        at(span.start)..at(span.end())
    }

    fn sub_schedule(&mut self, sub_schedule: usize) -> Result<(), Violation> {
        let mut registers: Vec<Registers> = self.bucket.plans.iter().map(|_| Registers::default()).collect();
        let plans = self.bucket.plans;
        let rounds = self.bucket.rounds(sub_schedule);
        let content =
            |member: Member, round: usize| plans[member.index()].sub_schedules[sub_schedule].rounds.get(round);
        for round in 0..rounds {
            for (member, own) in (0..).map(Member).zip(&mut registers) {
                let at = PlanPosition { member, sub_schedule, round };
                for step in content(member, round).map_or(&[][..], |content| &content.steps) {
                    self.step(at, own, step)?;
                }
            }
            self.transfers(sub_schedule, round, &mut registers)?;
        }
        let end = |member| PlanPosition { member, sub_schedule, round: rounds };
        (0..).map(Member).zip(&registers).try_for_each(|(member, own)| own.check_all_read(end(member)))
    }

    fn step(&mut self, at: PlanPosition, registers: &mut Registers, step: &Step) -> Result<(), Violation> {
        match *step {
            Step::Contribute { into, span } => {
                let values = self.contribute(at, span)?;
                registers.write(at, into, span, Content::Values(values.into()))
            }
            Step::Reduce { left, right, into, span } => {
                let a = registers.values(at, left, span)?;
                let b = registers.values(at, right, span)?;
                let reduced = a.iter().zip(b.iter()).map(|(a, b)| self.expressions.reduce(*a, *b));
                let values = reduced.collect::<Result<_, _>>().map_err(|refused| violation_of(at, refused))?;
                registers.write(at, into, span, Content::Values(values))
            }
            Step::Finish { register, span } => {
                let values = registers.values(at, register, span)?;
                let finished = values.iter().map(|value| self.expressions.finish(*value));
                let values = finished.collect::<Result<_, _>>().map_err(|refused| violation_of(at, refused))?;
                registers.write(at, register, span, Content::Values(values))
            }
            Step::Publish { from, span } => {
                let values = registers.values(at, from, span)?;
                self.publish(at, span, &values)
            }
            Step::ContributeEach { into, span } => self.contribute_each(at, registers, into, span),
            Step::ReduceN { first, into, span } => self.reduce_all(at, registers, (first, into), span),
            Step::Encode { register, span } => self.encode(at, registers, register, span),
            Step::Decode { register, span } => self.decode(at, registers, register, span),
            Step::MeasureOwn { into, span } => self.measure_own(at, registers, into, span),
            Step::MeasureAll { first, into, span } => self.measure_all(at, registers, (first, into), span),
            Step::Conclude { first } => self.conclude(at, registers, first),
        }
    }

    fn contribute(&self, at: PlanPosition, span: Span) -> Result<Vec<Expression>, Violation> {
        let own = &self.contributions[at.member.index()];
        let value = |interval: usize| {
            own[interval].ok_or_else(|| match self.slices[interval].source {
                Source::One(rank) => Violation::NotLocal { at, rank },
                Source::EveryRank => Violation::Span { at, span },
            })
        };
        self.intervals(span).map(value).collect()
    }

    fn publish(&mut self, at: PlanPosition, span: Span, values: &[Expression]) -> Result<(), Violation> {
        for (interval, value) in self.intervals(span).zip(values) {
            if self.bucket.work.kind.reduces() {
                self.expressions.complete(*value).map_err(|refused| violation_of(at, refused))?;
                if !self.expressions.is_finished(*value) {
                    return Err(Violation::Unfinished { at });
                }
            }
            if self.bucket.is_coded() && !self.expressions.is_decoded(*value) {
                return Err(Violation::PublishedPlain { at });
            }
            if let Target::One(rank) = self.slices[interval].target
                && !self.bucket.ranks_of(at.member).contains(&rank)
            {
                return Err(Violation::NotLocal { at, rank });
            }
            let element = self.borders[interval];
            let output = &mut self.outputs[at.member.index()][interval];
            if output.replace(*value).is_some() {
                return Err(Violation::PublishedTwice { at, element });
            }
        }
        Ok(())
    }

    /// Executes all sends of a round, then all receives.
    fn transfers(&mut self, sub_schedule: usize, round: usize, registers: &mut [Registers]) -> Result<(), Violation> {
        let plans = self.bucket.plans;
        let before = self.arrivals.clone();
        let content = |member: usize| plans[member].sub_schedules[sub_schedule].rounds.get(round);
        let mut moved = Vec::new();
        for (member, own) in (0..).map(Member).zip(registers.iter_mut()) {
            let at = PlanPosition { member, sub_schedule, round };
            for transfer in content(member.index()).map_or(&[][..], |content| &content.transfers) {
                if let Transfer::Send { to, from, span, form } = *transfer {
                    if self.bucket.is_coded() && form != Form::Encoded {
                        return Err(Violation::SentPlain { at, to });
                    }
                    moved.push((member, to, span, own.read(at, from, span, form)?));
                }
            }
        }
        for (from, to, span, content_sent) in moved {
            let at = PlanPosition { member: to, sub_schedule, round };
            let into = content(to.index()).and_then(|content| receiving_register(content, from));
            let Some(into) = into else { return Err(Violation::UnmatchedReceive { at, from }) };
            registers[to.index()].write(at, into, span, content_sent)?;
            let news = self.arrivals[to.index()].iter_mut().zip(&before[from.index()]);
            news.for_each(|(arrivals, known)| *arrivals |= known);
        }
        Ok(())
    }

    fn check_outputs(&self) -> Result<(), Violation> {
        for ((member, _), outputs) in self.bucket.members().zip(&self.outputs) {
            for (interval, output) in outputs.iter().enumerate() {
                let element = self.borders[interval];
                if self.holder(interval).is_some_and(|holder| holder != member) {
                    continue;
                }
                let Some(output) = *output else { return Err(Violation::NotPublished { member, element }) };
                if self.expected(interval).is_some_and(|expected| expected != output) {
                    return Err(Violation::ResultsDiffer { member, element });
                }
            }
        }
        let passes = self.bucket.work.kind == WorkKind::Barrier;
        for (member, arrivals) in (0..).map(Member).zip(&self.arrivals) {
            if let Some(other) = arrivals.iter().position(|arrivals| !arrivals).filter(|_| passes) {
                let other = Member(u32::try_from(other).unwrap_or(u32::MAX));
                return Err(Violation::NotAwaited { member, other });
            }
        }
        Ok(())
    }

    /// Checks that all members have concluded, if the work measures.
    fn check_concluded(&self) -> Result<(), Violation> {
        let needed = self.bucket.work.kind.measures() && !self.slices.is_empty();
        let missing = self.concluded.iter().position(|concluded| needed && !concluded);
        let member = missing.and_then(|member| self.bucket.members().nth(member));
        member.map_or(Ok(()), |(member, _)| Err(Violation::NeverConcluded { member }))
    }

    /// The only member that publishes an interval; `None` where all do.
    fn holder(&self, interval: usize) -> Option<Member> {
        match self.slices[interval].target {
            Target::EveryRank => None,
            Target::One(rank) => self.bucket.topology.member_of(rank),
        }
    }

    /// The expected value: member 0's result of a reduction for all members, any complete value of one for one member
    /// (`None`), otherwise the one input.
    fn expected(&self, interval: usize) -> Option<Expression> {
        if !self.bucket.work.kind.reduces() {
            return self.contributions.iter().find_map(|own| own[interval]);
        }
        if self.holder(interval).is_some() { None } else { self.outputs[0][interval] }
    }

    fn results(&self) -> Vec<Run> {
        let mut runs = Vec::new();
        for (interval, (border, slice)) in self.borders.windows(2).zip(&self.slices).enumerate() {
            let output = Span { start: slice.output_start, len: border[1] - border[0] };
            let holder = self.holder(interval).unwrap_or_default();
            let value = self.outputs[holder.index()][interval].expect("check_outputs found every element published");
            runs.push(Run { tensor: slice.tensor, target: slice.target, output, value });
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

fn violation_of(at: PlanPosition, refused: CombineError) -> Violation {
    match refused {
        CombineError::Twice(rank) => Violation::CountedTwice { at, rank },
        CombineError::Order => Violation::OperandOrder { at },
        CombineError::Finished => Violation::FinishedBefore { at },
        CombineError::Missing(rank) => Violation::Missing { at, rank },
        CombineError::Plain => Violation::ReducedPlain { at },
    }
}

fn borders(bucket: &Bucket<'_>) -> Vec<u64> {
    let mut borders = vec![0, bucket.plans[0].layout.elements];
    let mut add = |span: Span| borders.extend([span.start, span.end()]);
    bucket.plans[0].layout.slices.iter().for_each(|slice| add(slice.span));
    for round in bucket.plans.iter().flat_map(|plan| &plan.sub_schedules).flat_map(|sub_schedule| &sub_schedule.rounds)
    {
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
                Transfer::Send { form: Form::Measures, .. } | Transfer::Receive { form: Form::Measures, .. } => {}
                Transfer::Send { span, .. } | Transfer::Receive { span, .. } => add(span),
            }
        }
    }
    borders.sort_unstable();
    borders.dedup();
    borders
}
