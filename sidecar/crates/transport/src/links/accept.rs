//! Incoming connections, up to the hello.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use quinn::Incoming;
use ronde_wire::control::{self, Hello, Refusal};
use ronde_wire::{FrameKind, SidecarIndex};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::auth::LinkAuth;
use super::close::{CloseCode, CloseReason};
use super::connection::{Connection, ReadStop, RecvHalf, SendHalf};
use super::endpoints::ServerConfigs;
use super::handshakes::{Evicted, HandshakePermit, Handshakes};
use super::link::{self, LinkStream};
use super::state::Shared;
use crate::hello;
use crate::port::DownReason;
use crate::{quic, tcp};

/// Accepts connections over both carriers until the port is closed. Ignores connections to local addresses that are not
/// in `own`, unless `own` is empty.
pub(super) async fn accept_all(shared: Arc<Shared>, own: Vec<IpAddr>) {
    let handshakes = Handshakes::new("peers", HANDSHAKES_MAX, SILENT);
    tokio::join!(accept_quic(&shared, &own, &handshakes), accept_tcp(&shared, &own, &handshakes));
}

async fn accept_quic(shared: &Arc<Shared>, own: &[IpAddr], handshakes: &Handshakes) {
    let Some(endpoint) = shared.endpoints.quic.as_ref().map(|endpoint| &endpoint.quinn) else { return };
    let port = endpoint.local_addr().map_or(0, |address| address.port());
    while let Some(incoming) = endpoint.accept().await {
        let to = incoming.local_ip().map(|address| address.to_canonical());
        let from = incoming.remote_address();
        if !is_served_address(own, to, from) {
            incoming.ignore();
            continue;
        }
        // A connection to this same port: the peer's address also exists on this host.
        if from.port() == port && Some(from.ip().to_canonical()) == to {
            incoming.refuse();
            continue;
        }
        // Under load, requires senders to validate their address by a retry packet, so that spoofed ones cost no
        // handshake, and replace none.
        if handshakes.are_many() && incoming.may_retry() {
            if let Err(error) = incoming.retry() {
                error.into_incoming().ignore();
            }
            continue;
        }
        let Some(permit) = handshakes.admit(from.ip()) else {
            incoming.refuse();
            continue;
        };
        tokio::spawn(accept_one(shared.clone(), IncomingConnection::Quic(Box::new(incoming)), from, permit));
    }
}

async fn accept_tcp(shared: &Arc<Shared>, own: &[IpAddr], handshakes: &Handshakes) {
    let Some(endpoint) = &shared.endpoints.tcp else { return };
    while let Some(stream) = endpoint.accept().await {
        // A connection that was closed already has no peer address.
        let Ok(from) = stream.peer_addr() else { continue };
        if !is_served_address(own, tcp::local_ip(&stream), from) {
            continue;
        }
        let Some(permit) = handshakes.admit(from.ip()) else { continue };
        tokio::spawn(accept_one(shared.clone(), IncomingConnection::Tcp(stream), from, permit));
    }
}

/// A connection that arrived at one of the port's sockets.
enum IncomingConnection {
    Quic(Box<Incoming>),
    Tcp(TcpStream),
}

impl IncomingConnection {
    async fn authenticate(self, shared: &Shared, servers: ServerConfigs) -> Result<Connection, CloseReason> {
        match (self, servers.quic, &shared.endpoints.tcp) {
            (Self::Quic(incoming), Some(server), _) => {
                let accepting = incoming.accept_with(server).map_err(|error| quic::close_reason(&error))?;
                accepting.await.map(Connection::Quic).map_err(|error| quic::close_reason(&error))
            }
            (Self::Tcp(stream), _, Some(endpoint)) => {
                endpoint.accept_handshake(stream, servers.tls).await.map(Connection::Tcp)
            }
            (Self::Quic(_) | Self::Tcp(_), ..) => unreachable!("it arrived at one of the endpoints"),
        }
    }
}

