//! Children of a worker: they neither keep a dead parent's session alive nor can use it, and their end disturbs nobody.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{PATIENCE, Plan, Worker, sum};
use ronde_tests::script::{Fill, Wanted};
use ronde_wire::{Cause, Collective, DType};

use crate::WORKER;

#[test]
fn a_forked_child_neither_keeps_a_session_alive_nor_can_use_it() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).sidecars(WORKER)?;
    let sidecar = cluster.sidecar_of(1);
    let mut command = python()?;
    command
        .env("RONDE_SOCKET", sidecar.socket_dir()?)
        .env("RONDE_JOB", &cluster.job)
        .env("RONDE_RANK", "1")
        .env("RONDE_TOKEN_FILE", sidecar.token_file(1)?);
    let mut forking = Worker::run(1, &mut command)?;
    for rank in [0, 2] {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    forking.await_connected()?;
    let barrier = || Wanted {
        name: Some("start".to_owned()),
        collective: Collective::Barrier,
        dtype: DType::U8,
        shape: vec![0],
        fill: Fill::Ones,
    };
    let mut pending = Vec::new();
    for worker in &mut cluster.workers {
        worker.await_connected()?;
        worker.submit(barrier())?;
    }
    // The others submit only after the first child has ended.
    let (_, ended) = forking.await_notice(&["a child ended"], PATIENCE)?;
    ensure!(ended == "a child ended with status 0", "{ended}: it could use the session, or received another reason");
    for worker in &mut cluster.workers {
        pending.push(worker.submit(sum("in flight", 1_000, Fill::Ones))?);
    }
    for (worker, id) in cluster.workers.iter_mut().zip(&pending) {
        ensure!(worker.digest(*id, PATIENCE)? == Fill::Ones.digest_of_sum(&[0, 1, 2], 4_000), "rank {}", worker.rank);
    }
    let (_, stays) = forking.await_notice(&["a child stays"], PATIENCE)?;
    let child = stays.rsplit(' ').next().context("a process id")?.to_owned();
    let waiting = cluster.workers[0].submit(sum("waiting", 1_000, Fill::Ones))?;
    let killed = Instant::now();
    forking.process.signal(Signal::SIGKILL)?;
    let (at, failed) = cluster.workers[0].failure(waiting, PATIENCE)?;
    ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(1), "{failed:?}");
    ensure!(Path::new("/proc").join(&child).join("exe").exists(), "child {child} is gone; the test shows nothing");
    println!("the death of a parent was reported {:?} after it, while its child lived", at - killed);
    // Its silence would be noticed in any case, later.
    ensure!(!failed.text.contains("silent"), "its end was not noticed, but its silence: {}", failed.text);
    Ok(())
}

/// The Python script of a rank that forks.
fn python() -> Result<Command> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("the tests have a folder of their own")?;
    let python = std::env::var_os("RONDE_PYTHON").unwrap_or_else(|| "python3".into());
    let path = std::env::var_os("PYTHONPATH").unwrap_or_else(|| root.join("sdk-python/python").into());
    let probe = Command::new(&python).args(["-c", "import ronde"]).env("PYTHONPATH", &path).output();
    let probe = probe.with_context(|| format!("{} cannot be started", python.display()))?;
    ensure!(
        probe.status.success(),
        "{} cannot import ronde; run the tests by `make test`, which builds the extension and sets RONDE_PYTHON:\n{}",
        python.display(),
        String::from_utf8_lossy(&probe.stderr)
    );
    let mut command = Command::new(python);
    command.arg(root.join("tests/workers/forked.py")).env("PYTHONPATH", path);
    Ok(command)
}
