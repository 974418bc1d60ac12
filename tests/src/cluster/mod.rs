//! Real sidecars and workers, with the test as their launcher: nothing else ends them, and each can be killed, stopped,
//! cut off or started with another certificate.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ronde_wire::control::Transport;
use serde_json::{Value, json};
use tempfile::TempDir;

pub mod capture;
pub mod membership;
pub mod nccl;
pub mod network;
pub mod process;
pub mod resources;
pub mod sidecar;
pub mod worker;

pub use capture::{Capture, Captured};
pub use network::{Network, Shape};
pub use process::{Line, Process};
pub use resources::Resident;
pub use sidecar::{Authority, Sidecar, SidecarOptions, message};
pub use worker::{Failed, Outcome, Worker, sum};

/// A job: sidecars by index, workers by rank.
#[derive(Debug)]
pub struct Cluster {
    /// By index.
    pub sidecars: Vec<Sidecar>,
    /// By rank.
    pub workers: Vec<Worker>,
    /// The job's name.
    pub job: String,
    /// For each rank the index of its sidecar.
    pub placement: Vec<u32>,
    program: PathBuf,
    _directory: TempDir,
}

/// How a job is started.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    placement: Vec<u32>,
    peer_timeout_ms: Option<u64>,
    arena_bytes_max: Option<u64>,
    fusion_threshold_bytes: Option<u64>,
    eager_bytes: Option<u32>,
    run_ahead: Option<bool>,
    cache_capacity: Option<usize>,
    hierarchical_allreduce: Option<bool>,
    thread_affinity: Vec<usize>,
    stall_ms: Option<(u64, u64)>,
    control_fan_out: Option<usize>,
    transport: Transport,
    plugins: Vec<Value>,
    web: Value,
    otlp: Value,
    autotune: Value,
    chunk_bytes: Option<u32>,
    log: String,
    elastic: bool,
    authority: Option<&'a Authority>,
    network: Option<&'a Network>,
}

impl<'a> Plan<'a> {
    /// A job with this sidecar for each rank.
    #[must_use]
    pub fn of(placement: &[u32]) -> Self {
        Self {
            placement: placement.to_vec(),
            peer_timeout_ms: None,
            arena_bytes_max: None,
            fusion_threshold_bytes: None,
            eager_bytes: None,
            run_ahead: None,
            cache_capacity: None,
            hierarchical_allreduce: None,
            thread_affinity: Vec::new(),
            stall_ms: None,
            control_fan_out: None,
            transport: Transport::Auto,
            plugins: Vec::new(),
            web: Value::Null,
            otlp: Value::Null,
            autotune: Value::Null,
            chunk_bytes: None,
            log: "info".to_owned(),
            elastic: false,
            authority: None,
            network: None,
        }
    }

    /// With a timeout after which a silent peer is dead.
    #[must_use]
    pub fn peer_timeout_ms(self, milliseconds: u64) -> Self {
        Self { peer_timeout_ms: Some(milliseconds), ..self }
    }

    /// With a limit on the bytes of a session.
    #[must_use]
    pub fn arena_bytes_max(self, bytes: u64) -> Self {
        Self { arena_bytes_max: Some(bytes), ..self }
    }

    /// With this many bytes in a bucket, 0 for no fusion.
    #[must_use]
    pub fn fusion_threshold_bytes(self, bytes: u64) -> Self {
        Self { fusion_threshold_bytes: Some(bytes), ..self }
    }

    /// With this many bytes of a contribution that may travel eagerly, 0 for none.
    #[must_use]
    pub fn eager_bytes(self, bytes: u32) -> Self {
        Self { eager_bytes: Some(bytes), ..self }
    }

    /// With negotiation of every operation, including repeated ones.
    #[must_use]
    pub fn never_ahead(self) -> Self {
        Self { run_ahead: Some(false), ..self }
    }

    /// With a request cache of at most this many operations.
    #[must_use]
    pub fn cache_capacity(self, operations: usize) -> Self {
        Self { cache_capacity: Some(operations), ..self }
    }

    /// Without fusion: every tensor travels by itself.
    #[must_use]
    pub fn flat(self) -> Self {
        Self { hierarchical_allreduce: Some(false), ..self }
    }

