//! What is known of the agents, sidecars and workers of an elastic job. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::interfaces::InterfaceAddress;
use ronde_bootstrap::messages::{FromSidecar, Peer, Summary};

use super::super::agents::Tail;
use super::super::failure::LinkStatus;
use super::super::outcome::{self, Other};
use super::super::own_errors;
use super::super::placement::RankPlace;
use super::super::records::FlightRecords;
use super::super::state::{Bound, Hello};
use super::failure::{Culprit, Loss};
use super::plan::{Event, Members, WorkerEnd};
use crate::envelope::{FromAgent, Status};

/// The tables, by number. Numbers are not reused.
#[derive(Default)]
pub(super) struct Table {
    /// The first word of the workers' command.
    command: String,
    pub(super) agents: BTreeMap<u32, AgentFacts>,
    pub(super) sidecars: BTreeMap<u32, SidecarFacts>,
    pub(super) workers: BTreeMap<u32, WorkerFacts>,
    /// The workers whose sessions have ended since the last commit, in the order of their latest ends.
    left: Vec<u32>,
    /// The workers of the last committed membership.
    seated: BTreeSet<u32>,
    /// Where sidecars have written flight records.
    pub(super) records: FlightRecords,
    /// Whether the launcher has ordered everything to end.
    is_ending: bool,
}

/// An agent.
#[derive(Debug, Default)]
pub(super) struct AgentFacts {
    /// Its host.
    pub(super) host: String,
    /// Whether it is reached through the remote shell.
    pub(super) remote: bool,
    /// Its first message.
    pub(super) hello: Option<Hello>,
    /// The addresses to which its host's name resolves.
    pub(super) resolved: Option<Vec<std::net::IpAddr>>,
    /// The addresses at which its sidecars listen.
    pub(super) addresses: Vec<InterfaceAddress>,
    /// Whether it has the workers' environment.
    pub(super) is_prepared: bool,
    /// Whether the connection to it was ended on purpose.
    pub(super) is_dropped: bool,
    /// How the connection ended.
    pub(super) closed: Option<Status>,
    /// Why it is lost.
    pub(super) loss: Option<Loss>,
    pub(super) output: Tail,
}

/// A sidecar.
#[derive(Debug, Default)]
pub(super) struct SidecarFacts {
    pub(super) agent: u32,
    /// The addresses of its ports, and its certificate request.
    pub(super) bound: Option<Bound>,
    /// Its session directory, admin address and address for gRPC-Web.
    pub(super) serving: Option<(PathBuf, SocketAddr, Option<SocketAddr>)>,
    /// The token files of its workers.
    pub(super) token_files: BTreeMap<u32, PathBuf>,
    /// Whether its input was ended on purpose.
    pub(super) is_closed: bool,
    pub(super) summary: Option<Summary>,
    pub(super) exited: Option<Status>,
    pub(super) loss: Option<Loss>,
    /// Why it does not reach peers, as it reported last.
    pub(super) unreachable: BTreeMap<u32, String>,
    pub(super) log: Tail,
}

/// A worker.
#[derive(Debug, Default)]
pub(super) struct WorkerFacts {
    pub(super) sidecar: u32,
    pub(super) agent: u32,
    /// Its process on its host, once it has one.
    pub(super) pid: Option<u32>,
    /// Its rank in the last committed membership that had it.
    pub(super) rank: Option<u32>,
    /// Whether it was ordered to end.
    pub(super) is_stopped: bool,
    /// Whether it ended after the launcher had ordered everything to end.
    ended_late: bool,
    pub(super) exited: Option<Status>,
    /// What the coordinator has reported of it when it hung.
    pub(super) hung: Option<String>,
    noted: bool,
    last_call: Option<String>,
    /// The last lines of its standard error, when all of its output has arrived.
    stderr_tail: Option<Vec<String>>,
    pub(super) loss: Option<Loss>,
}

/// What follows from a message.
#[derive(Debug, Default)]
pub(super) struct Consequence {
    /// For the plan.
    pub(super) event: Option<Event>,
    /// The loss to report, when all is known about it.
    pub(super) loss: Option<Loss>,
    /// An agent that is of no use any more.
    pub(super) unusable: Option<u32>,
    /// A text for users.
    pub(super) text: Option<String>,
}

