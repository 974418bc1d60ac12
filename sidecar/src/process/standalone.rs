//! A sidecar without a launcher: its credentials define its identity; command line or configuration file name its
//! peers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail, ensure};
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::interfaces::{self, Selector};
use ronde_bootstrap::messages::{self, Membership, Peer};
use ronde_transport::{CaError, Identity, JobCa, KeyRequest, Validity};
use ronde_wire::{JobName, SidecarIndex};
use tokio::time::{Instant, sleep};

use crate::driver::membership::world_of;
use crate::process::Start;
use crate::process::affinity;
use crate::process::arguments::SidecarArgs;
use crate::process::credentials::Credentials;
use crate::process::logging;
use crate::process::ports::Ports;
use crate::process::settings::Settings;

/// Reads the credentials, resolves the peers and binds the ports.
///
/// # Errors
/// Which part cannot be used, with its code.
pub(crate) async fn membership(args: &SidecarArgs) -> anyhow::Result<Start> {
    let mut credentials = Credentials::named(args)?;
    let identity = Arc::new(credentials.load()?);
    let me = identity.id().sidecar;
    logging::identify(&identity.id().job, me);
    let deadline = Instant::now() + Duration::from_secs(args.start_timeout);
    let listed = args.peers.iter().map(|peer| PeerAddress::parse(peer)).collect::<anyhow::Result<Vec<_>>>();
    let listed = listed.context(Code::SidecarSettings)?;
    let own = own_address(&listed, me).context(Code::SidecarSettings)?;
    let addresses = match args.listen {
        Some(address) => vec![address],
        None if !args.network_interfaces.is_empty() => named_addresses(&args.network_interfaces)?,
        None => vec![resolve(own, None, deadline).await?.ip()],
    };
    let address = addresses[0];
    let settings = settings(args, &identity, addresses, Some(own.port)).context(Code::SidecarSettings)?;
    // Bind first, so that peers that resolve this sidecar can connect.
    let ports = Ports::bind(&settings)?;
    let mut peers = Vec::with_capacity(listed.len());
    for (index, peer) in (0_u32..).zip(&listed) {
        let control = resolve(peer, Some(address), deadline).await?;
        let (host, lanes) = (peer.host.clone(), lane_addresses(control));
        peers.push(Peer { sidecar: index, host, control, lanes, addresses: Vec::new() });
    }
    let placement = if args.placement.is_empty() { (0..).take(peers.len()).collect() } else { args.placement.clone() };
    let world = world_of(&placement, &peers, me).context(Code::SidecarSettings)?;
    let membership = Membership::fixed(peers, &placement);
    Ok(Start { settings, ports, identity, renewal: Some(credentials), membership, world })
}

/// Configures a sidecar for this many workers of this host, without peers. Its authority lives only until the
/// certificate is issued; no link ever needs it.
///
/// # Errors
/// Which part cannot be used, with its code.
pub(crate) fn local(args: &SidecarArgs, ranks: u16) -> anyhow::Result<Start> {
    let job = args.job.clone().map_or_else(|| JobName::new(LOCAL_JOB).context(Code::SidecarSettings), Ok)?;
    let identity = Arc::new(own_identity(job.clone(), args).context(Code::CertificateNotIssued)?);
    logging::identify(&job, identity.id().sidecar);
    let loopback = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    let settings = settings(args, &identity, loopback, None).context(Code::SidecarSettings)?;
    let ports = Ports::bind(&settings)?;
    let host = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
    let control = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let peers = vec![Peer { sidecar: 0, host, control, lanes: Vec::new(), addresses: Vec::new() }];
    let placement = vec![0; usize::from(ranks)];
    let world = world_of(&placement, &peers, identity.id().sidecar).context(Code::SidecarSettings)?;
    let membership = Membership::fixed(peers, &placement);
    Ok(Start { settings, ports, identity, renewal: None, membership, world })
}

fn own_identity(job: JobName, args: &SidecarArgs) -> Result<Identity, CaError> {
    let validity = || Validity::starting(SystemTime::now(), Duration::from_secs(args.certificate_life));
    let authority = JobCa::generate(job, args.trust_domain.clone(), validity())?;
    let key = KeyRequest::generate()?;
    let certificate = authority.issue(key.request_pem(), SidecarIndex(0), validity())?;
    key.into_identity(&certificate, authority.ca_certificate_pem(), authority.id_of(SidecarIndex(0)))
}

/// Returns the address of the admin pages: that of `--admin-listen`, or a free port of the loopback.
///
/// # Errors
/// When the address cannot be parsed or its name cannot be resolved.
pub(crate) async fn admin_address(args: &SidecarArgs) -> anyhow::Result<SocketAddr> {
    let Some(text) = &args.container.admin_listen else { return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))) };
    let peer = PeerAddress::parse(text).context("--admin-listen").context(Code::SidecarSettings)?;
    resolve(&peer, None, Instant::now() + Duration::from_secs(args.start_timeout)).await
}

/// Builds the settings that a launcher would have sent, and pins the threads to their cores.
fn settings(
    args: &SidecarArgs,
    identity: &Identity,
    addresses: Vec<IpAddr>,
    port: Option<u16>,
) -> anyhow::Result<Settings> {
    affinity::pin(&args.tuning.thread_affinity)?;
    Settings::new(messages::Start {
        job: identity.id().job.clone(),
        // Its sidecars have no id of the run in common.
        run: String::new(),
        trust_domain: identity.id().trust_domain.to_string(),
        sidecar: identity.id().sidecar.0,
        addresses,
        port,
        ports: None,
        runtime_dir: args.runtime_dir.clone(),
        start_timeout_ms: args.start_timeout.saturating_mul(1_000),
        // Without a stored authority, no client of gRPC-Web can have a certificate.
        tuning: args.tuning.clone().resolve(args.local_ranks.is_none())?,
        exits_are_reported: false,
        elastic: false,
        replace_stalled_ms: 0,
        control_fan_out: None,
    })
}

