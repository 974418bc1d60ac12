//! Lines for a standard stream, written by a thread of their own: a pipe that nobody reads blocks that thread alone.
//!
//! The writer of the crate `tracing-appender` does the same for logs. It is not used, for three reasons. Its queue is
//! bounded in lines, whatever their length. It does not report in the log itself how many lines it dropped. And when it
//! is dropped while its queue is full, it prints to standard output, which carries the launcher's protocol in a sidecar
//! and may be the blocked pipe.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The queue of a stream and its thread.
#[derive(Debug)]
pub struct LineWriter {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Notified when a line is queued, and when one has been written.
    changed: Condvar,
    /// The most bytes that wait, the line that is being written included.
    bytes_max: usize,
    /// Builds the line that reports a number of lost lines; without it, nothing is reported.
    report: Option<fn(u64) -> String>,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Line>,
    bytes: usize,
    /// When the thread began to write the present line; `None` while it waits for one.
    writing_since: Option<Instant>,
    lost: u64,
    /// Lost lines that no queued line reports.
    unreported: u64,
}

#[derive(Debug)]
struct Line {
    text: String,
    /// How many lost lines it reports.
    reports: u64,
}

impl LineWriter {
    /// Starts a thread that writes to `out`. At most `bytes_max` bytes wait for it.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(
        name: &str,
        out: impl Write + Send + 'static,
        bytes_max: usize,
        report: Option<fn(u64) -> String>,
    ) -> io::Result<Self> {
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { queue, changed, bytes_max, report });
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name(name.to_owned()).spawn(move || of_thread.write_on(out))?;
        Ok(Self { shared })
    }

    /// Queues a line, which ends with a newline. Returns false if there is no room: the line is lost then, and counted.
    pub fn push(&self, text: String) -> bool {
        let mut queue = self.shared.lock();
        if queue.bytes + text.len() > self.shared.bytes_max {
            queue.lost += 1;
            queue.unreported += 1;
            return false;
        }
        queue.report_losses(self.shared.report);
        queue.push(Line { text, reports: 0 });
        drop(queue);
        self.shared.changed.notify_all();
        true
    }

    /// Waits until all lines are written, but no longer than this. Returns whether they are.
    pub fn flush(&self, within: Duration) -> bool {
        let busy = |queue: &mut Queue| queue.writing_since.is_some() || !queue.lines.is_empty();
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), within, busy);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// Returns for how long the thread has been writing the present line.
    pub fn blocked_for(&self) -> Duration {
        self.shared.lock().writing_since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns how many lines were lost.
    pub fn lost(&self) -> u64 {
        self.shared.lock().lost
    }
}

impl Shared {
    fn write_on(&self, mut out: impl Write) {
        loop {
            let line = self.next();
            let written = write_line(&mut out, line.text.as_bytes());
            let mut queue = self.lock();
            queue.writing_since = None;
            queue.bytes -= line.text.len();
            match written {
                // Later lines may be long in coming.
                Ok(()) if queue.lines.is_empty() => queue.report_losses(self.report),
                Ok(()) => {}
                // A reader that is gone, or a full disk: the next line that is queued tries again.
                Err(_) => {
                    queue.lost += u64::from(line.reports == 0);
                    queue.unreported += line.reports.max(1);
                }
            }
            drop(queue);
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Line {
        let mut queue = self.lock();
        loop {
            if let Some(line) = queue.lines.pop_front() {
                queue.writing_since = Some(Instant::now());
                return line;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // No code panics while it holds the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn push(&mut self, line: Line) {
        self.bytes += line.text.len();
        self.lines.push_back(line);
    }

    /// Queues a report, which stands where the lost lines would. It may exceed the bound: there is one for each queued line
    /// at most.
    fn report_losses(&mut self, report: Option<fn(u64) -> String>) {
        if let (Some(report), 1..) = (report, self.unreported) {
            let reports = std::mem::take(&mut self.unreported);
            self.push(Line { text: report(reports), reports });
        }
    }
}

/// Writes all bytes, also to a stream that another process has switched to non-blocking mode.
fn write_line(out: &mut impl Write, mut rest: &[u8]) -> io::Result<()> {
    while !rest.is_empty() {
        match out.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY_INTERVAL),
            Err(error) => return Err(error),
        }
    }
    out.flush()
}

/// The pause before a non-blocking stream is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn report(lost: u64) -> String {
        format!("{lost} lost\n")
    }

    /// Queues lines until none is accepted; returns how many were.
    fn fill(writer: &LineWriter) -> usize {
        (0..).take_while(|_| writer.push(format!("{}\n", "x".repeat(99)))).count()
    }

    #[test]
    fn a_pipe_that_nobody_reads_blocks_no_caller_and_lost_lines_are_reported() {
        let (mut reader, out) = io::pipe().expect("a pipe");
        let writer = LineWriter::start("test", out, 10_000, Some(report)).expect("a thread");
        let mut accepted = fill(&writer);
        // The thread moves lines from the queue to the pipe until that is full, too. A busy machine may stop it before.
        while writer.blocked_for() < Duration::from_millis(200) || writer.flush(Duration::from_millis(10)) {
            accepted += fill(&writer);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(writer.lost() > 0);
        let reading = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            while !bytes.ends_with(b"end\n") {
                let start = bytes.len();
                bytes.resize(start + 4_096, 0);
                let read = reader.read(&mut bytes[start..]).expect("a pipe");
                bytes.truncate(start + read);
            }
            String::from_utf8(bytes).expect("text")
        });
        assert!(writer.flush(PATIENCE) && writer.push("end\n".to_owned()));
        let text = reading.join().expect("all of it is read");
        assert_eq!(text.lines().filter(|line| line.len() == 99).count(), accepted);
        let reported: u64 = text.lines().filter_map(|line| line.strip_suffix(" lost")?.parse::<u64>().ok()).sum();
        assert_eq!(reported, writer.lost());
    }

    #[test]
    fn lines_are_written_in_order_and_flushed() {
        let (mut reader, out) = io::pipe().expect("a pipe");
        let writer = LineWriter::start("test", out, 10_000, None).expect("a thread");
        assert!((0..50).all(|number| writer.push(format!("{number}\n"))));
        assert!(writer.flush(PATIENCE));
        let mut bytes = vec![0; 140];
        reader.read_exact(&mut bytes).expect("they are there");
        assert_eq!(String::from_utf8(bytes).expect("text"), (0..50).map(|n| format!("{n}\n")).collect::<String>());
        assert_eq!((writer.lost(), writer.blocked_for()), (0, Duration::ZERO));
    }

    #[test]
    fn lines_that_a_reader_did_not_wait_for_are_counted() {
        let (reader, out) = io::pipe().expect("a pipe");
        let writer = LineWriter::start("test", out, 10_000, Some(report)).expect("a thread");
        drop(reader);
        assert!((0..3).all(|_| writer.push("line\n".to_owned()) && writer.flush(PATIENCE)));
        assert_eq!(writer.lost(), 3);
    }
}
