//! The records of all sidecars of a run of a job, merged. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ronde_bootstrap::flight::{FlightRecord, RankRecord, RequestRecord};
use ronde_wire::{AnySource, Pair, TensorName, is_set_of_members_name};

/// A process set and a name in it.
pub(super) type Key<'a> = (u32, &'a str);

/// The newest record of each sidecar of one run of a job.
pub(super) struct View<'a> {
    /// By sidecar.
    pub(super) records: BTreeMap<u32, &'a FlightRecord>,
    /// The ranks that records are about.
    pub(super) ranks: BTreeMap<u32, RankView<'a>>,
    /// The sidecar of each rank of the job.
    pub(super) placement: &'a [u32],
    /// The newest epoch.
    pub(super) epoch: u64,
    /// Records that are not used: older ones, those of earlier epochs, and those of other runs and jobs.
    pub(super) left_out: usize,
    sets: BTreeMap<u32, BTreeSet<u32>>,
    /// The newest number of an operation that each record contains, by sidecar.
    newest: BTreeMap<u32, u64>,
    /// The newest number of a completed operation that all ranks of a set have submitted, by set.
    completed: BTreeMap<u32, u64>,
}

/// What is known of a rank.
pub(super) struct RankView<'a> {
    /// The record of its sidecar.
    pub(super) record: &'a FlightRecord,
    /// Its requests.
    pub(super) requests: &'a RankRecord,
    /// The same by their names.
    by_key: BTreeMap<Key<'a>, Vec<&'a RequestRecord>>,
}

impl<'a> View<'a> {
    /// Merges at least one record. Of several of a sidecar the newest counts, and of several runs that with the newest one.
    /// Records of an earlier epoch than the newest are left out: their ranks may have done anything since.
    pub(super) fn of(records: &'a [FlightRecord]) -> Self {
        let reference = records.iter().max_by_key(|record| record.made_us);
        let is_of_run = |record: &&FlightRecord| reference.is_some_and(|reference| is_one_run(reference, record));
        let mut newest: BTreeMap<u32, &FlightRecord> = BTreeMap::new();
        for record in records.iter().filter(is_of_run) {
            let known = newest.entry(record.sidecar).or_insert(record);
            if known.made_us < record.made_us {
                *known = record;
            }
        }
        let epoch = newest.values().map(|record| record.epoch).max().unwrap_or(0);
        newest.retain(|_, record| record.epoch == epoch);
        let placement: &[u32] = newest.values().next().map_or(&[], |record| &record.placement);
        let sets = newest.values().flat_map(|record| &record.sets);
        let sets = sets.map(|set| (set.id, set.ranks.iter().copied().collect())).collect();
        let ranks = newest.values().flat_map(|record| record.ranks.iter().map(move |requests| (*record, requests)));
        let is_current = |rank: u32, record: &FlightRecord| placement.get(rank as usize) == Some(&record.sidecar);
        let ranks = ranks.filter(|(record, requests)| is_current(requests.rank, record));
        let ranks = ranks.map(|(record, requests)| (requests.rank, RankView::new(record, requests))).collect();
        Self {
            left_out: records.len() - newest.len(),
            newest: newest.iter().filter_map(|(at, record)| Some((*at, newest_in(record, epoch)?))).collect(),
            completed: completed(&newest, epoch),
            records: newest,
            ranks,
            placement,
            epoch,
            sets,
        }
    }

    /// Whether the rank has taken part in a completed operation that is newer than everything in its sidecar's record: others
    /// were recorded later, and the rank may have submitted anything since. Sidecars admit operations in the order of their
    /// numbers, so this needs no clock.
    pub(super) fn is_outdated(&self, rank: u32, record: &FlightRecord) -> bool {
        let newest = self.newest.get(&record.sidecar).copied();
        let takes_part = |set: u32| set == 0 || self.sets.get(&set).is_some_and(|ranks| ranks.contains(&rank));
        self.completed.iter().any(|(set, seq)| Some(*seq) > newest && takes_part(*set))
    }

    /// How far apart the records were made, by the clocks of their hosts.
    pub(super) fn spread_us(&self) -> u64 {
        let times = || self.records.values().map(|record| record.made_us);
        times().max().unwrap_or(0) - times().min().unwrap_or(0)
    }

