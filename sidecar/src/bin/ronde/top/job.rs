//! The job that is shown, as its sidecars describe it together.

use std::time::Duration;

use super::model::{Answering, Model, Sort, View, Watched};
use super::page::{Link, Page, Path, Pending, Waiting, operation};
use crate::status::duration;

/// The sidecars of one job that are known here.
pub(super) struct Job<'a> {
    pub(super) sidecars: Vec<&'a Watched>,
    /// The page that knows most: of the coordinator, else of a sidecar that answers, else the last one.
    pub(super) head: Option<&'a Page>,
    sort: Sort,
    now: Duration,
}

/// How good a state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Good,
    Waits,
    Bad,
    Plain,
}

/// A rank.
pub(super) struct RankRow<'a> {
    pub(super) rank: u32,
    pub(super) sidecar: u32,
    pub(super) tone: Tone,
    pub(super) state: String,
    /// For how long others have waited for it, in microseconds; `None` where that is not known.
    pub(super) waited_us: Option<u64>,
    /// The share of the last interval for which they did.
    pub(super) share: Option<f64>,
    /// How often it was the last to be ready.
    pub(super) last: Option<u64>,
    /// Its oldest requests without an answer.
    pub(super) pending: Vec<&'a Pending>,
}

/// One direction of a link, as one of its ends sees it.
pub(super) struct LinkRow<'a> {
    pub(super) from: u32,
    pub(super) link: &'a Link,
    /// Absent when it is down.
    pub(super) path: Option<&'a Path>,
    pub(super) rates: Option<(f64, f64)>,
}

impl<'a> Job<'a> {
    /// The job that a view shows. A sidecar that has never answered could be of any job.
    pub(super) fn of(model: &'a Model) -> Self {
        let is_shown = |watched: &&Watched| watched.job().is_none_or(|job| job == model.job);
        let sidecars: Vec<&Watched> = model.sidecars.iter().filter(is_shown).collect();
        let rank = |watched: &&&Watched| {
            let page = watched.page.as_ref();
            let coordinates = page.is_some_and(|page| page.sidecar == page.coordinator);
            (page.is_some(), watched.answers(), page.map(|page| page.epoch), coordinates)
        };
        let head = sidecars.iter().max_by_key(rank).and_then(|watched| watched.page.as_ref());
        Self { sidecars, head, sort: model.sort, now: model.now }
    }

    /// The number of rows that can be selected in a view.
    pub(super) fn rows(&self, view: View) -> usize {
        match view {
            View::Overview => self.sidecars.len(),
            View::Ranks => self.head.map_or(0, |page| page.placement.len()),
            View::Links => self.links().len(),
            View::Waits => self.waits().len() + self.requests().len(),
            View::Engine => 0,
        }
    }

    fn answering(&self) -> impl Iterator<Item = (&'a Watched, &'a Page)> {
        self.sidecars
            .iter()
            .filter(|watched| watched.answers())
            .filter_map(|watched| Some((*watched, watched.page.as_ref()?)))
    }

    /// Whether the coordinator's page is among those that answer: only it knows who is late.
    pub(super) fn sees_coordinator(&self) -> bool {
        self.answering().any(|(_, page)| page.sidecar == page.coordinator)
    }

    /// What the job does in one sentence, and how good that is.
    pub(super) fn verdict(&self) -> (Tone, String) {
        let Some(page) = self.head else {
            return (Tone::Waits, "no sidecar has answered yet".to_owned());
        };
        // An elastic job begins another epoch, and then the reason is past.
        let reason = self.failure().filter(|_| page.phase != "active");
        let reason = reason.map(|reason| format!("the last epoch ended: {reason}"));
        let found = self.ended().or_else(|| self.lost()).or_else(|| self.suspected()).or_else(|| self.broken_link());
        if found.is_some() || reason.is_some() {
            return (Tone::Bad, [found, reason].into_iter().flatten().collect::<Vec<_>>().join("; "));
        }
        if !page.ranks_missing.is_empty() {
            return (Tone::Waits, format!("waits for {} to attach", ranks(&page.ranks_missing)));
        }
        let late = page.waiting_tensors.iter().find(|waiting| waiting.age_ms >= LATE_AFTER_MS).map(sentence);
        match late.or_else(|| self.late_request()) {
            Some(words) => (Tone::Waits, words),
            None => (Tone::Good, phase(&page.phase).to_owned()),
        }
    }

