//! Tests of conversions: round trips, and rejection of every invalid field.

use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use prost::Message as _;
use ronde_rpc::v1;
use ronde_rpc::{
    Claim, Claimed, Completion, ConvertError, EpochView, OutputPlace, Place, RankToken, SegmentKind, Submission,
    negotiate_protocol,
};
use ronde_wire::{
    Call, Cause, Codec, Collective, DType, Detail, Epoch, Exit, Failure, Group, JobName, PluginCall, Rank, Record,
    ReduceOp, Request, RequestId, Seq, SetId, Shape, SidecarIndex, TensorName, WorkerNumber, limits,
};

proptest! {
    #[test]
    fn submissions_survive_the_wire(submission in any_submission()) {
        let bytes = submission.clone().into_message().encode_to_vec();
        let message = v1::Submit::decode(bytes.as_slice()).expect("own bytes");
        prop_assert_eq!(Submission::parse(message, OWN_RANK), Ok(submission));
    }

    #[test]
    fn failures_survive_the_wire(failure in any_failure()) {
        let bytes = v1::Failure::from(&failure).encode_to_vec();
        let message = v1::Failure::decode(bytes.as_slice()).expect("own bytes");
        prop_assert_eq!(Failure::from(message), failure);
    }

    #[test]
    fn any_numbers_parse_or_are_refused(message in any_message()) {
        let (request, set) = (message.request, message.process_set);
        match Submission::parse(message, OWN_RANK) {
            Ok(submission) => {
                let wanted = submission.what.shape.elements() * submission.what.dtype.size_bytes() as u64;
                if let Some(bytes) = submission.place.bytes() {
                    prop_assert_eq!(bytes, wanted);
                }
                prop_assert!(submission.what.prescale.is_finite() && submission.what.prescale != 0.0);
            }
            Err(refused) => {
                prop_assert_eq!(refused.request, RequestId(request));
                prop_assert_eq!(refused.set, SetId(set));
                prop_assert!(!refused.reason.is_empty());
            }
        }
    }
}

#[test]
fn every_dtype_and_op_has_its_number() {
    for dtype in DType::ALL {
        let number = v1::DType::from(dtype).into();
        assert_eq!(ronde_rpc::convert::dtype_from(number), Ok(dtype));
    }
    for op in OPS {
        let number = v1::ReduceOp::from(op).into();
        assert_eq!(ronde_rpc::convert::reduce_op_from(number), Ok(op));
    }
}

#[test]
fn each_wrong_field_is_refused_by_name() {
    type Break = fn(&mut v1::Submit);
    let cases: [(&str, Break); 27] = [
        ("tensor name has 1 to", |m| m.name = String::new()),
        ("not 600", |m| m.name = "x".repeat(600)),
        ("collective is not set", |m| m.collective = None),
        ("collective is not set", |m| m.collective = Some(v1::Collective { kind: None })),
        ("reduce op is not set", |m| m.collective = Some(all_reduce(0))),
        ("reduce op 99", |m| m.collective = Some(all_reduce(99))),
        ("root is 4096", |m| m.collective = Some(Collective::Broadcast { root: Rank(4096) }.into())),
        ("splits", |m| m.collective = Some(Collective::AllToAll { splits: vec![u64::MAX, 3] }.into())),
        ("dtype is not set", |m| m.dtype = 0),
        ("dtype -1", |m| m.dtype = -1),
        ("at most 32 dimensions", |m| m.shape = vec![1; 33]),
        ("more elements than can be addressed", |m| m.shape = vec![1 << 40, 1 << 40]),
        ("prescale is 0", |m| m.prescale = 0.0),
        ("prescale is NaN", |m| m.prescale = f64::NAN),
        ("postscale is inf", |m| m.postscale = f64::INFINITY),
        ("postscale is 0", |m| m.postscale = 0.0),
        ("input is not set", |m| m.input = None),
        ("has 12 bytes, but the input has 11", |m| m.input = Some(arena(0, 11))),
        ("ends beyond", |m| m.input = Some(arena(u64::MAX, 12))),
        ("cuda memory", |m| m.input = Some(device())),
        ("codec \"top-k\"", |m| m.codec = "top-k".into()),
        ("a plugin and a codec", |m| (m.codec, m.plugin) = ("float16".into(), Some(plugin("topk", 0)))),
        ("and no plugin; say which", |m| m.collective = Some(all_reduce(v1::ReduceOp::Plugin.into()))),
        ("takes no plugin", |m| {
            (m.collective, m.plugin) = (Some(Collective::AllGather.into()), Some(plugin("topk", 0)));
        }),
        ("plugin parameters is 17", |m| m.plugin = Some(plugin("topk", 17))),
        ("plugin is 98", |m| m.plugin = Some(plugin(&"x".repeat(98), 0))),
        ("plugin parameter is not set", |m| {
            let mut plugin = plugin("topk", 1);
            plugin.parameters[0].value = None;
            m.plugin = Some(plugin);
        }),
    ];
    assert!(Submission::parse(good(), OWN_RANK).is_ok());
    for (wanted, spoil) in cases {
        let mut message = good();
        spoil(&mut message);
        let refused = Submission::parse(message, OWN_RANK).expect_err(wanted);
        assert!(refused.reason.contains(wanted), "{:?} does not say {wanted:?}", refused.reason);
        assert_eq!((refused.request, refused.set), (RequestId(7), SetId(3)));
        assert_eq!(refused.name.is_some(), !wanted.contains("name") && !wanted.contains("600"));
    }
}

