//! The gRPC-Web listener: which calls are accepted, what is refused before it is read, and that its sessions work like
//! any other.

#![forbid(unsafe_code)]

mod flood;
mod node;
mod tls;

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{JobName, Options, Rank, TensorRef};
use ronde_rpc::v1::client_message;
use ronde_rpc::v1::place::{Arena, Place};
use ronde_rpc::v1::server_message;
use ronde_rpc::{RankToken, ring, v1};
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, Sidecar};
use ronde_tests::raw::claim;
use ronde_tests::web::{Answer, Call, WebSession, address, connect, framed, messages_body, token};
use ronde_wire::{Collective, limits};
use serde_json::{Value, json};

/// Two sidecars with a rank each, both of which serve the loopback. The test writes all messages of sessions, and a
/// busy machine may delay them for longer than the default peer timeout.
fn plan<'a>() -> Plan<'a> {
    Plan::of(&[0, 1]).web(json!({ "listen": "127.0.0.1:0" })).peer_timeout_ms(SILENCE_MS)
}

fn token_of(sidecar: &Sidecar, rank: u32) -> Result<RankToken> {
    token(sidecar.token_file(rank)?)
}

fn call(sidecar: &Sidecar, call: &Call) -> Result<Answer<TcpStream>> {
    Answer::to(connect(address(sidecar)?)?, call)
}

fn encoded(message: &v1::Claim) -> Vec<u8> {
    let mut bytes = Vec::new();
    ring::encode(message, &mut bytes);
    framed(&bytes)
}

/// The ordinary rank 0, which waits for rank 1 meanwhile.
fn ordinary(cluster: &Cluster) -> Result<std::thread::JoinHandle<Result<Client, ronde::Error>>> {
    let options = Options::new(cluster.sidecars[0].socket_dir()?, JobName::new("test")?, Rank(0));
    Ok(std::thread::spawn(move || Client::connect(options)))
}

/// Rank 1's session, by its own token.
fn session(cluster: &Cluster) -> Result<(WebSession<TcpStream>, RankToken)> {
    let sidecar = &cluster.sidecars[1];
    let (token, claim) = (token_of(sidecar, 1)?, claim(sidecar.socket_dir()?, "test", 1)?);
    Ok((WebSession::open(connect(address(sidecar)?)?, &token, &claim)?, token))
}

/// A broadcast of rank 0's tensor of 3 floats, to be received inside messages.
fn broadcast(request: u64, name: &str) -> v1::Submit {
    v1::Submit {
        request,
        name: name.to_owned(),
        collective: Some(Collective::Broadcast { root: Rank(0) }.into()),
        dtype: v1::DType::DtypeF32.into(),
        shape: vec![3],
        prescale: 1.0,
        postscale: 1.0,
        input: Some(v1::Place { place: Some(Place::Inline(vec![0; 12].into())) }),
        ..Default::default()
    }
}

fn send_messages(
    sidecar: &Sidecar,
    token: &RankToken,
    claimed: &v1::Claimed,
    number: u64,
    messages: Vec<client_message::Message>,
) -> Result<String> {
    Ok(call(sidecar, &Call::new("Say", Some(token), messages_body(claimed, number, messages)))?.finish()?.1)
}

#[test]
fn grpc_web_is_off_by_default() -> Result<()> {
    let cluster = Plan::of(&[0]).sidecars("")?;
    ensure!(cluster.sidecars[0].serving.get("web").is_none(), "{}", cluster.sidecars[0].serving);
    Ok(())
}

#[test]
fn grpc_web_without_tls_listens_on_the_loopback_only() -> Result<()> {
    let refused = Plan::of(&[0]).web(json!({ "listen": "0.0.0.0:0" })).sidecars("").err().context("it starts")?;
    let text = format!("{refused:#}");
    ensure!(text.contains("in the clear beyond this host") && text.contains("--web-tls"), "{text}");
    Ok(())
}

