//! Error codes: every error on the command line carries one; `ronde explain` and `docs/ERRORS.md` explain it.
//!
//! The first digit is the part that failed: 1 the command line and files, 2 hosts and the launcher, 3 workers, 4 sidecars,
//! 5 keys and certificates, 6 asking a running job, 7 the benchmark. A number is never given to another error later on.

use std::fmt;
use std::ops::RangeInclusive;

use crate::exit::{EXIT_NOT_FOUND, EXIT_SIGNAL};

mod causes;
mod table;

pub use causes::CAUSES;
pub use table::TABLE;

/// The kind of an error.
///
/// Code that detects an error adds it to the [`anyhow::Error`] as context; [`coded`] appends it to the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub enum Code {
    /// Invalid options or arguments.
    CommandLine = 101,
    /// A list or file of hosts.
    Hosts = 102,
    /// Processes that do not fit the hosts.
    Placement = 103,
    /// Mistakes in the configuration file or in variables.
    ConfigFile = 104,
    /// `ronde explain` of something that is no code.
    NotExplained = 105,
    /// The profile of `--tuning` cannot be used.
    Profile = 106,
    /// The launcher cannot start.
    LauncherStart = 201,
    /// The program that reaches a host cannot be started.
    RemoteShellStart = 202,
    /// A host cannot be reached.
    HostUnreachable = 203,
    /// The connection to a host ended.
    HostLost = 204,
    /// A host runs another version.
    VersionDiffers = 205,
    /// A host cannot execute a command of the launcher.
    HostRefused = 206,
    /// A host has no address for others.
    NoAddress = 207,
    /// Not everything started in time.
    StartTimeout = 208,
    /// The workers' output, or the answer of a command, cannot be written.
    OutputLost = 209,
    /// The user ended the job.
    Interrupted = 210,
    /// The report cannot be written.
    ReportUnwritable = 211,
    /// The files for the workers' output cannot be made.
    OutputFiles = 212,
    /// The agent on a host cannot continue.
    AgentFailed = 213,
    /// A host has no interface that was asked for.
    NoInterface = 214,
    /// The key of a host is not known, or another one.
    HostKey = 215,
    /// A host rejects the user's log-in.
    LogIn = 216,
    /// A host does not answer the remote shell.
    HostSilent = 217,
    /// ronde is not on a host, or not at the expected path.
    RondeMissing = 218,
    /// The command of `--starter` failed.
    StarterFailed = 219,
    /// An elastic job cannot go on.
    ElasticEnded = 220,
    /// A host's notice of preemption was over before its workers had left.
    NoticeOver = 221,
    /// A worker failed.
    WorkerFailed = 301,
    /// A worker's command cannot be run.
    WorkerNotRun = 302,
    /// A worker is not on the host that its job expects.
    WorkerPlace = 303,
    /// A worker hung and was replaced.
    WorkerHung = 304,
    /// A rank left the job while others had operations.
    LeftEarly = 305,
    /// Ranks disagree on an operation.
    RanksDisagree = 306,
    /// A request was rejected or withdrawn.
    RequestRejected = 307,
    /// A request exceeds a limit.
    LimitReached = 308,
    /// An operation did not complete in time.
    OperationTimedOut = 309,
    /// A worker does not find its sidecar.
    SidecarNotFound = 310,
    /// A sidecar rejected a worker's claim.
    ClaimRejected = 311,
    /// A client was used after a fork.
    UsedAfterFork = 312,
    /// A client was used after it was closed.
    ClientClosed = 313,
    /// A worker's shared memory, GPU or thread failed.
    WorkerSystem = 314,
    /// A worker and its sidecar are of different releases.
    SessionProtocol = 315,
    /// A timeline cannot be recorded.
    TimelineFailed = 316,
    /// An invariant of ronde broke.
    Bug = 317,
    /// A sidecar ended.
    SidecarEnded = 401,
    /// A sidecar cannot continue.
    SidecarCannotGoOn = 402,
    /// A sidecar's settings are out of range.
    SidecarSettings = 403,
    /// A port cannot be bound.
    PortBind = 404,
    /// The directory of the sockets cannot be made.
    SocketDirectory = 405,
    /// Another sidecar did not connect.
    PeerMissing = 406,
    /// A sidecar cannot parse the launcher's messages.
    LauncherLine = 407,
    /// The launcher does not read a sidecar's messages.
    LauncherNotReading = 408,
    /// The log of the search for better settings cannot be made.
    AutotuneLog = 409,
    /// No certificate could be issued.
    CertificateNotIssued = 501,
    /// A sidecar has no credentials.
    NoCredentials = 502,
    /// A file of keys or certificates is open to others.
    KeyMode = 503,
    /// Files of certificates or keys are missing, unreadable or do not belong together.
    CertificateFiles = 504,
    /// A certificate has expired.
    CertificateExpired = 505,
    /// A certificate is not valid yet.
    CertificateNotYetValid = 506,
    /// A certificate is of another authority, job or sidecar.
    CertificateForeign = 507,
    /// A file would be overwritten.
    FileExists = 508,
    /// `ronde certs inspect` found unusable files.
    CertificatesUnusable = 509,
    /// A file holds no job's secret.
    JobSecret = 510,
    /// An authority would be changed in one step.
    AuthorityStep = 511,
    /// `ronde check` found a problem that prevents jobs.
    HostUnfit = 601,
    /// No sidecar was found.
    NoSidecarFound = 602,
    /// A sidecar does not answer.
    StatusUnreachable = 603,
    /// No elastic job was found.
    JobNotFound = 604,
    /// Several elastic jobs were found.
    JobAmbiguous = 605,
    /// A job is not elastic.
    JobNotElastic = 606,
    /// A running job cannot do what was asked for.
    JobRequest = 607,
    /// The launcher of a job does not answer.
    JobUnreachable = 608,
    /// A flight record cannot be read.
    FlightRecord = 609,
    /// A flight record or its timeline cannot be written.
    FlightFile = 610,
    /// The benchmark's Python cannot be run.
    PythonNotRun = 701,
    /// The benchmark's Python lacks packages.
    PythonPackages = 702,
    /// A search of `ronde tune` did not come to its end.
    TuneFailed = 703,
    /// A plot or a profile cannot be written.
    ResultUnwritable = 704,
    /// A plugin cannot be read or loaded.
    PluginFile = 801,
    /// A plugin's package cannot be created or built.
    PluginBuild = 802,
    /// A plugin fails the conformance test.
    PluginFailed = 803,
    /// A key or signature of a plugin cannot be used, or is not the right one.
    PluginTrust = 804,
    /// A plugin has no such parameter, or not of this value or type.
    PluginParameters = 805,
}

