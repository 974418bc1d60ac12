//! The operations: their names, inputs, outputs and attributes, as TensorFlow registers them.

#![allow(
    unsafe_code,
    reason = "C functions that register operations, with strings and functions that live long enough"
)]

use std::ffi::{CStr, CString};

use super::abi::{Api, Compute, Create, Delete, ShapeFunction, Status};
use super::kernel::{self, Kind};
use super::shapes;

/// An operation of TensorFlow.
struct Definition {
    name: &'static str,
    kind: Kind,
    inputs: &'static [&'static str],
    outputs: &'static [&'static str],
    attributes: &'static [&'static str],
    shapes: ShapeFunction,
}

const TYPE: &str = "T: {uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool}";
const TYPES: &str = "Ts: list({uint8, int8, uint16, int16, int32, int64, half, bfloat16, float, double, bool}) >= 1";
// An attribute called `name` would break the wrappers that TensorFlow generates. Without a name, operations are numbered.
const NAME: &str = "tensor_name: string = ''";
const SET: &str = "process_set_id: int = 0";
const OP: &str = "reduce_op: int";
// TensorFlow's numbers with a fraction are of 32 bits, which would scale tensors of 64 bits inexactly.
const PRESCALE: &str = "prescale_factor: string = '1'";
const POSTSCALE: &str = "postscale_factor: string = '1'";
const ROOT: &str = "root_rank: int";

/// All operations. TensorFlow can't take one back, so a process registers them once.
const DEFINITIONS: [Definition; 18] = [
    Definition {
        name: "RondeAllreduce",
        kind: Kind::AllReduce,
        inputs: &["tensor: T"],
        outputs: &["reduced: T"],
        attributes: &[TYPE, OP, PRESCALE, POSTSCALE, NAME, SET],
        shapes: shapes::same,
    },
    Definition {
        name: "RondeAllreduceMany",
        kind: Kind::AllReduceMany,
        inputs: &["tensors: Ts"],
        outputs: &["reduced: Ts"],
        attributes: &[TYPES, OP, PRESCALE, POSTSCALE, NAME, SET],
        shapes: shapes::same,
    },
    Definition {
        name: "RondeGroupedAllreduce",
        kind: Kind::GroupedAllReduce,
        inputs: &["tensors: Ts"],
        outputs: &["reduced: Ts"],
        attributes: &[TYPES, OP, PRESCALE, POSTSCALE, NAME, SET],
        shapes: shapes::same,
    },
    Definition {
        name: "RondeAllgather",
        kind: Kind::AllGather,
        inputs: &["tensor: T"],
        outputs: &["gathered: T"],
        attributes: &[TYPE, NAME, SET],
        shapes: shapes::other_rows,
    },
    Definition {
        name: "RondeGroupedAllgather",
        kind: Kind::GroupedAllGather,
        inputs: &["tensors: Ts"],
        outputs: &["gathered: Ts"],
        attributes: &[TYPES, NAME, SET],
        shapes: shapes::other_rows,
    },
    Definition {
        name: "RondeBroadcast",
        kind: Kind::Broadcast,
        inputs: &["tensor: T"],
        outputs: &["received: T"],
        attributes: &[TYPE, ROOT, NAME, SET],
        shapes: shapes::same,
    },
    Definition {
        name: "RondeBroadcastMany",
        kind: Kind::BroadcastMany,
        inputs: &["tensors: Ts"],
        outputs: &["received: Ts"],
        attributes: &[TYPES, ROOT, NAME, SET],
        shapes: shapes::same,
    },
    Definition {
        name: "RondeAlltoall",
        kind: Kind::AllToAll,
        inputs: &["tensor: T", "splits: int32"],
        outputs: &["received: T", "received_splits: int32"],
        attributes: &[TYPE, NAME, SET],
        shapes: shapes::other_rows_and_vector,
    },
    Definition {
        name: "RondeReducescatter",
        kind: Kind::ReduceScatter,
        inputs: &["tensor: T"],
        outputs: &["reduced: T"],
        attributes: &[TYPE, OP, PRESCALE, POSTSCALE, NAME, SET],
        shapes: shapes::other_rows,
    },
    Definition {
        name: "RondeGroupedReducescatter",
        kind: Kind::GroupedReduceScatter,
        inputs: &["tensors: Ts"],
        outputs: &["reduced: Ts"],
        attributes: &[TYPES, OP, PRESCALE, POSTSCALE, NAME, SET],
        shapes: shapes::other_rows,
    },
    Definition {
        name: "RondeBarrier",
        kind: Kind::Barrier,
        inputs: &[],
        outputs: &[],
        attributes: &[NAME, SET],
        shapes: shapes::nothing,
    },
    number("RondeJoin", Kind::Join, &[SET]),
    number("RondeRank", Kind::Rank, &[]),
    number("RondeSize", Kind::Size, &[SET]),
    number("RondeLocalRank", Kind::LocalRank, &[]),
    number("RondeLocalSize", Kind::LocalSize, &[]),
    number("RondeProcessSetIncluded", Kind::Included, &[SET]),
    number("RondeSelfTest", Kind::SelfTest, &[]),
];

