//! What a worker cannot reach on its own host: the memory of its sidecar, results of process sets without it, and, where
//! users differ, ranks of other users.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_shm::{OwnedSegment, SegmentId, SessionToken, Share};
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, Process, Sidecar, Worker, ronde_binary};
use ronde_tests::harness::copy_executable;
use ronde_tests::raw::{RawSession, WELL_BEHAVED, session_token};
use ronde_tests::script::{Answer, Fill, digest};
use ronde_wire::{Collective, Rank, ReduceOp};
use serde_json::Value;

use crate::WORKER;

/// Runs a program as an ordinary process of this user: without root's capabilities, some of which allow to trace others.
fn ordinary(program: &str) -> Command {
    if !nix::unistd::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", program]);
    command
}

/// Whether an ordinary process can read a file of another one.
fn can_read(process: &Process, file: &str) -> Result<bool> {
    let path = format!("/proc/{}/{file}", process.pid());
    Ok(ordinary("dd").args(["bs=1", "count=1", "status=none", &format!("if={path}")]).output()?.status.success())
}

#[test]
fn the_memory_of_a_sidecar_is_hidden_from_other_processes_of_its_user() -> Result<()> {
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let binary = ronde_binary()?;
    let mut command = ordinary(binary.to_str().context("a path of this project")?);
    command.args(["sidecar", "--local-ranks", "1", "--runtime-dir"]).arg(directory.path());
    let process = Process::start("a sidecar", &mut command)?;
    let mut sidecar = Sidecar { process, index: 0, bound: Value::Null, serving: Value::Null };
    sidecar.await_serving()?;
    for file in ["environ", "maps", "auxv"] {
        ensure!(!can_read(&sidecar.process, file)?, "another process can read {file}");
    }
    ensure!(can_read(&sidecar.process, "status")? && can_read(&sidecar.process, "cmdline")?, "ps cannot show it");
    // The same program can read them of a process that does not hide its memory.
    let mut command = ordinary("sh");
    let mut open = Process::start("a control", command.args(["-c", "echo ready; read line"]))?;
    open.await_line("its word", PATIENCE, |line| (line.text == "ready").then_some(()))?;
    ensure!(can_read(&open, "environ")? && can_read(&open, "maps")?, "the test would see nothing");
    Ok(())
}

/// A worker that the test controls, with a segment of its own.
struct RawRank {
    session: RawSession,
    token: SessionToken,
    rank: u32,
    segment: Arc<OwnedSegment>,
}

impl RawRank {
    fn claim(cluster: &Cluster, rank: u32) -> Result<Self> {
        let (session, claimed) = RawSession::claim(cluster.sidecars[0].socket_dir()?, "test", rank, WELL_BEHAVED)?;
        let token = session_token(&claimed)?;
        let segment = Arc::new(OwnedSegment::create("raw", 1 << 20, Share::Writable)?);
        session.memory()?.attach(&token, SegmentId(MINE), &segment)?;
        Ok(Self { session, token, rank, segment })
    }

    fn submit(&self, request: u64, name: &str, set: u32, collective: Collective) -> Result<()> {
        self.segment.copy_from(0, &FILL.bytes(self.rank, BYTES))?;
        let has_input = !matches!(collective, Collective::AddSet { .. });
        let place = v1::place::Place::Arena(v1::place::Arena { segment: MINE, offset: 0, bytes: BYTES as u64 });
        let submit = v1::Submit {
            request,
            name: name.to_owned(),
            process_set: set,
            collective: Some(collective.into()),
            dtype: v1::DType::DtypeF32.into(),
            shape: if has_input { vec![BYTES as u64 / 4] } else { vec![0] },
            prescale: 1.0,
            postscale: 1.0,
            input: has_input.then_some(v1::Place { place: Some(place) }),
            ..v1::Submit::default()
        };
        self.session.send(client_message::Message::Submit(submit))
    }

    fn completed(&mut self, request: u64) -> Result<v1::Completed> {
        self.session.await_message(&format!("the completion of request {request}"), |message| match message {
            server_message::Message::Completed(completed) if completed.request == request => Some(completed.clone()),
            _ => None,
        })
    }

    /// The segment of a request's result, which this rank can read there.
    fn result(&mut self, request: u64, ranks: &[u32]) -> Result<SegmentId> {
        let completed = self.completed(request)?;
        let Some(v1::place::Place::Arena(at)) = completed.result.and_then(|place| place.place) else {
            anyhow::bail!("the result is not in a segment of the sidecar")
        };
        let mut bytes = vec![0; BYTES];
        self.session.memory()?.result(&self.token, SegmentId(at.segment))?.copy_to(at.offset, &mut bytes)?;
        ensure!(digest(&bytes) == FILL.digest_of_sum(ranks, BYTES), "rank {} reads something else", self.rank);
        Ok(SegmentId(at.segment))
    }

