//! What a terminal understands.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// Whether a stream is a terminal that understands control sequences, which color text and move the cursor.
pub fn has_sequences(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && !is_dumb(std::env::var_os("TERM").as_deref())
}

/// Whether TERM is that of a terminal that understands none, such as a shell within Emacs.
fn is_dumb(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| term == "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_dumb_terminal_has_no_sequences() {
        let is_dumb = |term: Option<&str>| super::is_dumb(term.map(OsStr::new));
        assert!(is_dumb(Some("dumb")));
        assert!(!is_dumb(Some("xterm")) && !is_dumb(Some("")) && !is_dumb(None));
    }

    #[test]
    fn a_file_is_no_terminal() {
        let file = std::fs::File::open("/dev/null").expect("Linux has it");
        assert!(!has_sequences(&file));
    }
}
