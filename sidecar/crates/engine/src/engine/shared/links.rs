//! Liveness of control links: when each peer last sent a message, and round trips and clock offsets from heartbeats.

use std::collections::BTreeMap;

use ronde_wire::{Control, SidecarIndex};

use crate::event::Time;

/// All peers of the world.
#[derive(Debug)]
pub(crate) struct Links {
    peers: BTreeMap<SidecarIndex, Link>,
}

/// One peer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Link {
    pub(crate) up: bool,
    /// Lanes that the peer offers; 0 while unknown.
    pub(crate) lanes: u16,
    pub(crate) last_seen: Time,
    /// The newest `sent_us` of the peer, 0 for none, and when it arrived.
    stamp_us: u64,
    stamped: Time,
    pub(crate) round_trip_us: Option<u64>,
    /// The peer's clock less this sidecar's.
    pub(crate) clock_offset_us: Option<i64>,
}

impl Links {
    pub(crate) fn new(peers: impl Iterator<Item = SidecarIndex>, now: Time) -> Self {
        Self { peers: peers.map(|peer| (peer, Link { last_seen: now, ..Link::default() })).collect() }
    }

    pub(crate) fn opened(&mut self, peer: SidecarIndex, lanes: u16, now: Time) {
        if let Some(link) = self.peers.get_mut(&peer) {
            *link = Link { up: true, lanes, last_seen: now, ..Link::default() };
        }
    }

    pub(crate) fn closed(&mut self, peer: SidecarIndex) {
        if let Some(link) = self.peers.get_mut(&peer) {
            link.up = false;
        }
    }

    pub(crate) fn mark_alive(&mut self, peer: SidecarIndex, now: Time) {
        if let Some(link) = self.peers.get_mut(&peer) {
            link.last_seen = now;
        }
    }

    /// Restarts all liveness timers: an epoch begins, or this process itself was paused.
    pub(crate) fn rebase(&mut self, now: Time) {
        self.peers.values_mut().for_each(|link| link.last_seen = now);
    }

    /// Records the stamps of a heartbeat. They are untrusted and may have any value, so nothing here overflows.
    pub(crate) fn beat(&mut self, peer: SidecarIndex, stamps: Stamps, now: Time) {
        let Some(link) = self.peers.get_mut(&peer) else { return };
        (link.stamp_us, link.stamped) = (stamps.sent_us, now);
        if stamps.echo_us == 0 {
            return;
        }
        let round_trip = now.0.checked_sub(stamps.echo_us).and_then(|away| away.checked_sub(stamps.held_us));
        if let Some(round_trip) = round_trip {
            link.round_trip_us = Some(round_trip);
            let here = now.0 - round_trip / 2;
            link.clock_offset_us = Some(stamps.sent_us.wrapping_sub(here).cast_signed());
        }
    }

    pub(crate) fn heartbeat(&self, peer: SidecarIndex, now: Time) -> Control {
        let link = self.peers.get(&peer).copied().unwrap_or_default();
        let held_us = if link.stamp_us == 0 { 0 } else { now.0.saturating_sub(link.stamped.0) };
        Control::Heartbeat { sent_us: now.0, echo_us: link.stamp_us, held_us }
    }

    pub(crate) fn silent_ms(&self, peer: SidecarIndex, now: Time) -> u64 {
        self.peers.get(&peer).map_or(0, |link| now.ms_since(link.last_seen))
    }

    pub(crate) fn is_up(&self, peer: SidecarIndex) -> bool {
        self.peers.get(&peer).is_some_and(|link| link.up)
    }

    pub(crate) fn any_up(&self) -> bool {
        self.peers.values().any(|link| link.up)
    }

    /// Lanes that a peer offers, where that is known.
    pub(crate) fn lanes(&self, peer: SidecarIndex) -> Option<u16> {
        self.peers.get(&peer).map(|link| link.lanes).filter(|lanes| *lanes > 0)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SidecarIndex, &Link)> {
        self.peers.iter().map(|(peer, link)| (*peer, link))
    }
}

/// The numbers of a heartbeat.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stamps {
    pub(crate) sent_us: u64,
    pub(crate) echo_us: u64,
    pub(crate) held_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heartbeats_measure_round_trip_and_offset() {
        // The peer's clock is 1,000,000 us ahead; each way takes 300 us; the peer holds the stamp for 500 us.
        let peer = SidecarIndex(1);
        let mut links = Links::new([peer].into_iter(), Time(0));
        let beat = Stamps { sent_us: 10_000 + 300 + 500 + 1_000_000, echo_us: 10_000, held_us: 500 };
        links.beat(peer, beat, Time(10_000 + 300 + 500 + 300));
        let (_, link) = links.iter().next().expect("one peer");
        assert_eq!((link.round_trip_us, link.clock_offset_us), (Some(600), Some(1_000_000)));
        let reply = links.heartbeat(peer, Time(12_000));
        assert_eq!(reply, Control::Heartbeat { sent_us: 12_000, echo_us: 1_010_800, held_us: 900 });
    }

    #[test]
    fn absurd_stamps_are_ignored() {
        let peer = SidecarIndex(1);
        let mut links = Links::new([peer].into_iter(), Time(0));
        links.beat(peer, Stamps { sent_us: u64::MAX, echo_us: u64::MAX, held_us: u64::MAX }, Time(5));
        links.beat(SidecarIndex(9), Stamps { sent_us: 1, echo_us: 1, held_us: 1 }, Time(5));
        let (_, link) = links.iter().next().expect("one peer");
        assert_eq!(link.round_trip_us, None);
    }
}