    fn refusal(&self, segment: SegmentId) -> Result<String> {
        let fetched = self.session.memory()?.result(&self.token, segment).map(drop);
        let error = fetched.err().with_context(|| format!("rank {} maps segment {segment}", self.rank))?;
        Ok(error.to_string())
    }
}

#[test]
fn a_result_segment_is_mapped_by_members_of_its_process_set_only() -> Result<()> {
    let cluster = Plan::of(&[0, 0, 0]).sidecars(WORKER)?;
    let mut ranks: Vec<RawRank> = (0..3).map(|rank| RawRank::claim(&cluster, rank)).collect::<Result<_>>()?;
    ranks.iter_mut().try_for_each(|raw| raw.session.await_epoch())?;
    let all = Collective::AllReduce { op: ReduceOp::Sum };
    let mut set = 0;
    for raw in &ranks {
        raw.submit(1, "add", 0, Collective::AddSet { ranks: vec![Rank(0), Rank(1)] })?;
    }
    for raw in &mut ranks {
        set = raw.completed(1)?.set.context("an added set has an id")?;
    }
    for raw in &ranks {
        raw.submit(2, "allreduce.of.all", 0, all.clone())?;
    }
    let mut of_all = SegmentId(0);
    for raw in &mut ranks {
        of_all = raw.result(2, &[0, 1, 2])?;
    }
    for raw in &ranks[..2] {
        raw.submit(3, "allreduce.of.two", set, all.clone())?;
    }
    let of_set = ranks[0].result(3, &[0, 1])?;
    ensure!(ranks[1].result(3, &[0, 1])? == of_set && of_set != of_all, "{of_set} and {of_all}");
    let reason = ranks[2].refusal(of_set)?;
    println!("{reason}");
    ensure!(reason.contains("has results of a process set without rank 2"), "{reason}");
    Ok(())
}

/// Two users, each with a rank.
const UIDS: [u32; 2] = [10_002, 10_003];

#[test]
fn a_rank_that_is_reserved_for_a_user_is_claimed_by_nobody_else() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        ronde_tests::left_out::note("root", "ranks of several users", "only root can start workers of other users");
        return Ok(());
    }
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let at = |name: &str| directory.path().join(name);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
    copy_executable(Path::new(WORKER), &at("worker"));
    let mut command = Command::new(ronde_binary()?);
    command.args(["certs", "once", "--job", "pod", "--sidecars", "0"]).arg(at("certs"));
    ensure!(command.output()?.status.success(), "no certificates");
    let process = std::process::id().to_be_bytes();
    let peer = format!("127.230.{}.{}:7500", process[2], process[3].max(1));
    let mut command = Command::new(ronde_binary()?);
    command.args(["sidecar", "--lanes", "1", "--placement", "0,0", "--peers", &peer, "--worker-uids"]);
    command.arg(format!("0={},1={}", UIDS[0], UIDS[1])).arg("--certs").arg(at("certs/sidecar-0"));
    let process = Process::start("a sidecar", command.arg("--socket-dir").arg(at("sockets")))?;
    let mut sidecar = Sidecar { process, index: 0, bound: Value::Null, serving: Value::Null };
    sidecar.await_serving()?;

    let gid = nix::unistd::getegid().as_raw();
    let worker = |rank: u32, uid: u32| -> Result<Worker> {
        let mut command = Command::new(at("worker"));
        command.env("RONDE_SOCKET", at("sockets")).env("RONDE_JOB", "pod").env("RONDE_RANK", rank.to_string());
        Worker::run(rank, command.uid(uid).gid(gid))
    };
    let refusal = |mut worker: Worker| {
        worker.await_answer("the refusal", PATIENCE, |answer| match answer {
            Answer::NotConnected { text } => Some(text),
            _ => None,
        })
    };
    // Root can give the token away, so the user of rank 1 cannot even read that of rank 0.
    let text = refusal(worker(0, UIDS[1])?)?;
    ensure!(text.contains("ermission denied"), "{text}");
    // With the token, as if the sidecar were not root's, the kernel's report of the user decides.
    fs::set_permissions(sidecar.token_file(0)?, Permissions::from_mode(0o444))?;
    let text = refusal(worker(0, UIDS[1])?)?;
    ensure!(text.contains("rank 0 is reserved for the users {10002}") && text.contains("uid 10003"), "{text}");
    // Nor may the sidecar's own user.
    let text = refusal(worker(0, 0)?)?;
    ensure!(text.contains("rank 0 is reserved for the users {10002}"), "{text}");
    let mut workers = [worker(0, UIDS[0])?, worker(1, UIDS[1])?];
    workers.iter_mut().try_for_each(Worker::await_connected)
}

/// The number of the raw sessions' segments.
const MINE: u32 = 3;
const BYTES: usize = 4_000;
const FILL: Fill = Fill::Whole { seed: 11 };
