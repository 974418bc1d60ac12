//! Tests of every collective from submission to completion, and of every refusal with its text.

use ronde_wire::{
    Algorithm, Cause, Codec, Collective, Control, DType, Detail, Group, Rank, ReduceOp, Request, RequestId, SetId,
    Shape, SidecarIndex, World, limits,
};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;

const FOUR_ON_TWO: [u32; 4] = [0, 0, 1, 1];

/// The request of each rank.
type RequestOf = Box<dyn Fn(u32) -> Request>;

/// The shapes of all ranks' results as text, and whether each rank has a separate result.
fn results(cluster: &Cluster, requests: &[RequestId]) -> Vec<(String, bool)> {
    let result = |(rank, request): (u32, &RequestId)| {
        let done = cluster.outcome(rank, *request).as_ref().expect("a result");
        (done.shape.to_string(), done.own)
    };
    (0..).zip(requests).map(result).collect()
}

fn own(shapes: [&str; 4]) -> Vec<(String, bool)> {
    shapes.map(|shape| (shape.to_owned(), true)).into()
}

fn shared(shape: &str) -> Vec<(String, bool)> {
    vec![(shape.to_owned(), false); 4]
}

fn splits_of(rank: u32) -> Vec<u64> {
    // Rank r sends r rows to rank 0, 1 row to rank 1, none to rank 2, 2 rows to rank 3.
    vec![u64::from(rank), 1, 0, 2]
}

#[test]
fn each_collective_reports_the_shape_of_its_result() {
    let root = Rank(2);
    let no_tensor = |collective| Request { dtype: DType::U8, ..request("t", collective, &[0]) };
    let scatter = move |rank| {
        let collective = Collective::Scatter { root };
        if rank == 2 { request("t", collective, &[6, 5]) } else { no_tensor(collective) }
    };
    let to_all = |rank| {
        let rows = splits_of(rank).iter().sum();
        request("t", Collective::AllToAll { splits: splits_of(rank) }, &[rows, 5])
    };
    let rows = |collective: Collective| move |rank: u32| request("t", collective.clone(), &[u64::from(rank), 5]);
    let same = |collective: Collective| move |_: u32| request("t", collective.clone(), &[6, 5]);
    let reduce = |op| Collective::AllReduce { op };
    let none = "[0]";
    let cases: Vec<(RequestOf, Vec<(String, bool)>)> = vec![
        (Box::new(same(reduce(ReduceOp::Product))), shared("[6, 5]")),
        (Box::new(same(reduce(ReduceOp::Median))), shared("[6, 5]")),
        (Box::new(same(reduce(ReduceOp::ClippedMean))), shared("[6, 5]")),
        (Box::new(same(reduce(ReduceOp::Adasum))), shared("[6, 5]")),
        (Box::new(|_| Request { codec: Codec::Bf16, ..sum("t", &[6, 5]) }), shared("[6, 5]")),
        (Box::new(same(Collective::Broadcast { root })), shared("[6, 5]")),
        (Box::new(rows(Collective::AllGather)), shared("[6, 5]")),
        (Box::new(rows(Collective::Gather { root })), own([none, none, "[6, 5]", none])),
        (Box::new(same(Collective::Reduce { op: ReduceOp::Max, root })), own([none, none, "[6, 5]", none])),
        (
            Box::new(same(Collective::ReduceScatter { op: ReduceOp::Sum })),
            own(["[2, 5]", "[2, 5]", "[1, 5]", "[1, 5]"]),
        ),
        (Box::new(scatter), own(["[2, 5]", "[2, 5]", "[1, 5]", "[1, 5]"])),
        (Box::new(to_all), own(["[6, 5]", "[4, 5]", "[0, 5]", "[8, 5]"])),
        (Box::new(move |_| no_tensor(Collective::Barrier)), shared(none)),
    ];
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    for (request_of, expected) in cases {
        let requests: Vec<_> = (0..4).map(|rank| cluster.submit(rank, request_of(rank))).collect();
        cluster.run();
        assert_eq!(results(&cluster, &requests), expected, "{:?}", request_of(0).collective);
    }
    assert!(cluster.ended.is_empty());
}

