//! One `ronde sidecar --bootstrap`, with the test as its launcher.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use ronde_transport::{JobCa, TrustDomain, Validity};
use ronde_wire::control::Transport;
use ronde_wire::{JobName, SidecarIndex};
use serde_json::{Value, json};

use super::process::{Line, Process};
use super::{PATIENCE, ronde_binary};

/// How a sidecar is started.
#[derive(Clone, Debug)]
pub struct SidecarOptions {
    /// The job's name.
    pub job: String,
    /// Its index.
    pub index: u32,
    /// The address to listen on.
    pub address: String,
    /// Where its session directory is made.
    pub runtime_dir: PathBuf,
    /// Silence after which a peer is dead; the default when absent.
    pub peer_timeout_ms: Option<u64>,
    /// How long connecting the links may take.
    pub start_timeout_ms: u64,
    /// The most bytes of inputs, and of results, of one session; the default when absent.
    pub arena_bytes_max: Option<u64>,
    /// Bytes of one bucket; the default when absent.
    pub fusion_threshold_bytes: Option<u64>,
    /// The search for better settings, as the launcher sends it.
    pub autotune: Value,
    /// The chunk size; the default when absent.
    pub chunk_bytes: Option<u32>,
    /// Bytes of a contribution up to which operations travel eagerly, 0 for none.
    pub eager_bytes: Option<u32>,
    /// Whether repeated operations run ahead without negotiation; they do by default.
    pub run_ahead: Option<bool>,
    /// The capacity of the request cache.
    pub cache_capacity: Option<usize>,
    /// Whether an all-reduce begins among the ranks of a sidecar.
    pub hierarchical_allreduce: Option<bool>,
    /// The cores of its threads, any when empty.
    pub thread_affinity: Vec<usize>,
    /// Age after which a tensor that waits for some ranks is reported; the default when absent.
    pub stall_warning_ms: Option<u64>,
    /// Age after which such a tensor ends the epoch; never when absent.
    pub stall_shutdown_ms: Option<u64>,
    /// The fan-out of the tree of control links; the default when absent.
    pub control_fan_out: Option<usize>,
    /// The transport of links.
    pub transport: Transport,
    /// The sources of plugins and which are trusted, as the launcher sends them.
    pub plugins: Value,
    /// The gRPC-Web settings, as the launcher sends them; null for none.
    pub web: Value,
    /// Where metrics are exported to, as the launcher sends it; null for nowhere.
    pub otlp: Value,
    /// The filter of its log.
    pub log: String,
    /// Whether the membership of the job may change.
    pub elastic: bool,
    /// The network namespace to run in.
    pub namespace: Option<String>,
}

impl SidecarOptions {
    /// Returns the settings that a launcher sends; absent ones are left out.
    fn tuning(&self) -> Value {
        let mut tuning = json!({
            "peer_timeout_ms": self.peer_timeout_ms,
            "arena_bytes_max": self.arena_bytes_max,
            "fusion_threshold_bytes": self.fusion_threshold_bytes,
            "eager_bytes": self.eager_bytes,
            "no_run_ahead": self.run_ahead.map(|wanted| !wanted),
            "cache_capacity": self.cache_capacity,
            "no_hierarchical_allreduce": self.hierarchical_allreduce.map(|wanted| !wanted),
            "thread_affinity": self.thread_affinity,
            "stall_warning_ms": self.stall_warning_ms,
            "stall_shutdown_ms": self.stall_shutdown_ms,
            "transport": self.transport,
            "plugins": self.plugins,
            "web": self.web,
            "otlp": self.otlp,
            "autotune": self.autotune,
            "chunk_bytes": self.chunk_bytes,
        });
        if let Some(settings) = tuning.as_object_mut() {
            settings.retain(|_, value| !value.is_null());
        }
        tuning
    }
}

/// A running sidecar process.
#[derive(Debug)]
pub struct Sidecar {
    /// The process.
    pub process: Process,
    /// Its index.
    pub index: u32,
    /// Its `bound` message.
    pub bound: Value,
    /// Its `serving` message; null before.
    pub serving: Value,
}

