//! The net plugin between real processes and sidecars, called as NCCL calls it.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde_shm::ring::{Pushed, RingEnd, WorkerRing};
use ronde_shm::{MemClient, MemClientConfig, StreamRequest, WorkerToken};
use ronde_tests::cluster::nccl::{NcclDriver, digest, pattern};
use ronde_tests::cluster::{Capture, Cluster, Network, PATIENCE, Plan, Process};
use ronde_tests::script::MARKER;
use ronde_wire::control::Transport;
use ronde_wire::stream::{SidecarMessage, WorkerMessage};

use crate::WORKER;

/// Two ranks on two sidecars, and a driver for each.
fn pair(version: u32) -> Result<(Cluster, NcclDriver, NcclDriver)> {
    pair_with(PEER_TIMEOUT_MS, version)
}

fn pair_with(peer_timeout_ms: u64, version: u32) -> Result<(Cluster, NcclDriver, NcclDriver)> {
    let cluster = Plan::of(&[0, 1]).peer_timeout_ms(peer_timeout_ms).sidecars(WORKER)?;
    let (first, second) = (NcclDriver::start(&cluster, 0, version)?, NcclDriver::start(&cluster, 1, version)?);
    Ok((cluster, first, second))
}

fn expected(seed: usize, bytes: usize) -> String {
    format!("{bytes} {}", digest(&pattern(seed, bytes)))
}

#[test]
fn messages_through_the_net_plugin_arrive_in_order_and_whole() -> Result<()> {
    for version in [6, 7, 8] {
        let (_cluster, mut a, mut b) = pair(version)?;
        let properties = a.ask("properties 0")?;
        let wanted = "ronde path=true guid=0 memory=1 speed=10000 latency=50 comms=2048 recvs=1";
        ensure!(properties == wanted, "version {version}: {properties}");
        // The lower index dials, then the higher one; the second direction uses the same links.
        for (from, to) in [(0, 1), (1, 0)] {
            let (sender_side, receiver_side) = if from < to { (&mut a, &mut b) } else { (&mut b, &mut a) };
            let (sender, receiver) = sender_side.connect(receiver_side)?;
            for (seed, bytes) in SIZES.into_iter().enumerate() {
                // The buffer is larger than the message.
                let received = receiver_side.ask(&format!("recv {receiver} {}", bytes + seed))?;
                let sent = sender_side.ask(&format!("send {sender} {bytes} {seed}"))?;
                // Both are polled: a long message does not fit into the rings.
                receiver_side.begin(&format!("wait {received}"))?;
                let sent = sender_side.ask(&format!("wait {sent}"))?;
                ensure!(sent == expected(seed, bytes), "{bytes} bytes, sent: {sent}");
                let received = receiver_side.finish()?;
                ensure!(received == expected(seed, bytes), "version {version}, {bytes} bytes: {received}");
            }
            sender_side.ask(&format!("close {sender}"))?;
            receiver_side.ask(&format!("close {receiver}"))?;
        }
    }
    Ok(())
}

#[test]
fn many_requests_of_the_net_plugin_may_be_posted_early_late_and_tested_in_any_order() -> Result<()> {
    let (cluster, mut a, mut b) = pair(8)?;
    let (sender, receiver) = a.connect(&mut b)?;
    let bytes = |number: usize| (number * 7_919) % 300_000;
    // Receives first, then sends; waits from the last to the first.
    let mut receives = Vec::new();
    for number in 0..40 {
        receives.push(b.ask(&format!("recv {receiver} {}", bytes(number)))?);
    }
    for number in 0..40 {
        a.ask(&format!("send {sender} {} {number}", bytes(number)))?;
    }
    a.begin("wait Q41")?;
    for (number, request) in receives.iter().enumerate().rev() {
        let received = b.ask(&format!("wait {request}"))?;
        ensure!(received == expected(number, bytes(number)), "message {number}: {received}");
    }
    a.finish()?;
    // Sends that nobody receives yet: they wait in the rings, and in no sidecar.
    let mut sends = Vec::new();
    for number in 0..20 {
        sends.push(a.ask(&format!("send {sender} {} {number}", 1 << 20))?);
    }
    let last = sends.last().context("there are some")?;
    for _ in 0..50 {
        ensure!(a.ask(&format!("poll {last}"))? == "pending", "20 MiB do not fit into two rings of 1 MiB");
    }
    for (number, send) in sends.iter().enumerate() {
        let request = b.ask(&format!("recv {receiver} {}", 1 << 20))?;
        b.begin(&format!("wait {request}"))?;
        a.ask(&format!("wait {send}"))?;
        let received = b.finish()?;
        ensure!(received == expected(number, 1 << 20), "late message {number}: {received}");
    }
    let (_, metrics) = cluster.sidecars[1].page("/metrics")?;
    let received: u64 = (0..40).map(bytes).sum::<usize>() as u64 + (20 << 20);
    let line = format!("ronde_nccl_received_bytes_total {received}");
    ensure!(metrics.lines().any(|found| found == line), "{line} is not in\n{metrics}");
    Ok(())
}