impl Consequence {
    fn event(event: Event) -> Self {
        Self { event: Some(event), ..Self::default() }
    }
}

impl Table {
    /// Empty tables of a job that runs a command.
    pub(super) fn of(command: String) -> Self {
        Self { command, ..Self::default() }
    }

    /// The launcher orders everything to end.
    pub(super) fn note_end(&mut self) {
        self.is_ending = true;
    }

    /// Takes a message of an agent, which its scope has accepted.
    pub(super) fn handle_message(&mut self, agent: u32, message: FromAgent) -> Consequence {
        match message {
            FromAgent::Hello { version, hostname: _, interfaces, port } => {
                self.hello(agent, &version, interfaces, port)
            }
            FromAgent::Sidecar { sidecar, line } => self.handle_line(sidecar, line),
            FromAgent::SidecarLog { sidecar, text } => {
                self.sidecar(sidecar).log.push(&text);
                Consequence::default()
            }
            FromAgent::SidecarExited { sidecar, status } => self.sidecar_exited(sidecar, status),
            FromAgent::WorkerStarted { worker, pid } => {
                self.worker(worker).pid = Some(pid);
                Consequence::default()
            }
            FromAgent::WorkerExited { worker, status } => {
                let ended_late = self.is_ending;
                let facts = self.worker(worker);
                (facts.exited, facts.ended_late) = (Some(status), ended_late);
                let how = match status {
                    _ if status.is_success() => WorkerEnd::Success,
                    Status::Signal(SIGTERM) | Status::Code(CODE_OF_SIGTERM) if !facts.is_stopped => {
                        WorkerEnd::Terminated
                    }
                    _ => WorkerEnd::Failure,
                };
                Consequence::event(Event::WorkerEnded { worker, how })
            }
            FromAgent::Preempted { worker } => Consequence::event(Event::Preempted { agent, worker }),
            FromAgent::WorkerDrained { worker, stderr_tail } => {
                self.worker(worker).stderr_tail = Some(stderr_tail);
                let facts = &self.workers[&worker];
                let failed = facts.exited.is_some_and(|status| !status.is_success()) && !facts.is_stopped;
                Consequence { loss: failed.then(|| self.loss_of_worker(worker)).flatten(), ..Consequence::default() }
            }
            FromAgent::Refused { reason } => self.unusable(agent, Code::HostRefused, reason),
            // The printer has these; no worker of an elastic job takes input.
            FromAgent::Output { .. } | FromAgent::InputTaken { .. } | FromAgent::Notice { .. } | FromAgent::Beat => {
                Consequence::default()
            }
        }
    }

    fn hello(&mut self, agent: u32, theirs: &str, interfaces: Vec<InterfaceAddress>, port: u16) -> Consequence {
        let ours = env!("CARGO_PKG_VERSION");
        if theirs != ours {
            let reason = format!(
                "it runs ronde {theirs}, this one {ours}; install the same version on all hosts, or name it with \
                 --remote-ronde"
            );
            return self.unusable(agent, Code::VersionDiffers, reason);
        }
        self.agent(agent).hello = Some(Hello { interfaces, port });
        Consequence::default()
    }

    /// Records that a host cannot be used.
    pub(super) fn unusable(&mut self, agent: u32, code: ronde_bootstrap::codes::Code, reason: String) -> Consequence {
        let facts = self.agent(agent);
        let loss = Loss::Unusable { host: facts.host.clone(), reason, code, output: facts.output.lines() };
        facts.loss.get_or_insert_with(|| loss.clone());
        Consequence { event: Some(Event::AgentLost { agent }), loss: Some(loss), unusable: Some(agent), text: None }
    }

    /// The connection to an agent has ended.
    pub(super) fn closed(&mut self, agent: u32, status: Status) -> Consequence {
        let facts = self.agent(agent);
        facts.closed = Some(status);
        if facts.is_dropped || facts.loss.is_some() {
            return Consequence::event(Event::AgentLost { agent });
        }
        let (host, output) = (facts.host.clone(), facts.output.lines());
        let status = LinkStatus { remote: facts.remote, status };
        let loss = match facts.hello {
            Some(_) => Loss::Host { host, status, output },
            None => Loss::unreachable(host, status, output),
        };
        facts.loss = Some(loss.clone());
        Consequence { event: Some(Event::AgentLost { agent }), loss: Some(loss), ..Consequence::default() }
    }

