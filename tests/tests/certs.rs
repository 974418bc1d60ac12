//! Jobs without the launcher: directories of keys and certificates, sidecars that run from them, and fresh ones that are
//! taken while collectives run.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{Line, PATIENCE, Process, Sidecar, Worker, ronde_binary, sum};
use ronde_tests::script::Fill;
use serde_json::Value;
use tempfile::TempDir;

const WORKER: &str = env!("CARGO_BIN_EXE_ronde-test-worker");

/// A directory with an authority and certificates for two sidecars.
struct Job {
    directory: TempDir,
    number: u8,
}

impl Job {
    fn new(number: u8) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
        let job = Self { directory, number };
        job.certs(&["init", "--job", "night"], &["authority"])?;
        job.certs(&["issue", "--sidecars", "0-1", "--authority"], &["authority", "."])?;
        Ok(job)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `ronde certs` with these words and these paths of the job behind them.
    fn certs(&self, words: &[&str], paths: &[&str]) -> Result<Output> {
        let mut command = Command::new(ronde_binary()?);
        command.arg("certs").args(words).args(paths.iter().map(|name| self.path(name)));
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(output)
    }

    /// Addresses of the loopback that no other test has, so that ports need not be searched for.
    fn peers(&self) -> String {
        let process = std::process::id().to_be_bytes();
        let address =
            |index: u8| format!("127.{}.{}.{}:7400", 100 + (self.number * 2 + index), process[2], process[3].max(1));
        format!("{},{}", address(0), address(1))
    }

    fn sidecar(&self, index: u32) -> Result<Sidecar> {
        let mut command = Command::new(ronde_binary()?);
        command.args(["sidecar", "--lanes", "1", "--peers", &self.peers(), "--certs"]);
        command.arg(self.path(&format!("sidecar-{index}"))).arg("--runtime-dir").arg(self.directory.path());
        let process = Process::start(format!("sidecar {index}"), command.env("RONDE_LOG", "info"))?;
        Ok(Sidecar { process, index, bound: Value::Null, serving: Value::Null })
    }
}

fn check_sum(workers: &mut [Worker], name: &str) -> Result<()> {
    let fill = Fill::Whole { seed: 7 };
    let ids: Vec<u64> =
        workers.iter_mut().map(|worker| worker.submit(sum(name, 100_000, fill))).collect::<Result<_>>()?;
    for (worker, id) in workers.iter_mut().zip(ids) {
        ensure!(worker.digest(id, PATIENCE)? == fill.digest_of_sum(&[0, 1], 400_000), "{name} of rank {}", worker.rank);
    }
    Ok(())
}

fn says(sidecar: &mut Sidecar, words: &str) -> Result<()> {
    let find = |line: &Line| line.text.contains(words).then_some(());
    sidecar.process.await_log(words, PATIENCE, find)
}

#[test]
fn sidecars_run_from_directories_and_take_fresh_certificates_while_they_serve() -> Result<()> {
    let job = Job::new(1)?;
    let mut sidecars = vec![job.sidecar(0)?, job.sidecar(1)?];
    sidecars.iter_mut().try_for_each(Sidecar::await_serving)?;
    let mut workers = Vec::new();
    for (rank, sidecar) in (0..).zip(&sidecars) {
        workers.push(Worker::start(Path::new(WORKER), "night", rank, sidecar)?);
    }
    workers.iter_mut().try_for_each(Worker::await_connected)?;
    check_sum(&mut workers, "before")?;

    job.certs(&["rotate", "--authority"], &["authority", "sidecar-0", "sidecar-1"])?;
    for sidecar in &mut sidecars {
        check_sum(&mut workers, "during")?;
        says(sidecar, "new links take the fresh certificate")?;
    }
    check_sum(&mut workers, "after")?;

    fs::write(job.path("sidecar-0/cert.pem"), "no certificate")?;
    says(&mut sidecars[0], "the changed credentials cannot be used, the old ones stay")?;
    check_sum(&mut workers, "with a broken file")?;

    drop(workers);
    for sidecar in &mut sidecars {
        sidecar.process.signal(Signal::SIGTERM)?;
    }
    for sidecar in &mut sidecars {
        ensure!(sidecar.process.await_exit(PATIENCE)?.success(), "{}", sidecar.process.log());
    }
    Ok(())
}

#[test]
fn a_sidecar_of_another_authority_is_refused_with_the_reason() -> Result<()> {
    let (job, other) = (Job::new(2)?, Job::new(3)?);
    for name in ["cert.pem", "key.pem", "ca.pem"] {
        fs::copy(other.path("sidecar-1").join(name), job.path("sidecar-1").join(name))?;
    }
    let _first = job.sidecar(0)?;
    let mut second = job.sidecar(1)?;
    let reason = second.await_fatal(PATIENCE)?;
    ensure!(reason.contains("the certificate is not signed by an authority of this job"), "{reason}");
    ensure!(reason.contains("sidecar 0 did not come") && reason.contains("[RONDE-E406]"), "{reason}");
    ensure!(!second.process.await_exit(PATIENCE)?.success());
    Ok(())
}

#[test]
fn without_credentials_one_line_names_the_ways() -> Result<()> {
    let output = Command::new(ronde_binary()?).arg("sidecar").output()?;
    let text = String::from_utf8(output.stderr).context("words")?;
    ensure!(!output.status.success() && text.lines().count() == 1, "{text}");
    for words in ["ronde run", "--certs DIR", "ronde certs issue", "[RONDE-E502]"] {
        ensure!(text.contains(words), "{text:?} does not say {words:?}");
    }
    Ok(())
}

#[test]
fn a_key_that_others_can_read_is_refused_with_the_fix() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let job = Job::new(4)?;
    fs::set_permissions(job.path("sidecar-0/key.pem"), fs::Permissions::from_mode(0o644))?;
    let reason = job.sidecar(0)?.await_fatal(PATIENCE)?;
    ensure!(reason.contains("has mode 0644, others may read it; run: chmod 600 /"), "{reason}");
    ensure!(reason.contains("[RONDE-E503]"), "{reason}");
    Ok(())
}