#[test]
fn inline_inputs_are_bounded() {
    let mut message = good();
    let size = limits::INLINE_BYTES_MAX + 4;
    message.shape = vec![size as u64 / 4];
    message.input = Place::Inline(Bytes::from(vec![0; size])).into_message();
    let refused = Submission::parse(message, OWN_RANK).expect_err("too large");
    assert!(refused.reason.contains("over the limit of 1048576"), "{}", refused.reason);
}

#[test]
fn operations_without_reduction_do_not_scale_and_barriers_take_no_input() {
    let mut message = good();
    message.collective = Some(Collective::AllGather.into());
    message.prescale = 2.0;
    assert!(
        Submission::parse(message.clone(), OWN_RANK).expect_err("scaled").reason.contains("ALLGATHER does not scale")
    );
    message.prescale = 1.0;
    message.collective = Some(Collective::Barrier.into());
    assert!(Submission::parse(message.clone(), OWN_RANK).expect_err("input").reason.contains("BARRIER takes no input"));
    message.input = None;
    let barrier = Submission::parse(message, OWN_RANK).expect("a barrier");
    assert_eq!(barrier.what.shape.elements(), 0);
    assert_eq!(barrier.place, Place::None);
}

#[test]
fn receiving_ranks_submit_no_input() {
    let receives = [
        Collective::Scatter { root: Rank(0) },
        Collective::Recv { from: Rank(0), tag: 3 },
        Collective::RecvAny { tag: 3 },
        Collective::Join,
        Collective::AddSet { ranks: vec![Rank(0)] },
        Collective::AddSetOfMembers { ranks: vec![Rank(0)] },
        Collective::RemoveSet { set: SetId(1) },
    ];
    for collective in receives {
        let message = v1::Submit { collective: Some(collective.clone().into()), ..good() };
        let refused = Submission::parse(message.clone(), OWN_RANK).expect_err("an input");
        assert!(refused.reason.contains("takes no input"), "{}", refused.reason);
        let inline = Place::Inline(Bytes::new());
        let asking = v1::Submit { input: inline.clone().into_message(), ..message.clone() };
        assert_eq!(Submission::parse(asking, OWN_RANK).expect("a wish for messages").place, inline);
        // Its type and shape are ignored.
        let parsed =
            Submission::parse(v1::Submit { input: None, dtype: 0, ..message.clone() }, OWN_RANK).expect("in order");
        assert_eq!((parsed.what.dtype, parsed.what.shape.dimensions()), (DType::U8, &[0][..]));
        if collective.root() == Some(Rank(0)) {
            assert!(Submission::parse(message, Rank(0)).is_ok(), "the root hands over its tensor");
        }
    }
}

