//! Wires a sidecar process, from its first line of input to its last line of output. Read this first.

mod affinity;
pub mod arguments;
mod container;
pub mod credentials;
mod execution;
mod gpus;
mod log_limit;
mod logging;
mod open_files;
mod ports;
mod report;
mod settings;
mod standalone;
mod tuning;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::exit::fail;
use ronde_bootstrap::logs::LogFormat;
use ronde_bootstrap::messages::{FromSidecar, Join, Membership, Peer, Summary, ToSidecar, TokenFile};
use ronde_bootstrap::streams;
use ronde_engine::{EngineConfig, RunAhead};
use ronde_rpc::{PROTOCOL_VERSION, PROTOCOL_VERSION_MIN, RankToken, v1};
use ronde_transport::{
    BoundPort, Identity, KeyRequest, LinkOptions, LocalHello, MutualTls, NetworkPort, SpiffeId, TrustDomain,
};
use ronde_wire::control::Purpose;
use ronde_wire::stream::job_number;
use ronde_wire::{Cause, Epoch, Incarnation, Lane, Rank, SidecarIndex, WorkerNumber, World};
use tokio::io::{AsyncBufReadExt, BufReader, Lines, Stdin};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::interval;

use crate::admin::{self, Exporter};
use crate::driver::command::ControlCommand;
use crate::driver::liveness::Liveness;
use crate::driver::membership::{MembershipState, addresses, common_lanes, stream_token, world_of};
use crate::driver::{Driver, Flight, Inbox, Links, Phase};
use crate::operation::device;
use crate::operation::lanes::{LaneConfig, LaneHandle, LaneReport, local, network};
use crate::plugins::Plugins;
use crate::process::arguments::SidecarArgs;
use crate::process::container::ContainerArgs;
use crate::process::credentials::Credentials;
use crate::process::execution::{clients, execution, results};
use crate::process::gpus::GpuChoice;
use crate::process::ports::Ports;
use crate::process::settings::Settings;
use crate::session::directory::{DirectoryOptions, RuntimeDir, random_bytes};
use crate::session::segments::Segments;
use crate::session::service::Service;
use crate::session::worker_uids::WorkerUids;
use crate::streams::gate::NEW_STREAMS_MAX;
use crate::streams::{NewStream, StreamConfig, StreamGate};
use crate::web;

/// Runs `ronde sidecar`: takes part in one job, as the launcher, or the certificate and command line, define it.
pub fn main(args: &SidecarArgs) -> ExitCode {
    if let Err(error) = streams::open(logging::lost_lines) {
        return fail(Code::SidecarCannotGoOn, &format!("cannot start the threads of the log: {error}"));
    }
    logging::start(&args.logs);
    hide_memory();
    open_files::raise_limit();
    ronde_shm::heap::keep_freed_memory();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.context("cannot start the control thread's runtime").and_then(|runtime| {
        let result = runtime.block_on(sidecar(args));
        // A read of standard input cannot be interrupted, and the launcher may keep it open.
        runtime.shutdown_background();
        result
    });
    let status = match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let reason = coded(&error, Code::SidecarCannotGoOn);
            let is_queued = FromSidecar::Fatal { reason: reason.clone() }.send();
            // The launcher prints it, once for all sidecars that end for the same reason, if it reads.
            let is_read = args.bootstrap && is_queued && streams::undelivered().is_none();
            match args.bootstrap || args.logs.log_format == LogFormat::Json {
                _ if is_read => {}
                true => tracing::error!("{reason}"),
                false => streams::log(format!("ronde sidecar: {reason}\n")),
            }
            ExitCode::from(Code::of_error(&error, Code::SidecarCannotGoOn).exit_status())
        }
    };
    streams::flush();
    status
}

/// Keeps keys, tokens and tensors in this process's memory from other processes of its user, which could trace it or read
/// `/proc/<pid>/mem`; only root still can. The kernel writes no core dumps of such a process.
fn hide_memory() {
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        tracing::warn!(%error, "other processes of this user may read this sidecar's memory");
    }
}

