//! Plugins as requests and orders name them: the module, its parameters, and the properties that plans depend on.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::collective::ReduceOp;
use crate::limits;

/// A plugin with its parameters. Equal values mean equal behaviour: the digest covers the whole module.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PluginUse {
    /// The name in its manifest: 1 to [`limits::PLUGIN_NAME_BYTES_MAX`] of `a-z 0-9 -`.
    pub name: String,
    /// The version in its manifest: 1 to [`limits::PLUGIN_VERSION_BYTES_MAX`] of `0-9 A-Z a-z . + -`.
    pub version: String,
    /// SHA-256 of the module.
    pub digest: [u8; 32],
    /// All parameters in the order of the manifest, each as the eight bytes that reach the plugin, little-endian.
    pub parameters: Vec<u64>,
    /// What it does.
    pub work: PluginWork,
}

/// What a plugin computes, as far as plans depend on it. It follows from the module and the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PluginWork {
    /// It encodes and decodes contributions; the decoded values are summed.
    Codec {
        /// The most elements of one call.
        block_elements: u32,
        /// The most bytes that so many elements encode to.
        encoded_bytes: u32,
    },
    /// It reduces two ranks' values to one; associative but for rounding.
    Pairwise,
    /// It reduces all ranks' values at once.
    NAry,
    /// It measures each rank's tensor first, then reduces all ranks' values at once.
    TwoPass {
        /// Numbers for each rank.
        measures: u32,
    },
    /// The inner products of all pairs of ranks are measured first.
    Adaptive,
}

impl PluginWork {
    /// Whether it encodes, rather than reduces.
    #[must_use]
    pub const fn is_codec(self) -> bool {
        matches!(self, Self::Codec { .. })
    }
}

/// Why a plugin of a peer is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PluginError {
    /// A number is out of its bounds.
    #[error("{what} of a plugin is {given}, which is not within {min} to {max}")]
    Number {
        /// Which number.
        what: &'static str,
        /// What it is.
        given: usize,
        /// The least.
        min: usize,
        /// The most.
        max: usize,
    },
    /// A text has letters that no manifest may have, which could forge log lines.
    #[error("the {what} of a plugin is {given:?}, but has {letters} only")]
    Letters {
        /// Which text.
        what: &'static str,
        /// What it is.
        given: String,
        /// What it may have.
        letters: &'static str,
    },
}

impl PluginUse {
    /// Checks untrusted input from a peer against the limits.
    ///
    /// # Errors
    /// [`PluginError`] with the first number that is out of its bounds, or the first text with wrong letters.
    pub fn check(&self) -> Result<(), PluginError> {
        let within = |what, given, min, max| {
            if (min..=max).contains(&given) { Ok(()) } else { Err(PluginError::Number { what, given, min, max }) }
        };
        let written = |what, text: &String, allowed: fn(char) -> bool, letters| {
            let given = || text.clone();
            if text.chars().all(allowed) { Ok(()) } else { Err(PluginError::Letters { what, given: given(), letters }) }
        };
        within("the length of the name", self.name.len(), 1, limits::PLUGIN_NAME_BYTES_MAX)?;
        within("the length of the version", self.version.len(), 1, limits::PLUGIN_VERSION_BYTES_MAX)?;
        written("name", &self.name, name_letter, "small letters, digits and hyphens")?;
        written("version", &self.version, version_letter, "letters, digits and .+-")?;
        within("the number of parameters", self.parameters.len(), 0, limits::PLUGIN_PARAMETERS_MAX)?;
        match self.work {
            PluginWork::Codec { block_elements, encoded_bytes } => {
                within("the block", block_elements as usize, 1, limits::PLUGIN_BLOCK_BYTES_MAX)?;
                within("the encoded block", encoded_bytes as usize, 1, limits::PLUGIN_BLOCK_BYTES_MAX)
            }
            PluginWork::TwoPass { measures } => {
                within("the number of measures", measures as usize, 1, limits::PLUGIN_MEASURES_MAX)
            }
            PluginWork::Pairwise | PluginWork::NAry | PluginWork::Adaptive => Ok(()),
        }
    }

    /// Whether the plugin fits a reduction: a codec fits a sum or an average, a reducer fits [`ReduceOp::Plugin`].
    #[must_use]
    pub const fn goes_with(&self, op: ReduceOp) -> bool {
        match op {
            ReduceOp::Plugin => !self.work.is_codec(),
            ReduceOp::Sum | ReduceOp::Average => self.work.is_codec(),
            _ => false,
        }
    }
}

/// Whether a plugin's name may have this letter.
#[must_use]
pub const fn name_letter(letter: char) -> bool {
    letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-'
}

/// Whether a plugin's version may have this letter.
#[must_use]
pub const fn version_letter(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '.' | '+' | '-')
}

/// `name@version`, and enough of the digest to tell two apart.
impl fmt::Display for PluginUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{} (", self.name, self.version)?;
        self.digest[..6].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// A plugin as a worker names it; its sidecar resolves the module.
#[derive(Clone, Debug, PartialEq)]
pub struct PluginCall {
    /// `name`, or `name@version`.
    pub name: String,
    /// Parameters with other values than their defaults.
    pub parameters: Vec<(String, PluginValue)>,
}

impl PluginCall {
    /// A plugin under its default parameters.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), parameters: Vec::new() }
    }

    /// Adds a parameter.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<PluginValue>) -> Self {
        self.parameters.push((name.into(), value.into()));
        self
    }
}

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum PluginValue {
    /// A whole number; also for a parameter of type float.
    Int(i64),
    /// A number.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// One of the names that the parameter may have.
    Choice(String),
}

impl From<i64> for PluginValue {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<i32> for PluginValue {
    fn from(value: i32) -> Self {
        Self::Int(value.into())
    }
}

impl From<f64> for PluginValue {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<bool> for PluginValue {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<&str> for PluginValue {
    fn from(value: &str) -> Self {
        Self::Choice(value.to_owned())
    }
}

impl fmt::Display for PluginValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Choice(value) => write!(f, "{value:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, version: &str) -> PluginUse {
        let (name, version) = (name.to_owned(), version.to_owned());
        PluginUse { name, version, digest: [0; 32], parameters: Vec::new(), work: PluginWork::NAry }
    }

    #[test]
    fn plugin_names_from_peers_are_safe_to_log() {
        assert_eq!(named("top-k2", "1.0.0-rc+7").check(), Ok(()));
        for name in ["a\nb", "A", "a b", "\u{1b}[2J", "ä", "a@1"] {
            let refused = named(name, "1").check().expect_err(name).to_string();
            assert!(
                refused.starts_with("the name of a plugin is \"") && !refused.contains(['\n', '\u{1b}']),
                "{refused}"
            );
        }
        for version in ["1\r", "1 2", "1\u{202e}"] {
            let refused = named("a", version).check().expect_err(version).to_string();
            assert!(refused.contains("letters, digits and .+- only"), "{refused}");
        }
        for (name, version) in [("", "1"), ("a", ""), (&"a".repeat(limits::PLUGIN_NAME_BYTES_MAX + 1), "1")] {
            assert!(matches!(named(name, version).check(), Err(PluginError::Number { .. })), "{name:?} {version:?}");
        }
    }
}
