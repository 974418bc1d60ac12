//! The JSON form of the manifest.

use ronde_plugin_abi::{VERSION, limits};
use ronde_wire::DType;
use ronde_wire::plugin::{name_letter, version_letter};
use serde::Deserialize;
use serde_json::Value;

use super::{CodecManifest, Limits, Manifest, ManifestError, Parameter, ParameterKind, ReducerManifest, Shape};

/// The manifest as written, before its values are checked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    abi: u32,
    name: String,
    version: String,
    #[serde(default)]
    about: String,
    kinds: Kinds,
    #[serde(default)]
    parameters: Vec<ParameterDocument>,
    #[serde(default)]
    limits: LimitsDocument,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Kinds {
    codec: Option<CodecDocument>,
    reducer: Option<ReducerDocument>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CodecDocument {
    dtypes: Vec<String>,
    #[serde(default)]
    state_bytes: u32,
    #[serde(default)]
    lossless: bool,
    #[serde(default)]
    elementwise: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReducerDocument {
    dtypes: Vec<String>,
    shape: String,
    #[serde(default)]
    commutative: bool,
    #[serde(default)]
    measures: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParameterDocument {
    name: String,
    #[serde(rename = "type")]
    kind: String,
    default: Value,
    min: Option<Value>,
    max: Option<Value>,
    choices: Option<Vec<String>>,
    #[serde(default)]
    about: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsDocument {
    memory_bytes: Option<u64>,
    call_ms: Option<u64>,
    ranks: Option<u64>,
}

pub(super) fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
    if bytes.len() > limits::MANIFEST_BYTES_MAX {
        return Err(ManifestError::TooLong { bytes: bytes.len() });
    }
    // The version is checked first, because a manifest of another version may have other fields.
    if let Ok(Value::Object(fields)) = serde_json::from_slice::<Value>(bytes)
        && let Some(abi) = fields.get("abi").and_then(Value::as_u64)
        && abi != u64::from(VERSION)
    {
        return Err(ManifestError::Abi { found: u32::try_from(abi).unwrap_or(u32::MAX) });
    }
    let document: Document = serde_json::from_slice(bytes).map_err(|error| ManifestError::Json(error.to_string()))?;
    if document.abi != VERSION {
        return Err(ManifestError::Abi { found: document.abi });
    }
    let codec = document.kinds.codec.as_ref().map(codec).transpose()?;
    let reducer = document.kinds.reducer.as_ref().map(reducer).transpose()?;
    if codec.is_none() && reducer.is_none() {
        return Err(ManifestError::field("kinds", "name neither codec nor reducer; a plugin is one of them, or both"));
    }
    Ok(Manifest {
        name: word("name", document.name, limits::NAME_BYTES_MAX, name_letter, "small letters, digits and hyphens")?,
        version: word(
            "version",
            document.version,
            limits::VERSION_BYTES_MAX,
            version_letter,
            "letters, digits, dots, plus signs and hyphens",
        )?,
        about: line("about", document.about)?,
        codec,
        reducer,
        parameters: parameters(document.parameters)?,
        limits: requested_limits(&document.limits)?,
    })
}

fn codec(document: &CodecDocument) -> Result<CodecManifest, ManifestError> {
    if document.state_bytes > limits::STATE_BYTES_MAX {
        let problem = format!("is {}, but may be 0 to {}", document.state_bytes, limits::STATE_BYTES_MAX);
        return Err(ManifestError::field("kinds.codec.state_bytes", problem));
    }
    Ok(CodecManifest {
        dtypes: dtypes("kinds.codec.dtypes", &document.dtypes)?,
        state_bytes: document.state_bytes as usize,
        lossless: document.lossless,
        elementwise: document.elementwise,
    })
}

fn reducer(document: &ReducerDocument) -> Result<ReducerManifest, ManifestError> {
    let field = "kinds.reducer.measures";
    let shape = match document.shape.as_str() {
        "pairwise" => Shape::Pairwise,
        "n-ary" => Shape::Nary,
        "two-pass" if (1..=limits::MEASURES_MAX).contains(&document.measures) => {
            Shape::TwoPass { measures: document.measures as usize }
        }
        "two-pass" => {
            let problem = format!("is {}, but a two-pass reducer has 1 to {}", document.measures, limits::MEASURES_MAX);
            return Err(ManifestError::field(field, problem));
        }
        "adaptive" => Shape::Adaptive,
        other => {
            let problem = format!("is {other:?}; there are pairwise, n-ary, two-pass and adaptive");
            return Err(ManifestError::field("kinds.reducer.shape", problem));
        }
    };
    if document.measures != 0 && shape.measures() == 0 {
        let problem = format!("is {}, but only a two-pass reducer measures", document.measures);
        return Err(ManifestError::field(field, problem));
    }
    let dtypes = dtypes("kinds.reducer.dtypes", &document.dtypes)?;
    if shape == Shape::Adaptive && dtypes.iter().any(|dtype| !dtype.is_float()) {
        let problem = "names a type of integers, but inner products are measured of floating-point numbers";
        return Err(ManifestError::field("kinds.reducer.dtypes", problem));
    }
    Ok(ReducerManifest { dtypes, shape, commutative: document.commutative })
}

fn dtypes(field: &str, names: &[String]) -> Result<Vec<DType>, ManifestError> {
    let mut dtypes = Vec::with_capacity(names.len().min(DType::ALL.len()));
    for name in names {
        let Some(dtype) = DType::from_name(name) else {
            let known = DType::ALL.map(DType::name).join(", ");
            return Err(ManifestError::field(field, format!("names {name:?}, which is no type; there are {known}")));
        };
        if dtypes.contains(&dtype) {
            return Err(ManifestError::field(field, format!("names {name} twice")));
        }
        dtypes.push(dtype);
    }
    if dtypes.is_empty() {
        return Err(ManifestError::field(field, "is empty; name at least one type"));
    }
    Ok(dtypes)
}

fn requested_limits(document: &LimitsDocument) -> Result<Limits, ManifestError> {
    let within = |field: &str, given: Option<u64>, default: u64, max: u64| match given {
        Some(value) if !(1..=max).contains(&value) => {
            Err(ManifestError::field(format!("limits.{field}"), format!("is {value}, but may be 1 to {max}")))
        }
        given => Ok(given.unwrap_or(default)),
    };
    let (max, default) = (Limits::MAX, Limits::DEFAULT);
    let memory = within("memory_bytes", document.memory_bytes, default.memory_bytes as u64, max.memory_bytes as u64)?;
    let call_ms = within("call_ms", document.call_ms, default.call_ms.into(), max.call_ms.into())?;
    let ranks = within("ranks", document.ranks, default.ranks as u64, max.ranks as u64)?;
    let fits = "it is at most a constant that fits";
    Ok(Limits {
        memory_bytes: usize::try_from(memory).expect(fits),
        call_ms: u32::try_from(call_ms).expect(fits),
        ranks: usize::try_from(ranks).expect(fits),
    })
}

fn parameters(documents: Vec<ParameterDocument>) -> Result<Vec<Parameter>, ManifestError> {
    if documents.len() > limits::PARAMETERS_MAX {
        let problem = format!("are {}, but may be {}", documents.len(), limits::PARAMETERS_MAX);
        return Err(ManifestError::field("parameters", problem));
    }
    let mut parameters: Vec<Parameter> = Vec::with_capacity(documents.len());
    for document in documents {
        let parameter = parameter(document)?;
        if parameters.iter().any(|known| known.name == parameter.name) {
            return Err(ManifestError::field("parameters", format!("name {} twice", parameter.name)));
        }
        parameters.push(parameter);
    }
    Ok(parameters)
}

fn parameter(document: ParameterDocument) -> Result<Parameter, ManifestError> {
    let letter = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '_';
    let what = "small letters, digits and underscores, no digit first";
    let name = word("parameters' name", document.name, limits::PARAMETER_NAME_BYTES_MAX, letter, what)?;
    let field = format!("parameter {name}");
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        return Err(ManifestError::field(field, format!("does not begin with a letter; a name has {what}")));
    }
    if !["int", "float", "bool", "choice"].contains(&document.kind.as_str()) {
        let problem = format!("has the type {:?}; there are int, float, bool and choice", document.kind);
        return Err(ManifestError::field(field, problem));
    }
    let range = document.min.is_some() || document.max.is_some();
    if range && !matches!(document.kind.as_str(), "int" | "float") {
        return Err(ManifestError::field(field, "has min or max, which only int and float have"));
    }
    if document.choices.is_some() && document.kind != "choice" {
        return Err(ManifestError::field(field, "has choices, which only the type choice has"));
    }
    let kind = match document.kind.as_str() {
        "int" => int(&field, &document.default, document.min.as_ref(), document.max.as_ref())?,
        "float" => float(&field, &document.default, document.min.as_ref(), document.max.as_ref())?,
        "bool" => match document.default {
            Value::Bool(default) => ParameterKind::Bool { default },
            other => return Err(ManifestError::field(field, format!("has the default {other}, which is no bool"))),
        },
        _ => choice(&field, &document.default, document.choices.unwrap_or_default())?,
    };
    Ok(Parameter { about: line(&format!("{field}'s about"), document.about)?, name, kind })
}

fn int(field: &str, default: &Value, min: Option<&Value>, max: Option<&Value>) -> Result<ParameterKind, ManifestError> {
    let number = |value: &Value| {
        value.as_i64().ok_or_else(|| ManifestError::field(field, format!("has {value}, which is no int of 64 bits")))
    };
    let (default, min, max) = (number(default)?, min.map_or(Ok(i64::MIN), number)?, max.map_or(Ok(i64::MAX), number)?);
    if !(min..=max).contains(&default) {
        return Err(ManifestError::field(field, format!("has the default {default} outside of {min} to {max}")));
    }
    Ok(ParameterKind::Int { default, min, max })
}

fn float(
    field: &str,
    default: &Value,
    min: Option<&Value>,
    max: Option<&Value>,
) -> Result<ParameterKind, ManifestError> {
    let number = |value: &Value| {
        let finite = value.as_f64().filter(|number| number.is_finite());
        finite.ok_or_else(|| ManifestError::field(field, format!("has {value}, which is no float")))
    };
    let (default, min, max) = (number(default)?, min.map_or(Ok(f64::MIN), number)?, max.map_or(Ok(f64::MAX), number)?);
    if !(min..=max).contains(&default) {
        return Err(ManifestError::field(field, format!("has the default {default} outside of {min} to {max}")));
    }
    Ok(ParameterKind::Float { default, min, max })
}

fn choice(field: &str, default: &Value, choices: Vec<String>) -> Result<ParameterKind, ManifestError> {
    if choices.is_empty() || choices.len() > limits::CHOICES_MAX {
        let problem = format!("has {} choices, but may have 1 to {}", choices.len(), limits::CHOICES_MAX);
        return Err(ManifestError::field(field, problem));
    }
    for (index, choice) in choices.iter().enumerate() {
        let letter = |letter: char| letter.is_ascii_alphanumeric() || "_-.+".contains(letter);
        let fits = !choice.is_empty() && choice.len() <= limits::PARAMETER_NAME_BYTES_MAX;
        if !fits || !choice.chars().all(letter) || choices[..index].contains(choice) {
            let problem = format!("has the choice {choice:?}; each is another short word of letters, digits, _-.+");
            return Err(ManifestError::field(field, problem));
        }
    }
    let position = default.as_str().and_then(|default| choices.iter().position(|choice| choice == default));
    let Some(default) = position else {
        return Err(ManifestError::field(field, format!("has the default {default}, which is none of its choices")));
    };
    Ok(ParameterKind::Choice { choices, default })
}

/// Checks a short word of certain characters.
fn word(
    field: &str,
    text: String,
    bytes_max: usize,
    letter: impl Fn(char) -> bool,
    letters: &str,
) -> Result<String, ManifestError> {
    if text.is_empty() || text.len() > bytes_max || !text.chars().all(letter) {
        let problem = format!("is {text:?}, but has 1 to {bytes_max} {letters}");
        return Err(ManifestError::field(field, problem));
    }
    Ok(text)
}

/// Checks a single line of text.
fn line(field: &str, text: String) -> Result<String, ManifestError> {
    if text.len() > limits::ABOUT_BYTES_MAX || text.chars().any(char::is_control) {
        let problem = format!("is more than one line of {} bytes", limits::ABOUT_BYTES_MAX);
        return Err(ManifestError::field(field, problem));
    }
    Ok(text)
}
