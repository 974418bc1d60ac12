//! Divides the listener between ranks, so that holders of one rank's token cannot keep the others out: connections, bodies
//! that are read, and bodies that are decoded.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ronde_wire::{Rank, limits};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// The shares of all ranks of this sidecar.
pub(super) struct Shares {
    ranks: HashMap<Rank, RankShare>,
    /// Decode permits for calls in open sessions, whose heartbeats are among them.
    of_sessions: Semaphore,
    /// Those for all other calls.
    of_others: Semaphore,
    unauthenticated: Arc<Mutex<Unauthenticated>>,
}

struct RankShare {
    connections: Arc<Semaphore>,
    bodies: Semaphore,
}

/// Connections that have not carried a token yet, by age.
#[derive(Default)]
struct Unauthenticated {
    next: u64,
    open: BTreeMap<u64, Arc<Notify>>,
}

/// What a connection occupies: a place among the unauthenticated ones, or one of its rank's share.
pub(super) struct Occupied {
    unauthenticated: Arc<Mutex<Unauthenticated>>,
    number: u64,
    evicted: Arc<Notify>,
    rank: Mutex<Option<(Rank, OwnedSemaphorePermit)>>,
}

impl Shares {
    /// Divides the listener between these ranks.
    pub(super) fn new(ranks: impl IntoIterator<Item = Rank>) -> Self {
        let ranks: Vec<Rank> = ranks.into_iter().collect();
        let connections = connections_of_rank(ranks.len());
        let share = |rank| {
            let connections = Arc::new(Semaphore::new(connections));
            (rank, RankShare { connections, bodies: Semaphore::new(limits::WEB_BODIES_PER_RANK_MAX) })
        };
        Self {
            ranks: ranks.into_iter().map(share).collect(),
            of_sessions: Semaphore::new(limits::WEB_BODIES_MAX - BODIES_OF_OTHERS),
            of_others: Semaphore::new(BODIES_OF_OTHERS),
            unauthenticated: Arc::default(),
        }
    }

    /// Gives a new connection a place among the unauthenticated ones; the oldest one loses its place if they are too many.
    pub(super) fn enter(&self) -> Arc<Occupied> {
        let (evicted, unauthenticated) = (Arc::new(Notify::new()), Arc::clone(&self.unauthenticated));
        let mut table = lock(&unauthenticated);
        let number = table.next;
        table.next += 1;
        table.open.insert(number, Arc::clone(&evicted));
        if table.open.len() > limits::WEB_UNAUTHENTICATED_MAX
            && let Some((_, oldest)) = table.open.pop_first()
        {
            oldest.notify_one();
        }
        drop(table);
        Arc::new(Occupied { unauthenticated, number, evicted, rank: Mutex::new(None) })
    }

    /// Moves a connection that carries a rank's token into the share of that rank. Returns whether there is room.
    pub(super) fn identify(&self, occupied: &Occupied, rank: Rank) -> bool {
        let mut place = lock(&occupied.rank);
        if place.as_ref().is_some_and(|(known, _)| *known == rank) {
            return true;
        }
        let share = self.ranks.get(&rank).map(|share| Arc::clone(&share.connections));
        let Some(Ok(permit)) = share.map(Semaphore::try_acquire_owned) else { return false };
        *place = Some((rank, permit));
        lock(&self.unauthenticated).open.remove(&occupied.number);
        true
    }

    /// Waits until a body of a rank may be read; `None` for a rank that is not placed here.
    pub(super) async fn body(&self, rank: Rank) -> Option<SemaphorePermit<'_>> {
        self.ranks.get(&rank)?.bodies.acquire().await.ok()
    }

    /// Waits until a complete body may be decoded.
    pub(super) async fn decoding(&self, in_session: bool) -> Option<SemaphorePermit<'_>> {
        let turns = if in_session { &self.of_sessions } else { &self.of_others };
        turns.acquire().await.ok()
    }
}

impl Occupied {
    /// Resolves when a newer connection needs the place.
    pub(super) async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        lock(&self.unauthenticated).open.remove(&self.number);
    }
}

/// The connections of each rank.
pub(super) fn connections_of_rank(ranks: usize) -> usize {
    (limits::WEB_CONNECTIONS_MAX / ranks.max(1)).min(CONNECTIONS_OF_RANK_MAX)
}

/// Every change is a single insert, remove or assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connections of a rank: a session needs one for Open, one for its calls, and some for status pages.
const CONNECTIONS_OF_RANK_MAX: usize = 64;
/// Bodies of calls outside of open sessions that are decoded at the same time.
const BODIES_OF_OTHERS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_rank_has_its_own_connections_bodies_and_turns() {
        let shares = Shares::new([Rank(4), Rank(5)]);
        let mine: Vec<_> = (0..connections_of_rank(2)).map(|_| shares.enter()).collect();
        assert!(mine.iter().all(|place| shares.identify(place, Rank(4)) && shares.identify(place, Rank(4))));
        let one_more = shares.enter();
        assert!(!shares.identify(&one_more, Rank(4)), "its share is used up");
        assert!(!shares.identify(&one_more, Rank(6)), "it is not here");
        assert!(shares.identify(&one_more, Rank(5)), "another rank's is not");
        drop(mine);
        assert!(shares.identify(&one_more, Rank(4)), "there is room again");
        let mut held = Vec::new();
        for _ in 0..limits::WEB_BODIES_PER_RANK_MAX {
            held.push(shares.body(Rank(4)).await.expect("a body"));
        }
        assert!(shares.body(Rank(5)).await.is_some() && shares.ranks[&Rank(4)].bodies.available_permits() == 0);
        for _ in 0..BODIES_OF_OTHERS {
            held.push(shares.decoding(false).await.expect("a turn"));
        }
        assert!(shares.decoding(true).await.is_some() && shares.of_others.available_permits() == 0);
    }

    #[tokio::test]
    async fn the_oldest_unauthenticated_connection_makes_room() {
        let shares = Shares::new([Rank(4)]);
        let (known, oldest) = (shares.enter(), shares.enter());
        assert!(shares.identify(&known, Rank(4)));
        let others: Vec<_> = (0..limits::WEB_UNAUTHENTICATED_MAX).map(|_| shares.enter()).collect();
        oldest.evicted().await;
        drop(others);
        assert!(lock(&shares.unauthenticated).open.is_empty());
        let mut waits = Box::pin(known.evicted());
        assert!(
            std::future::poll_fn(|context| std::task::Poll::Ready(waits.as_mut().poll(context).is_pending())).await
        );
    }
}
