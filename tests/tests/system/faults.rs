//! Processes that die, stop or are cut off: every waiter is notified with the culprit's name, in time.
//!
//! The limits are the project's own: 1 s median and 3 s worst after a kill, suspicion at 1 s, failure at the peer
//! timeout. The measurements are printed. A machine that runs its threads late adds what [`Probe`] measures.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{Cluster, Failed, Network, PATIENCE, Plan, Worker, sum};
use ronde_tests::probe::Probe;
use ronde_tests::script::Fill;
use ronde_wire::Cause;
use serde_json::json;

use crate::WORKER;

#[test]
fn twenty_kills_are_reported_to_every_rank_in_time() -> Result<()> {
    let (mut delays, mut without_oversleep) = ([Vec::new(), Vec::new()], Vec::new());
    for round in 0..KILLS {
        // On 2 and 3 sidecars; in turns a worker and a sidecar; each rank and sidecar is the victim at some time.
        let placement: &[u32] = if round % 4 < 2 { &[0, 0, 1, 1] } else { &[0, 1, 1, 2] };
        let cluster = Plan::of(placement).start(WORKER)?;
        let probe = Probe::start();
        let delay = if round % 2 == 0 { kill_worker(cluster, round / 2 % 4) } else { kill_sidecar(cluster, round / 2) };
        let (delay, oversleep) = (delay?, probe.worst());
        delays[round as usize % 2].push(delay);
        without_oversleep.push(delay.saturating_sub(oversleep));
    }
    let summary = |mut delays: Vec<Duration>| {
        delays.sort();
        (delays[delays.len() / 2], delays[delays.len() - 1])
    };
    for (whose, delays) in ["workers", "sidecars"].into_iter().zip(&delays) {
        let (median, worst) = summary(delays.clone());
        println!("{} killed {whose}: from kill to the last failure {median:?} median, {worst:?} worst", delays.len());
    }
    let (median, worst) = summary(delays.concat());
    println!("all {KILLS} kills: {median:?} median, {worst:?} worst");
    let (median, worst) = summary(without_oversleep);
    println!("less what the machine overslept in each round: {median:?} median, {worst:?} worst");
    ensure!(median < Duration::from_secs(1), "median {median:?}");
    ensure!(worst < Duration::from_secs(3), "worst {worst:?}");
    Ok(())
}

const KILLS: u32 = 20;

fn kill_worker(mut cluster: Cluster, victim: u32) -> Result<Duration> {
    let pending = submit_all_but(&mut cluster, &[victim])?;
    let killed = Instant::now();
    cluster.workers[victim as usize].process.signal(Signal::SIGKILL)?;
    let named = |failed: &Failed| failed.cause == Some(Cause::RankLost) && failed.rank == Some(victim);
    await_failures(&mut cluster, pending, killed, named)
}

fn kill_sidecar(mut cluster: Cluster, round: u32) -> Result<Duration> {
    let count = u32::try_from(cluster.sidecars.len())?;
    let victim = round % count;
    let served: Vec<u32> =
        cluster.ranks().into_iter().filter(|rank| cluster.placement[*rank as usize] == victim).collect();
    // The operation waits for a rank of the victim, so that it is pending everywhere else.
    let pending = submit_all_but(&mut cluster, &served[..1])?;
    let killed = Instant::now();
    cluster.sidecars[victim as usize].process.signal(Signal::SIGKILL)?;
    let name = format!("sidecar {victim}");
    let directory = cluster.sidecars[victim as usize].socket_dir()?.display().to_string();
    let named = move |failed: &Failed| {
        // Its own workers know it by its directory.
        let named = failed.sidecar == Some(victim) && failed.text.contains(&name) || failed.text.contains(&directory);
        failed.cause == Some(Cause::SidecarLost) && named
    };
    await_failures(&mut cluster, pending, killed, named)
}

fn submit_all_but(cluster: &mut Cluster, absent: &[u32]) -> Result<Vec<(u32, u64)>> {
    let mut pending = Vec::new();
    for worker in cluster.workers.iter_mut().filter(|worker| !absent.contains(&worker.rank)) {
        let id = worker.submit(sum("pending", 1_000, Fill::Whole { seed: 1 }))?;
        pending.push((worker.rank, id));
    }
    Ok(pending)
}

/// The time until the last of the pending operations has failed, for the expected reason.
fn await_failures(
    cluster: &mut Cluster,
    pending: Vec<(u32, u64)>,
    since: Instant,
    expected: impl Fn(&Failed) -> bool,
) -> Result<Duration> {
    let mut last = Duration::ZERO;
    for (rank, id) in pending {
        let (at, failed) = cluster.workers[rank as usize].failure(id, PATIENCE)?;
        ensure!(expected(&failed), "rank {rank} receives {failed:?}");
        last = last.max(at - since);
    }
    Ok(last)
}

