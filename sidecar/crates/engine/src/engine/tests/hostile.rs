//! Tests with arbitrary messages of peers: nothing panics, and ranks of other sidecars are unaffected.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use ronde_wire::control::{Announcement, Intent, Order, OrderedTensor};
use ronde_wire::{
    Activity, Algorithm, Call, Cause, Codec, Collective, Control, DType, Epoch, Exit, Failure, Group, Pair, ProcessSet,
    Rank, Record, ReduceOp, Request, Seq, SetId, Shape, SidecarIndex, Tuning, World,
};

use super::cluster::{Cluster, name, sum};
use crate::engine::shared::{context::Context, planning, shapes};
use crate::event::{Event, Time};

const PLACEMENT: [u32; 4] = [0, 0, 1, 2];

pub(super) fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..6, Just(u64::MAX), Just(u64::MAX / 2), any::<u64>()]
}

pub(super) fn small() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0_u32..5, 1 => any::<u32>()]
}

fn shape() -> impl Strategy<Value = Shape> {
    vec(prop_oneof![5 => 0_u64..5, 1 => any::<u64>()], 0..4).prop_map(|d| Shape::new(d).unwrap_or_default())
}

fn op() -> impl Strategy<Value = ReduceOp> {
    prop::sample::select(vec![
        ReduceOp::Sum,
        ReduceOp::Average,
        ReduceOp::Adasum,
        ReduceOp::Min,
        ReduceOp::Median,
        ReduceOp::ClippedMean,
        ReduceOp::BitXor,
    ])
}

fn collective() -> impl Strategy<Value = Collective> {
    let some_rank = || small().prop_map(Rank);
    prop_oneof![
        3 => op().prop_map(|op| Collective::AllReduce { op }),
        1 => Just(Collective::AllGather),
        1 => Just(Collective::Barrier),
        2 => Just(Collective::Join),
        1 => op().prop_map(|op| Collective::ReduceScatter { op }),
        1 => (op(), some_rank()).prop_map(|(op, root)| Collective::Reduce { op, root }),
        1 => some_rank().prop_map(|root| Collective::Broadcast { root }),
        1 => some_rank().prop_map(|root| Collective::Gather { root }),
        1 => some_rank().prop_map(|root| Collective::Scatter { root }),
        1 => vec(number(), 0..5).prop_map(|splits| Collective::AllToAll { splits }),
        1 => (some_rank(), 0_u32..2).prop_map(|(to, tag)| Collective::Send { to, tag }),
        1 => (some_rank(), 0_u32..2).prop_map(|(from, tag)| Collective::Recv { from, tag }),
        1 => vec(some_rank(), 0..4).prop_map(|ranks| Collective::AddSet { ranks }),
        1 => (0_u32..4).prop_map(|set| Collective::RemoveSet { set: SetId(set) }),
    ]
}

fn pair() -> impl Strategy<Value = Pair> {
    (small(), small()).prop_map(|(from, to)| Pair { from: Rank(from), to: Rank(to) })
}

fn group() -> impl Strategy<Value = Option<Group>> {
    option::weighted(0.2, (tensor_name(), prop_oneof![0_u32..4, any::<u32>()]))
        .prop_map(|group| group.map(|(name, size)| Group { name, size }))
}

fn tensor_name() -> impl Strategy<Value = ronde_wire::TensorName> {
    let message = (pair(), 0_u32..2).prop_map(|(pair, tag)| pair.message_name(tag, 0));
    prop_oneof![4 => prop_oneof![Just("t"), Just("u"), Just("v")].prop_map(name), 1 => message]
}

fn failure() -> impl Strategy<Value = Failure> {
    let causes = vec![Cause::Mismatch, Cause::Refused, Cause::RankLost, Cause::ShutDown, Cause::TimedOut, Cause::Bug];
    (prop::sample::select(causes), option::of(small()), 0_usize..6_000).prop_map(|(cause, rank, length)| Failure {
        cause,
        rank: rank.map(Rank),
        sidecar: None,
        tensor: None,
        reason: "é".repeat(length),
        record: (length % 3 == 0).then(|| Arc::new(record(length))),
    })
}