fn is_served_address(own: &[IpAddr], to: Option<IpAddr>, from: SocketAddr) -> bool {
    let is_served_address = own.is_empty() || to.is_none_or(|to| own.contains(&to));
    if !is_served_address {
        tracing::debug!(%from, ?to, "a connection to a local address that this port does not serve was ignored");
    }
    is_served_address
}

/// Reports `Down` for a link whose peer has not dialled before the start timeout.
pub(super) async fn accept_timeout(shared: Arc<Shared>, peer: SidecarIndex, generation: u64) {
    let start_timeout = shared.options.start_timeout;
    sleep(start_timeout).await;
    let refused = shared.last_refusal().map(|text| format!("; the last link refused here: {text}"));
    let text = format!(
        "{peer} did not dial within {} s{}",
        start_timeout.as_secs_f32(),
        refused.as_deref().unwrap_or_default()
    );
    shared.report_down(peer, generation, DownReason::Lost(text));
}

async fn accept_one(
    shared: Arc<Shared>,
    incoming_connection: IncomingConnection,
    from: SocketAddr,
    permit: (HandshakePermit, Evicted),
) {
    let Some(outcome) = handshake(&shared, incoming_connection, permit).await else {
        return tracing::debug!(%from, "a connection sent no hello in time, or had to give way to another one");
    };
    let (stream, hello) = match outcome {
        Ok(HelloOutcome::NewLink(stream, hello)) => (*stream, hello),
        Ok(HelloOutcome::Replacement) => return,
        Err(Rejected::Lost(reason)) => {
            match reason.refusal() {
                Some(text) => shared.record_refusal(from, text),
                None => tracing::debug!(%from, ?reason, "a connection ended before its hello"),
            }
            return;
        }
        Err(Rejected::Violation { connection, code, text }) => {
            shared.record_refusal(from, &text);
            return connection.close(code, &text);
        }
        Err(Rejected::Refused { connection, peer, send, text }) => {
            shared.record_refusal(from, &text);
            shared.refuse_opening(peer, &text);
            return refuse(&connection, send, text).await;
        }
    };
    answer_and_run(shared, stream, hello).await;
}

/// Brings up the link and answers, in this order: once the peer has read the answer it sends, and what it sends over a
/// connection that this side gives up would be lost. Without an answer it dials again.
async fn answer_and_run(shared: Arc<Shared>, mut stream: LinkStream, hello: Hello) {
    let Some(installed) = shared.bring_up_accepted(&stream, hello) else {
        let reason = "another connection is kept, or another membership began";
        return stream.connection.close(CloseCode::Duplicate, reason);
    };
    let answer = Hello { replaces: false, ..shared.hello() };
    if !matches!(timeout(HELLO_TIMEOUT, link::write_hello(&mut stream.send, &answer)).await, Ok(Ok(_))) {
        let within = HELLO_TIMEOUT.as_secs();
        let reason = DownReason::Lost(format!("the answer to the peer's hello was not sent within {within} s"));
        shared.report_down(stream.peer, installed.generation, reason);
        return stream.connection.close(CloseCode::Closed, "the answer to the hello was not sent");
    }
    link::run(shared, stream, installed).await;
}

/// Receives the hello within the time for it; `None` when that is over, or when the handshake has to give way to another
/// one.
async fn handshake(
    shared: &Shared,
    incoming_connection: IncomingConnection,
    (permit, evicted): (HandshakePermit, Evicted),
) -> Option<Result<HelloOutcome, Rejected>> {
    tokio::select! {
        outcome = timeout(HELLO_TIMEOUT, receive_hello(shared, incoming_connection, &permit)) => outcome.ok(),
        // Dropping the connection closes it; a peer that dialled tries again.
        _ = evicted => None,
    }
}

/// What an accepted hello leads to.
enum HelloOutcome {
    NewLink(Box<LinkStream>, Hello),
    /// The peer's existing link stores the connection.
    Replacement,
}

/// Why a connection gets no link.
enum Rejected {
    /// It was closed, or TLS rejected it.
    Lost(CloseReason),
    /// It violates the protocol and is closed with a reason.
    Violation { connection: Connection, code: CloseCode, text: String },
    /// The peer is authenticated, but its hello is not acceptable.
    Refused { connection: Connection, peer: SidecarIndex, send: SendHalf, text: String },
}

