//! The structure that describes a call.

use core::mem::{align_of, offset_of, size_of};

/// Describes a call. The host writes it before each call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Call {
    /// The number of a [`Kind`].
    pub kind: u32,
    /// The number of a [`crate::DType`].
    pub dtype: u32,
    /// The number of a [`Stage`].
    pub stage: u32,
    /// Number of elements of the span.
    pub elements: u32,
    /// The span's first element within its tensor.
    pub offset: u64,
    /// Number of elements of the whole tensor.
    pub tensor_elements: u64,
    /// How often this tensor was reduced with this plugin before; equal on all ranks.
    pub round: u64,
    /// A number that identifies the tensor, equal on all ranks and in all rounds; usable as a seed.
    pub tensor: u64,
    /// When decoding, the bytes in the input; otherwise 0.
    pub encoded_bytes: u32,
    /// When reducing, the operands in the input; when concluding, the ranks in the measures; otherwise 0.
    pub ranks: u32,
    /// When reducing, the distance in bytes between operands in the input; otherwise 0.
    pub stride: u32,
    /// Numbers measured for each rank; 0 for shapes that do not measure.
    pub measures: u32,
}

impl Call {
    /// Bytes of a call.
    pub const BYTES: usize = 64;

    /// The call in its memory layout.
    #[inline]
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let words = [
            pair(self.kind, self.dtype),
            pair(self.stage, self.elements),
            self.offset,
            self.tensor_elements,
            self.round,
            self.tensor,
            pair(self.encoded_bytes, self.ranks),
            pair(self.stride, self.measures),
        ];
        let mut bytes = [0; Self::BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// The function that is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Kind {
    /// [`crate::names::ENCODE`].
    Encode = 1,
    /// [`crate::names::DECODE`].
    Decode = 2,
    /// [`crate::names::REDUCE`].
    Reduce = 3,
    /// [`crate::names::MEASURE`].
    Measure = 4,
    /// [`crate::names::CONCLUDE`].
    Conclude = 5,
}

impl Kind {
    /// Its number in a [`Call`].
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The kind with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Encode),
            2 => Some(Self::Decode),
            3 => Some(Self::Reduce),
            4 => Some(Self::Measure),
            5 => Some(Self::Conclude),
            _ => None,
        }
    }
}

/// The stage of a codec's call within an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Stage {
    /// A member's contribution.
    Contribution = 0,
    /// The result, encoded once by the owner of a chunk.
    Result = 1,
}

impl Stage {
    /// Its number in a [`Call`].
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// The stage with this number.
    #[must_use]
    pub const fn from_number(number: u32) -> Option<Self> {
        match number {
            0 => Some(Self::Contribution),
            1 => Some(Self::Result),
            _ => None,
        }
    }
}

const _: () = assert!(size_of::<Call>() == Call::BYTES && align_of::<Call>() == 64);
const _: () = assert!(offset_of!(Call, kind) == 0 && offset_of!(Call, dtype) == 4);
const _: () = assert!(offset_of!(Call, stage) == 8 && offset_of!(Call, elements) == 12);
const _: () = assert!(offset_of!(Call, offset) == 16 && offset_of!(Call, tensor_elements) == 24);
const _: () = assert!(offset_of!(Call, round) == 32 && offset_of!(Call, tensor) == 40);
const _: () = assert!(offset_of!(Call, encoded_bytes) == 48 && offset_of!(Call, ranks) == 52);
const _: () = assert!(offset_of!(Call, stride) == 56 && offset_of!(Call, measures) == 60);

#[cfg(test)]
mod tests {
    use super::{Call, Kind, Stage};

    #[test]
    fn each_field_is_written_where_it_lies() {
        let call = Call {
            kind: 0x0101,
            dtype: 2,
            stage: 3,
            elements: 4,
            offset: 0x0506_0708_090a_0b0c,
            tensor_elements: 6,
            round: 7,
            tensor: 8,
            encoded_bytes: 9,
            ranks: 10,
            stride: 11,
            measures: 12,
        };
        let bytes = call.to_bytes();
        assert_eq!(bytes[..8], [1, 1, 0, 0, 2, 0, 0, 0]);
        assert_eq!(bytes[8..24], [3, 0, 0, 0, 4, 0, 0, 0, 12, 11, 10, 9, 8, 7, 6, 5]);
        assert_eq!([bytes[24], bytes[32], bytes[40]], [6, 7, 8]);
        assert_eq!([bytes[48], bytes[52], bytes[56], bytes[60]], [9, 10, 11, 12]);
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 2 + 3 + 8 + 3 + 4);
    }

    #[test]
    fn numbers_lead_back() {
        let kinds = (0..8).filter_map(Kind::from_number).map(Kind::number);
        assert!(kinds.eq(1..=5));
        assert!((0..8).filter_map(Stage::from_number).map(Stage::number).eq(0..=1));
    }
}
