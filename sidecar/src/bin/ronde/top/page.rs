//! A sidecar's status page as types. A field that another version lacks has its default.

use std::collections::BTreeMap;

use anyhow::ensure;
use ronde_engine::STATUS_ENTRIES_MAX;
use ronde_wire::limits;
use serde::Deserialize;

/// The page, with what is shown here.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Page {
    pub(super) job: String,
    pub(super) version: String,
    pub(super) up_ms: u64,
    pub(super) transport: String,
    pub(super) traffic: Traffic,
    pub(super) sessions: Sessions,
    pub(super) plugins: Plugins,
    pub(super) gpu: Option<Gpu>,
    pub(super) paths: Vec<Path>,
    pub(super) sidecar: u32,
    pub(super) coordinator: u32,
    pub(super) phase: String,
    pub(super) epoch: u64,
    pub(super) world_size: usize,
    pub(super) placement: Vec<u32>,
    pub(super) ranks_in_epoch: Vec<u32>,
    pub(super) ranks_waiting: Vec<u32>,
    pub(super) ranks_missing: Vec<u32>,
    pub(super) ranks_joined: Vec<u32>,
    pub(super) sets: usize,
    pub(super) process_sets: Vec<ProcessSet>,
    pub(super) pending: usize,
    pub(super) pending_requests: Vec<Pending>,
    pub(super) negotiating: usize,
    pub(super) waiting_tensors: Vec<Waiting>,
    pub(super) last_to_be_ready: Vec<u64>,
    pub(super) waited_for_us: Vec<u64>,
    pub(super) autotune: Option<Autotune>,
    pub(super) schedule: Option<Schedule>,
    pub(super) in_flight: usize,
    pub(super) suspect_sidecars: Vec<u32>,
    pub(super) suspect_ranks: Vec<u32>,
    pub(super) notes: Vec<String>,
    pub(super) last_failure: Option<Failure>,
    pub(super) links: Vec<Link>,
    pub(super) stats: Stats,
}

/// Totals since the sidecar's start.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Traffic {
    pub(super) sealed_bytes: u64,
    pub(super) opened_bytes: u64,
    pub(super) operations: u64,
    pub(super) contributed_bytes: u64,
    pub(super) published_bytes: u64,
}

/// The attached workers.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Sessions {
    pub(super) live: usize,
    pub(super) over_ring: usize,
}

/// What plugins have done.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Plugins {
    pub(super) spans: u64,
    pub(super) faults: u64,
    pub(super) time_us: u64,
    pub(super) state_bytes: u64,
}

/// What the sidecar does on GPUs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Gpu {
    pub(super) unavailable: Option<String>,
    pub(super) gpus: usize,
    pub(super) nccl: String,
    pub(super) nccl_operations: u64,
    pub(super) two_level_operations: u64,
    pub(super) copied_operations: u64,
}

/// The connections of a link that is up.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Path {
    pub(super) peer: u32,
    pub(super) carrier: String,
    pub(super) data_carrier: String,
    pub(super) address: String,
    pub(super) sent_bytes: u64,
    pub(super) received_bytes: u64,
    pub(super) packets_lost: u64,
    pub(super) packets_sent: u64,
    pub(super) cipher: Option<String>,
    pub(super) key_exchange: Option<String>,
    pub(super) certificate: Option<Certificate>,
    pub(super) peer_certificate: Option<Certificate>,
}

/// A certificate of a connection.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Certificate {
    pub(super) until: String,
}

/// A control link.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Link {
    pub(super) peer: u32,
    pub(super) up: bool,
    pub(super) round_trip_us: Option<u64>,
}

/// A request of a local rank.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Pending {
    pub(super) rank: u32,
    /// The number of its process set; 0 is that of all ranks.
    pub(super) set: u32,
    pub(super) name: String,
    pub(super) collective: String,
    pub(super) ordered: bool,
    pub(super) scheduled: bool,
    pub(super) age_ms: u64,
}

/// A process set other than that of all ranks.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ProcessSet {
    pub(super) id: u32,
    pub(super) ranks: Vec<u32>,
}

