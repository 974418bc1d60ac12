//! Which slots are used: the agents and sidecars of hosts, and what is excluded.

use super::super::exclusion::{CooldownRange, Exclusion, Time};
use super::preemption::Leaving;
use super::{Action, Cause, Notice, Plan, Sidecar, SidecarState, Worker, WorkerState, count};

/// A host that can be used, with its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// How many workers it may run.
    pub slots: u32,
}

/// A host that is or was listed.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) name: String,
    /// How many of its slots are listed now.
    pub(super) listed: u32,
    /// All that were listed at some time.
    pub(super) slots: Vec<Slot>,
    pub(super) agent: Option<Agent>,
    pub(super) exclusion: Exclusion,
    /// Whether the user has drained it.
    pub(super) is_drained: bool,
    /// Until when it is left because it, or one of its workers, got a notice of preemption.
    pub(super) leaving: Option<Leaving>,
}

/// A slot of a host.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The worker that has it, until its process has ended.
    pub(super) worker: Option<u32>,
    pub(super) exclusion: Exclusion,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Agent {
    pub(super) number: u32,
    /// When it has to have answered, if it has not.
    due: Option<Time>,
}

impl Host {
    /// Whether it can be used.
    pub(super) fn is_listed(&self) -> bool {
        self.listed > 0
    }

    /// How many of its slots the job may have.
    pub(super) fn offered(&self) -> usize {
        if self.is_drained || self.leaving.is_some() { 0 } else { self.listed as usize }
    }

    /// When its agent has to have answered, and when it or a slot can be used again.
    pub(super) fn deadlines(&self, now: Time) -> impl Iterator<Item = Time> {
        let agent = self.agent.and_then(|agent| agent.due);
        let again = if self.is_listed() { self.exclusion.usable_from(now) } else { None };
        let slots =
            self.slots.iter().take(self.listed as usize).filter_map(move |slot| slot.exclusion.usable_from(now));
        let leaving = self.leaving.map(|leaving| leaving.until);
        agent.into_iter().chain(again).chain(slots).chain(leaving)
    }

    /// The slots that a new worker may have now.
    fn free(&self, now: Time) -> Vec<usize> {
        if !self.exclusion.usable(now) {
            return Vec::new();
        }
        let slots = self.slots.iter().enumerate().take(self.offered());
        slots.filter(|(_, slot)| slot.worker.is_none() && slot.exclusion.usable(now)).map(|(slot, _)| slot).collect()
    }

    pub(super) fn can_have(&self, slot: usize) -> bool {
        slot < self.offered()
    }
}

impl Plan {
    /// Takes the list of hosts. Those that are not in it keep their workers until a change removes them.
    pub(super) fn list(&mut self, listed: Vec<Listed>) {
        self.hosts.iter_mut().for_each(|host| host.listed = 0);
        for Listed { name, slots } in listed {
            let known = self.hosts.iter().position(|host| host.name == name);
            let index = known.unwrap_or(self.hosts.len());
            if known.is_none() {
                if self.hosts.len() >= HOSTS_MAX {
                    continue;
                }
                let exclusion = Exclusion::default();
                let (slots, is_drained) = (Vec::new(), false);
                self.hosts.push(Host { name, listed: 0, slots, agent: None, exclusion, is_drained, leaving: None });
            }
            let host = &mut self.hosts[index];
            host.listed = slots.min(self.bounds.max.saturating_add(self.bounds.spares));
            let slots = host.slots.len().max(host.listed as usize);
            host.slots.resize_with(slots, Slot::default);
        }
        self.stop_unwanted();
    }

    pub(super) fn agent_up(&mut self, agent: u32) {
        let agents = self.hosts.iter_mut().filter_map(|host| host.agent.as_mut());
        agents.filter(|known| known.number == agent).for_each(|known| known.due = None);
    }

