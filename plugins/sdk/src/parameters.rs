//! Parameters, as declared by [`export!`](crate::export!).

use crate::abi::limits::PARAMETER_BYTES;

/// A struct of parameters, read from the block of checked values that the host writes.
pub trait Parameters: Sized {
    /// Number of parameters.
    const COUNT: usize;

    /// Reads the block: [`PARAMETER_BYTES`] for each parameter, in the order of declaration.
    fn read(block: &[[u8; PARAMETER_BYTES]]) -> Self;
}

/// A parameter's type: `i64`, `f64`, `bool`, or [`Choice`].
pub trait Parameter: Sized {
    /// Reads the value from its 8 bytes.
    fn read(bytes: [u8; PARAMETER_BYTES]) -> Self;
}

/// The index of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice(pub usize);

impl Parameter for i64 {
    fn read(bytes: [u8; PARAMETER_BYTES]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

impl Parameter for f64 {
    fn read(bytes: [u8; PARAMETER_BYTES]) -> Self {
        Self::from_le_bytes(bytes)
    }
}

impl Parameter for bool {
    fn read(bytes: [u8; PARAMETER_BYTES]) -> Self {
        i64::from_le_bytes(bytes) != 0
    }
}

impl Parameter for Choice {
    #[allow(clippy::cast_possible_truncation, reason = "the host gives no more than there are choices")]
    #[allow(clippy::cast_sign_loss, reason = "the host gives the position in a list")]
    fn read(bytes: [u8; PARAMETER_BYTES]) -> Self {
        Self(i64::from_le_bytes(bytes) as usize)
    }
}

impl Choice {
    /// The index of the default in the list of choices: for [`export!`](crate::export!).
    ///
    /// # Panics
    /// If the default is not in the list; at compile time.
    #[doc(hidden)]
    #[must_use]
    pub const fn of(default: &str, choices: &[&str]) -> Self {
        let mut index = 0;
        while index < choices.len() {
            if equal(default.as_bytes(), choices[index].as_bytes()) {
                return Self(index);
            }
            index += 1;
        }
        panic!("the default is none of the choices");
    }
}

/// Compares two texts at compile time.
#[doc(hidden)]
#[must_use]
pub const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut index = 0;
    while index < a.len() && index < b.len() && a[index] == b[index] {
        index += 1;
    }
    index == a.len() && index == b.len()
}
