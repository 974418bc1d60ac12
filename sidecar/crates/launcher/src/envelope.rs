//! The messages between a launcher and its agents: one JSON object per line over the agent's standard input and output,
//! which are a pipe or the remote shell's connection.
//!
//! ```text
//! agent    → launcher  Hello          the host's name, addresses, a free port
//! launcher → agent     Prepare        the workers' directory and environment
//! launcher → agent     StartSidecar   then Sidecar lines both ways: [`ronde_bootstrap::messages`] in an envelope
//! launcher → agent     StartWorker    then Output as it arrives, WorkerExited at once, WorkerDrained after the last line
//! launcher → agent     Input          for the worker that takes the launcher's; InputTaken comes back
//! launcher → agent     StopWorkers    TERM, the grace, KILL
//! launcher → agent     CloseSidecars  they drain and exit
//! launcher → agent     StopWorker, CloseSidecar   the same for one of them, in elastic jobs
//! launcher → agent     TakeNotices    then SIGTERM is a notice of preemption: Preempted comes back, and the agent goes on
//! launcher → agent     Beat           then a Beat comes back at each interval, so that a host that vanishes is noticed
//! ```
//!
//! At the end of its input the agent ends everything and exits.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use ronde_wire::Exit;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use ronde_bootstrap::exit::EXIT_UNAVAILABLE;
use ronde_bootstrap::interfaces::InterfaceAddress;
use ronde_bootstrap::messages::{FromSidecar, LINE_BYTES_MAX, ToSidecar};

/// Names and values of environment variables.
pub(crate) type Environment = Vec<(String, String)>;

/// From the launcher to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum ToAgent {
    /// What all workers of the host have in common.
    Prepare {
        /// The working directory.
        directory: PathBuf,
        /// The whole environment, to which each worker's own is added.
        environment: Environment,
    },
    /// Start a sidecar.
    StartSidecar {
        /// Its index.
        sidecar: u32,
        /// Program and arguments instead of the agent's own binary.
        program: Option<Vec<String>>,
        /// Variables added to the agent's own environment.
        environment: Environment,
    },
    /// A line for a sidecar.
    Sidecar {
        /// Its index.
        sidecar: u32,
        /// The line.
        line: ToSidecar,
    },
    /// Start a worker.
    StartWorker {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
        /// The index of the sidecar that serves it, on the same host.
        sidecar: u32,
        /// Program and arguments.
        command: Vec<String>,
        /// Variables added to the prepared environment.
        environment: Environment,
        /// Whether its standard input is a pipe for [`ToAgent::Input`].
        #[serde(default)]
        takes_input: bool,
    },
    /// Input for a worker; nothing more than one before its [`FromAgent::InputTaken`].
    Input {
        /// Its number.
        worker: u32,
        /// What; the end when empty.
        text: String,
    },
    /// Send SIGTERM to all workers, and SIGKILL after the grace period.
    StopWorkers {
        /// The grace, milliseconds.
        grace_ms: u64,
    },
    /// Send SIGTERM to a worker, and SIGKILL after the grace period.
    StopWorker {
        /// Its number.
        worker: u32,
        /// The grace, milliseconds.
        grace_ms: u64,
    },
    /// End the input of all sidecars, at which they drain and exit.
    CloseSidecars,
    /// End the input of a sidecar.
    CloseSidecar {
        /// Its index.
        sidecar: u32,
    },
    /// Send a [`FromAgent::Beat`] at each interval.
    Beat {
        /// The interval, milliseconds.
        interval_ms: u64,
    },
    /// From now on SIGTERM, to the agent or to a worker, is a notice that the host is about to be taken away.
    TakeNotices {
        /// How long the agent goes on after its own notice, milliseconds.
        notice_ms: u64,
    },
    /// Kill everything at once.
    Kill,
}