    /// The ranks that take part in an operation; `None` if that is not known.
    pub(super) fn participants(&self, (set, name): Key<'_>, collective: &str) -> Option<BTreeSet<u32>> {
        let name = TensorName::new(name).ok()?;
        if let Some((pair, _)) = Pair::of_message(&name) {
            return Some(BTreeSet::from([pair.from.0, pair.to.0]));
        }
        if !is_of_whole_set(&name, collective) {
            return None;
        }
        match set {
            0 => Some((0..u32::try_from(self.placement.len()).unwrap_or(u32::MAX)).collect()),
            set => self.sets.get(&set).cloned(),
        }
    }

    /// The ranks of which there is no record.
    pub(super) fn unrecorded(&self) -> impl Iterator<Item = u32> {
        (0..).zip(self.placement).map(|(rank, _)| rank).filter(|rank| !self.ranks.contains_key(rank))
    }
}

impl<'a> RankView<'a> {
    fn new(record: &'a FlightRecord, requests: &'a RankRecord) -> Self {
        let mut by_key: BTreeMap<Key<'a>, Vec<&'a RequestRecord>> = BTreeMap::new();
        for request in &requests.requests {
            by_key.entry((request.set, &request.name)).or_default().push(request);
        }
        Self { record, requests, by_key }
    }

    /// The requests of an epoch that wait for other ranks, or that ended while they waited.
    pub(super) fn waiting(&self, epoch: u64) -> impl Iterator<Item = &'a RequestRecord> + use<'a> {
        let made_us = self.record.made_us;
        let requests = self.requests.requests.iter().filter(move |request| request.epoch == epoch);
        requests.filter(move |request| may_lack_ranks(request) && waits(request, made_us))
    }

    /// Whether the rank has joined: others do not wait for it.
    pub(super) fn has_joined(&self, epoch: u64) -> bool {
        self.waiting(epoch).any(|request| request.collective == "join")
    }

    /// Whether it submitted an operation at any time that is recorded.
    pub(super) fn knows(&self, key: Key<'_>) -> bool {
        self.by_key.contains_key(&key)
    }

    /// The number of the operation that its waiting request is for, or a number below it and above the rank's last use of
    /// that name: operations of one name have ascending numbers. If the record has lost the last use, it is the first number
    /// that its sidecar has not admitted, `newest` + 1; `None` if that is not known either.
    pub(super) fn turn(&self, waiting: &RequestRecord, newest: Option<u64>) -> Option<u64> {
        if let Some(ordered) = &waiting.ordered {
            return Some(ordered.seq);
        }
        let key = (waiting.set, waiting.name.as_str());
        let earlier = self.uses(key).iter().filter(|request| request.epoch == waiting.epoch);
        let last = earlier.filter_map(|request| request.ordered.as_ref()).map(|ordered| ordered.seq).max();
        let is_whole = self.requests.requests.len() as u64 >= self.requests.submitted;
        let last = if last.is_none() && !is_whole { newest } else { last };
        last.map(|seq| seq.saturating_add(1)).or(is_whole.then_some(0))
    }

    /// Whether it has submitted the operation that others wait for: its request waits as well, has the number of that
    /// operation or a later one, or has failed just now.
    pub(super) fn has_submitted(&self, key: Key<'_>, epoch: u64, turn: Option<u64>) -> bool {
        let made_us = self.record.made_us;
        let has = |request: &RequestRecord| {
            let is_in_turn = || request.ordered.as_ref().zip(turn).is_some_and(|(ordered, turn)| ordered.seq >= turn);
            (may_lack_ranks(request) && waits(request, made_us)) || is_in_turn() || has_failed_lately(request, made_us)
        };
        self.uses(key).iter().filter(|request| request.epoch == epoch).any(|request| has(request))
    }

    /// Microseconds from a time to the moment of the record.
    pub(super) fn age_us(&self, at_us: u64) -> u64 {
        self.record.made_us.saturating_sub(at_us)
    }

    fn uses<'s>(&'s self, key: Key<'s>) -> &'s [&'a RequestRecord] {
        self.by_key.get(&key).map_or(&[], Vec::as_slice)
    }
}

