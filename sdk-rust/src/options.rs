//! [`Options`]: the sidecar's directory, the rank of this worker, timeouts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ronde_rpc::{RankToken, paths};
use ronde_wire::{JobName, Rank, WorkerNumber, limits};

use crate::error::Error;
use crate::launcher::LaunchedBy;
use crate::timeline::TimelineOptions;

/// How a client finds and uses its sidecar.
#[derive(Clone, Debug)]
pub struct Options {
    /// The sidecar's session directory, which holds `rpc.sock` and `mem.sock`.
    pub socket_dir: PathBuf,
    /// The job.
    pub job: JobName,
    /// The rank to claim. In an elastic job the first one, which `worker` replaces.
    pub rank: Rank,
    /// The number of this worker in an elastic job, which it claims; it keeps it while its rank changes.
    pub worker: Option<WorkerNumber>,
    /// The file with the 32-byte token that authorizes the claim of the rank.
    pub token_file: PathBuf,
    /// The only user whose sidecar is accepted; `None` relies on the rights of the session directory and those above it.
    pub sidecar_uid: Option<u32>,
    /// How long to try to connect to the sidecar, which may still be starting.
    pub connect_timeout: Duration,
    /// How long to wait for all other ranks to attach.
    pub start_timeout: Duration,
    /// How long an operation may take before its waiter gives up; `None` for as long as it takes. Not for joins.
    pub operation_timeout: Option<Duration>,
    /// The program's name and version, for the sidecar's logs.
    pub client_name: String,
    /// How tensors reach the sidecar.
    pub transfer: Transfer,
    /// How messages reach the sidecar.
    pub ring: Ring,
    /// Whether results may stay in shared memory.
    pub mapped: bool,
    /// The timeline to record from the start; by rank 0 only.
    pub timeline: Option<TimelineOptions>,
    /// In how many levels collectives on GPUs are performed.
    pub gpu_levels: GpuLevels,
    /// Folders below which the package `nvidia-nccl` may be: Python's search path.
    pub nccl_folders: Vec<PathBuf>,
}

/// In how many levels collectives on tensors in device memory are performed. The same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GpuLevels {
    /// In one, by ronde.
    #[default]
    One,
    /// In two where that is possible and may pay, else in one: within a host by NCCL, between hosts by ronde.
    Auto,
    /// In two wherever hosts have several ranks; a rank that cannot is an error.
    Two,
}

/// How messages reach the sidecar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ring {
    /// Over a ring in shared memory, if the sidecar supports it and tensors travel through shared memory, too; else as with `Off`.
    #[default]
    Auto,
    /// On the session's gRPC stream.
    Off,
}

/// How tensors reach the sidecar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transfer {
    /// Through shared memory.
    #[default]
    Arena,
    /// Inside messages: for small tensors when shared memory is not available.
    Inline,
}

impl Options {
    /// Options for a rank whose token file is in the sidecar's session directory.
    #[must_use]
    pub fn new(socket_dir: impl Into<PathBuf>, job: JobName, rank: Rank) -> Self {
        let socket_dir = socket_dir.into();
        // Shared memory is connected later, perhaps from another working directory.
        let socket_dir = std::path::absolute(&socket_dir).unwrap_or(socket_dir);
        Self {
            token_file: paths::token_file(&socket_dir, WorkerNumber(rank.0)),
            socket_dir,
            job,
            rank,
            worker: None,
            sidecar_uid: None,
            connect_timeout: CONNECT_TIMEOUT,
            start_timeout: START_TIMEOUT,
            operation_timeout: None,
            client_name: concat!("ronde-rust ", env!("CARGO_PKG_VERSION")).to_owned(),
            transfer: Transfer::default(),
            ring: Ring::default(),
            mapped: true,
            timeline: None,
            gpu_levels: GpuLevels::default(),
            nccl_folders: Vec::new(),
        }
    }