    /// With the threads of all sidecars on these cores.
    #[must_use]
    pub fn on_cores(self, cores: &[usize]) -> Self {
        Self { thread_affinity: cores.to_vec(), ..self }
    }

    /// With stalled tensors reported after the first time and ending the epoch after the second.
    #[must_use]
    pub fn stall_ms(self, warning: u64, shutdown: u64) -> Self {
        Self { stall_ms: Some((warning, shutdown)), ..self }
    }

    /// With this fan-out of the tree of control links.
    #[must_use]
    pub fn control_fan_out(self, fan_out: usize) -> Self {
        Self { control_fan_out: Some(fan_out), ..self }
    }

    /// With links over this transport.
    #[must_use]
    pub fn transport(self, transport: Transport) -> Self {
        Self { transport, ..self }
    }

    /// With these settings about plugins, one for each sidecar, as the launcher sends them.
    #[must_use]
    pub fn plugins(self, of_sidecars: Vec<Value>) -> Self {
        Self { plugins: of_sidecars, ..self }
    }

    /// With a search for better settings, as the launcher configures it, from this chunk size.
    #[must_use]
    pub fn autotune(self, autotune: Value, chunk_bytes: u32) -> Self {
        Self { autotune, chunk_bytes: Some(chunk_bytes), ..self }
    }

    /// With gRPC-Web served by all sidecars, as the launcher configures it.
    #[must_use]
    pub fn web(self, web: Value) -> Self {
        Self { web, ..self }
    }

    /// With metrics exported by all sidecars, as the launcher configures it.
    #[must_use]
    pub fn otlp(self, otlp: Value) -> Self {
        Self { otlp, ..self }
    }

    /// With this filter of the sidecars' logs.
    #[must_use]
    pub fn log(self, filter: &str) -> Self {
        Self { log: filter.to_owned(), ..self }
    }

    /// With certificates of the test's own authority.
    #[must_use]
    pub fn issued_by(self, authority: &'a Authority) -> Self {
        Self { authority: Some(authority), ..self }
    }

    /// The same plan, for another authority.
    fn without_authority<'b>(self) -> Plan<'b>
    where
        'a: 'b,
    {
        Plan { authority: None, ..self }
    }

    /// With each sidecar on the host of its index.
    #[must_use]
    pub fn on(self, network: &'a Network) -> Self {
        Self { network: Some(network), ..self }
    }

    /// Starts sidecars and workers and waits until the epoch has begun everywhere. `program` is the scripted worker.
    ///
    /// # Errors
    /// What did not start, with its output.
    pub fn start(self, program: &str) -> Result<Cluster> {
        let mut cluster = self.sidecars(program)?;
        for rank in 0..cluster.size() {
            let worker = cluster.new_worker(rank)?;
            cluster.workers.push(worker);
        }
        cluster.workers.iter_mut().try_for_each(Worker::await_connected)?;
        Ok(cluster)
    }

    /// Starts sidecars only.
    ///
    /// # Errors
    /// What did not start, with its output.
    pub fn sidecars(self, program: &str) -> Result<Cluster> {
        let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
        let job = "test".to_owned();
        let count = self.placement.iter().max().context("a job has ranks")? + 1;
        let mut sidecars = Vec::new();
        for index in 0..count {
            sidecars.push(Sidecar::start(&self.options(&job, index, directory.path()))?);
        }
        let own = Authority::new(&job)?;
        let authority = self.authority.unwrap_or(&own);
        let peers: Vec<Value> = sidecars.iter().map(Sidecar::as_peer).collect();
        for sidecar in &mut sidecars {
            let certificate = authority.issue(sidecar.certificate_request()?, sidecar.index)?;
            sidecar.join(&certificate, authority.certificate(), &peers, &self.placement)?;
        }
        sidecars.iter_mut().try_for_each(Sidecar::await_serving)?;
        let (placement, program) = (self.placement, PathBuf::from(program));
        Ok(Cluster { sidecars, workers: Vec::new(), job, placement, program, _directory: directory })
    }

