//! Says in sentences what the merged records show. Pure.

use std::collections::BTreeMap;

use ronde_bootstrap::flight::OperationRecord;

use super::view::{RankView, View};
use super::waits::Waits;

/// What the records show, most important first.
pub(super) fn sentences(view: &View<'_>) -> Vec<String> {
    let waits = Waits::of(view);
    let mut lines = head(view);
    lines.extend(waits.divergence());
    lines.extend(waits.missing());
    lines.extend(waits.unrecorded());
    lines.extend(waits.outdated());
    lines.extend(unperformed(view, &waits));
    lines.extend(view.ranks.iter().map(|(rank, of)| counts(view, *rank, of)));
    lines.extend(slowest(view));
    lines.extend(last_most_often(view));
    lines
}

/// Whose records these are, and why they were made.
fn head(view: &View<'_>) -> Vec<String> {
    let Some(first) = view.records.values().next() else { return Vec::new() };
    let sidecars = listed("sidecar", view.records.keys().copied());
    let ranks = counted(view.placement.len() as u64, "rank");
    let mut lines = vec![format!("job {}: records of {sidecars}; {ranks}, epoch {}", first.job, view.epoch)];
    let failure = view.records.values().find_map(|record| Some((record.sidecar, record.failure.as_deref()?)));
    lines.extend(failure.map(|(sidecar, reason)| format!("sidecar {sidecar} recorded after a failure: {reason}")));
    let mut absent: Vec<u32> = view.placement.iter().copied().filter(|at| !view.records.contains_key(at)).collect();
    absent.sort_unstable();
    absent.dedup();
    if !absent.is_empty() {
        let ranks = (0..).zip(view.placement).filter(|(_, at)| absent.contains(at)).map(|(rank, _)| rank);
        let (serves, its) = if absent.len() == 1 { ("serves", "its") } else { ("serve", "their") };
        let (sidecars, ranks) = (listed("sidecar", absent.iter().copied()), listed("rank", ranks));
        lines.push(format!("no record of {sidecars}, which {serves} {ranks}: {its} ranks are not analyzed"));
    }
    if view.spread_us() >= SPREAD_SHOWN_US {
        lines.push(format!("the records were made {} apart, by the clocks of their hosts", duration(view.spread_us())));
    }
    match view.left_out {
        0 => {}
        1 => lines.push("1 record of an earlier time or of another run or job is left out".to_owned()),
        more => lines.push(format!("{more} records of earlier times or of other runs and jobs are left out")),
    }
    lines
}

/// The operations that a sidecar has not performed although no rank is known to be missing.
fn unperformed(view: &View<'_>, waits: &Waits<'_, '_>) -> Vec<String> {
    let of_sidecar = |(sidecar, record): (&u32, &&ronde_bootstrap::flight::FlightRecord)| {
        let runs = |of: &&OperationRecord| {
            let is_over = of.epoch != view.epoch || of.performed_us.is_some() || of.failed.is_some();
            // Sidecars admit the operations of a schedule in its order: those after it wait for the same ranks.
            let waits_too = of.scheduled && waits.first_incomplete().is_some_and(|first| of.seq >= first);
            !is_over && !waits_too
        };
        let first = record.operations.iter().find(|of| runs(of))?;
        let count = counted(record.operations.iter().filter(|of| runs(of)).count() as u64, "operation");
        let age = duration(record.made_us.saturating_sub(first.ordered_us));
        let state = if first.started_us.is_some() { "started" } else { "ordered and not started" };
        Some(format!(
            "sidecar {sidecar} had {count} in progress; the oldest is {:?} (seq {}), {state}, {age} after its order",
            first.name, first.seq
        ))
    };
    view.records.iter().filter_map(of_sidecar).collect()
}

/// How many requests of a rank ended in which way.
fn counts(view: &View<'_>, rank: u32, of: &RankView<'_>) -> String {
    let requests = &of.requests.requests;
    let completed = requests.iter().filter(|request| request.ended.as_ref().is_some_and(|end| end.failed.is_none()));
    let failed = requests.iter().filter(|request| request.ended.as_ref().is_some_and(|end| end.failed.is_some()));
    let pending = requests.iter().filter(|request| request.ended.is_none() && request.epoch == view.epoch);
    let kept = match requests.len() as u64 {
        kept if kept < of.requests.submitted => format!(", of which the newest {kept} are recorded"),
        _ => String::new(),
    };
    format!(
        "rank {rank}: {} submitted{kept}; {} completed, {} failed, {} pending; {}",
        of.requests.submitted,
        completed.count(),
        failed.count(),
        pending.count(),
        last_call(of)
    )
}

