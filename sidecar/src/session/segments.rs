//! The segments of all sessions, shared between the control thread and the threads that serve mem.sock.
//!
//! The lock is held for table lookups only: never while a segment is mapped, and never across an await.

use std::collections::HashMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use ronde_shm::ring::PeerRing;
use ronde_shm::{
    MemHost, OwnedSegment, SegmentId, ServeOutcome, SessionToken, WorkerSegment, peer_credentials, serve_one,
};
use ronde_wire::{Rank, limits};

use crate::session::ring::AttachedRing;

/// The table; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Segments {
    tables: Arc<Mutex<Tables>>,
}

#[derive(Default)]
struct Tables {
    sessions: Vec<SessionSegments>,
    /// Result segments of this sidecar by id.
    results: HashMap<SegmentId, ResultSegment>,
    /// Connections to mem.sock that are being served.
    connections: usize,
}

/// A segment with results of one process set.
struct ResultSegment {
    segment: Arc<OwnedSegment>,
    /// The set's local ranks, which may map it.
    members: Arc<[Rank]>,
}

struct SessionSegments {
    token: SessionToken,
    rank: Rank,
    uid: u32,
    limit_bytes: u64,
    mapped_bytes: u64,
    inputs: HashMap<SegmentId, Arc<WorkerSegment>>,
    ring: RingState,
}

/// The one ring that a session may have.
enum RingState {
    Free,
    Attached(AttachedRing),
    Taken,
}

impl Segments {
    /// Allows a session to attach segments, up to its limit, and to map those with results of its rank's process sets.
    pub(crate) fn open_session(&self, token: SessionToken, rank: Rank, uid: u32, limit_bytes: u64) {
        let (inputs, ring) = (HashMap::new(), RingState::Free);
        let session = SessionSegments { token, rank, uid, limit_bytes, mapped_bytes: 0, inputs, ring };
        self.lock().sessions.push(session);
    }

    /// Removes a session; its segments are unmapped when the last operation that uses them is over.
    pub(crate) fn close_session(&self, token: &SessionToken) {
        self.lock().sessions.retain(|session| session.token != *token);
    }

    /// Returns a segment of a worker.
    pub(crate) fn input(&self, token: &SessionToken, segment: SegmentId) -> Option<Arc<WorkerSegment>> {
        self.lock().sessions.iter().find(|s| s.token == *token)?.inputs.get(&segment).cloned()
    }

