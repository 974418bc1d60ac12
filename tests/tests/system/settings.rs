//! Settings that change how a job is performed, tested by their effect.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{DType, ReduceOp, Tensor, TensorRef, Transfer};
use ronde_tests::cluster::{Plan, Sidecar};
use ronde_tests::crew::{Crew, numbers};
use ronde_tests::script::Fill;

/// Elements of a tensor that is exchanged, and cut into several chunks.
const ELEMENTS: u64 = 300_001;

/// All ranks' tensors summed and averaged, in two types whose sums depend on the order.
fn reduced(client: &Client) -> Result<Vec<Vec<u8>>> {
    let rough = Fill::Rough { seed: 11 }.bytes(client.rank(), usize::try_from(ELEMENTS * 4)?);
    let shape = [ELEMENTS];
    let mut results = Vec::new();
    for (dtype, op, name) in
        [(DType::F32, ReduceOp::Sum, "a"), (DType::F32, ReduceOp::Average, "b"), (DType::F16, ReduceOp::Sum, "c")]
    {
        // Of the second type: any bits but those of infinities and NaN.
        let bytes: Vec<u8> = match dtype {
            DType::F16 => rough.chunks_exact(4).flat_map(|float| [float[0], float[3] & 0xBB]).collect(),
            _ => rough.clone(),
        };
        let sum = client.allreduce(name, TensorRef { dtype, shape: &shape, bytes: &bytes }, op)?;
        results.push(sum.bytes.to_vec());
    }
    Ok(results)
}

/// Returns the results of all ranks, which are equal, and the bytes sent between the sidecars.
fn results_on(plan: Plan<'_>) -> Result<(Vec<Vec<u8>>, u64)> {
    let crew = Crew::start(plan, Transfer::Arena)?;
    let mut all = crew.all(reduced)?;
    let first = all.remove(0);
    ensure!(all.iter().all(|other| *other == first), "ranks differ");
    let sent = crew.cluster.sidecars.iter().map(|sidecar| metric(sidecar, "ronde_sealed_bytes_total"));
    Ok((first, sent.sum::<Result<u64>>()?))
}

#[test]
fn a_flat_all_reduce_has_the_same_bits_on_every_placement_and_sends_more() -> Result<()> {
    let (alone, _) = results_on(Plan::of(&[0, 0, 0, 0]).flat())?;
    let (flat, flat_bytes) = results_on(Plan::of(&[0, 0, 1, 1]).flat())?;
    let (apart, _) = results_on(Plan::of(&[1, 0, 1, 2]).flat())?;
    ensure!(flat == alone && apart == alone, "bits depend on the placement");
    let (hierarchical, hierarchical_bytes) = results_on(Plan::of(&[0, 0, 1, 1]))?;
    ensure!(hierarchical != alone, "these tensors do not distinguish orders of reduction");
    ensure!(flat_bytes > hierarchical_bytes * 5 / 4, "{flat_bytes} bytes, {hierarchical_bytes} if hosts come first");
    Ok(())
}

#[test]
fn a_flat_all_reduce_goes_on_without_ranks_that_have_joined() -> Result<()> {
    let crew = Crew::start(Plan::of(&[0, 0, 1, 1]).flat(), Transfer::Arena)?;
    crew.all(|client| {
        if client.rank() == 1 {
            client.join()?;
            return Ok(());
        }
        let sum = client.allreduce("t", &numbers(&[30_000], |i| i + 1)?, ReduceOp::Sum)?;
        ensure!(sum.to_vec::<i64>()?.iter().zip(1..).all(|(sum, i)| *sum == 3 * i), "three ranks' tensors");
        client.join()?;
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn threads_stay_on_the_cores_that_are_named() -> Result<()> {
    let last = core_of_this_process()?;
    let crew = Crew::start(Plan::of(&[0, 1]).on_cores(&[last]), Transfer::Arena)?;
    crew.check_next()?;
    for sidecar in &crew.cluster.sidecars {
        let tasks = format!("/proc/{}/task", sidecar.process.pid());
        let mut threads = 0;
        for task in std::fs::read_dir(&tasks)? {
            let task = task?.path();
            let status = match std::fs::read_to_string(task.join("status")) {
                // A thread may end after it was listed.
                Err(_) if !task.exists() => continue,
                status => status?,
            };
            let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).context("cores")?;
            ensure!(allowed.trim() == last.to_string(), "{status}");
            threads += 1;
        }
        ensure!(threads >= 2, "{threads} threads, though there is one for control and one for data");
    }
    Ok(())
}

#[test]
fn a_core_that_is_not_there_ends_the_start() -> Result<()> {
    let error = Plan::of(&[0]).on_cores(&[60_000]).sidecars("").err().context("there is no such core")?;
    ensure!(format!("{error:#}").contains("core 60000 of --thread-affinity"), "{error:#}");
    Ok(())
}

#[test]
fn steps_that_exceed_the_request_cache_do_not_run_ahead() -> Result<()> {
    for (capacity, runs_ahead, is_numbered) in [(0, false, false), (1, false, true), (2, true, true)] {
        let crew = Crew::start(Plan::of(&[0, 1]).cache_capacity(capacity), Transfer::Arena)?;
        crew.all(|client| {
            for step in 0..8 {
                for name in ["first", "second"] {
                    let tensor: Tensor = numbers(&[20_000], |i| i + step)?;
                    client.allreduce(name, &tensor, ReduceOp::Sum)?;
                }
            }
            for _ in 0..4 {
                client.allreduce("alone", &numbers(&[3], |i| i)?, ReduceOp::Sum)?;
            }
            Ok(())
        })?;
        let coordinator = &crew.cluster.sidecars[0];
        let issued = metric(coordinator, "ronde_schedules_issued_total")?;
        ensure!((issued > 0) == runs_ahead, "{issued} schedules with {capacity} remembered");
        let again = metric(coordinator, "ronde_requests_announced_again_total")?;
        ensure!((again > 0) == is_numbered, "{again} announced by number with {capacity} remembered");
    }
    Ok(())
}

/// A core on which this process may run.
fn core_of_this_process() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).context("cores")?;
    let last = allowed.trim().rsplit([',', '-']).next().context("a core")?;
    Ok(last.parse()?)
}

fn metric(sidecar: &Sidecar, name: &str) -> Result<u64> {
    let (_, text) = sidecar.page("/metrics")?;
    let found = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' ')).map(|(_, value)| value);
    let values: Vec<u64> = found.map(str::parse).collect::<Result<_, _>>()?;
    ensure!(!values.is_empty(), "no {name} in {text}");
    Ok(values.into_iter().sum())
}
