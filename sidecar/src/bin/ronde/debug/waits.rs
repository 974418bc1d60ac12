//! Finds the operations that wait for ranks, and which ranks these are. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ronde_bootstrap::flight::{FlightRecord, RequestRecord, WaitingRecord};

use super::analysis::{counted, duration, label, last_call, listed};
use super::view::{Key, RankView, View, newest_admitted};

/// The operations that wait for ranks.
pub(super) struct Waits<'v, 'a> {
    view: &'v View<'a>,
    /// Oldest first, by their first submission.
    operations: Vec<Wait<'a>>,
}

/// An operation that some ranks wait for.
struct Wait<'a> {
    key: Key<'a>,
    collective: &'a str,
    first_us: u64,
    /// See [`RankView::turn`]: the latest one of the ranks that wait.
    turn: Option<u64>,
    /// Its number, if a schedule has admitted it somewhere.
    scheduled: Option<u64>,
    /// The ranks that wait, with their requests.
    waiting: BTreeMap<u32, &'a RequestRecord>,
    /// The ranks that did not submit it, as far as there are records of them.
    missing: BTreeSet<u32>,
    /// The ranks of which there is no record.
    unrecorded: BTreeSet<u32>,
    /// The ranks whose record was made too early to show whether they submitted it.
    outdated: BTreeSet<u32>,
}

impl<'a> Wait<'a> {
    fn new(request: &'a RequestRecord) -> Self {
        Self {
            key: (request.set, &request.name),
            collective: &request.collective,
            first_us: request.submitted_us,
            turn: None,
            scheduled: None,
            waiting: BTreeMap::new(),
            missing: BTreeSet::new(),
            unrecorded: BTreeSet::new(),
            outdated: BTreeSet::new(),
        }
    }

    fn add(&mut self, rank: u32, of: &RankView<'_>, request: &'a RequestRecord) {
        self.first_us = self.first_us.min(request.submitted_us);
        self.turn = self.turn.max(of.turn(request, newest_admitted(of.record, request.epoch)));
        self.scheduled = self.scheduled.or(request.ordered.as_ref().map(|ordered| ordered.seq));
        self.waiting.insert(rank, request);
    }

    /// Finds the participants that are missing, and those of which there is no record.
    fn find_missing(&mut self, view: &View<'_>) {
        let participants = view.participants(self.key, self.collective).unwrap_or_default();
        for rank in participants.into_iter().filter(|rank| !self.waiting.contains_key(rank)) {
            let Some(of) = view.ranks.get(&rank) else {
                self.unrecorded.insert(rank);
                continue;
            };
            // A record that was made before the operation began, by clocks that may differ, says nothing about it.
            let is_recent = self.first_us <= of.record.made_us.saturating_add(CLOCKS_US);
            if of.has_joined(view.epoch) || of.has_submitted(self.key, view.epoch, self.turn) {
                continue;
            }
            let is_shown = is_recent && !view.is_outdated(rank, of.record);
            let ranks = if is_shown { &mut self.missing } else { &mut self.outdated };
            ranks.insert(rank);
        }
    }

    /// The ranks that wait for this and miss the other one, if that is the last thing that each of them called.
    fn waiting_without(&self, other: &Self, view: &View<'_>) -> Vec<u32> {
        let is_last = |rank: u32, request: &RequestRecord| {
            let last = view.ranks.get(&rank).and_then(|of| of.requests.requests.last());
            last.is_some_and(|last| std::ptr::eq(last, request))
        };
        let found =
            self.waiting.iter().filter(|(rank, request)| other.missing.contains(rank) && is_last(**rank, request));
        found.map(|(rank, _)| *rank).collect()
    }

    fn label(&self) -> String {
        label(self.key.1, self.collective)
    }

