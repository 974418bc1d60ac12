//! Operations on tensors in device memory: [`path`] decides how they are performed, and a lane of their own does it,
//! [`lane`], with commands from its [`inbox`] and the calls of [`work`]. [`split`] says which GPU has which part of a tensor.

mod inbox;
pub(crate) mod lane;
pub(crate) mod path;
mod split;
mod work;

use ronde_engine::Admission;
use ronde_wire::Rank;

use crate::operation::memory::{Destination, OperationMemory, TensorMemory};
use crate::session::gpus::DevicePart;
use crate::session::request::Input;
use path::Facts;

impl OperationMemory {
    /// The bytes of host memory that its tensors take while they are copied there and back.
    pub(crate) fn staged_bytes(&self) -> u64 {
        self.tensors.iter().map(TensorMemory::staged_bytes).fold(0, u64::saturating_add)
    }

    /// The bytes of host memory that its tensors take where the local ranks' contributions are one, and all of them get one
    /// result.
    pub(crate) fn reduced_bytes(&self) -> u64 {
        let of_first = |tensor: &TensorMemory| tensor.outputs.first().map_or(0, |(_, output)| output.bytes());
        self.tensors.iter().map(|tensor| of_first(tensor).saturating_mul(2)).fold(0, u64::saturating_add)
    }

    /// Whether some of its tensors are in device memory, so that lanes on the host cannot perform it.
    pub(crate) fn is_on_device(&self) -> bool {
        self.tensors.iter().any(|tensor| {
            let has_input = tensor.inputs.iter().any(|(_, input)| matches!(input, Input::Device(_)));
            has_input || tensor.outputs.iter().any(|(_, output)| matches!(output, Destination::Device(..)))
        })
    }
}

impl TensorMemory {
    /// The bytes of host memory that the tensor takes while it is copied there and back: of each contribution in device
    /// memory, and of each result, once for all ranks that get the same.
    fn staged_bytes(&self) -> u64 {
        let inputs = self.inputs.iter().filter_map(|(_, input)| match input {
            Input::Device(part) => Some(part.bytes),
            _ => None,
        });
        let mut results: Vec<(Option<Rank>, u64)> = Vec::new();
        for (key, output) in &self.outputs {
            if let Destination::Device(part, _) = output
                && results.iter().all(|(of, _)| of != key)
            {
                results.push((*key, part.bytes));
            }
        }
        inputs.chain(results.into_iter().map(|(_, bytes)| bytes)).fold(0, u64::saturating_add)
    }

    /// Where a rank gets its result, if that is in device memory.
    pub(crate) fn device_output(&self, rank: Rank) -> Option<&DevicePart> {
        self.outputs.iter().find_map(|(_, output)| match output {
            Destination::Device(part, of) if *of == rank => Some(part),
            _ => None,
        })
    }

    /// The GPU with a rank's tensors, if all of them are on one. A tensor without bytes is anywhere.
    fn device_of(&self, rank: Rank) -> Option<u32> {
        let output = self.device_output(rank)?.segment.ordinal();
        match self.input(rank) {
            Some(Input::Device(part)) => (part.segment.ordinal() == output).then_some(output),
            _ => None,
        }
    }
}

/// What the path of an operation depends on.
pub(crate) fn facts_of(admission: &Admission, memory: &OperationMemory, is_hierarchical: bool) -> Facts {
    let arithmetic = &admission.arithmetic;
    let tensors = || memory.tensors.iter().filter(|tensor| !tensor.outputs.is_empty());
    let device_of = |rank: &Rank| {
        let mut found = tensors().map(|tensor| tensor.device_of(*rank));
        let first = found.next().flatten()?;
        found.all(|device| device == Some(first)).then_some(first)
    };
    let is_local = admission.topology.len() == 1;
    Facts {
        op: arithmetic.op,
        dtype: arithmetic.dtype,
        codec: arithmetic.codec,
        is_prescaled: arithmetic.prescale.to_bits() != ONE,
        is_postscaled: arithmetic.postscale.to_bits() != ONE,
        // A plan of several sidecars that reduces all ranks' values at once is one in the order of the ranks.
        is_hierarchical: is_hierarchical && (is_local || !arithmetic.at_once),
        is_local,
        ranks: arithmetic.ranks,
        has_joined: !admission.joined.is_empty(),
        devices: admission.served.iter().map(device_of).collect(),
    }
}

/// Exactly 1 means "no scaling".
const ONE: u64 = 1.0_f64.to_bits();
