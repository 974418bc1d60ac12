//! Rejected peers, and the reason that each side receives.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use rcgen::ExtendedKeyUsagePurpose;
use ronde_transport::{DownReason, JobCa, NetworkPort, Port, Role, TrustDomain, Validity};
use ronde_wire::control::{Hello, Transport};
use ronde_wire::{JobName, SidecarIndex};

use crate::harness::raw::{self, ALPN, Credentials, RawCa, bad_certificates};
use crate::harness::{
    self, CONTROL, START_TIMEOUT, ca, control, down, frame, heartbeat, hour, identity, issue, job, local, options,
    until, up,
};

harness::over_both!(
    an_expired_dialler_is_refused_until_it_has_a_fresh_certificate,
    a_sidecar_of_another_authority_is_refused,
    a_dialler_refuses_an_acceptor_of_another_job,
    a_link_ends_when_a_certificate_expires,
);

/// A port of sidecar 0 that knows sidecar 1 at one address.
fn port(ca: &RawCa, peer: Option<SocketAddr>) -> NetworkPort {
    let peers = HashMap::from([(SidecarIndex(1), peer.into_iter().collect())]);
    let started =
        harness::bind(Transport::Quic).start(ca.identity(0), &local(0, CONTROL), peers, options(START_TIMEOUT));
    started.expect("a good identity")
}

/// Connects with these credentials and returns the port's close reason.
async fn rejected(to: SocketAddr, credentials: Option<Credentials>, protocol: &[u8]) -> String {
    let error = match raw::dial(to, credentials, protocol).await {
        // A TLS 1.3 client finishes its handshake before the server has checked its certificate.
        Ok(connection) => connection.closed().await,
        Err(error) => error,
    };
    raw::reason(&error)
}

#[tokio::test]
async fn a_dialler_with_a_bad_certificate_is_refused() {
    let ca = RawCa::new();
    let mut port = port(&ca, None);
    let server_only = ca.issue(1, |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]);
    let bad = bad_certificates(&ca).into_iter().chain([("extended key usage for", server_only)]);
    for (refused, (expected, credentials)) in (1..).zip(bad) {
        let reason = rejected(port.local_addr(), Some(credentials), ALPN).await;
        assert!(reason.contains(expected), "{reason:?} does not say {expected:?}");
        until(|| port.stats().refusals == refused).await;
    }
    // A valid peer is still accepted.
    let hello = local(1, CONTROL).hello(SidecarIndex(1));
    let link = raw::greet(port.local_addr(), ca.good(1), &hello).await;
    assert_eq!(Hello { transport: hello.transport, ..up(&mut port, 1).await }, hello);
    drop(link);
}

#[tokio::test]
async fn an_acceptor_with_a_bad_certificate_is_refused() {
    let ca = RawCa::new();
    let client_only = ca.issue(1, |p| p.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth]);
    let another = ca.good(2);
    let more = [("extended key usage for", client_only), ("sidecar/2's, expected spiffe://", another)];
    for (expected, credentials) in bad_certificates(&ca).into_iter().chain(more) {
        let server = raw::listen(credentials);
        let mut port = port(&ca, Some(server.local_addr().expect("bound")));
        port.open(SidecarIndex(1), Role::Dial);
        let there = async { server.accept().await.expect("a dial").await.expect_err("the port turns away") };
        let (there, here) = tokio::join!(there, down(&mut port, 1));
        let DownReason::Refused(here) = here else { panic!("{here:?} is no refusal") };
        assert!(here.starts_with("sidecar 1 is not accepted here: "), "{here}");
        assert!(here.contains(expected), "{here:?} does not say {expected:?}");
        assert!(here.contains(raw::reason(&there).trim_start_matches("other error: ")), "{there} is not {here}");
        assert_eq!(port.stats().refusals, 1);
    }
}

#[tokio::test]
async fn a_dialler_without_a_certificate_is_refused() {
    let port = port(&RawCa::new(), None);
    assert!(rejected(port.local_addr(), None, ALPN).await.contains("no certificates"));
    until(|| port.stats().refusals == 1).await;
}

#[tokio::test]
async fn an_unauthenticated_connection_does_not_end_the_wait_and_is_named_in_the_timeout() {
    let ca = RawCa::new();
    let peers = HashMap::from([(SidecarIndex(1), Vec::new())]);
    // On a busy machine, the refusal may come after a short timeout.
    for seconds in [3, 10, 30] {
        let (peers, brief) = (peers.clone(), options(Duration::from_secs(seconds)));
        let mut port =
            harness::bind(Transport::Quic).start(ca.identity(0), &local(0, CONTROL), peers, brief).expect("starts");
        port.open(SidecarIndex(1), Role::Await);
        rejected(port.local_addr(), Some(RawCa::new().good(1)), ALPN).await;
        let DownReason::Lost(text) = down(&mut port, 1).await else { panic!("an unknown peer ended the wait") };
        let begin = format!("sidecar 1 did not dial within {seconds} s");
        assert!(text.starts_with(&begin), "{text}");
        if text.starts_with(&format!("{begin}; the last link refused here: ")) {
            return assert!(text.ends_with("not signed by an authority of this job"), "{text}");
        }
    }
    panic!("the timeout never names the refusal");
}

