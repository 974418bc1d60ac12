//! The handshakes in progress at a listener: how many there may be, and which one gives way when there is no room.
//!
//! Anyone who reaches the listener can open connections and send nothing. So room is shared by address: while all of it is
//! taken, a connection from an address with fewer handshakes than another one replaces one of the latter. Among
//! connections of one address, or of addresses with equally many, a new one replaces only one that has been silent for
//! a given time; otherwise peers that connect at the same time would keep replacing each other. In both cases the oldest
//! gives way, and one that has shown a certificate of the job only after all others.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

/// The handshakes of a listener; clones share them.
#[derive(Clone)]
pub struct Handshakes {
    listener: &'static str,
    table: Arc<Mutex<Table<oneshot::Sender<()>>>>,
}

/// The place of one handshake, free again when dropped.
pub struct HandshakePermit {
    handshakes: Handshakes,
    number: u64,
}

/// Resolves when the handshake has to give way to another one, or its permit is dropped.
pub type Evicted = oneshot::Receiver<()>;

impl Handshakes {
    /// At most `most` at a time, at a listener of this name. Those of an address replace each other once they have been
    /// `silent` for so long.
    #[must_use]
    pub fn new(listener: &'static str, most: usize, silent: Duration) -> Self {
        Self { listener, table: Arc::new(Mutex::new(Table::new(most, silent))) }
    }

    /// A permit for a connection from this address; `None` when there is no room for it.
    #[must_use]
    pub fn admit(&self, from: IpAddr) -> Option<(HandshakePermit, Evicted)> {
        let (sender, evicted) = oneshot::channel();
        let mut table = self.lock();
        let (admitted, most) = (table.admit(Instant::now(), from, sender), table.most);
        drop(table);
        if let Some(crowded) = admitted.crowded {
            tracing::warn!(
                %from, turned_away = crowded, listener = self.listener,
                "all {most} places for handshakes are taken; silent connections are closed, and peers retry"
            );
        }
        admitted.number.map(|number| (HandshakePermit { handshakes: self.clone(), number }, evicted))
    }

    /// Whether so many are in progress that a connection has to prove its address first.
    pub(super) fn are_many(&self) -> bool {
        let table = self.lock();
        table.pending.len() >= table.most / 2
    }

    fn lock(&self) -> MutexGuard<'_, Table<oneshot::Sender<()>>> {
        // Every change under this lock is complete in itself.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HandshakePermit {
    /// The peer has shown a certificate of the job.
    pub(super) fn mark_authenticated(&self) {
        if let Some(pending) = self.handshakes.lock().pending.get_mut(&self.number) {
            pending.authenticated = true;
        }
    }
}

impl Drop for HandshakePermit {
    fn drop(&mut self) {
        self.handshakes.lock().release(self.number);
    }
}

/// The handshakes in progress, the oldest first. Dropping `S` ends one: nothing is ever sent.
struct Table<S> {
    most: usize,
    silent: Duration,
    pending: BTreeMap<u64, Pending<S>>,
    next: u64,
    /// Connections that were closed for lack of room since the last report, and when that was.
    turned_away: u64,
    reported: Option<Instant>,
}

struct Pending<S> {
    source: IpAddr,
    since: Instant,
    authenticated: bool,
    _stop: S,
}

/// What comes of a new connection.
struct Admitted {
    /// Its number, if there is room.
    number: Option<u64>,
    /// How many connections were closed for lack of room, when that has to be reported.
    crowded: Option<u64>,
}

impl<S> Table<S> {
    fn new(most: usize, silent: Duration) -> Self {
        Self { most, silent, pending: BTreeMap::new(), next: 0, turned_away: 0, reported: None }
    }

    fn admit(&mut self, now: Instant, from: IpAddr, stop: S) -> Admitted {
        let source = source(from);
        if self.pending.len() < self.most {
            return Admitted { number: Some(self.insert(now, source, stop)), crowded: None };
        }
        let evicted = self.evictable(now, source);
        if let Some(evicted) = evicted {
            self.release(evicted);
        }
        let number = evicted.map(|_| self.insert(now, source, stop));
        Admitted { number, crowded: self.count_turned_away(now) }
    }

    fn insert(&mut self, now: Instant, source: IpAddr, stop: S) -> u64 {
        self.next += 1;
        self.pending.insert(self.next, Pending { source, since: now, authenticated: false, _stop: stop });
        self.next
    }

    fn release(&mut self, number: u64) {
        self.pending.remove(&number);
    }

    /// The handshake that gives way to one from `source`, if any does.
    fn evictable(&self, now: Instant, source: IpAddr) -> Option<u64> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.pending.values().for_each(|pending| *counts.entry(pending.source).or_default() += 1);
        let own = counts.get(&source).copied().unwrap_or_default();
        let most = counts.values().copied().max().unwrap_or_default();
        let has_most = |pending: &Pending<S>| counts.get(&pending.source) == Some(&most);
        // With one more, the new one's address still has no more than the other one, which then has one less.
        let is_fair = most > own + 1;
        let is_silent = |pending: &Pending<S>| now.duration_since(pending.since) >= self.silent;
        let candidates =
            self.pending.iter().filter(|(_, pending)| has_most(pending) && (is_fair || is_silent(pending)));
        candidates.min_by_key(|(number, pending)| (pending.authenticated, **number)).map(|(number, _)| *number)
    }

    /// Counts a connection that is closed for lack of room, and returns the count when it is time to report it: a flood
    /// of connections is not one of log lines.
    fn count_turned_away(&mut self, now: Instant) -> Option<u64> {
        self.turned_away += 1;
        let is_due = self.reported.is_none_or(|reported| now.duration_since(reported) >= REPORT_INTERVAL);
        if !is_due {
            return None;
        }
        self.reported = Some(now);
        Some(std::mem::take(&mut self.turned_away))
    }
}

