//! The start of a job: agents, sidecars, certificates, workers. Each step waits for all hosts and ends by one deadline.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use ronde_transport::{JobCa, TrustDomain, Validity};
use ronde_wire::SidecarIndex;
use tokio::time::timeout_at;

use super::super::envelope::ToAgent;
use super::address;
use super::agents::{Link, remote_command};
use super::environment::{self, Identity};
use super::failure::{Failure, ranks};
use super::job::Job;
use super::state::Step;
use crate::bootstrap::{Join, Peer, Start, ToSidecar};

impl Job<'_> {
    /// Starts everything.
    ///
    /// # Errors
    /// What could not be started, with its host and ranks.
    pub(super) async fn start(&mut self) -> Result<(), Failure> {
        self.reach_hosts()?;
        self.reached(Step::Hosts).await?;
        self.choose_addresses().await?;
        self.start_sidecars();
        self.reached(Step::Bound).await?;
        self.join_sidecars()?;
        self.reached(Step::Serving).await?;
        self.tell_of_sidecars().await;
        self.start_workers();
        self.reached(Step::Workers).await
    }

    async fn reached(&mut self, step: Step) -> Result<(), Failure> {
        let deadline = self.start_deadline;
        // A worker may fail before the last one has started.
        let done = |state: &super::state::State| state.missing(step).is_empty() || state.first_failed.is_some();
        if self.wait_until(Some(deadline), done).await? {
            return Ok(());
        }
        let seconds = self.settings.start_timeout.as_secs();
        Err(Failure::StartTimeout { seconds, missing: self.state.missing(step) })
    }

    fn reach_hosts(&mut self) -> Result<(), Failure> {
        let settings = self.settings;
        for (index, host) in settings.placement.hosts.iter().enumerate() {
            let local = address::is_local(host);
            self.state.hosts[index].remote = !local;
            let command = if local {
                vec![settings.ronde.to_string_lossy().into_owned(), "agent".to_owned()]
            } else {
                remote_command(&settings.remote_shell, &host.name, &settings.remote_ronde)
            };
            let placed = settings.placement.ranks_of_host(index);
            let link = Link::start(index, &command, self.commands_max(index), self.receivers()).map_err(|error| {
                Failure::Spawn { host: host.name.clone(), placed, program: command[0].clone(), error }
            })?;
            self.links.push(link);
        }
        Ok(())
    }

    /// All that an agent is ever told: three lines for a sidecar, one for a rank, and those that start and end a host.
    fn commands_max(&self, host: usize) -> usize {
        let placement = &self.settings.placement;
        let sidecars = placement.sidecars.iter().filter(|place| place.host == host).count();
        3 * sidecars + placement.ranks_of_host(host).len() + FRAMING_COMMANDS
    }

    /// Chooses where each host's sidecars listen: the loopback when there is no other host.
    async fn choose_addresses(&mut self) -> Result<(), Failure> {
        if self.state.hosts.iter().all(|host| !host.remote) {
            self.state.hosts.iter_mut().for_each(|host| host.address = Some(address::LOOPBACK));
            return Ok(());
        }
        let placement = &self.settings.placement;
        let mut some_remote = None;
        for (host, state) in placement.hosts.iter().zip(&mut self.state.hosts).filter(|(_, state)| state.remote) {
            let resolved = timeout_at(self.start_deadline, address::resolve(host)).await.unwrap_or_default();
            let own = state.hello.as_ref().map_or(&[][..], |hello| &hello.addresses);
            state.address = address::choose(&resolved, own);
            some_remote = some_remote.or(state.address);
        }
        for (host, state) in placement.hosts.iter().zip(&mut self.state.hosts).filter(|(_, state)| !state.remote) {
            let given = host.address().filter(|address| !address.is_loopback());
            state.address = given.or_else(|| some_remote.and_then(address::towards));
        }
        let homeless = placement.hosts.iter().zip(&self.state.hosts).find(|(_, state)| state.address.is_none());
        homeless.map_or(Ok(()), |(host, _)| Err(Failure::NoAddress { host: host.name.clone() }))
    }

    fn start_sidecars(&mut self) {
        let settings = self.settings;
        for (sidecar, place) in (0_u32..).zip(&settings.placement.sidecars) {
            let start = Start {
                job: settings.job.clone(),
                trust_domain: TRUST_DOMAIN.to_owned(),
                sidecar,
                address: self.address_of(place.host),
                port: None,
                runtime_dir: None,
                lanes: settings.lanes,
                peer_timeout_ms: settings.peer_timeout.map(milliseconds),
                start_timeout_ms: milliseconds(settings.start_timeout),
                arena_bytes_max: settings.arena_bytes_max,
                fusion_threshold_bytes: settings.fusion_threshold_bytes,
                stall_warning_ms: settings.stall_warning.map(milliseconds),
                stall_shutdown_ms: settings.stall_shutdown.map(milliseconds),
            };
            let link = &self.links[place.host];
            let environment = environment::for_sidecar(&settings.caller, sidecar, settings.verbose, &settings.logs);
            link.tell(ToAgent::StartSidecar { sidecar, program: settings.sidecar_command.clone(), environment });
            link.tell(ToAgent::Sidecar { sidecar, line: ToSidecar::Start(start) });
            self.state.sidecars[sidecar as usize].started = true;
        }
    }

    /// Signs every sidecar's certificate and tells each of all others. The authority ends with this function: a job has the
    /// sidecars that it started with.
    fn join_sidecars(&self) -> Result<(), Failure> {
        let placement = &self.settings.placement;
        let validity = Validity::starting(SystemTime::now(), CERTIFICATE_VALIDITY);
        let ca = TrustDomain::new(TRUST_DOMAIN)
            .map_err(|error| error.to_string())
            .and_then(|domain| {
                JobCa::generate(self.settings.job.clone(), domain, validity).map_err(|error| error.to_string())
            })
            .map_err(|reason| self.no_certificate(0, reason))?;
        let peers = self.peers();
        for (sidecar, place) in (0_u32..).zip(&placement.sidecars) {
            let Some(bound) = &self.state.sidecars[sidecar as usize].bound else { continue };
            let certificate = ca
                .issue(&bound.certificate_request, SidecarIndex(sidecar), validity)
                .map_err(|error| self.no_certificate(sidecar, error.to_string()))?;
            let join = Join {
                certificate,
                ca_certificate: ca.ca_certificate_pem().to_owned(),
                peers: peers.clone(),
                placement: placement.sidecar_of_ranks(),
            };
            self.links[place.host].tell(ToAgent::Sidecar { sidecar, line: ToSidecar::Join(join) });
        }
        Ok(())
    }

    fn peers(&self) -> Vec<Peer> {
        let placement = &self.settings.placement;
        let bound =
            (0_u32..).zip(&self.state.sidecars).filter_map(|(sidecar, state)| Some((sidecar, state.bound.as_ref()?)));
        bound
            .map(|(sidecar, bound)| Peer {
                sidecar,
                host: placement.host_of_sidecar(sidecar as usize).to_owned(),
                control: bound.control,
                lanes: bound.lanes.clone(),
            })
            .collect()
    }

    fn start_workers(&self) {
        let settings = self.settings;
        let common = environment::common(&settings.caller, &settings.exports);
        for link in &self.links {
            link.tell(ToAgent::Prepare { directory: settings.directory.clone(), environment: common.clone() });
        }
        let port = self.state.hosts[0].hello.as_ref().map_or(0, |hello| hello.port);
        let master = SocketAddr::new(self.address_of(0), port);
        for place in settings.placement.ranks() {
            let Some(serving) = &self.state.sidecars[place.sidecar as usize].serving else { continue };
            let identity = Identity {
                job: &settings.job,
                place,
                hostname: &settings.placement.hosts[place.host].name,
                socket_dir: &serving.socket_dir,
                token_file: &serving.token_files[place.local_rank as usize],
                master,
            };
            let (rank, command, environment) = (place.rank, settings.command.clone(), identity.environment());
            self.links[place.host].tell(ToAgent::StartWorker { rank, command, environment });
        }
    }

    async fn tell_of_sidecars(&self) {
        let placement = &self.settings.placement;
        for (place, state) in placement.sidecars.iter().zip(&self.state.sidecars) {
            let Some(serving) = &state.serving else { continue };
            let (served, host) = (ranks(&place.ranks), &placement.hosts[place.host].name);
            let directory = serving.socket_dir.display();
            self.tell_more(|| {
                format!(
                    "the sidecar of {served} on host {host} serves in {directory}, metrics at http://{}",
                    serving.admin
                )
            })
            .await;
        }
    }

    fn no_certificate(&self, sidecar: u32, reason: String) -> Failure {
        let place = &self.settings.placement.sidecars[sidecar as usize];
        let host = self.settings.placement.hosts[place.host].name.clone();
        Failure::Certificate { served: place.ranks.clone(), host, reason }
    }

    fn address_of(&self, host: usize) -> IpAddr {
        self.state.hosts[host].address.unwrap_or(address::LOOPBACK)
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Prepare, stop, close and kill, with room for kills that a user repeats.
const FRAMING_COMMANDS: usize = 32;
const TRUST_DOMAIN: &str = "ronde.local";
/// Longer than any job: certificates are not renewed while one runs.
const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(90 * 24 * 3_600);
