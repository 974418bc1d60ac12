//! The state that a port's tasks share with its owner: links, events and counters.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ronde_wire::control::{Carrier, Hello, Purpose};
use ronde_wire::{Frame, Incarnation, SidecarIndex};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::auth::{LinkAuth, LinkSecurity};
use super::close::CloseCode;
use super::connection::Connection;
use super::endpoints::{Endpoints, ServerConfigs};
use super::handover::Handover;
use super::link::LinkStream;
use super::outbox::Outbox;
use super::{LinkOptions, Routes};
use crate::identity::{Identity, IdentityError};
use crate::port::{DownReason, Outgoing, PortEvent, PortStats, Role, SendError};

/// A port's state. Owner and tasks run on one thread, so the lock is never contended.
pub(super) struct Shared {
    /// The hello of the first membership. Its other fields do not change; see [`Self::hello`].
    pub(super) hello: Hello,
    pub(super) options: LinkOptions,
    pub(super) endpoints: Endpoints,
    pub(super) counters: Counters,
    pub(super) routes: Routes,
    state: Mutex<State>,
    /// The current identity.
    identity: watch::Sender<Arc<Identity>>,
    /// Notified when the owner has polled events.
    inbox_space: Notify,
}

struct State {
    membership: u64,
    /// The sidecars of the membership, with the addresses at which they are dialled.
    peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
    servers: ServerConfigs,
    links: HashMap<SidecarIndex, Link>,
    events: VecDeque<QueuedEvent>,
    queued_bytes: usize,
    owner: Option<Waker>,
    incarnations: HashMap<SidecarIndex, Incarnation>,
    generation: u64,
    last_refusal: Option<String>,
}

struct Link {
    /// Distinguishes the tasks of this link from those of an earlier link to the same peer.
    generation: u64,
    phase: Phase,
    outbox: Arc<Outbox>,
}

enum Phase {
    Opening {
        role: Role,
        task: Option<AbortHandle>,
    },
    Up {
        connection: Connection,
        security: LinkSecurity,
        handover: Arc<Handover>,
        dialled: bool,
        since: Instant,
    },
    /// `Down` is queued. The entry is removed when the owner polls it, so that an earlier `open` does nothing.
    Down,
}

struct QueuedEvent {
    peer: SidecarIndex,
    generation: u64,
    event: PortEvent,
    bytes: usize,
}

/// The parts of a link that its task needs.
pub(super) struct ActiveLink {
    pub(super) generation: u64,
    pub(super) outbox: Arc<Outbox>,
    pub(super) handover: Arc<Handover>,
    /// Whether this side dialled. The dialler makes replacement connections.
    pub(super) dialled: bool,
}

impl Shared {
    pub(super) fn new(
        identity: Arc<Identity>,
        hello: Hello,
        peers: HashMap<SidecarIndex, Vec<SocketAddr>>,
        options: LinkOptions,
        (endpoints, servers): (Endpoints, ServerConfigs),
        routes: Routes,
    ) -> Self {
        let state = State {
            membership: hello.membership,
            peers,
            servers,
            links: HashMap::new(),
            events: VecDeque::new(),
            queued_bytes: 0,
            owner: None,
            incarnations: HashMap::new(),
            generation: 0,
            last_refusal: None,
        };
        let counters = Counters::default();
        let (state, inbox_space) = (Mutex::new(state), Notify::new());
        Self { hello, options, endpoints, counters, routes, state, identity: watch::Sender::new(identity), inbox_space }
    }

    /// The hello of the current membership.
    pub(super) fn hello(&self) -> Hello {
        Hello { membership: self.lock().membership, ..self.hello.clone() }
    }

    /// The sidecars of the current membership.
    pub(super) fn peers(&self) -> Vec<SidecarIndex> {
        self.lock().peers.keys().copied().collect()
    }

    /// Where a sidecar of the current membership is dialled; `None` for one that does not take part.
    pub(super) fn addresses(&self, peer: SidecarIndex) -> Option<Vec<SocketAddr>> {
        self.lock().peers.get(&peer).cloned()
    }

