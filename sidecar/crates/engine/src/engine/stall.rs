//! Names that some ranks have announced long ago and others have not, and groups that lack tensors: Horovod's stall report.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ronde_wire::{Cause, Collective, Failure, Rank, Request, SidecarIndex, TensorName, limits};

use super::agreement::Agreement;
use super::context::Context;
use super::groups::Waiting;
use super::wording;
use crate::event::{Action, Time};

/// Remembers what was reported, so that each report comes once an interval and is taken back.
#[derive(Debug, Default)]
pub(crate) struct Stalls {
    checked: Option<Time>,
    reported: bool,
}

impl Stalls {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// The report that is due, if one is. Looks four times per `stall_warning_ms`, so a name is reported at an age between
    /// one and one and a quarter of it, then once an interval.
    pub(crate) fn check(
        &mut self,
        cx: &Context,
        agreement: &Agreement,
        suspects: &(Vec<SidecarIndex>, Vec<Rank>),
    ) -> Option<Action> {
        let warning_ms = cx.config.stall_warning_ms;
        let interval_ms = if self.reported { warning_ms } else { warning_ms / 4 };
        if self.checked.is_some_and(|checked| cx.now.ms_since(checked) < interval_ms) {
            return None;
        }
        self.checked = Some(cx.now);
        let stalled = Stalled::find(cx, agreement, warning_ms);
        let was_reported = std::mem::replace(&mut self.reported, !stalled.is_empty());
        if stalled.is_empty() {
            let text = "No tensor waits for a rank or for its group for long any more.".to_owned();
            let (sidecars, ranks) = suspects.clone();
            return was_reported.then_some(Action::Notice { sidecars, ranks, text });
        }
        let text = stalled.warning(warning_ms);
        let ranks = stalled.missing.into_keys().collect();
        Some(Action::Notice { sidecars: suspects.0.clone(), ranks, text })
    }
}

/// What the epoch ends with when a tensor has waited for `stall_shutdown_ms`, for ranks or for its group.
pub(crate) fn shutdown(cx: &Context, agreement: &Agreement) -> Option<Failure> {
    let limit_ms = cx.config.stall_shutdown_ms;
    if limit_ms == 0 {
        return None;
    }
    let stalled = Stalled::find(cx, agreement, limit_ms);
    if stalled.is_empty() {
        return None;
    }
    let first = stalled.missing.keys().next().copied();
    let what = if first.is_some() { "some ranks" } else { "others of their groups" };
    let reason = format!(
        "ronde has been shut down: tensors have waited for {what} for more than {}, the limit of stall_shutdown.{}",
        wording::seconds(limit_ms),
        stalled.list()
    );
    Some(Failure { rank: first, ..Failure::new(Cause::ShutDown, reason) })
}

/// What has waited for long.
struct Stalled {
    missing: Missing,
    /// Groups of which tensors wait for others, in words.
    groups: Vec<String>,
}

impl Stalled {
    fn find(cx: &Context, agreement: &Agreement, age_ms: u64) -> Self {
        let old = |waiting: &Waiting<'_>| cx.now.ms_since(waiting.since()) >= age_ms;
        let groups = agreement.groups.waiting().filter(old).take(limits::REPORT_NAMES_MAX);
        let groups = groups.map(|waiting| group(cx, agreement, &waiting)).collect();
        Self { missing: missing(cx, agreement, age_ms), groups }
    }

    fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.groups.is_empty()
    }

    fn warning(&self, warning_ms: u64) -> String {
        if self.missing.is_empty() {
            let seconds = wording::seconds(warning_ms);
            return format!(
                "One or more tensors wait for others of their groups for more than {seconds}. Have all ranks ask for all \
                 tensors of a group, or give the group its true size.{}",
                self.list()
            );
        }
        format!(
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting \
             for remainder of ranks for more than {} seconds. Have all ranks run the same operations, or find out what \
             holds these up.{}",
            warning_ms / 1_000,
            self.list()
        )
    }

    /// Missing ranks and groups, on lines of their own.
    fn list(&self) -> String {
        let mut text = String::new();
        if !self.missing.is_empty() {
            text.push_str("\nMissing ranks:");
        }
        for (rank, (names, more)) in self.missing.iter().take(RANKS_MAX) {
            let _ = write!(text, "\n{}: [{}", rank.0, names.join(", "));
            let _ = if *more > 0 { write!(text, " and {more} more]") } else { write!(text, "]") };
        }
        if self.missing.len() > RANKS_MAX {
            let _ = write!(text, "\nand {} more ranks", self.missing.len() - RANKS_MAX);
        }
        for group in &self.groups {
            let _ = write!(text, "\n{group}");
        }
        text
    }
}

/// A group that waits, in words: what it has, since when, and what it lacks.
fn group(cx: &Context, agreement: &Agreement, waiting: &Waiting<'_>) -> String {
    let progress = waiting.progress();
    let age = wording::seconds(cx.now.ms_since(waiting.since()));
    let lacks = |request: &Request| {
        request.group.as_ref().is_some_and(|group| waiting.lacks(request.set, group, &request.name))
    };
    let asked: Vec<&TensorName> =
        agreement.negotiation.waiting().filter(|name| lacks(name.request)).map(|name| &name.request.name).collect();
    let unknown = waiting.missing().saturating_sub(asked.len());
    let mut lacking = Vec::new();
    if !asked.is_empty() {
        let names: Vec<&str> = asked.iter().take(limits::REPORT_NAMES_MAX).map(|name| name.as_str()).collect();
        let more = if asked.len() > names.len() { " and others" } else { "" };
        lacking.push(format!("some ranks have asked for {}{more}", names.join(", ")));
    }
    if unknown > 0 {
        lacking.push(format!("nobody for {unknown} more"));
    }
    format!("{} since {age}; {}.", wording::capitalised(&progress), lacking.join(", "))
}

/// For each missing rank the names that wait for it, and how many more there are.
type Missing = BTreeMap<Rank, (Vec<String>, usize)>;

/// What has waited for so long. A join waits for the slowest rank by its nature, so it does not count.
fn missing(cx: &Context, agreement: &Agreement, age_ms: u64) -> Missing {
    let mut missing = Missing::new();
    for waiting in agreement.negotiation.waiting() {
        if cx.now.ms_since(waiting.since) < age_ms || waiting.request.collective == Collective::Join {
            continue;
        }
        for rank in waiting.missing(&agreement.joined) {
            let (names, more) = missing.entry(rank).or_default();
            if names.len() < limits::REPORT_NAMES_MAX {
                names.push(waiting.request.name.to_string());
            } else {
                *more += 1;
            }
        }
    }
    missing
}

/// Ranks listed in one report.
const RANKS_MAX: usize = 16;
