//! Profiles: settings that `ronde tune` has found, in a file that `--tuning` reads.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, anyhow, bail, ensure};
use ronde_wire::control::Transport;
use ronde_wire::limits;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// Settings and a cost model. What is absent keeps its default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Profile {
    /// Bytes of tensors that share a bucket.
    pub fusion_threshold_bytes: Option<u64>,
    /// The chunk size of all plans.
    pub chunk_bytes: Option<u32>,
    /// Lanes between two sidecars.
    pub lanes: Option<u16>,
    /// Lanes of operations on one sidecar alone.
    pub local_lanes: Option<u16>,
    /// Bytes of a contribution up to which operations are eager.
    pub eager_bytes: Option<u32>,
    /// Whether an all-reduce first reduces the ranks of each sidecar.
    pub hierarchical_allreduce: Option<bool>,
    /// The transport between sidecars.
    pub transport: Option<Transport>,
    /// The cost model.
    pub cost: Option<Cost>,
}

/// A measured cost model: `rounds * alpha + sent bytes * beta + reduced bytes * gamma` microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Microseconds of a round.
    pub alpha_us: f64,
    /// Microseconds for each byte that a sidecar sends.
    pub beta_us_per_byte: f64,
    /// Microseconds for each byte that a sidecar reduces.
    pub gamma_us_per_byte: f64,
}

impl Cost {
    /// Checks the bounds: positive numbers, alpha up to ten seconds, the others up to a millisecond for each byte.
    ///
    /// # Errors
    /// When a number is out of its range, naming it.
    pub fn check(&self) -> anyhow::Result<()> {
        for (name, given, most) in [
            ("alpha-us", self.alpha_us, ALPHA_US_MOST),
            ("beta-us-per-byte", self.beta_us_per_byte, PER_BYTE_US_MOST),
            ("gamma-us-per-byte", self.gamma_us_per_byte, PER_BYTE_US_MOST),
        ] {
            ensure!(given > 0.0 && given <= most, "{name} = {given} is out of range; it is above 0 and at most {most}");
        }
        Ok(())
    }
}

impl Profile {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read or is too large, or a table, key or value in it cannot be used, with the nearest right key.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let length = std::fs::metadata(path).with_context(|| format!("cannot read the profile {shown}"))?.len();
        ensure!(
            length <= FILE_BYTES_MAX,
            "the profile {shown} has {length} bytes; a profile has at most {FILE_BYTES_MAX}"
        );
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the profile {shown}"))?;
        Self::parse(&text).with_context(|| format!("the profile {shown} cannot be used"))
    }

    /// Reads a text.
    ///
    /// # Errors
    /// When a table, key or value cannot be used.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let tables: Table = text.parse().map_err(|error: toml::de::Error| anyhow!("{}", error.message()))?;
        let mut profile = Self::default();
        for (name, value) in &tables {
            let Value::Table(table) = value else { bail!("{name} is a table: write [{name}]") };
            match name.as_str() {
                TUNING => profile.settings(table)?,
                COST => profile.cost = Some(cost(table)?),
                // Facts about the measurement, for people.
                MEASURED => {}
                other => bail!("there is no table [{other}]{}", hint(&[TUNING, COST, MEASURED], other)),
            }
        }
        Ok(profile)
    }

    fn settings(&mut self, table: &Table) -> anyhow::Result<()> {
        for (key, value) in table {
            match key.as_str() {
                "fusion-threshold-bytes" => {
                    self.fusion_threshold_bytes = Some(whole(key, value, 0, FUSION_BYTES_MOST)?);
                }
                "chunk-bytes" => self.chunk_bytes = Some(chunk_bytes(whole(key, value, 1, u32::MAX.into())?)?),
                "lanes" => self.lanes = Some(u16::try_from(whole(key, value, 1, limits::LANES_MAX as u64)?)?),
                "local-lanes" => {
                    self.local_lanes = Some(u16::try_from(whole(key, value, 1, limits::LANES_MAX as u64)?)?);
                }
                "eager-bytes" => {
                    self.eager_bytes = Some(u32::try_from(whole(key, value, 0, limits::EAGER_BYTES_MAX as u64)?)?);
                }
                "hierarchical-allreduce" => {
                    let given =
                        value.as_bool().with_context(|| format!("{key} is true or false, not {}", kind(value)))?;
                    self.hierarchical_allreduce = Some(given);
                }
                "transport" => {
                    let given = value.as_str().with_context(|| format!("{key} is a text, not {}", kind(value)))?;
                    self.transport = Some(given.parse().map_err(|error| anyhow!("{key} = {given:?}: {error}"))?);
                }
                other => bail!("[{TUNING}] has no key {other}{}", hint(&SETTINGS, other)),
            }
        }
        Ok(())
    }

    /// The text of a file, with facts about the measurement as lines of TOML.
    #[must_use]
    pub fn text(&self, measured: &str) -> String {
        let mut text =
            format!("# Settings that `ronde tune` has found; use them with `ronde run --tuning FILE`.\n[{TUNING}]\n");
        // A string cannot fail to be written to.
        let mut line = |key: &str, value: Option<String>| {
            if let Some(value) = value {
                let _ = writeln!(text, "{key} = {value}");
            }
        };
        line(SETTINGS[0], self.fusion_threshold_bytes.map(|bytes| bytes.to_string()));
        line(SETTINGS[1], self.chunk_bytes.map(|bytes| bytes.to_string()));
        line(SETTINGS[2], self.lanes.map(|lanes| lanes.to_string()));
        line(SETTINGS[3], self.local_lanes.map(|lanes| lanes.to_string()));
        line(SETTINGS[4], self.eager_bytes.map(|bytes| bytes.to_string()));
        line(SETTINGS[5], self.hierarchical_allreduce.map(|is_on| is_on.to_string()));
        line(SETTINGS[6], self.transport.map(|transport| format!("\"{transport}\"")));
        if let Some(Cost { alpha_us, beta_us_per_byte, gamma_us_per_byte }) = self.cost {
            let _ = write!(text, "\n[{COST}]\n{} = {alpha_us:?}\n{} = {beta_us_per_byte:?}\n", COSTS[0], COSTS[1]);
            let _ = writeln!(text, "{} = {gamma_us_per_byte:?}", COSTS[2]);
        }
        let _ = write!(text, "\n[{MEASURED}]\n{measured}");
        text
    }
}

