//! The sockets of a port: UDP, TCP, or both.

use std::net::SocketAddr;
use std::sync::Arc;

use ronde_wire::SidecarIndex;
use ronde_wire::control::Carrier;

use super::PortError;
use super::connection::{ConnectError, Connection};
use crate::identity::Identity;
use crate::{quic, tcp, tls};

/// The endpoints of both carriers. The port's own carrier is always there; the other one only rejects peers whose
/// `transport` setting differs.
pub(super) struct Endpoints {
    pub(super) quic: Option<quic::Endpoint>,
    pub(super) tcp: Option<tcp::Endpoint>,
}

/// The server configurations that present one identity.
#[derive(Clone)]
pub(super) struct ServerConfigs {
    pub(super) quic: Option<Arc<quinn::ServerConfig>>,
    pub(super) tls: Arc<rustls::ServerConfig>,
}

impl Endpoints {
    /// Builds the server configurations for an identity.
    pub(super) fn servers(&self, identity: &Identity) -> Result<ServerConfigs, PortError> {
        let quic = self.quic.as_ref().map(|endpoint| endpoint.server_config(identity)).transpose()?;
        Ok(ServerConfigs { quic: quic.map(Arc::new), tls: Arc::new(tls::server_config(identity)?) })
    }

    /// Uses these configurations for new connections.
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

    /// Stops accepting connections.
    pub(super) fn stop_accepting(&self) {
        if let Some(endpoint) = &self.quic {
            endpoint.quinn.set_server_config(None);
        }
        if let Some(endpoint) = &self.tcp {
            endpoint.stop_accepting();
        }
    }

    /// Closes all connections immediately.
    pub(super) fn close(&self, reason: &str) {
        if let Some(endpoint) = &self.quic {
            endpoint.close(reason);
        }
        if let Some(endpoint) = &self.tcp {
            endpoint.close(reason);
        }
    }

    /// Waits until all connections are closed and their peers have received the reason.
    pub(super) async fn wait_idle(&self) {
        if let Some(endpoint) = &self.quic {
            endpoint.quinn.wait_idle().await;
        }
        if let Some(endpoint) = &self.tcp {
            endpoint.wait_idle().await;
        }
    }
}