/// Below sidecar 0 are 1 and 2, below 1 are 3 and 4, below 2 are 5 and 6.
#[test]
fn a_killed_relay_is_named_by_everybody_and_a_leaf_too() -> Result<()> {
    for victim in [1, 2, 6] {
        let mut cluster = Plan::of(&[0, 1, 2, 3, 4, 5, 6]).control_fan_out(2).start(WORKER)?;
        cluster.check_sum("before", 10_000)?;
        let delay = kill_sidecar(cluster, victim)?;
        println!("sidecar {victim} killed: the last failure after {delay:?}");
    }
    Ok(())
}

#[test]
fn a_stopped_worker_is_suspect_then_dead() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 1]).start(WORKER)?;
    let pending = submit_all_but(&mut cluster, &[2])?;
    let probe = Probe::start();
    await_no_suspects(&mut cluster)?;
    let stopped = Stopped { at: Instant::now(), probe };
    cluster.workers[2].process.signal(Signal::SIGSTOP)?;
    suspect_then_dead(&mut cluster, pending, &stopped, &["rank 2"], |failed| {
        failed.cause == Some(Cause::RankLost) && failed.rank == Some(2)
    })
}

#[test]
fn a_stopped_sidecar_is_suspect_then_dead() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 1]).start(WORKER)?;
    let pending = submit_all_but(&mut cluster, &[2, 3])?;
    // A worker of the stopped sidecar waits, too; only its own client can notice.
    let own = cluster.workers[3].submit(sum("pending", 1_000, Fill::Whole { seed: 1 }))?;
    let probe = Probe::start();
    await_no_suspects(&mut cluster)?;
    let stopped = Stopped { at: Instant::now(), probe };
    cluster.sidecars[1].process.signal(Signal::SIGSTOP)?;
    suspect_then_dead(&mut cluster, pending, &stopped, &["sidecar 1"], |failed| {
        failed.cause == Some(Cause::SidecarLost) && failed.sidecar == Some(1)
    })?;
    let directory = cluster.sidecars[1].socket_dir()?.display().to_string();
    let (at, failed) = cluster.workers[3].failure(own, PATIENCE)?;
    println!("its own rank 3 after {:?}: {}", at - stopped.at, failed.text);
    ensure!(failed.cause == Some(Cause::SidecarLost) && failed.text.contains(&directory), "{failed:?}");
    stopped.check("its own rank failed", at - stopped.at, PEER_TIMEOUT)
}

#[test]
fn a_stopped_coordinator_is_suspect_then_dead() -> Result<()> {
    // The other way round: ranks 2 and 3 wait, and the sidecar of ranks 0 and 1 stops.
    let mut cluster = Plan::of(&[1, 1, 0, 0]).start(WORKER)?;
    let pending = submit_all_but(&mut cluster, &[0, 1])?;
    let probe = Probe::start();
    await_no_suspects(&mut cluster)?;
    let stopped = Stopped { at: Instant::now(), probe };
    cluster.sidecars[1].process.signal(Signal::SIGSTOP)?;
    suspect_then_dead(&mut cluster, pending, &stopped, &["sidecar 1"], |failed| {
        failed.cause == Some(Cause::SidecarLost) && failed.sidecar == Some(1)
    })
}

/// Waits until no sidecar knows of a silent one or of a silent rank, and drops the notices so far: those of the test
/// come after them.
fn await_no_suspects(cluster: &mut Cluster) -> Result<()> {
    for sidecar in &cluster.sidecars {
        sidecar
            .await_status(|status| status["suspect_ranks"] == json!([]) && status["suspect_sidecars"] == json!([]))?;
    }
    cluster.workers.iter_mut().for_each(Worker::drop_notices);
    Ok(())
}

/// When a process was stopped, with a probe that was started before.
struct Stopped {
    at: Instant,
    probe: Probe,
}

impl Stopped {
    /// Checks that something came after `limit`: not sooner than the last heartbeat allows, and in time.
    fn check(&self, what: &str, after: Duration, limit: Duration) -> Result<()> {
        // The last heartbeat may have been late, too.
        let oversleep = self.probe.worst();
        let soonest = limit.saturating_sub(HEARTBEATS + oversleep);
        ensure!(
            after >= soonest && after < limit + LATENESS + oversleep,
            "{what} after {after:?}, where the limit is {limit:?} and the machine overslept {oversleep:?}"
        );
        Ok(())
    }
}

fn suspect_then_dead(
    cluster: &mut Cluster,
    pending: Vec<(u32, u64)>,
    stopped: &Stopped,
    suspect: &[&str],
    expected: impl Fn(&Failed) -> bool,
) -> Result<()> {
    let mut noticed = Duration::ZERO;
    for (rank, _) in &pending {
        let (at, text) = cluster.workers[*rank as usize].await_notice(suspect, PATIENCE)?;
        println!("rank {rank} receives: {text}");
        noticed = noticed.max(at - stopped.at);
    }
    let failed = await_failures(cluster, pending, stopped.at, expected)?;
    println!("{suspect:?} stopped: suspect after {noticed:?}, failed after {failed:?}");
    stopped.check("suspect", noticed, SUSPECT)?;
    stopped.check("failed", failed, PEER_TIMEOUT)
}

