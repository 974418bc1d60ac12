//! Conversion of element types, reductions and collectives.

use ronde_wire::{Collective, DType, Rank, ReduceOp, SetId, limits};

use super::ConvertError;
use crate::v1;
use crate::v1::collective::Kind;

/// Converts the number of an element type.
///
/// # Errors
/// [`ConvertError::Missing`] for 0, [`ConvertError::Unknown`] for an unknown number.
pub fn dtype_from(number: i32) -> Result<DType, ConvertError> {
    let unknown = ConvertError::Unknown { field: "dtype", given: number };
    Ok(match v1::DType::try_from(number).map_err(|_| unknown)? {
        v1::DType::DtypeUnspecified => return Err(missing("dtype", "name the type of the elements")),
        v1::DType::DtypeU8 => DType::U8,
        v1::DType::DtypeI8 => DType::I8,
        v1::DType::DtypeU16 => DType::U16,
        v1::DType::DtypeI16 => DType::I16,
        v1::DType::DtypeI32 => DType::I32,
        v1::DType::DtypeI64 => DType::I64,
        v1::DType::DtypeF16 => DType::F16,
        v1::DType::DtypeBf16 => DType::Bf16,
        v1::DType::DtypeF32 => DType::F32,
        v1::DType::DtypeF64 => DType::F64,
        v1::DType::DtypeBool => DType::Bool,
    })
}

/// Converts the number of a reduction.
///
/// # Errors
/// [`ConvertError::Missing`] for 0, [`ConvertError::Unknown`] for an unknown number.
pub fn reduce_op_from(number: i32) -> Result<ReduceOp, ConvertError> {
    let unknown = ConvertError::Unknown { field: "reduce op", given: number };
    Ok(match v1::ReduceOp::try_from(number).map_err(|_| unknown)? {
        v1::ReduceOp::Unspecified => return Err(missing("reduce op", "name how elements are combined")),
        v1::ReduceOp::Average => ReduceOp::Average,
        v1::ReduceOp::Sum => ReduceOp::Sum,
        v1::ReduceOp::Adasum => ReduceOp::Adasum,
        v1::ReduceOp::Min => ReduceOp::Min,
        v1::ReduceOp::Max => ReduceOp::Max,
        v1::ReduceOp::Product => ReduceOp::Product,
        v1::ReduceOp::Median => ReduceOp::Median,
        v1::ReduceOp::ClippedMean => ReduceOp::ClippedMean,
        v1::ReduceOp::Plugin => ReduceOp::Plugin,
        v1::ReduceOp::BitAnd => ReduceOp::BitAnd,
        v1::ReduceOp::BitOr => ReduceOp::BitOr,
        v1::ReduceOp::BitXor => ReduceOp::BitXor,
    })
}

/// Converts a collective, which must be set.
///
/// # Errors
/// [`ConvertError`] if the kind or reduction is unset or unknown, or a rank exceeds the limit.
pub fn collective_from(message: Option<v1::Collective>) -> Result<Collective, ConvertError> {
    let kind = message.and_then(|m| m.kind).ok_or_else(|| missing("collective", "say which operation it is"))?;
    Ok(match kind {
        Kind::AllReduce(m) => Collective::AllReduce { op: reduce_op_from(m.op)? },
        Kind::AllGather(_) => Collective::AllGather,
        Kind::ReduceScatter(m) => Collective::ReduceScatter { op: reduce_op_from(m.op)? },
        Kind::Broadcast(m) => Collective::Broadcast { root: rank("root", m.root)? },
        Kind::AllToAll(m) => Collective::AllToAll { splits: m.splits },
        Kind::Reduce(m) => Collective::Reduce { op: reduce_op_from(m.op)?, root: rank("root", m.root)? },
        Kind::Gather(m) => Collective::Gather { root: rank("root", m.root)? },
        Kind::Scatter(m) => Collective::Scatter { root: rank("root", m.root)? },
        Kind::Send(m) => Collective::Send { to: rank("to", m.to)?, tag: m.tag },
        Kind::Recv(m) => Collective::Recv { from: rank("from", m.from)?, tag: m.tag },
        Kind::RecvAny(m) => Collective::RecvAny { tag: m.tag },
        Kind::Barrier(_) => Collective::Barrier,
        Kind::Join(_) => Collective::Join,
        Kind::AddSet(m) if m.ranks.len() > limits::RANKS_MAX => {
            let max = limits::RANKS_MAX as u64;
            return Err(ConvertError::TooLarge { field: "ranks", given: m.ranks.len() as u64, max });
        }
        Kind::AddSet(m) => {
            let ranks = m.ranks.into_iter().map(|r| rank("ranks", r)).collect::<Result<_, _>>()?;
            if m.members_only { Collective::AddSetOfMembers { ranks } } else { Collective::AddSet { ranks } }
        }
        Kind::RemoveSet(m) => Collective::RemoveSet { set: SetId(m.set) },
    })
}

