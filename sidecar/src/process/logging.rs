//! Formats log lines: one of text or JSON for each event, with the job and the sidecar on every line.
//!
//! The events' own fields have fixed names: `rank`, `peer`, `epoch`, `seq`, `operation` (a tensor's name), `reason`.
//! Lines contain names and numbers, never elements of tensors, tokens or keys.
//!
//! The formatters of tracing-subscriber are not used, for two reasons. They do not escape control characters in the
//! value of a field, and tensors' names, which workers choose, are such values: a name could forge a line or move a
//! terminal's cursor. And they print the job and the sidecar only from a span that every task and thread would have to
//! enter, nested under a key. Speed is no reason: on a busy machine of 2 cores, a line of text cost 4.5 us and one of
//! JSON 7.5 us with them, and 4.5 to 4.9 us and 8.5 to 9.3 us here (release build, 300,000 lines with three fields,
//! output discarded).

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;

use ronde_bootstrap::logs::{self, Head, LOG_VARIABLE, LogArgs, LogFormat, LogLevel};
use ronde_bootstrap::streams;
use ronde_wire::{JobName, SidecarIndex};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::process::log_limit::{Admitted, LogLimit};

/// Writes the events of this process to standard error, through the queue of [`streams::log`].
pub(crate) fn start(options: &LogArgs) {
    let from_environment = || std::env::var(LOG_VARIABLE).ok().map(EnvFilter::try_new);
    let (filter, mistake) = match (options.log_level, from_environment()) {
        (Some(level), _) => (filter(level), None),
        (None, Some(Ok(filter))) => (filter, None),
        (None, Some(Err(error))) => (default_filter(), Some(error)),
        (None, None) => (default_filter(), None),
    };
    let format = LineFormat { format: options.log_format, has_time: options.has_time() };
    // A process starts its log once.
    let _ = FORMAT.set(format);
    let colours = options.log_format == LogFormat::Text && std::io::stderr().is_terminal();
    tracing_subscriber::fmt()
        .with_writer(|| LogWriter)
        .with_ansi(colours)
        .with_env_filter(filter)
        .event_format(Lines { format, limit: LogLimit::default() })
        .init();
    std::panic::set_hook(Box::new(log_panic));
    if let Some(error) = mistake {
        tracing::warn!(%error, "{LOG_VARIABLE} cannot be parsed, so warnings are logged");
    }
}

/// What is logged when nothing else is asked for.
fn default_filter() -> EnvFilter {
    filter(LogLevel::Warn)
}

/// Other crates log warnings only, because they log every packet.
fn filter(level: LogLevel) -> EnvFilter {
    let others = if level == LogLevel::Error { "error" } else { "warn" };
    EnvFilter::new(format!("{others},ronde={}", level.name()))
}

/// Sets the job and the sidecar that every later line contains.
pub(crate) fn identify(job: &JobName, sidecar: SidecarIndex) {
    // A process takes part in one job.
    let _ = IDENTITY.set(LogIdentity { job: job.to_string(), sidecar: sidecar.0 });
}

struct LogIdentity {
    job: String,
    sidecar: u32,
}

static IDENTITY: OnceLock<LogIdentity> = OnceLock::new();

/// The line that reports how many lines were dropped.
pub(crate) fn lost_lines(lost: u64) -> String {
    let message = "log lines were dropped, because standard error was not read or could not be written".to_owned();
    let fields = Fields { message, others: vec![("dropped", lost.into())] };
    // Only lines that were logged can be lost, and they had a format.
    let format = FORMAT.get().copied().unwrap_or(LineFormat { format: LogFormat::Text, has_time: true });
    format.line("WARN", " WARN", module_path!(), &fields) + "\n"
}

/// The format of lines.
#[derive(Clone, Copy, Debug)]
struct LineFormat {
    format: LogFormat,
    has_time: bool,
}

impl LineFormat {
    /// `shown`: the level in a text line.
    fn line(self, level: &str, shown: &str, target: &str, fields: &Fields) -> String {
        match self.format {
            LogFormat::Json => json(level, target, IDENTITY.get(), fields),
            LogFormat::Text => text(self.has_time.then(logs::now), shown, target, IDENTITY.get(), fields),
        }
    }
}

static FORMAT: OnceLock<LineFormat> = OnceLock::new();

/// Queues each line, which the formatter writes in one piece.
struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        streams::log(String::from_utf8_lossy(line).into_owned());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Formats the events that the limit admits.
struct Lines {
    format: LineFormat,
    limit: LogLimit,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        let Admitted::Yes { left_out, is_last } = self.limit.admit(metadata) else { return Ok(()) };
        let mut fields = Fields::default();
        event.record(&mut fields);
        fields.note_limit(left_out, is_last);
        let level = metadata.level().as_str();
        let shown = coloured(level, writer.has_ansi_escapes());
        writeln!(writer, "{}", self.format.line(level, &shown, metadata.target(), &fields))
    }
}

