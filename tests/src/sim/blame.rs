//! Checks that a failure names its culprit.

use ronde_wire::{Cause, Failure, Rank};

use super::checks::{Property, Violated, violated};
use super::fake_plugins::FAILS;
use super::faults::Faults;
use super::item::{ANY_SOURCE_TAGS, Excuse, InjectedError, Item, Kind};
use super::workload::Workload;

/// Checks that the end of an epoch is blamed on a rank or sidecar that a fault hit, or that left or stalls by intent.
pub(super) fn blame(failure: &Failure, faults: &Faults, workload: &Workload, who: &str) -> Result<(), Violated> {
    let hit = match failure.cause {
        Cause::ShutDown => {
            let leaver = failure.rank.is_some() && failure.rank == workload.leaver;
            leaver || workload.staller.is_some_and(|(rank, item)| names_stall(failure, rank, &workload.items[item]))
        }
        Cause::RankLost => failure.rank.is_some_and(|rank| faults.ranks.contains(&rank)),
        // A sidecar that loses the coordinator ends the epoch on its own; the coordinator only receives that.
        Cause::SidecarLost => failure.sidecar.is_some_and(|s| {
            faults.hosts.contains(&s) || (!faults.hosts.is_empty() && failure.reason.contains("on its own"))
        }),
        _ => false,
    };
    if hit { Ok(()) } else { violated(Property::Culprit, format!("the failure of {who} names an innocent culprit")) }
}

/// Returns whether a failure of a single operation names its cause.
pub(super) fn is_named(failure: &Failure, item: &Item) -> bool {
    let refused = |culprit| failure.cause == Cause::Refused && failure.rank == Some(culprit);
    let excused = match item.excuse {
        Some(Excuse::Removed) => failure.cause == Cause::Refused && failure.reason.contains("was removed"),
        Some(Excuse::JoinFails) => failure.cause == Cause::Refused && failure.reason.contains("whose join has failed"),
        None => false,
    };
    let too_large = item.too_large && failure.cause == Cause::Refused && failure.reason.contains("arena_bytes_max");
    let plugin = item.may_fail && failure.cause == Cause::Refused && failure.reason.contains(FAILS);
    excused
        || too_large
        || plugin && failure.sidecar.is_some_and(|sidecar| failure.reason.contains(&format!("on {sidecar} ")))
        || match item.injected {
            // The culprit is the first that differs from the lowest rank.
            InjectedError::Mismatch(culprit, _) if matches!(item.kind, Kind::FormSet(..)) => {
                // The culprit may join before anyone has asked, and its own request then needs one who has failed and joined.
                let asked = failure.rank.is_some_and(|rank| item.askers.contains(&rank));
                let joined = asked && failure.reason.contains(NOT_WITH_JOIN);
                failure.cause == Cause::Mismatch && (joined || names_list(failure, culprit, item))
            }
            InjectedError::Mismatch(culprit, _) => {
                let named = if culprit == item.askers[0] { item.askers[1] } else { culprit };
                failure.cause == Cause::Mismatch && failure.rank == Some(named)
            }
            InjectedError::Refused(culprit) | InjectedError::Absurd(culprit) | InjectedError::Withdrawn(culprit) => {
                refused(culprit)
            }
            InjectedError::Nonsense(words) => failure.cause == Cause::Refused && failure.reason.contains(words),
            InjectedError::Joined => failure.reason.contains(NOT_WITH_JOIN),
            InjectedError::None | InjectedError::Missing => false,
        }
}

/// Whether a failure of ranks that formed a set names the rank that asked for another list, with both lists.
fn names_list(failure: &Failure, culprit: Rank, item: &Item) -> bool {
    // The ranks that asked for each list are in ascending order of the first of them, and the second one is at fault. So
    // it is the first of the others, as far as they had asked, if all those come after the culprit.
    let at_fault = failure.rank.is_some_and(|rank| rank >= culprit && item.askers.contains(&rank));
    let differs = failure.reason.contains("Mismatched process sets: One rank asked for");
    at_fault && differs && failure.reason.contains(&format!("{culprit}: "))
}

/// The error text of operations that are not supported while a rank has joined.
const NOT_WITH_JOIN: &str = "is not supported with Join";

fn names_stall(failure: &Failure, rank: Rank, item: &Item) -> bool {
    let reason = &failure.reason;
    if let Kind::Message(pair, tag @ ANY_SOURCE_TAGS..) = item.kind
        && pair.from == rank
    {
        // The sender is unknown.
        let words = format!("{} has waited for a message from any source", pair.to);
        return reason.contains(&words) && reason.contains(&format!("a message with tag {tag}"));
    }
    reason.contains(item.name.as_str()) && reason.contains(&rank.0.to_string()) && reason.contains("seconds")
}
