//! Divides the listener between ranks, so that holders of one rank's token cannot keep the others out: connections, bodies
//! that are read, and bodies that are decoded.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ronde_transport::{Evicted, HandshakePermit, Handshakes};
use ronde_wire::{Rank, limits};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// The shares of all ranks of this sidecar.
pub(super) struct Shares {
    ranks: HashMap<Rank, RankShare>,
    /// Decode permits for calls in open sessions, whose heartbeats are among them.
    of_sessions: Semaphore,
    /// Those for all other calls.
    of_others: Semaphore,
    /// Connections that have not carried a token yet.
    unauthenticated: Handshakes,
}

struct RankShare {
    connections: Arc<Semaphore>,
    bodies: Semaphore,
}

/// What a connection occupies.
pub(super) struct Occupied(Mutex<Place>);

enum Place {
    /// One of those for connections that have not carried a token yet.
    Unauthenticated { _held: HandshakePermit },
    /// A part of its rank's share.
    OfRank { rank: Rank, _held: OwnedSemaphorePermit },
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
            unauthenticated: Handshakes::new("gRPC-Web", limits::WEB_UNAUTHENTICATED_MAX, Duration::ZERO),
        }
    }

    /// Gives a new connection from this address a place among the unauthenticated ones. While all are taken, the oldest of
    /// the address that has the most loses its place: at once, as a flood of short connections would keep others out
    /// otherwise. `None` when none gives way.
    pub(super) fn enter(&self, from: IpAddr) -> Option<(Arc<Occupied>, Evicted)> {
        let (held, evicted) = self.unauthenticated.admit(from)?;
        Some((Arc::new(Occupied(Mutex::new(Place::Unauthenticated { _held: held }))), evicted))
    }

    /// Moves a connection that carries a rank's token into the share of that rank. Returns whether there is room.
    pub(super) fn identify(&self, occupied: &Occupied, rank: Rank) -> bool {
        let mut place = occupied.lock();
        if matches!(&*place, Place::OfRank { rank: known, .. } if *known == rank) {
            return true;
        }
        let share = self.ranks.get(&rank).map(|share| Arc::clone(&share.connections));
        let Some(Ok(permit)) = share.map(Semaphore::try_acquire_owned) else { return false };
        *place = Place::OfRank { rank, _held: permit };
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
    /// Resolves when another connection needs the place, which has carried no token until then.
    pub(super) async fn is_evicted(&self, evicted: Evicted) {
        let _: Result<(), _> = evicted.await;
        // The permit is dropped, too, when a token has arrived.
        if matches!(&*self.lock(), Place::OfRank { .. }) {
            std::future::pending::<()>().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        // Every change is a single assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The connections of each rank.
pub(super) fn connections_of_rank(ranks: usize) -> usize {
    (limits::WEB_CONNECTIONS_MAX / ranks.max(1)).min(CONNECTIONS_OF_RANK_MAX)
}

/// Connections of a rank: a session needs one for Open, one for its calls, and some for status pages.
const CONNECTIONS_OF_RANK_MAX: usize = 64;
/// Bodies of calls outside of open sessions that are decoded at the same time.
const BODIES_OF_OTHERS: usize = 4;

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::net::Ipv4Addr;
    use std::task::Poll;

    use super::*;

    fn enter(shares: &Shares, host: u8) -> (Arc<Occupied>, Evicted) {
        shares.enter(Ipv4Addr::new(10, 0, 0, host).into()).expect("room")
    }

    #[tokio::test]
    async fn a_rank_has_its_own_connections_bodies_and_turns() {
        let shares = Shares::new([Rank(4), Rank(5)]);
        let mine: Vec<_> = (0..connections_of_rank(2)).map(|_| enter(&shares, 1).0).collect();
        assert!(mine.iter().all(|place| shares.identify(place, Rank(4)) && shares.identify(place, Rank(4))));
        let (one_more, _) = enter(&shares, 1);
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

    /// How many of these have lost their places.
    async fn evicted(places: impl IntoIterator<Item = (Arc<Occupied>, Evicted)>) -> usize {
        let mut count = 0;
        for (place, evicted) in places {
            let mut waits = Box::pin(place.is_evicted(evicted));
            let is_over = poll_fn(|context| Poll::Ready(waits.as_mut().poll(context).is_ready()));
            // Its runtime would make a task wait that polls so often.
            count += usize::from(tokio::task::unconstrained(is_over).await);
        }
        count
    }

    #[tokio::test]
    async fn the_oldest_of_the_address_with_the_most_makes_room() {
        let shares = Shares::new([Rank(4)]);
        let (known, alone) = (enter(&shares, 1), enter(&shares, 1));
        assert!(shares.identify(&known.0, Rank(4)));
        let mut crowd: Vec<_> = (0..1_000).map(|_| enter(&shares, 2)).collect();
        let latest = crowd.split_off(1_000 - (limits::WEB_UNAUTHENTICATED_MAX - 1));
        assert_eq!((evicted(crowd).await, evicted(latest).await), (1_001 - limits::WEB_UNAUTHENTICATED_MAX, 0));
        assert_eq!(evicted([known, alone]).await, 0, "one has shown a token, the other's address has fewer");
    }
}
