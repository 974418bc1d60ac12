//! Names that some ranks have announced long ago and others have not: Horovod's stall report.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ronde_wire::{Cause, Collective, Failure, Rank, SidecarIndex, limits};

use super::agreement::Agreement;
use super::context::Context;
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
        let stalled = stalled(cx, agreement, warning_ms);
        let was_reported = std::mem::replace(&mut self.reported, !stalled.is_empty());
        if stalled.is_empty() {
            let text = "No tensor waits for a rank for long any more.".to_owned();
            let (sidecars, ranks) = suspects.clone();
            return was_reported.then_some(Action::Notice { sidecars, ranks, text });
        }
        let text = words(&stalled, agreement, warning_ms);
        let ranks = stalled.into_keys().collect();
        Some(Action::Notice { sidecars: suspects.0.clone(), ranks, text })
    }
}

/// What the epoch ends with when a tensor has waited for `stall_shutdown_ms`.
pub(crate) fn shutdown(cx: &Context, agreement: &Agreement) -> Option<Failure> {
    let limit_ms = cx.config.stall_shutdown_ms;
    if limit_ms == 0 {
        return None;
    }
    let stalled = stalled(cx, agreement, limit_ms);
    let first = *stalled.keys().next()?;
    let seconds = wording::seconds(limit_ms);
    let reason = format!(
        "ronde has been shut down: tensors have waited for some ranks for more than {seconds}, the limit of \
         stall_shutdown.\nMissing ranks:{}",
        list(&stalled)
    );
    Some(Failure::new(Cause::ShutDown, reason).with_rank(first))
}

/// For each missing rank the names that wait for it, and how many more there are.
type Missing = BTreeMap<Rank, (Vec<String>, usize)>;

/// What has waited for so long. A join waits for the slowest rank by its nature, so it does not count.
fn stalled(cx: &Context, agreement: &Agreement, age_ms: u64) -> Missing {
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

fn words(missing: &Missing, agreement: &Agreement, warning_ms: u64) -> String {
    let mut text = format!(
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for \
         remainder of ranks for more than {} seconds. Have all ranks run the same operations, or find out what holds these \
         up.\nMissing ranks:{}",
        warning_ms / 1_000,
        list(missing)
    );
    for ((set, name), decided, size) in agreement.groups.waiting().take(limits::REPORT_NAMES_MAX) {
        let _ = write!(text, "\nGroup {name} of {set} has {decided} of its {size} tensors.");
    }
    text
}

fn list(missing: &Missing) -> String {
    let mut text = String::new();
    for (rank, (names, more)) in missing.iter().take(RANKS_MAX) {
        let _ = write!(text, "\n{}: [{}", rank.0, names.join(", "));
        let _ = if *more > 0 { write!(text, " and {more} more]") } else { write!(text, "]") };
    }
    if missing.len() > RANKS_MAX {
        let _ = write!(text, "\nand {} more ranks", missing.len() - RANKS_MAX);
    }
    text
}

/// Ranks listed in one report.
const RANKS_MAX: usize = 16;
