//! The output of a process, split into whole lines.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::ToLauncher;
use crate::envelope::{FromAgent, TEXT_BYTES_MAX};
use crate::rows::LastLines;

/// Forwards `source` to its end in texts of whole lines, and records the last ones in `tail`.
///
/// Waits while the queue to the launcher is full, so that backpressure reaches the worker. With `patience`, the begin of a
/// line is forwarded when the rest does not come within that time: it may be a prompt. When `exited` says that the worker
/// has exited, what it wrote is in the pipe; others that hold the other end are read for a bounded time and length.
pub(super) async fn forward(
    mut source: impl AsyncRead + Unpin,
    launcher: ToLauncher,
    tail: Tail,
    patience: Option<Duration>,
    exited: watch::Receiver<bool>,
    wrap: impl Fn(String) -> FromAgent,
) {
    let mut cutter = LineCutter::default();
    let mut buffer = vec![0; READ_BYTES];
    let mut rest = Rest::of(exited);
    loop {
        let patience = patience.filter(|_| !cutter.pending.is_empty()).unwrap_or(Duration::MAX);
        let read = timeout(patience, rest.read(&mut source, &mut buffer)).await;
        // An error of a pipe counts as its end.
        let count = read.map(|read| read.unwrap_or(0));
        let text = match count {
            Ok(0) | Err(_) => cutter.finish(),
            Ok(count) => cutter.push(&buffer[..count]),
        };
        if let Some(text) = text {
            tail.push(&text);
            // The queue closes when the agent exits; then the text has no reader.
            let _ = launcher.send(wrap(text)).await;
        }
        if count == Ok(0) {
            return;
        }
    }
}

/// What is still read when the worker has exited: at most so many bytes, and waiting at most so long. The time in which the
/// launcher takes what was read does not count.
struct Rest {
    exited: watch::Receiver<bool>,
    bytes: usize,
    wait: Duration,
}

impl Rest {
    fn of(exited: watch::Receiver<bool>) -> Self {
        Self { exited, bytes: PIPE_BYTES_MAX, wait: REST_WAIT }
    }

    /// Reads once; nothing means the end.
    async fn read(&mut self, source: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> io::Result<usize> {
        tokio::select! {
            biased;
            Ok(_) = self.exited.wait_for(|exited| *exited) => {}
            read = source.read(buffer) => return read,
        }
        let began = Instant::now();
        let read = timeout(self.wait, source.read(buffer)).await;
        self.wait = self.wait.saturating_sub(began.elapsed());
        let count = read.unwrap_or(Ok(0))?.min(self.bytes);
        self.bytes -= count;
        Ok(count)
    }
}

/// Splits bytes into texts of whole lines. A carriage return without a line feed ends a line as well (a progress bar).
#[derive(Default)]
struct LineCutter {
    pending: Vec<u8>,
}

impl LineCutter {
    /// Adds bytes; returns complete lines, or the start of a line longer than [`LINE_PIECE_BYTES`].
    fn push(&mut self, bytes: &[u8]) -> Option<String> {
        self.pending.extend_from_slice(bytes);
        let whole = end_of_last_line(&self.pending);
        let end =
            if whole == 0 && self.pending.len() >= LINE_PIECE_BYTES { character_border(&self.pending) } else { whole };
        self.take(end)
    }

    /// Returns the last line, if it is incomplete.
    fn finish(&mut self) -> Option<String> {
        self.take(self.pending.len())
    }

    fn take(&mut self, end: usize) -> Option<String> {
        let rest = self.pending.split_off(end);
        let text = std::mem::replace(&mut self.pending, rest);
        (!text.is_empty()).then(|| String::from_utf8_lossy(&text).into_owned())
    }
}

/// The last lines of a stream, without the earlier states of progress bars; clones share them.
#[derive(Clone)]
pub(super) struct Tail(Arc<Mutex<LastLines>>);

impl Default for Tail {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(LastLines::of(TAIL_LINES, TAIL_LINE_BYTES))))
    }
}

impl Tail {
    /// The lines, oldest first.
    pub(super) fn lines(&self) -> Vec<String> {
        self.lock().lines()
    }

    fn push(&self, text: &str) {
        self.lock().push(text);
    }

