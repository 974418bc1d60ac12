//! Draws faults: a few for each run, each of them soon after an epoch has begun, when most is in flight.

use std::collections::BTreeSet;

use fastrand::Rng;
use ronde_wire::{Rank, SidecarIndex, World};

/// A fault that is repaired after a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A sidecar's process ends. If `seen`, its peers' transports notice immediately; otherwise it falls silent, as
    /// when its host loses power.
    CrashHost { host: usize, seen: bool, for_us: u64 },
    /// A worker's process ends; its sidecar sees that.
    CrashWorker { rank: Rank, for_us: u64 },
    /// A worker is stopped: it neither ends nor sends anything.
    HangWorker { rank: Rank, for_us: u64 },
    /// Two sidecars do not reach each other.
    Cut { a: usize, b: usize, for_us: u64 },
    /// A sidecar's process is stopped and goes on later.
    Pause { host: usize, for_us: u64 },
}

impl Fault {
    pub(super) fn for_us(self) -> u64 {
        match self {
            Self::CrashHost { for_us, .. }
            | Self::CrashWorker { for_us, .. }
            | Self::HangWorker { for_us, .. }
            | Self::Cut { for_us, .. }
            | Self::Pause { for_us, .. } => for_us,
        }
    }
}

/// The faults that are still to come, and the processes that were hit.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// The next one is last.
    waiting: Vec<Fault>,
    /// How many are about to happen.
    imminent: usize,
    /// When all faults are repaired that keep sidecars from receiving or from running their timers.
    pub(super) deaf_until_us: u64,
    /// When all faults are repaired.
    pub(super) mended_us: u64,
    /// Sidecars that may be blamed.
    pub(super) hosts: BTreeSet<SidecarIndex>,
    /// Ranks that may be blamed.
    pub(super) ranks: BTreeSet<Rank>,
}

impl Faults {
    pub(super) fn new(rng: &mut Rng, world: &World) -> Self {
        let count = [0, 0, 1, 1, 2, 3][rng.usize(..6)];
        let hosts = world.sidecars().len();
        Self { waiting: (0..count).map(|_| fault(rng, world, hosts)).collect(), ..Self::default() }
    }

    /// Only workers that crash and return immediately.
    pub(super) fn quick_crashes(rng: &mut Rng, world: &World) -> Self {
        let crash = |rng: &mut Rng| Fault::CrashWorker { rank: any_rank(rng, world), for_us: 1_000 };
        Self { waiting: (0..4).map(|_| crash(rng)).collect(), ..Self::default() }
    }

    /// One sidecar that ends where its peers see it, and is not restarted before every peer must have noticed.
    pub(super) fn one_long_crash(rng: &mut Rng, world: &World) -> Self {
        let host = rng.usize(..world.sidecars().len());
        let crash = Fault::CrashHost { host, seen: true, for_us: 12_000_000 };
        Self { waiting: vec![crash], ..Self::default() }
    }

    /// A sidecar is hostile, and will be replaced.
    pub(super) fn expect(&mut self, sidecar: SidecarIndex, ranks: &BTreeSet<Rank>) {
        self.imminent += 1;
        self.hosts.insert(sidecar);
        self.ranks.extend(ranks);
    }

    pub(super) fn none() -> Self {
        Self::default()
    }

    /// Draws the faults of an epoch that begins, with the time until each of them.
    pub(super) fn next(&mut self, rng: &mut Rng) -> Vec<(u64, Fault)> {
        let count = if rng.u8(..4) == 0 { 2 } else { 1 };
        let chosen: Vec<Fault> = (0..count).filter_map(|_| self.waiting.pop()).collect();
        self.imminent += chosen.len();
        chosen.into_iter().map(|fault| (rng.u64(..6_000), fault)).collect()
    }

    /// Returns the fault that is due, if it still applies.
    pub(super) fn happens(&mut self) {
        self.imminent -= 1;
    }

    /// Notes that something breaks now.
    pub(super) fn note(&mut self, now_us: u64, fault: Fault, world: &World, hosts: &[SidecarIndex]) {
        self.mended_us = self.mended_us.max(now_us + fault.for_us());
        if matches!(fault, Fault::Cut { .. } | Fault::Pause { .. }) {
            self.deaf_until_us = self.deaf_until_us.max(now_us + fault.for_us());
        }
        match fault {
            Fault::CrashHost { host, .. } | Fault::Pause { host, .. } => {
                self.hosts.insert(hosts[host]);
                self.ranks.extend(world.ranks_of(hosts[host]));
            }
            Fault::CrashWorker { rank, .. } | Fault::HangWorker { rank, .. } => {
                self.ranks.insert(rank);
            }
            Fault::Cut { a, b, .. } => self.hosts.extend([hosts[a], hosts[b]]),
        }
    }

    pub(super) fn are_over(&self, now_us: u64) -> bool {
        self.waiting.is_empty() && self.imminent == 0 && now_us >= self.mended_us
    }
}

fn fault(rng: &mut Rng, world: &World, hosts: usize) -> Fault {
    let host = rng.usize(..hosts);
    let rank = any_rank(rng, world);
    // Shorter and longer than every timeout.
    let for_us = [500, 20_000, 900_000, 3_000_000, 8_000_000][rng.usize(..5)] + rng.u64(..1_000);
    match rng.u8(..7) {
        0 | 1 => Fault::CrashHost { host, seen: rng.bool(), for_us },
        2 => Fault::CrashWorker { rank, for_us },
        3 => Fault::HangWorker { rank, for_us },
        4 | 5 if hosts > 1 => Fault::Cut { a: host, b: (host + rng.usize(1..hosts)) % hosts, for_us },
        _ => Fault::Pause { host, for_us },
    }
}

fn any_rank(rng: &mut Rng, world: &World) -> Rank {
    let size = u32::try_from(world.size()).expect("a small world");
    Rank(rng.u32(..size))
}
