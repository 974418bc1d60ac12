//! Memberships of elastic jobs on real sidecars, with the test as the launcher.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{Authority, Cluster, PATIENCE, Plan, Sidecar, Worker, message, sum};
use ronde_tests::script::{Answer, Fill};
use ronde_wire::Cause;

use crate::WORKER;

/// Waits for the notification that a membership changes.
fn await_change(worker: &mut Worker) -> Result<(u64, u32, u32)> {
    worker.await_answer("the change of the membership", PATIENCE, |answer| match answer {
        Answer::MembershipChange { membership, added, removed } => Some((membership, added, removed)),
        _ => None,
    })
}

/// Sums of small and large tensors, with the ranks of the membership.
fn check_sums(cluster: &mut Cluster) -> Result<()> {
    [1, 1_000, 300_000].into_iter().try_for_each(|elements| cluster.check_sum(&format!("sum.{elements}"), elements))
}

#[test]
fn survivors_of_a_killed_worker_continue_with_new_ranks() -> Result<()> {
    let (mut cluster, _) = Plan::of(&[0, 0, 1]).start_elastic(WORKER)?;
    check_sums(&mut cluster)?;
    let pending = cluster.workers[0].submit(sum("pending", 8, Fill::Whole { seed: 1 }))?;
    cluster.workers[1].process.signal(Signal::SIGKILL)?;
    let (_, failed) = cluster.workers[0].failure(pending, PATIENCE)?;
    ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(1), "{failed:?}");
    let seats = [(0, 0), (2, 1)];
    cluster.change(&[0, 1], 2, &seats)?;
    cluster.enter(&[0, 1], 2, (0, 1))?;
    cluster.commit(&[0, 1], 2)?;
    cluster.restart_workers(&seats)?;
    check_sums(&mut cluster)
}

#[test]
fn the_coordinators_sidecar_is_lost_and_the_others_continue() -> Result<()> {
    let (mut cluster, _) = Plan::of(&[0, 1, 2, 2]).start_elastic(WORKER)?;
    check_sums(&mut cluster)?;
    let pending = cluster.workers[3].submit(sum("pending", 8, Fill::Whole { seed: 1 }))?;
    cluster.sidecars[0].process.signal(Signal::SIGKILL)?;
    let (_, failed) = cluster.workers[3].failure(pending, PATIENCE)?;
    ensure!(failed.cause == Some(Cause::SidecarLost) && failed.sidecar == Some(0), "{failed:?}");
    let seats = [(1, 1), (2, 2), (3, 2)];
    cluster.change(&[1, 2], 2, &seats)?;
    cluster.enter(&[1, 2], 2, (0, 1))?;
    cluster.commit(&[1, 2], 2)?;
    cluster.restart_workers(&seats)?;
    check_sums(&mut cluster)
}

#[test]
fn a_sidecar_is_added_while_the_epoch_continues_until_the_workers_end_it() -> Result<()> {
    let plan = Plan::of(&[0, 1]);
    let (mut cluster, authority) = plan.clone().start_elastic(WORKER)?;
    let seats = [(0, 0), (1, 1), (2, 1), (3, 2)];
    let directory = cluster.sidecars[0].socket_dir()?.parent().expect("it has one").to_owned();
    let mut options = plan.options("test", 2, &directory);
    options.elastic = true;
    cluster.sidecars.push(Sidecar::start(&options)?);
    let membership = cluster.membership(2, &seats);
    let certificate = authority.issue(cluster.sidecars[2].certificate_request()?, 2)?;
    cluster.sidecars[2].join_membership(&certificate, authority.certificate(), &membership)?;
    cluster.sidecars[2].await_serving()?;
    cluster.change(&[0, 1], 2, &seats)?;
    // The new workers wait, and the others are not disturbed.
    let (new, other) = (cluster.elastic_worker(2, 1)?, cluster.elastic_worker(3, 2)?);
    check_sums(&mut cluster)?;
    cluster.release(&[0, 1], 2, (2, 0))?;
    for worker in &mut cluster.workers {
        ensure!(await_change(worker)? == (2, 2, 0));
    }
    check_sums(&mut cluster)?;
    // The workers end their epoch, which the sidecars wait for.
    cluster.workers.clear();
    cluster.await_entered(&[0, 1], 2)?;
    cluster.commit(&[0, 1, 2], 2)?;
    let (first, second) = (cluster.elastic_worker(0, 0)?, cluster.elastic_worker(1, 1)?);
    cluster.seat_workers(vec![first, second, new, other], &seats)?;
    check_sums(&mut cluster)
}

