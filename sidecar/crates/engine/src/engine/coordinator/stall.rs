//! Stall reports, as in Horovod: names that some ranks announced long ago and others did not, and incomplete groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use ronde_wire::{
    Activity, Cause, Collective, Control, Failure, Rank, Request, STALL_SHUTDOWN, Seq, SidecarIndex, TensorName, limits,
};

use super::agreement::Agreement;
use super::commits::PendingCommits;
use super::groups::Waiting;
use super::negotiation;
use crate::engine::shared::context::Context;
use crate::engine::shared::{Suspects, wording};
use crate::event::{Action, Time};

/// The state of stall reports: each stall is reported once, and the report is withdrawn when the stall is over.
///
/// Before a report, the sidecars of missing ranks are asked for the activity of these; the report waits for the
/// answers, but not for long.
#[derive(Debug, Default)]
pub(crate) struct Stalls {
    checked: Option<Time>,
    /// What the last report was about; empty after the stall is over.
    reported: BTreeSet<String>,
    query: Option<ActivityQuery>,
    /// The activities of the ranks of the last query, and when they arrived.
    activities: BTreeMap<Rank, (Time, Activity)>,
}

/// A query of activities, for whose answers a report waits.
#[derive(Debug)]
struct ActivityQuery {
    at: Time,
    awaited: BTreeSet<SidecarIndex>,
}

impl Stalls {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Makes the report that is due, if one is. It checks four times per `stall_warning_ms`, so a name is reported at
    /// an age of 1 to 1.25 times that. A later check reports only what waits for more ranks, names or groups.
    pub(crate) fn check(
        &mut self,
        cx: &mut Context,
        agreement: &Agreement,
        pending_commits: &PendingCommits,
        suspects: &Suspects,
    ) {
        if let Some(query) = &self.query {
            if query.awaited.is_empty() || cx.now.ms_since(query.at) >= ACTIVITY_WAIT_MS {
                self.report(cx, agreement, pending_commits, suspects);
            }
            return;
        }
        let warning_ms = cx.config.stall_warning_ms;
        let interval_ms = if self.reported.is_empty() { warning_ms / 4 } else { warning_ms };
        if self.checked.is_some_and(|checked| cx.now.ms_since(checked) < interval_ms) {
            return;
        }
        self.checked = Some(cx.now);
        let missing = missing(cx, agreement, warning_ms);
        if missing.is_empty() {
            self.report(cx, agreement, pending_commits, suspects);
        } else {
            self.query_activities(cx, agreement, missing.into_keys().take(limits::REPORT_RANKS_MAX));
        }
    }

    /// Handles the activities that a sidecar reports.
    pub(crate) fn answered(&mut self, cx: &Context, from: SidecarIndex, activities: Vec<Activity>) {
        // Late and unrequested answers are ignored.
        if self.query.as_mut().is_some_and(|query| query.awaited.remove(&from)) {
            let activities = activities.into_iter().take(limits::REPORT_RANKS_MAX);
            self.activities.extend(activities.map(|of| (of.rank, (cx.now, of.within_limits()))));
        }
    }

    /// The failure that ends the epoch when a tensor has waited for `stall_shutdown_ms`, for ranks or for its group.
    pub(crate) fn shutdown(&self, cx: &Context, agreement: &Agreement) -> Option<Failure> {
        let limit_ms = cx.config.stall_shutdown_ms;
        if limit_ms == 0 {
            return None;
        }
        let stalled = Stalled::find(cx, agreement, limit_ms);
        if stalled.is_empty() {
            return None;
        }
        let first = stalled.missing.keys().next().copied();
        let what = match first {
            Some(_) => "some ranks",
            None if stalled.groups.is_empty() => "a message from any rank",
            None => "others of their groups",
        };
        let reason = format!(
            "{STALL_SHUTDOWN} for {what} for more than {}, the limit of stall_shutdown.{}",
            wording::seconds(limit_ms),
            stalled.list(cx, &self.activities)
        );
        Some(Failure { rank: first, ..Failure::new(Cause::ShutDown, reason) })
    }

