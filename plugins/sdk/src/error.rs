//! Why a call fails.

use core::fmt;

use ronde_plugin_abi::codes;

/// Fails the operation on all ranks; the sidecar names plugin, tensor, code and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    code: i32,
    text: &'static str,
}

impl Error {
    /// Parameters that do not go together; `text` says which, and what would be right.
    #[must_use]
    pub const fn parameters(text: &'static str) -> Self {
        Self { code: codes::PARAMETERS, text }
    }

    /// Encoded bytes that this codec does not give; `text` says what they should be.
    #[must_use]
    pub const fn malformed(text: &'static str) -> Self {
        Self { code: codes::MALFORMED, text }
    }

    /// Values that cannot be taken.
    #[must_use]
    pub const fn values(text: &'static str) -> Self {
        Self { code: codes::VALUES, text }
    }

    /// A code of the plugin's own: 0 is the first one.
    #[must_use]
    pub const fn own(number: u16, text: &'static str) -> Self {
        Self { code: codes::OWN - number as i32, text }
    }

    /// A type or kind of call that is not taken.
    pub(crate) const fn unsupported(text: &'static str) -> Self {
        Self { code: codes::UNSUPPORTED, text }
    }

    /// A span that the buffers do not hold.
    pub(crate) const fn too_long(text: &'static str) -> Self {
        Self { code: codes::TOO_LONG, text }
    }

    /// What the function gives the host: always negative.
    #[must_use]
    pub const fn code(&self) -> i32 {
        self.code
    }

    /// For people.
    #[must_use]
    pub const fn text(&self) -> &'static str {
        self.text
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.text, self.code)
    }
}

impl core::error::Error for Error {}
