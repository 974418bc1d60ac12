//! What a lane calls: instances of its own, and the state that all lanes share.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use ronde_engine::{PluginFault, PluginSpan, Side, Stage};
use ronde_plugin_host::{Fault, Instance, Operands, Span};
use ronde_wire::PluginUse;

use super::Plugins;
use super::residuals::Tensor;

/// The plugins of one lane.
pub(crate) struct LanePlugins {
    shared: Arc<Plugins>,
    instances: HashMap<PluginUse, Instance>,
    encoded: Vec<u8>,
}

/// Instances that a lane keeps.
const INSTANCES_MAX: usize = 64;

impl LanePlugins {
    pub(crate) fn new(shared: Arc<Plugins>) -> Self {
        Self { shared, instances: HashMap::new(), encoded: Vec::new() }
    }

    /// The lane's instance of a plugin, started when it is first used.
    fn instance(&mut self, uses: &PluginUse) -> Result<&mut Instance, PluginFault> {
        started(&mut self.instances, &self.shared, uses)
    }

    /// A span as the host knows it.
    fn span(&self, at: &PluginSpan<'_>) -> Span {
        let stage = match at.stage {
            Stage::Contribution => ronde_plugin_host::Stage::Contribution,
            Stage::Result => ronde_plugin_host::Stage::Result,
        };
        let (round, number) = self.shared.residuals().round(&tensor(at));
        Span { dtype: at.dtype, stage, offset: at.offset, tensor_elements: at.tensor_elements, round, tensor: number }
    }
}

impl ronde_engine::Plugins for LanePlugins {
    fn encode(&mut self, at: &PluginSpan<'_>, values: &[u8], into: &mut [u8]) -> Result<usize, PluginFault> {
        let (span, tensor, block) = (self.span(at), tensor(at), (at.stage, at.offset));
        let Self { shared, instances, encoded } = self;
        let instance = started(instances, shared, at.plugin)?;
        let facts = instance.codec_facts(at.dtype).map_err(said)?;
        let bytes = values.len() / at.dtype.size_bytes() * facts.state_bytes_per_element;
        let keeps = bytes > 0;
        let mut state = if keeps { shared.residuals().state(&tensor, block, bytes) } else { Vec::new() };
        instance.encode(&span, values, &mut state, encoded).map_err(said)?;
        if keeps {
            let put = shared.residuals().put((at.epoch, at.seq), &tensor, block, state);
            put.map_err(|reason| PluginFault(format!("plugin {}: {reason}", at.plugin)))?;
        }
        // What is too long is told by its length.
        if let Some(place) = into.get_mut(..encoded.len()) {
            place.copy_from_slice(encoded);
        }
        Ok(encoded.len())
    }

    fn decode(&mut self, at: &PluginSpan<'_>, encoded: &[u8], into: &mut [u8]) -> Result<(), PluginFault> {
        let span = self.span(at);
        self.instance(at.plugin)?.decode(&span, encoded, into).map_err(said)
    }

    fn reduce_pair(
        &mut self,
        at: &PluginSpan<'_>,
        accumulator: &mut [u8],
        other: &[u8],
        side: Side,
    ) -> Result<(), PluginFault> {
        let span = self.span(at);
        let instance = self.instance(at.plugin)?;
        match side {
            Side::AccumulatorLeft => instance.reduce_pair(&span, accumulator, other),
            Side::AccumulatorRight => {
                let bytes = accumulator.len();
                instance.reduce_parts(&span, 2, bytes, &[], &mut IntoRight { left: other, right: accumulator })
            }
        }
        .map_err(said)
    }

    fn reduce(
        &mut self,
        at: &PluginSpan<'_>,
        operands: &[&[u8]],
        concluded: &[f64],
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        let span = self.span(at);
        self.instance(at.plugin)?.reduce(&span, operands, concluded, into).map_err(said)
    }

    fn measure(&mut self, at: &PluginSpan<'_>, values: &[u8], sums: &mut [f64]) -> Result<(), PluginFault> {
        let span = self.span(at);
        self.instance(at.plugin)?.measure(&span, values, sums).map_err(said)
    }

    fn conclude(&mut self, at: &PluginSpan<'_>, ranks: usize, measures: Vec<f64>) -> Result<Vec<f64>, PluginFault> {
        let (span, mut measures) = (self.span(at), measures);
        self.instance(at.plugin)?.conclude(&span, ranks, &mut measures).map_err(said)?;
        Ok(measures)
    }
}

/// Two operands of which the right one becomes the result.
struct IntoRight<'a> {
    left: &'a [u8],
    right: &'a mut [u8],
}

impl Operands for IntoRight<'_> {
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]) {
        into.copy_from_slice(if operand == 0 { &self.left[part] } else { &self.right[part] });
    }

    fn write(&mut self, part: Range<usize>, result: &[u8]) {
        self.right[part].copy_from_slice(result);
    }
}

fn started<'a>(
    instances: &'a mut HashMap<PluginUse, Instance>,
    shared: &Plugins,
    uses: &PluginUse,
) -> Result<&'a mut Instance, PluginFault> {
    if !instances.contains_key(uses) {
        let (plugin, parameters) = shared.registry().ordered(uses).map_err(PluginFault)?;
        let instance = plugin.instance(&parameters).map_err(said)?;
        if instances.len() >= INSTANCES_MAX {
            instances.clear();
        }
        instances.insert(uses.clone(), instance);
    }
    instances.get_mut(uses).ok_or_else(|| PluginFault(format!("plugin {uses} has no instance")))
}

fn tensor(at: &PluginSpan<'_>) -> Tensor {
    (at.set, at.name.clone())
}

#[allow(clippy::needless_pass_by_value, reason = "it is given to map_err")]
fn said(fault: Fault) -> PluginFault {
    PluginFault(fault.to_string())
}
