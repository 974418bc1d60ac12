//! Connections between sidecars: each direction is first-in-first-out, different ones overtake each other freely.

use std::collections::{BTreeMap, VecDeque};

use fastrand::Rng;
use ronde_wire::frame::Chunk;
use ronde_wire::{Control, Epoch, Seq};

use super::schedule::{Schedule, SimEvent};

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Plane {
    Control,
    Lane(usize),
}

/// A connection between two sidecars, the lower one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionId {
    pub(super) plane: Plane,
    pub(super) low: usize,
    pub(super) high: usize,
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Direction {
    pub(super) plane: Plane,
    pub(super) from: usize,
    pub(super) to: usize,
}

impl Direction {
    pub(super) fn connection(self) -> ConnectionId {
        ConnectionId { plane: self.plane, low: self.from.min(self.to), high: self.from.max(self.to) }
    }
}

impl ConnectionId {
    pub(super) fn directions(self) -> [Direction; 2] {
        let Self { plane, low, high } = self;
        [Direction { plane, from: low, to: high }, Direction { plane, from: high, to: low }]
    }

    pub(super) fn has(self, host: usize) -> bool {
        self.low == host || self.high == host
    }
}

/// An event of a connection.
#[derive(Clone, Debug)]
pub(super) enum Message {
    /// The connection is open.
    Up,
    /// The connection is gone.
    Down(&'static str),
    Control(Epoch, Seq, Control),
    Chunk(Chunk),
    Admitted(Epoch, Seq),
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Down,
    Opening,
    Up,
}

#[derive(Debug, Default)]
struct Connection {
    state: State,
    /// Grows when the connection breaks: everything in flight is void.
    generation: u64,
    /// Sent before the connection was up.
    early: Vec<(Direction, Message)>,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Message>,
    last_us: u64,
}

/// All connections.
#[derive(Debug)]
pub(super) struct Network {
    connections: BTreeMap<ConnectionId, Connection>,
    queues: BTreeMap<Direction, Queue>,
    /// Pairs that cannot reach each other, until when.
    cuts: BTreeMap<(usize, usize), u64>,
    /// The usual delay of a message is up to this.
    delay_us: u64,
    /// One of so many messages on lanes is late by up to 100 ms.
    pub(super) late_one_in: u32,
}

/// The idle timeout of a transport.
const IDLE_TIMEOUT_US: u64 = 6_000_000;
/// How long a transport tries to open one.
const OPEN_TIMEOUT_US: u64 = 10_000_000;
/// The pause between two attempts.
const RETRY_US: u64 = 100_000;
const LATE_US: u64 = 100_000;

impl Network {
    pub(super) fn new(rng: &mut Rng) -> Self {
        let delay_us = [20, 200, 2_000][rng.usize(..3)];
        let late_one_in = [20, 200, u32::MAX][rng.usize(..3)];
        let (connections, queues, cuts) = Default::default();
        Self { connections, queues, cuts, delay_us, late_one_in }
    }

    /// Sends a message; it waits until the connection is open.
    pub(super) fn send(&mut self, schedule: &mut Schedule, rng: &mut Rng, direction: Direction, message: Message) {
        self.open(schedule, rng, direction.connection());
        let connection = self.connection(direction.connection());
        if connection.state == State::Up {
            self.push(schedule, rng, direction, message);
        } else {
            connection.early.push((direction, message));
        }
    }

    /// Opens a connection unless there is one.
    pub(super) fn open(&mut self, schedule: &mut Schedule, rng: &mut Rng, id: ConnectionId) {
        let connection = self.connection(id);
        if connection.state == State::Down {
            connection.state = State::Opening;
            let give_up_us = schedule.now_us() + OPEN_TIMEOUT_US;
            let connect = SimEvent::Connect { connection: id, generation: connection.generation, give_up_us };
            schedule.after(rng.u64(1..=self.delay_us * 3), connect);
        }
    }

    /// Ends an attempt: the connection is up when both ends live and reach each other.
    pub(super) fn connect(
        &mut self,
        schedule: &mut Schedule,
        rng: &mut Rng,
        (id, generation, give_up_us): (ConnectionId, u64, u64),
        both_live: bool,
    ) {
        if self.connection(id).generation != generation {
            return;
        }
        if both_live && self.cut_until(id.low, id.high) <= schedule.now_us() {
            self.connection(id).state = State::Up;
            for direction in id.directions() {
                self.push(schedule, rng, direction, Message::Up);
            }
            for (direction, message) in std::mem::take(&mut self.connection(id).early) {
                self.push(schedule, rng, direction, message);
            }
        } else if schedule.now_us() < give_up_us {
            schedule.after(RETRY_US, SimEvent::Connect { connection: id, generation, give_up_us });
        } else {
            self.break_up(schedule, rng, id, None, "it did not connect");
        }
    }