#[test]
fn an_output_is_a_location_in_shared_memory_other_than_the_input() {
    let at = |offset, bytes| arena(offset, bytes);
    let inline = Place::Inline(Bytes::from_static(&[0; 12])).into_message();
    let send = Some(Collective::Send { to: Rank(0), tag: 0 }.into());
    let with = |output| v1::Submit { output: Some(output), ..good() };
    let cases = [
        ("cuda", with(device())),
        ("is in no segment", with(inline.clone().expect("a place"))),
        ("beyond what can be addressed", with(at(u64::MAX, 12))),
        ("some of the input's", with(at(0, 12))),
        ("some of the input's", with(at(11, 12))),
        ("has no bytes", with(at(64, 0))),
        ("inline request", v1::Submit { input: inline, ..with(at(64, 12)) }),
        ("no result", v1::Submit { collective: send, ..with(at(64, 12)) }),
    ];
    for (words, message) in cases {
        let refused = Submission::parse(message, OWN_RANK).expect_err(words);
        assert!(refused.reason.contains(words), "{} does not say {words}", refused.reason);
    }
    let beside = Submission::parse(with(at(12, 12)), OWN_RANK).expect("in order").output;
    assert_eq!(beside, Some(OutputPlace { kind: SegmentKind::Arena, segment: 1, offset: 12, bytes: 12 }));
}

#[test]
fn device_memory_takes_all_reduces_and_broadcasts_only() {
    let at = |offset| Place::Device { segment: 1, offset, bytes: 12 }.into_message().expect("a place");
    let with = |collective: Collective, input, output| v1::Submit {
        collective: Some(collective.into()),
        input: Some(input),
        output,
        ..good()
    };
    let sum = || Collective::AllReduce { op: ReduceOp::Sum };
    let parsed = Submission::parse(with(sum(), at(0), Some(at(12))), OWN_RANK).expect("in order");
    assert_eq!(parsed.place, Place::Device { segment: 1, offset: 0, bytes: 12 });
    assert_eq!(parsed.output, Some(OutputPlace { kind: SegmentKind::Device, segment: 1, offset: 12, bytes: 12 }));
    // The same numbers, of another memory.
    Submission::parse(with(sum(), at(0), Some(arena(0, 12))), OWN_RANK).expect("in order");
    Submission::parse(with(Collective::Broadcast { root: OWN_RANK }, at(0), None), OWN_RANK).expect("in order");
    let cases = [
        ("some of the input's", with(sum(), at(0), Some(at(11)))),
        ("beyond what can be addressed", with(sum(), at(u64::MAX), None)),
        ("only all-reduce and broadcast do", with(Collective::AllGather, at(0), None)),
        ("only all-reduce and broadcast do", with(Collective::AllGather, arena(0, 12), Some(at(0)))),
    ];
    for (words, message) in cases {
        let refused = Submission::parse(message, OWN_RANK).expect_err(words);
        assert!(refused.reason.contains(words), "{} does not say {words}", refused.reason);
    }
    let inline = Submission::parse(with(sum(), at(0), None), OWN_RANK).expect("in order").inline_only(OWN_RANK);
    assert!(inline.expect_err("over gRPC-Web").reason.contains("the input is in device memory"));
}

