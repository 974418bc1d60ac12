//! Why a job failed, as a message that names the rank, host or program at fault, and the exit code.

use std::fmt;
use std::ops::Range;

use nix::sys::signal::Signal;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{EXIT_NOT_FOUND, EXIT_UNAVAILABLE};
use ronde_bootstrap::interfaces::InterfaceAddress;
use ronde_wire::Exit;

use super::elastic::ElasticFailure;
use super::own_errors;
use super::shell::Trouble;
use crate::agent::exec;
use crate::envelope::Status;
use crate::rows::without_controls;

/// The first failure of a job. Its consequences are not reported.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    /// A worker failed.
    #[error("rank {rank} on host {host} {status}{}{}{}{}", memory_advice(.status), not_found(.status, .command, .stderr_tail), called(.last_call), tail("its stderr", .stderr_tail))]
    Worker {
        /// Its rank.
        rank: u32,
        /// Its host.
        host: String,
        /// How it ended.
        status: Status,
        /// The first word of its command.
        command: String,
        /// Its last call.
        last_call: Option<String>,
        /// The last lines of its standard error.
        stderr_tail: Vec<String>,
    },
    /// A rank left, in order, while others had operations.
    #[error("rank {rank} on host {host} left the job{} while others had operations{}{}{UNEVEN}{}", after(.operations), ended_as(.status), called(.last_call), tail_of_a_leaver(.status, .stderr_tail))]
    LeftEarly {
        /// Its rank.
        rank: u32,
        /// Its host.
        host: String,
        /// How its process ended, if it has.
        status: Option<Status>,
        /// How many operations it had called.
        operations: Option<u64>,
        /// Its last call.
        last_call: Option<String>,
        /// The last lines of its standard error.
        stderr_tail: Vec<String>,
        /// How the rank ended that failed first because of that.
        follower: Status,
    },
    /// The command that started the workers failed.
    #[error("{command} {status}{}; its output is above", not_found(.status, .command, .stderr_tail))]
    Starter {
        /// Its first word.
        command: String,
        /// How it ended.
        status: Status,
        /// The last lines of its standard error, which were printed.
        stderr_tail: Vec<String>,
    },
    /// The command of `--starter` could not be started.
    #[error("cannot start {program:?}, the command of --starter that starts the workers: {error}")]
    StarterSpawn {
        /// The program.
        program: String,
        /// Why not.
        error: std::io::Error,
    },
    /// A sidecar ended while it was needed.
    #[error("sidecar {sidecar} on host {host}, which serves {}, {status}{}{}", ranks(.served), memory_advice(.status), tail("its log", .log_tail))]
    Sidecar {
        /// Its index.
        sidecar: u32,
        /// The ranks it served.
        served: Range<u32>,
        /// Its host.
        host: String,
        /// How it ended.
        status: Status,
        /// The last lines of its log.
        log_tail: Vec<String>,
    },
    /// A sidecar reported that it cannot continue.
    #[error("the sidecar of {} on host {host} cannot go on: {reason}", ranks(.served))]
    Fatal {
        /// The ranks it served.
        served: Range<u32>,
        /// Its host.
        host: String,
        /// Its reason.
        reason: String,
    },
    /// The process that reaches a host could not be started.
    #[error("cannot start {program:?} to reach host {host} ({}): {error}", ranks(.placed))]
    Spawn {
        /// The host.
        host: String,
        /// Its ranks.
        placed: Range<u32>,
        /// The program.
        program: String,
        /// Why not.
        error: std::io::Error,
    },
    /// A host could not be reached.
    #[error("cannot start ronde on host {host} ({}): {status}{}{}", ranks(.placed), advice(*.trouble), tail("its output", .stderr_tail))]
    Unreachable {
        /// The host.
        host: String,
        /// Its ranks.
        placed: Range<u32>,
        /// How the agent or the remote shell ended.
        status: LinkStatus,
        /// The problem that the remote shell's output indicates, when it is recognized.
        trouble: Option<Trouble>,
        /// The last lines it wrote.
        stderr_tail: Vec<String>,
    },
    /// The connection to a host ended.
    #[error("the connection to host {host} ({}) was lost: {status}{}", ranks(.placed), tail("its output", .stderr_tail))]
    Lost {
        /// The host.
        host: String,
        /// Its ranks.
        placed: Range<u32>,
        /// How the agent or the remote shell ended.
        status: LinkStatus,
        /// The last lines it wrote.
        stderr_tail: Vec<String>,
    },
    /// A host runs another version.
    #[error(
        "host {host} runs ronde {theirs}, this one {ours}; install the same version on all hosts, or name it with --remote-ronde"
    )]
    Version {
        /// The host.
        host: String,
        /// Its version.
        theirs: String,
        /// The launcher's.
        ours: String,
    },
    /// A host cannot execute a command of the launcher.
    #[error("host {host}: {reason}")]
    Refused {
        /// The host.
        host: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A host has no address.
    #[error("host {host} has no address at which other hosts could reach it; give it a network interface that is up")]
    NoAddress {
        /// The host.
        host: String,
    },
    /// No host has an interface that `--network-interfaces` selects.
    #[error("no interface or network of --network-interfaces {asked} exists on {}{}", named(.hosts), existing(.hosts))]
    NoInterface {
        /// What was asked for.
        asked: String,
        /// The hosts, each with its addresses.
        hosts: Vec<(String, Vec<InterfaceAddress>)>,
    },
    /// A sidecar's certificate could not be issued.
    #[error("cannot issue a certificate to the sidecar of {} on host {host}: {reason}", ranks(.served))]
    Certificate {
        /// The ranks it serves.
        served: Range<u32>,
        /// Its host.
        host: String,
        /// Why not.
        reason: String,
    },
    /// Not everything started in time.
    #[error("Timed out waiting for {awaited}: not everything started within {seconds} s (--start-timeout):{}", list(.missing))]
    StartTimeout {
        /// What was waited for.
        awaited: &'static str,
        /// The time it had.
        seconds: u64,
        /// What did not.
        missing: Vec<Missing>,
    },
    /// The user ended the job.
    #[error("ended by {signal}")]
    Interrupted {
        /// By which signal.
        signal: Signal,
    },
    /// An elastic job cannot go on.
    #[error("{0}")]
    Elastic(ElasticFailure),
    /// The launcher's output has no reader.
    #[error("cannot write the workers' output: {reason}")]
    Output {
        /// Why not.
        reason: String,
    },
}

