//! The state of a job: tables of hosts, sidecars and workers, updated by events. Pure.

mod blame;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::PathBuf;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::interfaces::InterfaceAddress;
use ronde_bootstrap::messages::{FromSidecar, Summary};

use super::agents::{Event, Tail};
use super::failure::{Failure, Missing};
use super::placement::Placement;
use super::records::FlightRecords;
use super::routes;
use super::shell::Trouble;
use crate::envelope::{FromAgent, Status};

/// The tables.
pub(super) struct State {
    placement: Placement,
    command: String,
    /// By index of the host.
    pub(super) hosts: Vec<HostState>,
    /// By sidecar index.
    pub(super) sidecars: Vec<SidecarState>,
    /// By rank.
    pub(super) workers: Vec<WorkerState>,
    /// The rank whose process was the first to end with a failure.
    pub(super) first_failed: Option<u32>,
    /// Whether the launcher has requested everything to end: what ends from now on is no cause.
    is_ending: bool,
    /// The ranks whose sessions have ended, in the order of their latest ends.
    left: Vec<u32>,
    /// The command of `--starter`, if it has started the workers.
    starter: Option<StarterState>,
    /// Where sidecars have written flight records.
    pub(super) records: FlightRecords,
}

/// The state of the command of `--starter`.
#[derive(Debug)]
struct StarterState {
    ended: Option<Status>,
    stderr: Tail,
}

/// The state of a host.
#[derive(Debug, Default)]
pub(super) struct HostState {
    /// Whether it is reached through the remote shell.
    pub(super) remote: bool,
    /// The addresses at which its sidecars listen, once chosen; workers get the first.
    pub(super) addresses: Vec<InterfaceAddress>,
    /// The first message of its agent.
    pub(super) hello: Option<Hello>,
    /// How the connection to it ended.
    pub(super) closed: Option<Status>,
    /// Whether it ended while it was needed.
    is_lost: bool,
    stderr: Tail,
}

/// An agent's first message.
#[derive(Debug)]
pub(super) struct Hello {
    /// The addresses of its interfaces, loopback last.
    pub(super) interfaces: Vec<InterfaceAddress>,
    /// A port that is free on it.
    pub(super) port: u16,
}

/// The state of a sidecar.
#[derive(Debug, Default)]
pub(super) struct SidecarState {
    /// Whether its agent was instructed to start it.
    pub(super) started: bool,
    /// Its certificate request and ports.
    pub(super) bound: Option<Bound>,
    /// Its session directory.
    pub(super) serving: Option<Serving>,
    /// The sidecars to which it dials a control link.
    pub(super) dialled: BTreeSet<u32>,
    /// The sidecars that it has a control link to, and where each was reached or came from.
    pub(super) linked: BTreeMap<u32, IpAddr>,
    /// What it did.
    pub(super) summary: Option<Summary>,
    /// How it ended.
    pub(super) exited: Option<Status>,
    /// Whether it ended with a failure while it was needed.
    is_lost: bool,
    /// Why it cannot continue, as it has reported.
    fatal: Option<String>,
    log: Tail,
}

/// A sidecar's answer to its start.
#[derive(Debug)]
pub(super) struct Bound {
    /// PEM.
    pub(super) certificate_request: String,
    /// The control port.
    pub(super) control: SocketAddr,
    /// The lanes' ports.
    pub(super) lanes: Vec<SocketAddr>,
}

/// Where workers find a sidecar.
#[derive(Debug)]
pub(super) struct Serving {
    /// The directory with its sockets.
    pub(super) socket_dir: PathBuf,
    /// The token file of each of its ranks, ascending.
    pub(super) token_files: Vec<PathBuf>,
    /// Its admin address.
    pub(super) admin: SocketAddr,
    /// Its address for gRPC-Web, if any.
    pub(super) web: Option<SocketAddr>,
}

/// The state of a worker.
#[derive(Debug, Default)]
pub(super) struct WorkerState {
    /// Whether it was started.
    pub(super) started: bool,
    /// Whether it has joined the job.
    pub(super) attached: bool,
    /// How it ended.
    pub(super) exited: Option<Status>,
    /// Whether it was stopped by the launcher.
    is_stopped: bool,
    /// Whether its sidecar has its exit status.
    pub(super) noted: bool,
    /// How many operations it had called when its session ended.
    pub(super) operations: Option<u64>,
    /// Its last call, as reported by its sidecar.
    pub(super) last_call: Option<String>,
    /// The last lines of its standard error, when all of its output has arrived.
    pub(super) stderr_tail: Option<Vec<String>>,
}

/// A step of the start that all must take before the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Every agent has answered.
    Hosts,
    /// Every sidecar has its ports.
    Bound,
    /// Every sidecar takes workers.
    Serving,
    /// Every sidecar has the control links that it asked for.
    Linked,
    /// Every worker runs.
    Workers,
    /// Every worker has joined, if one has.
    Attached,
}

