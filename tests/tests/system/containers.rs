//! Sidecars as in containers: certificates of an authority that is dropped, a given directory of sockets, workers of
//! another user, an end with the workers, and a report.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{PATIENCE, Process, Sidecar, Worker, ronde_binary, sum};
use ronde_tests::harness::copy_executable;
use ronde_tests::script::{Answer, Ask, Fill};
use serde_json::Value;
use tempfile::TempDir;

use crate::WORKER;

/// The user of workers, if the test may change users.
const WORKER_UID: u32 = 10_002;
/// A user that is not allowed.
const FOREIGN_UID: u32 = 10_003;

/// Two sidecars with a worker each, everything below one directory.
struct Pod {
    directory: TempDir,
    number: u8,
}

impl Pod {
    fn new(number: u8) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("ronde-pod-").tempdir()?;
        // As between containers: every user can reach the sockets' directory.
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        copy_executable(Path::new(WORKER), &directory.path().join("worker"));
        let pod = Self { directory, number };
        let mut command = Command::new(ronde_binary()?);
        command.args(["certs", "once", "--job", "pod", "--sidecars", "0-1"]).arg(pod.path("certs"));
        let made = command.output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(pod)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// An address of the loopback that no other test uses, so that ports need not be searched for.
    fn address(&self, of: u8) -> String {
        let process = std::process::id().to_be_bytes();
        format!("127.{}.{}.{}", 200 + self.number * 2 + of, process[2], process[3].max(1))
    }

    fn sidecar(&self, index: u32, words: &[&str]) -> Result<Sidecar> {
        let peers = format!("{}:7500,{}:7500", self.address(0), self.address(1));
        let mut command = Command::new(ronde_binary()?);
        command.args(["sidecar", "--lanes", "1", "--peers", &peers]).args(words);
        command.arg("--certs").arg(self.path(&format!("certs/sidecar-{index}")));
        command.arg("--socket-dir").arg(self.path(&format!("sockets-{index}")));
        command.arg("--report").arg(self.path(&format!("report-{index}.json")));
        let process = Process::start(format!("sidecar {index}"), command.env("RONDE_LOG", "info"))?;
        let mut sidecar = Sidecar { process, index, bound: Value::Null, serving: Value::Null };
        sidecar.await_serving()?;
        Ok(sidecar)
    }

    /// A worker that finds everything in the given directory; as another user if one is named.
    fn worker(&self, rank: u32, user: Option<u32>) -> Result<Worker> {
        let mut command = Command::new(self.path("worker"));
        let socket = self.path(&format!("sockets-{rank}"));
        command.env("RONDE_SOCKET", socket).env("RONDE_JOB", "pod").env("RONDE_RANK", rank.to_string());
        if let Some(user) = user {
            // The group is the sidecar's.
            command.uid(user).gid(nix::unistd::getegid().as_raw());
        }
        Worker::run(rank, &mut command)
    }

    fn report(&self, index: u32) -> Result<Value> {
        let path = self.path(&format!("report-{index}.json"));
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(serde_json::from_str(&text)?)
    }
}

fn check_sum(workers: &mut [Worker]) -> Result<()> {
    let fill = Fill::Whole { seed: 3 };
    let ids: Vec<u64> =
        workers.iter_mut().map(|worker| worker.submit(sum("s", 50_000, fill))).collect::<Result<_>>()?;
    for (worker, id) in workers.iter_mut().zip(ids) {
        ensure!(worker.digest(id, PATIENCE)? == fill.digest_of_sum(&[0, 1], 200_000), "rank {}", worker.rank);
    }
    Ok(())
}

#[test]
fn sidecars_end_with_their_workers_and_report() -> Result<()> {
    let pod = Pod::new(0)?;
    let admin = format!("{}:9400", pod.address(0));
    let words = ["--exit-with-workers", "60"];
    let mut sidecars =
        vec![pod.sidecar(0, &[&words[..], &["--admin-listen", &admin]].concat())?, pod.sidecar(1, &words)?];
    ensure!(sidecars[0].socket_dir()? == pod.path("sockets-0"));
    ensure!(sidecars[0].admin()?.to_string() == admin && sidecars[0].page("/healthz")?.0.contains(" 200 "));
    let mut workers = [pod.worker(0, None)?, pod.worker(1, None)?];
    workers.iter_mut().try_for_each(Worker::await_connected)?;
    check_sum(&mut workers)?;
    for worker in &mut workers {
        worker.ask(&Ask::Close)?;
    }
    for (index, sidecar) in (0..).zip(&mut sidecars) {
        ensure!(sidecar.process.await_exit(PATIENCE)?.success(), "{}", sidecar.process.log());
        let report = pod.report(index)?;
        ensure!(report["sidecar"] == index && report["failure"].is_null(), "{report}");
        ensure!(report["summary"]["sealed_bytes"].as_u64() > Some(100_000), "{report}");
        let left: Vec<_> = fs::read_dir(pod.path(&format!("sockets-{index}")))?.flatten().collect();
        ensure!(left.is_empty(), "the given directory stays, and is empty: {left:?}");
    }
    Ok(())
}

