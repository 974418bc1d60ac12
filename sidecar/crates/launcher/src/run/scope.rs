//! What the agent of one host may send. An agent is trusted no more than its host, so each of its messages is checked
//! here, where it enters the launcher: it is about ranks and sidecars of that host only, its lists and texts are bounded,
//! and its texts for people cannot pass for lines of anything else. Pure.

use std::ops::Range;
use std::path::Path;

use ronde_bootstrap::interfaces::InterfaceAddress;
use ronde_bootstrap::messages::FromSidecar;
use ronde_wire::Failure;
use ronde_wire::limits::LANES_MAX;

use super::placement::Placement;
use crate::agent::{INTERFACES_MAX, TAIL_LINE_BYTES, TAIL_LINES};
use crate::envelope::{FromAgent, TEXT_BYTES_MAX};

/// The ranks and sidecars of a host, and whether its agent has sent its first message.
#[derive(Debug)]
pub(super) struct Scope {
    /// The name of the host.
    host: String,
    /// The sidecars of the host, with the ranks of each.
    sidecars: Vec<(u32, Range<u32>)>,
    ranks: Range<u32>,
    ranks_of_job: usize,
    sidecars_of_job: u32,
    greeted: bool,
}

/// How a message breaks the protocol; the text follows "it".
pub(super) type Violation = String;

impl Scope {
    /// The scope of the host with index `host`.
    pub(super) fn new(placement: &Placement, host: usize) -> Self {
        let sidecars = (0_u32..).zip(&placement.sidecars).filter(|(_, place)| place.host == host);
        Self {
            host: placement.hosts[host].name.clone(),
            sidecars: sidecars.map(|(sidecar, place)| (sidecar, place.ranks.clone())).collect(),
            ranks: placement.ranks_of_host(host),
            ranks_of_job: placement.size() as usize,
            sidecars_of_job: u32::try_from(placement.sidecars.len()).unwrap_or(u32::MAX),
            greeted: false,
        }
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
                self.ranks_of(sidecar)?;
                bounded("log", text.len(), TEXT_BYTES_MAX)?;
                Ok(message)
            }
            FromAgent::SidecarExited { sidecar, status: _ } => self.ranks_of(sidecar).map(|_| message),
            FromAgent::WorkerStarted { rank, pid: _ } | FromAgent::WorkerExited { rank, status: _ } => {
                has(&self.ranks, rank).map(|()| message)
            }
            FromAgent::Output { rank, stream: _, ref text } => {
                has(&self.ranks, rank)?;
                bounded("output", text.len(), TEXT_BYTES_MAX)?;
                Ok(message)
            }
            FromAgent::WorkerDrained { rank, ref stderr_tail } => {
                has(&self.ranks, rank)?;
                bounded("list of last lines", stderr_tail.len(), TAIL_LINES)?;
                stderr_tail.iter().try_for_each(|line| bounded("last line", line.len(), TAIL_LINE_BYTES))?;
                Ok(message)
            }
            FromAgent::Notice { text } => {
                Ok(FromAgent::Notice { text: format!("host {}: {}", self.host, Failure::line(&text)) })
            }
            FromAgent::Refused { reason } => Ok(FromAgent::Refused { reason: quoted(&reason) }),
        }
    }

    /// Checks a line of a sidecar, which speaks for its own ranks only.
    fn accept_line(&self, sidecar: u32, line: FromSidecar) -> Result<FromSidecar, Violation> {
        let ranks = self.ranks_of(sidecar)?;
        match line {
            FromSidecar::Bound { ref certificate_request, control: _, ref lanes, version: _ } => {
                bounded("certificate request", certificate_request.len(), REQUEST_BYTES_MAX)?;
                bounded("list of lanes", lanes.len(), LANES_MAX)?;
                Ok(line)
            }
            FromSidecar::Serving { ref socket_dir, ref token_files, admin: _, web: _ } => {
                bounded("list of token files", token_files.len(), ranks.len())?;
                check_path(socket_dir)?;
                token_files.iter().try_for_each(|file| check_path(&file.path))?;
                Ok(line)
            }
            FromSidecar::Dialling { peer } | FromSidecar::Linked { peer, address: _ } => {
                if peer == sidecar || peer >= self.sidecars_of_job {
                    return Err(format!("sent a message about a link of sidecar {sidecar} to sidecar {peer}"));
                }
                Ok(line)
            }
            FromSidecar::Attached { rank } | FromSidecar::Left { rank } => has(ranks, rank).map(|()| line),
            FromSidecar::Noted { rank, last_call } => {
                has(ranks, rank)?;
                Ok(FromSidecar::Noted { rank, last_call: last_call.map(|call| Failure::line(&call)) })
            }
            FromSidecar::Ended { ref summary } => {
                bounded("list of last ranks", summary.last_to_be_ready.len(), self.ranks_of_job)?;
                Ok(line)
            }
            FromSidecar::Fatal { reason } => Ok(FromSidecar::Fatal { reason: quoted(&reason) }),
        }
    }

    fn ranks_of(&self, sidecar: u32) -> Result<&Range<u32>, Violation> {
        let found = self.sidecars.iter().find(|(own, _)| *own == sidecar);
        found.map(|(_, ranks)| ranks).ok_or_else(|| not_its_own(&format!("sidecar {sidecar}")))
    }
}

fn has(ranks: &Range<u32>, rank: u32) -> Result<(), Violation> {
    if ranks.contains(&rank) { Ok(()) } else { Err(not_its_own(&format!("rank {rank}"))) }
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