/// An operation that has no input and gives a number.
const fn number(name: &'static str, kind: Kind, attributes: &'static [&'static str]) -> Definition {
    Definition { name, kind, inputs: &[], outputs: &["value: int32"], attributes, shapes: shapes::scalar }
}

/// The names of operations that may run in any order and must run. [`super`] describes what this is for.
pub(super) fn unordered() -> Vec<&'static str> {
    let is_ordered = |kind| matches!(kind, Kind::Barrier | Kind::Join | Kind::SelfTest);
    DEFINITIONS.iter().filter(|definition| !is_ordered(definition.kind)).map(|definition| definition.name).collect()
}

/// The names of all operations.
pub(super) fn names() -> Vec<&'static str> {
    DEFINITIONS.iter().map(|definition| definition.name).collect()
}

/// Registers all operations with their kernels.
///
/// # Errors
/// TensorFlow's reason. Some operations may be registered then.
pub(super) fn register(api: &'static Api) -> Result<(), String> {
    DEFINITIONS.iter().try_for_each(|definition| definition.register(api))
}

impl Definition {
    fn register(&self, api: &'static Api) -> Result<(), String> {
        let failed = |reason: String| format!("{}: {reason}", self.name);
        let name = CString::new(self.name).map_err(|error| failed(error.to_string()))?;
        let status = Status::new(api);
        // SAFETY: TensorFlow copies all strings. The shape function is a function of this library, which Python never unloads.
        // Registration deletes the builder.
        unsafe {
            let builder = (api.TF_NewOpDefinitionBuilder)(name.as_ptr());
            for (add, texts) in [
                (api.TF_OpDefinitionBuilderAddAttr, self.attributes),
                (api.TF_OpDefinitionBuilderAddInput, self.inputs),
                (api.TF_OpDefinitionBuilderAddOutput, self.outputs),
            ] {
                for text in texts {
                    add(builder, CString::new(*text).map_err(|error| failed(error.to_string()))?.as_ptr());
                }
            }
            // Stateless operations would be merged when they are equal, and folded when their inputs are constants.
            (api.TF_OpDefinitionBuilderSetIsStateful)(builder, true);
            (api.TF_OpDefinitionBuilderSetShapeInferenceFunction)(builder, self.shapes);
            (api.TF_RegisterOpDefinition)(builder, status.raw());
        }
        status.check().map_err(failed)?;
        [c"CPU", c"GPU"].into_iter().try_for_each(|device| self.register_kernel(api, &name, device)).map_err(failed)
    }

    /// Registers the kernel for a device. That for GPUs reads and writes main memory: TensorFlow copies what is elsewhere. A
    /// TensorFlow without GPUs never uses it.
    fn register_kernel(&self, api: &'static Api, name: &CStr, device: &CStr) -> Result<(), String> {
        let (create, compute, delete): (Create, Compute, Delete) = kernel::functions(self.kind);
        let status = Status::new(api);
        // SAFETY: as for `register`, for the three functions. Registration takes the builder over.
        unsafe {
            let builder = (api.TF_NewAsyncKernelBuilder)(name.as_ptr(), device.as_ptr(), create, compute, delete);
            for text in self.inputs.iter().chain(self.outputs) {
                let argument = text.split_once(':').map_or(*text, |(argument, _)| argument);
                let argument = CString::new(argument).map_err(|error| error.to_string())?;
                (api.TF_KernelBuilder_HostMemory)(builder, argument.as_ptr());
            }
            (api.TF_RegisterKernelBuilder)(name.as_ptr(), builder, status.raw());
        }
        status.check()
    }
}
