//! Workers that overwrite their tensors after a prelude has measured them.

use ronde_collectives::plan::WorkKind;
use ronde_wire::{Algorithm, DType, Rank, Tuning};

use super::jobs::{Job, kind_of, op_of};
use super::topology;
use super::world::Net;

/// A rank with a small norm that grows after it was measured would otherwise escape the clip, or the weights of Adasum.
#[test]
fn values_that_change_after_they_are_measured_do_not_reach_the_result() {
    for placement in [&[0, 1, 2][..], &[0, 0, 1, 1, 2], &[0, 0, 0]] {
        for (number, with_plugin) in [(5, false), (5, true), (6, false), (6, true)] {
            let topology = topology(placement);
            let job = measured_job(number, with_plugin, topology.len());
            let mut net = Net::new(topology, 1, 1 << 20, vec![19, 3, 240, 77]);
            net.nodes.iter_mut().for_each(|node| node.memory.contributions.swappers = vec![Rank(0), Rank(2)]);
            let seq = net.submit_values(&job);
            net.run();
            net.assert_all_done();
            net.assert_results(seq, &job);
        }
    }
}

/// A member keeps a copy of its ranks' tensors from the measurement until the end of the operation, and no other.
#[test]
fn the_measured_copy_takes_as_many_bytes_as_the_local_tensors() {
    for number in [5, 6] {
        let job = measured_job(number, false, 2);
        let mut net = Net::new(topology(&[0, 0, 1]), 1, 1 << 20, vec![7, 3, 9, 200]);
        net.submit_values(&job);
        net.run();
        net.assert_all_done();
        assert_eq!(net.peak_measured, 2 * 5_000 * 4, "{job:?}");
    }
}

fn measured_job(number: usize, with_plugin: bool, members: usize) -> Job {
    let (kind, algorithm) = kind_of(number, Rank(0));
    let algorithm = if members == 1 { Algorithm::Local } else { algorithm };
    assert!(matches!(kind, WorkKind::AllReduceTwoPass { .. } | WorkKind::AllReduceAdaptive));
    let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes: 1, window: 2 };
    let mut job = Job::new(kind, DType::F32, None, vec![vec![5_000]], tuning);
    job.op = op_of(&job.kind, 1);
    if with_plugin { job.with_plugin() } else { job }
}