/// The launcher gives each sidecar its certificate; this one is in possession of another job's.
#[test]
fn a_new_sidecar_with_another_jobs_certificate_is_reported_and_the_others_continue_without_it() -> Result<()> {
    let plan = Plan::of(&[0, 1]);
    let (mut cluster, _) = plan.clone().start_elastic(WORKER)?;
    let other = Authority::new("test")?;
    let seats = [(0, 0), (1, 1), (2, 2)];
    let directory = cluster.sidecars[0].socket_dir()?.parent().expect("it has one").to_owned();
    let mut options = plan.options("test", 2, &directory);
    options.elastic = true;
    cluster.sidecars.push(Sidecar::start(&options)?);
    let membership = cluster.membership(2, &seats);
    let certificate = other.issue(cluster.sidecars[2].certificate_request()?, 2)?;
    cluster.sidecars[2].join_membership(&certificate, other.certificate(), &membership)?;
    cluster.sidecars[2].await_serving()?;
    cluster.change(&[0, 1], 2, &seats)?;
    cluster.release(&[0, 1], 2, (1, 0))?;
    cluster.workers.clear();
    cluster.await_entered(&[0, 1], 2)?;
    cluster.commit(&[0, 1, 2], 2)?;
    let mut waiting: Vec<Worker> =
        seats.iter().map(|(worker, sidecar)| cluster.elastic_worker(*worker, *sidecar)).collect::<Result<_>>()?;
    let report = cluster.sidecars[2].process.await_line("what it does not reach", PATIENCE, |line| {
        message(line, "unreachable").filter(|report| report["peer"] == 0 && report["membership"] == 2)
    })?;
    let text = report["text"].as_str().unwrap_or_default();
    ensure!(text.contains("certificate"), "{text}");
    // As the launcher decides then.
    let seats = [(0, 0), (1, 1)];
    cluster.change(&[0, 1], 3, &seats)?;
    cluster.enter(&[0, 1], 3, (0, 1))?;
    cluster.commit(&[0, 1], 3)?;
    // Its worker ends with it; the others have waited.
    waiting.truncate(seats.len());
    cluster.seat_workers(waiting, &seats)?;
    check_sums(&mut cluster)
}

#[test]
fn a_worker_that_returns_early_waits_for_its_new_rank() -> Result<()> {
    let (mut cluster, _) = Plan::of(&[0, 0, 1]).start_elastic(WORKER)?;
    cluster.workers[0].process.signal(Signal::SIGKILL)?;
    cluster.workers[1].await_answer("the end", PATIENCE, |answer| match answer {
        Answer::Over { text } => Some(text),
        _ => None,
    })?;
    cluster.workers.clear();
    // They claim their numbers before the launcher changes the membership: no epoch begins without worker 0.
    let mut early = cluster.elastic_worker(1, 0)?;
    let mut other = cluster.elastic_worker(2, 1)?;
    std::thread::sleep(Duration::from_millis(300));
    cluster.change(&[0, 1], 2, &[(1, 0), (2, 1)])?;
    cluster.enter(&[0, 1], 2, (0, 1))?;
    cluster.commit(&[0, 1], 2)?;
    early.await_rank(0)?;
    other.await_rank(1)
}

#[test]
fn a_change_that_was_not_committed_is_replaced() -> Result<()> {
    let (mut cluster, _) = Plan::of(&[0, 1, 1]).start_elastic(WORKER)?;
    cluster.workers[1].process.signal(Signal::SIGKILL)?;
    cluster.change(&[0, 1], 2, &[(0, 0), (2, 1)])?;
    cluster.enter(&[0, 1], 2, (0, 1))?;
    // Sidecar 1 is lost before the commit.
    cluster.sidecars[1].process.signal(Signal::SIGKILL)?;
    cluster.change(&[0], 3, &[(0, 0)])?;
    cluster.enter(&[0], 3, (0, 1))?;
    cluster.commit(&[0], 3)?;
    cluster.restart_workers(&[(0, 0)])?;
    check_sums(&mut cluster)
}

#[test]
fn a_worker_that_was_removed_receives_the_reason() -> Result<()> {
    let (mut cluster, _) = Plan::of(&[0, 0]).start_elastic(WORKER)?;
    cluster.change(&[0], 2, &[(1, 0)])?;
    cluster.release(&[0], 2, (0, 1))?;
    ensure!(await_change(&mut cluster.workers[1])? == (2, 0, 1));
    cluster.workers.clear();
    cluster.await_entered(&[0], 2)?;
    cluster.commit(&[0], 2)?;
    let mut removed = cluster.elastic_worker(0, 0)?;
    let text = removed.await_answer("the refusal", PATIENCE, |answer| match answer {
        Answer::NotConnected { text } => Some(text),
        _ => None,
    })?;
    ensure!(text.contains("worker 0 has been removed from elastic job"), "{text}");
    cluster.restart_workers(&[(1, 0)])?;
    check_sums(&mut cluster)
}

#[test]
fn a_stale_membership_ends_the_sidecar_with_the_reason() -> Result<()> {
    let (mut cluster, _) = Plan::of(&[0, 1]).start_elastic(WORKER)?;
    let stale = cluster.membership(1, &[(0, 0), (1, 1)]);
    cluster.sidecars[1].send_membership("change", stale)?;
    let reason = cluster.sidecars[1].await_fatal(PATIENCE)?;
    ensure!(reason.contains("membership 1 of the job cannot be entered: membership 1 is newer"), "{reason}");
    // Workers have run, so it is not the exit code of settings that cannot be used.
    ensure!(reason.ends_with("[RONDE-E402]"), "{reason}");
    ensure!(cluster.sidecars[1].process.await_exit(PATIENCE)?.code() == Some(69), "{reason}");
    Ok(())
}