/// Something that did not start in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    /// The host.
    pub(super) host: String,
    /// The ranks that cannot run without it.
    pub(super) placed: Range<u32>,
    /// What was awaited.
    pub(super) awaited: String,
    /// The last lines of the process that was awaited.
    pub(super) output: Vec<String>,
}

/// How the process that reaches a host ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkStatus {
    /// Whether it is a remote shell.
    pub(super) remote: bool,
    /// How it ended.
    pub(super) status: Status,
}

/// The error code of a worker that has ended like this: that of the error of ronde that its program ended with, if any.
pub(super) fn code_of_worker(status: Status, stderr_tail: &[String]) -> Code {
    match status {
        _ if exec::is_not_run(status, stderr_tail) => Code::WorkerNotRun,
        Status::Code(STATUS_OF_AN_EXCEPTION) => own_errors::code(stderr_tail).unwrap_or(Code::WorkerFailed),
        Status::Code(_) | Status::Signal(_) | Status::OutOfMemory => Code::WorkerFailed,
    }
}

impl Failure {
    /// The launcher's exit code, never 0: that of the worker, starter or sidecar that failed first, 128 plus a signal, else
    /// that of the error code.
    pub(super) fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Worker { status, .. } | Self::Starter { status, .. } | Self::Sidecar { status, .. } => {
                status.shell_code()
            }
            Self::LeftEarly { follower, .. } => follower.shell_code(),
            Self::Interrupted { signal } => Status::Signal(*signal as i32).shell_code(),
            Self::Elastic(failure) => failure.exit_code(),
            _ => self.code().exit_status(),
        };
        if code == 0 { EXIT_UNAVAILABLE } else { code }
    }

    /// What to do about a debugger, or a program, that found no input. `reader` is the rank that has the launcher's.
    pub(super) fn input_hint(&self, reader: Option<u32>) -> Option<String> {
        let Self::Worker { rank, stderr_tail, .. } = self else { return None };
        if reader == Some(*rank) {
            return None;
        }
        match without_controls(stderr_tail.last()?).trim() {
            "bdb.BdbQuit" => Some(format!(
                "its debugger was quit or found no input: give `--stdin {rank}`, which passes that of `ronde run` to rank {rank}, and call \
                 `breakpoint()` on that rank alone"
            )),
            "EOFError: EOF when reading a line" => Some(match reader {
                Some(reader) => format!("only rank {reader} has input (--stdin): read it on that rank alone"),
                None => format!(
                    "ranks have no input: give `--stdin {rank}`, which passes that of `ronde run` to rank {rank}, and read it on that rank \
                     alone"
                ),
            }),
            _ => None,
        }
    }

    /// What happened, in a few words, for the time until the job has ended. Then the whole message follows.
    pub(super) fn brief(&self) -> String {
        match self {
            Self::Worker { rank, .. } => format!("rank {rank} failed"),
            Self::LeftEarly { rank, .. } => format!("rank {rank} left early"),
            Self::Starter { command, .. } => format!("{command} failed"),
            Self::StarterSpawn { program, .. } => format!("{program} was not started"),
            Self::Sidecar { sidecar, host, .. } => format!("sidecar {sidecar} on host {host} was lost"),
            Self::Fatal { served, host, .. } | Self::Certificate { served, host, .. } => {
                format!("the sidecar of {} on host {host} failed", ranks(served))
            }
            Self::Lost { host, .. } => format!("host {host} was lost"),
            Self::Spawn { host, .. }
            | Self::Unreachable { host, .. }
            | Self::Version { host, .. }
            | Self::Refused { host, .. }
            | Self::NoAddress { host } => format!("host {host} cannot be used"),
            Self::NoInterface { .. } => "a network interface is missing".to_owned(),
            Self::StartTimeout { .. } => "the start took too long (--start-timeout)".to_owned(),
            Self::Interrupted { signal } => signal.to_string(),
            Self::Output { .. } => "output cannot be written".to_owned(),
            Self::Elastic(failure) => failure.brief(),
        }
    }

    /// The error code that `ronde explain` explains.
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Worker { status, stderr_tail, .. } => code_of_worker(*status, stderr_tail),
            Self::LeftEarly { .. } => Code::LeftEarly,
            Self::Starter { .. } | Self::StarterSpawn { .. } => Code::StarterFailed,
            Self::Sidecar { .. } => Code::SidecarEnded,
            Self::Fatal { reason, .. } => Code::of(reason).unwrap_or(Code::SidecarCannotGoOn),
            Self::Spawn { .. } => Code::RemoteShellStart,
            Self::Unreachable { trouble, .. } => trouble.map_or(Code::HostUnreachable, Trouble::code),
            Self::Lost { .. } => Code::HostLost,
            Self::Version { .. } => Code::VersionDiffers,
            Self::Refused { .. } => Code::HostRefused,
            Self::NoAddress { .. } => Code::NoAddress,
            Self::NoInterface { .. } => Code::NoInterface,
            Self::Certificate { .. } => Code::CertificateNotIssued,
            Self::StartTimeout { .. } => Code::StartTimeout,
            Self::Interrupted { .. } => Code::Interrupted,
            Self::Output { .. } => Code::OutputLost,
            Self::Elastic(failure) => failure.code(),
        }
    }
}

