//! Tests of floating-point results: the same bits under any interleaving, and values that are not finite are carried.

use ronde_collectives::plan::{Counts, WorkKind};
use ronde_wire::{Codec, DType, Rank, ReduceOp, Tuning};

use super::jobs::{Job, KINDS, decode, encode, kind_of, op_of};
use super::topology;
use super::world::Net;

/// Two sidecars with interleaved ranks, three with one; an odd number of members, more than a power of two.
const PLACEMENT: [u32; 7] = [0, 1, 0, 2, 1, 3, 4];
const ELEMENTS: u64 = 9_001;

/// Conditions that may differ between two runs: order of events, credit, chunks, lanes, windows.
const RUNS: [(&[u8], u64, u32, u16, u16); 4] = [
    (&[7, 3, 9, 200], 1 << 20, 4_096, 1, 1),
    (&[1, 2, 250, 31, 77, 5], 4_300, 4_096, 3, 4),
    (&[90, 13, 8], 0, 16_384, 2, 2),
    (&[255, 254, 17, 0, 66], 60, 1 << 20, 1, 3),
];

#[test]
fn results_have_the_same_bits_under_any_interleaving() {
    for kind in 0..KINDS {
        for dtype in [DType::F32, DType::F16] {
            let results = RUNS.map(|run| results(kind, dtype, run));
            for other in &results[1..] {
                assert!(*other == results[0], "kind {kind} of {dtype}");
            }
        }
    }
}

/// The results at every member, after one run of an operation on values of any size.
fn results(kind: usize, dtype: DType, run: (&[u8], u64, u32, u16, u16)) -> Vec<Vec<u8>> {
    let (choices, grant_bytes, chunk_bytes, lanes, window) = run;
    let topology = topology(&PLACEMENT);
    let (kind, algorithm) = kind_of(kind, Rank(3));
    let counts = vec![ELEMENTS / 7; count_len(&kind)];
    let tuning = Tuning { algorithm, chunk_bytes, lanes, window };
    let tensors = if kind == WorkKind::Barrier { Vec::new() } else { vec![counts] };
    let mut job = Job::new(kind, dtype, None, tensors, tuning);
    job.op = op_of(&job.kind, 1);
    (job.prescale, job.postscale) = (0.3, 1.7);
    if job.codec != Codec::None {
        (job.codec, job.dtype) = (if dtype == DType::F32 { Codec::Bf16 } else { Codec::F16 }, DType::F32);
    }
    let mut net = Net::new(topology.clone(), lanes, grant_bytes, choices.to_vec());
    let seq = net.submit(&job, |_, rank, element| number(job.dtype, rank, element));
    net.run();
    net.assert_all_done();
    let outputs = job.tensors.iter().flat_map(|counts| job.outputs(&topology.ranks(), counts));
    let results = outputs.flat_map(|(whose, _)| net.results(seq, 0, whose));
    results.map(<[u8]>::to_vec).collect()
}

fn count_len(kind: &WorkKind) -> usize {
    match kind.counts() {
        Counts::One => 1,
        Counts::EachRank => PLACEMENT.len(),
        Counts::EachPair => PLACEMENT.len() * PLACEMENT.len(),
    }
}

/// A finite number whose sums depend on their order.
fn number(dtype: DType, rank: Rank, element: u64) -> Vec<u8> {
    let mixed = (element * 8 + u64::from(rank.0)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    // Exponents from 2^-8 on, either sign, all fractions.
    let value = f32::from_bits(u32::try_from(mixed >> 32).expect("32 bits") & 0x87ff_ffff | 0x3b80_0000);
    match dtype {
        DType::F16 => encode(dtype, f64::from(f32::from_bits(value.to_bits() & 0xffff_e000))),
        _ => encode(dtype, f64::from(value)),
    }
}

/// Rank 1's fourth element is NaN, rank 2's sixth is infinite, everything else is 1.
#[test]
fn values_that_are_not_finite_are_carried() {
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    for (kind, expected) in [
        (0, [nan, infinity, 4.0]),
        (1, [nan, infinity, 4.0]),
        (2, [nan, infinity, 4.0]),
        (3, [nan, infinity, 4.0]),
        // One value of four is infinite: it is not in the middle.
        (4, [nan, 1.0, 1.0]),
        // The two ranks whose norms are not finite are excluded; the mean is over all ranks.
        (5, [0.5, 0.5, 0.5]),
        // No inner product with them is finite.
        (6, [nan, nan, nan]),
        (8, [nan, infinity, 4.0]),
    ] {
        for placement in [&[0, 1, 0, 2][..], &[0, 0, 0, 0]] {
            let topology = topology(placement);
            let (kind, mut algorithm) = kind_of(kind, Rank(0));
            if topology.len() == 1 {
                algorithm = ronde_wire::Algorithm::Local;
            }
            let op = op_of(&kind, 0);
            let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 2 };
            let job = Job::new(kind, DType::F32, op, vec![vec![1_500]], tuning);
            let mut net = Net::new(topology.clone(), 1, 1 << 20, vec![3, 88, 41]);
            let seq = net.submit(&job, |_, rank, element| {
                let value = match (rank, element) {
                    (Rank(1), 3) => nan,
                    (Rank(2), 5) => infinity,
                    _ => 1.0,
                };
                encode(DType::F32, value)
            });
            net.run();
            net.assert_all_done();
            let whose = job.outputs(&topology.ranks(), &job.tensors[0])[0].0;
            for result in net.results(seq, 0, whose) {
                let found = decode(DType::F32, result);
                for (element, expected) in [3, 5, 7].into_iter().zip(expected) {
                    let found: f64 = found[element];
                    let equal = found == expected || (found.is_nan() && expected.is_nan());
                    assert!(equal, "{found} for {expected}, {element} of {job:?}");
                }
            }
        }
    }
}

/// Requests for these are refused, so this is a bug in ronde; it fails only the operation.
#[test]
fn an_operation_without_arithmetic_fails_by_name() {
    let topology = topology(&[0, 1]);
    for (codec, dtype, op, words) in [
        (Codec::F16, DType::I32, ReduceOp::Sum, "float16 does not encode int32"),
        (Codec::None, DType::Bool, ReduceOp::Average, "average of bool"),
    ] {
        let (kind, algorithm) = kind_of(0, Rank(0));
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 1 };
        let job = Job { codec, ..Job::new(kind, dtype, Some(op), vec![vec![10]], tuning) };
        let mut net = Net::new(topology.clone(), 1, 1 << 20, vec![1]);
        net.submit(&job, |_, _, _| vec![0; dtype.size_bytes()]);
        let reasons = net.failures();
        assert!(reasons.iter().all(|reason| reason.contains(words)) && reasons.len() == 2, "{reasons:?}");
    }
}
