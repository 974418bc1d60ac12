//! A member whose ranks were reduced elsewhere: its contribution is one, and all results are those of the operation.

use ronde_wire::{DType, Rank, ReduceOp, Tuning};

use super::jobs::{Job, kind_of};
use super::topology;
use super::world::{Net, Reduced};

/// Members with two, three and one ranks; the last one reduces its own.
const PLACEMENT: [u32; 6] = [0, 1, 0, 1, 1, 2];

fn check(kind: usize, dtype: DType, op: ReduceOp, factor: f64, reduced: &[u32]) {
    let topology = topology(&PLACEMENT);
    let (kind, algorithm) = kind_of(kind, Rank(0));
    let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 2, window: 2 };
    let mut job = Job::new(kind, dtype, Some(op), vec![vec![3_001], vec![5]], tuning);
    if op == ReduceOp::Sum {
        job.postscale = 2.0;
    }
    let mut net = Net::new(topology, 2, 1 << 20, vec![7, 3, 9, 200, 31]);
    net.reduced = Some(Reduced { sidecars: reduced.to_vec(), factor });
    let seq = net.submit_values(&job);
    net.run();
    net.assert_all_done();
    net.assert_results(seq, &job);
}

#[test]
fn a_member_may_contribute_what_its_ranks_were_reduced_to() {
    for reduced in [&[0][..], &[1], &[0, 1]] {
        for kind in 0..=2 {
            for (dtype, op) in [
                (DType::F32, ReduceOp::Sum),
                (DType::F64, ReduceOp::Average),
                (DType::I32, ReduceOp::Average),
                (DType::I64, ReduceOp::Product),
                (DType::U8, ReduceOp::Min),
                (DType::F16, ReduceOp::Sum),
            ] {
                check(kind, dtype, op, 1.0, reduced);
            }
            // As partial sums of bfloat16 are: six ranks, so an eighth.
            check(kind, DType::Bf16, ReduceOp::Average, 0.125, reduced);
        }
        // Encoded between members.
        check(3, DType::F32, ReduceOp::Sum, 1.0, reduced);
    }
}