#[test]
fn a_session_without_shared_memory_sends_everything_inline() {
    let inline = |bytes: &'static [u8]| Place::Inline(Bytes::from_static(bytes)).into_message();
    let collective = |collective: Collective| Some(v1::Collective::from(collective));
    let scatter = || collective(Collective::Scatter { root: Rank(0) });
    let nothing = v1::Submit { collective: scatter(), input: None, ..good() };
    let in_memory = [
        (good(), "the input is in an arena"),
        (v1::Submit { output: Some(arena(64, 12)), ..good() }, "the input is in an arena"),
        (nothing.clone(), "a result without a place goes to an arena"),
    ];
    for (message, words) in in_memory {
        let submission = Submission::parse(message, OWN_RANK).expect("good elsewhere");
        let refused = submission.clone().inline_only(OWN_RANK).expect_err(words);
        assert!(refused.reason.contains(words) && refused.reason.contains("gRPC-Web"), "{}", refused.reason);
        assert_eq!(
            (refused.request, refused.name),
            (submission.request, Some(submission.what.name)),
            "others are told"
        );
    }
    let barrier = v1::Submit { collective: collective(Collective::Barrier), input: None, ..good() };
    for message in
        [v1::Submit { input: inline(&[0; 12]), ..good() }, v1::Submit { input: inline(&[]), ..nothing }, barrier]
    {
        let submission = Submission::parse(message, OWN_RANK).expect("in order");
        assert_eq!(submission.clone().inline_only(OWN_RANK), Ok(submission));
    }
}

#[test]
fn splits_and_groups_are_bounded() {
    let cases = [(vec![], "splits"), (vec![1, 1], "splits"), (vec![2, 2], "splits"), (vec![0; 4_097], "splits")];
    for (splits, word) in cases {
        let message = v1::Submit { collective: Some(Collective::AllToAll { splits }.into()), ..good() };
        let refused = Submission::parse(message, OWN_RANK).expect_err("3 rows");
        assert!(refused.reason.contains(word), "{}", refused.reason);
    }
    let message = v1::Submit { collective: Some(Collective::AllToAll { splits: vec![1, 0, 2] }.into()), ..good() };
    assert!(Submission::parse(message, OWN_RANK).is_ok());
    for (size, words) in [(0, "group size is not set"), (16_385, "group size is 16385, but must be at most 16384")] {
        let group = Some(v1::Group { name: "g".into(), size });
        let refused = Submission::parse(v1::Submit { group, ..good() }, OWN_RANK).expect_err("its size");
        assert!(refused.reason.contains(words), "{}", refused.reason);
    }
    let group = Some(v1::Group { name: String::new(), size: 1 });
    assert!(Submission::parse(v1::Submit { group, ..good() }, OWN_RANK).is_err());
}

#[test]
fn a_failure_of_an_unknown_kind_is_delivered() {
    let message = v1::Failure { cause: 77, reason: "news".into(), tensor: Some(String::new()), ..Default::default() };
    assert_eq!(Failure::from(message), Failure::new(Cause::Bug, "news"));
}

#[test]
fn claims_are_checked_and_do_not_print_their_token() {
    let claim = Claim {
        job: JobName::new("mnist-7").expect("a name"),
        worker: WorkerNumber(3),
        token: RankToken::new(&[9; 32]).expect("32 bytes"),
        protocols: (1, 4),
        client: "test 0.1".into(),
        pid: 12,
    };
    assert!(!format!("{claim:?}").contains('9'));
    let message = claim.clone().into_message();
    assert_eq!(Claim::parse(&message), Ok(claim));
    assert!(Claim::parse(&v1::Claim { job: "A B".into(), ..message.clone() }).is_err());
    let short = Claim::parse(&v1::Claim { token: Bytes::from_static(b"short"), ..message });
    assert!(matches!(short, Err(ConvertError::Length { given: 5, wanted: 32, .. })));
}

#[test]
fn the_newest_common_protocol_is_negotiated() {
    assert_eq!(negotiate_protocol(1, 9), Ok(1));
    assert_eq!(negotiate_protocol(0, 1), Ok(1));
    assert!(negotiate_protocol(2, 9).is_err());
    assert!(negotiate_protocol(0, 0).is_err());
    assert!(negotiate_protocol(5, 1).is_err());
}