#[test]
fn an_all_to_all_reports_the_rows_received_from_each_rank() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let to_all = |rank| {
        let rows = splits_of(rank).iter().sum();
        request("t", Collective::AllToAll { splits: splits_of(rank) }, &[rows])
    };
    let requests: Vec<_> = (0..4).map(|rank| cluster.submit(rank, to_all(rank))).collect();
    cluster.run();
    let expected = [vec![0, 1, 2, 3], vec![1, 1, 1, 1], vec![0, 0, 0, 0], vec![2, 2, 2, 2]];
    for ((rank, request), rows) in (0..).zip(requests).zip(expected) {
        assert_eq!(cluster.outcome(rank, request).as_ref().expect("a result").detail, Detail::Splits(rows));
    }
    let admission = &cluster.admitted[1][0];
    assert!(admission.tensors[0].own && admission.joined.is_empty());
    assert_eq!(admission.arithmetic.op, None);
}

/// Asserts that a request of one rank is refused on all ranks with a reason, and that the next use of the name works.
fn assert_refused(cluster: &mut Cluster, odd: &Request, words: &str) {
    let usual = |odd: &Request| Request { name: odd.name.clone(), ..sum("t", &[4]) };
    let early = cluster.submit(1, usual(odd));
    cluster.run();
    let refused = cluster.submit(2, odd.clone());
    cluster.run();
    let late = cluster.submit(3, usual(odd));
    let refused_too = cluster.submit(0, odd.clone());
    cluster.run();
    for (rank, request) in [(1, early), (2, refused), (3, late), (0, refused_too)] {
        let failure = cluster.failure(rank, request);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{failure} lacks {words}");
    }
    assert!(cluster.failure(1, early).reason.contains("rank 2"), "the culprit is named");
    let again = cluster.submit_all(&usual(odd));
    cluster.run();
    assert!(cluster.all_completed(&again), "every rank has taken part in the failed round");
    assert!(cluster.ended.is_empty());
}

#[test]
fn invalid_requests_are_refused_by_name_on_all_ranks() {
    let reduce = |op, dtype| Request { dtype, ..request("t", Collective::AllReduce { op }, &[4]) };
    let to_all = |splits: &[u64]| request("t", Collective::AllToAll { splits: splits.to_vec() }, &[4]);
    let root = Rank(7);
    let group = |size| Some(Group { name: name("g"), size });
    let odd = [
        (reduce(ReduceOp::Adasum, DType::I32), "ALLREDUCE with reduction adasum takes floating-point types, not int32"),
        (reduce(ReduceOp::Median, DType::Bool), "reduction median takes floating-point types, not bool"),
        (reduce(ReduceOp::ClippedMean, DType::U8), "reduction clipped-mean takes floating-point types, not uint8"),
        (reduce(ReduceOp::Average, DType::Bool), "ALLREDUCE cannot average bool"),
        (
            reduce(ReduceOp::BitXor, DType::F16),
            "ALLREDUCE with reduction bit-xor takes integers and bool, not float16; floats have no bitwise reduction",
        ),
        (
            request("t", Collective::ReduceScatter { op: ReduceOp::BitAnd }, &[4]),
            "REDUCESCATTER with reduction bit-and takes integers and bool, not float32",
        ),
        (
            request("t", Collective::Reduce { op: ReduceOp::BitOr, root: Rank(0) }, &[4]),
            "REDUCE with reduction bit-or takes integers and bool, not float32",
        ),
        (request("t", Collective::ReduceScatter { op: ReduceOp::Adasum }, &[4]), "REDUCESCATTER with reduction adasum"),
        (
            request("t", Collective::Reduce { op: ReduceOp::Median, root: Rank(0) }, &[4]),
            "REDUCE with reduction median",
        ),
        (Request { codec: Codec::F16, ..reduce(ReduceOp::Max, DType::F32) }, "sum or average, not float32 with max"),
        (Request { codec: Codec::Bf16, ..reduce(ReduceOp::Sum, DType::F64) }, "takes float32 with reduction sum"),
        (Request { codec: Codec::F16, ..request("t", Collective::AllGather, &[4]) }, "ALLGATHER takes no codec"),
        (Request { postscale: 2.0, ..request("t", Collective::AllGather, &[4]) }, "ALLGATHER does not reduce"),
        (
            request("t", Collective::Broadcast { root }, &[4]),
            "received invalid root rank: rank 7 is not in process set 0",
        ),
        (request("t", Collective::Reduce { op: ReduceOp::Sum, root }, &[4]), "received invalid root rank"),
        (request("t", Collective::Gather { root }, &[4]), "received invalid root rank"),
        (request("t", Collective::Scatter { root }, &[4]), "received invalid root rank"),
        (to_all(&[1, 1, 2]), "splits has 3 entries for a set of 4 ranks"),
        (to_all(&[1, 1, 1, 2]), "the sum of splits is larger than the first dimension of the tensor, 4"),
        (to_all(&[u64::MAX, 1, 1, 2]), "the sum of splits is larger than the first dimension of the tensor, 4"),
        (to_all(&[1, 1, 1, 0]), "the sum of splits, 3, is smaller than the first dimension of the tensor, 4"),
        (Request { group: group(2), ..request("t", Collective::Barrier, &[0]) }, "BARRIER cannot be in a group"),
        (Request { group: group(0), ..sum("t", &[4]) }, "group g has 0 tensors; a group has 1 to 16384"),
    ];
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    for (what, words) in odd {
        assert_refused(&mut cluster, &what, words);
    }
}

