//! The output streams of a sidecar: log lines on standard error, and messages to the launcher on standard output.
//!
//! A thread of its own writes each of them, because the control thread, which answers heartbeats, must not wait for a
//! reader. A log line that does not fit into its queue is dropped and counted. A message must not be lost: [`undelivered`]
//! returns why a sidecar with a launcher must end.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::output::LineWriter;

/// Starts the threads. `report` builds the log line that reports a number of dropped ones.
///
/// # Errors
/// When the system starts no thread, or has no descriptor left.
pub fn open(report: fn(u64) -> String) -> io::Result<()> {
    // Duplicates, because the standard library locks its own streams while it writes to them.
    let (log, messages) = (duplicate(&io::stderr())?, duplicate(&io::stdout())?);
    let log = LineWriter::start("ronde-log", log, LOG_BYTES_MAX, Some(report))?;
    let messages = LineWriter::start("ronde-messages", messages, MESSAGES_BYTES_MAX, None)?;
    // A process opens its streams once.
    let _ = (LOG.set(log), MESSAGES.set(messages));
    Ok(())
}

/// Queues a line of the log, which ends with a newline. Without [`open`], writes it.
pub fn log(line: String) {
    match LOG.get() {
        // The queue counts dropped lines.
        Some(log) => drop(log.push(line)),
        None => drop(io::stderr().write_all(line.as_bytes())),
    }
}

/// Counts a line of the log that was left out, because too many came from the same place.
pub fn count_limited() {
    LIMITED.fetch_add(1, Ordering::Relaxed);
}

/// Queues a message to the launcher, which ends with a newline. Without [`open`], writes it. Returns false if the queue
/// is full, because nobody reads.
pub fn message(line: String) -> bool {
    let Some(messages) = MESSAGES.get() else {
        // Fails only if the reader is gone; a launcher's end is noticed by the end of standard input.
        drop(io::stdout().write_all(line.as_bytes()));
        return true;
    };
    let queued = messages.push(line);
    if !queued {
        IS_FULL.store(true, Ordering::Relaxed);
    }
    queued
}

/// Waits until everything is written, for at most a second in all.
pub fn flush() {
    let until = Instant::now() + FLUSH_MAX;
    for stream in [&MESSAGES, &LOG].into_iter().filter_map(OnceLock::get) {
        // What is not read by then is lost with the process.
        let _ = stream.flush(until.saturating_duration_since(Instant::now()));
    }
}

/// Lines that are not in the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostLines {
    /// Nobody read standard error, or it could not be written.
    pub unread: u64,
    /// Too many lines came from one place.
    pub limited: u64,
}

/// Returns how many lines are not in the log.
pub fn lost() -> LostLines {
    let unread = LOG.get().map_or(0, LineWriter::lost);
    LostLines { unread, limited: LIMITED.load(Ordering::Relaxed) }
}

/// Returns why a sidecar must end whose launcher does not read its messages.
pub fn undelivered() -> Option<String> {
    let blocked = MESSAGES.get()?.blocked_for();
    let (is_full, seconds) = (IS_FULL.load(Ordering::Relaxed), UNREAD_MAX.as_secs());
    let how = match (is_full, blocked > UNREAD_MAX) {
        (true, _) => format!("{MESSAGES_BYTES_MAX} bytes of them wait and one more was lost"),
        (false, true) => format!("one has waited for more than {seconds} s"),
        (false, false) => return None,
    };
    Some(format!(
        "the launcher does not read this sidecar's messages on standard output: {how}; see whether `ronde run`, or its agent on this host, is stopped or hangs"
    ))
}

fn duplicate(stream: &impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

static LOG: OnceLock<LineWriter> = OnceLock::new();
static MESSAGES: OnceLock<LineWriter> = OnceLock::new();
static LIMITED: AtomicU64 = AtomicU64::new(0);
static IS_FULL: AtomicBool = AtomicBool::new(false);

/// Bytes of log lines that wait: a burst of some thousand lines.
const LOG_BYTES_MAX: usize = 1 << 20;
/// Bytes of messages that wait, besides the 64 KiB of a pipe: some thousand, and the largest has a tenth of it.
const MESSAGES_BYTES_MAX: usize = 256 << 10;
/// How long a message may wait for the launcher: longer than a launcher is stopped by accident, and short enough that its
/// user still connects the job's end with the cause.
const UNREAD_MAX: Duration = Duration::from_secs(20);
/// How long the end of the process waits for a reader of each stream. An agent kills a sidecar that takes 10 s to end.
const FLUSH_MAX: Duration = Duration::from_secs(1);
