//! Holders of a token, and clients without one, that flood the listener while another rank's session is open: the session goes on.

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{JobName, Options, TensorRef};
use ronde_rpc::RankToken;
use ronde_rpc::v1;
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::server_message;
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, Sidecar};
use ronde_tests::probe::Probe;
use ronde_tests::web::{Answer, Call, WebSession, address, connect, connect_from, framed};
use ronde_wire::limits;
use serde_json::json;

use super::{HEARTBEAT, SILENCE_MS, broadcast, call, ordinary, plan, send_messages, session, token_of};

/// Rank 1 has a session over gRPC-Web, on the same sidecar as rank 2, whose token the flood uses. Only late answers fail
/// the test: a busy machine may make all heartbeats late, so the peer timeout is long.
struct Flooded {
    cluster: Cluster,
    /// Ranks 0 and 2.
    clients: [Client; 2],
    session: WebSession<TcpStream>,
    token: RankToken,
    /// The calls of rank 1 so far.
    calls: Cell<u64>,
}

impl Flooded {
    fn start() -> Result<Self> {
        let cluster = Plan::of(&[0, 1, 1]).web(json!({ "listen": "127.0.0.1:0" }));
        let cluster = cluster.peer_timeout_ms(SILENCE_MS).sidecars("")?;
        let options = Options::new(cluster.sidecars[1].socket_dir()?, JobName::new("test")?, ronde::Rank(2));
        let others = [ordinary(&cluster)?, std::thread::spawn(move || Client::connect(options))];
        let (session, token) = session(&cluster)?;
        let [first, second] = others.map(|other| other.join().expect("it only connects"));
        Ok(Self { cluster, clients: [first?, second?], session, token, calls: Cell::new(0) })
    }

    fn sidecar(&self) -> &Sidecar {
        &self.cluster.sidecars[1]
    }

    fn send(&self, message: client_message::Message) -> Result<String> {
        self.calls.set(self.calls.get() + 1);
        send_messages(self.sidecar(), &self.token, &self.session.claimed, self.calls.get(), vec![message])
    }

    /// Sends rank 1's heartbeats for a time, each over a new connection, while `flood` runs on several threads; each
    /// must be answered.
    fn beat_during(&self, flood: impl Fn(SocketAddr, RankToken) -> Result<()> + Sync) -> Result<()> {
        let (at, foreign, over) = (address(self.sidecar())?, token_of(self.sidecar(), 2)?, AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..FLOODERS {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        // The listener may refuse and close; that is what a flood meets.
                        drop(flood(at, foreign));
                    }
                });
            }
            let beaten = self.beat();
            over.store(true, Ordering::Relaxed);
            beaten
        })
    }

    fn beat(&self) -> Result<()> {
        let (began, probe, mut slowest) = (Instant::now(), Probe::start(), Duration::ZERO);
        while began.elapsed() < FLOOD_TIME {
            let (sent, at) = (Instant::now(), began.elapsed());
            let answer = self.send(client_message::Message::Heartbeat(v1::Heartbeat {}));
            let answer = answer.with_context(|| format!("a heartbeat after {at:?}"))?;
            ensure!(answer == "0 ", "a heartbeat after {at:?}: {answer}");
            slowest = slowest.max(sent.elapsed());
            let oversleep = probe.worst();
            ensure!(
                slowest < ANSWERED_WITHIN + oversleep,
                "a heartbeat took {slowest:?}, where the machine overslept {oversleep:?}"
            );
            std::thread::sleep(HEARTBEAT);
        }
        println!("the slowest heartbeat took {slowest:?}");
        Ok(())
    }

    /// Rank 1 takes part in an operation: it is not lost.
    fn check_alive(mut self) -> Result<()> {
        let (shape, values) = ([3], [1.0_f32, 2.0, 3.0]);
        let tensor = TensorRef::of(&shape, &values)?;
        let of = |client: &Client| client.broadcast_async("alive", tensor, 0);
        let others = [of(&self.clients[0])?, of(&self.clients[1])?];
        let answer = self.send(client_message::Message::Submit(broadcast(1, "broadcast.alive")))?;
        ensure!(answer == "0 ", "{answer}");
        let part = self.session.await_message("the tensor", |message| match message {
            server_message::Message::ResultPart(part) => Some(part.data),
            _ => None,
        })?;
        ensure!(part == values.map(f32::to_le_bytes).concat());
        for other in others {
            other.wait()?;
        }
        Ok(())
    }
}