    fn lock(&self) -> MutexGuard<'_, LastLines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn end_of_last_line(bytes: &[u8]) -> usize {
    let ends_line = |at: &usize| match bytes[*at] {
        b'\n' => true,
        b'\r' => bytes.get(at + 1).is_some_and(|next| *next != b'\n'),
        _ => false,
    };
    (0..bytes.len()).rev().find(ends_line).map_or(0, |at| at + 1)
}

/// The last position at which the bytes can be split between characters: at most three bytes before their end.
fn character_border(bytes: &[u8]) -> usize {
    let is_inside = |byte: &&u8| **byte & 0b1100_0000 == 0b1000_0000;
    let inside = bytes.iter().rev().take(CHARACTER_BYTES_MAX).take_while(is_inside).count();
    let first = bytes.len() - inside;
    // The leading ones of a character's first byte are its length; a single byte starts with a zero.
    let length = first.checked_sub(1).map_or(0, |lead| bytes[lead].leading_ones() as usize);
    let is_cut = (inside + 2..=CHARACTER_BYTES_MAX).contains(&length);
    if is_cut { first - 1 } else { bytes.len() }
}

const READ_BYTES: usize = 64 << 10;
/// The longest part of a line in one text; with the bytes of one read, a text has at most twice as many.
const LINE_PIECE_BYTES: usize = 64 << 10;
const CHARACTER_BYTES_MAX: usize = 4;
/// The most that a pipe holds, which a process without privileges can have.
const PIPE_BYTES_MAX: usize = 1 << 20;
/// The longest wait for the rest of an exited worker's output.
const REST_WAIT: Duration = Duration::from_secs(2);
/// A byte that is no text becomes three.
const _: () = assert!(3 * (LINE_PIECE_BYTES + READ_BYTES) <= TEXT_BYTES_MAX);
/// The last lines of a stream that are kept.
pub(crate) const TAIL_LINES: usize = 20;
/// The most bytes of each.
pub(crate) const TAIL_LINE_BYTES: usize = 1 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_come_whole_and_the_rest_at_the_end() {
        let mut cutter = LineCutter::default();
        assert_eq!(cutter.push(b"one\ntw"), Some("one\n".into()));
        assert_eq!(cutter.push(b"o"), None);
        assert_eq!(cutter.push(b"\n\nthree"), Some("two\n\n".into()));
        assert_eq!(cutter.finish(), Some("three".into()));
        assert_eq!(cutter.finish(), None);
    }

    #[test]
    fn a_progress_bar_is_shown_as_it_grows() {
        let mut cutter = LineCutter::default();
        assert_eq!(cutter.push(b"10 %\r20 %\r"), Some("10 %\r".into()));
        assert_eq!(cutter.push(b"\ndone"), Some("20 %\r\n".into()));
    }

    #[tokio::test]
    async fn the_begin_of_a_line_is_forwarded_after_a_while() {
        let (mut worker, source) = tokio::io::duplex(64);
        let (launcher, mut queue) = tokio::sync::mpsc::channel(8);
        let wrap = |text| FromAgent::Notice { text };
        let (_running, exited) = watch::channel(false);
        let patience = Some(Duration::from_millis(50));
        let task = tokio::spawn(forward(source, launcher, Tail::default(), patience, exited, wrap));
        for (written, forwarded) in [("one\n(Pdb) ", ["one\n", "(Pdb) "]), ("3\n(Pdb) ", ["3\n", "(Pdb) "])] {
            tokio::io::AsyncWriteExt::write_all(&mut worker, written.as_bytes()).await.expect("it is read");
            for expected in forwarded {
                let Some(FromAgent::Notice { text }) = queue.recv().await else { panic!("nothing is forwarded") };
                assert_eq!(text, expected);
            }
        }
        drop(worker);
        task.await.expect("it ends");
    }

    /// Starts to forward what a worker that has exited left in its pipe of 64 KiB.
    fn forward_rest(source: tokio::io::DuplexStream, queue: ToLauncher) -> tokio::task::JoinHandle<()> {
        let (ended, exited) = watch::channel(false);
        ended.send_replace(true);
        let wrap = |text| FromAgent::Notice { text };
        tokio::spawn(async move {
            let _ended = ended;
            forward(source, queue, Tail::default(), None, exited, wrap).await;
        })
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_exited_worker_wrote_outlasts_a_launcher_that_does_not_read() {
        let (mut worker, source) = tokio::io::duplex(3 * READ_BYTES);
        let (launcher, mut queue) = tokio::sync::mpsc::channel(1);
        let line = format!("{}\n", "x".repeat(READ_BYTES - 1));
        tokio::io::AsyncWriteExt::write_all(&mut worker, line.repeat(3).as_bytes()).await.expect("it has room");
        let task = forward_rest(source, launcher);
        tokio::time::sleep(REST_WAIT + Duration::from_millis(100)).await;
        let mut bytes = 0;
        while let Some(FromAgent::Notice { text }) = queue.recv().await {
            bytes += text.len();
        }
        assert_eq!(bytes, 3 * READ_BYTES, "another process holds the pipe, and all of it has come");
        task.await.expect("it ends");
        drop(worker);
    }

    #[tokio::test(start_paused = true)]
    async fn a_process_that_outlives_its_worker_is_read_for_a_while_only() {
        let (mut orphan, source) = tokio::io::duplex(READ_BYTES);
        let (launcher, mut queue) = tokio::sync::mpsc::channel(1);
        let task = forward_rest(source, launcher);
        let writes = async {
            // Fails when nothing reads any more.
            while tokio::io::AsyncWriteExt::write_all(&mut orphan, b"still here\n").await.is_ok() {}
        };
        let reads = async {
            let mut bytes = 0;
            while let Some(FromAgent::Notice { text }) = queue.recv().await {
                bytes += text.len();
            }
            bytes
        };
        let ((), bytes) = tokio::join!(writes, reads);
        assert_eq!(bytes, PIPE_BYTES_MAX);
        task.await.expect("it ends");
    }

    #[test]
    fn an_endless_line_is_cut_between_characters() {
        let mut cutter = LineCutter::default();
        let line = "€".repeat(LINE_PIECE_BYTES);
        let (first, second) = line.as_bytes().split_at(LINE_PIECE_BYTES + 1);
        let piece = cutter.push(first).expect("longer than a piece");
        assert!(piece.len() > LINE_PIECE_BYTES - CHARACTER_BYTES_MAX && !piece.contains('\u{fffd}'));
        let rest = cutter.push(second).expect("longer than a piece");
        assert_eq!(piece + &rest, line);
    }

    #[test]
    fn the_tail_keeps_the_last_lines_that_are_not_blank() {
        let tail = Tail::default();
        (0..50).for_each(|number| tail.push(&format!("line {number}\n\n")));
        assert_eq!(tail.lines().len(), TAIL_LINES);
        assert_eq!(tail.lines().last().map(String::as_str), Some("line 49"));
        tail.push(&"é".repeat(TAIL_LINE_BYTES));
        assert_eq!(tail.lines().last().map(String::len), Some(TAIL_LINE_BYTES));
    }

    #[tokio::test]
    async fn the_tail_keeps_one_state_of_a_progress_bar() {
        let (mut worker, source) = tokio::io::duplex(READ_BYTES);
        let (launcher, mut queue) = tokio::sync::mpsc::channel(64);
        let (_running, exited) = watch::channel(false);
        let tail = Tail::default();
        let task =
            tokio::spawn(forward(source, launcher, tail.clone(), None, exited, |text| FromAgent::Notice { text }));
        let reader = async { while queue.recv().await.is_some() {} };
        let writer = async {
            let states: String = (0..=50).map(|state| format!("\r{state} %")).collect();
            let text = format!("loading\n{states}\nTraceback\n{states}");
            tokio::io::AsyncWriteExt::write_all(&mut worker, text.as_bytes()).await.expect("it is read");
            drop(worker);
        };
        tokio::join!(writer, reader);
        task.await.expect("it ends");
        assert_eq!(tail.lines(), ["loading", "50 %", "Traceback", "50 %"]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_every_text_ends_with_a_line(text in "([a-zé€\u{1f980}]|\n|\r){0,80}", cuts in proptest::collection::vec(1_usize..9, 1..40)) {
            let mut cutter = LineCutter::default();
            let mut texts = Vec::new();
            let mut rest = text.as_bytes();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                texts.extend(cutter.push(now));
                rest = later;
            }
            for whole in &texts {
                prop_assert!(whole.ends_with(['\n', '\r']));
            }
            texts.extend(cutter.finish());
            prop_assert_eq!(texts.concat(), text);
        }

        #[test]
        fn bytes_that_are_not_text_are_cut_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 1..40)) {
            let border = character_border(&bytes);
            prop_assert!(border <= bytes.len() && border + CHARACTER_BYTES_MAX >= bytes.len());
        }
    }
}