impl fmt::Display for LinkStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let who = if self.remote { "the remote shell" } else { "its agent" };
        write!(f, "{who} {}", self.status)
    }
}

/// `rank 3` or `ranks 0-3`.
pub(super) fn ranks(range: &Range<u32>) -> String {
    match range.end.saturating_sub(range.start) {
        0 => "no rank".to_owned(),
        1 => format!("rank {}", range.start),
        _ => format!("ranks {}-{}", range.start, range.end - 1),
    }
}

pub(super) fn not_found(status: &Status, command: &str, stderr_tail: &[String]) -> String {
    if *status != Status::Code(EXIT_NOT_FOUND.into()) {
        return String::new();
    }
    if exec::is_not_found(*status, command, stderr_tail) {
        return format!(" (command not found: {command})");
    }
    " (a shell ends with it when it does not find a command, and a program when a shared library is missing)".to_owned()
}

fn advice(trouble: Option<Trouble>) -> String {
    trouble.map_or_else(String::new, |trouble| format!("; {}", trouble.advice()))
}

pub(super) fn memory_advice(status: &Status) -> &'static str {
    Exit::from(*status).advice()
}

pub(super) fn called(last_call: &Option<String>) -> String {
    last_call.as_ref().map(|call| format!("\nits last call was {call}")).unwrap_or_default()
}

