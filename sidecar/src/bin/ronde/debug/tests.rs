use proptest::prelude::*;
use ronde_bootstrap::codes::coded;
use ronde_bootstrap::flight::{
    EndRecord, FORMAT, FailureRecord, OperationRecord, OrderedRecord, RankRecord, RequestRecord, SetRecord, VERSION,
    WaitingRecord,
};

use super::*;

pub(super) const MADE_US: u64 = 100_000_000;

/// A request that waits since this time.
fn waiting(name: &str, submitted_us: u64) -> RequestRecord {
    RequestRecord {
        set: 0,
        name: format!("allreduce.{name}"),
        collective: "allreduce".to_owned(),
        bytes: 4,
        site: Some(format!("train.py:{}", submitted_us % 1_000)),
        epoch: 1,
        submitted_us,
        announced_us: Some(submitted_us + 1),
        ordered: None,
        withdrawn: false,
        ended: None,
    }
}

/// A request that a schedule has admitted as this operation, and that waits.
fn scheduled(name: &str, submitted_us: u64, seq: u64) -> RequestRecord {
    RequestRecord {
        ordered: Some(OrderedRecord { seq, at_us: submitted_us + 2, scheduled: true }),
        ..waiting(name, submitted_us)
    }
}

/// A request that is complete.
fn done(name: &str, submitted_us: u64, seq: u64) -> RequestRecord {
    let ordered = Some(OrderedRecord { seq, at_us: submitted_us + 2, scheduled: false });
    RequestRecord {
        ordered,
        ended: Some(EndRecord { at_us: submitted_us + 9, failed: None }),
        ..waiting(name, submitted_us)
    }
}

/// A request that failed.
fn failed(name: &str, submitted_us: u64, cause: &str, ends_epoch: bool) -> RequestRecord {
    let failed = Some(FailureRecord { cause: cause.to_owned(), reason: "why".to_owned(), ends_epoch });
    RequestRecord { ended: Some(EndRecord { at_us: MADE_US - 1, failed }), ..waiting(name, submitted_us) }
}

/// The record of a sidecar in a job with this placement; each rank has these requests.
fn record(sidecar: u32, placement: &[u32], ranks: Vec<(u32, Vec<RequestRecord>)>) -> FlightRecord {
    let ranks = ranks.into_iter();
    let ranks = ranks.map(|(rank, requests)| RankRecord { rank, submitted: requests.len() as u64, requests });
    FlightRecord {
        format: FORMAT.to_owned(),
        version: VERSION,
        job: "job".to_owned(),
        run: String::new(),
        sidecar,
        made_us: MADE_US,
        failure: None,
        epoch: 1,
        epoch_began_us: 1,
        placement: placement.to_vec(),
        sets: Vec::new(),
        ranks: ranks.collect(),
        operations: Vec::new(),
        last_to_be_ready: Vec::new(),
        waited_for_us: Vec::new(),
        waiting: Vec::new(),
    }
}

fn analysed(records: &[FlightRecord]) -> Vec<String> {
    analysis::sentences(&view::View::of(records))
}

/// Whether a line is among them.
fn includes(records: &[FlightRecord], line: &str) {
    let lines = analysed(records);
    assert!(lines.iter().any(|of| of == line), "{line:?} is not in {lines:#?}");
}

/// Whether no line contains this.
fn excludes(records: &[FlightRecord], part: &str) {
    let lines = analysed(records);
    assert!(!lines.iter().any(|of| of.contains(part)), "{part:?} is in {lines:#?}");
}

/// Four ranks on two sidecars, where rank 3 stopped before layer4.
pub(super) fn stuck() -> [FlightRecord; 2] {
    let rank = |at: u64| vec![done("layer3.bias", 80_000_081, 7), waiting("layer4.weight", at)];
    let first = record(0, &[0, 0, 1, 1], vec![(0, rank(90_000_090)), (1, rank(91_000_090))]);
    let second = record(1, &[0, 0, 1, 1], vec![(2, rank(92_000_090)), (3, vec![done("layer3.bias", 87_700_081, 7)])]);
    [first, second]
}