    fn query_activities(&mut self, cx: &mut Context, agreement: &Agreement, ranks: impl Iterator<Item = Rank>) {
        let mut by_sidecar: BTreeMap<SidecarIndex, Vec<Rank>> = BTreeMap::new();
        for rank in ranks {
            if let Some(sidecar) = cx.config.world.sidecar_of(rank) {
                by_sidecar.entry(sidecar).or_default().push(rank);
            }
        }
        self.activities.clear();
        self.query = Some(ActivityQuery { at: cx.now, awaited: by_sidecar.keys().copied().collect() });
        for (sidecar, ranks) in by_sidecar {
            let to = [sidecar].into_iter().collect();
            cx.send_down(&to, agreement.epoch, Seq(0), Control::AskActivity { ranks });
        }
    }

    fn report(
        &mut self,
        cx: &mut Context,
        agreement: &Agreement,
        pending_commits: &PendingCommits,
        suspects: &Suspects,
    ) {
        self.query = None;
        let warning_ms = cx.config.stall_warning_ms;
        let with_plugins = pending_commits.overdue(cx, warning_ms);
        let stalled = Stalled { with_plugins, ..Stalled::find(cx, agreement, warning_ms) };
        let subjects = stalled.subjects();
        let is_new = !subjects.is_subset(&self.reported);
        let was_reported = !self.reported.is_empty();
        self.reported = subjects;
        let Suspects { sidecars, ranks: suspect_ranks } = suspects.clone();
        if !stalled.is_empty() && is_new {
            let text = stalled.warning(warning_ms) + &stalled.list(cx, &self.activities);
            let ranks = stalled.missing.into_keys().collect();
            cx.act(Action::Notice { sidecars, ranks, text });
        } else if stalled.is_empty() && was_reported {
            let text =
                "The stall is over: no tensor has waited long for a rank, for its group or for a plugin.".to_owned();
            cx.act(Action::Notice { sidecars, ranks: suspect_ranks, text });
        }
    }
}

/// Everything that has waited for a given time.
struct Stalled {
    missing: Missing,
    /// Descriptions of groups with tensors that wait for others.
    groups: Vec<String>,
    /// Descriptions of receives from any source.
    receives: Vec<String>,
    /// Descriptions of operations that wait for their plugins.
    with_plugins: Vec<String>,
}

impl Stalled {
    fn find(cx: &Context, agreement: &Agreement, age_ms: u64) -> Self {
        let old = |waiting: &Waiting<'_>| cx.now.ms_since(waiting.since()) >= age_ms;
        let groups = agreement.groups.waiting().filter(old).take(limits::REPORT_NAMES_MAX);
        let groups = groups.map(|waiting| group(cx, agreement, &waiting)).collect();
        let receives = agreement.matching.waiting(cx.now, age_ms).take(limits::REPORT_NAMES_MAX).collect();
        Self { missing: missing(cx, agreement, age_ms), groups, receives, with_plugins: Vec::new() }
    }

    fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.groups.is_empty() && self.receives.is_empty() && self.with_plugins.is_empty()
    }

    /// What it is about, without the ages that change from check to check.
    fn subjects(&self) -> BTreeSet<String> {
        let ranks = self.missing.iter().map(|(rank, entry)| format!("{rank} {}", entry.oldest));
        let numbers =
            |what: &str, count: usize| (1..=count).map(|number| format!("{what} {number}")).collect::<Vec<_>>();
        let groups = numbers("group", self.groups.len());
        let receives = numbers("receive", self.receives.len());
        ranks.chain(groups).chain(receives).chain(numbers("plugin", self.with_plugins.len())).collect()
    }

    fn warning(&self, warning_ms: u64) -> String {
        let seconds = wording::seconds(warning_ms);
        if self.missing.is_empty() && self.groups.is_empty() && !self.receives.is_empty() {
            return format!(
                "One or more receives from any source have waited for more than {seconds}. Have a rank send with that tag in \
                 that process set, or find out what holds the senders up."
            );
        }
        if self.missing.is_empty() && self.groups.is_empty() {
            return format!(
                "One or more operations have waited for their plugins for more than {seconds}. All ranks have submitted \
                 them; check the load of the sidecars that are not done, and the speed of the plugin (ronde plugin bench)."
            );
        }
        if self.missing.is_empty() {
            return format!(
                "One or more tensors wait for others of their groups for more than {seconds}. Have all ranks ask for all \
                 tensors of a group, or give the group its true size."
            );
        }
        format!(
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting \
             for remainder of ranks for more than {} seconds. Have all ranks run the same operations, or find out what \
             holds these up.",
            warning_ms / 1_000
        )
    }

    /// Missing ranks, groups, and the known activities of the ranks, one per line.
    fn list(&self, cx: &Context, activities: &BTreeMap<Rank, (Time, Activity)>) -> String {
        let mut text = String::new();
        if !self.missing.is_empty() {
            text.push_str("\nMissing ranks:");
        }
        for (rank, entry) in self.missing.iter().take(limits::REPORT_RANKS_MAX) {
            let _ = write!(text, "\n{}: [{}", rank.0, entry.names.join(", "));
            let _ = if entry.more > 0 { write!(text, " and {} more]", entry.more) } else { write!(text, "]") };
        }
        if self.missing.len() > limits::REPORT_RANKS_MAX {
            let _ = write!(text, "\nand {} more ranks", self.missing.len() - limits::REPORT_RANKS_MAX);
        }
        for waiting in self.groups.iter().chain(&self.receives).chain(&self.with_plugins) {
            let _ = write!(text, "\n{waiting}");
        }
        for (rank, entry) in &self.missing {
            let Some((at, activity)) = activities.get(rank) else { continue };
            let age = wording::seconds(cx.now.ms_since(entry.since));
            let now = activity.clone().older_by(cx.now.ms_since(*at));
            let _ = write!(text, "\n{rank} has not asked for {} for {age}; {now}.", entry.oldest);
        }
        text
    }
}