/// What counts as one address: a host of IPv6 has all addresses of a /64.
fn source(from: IpAddr) -> IpAddr {
    match from.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & HOST_PREFIX).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

const REPORT_INTERVAL: Duration = Duration::from_secs(10);
/// The first 64 bits.
const HOST_PREFIX: u128 = !(u64::MAX as u128);

#[cfg(test)]
mod tests {
    use super::*;

    const HANDSHAKES_MAX: usize = 256;
    const SILENT: Duration = Duration::from_secs(1);

    fn at(host: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, host])
    }

    /// A table with so many handshakes of each host, the first host's first.
    fn table(now: Instant, counts: &[(u8, usize)]) -> Table<()> {
        let mut table = Table::new(HANDSHAKES_MAX, SILENT);
        for (host, count) in counts {
            for _ in 0..*count {
                assert!(table.admit(now, at(*host), ()).number.is_some(), "there is room");
            }
        }
        table
    }

    fn count(table: &Table<()>, host: u8) -> usize {
        table.pending.values().filter(|pending| pending.source == at(host)).count()
    }

    #[test]
    fn the_address_with_the_most_gives_way_to_others_at_once() {
        let now = Instant::now();
        let mut table = table(now, &[(1, 250), (2, 6)]);
        for newcomer in 3..100 {
            let number = table.admit(now, at(newcomer), ()).number.expect("host 1 gives way");
            assert_eq!((table.pending.len(), count(&table, newcomer)), (HANDSHAKES_MAX, 1));
            assert!(!table.pending.contains_key(&u64::from(newcomer - 2)), "the oldest of host 1 is gone");
            assert_eq!(count(&table, 2), 6, "others keep their places");
            assert!(table.pending.contains_key(&number));
        }
    }

    #[test]
    fn an_address_that_floods_replaces_none_but_its_own() {
        let now = Instant::now();
        let mut table = table(now, &[(2, 10), (1, 246)]);
        for _ in 0..1_000 {
            assert!(table.admit(now, at(1), ()).number.is_none(), "its handshakes may still be in progress");
        }
        let later = now + SILENT;
        for _ in 0..1_000 {
            table.admit(later, at(1), ());
        }
        assert_eq!((count(&table, 1), count(&table, 2)), (246, 10));
        assert!(table.pending.values().all(|pending| pending.source == at(2) || pending.since == later));
    }

    #[test]
    fn silent_ones_give_way_where_all_addresses_have_equally_many() {
        let now = Instant::now();
        let each: Vec<(u8, usize)> = (0..128).map(|host| (host, 2)).collect();
        let mut table = table(now, &each);
        let soon = now + SILENT / 2;
        assert!(table.admit(soon, at(200), ()).number.is_some(), "others have two");
        assert!(table.admit(soon, at(200), ()).number.is_none(), "it would have two as well");
        assert!(table.admit(now + SILENT, at(200), ()).number.is_some());
        assert_eq!((count(&table, 200), table.pending.len()), (2, HANDSHAKES_MAX));
    }

    #[test]
    fn those_with_a_certificate_of_the_job_give_way_last() {
        let now = Instant::now();
        let mut table = table(now, &[(1, HANDSHAKES_MAX)]);
        for number in 1..=2 {
            table.pending.get_mut(&number).expect("in progress").authenticated = true;
        }
        for newcomer in 0..100 {
            assert!(table.admit(now, at(100 + newcomer), ()).number.is_some());
        }
        assert!(table.pending.contains_key(&1) && table.pending.contains_key(&2));
        assert!((3..=102).all(|number| !table.pending.contains_key(&number)));
    }

    #[test]
    fn a_permit_is_evicted_and_frees_its_place() {
        let handshakes = Handshakes::new("test", HANDSHAKES_MAX, SILENT);
        let mut permits: Vec<_> = (0..HANDSHAKES_MAX).map(|_| handshakes.admit(at(1)).expect("room")).collect();
        assert!(handshakes.are_many() && handshakes.admit(at(1)).is_none());
        let other = handshakes.admit(at(2)).expect("host 1 gives way");
        assert!(permits[0].1.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Closed));
        assert!(permits[1].1.try_recv().is_err_and(|error| error == oneshot::error::TryRecvError::Empty));
        drop((permits, other));
        assert!(!handshakes.are_many() && handshakes.lock().pending.is_empty());
    }

    #[test]
    fn addresses_of_one_ipv6_network_count_together() {
        let [one, other, elsewhere] =
            ["fd00:1::1", "fd00:1::2:3", "fd00:2::1"].map(|text| text.parse().expect("valid"));
        assert!(source(one) == source(other) && source(one) != source(elsewhere));
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().expect("valid");
        assert_eq!(source(mapped), at(1));
    }

    #[test]
    fn a_flood_is_reported_now_and_then_with_its_size() {
        let now = Instant::now();
        let mut table = table(now, &[(1, HANDSHAKES_MAX)]);
        assert_eq!(table.admit(now, at(1), ()).crowded, Some(1));
        assert!((0..99).all(|_| table.admit(now, at(1), ()).crowded.is_none()));
        assert_eq!(table.admit(now + REPORT_INTERVAL, at(1), ()).crowded, Some(100));
    }
}
