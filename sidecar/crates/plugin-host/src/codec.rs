//! Encoding and decoding with codecs.

use std::ops::Range;

use ronde_plugin_abi::{Call, Kind, limits, names};
use ronde_wire::DType;

use crate::copying::copy;
use crate::error::{Fault, FaultKind};
use crate::guest::Guest;
use crate::instance::{Instance, Span, elements, fill};
use crate::manifest::CodecManifest;

/// How tensors of one type are split into blocks for a codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodecFacts {
    /// The most elements of one call; a multiple of 64.
    pub block_elements: usize,
    /// The most bytes that a block can be encoded to.
    pub block_bound: usize,
    /// Bytes of state for each element.
    pub state_bytes_per_element: usize,
}

/// The block sizes for types with elements of 1, 2, 4 and 8 bytes.
#[derive(Default)]
pub(crate) struct Codecs([Option<CodecFacts>; 4]);

impl Codecs {
    /// Queries the plugin's bounds.
    pub(crate) fn query(guest: &mut Guest, codec: &CodecManifest) -> Result<Self, FaultKind> {
        let mut codecs = Self::default();
        for dtype in &codec.dtypes {
            let facts = &mut codecs.0[size_class(*dtype)];
            if facts.is_none() {
                *facts = Some(largest_block(guest, codec, dtype.size_bytes())?);
            }
        }
        Ok(codecs)
    }

    pub(crate) fn facts(&self, dtype: DType) -> Option<CodecFacts> {
        self.0[size_class(dtype)]
    }
}

fn size_class(dtype: DType) -> usize {
    dtype.size_bytes().trailing_zeros() as usize
}

/// Finds the largest block whose values, state and encoded bytes fit the buffers. Bounds must not decrease, so binary
/// search finds it; for a plugin that violates this, all sidecars still find the same block.
fn largest_block(guest: &mut Guest, codec: &CodecManifest, size: usize) -> Result<CodecFacts, FaultKind> {
    let placement = &guest.placement;
    let near = placement.input.len().min(placement.output.len());
    let values = near.min(ronde_wire::limits::PLUGIN_BLOCK_BYTES_MAX) / size;
    let state = placement.state.len().checked_div(codec.state_bytes).unwrap_or(usize::MAX);
    let encoded = near.min(limits::ENCODED_BYTES_MAX);
    let (mut fits, mut above) = (0, values.min(state) / limits::BLOCK_ALIGN + 1);
    let mut block_bound = 0;
    while above - fits > 1 {
        let middle = usize::midpoint(fits, above);
        let elements = middle * limits::BLOCK_ALIGN;
        let bound = bound(guest, elements)?;
        if bound <= encoded {
            (fits, block_bound) = (middle, bound);
        } else {
            above = middle;
        }
    }
    let block_elements = fits * limits::BLOCK_ALIGN;
    if block_elements == 0 {
        let problem = format!("no block of {} elements of {size} bytes fits its buffers", limits::BLOCK_ALIGN);
        return Err(FaultKind::Start(problem));
    }
    Ok(CodecFacts { block_elements, block_bound, state_bytes_per_element: codec.state_bytes })
}

fn bound(guest: &mut Guest, elements: usize) -> Result<usize, FaultKind> {
    let bound = guest.bound(elements)?;
    let problem = "is a negative number".to_owned();
    usize::try_from(bound).map_err(|_| FaultKind::Bound { bound: bound.into(), elements, problem })
}

/// The bound of a span. It must not exceed that of a block.
fn span_bound(guest: &mut Guest, facts: &CodecFacts, elements: usize) -> Result<usize, FaultKind> {
    let bound = bound(guest, elements)?;
    if bound > facts.block_bound {
        let problem = format!("is more than the {} bytes for a whole block", facts.block_bound);
        return Err(FaultKind::Bound { bound: i64::try_from(bound).unwrap_or(i64::MAX), elements, problem });
    }
    Ok(bound)
}

impl Instance {
    /// The most bytes that `elements` elements can be encoded to.
    ///
    /// # Errors
    /// [`Fault`] if they are more than a block, or the plugin fails.
    pub fn bound_of(&mut self, dtype: DType, elements: usize) -> Result<usize, Fault> {
        let facts = self.codec_facts(dtype)?;
        self.attempt(|guest| {
            check_block(&facts, elements)?;
            span_bound(guest, &facts, elements)
        })
    }

