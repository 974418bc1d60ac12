//! Executes what the plan decides: messages to agents, processes.

use std::rc::Rc;
use std::time::Duration;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::interfaces;
use ronde_bootstrap::messages::{self, Join, Membership, Start, ToSidecar};
use ronde_wire::SidecarIndex;

use super::super::address;
use super::super::agents::{Event as AgentEvent, Link};
use super::super::environment::{self, Identity};
use super::super::hosts::Host;
use super::super::scope::{Rights, Scope};
use super::super::start::{TRUST_DOMAIN, milliseconds};
use super::job::ElasticJob;
use super::notices::Text;
use super::plan::{Action, End, Event, Members};
use super::table::{self, Consequence};
use crate::envelope::ToAgent;

impl ElasticJob<'_> {
    /// Executes an action; returns the end of the job.
    pub(super) fn execute(&mut self, action: Action) -> Option<End> {
        match action {
            Action::StartAgent { agent, host } => self.start_agent(agent, host),
            Action::DropAgent { agent } => self.drop_agent(agent),
            Action::StartSidecar { sidecar, agent } => self.start_sidecar(sidecar, agent),
            Action::CloseSidecar { sidecar } => self.close_sidecar(sidecar),
            Action::Join { sidecar, members } => self.join(sidecar, &members),
            Action::Change { sidecar, members } => {
                self.admit(sidecar, &members);
                let line = ToSidecar::Change(self.membership(&members));
                self.send_line(sidecar, line);
            }
            Action::Enter { sidecar, membership, added, removed } => {
                self.send_line(sidecar, ToSidecar::Enter { membership, added, removed });
            }
            Action::Commit { sidecar, membership } => self.send_line(sidecar, ToSidecar::Commit { membership }),
            Action::StartWorker { worker, sidecar, members, is_spare } => {
                self.start_worker((worker, sidecar), &members, is_spare);
            }
            Action::StopWorker { worker } => self.stop_worker(worker, super::super::job::GRACE),
            Action::KillWorker { worker } => self.stop_worker(worker, Duration::ZERO),
            Action::Notice(notice) => self.notify(&notice),
            Action::End(end) => return Some(end),
        }
        None
    }

    fn start_agent(&mut self, agent: u32, name: String) {
        let settings = self.settings;
        let host = Host { name: name.clone(), slots: std::num::NonZeroU32::MIN };
        let is_local = address::is_local(&host);
        let facts = self.table.agent(agent);
        (facts.host, facts.remote) = (name.clone(), !is_local);
        let command = if is_local {
            vec![settings.ronde.to_string_lossy().into_owned(), "agent".to_owned()]
        } else {
            settings.remote_shell.command(&name, &settings.remote_agent)
        };
        let rights = Rights::default();
        let scope = Scope::elastic(name, rights.clone(), 3 * self.elastic.peer_timeout);
        self.rights.insert(agent, rights);
        let receivers = self.receivers();
        let number = agent as usize;
        match Link::start((number, scope), &command, COMMANDS_MAX, receivers.clone()) {
            Ok(link) => {
                self.links.insert(agent, link);
                tokio::spawn(async move {
                    // An alias of the remote shell has no address; the host's own ones are used then.
                    let addresses = address::resolve(host).await;
                    let _ = receivers.events.send((number, AgentEvent::Resolved(addresses))).await;
                });
            }
            Err(error) => {
                let reason = format!("cannot start {:?} to reach it: {error}", command[0]);
                let consequence = self.table.unusable(agent, Code::RemoteShellStart, reason);
                self.table.agent(agent).closed = Some(crate::envelope::Status::Code(-1));
                self.follow(consequence);
            }
        }
    }

    /// Hands the plan what follows from an event, and reports a loss.
    pub(super) fn follow(&mut self, consequence: Consequence) {
        self.pending.extend(consequence.event);
        self.notices.extend(consequence.text.map(Text::Other));
        if let Some(loss) = consequence.loss {
            self.report_loss(loss);
        }
        if let Some(agent) = consequence.unusable {
            self.drop_agent(agent);
        }
    }

    /// An agent has answered, or its host's name is resolved: with both, its addresses are chosen.
    pub(super) fn greeted(&mut self, agent: u32) -> Consequence {
        let facts = self.table.agent(agent);
        let (Some(hello), Some(resolved)) = (&facts.hello, &facts.resolved) else { return Consequence::default() };
        let (remote, resolved) = (facts.remote, resolved.clone());
        let selectors = &self.settings.network_interfaces;
        let loopback_only = self.loopback_only.unwrap_or(false);
        let mut addresses = interfaces::select(&hello.interfaces, selectors);
        if loopback_only && remote {
            let reason = "the other hosts of the job were named as this machine's loopback, where it cannot reach them; name \
                          them by their host names, or give --network-interfaces";
            return self.table.unusable(agent, Code::NoAddress, reason.to_owned());
        }
        if loopback_only || (addresses.is_empty() && !remote && selectors.is_empty()) {
            addresses = vec![address::loopback()];
        }
        address::put_first(&mut addresses, &resolved);
        if addresses.is_empty() {
            let asked: Vec<String> = selectors.iter().map(ToString::to_string).collect();
            let (code, reason) = if selectors.is_empty() {
                (Code::NoAddress, "it has no address at which other hosts could reach it".to_owned())
            } else {
                (
                    Code::NoInterface,
                    format!("it has no interface or network of --network-interfaces {}", asked.join(",")),
                )
            };
            return self.table.unusable(agent, code, reason);
        }
        self.table.agent(agent).addresses = addresses;
        Consequence { event: Some(Event::AgentUp { agent }), ..Consequence::default() }
    }

    /// Ends the connection to an agent, which then ends everything it started.
    pub(super) fn drop_agent(&mut self, agent: u32) {
        self.table.agent(agent).is_dropped = true;
        if let Some(link) = self.links.get_mut(&agent) {
            link.hang_up();
            link.kill_after(AGENT_LEAVE);
        }
    }

    fn start_sidecar(&mut self, sidecar: u32, agent: u32) {
        let settings = self.settings;
        self.table.sidecar(sidecar).agent = agent;
        if let Some(rights) = self.rights.get(&agent) {
            rights.add_sidecar(sidecar);
        }
        let start = Start {
            job: settings.job.clone(),
            run: settings.run.clone(),
            trust_domain: TRUST_DOMAIN.to_owned(),
            sidecar,
            addresses: self.table.agent(agent).addresses.iter().map(|own| own.address).collect(),
            port: None,
            ports: settings.ports,
            runtime_dir: None,
            start_timeout_ms: milliseconds(settings.start_timeout),
            tuning: settings.tuning.clone(),
            elastic: true,
            replace_stalled_ms: self.elastic.replace_stalled.map_or(0, milliseconds),
            exits_are_reported: true,
            control_fan_out: None,
        };
        let environment = environment::for_sidecar(&settings.caller, sidecar, settings.verbose, &settings.logs);
        let program = settings.sidecar_command.clone();
        self.send(agent, ToAgent::StartSidecar { sidecar, program, environment });
        self.send_line(sidecar, ToSidecar::Start(Box::new(start)));
    }

    /// Ends a lost sidecar if it still runs.
    pub(super) fn end_sidecar(&mut self, sidecar: u32) {
        if self.table.sidecar(sidecar).exited.is_none() {
            self.close_sidecar(sidecar);
        }
    }

    fn close_sidecar(&mut self, sidecar: u32) {
        let facts = self.table.sidecar(sidecar);
        facts.is_closed = true;
        let agent = facts.agent;
        self.send(agent, ToAgent::CloseSidecar { sidecar });
    }

    /// Signs a sidecar's certificate and sends it with its first membership.
    fn join(&mut self, sidecar: u32, members: &Rc<Members>) {
        self.admit(sidecar, members);
        let Some(bound) = self.table.sidecars.get(&sidecar).and_then(|facts| facts.bound.as_ref()) else { return };
        let certificate = self.authority.issue(&bound.certificate_request, SidecarIndex(sidecar), self.validity);
        match certificate {
            Ok(certificate) => {
                let ca_certificate = self.authority.ca_certificate_pem().to_owned();
                let join = Join { certificate, ca_certificate, membership: self.membership(members) };
                self.send_line(sidecar, ToSidecar::Join(join));
            }
            Err(error) => {
                let reason = Code::CertificateNotIssued.mark(&format!("its certificate cannot be issued: {error}"));
                self.lose_sidecar(sidecar, reason);
            }
        }
    }

    /// Gives up a sidecar that cannot be used.
    fn lose_sidecar(&mut self, sidecar: u32, reason: String) {
        let consequence = self.table.fatal(sidecar, reason);
        self.follow(consequence);
        self.close_sidecar(sidecar);
    }

    /// From now on the host may send messages about the sidecar's new workers.
    fn admit(&self, sidecar: u32, members: &Members) {
        let agent = self.table.sidecars.get(&sidecar).map(|facts| facts.agent);
        let Some(rights) = agent.and_then(|agent| self.rights.get(&agent)) else { return };
        for seat in members.seats.iter().filter(|seat| seat.sidecar == sidecar) {
            rights.add_worker(sidecar, seat.worker);
        }
    }

    fn membership(&self, members: &Members) -> Membership {
        let seat = |seat: &super::plan::Seat| messages::Seat { worker: seat.worker, sidecar: seat.sidecar };
        let seats = members.seats.iter().map(seat).collect();
        Membership { number: members.number, peers: self.table.peers(members), seats }
    }

    fn start_worker(&mut self, (worker, sidecar): (u32, u32), members: &Members, is_spare: bool) {
        let settings = self.settings;
        let facts = self.table.sidecar(sidecar);
        let agent = facts.agent;
        let files = facts.serving.clone().zip(facts.token_files.get(&worker).cloned());
        let new = self.table.worker(worker);
        (new.sidecar, new.agent) = (sidecar, agent);
        let Some(((socket_dir, _, web), token_file)) = files else {
            let reason = format!("it has sent no token file for worker {worker}");
            return self.lose_sidecar(sidecar, reason);
        };
        let Some(place) = table::place(members, worker, agent) else { return };
        let identity = Identity {
            job: &settings.job,
            place,
            hostname: &self.table.host_of_agent(agent),
            socket_dir: &socket_dir,
            token_file: &token_file,
            web,
            master: self.table.master(members),
        };
        // Nobody has a state before the first membership.
        let own = environment::of_worker(worker, self.plan.committed().is_some());
        let patience = is_spare.then(environment::patient);
        let environment: Vec<_> = identity.environment().into_iter().chain(own).chain(patience).collect();
        let facts = self.table.agent(agent);
        if !std::mem::replace(&mut facts.is_prepared, true) {
            let (directory, environment) = (settings.directory.clone(), self.environment.clone());
            self.send(agent, ToAgent::Prepare { directory, environment });
        }
        let command = settings.command.clone();
        self.send(agent, ToAgent::StartWorker { worker, sidecar, command, environment, takes_input: false });
    }

    fn stop_worker(&mut self, worker: u32, grace: Duration) {
        let facts = self.table.worker(worker);
        facts.is_stopped = true;
        let (agent, grace_ms) = (facts.agent, milliseconds(grace));
        self.send(agent, ToAgent::StopWorker { worker, grace_ms });
    }

    fn send_line(&mut self, sidecar: u32, line: ToSidecar) {
        let agent = self.table.sidecar(sidecar).agent;
        self.send(agent, ToAgent::Sidecar { sidecar, line });
    }

    /// Sends a command. An agent that does not read is lost.
    pub(super) fn send(&mut self, agent: u32, command: ToAgent) {
        let Some(link) = self.links.get(&agent) else { return };
        if link.try_send(command).is_err() {
            link.kill();
            let reason = "its agent does not read the launcher's messages".to_owned();
            let consequence = self.table.unusable(agent, Code::HostLost, reason);
            self.follow(consequence);
        }
    }
}

/// Commands that an agent has not read yet.
const COMMANDS_MAX: usize = 4_096;
/// The time that an agent has to end what it started.
const AGENT_LEAVE: Duration = Duration::from_secs(30);