impl Sidecar {
    /// Starts it and waits until it is bound.
    ///
    /// # Errors
    /// When it is not, with its output.
    pub fn start(options: &SidecarOptions) -> Result<Self> {
        let SidecarOptions { index, namespace, .. } = options;
        let mut command = match namespace {
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(ronde_binary()?);
                command
            }
            None => Command::new(ronde_binary()?),
        };
        command.args(["sidecar", "--bootstrap"]).env("RONDE_LOG", &options.log);
        let mut process = Process::start(format!("sidecar {index}"), &mut command)?;
        let start = json!({
            "type": "start",
            "job": options.job,
            "trust_domain": TRUST_DOMAIN,
            "sidecar": index,
            "addresses": [options.address],
            "runtime_dir": options.runtime_dir,
            "start_timeout_ms": options.start_timeout_ms,
            "control_fan_out": options.control_fan_out,
            "elastic": options.elastic,
            "tuning": options.tuning(),
        });
        process.write_line(&start.to_string())?;
        let bound = process.await_line("the bound line", PATIENCE, |line| message(line, "bound"))?;
        Ok(Self { process, index: *index, bound, serving: Value::Null })
    }

    /// Its certificate request.
    ///
    /// # Errors
    /// When it sent none.
    pub fn certificate_request(&self) -> Result<&str> {
        self.bound["certificate_request"].as_str().context("a bound line has a certificate request")
    }

    /// The address for its peers.
    #[must_use]
    pub fn as_peer(&self) -> Value {
        let Self { index, bound, .. } = self;
        let host = format!("host-{index}");
        json!({ "sidecar": index, "host": host, "control": bound["control"], "lanes": bound["lanes"] })
    }

    /// Sends the join message.
    ///
    /// # Errors
    /// When it does not read.
    pub fn join(&mut self, certificate: &str, ca: &str, peers: &[Value], placement: &[u32]) -> Result<()> {
        let seat = |(worker, sidecar)| json!({ "worker": worker, "sidecar": sidecar });
        let seats: Vec<Value> = placement.iter().enumerate().map(seat).collect();
        self.join_membership(certificate, ca, &json!({ "number": 1, "peers": peers, "seats": seats }))
    }

    /// Sends the join message with a later membership of an elastic job.
    ///
    /// # Errors
    /// When it does not read.
    pub fn join_membership(&mut self, certificate: &str, ca: &str, membership: &Value) -> Result<()> {
        let join = json!({
            "type": "join",
            "certificate": certificate,
            "ca_certificate": ca,
            "membership": membership,
        });
        self.process.write_line(&join.to_string())
    }

    /// Waits until workers can connect.
    ///
    /// # Errors
    /// When it does not serve, with its output.
    pub fn await_serving(&mut self) -> Result<()> {
        self.serving = self.process.await_line("the serving line", PATIENCE, |line| message(line, "serving"))?;
        Ok(())
    }

    /// Waits for its fatal message: the reason why it ends.
    ///
    /// # Errors
    /// When it has none.
    pub fn await_fatal(&mut self, within: Duration) -> Result<String> {
        let fatal = self.process.await_line("its fatal line", within, |line| message(line, "fatal"))?;
        Ok(fatal["reason"].as_str().context("a fatal line has a reason")?.to_owned())
    }

    /// Waits for its summary, which it sends after draining.
    ///
    /// # Errors
    /// When it does not come.
    pub fn await_ended(&mut self, within: Duration) -> Result<Value> {
        let ended = self.process.await_line("its summary", within, |line| message(line, "ended"))?;
        Ok(ended["summary"].clone())
    }

    /// Its session directory.
    ///
    /// # Errors
    /// Before it serves.
    pub fn socket_dir(&self) -> Result<&Path> {
        self.serving["socket_dir"].as_str().map(Path::new).context("the sidecar does not serve yet")
    }

    /// The token file of a rank.
    ///
    /// # Errors
    /// When the rank is not served here.
    pub fn token_file(&self, rank: u32) -> Result<&Path> {
        let files = self.serving["token_files"].as_array().context("the sidecar does not serve yet")?;
        let file =
            files.iter().find(|file| file["worker"] == rank).with_context(|| format!("no token for rank {rank}"))?;
        file["path"].as_str().map(Path::new).context("a token file has a path")
    }

    /// One of its admin pages: the status line and the body.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn page(&self, path: &str) -> Result<(String, String)> {
        let mut stream = TcpStream::connect_timeout(&self.admin()?, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: sidecar\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("an answer of HTTP has a head")?;
        Ok((head.lines().next().unwrap_or_default().to_owned(), body.to_owned()))
    }

    /// Its status page.
    ///
    /// # Errors
    /// When it does not answer, or not with JSON.
    pub fn status(&self) -> Result<Value> {
        let (head, body) = self.page("/status")?;
        ensure!(head.contains("200"), "{head}");
        serde_json::from_str(&body).context("the status page is JSON")
    }

    /// Polls its status page until it matches.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn await_status(&self, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.status()?;
            if is(&status) {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "sidecar {}: waited {PATIENCE:?}; its status is {status:#}", self.index);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Where its admin pages are.
    ///
    /// # Errors
    /// Before it serves.
    pub fn admin(&self) -> Result<SocketAddr> {
        self.serving["admin"].as_str().context("the sidecar does not serve yet")?.parse().context("an address")
    }
}

