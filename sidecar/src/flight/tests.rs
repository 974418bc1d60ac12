use bytes::Bytes;
use proptest::prelude::*;
use ronde_bootstrap::flight::OPERATIONS_MAX;
use ronde_rpc::convert::Place;
use ronde_wire::{Collective, DType, ReduceOp, Request, Shape};

use super::*;

fn submission(request: u64, name: &str) -> Submission {
    let shape = Shape::new(vec![3]).expect("a shape");
    let collective = Collective::AllReduce { op: ReduceOp::Sum };
    Submission {
        request: RequestId(request),
        what: Request::new(SetId::WORLD, TensorName::new(name).expect("a name"), collective, DType::F32, shape),
        plugin: None,
        place: Place::Inline(Bytes::new()),
        output: None,
        site: Some(format!("train.py:{request}")),
    }
}

/// Rank 0, with its worker.
const RANK_0: (Rank, WorkerNumber) = (Rank(0), WorkerNumber(0));

/// A recorder in epoch 1 with rank 0.
fn recorder() -> FlightRecorder {
    let mut recorder = FlightRecorder::new(true);
    recorder.epoch_began(Time(0), Epoch(1), &[RANK_0]);
    recorder
}

fn submit(recorder: &mut FlightRecorder, at: u64, request: u64) {
    let mut submission = submission(request, "w");
    recorder.submitted(Time(at), Rank(0), &submission);
    recorder.accepted(Rank(0), &mut submission);
    assert_eq!(submission.site, None, "the text moved");
}

fn notes(recorder: &FlightRecorder) -> Vec<RequestNote> {
    recorder.ranks[&Rank(0)].requests.iter().cloned().collect()
}

#[test]
fn a_request_has_the_times_of_its_states() {
    let mut recorder = recorder();
    submit(&mut recorder, 5, 1);
    submit(&mut recorder, 6, 2);
    recorder.announced(Time(7), Rank(0), RequestId(1));
    recorder.ended(Time(9), Rank(0), RequestId(1), None);
    recorder.withdrawn(Rank(0), RequestId(2));
    let failure = Failure::new(Cause::RankLost, "é".repeat(1_000));
    recorder.ended(Time(10), Rank(0), RequestId(2), Some(&failure));
    let notes = notes(&recorder);
    assert_eq!((notes[0].submitted, notes[0].announced, notes[0].bytes), (Time(5), Some(Time(7)), 12));
    assert!(matches!(notes[0].ended, Some((Time(9), None))));
    assert_eq!((notes[0].withdrawn, notes[1].withdrawn), (false, true));
    assert_eq!(notes[0].site.as_deref(), Some("train.py:1"));
    let (_, failed) = notes[1].ended.as_ref().expect("it failed");
    assert_eq!(failed.as_ref().expect("it failed").reason, "é".repeat(256), "cut at a character");
    assert!(recorder.has_failed_by_end());
    recorder.epoch_began(Time(11), Epoch(2), &[RANK_0]);
    assert!(!recorder.has_failed_by_end());
}

#[test]
fn nothing_is_kept_when_it_is_off_or_of_other_ranks() {
    let mut off = FlightRecorder::new(false);
    off.epoch_began(Time(0), Epoch(1), &[RANK_0]);
    off.submitted(Time(1), Rank(0), &submission(1, "w"));
    let mut given = submission(1, "w");
    off.accepted(Rank(0), &mut given);
    assert_eq!((off.ranks.len(), given.site.is_some()), (0, true));
    let mut recorder = recorder();
    recorder.submitted(Time(1), Rank(9), &submission(1, "w"));
    recorder.ended(Time(1), Rank(9), RequestId(1), None);
    assert!(notes(&recorder).is_empty());
}

#[test]
fn ranks_that_moved_away_are_dropped_when_there_are_many() {
    let mut recorder = recorder();
    for epoch in 0..200 {
        let rank = u32::try_from(epoch).expect("small");
        recorder.epoch_began(Time(epoch), Epoch(epoch), &[(Rank(rank), WorkerNumber(rank))]);
        assert!(recorder.ranks.len() <= limits::LOCAL_RANKS_MAX + 1);
    }
}

