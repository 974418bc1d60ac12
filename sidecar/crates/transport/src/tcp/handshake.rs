//! The TLS 1.3 handshake between two buffers, by rustls' unbuffered API.

use std::sync::Arc;

use bytes::BytesMut;
use rustls::client::UnbufferedClientConnection;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::{ClientConfig, CommonState, Error, ServerConfig};
use rustls_pki_types::{CertificateDer, ServerName};

use super::records::Records;
use super::socket_buffer::SocketBuffer;
use crate::tls;

/// One side of an unfinished handshake.
pub(super) enum Handshake {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// The result of a finished handshake.
pub(super) struct HandshakeResult {
    pub(super) records: Records,
    /// The peer's certificates, leaf first.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    pub(super) has_ronde_alpn: bool,
}

/// The buffers of a handshake.
pub(super) struct Buffers<'a> {
    /// Received bytes. Unconsumed ones must stay in place, because rustls may keep offsets into them.
    pub(super) incoming: &'a mut SocketBuffer,
    pub(super) outgoing: &'a mut SocketBuffer,
    /// Application data that was decrypted after the handshake.
    pub(super) plain: &'a mut BytesMut,
    pub(super) has_peer_finished: &'a mut bool,
}

impl Handshake {
    pub(super) fn client(config: Arc<ClientConfig>) -> Result<Self, Error> {
        let name = ServerName::try_from(tls::SERVER_NAME).expect("a good name");
        let mut config = Arc::unwrap_or_clone(config);
        config.enable_secret_extraction = true;
        UnbufferedClientConnection::new(Arc::new(config), name).map(|side| Self::Client(Box::new(side)))
    }

    pub(super) fn server(config: Arc<ServerConfig>) -> Result<Self, Error> {
        let mut config = Arc::unwrap_or_clone(config);
        config.enable_secret_extraction = true;
        UnbufferedServerConnection::new(Arc::new(config)).map(|side| Self::Server(Box::new(side)))
    }

    /// Advances as far as the received bytes allow. Returns whether the handshake is finished.
    pub(super) fn advance(&mut self, buffers: &mut Buffers<'_>) -> Result<bool, Error> {
        loop {
            match self.step(buffers)? {
                Step::Again => {}
                Step::Finished => *buffers.has_peer_finished = true,
                Step::Blocked => return Ok(false),
                Step::Ready => return Ok(!self.state().is_handshaking()),
            }
        }
    }

    /// Appends the alert for a failure to the outgoing bytes. Call this once: rustls hands out the alert, and would
    /// panic if another step processed the same invalid bytes.
    pub(super) fn alert(&mut self, buffers: &mut Buffers<'_>) {
        if let Err(other) = self.step(buffers) {
            tracing::debug!(%other, "a handshake ends without an alert");
        }
    }

    /// Takes the connection over from rustls, once its handshake is finished and sent.
    pub(super) fn into_result(self) -> Result<HandshakeResult, Error> {
        let state = self.state();
        let certificates = state
            .peer_certificates()
            .map(|chain| chain.iter().map(|der| der.clone().into_owned()).collect())
            .unwrap_or_default();
        let has_ronde_alpn = state.alpn_protocol() == Some(tls::ALPN);
        let records = match self {
            Self::Client(side) => Records::of_client(side.dangerous_into_kernel_connection()?)?,
            Self::Server(side) => Records::of_server(side.dangerous_into_kernel_connection()?)?,
        };
        Ok(HandshakeResult { records, certificates, has_ronde_alpn })
    }

    fn state(&self) -> &CommonState {
        match self {
            Self::Client(side) => side,
            Self::Server(side) => side,
        }
    }

    fn step(&mut self, buffers: &mut Buffers<'_>) -> Result<Step, Error> {
        let incoming = buffers.incoming.filled_mut();
        let (discard, step) = match self {
            Self::Client(side) => step(side.process_tls_records(incoming), buffers.outgoing, buffers.plain),
            Self::Server(side) => step(side.process_tls_records(incoming), buffers.outgoing, buffers.plain),
        };
        buffers.incoming.take(discard);
        step
    }
}

/// The outcome of one step of rustls.
enum Step {
    Again,
    /// More bytes of the peer are needed.
    Blocked,
    /// Nothing is left to do.
    Ready,
    /// The peer has sent `close_notify`.
    Finished,
}

/// Performs what rustls asks for. Returns how many received bytes were consumed, and the outcome.
fn step<D>(
    status: UnbufferedStatus<'_, '_, D>,
    outgoing: &mut SocketBuffer,
    plain: &mut BytesMut,
) -> (usize, Result<Step, Error>) {
    let mut discard = status.discard;
    let step = match status.state {
        Err(error) => Err(error),
        Ok(ConnectionState::ReadTraffic(mut traffic)) => loop {
            match traffic.next_record() {
                None => break Ok(Step::Again),
                Some(Ok(record)) => {
                    discard += record.discard;
                    plain.extend_from_slice(record.payload);
                }
                Some(Err(error)) => break Err(error),
            }
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => match outgoing.append_growing(|room| data.encode(room)) {
            Ok(()) => Ok(Step::Again),
            Err(error) => Err(Error::General(error.to_string())),
        },
        // The bytes are in the outgoing buffer already.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Step::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Blocked),
        Ok(ConnectionState::WriteTraffic(_) | ConnectionState::Closed) => Ok(Step::Ready),
        Ok(ConnectionState::PeerClosed) => Ok(Step::Finished),
        Ok(other) => Err(Error::General(format!("rustls is in an unexpected state: {other:?}"))),
    };
    (discard, step)
}
