//! The steps that call plugins. A call covers a span of one tensor, so spans are split at tensor boundaries.

use ronde_collectives::plan::{Slice, Span};
use ronde_wire::{Rank, copying};

use super::arithmetic::{Accumulator, Block, ElementOps, StepContext, StepError};
use super::inputs::Inputs;
use crate::event::Admission;
use crate::memory::Memory;
use crate::plugins::{PluginFault, PluginSpan, Plugins, RankValues, Stage};

/// Encodes a block of one tensor; returns the number of bytes.
pub(super) fn encode(
    Block { span, stage }: Block,
    values: &[u8],
    into: &mut [u8],
    at: &mut StepContext<'_>,
) -> Result<usize, StepError> {
    let admission = at.admission;
    let (plugin_span, plugins) = (part(admission, &only(admission, span)?, stage)?, plugins(at.memory)?);
    let bytes = plugins.encode(&plugin_span, values, into)?;
    if bytes > into.len() {
        let most = into.len();
        return Err(fault(format!(
            "{} reports {bytes} encoded bytes, more than the maximum of {most}",
            plugin_span.plugin
        )));
    }
    Ok(bytes)
}

/// Decodes a block.
pub(super) fn decode(
    Block { span, stage }: Block,
    encoded: &[u8],
    into: &mut [u8],
    at: &mut StepContext<'_>,
) -> Result<(), StepError> {
    let admission = at.admission;
    let plugin_span = part(admission, &only(admission, span)?, stage)?;
    Ok(plugins(at.memory)?.decode(&plugin_span, encoded, into)?)
}

/// Reduces two registers.
pub(super) fn reduce_pair(
    span: Span,
    Accumulator { bytes, side }: Accumulator<'_>,
    other: &[u8],
    at: &mut StepContext<'_>,
) -> Result<(), StepError> {
    let admission = at.admission;
    let element_bytes = admission.arithmetic.dtype.size_bytes();
    for slice in admission.plan.layout.within(span) {
        let range = bytes_within(span, &slice, element_bytes);
        let plugin_span = part(admission, &slice, Stage::Contribution)?;
        plugins(at.memory)?.reduce_pair(&plugin_span, &mut bytes[range.clone()], &other[range], side)?;
    }
    Ok(())
}

impl ElementOps {
    /// Reduces all ranks' values of a span; in pairs, in rank order, for a pairwise plugin.
    pub(super) fn reduce_n_by_plugin(
        &self,
        operands: &[&[u8]],
        span: Span,
        into: &mut [u8],
        at: &mut StepContext<'_>,
    ) -> Result<(), StepError> {
        let admission = at.admission;
        let pairwise = is_pairwise(admission);
        let concluded = self.ranks.concluded();
        let element_bytes = self.sizes.element_bytes;
        for slice in admission.plan.layout.within(span) {
            let range = bytes_within(span, &slice, element_bytes);
            let plugin_span = part(admission, &slice, Stage::Contribution)?;
            let plugins = plugins(at.memory)?;
            if pairwise {
                let mut values = Registers { operands, skipped_bytes: range.start };
                plugins.reduce_in_pairs(&plugin_span, operands.len(), &mut values, &mut into[range])?;
            } else {
                let operands: Vec<&[u8]> = operands.iter().map(|operand| &operand[range.clone()]).collect();
                plugins.reduce(&plugin_span, &operands, concluded, &mut into[range])?;
            }
        }
        Ok(())
    }
}

/// Adds the measures of a block of one rank's values, `skipped_bytes` after the begin of a slice.
pub(super) fn measure(
    slice: &Slice,
    skipped_bytes: usize,
    block: &[u8],
    sums: &mut [f64],
    inputs: &mut Inputs<'_>,
) -> Result<(), StepError> {
    let element_bytes = inputs.sizes.element_bytes;
    let whole = part(inputs.admission, slice, Stage::Contribution)?;
    let span = PluginSpan {
        offset: whole.offset + (skipped_bytes / element_bytes) as u64,
        elements: (block.len() / element_bytes) as u64,
        ..whole
    };
    Ok(inputs.plugins.as_mut().ok_or_else(no_plugins)?.measure(&span, block, sums)?)
}