/// The description of a waiting group: its progress, its age, and the missing tensors.
fn group(cx: &Context, agreement: &Agreement, waiting: &Waiting<'_>) -> String {
    let progress = waiting.progress();
    let age = wording::seconds(cx.now.ms_since(waiting.since()));
    let lacks = |request: &Request| {
        request.group.as_ref().is_some_and(|group| waiting.lacks(request.set, group, &request.name))
    };
    let submitted: Vec<&TensorName> =
        agreement.negotiation.waiting().filter(|name| lacks(name.request)).map(|name| &name.request.name).collect();
    let unknown = waiting.missing().saturating_sub(submitted.len());
    let mut lacking = Vec::new();
    if !submitted.is_empty() {
        let names: Vec<&str> = submitted.iter().take(limits::REPORT_NAMES_MAX).map(|name| name.as_str()).collect();
        let more = if submitted.len() > names.len() { " and others" } else { "" };
        lacking.push(format!("some ranks have asked for {}{more}", names.join(", ")));
    }
    if unknown > 0 {
        lacking.push(format!("nobody for {unknown} more"));
    }
    format!("{}, for {age} now; {}.", wording::capitalised(&progress), lacking.join(", "))
}

/// The names that wait for each missing rank.
pub(super) type Missing = BTreeMap<Rank, MissingRank>;

/// The names that wait for a rank.
pub(super) struct MissingRank {
    /// Some of the names.
    names: Vec<String>,
    /// The number of further names.
    more: usize,
    /// The name that waits for longest, and since when.
    pub(super) oldest: TensorName,
    pub(super) since: Time,
}

/// The missing ranks of names that have waited for so long. Joins are excluded: they wait for the slowest rank by
/// design.
pub(super) fn missing(cx: &Context, agreement: &Agreement, age_ms: u64) -> Missing {
    let mut missing = Missing::new();
    let joins = |waiting: &negotiation::Waiting<'_>| waiting.request.collective == Collective::Join;
    let negotiated = agreement.negotiation.waiting().filter(|waiting| !joins(waiting));
    let negotiated = negotiated.map(|waiting| {
        (&waiting.request.name, waiting.since, waiting.missing(agreement.joins.of(waiting.request.set)))
    });
    let formed = agreement.member_sets.waiting().map(|waiting| (waiting.name, waiting.since, waiting.missing));
    for (name, since, ranks) in negotiated.chain(formed) {
        if cx.now.ms_since(since) < age_ms {
            continue;
        }
        for rank in ranks {
            let first = || MissingRank { names: Vec::new(), more: 0, oldest: name.clone(), since };
            let entry = missing.entry(rank).or_insert_with(first);
            if since < entry.since {
                (entry.oldest, entry.since) = (name.clone(), since);
            }
            if entry.names.len() < limits::REPORT_NAMES_MAX {
                entry.names.push(name.to_string());
            } else {
                entry.more += 1;
            }
        }
    }
    missing
}

/// How long a report waits for the activities of the missing ranks.
const ACTIVITY_WAIT_MS: u64 = 500;