    /// Takes the oldest message of a direction that arrives now; none while the two ends cannot reach each other.
    pub(super) fn deliver(
        &mut self,
        schedule: &mut Schedule,
        direction: Direction,
        generation: u64,
    ) -> Option<Message> {
        if self.connection(direction.connection()).generation != generation {
            return None;
        }
        let until_us = self.cut_until(direction.from, direction.to);
        let messages = &mut self.queues.get_mut(&direction)?.messages;
        // The event that a connection is gone does not travel.
        if until_us > schedule.now_us() && !matches!(messages.front(), Some(Message::Down(_))) {
            schedule.at(until_us, SimEvent::Deliver { direction, generation });
            return None;
        }
        messages.pop_front()
    }

    /// Cuts two sidecars off from each other. When that lasts, their transports give up.
    pub(super) fn cut(&mut self, schedule: &mut Schedule, a: usize, b: usize, for_us: u64) {
        let until_us = schedule.now_us() + for_us;
        self.cuts.insert((a.min(b), a.max(b)), until_us);
        if for_us > IDLE_TIMEOUT_US {
            self.expire_all(schedule, |id| (id.low, id.high) == (a.min(b), a.max(b)));
        }
    }

    /// Connections of a host that died silently time out later.
    pub(super) fn fall_silent(&self, schedule: &mut Schedule, host: usize) {
        self.expire_all(schedule, |id| id.has(host));
    }

    pub(super) fn expire(&mut self, schedule: &mut Schedule, rng: &mut Rng, id: ConnectionId, generation: u64) {
        if self.connection(id).generation == generation {
            self.break_up(schedule, rng, id, None, "it has been silent for too long");
        }
    }

    /// Breaks all connections of a host whose process is gone; its peers notice.
    pub(super) fn break_all(&mut self, schedule: &mut Schedule, rng: &mut Rng, host: usize, why: &'static str) {
        let ids: Vec<ConnectionId> = self.connections.keys().copied().filter(|id| id.has(host)).collect();
        for id in ids {
            self.break_up(schedule, rng, id, Some(host), why);
        }
    }

    /// Breaks a connection, which both ends notice.
    pub(super) fn break_link(&mut self, schedule: &mut Schedule, rng: &mut Rng, id: ConnectionId, why: &'static str) {
        self.break_up(schedule, rng, id, None, why);
    }

    pub(super) fn generation(&mut self, direction: Direction) -> u64 {
        self.connection(direction.connection()).generation
    }

    /// Undelivered messages of a direction, oldest first.
    pub(super) fn undelivered(&mut self, direction: Direction) -> &mut VecDeque<Message> {
        &mut self.queues.entry(direction).or_default().messages
    }

    fn break_up(
        &mut self,
        schedule: &mut Schedule,
        rng: &mut Rng,
        id: ConnectionId,
        gone: Option<usize>,
        why: &'static str,
    ) {
        let connection = self.connection(id);
        let was = std::mem::take(&mut connection.state);
        if was == State::Down {
            return;
        }
        connection.generation += 1;
        connection.early.clear();
        for direction in id.directions() {
            self.undelivered(direction).clear();
            if gone != Some(direction.to) {
                self.push(schedule, rng, direction, Message::Down(why));
            }
        }
    }

    fn push(&mut self, schedule: &mut Schedule, rng: &mut Rng, direction: Direction, message: Message) {
        let generation = self.connection(direction.connection()).generation;
        let late = direction.plane != Plane::Control && rng.u32(..self.late_one_in) == 0;
        let delay_us = rng.u64(1..=self.delay_us) + if late { rng.u64(..LATE_US) } else { 0 };
        let queue = self.queues.entry(direction).or_default();
        queue.last_us = queue.last_us.max(schedule.now_us() + delay_us);
        queue.messages.push_back(message);
        schedule.at(queue.last_us, SimEvent::Deliver { direction, generation });
    }

    fn expire_all(&self, schedule: &mut Schedule, concerns: impl Fn(ConnectionId) -> bool) {
        for (id, connection) in self.connections.iter().filter(|(id, c)| concerns(**id) && c.state == State::Up) {
            schedule.after(IDLE_TIMEOUT_US, SimEvent::Expire { connection: *id, generation: connection.generation });
        }
    }

    fn cut_until(&self, a: usize, b: usize) -> u64 {
        self.cuts.get(&(a.min(b), a.max(b))).copied().unwrap_or_default()
    }

    fn connection(&mut self, id: ConnectionId) -> &mut Connection {
        self.connections.entry(id).or_default()
    }
}
