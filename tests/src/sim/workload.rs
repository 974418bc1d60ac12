//! The requests of all ranks in one epoch, as a function of seed and epoch.

use std::collections::BTreeSet;

use fastrand::Rng;
use ronde_wire::{Epoch, Rank, World};

use super::item::{InjectedError, Item, Kind};
use super::mix::Mix;
use super::saboteur::Saboteur;

/// The workload of one epoch.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) epoch: Epoch,
    pub(super) items: Vec<Item>,
    /// The rank that shuts down when it has all its answers, which ends the epoch.
    pub(super) leaver: Option<Rank>,
    /// The rank that never submits an item that all others wait for, which ends the epoch.
    pub(super) staller: Option<(Rank, usize)>,
    /// Values are any floats, whose sums depend on the order of addition.
    pub(super) any_floats: bool,
    /// Whether some ranks deviate from the order of a loop.
    pub(super) wild: bool,
}

/// The parameters of workloads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recipe {
    pub(super) seed: u64,
    /// Epochs up to this one end with a shutdown or a stall.
    pub(super) leavers_until: Epoch,
    pub(super) any_floats: bool,
    pub(super) injected: bool,
    /// Whether an engine ends an epoch that stalls.
    pub(super) stalls: bool,
    /// The largest result allowed.
    pub(super) result_bytes_max: u64,
    /// Whether ranks submit the same steps repeatedly.
    pub(super) loops: Loops,
    /// Whether the mix favours what a planted bug needs.
    pub(super) saboteur: Option<Saboteur>,
}

/// How much of a workload repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loops {
    None,
    /// Some of it.
    Some,
    Only,
}

impl Workload {
    pub(super) fn new(recipe: &Recipe, world: &World, epoch: Epoch) -> Self {
        let mut rng = Rng::with_seed(recipe.seed.wrapping_mul(0x9E37_79B9) ^ epoch.0);
        let items = Mix::new(&mut rng, recipe, world).items();
        let mut leaver = (epoch <= recipe.leavers_until).then(|| world.sets()[0].ranks[rng.usize(..world.size())]);
        let mut staller = None;
        if leaver.is_some() && recipe.stalls {
            staller = stall(&mut rng, &items);
            leaver = leaver.filter(|_| staller.is_none());
        }
        let wild = rng.u8(..3) == 0 || recipe.saboteur.is_some();
        Self { epoch, items, leaver, staller, any_floats: recipe.any_floats, wild }
    }

    /// Whether the epoch lasts until something breaks.
    pub(super) fn lasts(&self) -> bool {
        self.leaver.is_none() && self.staller.is_none()
    }

    /// Returns the items that a rank submits.
    pub(super) fn of(&self, rank: Rank) -> impl Iterator<Item = usize> + '_ {
        let stalled = self.staller.filter(|(staller, _)| *staller == rank).map(|(_, item)| item);
        let asks = move |(index, item): &(usize, &Item)| item.askers.contains(&rank) && stalled != Some(*index);
        self.items.iter().enumerate().filter(asks).map(|(index, _)| index)
    }
}

/// Chooses a rank that does not submit an item on which nothing else depends. None where ranks may join instead.
fn stall(rng: &mut Rng, items: &[Item]) -> Option<(Rank, usize)> {
    let awaited: BTreeSet<usize> =
        items.iter().flat_map(|item| item.after.iter().chain(&item.asked_before)).copied().collect();
    let plain = |index: &usize| {
        let item = &items[*index];
        let undisturbed =
            !item.must_fail() && item.injected == InjectedError::None && item.excuse.is_none() && item.is_performed();
        undisturbed && item.group.is_none() && item.askers.len() > 1 && !awaited.contains(index)
    };
    let candidates: Vec<usize> = (0..items.len()).filter(plain).collect();
    if candidates.is_empty() || items.iter().any(|item| item.kind == Kind::Join) {
        return None;
    }
    let chosen = candidates[rng.usize(..candidates.len())];
    let askers = &items[chosen].askers;
    Some((askers[rng.usize(..askers.len())], chosen))
}