fn record(length: usize) -> Record {
    let call = Call { collective: "x".repeat(length), operation: name("t"), site: None, age_ms: u64::MAX };
    let stderr_tail = vec!["\x1b".repeat(length); length % 100];
    let exit = Some(Exit::Signal(i32::MIN));
    Record { rank: Rank(u32::MAX), host: "h".repeat(length), pid: None, exit, last_call: Some(call), stderr_tail }
}

fn activities() -> impl Strategy<Value = Vec<Activity>> {
    let activity = (small(), option::of(number()), option::of(0_usize..1_000), any::<u32>());
    let activity = activity.prop_map(|(rank, silent_ms, length, pending)| {
        let last_call = length.and_then(|length| record(length).last_call);
        Activity { rank: Rank(rank), silent_ms, last_call, pending, oldest: Some(name("t")) }
    });
    vec(activity, 0..40)
}

fn request() -> impl Strategy<Value = Request> {
    let dtype = prop_oneof![Just(DType::F32), prop::sample::select(DType::ALL.to_vec())];
    let codec = prop_oneof![3 => Just(Codec::None), 1 => Just(Codec::Bf16)];
    let prescale = prop_oneof![4 => Just(1.0), 1 => any::<f64>()];
    let kind = (collective(), dtype, shape(), codec);
    (0_u32..3, tensor_name(), kind, prescale, group()).prop_map(
        |(set, name, (collective, dtype, shape, codec), prescale, group)| Request {
            prescale,
            codec,
            group,
            ..Request::new(SetId(set), name, collective, dtype, shape)
        },
    )
}

fn announcement() -> impl Strategy<Value = Announcement> {
    let void = (0_u32..3, tensor_name(), failure(), group()).prop_map(|(set, name, failure, group)| Intent::Void {
        set: SetId(set),
        name,
        failure,
        group,
    });
    let slot = || prop_oneof![4 => 0_u16..2, 1 => any::<u16>()];
    let intent = prop_oneof![
        6 => request().prop_map(Intent::Ready),
        2 => (slot(), request()).prop_map(|(slot, request)| Intent::Remember { slot, request }),
        1 => slot().prop_map(|slot| Intent::Again { slot }),
        2 => void,
    ];
    (small(), intent, prop::collection::vec(any::<u8>(), 0..9)).prop_map(|(rank, intent, came)| {
        let contribution = came.into();
        Announcement { rank: Rank(rank), intent, contribution }
    })
}

fn order() -> impl Strategy<Value = Order> {
    let algorithms = vec![
        Algorithm::Local,
        Algorithm::Ring,
        Algorithm::RecursiveDoubling,
        Algorithm::BinomialTree,
        Algorithm::Dissemination,
        Algorithm::HalvingDoubling,
        Algorithm::Pairwise,
        Algorithm::Linear,
        Algorithm::Direct,
        Algorithm::Eager,
    ];
    let chunk_bytes = prop_oneof![Just(0), Just(4_096_u32), Just(65_536), any::<u32>()];
    let tuning = (prop::sample::select(algorithms), chunk_bytes, 0_u16..20, 0_u16..80)
        .prop_map(|(algorithm, chunk_bytes, lanes, window)| Tuning { algorithm, chunk_bytes, lanes, window });
    let tensor = (tensor_name(), shape(), vec(prop_oneof![4 => 0_u64..9, 1 => any::<u64>()], 0..5))
        .prop_map(|(name, shape, rows)| OrderedTensor { name, shape, rows });
    let came = option::weighted(0.3, vec(vec(vec(any::<u8>(), 0..9).prop_map(bytes::Bytes::from), 0..4), 0..4));
    let others =
        (option::weighted(0.2, pair()), vec(small().prop_map(Rank), 0..3), came.prop_map(Option::unwrap_or_default));
    (request(), vec(tensor, 0..4), tuning, any::<bool>(), others).prop_map(|(like, tensors, tuning, honest, others)| {
        let (pair, joined, contributions) = others;
        let mut order = Order {
            set: like.set,
            collective: like.collective,
            dtype: like.dtype,
            prescale: like.prescale,
            postscale: like.postscale,
            codec: like.codec,
            plugin: None,
            pair,
            joined,
            tensors,
            tuning,
            digest: [0; 16],
            contributions,
        };
        if honest {
            seal(&mut order);
        }
        order
    })
}

