//! Texts that users read (errors, logs, help, documents) may not contain retired words either.

use std::str::FromStr;

use proc_macro2::{Delimiter, Group, Literal, TokenStream, TokenTree};

use crate::hold;
use crate::retired_words::{is_converted, skipped};
use crate::source::{Source, files};

/// Words that are never right in such a text.
const RETIRED: [&str; 14] = [
    "anew",
    "deviation",
    "deviations",
    "farewell",
    "glance",
    "hear",
    "heard",
    "hears",
    "lent",
    "remembered",
    "settled",
    "stranger",
    "strangers",
    "told",
];

/// Terms of other fields that contain such a word.
const KEPT: [&str; 1] = ["standard deviation"];

/// Documents that are generated from a folder: they are checked once the folder is converted.
const GENERATED: [(&str, &str); 1] = [("docs/PYTHON_API.md", "sdk-python/")];

/// What clap derives: the doc comments of such a type are help.
const HELP: [&str; 4] = ["Args", "Parser", "Subcommand", "ValueEnum"];

#[test]
fn retired_words_do_not_return_in_texts_that_users_read() {
    let mut offences = Vec::new();
    for source in files("rs").iter().filter(|source| is_shipped(&source.path)) {
        offences.extend(report(source, &rust_texts(&source.text)));
    }
    for source in files("py").iter().filter(|source| is_shipped(&source.path)) {
        offences.extend(report(source, &python_texts(&source.text)));
    }
    for source in files("md").iter().filter(|source| is_document(&source.path)) {
        offences.extend(report(source, &prose(&source.text)));
    }
    hold(
        "Errors, logs, help and documents use the words of the field.",
        "Users search for the words that they know. Programs send, receive, report, cache and commit.",
        &offences,
    );
}

fn is_shipped(path: &str) -> bool {
    is_converted(path) && !path.contains("tests/") && !path.ends_with("/tests.rs")
}

fn is_document(path: &str) -> bool {
    let is_awaited = GENERATED.iter().any(|(document, folder)| *document == path && !is_converted(folder));
    (path == "README.md" || path.starts_with("docs/")) && !is_awaited
}

/// A text, and the line on which it begins.
type Text = (String, usize);

fn report(source: &Source, texts: &[Text]) -> Vec<String> {
    let offence = |(text, line): &Text| retired_word(text).map(|word| format!("{}:{line}: {word}", source.path));
    texts.iter().filter_map(offence).collect()
}

/// The first retired word of a text. Placeholders in braces are no words.
fn retired_word(text: &str) -> Option<&'static str> {
    let mut text = text.to_lowercase().replace("\\n", " ");
    KEPT.iter().for_each(|term| text = text.replace(term, ""));
    let parts = text.split('{').enumerate();
    let outside =
        parts.map(|(index, part)| if index == 0 { part } else { part.split_once('}').map_or(part, |(_, rest)| rest) });
    let outside: String = outside.collect::<Vec<_>>().join(" ");
    let mut words = outside.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    words.find_map(|word| RETIRED.iter().find(|retired| **retired == word).copied())
}

/// The strings of Rust code, and the help of clap's types, but not those of tests.
fn rust_texts(text: &str) -> Vec<Text> {
    let tokens = TokenStream::from_str(text).unwrap_or_else(|error| panic!("this is not Rust: {error}"));
    let mut texts = Vec::new();
    collect(tokens, false, &mut texts);
    texts
}

fn collect(tokens: TokenStream, is_help: bool, texts: &mut Vec<Text>) {
    let mut tokens = tokens.into_iter();
    let mut item = Item::default();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                let mut next = tokens.next();
                if matches!(&next, Some(TokenTree::Punct(_))) {
                    next = tokens.next();
                }
                if let Some(TokenTree::Group(attribute)) = next {
                    item.note(&attribute, is_help, texts);
                }
            }
            TokenTree::Punct(mark) if mark.as_char() == ';' => item = Item::default(),
            TokenTree::Group(group) => {
                let is_body = group.delimiter() == Delimiter::Brace;
                if !item.is_test {
                    collect(group.stream(), if is_body { item.is_help } else { is_help }, texts);
                }
                if is_body {
                    item = Item::default();
                }
            }
            TokenTree::Literal(literal) if !item.is_test => texts.extend(string(&literal)),
            TokenTree::Literal(_) | TokenTree::Ident(_) | TokenTree::Punct(_) => {}
        }
    }
}

/// The attributes of an item tell whether it is a test, and whether its doc comments are help.
#[derive(Default)]
struct Item {
    is_test: bool,
    is_help: bool,
}

impl Item {
    fn note(&mut self, attribute: &Group, is_help: bool, texts: &mut Vec<Text>) {
        let text = attribute.stream().to_string();
        self.is_test |= text == "test" || text.replace(' ', "") == "cfg(test)";
        self.is_help |= text.starts_with("derive") && HELP.iter().any(|name| text.contains(name));
        if is_help || !text.starts_with("doc") {
            collect(attribute.stream(), false, texts);
        }
    }
}

fn string(literal: &Literal) -> Option<Text> {
    let text = literal.to_string();
    (text.starts_with('"') || text.starts_with('r')).then(|| (text, literal.span().start().line))
}

/// The strings of Python code, docstrings included.
fn python_texts(text: &str) -> Vec<Text> {
    let (mut texts, mut rest, mut line) = (Vec::new(), text, 1);
    while !rest.is_empty() {
        let (token, after) = rest.split_at(skipped(rest));
        if token.starts_with(['"', '\'']) {
            texts.push((token.to_owned(), line));
        }
        line += token.matches('\n').count();
        rest = after;
    }
    texts
}

/// The lines of a document outside of code and of quotations, which quote the code.
fn prose(text: &str) -> Vec<Text> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        is_code ^= line.starts_with("```");
        if !is_code && !line.starts_with("> ") {
            lines.push((line.split('`').step_by(2).collect(), number));
        }
    }
    lines
}

#[test]
fn retired_words_are_found_in_texts_only() {
    let found = |texts: Vec<Text>| -> Vec<usize> {
        texts.into_iter().filter(|(text, _)| retired_word(text).is_some()).map(|(_, line)| line).collect()
    };
    let rust = "//! told\n/// heard\nfn f() {\n    m!(\"it was told\", told);\n}\n#[derive(Args)]\nstruct A {\n    /// Begin anew.\n    \
                a: u8,\n}\n#[error(\"{told}, not\\nheard\")]\nstruct E;\n#[cfg(test)]\nmod tests {\n    const A: &str = \"told\";\n}\n";
    assert_eq!(found(rust_texts(rust)), [4, 8, 11]);
    let python = "# told\ntold = f'{told} a'\n\"\"\"Told\nhere.\"\"\"\nx = 'a standard deviation', 'lent'\n";
    assert_eq!(found(python_texts(python)), [3, 5]);
    assert_eq!(found(prose("told\n`told`\n> told\n```\ntold\n```\nbetold\nanew.\n")), [1, 8]);
}