    /// The oldest request that other ranks may not have submitted, if it has waited for long. Its sidecar does not know which
    /// ranks are missing. The coordinator does, unless a schedule has admitted the operation, so that its page counts.
    fn late_request(&self) -> Option<String> {
        let is_unknown = |request: &Pending| request.scheduled || !self.sees_coordinator();
        let is_late =
            |request: &&&Pending| request.age_ms >= LATE_AFTER_MS && is_unknown(request) && !may_wait_for_long(request);
        let oldest = *self.requests().iter().find(is_late)?;
        if oldest.scheduled {
            return Some(self.late_under_schedule(oldest));
        }
        let what = operation(&oldest.collective, &oldest.name);
        Some(format!("rank {} has waited in {what} for {}", oldest.rank, duration(oldest.age_ms)))
    }

    /// An operation in flight that a schedule has admitted. The coordinator does not know the missing ranks then; those that
    /// take part and have no request are named.
    fn late_under_schedule(&self, oldest: &Pending) -> String {
        let what = operation(&oldest.collective, &oldest.name);
        let rows = self.ranks();
        let without = rows.iter().filter(|row| self.takes_part(row.rank, oldest.set) && self.is_without_request(row));
        let without: Vec<u32> = without.map(|row| row.rank).collect();
        let which = match &without[..] {
            [] => String::new(),
            [one] => format!("; rank {one} has no request in flight"),
            many => format!("; {} have no request in flight", ranks(many)),
        };
        format!("{what} has been in flight under a schedule for {}{which}", duration(oldest.age_ms))
    }

    /// Whether a rank has to submit the operations of a process set. Of a set that no page lists, none is known to.
    fn takes_part(&self, rank: u32, set: u32) -> bool {
        let has_joined = self.answering().any(|(_, page)| page.ranks_joined.contains(&rank));
        let mut sets = self.answering().flat_map(|(_, page)| &page.process_sets);
        !has_joined && (set == 0 || sets.any(|listed| listed.id == set && listed.ranks.contains(&rank)))
    }

    /// Whether the sidecar of a rank answers and has no request of it.
    fn is_without_request(&self, row: &RankRow<'_>) -> bool {
        let mut pages = self.answering().map(|(_, page)| page).filter(|page| page.sidecar == row.sidecar);
        row.pending.is_empty() && pages.any(|page| page.pending_requests.len() == page.pending)
    }

    /// Whether the whole job is gone.
    fn ended(&self) -> Option<String> {
        let none = match self.sidecars.len() {
            _ if self.answering().next().is_some() => return None,
            1 => "its sidecar does not answer".to_owned(),
            count => format!("none of its {count} sidecars answers"),
        };
        Some(format!("the job has ended: {none}"))
    }

    /// The sidecar that does not answer here, and why.
    fn lost(&self) -> Option<String> {
        let lost = self.sidecars.iter().find(|watched| !watched.answers())?;
        let name = match &lost.page {
            Some(page) => format!("sidecar {}", page.sidecar),
            None => "a sidecar".to_owned(),
        };
        let reason = match &lost.answer {
            Answering::No { reason, .. } => format!(": {reason}"),
            Answering::Yes | Answering::Ended => String::new(),
        };
        Some(format!("{name} {}{reason}", self.state(lost).1))
    }

    /// Sidecars and ranks that other sidecars report as silent.
    fn suspected(&self) -> Option<String> {
        self.answering().find_map(|(_, page)| match (&page.suspect_sidecars[..], &page.suspect_ranks[..]) {
            ([], []) => None,
            ([], silent) => Some(format!("{} {} silent", ranks(silent), is_or_are(silent))),
            (silent, _) => Some(format!("{} {} silent", numbered("sidecar", silent), is_or_are(silent))),
        })
    }

    fn broken_link(&self) -> Option<String> {
        self.answering().find_map(|(_, page)| {
            let down: Vec<u32> = page.links.iter().filter(|link| !link.up).map(|link| link.peer).collect();
            let peers = numbered("sidecar", &down);
            (!down.is_empty()).then(|| format!("sidecar {} has no link to {peers}", page.sidecar))
        })
    }

