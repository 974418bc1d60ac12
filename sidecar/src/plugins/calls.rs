//! Calls plugins on a lane: with the lane's own instances, and the state that all lanes share.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ronde_engine::{PluginFault, PluginSpan, RankValues, Side, Stage};
use ronde_plugin_host::{Fault, Instance, Operands, Operation, Shape, Span};
use ronde_wire::{Epoch, PluginUse, Seq, copying};

use super::Plugins;
use super::registry::ordered_parameters;
use super::residuals::Tensor;

/// The plugins of one lane.
pub(crate) struct LanePlugins {
    shared: Arc<Plugins>,
    instances: Instances,
    known: Option<LastTensor>,
}

/// The tensor of the last call; consecutive calls are often about the same one.
struct LastTensor {
    operation: (Epoch, Seq),
    tensor: Tensor,
    round: u64,
    number: u64,
}

/// Instances by plugin and operation.
#[derive(Default)]
struct Instances {
    running: HashMap<PluginUse, Instance>,
    /// The one used last. All calls of an operation share a use, which is compared here first.
    last: Option<(PluginUse, Instance)>,
}

/// The limit of the memory of a lane's instances together, without the last one's.
const INSTANCES_BYTES_MAX: usize = 256 << 20;

impl LanePlugins {
    pub(crate) fn new(shared: Arc<Plugins>) -> Self {
        Self { shared, instances: Instances::default(), known: None }
    }

    /// Returns a span as the host needs it, and its instance, which is started at the first use.
    fn call(&mut self, at: &PluginSpan<'_>) -> Result<(Span, &mut Instance), PluginFault> {
        let stage = match at.stage {
            Stage::Contribution => ronde_plugin_host::Stage::Contribution,
            Stage::Result => ronde_plugin_host::Stage::Result,
        };
        let (round, tensor) = self.round(at);
        let span =
            Span { dtype: at.dtype, stage, offset: at.offset, tensor_elements: at.tensor_elements, round, tensor };
        let operation = (at.epoch.0, at.seq.0);
        let instance = self.instances.of((at.plugin, operation), &self.shared)?;
        instance.work_on(operation);
        Ok((span, instance))
    }

    /// Calls a plugin, and counts the call.
    fn perform<T>(
        &mut self,
        at: &PluginSpan<'_>,
        call: impl FnOnce(&Span, &mut Instance) -> Result<T, Fault>,
    ) -> Result<T, PluginFault> {
        let begin = Instant::now();
        let (span, instance) = self.call(at)?;
        let result = call(&span, instance);
        self.shared.work.note(begin.elapsed(), result.is_err());
        result.map_err(plugin_fault)
    }

    /// Returns how often the tensor was reduced before, and its number. Neither changes during an operation.
    fn round(&mut self, at: &PluginSpan<'_>) -> (u64, u64) {
        let operation = (at.epoch, at.seq);
        let is_known = |known: &LastTensor| known.operation == operation && known.tensor == (at.set, at.name.clone());
        match &self.known {
            Some(known) if is_known(known) => (known.round, known.number),
            _ => {
                let tensor = tensor(at);
                let (round, number) = self.shared.residuals().round(&tensor);
                self.known = Some(LastTensor { operation, tensor, round, number });
                (round, number)
            }
        }
    }
}

impl Instances {
    fn of(
        &mut self,
        (uses, operation): (&PluginUse, Operation),
        shared: &Plugins,
    ) -> Result<&mut Instance, PluginFault> {
        if !self.last.as_ref().is_some_and(|(last, _)| last == uses) {
            let wanted = match self.running.remove(uses) {
                Some(running) => running,
                None => start(uses, operation, shared)?,
            };
            if let Some((uses, instance)) = self.last.replace((uses.clone(), wanted)) {
                let bytes = |instance: &Instance| instance.plugin().manifest().limits.memory_bytes;
                let others: usize = self.running.values().map(bytes).sum();
                if others + bytes(&instance) > INSTANCES_BYTES_MAX {
                    self.running.clear();
                }
                self.running.insert(uses, instance);
            }
        }
        self.last
            .as_mut()
            .map(|(_, instance)| instance)
            .ok_or_else(|| PluginFault(format!("plugin {uses} does not run")))
    }
}

