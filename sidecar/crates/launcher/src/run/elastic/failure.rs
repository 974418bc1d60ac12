//! What an elastic job lost, and why it ends.

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::EXIT_UNAVAILABLE;

use super::super::failure::{Failure, LinkStatus, called, code_of_worker, memory_advice, not_found, tail};
use super::super::shell::Trouble;
use super::discovery::DiscoveryError;
use crate::envelope::Status;

/// A worker, sidecar or host that an elastic job lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum Loss {
    /// A worker failed.
    #[error("worker {worker}{} on host {host} {status}{}{}{}{}", ranked(.rank), memory_advice(.status), not_found(.status, .command, .stderr_tail), called(.last_call), tail("its stderr", .stderr_tail))]
    Worker {
        /// Its number.
        worker: u32,
        /// Its last rank, if it had one.
        rank: Option<u32>,
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
    /// A worker did not join the job.
    #[error(
        "worker {worker} on host {host} has not joined the job (`ronde.init`) within {seconds} s, so it is stopped"
    )]
    NotAttached {
        /// Its number.
        worker: u32,
        /// Its host.
        host: String,
        /// The time it had.
        seconds: u64,
    },
    /// A worker did not come back after a change of the membership.
    #[error(
        "worker {worker}{} on host {host} has not come back for its rank in membership {membership} within {seconds} s \
         (--start-timeout) after another worker did, so it counts as lost and is ended; see what its program does between \
         two memberships", ranked(.rank)
    )]
    NotReturned {
        /// Its number.
        worker: u32,
        /// The rank that it has there.
        rank: Option<u32>,
        /// Its host.
        host: String,
        /// The number of the membership.
        membership: u64,
        /// The time it had.
        seconds: u64,
    },
    /// A worker hangs.
    #[error(
        "worker {worker}{} on host {host} hangs, so it is killed and replaced (--replace-stalled): {text}", ranked(.rank)
    )]
    Hung {
        /// Its number.
        worker: u32,
        /// Its rank.
        rank: Option<u32>,
        /// Its host.
        host: String,
        /// What it did last, and what waits for it.
        text: String,
    },
    /// A sidecar ended.
    #[error("sidecar {sidecar} on host {host} {status} while it was needed{}", tail("its log", .log_tail))]
    Sidecar {
        /// Its index.
        sidecar: u32,
        /// Its host.
        host: String,
        /// How it ended.
        status: Status,
        /// The last lines of its log.
        log_tail: Vec<String>,
    },
    /// A sidecar reported that it cannot continue, or the launcher cannot use it.
    #[error("sidecar {sidecar} on host {host} cannot go on: {reason}")]
    Fatal {
        /// Its index.
        sidecar: u32,
        /// Its host.
        host: String,
        /// Why not.
        reason: String,
    },
    /// A sidecar does not answer.
    #[error("sidecar {sidecar} on host {host} took too long {awaited}, so it counts as lost{}", tail("its log", .log_tail))]
    Silent {
        /// Its index.
        sidecar: u32,
        /// Its host.
        host: String,
        /// What it had to do.
        awaited: String,
        /// The last lines of its log.
        log_tail: Vec<String>,
    },
    /// Two sidecars do not reach each other, and this one has to leave.
    #[error(
        "sidecar {sidecar} on host {host} and sidecar {peer} on host {peer_host} cannot reach each other, so sidecar {sidecar} \
         counts as lost; see whether the network or a firewall between the hosts drops UDP and TCP at the ports of ronde. \
         Sidecar {reporter} reports: {text}"
    )]
    Unreachable {
        /// Its index.
        sidecar: u32,
        /// Its host.
        host: String,
        /// The other one.
        peer: u32,
        /// The other one's host.
        peer_host: String,
        /// Which of both reported it.
        reporter: u32,
        /// What it reported.
        text: String,
    },
    /// A host could not be used.
    #[error("host {host} cannot be used: {reason}{}", tail("its output", .output))]
    Unusable {
        /// The host.
        host: String,
        /// Why not, and what to do.
        reason: String,
        /// The error code.
        code: Code,
        /// The last lines of the remote shell.
        output: Vec<String>,
    },
    /// The connection to a host ended.
    #[error("the connection to host {host} was lost: {status}{}", tail("its output", .output))]
    Host {
        /// The host.
        host: String,
        /// How the agent or the remote shell ended.
        status: LinkStatus,
        /// The last lines it wrote.
        output: Vec<String>,
    },
}

impl Loss {
    /// A host that was not reached.
    pub(super) fn unreachable(host: String, status: LinkStatus, output: Vec<String>) -> Self {
        let trouble = Trouble::of(Some(status.status), &output).filter(|_| status.remote);
        let advice = trouble.map_or_else(String::new, |trouble| format!("; {}", trouble.advice()));
        let code = trouble.map_or(Code::HostUnreachable, Trouble::code);
        Self::Unusable { host, reason: format!("ronde cannot be started on it: {status}{advice}"), code, output }
    }