impl Step {
    /// What is waited for, for messages.
    pub(super) fn awaited(self) -> &'static str {
        match self {
            Self::Hosts => "hosts to start ronde",
            Self::Bound => "sidecars to open their ports",
            Self::Serving => "sidecars to serve",
            Self::Linked => "sidecars to reach each other",
            Self::Workers => "workers to start",
            Self::Attached => "all ranks to join",
        }
    }
}

impl State {
    /// The initial state. `command` is what the workers run.
    pub(super) fn new(placement: Placement, command: &str) -> Self {
        fn table<T: Default>(len: usize) -> Vec<T> {
            std::iter::repeat_with(T::default).take(len).collect()
        }
        Self {
            hosts: table(placement.hosts.len()),
            sidecars: table(placement.sidecars.len()),
            workers: table(placement.size() as usize),
            command: command.to_owned(),
            first_failed: None,
            is_ending: false,
            left: Vec::new(),
            starter: None,
            records: FlightRecords::default(),
            placement,
        }
    }

    /// The launcher stops all processes.
    pub(super) fn note_end(&mut self) {
        self.is_ending = true;
    }

    /// Updates the state with an event of a host.
    ///
    /// # Errors
    /// The failure that ends the job. A failed worker is no error yet: [`State::first_failed`] names it, and its last lines
    /// follow.
    pub(super) fn handle_event(&mut self, host: usize, event: Event) -> Result<(), Failure> {
        let noted = match event {
            Event::Message(message) => self.handle_message(host, message),
            Event::Violation(what) => {
                let reason = format!("it {what}; see that host");
                Err(Failure::Refused { host: self.host_name(host), reason })
            }
            Event::RemoteShellOutput(text) => {
                self.hosts[host].stderr.push(&text);
                Ok(())
            }
            Event::Closed(status) => self.handle_closed(host, status),
            // These are of elastic jobs.
            Event::Resolved(_) | Event::Silent(_) => Ok(()),
            Event::StarterOutput(text) => {
                self.starter.iter_mut().for_each(|starter| starter.stderr.push(&text));
                Ok(())
            }
            Event::StarterEnded(status) => {
                self.starter.iter_mut().for_each(|starter| starter.ended = Some(status));
                Ok(())
            }
        };
        // Failures after that of a worker are its consequences.
        if self.first_failed.is_some() { Ok(()) } else { noted }
    }

    /// The hosts, sidecars or workers that have not taken a step.
    pub(super) fn missing(&self, step: Step) -> Vec<Missing> {
        match step {
            Step::Hosts => self.missing_hosts(),
            Step::Bound => {
                self.missing_sidecars("its sidecar has not opened its ports", |sidecar| sidecar.bound.is_some())
            }
            Step::Serving => {
                self.missing_sidecars("its sidecar does not serve yet", |sidecar| sidecar.serving.is_some())
            }
            Step::Linked => self.missing_links(),
            Step::Workers => {
                self.missing_workers(|worker| (!worker.started).then(|| "its process has not been started".to_owned()))
            }
            Step::Attached => self.missing_workers(not_attached),
        }
    }

    /// Records that a command has started the workers; it handles their exits.
    pub(super) fn note_starter(&mut self) {
        self.starter = Some(StarterState { ended: None, stderr: Tail::of(STARTER_LINES) });
        self.workers.iter_mut().for_each(|worker| worker.started = true);
    }

    /// The failure that ended the job when that command has failed.
    pub(super) fn starter_failure(&self) -> Option<Failure> {
        let status = self.starter.as_ref()?.ended.filter(|status| !status.is_success())?;
        Some(Failure::Starter { command: self.command.clone(), status, stderr_tail: self.starter_output() })
    }

    /// The last lines of that command's standard error.
    pub(super) fn starter_output(&self) -> Vec<String> {
        self.starter.as_ref().map_or_else(Vec::new, |starter| starter.stderr.lines())
    }

    /// Whether all started workers have ended and their output has arrived, as far as their hosts are connected.
    pub(super) fn workers_ended(&self) -> bool {
        if let Some(starter) = &self.starter {
            return starter.ended.is_some();
        }
        let is_connected = |rank: &u32| self.hosts[self.host_of_rank(*rank)].closed.is_none();
        let running = |(_, worker): &(u32, &WorkerState)| worker.started && worker.stderr_tail.is_none();
        !(0_u32..).zip(&self.workers).filter(running).any(|(rank, _)| is_connected(&rank))
    }

    /// Whether a worker has joined the job.
    pub(super) fn some_attached(&self) -> bool {
        self.workers.iter().any(|worker| worker.attached)
    }