#[test]
fn a_worker_that_dies_ends_all_sidecars_with_the_reason() -> Result<()> {
    let pod = Pod::new(1)?;
    let words = ["--exit-with-workers", "60"];
    let mut sidecars = vec![pod.sidecar(0, &words)?, pod.sidecar(1, &words)?];
    let mut workers = [pod.worker(0, None)?, pod.worker(1, None)?];
    workers.iter_mut().try_for_each(Worker::await_connected)?;
    let waiting = workers[0].submit(sum("alone", 1_000, Fill::Whole { seed: 1 }))?;
    workers[1].process.signal(Signal::SIGKILL)?;
    let (_, failed) = workers[0].failure(waiting, PATIENCE)?;
    ensure!(failed.rank == Some(1), "{failed:?}");
    workers[0].ask(&Ask::Close)?;
    for (index, sidecar) in (0..).zip(&mut sidecars) {
        ensure!(sidecar.process.await_exit(PATIENCE)?.code() == Some(69), "the job has failed");
        let failure = pod.report(index)?["failure"].to_string();
        ensure!(failure.contains("rank 1"), "{failure} does not name the culprit");
    }
    Ok(())
}

#[test]
fn a_sidecar_without_workers_ends_and_so_do_its_peers() -> Result<()> {
    let pod = Pod::new(2)?;
    let mut patient = pod.sidecar(0, &["--exit-with-workers", "600"])?;
    let mut hasty = pod.sidecar(1, &["--exit-with-workers", "1"])?;
    ensure!(!hasty.process.await_exit(PATIENCE)?.success(), "no worker has connected");
    let failure = pod.report(1)?["failure"].to_string();
    ensure!(failure.contains("no worker connected within 1 seconds"), "{failure}");
    ensure!(!patient.process.await_exit(PATIENCE)?.success(), "without its peer there is no job");
    Ok(())
}

#[test]
fn workers_of_another_user_are_admitted_only_when_listed() -> Result<()> {
    if ronde_tests::left_out::without_root("workers of other users", "only root can start them") {
        return Ok(());
    }
    let pod = Pod::new(3)?;
    let uid = WORKER_UID.to_string();
    let words = ["--exit-with-workers", "60", "--worker-uids", &uid];
    let mut sidecars = vec![pod.sidecar(0, &words)?, pod.sidecar(1, &words)?];
    let mode = |path: &Path| fs::metadata(path).map(|found| found.permissions().mode() & 0o777);
    ensure!(mode(sidecars[0].socket_dir()?)? == 0o750 && mode(sidecars[0].token_file(0)?)? == 0o440);

    // It is in the group, and can read the token; the kernel reports its uid.
    let mut foreign = pod.worker(0, Some(FOREIGN_UID))?;
    let refused = |answer| match answer {
        Answer::NotConnected { text } => Some(text),
        _ => None,
    };
    let text = foreign.await_answer("the refusal", PATIENCE, refused)?;
    ensure!(text.contains("uid 10003 may not use this sidecar"), "{text}");

    let mut workers = [pod.worker(0, Some(WORKER_UID))?, pod.worker(1, Some(WORKER_UID))?];
    workers.iter_mut().try_for_each(Worker::await_connected)?;
    check_sum(&mut workers)?;
    for worker in &mut workers {
        worker.ask(&Ask::Close)?;
    }
    for sidecar in &mut sidecars {
        ensure!(sidecar.process.await_exit(Duration::from_secs(30))?.success(), "{}", sidecar.process.log());
    }
    Ok(())
}

/// As from a starter that ends everything early: once a signal before the last line of the start left sockets and tokens.
#[test]
fn a_signal_during_the_start_ends_with_empty_directories() -> Result<()> {
    for round in 0..10 {
        let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
        let left =
            || -> Result<Vec<PathBuf>> { fs::read_dir(directory.path())?.map(|entry| Ok(entry?.path())).collect() };
        let mut command = Command::new(ronde_binary()?);
        command.args(["sidecar", "--local-ranks", "2", "--job", "test", "--runtime-dir"]).arg(directory.path());
        let mut process = Process::start("a sidecar", &mut command)?;
        let deadline = Instant::now() + PATIENCE;
        while left()?.is_empty() {
            ensure!(Instant::now() < deadline, "round {round}: the sidecar makes no directory");
        }
        process.signal(Signal::SIGTERM)?;
        let status = process.await_exit(PATIENCE)?;
        ensure!(status.success(), "round {round}: {status}: {}", process.log());
        ensure!(left()?.is_empty(), "round {round}: {:?}", left()?);
    }
    Ok(())
}
