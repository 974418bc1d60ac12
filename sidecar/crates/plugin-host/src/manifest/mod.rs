//! What a plugin says about itself, checked.

mod document;
mod parameter;

use ronde_plugin_abi::limits;
use ronde_wire::DType;

pub use parameter::{Given, Parameter, ParameterError, ParameterKind, ParameterValue, Parameters};

/// What a plugin says about itself. It can only be had from bytes that were checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Small letters, digits and hyphens.
    pub name: String,
    /// Letters, digits, dots, plus signs and hyphens.
    pub version: String,
    /// One line for people.
    pub about: String,
    /// What it encodes, if it is a codec.
    pub codec: Option<CodecManifest>,
    /// What it reduces, if it is a reducer.
    pub reducer: Option<ReducerManifest>,
    /// What can be set, in the order of the block of parameters.
    pub parameters: Vec<Parameter>,
    /// What it wants.
    pub limits: Limits,
}

/// What a codec takes and promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodecManifest {
    /// The types of elements that it encodes, without repetition.
    pub dtypes: Vec<DType>,
    /// Bytes of state for each element, which the host keeps from one round to the next.
    pub state_bytes: usize,
    /// Whether decoding gives the very bits that were encoded.
    pub lossless: bool,
    /// Whether each element is encoded by itself, in the same number of bytes.
    pub elementwise: bool,
}

/// What a reducer takes and promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducerManifest {
    /// The types of elements that it reduces, without repetition.
    pub dtypes: Vec<DType>,
    /// How it sees the ranks' values.
    pub shape: Shape,
    /// Whether the order of operands changes nothing.
    pub commutative: bool,
}

/// How a reducer sees the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Two at a time; associative.
    Pairwise,
    /// All ranks' values of a span at once, in the order of ranks.
    Nary,
    /// So many numbers are measured of each rank's values first, which the reduction then sees.
    TwoPass {
        /// Numbers for each rank.
        measures: usize,
    },
    /// The host measures the inner products of all pairs of ranks; the plugin concludes one weight for each rank.
    Adaptive,
}

impl Shape {
    /// Numbers that the plugin measures for each rank.
    #[must_use]
    pub const fn measures(self) -> usize {
        if let Self::TwoPass { measures } = self { measures } else { 0 }
    }

    /// Its name in a manifest.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pairwise => "pairwise",
            Self::Nary => "n-ary",
            Self::TwoPass { .. } => "two-pass",
            Self::Adaptive => "adaptive",
        }
    }
}

/// Bounds on memory, time and ranks: those that a plugin wants, and those that a host grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the plugin's memory.
    pub memory_bytes: usize,
    /// Milliseconds of one call.
    pub call_ms: u32,
    /// Ranks whose values a reducer sees at once.
    pub ranks: usize,
}

impl Limits {
    /// The most that any host grants.
    pub const MAX: Self = Self {
        memory_bytes: limits::MEMORY_BYTES_MAX,
        call_ms: limits::CALL_MS_MAX,
        ranks: limits::RANKS_MAX as usize,
    };
    /// What a plugin wants that does not say what.
    pub const DEFAULT: Self = Self { memory_bytes: 4 << 20, call_ms: 20, ranks: 64 };
}

impl Manifest {
    /// Reads a manifest: JSON of at most [`limits::MANIFEST_BYTES_MAX`] in which every field is known.
    ///
    /// # Errors
    /// [`ManifestError`] that says which field is wrong, and what would be right.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        document::parse(bytes)
    }

    /// `name@version`, as people write it.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }

    /// What lies in the block of parameters, in bytes.
    #[must_use]
    pub fn parameter_bytes(&self) -> usize {
        self.parameters.len() * limits::PARAMETER_BYTES
    }
}

/// Why a manifest is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// It is longer than a manifest may be.
    #[error("the manifest has {bytes} bytes, but may have {}", limits::MANIFEST_BYTES_MAX)]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// It is no JSON, or has not the fields that a manifest has.
    #[error("the manifest is not what a manifest looks like: {0}")]
    Json(String),
    /// It is of another version of the interface.
    #[error(
        "the manifest says ABI version {found}, but this host speaks version {}; build the plugin with the matching SDK",
        ronde_plugin_abi::VERSION
    )]
    Abi {
        /// What it says.
        found: u32,
    },
    /// A field has a value that it cannot have.
    #[error("the manifest's {field} {problem}")]
    Field {
        /// Which one.
        field: String,
        /// What is wrong with it, and what would be right.
        problem: String,
    },
}

impl ManifestError {
    /// A field's value is wrong.
    fn field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { field: field.into(), problem: problem.into() }
    }
}