    /// Closes the links of the current membership for the owner, and admits those of another one.
    pub(super) fn enter(&self, membership: u64, peers: HashMap<SidecarIndex, Vec<SocketAddr>>) {
        let linked: Vec<_> = self.lock().links.keys().copied().collect();
        linked.into_iter().for_each(|peer| self.close(peer, &format!("membership {membership} of the job begins")));
        let mut state = self.lock();
        (state.membership, state.peers, state.last_refusal) = (membership, peers, None);
    }

    pub(super) fn identity(&self) -> Arc<Identity> {
        self.identity.borrow().clone()
    }

    /// The identity with the server configurations that present it.
    pub(super) fn accepting(&self) -> (Arc<Identity>, ServerConfigs) {
        let state = self.lock();
        (self.identity(), state.servers.clone())
    }

    /// The protocol that carries this port's links.
    pub(super) fn carrier(&self) -> Carrier {
        self.hello.transport.carrier(self.hello.purpose)
    }

    /// Notifies of each newly installed identity.
    pub(super) fn subscribe_identity(&self) -> watch::Receiver<Arc<Identity>> {
        self.identity.subscribe()
    }

    pub(super) fn set_identity(&self, identity: Arc<Identity>, servers: ServerConfigs) -> Result<(), IdentityError> {
        let current = self.identity();
        if identity.id() != current.id() {
            let (expected, found) = (Box::new(current.id().clone()), Box::new(identity.id().clone()));
            return Err(IdentityError::OtherId { expected, found });
        }
        self.endpoints.install(&servers);
        let mut state = self.lock();
        state.servers = servers;
        self.identity.send_replace(identity);
        Ok(())
    }

    /// Registers a link that is being opened; `None` if the peer already has one.
    pub(super) fn open(&self, peer: SidecarIndex, role: Role) -> Option<u64> {
        let mut state = self.lock();
        if state.links.contains_key(&peer) {
            return None;
        }
        let outbox = Arc::new(Outbox::new(self.hello.purpose));
        Some(state.insert(peer, Phase::Opening { role, task: None }, outbox))
    }

    pub(super) fn set_opening_task(&self, peer: SidecarIndex, generation: u64, handle: AbortHandle) {
        if let Some(Phase::Opening { task, .. }) = self.lock().phase_of(peer, generation) {
            *task = Some(handle);
        }
    }