/// From an agent to the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum FromAgent {
    /// The first line.
    Hello {
        /// The version of the agent's binary, which must be the launcher's.
        version: String,
        /// The host's own name.
        hostname: String,
        /// The addresses of its interfaces that are up, loopback last.
        interfaces: Vec<InterfaceAddress>,
        /// A TCP port that is free until the first worker starts.
        port: u16,
    },
    /// A line from a sidecar.
    Sidecar {
        /// Its index.
        sidecar: u32,
        /// The line.
        line: FromSidecar,
    },
    /// What a sidecar wrote to its log.
    SidecarLog {
        /// Its index.
        sidecar: u32,
        /// Whole lines.
        text: String,
    },
    /// A sidecar has ended.
    SidecarExited {
        /// Its index.
        sidecar: u32,
        /// How.
        status: Status,
    },
    /// A worker runs.
    WorkerStarted {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
        /// Its process id on its host.
        pid: u32,
    },
    /// What a worker wrote.
    Output {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
        /// Where to.
        stream: Stream,
        /// Whole lines, or part of one that is longer than a message.
        text: String,
    },
    /// The pipe of a worker has taken its input, or has no reader.
    InputTaken {
        /// Its number.
        worker: u32,
    },
    /// A worker has ended.
    WorkerExited {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
        /// How.
        status: Status,
    },
    /// All output of an ended worker has been sent.
    WorkerDrained {
        /// Its number, which is its rank in a job that is not elastic.
        worker: u32,
        /// The last lines of its standard error.
        stderr_tail: Vec<String>,
    },
    /// The host is up.
    Beat,
    /// The host is about to be taken away: the agent or a worker has received SIGTERM.
    Preempted {
        /// The worker, if only that has.
        worker: Option<u32>,
    },
    /// A notice for the user.
    Notice {
        /// What.
        text: String,
    },
    /// The agent cannot execute a command.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
}

/// One of a worker's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        })
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// It left with this code.
    Code(i32),
    /// It was ended by this signal.
    Signal(i32),
    /// It was ended because memory ran out.
    OutOfMemory,
}

impl Status {
    /// Whether it left with 0.
    pub(crate) fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// The code with which a shell would report it: the code, or 128 plus the signal.
    pub(crate) fn shell_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => signal.saturating_add(128),
            Self::OutOfMemory => 128 + Signal::SIGKILL as i32,
        };
        // An exit code has eight bits, and the system masks it as well. A failure never becomes a success by that.
        match u8::try_from(code & 0xff) {
            Ok(0) if !self.is_success() => EXIT_UNAVAILABLE,
            code => code.unwrap_or(u8::MAX),
        }
    }
}

impl From<ExitStatus> for Status {
    fn from(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Code(-1),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Exit::from(*self).fmt(f)
    }
}

impl From<Status> for Exit {
    fn from(status: Status) -> Self {
        match status {
            Status::Code(code) => Self::Code(code),
            Status::Signal(signal) => Self::Signal(signal),
            Status::OutOfMemory => Self::OutOfMemory,
        }
    }
}

/// Reads the next line.
///
/// `Ok(None)` is the end of input. A line without an end, or one longer than [`ENVELOPE_BYTES_MAX`], is an error.
pub(crate) async fn read_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(ENVELOPE_BYTES_MAX).read_until(b'\n', &mut line).await?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a line is cut or too long")),
    }
}

