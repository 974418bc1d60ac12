//! `ronde agent`: the launcher's agent on one host. It starts sidecars and workers, forwards their messages and output, and
//! ensures that none outlives the launcher: when its input ends, it ends everything it started.
//!
//! The main loop never waits for the launcher to read. Every process has its own task (`worker`, `sidecar`), which waits
//! for the bounded queue to the launcher and still executes orders to end the process.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::exit::write_error;
use ronde_bootstrap::interfaces;
use ronde_bootstrap::messages::ToSidecar;
use tokio::io::{AsyncWriteExt, BufReader, BufWriter};
use tokio::net::TcpSocket;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, timeout};

use self::memory::MemoryWatch;
use crate::envelope::{self, Environment, FromAgent, ToAgent};

pub mod exec;
mod group;
mod memory;
mod notices;
mod orphans;
mod sidecar;
mod stream;
mod worker;

use group::Orders;
pub(crate) use group::{Group, Order};
use notices::{Advice, Notices, Reported, Terminated};
pub(crate) use stream::{TAIL_LINE_BYTES, TAIL_LINES};

/// Serves a launcher on standard input and output until the input ends.
pub fn main() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error.into()),
    };
    let served = runtime.block_on(serve());
    // A read of standard input cannot be interrupted; the process does not wait for it.
    runtime.shutdown_background();
    served.map_or_else(|error| failed(&error), |()| ExitCode::SUCCESS)
}

/// The sending side of the queue to the launcher.
pub(super) type ToLauncher = mpsc::Sender<FromAgent>;

async fn serve() -> anyhow::Result<()> {
    nix::sys::prctl::set_child_subreaper(true).context("cannot become the parent of orphaned worker processes")?;
    let mut leave_signals = LeaveSignals::install()?;
    let (launcher, queue) = mpsc::channel(QUEUE_TO_LAUNCHER);
    let writer = tokio::spawn(write_queue(queue));
    let mut commands = read_commands();
    let mut agent = Agent::new(launcher)?;
    agent.send_hello().await;
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => agent.execute(command).await,
                None => break,
            },
            kind = leave_signals.recv() => if !agent.takes_notice(kind).await { break },
            reported = notices::next(&mut agent.notices) => match reported {
                Ok(reported) => agent.worker_terminated(reported).await,
                Err(notices::Over) => break,
            },
            () = next_beat(&mut agent.beats) => agent.beat(),
        }
    }
    tokio::select! {
        () = agent.leave() => {}
        _ = leave_signals.recv() => agent.kill().await,
    }
    drop(agent);
    // The launcher may have exited; then nobody reads the rest.
    let _ = timeout(FLUSH_WAIT, writer).await;
    Ok(())
}

/// The processes of this host and their shared state.
struct Agent {
    launcher: ToLauncher,
    /// Reserves the port that was reported to the launcher for a server of the workers.
    port: TcpSocket,
    directory: PathBuf,
    environment: Environment,
    workers: JoinSet<()>,
    workers_orders: Orders,
    sidecars: JoinSet<()>,
    sidecars_orders: Orders,
    sidecar_lines: BTreeMap<u32, mpsc::Sender<ToSidecar>>,
    /// The input of the workers that take any.
    inputs: BTreeMap<u32, mpsc::Sender<String>>,
    memory: MemoryWatch,
    /// When the launcher is to be notified that this host is up.
    beats: Option<Interval>,
    /// Whether SIGTERM is a notice that the host is about to be taken away.
    notices: Option<Notices>,
}

impl Agent {
    fn new(launcher: ToLauncher) -> anyhow::Result<Self> {
        Ok(Self {
            launcher,
            port: reserved_port().context("cannot find a free port")?,
            directory: PathBuf::from("/"),
            environment: Environment::new(),
            workers: JoinSet::new(),
            workers_orders: Orders::default(),
            sidecars: JoinSet::new(),
            sidecars_orders: Orders::default(),
            sidecar_lines: BTreeMap::new(),
            inputs: BTreeMap::new(),
            memory: MemoryWatch::new(),
            beats: None,
            notices: None,
        })
    }

