//! Repeated steps run ahead without negotiation, and results do not change.

#![forbid(unsafe_code)]

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{ReduceOp, Transfer};
use ronde_tests::cluster::{PATIENCE, Plan, Sidecar};
use ronde_tests::crew::{Crew, DATA_PATHS, numbers};

/// Three sidecars, and two ranks on the first of them.
const PLACEMENT: [u32; 4] = [0, 0, 1, 2];
/// The rank that differs.
const ODD: u32 = 2;

#[test]
fn repeated_steps_run_ahead_on_all_data_paths() -> Result<()> {
    for path in DATA_PATHS {
        let crew = Crew::start(Plan::of(&PLACEMENT), path)?;
        crew.all(|client| (0..40).try_for_each(|step| in_order(client, step)))?;
        for sidecar in &crew.cluster.sidecars {
            let steps = sidecar.status()?["schedule"]["steps"].as_u64().unwrap_or(0);
            ensure!(steps >= 30, "sidecar {}: {steps} of 40 steps ran ahead by {path:?}", sidecar.index);
            ensure!(metric(sidecar, "ronde_operations_scheduled_total")? >= 60, "few operations by {path:?}");
        }
        ensure!(metric(&crew.cluster.sidecars[0], "ronde_schedules_issued_total")? == 1, "by {path:?}");
        crew.check_next()?;
    }
    Ok(())
}

#[test]
fn a_rank_that_never_runs_ahead_negotiates_every_step() -> Result<()> {
    let crew = Crew::start(Plan::of(&PLACEMENT).never_ahead(), Transfer::Arena)?;
    crew.all(|client| (0..10).try_for_each(|step| in_order(client, step)))?;
    let coordinator = &crew.cluster.sidecars[0];
    ensure!(coordinator.status()?["schedule"].is_null() && metric(coordinator, "ronde_schedules_issued_total")? == 0);
    Ok(())
}

#[test]
fn a_rank_may_ask_for_more_and_in_another_order() -> Result<()> {
    let crew = Crew::start(Plan::of(&PLACEMENT), Transfer::Arena)?;
    crew.all(|client| {
        for step in 0..60 {
            match step {
                20 => {
                    let root = numbers(&[2], |i| i + 7)?;
                    let got = client.broadcast("more", &root, 1)?;
                    ensure!(got.to_vec::<i64>()? == [7, 8], "{got:?}");
                    in_order(client, step)?;
                }
                // It waits for the second before it submits the first, which the others have submitted.
                40 if client.rank() == ODD => other_way_round(client, step)?,
                _ => in_order(client, step)?,
            }
        }
        Ok(())
    })?;
    let coordinator = &crew.cluster.sidecars[0];
    for reason in ["request", "order"] {
        let withdrawn = metric(coordinator, &format!("ronde_schedules_withdrawn_total{{reason=\"{reason}\"}}"))?;
        ensure!(withdrawn >= 1, "none was withdrawn for the {reason}");
    }
    ensure!(metric(coordinator, "ronde_schedules_issued_total")? >= 2, "none was issued again");
    crew.check_next()
}

#[test]
fn a_rank_that_stops_is_named_while_steps_run_ahead() -> Result<()> {
    // Far more than a step of a busy machine takes: a schedule is withdrawn for a delay of a quarter of the first time.
    let crew = Crew::start(Plan::of(&PLACEMENT).stall_ms(8_000, 16_000), Transfer::Arena)?;
    let last = run_ahead(&crew)?;
    let coordinator = &crew.cluster.sidecars[0];
    let delays = || metric(coordinator, "ronde_schedules_withdrawn_total{reason=\"delay\"}");
    let before = delays()?;
    let outcomes = crew.each(|client| if client.rank() == ODD { Ok(()) } else { in_order(client, last) });
    for (rank, outcome) in (0..).zip(outcomes).filter(|(rank, _)| *rank != ODD) {
        let text = outcome.err().with_context(|| format!("rank {rank} has a sum without rank {ODD}"))?.to_string();
        ensure!(text.contains("Missing ranks:") && text.contains(&format!("{ODD}: [allreduce.")), "{text}");
    }
    ensure!(delays()? == before + 1, "{before} delays before, {} after", delays()?);
    Ok(())
}

/// Repeats steps until all sidecars have a schedule. Returns the number of the next step.
fn run_ahead(crew: &Crew) -> Result<i64> {
    let (deadline, mut next) = (Instant::now() + PATIENCE, 0);
    loop {
        crew.all(|client| (next..next + 10).try_for_each(|step| in_order(client, step)))?;
        next += 10;
        if crew.cluster.runs_ahead()? {
            return Ok(next);
        }
        ensure!(Instant::now() < deadline, "{next} steps, and no schedule");
    }
}

/// A step: a small tensor and a larger one, both in flight at once.
fn in_order(client: &Client, step: i64) -> Result<()> {
    let (small, large) = (part(client, step, SMALL)?, part(client, step, LARGE)?);
    let first = client.allreduce_async("small", &small, ReduceOp::Sum)?;
    let second = client.allreduce_async("large", &large, ReduceOp::Sum)?;
    check(step, SMALL, &first.wait()?.to_vec()?)?;
    check(step, LARGE, &second.wait()?.to_vec()?)
}

fn other_way_round(client: &Client, step: i64) -> Result<()> {
    let sum = client.allreduce("large", &part(client, step, LARGE)?, ReduceOp::Sum)?;
    check(step, LARGE, &sum.to_vec()?)?;
    let sum = client.allreduce("small", &part(client, step, SMALL)?, ReduceOp::Sum)?;
    check(step, SMALL, &sum.to_vec()?)
}

const SMALL: u64 = 3;
const LARGE: u64 = 30_000;

fn part(client: &Client, step: i64, elements: u64) -> Result<ronde::Tensor> {
    Ok(numbers(&[elements], |i| i + step * i64::from(client.rank() + 1))?)
}

fn check(step: i64, elements: u64, sum: &[i64]) -> Result<()> {
    let expected = (0..).take(usize::try_from(elements)?).map(|i: i64| 4 * i + step * 10);
    ensure!(expected.eq(sum.iter().copied()), "the sum of step {step} is wrong");
    Ok(())
}

fn metric(sidecar: &Sidecar, name: &str) -> Result<u64> {
    let (_, text) = sidecar.page("/metrics")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(line.with_context(|| format!("no {name} in {text}"))?.parse()?)
}