fn after(operations: &Option<u64>) -> String {
    match operations {
        Some(1) => " after 1 operation".to_owned(),
        Some(count) => format!(" after {count} operations"),
        None => String::new(),
    }
}

fn ended_as(status: &Option<Status>) -> String {
    status.map_or_else(|| "; its process still ran then".to_owned(), |status| format!("; its process {status}"))
}

/// The last lines of a rank that did not end with success: they may say more than that it left.
fn tail_of_a_leaver(status: &Option<Status>, lines: &[String]) -> String {
    if status.is_some_and(Status::is_success) { String::new() } else { tail("its stderr", lines) }
}

pub(super) fn tail(what: &str, lines: &[String]) -> String {
    if lines.is_empty() {
        return String::new();
    }
    // They are untrusted: without control characters none of them passes for a line of anything else.
    let lines: Vec<String> = lines.iter().map(|line| ronde_wire::Failure::line(line)).collect();
    format!("\nlast lines of {what}:\n  {}", lines.join("\n  "))
}

/// Whether a printed text has the first line of another one. More of a worker's last lines may have become known since then.
pub(super) fn has_first_line(printed: &str, text: &str) -> bool {
    text.lines().next().is_some_and(|first| printed.contains(first))
}

fn list(missing: &[Missing]) -> String {
    let more = missing.len().saturating_sub(LISTED_MAX);
    let more = if more > 0 { format!("\nand {more} more") } else { String::new() };
    let line = |missing: &Missing| {
        let Missing { host, placed, awaited, output } = missing;
        format!("\n{} on host {host}: {awaited}{}", ranks(placed), tail("its output", output))
    };
    missing.iter().take(LISTED_MAX).map(line).collect::<String>() + &more
}