    /// Encodes the elements of a span, at most a block, and updates their state. `encoded` is overwritten.
    ///
    /// # Errors
    /// [`Fault`]; the state is then unchanged, and `encoded` is empty.
    pub fn encode(&mut self, span: &Span, values: &[u8], state: &mut [u8], encoded: &mut Vec<u8>) -> Result<(), Fault> {
        encoded.clear();
        encoded.resize(self.codec_facts(span.dtype)?.block_bound, 0);
        let length = self.encode_into(span, values, state, encoded);
        encoded.truncate(*length.as_ref().unwrap_or(&0));
        length.map(drop)
    }

    /// Like [`Self::encode`], into a slice. Returns the number of encoded bytes. A block's bound is always sufficient.
    ///
    /// # Errors
    /// [`Fault`], also if `encoded` is too short; the state is then unchanged.
    pub fn encode_into(
        &mut self,
        span: &Span,
        values: &[u8],
        state: &mut [u8],
        encoded: &mut [u8],
    ) -> Result<usize, Fault> {
        let facts = self.codec_facts(span.dtype)?;
        self.attempt(|guest| {
            let elements = elements(span.dtype, values.len())?;
            check_block(&facts, elements)?;
            if state.len() != elements * facts.state_bytes_per_element {
                let wanted = elements * facts.state_bytes_per_element;
                let problem = format!("{elements} elements have {wanted} bytes of state, not {}", state.len());
                return Err(FaultKind::Refused(problem));
            }
            let call = span.call(Kind::Encode, 0, elements)?;
            let bound = span_bound(guest, &facts, elements)?;
            copy_in(guest, |guest| guest.placement.input.clone(), values);
            copy_in(guest, |guest| guest.placement.state.clone(), state);
            let bytes = guest.encode(&call)?;
            let bytes = encoded_bytes(bytes, elements, bound)?;
            let (output, kept) = (guest.placement.output.start, guest.placement.state.start);
            let memory = guest.memory();
            let Some(place) = encoded.get_mut(..bytes) else {
                let problem = format!("{bytes} encoded bytes have no room in {}", encoded.len());
                return Err(FaultKind::Refused(problem));
            };
            copy(place, &memory[output..output + bytes]);
            copy(state, &memory[kept..kept + state.len()]);
            Ok(bytes)
        })
    }

    /// Decodes the elements of a span, at most a block.
    ///
    /// # Errors
    /// [`Fault`]; `values` are then unchanged.
    pub fn decode(&mut self, span: &Span, encoded: &[u8], values: &mut [u8]) -> Result<(), Fault> {
        let facts = self.codec_facts(span.dtype)?;
        self.attempt(|guest| {
            let elements = elements(span.dtype, values.len())?;
            check_block(&facts, elements)?;
            let bound = span_bound(guest, &facts, elements)?;
            if encoded.len() > bound {
                let problem =
                    format!("{} encoded bytes are more than the {bound} of {elements} elements", encoded.len());
                return Err(FaultKind::Refused(problem));
            }
            let length = u32::try_from(encoded.len());
            let length = length.map_err(|_| FaultKind::Refused("more bytes than any span has".to_owned()))?;
            let call = Call { encoded_bytes: length, ..span.call(Kind::Decode, 0, elements)? };
            copy_in(guest, |guest| guest.placement.input.clone(), encoded);
            guest.decode(&call)?;
            let output = guest.placement.output.start;
            copy(values, &guest.memory()[output..output + values.len()]);
            Ok(())
        })
    }
}

/// Copies into one of the buffers. The check of the block ensures that the bytes fit.
fn copy_in(guest: &mut Guest, buffer: impl Fn(&Guest) -> Range<usize>, bytes: &[u8]) {
    if bytes.is_empty() {
        return;
    }
    let buffer = buffer(guest);
    fill(guest.memory(), &buffer, bytes);
}

fn check_block(facts: &CodecFacts, elements: usize) -> Result<(), FaultKind> {
    if elements > facts.block_elements {
        let problem = format!("{elements} elements are more than a block of {}", facts.block_elements);
        return Err(FaultKind::Refused(problem));
    }
    Ok(())
}

/// Checks the number of bytes that the plugin returned.
fn encoded_bytes(value: i32, elements: usize, bound: usize) -> Result<usize, FaultKind> {
    let function = names::ENCODE;
    match usize::try_from(value) {
        Err(_) => Err(FaultKind::Code { function, code: value }),
        Ok(bytes) if bytes > bound => Err(FaultKind::Length { function, bytes: value.into(), elements, bound }),
        Ok(bytes) => Ok(bytes),
    }
}
