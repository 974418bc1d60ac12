//! What a plugin implements.

use crate::abi::{Call, Stage};
use crate::element::{Element, State};
use crate::{Error, Operands};

/// What codecs and reducers have in common.
///
/// A value of this type lives as long as the module's instance. It may hold what follows from the parameters, and scratch
/// space; what a call gives must depend on its arguments and the parameters alone, for instances are shared among tensors
/// and come and go. `ronde plugin check` tests that.
pub trait Plugin: Sized {
    /// The struct that [`export!`](crate::export!) makes of the parameters.
    type Parameters;

    /// Called once, when the parameters are known. Ranges are checked already.
    ///
    /// # Errors
    /// [`Error::parameters`] when they do not go together.
    fn new(parameters: &Self::Parameters) -> Result<Self, Error>;
}

/// A codec: how many bytes at most, and what it keeps for each element.
pub trait Codec: Plugin {
    /// What is kept for each element from one round to the next: a residual, a momentum. `()` for nothing.
    type State: State;

    /// The most bytes that so many elements are encoded to. Depends on the parameters alone and never falls as `elements`
    /// rises.
    fn bound(&self, elements: usize) -> usize;
}

/// A codec of elements of one type.
pub trait CodecFor<E: Element>: Codec {
    /// Encodes a span to the front of `encoded`, which has [`Codec::bound`] bytes at least; gives how many bytes it took.
    /// There is a state for each value.
    ///
    /// # Errors
    /// Any; the operation fails on all ranks.
    fn encode(
        &mut self,
        span: &Span,
        values: &[E],
        state: &mut [Self::State],
        encoded: &mut [u8],
    ) -> Result<usize, Error>;

    /// Writes all `values`. The bytes may come from another host: they may be anything, of any length.
    ///
    /// # Errors
    /// [`Error::malformed`] when no span is encoded so.
    fn decode(&mut self, span: &Span, encoded: &[u8], values: &mut [E]) -> Result<(), Error>;
}

/// A reducer, pairwise, n-ary, two-pass or adaptive, as its manifest says.
pub trait Reducer: Plugin {
    /// Two-pass and adaptive: turns what was measured into what [`ReducerFor::reduce`] is given.
    ///
    /// Two-pass: `measures` holds the sums that [`ReducerFor::measure`] took of each rank, as many as the manifest says, one
    /// rank after the other, and keeps that shape. Adaptive: it holds the inner products of all pairs of ranks, the upper
    /// triangle with the diagonal row by row; one weight for each rank is to be left at its front.
    ///
    /// # Errors
    /// Any; the operation fails on all ranks.
    fn conclude(&mut self, ranks: usize, measures: &mut [f64]) -> Result<(), Error> {
        let _ = (ranks, measures);
        Ok(())
    }
}

/// A reducer of elements of one type.
pub trait ReducerFor<E: Element>: Reducer {
    /// Reduces a span: element `i` of `output` follows from element `i` of all operands, which are in rank order.
    /// `measures` is what was concluded, and empty when nothing is measured.
    ///
    /// # Errors
    /// Any; the operation fails on all ranks.
    fn reduce(
        &mut self,
        span: &Span,
        operands: &Operands<'_, E>,
        measures: &[f64],
        output: &mut [E],
    ) -> Result<(), Error>;

    /// Two-pass: measures a span of one rank's values. `measures` holds zeros; the host adds up the spans'.
    ///
    /// # Errors
    /// Any; the operation fails on all ranks.
    fn measure(&mut self, span: &Span, values: &[E], measures: &mut [f64]) -> Result<(), Error> {
        let _ = (span, values, measures);
        Ok(())
    }
}

/// Where the elements of a call belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whether they are what a member contributes, or a result that the owner of a piece sends to all.
    pub stage: Stage,
    /// How many elements there are.
    pub elements: usize,
    /// The first one within its tensor.
    pub offset: u64,
    /// Elements of the whole tensor.
    pub tensor_elements: u64,
    /// How often this tensor was reduced with this plugin before: equal on all ranks.
    pub round: u64,
    /// A number that stands for the tensor, equal on all ranks: with `round` and `offset` a seed.
    pub tensor: u64,
}

impl Span {
    /// A whole tensor in its first round: for tests.
    #[must_use]
    pub fn whole(elements: usize) -> Self {
        let tensor_elements = elements as u64;
        Self { stage: Stage::Contribution, elements, offset: 0, tensor_elements, round: 0, tensor: 0 }
    }

    /// What the host said of a call.
    pub(crate) fn of(call: &Call) -> Result<Self, Error> {
        let stage = Stage::from_number(call.stage).ok_or(Error::unsupported("there is no such stage"))?;
        let Call { offset, tensor_elements, round, tensor, .. } = *call;
        Ok(Self { stage, elements: call.elements as usize, offset, tensor_elements, round, tensor })
    }
}
