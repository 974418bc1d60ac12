use ronde_rpc::v1::timeline_event::{CycleStarted, EpochOver, Over, Tensor as EventTensor};

use super::*;

/// A recording of tensor `allreduce.t` by two ranks, written as (time, event).
fn lines(events: Vec<(u64, Event)>, dropped: u64) -> Vec<Value> {
    let mut trace = Trace::default();
    trace.begin(7);
    trace.add(batch(events, dropped));
    trace.finish();
    trace.take_lines().iter().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

fn batch(events: Vec<(u64, Event)>, dropped: u64) -> v1::TimelineBatch {
    let stamped = |(at_us, event)| v1::TimelineEvent { at_us, event: Some(event) };
    v1::TimelineBatch { events: events.into_iter().map(stamped).collect(), dropped }
}

fn ready(name: &str, rank: u32) -> Event {
    Event::Ready(Ready { name: name.to_owned(), process_set: 0, collective: "ALLREDUCE".to_owned(), rank })
}

fn ordered(seq: u64, names: &[&str]) -> Event {
    let tensors = names.iter().map(|name| EventTensor { name: (*name).to_owned(), shape: vec![2, 3] }).collect();
    let dtype = v1::DType::DtypeF32.into();
    Event::Ordered(Ordered { seq, process_set: 0, collective: "ALLREDUCE".to_owned(), dtype, tensors, ahead: false })
}

fn performed(seq: u64, lane: Option<u32>, phase: Phase, (begin_us, end_us): (u64, u64)) -> Event {
    let span = Span { phase: phase.into(), begin_us, end_us, busy_us: 1, pieces: 2, bytes: 3 };
    Event::Performed(Performed { seq, lane, spans: vec![span] })
}

fn over(seq: u64, dropped: bool) -> Event {
    Event::Over(Over { seq, dropped })
}

/// The events in a row of a tensor, as (phase, name or nothing, time, duration).
fn row(lines: &[Value], pid: u64, tid: u32) -> Vec<(String, String, u64, u64)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let here = |line: &&Value| line["pid"] == pid && line["tid"] == tid && line["ph"] != "M";
    let event = |line: &Value| {
        (
            text(&line["ph"]),
            text(&line["name"]),
            line["ts"].as_u64().expect("a time"),
            line["dur"].as_u64().unwrap_or(0),
        )
    };
    lines.iter().filter(here).map(event).collect()
}

fn expected(events: &[(&str, &str, u64, u64)]) -> Vec<(String, String, u64, u64)> {
    events.iter().map(|(ph, name, ts, dur)| ((*ph).to_owned(), (*name).to_owned(), *ts, *dur)).collect()
}

#[test]
fn an_operation_is_negotiated_queued_and_performed() {
    let lines = lines(
        vec![
            (10, ready("allreduce.t", 1)),
            (20, ready("allreduce.t", 0)),
            (20, ready("allreduce.t", 0)),
            (21, ordered(1, &["allreduce.t"])),
            (40, performed(1, Some(0), Phase::Reduce, (25, 35))),
            (41, performed(1, Some(1), Phase::Send, (24, 30))),
            (45, over(1, false)),
        ],
        0,
    );
    assert_eq!(lines[0]["args"]["start_time_since_epoch_in_micros"], 7);
    let named = |line: &&Value| line["name"] == "process_name" && line["args"]["name"] == "allreduce.t";
    assert_eq!(lines.iter().find(named).expect("the tensor has a name")["pid"], 1);
    assert_eq!(
        row(&lines, 1, NEGOTIATION),
        expected(&[("B", "NEGOTIATE_ALLREDUCE", 10, 0), ("X", "1", 10, 0), ("X", "0", 20, 0), ("E", "", 21, 0)])
    );
    assert_eq!(
        row(&lines, 1, OPERATION),
        expected(&[("B", "ALLREDUCE", 21, 0), ("X", "QUEUE", 21, 3), ("X", "PERFORM", 24, 11), ("E", "", 45, 0)])
    );
    let begin = lines.iter().find(|line| line["name"] == "ALLREDUCE").expect("it began");
    assert_eq!((&begin["args"]["dtype"], &begin["args"]["shape"]), (&json!("float32"), &json!("[2, 3]")));
    assert_eq!(row(&lines, 1, super::row(Some(0), Phase::Reduce)), expected(&[("X", "REDUCE", 25, 10)]));
    assert_eq!(row(&lines, 1, super::row(Some(1), Phase::Send)), expected(&[("X", "SEND", 24, 6)]));
}

#[test]
fn tensors_that_travel_together_share_the_work_of_the_first() {
    let events =
        vec![(1, ordered(4, &["a", "b"])), (9, performed(4, None, Phase::Reduce, (2, 8))), (9, over(4, false))];
    let lines = lines(events, 0);
    for pid in [1, 2] {
        let queue =
            expected(&[("B", "ALLREDUCE", 1, 0), ("X", "QUEUE", 1, 1), ("X", "PERFORM", 2, 6), ("E", "", 9, 0)]);
        assert_eq!(row(&lines, pid, OPERATION), queue);
    }
    let work = super::row(None, Phase::Reduce);
    assert_eq!((row(&lines, 1, work).len(), row(&lines, 2, work).len()), (1, 0));
}