/// Asserts that mismatched requests fail on all ranks with a reason, and that the next use of the name works.
fn assert_mismatch(cluster: &mut Cluster, request_of: impl Fn(u32) -> Request, words: &str, culprit: u32) {
    let requests: Vec<_> = (0..4).map(|rank| cluster.submit(rank, request_of(rank))).collect();
    cluster.run();
    let failure = cluster.common_failure(&requests);
    assert!(failure.reason.contains(words), "{failure} lacks {words}");
    assert_eq!((failure.cause, failure.rank), (Cause::Mismatch, Some(Rank(culprit))), "{failure}");
    let again = cluster.submit_all(&sum("t", &[4]));
    cluster.run();
    assert!(cluster.all_completed(&again) && cluster.ended.is_empty());
}

#[test]
fn mismatched_requests_fail_with_the_same_text_on_all_ranks() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let odd_one = |odd: Request, usual: Request| move |rank| if rank == 2 { odd.clone() } else { usual.clone() };
    let of = |collective: &Collective, shape: &[u64]| request("t", collective.clone(), shape);
    let root = Rank(1);
    let reducing = [Collective::ReduceScatter { op: ReduceOp::Sum }, Collective::Reduce { op: ReduceOp::Sum, root }];
    for collective in &reducing {
        let usual = of(collective, &[4, 2]);
        let scaled = Request { prescale: 0.5, ..usual.clone() };
        let words = format!("Mismatched {} tensor shapes", collective.name());
        assert_mismatch(&mut cluster, odd_one(of(collective, &[4, 3]), usual.clone()), &words, 2);
        assert_mismatch(&mut cluster, odd_one(scaled, usual), "Mismatched prescale and/or postscale factors", 2);
    }
    let max = of(&Collective::ReduceScatter { op: ReduceOp::Max }, &[4]);
    let usual = of(&reducing[0], &[4]);
    assert_mismatch(&mut cluster, odd_one(max, usual), "Mismatched reduction operation", 2);
    let to_all = Collective::AllToAll { splits: vec![1; 4] };
    for collective in [Collective::Gather { root }, Collective::AllGather, to_all] {
        let (name, usual) = (collective.name(), of(&collective, &[4, 2]));
        let scalar = format!("Rank 2 tried to {name} a rank-zero tensor");
        assert_mismatch(&mut cluster, odd_one(of(&collective, &[]), usual.clone()), &scalar, 2);
        let odd = of(&collective, &[4]);
        assert_mismatch(&mut cluster, odd_one(odd, usual.clone()), "One rank sent a tensor of rank 2", 2);
        let odd = of(&collective, &[4, 3]);
        assert_mismatch(&mut cluster, odd_one(odd, usual), "a tensor with dimension 1 equal to 2", 2);
    }
    for scalar in [reducing[0].clone(), Collective::Scatter { root: Rank(0) }] {
        let words = format!("Process-set rank zero tried to {} a rank-zero tensor", scalar.name());
        assert_mismatch(&mut cluster, |_| of(&scalar, &[]), &words, 0);
    }
    let other = Rank(3);
    let roots = [
        (Collective::Reduce { op: ReduceOp::Sum, root }, Collective::Reduce { op: ReduceOp::Sum, root: other }),
        (Collective::Gather { root }, Collective::Gather { root: other }),
        (Collective::Scatter { root }, Collective::Scatter { root: other }),
    ];
    for (usual, odd) in roots {
        let words = format!("Mismatched {} root ranks: One rank specified root rank 1", usual.name());
        assert_mismatch(&mut cluster, odd_one(of(&odd, &[4]), of(&usual, &[4])), &words, 2);
    }
    let coded = Request { codec: Codec::Bf16, ..sum("t", &[4]) };
    let words = "Mismatched codecs: One rank asked for none, but another rank asked for bfloat16.";
    assert_mismatch(&mut cluster, odd_one(coded, sum("t", &[4])), words, 2);
    let grouped = Request { group: Some(Group { name: name("g"), size: 1 }), ..sum("t", &[4]) };
    let words = "Mismatched groups: One rank had group none, but another rank had g of 1 tensors.";
    assert_mismatch(&mut cluster, odd_one(grouped, sum("t", &[4])), words, 2);
}