/// Returns the addresses that `--network-interfaces` selects, at least one.
fn named_addresses(selectors: &[Selector]) -> anyhow::Result<Vec<IpAddr>> {
    let found = interfaces::of_this_host();
    let addresses: Vec<IpAddr> = interfaces::select(&found, selectors).iter().map(|own| own.address).collect();
    if addresses.is_empty() {
        let asked: Vec<String> = selectors.iter().map(ToString::to_string).collect();
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        let (asked, found) = (asked.join(","), found.join(", "));
        let text = format!("no interface or network of --network-interfaces {asked} is on this host; it has {found}");
        return Err(anyhow!(text)).context(Code::NoInterface);
    }
    Ok(addresses)
}

fn own_address(listed: &[PeerAddress], me: SidecarIndex) -> anyhow::Result<&PeerAddress> {
    let count = listed.len();
    ensure!(
        count > 0,
        "no peers are given; name all sidecars in the order of their indices: --peers alpha:7400,beta:7400"
    );
    listed
        .get(me.0 as usize)
        .with_context(|| format!("this is {me}, but --peers names {count} sidecars, 0 to {}", count - 1))
}

/// An entry of `--peers`.
#[derive(Debug, PartialEq, Eq)]
struct PeerAddress {
    host: String,
    port: u16,
}

impl PeerAddress {
    /// Parses `HOST:PORT`; an IPv6 address is in brackets.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let wrong = || anyhow!("{text:?} is not HOST:PORT, for example alpha:7400 or [fd00::1]:7400");
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or_else(wrong)?,
            None if host.contains(':') => bail!(wrong()),
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        ensure!(!host.is_empty(), wrong());
        Ok(Self { host: host.to_owned(), port })
    }
}

/// Resolves a name, and retries until it has an address of the family of this sidecar's own address: where containers
/// start together, names become known later.
async fn resolve(peer: &PeerAddress, like: Option<IpAddr>, deadline: Instant) -> anyhow::Result<SocketAddr> {
    let PeerAddress { host, port } = peer;
    loop {
        let found = tokio::net::lookup_host((host.as_str(), *port)).await;
        let reason = match found {
            Ok(mut addresses) => {
                match addresses.find(|found| like.is_none_or(|like| like.is_ipv4() == found.is_ipv4())) {
                    Some(address) => return Ok(address),
                    None => "it has no address of this sidecar's family (IPv4 or IPv6)".to_owned(),
                }
            }
            Err(error) => error.to_string(),
        };
        if Instant::now() + RESOLVE_PAUSE > deadline {
            return Err(anyhow!("cannot look up {host:?}: {reason}")).context(Code::PeerMissing);
        }
        sleep(RESOLVE_PAUSE).await;
    }
}

/// Returns the addresses of a sidecar's lanes, whose ports follow its control port.
fn lane_addresses(control: SocketAddr) -> Vec<SocketAddr> {
    let offsets = 1..=u16::try_from(ronde_wire::limits::LANES_MAX).unwrap_or(u16::MAX);
    let ports = offsets.filter_map(|offset| control.port().checked_add(offset));
    ports.map(|port| SocketAddr::new(control.ip(), port)).collect()
}

/// The job's name if none was given.
const LOCAL_JOB: &str = "local";
const RESOLVE_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_addresses_are_parsed_and_malformed_ones_rejected() {
        let peer = |host: &str, port| PeerAddress { host: host.to_owned(), port };
        assert_eq!(PeerAddress::parse("alpha:7400").expect("good"), peer("alpha", 7_400));
        assert_eq!(PeerAddress::parse("[fd00::1]:7400").expect("good"), peer("fd00::1", 7_400));
        for bad in ["", "alpha", "alpha:", ":7400", "alpha:0", "alpha:65536", "fd00::1:7400", "[fd00::1:7400", "[]:1"] {
            let error = PeerAddress::parse(bad).expect_err(bad).to_string();
            assert!(error.contains("is not HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn the_lanes_follow_the_control_port() {
        let lanes = lane_addresses("10.0.0.1:7400".parse().expect("an address"));
        assert_eq!(lanes[0].port(), 7_401);
        assert_eq!(lanes.len(), ronde_wire::limits::LANES_MAX);
        assert_eq!(lane_addresses("10.0.0.1:65535".parse().expect("an address")), []);
    }

    #[test]
    fn the_own_address_is_the_entry_of_the_own_index() {
        let listed = [PeerAddress::parse("a:1").expect("good"), PeerAddress::parse("b:2").expect("good")];
        assert_eq!(own_address(&listed, SidecarIndex(1)).expect("there").port, 2);
        let error = own_address(&listed, SidecarIndex(2)).expect_err("not there").to_string();
        assert!(error.contains("--peers names 2 sidecars, 0 to 1"), "{error}");
        assert!(own_address(&[], SidecarIndex(0)).is_err());
    }

    #[tokio::test]
    async fn a_host_name_that_cannot_be_resolved_is_reported() {
        let peer = PeerAddress { host: "nowhere.invalid".to_owned(), port: 1 };
        let error = resolve(&peer, None, Instant::now()).await.expect_err("reserved for names that do not exist");
        assert!(format!("{error:#}").contains("cannot look up \"nowhere.invalid\""), "{error:#}");
    }
}
