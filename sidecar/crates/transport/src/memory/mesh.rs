//! The state of a mesh: ports, links, and messages in flight.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::task::Waker;
use std::time::Duration;

use ronde_wire::control::{Hello, Purpose};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::{Frame, FrameHeader, FrameKind, Incarnation, SidecarIndex};
use tokio::time::Instant;

use crate::hello;
use crate::links::outbox_bytes_max;
use crate::port::{DownReason, Outgoing, PortEvent, PortStats, Role, SendError};

/// The address of a port. Ports for the same purpose connect to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Address {
    pub(super) sidecar: SidecarIndex,
    pub(super) purpose: Purpose,
}

impl Address {
    fn of(self, sidecar: SidecarIndex) -> Self {
        Self { sidecar, ..self }
    }
}

#[derive(Default)]
pub(super) struct Mesh {
    nodes: HashMap<Address, Node>,
    cut: HashSet<(SidecarIndex, SidecarIndex)>,
    delay: HashMap<(SidecarIndex, SidecarIndex), Duration>,
    next_serial: u64,
}

struct Node {
    serial: u64,
    hello: Hello,
    links: HashMap<SidecarIndex, Link>,
    /// Messages in flight to this port, by sender, oldest first. They outlive the link, so that `Down` is delivered
    /// last.
    arriving: BTreeMap<SidecarIndex, VecDeque<Arriving>>,
    /// The sender whose message was delivered last; the next poll starts with the senders after it.
    served: SidecarIndex,
    incarnations: HashMap<SidecarIndex, Incarnation>,
    stats: PortStats,
    waker: Option<Waker>,
}

struct Link {
    role: Role,
    deadline: Instant,
    up: bool,
    /// Messages queued before the link is up.
    waiting: Vec<Outgoing>,
    /// Bytes sent and not yet polled by the peer.
    queued_bytes: usize,
}

struct Arriving {
    ready_at: Instant,
    event: PortEvent,
    /// Bytes that count towards the sender's queue limit.
    bytes: usize,
    /// Whether the message crossed the mesh and is therefore held back by a partition.
    from_afar: bool,
}

impl Mesh {
    pub(super) fn insert(&mut self, address: Address, hello: Hello, now: Instant) -> u64 {
        if let Some(old) = self.nodes.get(&address) {
            let serial = old.serial;
            self.remove(address, serial, now);
        }
        self.next_serial += 1;
        let serial = self.next_serial;
        let node = Node {
            serial,
            hello,
            links: HashMap::new(),
            arriving: BTreeMap::new(),
            served: SidecarIndex(0),
            incarnations: HashMap::new(),
            stats: PortStats::default(),
            waker: None,
        };
        self.nodes.insert(address, node);
        self.connect_all(now);
        serial
    }

    pub(super) fn remove(&mut self, address: Address, serial: u64, now: Instant) {
        if self.nodes.get(&address).is_none_or(|node| node.serial != serial) {
            return;
        }
        let links: Vec<_> = self.nodes.get(&address).into_iter().flat_map(|node| node.links.keys()).copied().collect();
        for peer in links {
            self.close(address, peer, "the port was closed", now);
        }
        self.nodes.remove(&address);
    }

    pub(super) fn open(&mut self, at: Address, peer: SidecarIndex, role: Role, deadline: Instant, now: Instant) {
        let Some(node) = self.nodes.get_mut(&at) else { return };
        // The owner has not polled `Down` of the last link yet, so for the owner that link still exists.
        let is_down = |arriving: &Arriving| matches!(arriving.event, PortEvent::Down { .. });
        if node.arriving.get(&peer).is_some_and(|queue| queue.iter().any(is_down)) {
            return;
        }
        node.links.entry(peer).or_insert_with(|| Link::opening(role, deadline));
        node.wake();
        self.connect(at, peer, now);
    }

    pub(super) fn send(
        &mut self,
        at: Address,
        to: SidecarIndex,
        message: Outgoing,
        now: Instant,
    ) -> Result<(), SendError> {
        let link = self.nodes.get_mut(&at).and_then(|node| node.links.get_mut(&to));
        let link = link.ok_or(SendError::NoLink(to))?;
        let limit_bytes = outbox_bytes_max(at.purpose);
        let bytes = wire_bytes(&message);
        if link.queued_bytes + bytes > limit_bytes {
            return Err(SendError::Full { peer: to, queued_bytes: link.queued_bytes, limit_bytes });
        }
        link.queued_bytes += bytes;
        if link.up {
            self.carry(at, to, message, now);
        } else {
            link.waiting.push(message);
        }
        Ok(())
    }

    pub(super) fn close(&mut self, at: Address, peer: SidecarIndex, reason: &str, now: Instant) {
        let Some(node) = self.nodes.get_mut(&at) else { return };
        node.arriving.remove(&peer);
        if node.links.remove(&peer).is_some_and(|link| link.up) {
            self.take_down(at.of(peer), at.sidecar, DownReason::ClosedByPeer(reason.to_owned()), now);
        }
    }

