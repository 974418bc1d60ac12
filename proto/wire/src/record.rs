//! The record of the rank that failed first: how its process ended, its last call and the last lines of its standard
//! error. All ranks get the same record with their failure.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Rank, TensorName};
use crate::limits;

/// The record of a first failure. Its texts are untrusted; [`Record::within_limits`] makes them safe to print.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The rank.
    pub rank: Rank,
    /// The display name of its host.
    pub host: String,
    /// The number of its process on that host.
    pub pid: Option<u32>,
    /// How the process ended, where a launcher observed it.
    pub exit: Option<Exit>,
    /// Its last call.
    pub last_call: Option<Call>,
    /// The last lines of its standard error, oldest first.
    pub stderr_tail: Vec<String>,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// It was ended by this signal.
    Signal(i32),
    /// The out-of-memory killer ended it, as its control group reports.
    OutOfMemory,
}

/// A call of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The collective in lower case: `allreduce`.
    pub collective: String,
    /// The operation's name, as the ranks know it.
    pub operation: TensorName,
    /// The call site in the program, as `file:line`.
    pub site: Option<String>,
    /// Milliseconds since the call.
    pub age_ms: u64,
}

/// What a rank is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// The rank.
    pub rank: Rank,
    /// Milliseconds since its process last sent a message; `None` when its session has ended.
    pub silent_ms: Option<u64>,
    /// Its last call.
    pub last_call: Option<Call>,
    /// The number of its pending requests.
    pub pending: u32,
    /// The oldest of them.
    pub oldest: Option<TensorName>,
}

impl Record {
    /// The record with texts truncated to their limits and without control characters.
    #[must_use]
    pub fn within_limits(self) -> Self {
        let mut left = limits::RECORD_BYTES_MAX - TEXT_BYTES_MAX;
        let newest = self.stderr_tail.iter().rev().take(limits::RECORD_LINES_MAX);
        let lines = newest.map(|line| head(&printable(line), LINE_BYTES_MAX).to_owned());
        let lines = lines.take_while(|line| {
            let fits = line.len() <= left;
            left = left.saturating_sub(line.len());
            fits
        });
        let mut stderr_tail: Vec<String> = lines.collect();
        stderr_tail.reverse();
        let host = head(&printable(&self.host), HOST_BYTES_MAX).to_owned();
        Self { host, last_call: self.last_call.map(Call::within_limits), stderr_tail, ..self }
    }
}

impl Call {
    /// The call with texts truncated to their limits and without control characters. A call site keeps its end.
    #[must_use]
    pub fn within_limits(self) -> Self {
        let collective = head(&printable(&self.collective), COLLECTIVE_BYTES_MAX).to_owned();
        Self { collective, site: self.site.and_then(Self::fit_site), ..self }
    }

    /// A call site from an untrusted source, made safe to print; `None` for an empty one.
    #[must_use]
    pub fn fit_site(site: String) -> Option<String> {
        let fits = site.len() <= limits::CALL_SITE_BYTES_MAX && site.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        let site = if fits { site } else { tail(&printable(&site), limits::CALL_SITE_BYTES_MAX).to_owned() };
        Some(site).filter(|site| !site.is_empty())
    }
}

impl Activity {
    /// The activity with texts truncated to their limits and without control characters.
    #[must_use]
    pub fn within_limits(self) -> Self {
        Self { last_call: self.last_call.map(Call::within_limits), ..self }
    }

    /// The same activity some time later.
    #[must_use]
    pub fn older_by(mut self, ms: u64) -> Self {
        if let Some(call) = &mut self.last_call {
            call.age_ms = call.age_ms.saturating_add(ms);
        }
        self.silent_ms = self.silent_ms.map(|silent| silent.saturating_add(ms));
        self
    }
}

impl Exit {
    /// Advice that follows the description, where there is any.
    #[must_use]
    pub const fn advice(self) -> &'static str {
        match self {
            Self::Signal(SIGKILL) => {
                "; unless somebody sent that signal, the host ran out of memory: see `dmesg` on that host"
            }
            Self::OutOfMemory => "; give its control group more memory, or let it use less",
            Self::Code(_) | Self::Signal(_) => "",
        }
    }
}

impl fmt::Display for Record {
    /// The text after the sentence that names the rank and its exit; empty where nothing is known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(call) = &self.last_call {
            write!(f, "\nIts last call was {call}, {} before.", Seconds(call.age_ms))?;
        }
        if !self.stderr_tail.is_empty() {
            write!(f, "\nThe last lines of its stderr:")?;
        }
        self.stderr_tail.iter().try_for_each(|line| write!(f, "\n  | {line}"))
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exited with code {code}"),
            Self::Signal(signal) => {
                write!(f, "was killed by signal {signal}")?;
                let name = usize::try_from(*signal).ok().and_then(|signal| SIGNALS.get(signal.checked_sub(1)?));
                name.map_or(Ok(()), |name| write!(f, " (SIG{name})"))
            }
            Self::OutOfMemory => f.write_str("was killed by the out-of-memory killer"),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, operation, site, .. } = self;
        // The SDKs prefix the user's name with the collective.
        let own = operation.as_str().strip_prefix(collective.as_str()).and_then(|rest| rest.strip_prefix('.'));
        write!(f, "{collective} '{}'", own.unwrap_or(operation.as_str()))?;
        site.as_ref().map_or(Ok(()), |site| write!(f, " at {site}"))
    }
}