#[test]
fn a_web_session_works_like_any_other() -> Result<()> {
    let cluster = plan().sidecars("")?;
    let sidecar = &cluster.sidecars[1];
    let ordinary = ordinary(&cluster)?;
    let (mut session, token) = session(&cluster)?;
    ensure!(session.claimed.ring_bytes == 0 && session.claimed.inline_bytes_max == limits::INLINE_BYTES_MAX as u64);
    let size = session.await_message("the epoch", |message| match message {
        server_message::Message::EpochBegan(began) => Some(began.size),
        _ => None,
    })?;
    ensure!(size == 2);
    let client = ordinary.join().expect("it only connects")?;
    std::thread::scope(|scope| -> Result<()> {
        let root = scope.spawn(|| client.broadcast("b", TensorRef::of(&[3], &[1.0_f32, 2.0, 3.0])?, 0));
        let submit = client_message::Message::Submit(broadcast(1, "broadcast.b"));
        let answer = send_messages(sidecar, &token, &session.claimed, 1, vec![submit])?;
        ensure!(answer == "0 ", "{answer}");
        let part = session.await_message("the result", |message| match message {
            server_message::Message::ResultPart(part) => Some(part.data),
            _ => None,
        })?;
        ensure!(part == [1.0_f32, 2.0, 3.0].map(f32::to_le_bytes).concat());
        root.join().expect("it does not panic")?;
        Ok(())
    })?;
    let page = call(sidecar, &Call::new("Status", Some(&token), framed(&[])))?.finish()?.0;
    let page: v1::StatusAnswer = ring::decode(page.first().context("a page")?)?;
    let page: Value = serde_json::from_str(&page.json)?;
    ensure!(page["job"] == "test" && page["sessions"]["live"] == 1 && page["sessions"]["over_ring"] == 0, "{page}");
    let described = call(sidecar, &Call::new("Describe", Some(&token), framed(&[])))?.finish()?.0;
    let described: v1::Description = ring::decode(described.first().context("a description")?)?;
    ensure!(described.ranks == [1] && described.job == "test");
    // Its end is the end of its call, and the others receive it.
    drop(session);
    let error = client.barrier(None).err().context("rank 1 is gone")?;
    ensure!(error.to_string().contains("rank 1"), "{error}");
    Ok(())
}

#[test]
fn a_web_session_needs_the_token_of_its_rank() -> Result<()> {
    let cluster = plan().sidecars("")?;
    let [first, sidecar] = &cluster.sidecars[..] else { unreachable!("two") };
    let other = token_of(first, 0)?;
    let own = token_of(sidecar, 1)?;
    for method in ["Describe", "Status", "Open", "Say"] {
        let missing = call(sidecar, &Call::new(method, None, framed(&[])))?;
        ensure!(
            missing.status == 401 && missing.head.contains("www-authenticate: bearer"),
            "{method}: {}",
            missing.head
        );
        ensure!(missing.finish()?.1.starts_with("16 a call carries a rank's token"));
        let wrong = call(sidecar, &Call::new(method, Some(&other), framed(&[])))?;
        ensure!(wrong.status == 401 && wrong.finish()?.1.contains("of no rank of this sidecar"), "{method}");
    }
    // The right one in the head, and a claim of another rank or with another token in the body.
    let good = claim(sidecar.socket_dir()?, "test", 1)?;
    let cases = [
        (v1::Claim { worker: 0, ..good.clone() }, "7 the call carries the token of rank 1, but claims worker 0"),
        (v1::Claim { token: vec![1; 32].into(), ..good.clone() }, "7 the token does not belong to worker 1"),
        (v1::Claim { job: "other".to_owned(), ..good.clone() }, "9 this sidecar serves job test"),
    ];
    for (claim, words) in cases {
        let refused = call(sidecar, &Call::new("Open", Some(&own), encoded(&claim)))?.finish()?.1;
        ensure!(refused.starts_with(words), "{refused}");
    }
    // A second live claim.
    let (session, _) = session(&cluster)?;
    let refused = call(sidecar, &Call::new("Open", Some(&own), encoded(&good)))?.finish()?.1;
    ensure!(refused.contains("claimed by a live session"), "{refused}");
    // No other rank can use it, not even with its token.
    let foreign =
        send_messages(first, &other, &session.claimed, 1, vec![client_message::Message::Heartbeat(v1::Heartbeat {})])?;
    ensure!(foreign.starts_with("5 no session of this token"), "{foreign}");
    Ok(())
}

