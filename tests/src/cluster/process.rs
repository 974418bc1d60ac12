//! A child process whose lines are read as they arrive; waits end at a deadline and name what they waited for.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::PATIENCE;

/// A line and when it was read.
#[derive(Clone, Debug)]
pub struct Line {
    /// The moment.
    pub at: Instant,
    /// The line without its end.
    pub text: String,
}

/// A running child. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    output: Lines,
    log: Lines,
}

/// The lines of a stream that were not taken yet.
#[derive(Debug)]
struct Lines {
    receiver: Receiver<Line>,
    kept: Vec<Line>,
    ended: bool,
    is_paused: Arc<AtomicBool>,
    pipe: OwnedFd,
}

impl Process {
    /// Starts a command in its own process group; `name` is for messages.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(name: impl Into<String>, command: &mut Command) -> Result<Self> {
        let name = name.into();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().with_context(|| format!("cannot start {name}: {command:?}"))?;
        let output = Lines::of(child.stdout.take().context("piped")?)?;
        let log = Lines::of(child.stderr.take().context("piped")?)?;
        Ok(Self { name, child, output, log })
    }

    /// Writes a line to its standard input.
    ///
    /// # Errors
    /// When it does not read any more.
    pub fn write_line(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().with_context(|| format!("the input of {} was closed", self.name))?;
        writeln!(input, "{line}").and_then(|()| input.flush()).with_context(|| format!("{} does not listen", self.name))
    }

    /// Ends its standard input.
    pub fn hang_up(&mut self) {
        self.child.stdin = None;
    }

    /// Waits for a line of its output and takes it; other lines stay for later waits.
    ///
    /// # Errors
    /// When none arrives in time, with all of its output.
    pub fn await_line<T>(&mut self, what: &str, within: Duration, find: impl FnMut(&Line) -> Option<T>) -> Result<T> {
        let found = self.output.take(within, find);
        found.map_err(|error| error.context(self.in_vain(what, within)))
    }

    /// The same for its standard error.
    ///
    /// # Errors
    /// When none arrives in time, with all of its output.
    pub fn await_log<T>(&mut self, what: &str, within: Duration, find: impl FnMut(&Line) -> Option<T>) -> Result<T> {
        let found = self.log.take(within, find);
        found.map_err(|error| error.context(self.in_vain(&format!("{what} in its log"), within)))
    }

    /// Waits until it has ended.
    ///
    /// # Errors
    /// When it has not ended in time.
    pub fn await_exit(&mut self, within: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!(self.in_vain("its end", within));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends a signal to the process itself.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill(self.pid(), signal).with_context(|| format!("cannot send {signal} to {}", self.name))
    }

    /// Its id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Stops reading its standard output, through a pipe of the least size from now on.
    ///
    /// # Errors
    /// When the pipe cannot be made smaller.
    pub fn pause_output(&self) -> Result<()> {
        self.output.pause()
    }

    /// Reads its standard output again.
    pub fn resume_output(&self) {
        self.output.is_paused.store(false, Ordering::Relaxed);
    }

    /// Stops reading its standard error, through a pipe of the least size from now on.
    ///
    /// # Errors
    /// When the pipe cannot be made smaller.
    pub fn pause_log(&self) -> Result<()> {
        self.log.pause()
    }

    /// Reads its standard error again.
    pub fn resume_log(&self) {
        self.log.is_paused.store(false, Ordering::Relaxed);
    }

    /// Returns the log lines up to now that were not taken.
    pub fn log(&mut self) -> String {
        self.log.drain();
        self.log.kept.iter().map(|line| format!("{}\n", line.text)).collect()
    }

    fn in_vain(&mut self, what: &str, within: Duration) -> String {
        let last_words = self.last_words();
        format!("{}: waited {within:?} for {what}{last_words}", self.name)
    }

    fn last_words(&mut self) -> String {
        self.output.drain();
        self.log.drain();
        let tail = |lines: &[Line]| {
            let last = &lines[lines.len().saturating_sub(LAST_WORDS)..];
            last.iter().map(|line| format!("\n    {}", line.text)).collect::<String>()
        };
        let state =
            self.child.try_wait().ok().flatten().map_or("it runs".to_owned(), |status| format!("it ended: {status}"));
        format!("\n  {state}\n  its output:{}\n  its log:{}", tail(&self.output.kept), tail(&self.log.kept))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Kill the whole group: its children must not outlive the test. This fails only when all are gone.
        let _ = nix::sys::signal::killpg(self.pid(), Signal::SIGKILL);
        let _ = self.child.wait();
        self.resume_output();
        self.resume_log();
    }
}

impl Lines {
    fn of(stream: impl Read + AsFd + Send + 'static) -> Result<Self> {
        let (sender, receiver) = sync_channel(LINES_MAX);
        let (pipe, is_paused) = (stream.as_fd().try_clone_to_owned()?, Arc::<AtomicBool>::default());
        let pauses = Arc::clone(&is_paused);
        std::thread::spawn(move || read(stream, &sender, &pauses));
        Ok(Self { receiver, kept: Vec::new(), ended: false, is_paused, pipe })
    }

    fn pause(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // Its contents have to fit.
        while fcntl(&self.pipe, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES_MIN)).is_err() {
            ensure!(Instant::now() < deadline, "the pipe cannot be made smaller");
            std::thread::sleep(POLL_INTERVAL);
        }
        self.is_paused.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn take<T>(&mut self, within: Duration, mut find: impl FnMut(&Line) -> Option<T>) -> Result<T> {
        for index in 0..self.kept.len() {
            if let Some(found) = find(&self.kept[index]) {
                self.kept.remove(index);
                return Ok(found);
            }
        }
        let deadline = Instant::now() + within;
        loop {
            match self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => match find(&line) {
                    Some(found) => return Ok(found),
                    None => self.kept.push(line),
                },
                Err(RecvTimeoutError::Timeout) => bail!("it did not arrive"),
                Err(RecvTimeoutError::Disconnected) => {
                    self.ended = true;
                    bail!("the stream ended before it arrived");
                }
            }
        }
    }

    fn drain(&mut self) {
        self.kept.extend(self.receiver.try_iter());
    }
}

fn read(stream: impl Read, sender: &SyncSender<Line>, is_paused: &AtomicBool) {
    let mut reader = BufReader::new(stream);
    let mut bytes = Vec::new();
    loop {
        while is_paused.load(Ordering::Relaxed) {
            std::thread::sleep(POLL_INTERVAL);
        }
        if !reader.read_until(b'\n', &mut bytes).is_ok_and(|read| read > 0) {
            return;
        }
        let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
        if sender.send(Line { at: Instant::now(), text }).is_err() {
            return;
        }
        bytes.clear();
    }
}

/// Lines queued for the test; a process that writes more is blocked.
const LINES_MAX: usize = 65_536;
const LAST_WORDS: usize = 30;
/// The least size of a pipe: a page.
const PIPE_BYTES_MIN: i32 = 4_096;
const POLL_INTERVAL: Duration = Duration::from_millis(2);
