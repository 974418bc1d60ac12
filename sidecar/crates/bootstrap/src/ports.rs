//! A range of ports, as `--ports` takes it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Ports from `low` to `high`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortRange {
    /// The first.
    pub low: u16,
    /// The last.
    pub high: u16,
}

impl PortRange {
    /// All of them, ascending.
    pub fn ports(self) -> impl Iterator<Item = u16> {
        self.low..=self.high
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (low, high) = text.split_once('-')?;
            Some(Self { low: low.trim().parse().ok()?, high: high.trim().parse().ok()? })
        };
        let range = read().filter(|range| range.low > 0 && range.low <= range.high);
        range.ok_or_else(|| format!("{text:?} is not LOW-HIGH with ports from 1 to 65535, for example 7400-7499"))
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.low, self.high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_ranges_are_parsed_and_invalid_ones_rejected() {
        assert_eq!("7400-7499".parse(), Ok(PortRange { low: 7_400, high: 7_499 }));
        assert_eq!("1-65535".parse::<PortRange>().map(|range| range.to_string()), Ok("1-65535".to_owned()));
        for text in ["", "7400", "7400-", "-7400", "0-9", "9-8", "1-65536", "a-b", "1-2-3"] {
            let error = text.parse::<PortRange>().expect_err(text);
            assert!(error.contains("is not LOW-HIGH"), "{error}");
        }
    }
}