#[test]
fn ring_and_shared_memory_are_refused_by_name() -> Result<()> {
    let cluster = plan().sidecars("")?;
    let sidecar = &cluster.sidecars[1];
    let ordinary = ordinary(&cluster)?;
    let (mut session, token) = session(&cluster)?;
    // Rank 0 may see the begin of the epoch first; a sidecar announces no refusal before its own.
    session.await_message("the epoch", |message| {
        matches!(message, server_message::Message::EpochBegan(_)).then_some(())
    })?;
    let client = ordinary.join().expect("it only connects")?;
    let refused = send_messages(
        sidecar,
        &token,
        &session.claimed,
        1,
        vec![client_message::Message::RingReady(v1::RingReady {})],
    )?;
    ensure!(refused.starts_with("3 RingReady is not supported over gRPC-Web"), "{refused}");
    let arena = v1::Place { place: Some(Place::Arena(Arena { segment: 0, offset: 0, bytes: 12 })) };
    let in_memory = [
        (v1::Submit { input: Some(arena), ..broadcast(1, "broadcast.in") }, "the input is in an arena"),
        (
            v1::Submit {
                collective: Some(Collective::Scatter { root: Rank(0) }.into()),
                input: None,
                ..broadcast(2, "scatter.out")
            },
            "a result without a place goes to an arena",
        ),
    ];
    for (number, (submit, words)) in (1..).zip(in_memory) {
        let name = submit.name.clone();
        ensure!(
            send_messages(sidecar, &token, &session.claimed, number, vec![client_message::Message::Submit(submit)])?
                == "0 "
        );
        let failure = session.await_message("the refusal", |message| match message {
            server_message::Message::Failed(failed) => failed.failure,
            _ => None,
        })?;
        ensure!(failure.reason.contains(words) && failure.reason.contains("gRPC-Web"), "{name}: {}", failure.reason);
    }
    // The others receive the reason, instead of waiting.
    let error = client.broadcast("in", TensorRef::of(&[3], &[0.0_f32; 3])?, 0).err().context("refused")?;
    ensure!(error.to_string().contains("the input is in an arena"), "{error}");
    // The session's token grants nothing on mem.sock or for timelines either.
    let memory = ronde_shm::MemClient::connect(
        &ronde_rpc::paths::mem_socket(sidecar.socket_dir()?),
        ronde_shm::MemClientConfig { timeout: PATIENCE, result_bytes_max: 1 << 20 },
    )?;
    let ring = ronde_shm::ring::WorkerRing::create(limits::RING_BYTES as u64)?;
    let refused = memory.ring(&ronde_tests::raw::session_token(&session.claimed)?, ring).err().context("a ring")?;
    ensure!(refused.to_string().contains("session"), "{refused}");
    let timeline = call(sidecar, &Call::new("Timeline", Some(&token), framed(&[])))?;
    ensure!(timeline.status == 404, "{}", timeline.head);
    Ok(())
}