    fn handle_line(&mut self, sidecar: u32, line: FromSidecar) -> Consequence {
        match line {
            FromSidecar::Bound { certificate_request, control, lanes, version: _ } => {
                self.sidecar(sidecar).bound = Some(Bound { certificate_request, control, lanes });
                Consequence::event(Event::Bound { sidecar })
            }
            FromSidecar::Serving { job: _, socket_dir, token_files, admin, web } => {
                let facts = self.sidecar(sidecar);
                facts.serving = Some((socket_dir, admin, web));
                facts.token_files.extend(token_files.into_iter().map(|file| (file.worker, file.path)));
                Consequence::event(Event::Serving { sidecar })
            }
            FromSidecar::Prepared { membership, token_files } => {
                let files = token_files.into_iter().map(|file| (file.worker, file.path));
                self.sidecar(sidecar).token_files.extend(files);
                Consequence::event(Event::Prepared { sidecar, membership })
            }
            FromSidecar::Entered { membership } => Consequence::event(Event::Entered { sidecar, membership }),
            FromSidecar::Attached { worker } => Consequence::event(Event::Attached { worker }),
            FromSidecar::Seated { worker, membership } => Consequence::event(Event::Seated { worker, membership }),
            FromSidecar::Hung { worker, membership, text } => {
                // The report may be about a worker that has ended long ago.
                if let Some(facts) = self.workers.get_mut(&worker) {
                    facts.hung = Some(text);
                }
                Consequence::event(Event::Hung { sidecar, worker, membership })
            }
            FromSidecar::Unreachable { peer, membership, text } => {
                self.sidecar(sidecar).unreachable.insert(peer, text);
                Consequence::event(Event::Unreachable { sidecar, peer, membership })
            }
            FromSidecar::Left { worker, .. } => {
                self.left.retain(|left| *left != worker);
                self.left.push(worker);
                Consequence::event(Event::Left { worker })
            }
            FromSidecar::Noted { worker, last_call } => {
                let facts = self.worker(worker);
                (facts.noted, facts.last_call) = (true, last_call);
                Consequence::default()
            }
            FromSidecar::Ended { summary } => {
                self.sidecar(sidecar).summary = Some(summary);
                Consequence::default()
            }
            FromSidecar::Recorded { path } => {
                let host = self.host_of_sidecar(sidecar);
                self.records.add(host, &path);
                Consequence::default()
            }
            FromSidecar::Fatal { reason } => {
                let host = self.host_of_sidecar(sidecar);
                self.sidecar(sidecar).log.push(&reason);
                let consequence = self.fatal(sidecar, reason.clone());
                // It has been lost before, or it was ending. One that was just starting reports that its input was closed.
                let is_its_own = Code::of(&reason) != Some(Code::LauncherLine);
                let is_no_loss = consequence.loss.is_none();
                let text = (is_no_loss && is_its_own)
                    .then(|| format!("sidecar {sidecar} on host {host} reports at its end: {reason}"));
                Consequence { text, ..consequence }
            }
            FromSidecar::Linked { peer, address: _ } => Consequence::event(Event::Linked { sidecar, peer }),
            FromSidecar::Dialling { .. } => Consequence::default(),
        }
    }

    /// A sidecar cannot continue.
    pub(super) fn fatal(&mut self, sidecar: u32, reason: String) -> Consequence {
        let host = self.host_of_sidecar(sidecar);
        let loss = Loss::Fatal { sidecar, host, reason };
        let facts = self.sidecar(sidecar);
        let is_first = facts.loss.is_none() && !facts.is_closed;
        facts.loss.get_or_insert_with(|| loss.clone());
        let event = Some(Event::SidecarLost { sidecar });
        Consequence { event, loss: is_first.then_some(loss), ..Consequence::default() }
    }