#[test]
fn responses_of_the_sidecar_are_checked() {
    let claimed = Claimed {
        session_token: [3; 16],
        protocol: 1,
        heartbeat_ms: 100,
        peer_timeout_ms: 5_000,
        arena_bytes_max: 1 << 30,
        inline_bytes_max: 1 << 20,
        pending_max: 100,
        ring_bytes: 1 << 18,
        device_bytes_max: 1 << 30,
    };
    assert_eq!(Claimed::parse(&claimed.clone().into_message()), Ok(claimed.clone()));
    assert!(Claimed::parse(&v1::Claimed { heartbeat_ms: 0, ..claimed.clone().into_message() }).is_err());
    assert!(Claimed::parse(&v1::Claimed { protocol: 2, ..claimed.clone().into_message() }).is_err());
    assert!(Claimed::parse(&v1::Claimed { session_token: Bytes::new(), ..claimed.into_message() }).is_err());

    let view = EpochView {
        epoch: Epoch(2),
        rank: Rank(1),
        size: 4,
        local_rank: 1,
        local_size: 2,
        cross_rank: 0,
        cross_size: 2,
        homogeneous: true,
        membership: 3,
    };
    assert_eq!(EpochView::parse(&view.into_message()), Ok(view));
    assert!(EpochView::parse(&v1::EpochBegan { rank: 4, ..view.into_message() }).is_err());
    assert!(EpochView::parse(&v1::EpochBegan { size: u32::MAX, ..view.into_message() }).is_err());

    let completion = Completion {
        request: RequestId(1),
        epoch: Epoch(2),
        seq: Seq(3),
        dtype: DType::F32,
        shape: Shape::new(vec![2, 3]).expect("a shape"),
        result: Place::Arena { segment: 1, offset: 64, bytes: 24 },
        in_output: false,
        detail: Detail::None,
    };
    let details = [
        Detail::None,
        Detail::Splits(vec![0, 4, 1]),
        Detail::LastJoined(Rank(0)),
        Detail::LastJoined(Rank(4_095)),
        Detail::Set(SetId(0)),
        Detail::Set(SetId(9)),
        Detail::Source(Rank(0)),
        Detail::Source(Rank(4_095)),
    ];
    for detail in details {
        let completion = Completion { detail, ..completion.clone() };
        assert_eq!(Completion::parse(completion.clone().into_message()), Ok(completion));
    }
    let written = Completion { result: Place::None, in_output: true, ..completion.clone() };
    assert_eq!(Completion::parse(written.clone().into_message()), Ok(written));
    let message = completion.into_message();
    assert!(Completion::parse(v1::Completed { dtype: 0, ..message.clone() }).is_err());
    assert!(Completion::parse(v1::Completed { last_joined: Some(4_096), ..message.clone() }).is_err());
    assert!(Completion::parse(v1::Completed { splits: vec![0; 4_097], ..message }).is_err());
}

fn good() -> v1::Submit {
    v1::Submit {
        request: 7,
        name: "grad".into(),
        process_set: 3,
        collective: Some(all_reduce(v1::ReduceOp::Sum.into())),
        dtype: v1::DType::DtypeF32.into(),
        shape: vec![3],
        prescale: 1.0,
        postscale: 1.0,
        input: Some(arena(0, 12)),
        codec: String::new(),
        group: None,
        call_site: None,
        output: None,
        plugin: None,
    }
}

fn plugin(name: &str, parameters: usize) -> v1::Plugin {
    use v1::plugin::{Parameter, parameter::Value};
    let parameter = Parameter { name: "k".into(), value: Some(Value::Int(1)) };
    v1::Plugin { name: name.into(), parameters: vec![parameter; parameters] }
}

fn all_reduce(op: i32) -> v1::Collective {
    use v1::collective::{AllReduce, Kind};
    v1::Collective { kind: Some(Kind::AllReduce(AllReduce { op })) }
}

fn arena(offset: u64, bytes: u64) -> v1::Place {
    Place::Arena { segment: 1, offset, bytes }.into_message().expect("a place")
}

fn device() -> v1::Place {
    let device = v1::place::Device { kind: "cuda".into(), bytes: 12, ..Default::default() };
    v1::Place { place: Some(v1::place::Place::Device(device)) }
}

