//! Workers and sidecars that must be rejected: each gets the reason, nothing hangs, nothing is left, and the job of the
//! others continues.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, Process, Sidecar, Worker, ronde_binary};
use ronde_tests::harness::copy_executable;
use ronde_tests::left_out::without_root;
use ronde_tests::raw::{RawSession, WELL_BEHAVED, claim};
use ronde_tests::script::Answer;
use ronde_transport::{
    DownReason, Identity, LinkOptions, LocalHello, NetworkPort, Outgoing, Port, PortEvent, Role, SocketOptions,
    next_event,
};
use ronde_wire::control::{Purpose, Transport};
use ronde_wire::limits::CONTROL_FRAME_BYTES_MAX;
use ronde_wire::{Epoch, Frame, FrameHeader, FrameKind, Incarnation, JobName, Seq, SidecarIndex};

use crate::WORKER;

/// The user `nobody` of common systems.
const OTHER_UID: u32 = 65_534;

/// Why a worker's process could not connect.
fn refusal(worker: &mut Worker) -> Result<String> {
    worker.await_answer("its refusal", PATIENCE, |answer| match answer {
        Answer::NotConnected { text } => Some(text),
        _ => None,
    })
}

#[test]
fn a_second_worker_for_a_rank_is_refused_and_the_first_goes_on() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let mut second = cluster.new_worker(1)?;
    let reason = refusal(&mut second)?;
    println!("{reason}");
    ensure!(reason.contains("rank 1") && reason.contains("claimed by a live session"), "{reason}");
    cluster.check_sum("afterwards", 10_000)
}

#[test]
fn workers_of_another_version_are_rejected_with_the_fix() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let directory = cluster.sidecars[0].socket_dir()?.to_owned();
    for versions in [(0, 0), (1_000, 2_000)] {
        let good = claim(&directory, "test", 0)?;
        let first =
            client_message::Message::Claim(v1::Claim { protocol_min: versions.0, protocol_max: versions.1, ..good });
        let reason = RawSession::open(&directory, Some(first), WELL_BEHAVED).await_end()?;
        println!("{reason}");
        ensure!(reason.contains("release of ronde on both sides"), "{reason}");
        ensure!(reason.contains(&versions.0.to_string()) && reason.contains(&versions.1.to_string()), "{reason}");
        cluster.check_sum("beside another release", 1_000)?;
    }
    Ok(())
}

/// Opens the directory to all users, as by mistake.
fn open_to_all(cluster: &Cluster) -> Result<()> {
    let directory = cluster.sidecars[0].socket_dir()?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(directory)? {
        fs::set_permissions(entry?.path(), fs::Permissions::from_mode(0o666))?;
    }
    // The test's own directory around it.
    fs::set_permissions(directory.parent().context("it has a parent")?, fs::Permissions::from_mode(0o755))?;
    Ok(())
}

#[test]
fn a_worker_of_another_user_is_refused() -> Result<()> {
    if without_root("a_worker_of_another_user_is_refused", "only root can become another user") {
        return Ok(());
    }
    let mut cluster = Plan::of(&[0, 1]).sidecars(WORKER)?;
    // A copy that the other user can run, wherever the tests are built.
    let programs = tempfile::tempdir()?;
    fs::set_permissions(programs.path(), fs::Permissions::from_mode(0o755))?;
    let program = programs.path().join("worker");
    copy_executable(Path::new(WORKER), &program);
    let other_user = |cluster: &Cluster| -> Result<Worker> {
        let sidecar = &cluster.sidecars[0];
        let mut command = Command::new(&program);
        command.uid(OTHER_UID).gid(OTHER_UID).current_dir("/").env("RONDE_JOB", "test").env("RONDE_RANK", "0");
        command.env("RONDE_SOCKET", sidecar.socket_dir()?).env("RONDE_TOKEN_FILE", sidecar.token_file(0)?);
        Worker::run(0, &mut command)
    };
    // The directory alone rejects it.
    let reason = refusal(&mut other_user(&cluster)?)?;
    println!("{reason}");
    ensure!(reason.contains("ermission denied"), "{reason}");
    // With the directory, the sockets and even the token open, the uid that the kernel reports rejects it.
    open_to_all(&cluster)?;
    let reason = refusal(&mut other_user(&cluster)?)?;
    println!("{reason}");
    ensure!(reason.contains("uid 65534 may not use this sidecar; allowed are {0}"), "{reason}");
    // Both ranks are still free for their workers.
    for rank in 0..2 {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    cluster.workers.iter_mut().try_for_each(Worker::await_connected)?;
    cluster.check_sum("afterwards", 1_000)
}

#[test]
fn a_socket_path_that_is_too_long_is_found_before_it_is_bound() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let long = directory.path().join("d".repeat(90));
    // A directory of others would not be used.
    fs::create_dir(&long)?;
    fs::set_permissions(&long, fs::Permissions::from_mode(0o700))?;
    let ronde = |words: &[&str], paths: &[&Path]| -> Result<(bool, String)> {
        let output = Command::new(ronde_binary()?).args(words).args(paths).env("XDG_RUNTIME_DIR", &long).output()?;
        let text = [output.stdout, output.stderr].concat();
        Ok((output.status.success(), String::from_utf8(text).context("words")?))
    };
    let secret = directory.path().join("secret");
    ensure!(ronde(&["certs", "secret"], &[&secret])?.0, "a secret can be made");
    let by_secret = ["sidecar", "--job", "night", "--index", "0", "--peers", "127.0.0.1:7399", "--job-secret-file"];
    for (words, paths) in [(&by_secret[..], &[secret.as_path()][..]), (&["run", "-np", "1", "true"], &[])] {
        let (good, output) = ronde(words, paths)?;
        println!("{output}");
        ensure!(!good && output.contains("[RONDE-E405]"), "{output}");
        for part in ["bytes long, but a Unix socket's may have 107", "--runtime-dir", "XDG_RUNTIME_DIR"] {
            ensure!(output.contains(part), "{output:?} lacks {part:?}");
        }
    }
    let left = fs::read_dir(&long)?.count();
    ensure!(left == 0, "{left} directories are left");
    Ok(())
}