impl From<DType> for v1::DType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::U8 => Self::DtypeU8,
            DType::I8 => Self::DtypeI8,
            DType::U16 => Self::DtypeU16,
            DType::I16 => Self::DtypeI16,
            DType::I32 => Self::DtypeI32,
            DType::I64 => Self::DtypeI64,
            DType::F16 => Self::DtypeF16,
            DType::Bf16 => Self::DtypeBf16,
            DType::F32 => Self::DtypeF32,
            DType::F64 => Self::DtypeF64,
            DType::Bool => Self::DtypeBool,
            // A type without a number here fails the test `every_dtype_and_op_has_its_number`.
            _ => Self::DtypeUnspecified,
        }
    }
}

impl From<ReduceOp> for v1::ReduceOp {
    fn from(op: ReduceOp) -> Self {
        match op {
            ReduceOp::Average => Self::Average,
            ReduceOp::Sum => Self::Sum,
            ReduceOp::Adasum => Self::Adasum,
            ReduceOp::Min => Self::Min,
            ReduceOp::Max => Self::Max,
            ReduceOp::Product => Self::Product,
            ReduceOp::Median => Self::Median,
            ReduceOp::ClippedMean => Self::ClippedMean,
            ReduceOp::Plugin => Self::Plugin,
            ReduceOp::BitAnd => Self::BitAnd,
            ReduceOp::BitOr => Self::BitOr,
            ReduceOp::BitXor => Self::BitXor,
            // As for element types: the receiver rejects an unset value.
            _ => Self::Unspecified,
        }
    }
}

impl From<Collective> for v1::Collective {
    fn from(collective: Collective) -> Self {
        use v1::collective as m;
        let number = |op: ReduceOp| i32::from(v1::ReduceOp::from(op));
        let kind = match collective {
            Collective::AllReduce { op } => Some(Kind::AllReduce(m::AllReduce { op: number(op) })),
            Collective::AllGather => Some(Kind::AllGather(m::AllGather {})),
            Collective::ReduceScatter { op } => Some(Kind::ReduceScatter(m::ReduceScatter { op: number(op) })),
            Collective::Broadcast { root } => Some(Kind::Broadcast(m::Broadcast { root: root.0 })),
            Collective::AllToAll { splits } => Some(Kind::AllToAll(m::AllToAll { splits })),
            Collective::Reduce { op, root } => Some(Kind::Reduce(m::Reduce { op: number(op), root: root.0 })),
            Collective::Gather { root } => Some(Kind::Gather(m::Gather { root: root.0 })),
            Collective::Scatter { root } => Some(Kind::Scatter(m::Scatter { root: root.0 })),
            Collective::Send { to, tag } => Some(Kind::Send(m::Send { to: to.0, tag })),
            Collective::Recv { from, tag } => Some(Kind::Recv(m::Recv { from: from.0, tag })),
            Collective::RecvAny { tag } => Some(Kind::RecvAny(m::RecvAny { tag })),
            Collective::Barrier => Some(Kind::Barrier(m::Barrier {})),
            Collective::Join => Some(Kind::Join(m::Join {})),
            Collective::AddSet { ranks } => Some(add_set(ranks, false)),
            Collective::AddSetOfMembers { ranks } => Some(add_set(ranks, true)),
            Collective::RemoveSet { set } => Some(Kind::RemoveSet(m::RemoveSet { set: set.0 })),
            // Unset, which the receiver rejects. No collective of this release gets here.
            _ => None,
        };
        Self { kind }
    }
}

/// The valid ranks of a process set that its members are to form; none of another operation.
pub(super) fn members(message: &v1::Collective) -> Vec<Rank> {
    match &message.kind {
        Some(Kind::AddSet(m)) if m.members_only => {
            m.ranks.iter().take(limits::RANKS_MAX).filter_map(|given| rank("ranks", *given).ok()).collect()
        }
        _ => Vec::new(),
    }
}

fn add_set(ranks: Vec<Rank>, members_only: bool) -> Kind {
    Kind::AddSet(v1::collective::AddSet { ranks: ranks.into_iter().map(|rank| rank.0).collect(), members_only })
}

/// Converts a rank, which must be below the limit.
pub(super) fn rank(field: &'static str, given: u32) -> Result<Rank, ConvertError> {
    let max = limits::RANKS_MAX as u64 - 1;
    if u64::from(given) > max {
        return Err(ConvertError::TooLarge { field, given: given.into(), max });
    }
    Ok(Rank(given))
}

fn missing(field: &'static str, hint: &'static str) -> ConvertError {
    ConvertError::Missing { field, hint }
}