async fn sidecar(args: &SidecarArgs) -> anyhow::Result<()> {
    // The identity, the addresses to listen on, and the peers.
    let mut launcher = (args.bootstrap || args.local_ranks.is_some() || args.end_with_input).then(Launcher::new);
    let Start { settings, ports, identity, renewal, membership, world } = match (args.local_ranks, &mut launcher) {
        (Some(ranks), _) => standalone::local(args, ranks)?,
        (None, Some(launcher)) if args.bootstrap => launcher.membership().await?,
        (None, _) => standalone::membership(args).await?,
    };
    let peers = &membership.peers;
    let incarnation = Incarnation(u64::from_le_bytes(random_bytes()?));

    // Data threads: one for each lane, with its socket and its executor; then those for operations on this host only.
    let options = settings.link_options();
    let hello = |purpose| local_hello(&settings, (incarnation, membership.number), purpose);
    let start = |port, purpose, addresses| start_port(port, &identity, hello(purpose), addresses, options.clone());
    let (control_sender, control_commands) = mpsc::channel(CONTROL_COMMANDS_MAX);
    let gpus = gpus::open(&settings)?;
    let (lanes, streams, reports, plugins) =
        spawn_lanes(&settings, (peers, &world, &gpus), &control_sender, ports.lanes, start)?;

    // A signal from now on ends the sidecar in order: nothing that it makes is left behind. A notice of preemption may go to
    // all processes of a host; in an elastic job the launcher decides what follows.
    let mut signals = Signals::new(!(settings.elastic && args.bootstrap))?;

    // Local workers: their directory, sockets, tokens and shared memory.
    let (place, uids) = socket_setup(&settings, &args.container, &world);
    let directory = Arc::new(RuntimeDir::create(place, &settings.job, settings.me)?);
    let segments = Segments::with_gpus(gpus.used().cloned());
    let (tokens, token_files) = written_tokens(&directory, &uids, workers_of(&membership, settings.me))?;
    let description = description(&settings, peers, &world);
    let (command_sender, commands) = mpsc::channel(COMMANDS_MAX);
    tokens.iter().for_each(|(worker, token)| streams.add_worker(*worker, stream_token(token)));
    let channels = (command_sender, segments.clone(), streams.clone());
    let service = Arc::new(Service::new(channels, description, uids, settings.sidecars_max(peers.len())));
    let (web_address, web_tls) = serve_web(&settings, &identity, &service, &tokens, &control_sender)?;
    let mut server = tokio::spawn(service.bind(directory.path())?);
    tokio::spawn(credentials::keep_fresh(renewal, Arc::clone(&identity), control_sender.clone()));
    let (admin, exporter) = serve_admin(args, (&settings, peers), &control_sender, &directory).await?;

    // The control thread: engine, control links, sessions.
    let control = start(ports.control, Purpose::Control, addresses(peers, |peer| Some(peer.control)))()?;
    let memberships = MembershipState::new(settings.elastic, &membership, &directory);
    let flight = Flight::new((settings.job.clone(), settings.run.clone()), &settings.tuning.flight_directory());
    let mut driver = Driver::new(
        engine_config(&settings, &membership, &world),
        Links { control, web_tls, transport: settings.tuning.transport() },
        execution(&settings, results(&settings, &world, &segments), &gpus, (lanes, plugins)),
        clients(&settings, tokens, (segments, streams)),
        (Liveness::new(args.container.exit_with_workers.map(Duration::from_secs)), memberships, flight),
        settings.exits_are_reported,
    );
    driver.autotune = tuning::autotune_log(&settings, &world)?;
    directory.open_to_workers()?;
    let (job, socket_dir) = (settings.job.to_string(), directory.path().to_path_buf());
    FromSidecar::Serving { job, socket_dir, token_files, admin, web: web_address }.send();

    // Serve until the launcher closes our input or a signal arrives; then drain the sessions, for a bounded time.
    let mut inbox = Inbox { commands, control: control_commands, reports };
    if !settings.elastic {
        driver.open_control_links();
    }
    let mut failure = None;
    let stop = stopped(&mut launcher, args.bootstrap, &control_sender, &mut signals, &mut server);
    driver.run(&mut inbox, Phase::Serving, async { failure = stop.await }).await;
    driver.fatal = driver.fatal.take().or(failure);
    driver.run(&mut inbox, Phase::Draining, signals.next_or_after(DRAIN_TIMEOUT)).await;
    server.abort();
    drop(inbox.reports); // Nobody reads them any more: a lane that waited for room would never end.
    Box::pin(finish(driver, exporter, &settings, args.container.report.as_deref())).await
}

/// The sockets for local workers, and who may connect.
fn socket_setup<'a>(
    settings: &'a Settings,
    container: &'a ContainerArgs,
    world: &World,
) -> (DirectoryOptions<'a>, WorkerUids) {
    let (base, exact) = (settings.runtime_dir.as_deref(), container.socket_dir.as_deref());
    let own = nix::unistd::geteuid().as_raw();
    let uids = WorkerUids::new(own, &container.worker_uids, &world.ranks_of(settings.me));
    (DirectoryOptions { base, exact, for_group: uids.has_others() }, uids)
}