#[tokio::test]
async fn another_protocol_is_refused() {
    let ca = RawCa::new();
    let port = port(&ca, None);
    rejected(port.local_addr(), Some(ca.good(1)), b"h3").await;
    until(|| port.stats().refusals == 1).await;
}

#[tokio::test]
async fn a_sidecar_that_is_no_peer_is_refused() {
    let ca = RawCa::new();
    let port = port(&ca, None);
    let reason = rejected(port.local_addr(), Some(ca.good(9)), ALPN).await;
    assert_eq!(reason, "sidecar 9 is not a peer of sidecar 0");
    until(|| port.stats().refusals == 1).await;
}

/// Two ports; the first, with this identity, dials the second.
async fn refused_dial(
    over: Transport,
    dialler: std::sync::Arc<ronde_transport::Identity>,
) -> (NetworkPort, NetworkPort, String) {
    let (one, two) = (harness::bind(over), harness::bind(over));
    let peers: HashMap<_, _> =
        [(SidecarIndex(0), vec![one.local_addr()]), (SidecarIndex(1), vec![two.local_addr()])].into();
    let mut one = one.start(dialler, &local(0, CONTROL), peers.clone(), options(START_TIMEOUT)).expect("starts");
    let two = two.start(identity(SidecarIndex(1)), &local(1, CONTROL), peers, options(START_TIMEOUT)).expect("starts");
    one.open(SidecarIndex(1), Role::Dial);
    let DownReason::Refused(reason) = down(&mut one, 1).await else { panic!("not refused") };
    until(|| (one.stats().refusals, two.stats().refusals) == (1, 1)).await;
    (one, two, reason)
}

async fn an_expired_dialler_is_refused_until_it_has_a_fresh_certificate(over: Transport) {
    let past = Validity {
        not_before: SystemTime::now() - Duration::from_secs(20),
        not_after: SystemTime::now() - Duration::from_secs(10),
    };
    let (mut one, mut two, reason) = refused_dial(over, issue(ca(), SidecarIndex(0), past, ca())).await;
    assert!(reason.starts_with("sidecar 1 does not accept this side: "), "{reason}");
    // TLS sends no text: over TCP the reason is in the peer's log.
    assert!(
        reason.contains(if over == Transport::Quic { "certificate expired" } else { "its log says why" }),
        "{reason}"
    );
    assert!(one.install_identity(identity(SidecarIndex(5))).is_err(), "another sidecar's identity is installed");
    one.install_identity(identity(SidecarIndex(0))).expect("the same sidecar's");
    one.open(SidecarIndex(1), Role::Dial);
    up(&mut one, 1).await;
    up(&mut two, 0).await;
    one.send(SidecarIndex(1), control(1)).expect("there is a link");
    assert_eq!(frame(&mut two, 0).await, heartbeat(1));
}

async fn a_sidecar_of_another_authority_is_refused(over: Transport) {
    let other = JobCa::generate(job(), harness::trust_domain(), hour()).expect("an authority");
    // The dialler trusts the job's authority, so only the acceptor can refuse.
    let (_, _, reason) = refused_dial(over, issue(&other, SidecarIndex(0), hour(), ca())).await;
    assert!(reason.contains("does not accept this side: "), "{reason}");
    let quic = "the certificate is not signed by an authority of this job";
    assert!(reason.ends_with(if over == Transport::Quic { quic } else { "its log says why" }), "{reason}");
}

async fn a_dialler_refuses_an_acceptor_of_another_job(over: Transport) {
    let day_run = JobName::new("day-run").expect("a good name");
    let other = JobCa::generate(day_run, TrustDomain::new("test.example").expect("a good name"), hour());
    let other = other.expect("an authority");
    let identity = issue(&other, SidecarIndex(0), hour(), ca());
    let (_, _, reason) = refused_dial(over, identity).await;
    assert!(reason.contains("is not accepted here") && reason.contains("expected spiffe://test.example/job/day-run"));
}

async fn a_link_ends_when_a_certificate_expires(over: Transport) {
    // Longer than a busy machine takes to open the link.
    let soon = Validity::starting(SystemTime::now(), Duration::from_secs(15));
    let (one, two) = (harness::bind(over), harness::bind(over));
    let peers: HashMap<_, _> =
        [(SidecarIndex(0), vec![one.local_addr()]), (SidecarIndex(1), vec![two.local_addr()])].into();
    let brief = issue(ca(), SidecarIndex(0), soon, ca());
    let mut one = one.start(brief, &local(0, CONTROL), peers.clone(), options(START_TIMEOUT)).expect("starts");
    let lasting = identity(SidecarIndex(1));
    let mut two = two.start(lasting, &local(1, CONTROL), peers, options(START_TIMEOUT)).expect("starts");
    one.open(SidecarIndex(1), Role::Dial);
    up(&mut one, 1).await;
    up(&mut two, 0).await;
    let (one, two) = tokio::join!(down(&mut one, 1), down(&mut two, 0));
    for reason in [one, two] {
        assert!(matches!(&reason, DownReason::Expired(text) if text.contains("was valid until")), "{reason:?}");
    }
}