/// A link to a real sidecar by a peer with valid certificates that breaks the protocol.
async fn link(port: &mut NetworkPort) -> Result<()> {
    port.open(SidecarIndex(0), Role::Dial);
    match tokio::time::timeout(PATIENCE, next_event(port)).await? {
        PortEvent::Up { .. } => Ok(()),
        other => bail!("{other:?} instead of a link"),
    }
}

async fn turned_away(port: &mut NetworkPort, payload: Bytes) -> Result<String> {
    let length = u32::try_from(payload.len())?;
    let header = FrameHeader { kind: FrameKind::Control, flags: 0, length, epoch: Epoch(0), seq: Seq(0) };
    let frame = Frame { header, payload };
    port.send(SidecarIndex(0), Outgoing::Frame(frame))?;
    loop {
        match tokio::time::timeout(PATIENCE, next_event(port)).await? {
            PortEvent::Down { reason: DownReason::ClosedByPeer(reason), .. } => return Ok(reason),
            PortEvent::Down { reason, .. } => bail!("{reason:?}"),
            _ => {}
        }
    }
}

#[test]
fn a_corrupt_and_an_oversized_frame_of_an_authenticated_peer_end_its_link() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let at = |name: &str| directory.path().join(name);
    for (words, paths) in [
        (&["init", "--job", "night"][..], vec![at("authority")]),
        (&["issue", "--sidecars", "0-1", "--authority"], vec![at("authority"), directory.path().to_owned()]),
    ] {
        let output = Command::new(ronde_binary()?).arg("certs").args(words).args(paths).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let number = std::process::id().to_be_bytes();
    let address = |last: u8| format!("127.{}.{}.{last}:7400", 20 + number[2] % 60, number[3].max(1));
    let runtime = at("runtime");
    fs::create_dir(&runtime)?;
    let mut command = Command::new(ronde_binary()?);
    command.args(["sidecar", "--lanes", "1", "--peers", &format!("{},{}", address(1), address(2)), "--certs"]);
    command.arg(at("sidecar-0")).arg("--runtime-dir").arg(&runtime).env("RONDE_LOG", "info");
    let process = Process::start("sidecar 0", &mut command)?;
    let none = serde_json::Value::Null;
    let mut sidecar = Sidecar { process, index: 0, bound: none.clone(), serving: none };
    sidecar.await_serving()?;

    let read = |name: &str| fs::read_to_string(at("sidecar-1").join(name));
    let identity = Identity::from_pem(&read("cert.pem")?, &read("key.pem")?, &read("ca.pem")?)?;
    let hello = LocalHello {
        job: JobName::new("night")?,
        incarnation: Incarnation(5),
        purpose: Purpose::Control,
        early_credit_bytes: 0,
        membership: 1,
        lanes: 1,
    };
    let peers = HashMap::from([(SidecarIndex(0), vec![address(1).parse::<SocketAddr>()?])]);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let bound =
            NetworkPort::bind(address(2).parse()?, Transport::Auto, Purpose::Control, &SocketOptions::default())?;
        let mut port = bound.start(identity.into(), &hello, peers, LinkOptions::default())?;
        link(&mut port).await?;
        let reason = turned_away(&mut port, Bytes::from_static(&[0xFF; 9])).await?;
        println!("{reason}");
        ensure!(reason.contains("does not decode"), "{reason}");
        ensure!(sidecar.page("/healthz")?.1 == "ok\n", "the sidecar does not serve any more");
        link(&mut port).await?;
        let reason = turned_away(&mut port, Bytes::from(vec![0; CONTROL_FRAME_BYTES_MAX + 1])).await?;
        println!("{reason}");
        ensure!(reason.contains("a Control frame may have"), "{reason}");
        Ok(())
    })?;
    // Without its peer there is no job: it reports the reason, ends, and leaves nothing.
    let reason = sidecar.await_fatal(PATIENCE)?;
    ensure!(reason.contains("sidecar 1 did not connect: protocol violation: a Control frame may have"), "{reason}");
    ensure!(!sidecar.process.await_exit(PATIENCE)?.success(), "it ended well");
    ensure!(fs::read_dir(&runtime)?.count() == 0, "its directory is left");
    Ok(())
}