    /// Returns the next event, or the time at which to poll again at the latest.
    pub(super) fn next_event(
        &mut self,
        at: Address,
        now: Instant,
        waker: &Waker,
    ) -> Result<PortEvent, Option<Instant>> {
        self.expire(at, now);
        let Some(node) = self.nodes.get_mut(&at) else { return Err(None) };
        let cut = &self.cut;
        let is_ready = |peer: SidecarIndex, queue: &VecDeque<Arriving>| {
            let is_cut = cut.contains(&pair(at.sidecar, peer));
            queue.front().is_some_and(|first| first.ready_at <= now && !(is_cut && first.from_afar))
        };
        let ready = || node.arriving.iter().filter(|(peer, queue)| is_ready(**peer, queue)).map(|(peer, _)| *peer);
        let Some(peer) = ready().find(|peer| *peer > node.served).or_else(|| ready().next()) else {
            node.waker = Some(waker.clone());
            return Err(node.wake_at(now));
        };
        node.served = peer;
        let arriving = node.arriving.get_mut(&peer).and_then(VecDeque::pop_front).expect("its front was just seen");
        if let PortEvent::Frame { frame, .. } = &arriving.event {
            node.stats.frames_received += 1;
            node.stats.opened_bytes += frame.wire_bytes() as u64;
        }
        if let Some(link) = self.nodes.get_mut(&at.of(peer)).and_then(|node| node.links.get_mut(&at.sidecar)) {
            link.queued_bytes = link.queued_bytes.saturating_sub(arriving.bytes);
        }
        Ok(arriving.event)
    }

    pub(super) fn stats(&self, at: Address) -> PortStats {
        self.nodes.get(&at).map(|node| node.stats).unwrap_or_default()
    }

    pub(super) fn set_cut(&mut self, one: SidecarIndex, other: SidecarIndex, cut: bool, now: Instant) {
        if cut {
            self.cut.insert(pair(one, other));
            return;
        }
        self.cut.remove(&pair(one, other));
        self.connect_all(now);
        self.nodes.values_mut().for_each(Node::wake);
    }

    pub(super) fn set_delay(&mut self, one: SidecarIndex, other: SidecarIndex, delay: Duration) {
        self.delay.insert(pair(one, other), delay);
    }

    /// Connects every dialling side whose peer's port exists now.
    fn connect_all(&mut self, now: Instant) {
        let waiting: Vec<_> =
            self.nodes.iter().flat_map(|(at, node)| node.links.keys().map(|peer| (*at, *peer))).collect();
        for (at, peer) in waiting {
            self.connect(at, peer, now);
        }
    }

    /// Opens a link if this side dials, the peer's port exists, and each side accepts the other's hello.
    fn connect(&mut self, at: Address, peer: SidecarIndex, now: Instant) {
        let there = at.of(peer);
        let dials = |node: &Node| node.links.get(&peer).is_some_and(|link| !link.up && link.role == Role::Dial);
        if self.cut.contains(&pair(at.sidecar, peer)) || !self.nodes.get(&at).is_some_and(dials) {
            return;
        }
        let (Some(dialler), Some(acceptor)) = (self.nodes.get(&at), self.nodes.get(&there)) else { return };
        let (ours, theirs) = (dialler.hello.clone(), acceptor.hello.clone());
        let known = |node: &Node, peer| node.incarnations.get(&peer).copied();
        let refusal = hello::refusal(&theirs, &ours, at.sidecar, known(acceptor, at.sidecar), false)
            .or_else(|| hello::refusal(&ours, &theirs, peer, known(dialler, peer), false));
        if let Some(reason) = refusal {
            self.refuse(at, peer, &reason, now);
            self.refuse(there, at.sidecar, &reason, now);
            return;
        }
        let waiting_there = self.bring_up(there, at.sidecar, ours, now);
        let waiting_here = self.bring_up(at, peer, theirs, now);
        waiting_here.into_iter().for_each(|message| self.carry(at, peer, message, now));
        waiting_there.into_iter().for_each(|message| self.carry(there, at.sidecar, message, now));
    }

    fn refuse(&mut self, at: Address, peer: SidecarIndex, reason: &str, now: Instant) {
        if let Some(node) = self.nodes.get_mut(&at) {
            node.stats.refusals += 1;
        }
        self.take_down(at, peer, DownReason::Refused(reason.to_owned()), now);
    }

    fn bring_up(&mut self, at: Address, peer: SidecarIndex, hello: Hello, now: Instant) -> Vec<Outgoing> {
        let Some(node) = self.nodes.get_mut(&at) else { return Vec::new() };
        let link = node.links.entry(peer).or_insert_with(|| Link::opening(Role::Await, now));
        link.up = true;
        let waiting = std::mem::take(&mut link.waiting);
        node.incarnations.insert(peer, hello.incarnation);
        node.stats.links_opened += 1;
        self.push(at, peer, PortEvent::Up { peer, hello: Box::new(hello) }, 0, now);
        waiting
    }

