//! How many bytes a span has, by what is held of it.

use ronde_collectives::plan::{Form, Span};
use ronde_wire::{Codec, DType};

use super::arithmetic::StepError;

/// The byte lengths of registers and chunks of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) element_bytes: usize,
    encoded_bytes: usize,
}

/// Bytes of one measure, an f64.
pub(super) const MEASURE_BYTES: usize = size_of::<f64>();

impl Sizes {
    pub(super) fn new(dtype: DType, codec: Codec) -> Result<Self, StepError> {
        let encoded_bytes = codec.encoded_bytes(dtype).ok_or(StepError::Codec { codec, dtype })?;
        Ok(Self { element_bytes: dtype.size_bytes(), encoded_bytes })
    }

    /// Bytes of a span's elements.
    pub(super) fn values(self, span: Span) -> usize {
        times(span, self.element_bytes)
    }

    /// Bytes of a span's elements as the codec encodes them.
    pub(super) fn encoded(self, span: Span) -> usize {
        times(span, self.encoded_bytes)
    }

    /// Bytes of a span in some form that come from a member with so many ranks.
    pub(super) fn of(self, form: Form, span: Span, ranks: usize) -> usize {
        match form {
            Form::Values => self.values(span),
            Form::Encoded => self.encoded(span),
            Form::EachRank => self.values(span).saturating_mul(ranks),
            Form::Measures => times(span, MEASURE_BYTES),
        }
    }
}

fn times(span: Span, bytes: usize) -> usize {
    usize::try_from(span.len).map_or(usize::MAX, |len| len.saturating_mul(bytes))
}
