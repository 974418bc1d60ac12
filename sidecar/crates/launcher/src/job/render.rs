//! The state of a job for people.

use std::fmt::Write as _;

use super::messages::{HostStatus, JobStatus, WorkerActivity, WorkerStatus};

/// The state in lines.
pub(super) fn status(status: &JobStatus) -> String {
    let mut text = head(status);
    text.push('\n');
    text.push_str(&table(&["rank", "worker", "host", "pid", "state"], status.workers.iter().map(worker)));
    text.push('\n');
    text.push_str(&table(&["host", "slots", "workers", "state"], status.hosts.iter().map(|of| host(status, of))));
    let slots = status.exclusions.iter().filter_map(|excluded| excluded.slot.map(|slot| (excluded, slot)));
    for (excluded, slot) in slots {
        let _ = writeln!(text, "slot {slot} of host {} is left out {}", excluded.host, how_long(excluded.seconds));
    }
    text
}

fn head(status: &JobStatus) -> String {
    let JobStatus { job, membership, wanted, min, max, changes, .. } = status;
    let ranks = status.workers.iter().filter(|worker| worker.rank.is_some()).count();
    let mut text = format!(
        "job {job}: membership {membership}, {ranks} ranks, {wanted} wanted at most (--min-np {min}, --max-np {max}), {changes} \
         changes\n"
    );
    if let Some(last) = status.memberships.last() {
        let ago = (status.seconds - last.began_s).max(0.0);
        let _ = writeln!(text, "membership {} began {ago:.0} s ago, because {}", last.number, last.cause);
    }
    if let Some(next) = &status.next {
        let _ = writeln!(text, "membership {} with {} ranks waits for {}", next.number, next.ranks, next.waits_for);
    }
    text
}

fn worker(worker: &WorkerStatus) -> Vec<String> {
    let or_none = |number: Option<u32>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    let state = match worker.state {
        WorkerActivity::Planned => "is about to start",
        WorkerActivity::Starting => "starts",
        WorkerActivity::Waiting => "waits for a membership",
        WorkerActivity::Returning => "is expected back",
        WorkerActivity::Training => "trains",
        WorkerActivity::Leaving => "leaves at its next commit",
        WorkerActivity::Ending => "ends",
    };
    vec![or_none(worker.rank), worker.worker.to_string(), worker.host.clone(), or_none(worker.pid), state.to_owned()]
}

fn host(status: &JobStatus, of: &HostStatus) -> Vec<String> {
    let excluded = status.exclusions.iter().find(|excluded| excluded.host == of.host && excluded.slot.is_none());
    let state = match excluded {
        _ if of.drained => "drained; `ronde job drain HOST --undo` uses it again".to_owned(),
        _ if of.slots == 0 => "not listed any more".to_owned(),
        Some(excluded) => format!("left out {}", how_long(excluded.seconds)),
        None => "used".to_owned(),
    };
    vec![of.host.clone(), of.slots.to_string(), of.workers.to_string(), state]
}

fn how_long(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "for the rest of the job".to_owned(), |seconds| format!("for {seconds:.0} s"))
}

/// Columns as wide as their widest cell.
fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().enumerate().map(|(column, cell)| format!("{cell:<width$}", width = width(column)));
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::messages::{ExclusionStatus, NextMembership, PastMembership};
    use super::*;

    #[test]
    fn the_state_is_a_table() {
        let worker = |rank, number, host: &str, state| WorkerStatus {
            rank,
            worker: number,
            host: host.to_owned(),
            sidecar: 0,
            pid: rank.map(|rank| 100 + rank),
            state,
        };
        let host = |host: &str, slots, drained| HostStatus { host: host.to_owned(), slots, workers: 1, drained };
        let state = JobStatus {
            job: "digits".to_owned(),
            seconds: 30.4,
            membership: 3,
            next: Some(NextMembership {
                number: 4,
                ranks: 1,
                waits_for: "the others to commit their state".to_owned(),
            }),
            wanted: 4,
            min: 1,
            max: 8,
            changes: 2,
            workers: vec![
                worker(Some(0), 0, "alpha", WorkerActivity::Training),
                worker(Some(1), 12, "beta", WorkerActivity::Leaving),
                worker(None, 13, "alpha", WorkerActivity::Waiting),
            ],
            hosts: vec![
                host("alpha", 2, false),
                host("beta", 2, true),
                host("gamma", 1, false),
                host("delta", 0, false),
            ],
            exclusions: vec![
                ExclusionStatus { host: "gamma".to_owned(), slot: None, seconds: Some(7.0) },
                ExclusionStatus { host: "alpha".to_owned(), slot: Some(1), seconds: None },
            ],
            memberships: vec![PastMembership {
                number: 3,
                began_s: 10.0,
                ranks: 2,
                cause: "slots were added".to_owned(),
            }],
            ..JobStatus::default()
        };
        let expected = "\
job digits: membership 3, 2 ranks, 4 wanted at most (--min-np 1, --max-np 8), 2 changes
membership 3 began 20 s ago, because slots were added
membership 4 with 1 ranks waits for the others to commit their state

rank  worker  host   pid  state
0     0       alpha  100  trains
1     12      beta   101  leaves at its next commit
-     13      alpha  -    waits for a membership

host   slots  workers  state
alpha  2      1        used
beta   2      1        drained; `ronde job drain HOST --undo` uses it again
gamma  1      1        left out for 7 s
delta  0      1        not listed any more
slot 1 of host alpha is left out for the rest of the job
";
        assert_eq!(status(&state), expected);
    }
}