impl Code {
    /// Its entry in the table.
    pub fn entry(self) -> &'static Entry {
        TABLE.iter().find(|entry| entry.code == self).expect("a test holds that every code is in the table")
    }

    /// The exit status of a command that ends with this error, the same in all commands. A job that ends because a
    /// process failed, or by a signal, has the status of the process or the signal instead.
    pub fn exit_status(self) -> u8 {
        self.entry().exit
    }

    /// The code of exceptions with this `cause`.
    pub fn of_cause(cause: &str) -> Option<Self> {
        CAUSES.iter().find(|(name, _)| *name == cause).map(|(_, code)| *code)
    }

    /// The code of an error: the outermost that was added to it, or else `otherwise`. Codes in its text do not count, as
    /// the text may quote what a user gave.
    pub fn of_error(error: &anyhow::Error, otherwise: Self) -> Self {
        error.downcast_ref::<Self>().copied().unwrap_or(otherwise)
    }

    /// Reads `E203`, `RONDE-E203`, `[RONDE-E203]` or `203`, in capitals or not.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().to_ascii_uppercase();
        let text = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(&text);
        let text = text.strip_prefix("RONDE-").unwrap_or(text);
        let number = text.strip_prefix('E').unwrap_or(text);
        TABLE.iter().map(|entry| entry.code).find(|code| (*code as u16).to_string() == number)
    }

    /// The code at the end of a text's first line, where [`Code::mark`] writes it. A code elsewhere is quoted.
    pub fn of(text: &str) -> Option<Self> {
        let (_, code) = text.lines().next()?.strip_suffix(']')?.rsplit_once('[')?;
        if code.starts_with(PREFIX) { Self::parse(code) } else { None }
    }

    /// Appends the code to the first line of a text, unless that line ends with one: the innermost code is the most
    /// specific. For texts of other processes, which end with a code already.
    pub fn mark(self, text: &str) -> String {
        Self::of(text).unwrap_or(self).append_to(text)
    }

    /// Appends the code to the first line of a text, unless that line ends with this code.
    pub fn append_to(self, text: &str) -> String {
        let (first, rest) = text.split_at(text.find('\n').unwrap_or(text.len()));
        if Self::of(first) == Some(self) { text.to_owned() } else { format!("{first} [{self}]{rest}") }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RONDE-E{}", *self as u16)
    }
}