    /// Returns the bytes of all input segments of live sessions.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.lock().sessions.iter().map(|session| session.mapped_bytes).sum()
    }

    /// Takes the ring that a session has attached, once.
    pub(crate) fn take_ring(&self, token: &SessionToken) -> Option<AttachedRing> {
        let mut tables = self.lock();
        let session = tables.sessions.iter_mut().find(|s| s.token == *token)?;
        match std::mem::replace(&mut session.ring, RingState::Taken) {
            RingState::Attached(ring) => Some(ring),
            RingState::Free | RingState::Taken => None,
        }
    }

    /// Publishes a result segment to the workers of these ranks.
    pub(crate) fn add_result(&self, id: SegmentId, segment: Arc<OwnedSegment>, members: Arc<[Rank]>) {
        self.lock().results.insert(id, ResultSegment { segment, members });
    }

    /// Withdraws a result segment; it is unmapped when the last worker that maps it has left.
    pub(crate) fn remove_result(&self, id: SegmentId) {
        self.lock().results.remove(&id);
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        // No code panics while it holds the lock in an inconsistent state: every change is a single insert or remove.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Serves mem.sock on its own threads: one that accepts, and one for each connection, mostly blocked. Returns the table
/// of the sessions' segments.
///
/// # Errors
/// When the socket cannot be bound.
pub(crate) fn serve(socket: &Path) -> anyhow::Result<Segments> {
    let segments = Segments::default();
    let table = segments.clone();
    let listener = UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
    let accept = move || {
        for stream in listener.incoming() {
            match stream {
                Ok(stream) => start_connection(&segments, stream),
                Err(error) => {
                    tracing::warn!(%error, "mem.sock: accepting failed");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    };
    std::thread::Builder::new().name("ronde-mem".into()).spawn(accept).context("cannot start the mem.sock thread")?;
    Ok(table)
}

fn start_connection(segments: &Segments, stream: UnixStream) {
    let segments = segments.clone();
    {
        let mut tables = segments.lock();
        if tables.connections >= CONNECTIONS_MAX {
            tracing::warn!(limit = CONNECTIONS_MAX, "mem.sock: too many connections, one is rejected");
            return;
        }
        tables.connections += 1;
    }
    let serving = segments.clone();
    let spawned = std::thread::Builder::new().name("ronde-mem-conn".into()).spawn(move || {
        serve_connection(&serving, &stream);
        serving.lock().connections -= 1;
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "mem.sock: cannot start a thread");
        segments.lock().connections -= 1;
    }
}

fn serve_connection(segments: &Segments, stream: &UnixStream) {
    let Ok(credentials) = peer_credentials(stream) else { return };
    if stream.set_read_timeout(Some(REQUEST_TIMEOUT)).and(stream.set_write_timeout(Some(REQUEST_TIMEOUT))).is_err() {
        return;
    }
    let mut host = ConnectionHost { segments: segments.clone(), uid: credentials.uid };
    loop {
        match serve_one(stream, &mut host) {
            Ok(ServeOutcome::Granted(_) | ServeOutcome::Idle) => {}
            Ok(ServeOutcome::Refused { request, reason }) => tracing::warn!(?request, reason, "mem.sock: refused"),
            // The session's reader owns the ring's bell now.
            Ok(ServeOutcome::Closed | ServeOutcome::Ringing) => return,
            Err(error) => {
                tracing::warn!(%error, "mem.sock: a connection is closed");
                return;
            }
        }
    }
}

/// The host of one connection, which may reach sessions of its own uid.
struct ConnectionHost {
    segments: Segments,
    uid: u32,
}

impl ConnectionHost {
    fn with_session<T>(
        &self,
        token: &SessionToken,
        then: impl FnOnce(&mut SessionSegments) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut tables = self.segments.lock();
        let session = tables.sessions.iter_mut().find(|s| s.token == *token);
        let session = session.ok_or("no live session has this token; claim a rank on rpc.sock first")?;
        if session.uid != self.uid {
            return Err(format!("the session belongs to uid {}, not to uid {}", session.uid, self.uid));
        }
        then(session)
    }
}

impl MemHost for ConnectionHost {
    fn attach_limit_bytes(&mut self, token: &SessionToken) -> Result<u64, String> {
        self.with_session(token, |session| Ok(session.limit_bytes - session.mapped_bytes))
    }

    fn attach(&mut self, token: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String> {
        let bytes = mapped.len();
        self.with_session(token, |session| {
            if session.inputs.contains_key(&segment) {
                return Err(format!("segment {segment} is attached already; give each segment its own number"));
            }
            if session.limit_bytes - session.mapped_bytes < bytes || session.inputs.len() >= SEGMENTS_PER_SESSION_MAX {
                return Err(format!(
                    "{bytes} more bytes exceed arena_bytes_max = {} (--arena-mb) or {SEGMENTS_PER_SESSION_MAX} segments",
                    session.limit_bytes
                ));
            }
            session.mapped_bytes += bytes;
            session.inputs.insert(segment, Arc::new(mapped));
            Ok(())
        })
    }

    fn result(&mut self, token: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String> {
        let rank = self.with_session(token, |session| Ok(session.rank))?;
        let tables = self.segments.lock();
        let found = tables.results.get(&segment).ok_or_else(|| format!("there is no result segment {segment}"))?;
        if !found.members.contains(&rank) {
            return Err(format!("result segment {segment} has results of a process set without {rank}"));
        }
        Ok(Arc::clone(&found.segment))
    }

    fn check_ring(&mut self, token: &SessionToken, capacity: u64) -> Result<(), String> {
        self.with_session(token, |session| session.check_ring(capacity))
    }

    fn ring(&mut self, token: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String> {
        self.with_session(token, |session| {
            session.check_ring(ring.capacity())?;
            session.ring = RingState::Attached(AttachedRing { ring, bell });
            Ok(())
        })
    }
}

#[cfg(test)]
impl Segments {
    /// Attaches a segment as mem.sock would, which tests of the control thread do without.
    pub(crate) fn attach_for_test(&self, token: &SessionToken, id: SegmentId, segment: WorkerSegment) {
        let mut tables = self.lock();
        let session = tables.sessions.iter_mut().find(|session| session.token == *token).expect("a live session");
        session.inputs.insert(id, Arc::new(segment));
    }
}

impl SessionSegments {
    fn check_ring(&self, capacity: u64) -> Result<(), String> {
        if capacity != limits::RING_BYTES as u64 {
            return Err(format!("a ring has {} bytes in each direction, as in Claimed", limits::RING_BYTES));
        }
        match self.ring {
            RingState::Free => Ok(()),
            RingState::Attached(_) | RingState::Taken => Err("the session has a ring already".to_owned()),
        }
    }
}

/// One connection for each session, and as many again for sessions that are ending.
const CONNECTIONS_MAX: usize = 2 * limits::LOCAL_RANKS_MAX;
/// Segments of one session; a worker that doubles its segments needs less than a tenth of it.
const SEGMENTS_PER_SESSION_MAX: usize = 1_024;
/// The timeout of one read or write on mem.sock; an idle connection is only polled this often.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed accept (no descriptors left), so that the thread does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