/// Returns the workers of a membership that are placed on a sidecar.
fn workers_of(membership: &Membership, me: SidecarIndex) -> Vec<WorkerNumber> {
    let mine = membership.seats.iter().filter(|seat| seat.sidecar == me.0);
    mine.map(|seat| WorkerNumber(seat.worker)).collect()
}

/// Draws a token for each worker and writes its file.
fn written_tokens(
    directory: &RuntimeDir,
    uids: &WorkerUids,
    workers: Vec<WorkerNumber>,
) -> anyhow::Result<(HashMap<WorkerNumber, RankToken>, Vec<TokenFile>)> {
    let owner = |worker: WorkerNumber| uids.owner(Rank(worker.0));
    let written = |worker| directory.write_token(worker, owner(worker)).map(|(token, file)| ((worker, token), file));
    let written = workers.into_iter().map(written).collect::<Result<Vec<_>, _>>()?;
    Ok(written.into_iter().unzip())
}

/// Ends all remaining sessions, reports the counters, and turns a fatal condition into an error.
async fn finish(
    mut driver: Driver,
    exporter: Option<Exporter>,
    settings: &Settings,
    report: Option<&Path>,
) -> anyhow::Result<()> {
    let reason = driver.fatal.take();
    let close_reason = reason.clone().unwrap_or_else(|| format!("{} is shutting down", settings.me));
    let cause = if reason.is_some() { Cause::SidecarLost } else { Cause::ShutDown };
    driver.end_sessions(cause, &close_reason);
    let summary = driver.summary().await;
    let exported = match exporter {
        Some(exporter) => Some(exporter.finish(driver.snapshot().await)),
        None => None,
    };
    // At the same time: a collector and a file system that do not answer must not add up.
    let exported = async {
        if let Some(exported) = exported {
            exported.await;
        }
    };
    tokio::join!(exported, driver.flight.finish());
    let failure = reason.or_else(|| driver.liveness.failure());
    Box::pin(driver.shut_down(&close_reason)).await;
    let written = report.map_or(Ok(()), |path| report::write(path, settings.me, &summary, failure.as_deref()));
    report::outcome(failure, written)?;
    FromSidecar::Ended { summary }.send();
    Ok(())
}

/// The configuration of a sidecar before it serves.
pub(crate) struct Start {
    pub(crate) settings: Settings,
    pub(crate) ports: Ports,
    pub(crate) identity: Arc<Identity>,
    /// The source of new identities; `None` when a launcher gave the only one.
    pub(crate) renewal: Option<Credentials>,
    /// The first membership in which the sidecar takes part.
    pub(crate) membership: Membership,
    /// Its placement of ranks.
    pub(crate) world: World,
}

/// The launcher's end of standard input.
struct Launcher {
    lines: Lines<BufReader<Stdin>>,
}

impl Launcher {
    fn new() -> Self {
        Self { lines: BufReader::new(tokio::io::stdin()).lines() }
    }

    /// Exchanges lines with the launcher until all peers are known.
    async fn membership(&mut self) -> anyhow::Result<Start> {
        let settings = self.start().await?;
        let ports = Ports::bind(&settings)?;
        let key = KeyRequest::generate().context("cannot make a key")?;
        ports.bound(&key).send();
        let join = self.join().await?;
        let world = world_of(&join.membership.placement(), &join.membership.peers, settings.me)
            .context(Code::SidecarSettings)?;
        let identity = identity(&settings, key, &join)?;
        Ok(Start { settings, ports, identity, renewal: None, membership: join.membership, world })
    }

    async fn start(&mut self) -> anyhow::Result<Settings> {
        match self.next().await? {
            ToSidecar::Start(start) => {
                logging::identify(&start.job, SidecarIndex(start.sidecar));
                affinity::pin(&start.tuning.thread_affinity).context(Code::SidecarSettings)?;
                Settings::new(*start).context(Code::SidecarSettings)
            }
            _ => bail!("the launcher's first line is not a start message"),
        }
    }

    async fn join(&mut self) -> anyhow::Result<Join> {
        match self.next().await? {
            ToSidecar::Join(join) => Ok(join),
            _ => bail!("the launcher's second line is not a join message"),
        }
    }