/// Whether all ranks of its process set submit an operation with this name, as opposed to messages and joins.
fn is_of_whole_set(name: &TensorName, collective: &str) -> bool {
    let is_message = Pair::of_message(name).is_some() || AnySource::of_receive(name).is_some();
    !is_message && !is_set_of_members_name(name) && collective != "join"
}

/// The newest number of an operation that a record contains.
fn newest_in(record: &FlightRecord, epoch: u64) -> Option<u64> {
    let requests = record.ranks.iter().flat_map(|rank| &rank.requests).filter(|request| request.epoch == epoch);
    let of_requests = requests.filter_map(|request| Some(request.ordered.as_ref()?.seq));
    of_requests.chain(newest_admitted(record, epoch)).max()
}

/// The newest number of an operation that a sidecar has admitted.
pub(super) fn newest_admitted(record: &FlightRecord, epoch: u64) -> Option<u64> {
    record.operations.iter().filter(|of| of.epoch == epoch).map(|of| of.seq).max()
}

/// By set, the newest number of a completed operation that all its ranks have submitted: that were negotiated, or that need
/// every rank. A broadcast of a schedule is none, because it is complete at its root as soon as it is sent.
fn completed(records: &BTreeMap<u32, &FlightRecord>, epoch: u64) -> BTreeMap<u32, u64> {
    let mut found: BTreeMap<u32, u64> = BTreeMap::new();
    let requests = records.values().flat_map(|record| &record.ranks).flat_map(|rank| &rank.requests);
    for request in requests.filter(|request| request.epoch == epoch) {
        let is_complete = request.ended.as_ref().is_some_and(|end| end.failed.is_none());
        let Some(ordered) = request.ordered.as_ref().filter(|_| is_complete) else { continue };
        let needs_all = !ordered.scheduled || NEED_ALL.contains(&request.collective.as_str());
        if needs_all
            && TensorName::new(request.name.as_str()).is_ok_and(|name| is_of_whole_set(&name, &request.collective))
        {
            let newest = found.entry(request.set).or_insert(ordered.seq);
            *newest = ordered.seq.max(*newest);
        }
    }
    found
}

/// Whether two records are of one run of a job. Without a launcher only times tell: of the begins of one epoch, else of the
/// records.
fn is_one_run(one: &FlightRecord, other: &FlightRecord) -> bool {
    let is_run = match (one.run.as_str(), other.run.as_str()) {
        ("", _) | (_, "") if one.epoch == other.epoch => one.epoch_began_us.abs_diff(other.epoch_began_us) <= APART_US,
        ("", _) | (_, "") => one.made_us.abs_diff(other.made_us) <= APART_US,
        (run, other) => run == other,
    };
    one.job == other.job && is_run
}

/// Whether ranks may be missing: the request is not ordered, or a schedule has admitted it, which it does as soon as the
/// ranks of one sidecar have submitted it.
fn may_lack_ranks(request: &RequestRecord) -> bool {
    request.ordered.as_ref().is_none_or(|ordered| ordered.scheduled)
}

/// Whether a request that may lack ranks waited at the end of what is recorded.
fn waits(request: &RequestRecord, made_us: u64) -> bool {
    let Some(end) = &request.ended else { return true };
    let Some(failed) = &end.failed else { return false };
    // A request that was withdrawn after its timeout waited until then; an older one is history.
    failed.ends_epoch || (request.withdrawn && has_failed_lately(request, made_us))
}

fn has_failed_lately(request: &RequestRecord, made_us: u64) -> bool {
    let end = request.ended.as_ref().filter(|end| end.failed.is_some());
    end.is_some_and(|end| made_us.saturating_sub(end.at_us) < RECENT_US)
}

/// The collectives that no rank completes before all ranks of the set have submitted them.
const NEED_ALL: [&str; 5] = ["allreduce", "allgather", "alltoall", "reducescatter", "barrier"];
/// How old the end of a withdrawn request may be.
const RECENT_US: u64 = 30_000_000;
/// How far apart the begins of one epoch, or records of several, may be on different sidecars, by clocks that may differ.
const APART_US: u64 = 30_000_000;
