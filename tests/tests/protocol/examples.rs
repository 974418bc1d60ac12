//! Whole frames as bytes, with their contents.

use std::fmt::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use ronde_wire::control::{Announcement, Hello, Intent, Order, OrderedTensor, Purpose, Refusal, Transport, encode};
use ronde_wire::frame::{Chunk, ChunkHeader, ROUND_TAKEN, WIRE_VERSION, WIRE_VERSION_MIN};
use ronde_wire::{
    Activity, Algorithm, Ascent, Call, Cause, Codec, Collective, Control, DType, Enclosed, Epoch, Exit, Failure, Frame,
    FrameKind, Incarnation, Invalidation, JobName, Lane, ProcessSet, Rank, Record, ReduceOp, Request, ScheduledBucket,
    Seq, SetId, Shape, SidecarIndex, SidecarSet, TensorName, Tuning, World,
};

/// The section of the document.
pub(super) fn section() -> String {
    let mut text = "```text\n".to_owned();
    for (name, notation, bytes) in greetings().into_iter().chain(controls()).chain(data()) {
        writeln!(text, "{name}").expect("strings grow");
        writeln!(text, "  {notation}").expect("strings grow");
        for line in bytes.chunks(BYTES_PER_LINE) {
            let hex: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "    {}", hex.join(" ")).expect("strings grow");
        }
    }
    text.push_str("```\n");
    text
}

const BYTES_PER_LINE: usize = 28;

/// Name, content in the document's notation, bytes of the frame.
type Example = (&'static str, String, Vec<u8>);

fn greetings() -> Vec<Example> {
    let hello = Hello {
        wire_versions: (WIRE_VERSION_MIN, WIRE_VERSION),
        planner_version: 3,
        job: JobName::new("digits").expect("a job's name"),
        sidecar: SidecarIndex(1),
        incarnation: Incarnation(300),
        purpose: Purpose::Data(Lane(0)),
        early_credit_bytes: 1 << 22,
        lanes: 1,
        transport: Transport::Auto,
        replaces: false,
        membership: 1,
    };
    let refusal = Refusal { reason: "job a is not job b".to_owned() };
    let frame = |kind, payload| bytes(&Frame::new(kind, Epoch(0), Seq(0), payload));
    vec![
        ("hello", text(&hello), frame(FrameKind::Hello, encode(&hello))),
        ("refusal", text(&refusal), frame(FrameKind::Refusal, encode(&refusal))),
    ]
}

fn controls() -> Vec<Example> {
    let world = World::with_sets(
        vec![SidecarIndex(0), SidecarIndex(0), SidecarIndex(1)],
        vec![set(0, &[0, 1, 2]), set(4, &[0, 2])],
    );
    let ready = Request {
        prescale: 0.5,
        ..Request::new(
            SetId::WORLD,
            name("allreduce.grad"),
            Collective::AllReduce { op: ReduceOp::Sum },
            DType::F32,
            Shape::new(vec![300, 2]).expect("a shape"),
        )
    };
    let failure = Failure::new(Cause::RankLost, "rank 1 is gone").with_rank(Rank(1)).with_sidecar(SidecarIndex(0));
    let failure = failure.with_record(Some(Arc::new(record())));
    let announcements = announcements(&ready);
    let order = Order {
        set: SetId::WORLD,
        collective: ready.collective.clone(),
        dtype: DType::F32,
        prescale: 0.5,
        postscale: 1.0,
        codec: Codec::None,
        plugin: None,
        pair: None,
        joined: vec![Rank(2)],
        tensors: vec![OrderedTensor { name: ready.name, shape: ready.shape, rows: Vec::new() }],
        tuning: Tuning { algorithm: Algorithm::RecursiveDoubling, chunk_bytes: 65_536, lanes: 1, window: 1 },
        digest: std::array::from_fn(|index| u8::try_from(index).expect("16 bytes")),
        contributions: Vec::new(),
    };
    let scheduled = schedule(Order { joined: Vec::new(), ..order.clone() });
    let joined = Ascent::Joined { sidecar: SidecarIndex(9), generation: 1, lanes: 2 };
    let done = Enclosed::new(&Control::Done);
    let done = Ascent::Message { origin: SidecarIndex(9), epoch: Epoch(3), seq: Seq(17), message: done };
    let ascents = vec![joined, done];
    let to: SidecarSet = [9, 17].map(SidecarIndex).into_iter().collect();
    let mut all = vec![
        control("heartbeat", 3, 0, Control::Heartbeat { sent_us: 1_000_000, echo_us: 0, held_us: 127 }),
        control("attached", 0, 0, Control::Attached { ranks: vec![Rank(0), Rank(1)] }),
        control("epoch begin", 3, 0, Control::EpochBegin { world: world.expect("a world"), eager_bytes: 4_096 }),
        control("announce", 3, 0, Control::Announce { announcements }),
        control("order", 3, 17, Control::Order(order)),
        control("done", 3, 17, Control::Done),
        control("set added", 3, 0, Control::SetAdded { name: name("add_process_set.0"), set: set(5, &[1, 2]) }),
        control("set refused", 3, 0, set_refused()),
        control("epoch end", 3, 0, Control::EpochEnd { failure }),
        control("ask activity", 3, 0, Control::AskActivity { ranks: vec![Rank(2)] }),
        control("activities", 3, 0, Control::Activities { activities: vec![activity()] }),
        control("path up", 0, 0, Control::PathUp { generation: 1 }),
        control("ascending", 0, 0, Control::Ascending { generation: 1, ascents }),
        control("descending", 3, 17, Control::Descending { to: Some(to), message: Enclosed::new(&Control::Done) }),
    ];
    all.extend(scheduled);
    all
}

fn announcements(ready: &Request) -> Vec<Announcement> {
    let announce = |rank, intent| Announcement::new(Rank(rank), intent);
    let failure = Failure::new(Cause::Refused, "no");
    vec![
        announce(0, Intent::Remember { slot: 5, request: ready.clone() }),
        announce(1, Intent::Again { slot: 5 }),
        announce(2, Intent::Void { set: SetId(4), name: name("barrier.b"), failure, group: None }),
    ]
}

fn set_refused() -> Control {
    let failure = Failure::new(Cause::Mismatch, "they differ").with_rank(Rank(2));
    Control::SetRefused { name: name("add_process_set.members.g"), ranks: vec![Rank(1), Rank(2)], failure }
}

fn schedule(order: Order) -> Vec<Example> {
    let bucket = ScheduledBucket { order, groups: vec![None] };
    let completed = vec![(SetId::WORLD, Seq(41))];
    vec![
        control("schedule", 3, 18, Control::Schedule { number: 1, buckets: vec![bucket], patience_us: 20_000 }),
        control("invalidated", 3, 0, Control::Invalidated { number: 1, invalidation: Invalidation::Request }),
        control("withdraw", 3, 0, Control::Withdraw { number: 1 }),
        control("frozen", 3, 0, Control::Frozen { number: 1, admitted: Seq(42), completed: completed.clone() }),
        control("resume", 3, 0, Control::Resume { number: 1, last: Seq(42), completed }),
    ]
}

fn record() -> Record {
    Record {
        rank: Rank(1),
        host: "beta".to_owned(),
        pid: Some(4_321),
        exit: Some(Exit::Code(1)),
        last_call: Some(call()),
        stderr_tail: vec!["ValueError: x".to_owned()],
    }
}

fn activity() -> Activity {
    Activity { rank: Rank(2), silent_ms: Some(50), last_call: Some(call()), pending: 1, oldest: Some(name("b")) }
}

fn call() -> Call {
    Call {
        collective: "allreduce".to_owned(),
        operation: name("allreduce.grad"),
        site: Some("train.py:88".to_owned()),
        age_ms: 300,
    }
}

fn data() -> Vec<Example> {
    let header = ChunkHeader { lane: Lane(0), sub_schedule: 2, round: 1, start: 300, len: 2 };
    let chunk = |header, early, data: &'static [u8]| {
        let chunk = Chunk { epoch: Epoch(3), seq: Seq(17), early, header, data: Bytes::from_static(data) };
        [&chunk.encode_head()[..], &chunk.data].concat()
    };
    let taken = ChunkHeader { round: ROUND_TAKEN, start: 0, len: 0, ..header };
    vec![
        (
            "chunk",
            "lane 0, sub-schedule 2, round 1, elements 300 to 301, sent early: 1.0 and -2.0 as float32".to_owned(),
            chunk(header, true, &[0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]),
        ),
        ("token", "lane 0, sub-schedule 2, taken".to_owned(), chunk(taken, false, &[])),
        ("admitted", "up to 17".to_owned(), bytes(&Frame::admitted(Epoch(3), Seq(17)))),
        ("renew", "another certificate".to_owned(), bytes(&Frame::renew())),
    ]
}

