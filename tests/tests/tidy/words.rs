//! Checks that no marks of unfinished work are left.

use crate::hold;
use crate::source::files;

#[test]
fn no_todo_markers_are_left() {
    // Written in two halves, so that this file does not offend.
    let rust = ["todo!", "unimplemented!", "dbg!"].map(|name| format!("{name}("));
    let anywhere = [concat!("FIX", "ME"), concat!("TO", "DO"), concat!("XX", "X")].map(str::to_owned);
    let python = [concat!("break", "point(").to_owned()];
    let mut offences = Vec::new();
    for (extension, own) in
        [("rs", rust.as_slice()), ("py", python.as_slice()), ("proto", &[]), ("toml", &[]), ("sh", &[])]
    {
        for source in files(extension) {
            let words = own.iter().chain(&anywhere);
            let found = |line: &str| words.clone().any(|word| line.contains(word.as_str()));
            let lines = source.text.lines().enumerate().filter(|(_, line)| found(line));
            if source.path != "tests/tests/tidy/words.rs" {
                offences.extend(lines.map(|(index, line)| format!("{}:{}: {}", source.path, index + 1, line.trim())));
            }
        }
    }
    hold(
        "Nothing is marked as unfinished.",
        "A mark in the code is read by nobody. Finish it, leave it out, or open an issue.",
        &offences,
    );
}
