//! What a WebAssembly plugin and the sidecar that runs it agree on, in version [`VERSION`].
//!
//! A plugin is a core WebAssembly module that imports nothing (but, if it likes, [`names::LOG`]) and exports its memory and a
//! few functions without arguments. At [`names::PLACE`] it tells where its [`Table`] lies, which names fixed buffers; before
//! each call the host writes a [`Call`] and the input, after it the host reads the output. All numbers are little-endian,
//! all buffers aligned to [`limits::BUFFER_ALIGN`]. Host and guest compile this crate, and both refuse to compile with
//! another layout.

#![no_std]
#![forbid(unsafe_code)]

mod call;
pub mod codes;
mod dtype;
pub mod limits;
pub mod names;
mod table;

pub use call::{Call, Kind, Stage};
pub use dtype::DType;
pub use table::Table;

/// The version of this interface, which [`names::ABI`] gives, and which [`Table::abi`] and the manifest repeat.
pub const VERSION: u32 = 1;

/// So many bytes rounded up to [`limits::BUFFER_ALIGN`]: the distance of operands in the input buffer.
#[must_use]
pub const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(limits::BUFFER_ALIGN)
}

#[cfg(test)]
mod tests {
    use super::padded;

    #[test]
    fn operands_are_lines_apart() {
        assert_eq!([0, 1, 63, 64, 65].map(padded), [0, 64, 64, 64, 128]);
    }
}