/// A job's certificate authority.
#[derive(Debug)]
pub struct Authority(JobCa);

impl Authority {
    /// Creates a new one.
    ///
    /// # Errors
    /// When the job's name or the key cannot be made.
    pub fn new(job: &str) -> Result<Self> {
        let ca = JobCa::generate(JobName::new(job)?, TrustDomain::new(TRUST_DOMAIN)?, an_hour())?;
        Ok(Self(ca))
    }

    /// Signs a sidecar's request for an index.
    ///
    /// # Errors
    /// When the request cannot be read.
    pub fn issue(&self, request: &str, index: u32) -> Result<String> {
        Ok(self.0.issue(request, SidecarIndex(index), an_hour())?)
    }

    /// The same with this validity.
    ///
    /// # Errors
    /// When the request cannot be read.
    pub fn issue_for(&self, request: &str, index: u32, time: Duration) -> Result<String> {
        Ok(self.0.issue(request, SidecarIndex(index), Validity::starting(SystemTime::now(), time))?)
    }

    /// The same, expired.
    ///
    /// # Errors
    /// When the request cannot be read.
    pub fn issue_expired(&self, request: &str, index: u32) -> Result<String> {
        let now = SystemTime::now();
        let validity =
            Validity { not_before: now - Duration::from_secs(7_200), not_after: now - Duration::from_secs(60) };
        Ok(self.0.issue(request, SidecarIndex(index), validity)?)
    }

    /// The same, not valid yet.
    ///
    /// # Errors
    /// When the request cannot be read.
    pub fn issue_early(&self, request: &str, index: u32) -> Result<String> {
        let later = SystemTime::now() + Duration::from_secs(3_600);
        let validity = Validity { not_before: later, not_after: later + Duration::from_secs(3_600) };
        Ok(self.0.issue(request, SidecarIndex(index), validity)?)
    }

    /// The authority's certificate.
    #[must_use]
    pub fn certificate(&self) -> &str {
        self.0.ca_certificate_pem()
    }
}

fn an_hour() -> Validity {
    Validity::starting(SystemTime::now(), Duration::from_secs(3_600))
}

/// Returns a line's object if it has this type.
#[must_use]
pub fn message(line: &Line, kind: &str) -> Option<Value> {
    let value: Value = serde_json::from_str(&line.text).ok()?;
    (value["type"] == kind).then_some(value)
}

/// Fails when a sidecar has reported that it must end.
///
/// # Errors
/// With its reason.
pub fn check_alive(sidecar: &mut Sidecar) -> Result<()> {
    match sidecar.await_fatal(Duration::ZERO) {
        Ok(reason) => bail!("sidecar {} cannot go on: {reason}", sidecar.index),
        Err(_) => Ok(()),
    }
}

const TRUST_DOMAIN: &str = "ronde.test";
const POLL_INTERVAL: Duration = Duration::from_millis(5);
