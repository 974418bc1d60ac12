//! Parameters: declared in the manifest, set by the user, passed to the plugin.

use std::fmt;

use super::Manifest;

/// The declaration of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Small letters, digits and underscores.
    pub name: String,
    /// One line for people.
    pub about: String,
    /// Its type and valid values.
    pub kind: ParameterKind,
}

/// The type of a parameter, its valid values, and its default.
#[derive(Clone, Debug, PartialEq)]
pub enum ParameterKind {
    /// A whole number.
    Int {
        /// The default.
        default: i64,
        /// The least.
        min: i64,
        /// The greatest.
        max: i64,
    },
    /// A finite number.
    Float {
        /// The default.
        default: f64,
        /// The least.
        min: f64,
        /// The greatest.
        max: f64,
    },
    /// Yes or no.
    Bool {
        /// The default.
        default: bool,
    },
    /// One of several words.
    Choice {
        /// The words.
        choices: Vec<String>,
        /// The index of the default.
        default: usize,
    },
}

/// A checked value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ParameterValue {
    /// A whole number.
    Int(i64),
    /// A finite number, never -0.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// The index of a choice.
    Choice(usize),
}

/// A value as the user gave it.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A word: a choice, or a number or `true` or `false` as text.
    Text(String),
}

impl fmt::Display for Given {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{value:?}"),
        }
    }
}

impl ParameterKind {
    /// The default value.
    #[must_use]
    pub fn default(&self) -> ParameterValue {
        match self {
            Self::Int { default, .. } => ParameterValue::Int(*default),
            Self::Float { default, .. } => ParameterValue::Float(default + 0.0),
            Self::Bool { default } => ParameterValue::Bool(*default),
            Self::Choice { default, .. } => ParameterValue::Choice(*default),
        }
    }

    /// Whether a value is valid.
    #[must_use]
    pub fn takes(&self, value: ParameterValue) -> bool {
        match (self, value) {
            (Self::Int { min, max, .. }, ParameterValue::Int(value)) => (*min..=*max).contains(&value),
            (Self::Float { min, max, .. }, ParameterValue::Float(value)) => (*min..=*max).contains(&value),
            (Self::Bool { .. }, ParameterValue::Bool(_)) => true,
            (Self::Choice { choices, .. }, ParameterValue::Choice(place)) => place < choices.len(),
            _ => false,
        }
    }

    /// Converts a given value if it is valid.
    fn value(&self, given: &Given) -> Option<ParameterValue> {
        let value = match self {
            Self::Int { .. } => match given {
                Given::Int(value) => ParameterValue::Int(*value),
                Given::Text(text) => ParameterValue::Int(text.parse().ok()?),
                Given::Float(_) | Given::Bool(_) => return None,
            },
            Self::Float { .. } => ParameterValue::Float(float(given)? + 0.0),
            Self::Bool { .. } => match given {
                Given::Bool(value) => ParameterValue::Bool(*value),
                Given::Text(text) => ParameterValue::Bool(text.parse().ok()?),
                Given::Int(_) | Given::Float(_) => return None,
            },
            Self::Choice { choices, .. } => {
                let Given::Text(text) = given else { return None };
                ParameterValue::Choice(choices.iter().position(|choice| choice == text)?)
            }
        };
        self.takes(value).then_some(value)
    }
}

impl fmt::Display for ParameterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int { min: i64::MIN, max: i64::MAX, .. } => f.write_str("an int of 64 bits"),
            Self::Int { min, max, .. } => write!(f, "an int of {min} to {max}"),
            Self::Float { min: f64::MIN, max: f64::MAX, .. } => f.write_str("a finite float"),
            Self::Float { min, max, .. } => write!(f, "a float of {min:?} to {max:?}"),
            Self::Bool { .. } => f.write_str("true or false"),
            Self::Choice { choices, .. } => write!(f, "one of {}", choices.join(", ")),
        }
    }
}

/// A value for each parameter of a plugin: given ones and defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    names: Vec<String>,
    values: Vec<ParameterValue>,
    words: Vec<String>,
}

impl Parameters {
    /// Checks the given values and adds defaults. The result, and thus [`Self::block`], does not depend on the order or
    /// form in which values are given.
    ///
    /// # Errors
    /// [`ParameterError`] for an unknown or repeated name, or an invalid value.
    pub fn checked(manifest: &Manifest, given: &[(String, Given)]) -> Result<Self, ParameterError> {
        let mut values: Vec<ParameterValue> = manifest.parameters.iter().map(|known| known.kind.default()).collect();
        for (index, (name, value)) in given.iter().enumerate() {
            let Some(place) = manifest.parameters.iter().position(|known| known.name == *name) else {
                let known: Vec<&str> = manifest.parameters.iter().map(|known| known.name.as_str()).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                return Err(ParameterError::Unknown { plugin: manifest.label(), name: name.clone(), known });
            };
            if given[..index].iter().any(|(earlier, _)| earlier == name) {
                return Err(ParameterError::Twice { plugin: manifest.label(), name: name.clone() });
            }
            let kind = &manifest.parameters[place].kind;
            values[place] = kind.value(value).ok_or_else(|| ParameterError::Value {
                plugin: manifest.label(),
                name: name.clone(),
                given: value.to_string(),
                wanted: kind.to_string(),
            })?;
        }
        let words = manifest.parameters.iter().zip(&values).map(|(known, value)| word(&known.kind, *value)).collect();
        let names = manifest.parameters.iter().map(|known| known.name.clone()).collect();
        Ok(Self { names, values, words })
    }

