//! Parses the configuration file: TOML with a table for each subcommand, whose keys are the long options.

use std::collections::BTreeMap;
use std::path::Path;

use clap::{Arg, ArgAction, Command};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{CONFIGURED, Mistakes, check, nearest, options};

/// Values by subcommand and option.
pub(super) type Values = BTreeMap<(String, String), FileValue>;

/// The value of an option.
pub(super) struct FileValue {
    /// The file and the line.
    pub(super) place: String,
    pub(super) words: Vec<String>,
}

/// Reads a file and checks all of it, including the tables of other subcommands.
pub(super) fn read(cli: &Command, path: &Path, mistakes: &mut Mistakes) -> Values {
    if path.as_os_str().is_empty() {
        mistakes.note("--config or RONDE_CONFIG", "it is empty; name a file, or leave it out");
        return Values::new();
    }
    let text = match std::fs::metadata(path).map(|metadata| metadata.len()) {
        Ok(length) if length > FILE_BYTES_MAX => {
            mistakes
                .note(path.display(), format!("it has {length} bytes; a configuration has at most {FILE_BYTES_MAX}"));
            return Values::new();
        }
        _ => match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                mistakes.note(path.display(), format!("it cannot be read: {error}"));
                return Values::new();
            }
        },
    };
    parse(cli, &path.display().to_string(), &text, mistakes)
}

/// Checks a text. Notes mistakes with their lines; returns the valid values.
pub(super) fn parse(cli: &Command, name: &str, text: &str, mistakes: &mut Mistakes) -> Values {
    let mut reader = Reader { cli, name, text, found: Vec::new(), values: Values::new() };
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let at = error.span().map_or(0, |span| span.start);
        reader.note(at, error.message().to_owned());
    }
    reader.tables(table.get_ref());
    // Tables are iterated by name; report by line.
    reader.found.sort();
    for (line, what) in reader.found {
        mistakes.note(format!("{name}:{line}"), what);
    }
    reader.values
}

struct Reader<'a> {
    cli: &'a Command,
    /// Of the file.
    name: &'a str,
    text: &'a str,
    /// Mistakes by line.
    found: Vec<(usize, String)>,
    values: Values,
}

impl Reader<'_> {
    fn note(&mut self, at: usize, what: impl std::fmt::Display) {
        self.found.push((self.line(at), what.to_string()));
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
    }

    fn tables(&mut self, root: &DeTable<'_>) {
        for (key, value) in root {
            let name = key.get_ref().as_ref();
            let command = CONFIGURED.iter().find(|known| **known == name);
            match (command.and_then(|name| self.cli.find_subcommand(name)), value.get_ref()) {
                (Some(command), DeValue::Table(table)) => self.table(command, table),
                (Some(_), _) => self.note(key.span().start, format!("{name} is a table: write [{name}]")),
                (None, DeValue::Table(_)) => {
                    let known = CONFIGURED.map(|name| format!("[{name}]")).join(" and ");
                    self.note(key.span().start, format!("there is no table [{name}]; there are {known}"));
                }
                (None, _) => {
                    let what = format!("{name} is outside of a table; {}", self.place_of(name));
                    self.note(key.span().start, what);
                }
            }
        }
    }

    /// Where a key of no table belongs.
    fn place_of(&self, name: &str) -> String {
        let of = |table: &str| self.cli.find_subcommand(table).and_then(|command| nearest(command, name));
        let places: Vec<String> =
            CONFIGURED.iter().filter_map(|table| Some(format!("{} below [{table}]", of(table)?))).collect();
        match places.is_empty() {
            true => "write keys below [run] or [sidecar]".to_owned(),
            false => format!("is {} meant?", places.join(", or ")),
        }
    }

    fn table(&mut self, command: &Command, table: &DeTable<'_>) {
        for (key, value) in table {
            let name = key.get_ref().as_ref();
            match options(command).find(|arg| arg.get_long() == Some(name)) {
                Some(arg) => self.option(command, arg, value),
                None => {
                    let hint = nearest(command, name).map(|near| format!("; is {near} meant?")).unwrap_or_default();
                    self.note(key.span().start, format!("[{}] has no key {name}{hint}", command.get_name()));
                }
            }
        }
    }

    fn option(&mut self, command: &Command, arg: &Arg, value: &Spanned<DeValue<'_>>) {
        if value.span().is_empty() {
            // The parser put it where it found no value, which is the mistake.
            return;
        }
        let long = arg.get_long().unwrap_or_default();
        let checked = match words(arg, value.get_ref()) {
            Ok(words) => check(arg, &words),
            Err(expected) => Err(format!("it takes {expected}, not {}", kind(value.get_ref()))),
        };
        match checked {
            Ok(words) => {
                let place = format!("{}:{}", self.name, self.line(value.span().start));
                let option = (command.get_name().to_owned(), arg.get_id().to_string());
                self.values.insert(option, FileValue { place, words });
            }
            Err(what) => self.note(value.span().start, format!("{long}: {what}")),
        }
    }
}

/// Returns the words of a value, as on the command line.
fn words(arg: &Arg, value: &DeValue<'_>) -> Result<Vec<String>, &'static str> {
    let is_list = matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some();
    match (arg.get_action(), value) {
        (ArgAction::SetTrue, DeValue::Boolean(value)) => Ok(vec![value.to_string()]),
        (ArgAction::SetTrue, _) => Err("true or false"),
        (_, DeValue::Array(items)) if is_list => {
            items.iter().map(|item| word(item.get_ref()).ok_or("a list of strings or numbers")).collect()
        }
        (_, value) => word(value).map(|word| vec![word]).ok_or(if is_list { "a list" } else { "a string or a number" }),
    }
}

fn word(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        // One with more digits is explained by the range, as any other number out of it.
        DeValue::Integer(number) => Some(
            i64::from_str_radix(number.as_str(), number.radix())
                .map_or_else(|_| number.to_string(), |number| number.to_string()),
        ),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        _ => None,
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

const FILE_BYTES_MAX: u64 = 1 << 20;
