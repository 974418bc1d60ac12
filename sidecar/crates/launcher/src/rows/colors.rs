//! The colors and attributes that a terminal shows text with, as sequences that end in `m` set them. Pure.

use std::collections::BTreeMap;
use std::fmt;

/// The sequence that ends all colors and attributes.
pub(super) const RESET: &str = "\x1b[0m";

/// The parameters that are in effect, by what they set: [`TEXT`], [`BACKGROUND`], [`UNDERLINE`], [`FONT`],
/// [`IDEOGRAM`], or the attribute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Colors(BTreeMap<u8, String>);

impl Colors {
    /// Applies the parameters of a sequence.
    pub(super) fn set(&mut self, parameters: &str) {
        let mut rest = parameters.split(';');
        while let Some(parameter) = rest.next() {
            let Some(number) = number(parameter) else { continue };
            let mut text = parameter.to_owned();
            if matches!(number, TEXT | BACKGROUND | UNDERLINE) && !parameter.contains(':') {
                let (form, count) = match rest.next() {
                    Some("5") => ("5", 1),
                    Some("2") => ("2", 3),
                    _ => return,
                };
                let parts: Vec<&str> = rest.by_ref().take(count).collect();
                if parts.len() < count {
                    return;
                }
                text = format!("{parameter};{form};{}", parts.join(";"));
            }
            self.apply(number, text);
        }
    }

    /// Whether text is shown without colors.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn apply(&mut self, number: u8, text: String) {
        let ended: &[u8] = match number {
            0 => return self.0.clear(),
            10 => &[FONT],
            22 => &[1, 2],
            24 => &[4, 21],
            25 => &[5, 6],
            23 => &[3, 20],
            27..=29 => &[number - 20],
            39 => &[TEXT],
            49 => &[BACKGROUND],
            50 => &[26],
            54 => &[51, 52],
            55 => &[53],
            59 => &[UNDERLINE],
            65 => &[IDEOGRAM],
            75 => &[73, 74],
            _ => &[],
        };
        self.0.retain(|set, _| !ended.contains(set));
        let set = match number {
            30..=TEXT | 90..=97 => TEXT,
            40..=BACKGROUND | 100..=107 => BACKGROUND,
            FONT..=19 => FONT,
            IDEOGRAM..=64 => IDEOGRAM,
            1..=9 | 20 | 21 | 26 | 51..=53 | UNDERLINE | 73 | 74 => number,
            _ => return,
        };
        if text.len() <= PARAMETER_BYTES_MAX {
            self.0.insert(set, text);
        }
    }
}

/// The sequence that sets them.
impl fmt::Display for Colors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return Ok(());
        }
        let parameters: Vec<&str> = self.0.values().map(String::as_str).collect();
        write!(f, "\x1b[{}m", parameters.join(";"))
    }
}

/// The number of a parameter, without parts after a colon; a missing one is 0.
fn number(parameter: &str) -> Option<u8> {
    let number = parameter.split(':').next().unwrap_or_default();
    if number.is_empty() { Some(0) } else { number.parse().ok() }
}

const TEXT: u8 = 38;
const BACKGROUND: u8 = 48;
const UNDERLINE: u8 = 58;
/// The first of the alternative fonts.
const FONT: u8 = 11;
/// The first of the lines around or below ideograms.
const IDEOGRAM: u8 = 60;
/// Longer than any valid one.
const PARAMETER_BYTES_MAX: usize = 24;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn after(sequences: &[&str]) -> String {
        let mut colors = Colors::default();
        sequences.iter().for_each(|parameters| colors.set(parameters));
        colors.to_string()
    }

    #[test]
    fn what_is_in_effect_is_one_sequence() {
        assert_eq!(after(&["31", "1"]), "\x1b[1;31m");
        assert_eq!(after(&["1;31", "32;44"]), "\x1b[1;32;44m");
        assert_eq!(after(&["38;5;0", "48;2;0;0;9;4"]), "\x1b[4;38;5;0;48;2;0;0;9m");
        assert_eq!(after(&["4:3", "58:2::1:2:3"]), "\x1b[4:3;58:2::1:2:3m");
    }

    #[test]
    fn what_has_ended_leaves_nothing() {
        for end in [&["0"][..], &[""], &["0;0"], &["39", "49", "22", "24"], &["39;49;22;24"]] {
            assert_eq!(after(&[&["1;2;4;21;31;44"], end].concat()), "", "{end:?}");
        }
        assert_eq!(after(&["31", "0;32"]), "\x1b[32m");
        assert_eq!(after(&["3;7;8;9", "23;27", "28;29"]), "");
    }

    #[test]
    fn rare_attributes_are_followed_too() {
        assert_eq!(after(&["51;53", "11", "12;73"]), "\x1b[12;51;53;73m");
        let all = "10;11;19;20;26;51;52;53;60;64;73;74";
        assert_eq!(after(&[all]), "\x1b[19;20;26;51;52;53;64;73;74m");
        assert_eq!(after(&[all, "10;23;50;54;55;65;75"]), "");
    }

    #[test]
    fn what_is_not_a_color_is_ignored() {
        assert_eq!(after(&["38", "38;7;1", "48;", "999", "56", "66", "75"]), "");
        assert_eq!(after(&["48;5;1", "38;5"]), "\x1b[48;5;1m", "a part of it is missing");
        assert_eq!(after(&["41:57;38;2;53"]), "\x1b[41:57m", "parts of it are missing");
        assert_eq!(after(&[&format!("38:{}", "1".repeat(PARAMETER_BYTES_MAX))]), "");
    }

    proptest! {
        #[test]
        fn the_sequence_is_bounded_and_sets_the_same(parameters in "([0-9]{0,4}|[3459][0-9]|[;:]){0,60}") {
            let mut colors = Colors::default();
            colors.set(&parameters);
            let sequence = colors.to_string();
            prop_assert!(sequence.len() <= 23 * (PARAMETER_BYTES_MAX + 1) + 3);
            let mut again = Colors::default();
            if let Some(parameters) = sequence.strip_prefix("\x1b[").and_then(|text| text.strip_suffix('m')) {
                again.set(parameters);
            }
            prop_assert_eq!(again, colors);
        }
    }
}