    fn sidecar_exited(&mut self, sidecar: u32, status: Status) -> Consequence {
        let host = self.host_of_sidecar(sidecar);
        let facts = self.sidecar(sidecar);
        facts.exited = Some(status);
        let event = Some(Event::SidecarLost { sidecar });
        if facts.is_closed || facts.loss.is_some() {
            return Consequence { event, ..Consequence::default() };
        }
        let loss = Loss::Sidecar { sidecar, host, status, log_tail: facts.log.lines() };
        facts.loss = Some(loss.clone());
        Consequence { event, loss: Some(loss), ..Consequence::default() }
    }

    /// Records a committed membership.
    pub(super) fn committed(&mut self, members: &Members) {
        self.left.clear();
        self.seated = members.seats.iter().map(|seat| seat.worker).collect();
        for (rank, seat) in (0..).zip(&members.seats) {
            self.worker(seat.worker).rank = Some(rank);
        }
        // Facts about workers that ended long ago are dropped.
        let ended: Vec<u32> =
            self.workers.iter().filter(|(_, facts)| facts.has_ended()).map(|(number, _)| *number).collect();
        for worker in ended.iter().rev().skip(ENDED_WORKERS_KEPT) {
            self.workers.remove(worker);
        }
    }

    /// The loss of a worker that failed, with what is known of it.
    pub(super) fn loss_of_worker(&self, worker: u32) -> Option<Loss> {
        let facts = self.workers.get(&worker)?;
        if let Some(loss) = &facts.loss {
            return Some(loss.clone());
        }
        Some(Loss::Worker {
            worker,
            rank: facts.rank,
            host: self.host_of_agent(facts.agent),
            status: facts.exited?,
            command: self.command.clone(),
            last_call: facts.last_call.clone(),
            stderr_tail: facts.stderr_tail.clone().unwrap_or_default(),
        })
    }

    /// The worker that caused the failure of `first`: the first whose session ended and whose process then failed.
    pub(super) fn culprit(&self, first: u32) -> u32 {
        let failed = |worker: &&u32| {
            let facts = self.workers.get(worker);
            facts.is_some_and(|facts| !facts.is_stopped && facts.exited.is_some_and(|status| !status.is_success()))
        };
        let end = self.left.iter().position(|left| *left == first).unwrap_or(self.left.len());
        self.left[..end].iter().find(failed).copied().unwrap_or(first)
    }

    /// The lines about the workers of the last membership that failed besides the culprit.
    pub(super) fn others(&self, culprit: Culprit) -> Vec<String> {
        let counts = |worker: u32, facts: &WorkerFacts| match culprit {
            Culprit::Worker(culprit) => worker != culprit,
            Culprit::Other => true,
            Culprit::EndedByItself => facts.is_stopped,
        };
        let workers = self.workers.iter().filter(|(worker, facts)| counts(**worker, facts));
        let seated = workers.filter(|(worker, _)| self.seated.is_empty() || self.seated.contains(worker));
        let who = if matches!(culprit, Culprit::Worker(_)) { "other worker" } else { "worker" };
        outcome::others_lines(who, seated.filter_map(|(_, facts)| facts.as_other()))
    }

    /// Whether the last lines and the last call of a failed worker have arrived, and the ends of those that left before.
    pub(super) fn is_explained(&self, first: u32) -> bool {
        let has_exited = |worker: &u32| self.workers.get(worker).is_none_or(|facts| facts.exited.is_some());
        let end = self.left.iter().position(|left| *left == first).unwrap_or(self.left.len());
        let culprit = self.culprit(first);
        self.left[..end].iter().all(has_exited)
            && self.workers.get(&culprit).is_none_or(|facts| {
                let sidecar_runs = self.sidecars.get(&facts.sidecar).is_some_and(|sidecar| sidecar.exited.is_none());
                let is_connected = self.agents.get(&facts.agent).is_some_and(|agent| agent.closed.is_none());
                !is_connected || (facts.stderr_tail.is_some() && (facts.noted || !sidecar_runs))
            })
    }

