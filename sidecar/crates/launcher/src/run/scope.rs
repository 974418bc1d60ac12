//! What the agent of one host may send. An agent is trusted no more than its host, so each of its messages is checked
//! here, where it enters the launcher: it is about ranks and sidecars of that host only, its lists and texts are bounded,
//! and its texts for people cannot pass for lines of anything else. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ronde_bootstrap::interfaces::InterfaceAddress;
use ronde_bootstrap::messages::{FromSidecar, TokenFile};
use ronde_wire::Failure;
use ronde_wire::limits::{LANES_MAX, RANKS_MAX, SIDECARS_MAX};

use super::placement::Placement;
use crate::agent::{INTERFACES_MAX, TAIL_LINE_BYTES, TAIL_LINES};
use crate::envelope::{FromAgent, TEXT_BYTES_MAX};

/// The sidecars and workers of a host, and whether its agent has sent its first message.
#[derive(Debug)]
pub(super) struct Scope {
    /// The name of the host.
    host: String,
    rights: Rights,
    is_elastic: bool,
    ranks_of_job: usize,
    sidecars_of_job: u32,
    greeted: bool,
    /// How long the agent may send nothing after its greeting.
    silence: Option<Duration>,
}

/// The sidecars of a host, and the workers of each. In an elastic job the launcher adds to them; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Rights(Arc<Mutex<BTreeMap<u32, BTreeSet<u32>>>>);

impl Rights {
    /// Adds a sidecar.
    pub(super) fn add_sidecar(&self, sidecar: u32) {
        self.lock().entry(sidecar).or_default();
    }

