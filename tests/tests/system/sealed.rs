//! Traffic between hosts is encrypted, and only sidecars of the job take part.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ronde_tests::cluster::{Authority, Capture, Captured, Network, PATIENCE, Plan, Sidecar, SidecarOptions};
use ronde_tests::script::{Fill, MARKER, Wanted, digest};
use ronde_wire::control::Transport;
use ronde_wire::{Collective, DType, ReduceOp};
use serde_json::Value;

use crate::WORKER;

const TENSOR_BYTES: usize = 8 << 20;
const TENSOR_NAME: &str = "a-name-that-nobody-else-may-read";

#[test]
fn no_tensor_data_is_readable_on_the_network() -> Result<()> {
    if Network::is_left_out("no_tensor_data_is_readable_on_the_network") {
        return Ok(());
    }
    let network = Network::up(2)?;
    let directory = tempfile::tempdir()?;
    for transport in [Transport::Auto, Transport::Quic, Transport::Tls] {
        let (captured, tokens) = all_reduce_of_markers(&network, transport, directory.path())?;
        let (udp, tcp) = captured.payload_bytes();
        println!("{transport}: {udp} bytes over UDP and {tcp} over TCP in {} packets", captured.frames.len());
        // Two members of an all-reduce send the tensor's size each, whatever the algorithm.
        let data = if transport == Transport::Quic { udp } else { tcp };
        ensure!(
            data >= 2 * TENSOR_BYTES as u64,
            "{transport}: {data} bytes were captured: the tensors went another way"
        );
        match transport {
            Transport::Auto => ensure!(udp > 0, "auto: control messages do not go over QUIC"),
            Transport::Quic => ensure!(tcp == 0, "quic: {tcp} bytes went over TCP"),
            Transport::Tls => ensure!(udp == 0, "tls: {udp} bytes went over UDP"),
        }
        ensure!(captured.places_of(MARKER) == 0, "{transport}: the tensor can be read");
        ensure!(captured.places_of(TENSOR_NAME.as_bytes()) == 0, "{transport}: the tensor's name can be read");
        for token in tokens {
            ensure!(captured.places_of(&token) == 0, "{transport}: a rank's token can be read");
        }
    }
    // The same detector finds the same bytes when they are not encrypted.
    let captured = plain_tcp(&network, directory.path())?;
    let places = captured.places_of(MARKER);
    println!("control run over plain TCP: the pattern is found in {places} places");
    ensure!(places > TENSOR_BYTES / 2, "the detector finds the pattern in {places} places only");
    Ok(())
}

/// The maximum of equal contributions: contributions, partial results and the result all consist of the marker.
fn all_reduce_of_markers(
    network: &Network,
    transport: Transport,
    directory: &Path,
) -> Result<(Captured, Vec<Vec<u8>>)> {
    let mut cluster = Plan::of(&[0, 1]).transport(transport).on(network).sidecars(WORKER)?;
    // Start before the workers connect: the first links are observed, too.
    let capture = Capture::start(network, 0, directory)?;
    for rank in 0..2 {
        let worker = cluster.new_worker(rank)?;
        cluster.workers.push(worker);
    }
    let mut pending = Vec::new();
    for worker in &mut cluster.workers {
        worker.await_connected()?;
        pending.push(worker.submit(Wanted {
            name: Some(TENSOR_NAME.to_owned()),
            collective: Collective::AllReduce { op: ReduceOp::Max },
            dtype: DType::U8,
            shape: vec![TENSOR_BYTES as u64],
            fill: Fill::Marker,
        })?);
    }
    for (worker, id) in cluster.workers.iter_mut().zip(pending) {
        ensure!(worker.digest(id, PATIENCE)? == digest(&Fill::Marker.bytes(0, TENSOR_BYTES)), "the result is wrong");
    }
    let tokens = (0..2).map(|rank| Ok(std::fs::read(cluster.sidecar_of(rank).token_file(rank)?)?));
    Ok((capture.finish()?, tokens.collect::<Result<_>>()?))
}

fn plain_tcp(network: &Network, directory: &Path) -> Result<Captured> {
    let capture = Capture::start(network, 0, directory)?;
    let (bound, address) = mpsc::sync_channel(1);
    let at = format!("{}:0", network.address(1));
    let receiver = network.run_on(1, move || {
        let listener = TcpListener::bind(at)?;
        bound.send(listener.local_addr()?)?;
        let mut received = Vec::new();
        listener.accept()?.0.read_to_end(&mut received)?;
        Ok(received.len())
    });
    let address = address.recv_timeout(PATIENCE).context("waited for a listener on host 1")?;
    let sender = network.run_on(0, move || {
        TcpStream::connect_timeout(&address, PATIENCE)?.write_all(&Fill::Marker.bytes(0, TENSOR_BYTES))?;
        Ok(())
    });
    sender.join().expect("the sender does not panic")?;
    ensure!(receiver.join().expect("the receiver does not panic")? == TENSOR_BYTES, "not all was received");
    capture.finish()
}

