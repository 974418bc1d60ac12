//! Messages between workers and their sidecar, as protobuf: over gRPC or the session's ring.

use bytes::Bytes;
use ronde_fuzz::{Outcome, Target};
use ronde_rpc::v1::{client_message, server_message};
use ronde_rpc::{Claim, Claimed, Completion, EpochView, Place, Submission, ring, v1};
use ronde_wire::{Failure, Rank, limits};

const ME: Rank = Rank(1);

/// All messages of a worker: a sidecar parses them before it trusts the worker.
pub(crate) fn messages_of_workers() -> Target {
    use client_message::Message;
    Target::new("messages_of_workers", seeds_of_workers(), move |bytes| {
        let message: v1::ClientMessage = match ring::decode(bytes) {
            Ok(message) => message,
            Err(error) => return Outcome::refused(&error),
        };
        same_bytes(&message);
        match message.message {
            None => Outcome::refused(&"an empty message"),
            Some(Message::Claim(claim)) => {
                let claim = Claim::parse(&claim);
                if let Ok(claim) = &claim {
                    assert_eq!(Claim::parse(&claim.clone().into_message()).as_ref(), Ok(claim));
                }
                Outcome::of(&claim)
            }
            Some(Message::Submit(submit)) => submission(submit),
            Some(other) => Outcome::read(&other),
        }
    })
}

#[test]
fn fuzz_messages_of_workers() {
    messages_of_workers().run();
}

/// All messages of a sidecar: a worker's process parses them.
pub(crate) fn messages_of_sidecars() -> Target {
    use server_message::Message;
    Target::new("messages_of_sidecars", seeds_of_sidecars(), move |bytes| {
        let message: v1::ServerMessage = match ring::decode(bytes) {
            Ok(message) => message,
            Err(error) => return Outcome::refused(&error),
        };
        same_bytes(&message);
        match message.message {
            None => Outcome::refused(&"an empty message"),
            Some(Message::Claimed(claimed)) => {
                let claimed = Claimed::parse(&claimed);
                if let Ok(claimed) = &claimed {
                    assert_eq!(Claimed::parse(&claimed.clone().into_message()).as_ref(), Ok(claimed));
                    assert!(claimed.heartbeat_ms <= claimed.peer_timeout_ms && claimed.pending_max > 0);
                    assert!(claimed.inline_bytes_max <= limits::INLINE_BYTES_MAX as u64);
                }
                Outcome::of(&claimed.map(|_| "claimed"))
            }
            Some(Message::EpochBegan(began)) => {
                let view = EpochView::parse(&began);
                if let Ok(view) = &view {
                    assert_eq!(EpochView::parse(&view.into_message()).as_ref(), Ok(view));
                    assert!(view.rank.0 < view.size && view.local_rank < view.local_size);
                    assert!(view.size as usize <= limits::RANKS_MAX);
                }
                Outcome::of(&view)
            }
            Some(Message::Completed(completed)) => {
                let completion = Completion::parse(completed);
                if let Ok(completion) = &completion {
                    assert_eq!(Completion::parse(completion.clone().into_message()).as_ref(), Ok(completion));
                    assert!(completion.shape.dimensions().len() <= limits::DIMENSIONS_MAX);
                }
                Outcome::of(&completion)
            }
            Some(Message::Failed(v1::Failed { failure, .. }) | Message::EpochEnded(v1::EpochEnded { failure, .. })) => {
                Outcome::read(&failure.map(checked_failure))
            }
            Some(other) => Outcome::read(&other),
        }
    })
}

#[test]
fn fuzz_messages_of_sidecars() {
    messages_of_sidecars().run();
}

