//! Which path an operation takes whose tensors are in device memory. Pure.

use ronde_gpu::nccl::ReduceOp as InsideOp;
use ronde_gpu::nccl::collective::{ElementType, Reduction};
use ronde_wire::{Codec, DType, ReduceOp};

/// What the decision depends on.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    /// The reduction of an all-reduce; `None` for a broadcast.
    pub(crate) op: Option<ReduceOp>,
    /// The type of the elements.
    pub(crate) dtype: DType,
    /// The encoding between sidecars.
    pub(crate) codec: Codec,
    /// Whether contributions are multiplied before the reduction.
    pub(crate) is_prescaled: bool,
    /// Whether the result is multiplied.
    pub(crate) is_postscaled: bool,
    /// Whether ranks of a sidecar may be reduced with each other before others.
    pub(crate) is_hierarchical: bool,
    /// Whether all ranks of the operation are here.
    pub(crate) is_local: bool,
    /// The ranks of the operation.
    pub(crate) ranks: u32,
    /// Whether one of the local ranks has joined and contributes zeros.
    pub(crate) has_joined: bool,
    /// For each local rank: the GPUs of its inputs and results. `None` for a rank with one of them elsewhere, or on two.
    pub(crate) devices: Vec<Option<u32>>,
}

/// A path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DevicePath {
    /// NCCL performs all of it.
    Nccl(LocalReduction),
    /// NCCL reduces the local ranks' tensors, in equal parts for the GPUs. The parts are copied to the host, where the operation
    /// is performed with that sum as this sidecar's contribution, and NCCL gathers the parts of the result.
    TwoLevels(LocalReduction),
    /// Each tensor is copied to the host, where the operation is performed as for tensors in shared memory.
    Copied(&'static str),
}

/// What NCCL reduces among the local ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LocalReduction {
    /// The type of the elements.
    pub(crate) dtype: ElementType,
    /// How they are combined.
    pub(crate) reduction: Reduction,
}

/// Decides.
pub(crate) fn path_of(facts: &Facts) -> DevicePath {
    reducing(facts).unwrap_or_else(DevicePath::Copied)
}

/// The path by NCCL, if its collectives have the operation's meaning among the local ranks.
fn reducing(facts: &Facts) -> Result<DevicePath, &'static str> {
    // Such a rank has no tensors at all.
    if facts.has_joined {
        return Err("a local rank has joined");
    }
    check_devices(&facts.devices)?;
    let Some(op) = facts.op else {
        return Err("broadcasts are performed on the host");
    };
    if facts.is_prescaled || facts.is_local && facts.is_postscaled {
        return Err("NCCL does not scale as ronde does");
    }
    if !facts.is_hierarchical {
        return Err("the ranks are reduced in their order (--no-hierarchical-allreduce)");
    }
    if facts.codec == Codec::Plugin || facts.is_local && facts.codec != Codec::None {
        return Err("a codec was asked for");
    }
    let dtype = element_of(facts.dtype).ok_or("NCCL has no such type of elements")?;
    if !facts.is_local {
        return Ok(DevicePath::TwoLevels(LocalReduction { dtype, reduction: partial(facts, op, dtype)? }));
    }
    let op = match op {
        ReduceOp::Average => average(dtype, facts.ranks)?,
        other => alike(other, dtype)?,
    };
    Ok(DevicePath::Nccl(LocalReduction { dtype, reduction: Reduction { op, factor: 1.0 } }))
}

/// NCCL's average: each contribution is multiplied by 1 / `ranks`, rounded to its type, before the sum.
fn average(dtype: ElementType, ranks: u32) -> Result<InsideOp, &'static str> {
    match dtype {
        ElementType::F32 | ElementType::F64 => Ok(InsideOp::Average),
        ElementType::Bf16 if ranks.is_power_of_two() => Ok(InsideOp::Average),
        // A third is 0.2 % too large.
        ElementType::Bf16 => Err("NCCL's factor of an average of bfloat16 over this number of ranks is not exact"),
        ElementType::F16 => Err("NCCL divides float16 before the sum, and small numbers lose digits"),
        _ => Err("ronde's average of integers truncates"),
    }
}

