//! The root cause of a job that failed, from the reports of its ranks and sidecars, and the block that names it. Pure.
//!
//! One process fails first. The others fail because it is gone, and often exit before it does: an interpreter that ends
//! with an exception takes longer than one that gets an error. So the order of exits proves little. The order in which
//! sessions ended, and the error code in the last lines of a rank, prove more.

use std::collections::BTreeMap;

use ronde_bootstrap::codes::Code;

use super::own_errors;
use crate::envelope::Status;

/// What is known of a rank.
#[derive(Clone, Debug, Default)]
pub(super) struct RankReport {
    /// Its position among the ranks whose sessions have ended.
    pub(super) left: Option<usize>,
    /// How its process ended.
    pub(super) status: Option<Status>,
    /// Whether its process was stopped by the launcher: then its status says nothing about the rank.
    pub(super) is_stopped: bool,
    /// How many operations it had called when its session ended.
    pub(super) operations: Option<u64>,
    /// The last lines of its standard error.
    pub(super) stderr_tail: Vec<String>,
}

/// What caused the end of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RootCause {
    /// This rank failed.
    Rank(u32),
    /// This rank left, in order, while others had operations.
    LeftEarly(u32),
    /// This sidecar ended.
    Sidecar(u32),
    /// The connection to this host ended.
    Host(usize),
}

/// What a job lost besides ranks, each in the order of its numbers.
#[derive(Clone, Debug, Default)]
pub(super) struct Losses {
    /// The sidecars that ended with a failure while they were needed.
    pub(super) sidecars: Vec<u32>,
    /// The hosts whose connection ended while it was needed.
    pub(super) hosts: Vec<usize>,
}

/// Finds the root cause.
///
/// `first_failed` is the rank whose process was the first to end with a failure.
pub(super) fn root_cause(ranks: &[RankReport], first_failed: u32, losses: &Losses) -> RootCause {
    let has_failed = |rank: &RankReport| !rank.is_stopped && rank.status.is_some_and(|status| !status.is_success());
    let failed = first_to_leave(ranks, first_failed, has_failed).unwrap_or(first_failed);
    if misses_a_sidecar(ranks, failed) {
        let sidecar = losses.sidecars.first().map(|sidecar| RootCause::Sidecar(*sidecar));
        let host = losses.hosts.first().map(|host| RootCause::Host(*host));
        return sidecar.or(host).unwrap_or(RootCause::Rank(failed));
    }
    // A rank that still runs after it has left in order may be saving its model.
    let left_well = |rank: &RankReport| rank.is_stopped || rank.status.is_none_or(Status::is_success);
    // E305 if it shut its session down; E301 if its process ended, with status 0, without that.
    let misses_a_rank = names(ranks, failed, Code::LeftEarly) || names(ranks, failed, Code::WorkerFailed);
    match first_to_leave(ranks, failed, left_well).filter(|_| misses_a_rank) {
        Some(rank) => RootCause::LeftEarly(rank),
        None => RootCause::Rank(failed),
    }
}

/// Whether a rank ended because a sidecar was lost, as its own error says.
pub(super) fn misses_a_sidecar(ranks: &[RankReport], rank: u32) -> bool {
    names(ranks, rank, Code::SidecarEnded)
}

/// The first rank whose session ended before that of `other`, of those that `fits` accepts.
fn first_to_leave(ranks: &[RankReport], other: u32, fits: impl Fn(&RankReport) -> bool) -> Option<u32> {
    let until = ranks.get(other as usize).and_then(|rank| rank.left).unwrap_or(usize::MAX);
    let left = (0..).zip(ranks).filter(|(_, rank)| fits(rank));
    let left = left.filter_map(|(number, rank)| rank.left.filter(|left| *left < until).map(|left| (left, number)));
    left.min().map(|(_, number)| number)
}

/// Whether a rank ended with an error of ronde that has this code.
fn names(ranks: &[RankReport], rank: u32, code: Code) -> bool {
    ranks.get(rank as usize).is_some_and(|rank| own_errors::codes(&rank.stderr_tail).contains(&code))
}