    /// Why the last epoch ended, as the sidecars know that answer.
    pub(super) fn failure(&self) -> Option<&'a str> {
        let known = |page: &'a Page| page.last_failure.as_ref().map(|failure| failure.reason.as_str());
        self.answering().find_map(|(_, page)| known(page)).or_else(|| self.head.and_then(known))
    }

    /// The state of a sidecar in words.
    pub(super) fn state(&self, watched: &Watched) -> (Tone, String) {
        let page = watched.page.as_ref();
        match &watched.answer {
            Answering::No { since, .. } => {
                let since = duration(milliseconds(self.now.saturating_sub(*since)));
                (Tone::Bad, format!("has not answered for {since}"))
            }
            Answering::Ended => (Tone::Bad, "has ended".to_owned()),
            Answering::Yes => {
                let phase = page.map_or("", |page| phase(&page.phase));
                let role = if page.is_some_and(|page| page.sidecar == page.coordinator) { ", coordinator" } else { "" };
                (Tone::Good, format!("{phase}{role}"))
            }
        }
    }

    /// The ranks of the job, in the order that was chosen.
    pub(super) fn ranks(&self) -> Vec<RankRow<'a>> {
        let Some(head) = self.head else { return Vec::new() };
        let rates_of = |sidecar: u32| self.watched_of(sidecar).and_then(|watched| watched.rates.as_ref());
        let rates = rates_of(head.sidecar);
        let row = |(rank, sidecar): (usize, &u32)| {
            let number = u32::try_from(rank).unwrap_or(u32::MAX);
            let (tone, state) = self.rank_state(head, number, *sidecar);
            let page = self.page_of(*sidecar);
            let own = page.map(|page| &page.pending_requests[..]).unwrap_or_default();
            // In steps that run by a schedule, each sidecar counts the waits among its own ranks.
            let here_us = page.and_then(|page| page.stats.waited_here_us.get(&number)).copied();
            let here = rates_of(*sidecar).and_then(|rates| rates.waited_here.get(&number)).copied();
            let share = rates.and_then(|rates| rates.waited_for.get(rank)).copied();
            RankRow {
                rank: number,
                sidecar: *sidecar,
                tone,
                state,
                waited_us: either(head.waited_for_us.get(rank).copied(), here_us, u64::saturating_add),
                share: either(share, here, |one, other| (one + other).min(1.0)),
                last: head.last_to_be_ready.get(rank).copied(),
                pending: own.iter().filter(|request| request.rank == number).collect(),
            }
        };
        let mut rows: Vec<RankRow<'_>> = head.placement.iter().enumerate().map(row).collect();
        if self.sort == Sort::ByWait {
            rows.sort_by(by_wait);
        }
        rows
    }

    /// Ranks for which others have waited, those with the greatest share of the last interval first.
    pub(super) fn stragglers(&self) -> Vec<RankRow<'a>> {
        let mut rows = self.ranks();
        rows.retain(|row| row.waited_us.is_some_and(|us| us > 0));
        rows.sort_by(by_wait);
        rows
    }

    fn page_of(&self, sidecar: u32) -> Option<&'a Page> {
        self.watched_of(sidecar).and_then(|watched| watched.page.as_ref())
    }

    fn watched_of(&self, sidecar: u32) -> Option<&'a Watched> {
        self.sidecars.iter().copied().find(|watched| watched.page.as_ref().is_some_and(|page| page.sidecar == sidecar))
    }

    fn rank_state(&self, head: &Page, rank: u32, sidecar: u32) -> (Tone, String) {
        let is_of = |watched: &&&Watched| watched.page.as_ref().is_some_and(|page| page.sidecar == sidecar);
        let served = self.sidecars.iter().find(is_of);
        let anywhere = |list: fn(&Page) -> &[u32]| self.answering().any(|(_, page)| list(page).contains(&rank));
        if served.is_some_and(|watched| !watched.answers()) {
            return (Tone::Bad, "its sidecar does not answer".to_owned());
        }
        if self.answering().any(|(_, page)| page.suspect_sidecars.contains(&sidecar)) {
            return (Tone::Bad, "its sidecar is silent".to_owned());
        }
        if anywhere(|page| &page.suspect_ranks) {
            return (Tone::Bad, "silent".to_owned());
        }
        if anywhere(|page| &page.ranks_missing) {
            return (Tone::Waits, "not attached".to_owned());
        }
        if let Some(waiting) = head.waiting_tensors.iter().find(|waiting| waiting.missing.contains(&rank)) {
            let what = operation(&waiting.collective, &waiting.name);
            return (Tone::Waits, format!("late by {}: {what}", duration(waiting.age_ms)));
        }
        if anywhere(|page| &page.ranks_joined) {
            return (Tone::Plain, "has joined".to_owned());
        }
        if anywhere(|page| &page.ranks_waiting) {
            return (Tone::Waits, "waits for the epoch".to_owned());
        }
        // Within an epoch all ranks take part; a sidecar lists its own.
        if head.phase == "active" || anywhere(|page| &page.ranks_in_epoch) {
            return (Tone::Good, "in the epoch".to_owned());
        }
        (Tone::Plain, "not known here".to_owned())
    }

    /// The links of the sidecars that answer.
    pub(super) fn links(&self) -> Vec<LinkRow<'a>> {
        let of = |(watched, page): (&'a Watched, &'a Page)| {
            page.links.iter().map(move |link| LinkRow {
                from: page.sidecar,
                link,
                path: page.paths.iter().find(|path| link.up && path.peer == link.peer),
                rates: watched
                    .rates
                    .as_ref()
                    .and_then(|rates| rates.links.get(&link.peer))
                    .copied()
                    .filter(|_| link.up),
            })
        };
        self.answering().flat_map(of).collect()
    }

    /// Operations that wait for ranks, as the coordinator knows.
    pub(super) fn waits(&self) -> Vec<&'a Waiting> {
        self.answering().flat_map(|(_, page)| &page.waiting_tensors).collect()
    }

    /// Requests that ranks wait for and that other ranks may not have submitted, oldest first: they are not ordered, or a
    /// schedule has admitted them.
    pub(super) fn requests(&self) -> Vec<&'a Pending> {
        let all = self.answering().flat_map(|(_, page)| &page.pending_requests);
        let mut waiting: Vec<&Pending> = all.filter(|request| !request.ordered || request.scheduled).collect();
        waiting.sort_by_key(|request| (std::cmp::Reverse(request.age_ms), request.rank));
        waiting
    }
}

