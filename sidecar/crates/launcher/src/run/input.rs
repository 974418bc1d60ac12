//! `--stdin RANK`: passes the launcher's standard input to a worker, for a debugger.
//!
//! One piece is under way at a time: the agent reports when the worker's pipe has taken it. A worker that does not read
//! therefore blocks nothing but its own input.

use std::io::IsTerminal;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;

use super::output::Item;
use crate::envelope::ToAgent;

/// The task that reads standard input.
pub(super) struct Input {
    taken: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Input {
    /// Reads standard input for a worker; `agent` takes the commands of its agent, and `output` those of the printer.
    pub(super) fn start(worker: u32, agent: mpsc::Sender<ToAgent>, output: mpsc::Sender<Item>) -> Self {
        let taken = Arc::new(Notify::new());
        // A terminal shows what is typed, up to the end of the line, among the output that it shows.
        let shows_both = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        let output = shows_both.then_some(output);
        let task = tokio::spawn(pass_on(tokio::io::stdin(), worker, agent, output, taken.clone()));
        Self { taken, task }
    }

    /// The worker has taken a piece, so that the next one may follow.
    pub(super) fn note_taken(&self) {
        self.taken.notify_one();
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass_on(
    mut source: impl AsyncRead + Unpin,
    worker: u32,
    agent: mpsc::Sender<ToAgent>,
    output: Option<mpsc::Sender<Item>>,
    taken: Arc<Notify>,
) {
    let (mut pending, mut buffer) = (Vec::new(), vec![0; PIECE_BYTES]);
    loop {
        // An error of standard input counts as its end.
        let count = source.read(&mut buffer).await.unwrap_or(0);
        pending.extend_from_slice(&buffer[..count]);
        let text = whole_characters(&mut pending, count == 0);
        if let Some(output) = output.as_ref().filter(|_| text.ends_with('\n')) {
            // The printer ends with the launcher.
            let _ = output.send(Item::Entered).await;
        }
        if !text.is_empty() {
            // The connection may have ended; then the job ends, too.
            if agent.send(ToAgent::Input { worker, text }).await.is_err() {
                return;
            }
            taken.notified().await;
        }
        if count == 0 {
            // An empty text is the end.
            let _ = agent.send(ToAgent::Input { worker, text: String::new() }).await;
            return;
        }
    }
}

/// Takes the bytes up to the last whole character, or all of them at the end.
fn whole_characters(pending: &mut Vec<u8>, is_end: bool) -> String {
    let whole = match std::str::from_utf8(pending) {
        Err(error) if error.error_len().is_none() && !is_end => error.valid_up_to(),
        _ => pending.len(),
    };
    let rest = pending.split_off(whole);
    String::from_utf8_lossy(&std::mem::replace(pending, rest)).into_owned()
}

/// The most bytes of one piece.
const PIECE_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_piece_follows_when_the_worker_has_taken_the_one_before() {
        let (agent, mut commands) = mpsc::channel(8);
        let taken = Arc::new(Notify::new());
        let source = (&b"next\n"[..]).chain(&b"p \xc3"[..]).chain(&b"\xa9\xff"[..]);
        let task = tokio::spawn(pass_on(source, 3, agent, None, taken.clone()));
        let mut texts = Vec::new();
        while let Some(ToAgent::Input { worker: 3, text }) = commands.recv().await {
            tokio::task::yield_now().await;
            assert!(commands.try_recv().is_err(), "the next one waits");
            texts.push(text);
            taken.notify_one();
        }
        assert_eq!(texts, ["next\n", "p ", "\u{e9}\u{fffd}", ""], "the last one is the end");
        task.await.expect("it ends");
    }
}