#[test]
fn rings_of_four_processes_on_two_sidecars_pass_messages_through_the_net_plugin() -> Result<()> {
    let cluster = Plan::of(&[0, 0, 1, 1]).sidecars(WORKER)?;
    let mut drivers = Vec::new();
    for rank in 0..4 {
        drivers.push(NcclDriver::start(&cluster, rank, 8)?);
    }
    // Each connects to the next one; two of the connections stay within a sidecar.
    let mut handles = Vec::new();
    for driver in &mut drivers {
        handles.push(driver.listen()?);
    }
    for (rank, driver) in drivers.iter_mut().enumerate() {
        driver.begin(&format!("meet {} {}", handles[(rank + 1) % 4].1, handles[rank].0))?;
    }
    let mut ends = Vec::new();
    for (rank, driver) in drivers.iter_mut().enumerate() {
        ends.push(driver.finish().with_context(|| format!("rank {rank} meets its neighbours"))?);
    }
    for bytes in [0, 1, 70_000, 3 << 20] {
        for (rank, driver) in drivers.iter_mut().enumerate() {
            driver.begin(&format!("pass {} {bytes} 5 {rank}", ends[rank]))?;
        }
        for (rank, driver) in drivers.iter_mut().enumerate() {
            let received = driver.finish().with_context(|| format!("rank {rank} passes {bytes} bytes"))?;
            ensure!(received == expected((rank + 3) % 4, bytes), "rank {rank}, {bytes} bytes: {received}");
        }
    }
    Ok(())
}

#[test]
fn a_message_that_does_not_fit_its_buffer_is_an_error_of_the_net_plugin() -> Result<()> {
    let (_cluster, mut a, mut b) = pair(8)?;
    let (sender, receiver) = a.connect(&mut b)?;
    let request = b.ask(&format!("recv {receiver} 99"))?;
    a.ask(&format!("send {sender} 100 1"))?;
    let code = b.fails(&format!("wait {request}"), "a message of 100 bytes does not fit a buffer of 99")?;
    ensure!(code == REMOTE_ERROR, "{code}");
    // What NCCL does not do, or only with other properties.
    b.fails(&format!("recv-many {receiver}"), "one message is received at a time, not 2")?;
    b.fails(&format!("register {receiver} 2"), "memory of kind 2 is not memory of the host")?;
    b.ask(&format!("register {receiver} 1"))?;
    ensure!(b.ask(&format!("flush {receiver}"))? == "false", "a flush of host memory needs nothing");
    b.fails("properties 1", "there is device 0 only")?;
    Ok(())
}

