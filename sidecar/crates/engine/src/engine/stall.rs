//! Names that some ranks have announced long ago and others have not: Horovod's stall report.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ronde_wire::{Rank, SidecarIndex, limits};

use super::context::Context;
use super::negotiation::Negotiation;
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
        cx: &mut Context,
        negotiation: &Negotiation,
        suspects: &(Vec<SidecarIndex>, Vec<Rank>),
    ) -> Option<Action> {
        let warning_ms = cx.config.stall_warning_ms;
        let interval_ms = if self.reported { warning_ms } else { warning_ms / 4 };
        if self.checked.is_some_and(|checked| cx.now.ms_since(checked) < interval_ms) {
            return None;
        }
        self.checked = Some(cx.now);
        let stalled = stalled(cx, negotiation);
        let was_reported = std::mem::replace(&mut self.reported, !stalled.is_empty());
        if stalled.is_empty() {
            let text = "No tensor waits for a rank for long any more.".to_owned();
            let (sidecars, ranks) = suspects.clone();
            return was_reported.then_some(Action::Notice { sidecars, ranks, text });
        }
        let text = words(&stalled, warning_ms);
        let ranks = stalled.into_keys().collect();
        Some(Action::Notice { sidecars: suspects.0.clone(), ranks, text })
    }
}

/// For each missing rank the names that wait for it, and how many more there are.
type Missing = BTreeMap<Rank, (Vec<String>, usize)>;

fn stalled(cx: &mut Context, negotiation: &Negotiation) -> Missing {
    let mut missing = Missing::new();
    for waiting in negotiation.waiting() {
        if cx.now.ms_since(waiting.since) < cx.config.stall_warning_ms {
            continue;
        }
        let Some(view) = cx.set(waiting.request.set) else { continue };
        for rank in waiting.missing(&view) {
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

fn words(missing: &Missing, warning_ms: u64) -> String {
    let mut text = format!(
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for \
         remainder of ranks for more than {} seconds. Have all ranks run the same operations, or find out what holds these \
         up.\nMissing ranks:",
        warning_ms / 1_000
    );
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