    /// The exit code of a job that ends with this loss, never 0.
    fn exit_code(&self) -> u8 {
        let code = match self {
            Self::Worker { status, .. } | Self::Sidecar { status, .. } => status.shell_code(),
            _ => self.code().exit_status(),
        };
        if code == 0 { EXIT_UNAVAILABLE } else { code }
    }

    /// What was lost, in a few words.
    fn brief(&self) -> String {
        match self {
            Self::Worker { worker, .. } => format!("worker {worker} failed"),
            Self::NotAttached { worker, .. } | Self::NotReturned { worker, .. } | Self::Hung { worker, .. } => {
                format!("worker {worker} was lost")
            }
            Self::Sidecar { sidecar, host, .. }
            | Self::Fatal { sidecar, host, .. }
            | Self::Silent { sidecar, host, .. }
            | Self::Unreachable { sidecar, host, .. } => format!("sidecar {sidecar} on host {host} was lost"),
            Self::Unusable { host, .. } if host.is_empty() => "all hosts were removed".to_owned(),
            Self::Unusable { host, .. } | Self::Host { host, .. } => format!("host {host} was lost"),
        }
    }

    /// Its text with its error code.
    pub(super) fn marked(&self) -> String {
        self.code().mark(&self.to_string())
    }

    /// Its error code.
    pub(super) fn code(&self) -> Code {
        match self {
            Self::Worker { status, stderr_tail, .. } => code_of_worker(*status, stderr_tail),
            Self::NotAttached { .. } | Self::NotReturned { .. } => Code::StartTimeout,
            Self::Hung { .. } => Code::WorkerHung,
            Self::Sidecar { .. } => Code::SidecarEnded,
            Self::Fatal { reason, .. } => Code::of(reason).unwrap_or(Code::SidecarCannotGoOn),
            Self::Silent { .. } => Code::SidecarCannotGoOn,
            Self::Unreachable { .. } => Code::PeerMissing,
            Self::Unusable { code, .. } => *code,
            Self::Host { .. } => Code::HostLost,
        }
    }
}

/// Why an elastic job ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum ElasticFailure {
    /// Nobody is left who could continue, or no further membership may begin.
    #[error("{0}")]
    Lost(Loss),
    /// Too few slots.
    #[error(
        "the job needs {needed} slots, and there are {have}{}; give it more hosts or slots, or a smaller --min-np{}", waited(.seconds), after(.last)
    )]
    TooFew {
        /// How many there are.
        have: u32,
        /// How many are needed.
        needed: u32,
        /// How long they were waited for, if more could have come.
        seconds: Option<u64>,
        /// What was lost last.
        last: Option<String>,
    },
    /// More changes than are allowed.
    #[error("number of resets during elastic job exceeded limit: {limit} (--reset-limit){}", after(.last))]
    ResetLimit {
        /// The limit.
        limit: u32,
        /// What was lost last.
        last: Option<String>,
    },
    /// A worker ended with status 0 without joining, for which others waited.
    #[error(
        "worker {worker} on host {host} ended without joining the job (`ronde.init`), for which the others waited {seconds} s"
    )]
    NeverJoined {
        /// Its number.
        worker: u32,
        /// Its host.
        host: String,
        /// How long.
        seconds: u64,
    },
    /// The discovery script failed at the start.
    #[error("{0}")]
    Discovery(DiscoveryError),
}

impl ElasticFailure {
    /// The launcher's exit code.
    pub(in super::super) fn exit_code(&self) -> u8 {
        match self {
            Self::Lost(loss) => loss.exit_code(),
            _ => self.code().exit_status(),
        }
    }

    /// What happened, in a few words.
    pub(in super::super) fn brief(&self) -> String {
        match self {
            Self::Lost(loss) => loss.brief(),
            Self::TooFew { .. } => "the job has too few slots".to_owned(),
            Self::ResetLimit { .. } => "the job has reached --reset-limit".to_owned(),
            Self::NeverJoined { worker, .. } => format!("worker {worker} never joined"),
            Self::Discovery(_) => "the hosts cannot be discovered".to_owned(),
        }
    }

    /// Which workers are not at fault.
    pub(super) fn culprit(&self) -> Culprit {
        match self {
            Self::Lost(
                Loss::Worker { worker, .. }
                | Loss::NotAttached { worker, .. }
                | Loss::NotReturned { worker, .. }
                | Loss::Hung { worker, .. },
            ) => Culprit::Worker(*worker),
            Self::Lost(_) => Culprit::Other,
            // Workers that were lost before are part of the reason.
            Self::TooFew { .. } | Self::ResetLimit { .. } | Self::NeverJoined { .. } | Self::Discovery(_) => {
                Culprit::EndedByItself
            }
        }
    }

