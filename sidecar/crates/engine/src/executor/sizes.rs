//! The byte lengths of spans in each form.

use ronde_collectives::plan::{Form, Span};
use ronde_wire::{Codec, DType, PluginWork};

use super::arithmetic::StepError;

/// The byte lengths of registers and chunks of one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) element_bytes: usize,
    encoded: Encoded,
}

/// The length of encoded elements.
#[derive(Clone, Copy, Debug)]
enum Encoded {
    /// This number of bytes per element.
    Each(usize),
    /// At most this number of bytes per span that is not empty.
    AtMost(usize),
}

/// Bytes of one measure, an f64.
pub(super) const MEASURE_BYTES: usize = size_of::<f64>();

impl Sizes {
    pub(super) fn new(dtype: DType, codec: Codec, plugin: Option<PluginWork>) -> Result<Self, StepError> {
        let encoded = match (codec, plugin) {
            (Codec::Plugin, Some(PluginWork::Codec { encoded_bytes, .. })) => Encoded::AtMost(encoded_bytes as usize),
            _ => Encoded::Each(codec.encoded_bytes(dtype).ok_or(StepError::Codec { codec, dtype })?),
        };
        Ok(Self { element_bytes: dtype.size_bytes(), encoded })
    }

    /// Bytes of a span's elements.
    pub(super) fn values(self, span: Span) -> usize {
        times(span, self.element_bytes)
    }

    /// The most bytes of a span's encoded elements.
    pub(super) fn encoded(self, span: Span) -> usize {
        match self.encoded {
            Encoded::Each(bytes) => times(span, bytes),
            Encoded::AtMost(bytes) => bytes * usize::from(!span.is_empty()),
        }
    }

    /// The most bytes of a span in some form from a member with this number of ranks.
    pub(super) fn of(self, form: Form, span: Span, ranks: usize) -> usize {
        match form {
            Form::Values => self.values(span),
            Form::Encoded => self.encoded(span),
            Form::EachRank => self.values(span).saturating_mul(ranks),
            Form::Measures => times(span, MEASURE_BYTES),
        }
    }

    /// Whether a span in some form can have `found` bytes, where [`Self::of`] returns `bytes`.
    pub(super) fn fits(self, form: Form, found: usize, bytes: usize) -> bool {
        match (form, self.encoded) {
            (Form::Encoded, Encoded::AtMost(_)) => found <= bytes,
            _ => found == bytes,
        }
    }
}

fn times(span: Span, bytes: usize) -> usize {
    usize::try_from(span.len).map_or(usize::MAX, |len| len.saturating_mul(bytes))
}