    /// What an agent started has ended with it.
    pub(super) fn agent_lost(&mut self, now: Time, agent: u32) {
        let lost = |(_, sidecar): &(&u32, &Sidecar)| sidecar.agent == agent;
        let disturbs = self.workers.iter().any(|(number, worker)| worker.agent == agent && self.has_rank(*number));
        let host = self.hosts.iter().position(|host| host.agent.is_some_and(|known| known.number == agent));
        let sidecars: Vec<u32> = self.sidecars.iter().filter(lost).map(|(index, _)| *index).collect();
        self.sidecars.retain(|sidecar, _| !sidecars.contains(sidecar));
        let hosts = &mut self.hosts;
        self.workers.retain(|_, worker| {
            let has_ended = worker.agent == agent;
            if has_ended {
                hosts[worker.host].slots[worker.slot].worker = None;
            }
            !has_ended
        });
        if let Some(host) = host {
            self.hosts[host].agent = None;
            self.exclude_host(now, host, CooldownRange::HOST);
            self.note_loss(now, Cause::Agent(agent), disturbs);
        }
    }

    /// Gives up agents that have not answered in time.
    pub(super) fn check_agents(&mut self, now: Time) {
        let agents = self.hosts.iter().filter_map(|host| host.agent);
        let late = agents.filter(|agent| agent.due.is_some_and(|due| due <= now));
        let late: Vec<u32> = late.map(|agent| agent.number).collect();
        for agent in late {
            self.actions.push_back(Action::Notice(Notice::SilentAgent { agent }));
            self.actions.push_back(Action::DropAgent { agent });
            self.agent_lost(now, agent);
        }
    }

    /// Starts the agents and sidecars that free slots need, no more than the job may have workers.
    pub(super) fn fill(&mut self, now: Time) {
        for (host, free) in self.assigned(now) {
            let up = match self.hosts[host].agent {
                Some(agent) if agent.due.is_none() => agent.number,
                Some(_) => continue,
                None => {
                    self.start_agent(now, host);
                    continue;
                }
            };
            let open = self.sidecars.iter().filter(|(index, sidecar)| sidecar.host == host && self.is_open(**index));
            let room: usize = open.map(|(index, _)| self.room(*index)).sum();
            if free.len() > room && self.next_sidecar < self.bounds.sidecars_max {
                let sidecar = self.next_sidecar;
                self.next_sidecar += 1;
                let due = Some((now + self.bounds.start_timeout, "to open its ports"));
                let state = SidecarState::Starting;
                let new = Sidecar { host, agent: up, state, due, entered: 0, prepared: 0, was_committed: false };
                self.sidecars.insert(sidecar, new);
                self.actions.push_back(Action::StartSidecar { sidecar, agent: up });
            }
        }
    }

    fn start_agent(&mut self, now: Time, host: usize) {
        let number = self.next_agent;
        self.next_agent += 1;
        self.hosts[host].agent = Some(Agent { number, due: Some(now + self.bounds.start_timeout) });
        self.actions.push_back(Action::StartAgent { agent: number, host: self.hosts[host].name.clone() });
    }

    /// The free slots that new workers get, by host: no more than the job may have workers.
    pub(super) fn assigned(&self, now: Time) -> Vec<(usize, Vec<usize>)> {
        let staying = self.workers.keys().filter(|worker| self.is_live(**worker) && self.is_wanted(**worker));
        let wanted = self.wanted_size.saturating_add(self.spares());
        let mut budget = wanted.saturating_sub(count(staying)) as usize;
        if self.has_no_resets() {
            budget = 0;
        }
        let hosts = self.hosts.iter().enumerate().map(|(index, host)| {
            let mut free = host.free(now);
            free.truncate(budget);
            budget -= free.len();
            (index, free)
        });
        hosts.filter(|(_, free)| !free.is_empty()).collect()
    }

    /// Of those, each with a sidecar that can serve it now.
    pub(super) fn ready(&self, now: Time) -> Vec<(usize, usize, u32)> {
        let mut ready = Vec::new();
        for (host, free) in self.assigned(now) {
            let can_serve = |index: u32, sidecar: &Sidecar| {
                let is_ready = matches!(sidecar.state, SidecarState::Bound | SidecarState::Serving);
                sidecar.host == host && is_ready && self.is_open(index)
            };
            let sidecars = self.sidecars.iter().filter(|(index, sidecar)| can_serve(**index, sidecar));
            let places = sidecars.flat_map(|(index, _)| std::iter::repeat_n(*index, self.room(*index)));
            ready.extend(free.into_iter().zip(places).map(|(slot, sidecar)| (host, slot, sidecar)));
        }
        ready
    }