/// The reduction of the local ranks that ronde completes with other sidecars.
fn partial(facts: &Facts, op: ReduceOp, dtype: ElementType) -> Result<Reduction, &'static str> {
    if facts.devices.len() == 1 {
        return Err("one rank of this host takes part");
    }
    let sum = |factor| Ok(Reduction { op: InsideOp::Sum, factor });
    match (op, dtype) {
        // ronde's partial sums of float16 have more exponents.
        (ReduceOp::Average, ElementType::F16) => Err("a sum of float16 may be too large where the average is not"),
        // As ronde's partial sums: no sum is too large, and a power of two changes no digit.
        (ReduceOp::Average, ElementType::Bf16) if facts.codec == Codec::None => {
            sum(1.0 / f64::from(facts.ranks.max(1).next_power_of_two()))
        }
        (ReduceOp::Average, _) => sum(1.0),
        (other, _) => Ok(Reduction { op: alike(other, dtype)?, factor: 1.0 }),
    }
}

/// NCCL's reduction with the same meaning, except for averages. Floating-point results may differ in rounding.
fn alike(op: ReduceOp, dtype: ElementType) -> Result<InsideOp, &'static str> {
    match op {
        ReduceOp::Sum => Ok(InsideOp::Sum),
        ReduceOp::Product => Ok(InsideOp::Product),
        // NCCL leaves NaN out, and ronde's result is NaN then.
        ReduceOp::Min | ReduceOp::Max if dtype.mantissa_bits().is_some() => {
            Err("NCCL's minimum and maximum ignore NaN")
        }
        ReduceOp::Min => Ok(InsideOp::Min),
        ReduceOp::Max => Ok(InsideOp::Max),
        _ => Err("NCCL has no such reduction"),
    }
}

fn check_devices(devices: &[Option<u32>]) -> Result<(), &'static str> {
    let mut known = Vec::with_capacity(devices.len());
    for device in devices {
        let device = device.ok_or("some local tensors are not in device memory that the sidecar can use")?;
        if known.contains(&device) {
            return Err("two local ranks share a GPU");
        }
        known.push(device);
    }
    Ok(())
}