#[test]
fn invalid_requests_are_rejected_by_their_head_without_disturbing_the_job() -> Result<()> {
    let cluster = plan().sidecars("")?;
    let sidecar = &cluster.sidecars[1];
    let token = token_of(sidecar, 1)?;
    let large = limits::WEB_BODY_BYTES_MAX + 1;
    let good = |method: &str| Call::new(method, Some(&token), framed(&[]));
    let cases = [
        (Call { line: "GET / HTTP/1.1".into(), ..good("Open") }, 404),
        (Call { line: "GET /ronde.v1.RondeWeb/Open HTTP/1.1".into(), ..good("Open") }, 405),
        (Call { line: "POST /ronde.v1.Ronde/Session HTTP/1.1".into(), ..good("Open") }, 404),
        (Call { headers: vec!["Host: sidecar".into()], ..good("Open") }, 415),
        (good("Open").with("Origin: https://evil.example"), 403),
        // Only the head is sent: it is refused without waiting for the rest.
        (Call { length: Some(large), body: Vec::new(), ..good("Say") }, 413),
        (good("Open").with(&format!("X-Long: {}", "x".repeat(limits::WEB_HEAD_BYTES_MAX))), 431),
        (Call { body: vec![1, 0, 0, 0, 0], ..good("Say") }, 400),
        (Call { body: framed(&[0xFF; 20]), ..good("Say") }, 400),
        (Call { body: [framed(&[]), framed(&[])].concat(), ..good("Say") }, 400),
        (Call { body: framed(&[26, 0].repeat(20_000)), ..good("Say") }, 400),
    ];
    for (request, status) in cases {
        let answer = call(sidecar, &request).with_context(|| format!("{} {:?}", request.line, request.headers))?;
        ensure!(answer.status == status, "{}: {} instead of {status}", request.line, answer.head);
        ensure!(!answer.head.contains("access-control-allow-origin"), "{}", answer.head);
    }
    // A page receives a text that a browser's console shows.
    let text = call(sidecar, &Call { headers: vec!["Host: sidecar".into()], ..good("Open") })?.text()?;
    ensure!(text.contains("application/grpc-web+proto"), "{text}");
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0; 64]]
    {
        let mut stream = connect(address(sidecar)?)?;
        stream.write_all(garbage)?;
        let mut answer = Vec::new();
        // Closed at once, by an answer or without one.
        let _ = stream.read_to_end(&mut answer);
        ensure!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&answer));
    }
    let described = call(sidecar, &good("Describe"))?.finish()?;
    ensure!(described.1 == "0 ", "{described:?}");
    Ok(())
}

#[test]
fn pages_of_a_named_origin_may_call() -> Result<()> {
    let web = json!({ "listen": "127.0.0.1:0", "origins": ["https://lab.example"] });
    let cluster = Plan::of(&[0]).web(web).sidecars("")?;
    let sidecar = &cluster.sidecars[0];
    let asking = Call {
        line: "OPTIONS /ronde.v1.RondeWeb/Status HTTP/1.1".into(),
        headers: vec!["Host: sidecar".into(), "Access-Control-Request-Method: POST".into()],
        ..Call::new("Status", None, Vec::new())
    };
    let asked = call(sidecar, &asking.clone().with("Origin: https://lab.example"))?;
    ensure!(
        asked.status == 204 && asked.head.contains("access-control-allow-origin: https://lab.example"),
        "{}",
        asked.head
    );
    ensure!(call(sidecar, &asking.with("Origin: https://evil.example"))?.status == 403);
    let token = token_of(sidecar, 0)?;
    let status = Call::new("Status", Some(&token), framed(&[])).with("Origin: https://lab.example");
    let answer = call(sidecar, &status)?;
    ensure!(answer.head.contains("access-control-expose-headers: grpc-status,grpc-message"), "{}", answer.head);
    ensure!(answer.finish()?.1 == "0 ");
    Ok(())
}

#[test]
fn a_client_that_stalls_is_disconnected() -> Result<()> {
    let cluster = plan().sidecars("")?;
    let sidecar = &cluster.sidecars[1];
    let token = token_of(sidecar, 1)?;
    // A head that has no end.
    let mut endless = connect(address(sidecar)?)?;
    endless.write_all(b"POST /ronde.v1.RondeWeb/Say HTTP/1.1\r\nHost: ")?;
    // A body that never arrives.
    let slow = call(sidecar, &Call { length: Some(10), body: vec![0], ..Call::new("Say", Some(&token), Vec::new()) })?;
    ensure!(slow.status == 408, "{}", slow.head);
    ensure!(slow.finish()?.1.starts_with("4 the body did not arrive within"));
    let mut answer = Vec::new();
    endless.read_to_end(&mut answer).context("the connection stays open")?;
    ensure!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&answer));
    Ok(())
}

