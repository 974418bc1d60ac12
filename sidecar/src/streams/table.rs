//! The streams and listeners of one lane.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ronde_shm::ring::{Wait, framed};
use ronde_transport::{DownReason, FramePool, Outgoing, Port, Role as Dialling, SendError};
use ronde_wire::frame::HEADER_BYTES;
use ronde_wire::stream::{
    Handle, ListenSecret, STREAM_HEADER_BYTES, SidecarMessage, StreamFrame, WorkerMessage, is_data, is_finish,
};
use ronde_wire::{Frame, Lane, SidecarIndex, limits};
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::gate::NewStream;
use super::stream::{BellEvent, Number, Role, Stream};

/// The configuration of a lane's streams.
pub(crate) struct StreamConfig {
    /// This sidecar.
    pub(crate) me: SidecarIndex,
    /// The lane.
    pub(crate) lane: Lane,
    /// See [`ronde_wire::stream::job_number`].
    pub(crate) job: u64,
    /// The sidecars of the membership.
    pub(crate) sidecars: BTreeSet<SidecarIndex>,
    /// The silence after which a peer is dead.
    pub(crate) peer_timeout: Duration,
    /// New rings of workers.
    pub(crate) new: mpsc::Receiver<NewStream>,
    /// Draws the secret of a listener.
    pub(crate) secret: fn() -> anyhow::Result<[u8; 16]>,
}

/// Counters of streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamStats {
    /// Streams and listeners that workers have open.
    pub(crate) open: usize,
    /// Streams that connected.
    pub(crate) connected: u64,
    /// Connections that were refused here, and streams that were closed because a worker broke the rules.
    pub(crate) refused: u64,
    /// Bytes of messages that were sent to other sidecars or to workers of this one.
    pub(crate) sent_bytes: u64,
    /// Bytes of messages that were received.
    pub(crate) received_bytes: u64,
}

impl StreamStats {
    /// The sum of two lanes' counters.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            open: self.open + other.open,
            connected: self.connected + other.connected,
            refused: self.refused + other.refused,
            sent_bytes: self.sent_bytes + other.sent_bytes,
            received_bytes: self.received_bytes + other.received_bytes,
        }
    }
}

/// Reports of bells that the lane has not received; a bell that is full of them waits.
const BELLS_MAX: usize = 1_024;

/// The streams of one lane.
pub(crate) struct Streams {
    pub(super) config: StreamConfig,
    pub(super) streams: BTreeMap<Number, Stream>,
    pub(super) listeners: HashMap<Number, Listener>,
    pub(super) peers: HashMap<SidecarIndex, PeerState>,
    /// Streams that may have messages to send.
    pub(super) queue: VecDeque<Number>,
    /// Frames from this sidecar to itself.
    local: VecDeque<Bytes>,
    /// Peers to which a frame was not sent: what follows would make no sense to them.
    broken: BTreeMap<SidecarIndex, SendError>,
    pub(super) stats: StreamStats,
    next: Number,
    pool: FramePool,
    bells: (mpsc::Sender<BellEvent>, mpsc::Receiver<BellEvent>),
    ticks: Interval,
    last_tick: Instant,
}

/// A listener of a worker.
pub(super) struct Listener {
    pub(super) secret: ListenSecret,
    /// Streams of its worker that wait for a peer.
    pub(super) ready: VecDeque<Number>,
    /// Peers that wait for its worker, with their numbers.
    pub(super) waiting: VecDeque<(SidecarIndex, Number)>,
}

/// What is known of a peer.
#[derive(Default)]
pub(super) struct PeerState {
    /// Bytes that its connection has not accepted yet.
    pub(super) queued_bytes: usize,
    /// Streams that wait until it has.
    pub(super) stalled: BTreeSet<Number>,
    /// When a frame arrived last, or the link came up, since there are streams with the peer.
    pub(super) received_at: Option<Instant>,
}

/// What wakes a lane for its streams.
pub(crate) enum StreamEvent {
    New(Box<NewStream>),
    Bell(Number, bool),
    Tick,
}