fn named(hosts: &[(String, Vec<InterfaceAddress>)]) -> String {
    let names: Vec<&str> = hosts.iter().take(LISTED_MAX).map(|(host, _)| host.as_str()).collect();
    format!("host{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

fn existing(hosts: &[(String, Vec<InterfaceAddress>)]) -> String {
    let line = |(host, found): &(String, Vec<InterfaceAddress>)| {
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        format!("\nhost {host} has {}", found.join(", "))
    };
    hosts.iter().take(LISTED_MAX).map(line).collect()
}

/// What to do about a rank that takes fewer steps.
const UNEVEN: &str = "\nif ranks have different numbers of batches, call join() after the loop: it takes part with zeros until all have finished";
/// The exit status of Python for an exception that nothing has caught.
const STATUS_OF_AN_EXCEPTION: i32 = 1;
/// How many hosts, sidecars or ranks one message lists.
const LISTED_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(status: Status) -> Failure {
        let stderr_tail = vec!["Traceback".to_owned(), "ValueError".to_owned()];
        let last_call = Some("allreduce 'grad' at train.py:88".to_owned());
        Failure::Worker { rank: 2, host: "beta".into(), status, command: "pythn".into(), last_call, stderr_tail }
    }

    #[test]
    fn a_worker_is_named_with_its_end_and_last_lines() {
        let failure = worker(Status::Signal(11));
        assert_eq!(
            failure.to_string(),
            "rank 2 on host beta was killed by signal 11 (SIGSEGV)\nits last call was allreduce 'grad' at train.py:88\nlast lines of its stderr:\n  Traceback\n  ValueError"
        );
        assert_eq!(failure.exit_code(), 139);
        assert!(
            worker(Status::Signal(9))
                .to_string()
                .contains("(SIGKILL); unless somebody sent that signal, the host ran out of memory")
        );
        let starved = worker(Status::OutOfMemory);
        assert!(starved.to_string().contains("on host beta was killed by the out-of-memory killer; give"), "{starved}");
        assert_eq!(starved.exit_code(), 137);
    }

    fn ended(status: Status, line: &str) -> Failure {
        let (host, command, stderr_tail) = ("beta".into(), "bash".into(), vec![line.to_owned()]);
        Failure::Worker { rank: 2, host, status, command, last_call: None, stderr_tail }
    }

    #[test]
    fn a_program_is_called_missing_only_if_it_was_not_run() {
        let missing = ended(
            Status::Code(127),
            "ronde: cannot run \"bash\": No such file or directory (os error 2); is it installed [RONDE-E302]",
        );
        assert!(missing.to_string().contains("exited with code 127 (command not found: bash)\n"), "{missing}");
        assert_eq!(missing.code(), Code::WorkerNotRun);
        let shells = ended(Status::Code(127), "bash: train.sh: No such file or directory");
        let expected = "exited with code 127 (a shell ends with it when it does not find a command, and a program when a shared library is missing)\n";
        assert!(shells.to_string().contains(expected), "{shells}");
        assert_eq!((shells.code(), shells.exit_code()), (Code::WorkerFailed, 127));
        let denied =
            ended(Status::Code(126), "ronde: cannot run \"bash\": Permission denied (os error 13) [RONDE-E302]");
        assert_eq!((denied.code(), denied.exit_code()), (Code::WorkerNotRun, 126));
        let orphan = ended(Status::Code(126), "ronde: process 7 is not this one's parent: it has ended [RONDE-E302]");
        assert_eq!((orphan.code(), orphan.exit_code()), (Code::WorkerNotRun, 126));
    }

    #[test]
    fn a_worker_has_the_code_of_its_own_error() {
        let line = "ronde.errors.MismatchError: Mismatched data types [RONDE-E306]";
        let failure = ended(Status::Code(1), line);
        assert_eq!((failure.code(), failure.exit_code()), (Code::RanksDisagree, 1));
        assert_eq!(ended(Status::Signal(9), line).code(), Code::WorkerFailed, "the signal ended it");
        assert_eq!(ended(Status::Code(3), line).code(), Code::WorkerFailed, "it has handled that error");
        assert_eq!(ended(Status::Code(1), "ValueError: see [RONDE-E306]").code(), Code::WorkerFailed);
    }

    #[test]
    fn a_debugger_without_input_is_explained() {
        let quit = ended(Status::Code(1), "\x1b[1;35mbdb.BdbQuit\x1b[0m");
        assert!(quit.input_hint(None).is_some_and(|hint| hint.contains("give `--stdin 2`")));
        assert!(quit.input_hint(Some(0)).is_some(), "another rank has the input");
        assert_eq!(quit.input_hint(Some(2)), None, "its user has quit");
        assert_eq!(ended(Status::Code(1), "ValueError: bdb.BdbQuit").input_hint(None), None);
    }

    #[test]
    fn a_program_without_input_is_explained() {
        let end = ended(Status::Code(1), "EOFError: EOF when reading a line");
        assert!(end.input_hint(None).is_some_and(|hint| hint.starts_with("ranks have no input: give `--stdin 2`")));
        assert!(end.input_hint(Some(0)).is_some_and(|hint| hint.starts_with("only rank 0 has input (--stdin)")));
        assert_eq!(end.input_hint(Some(2)), None, "its input has ended");
    }

    #[test]
    fn last_lines_are_shown_without_control_characters() {
        let lines = ["one\r\nrank 0 on host a failed".to_owned(), "\x1b[2Jtwo".to_owned()];
        assert_eq!(
            tail("its log", &lines),
            "\nlast lines of its log:\n  one\\r\\nrank 0 on host a failed\n  \\u{1b}[2Jtwo"
        );
    }

    #[test]
    fn every_failure_has_a_nonzero_exit_code() {
        assert_eq!(worker(Status::Code(256)).exit_code(), EXIT_UNAVAILABLE);
        assert_eq!(Failure::Interrupted { signal: Signal::SIGINT }.exit_code(), 130);
        let (host, status, log_tail) = ("a".into(), Status::Code(0), vec![]);
        let sidecar = Failure::Sidecar { sidecar: 0, served: 0..2, host, status, log_tail };
        assert_ne!(sidecar.exit_code(), 0);
        for (reason, exit) in [
            ("the disk is full", 69),
            ("a port is taken [RONDE-E404]", 69),
            ("lanes = 0 is out of range [RONDE-E403]", 64),
            ("x.wasm cannot be read [RONDE-E801]", 64),
            ("cannot write the autotune log x [RONDE-E409]", 73),
        ] {
            let fatal = Failure::Fatal { served: 0..2, host: "a".into(), reason: reason.into() };
            assert_eq!(fatal.exit_code(), exit, "{reason}: that of the sidecar itself");
        }
        assert_eq!(Failure::Output { reason: "nobody reads".into() }.exit_code(), 74);
    }

    #[test]
    fn a_lost_sidecar_is_named_in_words() {
        let (host, log_tail) = ("beta".into(), vec![]);
        let sidecar = Failure::Sidecar { sidecar: 1, served: 2..4, host, status: Status::Signal(9), log_tail };
        let text = sidecar.to_string();
        let expected =
            "sidecar 1 on host beta, which serves ranks 2-3, was killed by signal 9 (SIGKILL); unless somebody";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(sidecar.exit_code(), 137);
    }

    #[test]
    fn a_failure_in_brief_is_not_the_message_that_follows() {
        let (host, log_tail) = (String::from("beta"), vec![]);
        let sidecar =
            Failure::Sidecar { sidecar: 1, served: 2..4, host: host.clone(), status: Status::Signal(9), log_tail };
        assert_eq!(sidecar.brief(), "sidecar 1 on host beta was lost");
        let status = LinkStatus { remote: true, status: Status::Code(255) };
        let lost = Failure::Lost { host: host.clone(), placed: 2..4, status, stderr_tail: vec![] };
        assert_eq!(lost.brief(), "host beta was lost");
        let fatal = Failure::Fatal { served: 2..4, host, reason: "the disk is full".into() };
        assert_eq!(fatal.brief(), "the sidecar of ranks 2-3 on host beta failed");
        for failure in [sidecar, lost, fatal, worker(Status::Code(1)), Failure::Output { reason: "closed".into() }] {
            assert!(!failure.to_string().contains(&failure.brief()), "{failure}");
        }
    }

    #[test]
    fn a_rank_that_left_early_is_named_with_the_remedy() {
        let last_call = Some("allreduce 'grad' at train.py:88".to_owned());
        let follower = Status::Code(1);
        let stderr_tail = vec!["saving".to_owned()];
        let failed = |status| {
            let (host, last_call, stderr_tail) = (String::from("beta"), last_call.clone(), stderr_tail.clone());
            Failure::LeftEarly { rank: 2, host, status, operations: Some(3), last_call, stderr_tail, follower }
        };
        let failure = failed(Some(Status::Code(0)));
        let text = failure.to_string();
        let first = "rank 2 on host beta left the job after 3 operations while others had operations; its process exited \
                     with code 0\nits last call was allreduce 'grad' at train.py:88\n";
        assert!(text.starts_with(first) && text.contains("call join() after the loop"), "{text}");
        assert!(!text.contains("saving"), "{text}");
        let runs = failed(None).to_string();
        assert!(runs.contains("; its process still ran then\n"), "{runs}");
        assert!(runs.ends_with("until all have finished\nlast lines of its stderr:\n  saving"), "{runs}");
        assert_eq!((failure.exit_code(), failure.code()), (1, Code::LeftEarly));
    }

    #[test]
    fn a_start_timeout_lists_what_did_not_start() {
        let missing =
            |host: &str, placed| Missing { host: host.into(), placed, awaited: "no answer".into(), output: vec![] };
        let failure = Failure::StartTimeout {
            awaited: "all",
            seconds: 30,
            missing: vec![missing("a", 0..1), missing("b", 2..5)],
        };
        let text = failure.to_string();
        assert!(text.ends_with("\nrank 0 on host a: no answer\nranks 2-4 on host b: no answer"), "{text}");
    }
}
