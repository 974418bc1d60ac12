//! The options about log lines, and the form of a line of JSON, which the launcher and sidecars share.

use clap::{Args, ValueEnum};
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

/// The options about logs.
#[derive(Args, Clone, Debug)]
pub struct LogArgs {
    /// What log lines look like: text for people, or json with one object a line.
    #[arg(long, value_name = "FORMAT", value_enum, hide_possible_values = true, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// The least serious lines that sidecars log: error, warn, info, debug or trace, also as FATAL, ERROR, WARNING, INFO, DEBUG
    /// and TRACE. [default: the filter in RONDE_LOG, else warn]
    #[arg(
        long,
        value_name = "LEVEL",
        env = "HOROVOD_LOG_LEVEL",
        value_enum,
        ignore_case = true,
        hide_possible_values = true
    )]
    pub log_level: Option<LogLevel>,
    /// Begin log lines for people with the time; the default.
    #[arg(long, overrides_with = "log_without_timestamp")]
    pub log_with_timestamp: bool,
    /// Leave the time out of log lines for people; JSON has it always.
    #[arg(long, env = "HOROVOD_LOG_HIDE_TIME", overrides_with = "log_with_timestamp")]
    pub log_without_timestamp: bool,
}

impl LogArgs {
    /// Whether lines for people begin with the time.
    pub fn has_time(&self) -> bool {
        self.log_with_timestamp || !self.log_without_timestamp
    }
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// How serious a line is at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What ends something.
    #[value(alias = "fatal")]
    Error,
    /// Events that need attention.
    #[value(alias = "warning")]
    Warn,
    /// What happens once an epoch or a session.
    Info,
    /// What happens once an operation.
    Debug,
    /// Everything.
    Trace,
}

impl LogFormat {
    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

impl LogLevel {
    /// The word on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// What every line of JSON begins with.
#[derive(Debug)]
pub struct Head<'a> {
    /// The level in capitals.
    pub level: &'a str,
    /// The job, once it is known.
    pub job: Option<&'a str>,
    /// The index of the sidecar; absent for the launcher.
    pub sidecar: Option<u32>,
    /// The part of the program that logs.
    pub target: &'a str,
    /// What happened.
    pub message: &'a str,
}

/// A line of JSON without its newline: the time, the head, then the event's own fields. A field with the name of one in the
/// head is left out.
pub fn json_line(head: &Head<'_>, fields: &[(&'static str, Value)]) -> String {
    let Head { level, job, sidecar, target, message } = *head;
    let values: [Value; 6] = [now().into(), level.into(), job.into(), sidecar.into(), target.into(), message.into()];
    let mut line = "{".to_owned();
    JSON_KEYS.iter().zip(&values).for_each(|(name, value)| push(&mut line, name, value));
    fields.iter().filter(|(name, _)| !JSON_KEYS.contains(name)).for_each(|(name, value)| push(&mut line, name, value));
    line + "}"
}

/// The current time in UTC as RFC 3339 writes it, always with three digits of a second's fraction.
pub fn now() -> String {
    OffsetDateTime::now_utc().format(TIME).expect("every time of this era has this form")
}

fn push(line: &mut String, name: &str, value: &Value) {
    if line.len() > 1 {
        line.push(',');
    }
    line.push_str(&format!("{}:{value}", Value::from(name)));
}

/// A finer filter than --log-level, in the language of the crate `tracing-subscriber`.
pub const LOG_VARIABLE: &str = "RONDE_LOG";
/// What stands on every line, in this order, before the event's own fields.
const JSON_KEYS: [&str; 6] = ["time", "level", "job", "sidecar", "target", "message"];
const TIME: &[BorrowedFormatItem<'static>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_have_one_format() {
        let shape: String = now().chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "0000-00-00T00:00:00.000Z");
    }

    #[test]
    fn a_line_of_the_launcher_names_no_sidecar() {
        let head = Head { level: "INFO", job: Some("run-1"), sidecar: None, target: "ronde::run", message: "said" };
        let line: Value = serde_json::from_str(&json_line(&head, &[("job", "other".into())])).expect("JSON");
        assert_eq!((&line["job"], &line["message"], &line["sidecar"]), (&"run-1".into(), &"said".into(), &Value::Null));
    }
}