impl fmt::Display for Activity {
    /// The text after a sentence about the rank: "its last call was ...; its process last responded ... ago".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.last_call {
            Some(call) => write!(f, "its last call was {call}, {} ago", Seconds(call.age_ms))?,
            None => write!(f, "it has called nothing yet")?,
        }
        match (self.pending, &self.oldest) {
            (0, _) => write!(f, ", and none of its calls is pending")?,
            (1, Some(oldest)) => write!(f, "; its call {oldest} is pending")?,
            (count, Some(oldest)) => write!(f, "; {count} of its calls are pending, the oldest {oldest}")?,
            (count, None) => write!(f, "; {count} of its calls are pending")?,
        }
        match self.silent_ms {
            Some(silent_ms) => write!(f, "; its process last responded {} ago", Seconds(silent_ms)),
            None => write!(f, "; its process has exited"),
        }
    }
}

struct Seconds(u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} seconds", self.0 / 1_000, self.0 % 1_000 / 100)
    }
}

/// The text without characters that move the cursor or change the writing direction.
pub(crate) fn printable(text: &str) -> String {
    let hidden = |c: char| {
        c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => shown.push_str("    "),
            c if hidden(c) => shown.extend(c.escape_default()),
            c => shown.push(c),
        }
    }
    shown
}

pub(crate) fn head(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn tail(text: &str, bytes_max: usize) -> &str {
    let mut start = text.len().saturating_sub(bytes_max);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

const SIGKILL: i32 = 9;
/// The signals of Linux, from 1.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM", "TERM",
    "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO",
    "PWR", "SYS",
];
const HOST_BYTES_MAX: usize = 255;
const COLLECTIVE_BYTES_MAX: usize = 32;
const LINE_BYTES_MAX: usize = 512;
/// Bytes of all texts except the lines of standard error, which get the rest.
const TEXT_BYTES_MAX: usize =
    HOST_BYTES_MAX + COLLECTIVE_BYTES_MAX + limits::NAME_BYTES_MAX + limits::CALL_SITE_BYTES_MAX;

#[cfg(test)]
mod tests {
    use super::*;

    fn record(stderr_tail: Vec<String>) -> Record {
        let operation = TensorName::new("allreduce.grad.7").expect("a name");
        let call = Call { collective: "allreduce".into(), operation, site: Some("train.py:88".into()), age_ms: 349 };
        let exit = Some(Exit::Code(1));
        Record { rank: Rank(2), host: "beta".into(), pid: Some(7), exit, last_call: Some(call), stderr_tail }
    }

    #[test]
    fn a_record_reads_like_a_report() {
        let text = record(vec!["Traceback".into(), "ValueError: x".into()]).to_string();
        let expected = "\nIts last call was allreduce 'grad.7' at train.py:88, 0.3 seconds before.\nThe last lines of its stderr:\n  | Traceback\n  | ValueError: x";
        assert_eq!(text, expected);
        let unknown = Record { exit: None, last_call: None, ..record(Vec::new()) };
        assert_eq!(unknown.to_string(), "");
    }

    #[test]
    fn exits_are_described_by_name() {
        assert_eq!(Exit::Signal(11).to_string(), "was killed by signal 11 (SIGSEGV)");
        assert_eq!(Exit::Signal(31).to_string(), "was killed by signal 31 (SIGSYS)");
        for odd in [0, -1, 40, i32::MIN] {
            assert_eq!(Exit::Signal(odd).to_string(), format!("was killed by signal {odd}"));
        }
        assert!(Exit::Signal(SIGKILL).advice().contains("memory") && Exit::Code(1).advice().is_empty());
    }

    #[test]
    fn hostile_texts_are_truncated_and_escaped() {
        let endless = "\x1b[2J\u{202e}é".repeat(100_000);
        let mut hostile = record(vec![endless.clone(); 1_000]);
        hostile.host.clone_from(&endless);
        hostile.last_call =
            hostile.last_call.map(|call| Call { site: Some(endless.clone()), collective: endless, ..call });
        let kept = hostile.within_limits();
        let call = kept.last_call.as_ref().expect("it stays");
        let texts = [&kept.host, &call.collective, call.site.as_ref().expect("it stays")];
        let bytes: usize = texts.into_iter().chain(&kept.stderr_tail).map(String::len).sum();
        assert!(bytes + call.operation.as_str().len() <= limits::RECORD_BYTES_MAX, "{bytes}");
        assert!(!kept.stderr_tail.is_empty() && kept.stderr_tail.len() <= limits::RECORD_LINES_MAX);
        assert!(!kept.to_string().contains(['\x1b', '\u{202e}']));
    }

    #[test]
    fn the_newest_lines_and_the_end_of_a_call_site_are_kept() {
        let lines = (0..100).map(|number| format!("line {number}")).collect();
        let kept = record(lines).within_limits().stderr_tail;
        assert_eq!((kept.len(), kept[0].as_str(), kept[19].as_str()), (20, "line 80", "line 99"));
        let site = format!("{}/train.py:88", "d".repeat(300));
        let call = record(Vec::new()).last_call.map(|call| Call { site: Some(site), ..call }.within_limits());
        let site = call.and_then(|call| call.site).expect("it stays");
        assert!(site.len() == limits::CALL_SITE_BYTES_MAX && site.ends_with("/train.py:88"), "{site}");
    }

    #[test]
    fn an_activity_is_described_in_one_sentence() {
        let call = record(Vec::new()).last_call;
        let busy = Activity {
            rank: Rank(2),
            silent_ms: Some(100),
            last_call: call,
            pending: 2,
            oldest: TensorName::new("a").ok(),
        };
        assert_eq!(
            busy.to_string(),
            "its last call was allreduce 'grad.7' at train.py:88, 0.3 seconds ago; 2 of its calls are pending, the oldest a; its process last responded 0.1 seconds ago"
        );
        let gone = Activity { rank: Rank(2), silent_ms: None, last_call: None, pending: 0, oldest: None };
        assert!(gone.to_string().ends_with("its process has exited"), "{gone}");
    }
}
