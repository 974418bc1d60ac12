//! The table of a plugin's buffers.

use core::mem::{align_of, offset_of, size_of};

/// Addresses and sizes in bytes of a plugin's buffers. A buffer of 0 bytes is absent, whatever its address. Table, call
/// and buffers must be within the memory, at multiples of 64, and must not overlap, except that the output of a
/// pairwise reducer may replace the left operand: the start of the input, and at most half of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Table {
    /// [`crate::VERSION`].
    pub abi: u32,
    /// Address of the [`crate::Call`].
    pub call: u32,
    /// Address of the block of parameters: 8 bytes each, in the order of the manifest.
    pub parameters: u32,
    /// Its size: at least that of the manifest's parameters.
    pub parameters_bytes: u32,
    /// Address of the values to encode, the bytes to decode, or the operands to reduce.
    pub input: u32,
    /// Its size: at least 64 bytes for each operand.
    pub input_bytes: u32,
    /// Address of encoded bytes, decoded values, or the reduced values.
    pub output: u32,
    /// Its size.
    pub output_bytes: u32,
    /// Address of a codec's state.
    pub state: u32,
    /// Its size: at least that of 64 elements if there is a state.
    pub state_bytes: u32,
    /// Address of the measures, which are `f64`.
    pub measures: u32,
    /// Its size.
    pub measures_bytes: u32,
    /// Must be zero.
    pub reserved: [u32; 4],
}

impl Table {
    /// Bytes of a table.
    pub const BYTES: usize = 64;

    /// Reads a table in its memory layout.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |index: usize| {
            let at = index * 4;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Self {
            abi: word(0),
            call: word(1),
            parameters: word(2),
            parameters_bytes: word(3),
            input: word(4),
            input_bytes: word(5),
            output: word(6),
            output_bytes: word(7),
            state: word(8),
            state_bytes: word(9),
            measures: word(10),
            measures_bytes: word(11),
            reserved: [word(12), word(13), word(14), word(15)],
        }
    }
}

const _: () = assert!(size_of::<Table>() == Table::BYTES && align_of::<Table>() == 64);
const _: () = assert!(offset_of!(Table, abi) == 0 && offset_of!(Table, call) == 4);
const _: () = assert!(offset_of!(Table, parameters) == 8 && offset_of!(Table, parameters_bytes) == 12);
const _: () = assert!(offset_of!(Table, input) == 16 && offset_of!(Table, input_bytes) == 20);
const _: () = assert!(offset_of!(Table, output) == 24 && offset_of!(Table, output_bytes) == 28);
const _: () = assert!(offset_of!(Table, state) == 32 && offset_of!(Table, state_bytes) == 36);
const _: () = assert!(offset_of!(Table, measures) == 40 && offset_of!(Table, measures_bytes) == 44);
const _: () = assert!(offset_of!(Table, reserved) == 48);

#[cfg(test)]
mod tests {
    use super::Table;

    #[test]
    fn words_are_read_in_their_order() {
        let bytes = core::array::from_fn(|at| if at % 4 == 0 { u8::try_from(at / 4).expect("16 words") } else { 0 });
        let table = Table::from_bytes(&bytes);
        let buffers = [table.abi, table.call, table.parameters, table.parameters_bytes, table.input, table.input_bytes];
        assert_eq!(buffers, [0, 1, 2, 3, 4, 5]);
        let buffers =
            [table.output, table.output_bytes, table.state, table.state_bytes, table.measures, table.measures_bytes];
        assert_eq!(buffers, [6, 7, 8, 9, 10, 11]);
        assert_eq!(table.reserved, [12, 13, 14, 15]);
    }
}