/// Two sidecars that know of each other, one of which is not what the other expects.
struct Pair {
    authority: Authority,
    good: Sidecar,
    bad: Sidecar,
    _directory: tempfile::TempDir,
}

impl Pair {
    /// `good` is a sidecar of the job "test"; `bad` has any job and index.
    fn start(start_timeout_ms: u64, good: u32, bad_job: &str, bad: u32) -> Result<Self> {
        Self::start_over([Transport::Auto; 2], start_timeout_ms, good, bad_job, bad)
    }

    /// The same with the transport setting of each.
    fn start_over(over: [Transport; 2], start_timeout_ms: u64, good: u32, bad_job: &str, bad: u32) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let options = |job: &str, index, transport| SidecarOptions {
            job: job.to_owned(),
            index,
            address: "127.0.0.1".to_owned(),
            runtime_dir: directory.path().to_owned(),
            peer_timeout_ms: None,
            start_timeout_ms,
            arena_bytes_max: None,
            fusion_threshold_bytes: None,
            autotune: serde_json::Value::Null,
            chunk_bytes: None,
            eager_bytes: None,
            run_ahead: None,
            cache_capacity: None,
            hierarchical_allreduce: None,
            thread_affinity: Vec::new(),
            stall_warning_ms: None,
            stall_shutdown_ms: None,
            web: serde_json::Value::Null,
            otlp: serde_json::Value::Null,
            control_fan_out: None,
            transport,
            plugins: serde_json::json!({}),
            log: "info".to_owned(),
            elastic: false,
            namespace: None,
        };
        let (good, bad) =
            (Sidecar::start(&options("test", good, over[0]))?, Sidecar::start(&options(bad_job, bad, over[1]))?);
        Ok(Self { authority: Authority::new("test")?, good, bad, _directory: directory })
    }

    /// Sends both the join message: the good one a valid one, the bad one this certificate and index.
    fn join(&mut self, certificate: &str, ca: &str, placements: [&[u32]; 2]) -> Result<()> {
        let Self { authority, good, bad, .. } = self;
        let known_as = |sidecar: &Sidecar, index: u32| {
            let mut peer = sidecar.as_peer();
            peer["sidecar"] = index.into();
            peer
        };
        let other = |placement: &[u32], own: u32| placement.iter().copied().find(|index| *index != own).unwrap_or(own);
        let of_good: Vec<Value> = vec![good.as_peer(), known_as(bad, other(placements[0], good.index))];
        let of_bad: Vec<Value> = vec![bad.as_peer(), known_as(good, other(placements[1], bad.index))];
        let own = authority.issue(good.certificate_request()?, good.index)?;
        good.join(&own, ca, &of_good, placements[0])?;
        bad.join(certificate, ca, &of_bad, placements[1])
    }
}

/// Checks that both of a pair end, and that the good one's reason has these words. `pair` starts one with a start timeout
/// in milliseconds. Where a busy machine lets that pass before anything was refused, another pair gets a longer one.
fn refused(words: &[&str], pair: impl Fn(u64) -> Result<Pair>) -> Result<()> {
    let mut timeouts_ms = START_TIMEOUTS_MS.into_iter().peekable();
    while let Some(start_timeout_ms) = timeouts_ms.next() {
        let mut pair = pair(start_timeout_ms)?;
        let within = Duration::from_millis(start_timeout_ms) + PATIENCE;
        let reason = pair.good.await_fatal(within)?;
        println!("the good one reports: {reason}");
        if !words.iter().all(|word| reason.contains(word)) {
            ensure!(timeouts_ms.peek().is_some() && has_refused_nothing(&reason), "{reason:?} lacks {words:?}");
            continue;
        }
        let reason = pair.bad.await_fatal(within)?;
        println!("the bad one reports:  {reason}");
        ensure!(!pair.good.process.await_exit(PATIENCE)?.success(), "a sidecar without its peers ends well");
        return Ok(());
    }
    unreachable!("the last pair is checked")
}

/// Whether a sidecar ended because the start timeout passed before a link was refused.
fn has_refused_nothing(reason: &str) -> bool {
    let attempts = ["no attempt was finished", "no answer", "os error"];
    (reason.contains("did not dial within") && !reason.contains("the last link refused here"))
        || (reason.contains("did not answer within") && attempts.iter().any(|text| reason.contains(text)))
}

const START_TIMEOUTS_MS: [u64; 3] = [2_000, 8_000, 30_000];

#[test]
fn a_sidecar_of_another_authority_is_refused() -> Result<()> {
    refused(&["sidecar 1", "not signed by an authority of this job"], |start_timeout_ms| {
        let mut pair = Pair::start(start_timeout_ms, 0, "test", 1)?;
        let foreign = Authority::new("test")?;
        let certificate = foreign.issue(pair.bad.certificate_request()?, 1)?;
        let ca = pair.authority.certificate().to_owned();
        pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
        Ok(pair)
    })
}