fn any_submission() -> impl Strategy<Value = Submission> {
    let tensor = (prop::sample::select(DType::ALL.to_vec()), prop::collection::vec(0_u64..5, 0..4));
    let scales = (any_scale(), any_scale(), prop::sample::select(Codec::ALL.to_vec()));
    let group = prop::option::of(("[a-z]{1,20}", 1..=16_384_u32));
    let what = (any::<u32>(), "[a-z.é]{1,40}", any_collective(), group);
    (any::<u64>(), what, tensor, scales, any::<u32>()).prop_map(
        |(request, (set, name, collective, group), (dtype, shape), (prescale, postscale, codec), extra)| {
            let (dtype, shape) = if collective.has_input(OWN_RANK) { (dtype, shape) } else { (DType::U8, vec![0]) };
            let shape = Shape::new(shape).expect("small");
            let bytes = shape.elements() * dtype.size_bytes() as u64;
            let rows = shape.dimensions().first().copied().unwrap_or(1);
            let collective = match collective {
                Collective::AllToAll { splits } => {
                    // A random number of ranks; one of them gets all rows.
                    let last = splits.len();
                    Collective::AllToAll { splits: (0..=last).map(|i| if i == last { rows } else { 0 }).collect() }
                }
                other => other,
            };
            let place = match extra % 2 {
                _ if !collective.has_input(OWN_RANK) => Place::None,
                0 => Place::Arena { segment: extra, offset: extra.into(), bytes },
                _ => Place::Inline(vec![7; usize::try_from(bytes).expect("small")].into()),
            };
            let name = TensorName::new(name).expect("short");
            let scaled = collective.reduce_op().is_some();
            let (prescale, postscale) = if scaled { (prescale, postscale) } else { (1.0, 1.0) };
            let group = group.map(|(name, size)| Group { name: TensorName::new(name).expect("short"), size });
            let op = collective.reduce_op();
            let encodes = op.is_some_and(|op| op != ReduceOp::Plugin) && extra % 4 == 0;
            let plugin = (encodes || op == Some(ReduceOp::Plugin)).then(|| any_plugin(extra));
            let codec = if encodes { Codec::Plugin } else { codec };
            let what = Request {
                prescale,
                postscale,
                codec,
                group,
                ..Request::new(SetId(set), name, collective, dtype, shape)
            };
            let site = (extra % 3 > 0).then(|| format!("train.py:{extra}"));
            let wanted = extra % 5 > 0 && what.collective.has_result(OWN_RANK) && !matches!(place, Place::Inline(_));
            // After the input, in the same segment.
            let kind = SegmentKind::Arena;
            let output =
                OutputPlace { kind, segment: extra, offset: u64::from(extra) + bytes, bytes: 1 + u64::from(extra) };
            let output = wanted.then_some(output);
            Submission { request: RequestId(request), what, plugin, place, output, site }
        },
    )
}

fn any_collective() -> impl Strategy<Value = Collective> {
    let ranks = prop::collection::vec(0..4_096_u32, 0..6);
    (0..16_u8, any_op(), 0..4_u32, any::<u32>(), ranks).prop_map(|(kind, op, rank, number, ranks)| {
        let rank = Rank(rank);
        match kind {
            0 => Collective::AllReduce { op },
            1 => Collective::AllGather,
            2 => Collective::ReduceScatter { op },
            3 => Collective::Broadcast { root: rank },
            4 => Collective::AllToAll { splits: ranks.into_iter().map(u64::from).collect() },
            5 => Collective::Reduce { op, root: rank },
            6 => Collective::Gather { root: rank },
            7 => Collective::Scatter { root: rank },
            8 => Collective::Send { to: rank, tag: number },
            9 => Collective::Recv { from: rank, tag: number },
            10 => Collective::Barrier,
            11 => Collective::Join,
            12 => Collective::AddSet { ranks: ranks.into_iter().map(Rank).collect() },
            13 => Collective::RecvAny { tag: number },
            14 => Collective::AddSetOfMembers { ranks: ranks.into_iter().map(Rank).collect() },
            _ => Collective::RemoveSet { set: SetId(number) },
        }
    })
}