    async fn send_hello(&self) {
        let port = self.port.local_addr().map_or(0, |address| address.port());
        let hostname = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let interfaces = interfaces::of_this_host().into_iter().take(INTERFACES_MAX).collect();
        self.send(FromAgent::Hello { version, hostname, interfaces, port }).await;
    }

    async fn execute(&mut self, command: ToAgent) {
        match command {
            ToAgent::Prepare { directory, environment } => self.prepare(directory, environment).await,
            ToAgent::StartSidecar { sidecar, program, environment } => {
                self.start_sidecar(sidecar, program, environment).await;
            }
            ToAgent::Sidecar { sidecar, line } => self.pass_on(sidecar, line).await,
            ToAgent::StartWorker { worker, sidecar, command, environment, takes_input } => {
                self.start_worker((worker, sidecar), command, environment, takes_input).await;
            }
            ToAgent::Input { worker, text } => self.pass_input(worker, text).await,
            ToAgent::StopWorkers { grace_ms } => self.stop_workers(Duration::from_millis(grace_ms)),
            ToAgent::StopWorker { worker, grace_ms } => {
                self.workers_orders.stop(worker, Duration::from_millis(grace_ms));
            }
            ToAgent::CloseSidecars => self.close_sidecars(),
            ToAgent::CloseSidecar { sidecar } => {
                self.sidecar_lines.remove(&sidecar);
                self.sidecars_orders.stop(sidecar, sidecar::DRAIN_WAIT);
            }
            ToAgent::Beat { interval_ms } => self.begin_to_beat(Duration::from_millis(interval_ms.max(1))),
            ToAgent::TakeNotices { notice_ms } => match Notices::start(Duration::from_millis(notice_ms)) {
                Ok(notices) => self.notices = Some(notices),
                Err(error) => self.send(FromAgent::Notice { text: format!("{error:#}") }).await,
            },
            ToAgent::Kill => self.kill_all(),
        }
    }

    /// Takes a signal as a notice, if it is the first SIGTERM of an elastic job.
    async fn takes_notice(&mut self, kind: SignalKind) -> bool {
        let is_notice = kind == SignalKind::terminate() && self.notices.as_mut().is_some_and(Notices::take);
        if is_notice {
            self.send(FromAgent::Preempted { worker: None }).await;
        }
        is_notice
    }

    /// A worker has received SIGTERM, by an order of the launcher or from elsewhere.
    async fn worker_terminated(&mut self, (Terminated { worker }, reply): Reported) {
        let end_now = self.workers_orders.is_ordered(worker);
        if !end_now {
            self.send(FromAgent::Preempted { worker: Some(worker) }).await;
        }
        // The worker may have ended meanwhile.
        let _ = reply.send(Advice { end_now });
    }

    fn begin_to_beat(&mut self, interval: Duration) {
        let mut beats = tokio::time::interval(interval);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.beats = Some(beats);
    }

    fn beat(&self) {
        // When the queue is full, the launcher receives other messages.
        let _ = self.launcher.try_send(FromAgent::Beat);
    }

    async fn prepare(&mut self, directory: PathBuf, environment: Environment) {
        if !directory.is_dir() {
            let reason = format!(
                "the directory {} is not on this host; workers run where `ronde run` was started",
                directory.display()
            );
            self.send(FromAgent::Refused { reason }).await;
        }
        self.directory = directory;
        self.environment = environment;
    }

    async fn start_sidecar(&mut self, sidecar: u32, program: Option<Vec<String>>, environment: Environment) {
        let order = self.sidecars_orders.subscribe(sidecar);
        match sidecar::Sidecar::start(sidecar, program, environment) {
            Ok((started, lines)) => {
                self.sidecar_lines.insert(sidecar, lines);
                self.sidecars.spawn(started.supervise(self.launcher.clone(), order));
            }
            Err(error) => self.send(FromAgent::Refused { reason: format!("sidecar {sidecar}: {error:#}") }).await,
        }
    }