/// The number of operations of each rank, in one line; `None` if all that are known are equal.
pub(super) fn operations(ranks: &[RankReport]) -> Option<String> {
    let mut by_count: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for (number, rank) in (0..).zip(ranks) {
        if let Some(count) = rank.operations {
            by_count.entry(count).or_default().push(number);
        }
    }
    let line = |(count, ranks): (&u64, &Vec<u32>)| {
        let plural = if ranks.len() == 1 { "" } else { "s" };
        format!("{count} by rank{plural} {}", ranges(ranks))
    };
    // In ascending order: those that did the least come first.
    let shown: Vec<String> = by_count.iter().take(COUNTS_MAX).map(line).collect();
    let rest: usize = by_count.values().skip(COUNTS_MAX).map(Vec::len).sum();
    let rest = match rest {
        0 => String::new(),
        1 => ", more by 1 other rank".to_owned(),
        more => format!(", more by {more} other ranks"),
    };
    (by_count.len() > 1).then(|| shown.join(", ") + &rest)
}

/// How a rank or worker besides the root cause failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Other {
    /// How its process ended.
    pub(super) status: Status,
    /// Whether it ended because of the root cause, and not of an error of its own.
    pub(super) is_follower: bool,
}

/// The lines that count the other ranks that failed, by how they ended: first those that failed by themselves.
pub(super) fn others(ranks: &[RankReport], cause: RootCause) -> Vec<String> {
    let culprit = match cause {
        RootCause::Rank(rank) | RootCause::LeftEarly(rank) => Some(rank),
        RootCause::Sidecar(_) | RootCause::Host(_) => None,
    };
    // A rank that is blamed although it is a follower by its own error has the same cause as the other followers: all ranks
    // of a job that has stalled get one error.
    let blamed = match cause {
        RootCause::Rank(rank) => ranks.get(rank as usize),
        _ => None,
    };
    let has_common_cause = blamed.is_some_and(|rank| own_errors::ended_as_follower(&rank.stderr_tail) == Some(true));
    let other = |rank: &RankReport| {
        let is_follower = match own_errors::is_follower(&rank.stderr_tail) {
            Some(is_follower) => is_follower && !has_common_cause,
            None => rank.is_stopped,
        };
        Some(Other { status: rank.status?, is_follower })
    };
    let others = (0..).zip(ranks).filter(|(number, _)| Some(*number) != culprit);
    others_lines(if culprit.is_some() { "other rank" } else { "rank" }, others.filter_map(|(_, rank)| other(rank)))
}

/// The same of others, which a word in the singular names.
pub(super) fn others_lines(who: &str, others: impl Iterator<Item = Other>) -> Vec<String> {
    let (followers, alike): (Vec<Other>, Vec<Other>) =
        others.filter(|other| !other.status.is_success()).partition(|other| other.is_follower);
    let lines = [(alike, "failed, too"), (followers, "ended because of that")];
    lines.into_iter().filter_map(|(others, what)| others_line(who, what, &others)).collect()
}

fn others_line(who: &str, what: &str, others: &[Other]) -> Option<String> {
    let mut ends: BTreeMap<String, usize> = BTreeMap::new();
    for other in others {
        *ends.entry(end(other.status)).or_default() += 1;
    }
    let total = others.len();
    let plural = if total == 1 { "" } else { "s" };
    let rest: usize = ends.values().skip(COUNTS_MAX).sum();
    let rest = (rest > 0).then(|| format!("{rest} in other ways"));
    let how: Vec<String> = match ends.len() {
        1 => ends.into_keys().collect(),
        _ => ends.into_iter().take(COUNTS_MAX).map(|(end, count)| format!("{count} {end}")).chain(rest).collect(),
    };
    (total > 0).then(|| format!("{total} {who}{plural} {what}, {}", how.join(", ")))
}

fn end(status: Status) -> String {
    match status {
        Status::Code(code) => format!("with exit code {code}"),
        Status::OutOfMemory => "for lack of memory".to_owned(),
        Status::Signal(_) => status.to_string().replacen("was killed by", "by", 1),
    }
}

/// `0-2 and 5`.
fn ranges(numbers: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => runs.push((*number, *number)),
        }
    }
    let of = |(first, last): &(u32, u32)| if first == last { first.to_string() } else { format!("{first}-{last}") };
    let rest: u32 = runs.iter().skip(RANGES_MAX).map(|(first, last)| last - first + 1).sum();
    let rest = (rest > 0).then(|| format!("{rest} more"));
    let texts: Vec<String> = runs.iter().take(RANGES_MAX).map(of).chain(rest).collect();
    match texts.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => texts.concat(),
    }
}

