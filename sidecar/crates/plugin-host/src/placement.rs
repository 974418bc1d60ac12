//! The placement of a plugin's buffers in its memory, checked once.

use std::ops::Range;

use ronde_plugin_abi::{Call, Table, VERSION, limits};

use crate::manifest::{Manifest, Shape};

/// The buffers as ranges within the plugin's memory. They do not overlap, except that the output of a pairwise reducer
/// may be the left operand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) call: Range<usize>,
    pub(crate) parameters: Range<usize>,
    pub(crate) input: Range<usize>,
    pub(crate) output: Range<usize>,
    pub(crate) state: Range<usize>,
    pub(crate) measures: Range<usize>,
}

impl Placement {
    /// Reads and checks the table at an address.
    pub(crate) fn read(memory: &[u8], address: i32, manifest: &Manifest) -> Result<Self, String> {
        // WebAssembly passes unsigned addresses as signed numbers.
        let place = buffer("the table", address.cast_unsigned(), Table::BYTES, memory.len())?;
        let bytes = memory[place.clone()].try_into().expect("the range has a table's length");
        let table = Table::from_bytes(bytes);
        if table.abi != VERSION {
            return Err(format!("it has ABI version {}, but this host has version {VERSION}", table.abi));
        }
        if table.reserved != [0; 4] {
            return Err("its reserved words are not zero".to_owned());
        }
        let named = |what, address, bytes: u32| buffer(what, address, bytes as usize, memory.len());
        let placement = Self {
            call: buffer("the call", table.call, Call::BYTES, memory.len())?,
            parameters: named("the block of parameters", table.parameters, table.parameters_bytes)?,
            input: named("the input", table.input, table.input_bytes)?,
            output: named("the output", table.output, table.output_bytes)?,
            state: named("the state", table.state, table.state_bytes)?,
            measures: named("the block of measures", table.measures, table.measures_bytes)?,
        };
        placement.check_disjoint(&place, manifest)?;
        placement.check_sizes(manifest)?;
        Ok(placement)
    }

    fn check_disjoint(&self, table: &Range<usize>, manifest: &Manifest) -> Result<(), String> {
        let is_pairwise = manifest.reducer.as_ref().is_some_and(|reducer| reducer.shape == Shape::Pairwise);
        let may_reduce_in_place = is_pairwise && manifest.codec.is_none();
        let output = if may_reduce_in_place && self.reduces_in_place() { &(0..0) } else { &self.output };
        let mut ranges = [
            ("the table", table),
            ("the call", &self.call),
            ("the block of parameters", &self.parameters),
            ("the input", &self.input),
            ("the output", output),
            ("the state", &self.state),
            ("the block of measures", &self.measures),
        ];
        ranges.sort_by_key(|(_, range)| (range.start, range.end));
        let present: Vec<_> = ranges.iter().filter(|(_, range)| !range.is_empty()).collect();
        for pair in present.windows(2) {
            let [(lower, first), (upper, second)] = pair else { continue };
            if second.start < first.end {
                return Err(format!("{lower} and {upper} overlap"));
            }
        }
        Ok(())
    }

    /// Whether the result replaces the left operand, which must end where the right one may start.
    pub(crate) fn reduces_in_place(&self) -> bool {
        self.output.start == self.input.start && self.output.len() <= self.input.len() / 2
    }

    fn check_sizes(&self, manifest: &Manifest) -> Result<(), String> {
        at_least("the block of parameters", &self.parameters, manifest.parameter_bytes())?;
        at_least("the output", &self.output, limits::BUFFER_ALIGN)?;
        at_least("the input", &self.input, limits::BUFFER_ALIGN)?;
        if let Some(codec) = &manifest.codec {
            at_least("the state", &self.state, codec.state_bytes * limits::BLOCK_ALIGN)?;
        }
        let Some(reducer) = &manifest.reducer else { return Ok(()) };
        let ranks = if reducer.shape == Shape::Pairwise { 2 } else { manifest.limits.ranks };
        at_least("the input", &self.input, ranks * limits::BUFFER_ALIGN)?;
        let measures = match reducer.shape {
            Shape::Pairwise | Shape::Nary => 0,
            Shape::TwoPass { measures } => ranks * measures,
            Shape::Adaptive => ranks * (ranks + 1) / 2,
        };
        at_least("the block of measures", &self.measures, measures * size_of::<f64>())
    }
}

/// The range of a buffer; empty if the buffer is absent.
fn buffer(what: &str, address: u32, bytes: usize, memory: usize) -> Result<Range<usize>, String> {
    if bytes == 0 {
        return Ok(0..0);
    }
    let start = address as usize;
    if !start.is_multiple_of(limits::BUFFER_ALIGN) {
        return Err(format!("{what} is at address {start}, which is not a multiple of {}", limits::BUFFER_ALIGN));
    }
    match start.checked_add(bytes) {
        Some(end) if end <= memory => Ok(start..end),
        _ => Err(format!("{what}, {bytes} bytes at {start}, is not within the memory of {memory} bytes")),
    }
}

fn at_least(what: &str, range: &Range<usize>, bytes: usize) -> Result<(), String> {
    if range.len() < bytes {
        return Err(format!("{what} has {} bytes, but its manifest asks for at least {bytes}", range.len()));
    }
    Ok(())
}