    /// Forwards a line to a sidecar. A sidecar always reads, so this wait is short; one that has ended has closed its queue.
    async fn pass_on(&self, sidecar: u32, line: ToSidecar) {
        if let Some(lines) = self.sidecar_lines.get(&sidecar) {
            // Its end is reported by the task that waits for it.
            let _ = lines.send(line).await;
        }
    }

    /// Passes on a piece of input, of which only one is under way.
    async fn pass_input(&mut self, worker: u32, text: String) {
        if text.is_empty() {
            self.inputs.remove(&worker);
            return;
        }
        let is_passed = self.inputs.get(&worker).is_some_and(|input| input.try_send(text).is_ok());
        if !is_passed {
            // Its worker reads no more.
            self.send(FromAgent::InputTaken { worker }).await;
        }
    }

    async fn start_worker(
        &mut self,
        (number, sidecar): (u32, u32),
        command: Vec<String>,
        own: Environment,
        takes_input: bool,
    ) {
        let notices = self.notices.as_ref().map(Notices::variable);
        let environment = self.environment.iter().cloned().chain(own).chain(notices);
        match worker::Worker::start(number, &command, environment, &self.directory, takes_input) {
            Ok(mut worker) => {
                if let Some(input) = worker.pass_input(self.launcher.clone()) {
                    self.inputs.insert(number, input);
                }
                self.send(FromAgent::WorkerStarted { worker: number, pid: worker.pid() }).await;
                let memory = self.memory.worker(worker.pid());
                // A weak sender: only this agent decides when the input of a sidecar ends.
                let sidecar = self.sidecar_lines.get(&sidecar).map(mpsc::Sender::downgrade);
                let receivers = worker::Receivers { launcher: self.launcher.clone(), sidecar };
                let orders = self.workers_orders.subscribe(number);
                self.workers.spawn(worker.supervise(receivers, memory, orders));
            }
            Err(error) => self.send(FromAgent::Refused { reason: format!("worker {number}: {error:#}") }).await,
        }
    }

    fn stop_workers(&mut self, grace: Duration) {
        self.workers_orders.stop_all(grace);
    }

    fn close_sidecars(&mut self) {
        self.sidecar_lines.clear();
        self.sidecars_orders.stop_all(sidecar::DRAIN_WAIT);
    }

    fn kill_all(&mut self) {
        self.workers_orders.kill_all();
        self.sidecars_orders.kill_all();
    }

    /// Ends everything in order: workers, sidecars, then orphans of workers.
    async fn leave(&mut self) {
        self.stop_workers(LEAVE_GRACE);
        // A task that waits for the launcher to read ends no later than these bounds; its process has ended before.
        let _ = timeout(LEAVE_GRACE + TASK_SLACK, drained(&mut self.workers)).await;
        self.close_sidecars();
        let _ = timeout(sidecar::DRAIN_WAIT + TASK_SLACK, drained(&mut self.sidecars)).await;
        self.kill().await;
    }

    async fn kill(&mut self) {
        self.kill_all();
        let _ = timeout(TASK_SLACK, drained(&mut self.workers)).await;
        let _ = timeout(TASK_SLACK, drained(&mut self.sidecars)).await;
        orphans::kill_all();
    }

    async fn send(&self, message: FromAgent) {
        // Fails only after the writer has ended, with the process.
        let _ = self.launcher.send(message).await;
    }
}

/// The signals that have the same effect as the end of input, except for a notice.
struct LeaveSignals([Signal; 3]);

impl LeaveSignals {
    fn install() -> anyhow::Result<Self> {
        let of = |kind| signal(kind).context("cannot handle signals");
        Ok(Self([of(SignalKind::terminate())?, of(SignalKind::interrupt())?, of(SignalKind::hangup())?]))
    }

