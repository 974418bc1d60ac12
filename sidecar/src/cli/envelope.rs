//! What a launcher and its agents say to each other: one JSON object a line over the agent's standard input and output,
//! which are a pipe, or the remote shell's connection.
//!
//! ```text
//! agent    → launcher  Hello          the host's name, addresses, a free port
//! launcher → agent     Prepare        the workers' directory and environment
//! launcher → agent     StartSidecar   then Sidecar lines both ways: `crate::bootstrap` in an envelope
//! launcher → agent     StartWorker    then Output as it comes, WorkerExited at once, WorkerDrained behind the last line
//! launcher → agent     StopWorkers    TERM, the grace, KILL
//! launcher → agent     CloseSidecars  they drain and leave
//! ```
//!
//! End of input tells the agent to end everything and leave.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use nix::sys::signal::Signal;
use ronde_wire::Exit;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::bootstrap::{FromSidecar, LINE_BYTES_MAX, ToSidecar};
use crate::interfaces::InterfaceAddress;

/// Names and values of environment variables.
pub(super) type Environment = Vec<(String, String)>;

/// From the launcher to an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum ToAgent {
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
        /// Its rank.
        rank: u32,
        /// The index of the sidecar that serves it, on the same host.
        sidecar: u32,
        /// Program and arguments.
        command: Vec<String>,
        /// Variables added to the prepared environment.
        environment: Environment,
    },
    /// Ask all workers to end; kill those that have not after the grace.
    StopWorkers {
        /// The grace, milliseconds.
        grace_ms: u64,
    },
    /// End the input of all sidecars: they drain and leave.
    CloseSidecars,
    /// Kill everything at once.
    Kill,
}

/// From an agent to the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum FromAgent {
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
        /// Its rank.
        rank: u32,
        /// Its process id on its host.
        pid: u32,
    },
    /// What a worker wrote.
    Output {
        /// Its rank.
        rank: u32,
        /// Where to.
        stream: Stream,
        /// Whole lines, or a piece of one that is longer than a message.
        text: String,
    },
    /// A worker has ended.
    WorkerExited {
        /// Its rank.
        rank: u32,
        /// How.
        status: Status,
    },
    /// All that an ended worker wrote has been sent.
    WorkerDrained {
        /// Its rank.
        rank: u32,
        /// The last lines of its standard error.
        stderr_tail: Vec<String>,
    },
    /// Something that the user should know.
    Notice {
        /// What.
        text: String,
    },
    /// The agent cannot do what it was told.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
}

/// One of a worker's two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stream {
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
pub(super) enum Status {
    /// It left with this code.
    Code(i32),
    /// It was ended by this signal.
    Signal(i32),
    /// It was ended because memory ran out.
    OutOfMemory,
}

impl Status {
    /// Whether it left with 0.
    pub(super) fn is_success(self) -> bool {
        self == Self::Code(0)
    }

    /// The code with which a shell would report it: the code, or 128 plus the signal.
    pub(super) fn shell_code(self) -> u8 {
        let code = match self {
            Self::Code(code) => code,
            Self::Signal(signal) => 128 + signal,
            Self::OutOfMemory => 128 + Signal::SIGKILL as i32,
        };
        // An exit code has eight bits; the mask is what the system does too.
        u8::try_from(code & 0xff).unwrap_or(u8::MAX)
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
pub(super) async fn read_line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    reader.take(ENVELOPE_BYTES_MAX).read_until(b'\n', &mut line).await?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a line is cut or too long")),
    }
}

/// Reads the next message; `Ok(None)` is the end of input.
pub(super) async fn read<M: DeserializeOwned>(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<M>> {
    let Some(line) = read_line(reader).await? else { return Ok(None) };
    Ok(Some(serde_json::from_slice(&line)?))
}

/// Writes a message without flushing.
pub(super) async fn write<M: Serialize>(writer: &mut (impl AsyncWrite + Unpin), message: &M) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    writer.write_all(&line).await
}

/// The most bytes of one line: a bootstrap line in its envelope, or an environment with every byte escaped.
const ENVELOPE_BYTES_MAX: u64 = 4 * LINE_BYTES_MAX as u64;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_back_as_they_were_written() {
        let status = FromAgent::WorkerExited { rank: 3, status: Status::Signal(9) };
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
    async fn a_line_that_is_cut_or_nonsense_is_an_error() {
        assert!(read::<FromAgent>(&mut b"{\"type\":\"hello\"".as_slice()).await.is_err());
        assert!(read::<FromAgent>(&mut b"{\"type\":\"hell\"}\n".as_slice()).await.is_err());
        assert!(
            read::<ToAgent>(&mut b"{\"type\":\"stop_workers\",\"grace_ms\":1,\"x\":1}\n".as_slice()).await.is_err()
        );
    }

    #[test]
    fn a_status_reads_like_a_shell_reports_it() {
        assert_eq!(Status::Code(3).shell_code(), 3);
        assert_eq!((Status::Signal(9).shell_code(), Status::OutOfMemory.shell_code()), (137, 137));
        assert_eq!(Status::Signal(9).to_string(), "was ended by signal 9 (SIGKILL)");
        assert_eq!(Status::Signal(40).to_string(), "was ended by signal 40");
    }
}
