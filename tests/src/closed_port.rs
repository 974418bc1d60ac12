//! [`ClosedPort`]: a TCP port at which nothing listens.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, Result};
use socket2::{Domain, Socket, Type};

/// A TCP port of the loopback at which nothing listens: connections are refused. A bound socket holds it. The kernel may give
/// a port that was only closed to the next process that binds one.
#[derive(Debug)]
pub struct ClosedPort {
    address: SocketAddr,
    _bound: Socket,
}

impl ClosedPort {
    /// Binds a port.
    ///
    /// # Errors
    /// When there is no free one.
    pub fn bind() -> Result<Self> {
        let bound = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        bound.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let address = bound.local_addr()?.as_socket().context("an address of the loopback")?;
        Ok(Self { address, _bound: bound })
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}
