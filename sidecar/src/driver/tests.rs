//! Tests of a driver whose only lane is in the hands of the test, so that every order of events can be produced.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::mpsc as std_mpsc;
use std::time::SystemTime;

use ronde_bootstrap::flight::FlightDirectory;
use ronde_engine::{Executor, ExecutorAction, ExecutorConfig};
use ronde_rpc::RankToken;
use ronde_rpc::convert::{Claim, OutputPlace, Place, SegmentKind, Submission, TOKEN_BYTES};
use ronde_shm::{OwnedSegment, SegmentId, SessionToken, Share, WorkerSegment};
use ronde_transport::{
    BoundPort, Identity, JobCa, KeyRequest, LinkOptions, LocalHello, SocketOptions, TrustDomain, Validity,
};
use ronde_wire::control::Purpose;
use ronde_wire::{
    Codec, Collective, DType, Epoch, Exit, Incarnation, JobName, Lane, ReduceOp, Request, RequestId, Seq, SetId, Shape,
    TensorName,
};
use tokio::sync::oneshot;

use super::*;
use crate::operation::lanes::{ExecuteCommand, LaneCommand};
use crate::operation::memory::LaneMemory;
use crate::operation::results::Results;
use crate::session::command::{Access, ClaimRequest};
use crate::session::outgoing::{OutgoingStream, outgoing};

const ME: SidecarIndex = SidecarIndex(0);
const SEGMENT: SegmentId = SegmentId(0);
/// Too much for the control thread, and several chunks.
const BYTES: usize = 4 << 20;
/// The input lies at the start of the segment, the place of the result after it.
const SEGMENT_BYTES: usize = 2 * BYTES;
const FILLED: u8 = 0xAB;

/// A driver with two local ranks and one lane.
struct Fixture {
    driver: Driver,
    lane: TestLane,
    workers: Vec<Worker>,
}

/// The lane: its thread has ended, and the test does its work.
struct TestLane {
    commands: mpsc::Receiver<LaneCommand>,
    executor: Executor,
    memory: LaneMemory,
}

/// A worker with one segment.
struct Worker {
    id: SessionId,
    segment: OwnedSegment,
    messages: OutgoingStream,
}

impl TestLane {
    fn start() -> (LaneHandle, Self) {
        let (sender, receiver) = std_mpsc::channel();
        let handle = LaneHandle::start(Lane(0), move |commands| drop(sender.send(commands))).expect("a thread");
        let commands = receiver.recv().expect("the lane's queue");
        let config = ExecutorConfig { me: ME, lane: Lane(0), early_grant_bytes: 0 };
        (handle, Self { commands, executor: Executor::new(config), memory: LaneMemory::new(None) })
    }

    /// Handles all commands; returns the reports that answer them.
    fn handle_commands(&mut self) -> Vec<LaneReport> {
        let mut reports = Vec::new();
        while let Ok(command) = self.commands.try_recv() {
            let LaneCommand::Execute(command) = command else { continue };
            match command {
                ExecuteCommand::Epoch(epoch) => self.executor.handle_epoch(epoch),
                ExecuteCommand::EpochEnd(epoch) => {
                    self.executor.handle_epoch_end(epoch);
                    self.memory.clear();
                    reports.push(LaneReport::Released(epoch));
                }
                ExecuteCommand::Admit(admission, memory) => {
                    self.memory.insert(admission.seq, memory);
                    self.executor.handle_admission(admission);
                }
                ExecuteCommand::Cancel(epoch, last, dropped) => {
                    self.executor.handle_cancel(epoch, last, &dropped);
                    reports.push(LaneReport::Dropped(epoch, last));
                }
                ExecuteCommand::Trace(_) => {}
            }
        }
        reports
    }

    /// Performs steps while `goes_on`; returns whether it stopped because of that.
    fn work_while(&mut self, mut goes_on: impl FnMut() -> bool) -> bool {
        while goes_on() {
            match self.executor.poll_action(&mut self.memory) {
                Some(ExecutorAction::Done { .. }) | None => return false,
                Some(_) => {}
            }
        }
        true
    }
}