    /// Whether all started sidecars have ended, as far as their hosts are connected.
    pub(super) fn sidecars_ended(&self) -> bool {
        let ended = |(place, sidecar): (&super::placement::SidecarPlace, &SidecarState)| {
            !sidecar.started || sidecar.exited.is_some() || self.hosts[place.host].closed.is_some()
        };
        self.placement.sidecars.iter().zip(&self.sidecars).all(ended)
    }

    /// Whether all connections have ended, of those to the first `links` hosts.
    pub(super) fn links_closed(&self, links: usize) -> bool {
        self.hosts.iter().take(links).all(|host| host.closed.is_some())
    }

    /// Handles a message that the host's scope has accepted: it names ranks and sidecars of that host.
    fn handle_message(&mut self, host: usize, message: FromAgent) -> Result<(), Failure> {
        match message {
            FromAgent::Hello { version, hostname: _, interfaces, port } => {
                let ours = env!("CARGO_PKG_VERSION");
                if version != ours {
                    let host = self.host_name(host);
                    return Err(Failure::Version { host, theirs: version, ours: ours.to_owned() });
                }
                self.hosts[host].hello = Some(Hello { interfaces, port });
            }
            FromAgent::Sidecar { sidecar, line } => return self.handle_line(host, sidecar, line),
            FromAgent::SidecarLog { sidecar, text } => self.sidecars[sidecar as usize].log.push(&text),
            FromAgent::SidecarExited { sidecar, status } => {
                let state = &mut self.sidecars[sidecar as usize];
                (state.exited, state.is_lost) = (Some(status), !self.is_ending && !status.is_success());
                return Err(self.sidecar_failure(sidecar, status));
            }
            FromAgent::WorkerStarted { worker: rank, pid: _ } => self.workers[rank as usize].started = true,
            FromAgent::WorkerExited { worker: rank, status } => {
                let worker = &mut self.workers[rank as usize];
                (worker.exited, worker.is_stopped) = (Some(status), self.is_ending);
                if !status.is_success() {
                    self.first_failed.get_or_insert(rank);
                }
            }
            FromAgent::WorkerDrained { worker: rank, stderr_tail } => {
                self.workers[rank as usize].stderr_tail = Some(stderr_tail);
            }
            FromAgent::Refused { reason } => return Err(Failure::Refused { host: self.host_name(host), reason }),
            // The job notifies the task that reads the input.
            FromAgent::InputTaken { .. } => {}
            // The printer gets them.
            FromAgent::Output { .. } | FromAgent::Notice { .. } | FromAgent::Beat => {}
            // Only the agents of an elastic job send it; see `Scope`.
            FromAgent::Preempted { .. } => {}
        }
        Ok(())
    }

    fn handle_line(&mut self, host: usize, sidecar: u32, line: FromSidecar) -> Result<(), Failure> {
        let served = self.served(sidecar);
        let host_name = self.host_name(host);
        let state = &mut self.sidecars[sidecar as usize];
        match line {
            FromSidecar::Bound { certificate_request, control, lanes, version: _ } => {
                state.bound = Some(Bound { certificate_request, control, lanes });
            }
            FromSidecar::Serving { job: _, socket_dir, mut token_files, admin, web } => {
                token_files.sort_by_key(|file| file.worker);
                if !token_files.iter().map(|file| file.worker).eq(served.clone()) {
                    let reason = format!("it made tokens for other ranks than {}", super::failure::ranks(&served));
                    return Err(Failure::Fatal { served, host: host_name, reason });
                }
                let token_files = token_files.into_iter().map(|file| file.path).collect();
                state.serving = Some(Serving { socket_dir, token_files, admin, web });
            }
            FromSidecar::Dialling { peer } => {
                state.dialled.insert(peer);
            }
            FromSidecar::Linked { peer, address } => {
                state.linked.insert(peer, address);
            }
            FromSidecar::Attached { worker } => self.workers[worker as usize].attached = true,
            FromSidecar::Noted { worker, last_call } => {
                let worker = &mut self.workers[worker as usize];
                (worker.noted, worker.last_call) = (true, last_call);
            }
            FromSidecar::Left { worker, operations } => {
                // A worker may attach again: its latest end counts.
                self.left.retain(|left| *left != worker);
                self.left.push(worker);
                self.workers[worker as usize].operations = operations;
            }
            // Only an elastic job has a second membership; see `Scope`.
            FromSidecar::Prepared { .. }
            | FromSidecar::Entered { .. }
            | FromSidecar::Seated { .. }
            | FromSidecar::Hung { .. }
            | FromSidecar::Unreachable { .. } => {}
            FromSidecar::Recorded { path } => self.records.add(host_name, &path),
            FromSidecar::Ended { summary } => state.summary = Some(summary),
            FromSidecar::Fatal { reason } => {
                state.log.push(&reason);
                // The input of one that is just starting is closed.
                let follows_from_the_end = self.is_ending && Code::of(&reason) == Some(Code::LauncherLine);
                state.fatal = (!follows_from_the_end).then(|| reason.clone());
                return Err(Failure::Fatal { served, host: host_name, reason });
            }
        }
        Ok(())
    }