impl Streams {
    /// Creates an empty table. Call it inside the runtime of the lane.
    pub(crate) fn new(config: StreamConfig) -> Self {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            config,
            streams: BTreeMap::new(),
            listeners: HashMap::new(),
            peers: HashMap::new(),
            queue: VecDeque::new(),
            local: VecDeque::new(),
            broken: BTreeMap::new(),
            stats: StreamStats::default(),
            next: 1,
            pool: FramePool::default(),
            bells: mpsc::channel(BELLS_MAX),
            ticks,
            last_tick: Instant::now(),
        }
    }

    /// Counters.
    pub(crate) fn stats(&self) -> StreamStats {
        StreamStats { open: self.streams.len(), ..self.stats }
    }

    /// Waits for the next event of workers, or for the next tick if there are streams. Cancel safe.
    pub(crate) async fn next_event(&mut self) -> StreamEvent {
        let has_streams = !self.streams.is_empty();
        tokio::select! {
            Some(new) = self.config.new.recv() => StreamEvent::New(Box::new(new)),
            Some(event) = self.bells.1.recv() => match event {
                BellEvent::Rung(number) => StreamEvent::Bell(number, false),
                BellEvent::Gone(number) => StreamEvent::Bell(number, true),
            },
            _ = self.ticks.tick(), if has_streams => StreamEvent::Tick,
            else => std::future::pending().await,
        }
    }

    /// Handles an event.
    pub(crate) fn handle_event(&mut self, event: StreamEvent, port: &mut dyn Port) {
        match event {
            StreamEvent::New(new) => self.attach(*new),
            StreamEvent::Bell(number, is_gone) => {
                let Some(stream) = self.streams.get_mut(&number) else { return };
                stream.take_bell();
                if is_gone {
                    stream.gone_since.get_or_insert_with(Instant::now);
                }
                self.enqueue(number);
            }
            StreamEvent::Tick => self.tick(Instant::now(), port),
        }
    }

    fn attach(&mut self, new: NewStream) {
        let number = self.next;
        self.next += 1;
        match Stream::open(new, number, self.bells.0.clone()) {
            Ok(stream) => drop(self.streams.insert(number, stream)),
            Err(error) => return tracing::warn!(error, "a stream is not opened"),
        }
        self.enqueue(number);
    }

    /// Puts a stream into the queue of those that are advanced.
    pub(super) fn enqueue(&mut self, number: Number) {
        if let Some(stream) = self.streams.get_mut(&number)
            && !std::mem::replace(&mut stream.is_queued, true)
        {
            self.queue.push_back(number);
        }
    }

    /// Advances a few streams, in turns. Returns whether more can be done at once.
    pub(crate) fn work(&mut self, port: &mut dyn Port) -> bool {
        while let Some(payload) = self.local.pop_front() {
            if let Err(violation) = self.handle_frame(port, self.config.me, &payload) {
                // Both ends are this program.
                tracing::error!(violation, "a stream of this sidecar to itself broke the protocol");
            }
        }
        for _ in 0..STREAMS_PER_TURN {
            let Some(number) = self.queue.pop_front() else { break };
            if let Some(stream) = self.streams.get_mut(&number) {
                stream.is_queued = false;
                self.advance(number, port);
            }
        }
        !self.queue.is_empty() || !self.local.is_empty()
    }

    /// Handles messages of one stream's worker, up to a number.
    fn advance(&mut self, number: Number, port: &mut dyn Port) {
        for _ in 0..MESSAGES_PER_TURN {
            match self.advance_once(number, port) {
                Ok(Step::More) => {}
                Ok(Step::Waits) => return,
                Err(violation) => {
                    let reason = format!("the sidecar ended the connection: {violation}");
                    self.stats.refused += 1;
                    return self.close(number, &reason, port);
                }
            }
        }
        self.enqueue(number);
    }

    fn advance_once(&mut self, number: Number, port: &mut dyn Port) -> Result<Step, String> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(Step::Waits) };
        if stream.role == Role::Ended {
            if stream.gone_since.is_some() {
                self.streams.remove(&number);
            }
            return Ok(Step::Waits);
        }
        let Some(length) = stream.ring.consumer.next_bytes().map_err(|error| error.to_string())? else {
            if stream.gone_since.is_some() {
                self.close(number, PROCESS_GONE, port);
                return Ok(Step::Waits);
            }
            let is_empty = stream.ring.consumer.arm(Wait::Bell).map_err(|error| error.to_string())?;
            return Ok(if is_empty { Step::Waits } else { Step::More });
        };
        match stream.role {
            Role::Sending { peer, remote, credit, window } => {
                self.send_next(number, length, (peer, remote, credit, window), port)
            }
            _ => self.handle_message(number, length, port),
        }
    }

    /// Sends the next message of a stream, if there is credit and room.
    fn send_next(
        &mut self,
        number: Number,
        length: usize,
        (peer, remote, credit, window): (SidecarIndex, Number, u64, u64),
        port: &mut dyn Port,
    ) -> Result<Step, String> {
        let queued_bytes = self.peers.get(&peer).map_or(0, |state| state.queued_bytes);
        if peer != self.config.me && queued_bytes >= limits::STREAM_WINDOW_BYTES {
            self.peers.entry(peer).or_default().stalled.insert(number);
            return Ok(Step::Waits);
        }
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(Step::Waits) };
        let cost = framed(length as u64);
        let mut head = [0; STREAM_HEADER_BYTES];
        let head = &mut head[..length.min(STREAM_HEADER_BYTES)];
        stream.ring.consumer.peek(head).map_err(|error| error.to_string())?;
        if cost > credit && !(length == STREAM_HEADER_BYTES && is_finish(head)) {
            if cost > window {
                return Err(format!("a part of {length} bytes does not fit the receiver's window of {window}"));
            }
            // The next credit continues.
            return Ok(Step::Waits);
        }
        let payload_bytes = STREAM_HEADER_BYTES + length;
        let mut memory = self.pool.take(payload_bytes);
        let message = &mut memory[STREAM_HEADER_BYTES..payload_bytes];
        stream.ring.consumer.pop_to(0, message).map_err(|error| error.to_string())?;
        // From here on the bytes are private.
        if is_finish(message) {
            self.streams.remove(&number);
            self.send(port, peer, StreamFrame::Finish.encode(remote));
            return Ok(Step::Waits);
        }
        if !is_data(message) || cost > credit {
            return Err("it sends something else than data".to_owned());
        }
        stream.role = Role::Sending { peer, remote, credit: credit - cost, window };
        let (head, _) = memory.split_first_chunk_mut().ok_or("a payload has a header")?;
        StreamFrame::data_header(remote, head);
        self.stats.sent_bytes += (length - STREAM_HEADER_BYTES) as u64;
        let payload = self.pool.freeze(memory, payload_bytes);
        self.send(port, peer, payload);
        Ok(Step::More)
    }

    /// Handles a message of a stream that does not send.
    fn handle_message(&mut self, number: Number, length: usize, port: &mut dyn Port) -> Result<Step, String> {
        let Some(stream) = self.streams.get_mut(&number) else { return Ok(Step::Waits) };
        let mut message = [0; MESSAGE_BYTES_MAX];
        let message = message.get_mut(..length).ok_or("a message is longer than any that may come now")?;
        stream.ring.consumer.pop_to(0, message).map_err(|error| error.to_string())?;
        let message = WorkerMessage::decode(message).map_err(|error| error.to_string())?;
        match (&mut stream.role, message) {
            (Role::New, WorkerMessage::Listen) => self.listen(number)?,
            (Role::New, WorkerMessage::Accept { listener, secret }) => {
                let known = self.listeners.get_mut(&listener).filter(|known| known.secret == secret);
                known.ok_or("there is no such listener")?.ready.push_back(number);
                stream.role = Role::Accepting(listener);
                self.match_listener(listener, port);
            }
            (Role::New, WorkerMessage::Connect(handle)) => self.connect(number, &handle, port)?,
            // Each one makes a frame, so one without bytes could be sent without end.
            (Role::Receiving { .. }, WorkerMessage::Credit(0)) => return Err("it grants 0 bytes".to_owned()),
            (Role::Receiving { peer, remote, granted }, WorkerMessage::Credit(bytes)) => {
                *granted = granted.saturating_add(bytes);
                let (peer, remote, granted) = (*peer, *remote, *granted);
                if granted > stream.window() {
                    return Err(format!("it grants {granted} bytes of a window of {}", stream.window()));
                }
                self.send(port, peer, StreamFrame::Credit(bytes).encode(remote));
            }
            (role, message) => return Err(format!("{message:?} is not expected while it is {}", described(role))),
        }
        Ok(Step::More)
    }

    fn listen(&mut self, number: Number) -> Result<(), String> {
        let secret = (self.config.secret)().map_err(|error| format!("no secret can be drawn: {error:#}"))?;
        let secret = ListenSecret(secret);
        let StreamConfig { me, lane, job, .. } = self.config;
        let handle = Handle { sidecar: me, lane, listener: number, secret, job };
        let stream = self.streams.get_mut(&number).ok_or("it is gone")?;
        stream.push(&SidecarMessage::Listening(handle).encode())?;
        stream.role = Role::Listener;
        self.listeners.insert(number, Listener { secret, ready: VecDeque::new(), waiting: VecDeque::new() });
        Ok(())
    }

    fn connect(&mut self, number: Number, handle: &Handle, port: &mut dyn Port) -> Result<(), String> {
        if handle.job != self.config.job {
            return Err("the handle belongs to another job".to_owned());
        }
        if handle.lane != self.config.lane || !self.config.sidecars.contains(&handle.sidecar) {
            return Err(format!("the handle names {} of {}, which is not in this job", handle.lane, handle.sidecar));
        }
        if !self.active_peers().contains(&handle.sidecar)
            && let Some(state) = self.peers.get_mut(&handle.sidecar)
        {
            // It may have been silent, because there was nothing to say.
            state.received_at = None;
        }
        let stream = self.streams.get_mut(&number).ok_or("it is gone")?;
        stream.role = Role::Connecting(handle.sidecar, handle.listener);
        let open = StreamFrame::Open { listener: handle.listener, secret: handle.secret };
        if handle.sidecar != self.config.me {
            port.open(handle.sidecar, Dialling::Dial);
        }
        self.send(port, handle.sidecar, open.encode(number));
        Ok(())
    }

    /// Joins peers that wait with streams that their worker offers.
    pub(super) fn match_listener(&mut self, number: Number, port: &mut dyn Port) {
        while let Some(listener) = self.listeners.get_mut(&number)
            && !listener.waiting.is_empty()
            && let Some(ready) = listener.ready.pop_front()
        {
            let Some(stream) = self.streams.get_mut(&ready) else { continue };
            let Some((peer, remote)) = listener.waiting.pop_front() else { return };
            let window = stream.window();
            stream.role = Role::Receiving { peer, remote, granted: window };
            let connected = SidecarMessage::Connected { peer, window: window_of(window) };
            if let Err(error) = stream.push(&connected.encode()) {
                self.close(ready, &error, port);
                continue;
            }
            self.stats.connected += 1;
            self.send(port, peer, StreamFrame::Accept { number: ready, credit: window }.encode(remote));
        }
    }

    /// Ends a stream or a listener, and notifies its worker and its peer.
    pub(super) fn close(&mut self, number: Number, reason: &str, port: &mut dyn Port) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        let role = stream.role.clone();
        stream.fail(reason);
        // Its worker reads the reason, and then closes its end.
        if stream.gone_since.is_some() {
            self.streams.remove(&number);
        }
        match role {
            Role::Sending { peer, remote, .. } | Role::Receiving { peer, remote, .. } => {
                self.send(port, peer, StreamFrame::Close(reason.to_owned()).encode(remote));
            }
            Role::Listener => {
                let Some(listener) = self.listeners.remove(&number) else { return };
                for (peer, remote) in listener.waiting {
                    self.send(port, peer, StreamFrame::Close("the listener was closed".to_owned()).encode(remote));
                }
                for ready in listener.ready {
                    self.close(ready, "its listener was closed", port);
                }
            }
            Role::Accepting(listener) => {
                if let Some(listener) = self.listeners.get_mut(&listener) {
                    listener.ready.retain(|ready| *ready != number);
                }
            }
            // If the peer has answered meanwhile, the answer meets no stream, which it is told then.
            Role::Connecting(peer, listener) => {
                self.send(port, peer, StreamFrame::Abandon { listener }.encode(number));
            }
            Role::New | Role::Ended => {}
        }
    }

    /// Sends a payload; to a peer without a link nothing, because its streams have been closed.
    pub(super) fn send(&mut self, port: &mut dyn Port, peer: SidecarIndex, payload: Bytes) {
        if peer == self.config.me {
            return self.local.push_back(payload);
        }
        let bytes = HEADER_BYTES + payload.len();
        match port.send(peer, Outgoing::Frame(Frame::stream(payload))) {
            Ok(()) => self.peers.entry(peer).or_default().queued_bytes += bytes,
            // Later, because the caller is in the middle of something.
            Err(error) => drop(self.broken.insert(peer, error)),
        }
    }

    /// Ends the streams with peers to which a frame was not sent. Returns a peer whose link has to be closed, because it is up
    /// and the peer would wait for that frame.
    pub(crate) fn take_broken(&mut self, port: &mut dyn Port) -> Option<(SidecarIndex, String)> {
        while let Some((peer, error)) = self.broken.pop_first() {
            match error {
                SendError::NoLink(_) => self.end_peer(peer, &error.to_string(), port),
                SendError::Full { .. } => return Some((peer, error.to_string())),
            }
        }
        None
    }

    /// Ends all streams with a peer, whose link is down or which is silent.
    pub(crate) fn handle_down(&mut self, peer: SidecarIndex, reason: &DownReason, port: &mut dyn Port) {
        self.end_peer(peer, &format!("the link to {peer} is down: {reason}"), port);
    }

    fn end_peer(&mut self, peer: SidecarIndex, reason: &str, port: &mut dyn Port) {
        self.peers.remove(&peer);
        for listener in self.listeners.values_mut() {
            listener.waiting.retain(|(waiting, _)| *waiting != peer);
        }
        let concerned = self.streams.iter().filter(|(_, stream)| stream.role.peer() == Some(peer));
        let concerned: Vec<Number> = concerned.map(|(number, _)| *number).collect();
        concerned.into_iter().for_each(|number| self.close(number, reason, port));
        // They were not notified, and need not be.
        self.broken.remove(&peer);
    }

    /// The connection of a peer has accepted bytes.
    pub(crate) fn handle_sent(&mut self, peer: SidecarIndex, bytes: usize) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        state.queued_bytes = state.queued_bytes.saturating_sub(bytes);
        if state.queued_bytes < limits::STREAM_WINDOW_BYTES {
            let stalled = std::mem::take(&mut state.stalled);
            stalled.into_iter().for_each(|number| self.enqueue(number));
        }
    }

    /// Another membership begins: ends all streams and listeners, and admits peers of these sidecars.
    pub(crate) fn enter(&mut self, sidecars: BTreeSet<SidecarIndex>, port: &mut dyn Port) {
        let all: Vec<Number> = self.streams.keys().copied().collect();
        all.into_iter().for_each(|number| self.close(number, "another membership of the job begins", port));
        self.local.clear();
        self.peers.clear();
        self.config.sidecars = sidecars;
    }

    /// The other sidecars with which there are streams, or which wait for a worker of this one.
    fn active_peers(&self) -> BTreeSet<SidecarIndex> {
        let waiting = self.listeners.values().flat_map(|listener| listener.waiting.iter().map(|(peer, _)| *peer));
        let mut peers: BTreeSet<SidecarIndex> = waiting.collect();
        peers.extend(self.streams.values().filter_map(|stream| stream.role.peer()));
        peers.remove(&self.config.me);
        peers
    }

    /// Shows peers that this side is alive, and ends the streams of those that are silent.
    pub(super) fn tick(&mut self, now: Instant, port: &mut dyn Port) {
        let was_paused = now.duration_since(self.last_tick) > self.config.peer_timeout / 2;
        self.last_tick = now;
        let timeout = self.config.peer_timeout;
        let late = self.streams.iter().filter(|(_, stream)| is_late(stream, now, timeout));
        let late: Vec<Number> = late.map(|(number, _)| *number).collect();
        late.into_iter().for_each(|number| self.close(number, PROCESS_GONE, port));
        for peer in self.active_peers() {
            let state = self.peers.entry(peer).or_default();
            if was_paused {
                state.received_at = state.received_at.map(|_| now);
            }
            let silent = state.received_at.map_or(Duration::ZERO, |received_at| now.duration_since(received_at));
            if silent >= timeout {
                self.end_peer(peer, &format!("{peer} is silent for {} s", silent.as_secs()), port);
            } else if state.queued_bytes < limits::STREAM_WINDOW_BYTES {
                self.send(port, peer, StreamFrame::Alive.encode(0));
            }
        }
    }
}