    /// How a sidecar of the job is started.
    #[must_use]
    pub fn options(&self, job: &str, index: u32, directory: &Path) -> SidecarOptions {
        SidecarOptions {
            job: job.to_owned(),
            index,
            address: self.network.map_or_else(|| "127.0.0.1".to_owned(), |network| network.address(index)),
            runtime_dir: directory.to_owned(),
            peer_timeout_ms: self.peer_timeout_ms,
            start_timeout_ms: 30_000,
            arena_bytes_max: self.arena_bytes_max,
            fusion_threshold_bytes: self.fusion_threshold_bytes,
            eager_bytes: self.eager_bytes,
            run_ahead: self.run_ahead,
            cache_capacity: self.cache_capacity,
            hierarchical_allreduce: self.hierarchical_allreduce,
            thread_affinity: self.thread_affinity.clone(),
            stall_warning_ms: self.stall_ms.map(|(warning, _)| warning),
            stall_shutdown_ms: self.stall_ms.map(|(_, shutdown)| shutdown),
            control_fan_out: self.control_fan_out,
            transport: self.transport,
            plugins: self.plugins.get(index as usize).cloned().unwrap_or_else(|| json!({})),
            web: self.web.clone(),
            otlp: self.otlp.clone(),
            autotune: self.autotune.clone(),
            chunk_bytes: self.chunk_bytes,
            log: self.log.clone(),
            elastic: self.elastic,
            namespace: self.network.map(|network| network.host(index)),
        }
    }
}

impl Cluster {
    /// The number of ranks.
    #[must_use]
    pub fn size(&self) -> u32 {
        u32::try_from(self.placement.len()).unwrap_or(u32::MAX)
    }

    /// All ranks.
    #[must_use]
    pub fn ranks(&self) -> Vec<u32> {
        (0..self.size()).collect()
    }

    /// The sidecar that serves a rank.
    #[must_use]
    pub fn sidecar_of(&self, rank: u32) -> &Sidecar {
        &self.sidecars[self.placement[rank as usize] as usize]
    }

    /// Starts a worker for a rank without waiting for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn new_worker(&self, rank: u32) -> Result<Worker> {
        Worker::start(&self.program, &self.job, rank, self.sidecar_of(rank))
    }

    /// Returns whether all sidecars have a schedule: repeated steps run ahead.
    ///
    /// # Errors
    /// When one does not answer.
    pub fn runs_ahead(&self) -> Result<bool> {
        for sidecar in &self.sidecars {
            if sidecar.status()?["schedule"].is_null() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Submits a sum of whole numbers on all ranks, and checks that all of them receive it exactly.
    ///
    /// # Errors
    /// When one does not.
    pub fn check_sum(&mut self, name: &str, elements: u64) -> Result<()> {
        let fill = crate::script::Fill::Whole { seed: crate::script::scatter(elements) };
        let ranks = self.ranks();
        let mut pending = Vec::new();
        for worker in &mut self.workers {
            pending.push(worker.submit(sum(name, elements, fill))?);
        }
        let expected = fill.digest_of_sum(&ranks, usize::try_from(elements * 4)?);
        for (worker, id) in self.workers.iter_mut().zip(pending) {
            let digest = worker.digest(id, PATIENCE)?;
            ensure!(digest == expected, "rank {}: the sum {name} of {elements} elements is wrong", worker.rank);
        }
        Ok(())
    }
}

/// Returns the binary under test: RONDE_BIN, else the one that was built next to this test.
///
/// # Errors
/// When there is none.
pub fn ronde_binary() -> Result<PathBuf> {
    let path = match std::env::var_os("RONDE_BIN") {
        Some(path) => PathBuf::from(path),
        None => {
            let test = std::env::current_exe()?;
            let profile = test.parent().and_then(Path::parent).context("tests are built into target/<profile>/deps")?;
            profile.join("ronde")
        }
    };
    ensure!(
        path.is_file(),
        "{} does not exist; build it with `cargo build -p ronde-sidecar` or set RONDE_BIN",
        path.display()
    );
    Ok(path)
}

/// The timeout for anything that takes milliseconds when nothing is wrong.
pub const PATIENCE: Duration = Duration::from_secs(30);