impl ronde_engine::Plugins for LanePlugins {
    fn encode(&mut self, at: &PluginSpan<'_>, values: &[u8], into: &mut [u8]) -> Result<usize, PluginFault> {
        let facts = self.call(at)?.1.codec_facts(at.dtype).map_err(plugin_fault)?;
        let bytes = values.len() / at.dtype.size_bytes() * facts.state_bytes_per_element;
        if bytes == 0 {
            return self.perform(at, |span, instance| instance.encode_into(span, values, &mut [], into));
        }
        let (tensor, block) = (tensor(at), (at.stage, at.offset));
        let kept = self.shared.residuals().state(&tensor, block);
        let mut state = match kept {
            Some(kept) if kept.len() == bytes => kept.to_vec(),
            _ => vec![0; bytes],
        };
        let length = self.perform(at, |span, instance| instance.encode_into(span, values, &mut state, into))?;
        let (removed, put) = self.shared.residuals().put((at.epoch, at.seq), &tensor, block, state);
        drop(removed);
        put.map_err(|reason| PluginFault(format!("plugin {}: {reason}", at.plugin)))?;
        Ok(length)
    }

    fn decode(&mut self, at: &PluginSpan<'_>, encoded: &[u8], into: &mut [u8]) -> Result<(), PluginFault> {
        self.perform(at, |span, instance| instance.decode(span, encoded, into))
    }

    fn reduce_pair(
        &mut self,
        at: &PluginSpan<'_>,
        accumulator: &mut [u8],
        other: &[u8],
        side: Side,
    ) -> Result<(), PluginFault> {
        self.perform(at, |span, instance| match side {
            Side::AccumulatorLeft => instance.reduce_pair(span, accumulator, other),
            Side::AccumulatorRight => {
                let bytes = accumulator.len();
                instance.reduce_in_pairs(span, 2, bytes, &mut IntoRight { left: other, right: accumulator })
            }
        })
    }

    fn reduce_in_pairs(
        &mut self,
        at: &PluginSpan<'_>,
        ranks: usize,
        values: &mut dyn RankValues,
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        let bytes = into.len();
        self.perform(at, |span, instance| instance.reduce_in_pairs(span, ranks, bytes, &mut Read { values, into }))
    }

    fn reduce(
        &mut self,
        at: &PluginSpan<'_>,
        operands: &[&[u8]],
        concluded: &[f64],
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        self.perform(at, |span, instance| {
            let reducer = instance.plugin().manifest().reducer.as_ref();
            if reducer.is_some_and(|reducer| reducer.shape == Shape::Pairwise) {
                // A reducer for which the order of ranks matters: see `reducer_work`.
                return instance.fold(span, operands, into);
            }
            instance.reduce(span, operands, concluded, into)
        })
    }

    fn measure(&mut self, at: &PluginSpan<'_>, values: &[u8], sums: &mut [f64]) -> Result<(), PluginFault> {
        self.perform(at, |span, instance| instance.measure(span, values, sums))
    }

    fn conclude(&mut self, at: &PluginSpan<'_>, ranks: usize, measures: Vec<f64>) -> Result<Vec<f64>, PluginFault> {
        let mut measures = measures;
        self.perform(at, |span, instance| instance.conclude(span, ranks, &mut measures))?;
        Ok(measures)
    }
}

/// Operands that are read directly into the plugin's memory.
struct Read<'a> {
    values: &'a mut dyn RankValues,
    into: &'a mut [u8],
}

impl Operands for Read<'_> {
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]) {
        self.values.read(operand, part.start, into);
    }

    fn write(&mut self, part: Range<usize>, result: &[u8]) {
        copying::copy(&mut self.into[part], result);
    }
}

/// Two operands, of which the right one becomes the result.
struct IntoRight<'a> {
    left: &'a [u8],
    right: &'a mut [u8],
}

impl Operands for IntoRight<'_> {
    fn read(&mut self, operand: usize, part: Range<usize>, into: &mut [u8]) {
        copying::copy(into, if operand == 0 { &self.left[part] } else { &self.right[part] });
    }

    fn write(&mut self, part: Range<usize>, result: &[u8]) {
        copying::copy(&mut self.right[part], result);
    }
}

fn start(uses: &PluginUse, operation: Operation, shared: &Plugins) -> Result<Instance, PluginFault> {
    let plugin = shared.module(uses).map_err(PluginFault)?;
    let parameters = ordered_parameters(&plugin, uses).map_err(PluginFault)?;
    plugin.instance_for(operation, &parameters).map_err(plugin_fault)
}

fn tensor(at: &PluginSpan<'_>) -> Tensor {
    (at.set, at.name.clone())
}

#[allow(clippy::needless_pass_by_value, reason = "it is given to map_err")]
fn plugin_fault(fault: Fault) -> PluginFault {
    PluginFault(fault.to_string())
}
