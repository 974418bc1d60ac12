//! The launcher: the real plan of memberships ([`ronde_launcher::memberships`]), and what is needed to carry it out.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ronde_launcher::memberships::{Bounds, CooldownRange, Event, Listed, Members, Plan};

/// To a sidecar.
#[derive(Clone, Debug)]
pub(super) enum ToSidecar {
    Change(Seats),
    Enter(u64),
    Commit(u64),
}

/// To the launcher.
#[derive(Clone, Debug)]
pub(super) enum ToLauncher {
    /// What the plan has to know.
    Plan(Event),
    /// A host appears, with so many slots.
    HostFound { slots: u32 },
    /// The host of a sidecar has another slot.
    SlotFound { host: usize },
}

/// A membership: for each rank a worker and its sidecar.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seats {
    pub(super) number: u64,
    pub(super) seats: Vec<(u32, usize)>,
}

impl Seats {
    /// A membership of one worker, for a sidecar that has not started.
    pub(super) fn of(host: usize) -> Self {
        Self { number: 0, seats: vec![(0, host)] }
    }

    pub(super) fn workers(&self) -> Vec<u32> {
        self.seats.iter().map(|(worker, _)| *worker).collect()
    }
}

impl From<&Members> for Seats {
    fn from(members: &Members) -> Self {
        let seats = members.seats.iter().map(|seat| (seat.worker, seat.sidecar as usize));
        Self { number: members.number, seats: seats.collect() }
    }
}

/// The plan, and the hosts, agents and sidecars that exist.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) plan: Plan,
    /// The hosts that the discovery script would print.
    pub(super) listed: Vec<Listed>,
    /// The host of each agent that runs.
    pub(super) agents: BTreeMap<u32, String>,
    /// The agent of each sidecar that was started.
    pub(super) agent_of: BTreeMap<usize, u32>,
    /// Agents that got a notice of preemption.
    pub(super) leaving: BTreeSet<u32>,
    /// Sidecars that have joined.
    pub(super) started: BTreeSet<usize>,
    /// When the last message to a sidecar arrives.
    pub(super) last_us: BTreeMap<usize, u64>,
    /// When the plan is called again at the latest.
    pub(super) tick_us: Option<u64>,
}

impl Launcher {
    /// A job without hosts.
    pub(super) fn new(seed: u64) -> Self {
        let bounds = Bounds {
            first: 1,
            min: 1,
            max: 1_000,
            elastic_timeout: Duration::from_secs(3_600),
            reset_limit: None,
            // Excluded slots and hosts are used again while the job is watched.
            cooldown: Some(CooldownRange { min: Duration::from_millis(500), max: Duration::from_secs(2) }),
            has_discovery: true,
            start_timeout: Duration::from_secs(30),
            attach_timeout: Duration::from_secs(30),
            answer_timeout: Duration::from_secs(15),
            replaces_stalled: false,
            spares: 0,
            preemption_notice: Duration::from_secs(3),
            local_max: 64,
            sidecars_max: 1_000,
            seed,
        };
        Self {
            plan: Plan::new(bounds),
            listed: Vec::new(),
            agents: BTreeMap::new(),
            agent_of: BTreeMap::new(),
            leaving: BTreeSet::new(),
            started: BTreeSet::new(),
            last_us: BTreeMap::new(),
            tick_us: None,
        }
    }

    /// The committed membership.
    pub(super) fn current(&self) -> Seats {
        self.plan.committed().map(|members| Seats::from(&**members)).unwrap_or_default()
    }

    /// Adds a host.
    pub(super) fn add_host(&mut self, slots: u32) {
        let name = format!("host-{}", self.listed.len());
        self.listed.push(Listed { name, slots });
    }

    /// Adds a slot to the host of a sidecar.
    pub(super) fn add_slot(&mut self, sidecar: usize) {
        let name = self.agent_of.get(&sidecar).and_then(|agent| self.agents.get(agent));
        let host = name.and_then(|name| self.listed.iter_mut().find(|listed| listed.name == *name));
        host.into_iter().for_each(|host| host.slots += 1);
    }
}