    /// Reads the environment, as `ronde run` sets it: RONDE_SOCKET (else `$XDG_RUNTIME_DIR/ronde`, else `/run/ronde`),
    /// RONDE_JOB, RONDE_RANK (else the rank that another launcher has set), RONDE_WORKER (the number of the worker in an
    /// elastic job), RONDE_TOKEN_FILE (else the rank's file in the session directory), and, in seconds,
    /// RONDE_CONNECT_TIMEOUT, RONDE_START_TIMEOUT, RONDE_OPERATION_TIMEOUT. RONDE_SIDECAR_UID is the only user whose sidecar is
    /// accepted. RONDE_RING=0 disables the ring, RONDE_MAPPED=0 copies all results. RONDE_GPU_LEVELS is 1, 2 or auto. RONDE_TIMELINE, or else HOROVOD_TIMELINE, names the file of a timeline; DYNAMIC means that the program
    /// starts it later. RONDE_TIMELINE_MARK_CYCLES, or else HOROVOD_TIMELINE_MARK_CYCLES, is 1 to mark cycles.
    ///
    /// # Errors
    /// [`Error::Settings`] with all problems at once. Where neither RONDE_SOCKET nor RONDE_JOB is set and another launcher has
    /// started this process as one of several (see [`LaunchedBy`]), the first problem names that launcher and its variables.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_lookup(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// [`Options::from_env`] with any source of settings.
    ///
    /// # Errors
    /// [`Error::Settings`] with all problems at once.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let mut problems = Problems::default();
        problems.0.extend(other_launcher(&lookup));
        let socket_dir = problems.note(socket_dir(&lookup));
        let job = problems.note(job(&lookup));
        let rank = problems.note(rank(&lookup));
        let worker = problems.note(worker(&lookup));
        let connect = problems.note(seconds(&lookup, "RONDE_CONNECT_TIMEOUT"));
        let start = problems.note(seconds(&lookup, "RONDE_START_TIMEOUT"));
        let operation = problems.note(seconds(&lookup, "RONDE_OPERATION_TIMEOUT"));
        let sidecar_uid = problems.note(sidecar_uid(&lookup));
        let ring = problems.note(ring(&lookup));
        let mapped = problems.note(mapped(&lookup));
        let timeline = problems.note(timeline(&lookup));
        let gpu_levels = problems.note(gpu_levels(&lookup));
        let (Some(socket_dir), Some(job), Some(rank), Some(connect), Some(start), Some(operation)) =
            (socket_dir, job, rank, connect, start, operation)
        else {
            return Err(Error::Settings { problems: problems.0 });
        };
        let (Some(worker), Some(sidecar_uid), Some(ring), Some(mapped), Some(timeline), Some(gpu_levels)) =
            (worker, sidecar_uid, ring, mapped, timeline, gpu_levels)
        else {
            return Err(Error::Settings { problems: problems.0 });
        };
        let mut options = Self::new(socket_dir, job, rank);
        options.connect_timeout = connect.unwrap_or(CONNECT_TIMEOUT);
        options.start_timeout = start.unwrap_or(START_TIMEOUT);
        options.operation_timeout = operation;
        (options.worker, options.sidecar_uid) = (worker, sidecar_uid);
        (options.ring, options.mapped, options.timeline) = (ring, mapped, timeline);
        options.gpu_levels = gpu_levels;
        if let Some(path) = lookup("RONDE_TOKEN_FILE") {
            options.token_file = path.into();
        }
        Ok(options)
    }

    /// Reads the rank's token.
    pub(crate) fn read_token(&self) -> Result<RankToken, Error> {
        let path = &self.token_file;
        let refuse = |reason: String| Error::Token { path: path.clone(), reason };
        let bytes = std::fs::read(path)
            .map_err(|error| refuse(format!("{error}; RONDE_TOKEN_FILE must name the file that the sidecar wrote")))?;
        RankToken::new(&bytes).map_err(|error| refuse(error.to_string()))
    }
}

/// Collects problems so that one error lists all of them.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn note<T>(&mut self, outcome: Result<T, String>) -> Option<T> {
        outcome.map_err(|problem| self.0.push(problem)).ok()
    }
}

/// The problem when another launcher has started this process.
fn other_launcher(lookup: &impl Fn(&str) -> Option<String>) -> Option<String> {
    if lookup("RONDE_SOCKET").is_some() || lookup("RONDE_JOB").is_some() {
        return None;
    }
    LaunchedBy::detect(lookup).filter(LaunchedBy::is_one_of_several).map(|launched| launched.refusal())
}