impl Worker {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; SEGMENT_BYTES];
        self.segment.copy_to(0, &mut bytes).expect("the whole segment");
        bytes
    }

    fn byte(&self, offset: usize) -> u8 {
        let mut byte = [0];
        self.segment.copy_to(offset as u64, &mut byte).expect("within the segment");
        byte[0]
    }

    fn fill(&self, value: u8) {
        self.segment.copy_from(0, &vec![value; SEGMENT_BYTES]).expect("the whole segment");
    }

    /// The kinds of the messages since the last call.
    fn received(&mut self) -> Vec<&'static str> {
        let mut kinds = Vec::new();
        while let Ok(Ok(v1::ServerMessage { message: Some(message) })) = self.messages.try_recv() {
            kinds.push(match message {
                Message::Claimed(_) => "claimed",
                Message::EpochBegan(_) => "began",
                Message::EpochEnded(_) => "ended",
                Message::Failed(_) => "failed",
                Message::Completed(_) => "completed",
                _ => "other",
            });
        }
        kinds
    }
}

impl Fixture {
    /// Both ranks have claimed, and their epoch has begun.
    fn new() -> Self {
        let (handle, lane) = TestLane::start();
        let world = World::new(vec![ME; 2]).expect("two ranks");
        let segments = Segments::default();
        let results = Results::new(1 << 30, vec![Rank(0), Rank(1)], segments.clone());
        let tokens = [Rank(0), Rank(1)].map(|rank| (WorkerNumber(rank.0), token(rank)));
        let job = JobName::new("test").expect("a name");
        let mut driver = Driver::new(
            EngineConfig { eager_bytes: 0, run_ahead: None, ..EngineConfig::new(ME, world) },
            Links { control: control_port(), web_tls: None, transport: Transport::default() },
            Execution {
                operations: Operations::new(results, 1),
                inline: InlineExecutor::new(ME),
                lanes: vec![handle],
                plugins: Plugins::new(&Default::default(), || {}).expect("no plugins"),
                device: DeviceExecution::default(),
            },
            Clients {
                sessions: Sessions::new(HashMap::from(tokens)),
                streams: StreamGate::new(Vec::new(), 1),
                segments,
                parked: Parked::default(),
                arena_bytes_max: 1 << 30,
                peer_timeout_ms: 10_000,
            },
            (Liveness::new(None), MembershipState::fixed(2), Flight::new((job, String::new()), &FlightDirectory::Off)),
            false,
        );
        let workers = [Rank(0), Rank(1)].map(|rank| claim(&mut driver, rank)).into();
        let mut fixture = Self { driver, lane, workers };
        fixture.drive();
        for worker in &mut fixture.workers {
            assert_eq!(worker.received(), ["claimed", "began"]);
        }
        fixture
    }

    fn drive(&mut self) {
        self.driver.perform_actions();
    }

    fn command(&mut self, command: SessionCommand) {
        self.driver.handle_command(command);
        self.drive();
    }

    /// The lane handles its commands, and the driver its reports.
    fn lane_answers(&mut self) {
        for report in self.lane.handle_commands() {
            self.driver.handle_report(report);
        }
        self.drive();
    }

    /// Both ranks submit a sum; the lane has admitted it and written a part of rank 0's result.
    fn sum_in_progress(&mut self) {
        for index in 0..self.workers.len() {
            let session = self.workers[index].id;
            self.command(SessionCommand::Submit { session, submission: Box::new(Ok(sum())) });
        }
        self.lane_answers();
        let worker = &self.workers[0];
        assert!(self.lane.work_while(|| worker.byte(BYTES) == 0), "the first byte of the result is written");
        assert_eq!(worker.byte(SEGMENT_BYTES - 1), 0, "the last one is not");
    }
}

fn token(rank: Rank) -> RankToken {
    RankToken::new(&[u8::try_from(rank.0).expect("small") + 1; TOKEN_BYTES]).expect("a token")
}