/// The reduction of the local ranks' values in pairs, in rank order.
pub(super) fn reduce_local(
    inputs: &mut Inputs<'_>,
    slice: &Slice,
    ranks: &[Rank],
    into: &mut [u8],
) -> Result<(), StepError> {
    let plugin_span = part(inputs.admission, slice, Stage::Contribution)?;
    let plugins = inputs.plugins.take().ok_or_else(no_plugins)?;
    let mut values = Contributed { inputs, slice, ranks, failed: None };
    let reduced = plugins.reduce_in_pairs(&plugin_span, ranks.len(), &mut values, into);
    let failed = values.failed.take();
    inputs.plugins = Some(plugins);
    match failed {
        Some(error) => Err(error),
        None => Ok(reduced?),
    }
}

/// The local ranks' values of a slice.
struct Contributed<'a, 'b> {
    inputs: &'a mut Inputs<'b>,
    slice: &'a Slice,
    ranks: &'a [Rank],
    /// Why a read of a rank's values failed. Nothing is read after that.
    failed: Option<StepError>,
}

impl RankValues for Contributed<'_, '_> {
    fn read(&mut self, rank: usize, start: usize, into: &mut [u8]) {
        if self.failed.is_none() {
            self.failed = self.inputs.read_prescaled(self.slice, self.ranks[rank], start, into).err();
        }
    }
}

/// All ranks' values of part of a span, in registers.
struct Registers<'a> {
    operands: &'a [&'a [u8]],
    skipped_bytes: usize,
}

impl RankValues for Registers<'_> {
    fn read(&mut self, rank: usize, start: usize, into: &mut [u8]) {
        let start = self.skipped_bytes + start;
        copying::copy(into, &self.operands[rank][start..start + into.len()]);
    }
}

/// The conclusions of the plugin from the measures of all ranks.
pub(super) fn conclude(ranks: usize, measures: Vec<f64>, at: &mut StepContext<'_>) -> Result<Vec<f64>, StepError> {
    let admission = at.admission;
    let whole = Span { start: 0, len: admission.plan.layout.elements };
    let first = admission.plan.layout.within(whole).next().ok_or_else(|| fault("there is nothing to reduce".into()))?;
    let plugin_span = PluginSpan { offset: 0, elements: 0, ..part(admission, &first, Stage::Contribution)? };
    Ok(plugins(at.memory)?.conclude(&plugin_span, ranks, measures)?)
}

/// Whether a plugin reduces in pairs.
pub(super) fn is_pairwise(admission: &Admission) -> bool {
    let work = admission.plugin.as_ref().map(|plugin| plugin.uses.work);
    work == Some(ronde_wire::PluginWork::Pairwise)
}

fn plugins(memory: &mut dyn Memory) -> Result<&mut dyn Plugins, StepError> {
    memory.parts().1.ok_or_else(no_plugins)
}

fn no_plugins() -> StepError {
    fault("this sidecar runs no plugins".to_owned())
}

/// The one slice of a block.
fn only(admission: &Admission, span: Span) -> Result<Slice, StepError> {
    let mut slices = admission.plan.layout.within(span);
    match (slices.next(), slices.next()) {
        (Some(slice), None) => Ok(slice),
        _ => Err(fault("a block spans several tensors; the plan is wrong".to_owned())),
    }
}

/// The span of a slice for a plugin call.
fn part<'a>(admission: &'a Admission, slice: &Slice, stage: Stage) -> Result<PluginSpan<'a>, StepError> {
    let tensor = slice.tensor as usize;
    let missing = || fault("the operation names no plugin".to_owned());
    let plugin = admission.plugin.as_ref().ok_or_else(missing)?;
    Ok(PluginSpan {
        epoch: admission.epoch,
        seq: admission.seq,
        plugin: &plugin.uses,
        set: admission.topology.set,
        name: &admission.tensors[tensor].name,
        dtype: admission.arithmetic.dtype,
        stage,
        offset: slice.input_start,
        elements: slice.span.len,
        tensor_elements: plugin.elements.get(tensor).copied().unwrap_or_default(),
    })
}

/// The byte range of a slice within its span.
fn bytes_within(span: Span, slice: &Slice, element_bytes: usize) -> std::ops::Range<usize> {
    let elements = |elements: u64| usize::try_from(elements).unwrap_or(usize::MAX).saturating_mul(element_bytes);
    elements(slice.span.start - span.start)..elements(slice.span.end() - span.start)
}

fn fault(text: String) -> StepError {
    StepError::Plugin(PluginFault(text))
}