/// What there is to say of a code.
#[derive(Debug)]
pub struct Entry {
    /// The code.
    pub code: Code,
    /// The exit status of a command that ends with it.
    pub exit: u8,
    /// What went wrong, in a few words.
    pub title: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

impl Entry {
    /// The exit status in words: that of all commands, or where it comes from.
    pub fn exit_text(&self) -> String {
        match self.code {
            Code::WorkerFailed | Code::LeftEarly | Code::SidecarEnded | Code::StarterFailed => {
                let otherwise = self.exit;
                format!("that of the process that failed first, 128 + N if signal N ended it, or else {otherwise}")
            }
            Code::WorkerNotRun => format!("{}, or {EXIT_NOT_FOUND} if the command does not exist", self.exit),
            Code::Interrupted => format!("{EXIT_SIGNAL} + N for signal N, such as 130 for Ctrl-C"),
            Code::StartTimeout | Code::Bug => format!("{}, or that of the worker if its program raised it", self.exit),
            code if ONLY_OF_WORKERS.contains(&code) => {
                "that of the worker, such as 1 if its program does not handle the exception".to_owned()
            }
            _ => self.exit.to_string(),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, title, meaning, remedy, .. } = self;
        write!(f, "{code}: {title}\n\n{meaning}\n\nWhat to do: {remedy}\n\nExit code: {}", self.exit_text())
    }
}

/// An error's text, causes included, with its code ([`Code::of_error`]).
pub fn coded(error: &anyhow::Error, otherwise: Code) -> String {
    // A code's own text is one of the layers; it goes to the end of the line instead.
    let layers: Vec<String> =
        error.chain().map(ToString::to_string).filter(|layer| !layer.starts_with(PREFIX)).collect();
    Code::of_error(error, otherwise).append_to(&layers.join(": "))
}

/// Makes an error of a text whose first line may end with its code, for instance one of another thread.
pub fn error_with_code(text: String, otherwise: Code) -> anyhow::Error {
    let code = Code::of(&text).unwrap_or(otherwise);
    anyhow::Error::msg(text).context(code)
}

const PREFIX: &str = "RONDE-E";
/// The codes that only exceptions of workers have. A job that such an exception ends has the code, and the worker's status.
const ONLY_OF_WORKERS: RangeInclusive<Code> = Code::RanksDisagree..=Code::TimelineFailed;

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn the_code_follows_the_first_line_once() {
        assert_eq!(Code::Hosts.mark("no hosts"), "no hosts [RONDE-E102]");
        assert_eq!(Code::Hosts.mark("one\ntwo"), "one [RONDE-E102]\ntwo");
        assert_eq!(Code::Hosts.mark("[fd00::1] [203x]"), "[fd00::1] [203x] [RONDE-E102]");
        let inner = Code::PortBind.mark("a port is taken");
        assert_eq!(Code::SidecarCannotGoOn.mark(&format!("it ends: {inner}")), "it ends: a port is taken [RONDE-E404]");
        assert_eq!(Code::PortBind.append_to(&inner), inner);
    }