    async fn recv(&mut self) -> SignalKind {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => SignalKind::terminate(),
            _ = interrupt.recv() => SignalKind::interrupt(),
            _ = hangup.recv() => SignalKind::hangup(),
        }
    }
}

async fn next_beat(beats: &mut Option<Interval>) {
    match beats {
        Some(beats) => {
            beats.tick().await;
        }
        None => std::future::pending().await,
    }
}

/// Reads commands until the input ends or is invalid, which ends the queue.
fn read_commands() -> mpsc::Receiver<ToAgent> {
    let (commands, queue) = mpsc::channel(QUEUE_OF_COMMANDS);
    tokio::spawn(async move {
        let mut input = BufReader::new(tokio::io::stdin());
        loop {
            match envelope::read(&mut input).await {
                Ok(Some(command)) => {
                    if commands.send(command).await.is_err() {
                        break;
                    }
                }
                Ok(None) => break,
                Err(error) => {
                    let text = format!("cannot parse a message of the launcher: {error}");
                    write_error(&format!("ronde agent: {}", Code::AgentFailed.append_to(&text)));
                    break;
                }
            }
        }
    });
    queue
}

/// Writes the queue to the launcher. After the launcher has exited it drains the queue, so that no task waits for it.
async fn write_queue(mut queue: mpsc::Receiver<FromAgent>) {
    let mut output = BufWriter::with_capacity(OUTPUT_BUFFER_BYTES, tokio::io::stdout());
    let mut launcher_reads = true;
    while let Some(message) = queue.recv().await {
        if launcher_reads {
            let written = envelope::write(&mut output, &message).await;
            let flushed = if queue.is_empty() { output.flush().await } else { Ok(()) };
            launcher_reads = written.and(flushed).is_ok();
        }
    }
}

async fn drained(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}

/// Binds a port at which nothing listens. While the socket exists, the kernel gives the port to nobody who binds any free one, or
/// connects. A server that names it can bind it, too: both allow reuse of their address, as servers do.
fn reserved_port() -> std::io::Result<TcpSocket> {
    let reserved = TcpSocket::new_v4()?;
    reserved.set_reuseaddr(true)?;
    reserved.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
    Ok(reserved)
}

/// The path of this binary, which workers and sidecars are started from.
fn own_binary() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find the ronde binary")
}

fn failed(error: &anyhow::Error) -> ExitCode {
    write_error(&format!("ronde agent: {}", coded(error, Code::AgentFailed)));
    ExitCode::from(Code::of_error(error, Code::AgentFailed).exit_status())
}

/// Messages queued for the launcher: 4 MiB with 64 KiB of output each.
const QUEUE_TO_LAUNCHER: usize = 64;
const QUEUE_OF_COMMANDS: usize = 64;
/// A host of many containers has a few hundred addresses; the launcher chooses among the first of them.
pub(crate) const INTERFACES_MAX: usize = 512;
const OUTPUT_BUFFER_BYTES: usize = 256 << 10;
/// The time between SIGTERM and SIGKILL after the launcher has exited.
const LEAVE_GRACE: Duration = Duration::from_secs(5);
/// The time that a task needs to report after its process has ended.
const TASK_SLACK: Duration = Duration::from_secs(3);
const FLUSH_WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_reserved_port_refuses_connections_until_a_server_binds_it() {
        let reserved = reserved_port().expect("a free port");
        let port = reserved.local_addr().expect("it is bound").port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect_err("nothing listens");
        let addresses: [IpAddr; 3] =
            [Ipv4Addr::LOCALHOST.into(), Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        for address in addresses {
            // A machine without IPv6 has none of its addresses.
            let Ok(_server) = TcpListener::bind(SocketAddr::new(address, port)) else {
                assert!(address.is_ipv6(), "{address} cannot be bound");
                continue;
            };
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("it listens");
        }
    }
}
