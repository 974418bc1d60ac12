//! One `ronde run`, from its command line to the last of its processes.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;

use super::process::{Process, marked};
use super::{DEADLINE, ronde_binary};
use crate::cluster::Network;

/// A builder of a command line of `ronde run`, or of another command of ronde.
pub struct Run {
    command: Command,
    mark: String,
    runtime_dir: tempfile::TempDir,
    reads_stdout: bool,
    /// What a signal does to the launcher at its start, as an option of `env`.
    disposition: String,
}

impl Run {
    /// `ronde run -np <ranks>`, with a runtime directory of its own.
    ///
    /// # Panics
    /// When there is no binary or no temporary directory.
    #[must_use]
    pub fn new(ranks: u32) -> Self {
        Self::of(&["run", "-np", &ranks.to_string()])
    }

    /// `ronde tune -np <ranks>`, likewise.
    ///
    /// # Panics
    /// When there is no binary or no temporary directory.
    #[must_use]
    pub fn tune(ranks: u32) -> Self {
        Self::of(&["tune", "-np", &ranks.to_string()])
    }

    /// Any command of ronde, likewise; [`Run::start`] gets its words.
    ///
    /// # Panics
    /// When there is no binary or no temporary directory.
    #[must_use]
    pub fn command() -> Self {
        Self::of(&[])
    }

    fn of(words: &[&str]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mark = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // Runtime directories that others can enter are not used.
        let private = Permissions::from_mode(0o700);
        let runtime_dir = tempfile::Builder::new().prefix("ronde-test-").permissions(private).tempdir();
        let runtime_dir = runtime_dir.expect("a temporary directory");
        let mut command = Command::new(ronde_binary());
        command.args(words);
        command.env(MARK, &mark).env("XDG_RUNTIME_DIR", runtime_dir.path());
        // A busy machine needs more than the default. The options of a test come first.
        command.env("HOROVOD_START_TIMEOUT", DEADLINE.as_secs().to_string());
        // A shell that starts the tests in the background ignores SIGINT, and nohup SIGHUP; the launcher would inherit that.
        let disposition = "--default-signal=INT,HUP".to_owned();
        Self { command, mark, runtime_dir, reads_stdout: true, disposition }
    }

    /// Adds `--sidecars`.
    #[must_use]
    pub fn sidecars(self, sidecars: u32) -> Self {
        self.options(["--sidecars", &sidecars.to_string()])
    }

    /// Adds options unchanged.
    #[must_use]
    pub fn options(mut self, options: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.command.args(options);
        self
    }

    /// Sets a variable of the launcher's environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Starts the launcher in a directory.
    #[must_use]
    pub fn in_directory(mut self, directory: &Path) -> Self {
        self.command.current_dir(directory);
        self
    }

    /// Starts the launcher on a host of a network.
    #[must_use]
    pub fn on_host(mut self, network: &Network, index: u32) -> Self {
        let mut command = network.command(index, self.command.get_program().to_str().expect("a path of this project"));
        command.args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        self.command = command;
        self
    }

    /// Starts the launcher with a signal ignored.
    #[must_use]
    pub fn ignoring(mut self, signal: Signal) -> Self {
        self.disposition = format!("--ignore-signal={}", signal.as_str());
        self
    }

    /// Does not read the launcher's standard output, so that the pipe fills up.
    #[must_use]
    pub fn stdout_unread(mut self) -> Self {
        self.reads_stdout = false;
        self
    }

    /// Starts the launcher with a worker command.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(mut self, worker: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Job {
        self.command.args(worker);
        let mut command = Command::new("env");
        command.arg(&self.disposition).arg(self.command.get_program()).args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        if let Some(directory) = self.command.get_current_dir() {
            command.current_dir(directory);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the ronde binary is there and can be started");
        let collected = Arc::new(Collected::default());
        let (stdout, stderr) = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
        let mut readers = vec![collect(stderr, Arc::clone(&collected), |lines| &mut lines.stderr)];
        let mut unread = None;
        if self.reads_stdout {
            readers.push(collect(stdout, Arc::clone(&collected), |lines| &mut lines.stdout));
        } else {
            unread = Some(stdout);
        }
        Job { child, mark: self.mark, runtime_dir: self.runtime_dir, collected, readers, unread }
    }
}

/// A running launcher and its processes. Dropping it kills all of them.
pub struct Job {
    child: Child,
    mark: String,
    runtime_dir: tempfile::TempDir,
    collected: Arc<Collected>,
    readers: Vec<JoinHandle<()>>,
    unread: Option<std::process::ChildStdout>,
}