/// Checks a chunk size.
///
/// # Errors
/// When it is no power of two within the limits of a chunk.
pub(crate) fn chunk_bytes(given: u64) -> anyhow::Result<u32> {
    let (least, most) = (limits::CHUNK_BYTES_MIN as u64, limits::CHUNK_BYTES_MAX as u64);
    ensure!(
        given.is_power_of_two() && (least..=most).contains(&given),
        "a chunk of {given} bytes is not possible; it must be a power of two from {least} to {most}"
    );
    Ok(u32::try_from(given)?)
}

fn cost(table: &Table) -> anyhow::Result<Cost> {
    if let Some(other) = table.keys().find(|key| !COSTS.contains(&key.as_str())) {
        bail!("[{COST}] has no key {other}{}", hint(&COSTS, other));
    }
    let number = |key: &str| {
        let value = table.get(key).with_context(|| format!("[{COST}] lacks {key}"))?;
        let number = value.as_float().or(value.as_integer().map(|whole| whole as f64));
        number.with_context(|| format!("{key} is a number, not {}", kind(value)))
    };
    let [alpha_us, beta_us_per_byte, gamma_us_per_byte] = COSTS.map(number);
    let cost = Cost { alpha_us: alpha_us?, beta_us_per_byte: beta_us_per_byte?, gamma_us_per_byte: gamma_us_per_byte? };
    cost.check()?;
    Ok(cost)
}

