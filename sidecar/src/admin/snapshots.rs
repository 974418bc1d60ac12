//! Takes snapshots of the sidecar for all readers of the admin pages: one at a time, however many ask and go away.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, MutexGuard, mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::driver::command::ControlCommand;
use crate::driver::snapshot::Snapshot;

/// The pause between two snapshots: readers that ask without a pause cause few.
const PAUSE: Duration = Duration::from_millis(50);

/// The channel to the driver, which is asked for one snapshot at a time. Clones share it.
#[derive(Clone)]
pub(super) struct Snapshots {
    commands: mpsc::Sender<ControlCommand>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// How many have begun.
    begun: AtomicU64,
    /// Locked while one is taken.
    latest: Mutex<Option<Taken>>,
}

/// A snapshot that has been taken.
struct Taken {
    /// Its number, from 1.
    number: u64,
    ended: Instant,
    snapshot: Arc<Snapshot>,
}

/// While it is held, no snapshot is taken.
pub(super) struct Turn<'a>(#[expect(dead_code, reason = "its drop ends the turn")] MutexGuard<'a, Option<Taken>>);

impl Snapshots {
    pub(super) fn new(commands: mpsc::Sender<ControlCommand>) -> Self {
        Self { commands, shared: Arc::default() }
    }

    /// Takes a snapshot; `None` when the sidecar is ending. Readers that ask while one is taken share the next one, so that each
    /// gets one that has begun after its request.
    pub(super) async fn take(&self) -> Option<Arc<Snapshot>> {
        let known = self.shared.begun.load(Ordering::Acquire);
        let snapshots = self.clone();
        // A task: a reader that closes its connection meanwhile does not let another one begin before this one has ended.
        tokio::spawn(async move { snapshots.after(known).await }).await.ok().flatten()
    }

    /// Waits until no snapshot is taken.
    pub(super) async fn turn(&self) -> Turn<'_> {
        Turn(self.shared.latest.lock().await)
    }

    /// The first snapshot after the one with this number: that of another reader, or a new one.
    async fn after(&self, known: u64) -> Option<Arc<Snapshot>> {
        let mut latest = self.shared.latest.lock().await;
        if let Some(taken) = latest.as_ref() {
            if taken.number > known {
                return Some(Arc::clone(&taken.snapshot));
            }
            sleep_until(taken.ended + PAUSE).await;
        }
        let number = self.shared.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let (reply, answer) = oneshot::channel();
        self.commands.send(ControlCommand::Snapshot(reply)).await.ok()?;
        let snapshot = Arc::new(answer.await.ok()?);
        *latest = Some(Taken { number, ended: Instant::now(), snapshot: Arc::clone(&snapshot) });
        Some(snapshot)
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::document::snapshot;
    use super::*;

    /// The next request of a snapshot.
    async fn asked(driver: &mut mpsc::Receiver<ControlCommand>) -> oneshot::Sender<Snapshot> {
        match driver.recv().await {
            Some(ControlCommand::Snapshot(reply)) => reply,
            _ => panic!("not a request of a snapshot"),
        }
    }

    /// A reader that has asked.
    async fn reader(snapshots: &Snapshots) -> tokio::task::JoinHandle<Option<Arc<Snapshot>>> {
        let snapshots = snapshots.clone();
        let reader = tokio::spawn(async move { snapshots.take().await });
        // On this thread, it runs as far as it can.
        for _ in 0..4 {
            tokio::task::yield_now().await;
        }
        reader
    }

    #[tokio::test(start_paused = true)]
    async fn readers_that_ask_while_a_snapshot_is_taken_share_the_next_one() {
        let (commands, mut driver) = mpsc::channel(8);
        let snapshots = Snapshots::new(commands);
        let first = reader(&snapshots).await;
        let reply = asked(&mut driver).await;
        let others = [reader(&snapshots).await, reader(&snapshots).await, reader(&snapshots).await];
        assert!(driver.try_recv().is_err(), "one at a time");
        reply.send(snapshot()).ok().expect("it is awaited");
        let first = first.await.expect("no panic").expect("a snapshot");
        asked(&mut driver).await.send(snapshot()).ok().expect("it is awaited");
        let mut shared = Vec::new();
        for other in others {
            shared.push(other.await.expect("no panic").expect("a snapshot"));
        }
        assert!(shared.iter().all(|one| Arc::ptr_eq(one, &shared[0])), "they share one");
        assert!(!Arc::ptr_eq(&shared[0], &first), "it has begun after they asked");
        assert!(driver.try_recv().is_err(), "no other one is taken");
    }

    #[tokio::test(start_paused = true)]
    async fn readers_that_go_away_leave_no_snapshots_to_pile_up() {
        let (commands, mut driver) = mpsc::channel(8);
        let snapshots = Snapshots::new(commands);
        let mut replies = Vec::new();
        for _ in 0..20 {
            let gone = reader(&snapshots).await;
            gone.abort();
            assert!(gone.await.is_err_and(|error| error.is_cancelled()));
            while let Ok(ControlCommand::Snapshot(reply)) = driver.try_recv() {
                replies.push(reply);
            }
        }
        assert_eq!(replies.len(), 1, "the first one has not ended");
        let stays = reader(&snapshots).await;
        replies.remove(0).send(snapshot()).ok().expect("it is awaited");
        asked(&mut driver).await.send(snapshot()).ok().expect("it is awaited");
        assert!(stays.await.expect("no panic").is_some());
        assert!(driver.try_recv().is_err(), "those that are gone share it");
    }

    #[tokio::test]
    async fn a_sidecar_that_is_ending_takes_none() {
        let (commands, mut driver) = mpsc::channel(8);
        let snapshots = Snapshots::new(commands);
        let waits = reader(&snapshots).await;
        drop(asked(&mut driver).await);
        assert!(waits.await.expect("no panic").is_none());
        drop(driver);
        assert!(snapshots.take().await.is_none());
    }
}
