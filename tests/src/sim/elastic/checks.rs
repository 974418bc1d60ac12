//! What must hold.

use std::collections::BTreeMap;

use ronde_wire::{Epoch, Seq};

/// Everything that was observed and restricts what may follow.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    /// The membership of each epoch.
    epochs: BTreeMap<Epoch, u64>,
    /// The result of each operation: one bit for each contribution.
    results: BTreeMap<(Epoch, Seq), u64>,
    /// The workers of each membership, as bits.
    memberships: BTreeMap<u64, u64>,
}

impl Oracle {
    /// A membership has these workers.
    pub(super) fn note_membership(&mut self, number: u64, workers: &[u32]) {
        self.memberships.insert(number, workers.iter().fold(0, |bits, worker| bits | bit(*worker)));
    }

    /// An epoch begins on a sidecar.
    pub(super) fn begin(&mut self, epoch: Epoch, membership: u64) -> Result<(), String> {
        let of = *self.epochs.entry(epoch).or_insert(membership);
        if of != membership {
            return Err(format!("{epoch} is of membership {of}, and begins in membership {membership}, too"));
        }
        let before = self.epochs.range(..epoch).map(|(_, of)| *of).max().unwrap_or(0);
        let after = self.epochs.range(epoch..).map(|(_, of)| *of).min().unwrap_or(u64::MAX);
        if before > membership || after < membership {
            return Err(format!(
                "{epoch} of membership {membership} is among epochs of memberships {before} and {after}"
            ));
        }
        Ok(())
    }

    /// A rank receives a result within a membership.
    pub(super) fn result(&mut self, (epoch, seq): (Epoch, Seq), membership: u64, result: u64) -> Result<(), String> {
        let expected = self.memberships.get(&membership).copied().unwrap_or(0);
        if result != expected {
            return Err(format!(
                "{seq} of {epoch} has the contributions {result:b}, but membership {membership} has {expected:b}"
            ));
        }
        let first = *self.results.entry((epoch, seq)).or_insert(result);
        if first != result {
            return Err(format!("{seq} of {epoch} has the results {first:b} and {result:b}"));
        }
        Ok(())
    }
}

/// A worker's contribution: its own bit. A run has fewer workers than bits.
pub(super) fn bit(worker: u32) -> u64 {
    1_u64.checked_shl(worker).unwrap_or(0)
}
