//! Concatenates the manifest's text at compile time.

/// The length of the concatenated parts.
#[must_use]
pub const fn length(parts: &[&str]) -> usize {
    let (mut length, mut last, mut part) = (0, 0, 0);
    while part < parts.len() {
        if !follows_opening(parts[part], last) {
            length += parts[part].len();
            last = last_byte(parts[part], last);
        }
        part += 1;
    }
    length
}

/// Concatenates the parts. A part that is a comma is omitted at the start of a list.
#[must_use]
pub const fn joined<const LENGTH: usize>(parts: &[&str]) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    let (mut length, mut last, mut part) = (0, 0, 0);
    while part < parts.len() {
        let text = parts[part].as_bytes();
        if !follows_opening(parts[part], last) {
            let mut index = 0;
            while index < text.len() {
                bytes[length] = text[index];
                (length, index) = (length + 1, index + 1);
            }
            last = last_byte(parts[part], last);
        }
        part += 1;
    }
    bytes
}

/// Converts concatenated text to a string.
///
/// # Panics
/// If it is not UTF-8; at compile time.
#[must_use]
pub const fn text(bytes: &[u8]) -> &str {
    match core::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(_) => panic!("texts that were joined are no text"),
    }
}

/// Whether a text needs no escapes in the manifest: it has no quotes, backslashes or control characters.
///
/// ```
/// ronde_plugin::export! {
///     name: "own", about: "Says 'no'.", parameters: Settings {},
///     limits: { memory_bytes: 65536, call_ms: 1, ranks: 1 }, buffers: { input: 64, output: 64, state: 0, measures: 0 },
/// }
/// # fn main() {}
/// ```
///
/// ```compile_fail
/// ronde_plugin::export! {
///     name: "own", about: "Says \"no\".", parameters: Settings {},
///     limits: { memory_bytes: 65536, call_ms: 1, ranks: 1 }, buffers: { input: 64, output: 64, state: 0, measures: 0 },
/// }
/// # fn main() {}
/// ```
#[must_use]
pub const fn is_plain(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut index = 0;
    while index < bytes.len() {
        if matches!(bytes[index], b'"' | b'\\' | 0..0x20 | 0x7f) {
            return false;
        }
        index += 1;
    }
    true
}

/// The bytes of a text as an array, for a section.
///
/// # Panics
/// If the length differs; at compile time.
#[must_use]
pub const fn bytes<const LENGTH: usize>(text: &'static str) -> &'static [u8; LENGTH] {
    match text.as_bytes().first_chunk() {
        Some(bytes) if text.len() == LENGTH => bytes,
        _ => panic!("the length is that of another text"),
    }
}

const fn follows_opening(part: &str, last: u8) -> bool {
    part.len() == 1 && part.as_bytes()[0] == b',' && (last == b'[' || last == b'{')
}

const fn last_byte(part: &str, last: u8) -> u8 {
    if part.is_empty() { last } else { part.as_bytes()[part.len() - 1] }
}

#[cfg(test)]
mod tests {
    use super::{is_plain, joined, length, text};

    #[test]
    fn texts_for_the_manifest_need_no_escapes() {
        assert!(is_plain("") && is_plain("Says 'no', …"));
        assert!(!["\"", "a\"b", "\\", "a\nb", "\u{7f}"].into_iter().any(is_plain));
    }

    #[test]
    fn a_comma_is_left_out_where_a_list_begins() {
        const PARTS: &[&str] = &["{\"a\":[", ",", "1", ",", "2", "", "],", "{", ",", "}"];
        const BYTES: [u8; length(PARTS)] = joined(PARTS);
        assert_eq!(text(&BYTES), "{\"a\":[1,2],{}");
    }
}