    #[test]
    fn a_code_that_is_quoted_is_not_the_code_of_the_text() {
        let quoted = "\"[RONDE-E301]\" is not a code";
        assert_eq!(Code::of(quoted), None);
        assert_eq!(Code::of("why it ends\nlast lines: a [RONDE-E301]"), None);
        assert_eq!(Code::of("why it ends [RONDE-E404]\nlast lines"), Some(Code::PortBind));
        assert_eq!(Code::Hosts.mark(quoted), format!("{quoted} [RONDE-E102]"));
        let error = anyhow::anyhow!("cannot read [RONDE-E301]").context(Code::Profile);
        assert_eq!(coded(&error, Code::Hosts), "cannot read [RONDE-E301] [RONDE-E106]");
        assert_eq!(Code::of_error(&error, Code::Hosts), Code::Profile);
        assert_eq!(Code::of_error(&anyhow::anyhow!("none [RONDE-E301]"), Code::Hosts), Code::Hosts);
    }

    #[test]
    fn a_text_with_its_code_becomes_an_error_with_that_code() {
        let text = "why it ends [RONDE-E404]\nits report is missing";
        assert_eq!(coded(&error_with_code(text.to_owned(), Code::SidecarCannotGoOn), Code::Hosts), text);
        let error = error_with_code("why it ends".to_owned(), Code::SidecarCannotGoOn);
        assert_eq!(coded(&error, Code::Hosts), "why it ends [RONDE-E402]");
    }

    #[test]
    fn an_explanation_ends_with_the_exit_code() {
        for (code, exit) in [
            (Code::HostUnreachable, "69"),
            (Code::WorkerFailed, "that of the process that failed first, 128 + N if signal N ended it, or else 69"),
            (Code::WorkerNotRun, "126, or 127 if the command does not exist"),
            (Code::Interrupted, "128 + N for signal N, such as 130 for Ctrl-C"),
            (Code::RanksDisagree, "that of the worker, such as 1 if its program does not handle the exception"),
            (Code::Bug, "70, or that of the worker if its program raised it"),
        ] {
            let text = code.entry().to_string();
            assert!(text.ends_with(&format!("\n\nExit code: {exit}")), "{text}");
        }
    }

    #[test]
    fn the_exit_status_of_an_exception_is_that_of_its_worker() {
        for (cause, code) in CAUSES {
            let text = code.entry().exit_text();
            assert!(text.contains("that of the worker") || text.contains("that of the process"), "{cause}: {text}");
        }
    }

    #[test]
    fn an_error_shows_its_causes_and_its_outermost_code() {
        let cause = || anyhow::anyhow!("file not found");
        assert_eq!(coded(&cause(), Code::Hosts), "file not found [RONDE-E102]");
        let error = cause().context("cannot read x").context(Code::OutputFiles);
        assert_eq!(coded(&error, Code::Hosts), "cannot read x: file not found [RONDE-E212]");
        let error = Err::<(), _>(error).context("outside").expect_err("it is one");
        assert_eq!(coded(&error, Code::Hosts), "outside: cannot read x: file not found [RONDE-E212]");
    }

    #[test]
    fn a_code_is_read_in_every_spelling() {
        for text in ["E203", "e203", "RONDE-E203", "ronde-e203", "203", " E203 ", "[RONDE-E203]"] {
            assert_eq!(Code::parse(text), Some(Code::HostUnreachable), "{text:?}");
        }
        for text in ["", "E", "E0203", "E9", "RONDE-", "EE203", "E203x", "[E203", "E203]"] {
            assert_eq!(Code::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_table_is_in_order_complete_and_worded() {
        assert!(TABLE.windows(2).all(|pair| pair[0].code < pair[1].code), "codes are sorted and unique");
        for entry in TABLE {
            for text in [entry.title, entry.meaning, entry.remedy] {
                assert!(!text.is_empty() && !text.contains('\n') && !text.contains("  "), "{}: {text:?}", entry.code);
            }
            assert!(!entry.title.ends_with('.'), "{}: a title is no sentence", entry.code);
            assert!(entry.meaning.ends_with('.') && entry.remedy.ends_with('.'), "{}: sentences end", entry.code);
        }
    }
}
