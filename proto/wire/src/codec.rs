//! Encodings of elements between sidecars.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::dtype::DType;

/// How the contributions to an all-reduce are encoded on the wire. A lossy codec uses the direct two-stage plan, in
/// which each value is rounded at most twice: by its contributor and by the member that reduced it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Codec {
    /// The elements unchanged.
    #[default]
    None,
    /// Each float32 as an IEEE 754 binary16, rounded to nearest, ties to even.
    F16,
    /// Each float32 as a bfloat16, rounded to nearest, ties to even.
    Bf16,
    /// The encoding of the plugin that the request names.
    Plugin,
}

impl Codec {
    /// All codecs that need no plugin.
    pub const ALL: [Self; 3] = [Self::None, Self::F16, Self::Bf16];

    /// The name in the API; empty for none.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Plugin => "plugin",
        }
    }

    /// The codec with this name that needs no plugin, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.name() == name)
    }

    /// Bytes of one encoded element; `None` when the codec does not support elements of this type, or is a plugin.
    #[must_use]
    pub const fn encoded_bytes(self, dtype: DType) -> Option<usize> {
        match (self, dtype) {
            (Self::None, _) => Some(dtype.size_bytes()),
            (Self::F16 | Self::Bf16, DType::F32) => Some(2),
            _ => None,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::None) { "none" } else { self.name() })
    }
}