/// The fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        self.others.push((field.name(), value.into()));
    }

    /// Adds what the limit left out before this line, and will leave out after it.
    fn note_limit(&mut self, left_out: u64, is_last: bool) {
        if left_out > 0 {
            self.others.push(("left_out", left_out.into()));
        }
        if is_last {
            self.others.push(("next", "lines like this one are left out, but for one a second".into()));
        }
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            _ => self.add(field, value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            _ => self.add(field, format!("{value:?}")),
        }
    }
}

fn json(level: &str, target: &str, who: Option<&LogIdentity>, fields: &Fields) -> String {
    let who = who.map(|who| (who.job.as_str(), who.sidecar));
    let (job, sidecar) = who.unzip();
    let head = Head { level, job, sidecar, target, message: &fields.message };
    logs::json_line(&head, &fields.others)
}

fn text(time: Option<String>, level: &str, target: &str, who: Option<&LogIdentity>, fields: &Fields) -> String {
    let time = time.map(|time| time + " ").unwrap_or_default();
    let message = printable(&fields.message, true);
    // The fields belong to the first line; the others are a list for people.
    let (first, rest) = message.split_at(message.find('\n').unwrap_or(message.len()));
    let mut line = format!("{time}{level} {target}: {first}");
    if let Some(LogIdentity { job, sidecar }) = who {
        line.push_str(&format!(" job={job} sidecar={sidecar}"));
    }
    for (name, value) in &fields.others {
        let value = match value {
            Value::String(text) if text.contains([' ', '"', '=']) || text.is_empty() => format!("{text:?}"),
            Value::String(text) => printable(text, false),
            other => other.to_string(),
        };
        line.push_str(&format!(" {name}={value}"));
    }
    line + rest
}

fn coloured(level: &str, colours: bool) -> String {
    let colour = match level {
        _ if !colours => return format!("{level:>5}"),
        "ERROR" => 31,
        "WARN" => 33,
        "INFO" => 32,
        _ => 34,
    };
    format!("\x1b[{colour}m{level:>5}\x1b[0m")
}

/// Escapes control characters: some lines contain text of workers and peers, which must not move a terminal's cursor.
fn printable(text: &str, lines: bool) -> String {
    let escaped = |c: char| c.is_control() && !(lines && c == '\n');
    if !text.contains(escaped) {
        return text.to_owned();
    }
    text.chars().flat_map(|c| if escaped(c) { c.escape_default().collect() } else { vec![c] }).collect()
}

fn log_panic(panic: &PanicHookInfo<'_>) {
    let place = panic.location().map(ToString::to_string).unwrap_or_default();
    let payload = panic.payload();
    let message =
        payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    let trace = Backtrace::capture();
    let trace = if trace.status() == BacktraceStatus::Captured { trace.to_string() } else { String::new() };
    tracing::error!(place, trace, "a thread panicked; this is a bug in ronde: {}", message.unwrap_or("no text"));
    // The process may end with this thread.
    streams::flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(message: &str, others: Vec<(&'static str, Value)>) -> Fields {
        Fields { message: message.to_owned(), others }
    }

    #[test]
    fn a_line_of_json_has_who_and_what_and_no_key_twice() {
        let who = LogIdentity { job: "run-1".to_owned(), sidecar: 3 };
        let fields =
            fields("gone:\n\"x\"", vec![("rank", 2.into()), ("job", "other".into()), ("reason", "\x1b".into())]);
        let line = json("WARN", "ronde::driver", Some(&who), &fields);
        assert!(!line.contains('\n') && line.matches("\"job\"").count() == 1, "{line}");
        let value: Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!((&value["job"], &value["sidecar"], &value["rank"]), (&"run-1".into(), &3.into(), &2.into()));
        assert_eq!((&value["message"], &value["reason"]), (&"gone:\n\"x\"".into(), &"\x1b".into()));
        let unknown: Value = serde_json::from_str(&json("WARN", "t", None, &fields)).expect("JSON");
        assert!(unknown["job"].is_null() && unknown["sidecar"].is_null());
    }

    #[test]
    fn a_line_of_text_moves_no_cursor() {
        let who = LogIdentity { job: "run-1".to_owned(), sidecar: 3 };
        let others = vec![("rank", 2.into()), ("reason", "two words".into()), ("name", "a\x1b[2J\nb".into())];
        let of = |time| text(time, " WARN", "ronde", Some(&who), &fields("first\nsecond \x1b[2J", others.clone()));
        let line = of(None);
        assert_eq!(of(Some("12:00".to_owned())), format!("12:00 {line}"));
        let expected = " WARN ronde: first job=run-1 sidecar=3 rank=2 reason=\"two words\" name=a\\u{1b}[2J\\nb\nsecond \\u{1b}[2J";
        assert_eq!(line, expected);
    }

    #[test]
    fn other_crates_log_only_warnings() {
        assert_eq!(filter(LogLevel::Debug).to_string(), "ronde=debug,warn");
        assert_eq!(filter(LogLevel::Error).to_string(), "ronde=error,error");
    }
}