/// `its last call was allreduce "layer3.bias" at train.py:81, 12.3 s before the dump`.
pub(super) fn last_call(of: &RankView<'_>) -> String {
    let moment = if of.record.failure.is_some() { "failure" } else { "dump" };
    match of.requests.requests.last() {
        None => "it has submitted no operation".to_owned(),
        Some(last) => {
            let at = last.site.as_ref().map(|site| format!(" at {site}")).unwrap_or_default();
            let (name, age) = (label(&last.name, &last.collective), duration(of.age_us(last.submitted_us)));
            format!("its last call was {} {name}{at}, {age} before the {moment}", last.collective)
        }
    }
}

/// The operations that took longest from their order to their end, on the slowest sidecar.
fn slowest(view: &View<'_>) -> Vec<String> {
    let mut longest: BTreeMap<(u64, u64), (u64, u32, &OperationRecord)> = BTreeMap::new();
    for (sidecar, record) in &view.records {
        for of in record.operations.iter().filter(|of| of.failed.is_none()) {
            let Some(took) = of.performed_us.map(|at| at.saturating_sub(of.ordered_us)) else { continue };
            let known = longest.entry((of.epoch, of.seq)).or_insert((took, *sidecar, of));
            if known.0 < took {
                *known = (took, *sidecar, of);
            }
        }
    }
    let mut found: Vec<_> = longest.into_values().collect();
    found.sort_by_key(|(took, _, of)| (std::cmp::Reverse(*took), of.seq));
    let line = |(took, sidecar, of): (u64, u32, &OperationRecord)| {
        let more = match of.tensors.saturating_sub(1) {
            0 => String::new(),
            more => format!(" and {}", counted(u64::from(more), "more tensor")),
        };
        format!("slowest: {:?}{more} (seq {}) took {} on sidecar {sidecar}", of.name, of.seq, duration(took))
    };
    found.into_iter().take(SLOWEST_MAX).map(line).collect()
}

/// The ranks that others waited for most often, by the counts of the coordinator.
fn last_most_often(view: &View<'_>) -> Option<String> {
    let record = view.records.values().rfind(|record| record.last_to_be_ready.iter().any(|count| *count > 0))?;
    let mut ranks: Vec<(u64, usize)> = record.last_to_be_ready.iter().copied().zip(0..).collect();
    ranks.sort_by_key(|(count, rank)| (std::cmp::Reverse(*count), *rank));
    let shown = ranks.into_iter().filter(|(count, _)| *count > 0).take(LAST_MAX).map(|(count, rank)| {
        let waited = record.waited_for_us.get(rank).copied().unwrap_or(0);
        format!("rank {rank} {} (others waited {} for it)", counted(count, "time"), duration(waited))
    });
    Some(format!("last to submit: {}", shown.collect::<Vec<_>>().join(", ")))
}

/// The name as the program knows it, in quotation marks.
pub(super) fn label(name: &str, collective: &str) -> String {
    let own = name.strip_prefix(collective).and_then(|rest| rest.strip_prefix('.')).filter(|own| !own.is_empty());
    format!("{:?}", own.unwrap_or(name))
}

/// `1 rank`, or `4 ranks`.
pub(super) fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// `rank 3`, or `ranks 0, 1 and 2`.
pub(super) fn listed(what: &str, numbers: impl IntoIterator<Item = u32>) -> String {
    let numbers: Vec<String> = numbers.into_iter().map(|number| number.to_string()).collect();
    match numbers.as_slice() {
        [one] => format!("{what} {one}"),
        [some @ .., last] if numbers.len() <= LISTED_MAX => format!("{what}s {} and {last}", some.join(", ")),
        many => format!(
            "{what}s {} and {} more",
            many[..LISTED_MAX.min(many.len())].join(", "),
            many.len().saturating_sub(LISTED_MAX)
        ),
    }
}

/// A time with three or four digits.
pub(super) fn duration(us: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "it is rounded")]
    let seconds = us as f64 / 1e6;
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

/// Sidecars that are asked at the same time make their records within less.
const SPREAD_SHOWN_US: u64 = 1_000_000;
const LISTED_MAX: usize = 16;
const SLOWEST_MAX: usize = 5;
const LAST_MAX: usize = 3;