#[test]
fn connections_of_the_net_plugin_close_in_every_order() -> Result<()> {
    let (_cluster, mut a, mut b) = pair(8)?;
    // The sender first: what it sent arrives before the end.
    let (sender, receiver) = a.connect(&mut b)?;
    a.ask(&format!("send {sender} 300000 5"))?;
    a.ask("wait Q2")?;
    a.ask(&format!("close {sender}"))?;
    let request = b.ask(&format!("recv {receiver} 300000"))?;
    ensure!(b.ask(&format!("wait {request}"))? == expected(5, 300_000), "a message before the end is lost");
    let code = b.fails_within(&format!("recv {receiver} 1"), PATIENCE)?;
    ensure!(code == REMOTE_ERROR, "{code}");
    b.ask(&format!("close {receiver}"))?;
    // The receiver first, with a receive that is not complete.
    let (sender, receiver) = a.connect(&mut b)?;
    b.ask(&format!("recv {receiver} 10"))?;
    b.ask(&format!("close {receiver}"))?;
    let code = a.fails_within(&format!("send {sender} 100000 1"), PATIENCE)?;
    ensure!(code == REMOTE_ERROR, "{code}");
    a.ask(&format!("close {sender}"))?;
    // A listener while a peer connects, and one that nobody used.
    let (listener, handle) = b.listen()?;
    ensure!(a.ask(&format!("try {handle} 20"))? == "pending", "nobody has accepted");
    b.ask(&format!("close {listener}"))?;
    let (listener, late) = b.listen()?;
    b.ask(&format!("close {listener}"))?;
    let code = a.fails(&format!("connect {late}"), "listener")?;
    ensure!(code == REMOTE_ERROR, "{code}");
    // Everything still works, and a listener takes several.
    let (listener, handle) = b.listen()?;
    for seed in 0..3 {
        a.begin(&format!("connect {handle}"))?;
        let receiver = b.ask(&format!("accept {listener}"))?;
        let sender = a.finish()?;
        let request = b.ask(&format!("recv {receiver} 1000"))?;
        a.ask(&format!("send {sender} 1000 {seed}"))?;
        ensure!(b.ask(&format!("wait {request}"))? == expected(seed, 1_000), "connection {seed}");
    }
    Ok(())
}