    /// Whether a host or sidecar that free slots need is about to be ready.
    pub(super) fn is_starting(&self, now: Time) -> bool {
        self.assigned(now).iter().any(|(host, _)| {
            let agent = self.hosts[*host].agent.is_some_and(|agent| agent.due.is_some());
            let is_unready = |sidecar: &Sidecar| matches!(sidecar.state, SidecarState::Starting | SidecarState::Joined);
            agent || self.sidecars.values().any(|sidecar| sidecar.host == *host && is_unready(sidecar))
        })
    }

    /// Ends sidecars that serve nobody and agents that nobody needs.
    pub(super) fn tidy(&mut self, now: Time) {
        let assigned: Vec<usize> = self.assigned(now).into_iter().map(|(host, _)| host).collect();
        let serves = |index: u32| self.workers.values().any(|worker| worker.sidecar == index);
        let is_needed = |index: u32, sidecar: &Sidecar| {
            serves(index) || (assigned.contains(&sidecar.host) && !sidecar.was_committed) || self.takes_part(index)
        };
        let is_open = |sidecar: &Sidecar| sidecar.state != SidecarState::Closing;
        let unused = self.sidecars.iter().filter(|(index, sidecar)| is_open(sidecar) && !is_needed(**index, sidecar));
        let unused: Vec<u32> = unused.map(|(index, _)| *index).collect();
        unused.into_iter().for_each(|sidecar| self.close_sidecar(sidecar));
        for host in (0..self.hosts.len()).filter(|host| !assigned.contains(host)) {
            let Some(agent) = self.hosts[host].agent else { continue };
            let has_sidecar = self.sidecars.values().any(|sidecar| sidecar.agent == agent.number);
            if !has_sidecar && !self.workers.values().any(|worker| worker.agent == agent.number) {
                self.hosts[host].agent = None;
                self.actions.push_back(Action::DropAgent { agent: agent.number });
            }
        }
    }

    /// Ends a sidecar that no membership needs.
    pub(super) fn close_sidecar(&mut self, index: u32) {
        if let Some(sidecar) = self.sidecars.get_mut(&index).filter(|sidecar| sidecar.state != SidecarState::Closing) {
            (sidecar.state, sidecar.due) = (SidecarState::Closing, None);
            self.actions.push_back(Action::CloseSidecar { sidecar: index });
        }
    }

    /// A sidecar has ended.
    pub(super) fn sidecar_lost(&mut self, now: Time, index: u32) {
        let Some(sidecar) = self.sidecars.remove(&index) else { return };
        if sidecar.state != SidecarState::Closing {
            self.lose_workers_of(now, index, sidecar.host, CooldownRange::HOST);
        }
    }

    /// A sidecar that does not answer counts as lost.
    pub(super) fn give_up_sidecar(&mut self, now: Time, index: u32, cooldown: CooldownRange) {
        let Some(sidecar) = self.sidecars.get(&index) else { return };
        let host = sidecar.host;
        self.close_sidecar(index);
        self.lose_workers_of(now, index, host, cooldown);
    }

    fn lose_workers_of(&mut self, now: Time, sidecar: u32, host: usize, cooldown: CooldownRange) {
        let served = |(_, worker): &(&u32, &Worker)| worker.sidecar == sidecar;
        let lost: Vec<u32> = self.workers.iter().filter(served).map(|(worker, _)| *worker).collect();
        let disturbs = lost.iter().any(|worker| self.has_rank(*worker));
        lost.into_iter().for_each(|worker| self.stop_worker(worker));
        self.exclude_host(now, host, cooldown);
        self.note_loss(now, Cause::Sidecar(sidecar), disturbs);
    }

    /// Whether a worker has a rank in the committed membership and has not been removed since.
    pub(super) fn has_rank(&self, worker: u32) -> bool {
        self.committed.as_ref().is_some_and(|members| members.contains(worker)) && !self.is_leaving(worker)
    }

    fn takes_part(&self, sidecar: u32) -> bool {
        let has = |members: &super::Members| members.seats.iter().any(|seat| seat.sidecar == sidecar);
        let in_change = self.change.as_ref().is_some_and(|change| has(&change.members));
        in_change || self.committed.as_ref().is_some_and(|members| has(members))
    }