/// Sets the digest of an order to match its contents, so that the checks after the digest are reached.
fn seal(order: &mut Order) {
    seal_for(&PLACEMENT, order);
}

pub(super) fn seal_for(placement: &[u32], order: &mut Order) {
    let world = World::new(placement.iter().copied().map(SidecarIndex).collect()).expect("a world");
    let config = crate::EngineConfig::new(SidecarIndex(0), world);
    let set = Context::new(config, Time(0)).world_set(order.set);
    let kind = shapes::work_kind(&order.collective, order.dtype, order.codec, order.plugin.as_deref(), order.pair);
    let (Some(set), Some(kind)) = (set, kind) else { return };
    let pair = order.pair.and_then(|pair| set.pair(SidecarIndex(0), pair));
    let view = pair.as_ref().unwrap_or(&set);
    let work = shapes::work(kind, order.dtype, view, &order.tensors);
    order.digest = planning::digest(&view.topology, &work, &order.tuning);
}

pub(super) fn control() -> impl Strategy<Value = Control> {
    let ranks = || vec(small().prop_map(Rank), 0..4);
    let world = vec(0_u32..4, 1..5)
        .prop_map(|placement| World::new(placement.into_iter().map(SidecarIndex).collect()).expect("a world"));
    let others = prop_oneof![
        (number(), number(), number()).prop_map(|(sent_us, echo_us, held_us)| Control::Heartbeat {
            sent_us,
            echo_us,
            held_us
        }),
        ranks().prop_map(|ranks| Control::Attached { ranks }),
        (small(), failure()).prop_map(|(rank, failure)| Control::Left { rank: Rank(rank), failure }),
        (small(), ".{0,40}").prop_map(|(s, reason)| Control::Unreachable { sidecar: SidecarIndex(s), reason }),
        (world, any::<u32>()).prop_map(|(world, eager_bytes)| Control::EpochBegin { world, eager_bytes }),
        failure().prop_map(|failure| Control::EpochEnd { failure }),
        (0_u32..3, tensor_name(), failure(), ranks()).prop_map(|(set, name, failure, excused)| Control::Reject {
            excused,
            set: SetId(set),
            name,
            failure
        }),
        (tensor_name(), 0_u32..3, ranks())
            .prop_map(|(name, id, ranks)| Control::SetAdded { name, set: ProcessSet { id: SetId(id), ranks } }),
        (tensor_name(), 0_u32..3).prop_map(|(name, set)| Control::SetRemoved { name, set: SetId(set) }),
        (0_u32..3).prop_map(|set| Control::SetForgotten { set: SetId(set) }),
        (tensor_name(), small()).prop_map(|(name, last)| Control::AllJoined { name, last: Rank(last) }),
        Just(Control::Done),
        failure().prop_map(|failure| Control::Failed { failure }),
        (vec(small().prop_map(SidecarIndex), 0..3), ranks())
            .prop_map(|(sidecars, ranks)| Control::Suspects { sidecars, ranks }),
        ranks().prop_map(|ranks| Control::SuspectRanks { ranks }),
        ranks().prop_map(|ranks| Control::AskActivity { ranks }),
        activities().prop_map(|activities| Control::Activities { activities }),
    ];
    let announce = vec(announcement(), 0..6).prop_map(|announcements| Control::Announce { announcements });
    prop_oneof![4 => announce, 6 => order().prop_map(Control::Order), 10 => others]
}