fn submission(message: v1::Submit) -> Outcome {
    let (request, set) = (message.request, message.process_set);
    match Submission::parse(message, ME) {
        Ok(submission) => {
            let what = &submission.what;
            assert!(what.shape.dimensions().len() <= limits::DIMENSIONS_MAX);
            assert!(what.name.as_str().len() <= limits::NAME_BYTES_MAX);
            assert!(what.prescale.is_finite() && what.postscale.is_finite());
            assert!(submission.site.as_ref().is_none_or(|site| site.len() <= limits::CALL_SITE_BYTES_MAX));
            if what.collective.has_input(ME) {
                let wanted = what.shape.elements() * what.dtype.size_bytes() as u64;
                assert_eq!(submission.place.bytes(), Some(wanted));
            }
            if let Place::Arena { offset, bytes, .. } = submission.place {
                assert!(offset.checked_add(bytes).is_some());
            }
            assert!(submission.output.is_none_or(|output| !output.overlaps(&submission.place)));
            // As bytes: a parameter may be NaN, which its plugin refuses.
            let message = submission.clone().into_message();
            let again = Submission::parse(message.clone(), ME).expect("what was parsed is parsed again");
            assert_eq!(bytes(&again.into_message()), bytes(&message), "another request comes back");
            Outcome::read(&(&submission.what.collective, submission.plugin.is_some(), submission.output.is_some()))
        }
        Err(refused) => {
            assert_eq!((refused.request.0, refused.set.0), (request, set), "the answer is for another request");
            assert!(!refused.reason.is_empty());
            Outcome::refused(&refused.reason)
        }
    }
}

fn checked_failure(message: v1::Failure) -> Failure {
    let failure = Failure::from(message);
    assert!(failure.reason.len() <= limits::REASON_BYTES_MAX);
    if let Some(record) = &failure.record {
        let text: usize = record.stderr_tail.iter().map(String::len).sum();
        assert!(text <= limits::RECORD_BYTES_MAX && record.stderr_tail.len() <= limits::RECORD_LINES_MAX);
        let hidden = |text: &String| text.chars().any(|letter| letter.is_control() && letter != '\t');
        assert!(!record.stderr_tail.iter().any(hidden) && !hidden(&record.host), "control characters are left");
    }
    assert_eq!(Failure::from(v1::Failure::from(&failure)), failure, "another failure comes back");
    failure
}

/// Checks that a decoded message survives the ring.
fn same_bytes<M: Default + PartialEq + std::fmt::Debug + prost::Message>(message: &M) {
    let (mut once, mut twice) = (Vec::new(), Vec::new());
    ring::encode(message, &mut once);
    let again: M = ring::decode(&once).expect("what was encoded decodes");
    ring::encode(&again, &mut twice);
    assert_eq!(once, twice, "another message comes back");
}

fn seeds_of_workers() -> Vec<Vec<u8>> {
    use client_message::Message;
    let claim = v1::Claim {
        job: "digits".to_owned(),
        worker: 1,
        token: Bytes::from(vec![7; 32]),
        protocol_min: 1,
        protocol_max: 9,
        client: "ronde-python 0.1.0".to_owned(),
        pid: 4_321,
    };
    let submits = submits().into_iter().map(Message::Submit);
    let others = [
        Message::Claim(claim),
        Message::Heartbeat(v1::Heartbeat {}),
        Message::Goodbye(v1::Goodbye { reason: "done".to_owned() }),
        Message::RingReady(v1::RingReady {}),
    ];
    submits.chain(others).map(|message| bytes(&v1::ClientMessage { message: Some(message) })).collect()
}