/// An operation that waits for ranks.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Waiting {
    pub(super) name: String,
    pub(super) collective: String,
    pub(super) missing: Vec<u32>,
    pub(super) age_ms: u64,
}

/// The search for better settings.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Autotune {
    pub(super) stage: String,
    pub(super) samples: u64,
    pub(super) samples_max: u64,
}

/// The steps that run without negotiation.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Schedule {
    pub(super) operations: usize,
    pub(super) tensors: usize,
    pub(super) steps: u64,
}

/// Why the last epoch ended.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Failure {
    pub(super) reason: String,
}

/// Counters of the engine.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Stats {
    pub(super) failed: u64,
    pub(super) tensors_executed: u64,
    pub(super) executed: u64,
    pub(super) epochs: u64,
    pub(super) ordered_operations: u64,
    pub(super) ordered_tensors: u64,
    pub(super) fused_tensors: u64,
    pub(super) mismatches: u64,
    pub(super) waited_here_us: BTreeMap<u32, u64>,
}

impl Page {
    /// Checks that it has no more than a sidecar shows: anything may serve at its port.
    ///
    /// # Errors
    /// What it has too many of.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let ranks = [
            &self.placement,
            &self.ranks_in_epoch,
            &self.ranks_waiting,
            &self.ranks_missing,
            &self.ranks_joined,
            &self.suspect_ranks,
        ];
        let sets = self.process_sets.iter().map(|set| set.ranks.len());
        let missing = self.waiting_tensors.iter().map(|waiting| waiting.missing.len()).chain(sets);
        let counts = [self.last_to_be_ready.len(), self.waited_for_us.len(), self.stats.waited_here_us.len()];
        let ranks = ranks.into_iter().map(Vec::len).chain(missing).chain(counts).max().unwrap_or(0);
        let sidecars = [self.links.len(), self.paths.len(), self.suspect_sidecars.len()].into_iter().max().unwrap_or(0);
        let entries =
            [self.pending_requests.len(), self.waiting_tensors.len(), self.notes.len(), self.process_sets.len()];
        let entries = entries.into_iter().max().unwrap_or(0);
        let found = [
            (ranks, limits::RANKS_MAX, "ranks"),
            (sidecars, limits::SIDECARS_MAX, "sidecars"),
            (entries, STATUS_ENTRIES_MAX, "requests, waiting operations, notes or process sets"),
        ];
        for (count, most, what) in found {
            ensure!(count <= most, "it lists {count} {what}, but at most {most} are possible");
        }
        Ok(())
    }
}

/// An operation in words. A name that ronde made begins with its collective.
pub(super) fn operation(collective: &str, name: &str) -> String {
    let collective = collective.to_ascii_lowercase();
    let is_named = name.strip_prefix(&collective).is_some_and(|rest| rest.starts_with('.'));
    if is_named { name.to_owned() } else { format!("{collective} {name}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_with_more_than_a_sidecar_shows_is_refused() {
        let reason = |page: Page| page.check().map_err(|error| error.to_string());
        assert_eq!(reason(Page::default()), Ok(()));
        let ranks = "it lists 4097 ranks, but at most 4096 are possible";
        assert_eq!(reason(Page { placement: vec![0; 4_097], ..Page::default() }), Err(ranks.to_owned()));
        let waiting = Waiting { missing: vec![0; 4_097], ..Waiting::default() };
        assert_eq!(reason(Page { waiting_tensors: vec![waiting], ..Page::default() }), Err(ranks.to_owned()));
        let process_sets = vec![ProcessSet { ranks: vec![0; 4_097], ..ProcessSet::default() }];
        assert_eq!(reason(Page { process_sets, ..Page::default() }), Err(ranks.to_owned()));
        let requests = vec![Pending::default(); 101];
        let entries = "it lists 101 requests, waiting operations, notes or process sets, but at most 100 are possible";
        assert_eq!(reason(Page { pending_requests: requests, ..Page::default() }), Err(entries.to_owned()));
        let links = vec![Link::default(); limits::SIDECARS_MAX + 1];
        assert!(reason(Page { links, ..Page::default() }).expect_err("too many").contains("sidecars"));
    }
}
