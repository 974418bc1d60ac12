//! The start of a job: agents, sidecars, certificates, workers. Each step waits for all hosts and ends by one deadline.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use ronde_bootstrap::interfaces;
use ronde_bootstrap::messages::{Join, Membership, Peer, Start, ToSidecar};
use ronde_transport::{JobCa, TrustDomain, Validity};
use ronde_wire::SidecarIndex;
use tokio::time::Instant;

use super::address;
use super::agents::Link;
use super::environment::{self, Identity};
use super::failure::{Failure, ranks};
use super::input::Input;
use super::job::Job;
use super::placement::SidecarPlace;
use super::routes;
use super::scope::Scope;
use super::starter::Starter;
use super::state::{SidecarState, State, Step};
use super::world::{Served, WORLD, World};
use crate::envelope::ToAgent;

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
        self.report_sidecars().await;
        self.reached(Step::Linked).await?;
        self.report_routes().await;
        if self.settings.has_starter {
            self.start_starter()?;
        } else {
            self.start_workers();
        }
        self.reached(Step::Workers).await
    }

    async fn reached(&mut self, step: Step) -> Result<(), Failure> {
        let deadline = self.start_deadline;
        // A worker may fail before the last one has started.
        let done = |state: &State| state.missing(step).is_empty() || state.first_failed.is_some();
        if self.wait_until(Some(deadline), done).await? {
            return Ok(());
        }
        let seconds = self.settings.start_timeout.as_secs();
        Err(Failure::StartTimeout { awaited: step.awaited(), seconds, missing: self.state.missing(step) })
    }

    /// Waits until all ranks have joined, once one has, because joined ranks wait for the others. A command that never joins
    /// may run on.
    ///
    /// # Errors
    /// The ranks that have not joined in time, or another failure that ends the job.
    pub(super) async fn joined(&mut self) -> Result<(), Failure> {
        let over = |state: &State| state.first_failed.is_some() || state.workers_ended();
        self.wait_until(None, |state| over(state) || state.some_attached()).await?;
        let deadline = Instant::now() + self.settings.join_timeout;
        let done = |state: &State| over(state) || state.missing(Step::Attached).is_empty();
        if self.wait_until(Some(deadline), done).await? {
            return Ok(());
        }
        let (seconds, step) = (self.settings.join_timeout.as_secs(), Step::Attached);
        Err(Failure::StartTimeout { awaited: step.awaited(), seconds, missing: self.state.missing(step) })
    }

    fn reach_hosts(&mut self) -> Result<(), Failure> {
        let settings = self.settings;
        for (index, host) in self.placement.hosts.iter().enumerate() {
            let local = address::is_local(host);
            self.state.hosts[index].remote = !local;
            let command = if local {
                vec![settings.ronde.to_string_lossy().into_owned(), "agent".to_owned()]
            } else {
                settings.remote_shell.command(&host.name, &settings.remote_agent)
            };
            let (placed, scope) = (self.placement.ranks_of_host(index), Scope::new(self.placement, index));
            let link =
                Link::start((index, scope), &command, self.commands_max(index), self.receivers()).map_err(|error| {
                    Failure::Spawn { host: host.name.clone(), placed, program: command[0].clone(), error }
                })?;
            self.links.push(link);
        }
        Ok(())
    }

    /// The most commands for an agent: three per sidecar, one per rank, and those that start and end a host.
    fn commands_max(&self, host: usize) -> usize {
        let placement = self.placement;
        let sidecars = placement.sidecars.iter().filter(|place| place.host == host).count();
        3 * sidecars + placement.ranks_of_host(host).len() + FRAMING_COMMANDS
    }

    /// Chooses the addresses at which each host's sidecars listen: those that the user allows, or all but the loopback, and
    /// the loopback alone when there is no other host.
    async fn choose_addresses(&mut self) -> Result<(), Failure> {
        let (placement, selectors) = (self.placement, &self.settings.network_interfaces);
        if selectors.is_empty() && self.state.hosts.iter().all(|host| !host.remote) {
            self.state.hosts.iter_mut().for_each(|host| host.addresses = vec![address::loopback()]);
            return Ok(());
        }
        for state in &mut self.state.hosts {
            let found = state.hello.as_ref().map_or(&[][..], |hello| &hello.interfaces);
            state.addresses = interfaces::select(found, selectors);
        }
        let resolved = self.resolve_remote().await?;
        let mut some_remote = None;
        for (state, resolved) in self.state.hosts.iter_mut().filter(|state| state.remote).zip(resolved) {
            address::put_first(&mut state.addresses, &resolved);
            some_remote = some_remote.or(state.addresses.first().map(|own| own.address));
        }
        for (host, state) in placement.hosts.iter().zip(&mut self.state.hosts).filter(|(_, state)| !state.remote) {
            let given = host.address().or_else(|| some_remote.and_then(address::towards));
            address::put_first(&mut state.addresses, given.as_slice());
        }
        self.check_addresses()
    }

    /// Resolves the names of remote hosts, all at the same time.
    async fn resolve_remote(&mut self) -> Result<Vec<Vec<IpAddr>>, Failure> {
        let hosts = self.placement.hosts.iter().zip(&self.state.hosts).filter(|(_, state)| state.remote);
        let tasks: Vec<_> = hosts.map(|(host, _)| tokio::spawn(address::resolve(host.clone()))).collect();
        let mut resolved = Vec::new();
        for task in tasks {
            tokio::select! {
                // Fails only with a panic, which is reported where it happens.
                found = task => resolved.push(found.unwrap_or_default()),
                signal = self.signals.recv() => return Err(Failure::Interrupted { signal }),
            }
        }
        Ok(resolved)
    }

    fn check_addresses(&self) -> Result<(), Failure> {
        let selectors = &self.settings.network_interfaces;
        let hosts = self.placement.hosts.iter().zip(&self.state.hosts);
        let mut without = hosts.filter(|(_, state)| state.addresses.is_empty()).map(|(host, state)| {
            (host.name.clone(), state.hello.as_ref().map_or_else(Vec::new, |hello| hello.interfaces.clone()))
        });
        if selectors.is_empty() {
            return without.next().map_or(Ok(()), |(host, _)| Err(Failure::NoAddress { host }));
        }
        let hosts: Vec<_> = without.collect();
        if hosts.is_empty() {
            return Ok(());
        }
        let asked: Vec<String> = selectors.iter().map(ToString::to_string).collect();
        Err(Failure::NoInterface { asked: asked.join(","), hosts })
    }

    fn start_sidecars(&mut self) {
        let settings = self.settings;
        for (sidecar, place) in (0_u32..).zip(&self.placement.sidecars) {
            let start = Start {
                job: settings.job.clone(),
                run: settings.run.clone(),
                trust_domain: TRUST_DOMAIN.to_owned(),
                sidecar,
                addresses: self.state.hosts[place.host].addresses.iter().map(|own| own.address).collect(),
                port: None,
                ports: settings.ports,
                runtime_dir: None,
                start_timeout_ms: milliseconds(settings.start_timeout),
                tuning: settings.tuning.clone(),
                elastic: false,
                replace_stalled_ms: 0,
                exits_are_reported: !settings.has_starter,
                control_fan_out: None,
            };
            let link = &self.links[place.host];
            let environment = environment::for_sidecar(&settings.caller, sidecar, settings.verbose, &settings.logs);
            link.send(ToAgent::StartSidecar { sidecar, program: settings.sidecar_command.clone(), environment });
            link.send(ToAgent::Sidecar { sidecar, line: ToSidecar::Start(Box::new(start)) });
            self.state.sidecars[sidecar as usize].started = true;
        }
    }

    /// Signs every sidecar's certificate and sends it with the list of all peers. The authority is dropped afterwards, as a job
    /// never gets more sidecars.
    fn join_sidecars(&self) -> Result<(), Failure> {
        let placement = self.placement;
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
                membership: Membership::fixed(peers.clone(), &placement.sidecar_of_ranks()),
            };
            self.links[place.host].send(ToAgent::Sidecar { sidecar, line: ToSidecar::Join(join) });
        }
        Ok(())
    }

    fn peers(&self) -> Vec<Peer> {
        let placement = self.placement;
        let bound =
            (0_u32..).zip(&self.state.sidecars).filter_map(|(sidecar, state)| Some((sidecar, state.bound.as_ref()?)));
        bound
            .map(|(sidecar, bound)| Peer {
                sidecar,
                host: placement.host_of_sidecar(sidecar as usize).to_owned(),
                control: bound.control,
                lanes: bound.lanes.clone(),
                addresses: self.state.hosts[placement.sidecars[sidecar as usize].host].addresses.clone(),
            })
            .collect()
    }

    fn start_workers(&mut self) {
        let settings = self.settings;
        let common = environment::common(&settings.caller, &settings.exports);
        for link in &self.links {
            link.send(ToAgent::Prepare { directory: settings.directory.clone(), environment: common.clone() });
        }
        let master = self.master();
        for place in self.placement.ranks() {
            let Some(serving) = &self.state.sidecars[place.sidecar as usize].serving else { continue };
            let identity = Identity {
                job: &settings.job,
                place,
                hostname: &self.placement.hosts[place.host].name,
                socket_dir: &serving.socket_dir,
                token_file: &serving.token_files[place.local_rank as usize],
                web: serving.web,
                master,
            };
            let (rank, sidecar) = (place.rank, place.sidecar);
            let (command, environment) = (settings.command.clone(), identity.environment());
            let takes_input = settings.stdin == Some(rank);
            let link = &self.links[place.host];
            link.send(ToAgent::StartWorker { worker: rank, sidecar, command, environment, takes_input });
            if takes_input {
                self.input = Some(Input::start(rank, link.input(), self.printer.sender()));
            }
        }
    }

    /// Runs the command that starts the workers. Each worker finds its rank and sidecar in its environment.
    fn start_starter(&mut self) -> Result<(), Failure> {
        let settings = self.settings;
        let served = |(place, state): (&SidecarPlace, &SidecarState)| {
            let serving = state.serving.as_ref()?;
            let (first, count) = (place.ranks.start, place.ranks.end - place.ranks.start);
            Some(Served { host: place.host, first, count, socket_dir: serving.socket_dir.clone(), web: serving.web })
        };
        let world = World {
            job: settings.job.clone(),
            master: self.master(),
            hosts: self.placement.hosts.iter().map(|host| host.name.clone()).collect(),
            sidecars: self.placement.sidecars.iter().zip(&self.state.sidecars).filter_map(served).collect(),
            environment: environment::added(&settings.caller, &settings.exports),
        };
        let mut environment = environment::common(&settings.caller, &settings.exports);
        let started = serde_json::to_string(&world).map_err(std::io::Error::from).and_then(|world| {
            environment.push((WORLD.to_owned(), world));
            Starter::start(&settings.ronde, &settings.command, environment, &settings.directory, self.receivers())
        });
        let program = || settings.command.first().map_or_else(String::new, Clone::clone);
        let starter = started.map_err(|error| Failure::StarterSpawn { program: program(), error })?;
        self.state.note_starter();
        self.starter = Some(starter);
        Ok(())
    }

    /// The rendezvous address for the workers' own communication (`MASTER_ADDR`, `MASTER_PORT`).
    fn master(&self) -> SocketAddr {
        let port = self.state.hosts[0].hello.as_ref().map_or(0, |hello| hello.port);
        SocketAddr::new(self.address_of(0), port)
    }

    async fn report_sidecars(&self) {
        let placement = self.placement;
        for (place, state) in placement.sidecars.iter().zip(&self.state.sidecars) {
            let Some(serving) = &state.serving else { continue };
            let (served, host) = (ranks(&place.ranks), &placement.hosts[place.host].name);
            let directory = serving.socket_dir.display();
            self.verbose_notice(|| {
                format!(
                    "the sidecar of {served} on host {host} serves in {directory}, page and metrics at http://{}/",
                    serving.admin
                )
            })
            .await;
        }
    }

    async fn report_routes(&self) {
        let lines = routes::chosen(self.placement, &self.state, self.settings.verbose);
        let shown = if self.settings.verbose { lines.len() } else { ROUTES_SHOWN_MAX };
        for line in lines.iter().take(shown) {
            self.printer.notice(line.as_str()).await;
        }
        if let Some(more) = lines.len().checked_sub(shown).filter(|more| *more > 0) {
            self.printer.notice(format!("and {more} more sidecars; --verbose shows all")).await;
        }
    }

    fn no_certificate(&self, sidecar: u32, reason: String) -> Failure {
        let place = &self.placement.sidecars[sidecar as usize];
        let host = self.placement.hosts[place.host].name.clone();
        Failure::Certificate { served: place.ranks.clone(), host, reason }
    }

    fn address_of(&self, host: usize) -> IpAddr {
        self.state.hosts[host].addresses.first().map_or(address::LOOPBACK, |own| own.address)
    }
}

/// The time in milliseconds.
pub(super) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Prepare, stop, close and kill, with room for kills that a user repeats.
const FRAMING_COMMANDS: usize = 32;
/// The most sidecars whose addresses are printed without `--verbose`.
const ROUTES_SHOWN_MAX: usize = 16;
/// The trust domain of jobs.
pub(super) const TRUST_DOMAIN: &str = "ronde.local";
/// Longer than any job, as certificates are not renewed while one runs.
pub(super) const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(90 * 24 * 3_600);