    /// The error code.
    pub(in super::super) fn code(&self) -> Code {
        match self {
            Self::Lost(loss) => loss.code(),
            Self::TooFew { .. } | Self::ResetLimit { .. } => Code::ElasticEnded,
            Self::NeverJoined { .. } => Code::StartTimeout,
            Self::Discovery(_) => Code::Hosts,
        }
    }
}

/// Whom the end of a job is blamed on, as far as workers are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Culprit {
    /// This worker.
    Worker(u32),
    /// No worker.
    Other,
    /// Any that ended before the launcher stopped them.
    EndedByItself,
}

impl From<ElasticFailure> for Failure {
    fn from(failure: ElasticFailure) -> Self {
        Self::Elastic(failure)
    }
}

fn ranked(rank: &Option<u32>) -> String {
    rank.map_or_else(|| " (without a rank)".to_owned(), |rank| format!(" (rank {rank})"))
}

fn waited(seconds: &Option<u64>) -> String {
    seconds.map_or_else(
        || ", which cannot become more".to_owned(),
        |seconds| format!(" after waiting {seconds} s (--elastic-timeout)"),
    )
}

fn after(last: &Option<String>) -> String {
    last.as_ref().map_or_else(String::new, |last| format!("\nthe last loss: {last}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_have_counts_codes_and_exit_codes() {
        let status = Status::Signal(9);
        let loss = Loss::Worker {
            worker: 5,
            rank: Some(1),
            host: "beta".into(),
            status,
            command: "python".into(),
            last_call: None,
            stderr_tail: vec!["bye".into()],
        };
        assert!(
            loss.to_string().starts_with("worker 5 (rank 1) on host beta was killed by signal 9 (SIGKILL)"),
            "{loss}"
        );
        let failure = ElasticFailure::Lost(loss.clone());
        assert_eq!((failure.exit_code(), failure.code()), (137, Code::WorkerFailed));
        let own = |code, line: &str| {
            let mut loss = loss.clone();
            if let Loss::Worker { status, stderr_tail, .. } = &mut loss {
                (*status, *stderr_tail) = (Status::Code(code), vec![line.to_owned()]);
            }
            loss.marked().lines().next().map(str::to_owned).unwrap_or_default()
        };
        let missing = own(127, "ronde: cannot run \"python\": No such file or directory (os error 2) [RONDE-E302]");
        assert!(missing.ends_with("exited with code 127 (command not found: python) [RONDE-E302]"), "{missing}");
        let shells = own(127, "sh: 1: nosuch: not found");
        assert!(shells.ends_with("(a shell ends with it when it does not find a command, and a program when a shared library is missing) [RONDE-E301]"), "{shells}");
        let mismatch = own(1, "ronde.errors.MismatchError: Mismatched data types [RONDE-E306]");
        assert!(mismatch.ends_with("exited with code 1 [RONDE-E306]"), "{mismatch}");
        let few = ElasticFailure::TooFew { have: 3, needed: 4, seconds: Some(600), last: None };
        let text = "the job needs 4 slots, and there are 3 after waiting 600 s (--elastic-timeout); give it more hosts or slots";
        assert!(few.to_string().starts_with(text), "{few}");
        assert_eq!((few.exit_code(), few.code().to_string()), (69, "RONDE-E220".to_owned()));
        assert_eq!((failure.brief(), few.brief()), ("worker 5 failed".into(), "the job has too few slots".into()));
        let limit = ElasticFailure::ResetLimit { limit: 2, last: Some(loss.to_string()) };
        assert!(limit.to_string().starts_with("number of resets during elastic job exceeded limit: 2"), "{limit}");
        let ended = Loss::Sidecar { sidecar: 0, host: "a".into(), status: Status::Code(0), log_tail: Vec::new() };
        let ended = ElasticFailure::Lost(ended);
        assert_ne!(ended.exit_code(), 0);
        assert_eq!(ended.brief(), "sidecar 0 on host a was lost");
    }

    #[test]
    fn a_host_that_is_not_reached_has_the_code_of_its_trouble() {
        let status = LinkStatus { remote: true, status: Status::Code(255) };
        let loss = Loss::unreachable("b".into(), status, vec!["Host key verification failed.".into()]);
        assert_eq!(loss.code(), Code::HostKey);
        let local = LinkStatus { remote: false, status: Status::Code(1) };
        assert_eq!(Loss::unreachable("b".into(), local, Vec::new()).code(), Code::HostUnreachable);
    }
}