#[test]
fn a_process_that_is_killed_ends_its_connections_of_the_net_plugin() -> Result<()> {
    for kills_receiver in [true, false] {
        let (cluster, mut a, mut b) = pair(8)?;
        let (sender, receiver) = a.connect(&mut b)?;
        let begin;
        if kills_receiver {
            b.process.signal(Signal::SIGKILL)?;
            begin = Instant::now();
            a.fails_within(&format!("send {sender} 1000 1"), PATIENCE)?;
        } else {
            let request = b.ask(&format!("recv {receiver} 1000"))?;
            a.process.signal(Signal::SIGKILL)?;
            begin = Instant::now();
            let code = b.fails(&format!("wait {request}"), "has closed the connection or ended")?;
            ensure!(code == REMOTE_ERROR, "{code}");
        }
        println!("the other process received the error after {:?}", begin.elapsed());
        // The sidecars go on, and hold nothing of it.
        for (index, rank) in [(0, 0), (1, 1)] {
            let deadline = Instant::now() + PATIENCE;
            let is_survivor = (rank == 0) == kills_receiver;
            let line = format!("ronde_nccl_connections {}", if is_survivor { 1 } else { 0 });
            while !cluster.sidecars[index].page("/metrics")?.1.lines().any(|found| found == line) {
                ensure!(Instant::now() < deadline, "sidecar {index} does not report {line}");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    Ok(())
}

#[test]
fn a_sidecar_that_is_killed_or_silent_ends_the_connections_of_the_net_plugin() -> Result<()> {
    for signal in [Signal::SIGKILL, Signal::SIGSTOP] {
        let (cluster, mut a, mut b) = pair_with(SILENCE_MS, 8)?;
        let (sender, receiver) = a.connect(&mut b)?;
        let (back, _) = b.connect(&mut a)?;
        let request = b.ask(&format!("recv {receiver} 10"))?;
        cluster.sidecars[0].process.signal(signal)?;
        let begin = Instant::now();
        if signal == Signal::SIGKILL {
            a.fails_within(&format!("send {sender} 10 1"), PATIENCE)?;
        }
        b.fails(&format!("wait {request}"), "the connection is over")?;
        println!("{signal}: the other host received the error after {:?}", begin.elapsed());
        b.fails_within(&format!("send {back} 10 1"), PATIENCE)?;
    }
    Ok(())
}

#[test]
fn handles_that_are_forged_or_of_others_connect_to_nothing() -> Result<()> {
    let (_cluster, mut a, mut b) = pair(8)?;
    let (listener, handle) = b.listen()?;
    let with = |offset: usize, digits: &str| {
        let mut changed = handle.clone();
        changed.replace_range(2 * offset..2 * offset + digits.len(), digits);
        changed
    };
    let zeros = "0".repeat(256);
    for (forged, text) in [
        (zeros.as_str(), "is not one of ronde's plugin"),
        (&with(28, "00000000000000000000000000000000"), "there is no listener with this number and secret"),
        (&with(20, "ffffffffffffffff"), "there is no listener with this number and secret"),
        (&with(12, "07000000"), "which is not in this job"),
        (&with(16, "ff00"), "which is not in this job"),
        (&with(44, "0000000000000000"), "belongs to another job"),
        (&with(8, "02"), "is of another version"),
        (&with(120, "0100000000000000"), "the handle was changed"),
    ] {
        a.fails(&format!("connect {forged}"), text)?;
    }
    // The true one still works.
    a.begin(&format!("connect {handle}"))?;
    b.ask(&format!("accept {listener}"))?;
    a.finish()?;
    Ok(())
}

/// A ring of the test's own, as any process with the token can make one.
fn ring(cluster: &Cluster, rank: u32, token: [u8; 32]) -> Result<RingEnd> {
    let config = MemClientConfig { timeout: PATIENCE, result_bytes_max: 0 };
    let client = MemClient::connect(&cluster.sidecar_of(rank).socket_dir()?.join("mem.sock"), config)?;
    let request = StreamRequest { worker: rank, token: WorkerToken::from_bytes(token), capacity: 0, lane: 0 };
    Ok(client.stream(request, WorkerRing::create(RING_BYTES)?)?)
}

fn token(cluster: &Cluster, rank: u32) -> Result<[u8; 32]> {
    let bytes = std::fs::read(cluster.sidecar_of(rank).token_file(rank)?)?;
    bytes.try_into().ok().context("a token has 32 bytes")
}

/// Waits for a message in a ring.
fn message(ring: &mut RingEnd) -> Result<SidecarMessage> {
    let (deadline, mut message) = (Instant::now() + PATIENCE, Vec::new());
    while !ring.consumer.pop(&mut message)? {
        ensure!(Instant::now() < deadline, "no message came");
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(SidecarMessage::decode(&message)?)
}

fn push(ring: &mut RingEnd, bytes: &[u8]) -> Result<()> {
    ensure!(ring.producer.push(bytes)? == Pushed::Done, "the ring is full");
    ring.producer.wake();
    Ok(())
}

#[test]
fn garbage_in_a_ring_of_the_net_plugin_ends_that_connection_only() -> Result<()> {
    let (cluster, mut a, mut b) = pair(8)?;
    let (sender, receiver) = a.connect(&mut b)?;
    let wrong = ring(&cluster, 0, [0; 32]).expect_err("the token is wrong").to_string();
    ensure!(wrong.contains("the token does not belong to"), "{wrong}");
    let secret = token(&cluster, 0)?;
    let unexpected: [&[u8]; 5] = [b"", b"garbage", &[0xff; 16], &WorkerMessage::Credit(1).encode(), &[4; 30_000]];
    for bytes in unexpected {
        let mut ring = ring(&cluster, 0, secret)?;
        push(&mut ring, bytes)?;
        let SidecarMessage::Failed(reason) = message(&mut ring)? else { anyhow::bail!("{bytes:?} is taken") };
        println!("{:?}...: {reason}", &bytes[..bytes.len().min(16)]);
    }
    // A receiver that grants more than it has, and one that sends data.
    for bytes in
        [WorkerMessage::Credit(u64::MAX).encode(), WorkerMessage::Credit(1).encode(), WorkerMessage::Data.encode()]
    {
        let mut listener = ring(&cluster, 0, secret)?;
        push(&mut listener, &WorkerMessage::Listen.encode())?;
        let SidecarMessage::Listening(handle) = message(&mut listener)? else { anyhow::bail!("no handle") };
        let mut receiver = ring(&cluster, 0, secret)?;
        let accept = WorkerMessage::Accept { listener: handle.listener, secret: handle.secret };
        push(&mut receiver, &accept.encode())?;
        let mut sender = ring(&cluster, 0, secret)?;
        push(&mut sender, &WorkerMessage::Connect(handle).encode())?;
        for end in [&mut receiver, &mut sender] {
            ensure!(matches!(message(end)?, SidecarMessage::Connected { .. }), "it connects");
        }
        push(&mut receiver, &bytes)?;
        for end in [&mut receiver, &mut sender] {
            ensure!(matches!(message(end)?, SidecarMessage::Failed(_)), "both ends are notified");
        }
    }
    let request = b.ask(&format!("recv {receiver} 1000"))?;
    a.ask(&format!("send {sender} 1000 3"))?;
    ensure!(b.ask(&format!("wait {request}"))? == expected(3, 1_000), "a connection of another ring is affected");
    Ok(())
}

#[test]
fn a_program_that_is_no_sidecar_cannot_reach_connections_of_the_net_plugin() -> Result<()> {
    let (cluster, mut a, mut b) = pair(8)?;
    let (sender, receiver) = a.connect(&mut b)?;
    let lane = cluster.sidecars[1].bound["lanes"][0].as_str().context("there is a lane")?;
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 4_096], vec![0xff; 4_096]] {
        TcpStream::connect(lane)?.write_all(&bytes)?;
    }
    let request = b.ask(&format!("recv {receiver} 100000"))?;
    a.ask(&format!("send {sender} 100000 3"))?;
    ensure!(b.ask(&format!("wait {request}"))? == expected(3, 100_000), "a connection is affected");
    // Without the variables of a worker there is no plugin, and no other way to send.
    let mut unknown_peer = NcclDriver::with(8, |command| {
        command.env_remove("RONDE_SOCKET");
        Ok(())
    })?;
    let code = unknown_peer.fails("init", "RONDE_SOCKET is not set; start the program by `ronde run --nccl-net`")?;
    ensure!(code == SYSTEM_ERROR, "{code}");
    Ok(())
}

#[test]
fn no_message_of_the_net_plugin_is_readable_on_the_network() -> Result<()> {
    if Network::is_left_out("no_message_of_the_net_plugin_is_readable_on_the_network") {
        return Ok(());
    }
    let network = Network::up(2)?;
    let directory = tempfile::tempdir()?;
    let text = std::str::from_utf8(MARKER)?.replace(' ', "_");
    for transport in [Transport::Auto, Transport::Quic] {
        let cluster = Plan::of(&[0, 1]).transport(transport).on(&network).sidecars(WORKER)?;
        let capture = Capture::start(&network, 0, directory.path())?;
        let (mut a, mut b) = (NcclDriver::start(&cluster, 0, 8)?, NcclDriver::start(&cluster, 1, 8)?);
        let (sender, receiver) = a.connect(&mut b)?;
        let request = b.ask(&format!("recv {receiver} {CAPTURED_BYTES}"))?;
        a.ask(&format!("send {sender} {CAPTURED_BYTES} {text}"))?;
        a.begin("wait Q2")?;
        b.ask(&format!("wait {request}"))?;
        a.finish()?;
        let captured = capture.finish()?;
        let (udp, tcp) = captured.payload_bytes();
        println!("{transport}: {udp} bytes over UDP and {tcp} over TCP");
        ensure!(udp + tcp >= CAPTURED_BYTES as u64, "{transport}: the message went another way");
        ensure!(captured.places_of(text.as_bytes()) == 0, "{transport}: the message can be read");
        for rank in 0..2 {
            ensure!(captured.places_of(&token(&cluster, rank)?) == 0, "{transport}: a token can be read");
        }
    }
    Ok(())
}

/// The processor time of a process so far, in seconds.
fn processor_seconds(process: &Process) -> Result<f64> {
    Ok(process.processor_time()?.as_secs_f64())
}

/// Prints speed and processor time beside those of plain sockets, in turns on the same machine; it decides nothing. Both travel
/// between two network namespaces, or, without the right to make some, over the loopback.
#[test]
fn many_messages_of_nccls_size_pass_through_the_net_plugin() -> Result<()> {
    let network = if Network::is_left_out("many_messages_of_nccls_size_pass_through_the_net_plugin") {
        None
    } else {
        Some(Network::up(2)?)
    };
    let plan = Plan::of(&[0, 1]).peer_timeout_ms(PEER_TIMEOUT_MS);
    let cluster = match &network {
        Some(network) => plan.on(network).sidecars(WORKER)?,
        None => plan.sidecars(WORKER)?,
    };
    let start = |rank: u32| match &network {
        Some(network) => NcclDriver::start_on(network, rank, &cluster, rank),
        None => NcclDriver::start(&cluster, rank, 8),
    };
    let (mut a, mut b) = (start(0)?, start(1)?);
    let ip = network.as_ref().map_or_else(|| "127.0.0.1".to_owned(), |network| network.address(1));
    // Of the sender, its sidecar, the receiver's sidecar, and the receiver.
    let spent = |a: &NcclDriver, b: &NcclDriver| -> Result<[f64; 4]> {
        let [first, second] = [&cluster.sidecars[0].process, &cluster.sidecars[1].process];
        Ok([
            processor_seconds(&a.process)?,
            processor_seconds(first)?,
            processor_seconds(second)?,
            processor_seconds(&b.process)?,
        ])
    };
    let megabytes: u16 = std::env::var("RONDE_NCCL_MEASURE_MB").map_or(Ok(32), |text| text.parse())?;
    let (count, bytes) = (usize::from(megabytes) * 2, 512 << 10);
    let gigabytes = f64::from(megabytes) * 1_048_576e-9;
    let (sender, receiver) = a.connect(&mut b)?;
    let place = if network.is_some() { "between namespaces" } else { "over the loopback" };
    for round in 0..3 {
        let begin = spent(&a, &b)?;
        b.begin(&format!("drain {receiver} {bytes} {count}"))?;
        a.ask(&format!("pump {sender} {bytes} {count}"))?;
        let plugin: f64 = b.finish()?.parse()?;
        let middle = spent(&a, &b)?;
        b.begin(&format!("tcp-drain {} {ip}", count * bytes))?;
        let address =
            b.process.await_line("an address", PATIENCE, |line| line.text.strip_prefix("at ").map(str::to_owned))?;
        a.ask(&format!("tcp-pump {address} {}", count * bytes))?;
        let plain: f64 = b.finish()?.parse()?;
        let end = spent(&a, &b)?;
        let of_each: Vec<f64> = middle.iter().zip(begin).map(|(after, before)| (after - before) / gigabytes).collect();
        let of_plain = end.iter().sum::<f64>() - middle.iter().sum::<f64>();
        println!(
            "round {round} {place}: net plugin {:.2} GB/s and {:.2} s of processors a GB (sender {:.2}, its sidecar {:.2}, the receiver's {:.2}, receiver {:.2}); plain socket {:.2} GB/s and {:.2} s a GB",
            gigabytes / plugin,
            of_each.iter().sum::<f64>(),
            of_each[0],
            of_each[1],
            of_each[2],
            of_each[3],
            gigabytes / plain,
            of_plain / gigabytes
        );
    }
    Ok(())
}

/// Around the sizes of parts and records, and more than a ring.
const SIZES: [usize; 12] = [0, 1, 15, 16, 17, 4_096, 65_520, 131_056, 131_057, 1 << 20, (2 << 20) - 1, (5 << 20) + 3];
/// Longer than a busy machine stops a process.
const PEER_TIMEOUT_MS: u64 = 60_000;
/// The peer timeout where a sidecar falls silent.
const SILENCE_MS: u64 = 10_000;
const RING_BYTES: u64 = 64 << 10;
const CAPTURED_BYTES: usize = 4 << 20;
/// `ncclSystemError`, `ncclRemoteError`.
const SYSTEM_ERROR: &str = "2";
const REMOTE_ERROR: &str = "6";