fn claim(driver: &mut Driver, rank: Rank) -> Worker {
    let (outgoing, messages) = outgoing(64);
    let (reply, mut decision) = oneshot::channel();
    let session_token = SessionToken::from_bytes([u8::try_from(rank.0).expect("small"); 16]);
    let job = JobName::new("test").expect("a name");
    let claim = Claim {
        job,
        worker: WorkerNumber(rank.0),
        token: token(rank),
        protocols: (1, 1),
        client: "test".into(),
        pid: 0,
    };
    let access = Access::Socket { uid: 0 };
    driver.claim(ClaimRequest { claim, access, protocol: 1, session_token, outgoing, reply });
    let id = decision.try_recv().expect("an answer").expect("the rank is free");
    let segment = OwnedSegment::create("worker", SEGMENT_BYTES, Share::Writable).expect("memory");
    let fd = segment.fd().try_clone_to_owned().expect("a descriptor");
    let mapped = WorkerSegment::map_named("worker", fd, SEGMENT_BYTES as u64).expect("a mapping");
    driver.clients.segments.attach_for_test(&session_token, SEGMENT, mapped);
    segment.copy_from(0, &vec![1; BYTES]).expect("within the segment");
    Worker { id, segment, messages }
}

fn sum() -> Submission {
    let what = Request {
        set: SetId::WORLD,
        name: TensorName::new("gradient").expect("a name"),
        collective: Collective::AllReduce { op: ReduceOp::Sum },
        dtype: DType::U8,
        shape: Shape::new(vec![BYTES as u64]).expect("a shape"),
        prescale: 1.0,
        postscale: 1.0,
        codec: Codec::None,
        plugin: None,
        group: None,
    };
    let bytes = BYTES as u64;
    let place = Place::Arena { segment: SEGMENT.0, offset: 0, bytes };
    let output = Some(OutputPlace { kind: SegmentKind::Arena, segment: SEGMENT.0, offset: bytes, bytes });
    Submission { request: RequestId(1), what, plugin: None, place, output, site: None }
}

/// A started port; this sidecar has no peers.
fn control_port() -> NetworkPort {
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let bound: BoundPort =
        NetworkPort::bind(at, Transport::default(), Purpose::Control, &SocketOptions::default()).expect("a free port");
    let identity = identity();
    let hello = LocalHello {
        job: identity.id().job.clone(),
        incarnation: Incarnation(1),
        purpose: Purpose::Control,
        early_credit_bytes: 0,
        lanes: 1,
        membership: 1,
    };
    bound.start(Arc::new(identity), &hello, HashMap::new(), LinkOptions::default()).expect("a port")
}

fn identity() -> Identity {
    let validity = || Validity::starting(SystemTime::now(), Duration::from_secs(3_600));
    let job = JobName::new("test").expect("a name");
    let domain = TrustDomain::new("test.example").expect("a name");
    let authority = JobCa::generate(job, domain, validity()).expect("an authority");
    let key = KeyRequest::generate().expect("a key");
    let certificate = authority.issue(key.request_pem(), ME, validity()).expect("a certificate");
    key.into_identity(&certificate, authority.ca_certificate_pem(), authority.id_of(ME)).expect("its own key")
}

/// A worker owns its memory again when it receives the failure, so the lanes must have let go of it before. The lane is
/// slow here: it does not come to its next command before it has written more of the result.
#[tokio::test]
async fn failures_of_an_epoch_wait_for_its_lanes() {
    let mut fixture = Fixture::new();
    fixture.sum_in_progress();
    let session = fixture.workers[1].id;
    fixture.command(SessionCommand::Closed { session, reason: "its process is gone".into() });
    assert_eq!(fixture.workers[0].received(), [""; 0], "the lane still writes");
    // The next epoch begins, which rank 0 must not see before the end of this one.
    fixture.workers[1] = claim(&mut fixture.driver, Rank(1));
    fixture.drive();
    let (before, worker) = (fixture.workers[0].byte(BYTES), &fixture.workers[0]);
    assert_eq!(before, 2, "1 + 1");
    let mut steps = 0;
    fixture.lane.work_while(|| {
        steps += 1;
        steps < 3 && worker.byte(SEGMENT_BYTES - 1) == 0
    });
    assert_eq!(fixture.workers[0].received(), [""; 0], "the lane still writes");

    fixture.lane_answers();
    assert_eq!(fixture.workers[0].received()[..2], ["failed", "ended"]);
    fixture.workers[0].fill(FILLED);
    assert!(!fixture.lane.work_while(|| true), "nothing of the operation is left");
    fixture.lane_answers();
    let changed = fixture.workers[0].bytes().iter().position(|byte| *byte != FILLED);
    assert_eq!(changed, None, "this byte was written after the failure");
}

