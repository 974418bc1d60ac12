//! The manifest: a plugin's description of itself, checked.

mod document;
mod parameter;

use ronde_plugin_abi::limits;
use ronde_wire::DType;

pub use parameter::{Given, Parameter, ParameterError, ParameterKind, ParameterValue, Parameters};

/// A plugin's description of itself. It is created by [`Self::parse`] only, which checks it.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Small letters, digits and hyphens.
    pub name: String,
    /// Letters, digits, dots, plus signs and hyphens.
    pub version: String,
    /// One line for people.
    pub about: String,
    /// The codec, if it is one.
    pub codec: Option<CodecManifest>,
    /// The reducer, if it is one.
    pub reducer: Option<ReducerManifest>,
    /// The parameters, in the order of the block of parameters.
    pub parameters: Vec<Parameter>,
    /// The requested limits.
    pub limits: Limits,
}

/// The properties of a codec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodecManifest {
    /// Supported element types, without repetition.
    pub dtypes: Vec<DType>,
    /// Bytes of state for each element, which the host keeps from one round to the next.
    pub state_bytes: usize,
    /// Whether decoding restores exactly the encoded bits.
    pub lossless: bool,
    /// Whether elements are encoded independently, into equally many bytes each.
    pub elementwise: bool,
}

/// The properties of a reducer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducerManifest {
    /// Supported element types, without repetition.
    pub dtypes: Vec<DType>,
    /// How it receives the ranks' values.
    pub shape: Shape,
    /// Whether the result is independent of the order of operands.
    pub commutative: bool,
}

/// How a reducer receives the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Two at a time; associative.
    Pairwise,
    /// All ranks' values of a span at once, in rank order.
    Nary,
    /// Each rank's values are measured first; the reduction receives these numbers.
    TwoPass {
        /// Numbers per rank.
        measures: usize,
    },
    /// The host measures the inner products of all pairs of ranks, from which the plugin computes one weight per rank.
    Adaptive,
}

impl Shape {
    /// How many numbers the plugin measures for each rank.
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

/// Limits for memory, time and ranks, as requested by a plugin or granted by a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the plugin's memory.
    pub memory_bytes: usize,
    /// Milliseconds of one call.
    pub call_ms: u32,
    /// Ranks whose values a reducer receives at once.
    pub ranks: usize,
}

impl Limits {
    /// The most that any host may grant.
    pub const MAX: Self = Self {
        memory_bytes: limits::MEMORY_BYTES_MAX,
        call_ms: limits::CALL_MS_MAX,
        ranks: limits::RANKS_MAX as usize,
    };
    /// The limits of a plugin whose manifest sets none.
    pub const DEFAULT: Self = Self { memory_bytes: 4 << 20, call_ms: 20, ranks: 64 };
}

impl Manifest {
    /// Parses a manifest: JSON of at most [`limits::MANIFEST_BYTES_MAX`] bytes without unknown fields.
    ///
    /// # Errors
    /// [`ManifestError`] with the invalid field and its valid values.
    pub fn parse(bytes: &[u8]) -> Result<Self, ManifestError> {
        document::parse(bytes)
    }

    /// `name@version`.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.version)
    }

    /// Bytes of the block of parameters.
    #[must_use]
    pub fn parameter_bytes(&self) -> usize {
        self.parameters.len() * limits::PARAMETER_BYTES
    }
}

/// Why a manifest is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The manifest is too long.
    #[error("the manifest has {bytes} bytes, but may have {}", limits::MANIFEST_BYTES_MAX)]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The manifest is not JSON, or has wrong fields.
    #[error("the manifest is not valid JSON with the fields of a manifest: {0}")]
    Json(String),
    /// The manifest has another version of the interface.
    #[error(
        "the manifest has ABI version {found}, but this host has version {}; build the plugin with the matching SDK",
        ronde_plugin_abi::VERSION
    )]
    Abi {
        /// The manifest's version.
        found: u32,
    },
    /// A field has an invalid value.
    #[error("the manifest's {field} {problem}")]
    Field {
        /// The name of the field.
        field: String,
        /// What is wrong with the value, and which values are valid.
        problem: String,
    },
}

impl ManifestError {
    /// Creates an error for a field.
    fn field(field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Field { field: field.into(), problem: problem.into() }
    }
}