    async fn next(&mut self) -> anyhow::Result<ToSidecar> {
        self.read().await.context(Code::LauncherLine)
    }

    async fn read(&mut self) -> anyhow::Result<ToSidecar> {
        let line = self.lines.next_line().await.context("cannot read from the launcher")?;
        let line = line.context("the launcher closed its end; `ronde sidecar` is started by `ronde run`")?;
        serde_json::from_str(&line).context("the launcher's line cannot be parsed")
    }

    /// Forwards the launcher's messages; resolves when the launcher has closed its end or is gone.
    async fn closed(&mut self, commands: &mpsc::Sender<ControlCommand>) {
        while let Ok(Some(line)) = self.lines.next_line().await {
            match serde_json::from_str::<ToSidecar>(&line) {
                // Sending fails only when the control thread has ended, and the process with it.
                Ok(message) => drop(commands.send(ControlCommand::Launcher(Box::new(message))).await),
                Err(error) => tracing::warn!(bytes = line.len(), %error, "a line of the launcher is ignored"),
            }
        }
    }
}

/// Resolves when the launcher has closed its end; never without a launcher.
async fn closed(launcher: &mut Option<Launcher>, commands: &mpsc::Sender<ControlCommand>) {
    match launcher {
        Some(launcher) => launcher.closed(commands).await,
        None => std::future::pending().await,
    }
}

/// Resolves when the sidecar must stop serving; returns the reason if it is a failure. `is_launched`: the launcher needs
/// all messages.
async fn stopped(
    launcher: &mut Option<Launcher>,
    is_launched: bool,
    commands: &mpsc::Sender<ControlCommand>,
    signals: &mut Signals,
    server: &mut JoinHandle<Result<(), tonic::transport::Error>>,
) -> Option<String> {
    tokio::select! {
        () = closed(launcher, commands) => None,
        () = signals.next() => None,
        ended = server => {
            tracing::error!(?ended, "the service of rpc.sock has ended");
            Some("the service of rpc.sock has ended; see the log above".to_owned())
        }
        reason = undelivered(), if is_launched => Some(Code::LauncherNotReading.mark(&reason)),
    }
}

/// Resolves when the launcher has not read a message for too long.
async fn undelivered() -> String {
    let mut ticks = interval(UNDELIVERED_POLL_INTERVAL);
    loop {
        ticks.tick().await;
        if let Some(reason) = streams::undelivered() {
            return reason;
        }
    }
}

/// SIGTERM and SIGINT, in the order of arrival.
struct Signals {
    term: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    heeds_term: bool,
}

impl Signals {
    /// `heeds_term`: whether SIGTERM counts.
    fn new(heeds_term: bool) -> anyhow::Result<Self> {
        let install = |kind| signal(kind).context("cannot install a signal handler");
        let (term, interrupt) = (install(SignalKind::terminate())?, install(SignalKind::interrupt())?);
        Ok(Self { term, interrupt, heeds_term })
    }

