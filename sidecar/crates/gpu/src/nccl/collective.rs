//! Collectives of a [`Communicator`] on elements of several types.

#![allow(unsafe_code, reason = "collectives on device memory")]

use std::ffi::c_int;
use std::time::Instant;

use cudarc::nccl::sys::ncclDataType_t;

use super::communicator::{Communicator, ReduceOp};
use super::table::Call;
use crate::driver::Stream;
use crate::error::GpuError;
use crate::span::DeviceSpan;

/// A type of elements that NCCL reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
}

impl ElementType {
    /// The bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The bits of its mantissa, without the implicit one; `None` for integers.
    #[must_use]
    pub const fn mantissa_bits(self) -> Option<u32> {
        match self {
            Self::F16 => Some(10),
            Self::Bf16 => Some(7),
            Self::F32 => Some(23),
            Self::F64 => Some(52),
            Self::I8 | Self::U8 | Self::I32 | Self::I64 => None,
        }
    }

    pub(super) fn number(self) -> c_int {
        let dtype = match self {
            Self::I8 => ncclDataType_t::ncclInt8,
            Self::U8 => ncclDataType_t::ncclUint8,
            Self::I32 => ncclDataType_t::ncclInt32,
            Self::I64 => ncclDataType_t::ncclInt64,
            Self::F16 => ncclDataType_t::ncclFloat16,
            // cudarc leaves it out, because the header defines it conditionally.
            Self::Bf16 => return NCCL_BFLOAT16,
            Self::F32 => ncclDataType_t::ncclFloat32,
            Self::F64 => ncclDataType_t::ncclFloat64,
        };
        dtype as c_int
    }

    /// A factor as an element, in the first bytes. The factor is a power of two in the range of the type's normal numbers for
    /// the 16-bit types.
    fn scalar(self, factor: f64) -> [u8; 8] {
        let mut bytes = [0; 8];
        #[expect(clippy::cast_possible_truncation, reason = "rounds to the type")]
        let single = factor as f32;
        match self {
            Self::F64 => bytes.copy_from_slice(&factor.to_le_bytes()),
            Self::F32 => bytes[..4].copy_from_slice(&single.to_le_bytes()),
            Self::Bf16 => bytes[..2].copy_from_slice(&single.to_le_bytes()[2..]),
            Self::F16 => bytes[..2].copy_from_slice(&half_bits(single).to_le_bytes()),
            Self::I8 | Self::U8 | Self::I32 | Self::I64 => {}
        }
        bytes
    }
}

/// `ncclBfloat16` of all versions since 2.10.
const NCCL_BFLOAT16: c_int = 9;

/// The binary16 with the value of a normal number of it; its low mantissa bits are cut off.
fn half_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let exponent = ((bits >> 23) & 0xff).saturating_sub(127 - 15).min(30);
    #[expect(clippy::cast_possible_truncation, reason = "16 bits are left")]
    let half = (((bits >> 16) & 0x8000) | (exponent << 10) | ((bits >> 13) & 0x3ff)) as u16;
    half
}

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    /// The operation.
    pub op: ReduceOp,
    /// Multiplies each contribution to a sum of floating-point numbers; 1 otherwise. For 16-bit types a power of two.
    pub factor: f64,
}

impl Reduction {
    /// The bytes of other collectives.
    pub const NONE: Self = Self { op: ReduceOp::Sum, factor: 1.0 };
}

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// All ranks get the reduction of all. Both sides have the same length.
    AllReduce,
    /// The source has a part for each rank; the target gets the reduction of this rank's.
    ReduceScatter,
    /// The target gets all ranks' sources in the order of ranks.
    AllGather,
    /// All ranks get the source of a rank.
    Broadcast {
        /// That rank.
        root: u32,
    },
}

/// A collective with its memory.
#[derive(Debug)]
pub struct Work<'a> {
    /// Which one.
    pub collective: Collective,
    /// This rank's contribution.
    pub source: &'a DeviceSpan,
    /// Its result; may be (for parts: within) the source, where NCCL allows that.
    pub target: &'a DeviceSpan,
    /// The elements.
    pub dtype: ElementType,
    /// How they are combined.
    pub reduction: Reduction,
}

impl Work<'_> {
    /// NCCL's call and count of elements.
    pub(super) fn call(&self, ranks: u32) -> Result<(Call, usize), GpuError> {
        let (source, target, ranks) = (self.source.bytes(), self.target.bytes(), ranks as usize);
        let (call, counted, fits) = match self.collective {
            Collective::AllReduce => (Call::AllReduce, source, source == target),
            Collective::ReduceScatter => (Call::ReduceScatter, target, Some(source) == target.checked_mul(ranks)),
            Collective::AllGather => (Call::AllGather, source, Some(target) == source.checked_mul(ranks)),
            Collective::Broadcast { root } => {
                let number = c_int::try_from(root).ok().filter(|_| (root as usize) < ranks);
                let root = number.ok_or_else(|| GpuError::argument(format!("root {root} of {ranks} ranks")))?;
                (Call::Broadcast { root }, target, source == target)
            }
        };
        if !fits || !counted.is_multiple_of(self.dtype.bytes()) {
            let (what, dtype) = (self.collective, self.dtype);
            return Err(GpuError::argument(format!(
                "{what:?} of {dtype:?} from {source} bytes into {target} bytes among {ranks} ranks: the lengths do not fit"
            )));
        }
        Ok((call, counted / self.dtype.bytes()))
    }
}