#[test]
fn ranks_without_an_input_may_give_any_type() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let scatter = |rank, dtype| Request { dtype, ..request("t", Collective::Scatter { root: Rank(rank) }, &[8]) };
    let dtypes = [DType::U8, DType::I64, DType::F64, DType::Bool];
    let requests: Vec<_> = (0..).zip(dtypes).map(|(rank, dtype)| cluster.submit(rank, scatter(2, dtype))).collect();
    cluster.run();
    for (rank, request) in (0..).zip(requests) {
        let done = cluster.outcome(rank, request).as_ref().expect("a result");
        assert_eq!((done.dtype, done.shape.to_string()), (DType::F64, "[2]".to_owned()));
    }
}

#[test]
fn tensors_with_zero_elements_complete() {
    let mut cluster = Cluster::new(&FOUR_ON_TWO).started();
    let collectives = [
        (Collective::AllReduce { op: ReduceOp::Adasum }, "[0, 3]"),
        (Collective::ReduceScatter { op: ReduceOp::Sum }, "[0, 3]"),
        (Collective::AllToAll { splits: vec![0; 4] }, "[0, 3]"),
        (Collective::Scatter { root: Rank(0) }, "[0, 3]"),
        (Collective::AllGather, "[0, 3]"),
    ];
    for (collective, shape) in collectives {
        let requests = cluster.submit_all(&request("t", collective.clone(), &[0, 3]));
        cluster.run();
        let shapes = results(&cluster, &requests);
        assert!(shapes.iter().all(|(given, _)| given == shape), "{collective:?}: {shapes:?}");
    }
}

#[test]
fn a_result_that_is_too_large_is_refused_on_all_ranks() {
    let world = Cluster::new(&FOUR_ON_TWO).world;
    let mut cluster = Cluster::of(world, |config| EngineConfig { result_bytes_max: 64, ..config }).started();
    let too_large = [
        (sum("t", &[17]), "has a result of 68 bytes, more than the 64 bytes of arena_bytes_max"),
        (request("t", Collective::AllGather, &[5]), "ALLGATHER has a result of 80 bytes"),
        (request("t", Collective::Gather { root: Rank(3) }, &[5]), "GATHER has a result of 80 bytes"),
        (request("t", Collective::AllToAll { splits: vec![5; 4] }, &[20]), "ALLTOALL has a result of 80 bytes"),
        (
            request("t", Collective::ReduceScatter { op: ReduceOp::Sum }, &[65]),
            "REDUCESCATTER has a result of 68 bytes",
        ),
        (
            request("t", Collective::AllGather, &[1 << 47]),
            "ALLGATHER has a result of more elements than a tensor may have",
        ),
    ];
    for (what, words) in too_large {
        let requests = cluster.submit_all(&what);
        cluster.run();
        let failure = cluster.common_failure(&requests);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{failure} lacks {words}");
        let again = cluster.submit_all(&sum("t", &[16]));
        cluster.run();
        assert!(cluster.all_completed(&again) && cluster.ended.is_empty(), "{words}");
    }
}

