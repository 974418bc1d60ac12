//! Errors of calls.

use core::fmt;

use ronde_plugin_abi::codes;

/// An error that fails the operation on all ranks. The sidecar reports plugin, tensor, code and text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error {
    code: i32,
    text: &'static str,
}

impl Error {
    /// Incompatible parameters; `text` says which, and what would be valid.
    #[must_use]
    pub const fn parameters(text: &'static str) -> Self {
        Self { code: codes::PARAMETERS, text }
    }

    /// Malformed encoded bytes; `text` says what is expected.
    #[must_use]
    pub const fn malformed(text: &'static str) -> Self {
        Self { code: codes::MALFORMED, text }
    }

    /// Unsupported values.
    #[must_use]
    pub const fn values(text: &'static str) -> Self {
        Self { code: codes::VALUES, text }
    }

    /// An error code of the plugin's own, starting at 0.
    #[must_use]
    pub const fn own(number: u16, text: &'static str) -> Self {
        Self { code: codes::OWN - number as i32, text }
    }

    /// An unsupported type or kind of call.
    pub(crate) const fn unsupported(text: &'static str) -> Self {
        Self { code: codes::UNSUPPORTED, text }
    }

    /// A span that does not fit the buffers.
    pub(crate) const fn too_long(text: &'static str) -> Self {
        Self { code: codes::TOO_LONG, text }
    }

    /// The code that the function returns to the host; always negative.
    #[must_use]
    pub const fn code(&self) -> i32 {
        self.code
    }

    /// The text.
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
