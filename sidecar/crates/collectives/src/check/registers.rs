//! The symbolic content of registers.

use std::rc::Rc;

use ronde_wire::Member;

use super::expression::Expression;
use super::{PlanPosition, Violation};
use crate::plan::{Form, Register, Span};

/// The written registers of one sub-schedule on one member.
#[derive(Clone, Default)]
pub(super) struct Registers {
    held: Vec<Option<Held>>,
}

#[derive(Clone)]
struct Held {
    span: Span,
    content: Content,
    read: bool,
}

/// The content of a register or chunk.
#[derive(Clone)]
pub(super) enum Content {
    /// A value for each interval of the span.
    Values(Rc<[Expression]>),
    /// An encoded value for each interval of the span.
    Encoded(Rc<[Expression]>),
    /// The values of each of this member's ranks.
    EachRank(Member),
    /// The span counts numbers.
    Measures(Measured),
}

/// The spans that a member has measured, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Measured {
    pub(super) by: Member,
    pub(super) spans: Rc<[Span]>,
}

impl Content {
    pub(super) const fn form(&self) -> Form {
        match self {
            Self::Values(_) => Form::Values,
            Self::Encoded(_) => Form::Encoded,
            Self::EachRank(_) => Form::EachRank,
            Self::Measures(_) => Form::Measures,
        }
    }
}

impl Registers {
    /// Reads a register, which must hold exactly this span in this form. Measures that were never taken are zeros.
    pub(super) fn read(
        &mut self,
        at: PlanPosition,
        register: Register,
        span: Span,
        form: Form,
    ) -> Result<Content, Violation> {
        match self.held.get_mut(usize::from(register.0)) {
            Some(Some(held)) if held.span == span => {
                if held.content.form() != form {
                    return Err(Violation::HeldForm { at, register, held: held.content.form(), read: form });
                }
                held.read = true;
                Ok(held.content.clone())
            }
            None | Some(None) if form == Form::Measures => {
                Ok(Content::Measures(Measured { by: at.member, spans: Rc::default() }))
            }
            _ => Err(Violation::Stale { at, register, span }),
        }
    }

    pub(super) fn values(
        &mut self,
        at: PlanPosition,
        register: Register,
        span: Span,
    ) -> Result<Rc<[Expression]>, Violation> {
        match self.read(at, register, span, Form::Values)? {
            Content::Values(values) => Ok(values),
            _ => Err(Violation::Stale { at, register, span }),
        }
    }

    /// Reads measures; the register may be empty.
    pub(super) fn measures(
        &mut self,
        at: PlanPosition,
        register: Register,
    ) -> Result<Option<(Span, Measured)>, Violation> {
        match self.held.get_mut(usize::from(register.0)) {
            Some(Some(Held { span, content: Content::Measures(measured), read })) => {
                *read = true;
                Ok(Some((*span, measured.clone())))
            }
            Some(Some(held)) => {
                let held = held.content.form();
                Err(Violation::HeldForm { at, register, held, read: Form::Measures })
            }
            _ => Ok(None),
        }
    }

    pub(super) fn write(
        &mut self,
        at: PlanPosition,
        register: Register,
        span: Span,
        content: Content,
    ) -> Result<(), Violation> {
        let index = usize::from(register.0);
        if index >= self.held.len() {
            self.held.resize(index + 1, None);
        }
        check_read(at, register, self.held[index].as_ref())?;
        self.held[index] = Some(Held { span, content, read: false });
        Ok(())
    }

    /// Checks that every value was read.
    pub(super) fn check_all_read(&self, at: PlanPosition) -> Result<(), Violation> {
        let mut held = (0..).map(Register).zip(&self.held);
        held.try_for_each(|(register, held)| check_read(at, register, held.as_ref()))
    }
}

/// An unread value indicates a wrong register; a barrier's tokens have no value.
fn check_read(at: PlanPosition, register: Register, held: Option<&Held>) -> Result<(), Violation> {
    match held {
        Some(held) if !held.read && !held.span.is_empty() => Err(Violation::Unread { at, register }),
        _ => Ok(()),
    }
}