    fn handle_closed(&mut self, host: usize, status: Status) -> Result<(), Failure> {
        let state = &mut self.hosts[host];
        (state.closed, state.is_lost) = (Some(status), !self.is_ending);
        Err(self.host_failure(host, status))
    }

    fn missing_hosts(&self) -> Vec<Missing> {
        let silent = self.hosts.iter().enumerate().filter(|(_, state)| state.hello.is_none());
        silent
            .map(|(host, state)| Missing {
                host: self.host_name(host),
                placed: self.placement.ranks_of_host(host),
                awaited: if state.remote {
                    let trouble = Trouble::of(None, &state.stderr.lines()).map(Trouble::advice);
                    let advice = trouble.unwrap_or("does `ssh HOST true` come back at once?");
                    format!("the remote shell has not started ronde there; {advice}")
                } else {
                    "its agent has not answered".to_owned()
                },
                output: state.stderr.lines(),
            })
            .collect()
    }

    fn missing_sidecars(&self, awaited: &str, done: fn(&SidecarState) -> bool) -> Vec<Missing> {
        let places = self.placement.sidecars.iter().zip(&self.sidecars);
        places
            .filter(|(_, state)| !done(state))
            .map(|(place, state)| Missing {
                host: self.host_name(place.host),
                placed: place.ranks.clone(),
                awaited: awaited.to_owned(),
                output: state.log.lines(),
            })
            .collect()
    }

    /// Each sidecar dials the links that it needs; all but the first need at least one.
    fn missing_links(&self) -> Vec<Missing> {
        let places = (0_u32..).zip(self.placement.sidecars.iter().zip(&self.sidecars));
        places
            .filter_map(|(sidecar, (place, state))| {
                let awaited = match state.dialled.iter().find(|peer| !self.is_linked(sidecar, **peer)) {
                    Some(peer) => format!(
                        "sidecar {sidecar} does not reach sidecar {peer} on host {} at {}; is UDP between the two \
                         blocked? Test it with `ronde check --hosts`, or choose others with --ports and --network-interfaces",
                        self.placement.host_of_sidecar(*peer as usize),
                        routes::addresses_of(&self.placement, self, *peer)
                    ),
                    None if state.dialled.is_empty() && sidecar > 0 => {
                        format!("sidecar {sidecar} has not asked for a link to the others")
                    }
                    None => return None,
                };
                let (host, placed) = (self.host_name(place.host), place.ranks.clone());
                Some(Missing { host, placed, awaited, output: state.log.lines() })
            })
            .collect()
    }

    /// Whether both ends have reported the link.
    fn is_linked(&self, one: u32, other: u32) -> bool {
        let knows =
            |from: u32, to: u32| self.sidecars.get(from as usize).is_some_and(|from| from.linked.contains_key(&to));
        knows(one, other) && knows(other, one)
    }

    /// Ranks of one host that lack the same step share one entry.
    fn missing_workers(&self, lack: fn(&WorkerState) -> Option<String>) -> Vec<Missing> {
        let mut missing: Vec<Missing> = Vec::new();
        for (rank, worker) in (0_u32..).zip(&self.workers) {
            let Some(awaited) = lack(worker) else { continue };
            let host = self.host_name(self.host_of_rank(rank));
            match missing.last_mut() {
                Some(last) if last.host == host && last.awaited == awaited && last.placed.end == rank => {
                    last.placed.end += 1;
                }
                _ => missing.push(Missing { host, placed: rank..rank + 1, awaited, output: Vec::new() }),
            }
        }
        missing
    }

    fn served(&self, sidecar: u32) -> Range<u32> {
        self.placement.sidecars.get(sidecar as usize).map_or(0..0, |place| place.ranks.clone())
    }

    fn host_of_rank(&self, rank: u32) -> usize {
        self.placement.sidecars.iter().find(|place| place.ranks.contains(&rank)).map_or(0, |place| place.host)
    }

    fn host_name(&self, host: usize) -> String {
        self.placement.hosts[host].name.clone()
    }
}

/// The last lines kept of the command of `--starter`, which include the output of all workers and its report of their exits.
const STARTER_LINES: usize = 200;

fn not_attached(worker: &WorkerState) -> Option<String> {
    if worker.attached {
        return None;
    }
    Some(match worker.exited {
        Some(status) => format!("its process {status} and never joined the job"),
        None => "its process runs, but has not joined the job (`ronde.init`), while others wait for it".to_owned(),
    })
}

#[cfg(test)]
mod tests;
