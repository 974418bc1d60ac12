//! The copy of the local ranks' tensors that a prelude measures, and that the ranks then contribute.
//!
//! Workers may write their segments at any time. If an operation read a tensor once to measure it and once more to
//! contribute it, a worker could change its values in between, and escape the clip or the weight that its measures led
//! to. So a tensor with a prelude is read once.

use bytes::{Bytes, BytesMut};
use ronde_collectives::plan::Span;

use super::arithmetic::StepError;
use super::register::{Buffers, Value};
use super::sizes::Sizes;

/// The local ranks' prescaled values, complete for one rank after another, in the order of the plan's layout.
#[derive(Debug)]
pub(super) struct Measured {
    values: Values,
    ranks: usize,
    /// Bytes of one rank's tensor.
    rank_bytes: usize,
    sizes: Sizes,
}

#[derive(Debug)]
enum Values {
    /// The prelude copies; the number counts bytes that it has copied.
    Copying(BytesMut, usize),
    /// The prelude is over. Registers share these bytes.
    Complete(Bytes),
}

impl Measured {
    /// Memory for the tensors of so many ranks with `elements` elements each. The system provides its pages as they are
    /// written.
    pub(super) fn new(ranks: usize, elements: u64, sizes: Sizes) -> Self {
        let rank_bytes = sizes.values(Span { start: 0, len: elements });
        let values = Values::Copying(BytesMut::zeroed(ranks.saturating_mul(rank_bytes)), 0);
        Self { values, ranks, rank_bytes, sizes }
    }

    /// The place for a local rank's elements of a span. Each element is written once.
    pub(super) fn place(&mut self, rank: usize, span: Span) -> Result<&mut [u8], StepError> {
        let start = rank * self.rank_bytes + self.offset(span);
        let bytes = self.sizes.values(span);
        let Values::Copying(values, copied) = &mut self.values else { return Err(StepError::ConcludedTwice) };
        *copied += bytes;
        values.get_mut(start..start + bytes).ok_or(StepError::NotMeasured)
    }

    /// Ends the copying.
    pub(super) fn complete(&mut self) -> Result<(), StepError> {
        let Values::Copying(values, copied) = &mut self.values else { return Err(StepError::ConcludedTwice) };
        if *copied != values.len() {
            return Err(StepError::NotMeasured);
        }
        self.values = Values::Complete(std::mem::take(values).freeze());
        Ok(())
    }

    /// Each local rank's elements of a span, one rank after another; `None` while the prelude copies. Those of a single
    /// rank are shared, those of several are copied into the buffer of `old`.
    pub(super) fn contribution(&self, span: Span, old: Value, buffers: &mut Buffers) -> Result<Value, StepError> {
        let Values::Complete(values) = &self.values else { return Err(StepError::NotConcluded) };
        let (start, bytes) = (self.offset(span), self.sizes.values(span));
        if start + bytes > self.rank_bytes {
            return Err(StepError::NotMeasured);
        }
        if self.ranks == 1 {
            buffers.give(old);
            return Ok(Value::Shared(values.slice(start..start + bytes)));
        }
        let mut buffer = buffers.renew(old, bytes * self.ranks);
        for (rank, part) in buffer.chunks_exact_mut(bytes.max(1)).enumerate() {
            part.copy_from_slice(&values[rank * self.rank_bytes + start..][..bytes]);
        }
        Ok(Value::Private(buffer))
    }

    /// Whether the prelude is over.
    pub(super) fn is_complete(&self) -> bool {
        matches!(self.values, Values::Complete(_))
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.rank_bytes * self.ranks) as u64
    }

    fn offset(&self, span: Span) -> usize {
        self.sizes.values(Span { start: 0, len: span.start })
    }
}