    /// A plugin's defaults.
    #[must_use]
    pub fn defaults(manifest: &Manifest) -> Self {
        Self::checked(manifest, &[]).expect("nothing is given, so nothing can be wrong")
    }

    /// Names and values, in the order of the manifest.
    pub fn iter(&self) -> impl Iterator<Item = (&str, ParameterValue)> {
        self.names.iter().map(String::as_str).zip(self.values.iter().copied())
    }

    /// The block of parameters for the plugin: 8 bytes each, in the order of the manifest.
    #[must_use]
    pub fn block(&self) -> Vec<u8> {
        let bytes = self.values.iter().map(|value| match *value {
            ParameterValue::Int(value) => value.to_le_bytes(),
            ParameterValue::Float(value) => value.to_le_bytes(),
            ParameterValue::Bool(value) => u64::from(value).to_le_bytes(),
            ParameterValue::Choice(place) => (place as u64).to_le_bytes(),
        });
        bytes.flatten().collect()
    }

    /// Reads the values of a block made by [`Self::block`], and checks them like given ones.
    ///
    /// # Errors
    /// [`ParameterError`] if the block does not belong to this plugin.
    pub fn from_block(manifest: &Manifest, block: &[u8]) -> Result<Self, ParameterError> {
        let (words, rest) = block.as_chunks::<8>();
        let (given, wanted) = (block.len(), 8 * manifest.parameters.len());
        if !rest.is_empty() || given != wanted {
            return Err(ParameterError::Block { plugin: manifest.label(), given, wanted });
        }
        let value = |(parameter, word): (&Parameter, &[u8; 8])| {
            let number = i64::from_le_bytes(*word);
            let given = match &parameter.kind {
                ParameterKind::Int { .. } => Given::Int(number),
                ParameterKind::Float { .. } => Given::Float(f64::from_le_bytes(*word)),
                // Any other number is rejected as an invalid value.
                ParameterKind::Bool { .. } => [Given::Bool(false), Given::Bool(true)]
                    .into_iter()
                    .nth(usize::try_from(number).unwrap_or(usize::MAX))
                    .unwrap_or(Given::Int(number)),
                ParameterKind::Choice { choices, .. } => usize::try_from(number)
                    .ok()
                    .and_then(|place| choices.get(place))
                    .map_or(Given::Int(number), |choice| Given::Text(choice.clone())),
            };
            (parameter.name.clone(), given)
        };
        let given: Vec<(String, Given)> = manifest.parameters.iter().zip(words).map(value).collect();
        Self::checked(manifest, &given)
    }

    /// Whether these are values for this plugin's parameters.
    pub(crate) fn fit(&self, manifest: &Manifest) -> bool {
        self.values.len() == manifest.parameters.len()
            && self
                .iter()
                .zip(&manifest.parameters)
                .all(|((name, value), known)| name == known.name && known.kind.takes(value))
    }
}

/// `ratio=0.01, mode=fast`: pairs that [`Parameters::checked`] accepts as [`Given::Text`].
impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, word)) in self.names.iter().zip(&self.words).enumerate() {
            write!(f, "{}{name}={word}", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

fn float(given: &Given) -> Option<f64> {
    match given {
        Given::Float(value) => Some(*value),
        // A whole number is accepted if an f64 represents it exactly.
        #[allow(clippy::cast_possible_truncation, reason = "compared with what it came from")]
        Given::Int(value) => Some(*value as f64).filter(|float| *float as i64 == *value),
        Given::Text(text) => text.parse().ok(),
        Given::Bool(_) => None,
    }
}

fn word(kind: &ParameterKind, value: ParameterValue) -> String {
    match (kind, value) {
        (ParameterKind::Choice { choices, .. }, ParameterValue::Choice(place)) => choices[place].clone(),
        (_, ParameterValue::Int(value)) => value.to_string(),
        (_, ParameterValue::Float(value)) => format!("{value:?}"),
        (_, ParameterValue::Bool(value)) => value.to_string(),
        (_, ParameterValue::Choice(place)) => place.to_string(),
    }
}

/// Why parameters are rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// A block has the wrong length.
    #[error("a block of {given} bytes does not hold the values for the parameters of {plugin}; it needs {wanted}")]
    Block {
        /// The plugin's name and version.
        plugin: String,
        /// The block's length.
        given: usize,
        /// The required length.
        wanted: usize,
    },
    /// The plugin has no such parameter.
    #[error("plugin {plugin} has no parameter {name:?}; it has: {known}")]
    Unknown {
        /// The plugin's name and version.
        plugin: String,
        /// The given name.
        name: String,
        /// The plugin's parameters.
        known: String,
    },
    /// A parameter was given twice.
    #[error("parameter {name} of plugin {plugin} is given twice")]
    Twice {
        /// The plugin's name and version.
        plugin: String,
        /// The parameter.
        name: String,
    },
    /// The value is invalid.
    #[error("parameter {name} of plugin {plugin} is {given}, but takes {wanted}")]
    Value {
        /// The plugin's name and version.
        plugin: String,
        /// The parameter.
        name: String,
        /// The given value.
        given: String,
        /// The valid values.
        wanted: String,
    },
}