    /// Whether new workers may be placed on a sidecar. One that was in a membership, and is not in the next one, ends.
    fn is_open(&self, index: u32) -> bool {
        let Some(sidecar) = self.sidecars.get(&index) else { return false };
        let keeps = |(number, worker): (&u32, &Worker)| {
            let stays = self.has_rank(*number) || matches!(worker.state, WorkerState::Attached(_));
            worker.sidecar == index && stays && worker.state != WorkerState::Stopping
        };
        sidecar.state != SidecarState::Closing && (!sidecar.was_committed || self.workers.iter().any(keeps))
    }

    fn room(&self, sidecar: u32) -> usize {
        let served = self.workers.values().filter(|worker| worker.sidecar == sidecar).count();
        self.bounds.local_max.saturating_sub(served)
    }

    /// How many slots there are now: those of workers, and free ones.
    pub(super) fn usable_count(&self, now: Time) -> u32 {
        let free: usize = self.hosts.iter().map(|host| host.free(now).len()).sum();
        self.live_count().saturating_add(u32::try_from(free).unwrap_or(u32::MAX)).min(self.bounds.max)
    }

    /// How many slots of listed hosts can be used now or later.
    pub(super) fn potential(&self) -> u32 {
        let of_host = |host: &Host| {
            let slots = host.slots.iter().take(host.offered());
            let usable = slots.filter(|slot| slot.worker.is_some() || slot.exclusion.is_usable_ever());
            if host.exclusion.is_usable_ever() { count(usable) } else { 0 }
        };
        self.hosts.iter().map(of_host).fold(0, u32::saturating_add)
    }

    /// Whether the slot of a worker is still listed.
    pub(super) fn is_wanted(&self, worker: u32) -> bool {
        self.workers.get(&worker).is_some_and(|worker| self.hosts[worker.host].can_have(worker.slot))
    }

    /// Counts a failure of the worker in a slot.
    pub(super) fn strike_slot(&mut self, now: Time, worker: &Worker, ran: Time) {
        let (seed, range) = (self.seed_of(worker.host, worker.slot), self.bounds.cooldown);
        let exclusion = &mut self.hosts[worker.host].slots[worker.slot].exclusion;
        if exclusion.worker_failed(now, ran, range, seed) {
            self.report_slot(now, worker);
        }
    }

    /// Excludes the slot of a worker.
    pub(super) fn exclude_slot(&mut self, now: Time, worker: &Worker) {
        let (seed, range) = (self.seed_of(worker.host, worker.slot), self.bounds.cooldown);
        self.hosts[worker.host].slots[worker.slot].exclusion.exclude(now, range, seed);
        self.report_slot(now, worker);
    }

    fn report_slot(&mut self, now: Time, worker: &Worker) {
        let host = &self.hosts[worker.host];
        let cooldown = host.slots[worker.slot].exclusion.usable_from(now).map(|from| from - now);
        let (host, slot) = (host.name.clone(), u32::try_from(worker.slot).unwrap_or(u32::MAX));
        self.actions.push_back(Action::Notice(Notice::SlotExcluded { host, slot, cooldown }));
    }

    /// Excludes a host, for the cool-down that the user wants, or else this one.
    pub(super) fn exclude_host(&mut self, now: Time, host: usize, cooldown: CooldownRange) {
        let (seed, range) = (self.seed_of(host, usize::MAX), self.bounds.cooldown.unwrap_or(cooldown));
        let host = &mut self.hosts[host];
        host.exclusion.exclude(now, Some(range), seed);
        let cooldown = host.exclusion.usable_from(now).map(|from| from - now);
        if host.is_listed() {
            self.actions.push_back(Action::Notice(Notice::HostExcluded { host: host.name.clone(), cooldown }));
        }
    }

    fn seed_of(&self, host: usize, slot: usize) -> u64 {
        let place = (host as u64) << 32 | (slot as u64 & 0xffff_ffff);
        self.bounds.seed ^ place.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

/// The most hosts in the life of a job.
const HOSTS_MAX: usize = 4_096;