    /// Who waits, for how long and where.
    fn who(&self, view: &View<'_>) -> String {
        let ranks = listed("rank", self.waiting.keys().copied());
        let verb = if self.waiting.len() == 1 { "waits" } else { "wait" };
        let longest =
            self.waiting.iter().filter_map(|(rank, request)| Some(view.ranks.get(rank)?.age_us(request.submitted_us)));
        let sites: BTreeSet<&str> = self.waiting.values().filter_map(|request| request.site.as_deref()).collect();
        let at = sites.first().map(|site| format!(" at {site}")).unwrap_or_default();
        format!("{ranks} {verb} for it{at}, for {}", duration(longest.max().unwrap_or(0)))
    }
}

impl<'v, 'a> Waits<'v, 'a> {
    pub(super) fn of(view: &'v View<'a>) -> Self {
        let mut found: BTreeMap<Key<'a>, Wait<'a>> = BTreeMap::new();
        for (rank, of) in &view.ranks {
            for request in of.waiting(view.epoch) {
                let wait = found.entry((request.set, &request.name)).or_insert_with(|| Wait::new(request));
                wait.add(*rank, of, request);
            }
        }
        let mut operations: Vec<Wait<'a>> = found.into_values().collect();
        operations.sort_by_key(|wait| (wait.first_us, wait.key));
        operations.truncate(WAITS_MAX);
        operations.iter_mut().for_each(|wait| wait.find_missing(view));
        let may_lack_ranks =
            |wait: &Wait<'_>| [&wait.missing, &wait.unrecorded, &wait.outdated].iter().any(|ranks| !ranks.is_empty());
        operations.retain(may_lack_ranks);
        Self { view, operations }
    }

    /// The first operation of a schedule that ranks are missing from or may be missing from.
    pub(super) fn first_incomplete(&self) -> Option<u64> {
        self.operations.iter().filter_map(|wait| wait.scheduled).min()
    }

    /// For each rank that is missing, the oldest operation that it did not submit, and who waits.
    pub(super) fn missing(&self) -> Vec<String> {
        let ranks: BTreeSet<u32> = self.operations.iter().flat_map(|wait| wait.missing.iter().copied()).collect();
        let mut lines = Vec::new();
        for rank in ranks.iter().copied().take(RANKS_MAX) {
            let mut lacking = self.operations.iter().filter(|wait| wait.missing.contains(&rank));
            let (Some(wait), Some(of)) = (lacking.next(), self.view.ranks.get(&rank)) else { continue };
            let what = match of.knows(wait.key) {
                true => format!("has not submitted {} again", wait.label()),
                false => format!("never submitted {}", wait.label()),
            };
            lines.push(format!("rank {rank} {what}; {}", last_call(of)));
            lines.push(format!("  {}", wait.who(self.view)));
            match lacking.count() as u64 {
                0 => {}
                1 => lines.push(format!("  1 more operation waits for rank {rank}")),
                more => lines.push(format!("  {more} more operations wait for rank {rank}")),
            }
        }
        let more: Vec<u32> = ranks.into_iter().skip(RANKS_MAX).collect();
        lines.extend(more_missing(&more));
        lines
    }

    /// The ranks whose records were made too early to show whether they submitted an operation.
    pub(super) fn outdated(&self) -> Option<String> {
        let ranks: BTreeSet<u32> = self.operations.iter().flat_map(|wait| wait.outdated.iter().copied()).collect();
        let wait = self.operations.iter().find(|wait| !wait.outdated.is_empty())?;
        let (record, it_has) = if ranks.len() == 1 { ("its record was", "it") } else { ("their records were", "they") };
        Some(format!(
            "{} may have submitted {} and later operations after {record} made: dump the records of all hosts at the same time to see \
             whether {it_has} did",
            listed("rank", ranks),
            wait.label()
        ))
    }

