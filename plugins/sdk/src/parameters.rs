//! Parameters: what [`export!`](crate::export!) makes of their declarations.

use crate::abi::limits::PARAMETER_BYTES;

/// A struct of parameters, read from the block that the host fills in with checked values.
pub trait Parameters: Sized {
    /// How many there are.
    const COUNT: usize;

    /// Reads the block: [`PARAMETER_BYTES`] for each, in the order of their declaration.
    fn read(block: &[[u8; PARAMETER_BYTES]]) -> Self;
}

/// A parameter's type: `i64`, `f64`, `bool`, or [`Choice`].
pub trait Parameter: Sized {
    /// From its 8 bytes.
    fn read(bytes: [u8; PARAMETER_BYTES]) -> Self;
}

/// The position of the chosen word in its list.
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
    /// The position of the default in the list of choices: for [`export!`](crate::export!).
    ///
    /// # Panics
    /// When it is not in the list; at compile time, as it is called there.
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

/// Whether two texts are the same, at compile time.
#[doc(hidden)]
#[must_use]
pub const fn equal(a: &[u8], b: &[u8]) -> bool {
    let mut index = 0;
    while index < a.len() && index < b.len() && a[index] == b[index] {
        index += 1;
    }
    index == a.len() && index == b.len()
}