/// How many numbers of operations, or ways to end, one line has.
const COUNTS_MAX: usize = 8;
/// How many ranges of ranks a list has.
const RANGES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(left: usize, code: i32, operations: u64, line: &str) -> RankReport {
        let stderr_tail = vec!["Traceback".to_owned(), line.to_owned()];
        let status = Some(Status::Code(code));
        RankReport { left: Some(left), status, is_stopped: false, operations: Some(operations), stderr_tail }
    }

    #[test]
    fn a_rank_that_ended_well_without_shutting_down_is_the_cause() {
        let ranks = [
            rank(1, 1, 4, "PeerLostError: rank 1 [RONDE-E301]"),
            rank(0, 0, 3, ""),
            rank(2, 1, 4, "PeerLostError: rank 1 [RONDE-E301]"),
        ];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::LeftEarly(1));
    }

    #[test]
    fn the_rank_that_left_first_and_failed_is_the_cause_although_another_exits_first() {
        let ranks = [
            rank(1, 1, 4, "PeerLostError: rank 1 [RONDE-E301]"),
            rank(0, 1, 4, "ValueError"),
            rank(2, 1, 4, "PeerLostError: rank 1 [RONDE-E301]"),
        ];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(1));
        assert_eq!(operations(&ranks), None);
        let expected = "2 other ranks ended because of that, with exit code 1";
        assert_eq!(others(&ranks, RootCause::Rank(1)), [expected]);
    }

    #[test]
    fn a_rank_that_takes_fewer_steps_is_the_cause_of_those_that_fail_because_it_left() {
        let mut ranks = [
            rank(1, 1, 6, "ShutDownError: rank 1 left [RONDE-E305]"),
            rank(0, 0, 3, ""),
            rank(2, 1, 6, "ShutDownError: rank 1 left [RONDE-E305]"),
        ];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::LeftEarly(1));
        assert_eq!(operations(&ranks).as_deref(), Some("3 by rank 1, 6 by ranks 0 and 2"));
        ranks[1].status = None;
        assert_eq!(
            root_cause(&ranks, 0, &Losses::default()),
            RootCause::LeftEarly(1),
            "it left, and its process still runs"
        );
        (ranks[2].status, ranks[2].is_stopped) = (Some(Status::Signal(15)), true);
        let expected = "2 other ranks ended because of that, 1 by signal 15 (SIGTERM), 1 with exit code 1";
        assert_eq!(others(&ranks, RootCause::LeftEarly(1)), [expected]);
    }

    #[test]
    fn a_failure_of_its_own_is_not_blamed_on_a_rank_that_has_finished() {
        let ranks = [rank(1, 1, 6, "ValueError: no data"), rank(0, 0, 6, "")];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(0));
        assert!(others(&ranks, RootCause::Rank(0)).is_empty());
    }

    #[test]
    fn ranks_that_fail_by_themselves_are_not_counted_as_followers() {
        let mismatch = "ronde.errors.MismatchError: Mismatched shapes [RONDE-E306]";
        let mut ranks = [
            rank(0, 1, 4, mismatch),
            rank(1, 1, 4, mismatch),
            rank(2, 5, 4, "no data"),
            rank(3, 1, 4, "PeerLostError: rank 0 [RONDE-E301]"),
            rank(4, 143, 4, "saved"),
        ];
        ranks[4].is_stopped = true;
        let expected = [
            "2 other ranks failed, too, 1 with exit code 1, 1 with exit code 5",
            "2 other ranks ended because of that, 1 with exit code 1, 1 with exit code 143",
        ];
        assert_eq!(others(&ranks, RootCause::Rank(0)), expected);
        ranks[1].is_stopped = true;
        assert_eq!(others(&ranks, RootCause::Rank(0)), expected, "it was about to end with its own error");
    }

    #[test]
    fn ranks_with_one_error_that_no_rank_has_caused_are_not_counted_as_followers() {
        let stalled = "ShutDownError: ronde has been shut down: tensors have waited [RONDE-E305] (at a.py:4)";
        let ranks = [rank(0, 1, 4, stalled), rank(1, 1, 4, stalled)];
        assert_eq!(others(&ranks, RootCause::Rank(1)), ["1 other rank failed, too, with exit code 1"]);
        // A line of a log is not what the blamed rank ended with.
        let ranks = [rank(0, 1, 4, stalled), rank(1, 1, 4, "handled: rank 3 was killed [RONDE-E301]")];
        assert_eq!(others(&ranks, RootCause::Rank(1)), ["1 other rank ended because of that, with exit code 1"]);
    }

    #[test]
    fn an_error_that_names_a_rank_that_left_is_not_blamed_on_one_that_left_later() {
        let ranks = [rank(0, 1, 6, "ShutDownError: stalled [RONDE-E305]"), rank(1, 0, 6, "")];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(0));
    }

    #[test]
    fn a_lost_sidecar_is_the_cause_of_the_ranks_that_it_served() {
        let ranks = [rank(1, 1, 2, "PeerLostError: gone [RONDE-E401]"), RankReport::default()];
        assert!(misses_a_sidecar(&ranks, 0));
        let lost = Losses { sidecars: vec![1], hosts: vec![1] };
        assert_eq!(root_cause(&ranks, 0, &lost), RootCause::Sidecar(1));
        let host = Losses { sidecars: Vec::new(), hosts: vec![1] };
        assert_eq!(root_cause(&ranks, 0, &host), RootCause::Host(1), "with its host");
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(0), "no sidecar has ended");
        let expected = "1 rank ended because of that, with exit code 1";
        assert_eq!(others(&ranks, RootCause::Sidecar(1)), [expected]);
        let own = [rank(0, 1, 2, "ValueError")];
        assert_eq!(root_cause(&own, 0, &lost), RootCause::Rank(0), "the sidecar ended for another reason");
    }

    #[test]
    fn a_rank_without_a_session_can_fail_first() {
        let ranks = [RankReport { status: Some(Status::Code(2)), ..RankReport::default() }, RankReport::default()];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(0));
        assert_eq!(operations(&ranks), None);
    }

    #[test]
    fn ranks_are_listed_in_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5]), "0-2 and 5");
        assert_eq!(ranges(&[0, 2, 4, 5]), "0, 2 and 4-5");
        assert_eq!(ranges(&[7]), "7");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn a_rank_that_fails_slowly_did_not_leave_early() {
        let mut ranks = [rank(1, 1, 6, "ShutDownError: rank 1 left [RONDE-E305]"), rank(0, 1, 3, "ValueError: bad")];
        ranks[1].status = None;
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::LeftEarly(1), "as far as is known");
        ranks[1].status = Some(Status::Code(1));
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(1));
        ranks[1].is_stopped = true;
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::LeftEarly(1), "the launcher has stopped it");
        let expected = "1 other rank ended because of that, with exit code 1";
        assert_eq!(others(&ranks, RootCause::Rank(0)), [expected]);
    }

    #[test]
    fn a_code_that_a_program_writes_by_itself_blames_nobody() {
        let ranks = [rank(1, 1, 6, "see [RONDE-E305] in the manual of ronde"), rank(0, 0, 6, "")];
        assert_eq!(root_cause(&ranks, 0, &Losses::default()), RootCause::Rank(0));
    }

    #[test]
    fn the_lines_about_many_ranks_are_bounded() {
        let ranks: Vec<RankReport> = (0..10_000)
            .map(|number| rank(number, i32::try_from(number % 200).expect("small") + 1, number as u64 % 5_000, ""))
            .collect();
        let counts = operations(&ranks).expect("they differ");
        assert!(counts.starts_with("0 by ranks 0 and 5000, 1 by ranks 1 and 5001, "), "{counts}");
        assert!(counts.ends_with(", 7 by ranks 7 and 5007, more by 9984 other ranks"), "{counts}");
        let alternating: Vec<RankReport> = (0..10_000).map(|number| rank(number, 1, number as u64 % 2, "")).collect();
        let counts = operations(&alternating).expect("they differ");
        assert!(
            counts.starts_with("0 by ranks 0, 2, 4, 6, 8, 10, 12, 14 and 4992 more, 1 by ranks 1, 3, "),
            "{counts}"
        );
        let text = others(&ranks, RootCause::Rank(0)).concat();
        assert!(text.ends_with(", 9600 in other ways") && text.len() < 400, "{text}");
    }
}