fn any_failure() -> impl Strategy<Value = Failure> {
    let causes = prop::sample::select(vec![
        Cause::Mismatch,
        Cause::Refused,
        Cause::RankLost,
        Cause::SidecarLost,
        Cause::ShutDown,
        Cause::TimedOut,
        Cause::Bug,
    ]);
    let names = prop::option::of("[a-z]{1,20}");
    let record = prop::option::of(any_record());
    (causes, any::<Option<u32>>(), any::<Option<u32>>(), names, ".{0,50}", record).prop_map(
        |(cause, rank, sidecar, tensor, reason, record)| {
            let mut failure = Failure::new(cause, reason).with_record(record.map(Arc::new));
            failure.rank = rank.map(Rank);
            failure.sidecar = sidecar.map(SidecarIndex);
            failure.tensor = tensor.map(|name| TensorName::new(name).expect("short"));
            failure
        },
    )
}

fn any_record() -> impl Strategy<Value = Record> {
    let exit =
        prop_oneof![any::<i32>().prop_map(Exit::Code), any::<i32>().prop_map(Exit::Signal), Just(Exit::OutOfMemory)];
    let call = ("[a-z]{1,10}", "[a-z.]{1,20}", prop::option::of(r"[a-z/]{1,20}\.py:[0-9]{1,4}"), any::<u64>());
    let call = call.prop_map(|(collective, operation, site, age_ms)| {
        let operation = TensorName::new(operation).expect("short");
        Call { collective, operation, site, age_ms }
    });
    let tail = prop::collection::vec("[ -~]{0,50}", 0..20);
    let some = (prop::option::of(exit), prop::option::of(call));
    (any::<u32>(), "[a-z0-9]{0,20}", any::<Option<u32>>(), some, tail).prop_map(
        |(rank, host, pid, (exit, last_call), stderr_tail)| Record {
            rank: Rank(rank),
            host,
            pid,
            exit,
            last_call,
            stderr_tail,
        },
    )
}

fn any_plugin(extra: u32) -> PluginCall {
    let call = PluginCall::new(format!("p{extra}@1.0.{extra}"));
    let call = call.with("ratio", f64::from(extra) / 3.0).with("seed", -i64::from(extra));
    if extra.is_multiple_of(8) { call.with("exact", true).with("mode", "a") } else { call }
}

fn any_message() -> impl Strategy<Value = v1::Submit> {
    let shape = prop::collection::vec(prop_oneof![0_u64..4, any::<u64>()], 0..40);
    let place = (any::<u32>(), any::<u64>(), prop_oneof![0_u64..300, any::<u64>()]);
    (any::<u64>(), ".{0,20}", -2..14_i32, -2..9_i32, shape, any::<f64>(), any::<f64>(), place).prop_map(
        |(request, name, dtype, op, shape, prescale, postscale, (segment, offset, bytes))| v1::Submit {
            request,
            name,
            process_set: segment,
            collective: Some(all_reduce(op)),
            dtype,
            shape,
            prescale,
            postscale,
            input: Place::Arena { segment, offset, bytes }.into_message(),
            codec: String::new(),
            group: None,
            call_site: None,
            output: Place::Arena { segment, offset: bytes, bytes: offset }.into_message(),
            plugin: (bytes % 2 > 0).then(|| v1::Plugin { name: "topk".into(), parameters: Vec::new() }),
        },
    )
}

fn any_op() -> impl Strategy<Value = ReduceOp> {
    prop::sample::select(OPS.to_vec())
}

fn any_scale() -> impl Strategy<Value = f64> {
    prop_oneof![Just(1.0), -1e30..-1e-30, 1e-30..1e30]
}

const OWN_RANK: Rank = Rank(1);
const OPS: [ReduceOp; 12] = [
    ReduceOp::Average,
    ReduceOp::Sum,
    ReduceOp::Adasum,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
    ReduceOp::Median,
    ReduceOp::ClippedMean,
    ReduceOp::Plugin,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];