fn control(name: &'static str, epoch: u64, seq: u64, message: Control) -> Example {
    (name, text(&message), bytes(&message.into_frame(Epoch(epoch), Seq(seq))))
}

fn bytes(frame: &Frame) -> Vec<u8> {
    [&frame.header.encode()[..], &frame.payload].concat()
}

/// Formats a message as `Debug` does, but shows newtypes as their content.
fn text(message: &impl std::fmt::Debug) -> String {
    let mut text = format!("{message:?}");
    for newtype in NEWTYPES {
        while let Some(at) = text.find(&format!("{newtype}(")).filter(|at| !preceded_by_letter(&text, *at)) {
            let open = at + newtype.len();
            let close = open + text[open..].find(')').expect("every newtype is closed");
            let inner = text[open + 1..close].to_owned();
            text.replace_range(at..=close, &inner);
        }
    }
    text
}

fn preceded_by_letter(text: &str, at: usize) -> bool {
    text[..at].ends_with(|c: char| c.is_ascii_alphanumeric())
}

const NEWTYPES: [&str; 10] =
    ["Epoch", "Rank", "SidecarIndex", "SetId", "Lane", "Incarnation", "JobName", "TensorName", "Shape", "Seq"];

fn name(name: &str) -> TensorName {
    TensorName::new(name).expect("a name")
}

fn set(id: u32, ranks: &[u32]) -> ProcessSet {
    ProcessSet { id: SetId(id), ranks: ranks.iter().copied().map(Rank).collect() }
}