fn submits() -> Vec<v1::Submit> {
    use v1::collective::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, Kind};
    use v1::plugin::{Parameter, parameter::Value};
    let collective = |kind| Some(v1::Collective { kind: Some(kind) });
    let sum = collective(Kind::AllReduce(AllReduce { op: v1::ReduceOp::Sum.into() }));
    let arena = |offset| Place::Arena { segment: 1, offset, bytes: 12 }.into_message();
    let plain = v1::Submit {
        request: 7,
        name: "allreduce.grad".to_owned(),
        process_set: 3,
        collective: sum,
        dtype: v1::DType::DtypeF32.into(),
        shape: vec![3],
        prescale: 1.0,
        postscale: 0.5,
        input: arena(0),
        ..v1::Submit::default()
    };
    let unscaled = v1::Submit { postscale: 1.0, ..plain.clone() };
    let parameter = Parameter { name: "ratio".to_owned(), value: Some(Value::Float(0.1)) };
    let plugin = v1::Plugin { name: "topk@1.0.0".to_owned(), parameters: vec![parameter] };
    let barrier = collective(Kind::Barrier(Barrier {}));
    vec![
        v1::Submit { plugin: Some(plugin), call_site: Some("train.py:88".to_owned()), ..plain.clone() },
        v1::Submit { codec: "float16".to_owned(), output: arena(64), ..plain.clone() },
        v1::Submit { input: Place::Inline(Bytes::from(vec![1; 12])).into_message(), ..plain.clone() },
        v1::Submit { group: Some(v1::Group { name: "g".to_owned(), size: 2 }), ..plain },
        v1::Submit { collective: collective(Kind::AllGather(AllGather {})), ..unscaled.clone() },
        v1::Submit { collective: collective(Kind::AllToAll(AllToAll { splits: vec![1, 2] })), ..unscaled.clone() },
        v1::Submit { collective: collective(Kind::Broadcast(Broadcast { root: 1 })), ..unscaled.clone() },
        v1::Submit { collective: barrier, input: None, dtype: 0, shape: Vec::new(), ..unscaled },
    ]
}

fn seeds_of_sidecars() -> Vec<Vec<u8>> {
    use server_message::Message;
    let claimed = v1::Claimed {
        session_token: Bytes::from(vec![9; 16]),
        protocol: ronde_rpc::PROTOCOL_VERSION,
        heartbeat_ms: 250,
        peer_timeout_ms: 5_000,
        arena_bytes_max: 1 << 30,
        inline_bytes_max: 1 << 20,
        pending_max: 65_536,
        ring_bytes: 256 << 10,
        device_bytes_max: 1 << 30,
    };
    let began = v1::EpochBegan {
        epoch: 3,
        rank: 1,
        size: 4,
        local_rank: 1,
        local_size: 2,
        cross_rank: 0,
        cross_size: 2,
        membership: 1,
        homogeneous: true,
    };
    let completed = v1::Completed {
        request: 7,
        epoch: 3,
        seq: 17,
        shape: vec![2, 3],
        dtype: v1::DType::DtypeF32.into(),
        result: Place::Arena { segment: 0, offset: 4_096, bytes: 24 }.into_message(),
        ..v1::Completed::default()
    };
    let call = v1::Call {
        collective: "allreduce".to_owned(),
        operation: "allreduce.grad".to_owned(),
        site: Some("train.py:88".to_owned()),
        age_ms: 300,
    };
    let record = v1::Record {
        rank: 1,
        host: "beta".to_owned(),
        pid: Some(4_321),
        exit: Some(v1::record::Exit::Signal(9)),
        last_call: Some(call),
        stderr_tail: vec!["Traceback".to_owned(), "ValueError: é\u{1b}[2J".to_owned()],
    };
    let failure = v1::Failure {
        cause: v1::Cause::RankLost.into(),
        rank: Some(1),
        sidecar: Some(0),
        tensor: Some("grad".to_owned()),
        reason: "rank 1 is gone".to_owned(),
        record: Some(record),
    };
    let split = v1::Completed { splits: vec![1, 1], result: None, ..completed.clone() };
    let messages = [
        Message::Claimed(claimed),
        Message::EpochBegan(began),
        Message::Completed(completed),
        Message::Completed(split),
        Message::Failed(v1::Failed { request: 7, failure: Some(failure.clone()) }),
        Message::EpochEnded(v1::EpochEnded { epoch: 3, failure: Some(failure) }),
        Message::ResultPart(v1::ResultPart { request: 7, data: Bytes::from_static(b"bytes") }),
        Message::Notice(v1::Notice { text: "late".to_owned(), suspect_ranks: vec![1], suspect_sidecars: vec![0] }),
    ];
    messages.into_iter().map(|message| bytes(&v1::ServerMessage { message: Some(message) })).collect()
}

pub(super) fn bytes(message: &impl prost::Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    ring::encode(message, &mut bytes);
    bytes
}
