//! Arbitrary messages of sidecars: every kind, with numbers at the ends of their ranges and texts of any length.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use ronde_wire::control::{Announcement, Intent, Order, OrderedTensor};
use ronde_wire::{
    Activity, Algorithm, AnySource, Ascent, Call, Cause, Codec, Collective, Control, DType, Enclosed, Epoch, Exit,
    Failure, Group, Invalidation, Pair, PluginUse, PluginWork, ProcessSet, Rank, Record, ReduceOp, Request,
    ScheduledBucket, Seq, SetId, Shape, SidecarIndex, Tuning, World, set_of_members_name,
};

use super::cluster::name;
use crate::engine::shared::{context::Context, planning, shapes};
use crate::event::Time;

/// The sidecar of each rank, by which orders are sealed.
pub(super) const PLACEMENT: [u32; 4] = [0, 0, 1, 2];

pub(super) fn number() -> impl Strategy<Value = u64> {
    let ends = prop::sample::select(vec![u64::MAX, u64::MAX - 1, u64::MAX / 2, u64::MAX / 2 + 1]);
    prop_oneof![2 => 0_u64..6, 2 => ends, 1 => any::<u64>()]
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
        ReduceOp::Plugin,
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
        1 => (0_u32..2).prop_map(|tag| Collective::RecvAny { tag }),
        1 => vec(some_rank(), 0..4).prop_map(|ranks| Collective::AddSet { ranks }),
        2 => vec(some_rank(), 0..4).prop_map(|ranks| Collective::AddSetOfMembers { ranks }),
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
    let any = (small(), 0_u32..2).prop_map(|(to, tag)| AnySource { to: Rank(to), tag }.receive_name(0));
    let set = prop_oneof![Just("a"), Just("b")].prop_map(|own| set_of_members_name(own).expect("a short name"));
    prop_oneof![8 => prop_oneof![Just("t"), Just("u"), Just("v")].prop_map(name), 2 => message, 1 => any, 2 => set]
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

// Boxed: a strategy holds those below it by value, and the nest of a relayed message would need megabytes of stack.
pub(super) fn request() -> impl Strategy<Value = Request> {
    let dtype = prop_oneof![Just(DType::F32), prop::sample::select(DType::ALL.to_vec())];
    let codec = prop_oneof![6 => Just(Codec::None), 1 => Just(Codec::Bf16), 1 => Just(Codec::Plugin)];
    let prescale = prop_oneof![4 => Just(1.0), 1 => any::<f64>()];
    let kind = (collective(), dtype, shape(), codec, option::weighted(0.2, plugin()));
    (0_u32..3, tensor_name(), kind, prescale, group())
        .prop_map(|(set, name, (collective, dtype, shape, codec, plugin), prescale, group)| Request {
            prescale,
            codec,
            plugin: plugin.map(Arc::new),
            group,
            ..Request::new(SetId(set), name, collective, dtype, shape)
        })
        .boxed()
}

fn plugin() -> impl Strategy<Value = PluginUse> {
    let sizes = || prop_oneof![4 => 1_u32..400, 1 => any::<u32>()];
    let work = prop_oneof![
        3 => (sizes(), sizes())
            .prop_map(|(block_elements, encoded_bytes)| PluginWork::Codec { block_elements, encoded_bytes }),
        1 => Just(PluginWork::Pairwise),
        1 => Just(PluginWork::NAry),
        1 => prop_oneof![1_u32..9, any::<u32>()].prop_map(|measures| PluginWork::TwoPass { measures }),
        1 => Just(PluginWork::Adaptive),
    ];
    ("[a-z]{0,3}", "[0-9.]{0,3}", vec(any::<u64>(), 0..3), work)
        .prop_map(|(name, version, parameters, work)| PluginUse { name, version, digest: [7; 32], parameters, work })
}

fn announcement() -> impl Strategy<Value = Announcement> {
    let void = (0_u32..3, tensor_name(), failure(), group()).prop_map(|(set, name, failure, group)| Intent::Void {
        set: SetId(set),
        name,
        failure,
        group,
    });
    let void_set = (tensor_name(), vec(small().prop_map(Rank), 0..4), failure())
        .prop_map(|(name, ranks, failure)| Intent::VoidSet { name, ranks, failure });
    let slot = || prop_oneof![4 => 0_u16..2, 1 => any::<u16>()];
    let intent = prop_oneof![
        6 => request().prop_map(Intent::Ready),
        2 => (slot(), request()).prop_map(|(slot, request)| Intent::Remember { slot, request }),
        1 => slot().prop_map(|slot| Intent::Again { slot }),
        2 => void,
        1 => void_set,
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
            plugin: like.plugin,
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

/// The messages about schedules and commits.
fn ahead() -> impl Strategy<Value = Control> {
    // The first schedule of an epoch has the number 1.
    let schedule = || prop_oneof![6 => 0_u64..3, 1 => number()];
    let seq = || number().prop_map(Seq);
    let completed = || vec((0_u32..3, seq()).prop_map(|(set, seq)| (SetId(set), seq)), 0..3);
    let bucket = (order(), vec(group(), 0..4), any::<bool>()).prop_map(|(mut order, groups, plain)| {
        if !plain {
            return ScheduledBucket { order, groups };
        }
        // Reaches the checks of the order itself.
        (order.joined, order.contributions, order.pair) = (Vec::new(), Vec::new(), None);
        seal(&mut order);
        let groups = vec![None; order.tensors.len()];
        ScheduledBucket { order, groups }
    });
    prop_oneof![
        3 => (schedule(), vec(bucket, 0..4), number())
            .prop_map(|(number, buckets, patience_us)| Control::Schedule { number, buckets, patience_us }),
        1 => (schedule(), prop::sample::select(Invalidation::ALL.to_vec()))
            .prop_map(|(number, invalidation)| Control::Invalidated { number, invalidation }),
        1 => schedule().prop_map(|number| Control::Withdraw { number }),
        2 => (schedule(), seq(), completed())
            .prop_map(|(number, admitted, completed)| Control::Frozen { number, admitted, completed }),
        2 => (schedule(), seq(), completed())
            .prop_map(|(number, last, completed)| Control::Resume { number, last, completed }),
        1 => option::of(failure()).prop_map(|failure| Control::Performed { failure }),
        1 => option::of(failure()).prop_map(|failure| Control::Commit { failure }),
        1 => (0_u32..3, tensor_name(), tensor_name())
            .prop_map(|(set, receive, message)| Control::Matched { set: SetId(set), receive, message }),
    ]
}

/// Messages to the coordinator and from it.
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
        (tensor_name(), ranks(), failure()).prop_map(|(name, ranks, failure)| Control::SetRefused {
            name,
            ranks,
            failure
        }),
        (tensor_name(), 0_u32..3, ranks())
            .prop_map(|(name, id, ranks)| Control::SetAdded { name, set: ProcessSet { id: SetId(id), ranks } }),
        (tensor_name(), 0_u32..3).prop_map(|(name, set)| Control::SetRemoved { name, set: SetId(set) }),
        (0_u32..3).prop_map(|set| Control::SetForgotten { set: SetId(set) }),
        (tensor_name(), 0_u32..3, small()).prop_map(|(name, set, last)| Control::AllJoined {
            set: SetId(set),
            name,
            last: Rank(last)
        }),
        Just(Control::Done),
        failure().prop_map(|failure| Control::Failed { failure }),
        (vec(small().prop_map(SidecarIndex), 0..3), ranks())
            .prop_map(|(sidecars, ranks)| Control::Suspects { sidecars, ranks }),
        ranks().prop_map(|ranks| Control::SuspectRanks { ranks }),
        ranks().prop_map(|ranks| Control::AskActivity { ranks }),
        activities().prop_map(|activities| Control::Activities { activities }),
    ];
    let announce = vec(announcement(), 0..6).prop_map(|announcements| Control::Announce { announcements });
    prop_oneof![4 => announce, 6 => order().prop_map(Control::Order), 6 => ahead(), 10 => others]
}

fn ascent() -> impl Strategy<Value = Ascent> {
    let sidecar = || small().prop_map(SidecarIndex);
    let message = (sidecar(), 0_u64..3, 0_u64..4, control()).prop_map(|(origin, epoch, seq, message)| {
        Ascent::Message { origin, epoch: Epoch(epoch), seq: Seq(seq), message: Enclosed::new(&message) }
    });
    let joined = (sidecar(), 0_u64..8, any::<u16>()).prop_map(|(sidecar, generation, lanes)| Ascent::Joined {
        sidecar,
        generation,
        lanes,
    });
    let lost = (sidecar(), ".{0,20}").prop_map(|(sidecar, reason)| Ascent::Lost { sidecar, reason });
    prop_oneof![3 => message, 1 => joined, 1 => lost]
}

/// The same, and messages of the tree of control links, also with others enclosed.
pub(super) fn relayed() -> impl Strategy<Value = Control> {
    let sidecar = || small().prop_map(SidecarIndex);
    let generation = || prop_oneof![4 => 0_u64..8, 1 => number()];
    prop_oneof![
        3 => control(),
        3 => (generation(), vec(ascent(), 0..4))
            .prop_map(|(generation, ascents)| Control::Ascending { generation, ascents }),
        3 => (option::of(vec(sidecar(), 0..4)), control()).prop_map(|(to, message)| Control::Descending {
            to: to.map(|to| to.into_iter().collect()),
            message: Enclosed::new(&message),
        }),
        1 => generation().prop_map(|generation| Control::PathUp { generation }),
        1 => (sidecar(), ".{0,20}").prop_map(|(sidecar, reason)| Control::PathDown { sidecar, reason }),
        1 => (sidecar(), generation()).prop_map(|(sidecar, generation)| Control::Welcome { sidecar, generation }),
        1 => (sidecar(), ".{0,20}").prop_map(|(sidecar, reason)| Control::Expel { sidecar, reason }),
        1 => vec((sidecar(), number()), 0..4).prop_map(|sidecars| Control::Silent { sidecars }),
    ]
}

/// A message that no test draws is one that no test defends against.
#[test]
fn every_kind_of_message_is_drawn() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let drawn: std::collections::BTreeSet<&str> =
        (0..2_000).map(|_| relayed().new_tree(&mut runner).expect("no value is rejected").current().kind()).collect();
    let missing: Vec<&&str> = Control::KINDS.iter().filter(|kind| !drawn.contains(**kind)).collect();
    assert!(missing.is_empty(), "no {missing:?} in 2,000 messages");
}