fn whole(key: &str, value: &Value, least: u64, most: u64) -> anyhow::Result<u64> {
    let given = value.as_integer().with_context(|| format!("{key} is a whole number, not {}", kind(value)))?;
    let known = u64::try_from(given).ok().filter(|given| (least..=most).contains(given));
    known.with_context(|| format!("{key} = {given} is out of range; it is {least} to {most}"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::String(_) => "a string",
        Value::Integer(_) => "a whole number",
        Value::Float(_) => "a number with a fraction",
        Value::Boolean(_) => "true or false",
        Value::Datetime(_) => "a date",
        Value::Array(_) => "a list",
        Value::Table(_) => "a table",
    }
}

/// The key that is nearest to a wrong one.
fn hint(known: &[&str], given: &str) -> String {
    let given = given.replace('_', "-").to_ascii_lowercase();
    let nearest = known.iter().min_by_key(|known| strsim::levenshtein(known, &given));
    nearest.map(|nearest| format!("; is {nearest} meant?")).unwrap_or_default()
}

const TUNING: &str = "tuning";
const COST: &str = "cost";
const MEASURED: &str = "measured";
const SETTINGS: [&str; 7] = [
    "fusion-threshold-bytes",
    "chunk-bytes",
    "lanes",
    "local-lanes",
    "eager-bytes",
    "hierarchical-allreduce",
    "transport",
];
const COSTS: [&str; 3] = ["alpha-us", "beta-us-per-byte", "gamma-us-per-byte"];
const FILE_BYTES_MAX: u64 = 1 << 20;
/// 64 GiB, as `--fusion-threshold-mb` has.
const FUSION_BYTES_MOST: u64 = 65_536 << 20;
const ALPHA_US_MOST: f64 = 1e7;
const PER_BYTE_US_MOST: f64 = 1e3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_read_as_it_was_written() {
        let cost = Cost { alpha_us: 41.5, beta_us_per_byte: 3.1e-4, gamma_us_per_byte: 8e-5 };
        let full = Profile {
            fusion_threshold_bytes: Some(8 << 20),
            chunk_bytes: Some(256 << 10),
            lanes: Some(2),
            local_lanes: Some(4),
            eager_bytes: Some(0),
            hierarchical_allreduce: Some(false),
            transport: Some(Transport::Tls),
            cost: Some(cost),
        };
        for profile in [full, Profile::default()] {
            let text = profile.text("ranks = 4\nhosts = [\"alpha\"]\n");
            assert_eq!(Profile::parse(&text).expect("it was written so"), profile, "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_the_nearest_right_key() {
        for (text, reason) in [
            ("[tuning]\nchunk_byte = 4096", "[tuning] has no key chunk_byte; is chunk-bytes meant?"),
            ("[tunning]", "there is no table [tunning]; is tuning meant?"),
            ("[cost]\nalpha = 3.0", "[cost] has no key alpha; is alpha-us meant?"),
            ("[cost]\nalpha-us = 3.0", "[cost] lacks beta-us-per-byte"),
            ("[cost]\nalpha-us = -3.0\nbeta-us-per-byte = 1\ngamma-us-per-byte = 1", "alpha-us = -3 is out of range"),
            ("[cost]\nalpha-us = nan\nbeta-us-per-byte = 1\ngamma-us-per-byte = 1", "alpha-us = NaN is out of range"),
            ("[tuning]\nlanes = -1", "lanes = -1 is out of range; it is 1 to 16"),
            ("[tuning]\nlanes = \"two\"", "lanes is a whole number, not a string"),
            (
                "[tuning]\nchunk-bytes = 5000",
                "a chunk of 5000 bytes is not possible; it must be a power of two from 4096",
            ),
            ("[tuning]\neager-bytes = 9999", "eager-bytes = 9999 is out of range; it is 0 to 4096"),
            ("[tuning]\nhierarchical-allreduce = 1", "hierarchical-allreduce is true or false, not a whole number"),
            ("[tuning]\ntransport = \"tcp\"", "transport = \"tcp\""),
            ("tuning = 3", "tuning is a table: write [tuning]"),
            ("[tuning", "unclosed table"),
        ] {
            let error = format!("{:#}", Profile::parse(text).expect_err(text));
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_file_that_is_missing_or_too_large_is_named() {
        let directory = tempfile::tempdir().expect("a directory can be made");
        let path = directory.path().join("profile.toml");
        let error = format!("{:#}", Profile::read(&path).expect_err("it is missing"));
        assert!(error.contains("cannot read the profile") && error.contains("profile.toml"), "{error}");
        std::fs::write(&path, " ".repeat((1 << 20) + 1)).expect("ours");
        let error = Profile::read(&path).expect_err("too large").to_string();
        assert!(error.contains("has 1048577 bytes; a profile has at most 1048576"), "{error}");
        std::fs::write(&path, "[tuning]\nlane = 1").expect("ours");
        let error = format!("{:#}", Profile::read(&path).expect_err("no such key"));
        assert!(error.contains("profile.toml cannot be used: [tuning] has no key lane; is lanes meant?"), "{error}");
    }
}