    /// What is known of ranks of which there is no record: the coordinator's report, else that they may be missing.
    pub(super) fn unrecorded(&self) -> Vec<String> {
        let mut unknown: BTreeSet<u32> = self.view.unrecorded().collect();
        let (mut lines, mut more) = (Vec::new(), Vec::new());
        let reports =
            self.view.records.values().flat_map(|record| record.waiting.iter().map(move |wait| (*record, wait)));
        for (record, wait) in reports {
            let missing: Vec<u32> = wait.missing.iter().copied().filter(|rank| unknown.remove(rank)).collect();
            match missing.is_empty() {
                true => {}
                false if lines.len() < RANKS_MAX => lines.push(reported(record, wait, missing)),
                false => more.extend(missing),
            }
        }
        lines.extend(more_missing(&more));
        // The coordinator knows who has submitted what it reports.
        let is_reported = |wait: &&Wait<'_>| {
            let mut reports = self.view.records.values().flat_map(|record| &record.waiting);
            reports.any(|report| (report.set, report.name.as_str()) == wait.key)
        };
        let may_lack = |wait: &&Wait<'_>| !wait.unrecorded.is_disjoint(&unknown) && !is_reported(wait);
        let mut others = self.operations.iter().filter(may_lack);
        if let Some(wait) = others.next() {
            let ranks = listed("rank", wait.unrecorded.intersection(&unknown).copied());
            let them = if wait.unrecorded.intersection(&unknown).count() == 1 { "it" } else { "them" };
            lines.push(format!("{ranks} may not have submitted {}: there is no record of {them}", wait.label()));
            lines.push(format!("  {}", wait.who(self.view)));
            match others.count() as u64 {
                0 => {}
                more => lines.push(format!("  the same is true of {}", counted(more, "more operation"))),
            }
        }
        lines
    }

    /// Two operations whose ranks wait for each other, probably because they were submitted in different orders.
    pub(super) fn divergence(&self) -> Option<String> {
        let compared = &self.operations[..self.operations.len().min(COMPARED_MAX)];
        for (index, one) in compared.iter().enumerate() {
            for other in &compared[index + 1..] {
                let (these, those) = (one.waiting_without(other, self.view), other.waiting_without(one, self.view));
                if !these.is_empty() && !those.is_empty() {
                    let (first, second) = (one.label(), other.label());
                    let line = |ranks: Vec<u32>, has: &str, lacks: &str| {
                        let (wait, have) = if ranks.len() == 1 { ("waits", "has") } else { ("wait", "have") };
                        format!("{} {wait} for {has} and {have} not submitted {lacks}", listed("rank", ranks))
                    };
                    let (these, those) = (line(these, &first, &second), line(those, &second, &first));
                    return Some(format!(
                        "{these}; {those}: probably different orders; call operations whose results are awaited one by one in the same order on all ranks"
                    ));
                }
            }
        }
        None
    }
}

/// A line with the ranks that are missing as well and of which no operation is named.
fn more_missing(ranks: &[u32]) -> Option<String> {
    let verb = if ranks.len() == 1 { "is" } else { "are" };
    let count = counted(ranks.len() as u64, "more rank");
    (!ranks.is_empty()).then(|| format!("{count} {verb} missing: {}", listed("rank", ranks.iter().copied())))
}

/// The coordinator's report of missing ranks.
fn reported(record: &FlightRecord, wait: &WaitingRecord, missing: Vec<u32>) -> String {
    let (name, record_of) = (label(&wait.name, &wait.collective), if missing.len() == 1 { "it" } else { "them" });
    let age = duration(record.made_us.saturating_sub(wait.since_us));
    format!(
        "{} did not submit {name}, for which others have waited {age}; sidecar {} reports it, and there is no record of {record_of}",
        listed("rank", missing),
        record.sidecar
    )
}

/// The oldest operations that wait, and those of them that are compared with each other.
const WAITS_MAX: usize = 4_096;
const COMPARED_MAX: usize = 256;
/// How far the clocks of two hosts may differ.
const CLOCKS_US: u64 = 10_000_000;
/// The ranks that are named with an operation.
const RANKS_MAX: usize = 16;