#[test]
fn the_missing_rank_is_named_with_its_last_call() {
    includes(
        &stuck(),
        r#"rank 3 never submitted "layer4.weight"; its last call was allreduce "layer3.bias" at train.py:81, 12.3 s before the dump"#,
    );
    includes(&stuck(), "  ranks 0, 1 and 2 wait for it at train.py:90, for 10.0 s");
    includes(&stuck(), "job job: records of sidecars 0 and 1; 4 ranks, epoch 1");
    includes(
        &stuck(),
        r#"rank 0: 2 submitted; 1 completed, 0 failed, 1 pending; its last call was allreduce "layer4.weight" at train.py:90, 10.0 s before the dump"#,
    );
    excludes(&stuck(), "different orders");
    excludes(&stuck(), "rank 0 never");
}

#[test]
fn what_waited_when_the_epoch_ended_is_analysed_like_what_waits() {
    let mut records = stuck();
    for record in &mut records {
        record.failure = Some("rank 3 is gone".to_owned());
        for request in record.ranks.iter_mut().flat_map(|rank| &mut rank.requests).filter(|r| r.ended.is_none()) {
            *request = failed("layer4.weight", request.submitted_us, "RankLost", true);
        }
    }
    includes(
        &records,
        r#"rank 3 never submitted "layer4.weight"; its last call was allreduce "layer3.bias" at train.py:81, 12.3 s before the failure"#,
    );
    includes(&records, "sidecar 0 recorded after a failure: rank 3 is gone");
    // A request that was refused at once did not wait for another rank.
    for cause in ["Mismatch", "Refused"] {
        let refused = vec![(0, vec![failed("x", 1, cause, false)]), (1, vec![])];
        excludes(&[record(0, &[0, 0], refused)], "never submitted");
    }
    // Ranks whose requests failed with the one that was withdrawn are not missing.
    let withdrawn = RequestRecord { withdrawn: true, ..failed("x", 1, "Refused", false) };
    let ranks = vec![(0, vec![withdrawn]), (1, vec![]), (2, vec![failed("x", 1, "Refused", false)])];
    let record = record(0, &[0, 0, 0], ranks);
    includes(std::slice::from_ref(&record), r#"rank 1 never submitted "x"; it has submitted no operation"#);
    excludes(std::slice::from_ref(&record), "rank 2 never");
    excludes(&[FlightRecord { made_us: MADE_US + 60_000_000, ..record }], "never submitted");
}

/// The same four ranks under a schedule: sidecar 0 admits what its ranks have submitted, though rank 3 has not.
fn stuck_under_a_schedule() -> [FlightRecord; 2] {
    let history = || vec![done("w", 80_000_081, 7), done("v", 80_000_085, 8)];
    let with = |more: RequestRecord| history().into_iter().chain([more]).collect::<Vec<_>>();
    let ranks = vec![(0, with(scheduled("w", 90_000_090, 9))), (1, with(scheduled("w", 91_000_090, 9)))];
    let mut first = record(0, &[0, 0, 1, 1], ranks);
    let operation = |seq, performed_us| OperationRecord {
        epoch: 1,
        seq,
        scheduled: true,
        name: "allreduce.w".to_owned(),
        tensors: 1,
        ordered_us: 91_000_092,
        started_us: Some(91_000_093),
        performed_us,
        failed: None,
    };
    first.operations = vec![operation(8, Some(91_000_095)), operation(9, None), operation(10, None)];
    let second = record(1, &[0, 0, 1, 1], vec![(2, with(waiting("w", 92_000_090))), (3, history())]);
    [first, second]
}

#[test]
fn the_rank_that_a_schedule_did_not_wait_for_is_named() {
    let records = stuck_under_a_schedule();
    includes(
        &records,
        r#"rank 3 has not submitted "w" again; its last call was allreduce "v" at train.py:85, 20.0 s before the dump"#,
    );
    includes(&records, "  ranks 0, 1 and 2 wait for it at train.py:90, for 10.0 s");
    excludes(&records, "in progress");
    // After a failure of the epoch, too.
    let mut records = records;
    for record in &mut records {
        for request in record.ranks.iter_mut().flat_map(|rank| &mut rank.requests).filter(|r| r.ended.is_none()) {
            request.ended = failed("w", 1, "RankLost", true).ended;
        }
    }
    includes(&records, "  ranks 0, 1 and 2 wait for it at train.py:90, for 10.0 s");
    // Without the record of the other sidecar.
    let [first, _] = records;
    includes(std::slice::from_ref(&first), r#"ranks 2 and 3 may not have submitted "w": there is no record of them"#);
    excludes(&[first], "in progress");
}

#[test]
fn an_operation_that_all_ranks_have_submitted_waits_for_no_rank() {
    let [first, mut second] = stuck_under_a_schedule();
    // It is complete on the other sidecar, or ordered there.
    second.ranks[0].requests[2] = done("w", 92_000_090, 9);
    second.ranks[1].requests.push(RequestRecord {
        ordered: Some(OrderedRecord { seq: 9, at_us: 92_000_092, scheduled: true }),
        ..waiting("w", 92_000_091)
    });
    let records = [first, second];
    excludes(&records, "has not submitted");
    includes(
        &records,
        r#"sidecar 0 had 2 operations in progress; the oldest is "allreduce.w" (seq 9), started, 9.0 s after its order"#,
    );
    // A record that was made before the order shows no missing rank to one that was made after the operation.
    let early = record(0, &[0, 1], vec![(0, vec![done("w", 10, 1), waiting("w", 20)])]);
    let late = record(1, &[0, 1], vec![(1, vec![done("w", 10, 1), done("w", 20, 2)])]);
    excludes(&[early, late], "has not submitted");
    // Unless the record has lost what was before.
    let mut lost = record(0, &[0, 1], vec![(0, vec![waiting("w", 20)])]);
    lost.ranks[0].submitted = 5_000;
    let shorter = record(1, &[0, 1], vec![(1, vec![done("w", 10, 1)])]);
    includes(
        &[lost, shorter],
        "rank 1 has not submitted \"w\" again; its last call was allreduce \"w\" at train.py:10, 100.0 s before the dump",
    );
}

#[test]
fn records_of_different_runs_are_not_merged() {
    let [first, second] = stuck();
    let of = |run: &str, record: &FlightRecord| FlightRecord { run: run.to_owned(), ..record.clone() };
    let none = "no record of sidecar 1, which serves ranks 2 and 3: its ranks are not analyzed";
    let earlier = FlightRecord { made_us: MADE_US - 5, ..of("a", &second) };
    includes(&[of("b", &first), earlier.clone()], none);
    includes(&[of("a", &first), earlier], "job job: records of sidecars 0 and 1; 4 ranks, epoch 1");
    // Without a launcher the begin of the epoch distinguishes runs.
    let yesterday = FlightRecord { epoch_began_us: 40_000_000, made_us: MADE_US - 5, ..second.clone() };
    includes(&[first.clone(), yesterday], none);
    let soon = FlightRecord { epoch_began_us: 9_000_000, ..second };
    includes(&[first.clone(), soon], "job job: records of sidecars 0 and 1; 4 ranks, epoch 1");
    // Ranks that the job does not have are not shown.
    let mut more = first;
    more.ranks.push(RankRecord { rank: 9, submitted: 0, requests: Vec::new() });
    excludes(&[more], "rank 9");
}

#[test]
fn a_name_of_every_step_is_not_called_new() {
    let again = vec![done("w", 10, 1), waiting("w", 20)];
    let records = [record(0, &[0, 0], vec![(0, again), (1, vec![done("w", 10, 1)])])];
    includes(
        &records,
        r#"rank 1 has not submitted "w" again; its last call was allreduce "w" at train.py:10, 100.0 s before the dump"#,
    );
    let many = (0..4).map(|number| waiting(&format!("w{number}"), number)).collect();
    includes(&[record(0, &[0, 0], vec![(0, many), (1, vec![])])], "  3 more operations wait for rank 1");
    let two = (0..2).map(|number| waiting(&format!("w{number}"), number)).collect();
    includes(&[record(0, &[0, 0], vec![(0, two), (1, vec![])])], "  1 more operation waits for rank 1");
}

#[test]
fn ranks_that_wait_for_each_other_have_probably_called_in_different_orders() {
    let records = [record(
        0,
        &[0, 0, 0],
        vec![(0, vec![waiting("a", 10)]), (1, vec![waiting("b", 11)]), (2, vec![waiting("a", 12)])],
    )];
    includes(
        &records,
        r#"ranks 0 and 2 wait for "a" and have not submitted "b"; rank 1 waits for "b" and has not submitted "a": probably different orders; call operations whose results are awaited one by one in the same order on all ranks"#,
    );
    // A rank that has called other operations since does not wait for one by one.
    let goes_on = vec![waiting("b", 11), done("c", 12, 1)];
    excludes(&[record(0, &[0, 0], vec![(0, vec![waiting("a", 10)]), (1, goes_on)])], "different orders");
    // Another order alone does not matter.
    let fine = [record(
        0,
        &[0, 0],
        vec![(0, vec![done("a", 10, 1), done("b", 11, 2)]), (1, vec![done("b", 10, 2), done("a", 11, 1)])],
    )];
    excludes(&fine, "different orders");
}

#[test]
fn only_ranks_that_take_part_are_missing() {
    let in_set = |set| vec![RequestRecord { set, ..waiting("s", 10) }];
    let mut of_set = record(0, &[0, 0, 0], vec![(0, in_set(7)), (1, vec![]), (2, vec![])]);
    excludes(std::slice::from_ref(&of_set), "never submitted");
    of_set.sets = vec![SetRecord { id: 7, ranks: vec![0, 2] }];
    includes(std::slice::from_ref(&of_set), r#"rank 2 never submitted "s"; it has submitted no operation"#);
    excludes(&[of_set], "rank 1 never");
    let message =
        RequestRecord { name: "message.2.0.5.1".to_owned(), collective: "recv".to_owned(), ..waiting("", 10) };
    let records = [record(0, &[0, 0, 0], vec![(0, vec![message]), (1, vec![]), (2, vec![])])];
    includes(&records, r#"rank 2 never submitted "message.2.0.5.1"; it has submitted no operation"#);
    excludes(&records, "rank 1 never");
    let join = RequestRecord { name: "join".to_owned(), collective: "join".to_owned(), ..waiting("", 10) };
    excludes(&[record(0, &[0, 0], vec![(0, vec![waiting("a", 5)]), (1, vec![join])])], "rank 1 never");
}

#[test]
fn a_sidecar_without_a_record_is_named_and_the_coordinators_report_counts() {
    let mut first = stuck()[0].clone();
    let wait_of = |name: &str, missing| WaitingRecord {
        set: 0,
        name: format!("allreduce.{name}"),
        collective: "allreduce".to_owned(),
        missing,
        since_us: MADE_US - 2_000_000,
    };
    let none = "no record of sidecar 1, which serves ranks 2 and 3: its ranks are not analyzed";
    includes(std::slice::from_ref(&first), none);
    includes(
        std::slice::from_ref(&first),
        r#"ranks 2 and 3 may not have submitted "layer4.weight": there is no record of them"#,
    );
    includes(std::slice::from_ref(&first), "  ranks 0 and 1 wait for it at train.py:90, for 10.0 s");
    first.waiting = vec![wait_of("layer4.weight", vec![3]), wait_of("x", vec![1, 3])];
    includes(
        std::slice::from_ref(&first),
        r#"rank 3 did not submit "layer4.weight", for which others have waited 2.0 s; sidecar 0 reports it, and there is no record of it"#,
    );
    excludes(std::slice::from_ref(&first), "may not have submitted");
    excludes(std::slice::from_ref(&first), r#"submit "x""#);
    let three = FlightRecord { placement: vec![0, 0, 1, 2], ..first };
    includes(&[three], "no record of sidecars 1 and 2, which serve ranks 2 and 3: their ranks are not analyzed");
}

#[test]
fn the_newest_record_of_each_sidecar_and_of_the_newest_job_counts() {
    let old = FlightRecord { made_us: 5, ..record(0, &[0], vec![(0, vec![waiting("old", 1)])]) };
    let other = FlightRecord { job: "other".to_owned(), made_us: 6, ..old.clone() };
    let records = [old, record(0, &[0], vec![(0, vec![done("new", 1, 1)])]), other];
    includes(&records, "job job: records of sidecar 0; 1 rank, epoch 1");
    includes(&records, "2 records of earlier times or of other runs and jobs are left out");
}

#[test]
fn records_of_another_epoch_or_of_an_earlier_time_show_no_missing_ranks() {
    let [first, second] = stuck();
    let old = FlightRecord { epoch: 0, ..second.clone() };
    excludes(&[first.clone(), old.clone()], "rank 3 never");
    includes(&[first.clone(), old], "no record of sidecar 1, which serves ranks 2 and 3: its ranks are not analyzed");
    let early = FlightRecord { made_us: 79_000_000, ..second };
    excludes(&[first, early], "rank 3 never");
}

/// Rank 0 waits for `x` and goes on with others; the record of rank 1 was made five seconds earlier.
fn made_apart(newest_of_rank_0: RequestRecord) -> [FlightRecord; 2] {
    let first = record(0, &[0, 1], vec![(0, vec![waiting("x", 96_000_000), newest_of_rank_0])]);
    let early = record(1, &[0, 1], vec![(1, vec![done("w", 80_000_081, 7)])]);
    [first, FlightRecord { made_us: MADE_US - 5_000_000, ..early }]
}

#[test]
fn a_rank_whose_record_is_older_than_a_completed_operation_of_it_is_not_called_missing() {
    let records = made_apart(done("w", 97_000_000, 12));
    excludes(&records, "never submitted");
    includes(
        &records,
        r#"rank 1 may have submitted "x" and later operations after its record was made: dump the records of all hosts at the same time to see whether it did"#,
    );
    includes(&records, "the records were made 5.0 s apart, by the clocks of their hosts");
    // Nothing newer was completed with it, so nothing shows that its record is too old.
    let missing =
        r#"rank 1 never submitted "x"; its last call was allreduce "w" at train.py:81, 15.0 s before the dump"#;
    includes(&made_apart(done("w", 95_000_000, 7)), missing);
    includes(&made_apart(RequestRecord { ended: None, ..done("w", 97_000_000, 12) }), missing);
    includes(&made_apart(failed("w", 97_000_000, "Refused", false)), missing);
    // A root has completed its broadcast under a schedule when it has sent it; a set without the rank does not need it.
    let broadcast = |scheduled| {
        let request = done("w", 97_000_000, 12);
        let ordered = request.ordered.map(|ordered| OrderedRecord { scheduled, ..ordered });
        RequestRecord { name: "broadcast.w".to_owned(), collective: "broadcast".to_owned(), ordered, ..request }
    };
    includes(&made_apart(broadcast(true)), missing);
    excludes(&made_apart(broadcast(false)), "never submitted");
    let of_set = |ranks: Vec<u32>| {
        made_apart(RequestRecord { set: 7, ..done("w", 97_000_000, 12) })
            .map(|record| FlightRecord { sets: vec![SetRecord { id: 7, ranks: ranks.clone() }], ..record })
    };
    includes(&of_set(vec![0]), missing);
    excludes(&of_set(vec![0, 1]), "never submitted");
    excludes(&stuck(), "the records were made");
}

#[test]
fn an_operation_of_a_name_whose_uses_are_lost_is_newer_than_what_the_sidecar_has_admitted() {
    let operation = |seq| OperationRecord {
        epoch: 1,
        seq,
        scheduled: false,
        name: "allreduce.v".to_owned(),
        tensors: 1,
        ordered_us: 1_000,
        started_us: Some(1_001),
        performed_us: Some(1_002),
        failed: None,
    };
    let records = |seq_of_rank_1| {
        let mut lost = record(0, &[0, 1], vec![(0, vec![waiting("w", 99_000_000)])]);
        lost.ranks[0].submitted = 5_000;
        lost.operations = vec![operation(39), operation(40)];
        [lost, record(1, &[0, 1], vec![(1, vec![done("w", 99_000_000, seq_of_rank_1)])])]
    };
    excludes(&records(41), "has not submitted");
    let missing =
        r#"rank 1 has not submitted "w" again; its last call was allreduce "w" at train.py:0, 1.0 s before the dump"#;
    includes(&records(40), missing);
}

#[test]
fn ranks_beyond_those_that_are_named_with_an_operation_are_listed() {
    let silent = |ranks: u32| {
        let others = (1..ranks).map(|rank| (rank, vec![]));
        let all = std::iter::once((0, vec![waiting("x", 10)])).chain(others).collect();
        [record(0, &vec![0; ranks as usize], all)]
    };
    excludes(&silent(17), "more rank");
    includes(&silent(18), "1 more rank is missing: rank 17");
    includes(&silent(20), "3 more ranks are missing: ranks 17, 18 and 19");
    // The coordinator's reports of ranks without a record, one operation for each of them.
    let reported = |count: u32| {
        let placement: Vec<u32> = std::iter::once(0).chain((0..count).map(|_| 1)).collect();
        let wait = |rank: u32| WaitingRecord {
            set: 0,
            name: format!("allreduce.{rank}"),
            collective: "allreduce".to_owned(),
            missing: vec![rank],
            since_us: MADE_US,
        };
        let waiting = (1..=count).map(wait).collect();
        [FlightRecord { waiting, ..record(0, &placement, vec![(0, vec![])]) }]
    };
    excludes(&reported(16), "more rank");
    includes(&reported(18), "2 more ranks are missing: ranks 17 and 18");
}

#[test]
fn slow_operations_and_ranks_that_were_last_are_named() {
    let operation = |seq: u64, took: Option<u64>| OperationRecord {
        epoch: 1,
        seq,
        scheduled: false,
        name: format!("allreduce.{seq}"),
        tensors: 3,
        ordered_us: 1_000,
        started_us: Some(1_001),
        performed_us: took.map(|took| 1_000 + took),
        failed: None,
    };
    let mut records = [record(0, &[0, 1], vec![(0, vec![])]), record(1, &[0, 1], vec![(1, vec![])])];
    records[0].operations = (1..9).map(|seq| operation(seq, Some(seq))).collect();
    records[1].operations = vec![operation(3, Some(70_000)), operation(9, None)];
    (records[0].last_to_be_ready, records[0].waited_for_us) = (vec![2, 40], vec![5, 1_500_000]);
    includes(&records, r#"slowest: "allreduce.3" and 2 more tensors (seq 3) took 70.0 ms on sidecar 1"#);
    includes(
        &records,
        r#"sidecar 1 had 1 operation in progress; the oldest is "allreduce.9" (seq 9), started, 100.0 s after its order"#,
    );
    includes(
        &records,
        "last to submit: rank 1 40 times (others waited 1.5 s for it), rank 0 2 times (others waited 5 us for it)",
    );
    assert_eq!(analysed(&records).iter().filter(|line| line.starts_with("slowest")).count(), 5);
}

#[test]
fn the_timeline_is_valid_and_shows_all_ranks() {
    let records = stuck();
    let text = perfetto::timeline(&view::View::of(&records));
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).expect("it is JSON");
    let count = |phase: &str, name: &str| events.iter().filter(|e| e["ph"] == phase && e["name"] == name).count();
    assert_eq!((count("B", "ALLREDUCE"), count("B", "NEGOTIATE_ALLREDUCE")), (1, 2), "{text}");
    assert_eq!(count("X", "3"), 1, "rank 3 submitted once: {text}");
    assert_eq!(events[0]["args"]["start_time_since_epoch_in_micros"], 80_000_081);
}

#[test]
fn files_that_are_not_records_are_named_and_the_others_are_read() {
    let folder = tempfile::tempdir().expect("a directory");
    let bad = folder.path().join("bad.flight.json");
    std::fs::write(&bad, "{").expect("it can be written");
    let args = |files: Vec<PathBuf>| AnalyzeArgs { files, job: None, perfetto: None };
    let error = analyze(&args(vec![bad.clone()])).expect_err("none is good").to_string();
    assert!(error.contains("bad.flight.json is not a flight record, or is truncated: "), "{error}");
    flight::write(folder.path(), &stuck()[0]).expect("it can be written");
    let text = analyze(&args(vec![folder.path().to_owned()])).expect("one is good");
    assert!(text.contains("left out: ") && text.contains("rank 0: 2 submitted"), "{text}");
    let timeline = folder.path().join("timeline.json");
    let text = analyze(&AnalyzeArgs { perfetto: Some(timeline.clone()), ..args(vec![folder.path().to_owned()]) });
    assert!(text.expect("it can be written").contains("ui.perfetto.dev"));
    serde_json::from_slice::<serde_json::Value>(&std::fs::read(timeline).expect("it is there")).expect("JSON");
}

#[test]
fn a_job_can_be_chosen_and_a_timeline_that_cannot_be_written_has_its_own_code() {
    let folder = tempfile::tempdir().expect("a directory");
    let [first, second] = stuck();
    let other = FlightRecord { job: "other".to_owned(), made_us: MADE_US + 9, ..second };
    for record in [&first, &other] {
        flight::write(folder.path(), record).expect("it can be written");
    }
    let args = |job: Option<&str>, perfetto: Option<PathBuf>| {
        let job = job.map(str::to_owned);
        analyze(&AnalyzeArgs { files: vec![folder.path().to_owned()], job, perfetto })
    };
    assert!(args(None, None).expect("two records").contains("job other: records of sidecar 1;"), "the newest one");
    let text = args(Some("job"), None).expect("one record");
    assert!(text.contains("job job: records of sidecar 0;") && text.contains(" is of job other\n"), "{text}");
    let error = args(Some("none"), None).expect_err("no record");
    assert!(coded(&error, Code::FlightRecord).contains("[RONDE-E609]"), "{error:#}");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(folder.path().join("elsewhere"), &link).expect("a link");
    let error = args(None, Some(link)).expect_err("links are not followed");
    assert!(coded(&error, Code::FlightRecord).contains("[RONDE-E610]"), "{error:#}");
    let open = folder.path().join("open");
    std::fs::write(&open, "")
        .and_then(|()| std::fs::set_permissions(&open, Permissions::from_mode(0o644)))
        .expect("ours");
    args(None, Some(open.clone())).expect("it can be written");
    assert_eq!(std::fs::metadata(open).expect("it is there").permissions().mode() & 0o777, 0o600);
}

/// A request with any fields.
fn any_request() -> impl Strategy<Value = RequestRecord> {
    let texts = (0_u32..4, "[a-c]{0,2}", prop::sample::select(vec!["allreduce", "join", "recv", ""]));
    let ordered = any::<Option<(u64, u64, bool)>>();
    let times = (any::<u64>(), any::<Option<u64>>(), ordered, any::<Option<(u64, bool, bool)>>());
    (texts, times, 0_u64..3).prop_map(
        |((set, name, collective), (submitted_us, announced_us, ordered, ended), epoch)| {
            let ended = ended.map(|(at_us, fails, ends_epoch)| EndRecord {
                at_us,
                failed: fails.then(|| FailureRecord { cause: "Refused".to_owned(), reason: String::new(), ends_epoch }),
            });
            RequestRecord {
                set,
                name,
                collective: collective.to_owned(),
                bytes: 0,
                site: None,
                epoch,
                submitted_us,
                announced_us,
                ordered: ordered.map(|(seq, at_us, scheduled)| OrderedRecord { seq, at_us, scheduled }),
                withdrawn: submitted_us % 2 == 0,
                ended,
            }
        },
    )
}

/// A record with any contents.
fn any_record() -> impl Strategy<Value = FlightRecord> {
    let ranks = prop::collection::vec((0_u32..5, prop::collection::vec(any_request(), 0..6)), 0..4);
    let counts = prop::collection::vec(any::<u64>(), 0..3);
    (0_u32..3, prop::collection::vec(0_u32..3, 0..5), ranks, counts, any::<u64>(), 0_u64..3).prop_map(
        |(sidecar, placement, ranks, counts, made_us, epoch)| {
            let base = record(sidecar, &placement, ranks);
            FlightRecord { made_us, epoch, last_to_be_ready: counts.clone(), waited_for_us: counts, ..base }
        },
    )
}

proptest! {
    /// Whatever the files say, the analysis ends, and a rank that submitted a name is not said to have never done so.
    #[test]
    fn any_records_are_analysed(records in prop::collection::vec(any_record(), 1..4)) {
        let view = view::View::of(&records);
        let lines = analysis::sentences(&view);
        for (rank, of) in &view.ranks {
            for request in &of.requests.requests {
                let key = format!("rank {rank} never submitted {:?};", request.name);
                let is_wrong = lines.iter().any(|line| line.starts_with(&key));
                // Another process set may have the same name.
                prop_assert!(!is_wrong || has_other_set(&view, &request.name), "{}", key);
            }
        }
        let text = perfetto::timeline(&view);
        prop_assert!(serde_json::from_str::<Vec<serde_json::Value>>(&text).is_ok());
    }
}

/// Whether a name is used in another set than that of all ranks.
fn has_other_set(view: &view::View<'_>, name: &str) -> bool {
    view.ranks.values().flat_map(|of| &of.requests.requests).any(|request| request.set != 0 && request.name == name)
}
