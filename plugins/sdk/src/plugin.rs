//! The traits that a plugin implements.

use crate::abi::{Call, Stage};
use crate::element::{Element, State};
use crate::{Error, Operands};

/// The common part of codecs and reducers.
///
/// A value of this type lives as long as an instance of the module. It may hold data derived from the parameters, and
/// scratch space. The results of a call must depend on its arguments and the parameters only, because instances are
/// shared among tensors, and created and dropped at any time. `ronde plugin check` tests this.
pub trait Plugin: Sized {
    /// The struct of parameters that [`export!`](crate::export!) defines.
    type Parameters;

    /// Called once with the parameters, whose ranges are already checked.
    ///
    /// # Errors
    /// [`Error::parameters`] if they are incompatible.
    fn new(parameters: &Self::Parameters) -> Result<Self, Error>;
}

/// A codec: the bound of its encoding, and the state for each element.
pub trait Codec: Plugin {
    /// The state of each element from one round to the next: a residual, a momentum. `()` for none.
    type State: State;

    /// The most bytes that `elements` elements can be encoded to. It depends on the parameters only, and never
    /// decreases as `elements` increases.
    fn bound(&self, elements: usize) -> usize;
}

/// A codec for elements of one type.
pub trait CodecFor<E: Element>: Codec {
    /// Encodes a span to the start of `encoded`, which has at least [`Codec::bound`] bytes. Returns the number of bytes
    /// written. There is one state for each value.
    ///
    /// # Errors
    /// Any error fails the operation on all ranks.
    fn encode(
        &mut self,
        span: &Span,
        values: &[E],
        state: &mut [Self::State],
        encoded: &mut [u8],
    ) -> Result<usize, Error>;

    /// Decodes to all `values`. The bytes come from another host and are untrusted: any content, of any length.
    ///
    /// # Errors
    /// [`Error::malformed`] if no span is encoded to these bytes.
    fn decode(&mut self, span: &Span, encoded: &[u8], values: &mut [E]) -> Result<(), Error>;
}

/// A reducer: pairwise, n-ary, two-pass or adaptive, as its manifest says.
pub trait Reducer: Plugin {
    /// For two-pass and adaptive reducers: converts measures into what [`ReducerFor::reduce`] receives.
    ///
    /// Two-pass: `measures` has the sums of [`ReducerFor::measure`] for each rank in turn, as many per rank as the
    /// manifest says, and keeps this layout. Adaptive: `measures` has the inner products of all pairs of ranks, the
    /// upper triangle with the diagonal row by row; the result is one weight for each rank, at the start.
    ///
    /// # Errors
    /// Any error fails the operation on all ranks.
    fn conclude(&mut self, ranks: usize, measures: &mut [f64]) -> Result<(), Error> {
        let _ = (ranks, measures);
        Ok(())
    }
}

/// A reducer for elements of one type.
pub trait ReducerFor<E: Element>: Reducer {
    /// Reduces a span: element `i` of `output` depends on element `i` of each operand only; operands are in rank order.
    /// `measures` is the result of [`Reducer::conclude`], and empty for shapes that do not measure.
    ///
    /// # Errors
    /// Any error fails the operation on all ranks.
    fn reduce(
        &mut self,
        span: &Span,
        operands: &Operands<'_, E>,
        measures: &[f64],
        output: &mut [E],
    ) -> Result<(), Error>;

    /// For two-pass reducers: measures a span of one rank's values. `measures` is zero at first; the host adds the
    /// results of spans.
    ///
    /// # Errors
    /// Any error fails the operation on all ranks.
    fn measure(&mut self, span: &Span, values: &[E], measures: &mut [f64]) -> Result<(), Error> {
        let _ = (span, values, measures);
        Ok(())
    }
}

/// The position of a call's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whether they are a member's contribution, or a result that the owner of a chunk sends to all.
    pub stage: Stage,
    /// Number of elements.
    pub elements: usize,
    /// Index of the first element in its tensor.
    pub offset: u64,
    /// Number of elements of the whole tensor.
    pub tensor_elements: u64,
    /// How often this tensor was reduced with this plugin before: equal on all ranks.
    pub round: u64,
    /// A number that identifies the tensor, equal on all ranks; with `round` and `offset` usable as a seed.
    pub tensor: u64,
}

impl Span {
    /// A whole tensor in its first round, for tests.
    #[must_use]
    pub fn whole(elements: usize) -> Self {
        let tensor_elements = elements as u64;
        Self { stage: Stage::Contribution, elements, offset: 0, tensor_elements, round: 0, tensor: 0 }
    }

    /// Reads the span of a call.
    pub(crate) fn of(call: &Call) -> Result<Self, Error> {
        let stage = Stage::from_number(call.stage).ok_or(Error::unsupported("there is no such stage"))?;
        let Call { offset, tensor_elements, round, tensor, .. } = *call;
        Ok(Self { stage, elements: call.elements as usize, offset, tensor_elements, round, tensor })
    }
}