    pub(super) fn send(&self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError> {
        let state = self.lock();
        match state.links.get(&to) {
            Some(link) if !matches!(link.phase, Phase::Down) => link.outbox.push(to, message),
            _ => Err(SendError::NoLink(to)),
        }
    }

    pub(super) fn queued_bytes(&self, peer: SidecarIndex) -> usize {
        self.lock().links.get(&peer).map_or(0, |link| link.outbox.queued_bytes())
    }

    pub(super) fn poll_event(&self, cx: &mut Context<'_>) -> Poll<PortEvent> {
        let mut state = self.lock();
        let Some(queued) = state.events.pop_front() else {
            state.owner = Some(cx.waker().clone());
            return Poll::Pending;
        };
        state.queued_bytes -= queued.bytes;
        if matches!(queued.event, PortEvent::Down { .. }) && state.phase_of(queued.peer, queued.generation).is_some() {
            state.links.remove(&queued.peer);
        }
        drop(state);
        self.inbox_space.notify_waiters();
        Poll::Ready(queued.event)
    }

    pub(super) fn connection(&self, peer: SidecarIndex) -> Option<Connection> {
        match &self.lock().links.get(&peer)?.phase {
            Phase::Up { connection, .. } => Some(connection.clone()),
            Phase::Opening { .. } | Phase::Down => None,
        }
    }

    pub(super) fn security(&self, peer: SidecarIndex) -> Option<LinkSecurity> {
        match &self.lock().links.get(&peer)?.phase {
            Phase::Up { security, .. } => Some(security.clone()),
            Phase::Opening { .. } | Phase::Down => None,
        }
    }

    /// The handover by which the peer can replace the connection that it dialled.
    pub(super) fn accepted_link(&self, peer: SidecarIndex) -> Option<Arc<Handover>> {
        match &self.lock().links.get(&peer)?.phase {
            Phase::Up { handover, dialled: false, .. } => Some(handover.clone()),
            Phase::Up { .. } | Phase::Opening { .. } | Phase::Down => None,
        }
    }

    /// Records that a link has moved to another connection.
    pub(super) fn record_replaced(&self, peer: SidecarIndex, generation: u64, next: &Connection, auth: &LinkAuth) {
        tracing::info!(%peer, purpose = ?self.hello.purpose, serial = auth.peer.serial, "the connection was replaced");
        self.counters.add(&self.counters.links_replaced, 1);
        if let Some(Phase::Up { connection, security, .. }) = self.lock().phase_of(peer, generation) {
            *connection = next.clone();
            *security = auth.security();
        }
    }

    /// Closes a link for its owner, which receives no further events of it.
    pub(super) fn close(&self, peer: SidecarIndex, reason: &str) {
        let mut state = self.lock();
        let Some(link) = state.links.remove(&peer) else { return };
        match link.phase {
            Phase::Opening { task, .. } => task.iter().for_each(AbortHandle::abort),
            Phase::Up { .. } => link.outbox.close(reason),
            Phase::Down => {}
        }
        state.events.retain(|queued| queued.peer != peer);
        state.queued_bytes = state.events.iter().map(|queued| queued.bytes).sum();
        drop(state);
        self.inbox_space.notify_waiters();
    }

    /// Closes every link after its queue is sent, and accepts no new ones.
    pub(super) fn close_links(&self, reason: &str) {
        self.endpoints.stop_accepting();
        let peers: Vec<_> = self.lock().links.keys().copied().collect();
        peers.into_iter().for_each(|peer| self.close(peer, reason));
    }

    /// Closes the endpoint immediately.
    pub(super) fn close_endpoint(&self, reason: &str) {
        let links: Vec<_> = self.lock().links.drain().map(|(_, link)| link.phase).collect();
        for phase in links {
            if let Phase::Opening { task: Some(task), .. } = phase {
                task.abort();
            }
        }
        self.endpoints.close(reason);
        self.inbox_space.notify_waiters();
    }

    /// Brings up the link that was dialled; `None` if the owner has closed it meanwhile.
    pub(super) fn bring_up_dialled(&self, generation: u64, stream: &LinkStream, hello: Hello) -> Option<ActiveLink> {
        let (mut state, peer) = (self.lock(), stream.peer);
        let phase = state.phase_of(peer, generation).filter(|phase| matches!(phase, Phase::Opening { .. }))?;
        *phase = Phase::up(stream, true);
        self.routes.record(peer, stream.connection.remote_address().ip());
        Some(self.mark_up(state, peer, hello))
    }

    /// Brings up a link that the peer dialled, whether or not this side opened it; `None` if this side's own dial takes
    /// precedence.
    pub(super) fn bring_up_accepted(&self, stream: &LinkStream, hello: Hello) -> Option<ActiveLink> {
        let (mut state, peer) = (self.lock(), stream.peer);
        if state.membership != hello.membership {
            return None;
        }
        let phase = Phase::up(stream, false);
        match state.links.get_mut(&peer) {
            Some(Link { phase: Phase::Opening { role: Role::Dial, .. }, .. }) if self.hello.sidecar < peer => {
                return None;
            }
            Some(Link { phase: Phase::Up { dialled: true, since, .. }, .. })
                if keeps_own((self.hello.sidecar, peer), self.hello.purpose, since.elapsed()) =>
            {
                return None;
            }
            Some(Link { phase: opening @ Phase::Opening { .. }, .. }) => {
                if let Phase::Opening { task: Some(task), .. } = std::mem::replace(opening, phase) {
                    task.abort();
                }
            }
            before => {
                if let Some(Link { generation, phase: Phase::Up { connection: old, .. }, .. }) = before {
                    old.close(CloseCode::Replaced, "the same peer connected again");
                    let generation = *generation;
                    tracing::warn!(%peer, purpose = ?self.hello.purpose, "the peer connected again; its old link is closed");
                    state.push_down(peer, generation, DownReason::Lost("the peer connected again".to_owned()));
                }
                state.insert(peer, phase, Arc::new(Outbox::new(self.hello.purpose)));
            }
        }
        self.routes.record(peer, stream.connection.remote_address().ip());
        Some(self.mark_up(state, peer, hello))
    }

    /// Queues a frame for the owner and waits while the inbox is full. Returns false if the owner has closed the link.
    pub(super) async fn deliver(&self, peer: SidecarIndex, generation: u64, frame: Frame) -> bool {
        let bytes = frame.wire_bytes();
        loop {
            let inbox_space = self.inbox_space.notified();
            {
                let mut state = self.lock();
                if state.phase_of(peer, generation).is_none() {
                    return false;
                }
                if state.queued_bytes < INBOX_BYTES_MAX {
                    state.push(peer, generation, PortEvent::Frame { from: peer, frame }, bytes);
                    return true;
                }
            }
            inbox_space.await;
        }
    }

    /// Reports to the owner how many chunks the connection has accepted; combined with a report that was not polled
    /// yet.
    pub(super) fn report_sent(&self, peer: SidecarIndex, generation: u64, chunks: u32) {
        let mut state = self.lock();
        if chunks == 0 || state.phase_of(peer, generation).is_none() {
            return;
        }
        match state.events.back_mut() {
            Some(QueuedEvent { peer: last, event: PortEvent::Sent { chunks: count, .. }, .. }) if *last == peer => {
                *count += chunks;
            }
            _ => state.push(peer, generation, PortEvent::Sent { peer, chunks }, 0),
        }
    }

    /// Reports to the owner how many bytes of frames about streams the connection has accepted.
    pub(super) fn report_stream_sent(&self, peer: SidecarIndex, generation: u64, bytes: usize) {
        let mut state = self.lock();
        if bytes > 0 && state.phase_of(peer, generation).is_some() {
            state.push(peer, generation, PortEvent::StreamSent { peer, bytes }, 0);
        }
    }

    /// Reports `Down` to the owner once, unless the owner closed the link.
    pub(super) fn report_down(&self, peer: SidecarIndex, generation: u64, reason: DownReason) {
        tracing::info!(%peer, purpose = ?self.hello.purpose, %reason, "link down");
        let mut state = self.lock();
        match state.phase_of(peer, generation) {
            None | Some(Phase::Down) => {}
            Some(phase) => {
                *phase = Phase::Down;
                state.push_down(peer, generation, reason);
            }
        }
    }

    /// Counts and logs a connection or hello that one of the two sides rejected.
    pub(super) fn record_refusal(&self, from: SocketAddr, text: &str) {
        tracing::warn!(%from, purpose = ?self.hello.purpose, reason = text, "link refused");
        self.counters.add(&self.counters.refusals, 1);
        self.lock().last_refusal = Some(text.to_owned());
    }

    /// Fails a link that is being opened because the authenticated peer is not acceptable.
    pub(super) fn refuse_opening(&self, peer: SidecarIndex, text: &str) {
        let mut state = self.lock();
        let Some(link) = state.links.get_mut(&peer) else { return };
        let Phase::Opening { task, .. } = &mut link.phase else { return };
        task.iter().for_each(AbortHandle::abort);
        link.phase = Phase::Down;
        let generation = link.generation;
        state.push_down(peer, generation, DownReason::Refused(text.to_owned()));
    }

    pub(super) fn last_refusal(&self) -> Option<String> {
        self.lock().last_refusal.clone()
    }

    pub(super) fn known_incarnation(&self, peer: SidecarIndex) -> Option<Incarnation> {
        self.lock().incarnations.get(&peer).copied()
    }

    fn mark_up(&self, mut state: MutexGuard<'_, State>, peer: SidecarIndex, hello: Hello) -> ActiveLink {
        state.incarnations.insert(peer, hello.incarnation);
        self.counters.add(&self.counters.links_opened, 1);
        let link = state.links.get(&peer).expect("both callers have just set it");
        let Phase::Up { handover, dialled, .. } = &link.phase else { unreachable!("both callers have just set it") };
        let (generation, outbox) = (link.generation, link.outbox.clone());
        let installed = ActiveLink { generation, outbox, handover: handover.clone(), dialled: *dialled };
        state.push(peer, installed.generation, PortEvent::Up { peer, hello: Box::new(hello) }, 0);
        installed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in one task must not affect the port's other links; every change under this lock is complete in
        // itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a link that this side dialled stays when the peer dials, too. On lanes either side may dial, so both may at the same
/// time: the link of the lower index stays. A peer that dials a link of some `age` has lost its end of it, of which this side
/// may never learn while nothing is sent.
fn keeps_own((me, peer): (SidecarIndex, SidecarIndex), purpose: Purpose, age: Duration) -> bool {
    me < peer && purpose != Purpose::Control && age < SIMULTANEOUS_DIALS
}

impl Phase {
    fn up(stream: &LinkStream, dialled: bool) -> Self {
        let (connection, security) = (stream.connection.clone(), stream.auth.security());
        Self::Up { connection, security, handover: Arc::default(), dialled, since: Instant::now() }
    }
}

impl State {
    fn insert(&mut self, peer: SidecarIndex, phase: Phase, outbox: Arc<Outbox>) -> u64 {
        self.generation += 1;
        let generation = self.generation;
        self.links.insert(peer, Link { generation, phase, outbox });
        generation
    }

    fn phase_of(&mut self, peer: SidecarIndex, generation: u64) -> Option<&mut Phase> {
        self.links.get_mut(&peer).filter(|link| link.generation == generation).map(|link| &mut link.phase)
    }

    fn push_down(&mut self, peer: SidecarIndex, generation: u64, reason: DownReason) {
        self.push(peer, generation, PortEvent::Down { peer, reason }, 0);
    }

    fn push(&mut self, peer: SidecarIndex, generation: u64, event: PortEvent, bytes: usize) {
        self.events.push_back(QueuedEvent { peer, generation, event, bytes });
        self.queued_bytes += bytes;
        if let Some(owner) = self.owner.take() {
            owner.wake();
        }
    }
}

/// The counters of [`PortStats`] as atomics.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) sealed_bytes: AtomicU64,
    pub(super) opened_bytes: AtomicU64,
    pub(super) frames_sent: AtomicU64,
    pub(super) frames_received: AtomicU64,
    links_opened: AtomicU64,
    links_replaced: AtomicU64,
    refusals: AtomicU64,
}

impl Counters {
    pub(super) fn add(&self, counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn snapshot(&self) -> PortStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        PortStats {
            sealed_bytes: read(&self.sealed_bytes),
            opened_bytes: read(&self.opened_bytes),
            frames_sent: read(&self.frames_sent),
            frames_received: read(&self.frames_received),
            links_opened: read(&self.links_opened),
            links_replaced: read(&self.links_replaced),
            refusals: read(&self.refusals),
        }
    }
}

/// Limit for the bytes of frames that the owner has not polled. Beyond it readers wait, so that receive windows close
/// and senders stop. The owner polls long before that unless it is busy for a while.
const INBOX_BYTES_MAX: usize = 64 << 20;
/// How long after a link is up the peer's own dial may still arrive: a handshake's time on a host that is overloaded.
const SIMULTANEOUS_DIALS: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use ronde_wire::Lane;

    use super::*;

    #[test]
    fn of_two_dials_at_the_same_time_one_stays_and_a_later_one_replaces_a_link() {
        let (low, high) = (SidecarIndex(1), SidecarIndex(2));
        let lane = Purpose::Data(Lane(0));
        assert!(keeps_own((low, high), lane, Duration::from_secs(1)));
        assert!(!keeps_own((high, low), lane, Duration::from_secs(1)), "the lower one's stays there");
        assert!(!keeps_own((low, high), lane, SIMULTANEOUS_DIALS), "the peer has lost its end");
        assert!(!keeps_own((low, high), Purpose::Control, Duration::ZERO), "only one side dials those");
    }
}
