//! Words that this project invented once and has replaced by those of its field may not return as names.

use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};

use crate::hold;
use crate::source::{Source, files};

/// Retired words, and what to write instead. A word counts as a part of a name, too: `said` in `said_bytes` or
/// `SaidBytes`.
const RETIRED: &[(&[&str], &str)] = &[
    (&["say", "says", "said", "saying", "tell", "tells", "told", "telling"], "send, notify, report; reply, message"),
    (&["hear", "hears", "heard", "hearing"], "receive, received"),
    (&["look", "looks", "looked", "looking", "glance"], "poll, spin, load, check"),
    (&["behind", "anew"], "after, rest; again, new"),
    (&["remembered", "remembers"], "request cache, cached"),
    (&["settle", "settles", "settled", "settlement"], "commit, committed"),
    (&["pace"], "backpressure, send pacing"),
    (&["prompt"], "inline execution"),
    (&["manners", "urgency"], "session options; flush hint"),
    (&["rim", "rims", "floor", "floors", "house"], "adapter; layer; socket setup"),
    (&["parting", "farewell", "goodbye"], "shutdown, close reason"),
    (&["deviation", "deviations"], "schedule invalidation"),
    (&["departure", "departures", "presence"], "worker exit, liveness"),
    (&["lend", "lent"], "zero-copy, pooled, registered"),
    (&["stranger", "strangers"], "unauthenticated or unknown peer; straggler, missing rank"),
    (&["census", "faint", "hungry", "disowned"], "counter; weak reference; needs input; untrusted"),
];

/// Names of other crates, and of the protocol, whose names stay.
const KEPT: &[&str] = &["Goodbye", "SayAnswer", "SayRequest", "Settled", "floor", "floor_char_boundary"];

/// Files that implement or call a method of the protocol, and its name.
const KEPT_IN: &[(&str, &str)] =
    &[("sidecar/src/web/calls.rs", "say"), ("sdk-rust/src/web/link.rs", "say"), ("sdk-rust/src/web/tests.rs", "say")];

/// Folders whose names are not converted yet. Take one out when it is.
const NOT_YET_CONVERTED: &[&str] = &[];

#[test]
fn retired_words_do_not_return_as_names() {
    let mut offences = Vec::new();
    for source in files("rs").iter().filter(|source| is_converted(&source.path)) {
        offences.extend(report(source, &rust_names(&source.text)));
    }
    for source in files("py").iter().filter(|source| is_converted(&source.path)) {
        offences.extend(report(source, &python_names(&source.text)));
    }
    hold(
        "Names use the words of the field.",
        "Readers search for the words that they know from Tokio, quinn, MPI or the kernel.",
        &offences,
    );
}

#[test]
fn folders_that_are_not_converted_exist() {
    let missing = NOT_YET_CONVERTED.iter().filter(|folder| !crate::source::exists(folder));
    let missing: Vec<String> = missing.map(|folder| (*folder).to_owned()).collect();
    hold("The list of folders names folders.", "An exception for nothing hides a mistake.", &missing);
}

/// Whether a file is outside of the folders that are not converted yet.
pub(crate) fn is_converted(path: &str) -> bool {
    !NOT_YET_CONVERTED.iter().any(|folder| path.starts_with(folder))
}

/// A name, and the line that it is on.
type Name = (String, usize);

fn report(source: &Source, names: &[Name]) -> Vec<String> {
    let is_kept = |name: &str| KEPT_IN.contains(&(source.path.as_str(), name));
    let offence = |(name, line): &Name| {
        let better = replacement(name)?;
        Some(format!("{}:{line}: {name} (write: {better})", source.path))
    };
    names.iter().filter(|(name, _)| !is_kept(name)).filter_map(offence).collect()
}

/// What to write instead of a name's retired word, if it has one.
fn replacement(name: &str) -> Option<&'static str> {
    if KEPT.contains(&name) {
        return None;
    }
    let words = words(name);
    RETIRED
        .iter()
        .find(|(retired, _)| words.iter().any(|word| retired.contains(&word.as_str())))
        .map(|(_, better)| *better)
}