    async fn next_or_after(&mut self, patience: Duration) {
        tokio::select! { () = tokio::time::sleep(patience) => {}, () = self.next() => {} }
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv(), if self.heeds_term => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn identity(settings: &Settings, key: KeyRequest, join: &Join) -> anyhow::Result<Arc<Identity>> {
    let id = SpiffeId {
        trust_domain: TrustDomain::new(settings.trust_domain.as_str())?,
        job: settings.job.clone(),
        sidecar: settings.me,
    };
    let identity = key.into_identity(&join.certificate, &join.ca_certificate, id);
    identity.map(Arc::new).context("the launcher's certificate cannot be used")
}

/// Builds the hello that this sidecar sends on the links of one port.
fn local_hello(settings: &Settings, (incarnation, membership): (Incarnation, u64), purpose: Purpose) -> LocalHello {
    LocalHello {
        job: settings.job.clone(),
        incarnation,
        purpose,
        early_credit_bytes: if purpose == Purpose::Control { 0 } else { settings.early_grant_bytes() },
        lanes: settings.tuning.lanes(),
        membership,
    }
}

/// Prepares the start of a port, once, on the thread that will own it.
fn start_port(
    port: BoundPort,
    identity: &Arc<Identity>,
    hello: LocalHello,
    peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
    options: LinkOptions,
) -> impl FnOnce() -> anyhow::Result<NetworkPort> + Send + 'static {
    let identity = Arc::clone(identity);
    move || port.start(identity, &hello, peers, options).context("cannot start a port")
}

/// Creates the plugins of this sidecar; their thread notifies the driver when it has loaded one or failed.
fn load_plugins(settings: &Settings, commands: mpsc::Sender<ControlCommand>) -> anyhow::Result<Arc<Plugins>> {
    // Without a driver nothing waits.
    Plugins::new(&settings.tuning.plugins, move || drop(commands.blocking_send(ControlCommand::PluginsAnswered)))
}

type DataThreads = (Vec<LaneHandle>, StreamGate, mpsc::Receiver<LaneReport>, Arc<Plugins>);

/// Spawns the data threads; returns them with what hands streams to them, the channel for their reports and the plugins that
/// they call.
fn spawn_lanes<Start: FnOnce() -> anyhow::Result<NetworkPort> + Send + 'static>(
    settings: &Settings,
    (peers, world, gpus): (&[Peer], &World, &GpuChoice),
    commands: &mpsc::Sender<ControlCommand>,
    ports: Vec<BoundPort>,
    start: impl Fn(BoundPort, Purpose, HashMap<SidecarIndex, Vec<SocketAddr>>) -> Start,
) -> anyhow::Result<DataThreads> {
    let plugins = load_plugins(settings, commands.clone())?;
    let (report_sender, reports) = mpsc::channel(REPORTS_MAX);
    let (mut lanes, mut stream_senders) = (Vec::new(), Vec::new());
    for (lane, port) in (0..).map(Lane).zip(ports) {
        let addresses = addresses(peers, |peer| peer.lanes.get(usize::from(lane.0)).copied());
        let start = start(port, Purpose::Data(lane), addresses);
        let (sender, new) = mpsc::channel(NEW_STREAMS_MAX);
        stream_senders.push(sender);
        let configs = (lane_config(settings, lane, &plugins), stream_config(settings, lane, peers, new));
        lanes.push(network::spawn(configs, start, report_sender.clone())?);
    }
    let streams = StreamGate::new(stream_senders, common_lanes(peers));
    for lane in (settings.tuning.lanes()..settings.tuning.threads()).map(Lane) {
        lanes.push(local::spawn(lane_config(settings, lane, &plugins), report_sender.clone())?);
    }
    if let Some(gpus) = gpus.used() {
        let lane = Lane(settings.tuning.threads());
        lanes.push(device::lane::spawn(gpus::lane_config(settings, (lane, world), gpus), report_sender)?);
    }
    Ok((lanes, streams, reports, plugins))
}

/// Serves the admin pages; returns their address, which it writes to a file, and what sends metrics elsewhere.
async fn serve_admin(
    args: &SidecarArgs,
    (settings, peers): (&Settings, &[Peer]),
    commands: &mpsc::Sender<ControlCommand>,
    directory: &RuntimeDir,
) -> anyhow::Result<(SocketAddr, Option<Exporter>)> {
    let pages = admin::Pages::new(commands.clone(), settings.job.clone());
    let address = admin::serve(pages.clone(), standalone::admin_address(args).await?).await?;
    directory.write_admin(address)?;
    let exporter = Exporter::start(settings.tuning.otlp.settings()?, pages, (settings.me, host_of(settings, peers)));
    Ok((address, exporter.context(Code::SidecarSettings)?))
}

/// Serves gRPC-Web if it is enabled; returns its address and what receives new certificates for it.
fn serve_web(
    settings: &Settings,
    identity: &Identity,
    service: &Arc<Service>,
    tokens: &HashMap<WorkerNumber, RankToken>,
    commands: &mpsc::Sender<ControlCommand>,
) -> anyhow::Result<(Option<SocketAddr>, Option<Arc<MutualTls>>)> {
    let Some(wanted) = settings.tuning.web.settings()? else { return Ok((None, None)) };
    let pages = admin::Pages::new(commands.clone(), settings.job.clone());
    // Without an elastic job, the number of a worker is its rank.
    let tokens = tokens.iter().map(|(worker, token)| (Rank(worker.0), *token));
    let served = web::serve(&wanted, identity, Arc::clone(service), pages, tokens)?;
    Ok((Some(served.address), served.tls))
}

fn lane_config(settings: &Settings, lane: Lane, plugins: &Arc<Plugins>) -> LaneConfig {
    let plugins = Arc::clone(plugins);
    LaneConfig { me: settings.me, lane, early_grant_bytes: settings.early_grant_bytes(), plugins }
}