#[test]
fn collectives_that_see_all_ranks_at_once_are_refused_in_large_sets() {
    let ranks = u32::try_from(limits::NARY_RANKS_MAX).expect("a small number") + 1;
    let placement = (0..ranks).map(|rank| SidecarIndex(rank / 64)).collect();
    let mut cluster = Cluster::of(World::new(placement).expect("a world"), |config| config).started();
    let splits = vec![1; ranks as usize];
    let odd = [
        (request("t", Collective::AllReduce { op: ReduceOp::Median }, &[4]), "takes sets of up to 256 ranks"),
        (request("t", Collective::AllToAll { splits }, &[u64::from(ranks)]), "takes sets of up to 256 ranks"),
    ];
    for (what, words) in odd {
        let requests = cluster.submit_all(&what);
        cluster.run();
        assert!((0..).zip(requests).all(|(rank, request)| cluster.failure(rank, request).reason.contains(words)));
    }
}

#[test]
fn orders_of_every_collective_are_checked_against_local_requests() {
    type Change = fn(&mut ronde_wire::control::Order);
    let splits = vec![1, 1];
    let changes: [(Request, Change, &str); 5] = [
        (
            request("t", Collective::AllToAll { splits }, &[2]),
            |order| order.tensors[0].rows = vec![1, 1, 0, 2],
            "shape",
        ),
        (request("t", Collective::AllGather, &[2]), |order| order.tensors[0].rows = vec![2, 3], "shape"),
        (
            sum("t", &[2]),
            |order| {
                order.codec = Codec::Bf16;
                order.tuning.algorithm = Algorithm::Direct;
            },
            "codec bfloat16 was ordered",
        ),
        (sum("t", &[2]), |order| order.joined = vec![Rank(1)], "rank 1 is marked as joined but has not joined"),
        (
            request("t", Collective::Broadcast { root: Rank(0) }, &[2]),
            |order| order.joined = vec![Rank(1)],
            "BROADCAST of process set 0 goes on without ranks that have joined",
        ),
    ];
    for (what, change, words) in changes {
        let mut cluster = Cluster::new(&[0, 1]).started();
        let requests = cluster.submit_all(&what);
        cluster.drain_all();
        cluster.deliver((1, 0));
        cluster.drain_all();
        cluster.tamper((0, 1), |_, message| {
            if let Control::Order(order) = message {
                change(order);
                super::arbitrary::seal_for(&[0, 1], order);
            }
        });
        cluster.run();
        let failure = cluster.failure(1, requests[1]);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Bug, "{failure} lacks {words}");
    }
}

#[test]
fn the_same_name_in_two_sets_is_two_names() {
    let mut cluster = Cluster::with_sets(&FOUR_ON_TWO, &[&[1, 2], &[0, 1, 3]]).started();
    let in_set = |set, shape: &[u64]| Request { set: SetId(set), ..sum("t", shape) };
    let mut requests = Vec::new();
    for (set, ranks, rows) in [(0, &[0, 1, 2, 3][..], 4), (1, &[1, 2], 5), (2, &[0, 1, 3], 6)] {
        let of_set = |rank: &u32| (*rank, cluster.submit(*rank, in_set(set, &[rows])), rows);
        requests.extend(ranks.iter().map(of_set).collect::<Vec<_>>());
    }
    cluster.run();
    for (rank, request, rows) in requests {
        let shape = &cluster.outcome(rank, request).as_ref().expect("a result").shape;
        assert_eq!(*shape, Shape::new(vec![rows]).expect("a shape"));
    }
}