    /// Whether all workers have ended and their output has arrived, as far as their hosts are connected.
    pub(super) fn workers_ended(&self) -> bool {
        self.workers.values().all(|facts| facts.has_ended() || !self.is_connected(facts.agent))
    }

    /// Whether all sidecars have ended, as far as their hosts are connected.
    pub(super) fn sidecars_ended(&self) -> bool {
        self.sidecars.values().all(|facts| facts.exited.is_some() || !self.is_connected(facts.agent))
    }

    /// Whether all connections have ended.
    pub(super) fn links_closed(&self) -> bool {
        self.agents.values().all(|facts| facts.closed.is_some())
    }

    fn is_connected(&self, agent: u32) -> bool {
        self.agents.get(&agent).is_some_and(|facts| facts.closed.is_none())
    }

    /// The sidecars of a membership, as others reach them.
    pub(super) fn peers(&self, members: &Members) -> Vec<Peer> {
        let peer = |sidecar: u32| {
            let facts = self.sidecars.get(&sidecar)?;
            let (bound, agent) = (facts.bound.as_ref()?, self.agents.get(&facts.agent)?);
            Some(Peer {
                sidecar,
                host: agent.host.clone(),
                control: bound.control,
                lanes: bound.lanes.clone(),
                addresses: agent.addresses.clone(),
            })
        };
        members.sidecars().into_iter().filter_map(peer).collect()
    }

    /// The address and port at which workers may meet by themselves: on the host of rank 0.
    pub(super) fn master(&self, members: &Members) -> SocketAddr {
        let sidecar = members.seats.first().and_then(|seat| self.sidecars.get(&seat.sidecar));
        let agent = sidecar.and_then(|sidecar| self.agents.get(&sidecar.agent));
        let address = agent.and_then(|agent| agent.addresses.first());
        let port = agent.and_then(|agent| agent.hello.as_ref()).map_or(0, |hello| hello.port);
        SocketAddr::new(address.map_or(super::super::address::LOOPBACK, |own| own.address), port)
    }

    pub(super) fn agent(&mut self, agent: u32) -> &mut AgentFacts {
        self.agents.entry(agent).or_default()
    }

    pub(super) fn sidecar(&mut self, sidecar: u32) -> &mut SidecarFacts {
        self.sidecars.entry(sidecar).or_default()
    }

    pub(super) fn worker(&mut self, worker: u32) -> &mut WorkerFacts {
        self.workers.entry(worker).or_default()
    }

    pub(super) fn host_of_agent(&self, agent: u32) -> String {
        self.agents.get(&agent).map_or_else(String::new, |facts| facts.host.clone())
    }

    pub(super) fn host_of_sidecar(&self, sidecar: u32) -> String {
        self.sidecars.get(&sidecar).map_or_else(String::new, |facts| self.host_of_agent(facts.agent))
    }

    /// How many hosts a membership has.
    pub(super) fn hosts(&self, members: &Members) -> usize {
        let hosts: BTreeSet<String> =
            members.sidecars().into_iter().map(|sidecar| self.host_of_sidecar(sidecar)).collect();
        hosts.len()
    }
}

impl WorkerFacts {
    fn has_ended(&self) -> bool {
        self.exited.is_some() && self.stderr_tail.is_some()
    }

    /// How it failed besides a culprit.
    fn as_other(&self) -> Option<Other> {
        let was_ordered = || self.is_stopped || self.ended_late;
        let lines = self.stderr_tail.as_deref().unwrap_or_default();
        let is_follower = own_errors::ended_as_follower(lines).unwrap_or_else(was_ordered);
        Some(Other { status: self.exited?, is_follower })
    }
}

/// The ranks and sizes of a worker in a membership. Each sidecar counts as its own host, as in jobs that are not elastic.
pub(super) fn place(members: &Members, worker: u32, agent: u32) -> Option<RankPlace> {
    let rank = members.rank_of(worker)?;
    let sidecar = members.seats[rank as usize].sidecar;
    let local = |of: u32| members.seats.iter().filter(move |seat| seat.sidecar == of);
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let local_rank = local(sidecar).position(|seat| seat.worker == worker)?;
    let across: Vec<u32> = members.sidecars().into_iter().filter(|of| local(*of).count() > local_rank).collect();
    Some(RankPlace {
        rank,
        size: number(members.seats.len()),
        host: agent as usize,
        sidecar,
        local_rank: number(local_rank),
        local_size: number(local(sidecar).count()),
        cross_rank: number(across.iter().position(|of| *of == sidecar)?),
        cross_size: number(across.len()),
    })
}