/// Whether a stream whose worker is gone has had its time to send the rest.
fn is_late(stream: &Stream, now: Instant, timeout: Duration) -> bool {
    stream.gone_since.is_some_and(|since| now.duration_since(since) >= timeout)
}

/// What a stream's turn has led to.
enum Step {
    /// There may be more to do.
    More,
    /// An event continues.
    Waits,
}

fn described(role: &Role) -> &'static str {
    match role {
        Role::New => "new",
        Role::Listener => "a listener",
        Role::Accepting(_) => "waiting for a peer",
        Role::Connecting(..) => "connecting",
        Role::Sending { .. } => "sending",
        Role::Receiving { .. } => "receiving",
        Role::Ended => "over",
    }
}

pub(super) fn window_of(bytes: u64) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Why a stream is over whose worker's end was closed. It may have closed it, or have ended.
pub(super) const PROCESS_GONE: &str = "the process at the other end has closed the connection or ended";
const TICK: Duration = Duration::from_millis(500);
/// Streams that are advanced before the lane turns to its other work.
const STREAMS_PER_TURN: usize = 4;
/// Messages of one stream in its turn: half a megabyte.
const MESSAGES_PER_TURN: usize = 4;
/// The longest message of a worker other than data.
const MESSAGE_BYTES_MAX: usize = 256;