fn socket_dir(lookup: &impl Fn(&str) -> Option<String>) -> Result<PathBuf, String> {
    if let Some(directory) = lookup("RONDE_SOCKET") {
        return Ok(directory.into());
    }
    let mut usual: Vec<PathBuf> =
        lookup("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("ronde")).into_iter().collect();
    usual.push(PathBuf::from("/run/ronde"));
    let found = usual.iter().find(|directory| paths::rpc_socket(directory).exists());
    found.cloned().ok_or_else(|| {
        let tried: Vec<String> = usual.iter().map(|directory| directory.display().to_string()).collect();
        format!(
            "RONDE_SOCKET is not set and there is no rpc.sock in {}; start the program with `ronde run`, or set RONDE_SOCKET to \
             the sidecar's session directory",
            tried.join(" or ")
        )
    })
}

fn job(lookup: &impl Fn(&str) -> Option<String>) -> Result<JobName, String> {
    let name = lookup("RONDE_JOB").ok_or("RONDE_JOB is not set; it is the job's name, as the sidecar was given it")?;
    JobName::new(name).map_err(|error| format!("RONDE_JOB: {error}"))
}

fn rank(lookup: &impl Fn(&str) -> Option<String>) -> Result<Rank, String> {
    let launched = || LaunchedBy::detect(lookup)?.rank.map(|rank| rank.to_string());
    let text = lookup("RONDE_RANK").or_else(launched);
    let text = text.ok_or("RONDE_RANK is not set; it is this worker's number in the job, from 0")?;
    let rank = text.parse::<u32>().ok().filter(|rank| (*rank as usize) < limits::RANKS_MAX);
    rank.map(Rank)
        .ok_or_else(|| format!("RONDE_RANK is {text:?}; it must be a whole number from 0 to {}", limits::RANKS_MAX - 1))
}

fn worker(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<WorkerNumber>, String> {
    let Some(text) = lookup("RONDE_WORKER") else { return Ok(None) };
    let number = text.parse().map(WorkerNumber);
    number.map(Some).map_err(|_| format!("RONDE_WORKER is {text:?}; it is this worker's number in an elastic job"))
}

fn ring(lookup: &impl Fn(&str) -> Option<String>) -> Result<Ring, String> {
    match lookup("RONDE_RING").as_deref() {
        None | Some("1") => Ok(Ring::Auto),
        Some("0") => Ok(Ring::Off),
        Some(text) => {
            Err(format!("RONDE_RING is {text:?}; it is 0 for no ring, or 1 for one where the sidecar takes it"))
        }
    }
}

fn gpu_levels(lookup: &impl Fn(&str) -> Option<String>) -> Result<GpuLevels, String> {
    match lookup("RONDE_GPU_LEVELS").as_deref() {
        None | Some("1") => Ok(GpuLevels::One),
        Some("auto") => Ok(GpuLevels::Auto),
        Some("2") => Ok(GpuLevels::Two),
        Some(text) => Err(format!("RONDE_GPU_LEVELS is {text:?}; it is 1, 2 or auto")),
    }
}

fn mapped(lookup: &impl Fn(&str) -> Option<String>) -> Result<bool, String> {
    match lookup("RONDE_MAPPED").as_deref() {
        None | Some("1") => Ok(true),
        Some("0") => Ok(false),
        Some(text) => Err(format!(
            "RONDE_MAPPED is {text:?}; it is 0 to copy all results, or 1 to leave large ones in shared memory"
        )),
    }
}

fn timeline(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<TimelineOptions>, String> {
    let named = |name: &str| {
        let names = [format!("RONDE_{name}"), format!("HOROVOD_{name}")];
        names.into_iter().find_map(|name| lookup(&name).map(|value| (name, value)))
    };
    let mark_cycles = match named("TIMELINE_MARK_CYCLES") {
        None => false,
        Some((name, text)) => match text.as_str() {
            "" | "0" => false,
            "1" => true,
            _ => return Err(format!("{name} is {text:?}; it is 1 to mark cycles in the timeline, or 0")),
        },
    };
    let path = named("TIMELINE").map(|(_, path)| path).filter(|path| !path.is_empty() && path != LATER);
    Ok(path.map(|path| TimelineOptions { path: path.into(), mark_cycles }))
}

fn sidecar_uid(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<u32>, String> {
    let Some(text) = lookup("RONDE_SIDECAR_UID") else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("RONDE_SIDECAR_UID is {text:?}; it is the number of a user"))
}

fn seconds(lookup: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<Duration>, String> {
    let Some(text) = lookup(name) else { return Ok(None) };
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    let duration = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    duration.map(Some).ok_or_else(|| format!("{name} is {text:?}; it must be a number of seconds above 0"))
}

/// Instead of a timeline's file: the program starts the timeline later.
const LATER: &str = "DYNAMIC";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Importing a framework on a loaded machine takes a while, and the slowest rank decides.
const START_TIMEOUT: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_problems_are_reported_at_once() {
        let settings = [
            ("RONDE_RANK", "-1"),
            ("RONDE_START_TIMEOUT", "soon"),
            ("RONDE_RING", "maybe"),
            ("RONDE_MAPPED", "never"),
            ("RONDE_GPU_LEVELS", "3"),
            ("RONDE_SIDECAR_UID", "root"),
            ("HOROVOD_TIMELINE_MARK_CYCLES", "perhaps"),
            ("XDG_RUNTIME_DIR", "/nowhere"),
        ];
        let lookup = |name: &str| settings.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        let Err(Error::Settings { problems }) = Options::from_lookup(lookup) else { panic!("accepted") };
        let text = problems.join("\n");
        let expected = ["\"-1\"", "\"soon\"", "\"3\"", "\"maybe\"", "\"never\"", "\"root\"", "\"perhaps\""];
        for wanted in expected.into_iter().chain(["RONDE_SOCKET is not set", "/nowhere/ronde", "RONDE_JOB is not set"])
        {
            assert!(text.contains(wanted), "{text} does not contain {wanted}");
        }
        assert_eq!(problems.len(), 9);
    }

    #[test]
    fn missing_and_invalid_settings_are_listed_below_one_sentence() {
        let job = [("RONDE_SOCKET", "/s"), ("RONDE_JOB", "j"), ("RONDE_MAPPED", "never")];
        let lookup = |name: &str| job.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        let text = Options::from_lookup(lookup).expect_err("they are wrong").to_string();
        assert!(
            text.starts_with("this process cannot connect with its settings:\n  - RONDE_RANK is not set"),
            "{text}"
        );
        assert!(text.contains("\n  - RONDE_MAPPED is \"never\""), "{text}");
    }

    #[test]
    fn another_launcher_is_named_where_there_is_no_job() {
        let read = |settings: &[(&str, &str)]| {
            let lookup = |name: &str| settings.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            Options::from_lookup(lookup).map_err(|error| error.to_string())
        };
        let found = read(&[("WORLD_SIZE", "2"), ("RANK", "1")]).expect_err("there is no job");
        assert!(found.contains("as one of 2 (WORLD_SIZE=2, RANK=1), but there is no job of ronde"), "{found}");
        let alone = read(&[("WORLD_SIZE", "1"), ("RANK", "0")]).expect_err("there is no job");
        assert!(!alone.contains("WORLD_SIZE"), "{alone}");
        let job = [("RONDE_SOCKET", "/s"), ("RONDE_JOB", "j"), ("RONDE_RANK", "1"), ("WORLD_SIZE", "2")];
        assert_eq!(read(&job).expect("a job of ronde").rank, Rank(1));
        let by_launcher = [("RONDE_SOCKET", "/s"), ("RONDE_JOB", "j"), ("WORLD_SIZE", "2"), ("RANK", "1")];
        assert_eq!(read(&by_launcher).expect("sidecars that run already").rank, Rank(1));
    }

    #[test]
    fn a_timeline_is_named_or_comes_later() {
        let read = |settings: &[(&str, &str)]| {
            let lookup = |name: &str| settings.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
            timeline(&lookup).expect("good settings")
        };
        let named = |path: &str, mark_cycles| Some(TimelineOptions { path: path.into(), mark_cycles });
        assert_eq!(read(&[]), None);
        assert_eq!(read(&[("HOROVOD_TIMELINE", "/h"), ("HOROVOD_TIMELINE_MARK_CYCLES", "1")]), named("/h", true));
        assert_eq!(read(&[("RONDE_TIMELINE", "/r"), ("HOROVOD_TIMELINE", "/h")]), named("/r", false));
        assert_eq!(read(&[("RONDE_TIMELINE", "DYNAMIC"), ("HOROVOD_TIMELINE", "/h")]), None);
    }

    #[test]
    fn settings_are_taken_over() {
        let settings = [
            ("RONDE_SOCKET", "/s"),
            ("RONDE_JOB", "mnist"),
            ("RONDE_RANK", "3"),
            ("RONDE_OPERATION_TIMEOUT", "0.5"),
            ("RONDE_RING", "0"),
            ("RONDE_MAPPED", "0"),
            ("RONDE_SIDECAR_UID", "1000"),
        ];
        let lookup = |name: &str| settings.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        let options = Options::from_lookup(lookup).expect("complete settings");
        assert_eq!(options.token_file, Path::new("/s/rank-3.token"));
        assert_eq!(options.operation_timeout, Some(Duration::from_millis(500)));
        assert_eq!((options.rank, options.job.as_str()), (Rank(3), "mnist"));
        assert_eq!((options.ring, options.mapped, options.sidecar_uid), (Ring::Off, false, Some(1_000)));
    }
}