fn messages() -> impl Strategy<Value = Vec<(usize, u32, u64, u64, Control)>> {
    let epoch = prop_oneof![6 => Just(1_u64), 1 => 0_u64..4, 1 => number()];
    let seq = prop_oneof![4 => 0_u64..6, 1 => any::<u64>()];
    vec((0_usize..3, small(), epoch, seq, control()), 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Any sidecar sends any message to any other one while correct ranks have pending requests: no panic, and every
    /// request completes exactly once.
    #[test]
    fn arbitrary_messages_never_panic_and_every_request_completes(messages in messages(), ask in vec((0_u32..4, request()), 0..8)) {
        let mut cluster = Cluster::new(&PLACEMENT).started();
        let mut requests = Vec::new();
        let mut ask = ask.into_iter();
        for (to, from, epoch, seq, message) in messages {
            if let Some((rank, what)) = ask.next() {
                requests.push((rank, cluster.submit(rank, what)));
            }
            if from as usize != to {
                cluster.control(to, from, (epoch, seq), message);
            }
            cluster.run();
        }
        cluster.advance(200);
        cluster.close_session(3);
        cluster.close_session(0);
        cluster.run();
        // A sidecar that was misled about the epoch detects it by silence.
        cluster.stopped[0] = true;
        cluster.advance(8_000);
        for (rank, request) in requests {
            let _ = cluster.outcome(rank, request);
        }
    }

    /// A sidecar that is not the coordinator can affect another one only by ending the epoch.
    #[test]
    fn a_sidecar_without_ranks_of_a_request_cannot_complete_it(messages in vec((any::<u64>(), control()), 1..12)) {
        let mut cluster = Cluster::new(&PLACEMENT).started();
        let pending = cluster.submit(2, sum("t", &[4]));
        cluster.run();
        for (seq, message) in messages {
            // Sidecar 2 to sidecar 1, neither of which coordinates.
            let before = cluster.disconnects.len();
            cluster.engines[1].handle_event(cluster.now, Event::Control {
                from: SidecarIndex(2), epoch: Epoch(1), seq: Seq(seq), message,
            });
            cluster.drain_all();
            prop_assert_eq!(cluster.disconnects.len(), before + 1);
            prop_assert!(cluster.is_pending(pending));
            prop_assert!(cluster.admitted[1].is_empty());
        }
    }
}

#[test]
fn a_sidecar_speaks_only_for_its_own_ranks() {
    let foreign = [
        Control::Attached { ranks: vec![Rank(0)] },
        Control::Left { rank: Rank(0), failure: Failure::new(Cause::RankLost, "gone") },
        Control::SuspectRanks { ranks: vec![Rank(3), Rank(99)] },
        Control::Activities {
            activities: vec![Activity { rank: Rank(0), silent_ms: None, last_call: None, pending: 0, oldest: None }],
        },
        Control::AskActivity { ranks: vec![Rank(1)] },
        Control::Announce { announcements: vec![Announcement::new(Rank(0), Intent::Ready(sum("t", &[1])))] },
        Control::Done,
        Control::Unreachable { sidecar: SidecarIndex(77), reason: String::new() },
        Control::EpochEnd { failure: Failure::new(Cause::RankLost, "gone") },
    ];
    for message in foreign {
        let mut cluster = Cluster::new(&PLACEMENT).started();
        let pending = cluster.submit(1, sum("t", &[1]));
        cluster.run();
        cluster.control(0, 1, (1, 1), message.clone());
        cluster.run();
        assert_eq!(cluster.disconnects.len(), 1, "{message:?}");
        assert_eq!((cluster.disconnects[0].0, cluster.disconnects[0].1), (0, SidecarIndex(1)));
        let failure = cluster.failure(1, pending);
        assert!(failure.reason.contains("sidecar 1 (rank 2) is lost: sidecar 1 breaks the protocol"), "{failure}");
    }
}

#[test]
fn an_unknown_sidecar_is_disconnected_and_changes_nothing() {
    let mut cluster = Cluster::new(&PLACEMENT).started();
    let pending = cluster.submit(1, sum("t", &[1]));
    cluster.control(0, 9, (1, 0), Control::Failed { failure: Failure::new(Cause::Bug, "x") });
    cluster.control(1, 9, (1, 0), Control::Heartbeat { sent_us: 1, echo_us: 1, held_us: 1 });
    cluster.run();
    assert_eq!(cluster.disconnects.len(), 2);
    assert!(cluster.is_pending(pending) && cluster.ended.is_empty());
}