/// An address of this host that the session does not use.
const OTHER_ADDRESS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// Threads that flood.
const FLOODERS: usize = 4;
/// Longer than two slow bodies may take, and than the default peer timeout.
const FLOOD_TIME: Duration = Duration::from_secs(13);
/// Less than the default peer timeout, and less than a slow body may take.
const ANSWERED_WITHIN: Duration = Duration::from_secs(4);

/// Sends the head of a call and a part of its body, again and again, until the connection ends.
fn dribble(at: SocketAddr, token: RankToken) -> Result<()> {
    let mut streams = Vec::new();
    for _ in 0..16 {
        let mut stream = connect(at)?;
        let length = Some(limits::WEB_BODY_BYTES_MAX);
        stream.write_all(&Call { length, ..Call::new("Say", Some(&token), Vec::new()) }.bytes())?;
        streams.push(stream);
    }
    for _ in 0..60 {
        for stream in &mut streams {
            stream.write_all(&[0; 64])?;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

#[test]
fn slow_bodies_of_one_rank_do_not_delay_the_heartbeats_of_another() -> Result<()> {
    let flooded = Flooded::start()?;
    flooded.beat_during(dribble)?;
    flooded.check_alive()
}

/// Connections from another address that say nothing, and those that have made a call and are idle.
fn crowd(at: SocketAddr, token: RankToken) -> Result<()> {
    let mut streams = Vec::new();
    for number in 0..limits::WEB_CONNECTIONS_MAX / FLOODERS + 8 {
        let mut stream = connect_from(OTHER_ADDRESS, at)?;
        if number % 2 == 0 {
            stream.write_all(&Call::new("Describe", Some(&token), framed(&[])).bytes())?;
        }
        streams.push(stream);
    }
    std::thread::sleep(Duration::from_secs(3));
    Ok(())
}

#[test]
fn crowds_of_connections_do_not_keep_an_open_session_out() -> Result<()> {
    let flooded = Flooded::start()?;
    flooded.beat_during(crowd)?;
    flooded.check_alive()
}

/// Complete calls that are answered, as many as the listener takes.
fn hammer(at: SocketAddr, token: RankToken) -> Result<()> {
    for method in ["Describe", "Status", "Say", "Open"] {
        let large = framed(&vec![0; limits::INLINE_BYTES_MAX]);
        Answer::to(connect(at)?, &Call::new(method, Some(&token), large))?;
    }
    Ok(())
}

#[test]
fn calls_of_one_rank_do_not_delay_the_heartbeats_of_another() -> Result<()> {
    let flooded = Flooded::start()?;
    flooded.beat_during(hammer)?;
    flooded.check_alive()
}

#[test]
fn a_rank_has_a_few_bodies_and_connections_at_a_time() -> Result<()> {
    let cluster = Plan::of(&[0, 0]).web(json!({ "listen": "127.0.0.1:0" })).sidecars("")?;
    let sidecar = &cluster.sidecars[0];
    let token = token_of(sidecar, 0)?;
    let slow = Call { length: Some(limits::WEB_BODY_BYTES_MAX), ..Call::new("Say", Some(&token), Vec::new()) };
    let mut reading = Vec::new();
    for _ in 0..limits::WEB_BODIES_PER_RANK_MAX {
        let mut stream = connect(address(sidecar)?)?;
        stream.write_all(&slow.bytes())?;
        reading.push(stream);
    }
    // One more waits for them once the listener reads them, and another rank's does not.
    let describe = |rank| -> Result<Answer<TcpStream>> {
        call(sidecar, &Call::new("Describe", Some(&token_of(sidecar, rank)?), framed(&[])))
    };
    let deadline = Instant::now() + PATIENCE;
    let waiting = loop {
        let mut stream = connect(address(sidecar)?)?;
        stream.write_all(&Call::new("Describe", Some(&token), framed(&[])).bytes())?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        match stream.peek(&mut [0]) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break stream,
            answered => ensure!(answered? > 0 && Instant::now() < deadline, "no call waits"),
        }
    };
    let (began, probe) = (Instant::now(), Probe::start());
    ensure!(describe(1)?.finish()?.1 == "0 ");
    ensure!(began.elapsed() < ANSWERED_WITHIN + probe.worst(), "{:?}", began.elapsed());
    waiting.set_read_timeout(Some(PATIENCE))?;
    ensure!(Answer::read(waiting)?.finish()?.1 == "0 ", "it is answered when the slow bodies are over");
    // Each of these connections has made a call.
    let (mut held, mut refused) = (Vec::new(), None);
    for _ in 0..=limits::WEB_CONNECTIONS_MAX {
        let mut stream = connect(address(sidecar)?)?;
        stream.write_all(&Call::new("Describe", Some(&token), framed(&[])).bytes())?;
        let answer = Answer::read(stream.try_clone()?)?;
        if answer.status != 200 {
            refused = Some(answer.finish()?.1);
            break;
        }
        held.push(stream);
    }
    let refused = refused.context("one rank has all connections")?;
    ensure!(refused.contains("connections") && held.len() <= limits::WEB_CONNECTIONS_MAX / 2, "{refused}");
    ensure!(describe(1)?.finish()?.1 == "0 ");
    Ok(())
}

/// The oldest connection without a token is closed for a newer one, of the address that has the most; those that have
/// carried a token stay.
#[test]
fn the_oldest_connection_without_a_token_makes_room() -> Result<()> {
    let cluster = Plan::of(&[0]).web(json!({ "listen": "127.0.0.1:0" })).sidecars("")?;
    let sidecar = &cluster.sidecars[0];
    let token = token_of(sidecar, 0)?;
    let describe = Call::new("Describe", Some(&token), framed(&[]));
    let mut known = connect(address(sidecar)?)?;
    known.write_all(&describe.bytes())?;
    ensure!(Answer::read(known.try_clone()?)?.status == 200);
    let foreign = connect_from(OTHER_ADDRESS, address(sidecar)?)?;
    let count = limits::WEB_UNAUTHENTICATED_MAX;
    let mut others = (0..count).map(|_| connect(address(sidecar)?)).collect::<Result<Vec<_>>>()?;
    let (began, probe) = (Instant::now(), Probe::start());
    let mut nothing = Vec::new();
    others[0].read_to_end(&mut nothing).context("the oldest one stays open")?;
    // Sooner than an idle connection is closed.
    let within = Duration::from_secs(5) + probe.worst();
    ensure!(nothing.is_empty() && began.elapsed() < within, "{:?}", began.elapsed());
    let newest = others.pop().context("the newest")?;
    for kept in [newest, foreign, known] {
        ensure!(Answer::to(kept, &describe)?.finish()?.1 == "0 ");
    }
    Ok(())
}

/// The limit that `Claimed` states is the one that holds, and it is the listener's own.
#[test]
fn a_web_session_may_have_as_many_requests_pending_as_announced() -> Result<()> {
    let cluster = plan().sidecars("")?;
    let sidecar = &cluster.sidecars[1];
    let ordinary = ordinary(&cluster)?;
    let (mut session, token) = session(&cluster)?;
    let _client = ordinary.join().expect("it only connects")?;
    session.await_message("the epoch", |message| {
        matches!(message, server_message::Message::EpochBegan(_)).then_some(())
    })?;
    let most = u64::from(session.claimed.pending_max);
    ensure!(most == limits::WEB_PENDING_MAX as u64);
    let submit = |request: u64| client_message::Message::Submit(broadcast(request, &format!("broadcast.{request}")));
    let calls = [(1..=most).map(submit).collect(), vec![submit(most + 1)]];
    for (number, messages) in (1..).zip(calls) {
        let answer = send_messages(sidecar, &token, &session.claimed, number, messages)?;
        ensure!(answer == "0 ", "{answer}");
    }
    let (request, failure) = session.await_message("the refusal", |message| match message {
        server_message::Message::Failed(failed) => Some((failed.request, failed.failure)),
        _ => None,
    })?;
    let reason = failure.context("a failure has a reason")?.reason;
    ensure!(request == most + 1 && reason.contains("the limit WEB_PENDING_MAX is 1024"), "{request}: {reason}");
    Ok(())
}