async fn receive_hello(
    shared: &Shared,
    incoming_connection: IncomingConnection,
    permit: &HandshakePermit,
) -> Result<HelloOutcome, Rejected> {
    let (identity, servers) = shared.accepting();
    let connection = incoming_connection.authenticate(shared, servers).await.map_err(Rejected::Lost)?;
    permit.mark_authenticated();
    let violation = |code, text| Rejected::Violation { connection: connection.clone(), code, text };
    let auth = LinkAuth::of(&connection, identity).map_err(|error| violation(CloseCode::Refused, error.to_string()))?;
    let peer = auth.peer.id.sidecar;
    if shared.addresses(peer).is_none() {
        return Err(violation(CloseCode::Refused, format!("{peer} is not a peer of {}", shared.hello.sidecar)));
    }
    let (mut send, mut recv) = connection.accept().await.map_err(Rejected::Lost)?;
    let hello = read_hello(&mut recv).await.map_err(|stop| match stop {
        ReadStop::Lost(reason) => Rejected::Lost(reason),
        ReadStop::Finished => violation(CloseCode::Protocol, "the stream ended without a hello".to_owned()),
        ReadStop::Violation(text) => violation(CloseCode::Protocol, text),
    })?;
    let link = shared.accepted_link(peer);
    if let Some(text) = hello::refusal(&shared.hello(), &hello, peer, shared.known_incarnation(peer), link.is_some()) {
        return Err(Rejected::Refused { connection, peer, send, text });
    }
    if connection.carrier() != shared.carrier() {
        let text = format!("this port takes links over {}, not over {}", shared.carrier(), connection.carrier());
        return Err(Rejected::Refused { connection, peer, send, text });
    }
    if hello.replaces && link.as_ref().is_some_and(|link| !link.accepts_offers()) {
        let text = "the connection is being replaced already; try again later".to_owned();
        return Err(Rejected::Refused { connection, peer, send, text });
    }
    let Some(link) = link.filter(|_| hello.replaces) else {
        return Ok(HelloOutcome::NewLink(Box::new(LinkStream { connection, send, recv, peer, auth }), hello));
    };
    if link::write_hello(&mut send, &Hello { replaces: true, ..shared.hello() }).await.is_err() {
        return Err(Rejected::Lost(connection.closed().await));
    }
    // Another replacement may have arrived while the answer was written.
    if !link.accepts_offers() {
        return Err(violation(CloseCode::Refused, "the connection is being replaced already".to_owned()));
    }
    link.offer(LinkStream { connection, send, recv, peer, auth });
    Ok(HelloOutcome::Replacement)
}

async fn read_hello(recv: &mut RecvHalf) -> Result<Hello, ReadStop> {
    let frame = link::read_frame(recv, link::check_first_header).await?;
    if frame.header.kind != FrameKind::Hello {
        return Err(ReadStop::Violation(format!("the first frame is {:?}, not a hello", frame.header.kind)));
    }
    control::decode(FrameKind::Hello, &frame.payload).map_err(|error| ReadStop::Violation(error.to_string()))
}

/// Sends the refusal, and closes the connection after the peer has had a moment to read it.
async fn refuse(connection: &Connection, mut send: SendHalf, text: String) {
    let payload = control::encode(&Refusal { reason: text.clone() });
    if link::write_first(&mut send, FrameKind::Refusal, payload).await.is_ok() {
        send.finish_refusal();
        // The peer closes when it has read the refusal; otherwise the timeout expires.
        let _ = timeout(REFUSAL_TIMEOUT, connection.closed()).await;
    }
    connection.close(CloseCode::Refused, &text);
}

/// Limit for simultaneous handshakes.
const HANDSHAKES_MAX: usize = 256;
/// How long a handshake may take before a new connection may replace it. On a path of 200 ms it takes about 600 ms.
const SILENT: Duration = Duration::from_secs(1);
/// Limit for the time from the first packet to the hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(1);