/// It submits and sends heartbeats, and reads none of its results: its own session ends, and nothing else waits for it.
#[test]
fn a_client_that_stops_reading_is_disconnected_and_delays_nobody() -> Result<()> {
    let plan = Plan::of(&[0, 1, 1]).web(json!({ "listen": "127.0.0.1:0" })).peer_timeout_ms(SILENCE_MS);
    let cluster = plan.sidecars("")?;
    let sidecar = &cluster.sidecars[1];
    let other = Options::new(sidecar.socket_dir()?, JobName::new("test")?, Rank(2));
    let other = std::thread::spawn(move || Client::connect(other));
    let root = ordinary(&cluster)?;
    let (mut unread, token) = session(&cluster)?;
    unread.await_message("the epoch", |message| {
        matches!(message, server_message::Message::EpochBegan(_)).then_some(())
    })?;
    let (root, other) = (root.join().expect("it only connects")?, other.join().expect("it only connects")?);
    let heartbeat = || client_message::Message::Heartbeat(v1::Heartbeat {});
    let mut number = 0;
    let mut speak = |message| -> Result<String> {
        number += 1;
        send_messages(sidecar, &token, &unread.claimed, number, vec![message])
    };
    // More than socket buffers hold.
    for tensor in 0..RESULTS {
        let name = format!("large.{tensor}");
        let elements = limits::INLINE_BYTES_MAX / 4;
        let input = Some(v1::Place { place: Some(Place::Inline(vec![0; 4 * elements].into())) });
        let submit = broadcast(tensor + 1, &format!("broadcast.{name}"));
        let large = v1::Submit { shape: vec![elements as u64], input, ..submit };
        let answer = speak(client_message::Message::Submit(large))?;
        ensure!(answer == "0 ", "{answer}");
        let (shape, values) = ([elements as u64], vec![1.0_f32; elements]);
        let whole = TensorRef::of(&shape, &values)?;
        let sent = root.broadcast_async(name.as_str(), whole, 0)?;
        let got = other.broadcast_async(name.as_str(), whole, 0)?;
        sent.wait()?;
        got.wait()?;
    }
    // The others continue, on the same sidecar, too.
    for turn in 0..100_u8 {
        let sent = root.send_async(TensorRef::of(&[1], &[turn])?, 2, 0)?;
        ensure!(other.recv(0, 0)?.to_vec::<u8>()? == [turn]);
        sent.wait()?;
        if turn % 5 == 0 {
            let answer = speak(heartbeat())?;
            ensure!(answer == "0 ", "{answer}");
        }
    }
    // It sends heartbeats until its session is gone.
    let deadline = std::time::Instant::now() + 2 * PATIENCE;
    let ended = loop {
        let answer = speak(heartbeat())?;
        if answer != "0 " {
            break answer;
        }
        ensure!(std::time::Instant::now() < deadline, "it is kept for ever");
        std::thread::sleep(HEARTBEAT);
    };
    ensure!(ended.contains("no session of this token"), "{ended}");
    let error = root.barrier(None).err().context("rank 1 is gone")?;
    let error = error.to_string();
    ensure!(error.contains("rank 1 on sidecar 1 is gone") && error.contains("that it has not read"), "{error}");
    Ok(())
}

/// Results of a megabyte each.
const RESULTS: u64 = 24;
/// The heartbeat interval of a worker.
const HEARTBEAT: std::time::Duration = std::time::Duration::from_millis(250);
/// The timeout of each step of a test.
const SILENCE_MS: u64 = 60_000;