fn stream_config(settings: &Settings, lane: Lane, peers: &[Peer], new: mpsc::Receiver<NewStream>) -> StreamConfig {
    StreamConfig {
        me: settings.me,
        lane,
        job: job_number(&settings.job),
        sidecars: peers.iter().map(|peer| SidecarIndex(peer.sidecar)).collect(),
        peer_timeout: Duration::from_millis(settings.tuning.peer_timeout_ms()),
        new,
        secret: random_bytes,
    }
}

fn engine_config(settings: &Settings, membership: &Membership, world: &World) -> EngineConfig {
    let defaults = EngineConfig::new(settings.me, world.clone());
    EngineConfig {
        lanes: settings.tuning.lanes(),
        chunk_bytes: settings.tuning.chunk_bytes,
        cost: tuning::known(settings),
        measured_gamma_us_per_byte: tuning::measured_gamma(settings),
        autotune: tuning::autotune(settings),
        threads: settings.tuning.threads(),
        threads_used_max: settings.tuning.local_lanes.unwrap_or(defaults.threads_used_max),
        peer_timeout_ms: settings.tuning.peer_timeout_ms(),
        fusion_threshold_bytes: settings.tuning.fusion_threshold_bytes(),
        separates_small_tensors: settings.tuning.gpu,
        eager_bytes: settings.tuning.eager_bytes.unwrap_or(defaults.eager_bytes),
        run_ahead: run_ahead(settings),
        announce_slots: settings.tuning.cache_capacity.unwrap_or(defaults.announce_slots),
        hierarchical_allreduce: settings.tuning.hierarchical_allreduce(),
        stall_warning_ms: settings.tuning.stall_warning_ms().unwrap_or(defaults.stall_warning_ms),
        stall_shutdown_ms: settings.tuning.stall_shutdown_ms(),
        replace_stalled_ms: settings.replace_stalled_ms,
        result_bytes_max: settings.tuning.arena_bytes_max(),
        host: host_of(settings, &membership.peers),
        epochs_after: if settings.elastic { Epoch::before_membership(membership.number) } else { Epoch(0) },
        control_fan_out: settings.control_fan_out,
        ..defaults
    }
}

/// Returns when schedules are issued, if they are enabled and the request cache has room.
fn run_ahead(settings: &Settings) -> Option<RunAhead> {
    let defaults = RunAhead::default();
    let tensors_max = settings.tuning.cache_capacity.unwrap_or(defaults.tensors_max);
    (!settings.tuning.no_run_ahead && tensors_max > 0).then_some(RunAhead { tensors_max, ..defaults })
}

fn description(settings: &Settings, peers: &[Peer], world: &World) -> v1::Description {
    v1::Description {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol_min: PROTOCOL_VERSION_MIN,
        protocol_max: PROTOCOL_VERSION,
        job: settings.job.to_string(),
        sidecar: settings.me.0,
        host: host_of(settings, peers),
        ranks: world.ranks_of(settings.me).into_iter().map(|rank| rank.0).collect(),
    }
}

/// Returns the name of this sidecar's host, as its peers know it.
fn host_of(settings: &Settings, peers: &[Peer]) -> String {
    peers.iter().find(|peer| peer.sidecar == settings.me.0).map(|peer| peer.host.clone()).unwrap_or_default()
}

/// Messages from workers queued for the control thread; a full queue slows the workers' streams down.
const COMMANDS_MAX: usize = 4_096;
/// Commands of the rest of the process queued for the control thread; a full queue blocks their senders.
const CONTROL_COMMANDS_MAX: usize = 256;
/// Reports of lanes queued for the control thread; a full queue slows the lanes down.
const REPORTS_MAX: usize = 4_096;
/// How often the sidecar checks whether the launcher reads its messages.
const UNDELIVERED_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long sessions may continue after the sidecar was asked to shut down.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

impl Driver {
    /// Logs the counters of this sidecar.
    async fn summary(&mut self) -> Summary {
        let snapshot = self.snapshot().await;
        let ports = snapshot.lanes.iter().map(|lane| lane.port).chain([snapshot.control]);
        let (sealed_bytes, opened_bytes) =
            ports.fold((0, 0), |(sealed, opened), port| (sealed + port.sealed_bytes, opened + port.opened_bytes));
        Summary {
            sealed_bytes,
            opened_bytes,
            operations: snapshot.engine.executed,
            tensors: snapshot.engine.tensors_executed,
            last_to_be_ready: snapshot.status.last_to_be_ready,
            cost: snapshot.status.measured_cost.map(tuning::measured),
        }
    }
}