fn by_wait(one: &RankRow<'_>, other: &RankRow<'_>) -> std::cmp::Ordering {
    let share = |row: &RankRow<'_>| row.share.unwrap_or_default();
    let total = |row: &RankRow<'_>| row.waited_us.unwrap_or_default();
    share(other).total_cmp(&share(one)).then(total(other).cmp(&total(one))).then(one.rank.cmp(&other.rank))
}

/// "allreduce.w has waited 4 s for rank 3".
pub(super) fn sentence(waiting: &Waiting) -> String {
    let what = operation(&waiting.collective, &waiting.name);
    format!("{what} has waited {} for {}", duration(waiting.age_ms), ranks(&waiting.missing))
}

/// "rank 3", or "ranks 1, 2, 3".
pub(super) fn ranks(list: &[u32]) -> String {
    numbered("rank", list)
}

fn numbered(one: &str, list: &[u32]) -> String {
    let numbers: Vec<String> = list.iter().map(ToString::to_string).collect();
    format!("{one}{} {}", if list.len() == 1 { "" } else { "s" }, numbers.join(", "))
}

const fn is_or_are(list: &[u32]) -> &'static str {
    if list.len() == 1 { "is" } else { "are" }
}

/// What the engine does, in words.
fn phase(phase: &str) -> &str {
    match phase {
        "active" => "runs",
        "waiting" => "waits for workers",
        "closing" => "ends",
        other => other,
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// An operation that waits for so long is worth a sentence.
const LATE_AFTER_MS: u64 = 4_000;
/// Whether a request waits for long in a healthy job: of a rank that has joined, while others train, and for a message of any
/// rank, as that of a rank that serves others.
fn may_wait_for_long(request: &Pending) -> bool {
    request.collective == "JOIN" || request.name.starts_with("message.any.")
}

/// The sum of two figures, or the one that is known.
fn either<T>(one: Option<T>, other: Option<T>, sum: impl Fn(T, T) -> T) -> Option<T> {
    match (one, other) {
        (Some(one), Some(other)) => Some(sum(one, other)),
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures;
    use super::super::model::{Action, Sample, act, update};
    use super::super::page::ProcessSet;
    use super::*;

    /// The verdict after both pages were changed.
    fn verdict(change: impl Fn(&mut Page)) -> (Tone, String) {
        let mut model = fixtures::model(View::Overview);
        let pages = [0, 1].map(|sidecar| {
            let mut page = fixtures::page(sidecar, 2);
            change(&mut page);
            fixtures::answered(u16::try_from(sidecar).expect("small"), page)
        });
        update(&mut model, Sample { answers: pages.into(), ..Sample::default() }, Duration::from_secs(2));
        model.shown().verdict()
    }

    #[test]
    fn the_verdict_is_the_worst_that_is_known() {
        let bad = |words: &str| (Tone::Bad, words.to_owned());
        let waits = |words: &str| (Tone::Waits, words.to_owned());
        assert_eq!(verdict(|_| ()), (Tone::Good, "runs".to_owned()));
        let late = |page: &mut Page| page.waiting_tensors.iter_mut().for_each(|waiting| waiting.age_ms = 5_000);
        assert_eq!(verdict(late), waits("allreduce.layer4.weight has waited 5 s for rank 3"));
        let scheduled = |page: &mut Page| {
            page.waiting_tensors.clear();
            page.pending = 1;
            if page.sidecar == 1 {
                (page.pending, page.pending_requests) = (0, Vec::new());
            }
            for request in &mut page.pending_requests {
                (request.ordered, request.scheduled, request.age_ms) = (true, true, 5_000);
            }
        };
        let in_flight = "allreduce.layer4.weight has been in flight under a schedule for 5 s";
        let words = format!("{in_flight}; ranks 1, 2, 3 have no request in flight");
        assert_eq!(verdict(scheduled), waits(&words));
        let cut = |page: &mut Page| {
            scheduled(page);
            page.pending = 500;
        };
        assert_eq!(verdict(cut), waits(in_flight), "a list that is cut shows nothing about the other ranks");
        // The pending requests are those of rank 0.
        let of_a_set = |ranks: &[u32]| {
            let process_sets = vec![ProcessSet { id: 4, ranks: ranks.to_vec() }];
            verdict(|page| {
                scheduled(page);
                page.pending_requests.iter_mut().for_each(|request| request.set = 4);
                page.process_sets = process_sets.clone();
            })
        };
        assert_eq!(of_a_set(&[0, 1]), waits(&format!("{in_flight}; rank 1 has no request in flight")));
        assert_eq!(of_a_set(&[0]), waits(in_flight), "no other rank takes part");
        let joined = |page: &mut Page| {
            scheduled(page);
            page.ranks_joined = vec![2, 3];
        };
        assert_eq!(verdict(joined), waits(&format!("{in_flight}; rank 1 has no request in flight")));
        let missing = |page: &mut Page| {
            late(page);
            page.ranks_missing = vec![1, 2];
        };
        assert_eq!(verdict(missing), waits("waits for ranks 1, 2 to attach"));
        let failed = |page: &mut Page| {
            page.phase = "waiting".to_owned();
            page.last_failure = Some(super::super::page::Failure { reason: "rank 3 is gone".to_owned() });
        };
        assert_eq!(verdict(failed), bad("the last epoch ended: rank 3 is gone"));
        let down = |page: &mut Page| {
            failed(page);
            page.links[0].up = false;
        };
        assert_eq!(verdict(down), bad("sidecar 0 has no link to sidecar 1; the last epoch ended: rank 3 is gone"));
        assert_eq!(verdict(|page| page.suspect_ranks = vec![2]), bad("rank 2 is silent"));
        let silent = |page: &mut Page| page.suspect_sidecars = vec![1, 2];
        assert_eq!(verdict(silent), bad("sidecars 1, 2 are silent"));
    }

    #[test]
    fn a_lost_sidecar_and_its_ranks_are_named() {
        let mut model = fixtures::model(View::Overview);
        for second in [2, 5] {
            update(&mut model, fixtures::sample_without(second, 1), Duration::from_secs(second));
        }
        let job = model.shown();
        let words = format!("sidecar 1 has not answered for 3 s: {}", fixtures::lost(1));
        assert_eq!(job.verdict(), (Tone::Bad, words));
        let states: Vec<String> = job.ranks().into_iter().map(|row| row.state).collect();
        assert_eq!(
            states,
            ["in the epoch", "in the epoch", "its sidecar does not answer", "its sidecar does not answer"]
        );
        assert_eq!(job.links().len(), 1, "a lost sidecar says nothing of its links");
        let mut sample = fixtures::sample_without(6, 1);
        sample.answers[0].1 = Err(fixtures::lost(0));
        update(&mut model, sample, Duration::from_secs(6));
        // Its last page has no failure.
        assert_eq!(
            model.shown().verdict(),
            (Tone::Bad, "the job has ended: none of its 2 sidecars answers".to_owned())
        );
    }

    #[test]
    fn the_rank_that_others_wait_for_comes_first_when_sorted() {
        let mut model = fixtures::model(View::Ranks);
        let order = |model: &Model| model.shown().ranks().iter().map(|row| row.rank).collect::<Vec<_>>();
        assert_eq!(order(&model), [0, 1, 2, 3]);
        act(&mut model, Action::Sort);
        assert_eq!(order(&model), [3, 0, 2, 1]);
        let stragglers = model.shown().stragglers();
        assert_eq!(stragglers.iter().map(|row| row.rank).collect::<Vec<_>>(), [3, 0, 2]);
        assert_eq!((stragglers[0].share, stragglers[0].last), (Some(0.4), Some(40)));
    }

    #[test]
    fn without_the_coordinators_page_nobody_is_called_late() {
        let mut model = Model::new(View::Ranks, true);
        let answer = fixtures::answered(1, fixtures::page(1, 0));
        update(&mut model, Sample { answers: vec![answer], ..Sample::default() }, Duration::ZERO);
        let job = model.shown();
        assert!(!job.sees_coordinator());
        assert!(job.ranks().iter().all(|row| row.state == "in the epoch" && row.waited_us.is_none()));
        assert_eq!(job.requests().len(), 1);
    }

    #[test]
    fn without_the_coordinators_page_a_request_that_waits_is_the_verdict() {
        let verdict_of = |sidecar: u16, changed: &dyn Fn(&mut Pending)| {
            let mut page = fixtures::page(sidecar.into(), 0);
            page.waiting_tensors.clear();
            page.pending_requests.iter_mut().for_each(changed);
            let mut model = Model::new(View::Overview, true);
            let answers = vec![fixtures::answered(sidecar, page)];
            update(&mut model, Sample { answers, ..Sample::default() }, Duration::ZERO);
            model.shown().verdict()
        };
        let verdict = |collective: &str, age_ms: u64, ordered: bool| {
            verdict_of(1, &|request| {
                (request.collective, request.age_ms, request.ordered) = (collective.to_owned(), age_ms, ordered);
            })
        };
        let runs = (Tone::Good, "runs".to_owned());
        let words = "rank 2 has waited in allreduce.layer4.weight for 13 s";
        assert_eq!(verdict("ALLREDUCE", 13_000, false), (Tone::Waits, words.to_owned()));
        assert_eq!(verdict("ALLREDUCE", 3_900, false), runs, "a step may take as long");
        assert_eq!(verdict("ALLREDUCE", 13_000, true), runs, "it is performed: all ranks have submitted it");
        assert_eq!(verdict("JOIN", 13_000, false), runs, "the others train on");
        let receive = |request: &mut Pending| {
            (request.age_ms, request.ordered, request.name) = (13_000, false, "message.any.2.0.0".to_owned());
        };
        assert_eq!(verdict_of(1, &receive), runs, "it serves others");
        let waits = |request: &mut Pending| (request.age_ms, request.ordered) = (13_000, false);
        assert_eq!(verdict_of(0, &waits), runs, "the coordinator knows of no rank that is late");
    }
}
