//! The guarantees for training: right results, the same bits everywhere, mismatches reported to all ranks.

use anyhow::{Context, Result, ensure};
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, Worker, sum};
use ronde_tests::regression::Model;
use ronde_tests::script::{Answer, Ask, Fill, Wanted, scatter};
use ronde_wire::{Cause, Collective, DType, ReduceOp};

use crate::WORKER;

#[test]
fn sums_are_right_from_one_element_to_many_chunks() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 2, 2]).start(WORKER)?;
    for elements in [1, 2, 3, 255, 1_024, 1_025, 65_537, 1_000_003] {
        cluster.check_sum(&format!("sum of {elements}"), elements)?;
    }
    Ok(())
}

#[test]
fn fifty_tensors_in_any_order_give_the_same_bits() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 1, 2, 2]).start(WORKER)?;
    let first = fifty_tensors(&mut cluster, 1)?;
    let second = fifty_tensors(&mut cluster, 2)?;
    ensure!(first == second, "two runs in different orders differ in some bits");
    // Another job of the same placement gives the same bits, too.
    drop(cluster);
    let mut cluster = Plan::of(&[0, 0, 1, 1, 2, 2]).start(WORKER)?;
    ensure!(fifty_tensors(&mut cluster, 3)? == first, "another job of the same placement differs in some bits");
    Ok(())
}

/// Submits all tensors on every rank, each in its own order, with random waits in between; returns the digests.
fn fifty_tensors(cluster: &mut Cluster, order: u64) -> Result<Vec<u64>> {
    let mut schedule: Vec<(usize, u64)> = Vec::new();
    for rank in 0..cluster.workers.len() {
        schedule.extend((0..TENSORS).map(|tensor| (rank, tensor)));
    }
    // One global order of all submissions of all ranks, so that each rank's own order and the timing between ranks are
    // both random, and the same in every run.
    schedule.sort_by_key(|(rank, tensor)| scatter(scatter(order ^ (*rank as u64) << 32) ^ *tensor));
    let mut pending = vec![Vec::new(); cluster.workers.len()];
    for (rank, tensor) in schedule {
        let wanted = sum(&format!("tensor {tensor}"), elements_of(tensor), Fill::Rough { seed: tensor });
        let id = cluster.workers[rank].submit(wanted)?;
        pending[rank].push((tensor, id));
    }
    let mut digests: Vec<Vec<u64>> = Vec::new();
    for (worker, mut pending) in cluster.workers.iter_mut().zip(pending) {
        pending.sort_unstable();
        let of_rank: Result<Vec<u64>> = pending.iter().map(|(_, id)| worker.digest(*id, PATIENCE)).collect();
        digests.push(of_rank?);
    }
    for (rank, of_rank) in digests.iter().enumerate() {
        let differing: Vec<usize> =
            (0..of_rank.len()).filter(|&tensor| of_rank[tensor] != digests[0][tensor]).collect();
        ensure!(differing.is_empty(), "rank {rank} differs from rank 0 in tensors {differing:?}");
    }
    digests.into_iter().next().context("there are ranks")
}

const TENSORS: u64 = 50;

/// From one element to 3 MiB, most of them small, as in a model.
fn elements_of(tensor: u64) -> u64 {
    let bits = scatter(tensor) % 20;
    (scatter(tensor ^ 0xE1E) % (1 << bits)).clamp(1, 3 << 18)
}

#[test]
fn training_equals_one_process_on_all_samples() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 1]).start(WORKER)?;
    let alone = Model::trained_alone(cluster.size(), STEPS);
    let distances = train(&mut cluster, &alone, false)?;
    println!("greatest difference of a weight after {STEPS} steps: {distances:?}");
    ensure!(distances.iter().all(|distance| *distance < 1e-5), "weights differ by {distances:?}");
    // The same check fails when gradients are not reduced.
    let distances = train(&mut cluster, &alone, true)?;
    println!("the same with the identity in place of the reduction: {distances:?}");
    ensure!(distances.iter().all(|distance| *distance > 1e-3), "the check does not notice a missing reduction");
    Ok(())
}

const STEPS: u64 = 50;

fn train(cluster: &mut Cluster, alone: &Model, identity: bool) -> Result<Vec<f32>> {
    for worker in &mut cluster.workers {
        worker.ask(&Ask::Train { steps: STEPS, identity })?;
    }
    let trained = |answer| if let Answer::Trained { weights } = answer { Some(weights) } else { None };
    let all: Result<Vec<Vec<f32>>> =
        cluster.workers.iter_mut().map(|worker| worker.await_answer("trained weights", PATIENCE, trained)).collect();
    let all = all?;
    ensure!(identity || all.iter().all(|weights| *weights == all[0]), "ranks end with different weights");
    Ok(all.iter().map(|weights| alone.distance(weights)).collect())
}

#[test]
fn a_mismatch_fails_on_all_ranks_with_the_same_text_and_the_next_operation_works() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let with = |change: fn(&mut Wanted)| {
        let mut wanted = sum("weights", 100, Fill::Whole { seed: 1 });
        change(&mut wanted);
        wanted
    };
    let broadcast = |root: u32| {
        let collective = Collective::Broadcast { root: ronde_wire::Rank(root) };
        Wanted { collective, ..sum("weights", 100, Fill::Whole { seed: 1 }) }
    };
    let plain = || with(|_| {});
    let cases: [(&str, [Wanted; 3]); 5] = [
        ("type", [plain(), plain(), with(|wanted| wanted.dtype = DType::F64)]),
        ("shape", [plain(), with(|wanted| wanted.shape = vec![101]), plain()]),
        ("shape", [plain(), plain(), with(|wanted| wanted.shape = vec![10, 10])]),
        ("op", [with(|wanted| wanted.collective = Collective::AllReduce { op: ReduceOp::Max }), plain(), plain()]),
        ("root", [broadcast(0), broadcast(2), broadcast(0)]),
    ];
    for (about, wanted) in cases {
        let texts = mismatch(&mut cluster.workers, wanted)?;
        ensure!(texts.iter().all(|text| *text == texts[0]), "{about}: ranks receive different texts: {texts:?}");
        println!("{about}: {}", texts[0]);
        ensure!(texts[0].to_lowercase().contains(about), "the text does not speak of {about}: {}", texts[0]);
        cluster.check_sum("weights", 100)?;
    }
    Ok(())
}

fn mismatch(workers: &mut [Worker], wanted: [Wanted; 3]) -> Result<Vec<String>> {
    let mut pending = Vec::new();
    for (worker, wanted) in workers.iter_mut().zip(wanted) {
        pending.push(worker.submit(wanted)?);
    }
    let mut texts = Vec::new();
    for (worker, id) in workers.iter_mut().zip(pending) {
        let (_, failed) = worker.failure(id, PATIENCE)?;
        ensure!(failed.cause == Some(Cause::Mismatch), "rank {}: {failed:?}", worker.rank);
        texts.push(failed.text);
    }
    Ok(texts)
}

#[test]
fn an_operation_that_a_rank_gives_up_fails_on_all_and_the_next_works() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1, 1]).start(WORKER)?;
    let wanted = || sum("given up", 1_000, Fill::Whole { seed: 1 });
    let first = cluster.workers[0].submit(wanted())?;
    let second = cluster.workers[1].submit(wanted())?;
    cluster.workers[1].ask(&Ask::Abandon { id: second })?;
    let (_, failed) = cluster.workers[0].failure(first, PATIENCE)?;
    ensure!(failed.cause == Some(Cause::Refused) && failed.rank == Some(1), "{failed:?}");
    cluster.check_sum("next", 1_000)
}