/// The host's lanes get no cancellation that waits for its turn when the epoch ends.
#[tokio::test]
async fn a_cancellation_that_no_lane_answers_ends_with_its_epoch() {
    let mut fixture = Fixture::new();
    let operations = &mut fixture.driver.execution.operations;
    let (epoch, last) = (Epoch(1), Seq(2));
    operations.cancel((epoch, last), &vec![last].into());
    assert!(!operations.is_unused());
    operations.end_epoch(epoch);
    operations.lane_released(epoch);
    assert!(operations.is_unused(), "another membership waits for this");
    assert!(!operations.lane_dropped(epoch, last), "it is over");
}

/// As above, for an operation that is dropped while its epoch goes on.
#[tokio::test]
async fn failures_of_a_cancelled_operation_wait_for_its_lanes() {
    let mut fixture = Fixture::new();
    fixture.sum_in_progress();
    let (epoch, seq) = (Epoch(1), Seq(1));
    fixture.driver.cancel(epoch, seq, &vec![seq].into());
    for rank in [Rank(0), Rank(1)] {
        let failure = Failure::new(Cause::Refused, "the plugin failed");
        fixture.driver.complete(rank, RequestId(1), Err(failure));
    }
    assert!(fixture.workers.iter_mut().all(|worker| worker.received().is_empty()), "the lane still writes");
    fixture.lane_answers();
    for worker in &mut fixture.workers {
        assert_eq!(worker.received(), ["failed"]);
    }
    fixture.workers[0].fill(FILLED);
    assert!(!fixture.lane.work_while(|| true), "nothing of the operation is left");
    assert!(fixture.workers[0].bytes().iter().all(|byte| *byte == FILLED));
}

/// The agent of a busy machine reports the end of a process late.
#[tokio::test]
async fn the_report_of_a_process_that_has_ended_is_waited_for() {
    for (pid, waits) in [(u32::MAX, true), (std::process::id(), false)] {
        let mut fixture = Fixture::new();
        fixture.driver.exits.are_reported = true;
        let session = fixture.workers[1].id;
        fixture.driver.clients.sessions.get_mut(session).expect("it is open").pid = pid;
        fixture.command(SessionCommand::Closed { session, reason: "its stream has ended".into() });
        let due = fixture.driver.next_close().expect("it is closing");
        fixture.driver.close_due_sessions(due);
        fixture.drive();
        fixture.lane_answers();
        assert_eq!(fixture.workers[0].received().is_empty(), waits, "process {pid}");
        if waits {
            let exited = WorkerExited { worker: 1, pid, exit: Exit::Code(3), stderr_tail: Vec::new() };
            fixture.driver.worker_exited(exited);
            fixture.drive();
            fixture.lane_answers();
            assert_eq!(fixture.workers[0].received(), ["ended"]);
        }
    }
}

/// A report that never comes is not waited for any longer.
#[tokio::test]
async fn a_session_closes_without_a_report_in_the_end() {
    let mut fixture = Fixture::new();
    fixture.driver.exits.are_reported = true;
    let session = fixture.workers[1].id;
    fixture.driver.clients.sessions.get_mut(session).expect("it is open").pid = u32::MAX;
    fixture.command(SessionCommand::Closed { session, reason: "its stream has ended".into() });
    fixture.driver.close_due_sessions(Instant::now() + Duration::from_secs(1));
    fixture.drive();
    fixture.lane_answers();
    assert_eq!(fixture.workers[0].received(), ["ended"]);
}