impl Job {
    /// Waits for the launcher's end and all of its output. With [`Run::stdout_unread`] its standard output is what the pipe
    /// has at the end.
    ///
    /// # Panics
    /// When it does not end in time.
    #[must_use]
    pub fn wait(mut self, within: Duration) -> Ended {
        self.wait_for("the launcher's end", within, |job| job.child.try_wait().ok().flatten().map(drop));
        let status = self.child.wait().expect("it has ended");
        // A process that still runs would keep a pipe open.
        self.wait_for("the end of the launcher's output", within, |job| {
            job.readers.iter().all(JoinHandle::is_finished).then_some(())
        });
        self.readers.drain(..).for_each(|reader| reader.join().expect("a reader only reads"));
        let lines = self.collected.lock();
        let stdout = self.unread.take().map_or_else(|| lines.stdout.clone(), content);
        Ended::new(status, stdout, lines.stderr.clone())
    }

    /// Waits for a line of either output that holds a text, and returns the line.
    ///
    /// # Panics
    /// When it does not come in time.
    pub fn wait_for_line(&mut self, text: &str, within: Duration) -> String {
        self.wait_for(&format!("a line with {text:?}"), within, |job| {
            let lines = job.collected.lock();
            lines.stdout.lines().chain(lines.stderr.lines()).find(|line| line.contains(text)).map(str::to_owned)
        })
    }

    /// Returns whether a line of either output so far is one of these.
    #[must_use]
    pub fn has_line(&self, is: impl Fn(&str) -> bool) -> bool {
        let lines = self.collected.lock();
        lines.stdout.lines().chain(lines.stderr.lines()).any(is)
    }

    /// Waits until a worker runs, and returns its process.
    ///
    /// # Panics
    /// When it does not come in time.
    pub fn worker(&mut self, rank: u32, within: Duration) -> Process {
        self.wait_for(&format!("the process of rank {rank}"), within, |job| {
            let rank = rank.to_string();
            let is_it = |process: &Process| process.environment.get("RONDE_RANK") == Some(&rank);
            let agents: Vec<i32> = job.of_kind("agent").iter().map(|agent| agent.pid).collect();
            let becomes = |process: &Process| process.arguments.get(1).is_some_and(|word| word == "exec-worker");
            job.processes().into_iter().find(|one| is_it(one) && agents.contains(&one.parent) && !becomes(one))
        })
    }

    /// Waits until the sidecar with an index runs, and returns its process.
    ///
    /// # Panics
    /// When it does not come in time.
    pub fn sidecar(&mut self, index: u32, within: Duration) -> Process {
        self.wait_for(&format!("the process of sidecar {index}"), within, |job| {
            let (mut sidecars, name) = (job.of_kind("sidecar"), index.to_string());
            let of = |process: &Process| process.environment.get("RONDE_SIDECAR").cloned();
            if let Some(found) = sidecars.iter().find(|process| of(process).as_ref() == Some(&name)) {
                return Some(found.clone());
            }
            // Only root can read their environments. An agent starts them in the order of their indices.
            sidecars.retain(|process| of(process).is_none());
            sidecars.sort_by_key(|process| process.pid);
            sidecars.into_iter().nth(index as usize)
        })
    }

    /// Polls until `find` returns something.
    ///
    /// # Panics
    /// At the deadline, with all that the launcher wrote so far.
    pub fn wait_for<T>(&mut self, awaited: &str, within: Duration, mut find: impl FnMut(&mut Self) -> Option<T>) -> T {
        let deadline = Instant::now() + within;
        loop {
            if let Some(found) = find(self) {
                return found;
            }
            assert!(Instant::now() < deadline, "{awaited} did not happen within {within:?}\n{}", self.describe());
            self.collected.wait_for_news(POLL_INTERVAL);
        }
    }

    /// Waits until no process of the job is left, the launcher included.
    ///
    /// # Panics
    /// When some are left at the deadline, naming them.
    pub fn wait_for_nothing_left(&mut self, within: Duration) {
        self.wait_for("the end of all processes", within, |job| {
            // The launcher is this process's child and would stay a zombie.
            let ended = job.child.try_wait().ok().flatten().is_some();
            (ended && job.processes().is_empty()).then_some(())
        });
    }

