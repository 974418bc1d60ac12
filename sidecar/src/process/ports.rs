//! The ports of a sidecar: one for control messages and one for each lane.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, anyhow};
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::messages::FromSidecar;
use ronde_bootstrap::ports::PortRange;
use ronde_transport::{BoundPort, KeyRequest, NetworkPort, PortError, Routes, SocketOptions};
use ronde_wire::Lane;
use ronde_wire::control::Purpose;

use crate::process::settings::Settings;

/// The sockets of a sidecar, bound before its identity is known.
pub(crate) struct Ports {
    /// For control messages.
    pub(crate) control: BoundPort,
    /// For each lane.
    pub(crate) lanes: Vec<BoundPort>,
    first_address: IpAddr,
}

impl Ports {
    /// Binds a socket for control messages and one for each lane.
    ///
    /// One socket serves all addresses: the host's routes choose how packets leave, and answers leave from the address
    /// that was asked. One socket for each address would multiply buffers and handshakes for nothing. With one address
    /// the socket is bound to that address; with several it is bound to all of the host's, and connections to others
    /// are not answered.
    ///
    /// # Errors
    /// Which port of which address is not available, and what to do.
    pub(crate) fn bind(settings: &Settings) -> anyhow::Result<Self> {
        Self::bind_uncoded(settings).context(Code::PortBind)
    }

    fn bind_uncoded(settings: &Settings) -> anyhow::Result<Self> {
        let first_address = *settings.addresses.first().context("there is no address to listen on")?;
        let to = wildcard(&settings.addresses).unwrap_or(first_address);
        let own = if settings.addresses.len() > 1 { settings.addresses.clone() } else { Vec::new() };
        let routes = Routes::default();
        let count = 1 + usize::from(settings.tuning.lanes());
        let mut bound = Vec::with_capacity(count);
        let mut free = settings.ports.candidates();
        for number in 0..count {
            let purpose = number.checked_sub(1).map_or(Purpose::Control, |lane| Purpose::Data(lane_number(lane)));
            let bind = |at| NetworkPort::bind(at, settings.tuning.transport(), purpose, &SocketOptions::default());
            let port = next_free(to, &mut free, bind).map_err(|none| none.explain(settings.ports, number, count))?;
            bound.push(port.with_routes(routes.clone()).accept_only_at(own.clone()));
        }
        let control = bound.remove(0);
        Ok(Self { control, lanes: bound, first_address })
    }

    /// The addresses that the launcher receives.
    pub(crate) fn bound(&self, key: &KeyRequest) -> FromSidecar {
        let at = |port: &BoundPort| SocketAddr::new(self.first_address, port.local_addr().port());
        FromSidecar::Bound {
            certificate_request: key.request_pem().to_owned(),
            control: at(&self.control),
            lanes: self.lanes.iter().map(at).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// Which ports a sidecar uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortChoice {
    /// Any free ones.
    Any,
    /// This one for control messages; those of the lanes follow.
    From(u16),
    /// The first free ones of a range.
    Within(PortRange),
}

impl PortChoice {
    /// Returns the ports to try, in order, and whether one in use may be skipped.
    fn candidates(self) -> Box<dyn Iterator<Item = (u16, bool)>> {
        match self {
            Self::Any => Box::new(std::iter::repeat((0, false))),
            Self::From(first) => Box::new((first..=u16::MAX).map(|port| (port, false))),
            Self::Within(range) => Box::new(range.ports().map(|port| (port, true))),
        }
    }
}

/// Why no port is available.
enum NoPort {
    /// All candidates have been tried.
    NoneLeft,
    /// The system refuses a port.
    Refused(PortError),
}

impl NoPort {
    fn explain(self, choice: PortChoice, bound: usize, wanted: usize) -> anyhow::Error {
        match (self, choice) {
            (Self::NoneLeft, PortChoice::Within(range)) => anyhow!(
                "only {bound} of the {wanted} ports that this sidecar needs (one for control, one for each lane) are free \
                 in {range}; give a wider range with --ports, fewer --lanes, or end who has them (`ss -tulpn`)"
            ),
            (Self::NoneLeft, _) => anyhow!("the port of a lane would be above 65535; give a lower one"),
            (Self::Refused(PortError::Bind { protocol, addr, source }), _)
                if source.kind() == io::ErrorKind::AddrInUse =>
            {
                anyhow!(
                    "{protocol} port {} at {} is in use; end the process that uses it (`ss -tulpn 'sport = :{}'` shows \
                     it), or give this sidecar another port in --peers (lanes use the {} after it)",
                    addr.port(),
                    addr.ip(),
                    addr.port(),
                    wanted - 1
                )
            }
            (Self::Refused(error), _) => anyhow!(error).context("cannot bind a port"),
        }
    }
}

fn next_free(
    address: IpAddr,
    candidates: &mut impl Iterator<Item = (u16, bool)>,
    bind: impl Fn(SocketAddr) -> Result<BoundPort, PortError>,
) -> Result<BoundPort, NoPort> {
    for (port, may_be_left_out) in candidates {
        match bind(SocketAddr::new(address, port)) {
            Ok(bound) => return Ok(bound),
            Err(error) if may_be_left_out && error.is_taken() => {}
            Err(error) => return Err(NoPort::Refused(error)),
        }
    }
    Err(NoPort::NoneLeft)
}

fn lane_number(lane: usize) -> Lane {
    Lane(u16::try_from(lane).expect("lanes are at most LANES_MAX"))
}

/// Returns the wildcard address, if there are several addresses to listen on.
fn wildcard(addresses: &[IpAddr]) -> Option<IpAddr> {
    match addresses {
        [] | [_] => None,
        several if several.iter().all(IpAddr::is_ipv4) => Some(Ipv4Addr::UNSPECIFIED.into()),
        _ => Some(Ipv6Addr::UNSPECIFIED.into()),
    }
}

#[cfg(test)]
mod tests {
    use ronde_wire::control::Transport;

    use super::*;

    fn bind(at: SocketAddr) -> Result<BoundPort, PortError> {
        NetworkPort::bind(at, Transport::Auto, Purpose::Control, &SocketOptions::default())
    }

    #[test]
    fn a_port_range_yields_a_free_port_or_an_error() {
        let taken = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = taken.local_addr().expect("bound").port();
        let address = Ipv4Addr::LOCALHOST.into();
        let refused = |choice: PortChoice| {
            let none = next_free(address, &mut choice.candidates(), bind).map(drop).expect_err("nothing is free");
            none.explain(choice, 0, 2).to_string()
        };
        let text = refused(PortChoice::Within(PortRange { low: port, high: port }));
        assert!(text.starts_with("only 0 of the 2 ports") && text.contains(&format!("in {port}-{port};")), "{text}");
        let text = refused(PortChoice::From(port));
        assert!(text.starts_with(&format!("UDP port {port} at 127.0.0.1 is in use; end the process")), "{text}");
        let mut beyond = PortChoice::From(u16::MAX).candidates();
        assert_eq!((beyond.next(), beyond.next()), (Some((u16::MAX, false)), None));
    }
}