const SUSPECT: Duration = Duration::from_millis(ronde_wire::limits::SUSPECT_MS);
const PEER_TIMEOUT: Duration = Duration::from_millis(ronde_wire::limits::PEER_TIMEOUT_MS);
/// Silence counts from the last heartbeat, which was up to one of its periods before the stop.
const HEARTBEATS: Duration = Duration::from_millis(250);
/// The allowance for a loaded machine of two cores.
const LATENESS: Duration = Duration::from_secs(1);
/// How long pauses and cuts last that a job must survive.
const PAUSE: Duration = Duration::from_secs(3);
/// The peer timeout of jobs that must survive it: a busy machine makes the silence longer.
const PATIENT_MS: u64 = 30_000;

#[test]
fn a_pause_of_three_seconds_goes_on_with_right_results() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1, 1]).peer_timeout_ms(PATIENT_MS).start(WORKER)?;
    cluster.check_sum("before", 100_000)?;
    let pauses: [fn(&Cluster) -> nix::unistd::Pid; 3] = [
        |cluster| cluster.workers[3].process.pid(),
        |cluster| cluster.sidecars[0].process.pid(),
        |cluster| cluster.sidecars[1].process.pid(),
    ];
    for (number, pause) in pauses.iter().enumerate() {
        let pid = pause(&cluster);
        let begin = Instant::now();
        let fill = Fill::Whole { seed: number as u64 };
        // In flight when the pause begins, and not complete before it ends: the last rank submits in it.
        let mut pending = Vec::new();
        for worker in &mut cluster.workers[..3] {
            pending.push(worker.submit(sum("paused", 100_000, fill))?);
        }
        nix::sys::signal::kill(pid, Signal::SIGSTOP)?;
        std::thread::sleep(PAUSE.saturating_sub(begin.elapsed()));
        nix::sys::signal::kill(pid, Signal::SIGCONT)?;
        pending.push(cluster.workers[3].submit(sum("paused", 100_000, fill))?);
        let expected = fill.digest_of_sum(&[0, 1, 2, 3], 400_000);
        for (worker, id) in cluster.workers.iter_mut().zip(pending) {
            ensure!(worker.digest(id, PATIENCE)? == expected, "rank {}: wrong after a pause", worker.rank);
        }
        cluster.check_sum("after", 100_000)?;
    }
    Ok(())
}

#[test]
fn a_cut_of_three_seconds_goes_on_with_right_results() -> Result<()> {
    if Network::is_left_out("a_cut_of_three_seconds_goes_on_with_right_results") {
        return Ok(());
    }
    let network = Network::up(2)?;
    let mut cluster = Plan::of(&[0, 0, 1, 1]).peer_timeout_ms(PATIENT_MS).on(&network).start(WORKER)?;
    cluster.check_sum("before", 100_000)?;
    // Large enough that the cut comes while its bytes travel, unless this process is late: then twice as large.
    for elements in [8 << 20, 16 << 20, 16 << 20] {
        if is_cut(&mut cluster, &network, elements)? {
            return cluster.check_sum("after", 100_000);
        }
    }
    bail!("each operation was complete before its link was mended: none was cut")
}

/// Cuts the link under an operation for [`PAUSE`] and checks the results, and those of one that the last rank submits
/// in the cut. Returns whether the first one was complete on no rank before the link was mended.
fn is_cut(cluster: &mut Cluster, network: &Network, elements: u64) -> Result<bool> {
    let fill = Fill::Whole { seed: 3 };
    let mut pending = Vec::new();
    for worker in &mut cluster.workers {
        pending.push((worker.submit(sum("cut", elements, fill))?, elements));
    }
    network.set_link(1, false)?;
    for worker in &mut cluster.workers {
        pending.push((worker.submit(sum("in the cut", 1_000, fill))?, 1_000));
    }
    std::thread::sleep(PAUSE);
    let (mended, mut is_cut, ranks) = (Instant::now(), true, cluster.workers.len());
    network.set_link(1, true)?;
    for (number, (id, elements)) in pending.into_iter().enumerate() {
        let worker = &mut cluster.workers[number % ranks];
        let expected = fill.digest_of_sum(&[0, 1, 2, 3], usize::try_from(elements * 4)?);
        let outcome = worker.outcome(id, PATIENCE)?;
        ensure!(outcome.result == Ok(expected), "rank {}: {:?}", worker.rank, outcome.result);
        let is_after = outcome.at > mended;
        is_cut &= is_after;
        ensure!(is_after || number < ranks, "rank {} has a sum of ranks beyond the cut", worker.rank);
        let after = outcome.at.saturating_duration_since(mended);
        println!("rank {}: {elements} elements complete {after:?} after the link was mended", worker.rank);
    }
    Ok(is_cut)
}