    /// Sends the launcher a signal.
    pub fn signal(&self, signal: Signal) {
        if let Some(launcher) = self.processes().iter().find(|process| process.pid.unsigned_abs() == self.child.id()) {
            launcher.signal(signal);
        }
    }

    /// Runs another command of ronde beside the job, as its user: `ronde <arguments>`. One that does not end within two minutes
    /// is ended, with status 124.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn beside(&self, arguments: &[&str]) -> Ended {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", "120"]).arg(ronde_binary()).args(arguments);
        command.env("XDG_RUNTIME_DIR", self.runtime_dir.path()).env_remove("RONDE_JOB");
        let output = command.output().expect("the ronde binary is there and can be started");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ended::new(output.status, text(&output.stdout), text(&output.stderr))
    }

    /// The bytes that the pipe of the launcher's standard output has room for. Only with [`Run::stdout_unread`].
    ///
    /// # Panics
    /// When the output is read.
    #[must_use]
    pub fn stdout_capacity(&self) -> usize {
        let pipe = self.unread.as_ref().expect("standard output is not read");
        let bytes = fcntl(pipe, FcntlArg::F_GETPIPE_SZ).expect("it is a pipe");
        usize::try_from(bytes).expect("a size")
    }

    /// Closes the reading end of the launcher's standard output, as `head` does. Only with [`Run::stdout_unread`].
    pub fn close_stdout(&mut self) {
        self.unread = None;
    }

    /// All running processes of the job.
    #[must_use]
    pub fn processes(&self) -> Vec<Process> {
        marked(MARK, &self.mark)
    }

    /// Returns all processes whose first argument is `subcommand`, for instance the agents.
    #[must_use]
    pub fn of_kind(&self, subcommand: &str) -> Vec<Process> {
        self.processes().into_iter().filter(|one| one.arguments.get(1).is_some_and(|word| word == subcommand)).collect()
    }

    /// Lists the runtime directory: session directories, while sidecars run.
    #[must_use]
    pub fn runtime_files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.runtime_dir.path()).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    }

    fn describe(&self) -> String {
        let lines = self.collected.lock();
        let processes: Vec<String> = self.processes().iter().map(ToString::to_string).collect();
        let (stdout, stderr) = (&lines.stdout, &lines.stderr);
        format!("processes:\n{}\nstdout:\n{stdout}\nstderr:\n{stderr}", processes.join("\n"))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Failures mean that they have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        for _ in 0..KILL_ROUNDS {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            left.iter().for_each(|process| process.signal(Signal::SIGKILL));
        }
    }
}

/// How a launcher ended and what it wrote.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Ended {
    fn new(status: ExitStatus, stdout: String, stderr: String) -> Self {
        Self { code: status.code(), stdout, stderr }
    }

    /// What one rank wrote to its standard output, without prefixes.
    #[must_use]
    pub fn stdout_of(&self, rank: u32) -> Vec<&str> {
        let prefix = format!("[{rank}]<stdout>:");
        self.stdout.lines().filter_map(|line| line.strip_prefix(&prefix)).collect()
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exit code {:?}\nstdout:\n{}\nstderr:\n{}", self.code, self.stdout, self.stderr)
    }
}

#[derive(Default)]
struct Lines {
    stdout: String,
    stderr: String,
}

#[derive(Default)]
struct Collected {
    lines: Mutex<Lines>,
    news: Condvar,
}

impl Collected {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when a line has come, or after `at_most`.
    fn wait_for_news(&self, at_most: Duration) {
        let waited = self.news.wait_timeout(self.lock(), at_most);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// What a pipe has now; a process that still has its other end is not waited for.
fn content(mut pipe: std::process::ChildStdout) -> String {
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).expect("it is a pipe");
    let mut bytes = Vec::new();
    // At the end of what is there, an error says that more might come.
    let _ = pipe.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn collect(
    source: impl Read + Send + 'static,
    collected: Arc<Collected>,
    place: fn(&mut Lines) -> &mut String,
) -> JoinHandle<()> {
    thread::spawn(move || {
        let mut source = BufReader::new(source);
        let mut line = Vec::new();
        while source.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            place(&mut collected.lock()).push_str(&String::from_utf8_lossy(&line));
            collected.news.notify_all();
            line.clear();
        }
    })
}

/// The variable that marks all processes of one job.
const MARK: &str = "RONDE_TEST_JOB";
/// Processes appear and end without a notification, so they are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// A killed process may have been starting another one.
const KILL_ROUNDS: usize = 100;
