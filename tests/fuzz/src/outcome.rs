//! The outcome of decoding an input.

use std::collections::hash_map::DefaultHasher;
use std::fmt::{self, Write};
use std::hash::Hasher;

/// What a decoder made of an input. Inputs with a new outcome are mutated further, so its words guide a target: the
/// name of the decoded type, and the reason of a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    is_read: bool,
    /// A hash of the words; numbers and quoted text do not count.
    pub(crate) kind: u64,
    words: String,
}

impl Outcome {
    /// The input is an encoding of this.
    pub fn read(what: &impl fmt::Debug) -> Self {
        Self::new(true, format_args!("{what:?}"))
    }

    /// The input is malformed, for this reason.
    pub fn refused(why: &impl fmt::Display) -> Self {
        Self::new(false, format_args!("{why}"))
    }

    /// Decoded or refused.
    pub fn of<T: fmt::Debug, E: fmt::Display>(result: &Result<T, E>) -> Self {
        match result {
            Ok(what) => Self::read(what),
            Err(why) => Self::refused(why),
        }
    }

    fn new(is_read: bool, words: fmt::Arguments<'_>) -> Self {
        let mut beginning = Beginning(String::new());
        // Formatting stops with an error when the buffer is full.
        let _ = beginning.write_fmt(words);
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(u8::from(is_read));
        let mut quoted = false;
        for letter in beginning.0.bytes() {
            quoted ^= matches!(letter, b'"' | b'`');
            if !quoted && letter.is_ascii_alphabetic() {
                hasher.write_u8(letter);
            }
        }
        Self { is_read, kind: hasher.finish(), words: beginning.0 }
    }

    /// Whether the input was an encoding.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// The beginning of the words.
    #[must_use]
    pub fn words(&self) -> &str {
        &self.words
    }
}

/// A buffer of bounded length. Formatting stops when it is full, so the rest of a large message is not formatted.
struct Beginning(String);

impl fmt::Write for Beginning {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.extend(text.chars().take(WORDS_MAX.saturating_sub(self.0.len())));
        if self.0.len() < WORDS_MAX { Ok(()) } else { Err(fmt::Error) }
    }
}

const WORDS_MAX: usize = 120;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_that_differ_only_in_numbers_and_quotes_are_equal() {
        let kind = |why: &str| Outcome::refused(&why).kind;
        assert_eq!(kind("7 bytes too many"), kind("1345 bytes too many"));
        assert_eq!(kind("no codec \"a\" is known"), kind("no codec \"bcd\" is known"));
        assert_eq!(kind("unknown field `a`, é"), kind("unknown field `bcd`"));
        assert_ne!(kind("no codec"), kind("no plugin"));
        assert_ne!(Outcome::read(&"a").kind, Outcome::refused(&"\"a\"").kind);
        assert_eq!(Outcome::read(&vec![0; 1 << 20]).words().len(), WORDS_MAX);
    }
}