/// The words of a name in snake case or camel case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut previous = '_';
    for letter in name.chars() {
        let starts = letter == '_' || letter.is_uppercase() && !previous.is_uppercase();
        if starts {
            words.push(String::new());
        }
        if letter != '_' {
            words.last_mut().expect("it is never empty").extend(letter.to_lowercase());
        }
        previous = letter;
    }
    words.retain(|word| !word.is_empty());
    words
}

/// All identifiers of Rust code, also within macros, but not in comments and strings.
fn rust_names(text: &str) -> Vec<Name> {
    let tokens = TokenStream::from_str(text).unwrap_or_else(|error| panic!("this is not Rust: {error}"));
    let mut names = Vec::new();
    collect(tokens, &mut names);
    names
}

fn collect(tokens: TokenStream, names: &mut Vec<Name>) {
    for token in tokens {
        match token {
            TokenTree::Ident(name) => names.push((name.to_string(), name.span().start().line)),
            TokenTree::Group(group) => collect(group.stream(), names),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// All identifiers of Python code, but not in comments and strings.
fn python_names(text: &str) -> Vec<Name> {
    let (mut names, mut name, mut line) = (Vec::new(), String::new(), 1);
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        if letter.is_alphanumeric() || letter == '_' {
            name.push(letter);
            rest = &rest[letter.len_utf8()..];
            continue;
        }
        if !name.is_empty() {
            names.push((std::mem::take(&mut name), line));
        }
        let skipped = skipped(rest);
        line += rest[..skipped].matches('\n').count();
        rest = &rest[skipped..];
    }
    names.extend((!name.is_empty()).then_some((name, line)));
    names
}

/// The length of a comment or string at the start of Python code, and of any other character.
pub(crate) fn skipped(code: &str) -> usize {
    let length = |end: Option<usize>| end.unwrap_or(code.len());
    for quote in ["\"\"\"", "'''", "\"", "'"] {
        if let Some(content) = code.strip_prefix(quote) {
            return quote.len() + string_length(content, quote);
        }
    }
    if code.starts_with('#') { length(code.find('\n')) } else { code.chars().next().map_or(0, char::len_utf8) }
}

/// The length of a string's content and its closing quote.
fn string_length(content: &str, quote: &str) -> usize {
    let mut place = 0;
    while place < content.len() {
        let rest = &content[place..];
        if rest.starts_with(quote) {
            return place + quote.len();
        }
        let letters = if rest.starts_with('\\') { 2 } else { 1 };
        place += rest.chars().take(letters).map(char::len_utf8).sum::<usize>();
    }
    content.len()
}

#[test]
fn retired_words_are_found_in_names_only() {
    let found =
        |names: Vec<Name>| -> Vec<Name> { names.into_iter().filter(|(name, _)| replacement(name).is_some()).collect() };
    let rust = "// said\nfn f(said_bytes: u8) {\n    let x = \"told\"; m!(SaidHeard, [tellTale]);\n}\nstruct Sayings(SayRequest);";
    let expected = [("said_bytes", 2), ("SaidHeard", 3), ("tellTale", 3)].map(|(name, line)| (name.to_owned(), line));
    assert_eq!(found(rust_names(rust)), expected);
    let python = "# said\nx = 'it\\'s told'\n\"\"\"heard\nhere\"\"\"\nlooked_up = say(y)  # tell\n'unclosed said";
    let expected = [("looked_up", 5), ("say", 5)].map(|(name, line)| (name.to_owned(), line));
    assert_eq!(found(python_names(python)), expected);
}

#[test]
fn names_are_split_into_words() {
    assert_eq!(words("said_bytes"), ["said", "bytes"]);
    assert_eq!(words("HTTPServer2Said"), ["httpserver2", "said"]);
    assert_eq!(words("_SCREAMING_SAID"), ["screaming", "said"]);
}
