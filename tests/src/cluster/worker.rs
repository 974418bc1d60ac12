//! One scripted worker: see [`crate::script`].

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ronde_wire::{Cause, Collective, DType, ReduceOp};

use super::process::{Line, Process};
use super::sidecar::Sidecar;
use crate::script::{Answer, Ask, Fill, Wanted};

/// A running worker process.
#[derive(Debug)]
pub struct Worker {
    /// The process.
    pub process: Process,
    /// Its rank.
    pub rank: u32,
    next: u64,
}

/// How an operation ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// When the test received it.
    pub at: Instant,
    /// The digest of the result, or why there is none.
    pub result: Result<u64, Failed>,
}

/// Why an operation has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The kind of failure, where it is one of the job.
    pub cause: Option<Cause>,
    /// The rank at fault.
    pub rank: Option<u32>,
    /// The sidecar at fault.
    pub sidecar: Option<u32>,
    /// The error text.
    pub text: String,
}

impl Worker {
    /// Starts a worker that claims `rank` of a sidecar's job.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(program: &Path, job: &str, rank: u32, sidecar: &Sidecar) -> Result<Self> {
        Self::start_with(program, job, rank, sidecar, |_| {})
    }

    /// [`Worker::start`] with a command that `adjust` changes.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_with(
        program: &Path,
        job: &str,
        rank: u32,
        sidecar: &Sidecar,
        adjust: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let mut command = Command::new(program);
        command
            .env("RONDE_SOCKET", sidecar.socket_dir()?)
            .env("RONDE_JOB", job)
            .env("RONDE_RANK", rank.to_string())
            .env("RONDE_TOKEN_FILE", sidecar.token_file(rank)?);
        adjust(&mut command);
        Self::run(rank, &mut command)
    }

    /// Starts any command that implements the script's protocol.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn run(rank: u32, command: &mut Command) -> Result<Self> {
        Ok(Self { process: Process::start(format!("worker {rank}"), command)?, rank, next: 0 })
    }

    /// Waits until the epoch has begun.
    ///
    /// # Errors
    /// When it does not.
    pub fn await_connected(&mut self) -> Result<()> {
        let connected = |answer| match answer {
            Answer::Connected { .. } => Some(Ok(())),
            Answer::NotConnected { text } => Some(Err(text)),
            _ => None,
        };
        match self.await_answer("its connection", super::PATIENCE, connected)? {
            Ok(()) => Ok(()),
            Err(text) => bail!("worker {} cannot connect: {text}", self.rank),
        }
    }

    /// Waits until the epoch has begun with this rank.
    ///
    /// # Errors
    /// When it does not, or another rank is given.
    pub fn await_rank(&mut self, expected: u32) -> Result<()> {
        let connected = |answer| match answer {
            Answer::Connected { rank, .. } => Some(Ok(rank)),
            Answer::NotConnected { text } => Some(Err(text)),
            _ => None,
        };
        match self.await_answer("its connection", super::PATIENCE, connected)? {
            Ok(rank) if rank == expected => Ok(()),
            Ok(rank) => bail!("it has rank {rank} instead of {expected}"),
            Err(text) => bail!("it cannot connect: {text}"),
        }
    }

    /// Submits an operation and waits until the SDK has accepted it; returns the number for [`Worker::outcome`].
    ///
    /// # Errors
    /// When the worker does not answer.
    pub fn submit(&mut self, operation: Wanted) -> Result<u64> {
        let id = self.next;
        self.next += 1;
        self.ask(&Ask::Submit { id, operation })?;
        self.await_answer("the submission", super::PATIENCE, |answer| {
            matches!(answer, Answer::Submitted { id: of } if of == id).then_some(())
        })?;
        Ok(id)
    }

    /// Sends a request without waiting for anything.
    ///
    /// # Errors
    /// When the worker does not read.
    pub fn ask(&mut self, ask: &Ask) -> Result<()> {
        self.process.write_line(&serde_json::to_string(ask)?)
    }

    /// Waits until an operation is complete or has failed.
    ///
    /// # Errors
    /// When it is neither in time.
    pub fn outcome(&mut self, id: u64, within: Duration) -> Result<Outcome> {
        let find = |line: &Line| {
            let result = match serde_json::from_str(&line.text).ok()? {
                Answer::Done { id: of, digest, .. } if of == id => Ok(digest),
                Answer::Failed { id: of, cause, rank, sidecar, text } if of == id => {
                    Err(Failed { cause, rank, sidecar, text })
                }
                _ => return None,
            };
            Some(Outcome { at: line.at, result })
        };
        self.process.await_line(&format!("the outcome of operation {id}"), within, find)
    }

    /// Waits for the digest of an operation's result.
    ///
    /// # Errors
    /// When it fails or does not come in time.
    pub fn digest(&mut self, id: u64, within: Duration) -> Result<u64> {
        let outcome = self.outcome(id, within)?;
        outcome.result.map_err(|failed| anyhow::anyhow!("worker {}: operation {id} failed: {}", self.rank, failed.text))
    }

    /// Waits for an operation's failure.
    ///
    /// # Errors
    /// When it succeeds or nothing comes in time.
    pub fn failure(&mut self, id: u64, within: Duration) -> Result<(Instant, Failed)> {
        let Outcome { at, result } = self.outcome(id, within)?;
        let failed = result.err().with_context(|| format!("worker {}: operation {id} did not fail", self.rank))?;
        Ok((at, failed))
    }

    /// Waits for a notice that contains all of these words.
    ///
    /// # Errors
    /// When none comes in time.
    pub fn await_notice(&mut self, words: &[&str], within: Duration) -> Result<(Instant, String)> {
        let find = |line: &Line| match serde_json::from_str(&line.text).ok()? {
            Answer::Notice { text } if words.iter().all(|word| text.contains(word)) => Some((line.at, text)),
            _ => None,
        };
        self.process.await_line(&format!("a notice with {words:?}"), within, find)
    }

    /// Drops the notices that have arrived.
    pub fn drop_notices(&mut self) {
        while self.await_notice(&[], Duration::ZERO).is_ok() {}
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// When it does not come in time.
    pub fn await_answer<T>(
        &mut self,
        what: &str,
        within: Duration,
        mut find: impl FnMut(Answer) -> Option<T>,
    ) -> Result<T> {
        self.process.await_line(what, within, |line| find(serde_json::from_str(&line.text).ok()?))
    }
}

/// A sum of f32.
#[must_use]
pub fn sum(name: &str, elements: u64, fill: Fill) -> Wanted {
    let collective = Collective::AllReduce { op: ReduceOp::Sum };
    Wanted { name: Some(name.to_owned()), collective, dtype: DType::F32, shape: vec![elements], fill }
}
