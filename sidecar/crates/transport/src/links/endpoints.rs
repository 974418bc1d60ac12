//! What a port listens with and dials from: a UDP socket, a TCP listener, or both.

use std::net::SocketAddr;
use std::sync::Arc;

use ronde_wire::SidecarIndex;
use ronde_wire::control::Carrier;

use super::PortError;
use super::connection::{ConnectError, Connection};
use crate::identity::Identity;
use crate::{quic, tcp, tls};

/// At least one is there: that of the port's own carrier. The other one, where there is one, only tells peers of another
/// setting what is wrong.
pub(super) struct Endpoints {
    pub(super) quic: Option<quic::Endpoint>,
    pub(super) tcp: Option<tcp::Endpoint>,
}

/// What accepts connections in the name of one identity.
#[derive(Clone)]
pub(super) struct ServerConfigs {
    pub(super) quic: Option<Arc<quinn::ServerConfig>>,
    pub(super) tls: Arc<rustls::ServerConfig>,
}

impl Endpoints {
    /// Makes what accepts connections in the name of an identity.
    pub(super) fn servers(&self, identity: &Identity) -> Result<ServerConfigs, PortError> {
        let quic = self.quic.as_ref().map(|endpoint| endpoint.server_config(identity)).transpose()?;
        Ok(ServerConfigs { quic: quic.map(Arc::new), tls: Arc::new(tls::server_config(identity)?) })
    }

    /// Accepts with these from now on.
    pub(super) fn install(&self, servers: &ServerConfigs) {
        if let (Some(endpoint), Some(server)) = (&self.quic, &servers.quic) {
            endpoint.quinn.set_server_config(Some(server.as_ref().clone()));
        }
    }

    /// Dials a peer.
    pub(super) async fn connect(
        &self,
        carrier: Carrier,
        identity: &Identity,
        peer: SidecarIndex,
        address: SocketAddr,
    ) -> Result<Connection, ConnectError> {
        match (carrier, &self.quic, &self.tcp) {
            (Carrier::Quic, Some(endpoint), _) => endpoint.connect(identity, peer, address).await.map(Connection::Quic),
            (Carrier::Tls, _, Some(endpoint)) => endpoint.connect(identity, peer, address).await.map(Connection::Tcp),
            (carrier, ..) => Err(ConnectError::Local(format!("this port has no socket for {carrier}"))),
        }
    }

    /// Takes no more connections.
    pub(super) fn stop_accepting(&self) {
        if let Some(endpoint) = &self.quic {
            endpoint.quinn.set_server_config(None);
        }
        if let Some(endpoint) = &self.tcp {
            endpoint.stop_accepting();
        }
    }

    /// Ends all connections at once.
    pub(super) fn close(&self, reason: &str) {
        if let Some(endpoint) = &self.quic {
            endpoint.close(reason);
        }
        if let Some(endpoint) = &self.tcp {
            endpoint.close(reason);
        }
    }

    /// Waits until the peers of all connections have heard of their end.
    pub(super) async fn wait_idle(&self) {
        if let Some(endpoint) = &self.quic {
            endpoint.quinn.wait_idle().await;
        }
        if let Some(endpoint) = &self.tcp {
            endpoint.wait_idle().await;
        }
    }
}
