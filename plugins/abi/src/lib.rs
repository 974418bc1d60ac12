//! The binary interface between a WebAssembly plugin and its sidecar, version [`VERSION`].
//!
//! A plugin is a core WebAssembly module. It imports nothing except, optionally, [`names::LOG`], and exports its memory
//! and a few functions. [`names::PLACE`] returns the address of its [`Table`], which locates fixed buffers. Before each
//! call the host writes a [`Call`] and the input; afterwards it reads the output. All numbers are little-endian, and
//! all buffers are aligned to [`limits::BUFFER_ALIGN`]. Host and guest compile this crate, which does not compile with
//! another memory layout.

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

/// The version of this interface, as returned by [`names::ABI`] and repeated in [`Table::abi`] and the manifest.
pub const VERSION: u32 = 1;

/// Rounds up to [`limits::BUFFER_ALIGN`]: the distance of operands in the input buffer.
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
