//! The handshake of TLS 1.3 between two buffers, by rustls through its unbuffered interface.

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

/// One side of a handshake that is not over.
pub(super) enum Handshake {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

/// What a handshake has agreed on.
pub(super) struct HandshakeResult {
    pub(super) records: Records,
    /// The peer's, leaf first.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    pub(super) has_ronde_alpn: bool,
}

/// The buffers that a handshake works on.
pub(super) struct Buffers<'a> {
    /// What arrived. What is not done with stays there: rustls may hold places within it.
    pub(super) incoming: &'a mut SocketBuffer,
    pub(super) outgoing: &'a mut SocketBuffer,
    /// Opened behind the handshake.
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

    /// Goes as far as what has arrived allows; whether it is over.
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

    /// Puts the alert that tells the peer of a failure behind what is to be written. Once: it hands out the alert, and the
    /// next step would look at the same bad bytes again, for which rustls, having sent its alert, panics.
    pub(super) fn alert(&mut self, buffers: &mut Buffers<'_>) {
        if let Err(other) = self.step(buffers) {
            tracing::debug!(%other, "a handshake ends without an alert");
        }
    }

    /// Takes the connection over from rustls when its handshake is over and written out.
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

/// What one step of rustls was.
enum Step {
    Again,
    /// More bytes of the peer are needed.
    Blocked,
    /// Nothing is left to do.
    Ready,
    /// The peer has ended its direction.
    Finished,
}

/// Does what rustls asks for. How many bytes of the peer are done with comes first.
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
        // It is in the buffer, in front of everything that follows.
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done();
            Ok(Step::Again)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(Step::Blocked),
        Ok(ConnectionState::WriteTraffic(_) | ConnectionState::Closed) => Ok(Step::Ready),
        Ok(ConnectionState::PeerClosed) => Ok(Step::Finished),
        Ok(other) => Err(Error::General(format!("TLS is in a state that was not asked for: {other:?}"))),
    };
    (discard, step)
}