#[test]
fn a_sidecar_of_another_job_is_refused() -> Result<()> {
    // The side that dials checks the other's certificate first, and reports why it rejects it.
    refused(&["sidecar 1", "job/test/sidecar/0's", "expected", "job/other/sidecar/0"], |start_timeout_ms| {
        let mut pair = Pair::start(start_timeout_ms, 0, "other", 1)?;
        // Both authorities are known to both, so only the job's name differs.
        let other = Authority::new("other")?;
        let certificate = other.issue(pair.bad.certificate_request()?, 1)?;
        let ca = format!("{}{}", pair.authority.certificate(), other.certificate());
        pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
        Ok(pair)
    })
}

#[test]
fn a_sidecar_of_another_index_that_dials_is_refused() -> Result<()> {
    refused(&["sidecar 2 is not a peer of sidecar 0"], |start_timeout_ms| {
        let mut pair = Pair::start(start_timeout_ms, 0, "test", 2)?;
        let certificate = pair.authority.issue(pair.bad.certificate_request()?, 2)?;
        let ca = pair.authority.certificate().to_owned();
        pair.join(&certificate, &ca, [&[0, 1], &[0, 2]])?;
        Ok(pair)
    })
}

#[test]
fn a_sidecar_of_another_index_that_is_dialled_is_refused() -> Result<()> {
    refused(&["sidecar 0", "sidecar/2", "expected", "sidecar/0"], |start_timeout_ms| {
        let mut pair = Pair::start(start_timeout_ms, 1, "test", 2)?;
        let certificate = pair.authority.issue(pair.bad.certificate_request()?, 2)?;
        let ca = pair.authority.certificate().to_owned();
        // The good one expects sidecar 0, the coordinator, where sidecar 2 is.
        pair.join(&certificate, &ca, [&[0, 1], &[2, 1]])?;
        Ok(pair)
    })
}

#[test]
fn sidecars_of_different_transports_end_with_an_error_that_names_both_settings() -> Result<()> {
    use Transport::{Auto, Quic, Tls};
    for over in [[Auto, Quic], [Quic, Tls], [Tls, Auto]] {
        let settings = over.map(|transport| format!("transport = {transport}"));
        refused(
            &["sidecar 1", &settings[0], &settings[1], "give all sidecars of the job the same"],
            |start_timeout_ms| {
                let mut pair = Pair::start_over(over, start_timeout_ms, 0, "test", 1)?;
                let certificate = pair.authority.issue(pair.bad.certificate_request()?, 1)?;
                let ca = pair.authority.certificate().to_owned();
                pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
                Ok(pair)
            },
        )?;
    }
    Ok(())
}

#[test]
fn an_expired_certificate_is_refused_over_tls_whichever_side_dials() -> Result<()> {
    // The good one dials and checks the certificate first; then it is dialled, and checks it last.
    for (good, bad) in [(0, 1), (1, 0)] {
        refused(&["expired at 20", "correct that clock"], |start_timeout_ms| {
            let mut pair = Pair::start_over([Transport::Tls; 2], start_timeout_ms, good, "test", bad)?;
            let certificate = pair.authority.issue_expired(pair.bad.certificate_request()?, bad)?;
            let ca = pair.authority.certificate().to_owned();
            pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
            Ok(pair)
        })?;
    }
    Ok(())
}

#[test]
fn an_expired_certificate_is_refused() -> Result<()> {
    refused(&["sidecar 1", "expired at 20", "correct that clock"], |start_timeout_ms| {
        let mut pair = Pair::start(start_timeout_ms, 0, "test", 1)?;
        let certificate = pair.authority.issue_expired(pair.bad.certificate_request()?, 1)?;
        let ca = pair.authority.certificate().to_owned();
        pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
        Ok(pair)
    })
}

#[test]
fn a_certificate_that_is_not_valid_yet_is_refused_with_a_word_on_clocks() -> Result<()> {
    refused(&["sidecar 1", "not valid before 20", "compare the clocks of the hosts"], |start_timeout_ms| {
        let mut pair = Pair::start(start_timeout_ms, 0, "test", 1)?;
        let certificate = pair.authority.issue_early(pair.bad.certificate_request()?, 1)?;
        let ca = pair.authority.certificate().to_owned();
        pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
        Ok(pair)
    })
}

#[test]
fn a_sidecar_does_not_take_a_certificate_of_another_index_for_its_own() -> Result<()> {
    let mut pair = Pair::start(START_TIMEOUTS_MS[2], 0, "test", 1)?;
    let certificate = pair.authority.issue(pair.bad.certificate_request()?, 2)?;
    let ca = pair.authority.certificate().to_owned();
    pair.join(&certificate, &ca, [&[0, 1], &[0, 1]])?;
    let reason = pair.bad.await_fatal(PATIENCE)?;
    println!("{reason}");
    ensure!(reason.contains("sidecar/2") && reason.contains("sidecar/1"), "{reason}");
    Ok(())
}
