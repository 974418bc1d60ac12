//! Checks of the steps of codecs and n-ary reducers.

use std::rc::Rc;

use ronde_wire::Member;

use super::registers::{Content, Measured, Registers};
use super::values::Execution;
use super::{PlanPosition, Violation};
use crate::plan::{Form, Register, Span, WorkKind};

impl Execution<'_> {
    pub(super) fn contribute_each(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        into: Register,
        span: Span,
    ) -> Result<(), Violation> {
        registers.write(at, into, span, Content::EachRank(at.member))
    }

    /// Reduces all ranks' values at once, from one register per member.
    pub(super) fn reduce_all(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        (first, into): (Register, Register),
        span: Span,
    ) -> Result<(), Violation> {
        self.read_each(at, registers, (first, into), span)?;
        if self.bucket.work.kind.measures() && !self.concluded[at.member.index()] {
            return Err(Violation::NotConcluded { at });
        }
        let all = self.expressions.all();
        let values = self.intervals(span).map(|_| all).collect();
        registers.write(at, into, span, Content::Values(values))
    }

    /// A source encodes its contribution to an owner once, and an owner its finished result.
    pub(super) fn encode(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        register: Register,
        span: Span,
    ) -> Result<(), Violation> {
        let values = registers.values(at, register, span)?;
        let members = self.bucket.plans.len();
        for (interval, value) in self.intervals(span).zip(values.iter()) {
            let stage = if self.expressions.is_decoded(*value) {
                return Err(Violation::EncodedAgain { at });
            } else if self.expressions.is_finished(*value) {
                members
            } else if *value == self.whole[at.member.index()] {
                at.member.index()
            } else {
                return Err(Violation::EncodedBetween { at });
            };
            let times = &mut self.encoded[stage][interval];
            *times += 1;
            if *times > 1 {
                return Err(Violation::EncodedAgain { at });
            }
        }
        registers.write(at, register, span, Content::Encoded(values))
    }

    pub(super) fn decode(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        register: Register,
        span: Span,
    ) -> Result<(), Violation> {
        let Content::Encoded(values) = registers.read(at, register, span, Form::Encoded)? else {
            return Err(Violation::Stale { at, register, span });
        };
        let values = values.iter().map(|value| self.expressions.decoded(*value)).collect();
        registers.write(at, register, span, Content::Values(values))
    }

    /// Checks that every contribution and every result was encoded once.
    pub(super) fn check_encoded(&self) -> Result<(), Violation> {
        for (stage, times) in self.encoded.iter().enumerate() {
            if let Some(interval) = times.iter().position(|times| *times == 0) {
                let element = self.borders[interval];
                return Err(Violation::NotEncoded { stage, element });
            }
        }
        Ok(())
    }

    pub(super) fn measure_own(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        into: Register,
        span: Span,
    ) -> Result<(), Violation> {
        self.add_measured(at, registers, into, span)
    }

    pub(super) fn measure_all(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        (first, into): (Register, Register),
        span: Span,
    ) -> Result<(), Violation> {
        self.read_each(at, registers, (first, into), span)?;
        self.add_measured(at, registers, into, span)
    }

    /// Checks that the members' measures cover every element of every rank once and are equal on all members.
    pub(super) fn conclude(
        &mut self,
        at: PlanPosition,
        registers: &mut Registers,
        first: Register,
    ) -> Result<(), Violation> {
        if std::mem::replace(&mut self.concluded[at.member.index()], true) {
            return Err(Violation::ConcludedTwice { at });
        }
        let mut all = Vec::new();
        for (member, register) in self.member_registers(first) {
            let span = self.measures_of(member);
            let Content::Measures(measured) = registers.read(at, register, span, Form::Measures)? else {
                return Err(Violation::Stale { at, register, span });
            };
            if measured.by != member {
                return Err(Violation::RegisterOrder { at, register, member });
            }
            all.push(measured);
        }
        if matches!(self.bucket.work.kind, WorkKind::AllReduceAdaptive) {
            let spans: Vec<Span> = all.iter().flat_map(|measured| measured.spans.iter().copied()).collect();
            self.check_covers(at, &spans)?;
        } else {
            all.iter().try_for_each(|measured| self.check_covers(at, &measured.spans))?;
        }
        if self.measured.is_empty() {
            self.measured = all;
        } else if self.measured != all {
            return Err(Violation::ConclusionsDiffer { at });
        }
        Ok(())
    }

    /// The span of a member's measures, which counts numbers.
    pub(super) fn measures_of(&self, member: Member) -> Span {
        Span { start: 0, len: self.bucket.measures_of(member) }
    }

    fn member_registers(&self, first: Register) -> impl Iterator<Item = (Member, Register)> + use<> {
        let registers = (first.0..=u16::MAX).map(Register);
        (0..).map(Member).take(self.bucket.plans.len()).zip(registers)
    }

    /// Reads the values of all members' ranks; the result must be in another register.
    fn read_each(
        &self,
        at: PlanPosition,
        registers: &mut Registers,
        (first, into): (Register, Register),
        span: Span,
    ) -> Result<(), Violation> {
        for (member, register) in self.member_registers(first) {
            if register == into {
                return Err(Violation::Target { at });
            }
            match registers.read(at, register, span, Form::EachRank)? {
                Content::EachRank(held) if held == member => {}
                _ => return Err(Violation::RegisterOrder { at, register, member }),
            }
        }
        Ok(())
    }

    fn add_measured(
        &self,
        at: PlanPosition,
        registers: &mut Registers,
        into: Register,
        span: Span,
    ) -> Result<(), Violation> {
        let whole = self.measures_of(at.member);
        let before = match registers.measures(at, into)? {
            Some((_, measured)) if measured.by != at.member => {
                return Err(Violation::RegisterOrder { at, register: into, member: at.member });
            }
            Some((_, measured)) => measured.spans,
            None => Rc::default(),
        };
        let spans = before.iter().copied().chain([span]).collect();
        registers.write(at, into, whole, Content::Measures(Measured { by: at.member, spans }))
    }

    /// Checks that spans cover each element once.
    fn check_covers(&self, at: PlanPosition, spans: &[Span]) -> Result<(), Violation> {
        let mut spans = spans.to_vec();
        spans.sort_unstable();
        let mut end = 0;
        for span in spans.into_iter().filter(|span| !span.is_empty()) {
            if span.start != end {
                return Err(Violation::Measured { at, element: end.min(span.start) });
            }
            end = span.end();
        }
        let elements = self.bucket.plans[0].layout.elements;
        if end == elements { Ok(()) } else { Err(Violation::Measured { at, element: end }) }
    }
}