/// NCCL's type of elements, if it has one. Of bool and 16-bit integers it has none.
fn element_of(dtype: DType) -> Option<ElementType> {
    Some(match dtype {
        DType::U8 => ElementType::U8,
        DType::I8 => ElementType::I8,
        DType::I32 => ElementType::I32,
        DType::I64 => ElementType::I64,
        DType::F16 => ElementType::F16,
        DType::Bf16 => ElementType::Bf16,
        DType::F32 => ElementType::F32,
        DType::F64 => ElementType::F64,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inside(dtype: ElementType, op: InsideOp, factor: f64) -> LocalReduction {
        LocalReduction { dtype, reduction: Reduction { op, factor } }
    }

    fn facts() -> Facts {
        Facts {
            op: Some(ReduceOp::Sum),
            dtype: DType::F32,
            codec: Codec::None,
            is_prescaled: false,
            is_postscaled: false,
            is_hierarchical: true,
            is_local: true,
            ranks: 2,
            has_joined: false,
            devices: vec![Some(0), Some(1)],
        }
    }

    /// The same operation in a job of two sidecars with three ranks each.
    fn spread() -> Facts {
        Facts { is_local: false, ranks: 6, devices: vec![Some(0), Some(1), Some(2)], ..facts() }
    }

    #[test]
    fn nccl_performs_what_it_performs_alike() {
        assert_eq!(path_of(&facts()), DevicePath::Nccl(inside(ElementType::F32, InsideOp::Sum, 1.0)));
        for (dtype, of, ranks) in [(DType::F32, ElementType::F32, 3), (DType::Bf16, ElementType::Bf16, 2)] {
            let average = Facts { op: Some(ReduceOp::Average), dtype, ranks, ..facts() };
            assert_eq!(path_of(&average), DevicePath::Nccl(inside(of, InsideOp::Average, 1.0)));
        }
        let greatest = Facts { op: Some(ReduceOp::Max), dtype: DType::I64, ..facts() };
        assert_eq!(path_of(&greatest), DevicePath::Nccl(inside(ElementType::I64, InsideOp::Max, 1.0)));
    }

    #[test]
    fn nccl_reduces_a_hosts_part_of_what_ronde_completes() {
        let op = |op, dtype| Facts { op: Some(op), dtype, ..spread() };
        let cases = [
            (spread(), inside(ElementType::F32, InsideOp::Sum, 1.0)),
            (
                Facts { is_postscaled: true, codec: Codec::Bf16, ..spread() },
                inside(ElementType::F32, InsideOp::Sum, 1.0),
            ),
            (op(ReduceOp::Product, DType::F64), inside(ElementType::F64, InsideOp::Product, 1.0)),
            (op(ReduceOp::Min, DType::U8), inside(ElementType::U8, InsideOp::Min, 1.0)),
            // ronde divides, once.
            (op(ReduceOp::Average, DType::I32), inside(ElementType::I32, InsideOp::Sum, 1.0)),
            (op(ReduceOp::Average, DType::F32), inside(ElementType::F32, InsideOp::Sum, 1.0)),
            (op(ReduceOp::Average, DType::Bf16), inside(ElementType::Bf16, InsideOp::Sum, 0.125)),
            (Facts { ranks: 4, ..op(ReduceOp::Average, DType::Bf16) }, inside(ElementType::Bf16, InsideOp::Sum, 0.25)),
        ];
        for (facts, expected) in cases {
            assert_eq!(path_of(&facts), DevicePath::TwoLevels(expected), "{facts:?}");
        }
    }

    #[test]
    fn what_nccl_would_change_is_copied() {
        let cases = [
            (Facts { op: None, ..facts() }, "broadcasts"),
            (Facts { devices: vec![Some(0), None], ..facts() }, "not in device memory"),
            (Facts { devices: vec![Some(1), Some(1)], ..facts() }, "share a GPU"),
            (Facts { has_joined: true, ..facts() }, "joined"),
            (Facts { is_prescaled: true, ..facts() }, "scale"),
            (Facts { is_postscaled: true, ..facts() }, "scale"),
            (Facts { is_hierarchical: false, ..facts() }, "in their order"),
            (Facts { codec: Codec::Bf16, ..facts() }, "codec"),
            (Facts { dtype: DType::I16, ..facts() }, "type of elements"),
            (Facts { dtype: DType::Bool, op: Some(ReduceOp::Max), ..facts() }, "type of elements"),
            (Facts { dtype: DType::I32, op: Some(ReduceOp::Average), ..facts() }, "truncates"),
            (Facts { dtype: DType::F16, op: Some(ReduceOp::Average), ..facts() }, "lose digits"),
            (Facts { dtype: DType::Bf16, op: Some(ReduceOp::Average), ranks: 3, ..facts() }, "is not exact"),
            (Facts { op: Some(ReduceOp::Max), ..facts() }, "NaN"),
            (Facts { op: Some(ReduceOp::Min), dtype: DType::F16, ..facts() }, "NaN"),
            (Facts { op: Some(ReduceOp::Adasum), ..facts() }, "no such reduction"),
            (Facts { op: Some(ReduceOp::BitAnd), dtype: DType::I32, ..facts() }, "no such reduction"),
            (Facts { codec: Codec::Plugin, ..facts() }, "codec"),
            (Facts { op: None, ..spread() }, "broadcasts"),
            (Facts { devices: vec![Some(0)], ..spread() }, "one rank of this host"),
            (Facts { is_prescaled: true, ..spread() }, "scale"),
            (Facts { is_hierarchical: false, ..spread() }, "in their order"),
            (Facts { codec: Codec::Plugin, ..spread() }, "codec"),
            (Facts { op: Some(ReduceOp::Average), dtype: DType::F16, ..spread() }, "sum of float16"),
            (Facts { op: Some(ReduceOp::Max), ..spread() }, "NaN"),
            (Facts { op: Some(ReduceOp::Adasum), ..spread() }, "no such reduction"),
        ];
        for (facts, words) in cases {
            let path = path_of(&facts);
            assert!(matches!(path, DevicePath::Copied(reason) if reason.contains(words)), "{facts:?}: {path:?}");
        }
    }
}