const SIGTERM: i32 = nix::sys::signal::Signal::SIGTERM as i32;
/// The exit code of a program that handles SIGTERM and ends, as a shell reports the signal.
const CODE_OF_SIGTERM: i32 = 128 + SIGTERM;
/// For how many ended workers the facts are kept.
const ENDED_WORKERS_KEPT: usize = 256;

#[cfg(test)]
mod tests {
    use super::super::plan::Seat;
    use super::*;

    #[test]
    fn followers_are_the_workers_of_the_last_membership_that_failed_because_of_the_culprit() {
        let mut table = Table::of("train".to_owned());
        // Worker 0 was lost in the membership before.
        table.handle_message(0, FromAgent::WorkerExited { worker: 0, status: Status::Code(9) });
        let seats = (1..5).map(|worker| Seat { worker, sidecar: 0 }).collect();
        table.committed(&Members { number: 2, seats });
        assert!(table.others(Culprit::Worker(1)).is_empty(), "none has ended");
        for (worker, code) in [(1, 7), (2, 1), (3, 1), (4, 0)] {
            table.worker(worker).is_stopped = worker == 3;
            table.handle_message(0, FromAgent::WorkerExited { worker, status: Status::Code(code) });
        }
        let stopped = "1 worker ended because of that, with exit code 1";
        assert_eq!(
            table.others(Culprit::Worker(1)),
            ["1 other worker failed, too, with exit code 1", &stopped.replace("worker", "other worker")]
        );
        let alike = "2 workers failed, too, 1 with exit code 1, 1 with exit code 7";
        assert_eq!(table.others(Culprit::Other), [alike, stopped]);
        assert_eq!(table.others(Culprit::EndedByItself), [stopped]);
        let stderr_tail = vec!["PeerLostError: worker 1 was killed [RONDE-E301] (at a.py:4)".to_owned()];
        table.handle_message(0, FromAgent::WorkerDrained { worker: 2, stderr_tail });
        let followers = "2 other workers ended because of that, with exit code 1";
        assert_eq!(table.others(Culprit::Worker(1)), [followers]);
        // The error of a membership before, which it has handled, is not what it ended with.
        let stderr_tail =
            vec!["handled: worker 0 was killed [RONDE-E301]".to_owned(), "ValueError: no data".to_owned()];
        table.handle_message(0, FromAgent::WorkerDrained { worker: 2, stderr_tail });
        let apart =
            ["1 other worker failed, too, with exit code 1", "1 other worker ended because of that, with exit code 1"];
        assert_eq!(table.others(Culprit::Worker(1)), apart);
    }

    #[test]
    fn workers_that_end_with_the_job_are_counted_as_its_followers() {
        let mut table = Table::of("train".to_owned());
        table.handle_message(0, FromAgent::WorkerExited { worker: 0, status: Status::Code(7) });
        table.note_end();
        table.handle_message(0, FromAgent::WorkerExited { worker: 1, status: Status::Signal(SIGTERM) });
        let expected = ["1 other worker ended because of that, by signal 15 (SIGTERM)"];
        assert_eq!(table.others(Culprit::Worker(0)), expected);
    }

    #[test]
    fn a_sidecar_that_was_starting_when_the_job_ended_reports_no_reason() {
        let mut table = Table::of("train".to_owned());
        table.sidecar(0).is_closed = true;
        let mut printed = |reason: &str| {
            let line = FromSidecar::Fatal { reason: reason.to_owned() };
            table.handle_message(0, FromAgent::Sidecar { sidecar: 0, line }).text
        };
        assert_eq!(printed("the launcher closed its end [RONDE-E407]"), None);
        let text = printed("a port is taken [RONDE-E404]").expect("it is its own");
        assert!(text.ends_with(" reports at its end: a port is taken [RONDE-E404]"), "{text}");
    }
}