impl Communicator {
    /// Enqueues a collective on a stream: when this returns, an event of the stream comes after it. All ranks enqueue the same
    /// collectives in the same order.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or lengths that do not fit; [`GpuError::Aborted`], also when NCCL
    /// has not enqueued it by `deadline`.
    pub fn enqueue(&mut self, work: &Work<'_>, stream: &Stream, deadline: Instant) -> Result<(), GpuError> {
        let (call, count) = work.call(self.ranks())?;
        self.context.check_span(work.source)?;
        self.context.check_span(work.target)?;
        let (handle, table, dtype) = (self.handle()?, self.nccl.table, work.dtype.number());
        let own = self.scaled_sum(work.dtype, work.reduction)?;
        let op = own.unwrap_or(work.reduction.op.number());
        let addresses = (work.source.address(), work.target.address(), count);
        // SAFETY: both spans were checked to be this device's and to have the lengths that the collective uses; their owners
        // keep them (contract of `DeviceSpan::new`).
        let enqueue = || unsafe { table.collective(handle, call, addresses, (dtype, op), stream.handle()) };
        let enqueued = self.context.with(enqueue)?;
        let checked = self.nccl.check("a collective of NCCL", enqueued);
        checked.inspect_err(|error| self.abort(&error.to_string()))?;
        // A communicator that does not block may return before the kernel is on the stream.
        self.wait_while_in_progress(deadline, || "NCCL did not enqueue a collective in time".to_owned())?;
        own.map_or(Ok(()), |op| self.destroy_op(op))
    }

    /// Releases an operation of [`Communicator::scaled_sum`]; collectives that were enqueued keep it.
    pub(super) fn destroy_op(&self, op: c_int) -> Result<(), GpuError> {
        let (handle, table) = (self.handle()?, self.nccl.table);
        let destroyed = self.context.with(|| table.destroy_op(handle, op))?;
        self.nccl.check("ncclRedOpDestroy", destroyed)
    }

    /// An operation of the communicator's own, if the contributions are multiplied.
    pub(super) fn scaled_sum(&self, dtype: ElementType, reduction: Reduction) -> Result<Option<c_int>, GpuError> {
        let Reduction { op, factor } = reduction;
        if factor.to_bits() == 1.0_f64.to_bits() {
            return Ok(None);
        }
        if op != ReduceOp::Sum || dtype.mantissa_bits().is_none() {
            return Err(GpuError::argument(format!("{op:?} of {dtype:?} takes no factor")));
        }
        let (handle, table) = (self.handle()?, self.nccl.table);
        let mut scalar = dtype.scalar(factor);
        let made = self.context.with(|| table.create_scaled_sum(handle, &mut scalar, dtype.number()))?;
        self.nccl.check("ncclRedOpCreatePreMulSum", made).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_become_elements() {
        assert_eq!(ElementType::F16.scalar(0.25)[..2], 0x3400_u16.to_le_bytes());
        assert_eq!(ElementType::F16.scalar(1.5)[..2], 0x3e00_u16.to_le_bytes());
        assert_eq!(ElementType::Bf16.scalar(0.125)[..2], 0x3e00_u16.to_le_bytes());
        assert_eq!(ElementType::F32.scalar(0.1)[..4], 0.1_f32.to_le_bytes());
        assert_eq!(ElementType::F64.scalar(0.1), 0.1_f64.to_le_bytes());
    }

    #[test]
    fn lengths_have_to_fit() {
        let span = |bytes| {
            // SAFETY: nothing uses the memory.
            unsafe { DeviceSpan::new(0, 4096, bytes, None) }
        };
        let call = |collective, source, target, ranks| {
            let (source, target) = (span(source), span(target));
            let dtype = ElementType::F32;
            Work { collective, source: &source, target: &target, dtype, reduction: Reduction::NONE }.call(ranks)
        };
        assert_eq!(call(Collective::AllReduce, 8, 8, 3).expect("equal"), (Call::AllReduce, 2));
        assert_eq!(call(Collective::ReduceScatter, 24, 8, 3).expect("a third"), (Call::ReduceScatter, 2));
        assert_eq!(call(Collective::AllGather, 8, 24, 3).expect("three"), (Call::AllGather, 2));
        assert_eq!(call(Collective::Broadcast { root: 2 }, 8, 8, 3).expect("a rank"), (Call::Broadcast { root: 2 }, 2));
        call(Collective::AllReduce, 8, 12, 3).expect_err("other lengths");
        call(Collective::AllReduce, 6, 6, 3).expect_err("no whole elements");
        call(Collective::ReduceScatter, 20, 8, 3).expect_err("no three parts");
        call(Collective::AllGather, 8, 16, 3).expect_err("two parts");
        call(Collective::Broadcast { root: 3 }, 8, 8, 3).expect_err("ranks are 0 to 2");
    }
}