#[test]
fn the_next_use_of_a_name_may_begin_before_the_previous_one_ends() {
    let events = vec![
        (1, ordered(1, &["t"])),
        (2, ready("t", 1)),
        (5, over(1, false)),
        (6, ready("t", 0)),
        (7, ordered(2, &["t"])),
        (9, over(2, false)),
    ];
    let lines = lines(events, 0);
    assert_eq!(
        row(&lines, 1, NEGOTIATION),
        expected(&[("B", "NEGOTIATE_ALLREDUCE", 2, 0), ("X", "1", 2, 0), ("X", "0", 6, 0), ("E", "", 7, 0)])
    );
    let ends: Vec<u64> =
        row(&lines, 1, OPERATION).iter().filter(|(ph, ..)| ph == "E").map(|(_, _, ts, _)| *ts).collect();
    assert_eq!(ends, [5, 9]);
}

#[test]
fn every_begin_has_one_end_whichever_events_are_missing() {
    let all = vec![
        (1, ready("t", 0)),
        (2, ordered(1, &["t", "u"])),
        (3, performed(1, Some(0), Phase::Receive, (0, 3))),
        (4, over(1, true)),
        (5, ready("t", 1)),
        (6, ordered(2, &["t"])),
        (7, over(2, false)),
        (8, Event::CycleStarted(CycleStarted {})),
        (9, ready("v", 1)),
        (10, Event::EpochOver(EpochOver {})),
        (11, ready("t", 1)),
    ];
    for without in 0..1_u32 << all.len() {
        let kept = (0..).zip(&all).filter(|(at, _)| without >> at & 1 == 0).map(|(_, event)| event.clone()).collect();
        let mut open = std::collections::HashMap::<(Value, Value), i32>::new();
        for line in lines(kept, 0) {
            let depth = open.entry((line["pid"].clone(), line["tid"].clone())).or_default();
            *depth += i32::from(line["ph"] == "B") - i32::from(line["ph"] == "E");
            assert!((0..=1).contains(depth), "{without:b}");
        }
        assert!(open.values().all(|depth| *depth == 0), "{without:b}");
    }
}

#[test]
fn dropped_events_are_counted() {
    let dropped = |line: &&Value| line["name"] == "EVENTS_DROPPED";
    assert_eq!(lines(vec![(1, ready("t", 0))], 12).iter().find(dropped).expect("it is reported")["args"]["so_far"], 12);
    assert_eq!(lines(vec![(1, ready("t", 0))], 0).iter().find(dropped), None);
}

#[test]
fn beyond_the_limit_only_tensors_in_progress_are_kept() {
    let mut trace = Trace::default();
    for count in 0..TENSORS_MAX as u64 {
        trace.add(batch(vec![(count, ordered(count, &[&format!("t{count}")])), (count, over(count, false))], 0));
        drop(trace.take_lines());
    }
    trace.add(batch(vec![(1, ready("open", 0))], 0));
    assert!(trace.tensors.len() <= TENSORS_MAX);
    trace.add(batch(vec![(2, ready("open", 1))], 0));
    assert_eq!(trace.tensors.len(), 1);
}

#[test]
fn names_are_escaped_for_json() {
    let lines = lines(vec![(1, ready("all\"reduce\\.\u{7}ä", 0))], 0);
    assert!(lines.iter().any(|line| line["args"]["name"] == "all\"reduce\\.\u{7}ä"));
}

/// Decodes arbitrary batches, several in one input: each line is JSON, and the kept state is bounded.
#[test]
fn fuzz_timeline() {
    use ronde_fuzz::Outcome;
    use ronde_rpc::ring;

    let batches = [
        vec![(5, ready("allreduce.t", 1)), (9, ordered(3, &["allreduce.t"]))],
        vec![(20, performed(3, Some(0), Phase::Send, (12, 18))), (21, over(3, false))],
        vec![(22, Event::CycleStarted(CycleStarted {})), (23, Event::EpochOver(EpochOver {}))],
    ];
    let seeds = batches.into_iter().map(|events| {
        let mut bytes = Vec::new();
        ring::encode(&batch(events, 2), &mut bytes);
        bytes
    });
    let mut seeds: Vec<Vec<u8>> = seeds.collect();
    // Protobuf joins messages that follow each other.
    seeds.push(seeds.concat());
    ronde_fuzz::fuzz("timeline", seeds, |bytes| {
        let batch: v1::TimelineBatch = match ring::decode(bytes) {
            Ok(batch) => batch,
            Err(error) => return Outcome::refused(&error),
        };
        let mut trace = Trace::default();
        trace.begin(7);
        trace.add(batch);
        trace.finish();
        assert!(trace.operations.is_empty(), "an operation is in progress after the end");
        let lines = trace.take_lines();
        let names =
            lines.iter().map(|line| serde_json::from_str::<Value>(line).expect("each line is JSON")["ph"].clone());
        Outcome::read(&names.collect::<Vec<_>>())
    });
}
