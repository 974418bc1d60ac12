use ronde_engine::{ExecutorAction, Phase};
use ronde_rpc::v1::timeline_event::Phase as WirePhase;

use super::*;

fn channel(capacity: usize) -> (Batches, mpsc::Receiver<Result<v1::TimelineBatch, Status>>) {
    mpsc::channel(capacity)
}

fn batch(receiver: &mut mpsc::Receiver<Result<v1::TimelineBatch, Status>>) -> v1::TimelineBatch {
    receiver.try_recv().expect("a batch waits").expect("it is no refusal")
}

#[test]
fn the_reply_is_an_empty_batch_and_events_are_sent_when_old_or_many() {
    let (batches, mut receiver) = channel(8);
    let (mut timeline, began) = (Timeline::default(), Instant::now());
    timeline.begin(began, batches, false);
    assert_eq!(batch(&mut receiver), v1::TimelineBatch::default());
    assert_eq!(timeline.due(), None);
    let over = Trace::Over { seq: Seq(7), dropped: false };
    timeline.note(began + Duration::from_micros(5), vec![Trace::Cycle, over.clone()]);
    assert!(receiver.try_recv().is_err(), "it waits for others");
    timeline.flush(timeline.due().expect("there is something to send"));
    let events = batch(&mut receiver).events;
    let sent = v1::TimelineEvent { at_us: 5, event: Some(Event::Over(Over { seq: 7, dropped: false })) };
    assert_eq!(events, [sent], "cycles are not wanted");
    timeline.note(began, vec![over; BATCH_EVENTS]);
    assert_eq!(batch(&mut receiver).events.len(), BATCH_EVENTS);
    let tensor = (TensorName::new("t".repeat(500)).expect("a name"), Shape::default());
    let large = |tensors| Trace::Ordered {
        seq: Seq(8),
        set: ronde_wire::SetId::WORLD,
        operation: "ALLREDUCE",
        dtype: ronde_wire::DType::F32,
        tensors: vec![tensor.clone(); tensors],
        ahead: false,
    };
    timeline.note(began, vec![large(20), large(20), large(1)]);
    assert_eq!(batch(&mut receiver).events.len(), 2, "these are many bytes");
}

#[tokio::test]
async fn events_dropped_for_a_slow_worker_are_counted_and_its_last_batch_arrives() {
    let (batches, mut receiver) = channel(2);
    let (mut timeline, now) = (Timeline::default(), Instant::now());
    let recording = timeline.begin(now, batches, true);
    for _ in 0..4 {
        timeline.note(now, vec![Trace::Cycle; BATCH_EVENTS]);
    }
    timeline.note(now, vec![Trace::Cycle]);
    timeline.end_of(recording);
    assert!(!timeline.is_on());
    assert_eq!(batch(&mut receiver).events.len(), 0);
    assert_eq!(batch(&mut receiver).events.len(), BATCH_EVENTS);
    let last = receiver.recv().await.expect("the last batch waits for room").expect("no refusal");
    assert_eq!((last.events.len(), last.dropped), (1, 3 * BATCH_EVENTS as u64));
    assert!(receiver.recv().await.is_none(), "the stream ends after it");
}

#[tokio::test]
async fn a_recording_ends_with_its_worker_or_with_the_next_one() {
    let (batches, receiver) = channel(2);
    let (mut timeline, now) = (Timeline::default(), Instant::now());
    let first = timeline.begin(now, batches, true);
    drop(receiver);
    timeline.note(now, vec![Trace::Cycle; BATCH_EVENTS]);
    assert!(!timeline.is_on(), "the worker is gone");
    let (batches, mut receiver) = channel(2);
    timeline.begin(now, batches, true);
    timeline.end_of(first);
    assert!(timeline.is_on(), "the end of an earlier one");
    let (others, _receiver) = channel(2);
    timeline.begin(now, others, true);
    assert_eq!(receiver.recv().await.expect("the answer").expect("no refusal").events, []);
    assert!(receiver.recv().await.is_some(), "its last batch");
    assert!(receiver.recv().await.is_none(), "its end");
}

#[test]
fn a_thread_records_its_work_on_an_operation() {
    let mut tracer = Tracer::default();
    let worked = |phase| ExecutorAction::Worked { work: Some((Seq(3), phase)) };
    tracer.polled(tracer.now(), &worked(Phase::Reduce));
    assert_eq!(tracer.take(Seq(3)), None, "tracing is off");
    tracer.set(true);
    let began = tracer.now().expect("tracing is on");
    tracer.received(Seq(3), 100);
    tracer.received(Seq(3), 50);
    for phase in [Phase::ReadInput, Phase::Reduce, Phase::Reduce, Phase::CopyResult] {
        tracer.polled(tracer.now(), &worked(phase));
    }
    tracer.polled(tracer.now(), &ExecutorAction::Worked { work: None });
    let spans = tracer.take(Seq(3)).expect("something was done").spans(began);
    let sent: Vec<(WirePhase, u64, u64)> = spans.iter().map(|span| (span.phase(), span.pieces, span.bytes)).collect();
    assert_eq!(
        sent,
        [
            (WirePhase::ReadInput, 1, 0),
            (WirePhase::Reduce, 2, 0),
            (WirePhase::Receive, 2, 150),
            (WirePhase::CopyResult, 1, 0)
        ]
    );
    assert!(spans.iter().all(|span| span.begin_us <= span.end_us));
    tracer.received(Seq(4), 1);
    tracer.received(Seq(5), 1);
    tracer.forget(Some(Seq(4)));
    assert_eq!((tracer.take(Seq(4)), tracer.take(Seq(5)).is_some()), (None, true));
}