    /// Delivers a message to the peer, or closes the link if the peer would reject the message.
    fn carry(&mut self, at: Address, to: SidecarIndex, message: Outgoing, now: Instant) {
        let bytes = wire_bytes(&message);
        let frame = into_frame(message, at.purpose);
        if let Some(node) = self.nodes.get_mut(&at) {
            node.stats.frames_sent += 1;
            node.stats.sealed_bytes += bytes as u64;
        }
        match frame {
            Ok(frame) => {
                if frame.header.kind == FrameKind::Chunk {
                    self.push(at, to, PortEvent::Sent { peer: to, chunks: 1 }, 0, now);
                }
                self.push(at.of(to), at.sidecar, PortEvent::Frame { from: at.sidecar, frame }, bytes, now);
            }
            Err(reason) => {
                self.take_down(at.of(to), at.sidecar, DownReason::Protocol(reason.clone()), now);
                self.take_down(at, to, DownReason::ClosedByPeer(format!("protocol violation: {reason}")), now);
            }
        }
    }

    /// Removes one side's link and queues its `Down` event.
    fn take_down(&mut self, at: Address, peer: SidecarIndex, reason: DownReason, now: Instant) {
        let removed = self.nodes.get_mut(&at).and_then(|node| node.links.remove(&peer));
        if removed.is_some() {
            self.push(at, peer, PortEvent::Down { peer, reason }, 0, now);
        }
    }

    fn push(&mut self, at: Address, from: SidecarIndex, event: PortEvent, bytes: usize, now: Instant) {
        let delay = self.delay.get(&pair(at.sidecar, from)).copied().unwrap_or_default();
        let Some(node) = self.nodes.get_mut(&at) else { return };
        let queue = node.arriving.entry(from).or_default();
        let ready_at = queue.back().map_or(now + delay, |last| last.ready_at.max(now + delay));
        queue.push_back(Arriving { ready_at, event, bytes, from_afar: true });
        node.wake();
    }

    fn expire(&mut self, at: Address, now: Instant) {
        let Some(node) = self.nodes.get(&at) else { return };
        let late = node.links.iter().filter(|(_, link)| !link.up && link.deadline <= now);
        let late: Vec<_> = late.map(|(peer, link)| (*peer, link.role)).collect();
        for (peer, role) in late {
            let reason = match role {
                Role::Dial => DownReason::Unanswered("it was dialled until the start timeout in vain".to_owned()),
                Role::Await => DownReason::Lost("it did not dial before the start timeout".to_owned()),
            };
            let event = PortEvent::Down { peer, reason };
            let Some(node) = self.nodes.get_mut(&at) else { return };
            node.links.remove(&peer);
            let queue = node.arriving.entry(peer).or_default();
            queue.push_back(Arriving { ready_at: now, event, bytes: 0, from_afar: false });
        }
    }
}

impl Node {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn wake_at(&self, now: Instant) -> Option<Instant> {
        let opening = self.links.values().filter(|link| !link.up).map(|link| link.deadline);
        let delayed = self.arriving.values().filter_map(VecDeque::front).map(|first| first.ready_at);
        // A message that is ready but held back by a partition sets no timer: `set_cut` wakes the port.
        opening.chain(delayed.filter(|at| *at > now)).min()
    }
}

impl Link {
    fn opening(role: Role, deadline: Instant) -> Self {
        Self { role, deadline, up: false, waiting: Vec::new(), queued_bytes: 0 }
    }
}

fn pair(one: SidecarIndex, other: SidecarIndex) -> (SidecarIndex, SidecarIndex) {
    (one.min(other), one.max(other))
}

fn wire_bytes(message: &Outgoing) -> usize {
    match message {
        Outgoing::Frame(frame) => frame.wire_bytes(),
        Outgoing::Chunk(chunk) => chunk.encode_head().len() + chunk.data.len(),
    }
}

/// Encodes and decodes a message as a network would, or returns why the receiver would close the link.
fn into_frame(message: Outgoing, purpose: Purpose) -> Result<Frame, String> {
    let frame = match message {
        Outgoing::Frame(frame) => {
            FrameHeader::decode(&frame.header.encode()).map_err(|error| error.to_string())?;
            if frame.header.length as usize != frame.payload.len() {
                return Err(format!("{} bytes in a frame of length {}", frame.payload.len(), frame.header.length));
            }
            frame
        }
        Outgoing::Chunk(chunk) => {
            let head = chunk.encode_head();
            let (frame, own) = head.split_at(HEADER_BYTES);
            let header = FrameHeader::decode(frame.try_into().expect("split at its length"));
            let header = header.map_err(|error| error.to_string())?;
            Frame { header, payload: [own, &chunk.data].concat().into() }
        }
    };
    hello::check_kind(&frame.header, purpose)?;
    hello::check_lane(&frame, purpose)?;
    Ok(frame)
}