    /// Adds a worker of a sidecar.
    pub(super) fn add_worker(&self, sidecar: u32, worker: u32) {
        self.lock().entry(sidecar).or_default().insert(worker);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, BTreeSet<u32>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a message breaks the protocol; the text follows "it".
pub(super) type Violation = String;

impl Scope {
    /// The scope of the host with index `host`.
    pub(super) fn new(placement: &Placement, host: usize) -> Self {
        let rights = Rights::default();
        for (sidecar, place) in (0_u32..).zip(&placement.sidecars).filter(|(_, place)| place.host == host) {
            rights.add_sidecar(sidecar);
            place.ranks.clone().for_each(|rank| rights.add_worker(sidecar, rank));
        }
        Self {
            host: placement.hosts[host].name.clone(),
            rights,
            is_elastic: false,
            ranks_of_job: placement.size() as usize,
            sidecars_of_job: u32::try_from(placement.sidecars.len()).unwrap_or(u32::MAX),
            greeted: false,
            silence: None,
        }
    }

    /// The scope of a host of an elastic job, whose agent sends beats.
    pub(super) fn elastic(host: String, rights: Rights, silence: Duration) -> Self {
        let sidecars_of_job = u32::try_from(SIDECARS_MAX).unwrap_or(u32::MAX);
        Self {
            host,
            rights,
            is_elastic: true,
            ranks_of_job: RANKS_MAX,
            sidecars_of_job,
            greeted: false,
            silence: Some(silence),
        }
    }

    /// How long the agent may send nothing now.
    pub(super) fn silence(&self) -> Option<Duration> {
        self.silence.filter(|_| self.greeted)
    }

    /// Returns the message with its texts made safe to print.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(super) fn accept(&mut self, message: FromAgent) -> Result<FromAgent, Violation> {
        let is_hello = matches!(message, FromAgent::Hello { .. });
        if is_hello == std::mem::replace(&mut self.greeted, true) {
            return Err(if is_hello { "sent a second greeting" } else { "sent no greeting first" }.to_owned());
        }
        match message {
            FromAgent::Hello { version, hostname, interfaces, port } => {
                check_interfaces(&interfaces)?;
                Ok(FromAgent::Hello { version: Failure::line(&version), hostname, interfaces, port })
            }
            FromAgent::Sidecar { sidecar, line } => {
                let line = self.accept_line(sidecar, line)?;
                Ok(FromAgent::Sidecar { sidecar, line })
            }
            FromAgent::SidecarLog { sidecar, ref text } => {
                self.workers_of(sidecar)?;
                bounded("log", text.len(), TEXT_BYTES_MAX)?;
                Ok(message)
            }
            FromAgent::SidecarExited { sidecar, status: _ } => self.workers_of(sidecar).map(|_| message),
            FromAgent::WorkerStarted { worker, pid: _ }
            | FromAgent::InputTaken { worker }
            | FromAgent::WorkerExited { worker, status: _ } => self.has(worker).map(|()| message),
            FromAgent::Output { worker, stream: _, ref text } => {
                self.has(worker)?;
                bounded("output", text.len(), TEXT_BYTES_MAX)?;
                Ok(message)
            }
            FromAgent::WorkerDrained { worker, ref stderr_tail } => {
                self.has(worker)?;
                bounded("list of last lines", stderr_tail.len(), TAIL_LINES)?;
                stderr_tail.iter().try_for_each(|line| bounded("last line", line.len(), TAIL_LINE_BYTES))?;
                Ok(message)
            }
            FromAgent::Beat => Ok(message),
            FromAgent::Preempted { .. } if !self.is_elastic => {
                Err("sent a notice of preemption, but the job is not elastic".to_owned())
            }
            FromAgent::Preempted { worker } => worker.map_or(Ok(()), |worker| self.has(worker)).map(|()| message),
            FromAgent::Notice { text } => {
                Ok(FromAgent::Notice { text: format!("host {}: {}", self.host, Failure::line(&text)) })
            }
            FromAgent::Refused { reason } => Ok(FromAgent::Refused { reason: quoted(&reason) }),
        }
    }

    /// Checks a line of a sidecar, which speaks for its own ranks only.
    fn accept_line(&self, sidecar: u32, line: FromSidecar) -> Result<FromSidecar, Violation> {
        let workers = self.workers_of(sidecar)?;
        match line {
            FromSidecar::Bound { ref certificate_request, control: _, ref lanes, version: _ } => {
                bounded("certificate request", certificate_request.len(), REQUEST_BYTES_MAX)?;
                bounded("list of lanes", lanes.len(), LANES_MAX)?;
                Ok(line)
            }
            FromSidecar::Serving { job: _, ref socket_dir, ref token_files, admin: _, web: _ } => {
                check_path(socket_dir)?;
                self.check_tokens(&workers, token_files).map(|()| line)
            }
            FromSidecar::Dialling { peer } | FromSidecar::Linked { peer, address: _ } => {
                if peer == sidecar || peer >= self.sidecars_of_job {
                    return Err(format!("sent a message about a link of sidecar {sidecar} to sidecar {peer}"));
                }
                Ok(line)
            }
            FromSidecar::Attached { worker } | FromSidecar::Left { worker, .. } => {
                self.is_of(&workers, worker).map(|()| line)
            }
            FromSidecar::Prepared { .. }
            | FromSidecar::Entered { .. }
            | FromSidecar::Seated { .. }
            | FromSidecar::Hung { .. }
            | FromSidecar::Unreachable { .. }
                if !self.is_elastic =>
            {
                Err(format!("sent a message about another membership of sidecar {sidecar}, but the job is not elastic"))
            }
            // The coordinator reports workers of any host; the plan accepts that of no other sidecar.
            FromSidecar::Hung { worker, membership, text } => {
                Ok(FromSidecar::Hung { worker, membership, text: Failure::line(&text) })
            }
            // A peer that takes no part in the membership is ignored by the plan.
            FromSidecar::Unreachable { peer, membership, text } => {
                Ok(FromSidecar::Unreachable { peer, membership, text: Failure::line(&text) })
            }
            FromSidecar::Seated { worker, membership: _ } => self.is_of(&workers, worker).map(|()| line),
            FromSidecar::Prepared { membership: _, ref token_files } => {
                self.check_tokens(&workers, token_files).map(|()| line)
            }
            FromSidecar::Entered { membership: _ } => Ok(line),
            FromSidecar::Noted { worker, last_call } => {
                self.is_of(&workers, worker)?;
                Ok(FromSidecar::Noted { worker, last_call: last_call.map(|call| Failure::line(&call)) })
            }
            FromSidecar::Recorded { ref path } => check_path(path).map(|()| line),
            FromSidecar::Ended { ref summary } => {
                bounded("list of last ranks", summary.last_to_be_ready.len(), self.ranks_of_job)?;
                Ok(line)
            }
            FromSidecar::Fatal { reason } => Ok(FromSidecar::Fatal { reason: quoted(&reason) }),
        }
    }

    fn workers_of(&self, sidecar: u32) -> Result<BTreeSet<u32>, Violation> {
        self.rights.lock().get(&sidecar).cloned().ok_or_else(|| not_its_own(&format!("sidecar {sidecar}")))
    }

    fn has(&self, worker: u32) -> Result<(), Violation> {
        let is_here = self.rights.lock().values().any(|workers| workers.contains(&worker));
        if is_here { Ok(()) } else { Err(self.not_its_worker(worker)) }
    }

    fn is_of(&self, workers: &BTreeSet<u32>, worker: u32) -> Result<(), Violation> {
        if workers.contains(&worker) { Ok(()) } else { Err(self.not_its_worker(worker)) }
    }

    fn not_its_worker(&self, worker: u32) -> Violation {
        not_its_own(&format!("{} {worker}", if self.is_elastic { "worker" } else { "rank" }))
    }

    fn check_tokens(&self, workers: &BTreeSet<u32>, files: &[TokenFile]) -> Result<(), Violation> {
        bounded("list of token files", files.len(), workers.len())?;
        files.iter().try_for_each(|file| {
            // The ranks of a job that is not elastic are compared with their placement later.
            if self.is_elastic {
                self.is_of(workers, file.worker)?;
            }
            check_path(&file.path)
        })
    }
}

fn not_its_own(what: &str) -> Violation {
    format!("sent a message about {what}, which does not run there")
}

fn bounded(what: &str, given: usize, most: usize) -> Result<(), Violation> {
    if given <= most { Ok(()) } else { Err(format!("sent a {what} of length {given}, which is more than {most}")) }
}

fn check_interfaces(interfaces: &[InterfaceAddress]) -> Result<(), Violation> {
    bounded("list of interfaces", interfaces.len(), INTERFACES_MAX)?;
    let mut names = interfaces.iter().map(|found| &found.interface);
    names.try_for_each(|name| {
        bounded("name of an interface", name.len(), INTERFACE_NAME_BYTES_MAX)?;
        let is_plain = !name.contains(|c: char| c.is_control() || c.is_whitespace());
        if is_plain { Ok(()) } else { Err(format!("sent {name:?} as the name of an interface")) }
    })
}

/// Workers get these paths in their environment, which has no null bytes.
fn check_path(path: &Path) -> Result<(), Violation> {
    let bytes = path.as_os_str().as_encoded_bytes();
    bounded("path", bytes.len(), PATH_BYTES_MAX)?;
    if bytes.contains(&0) { Err("sent a path with a null byte".to_owned()) } else { Ok(()) }
}

/// A text of several lines: all but the first are indented, as quotations are, so that none passes for a line of the
/// launcher or of a rank.
fn quoted(text: &str) -> String {
    let lines = text.lines().take(QUOTED_LINES_MAX).map(Failure::line);
    lines.collect::<Vec<_>>().join("\n  ")
}

/// A request with a key of P-256 has about 500 bytes.
const REQUEST_BYTES_MAX: usize = 16 << 10;
/// The kernel's PATH_MAX.
const PATH_BYTES_MAX: usize = 4_096;
/// The kernel allows 15 bytes; one that is no UTF-8 is sent as three.
const INTERFACE_NAME_BYTES_MAX: usize = 45;
/// Reasons have a few lines.
const QUOTED_LINES_MAX: usize = 32;

#[cfg(test)]
mod tests;