#[test]
fn requests_of_another_worker_with_the_same_rank_are_dropped() {
    let mut recorder = recorder();
    submit(&mut recorder, 5, 1);
    recorder.epoch_began(Time(6), Epoch(2), &[RANK_0]);
    assert_eq!(notes(&recorder).len(), 1, "the worker has stayed");
    recorder.epoch_began(Time(7), Epoch(3), &[(Rank(0), WorkerNumber(9))]);
    assert!(notes(&recorder).is_empty());
    assert_eq!(recorder.ranks[&Rank(0)].requests.pushed(), 0);
}

#[test]
fn operations_that_are_dropped_are_announced_again() {
    let mut recorder = recorder();
    submit(&mut recorder, 5, 1);
    recorder.ranks.get_mut(&Rank(0)).expect("it is served").change(RequestId(1), |note| {
        note.ordered = Some(OrderNote { seq: Seq(4), at: Time(6), scheduled: true });
    });
    recorder.dropped(Epoch(1), &[Seq(3)]);
    assert!(notes(&recorder)[0].ordered.is_some());
    recorder.dropped(Epoch(1), &[Seq(3), Seq(4)]);
    assert!(notes(&recorder)[0].ordered.is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// The newest requests are kept, whichever numbers a client chooses, and each change reaches its request.
    #[test]
    fn the_ring_is_a_window_of_the_newest(steps in 0_u64..6_000, stride in 1_u64..4, shuffled in any::<bool>()) {
        let mut recorder = recorder();
        let number = |step: u64| if shuffled { step.reverse_bits() } else { 10 + step * stride };
        for step in 0..steps {
            recorder.submitted(Time(step), Rank(0), &submission(number(step), "w"));
            let (before, kept) = (step / 2, step - step / 2 < OPERATIONS_MAX as u64);
            recorder.announced(Time(step), Rank(0), RequestId(number(before)));
            if kept && step % 97 == 0 {
                let notes = notes(&recorder);
                let note = notes.iter().find(|note| note.request == RequestId(number(before))).expect("it is kept");
                prop_assert_eq!(note.announced, Some(Time(step)));
            }
        }
        let notes = notes(&recorder);
        prop_assert_eq!(notes.len() as u64, steps.min(OPERATIONS_MAX as u64));
        let expected: Vec<RequestId> = (steps - notes.len() as u64..steps).map(|step| RequestId(number(step))).collect();
        prop_assert_eq!(notes.iter().map(|note| note.request).collect::<Vec<_>>(), expected);
        prop_assert_eq!(recorder.ranks[&Rank(0)].requests.pushed(), steps);
    }
}

/// Prints what docs/adr/0037-the-flight-recorder.md has: the least of many batches, because other programs interfere.
#[test]
#[ignore = "measures"]
fn the_cost_of_the_notes_of_an_operation() {
    let clock = std::time::Instant::now();
    let now = || Time(u64::try_from(clock.elapsed().as_micros()).expect("small"));
    let mut recorder = recorder();
    let mut least = std::time::Duration::MAX;
    for batch in 0..BATCHES {
        let first = batch * u64::from(BATCH);
        let submissions: Vec<Submission> =
            (first..first + u64::from(BATCH)).map(|request| submission(request, "layer.weight")).collect();
        let began = std::time::Instant::now();
        for mut submission in submissions {
            note_operation(&mut recorder, now, &mut submission);
        }
        least = least.min(began.elapsed() / BATCH);
    }
    println!("{least:?} for each operation of one rank");
    let began = std::time::Instant::now();
    let notes = recorder.notes();
    println!("{:?} for a copy of {} notes", began.elapsed(), notes.operations.iter().count() + OPERATIONS_MAX);
}

const BATCHES: u64 = 400;
const BATCH: u32 = 500;

/// Makes all notes of an operation with one request.
fn note_operation(recorder: &mut FlightRecorder, now: impl Fn() -> Time, submission: &mut Submission) {
    let seq = Seq(submission.request.0);
    recorder.submitted(now(), Rank(0), submission);
    recorder.accepted(Rank(0), submission);
    recorder.announced(now(), Rank(0), submission.request);
    recorder.operations.push(OperationNote {
        epoch: Epoch(1),
        seq,
        scheduled: false,
        name: Some(submission.what.name.clone()),
        tensors: 1,
        ordered: now(),
        started: None,
        performed: None,
        failed: None,
    });
    recorder.started(now(), Epoch(1), seq);
    recorder.performed(now(), Epoch(1), seq);
    recorder.ended(now(), Rank(0), submission.request, None);
}