/// Reads the next message; `Ok(None)` is the end of input.
pub(crate) async fn read<M: DeserializeOwned>(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<M>> {
    let Some(line) = read_line(reader).await? else { return Ok(None) };
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Writes a message without flushing.
pub(crate) async fn write<M: Serialize>(writer: &mut (impl AsyncWrite + Unpin), message: &M) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

/// The most bytes of output or log in one message.
pub(crate) const TEXT_BYTES_MAX: usize = 384 << 10;

/// The most bytes of one line: a bootstrap line in its envelope, or an environment with every byte escaped.
const ENVELOPE_BYTES_MAX: u64 = 4 * LINE_BYTES_MAX as u64;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_back_as_they_were_written() {
        let status = FromAgent::WorkerExited { worker: 3, status: Status::Signal(9) };
        let bound = FromAgent::Sidecar { sidecar: 1, line: FromSidecar::Fatal { reason: "no \"room\"\n".into() } };
        let mut wire = Vec::new();
        write(&mut wire, &status).await.expect("a vector takes everything");
        write(&mut wire, &bound).await.expect("a vector takes everything");
        let mut reader = wire.as_slice();
        for expected in [status, bound] {
            let read: FromAgent = read(&mut reader).await.expect("valid").expect("not the end");
            assert_eq!(format!("{read:?}"), format!("{expected:?}"));
        }
        assert!(read::<FromAgent>(&mut reader).await.expect("valid").is_none());
    }

    #[tokio::test]
    async fn a_line_that_is_truncated_or_invalid_is_an_error() {
        assert!(read::<FromAgent>(&mut b"{\"type\":\"hello\"".as_slice()).await.is_err());
        assert!(read::<FromAgent>(&mut b"{\"type\":\"hell\"}\n".as_slice()).await.is_err());
        assert!(
            read::<ToAgent>(&mut b"{\"type\":\"stop_workers\",\"grace_ms\":1,\"x\":1}\n".as_slice()).await.is_err()
        );
    }

    #[test]
    fn a_status_has_the_exit_code_of_a_shell() {
        assert_eq!(Status::Code(3).shell_code(), 3);
        assert_eq!((Status::Signal(9).shell_code(), Status::OutOfMemory.shell_code()), (137, 137));
        // No system reports these, but an agent could send them.
        let strange = [Status::Code(256), Status::Signal(128), Status::Signal(i32::MAX), Status::Code(-1)];
        assert_eq!(strange.map(Status::shell_code), [EXIT_UNAVAILABLE, EXIT_UNAVAILABLE, 255, 255]);
        assert_eq!(Status::Signal(9).to_string(), "was killed by signal 9 (SIGKILL)");
        assert_eq!(Status::Signal(40).to_string(), "was killed by signal 40");
    }

    /// The first byte selects the parser: that of a sidecar, of a sidecar's messages, of an agent, of an agent's messages.
    #[test]
    fn fuzz_lines_of_launchers() {
        use ronde_fuzz::{Outcome, fuzz};

        fn decoded<M: DeserializeOwned + Serialize + fmt::Debug>(line: &[u8]) -> Outcome {
            let message = serde_json::from_slice::<M>(line);
            if let Ok(message) = &message {
                let once = serde_json::to_vec(message).expect("a message is JSON");
                let again: M = serde_json::from_slice(&once).expect("what was written is read");
                assert_eq!(serde_json::to_vec(&again).expect("a message is JSON"), once, "another message comes back");
            }
            Outcome::of(&message)
        }
        let peer = r#"{"sidecar":1,"host":"b","control":"10.0.0.2:7400","lanes":["10.0.0.2:7401"],"addresses":[{"interface":"eth0","address":"10.0.0.2","prefix_length":24}]}"#;
        let worker = r#""worker":1,"pid":7,"exit":{"Code":1},"stderr_tail":["ValueError"]"#;
        let seeds = [
            (
                0,
                format!(
                    r#"{{"type":"join","certificate":"C","ca_certificate":"A","membership":{{"number":1,"peers":[{peer}],"seats":[{{"worker":0,"sidecar":1}}]}}}}"#
                ),
            ),
            (0, r#"{"type":"enter","membership":2,"added":1,"removed":0}"#.to_owned()),
            (1, r#"{"type":"prepared","membership":2,"token_files":[{"worker":3,"path":"/t"}]}"#.to_owned()),
            (2, r#"{"type":"stop_worker","worker":1,"grace_ms":5}"#.to_owned()),
            (0, format!(r#"{{"type":"worker_exited",{worker}}}"#)),
            (
                0,
                r#"{"type":"start","job":"j","trust_domain":"d","sidecar":0,"addresses":["::1"],"start_timeout_ms":9}"#
                    .to_owned(),
            ),
            (1, r#"{"type":"linked","peer":1,"address":"10.0.0.2"}"#.to_owned()),
            (1, r#"{"type":"noted","worker":1,"last_call":"allreduce"}"#.to_owned()),
            (
                2,
                r#"{"type":"start_worker","worker":1,"sidecar":0,"command":["sh"],"environment":[["A","1"]]}"#
                    .to_owned(),
            ),
            (2, format!(r#"{{"type":"sidecar","sidecar":0,"line":{{"type":"worker_exited",{worker}}}}}"#)),
            (3, r#"{"type":"worker_exited","worker":1,"status":{"signal":9}}"#.to_owned()),
            (3, r#"{"type":"output","worker":1,"stream":"stderr","text":"é\u001b"}"#.to_owned()),
        ];
        let seeds = seeds.into_iter().map(|(kind, line)| [&[kind], line.as_bytes()].concat()).collect();
        fuzz("lines_of_launchers", seeds, |bytes| match bytes.split_first() {
            None => Outcome::refused(&"nothing"),
            Some((kind, line)) => match kind % 4 {
                0 => decoded::<ToSidecar>(line),
                1 => decoded::<FromSidecar>(line),
                2 => decoded::<ToAgent>(line),
                _ => {
                    if let Ok(FromAgent::WorkerExited { status, .. }) = serde_json::from_slice(line) {
                        assert_eq!(status.shell_code() == 0, status.is_success(), "{status} passes for success");
                    }
                    decoded::<FromAgent>(line)
                }
            },
        });
    }
}
