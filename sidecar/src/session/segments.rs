//! The segments of all sessions, shared between the control thread and the threads that serve mem.sock.
//!
//! The lock is held for table lookups only: never while a segment is mapped, and never across an await. A segment is
//! reserved in its session's account before it is mapped, so that concurrent requests stay within the limits together.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ronde_gpu::DeviceSegment;
use ronde_shm::{OwnedSegment, SegmentId, SessionToken, WorkerSegment};
use ronde_wire::{Rank, limits};

use crate::session::gate::{Claim, Place};
use crate::session::gpus::Gpus;
use crate::session::ring::AttachedRing;

/// The table; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Segments {
    tables: Arc<Mutex<Tables>>,
    /// What imports device memory, if the sidecar uses GPUs.
    gpus: Option<Arc<Gpus>>,
}

#[derive(Default)]
struct Tables {
    sessions: Vec<SessionSegments>,
    /// Result segments of this sidecar by id.
    results: HashMap<SegmentId, ResultSegment>,
}

/// A segment with results of one process set.
struct ResultSegment {
    segment: Arc<OwnedSegment>,
    /// The set's local ranks, which may map it.
    members: Arc<[Rank]>,
}

/// The account of a session's shared memory.
pub(crate) struct SessionSegments {
    token: SessionToken,
    /// `None` while its worker waits for a rank.
    rank: Option<Rank>,
    uid: u32,
    limit_bytes: u64,
    /// Of segments that are attached or reserved.
    bytes: u64,
    inputs: HashMap<SegmentId, InputState>,
    ring: RingState,
    /// Its device memory, imported; `None` for a segment that is being imported.
    devices: HashMap<SegmentId, (u64, Option<Arc<DeviceSegment>>)>,
    /// The connections to mem.sock that the session uses; they are unclaimed again when it ends.
    connections: Vec<Claim>,
}

/// An input segment of a session.
enum InputState {
    /// So many bytes, which are being mapped.
    Reserved(u64),
    Attached(Arc<WorkerSegment>),
}

/// The one ring that a session may have.
enum RingState {
    Free,
    /// It is being mapped.
    Reserved,
    Attached(AttachedRing),
    Taken,
}

impl Segments {
    /// A table for sessions that may pass device memory, too.
    pub(crate) fn with_gpus(gpus: Option<Arc<Gpus>>) -> Self {
        Self { gpus, ..Self::default() }
    }

    /// The GPUs that the sidecar uses.
    pub(crate) fn gpus(&self) -> Option<&Arc<Gpus>> {
        self.gpus.as_ref()
    }

    /// Allows a session to attach segments, up to its limit, and to map those with results of its rank's process sets.
    pub(crate) fn open_session(&self, token: SessionToken, uid: u32, limit_bytes: u64) {
        let (inputs, ring) = (HashMap::new(), RingState::Free);
        let (devices, connections) = (HashMap::new(), Vec::new());
        let session =
            SessionSegments { token, rank: None, uid, limit_bytes, bytes: 0, inputs, ring, devices, connections };
        self.lock().sessions.push(session);
    }

    /// Removes a session; its segments are unmapped when the last operation that uses them is over.
    pub(crate) fn close_session(&self, token: &SessionToken) {
        self.lock().sessions.retain(|session| session.token != *token);
    }

    /// Returns a segment of a worker.
    pub(crate) fn input(&self, token: &SessionToken, segment: SegmentId) -> Option<Arc<WorkerSegment>> {
        match self.lock().sessions.iter().find(|s| s.token == *token)?.inputs.get(&segment)? {
            InputState::Attached(mapped) => Some(Arc::clone(mapped)),
            InputState::Reserved(_) => None,
        }
    }

    /// Returns a session's segment of device memory.
    pub(crate) fn device(&self, token: &SessionToken, segment: SegmentId) -> Option<Arc<DeviceSegment>> {
        self.lock().sessions.iter().find(|s| s.token == *token)?.devices.get(&segment)?.1.clone()
    }

    /// Returns the bytes of all device memory that live sessions have passed.
    pub(crate) fn device_bytes(&self) -> u64 {
        self.lock().sessions.iter().map(SessionSegments::device_bytes).sum()
    }

    /// Returns the bytes of all input segments of live sessions.
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.lock().sessions.iter().map(|session| session.bytes).sum()
    }

    /// Takes the ring that a session has attached, once.
    pub(crate) fn take_ring(&self, token: &SessionToken) -> Option<AttachedRing> {
        let mut tables = self.lock();
        let session = tables.sessions.iter_mut().find(|s| s.token == *token)?;
        match std::mem::replace(&mut session.ring, RingState::Taken) {
            RingState::Attached(ring) => Some(ring),
            // A ring that is being mapped finds that the session has none any more.
            RingState::Free | RingState::Reserved | RingState::Taken => None,
        }
    }

    /// Returns a result segment for a rank.
    ///
    /// # Errors
    /// When there is none, or the rank is not in its process set; the text is for the worker's user.
    pub(crate) fn result(&self, id: SegmentId, rank: Rank) -> Result<Arc<OwnedSegment>, String> {
        let tables = self.lock();
        let found = tables.results.get(&id).ok_or_else(|| format!("there is no result segment {id}"))?;
        if !found.members.contains(&rank) {
            return Err(format!("result segment {id} has results of a process set without {rank}"));
        }
        Ok(Arc::clone(&found.segment))
    }

    /// Calls `then` with the session of a token, for a process of its user.
    ///
    /// # Errors
    /// When there is no such session, and those of `then`; the text is for the worker's user.
    pub(crate) fn with_session<T>(
        &self,
        token: &SessionToken,
        uid: u32,
        then: impl FnOnce(&mut SessionSegments) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut tables = self.lock();
        let session = tables.sessions.iter_mut().find(|s| s.token == *token);
        let session = session.ok_or("no live session has this token; claim a rank on rpc.sock first")?;
        if session.uid != uid {
            return Err(format!("the session belongs to uid {}, not to uid {uid}", session.uid));
        }
        then(session)
    }

    /// Publishes a result segment to the workers of these ranks.
    pub(crate) fn add_result(&self, id: SegmentId, segment: Arc<OwnedSegment>, members: Arc<[Rank]>) {
        self.lock().results.insert(id, ResultSegment { segment, members });
    }

    /// Withdraws all result segments.
    pub(crate) fn clear_results(&self) {
        self.lock().results.clear();
    }

    /// Returns the rank of a session, once it has one.
    pub(crate) fn rank_of(&self, token: &SessionToken) -> Option<Rank> {
        self.lock().sessions.iter().find(|session| session.token == *token)?.rank
    }

    /// Sets the rank by which a session may map results.
    pub(crate) fn seat(&self, token: &SessionToken, rank: Rank) {
        if let Some(session) = self.lock().sessions.iter_mut().find(|session| session.token == *token) {
            session.rank = Some(rank);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        // No code panics while it holds the lock in an inconsistent state: every change is a single insert or remove.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
impl Segments {
    /// Attaches a segment as mem.sock would, which tests of the control thread do without.
    pub(crate) fn attach_for_test(&self, token: &SessionToken, id: SegmentId, segment: WorkerSegment) {
        let mut tables = self.lock();
        let session = tables.sessions.iter_mut().find(|session| session.token == *token).expect("a live session");
        session.inputs.insert(id, InputState::Attached(Arc::new(segment)));
    }
}

impl SessionSegments {
    /// Returns the rank of the session.
    ///
    /// # Errors
    /// While its worker waits for one.
    pub(crate) fn rank(&self) -> Result<Rank, String> {
        self.rank.ok_or_else(|| "the worker has no rank yet, and so no results".to_owned())
    }

    /// Adds a connection to mem.sock that the session uses.
    ///
    /// # Errors
    /// When it has as many as it may.
    pub(crate) fn add_connection(&mut self, place: &Arc<Place>) -> Result<(), String> {
        if self.connections.len() >= CONNECTIONS_PER_SESSION_MAX {
            return Err(format!(
                "the session has {CONNECTIONS_PER_SESSION_MAX} connections to mem.sock already; close one of them"
            ));
        }
        self.connections.push(place.claim());
        Ok(())
    }

    /// Removes a connection.
    pub(crate) fn remove_connection(&mut self, place: &Arc<Place>) {
        self.connections.retain(|claim| !claim.is_of(place));
    }

    /// Reserves an input segment.
    ///
    /// # Errors
    /// When its number is in use, or the session has no room for it.
    pub(crate) fn reserve(&mut self, segment: SegmentId, bytes: u64) -> Result<(), String> {
        if self.inputs.contains_key(&segment) {
            return Err(format!("segment {segment} is attached already; give each segment its own number"));
        }
        let (limit, attached) = (self.limit_bytes, self.bytes);
        if bytes > limit.saturating_sub(attached) {
            return Err(format!(
                "segment {segment} of {bytes} bytes is over the limit of {limit}, arena_bytes_max (--arena-mb), of which {attached} are attached"
            ));
        }
        if self.inputs.len() >= SEGMENTS_PER_SESSION_MAX {
            return Err(format!("the session has {SEGMENTS_PER_SESSION_MAX} segments already; use larger ones"));
        }
        self.bytes += bytes;
        self.inputs.insert(segment, InputState::Reserved(bytes));
        Ok(())
    }

    /// Gives a reservation back.
    pub(crate) fn release(&mut self, segment: SegmentId) {
        if let Some(InputState::Reserved(bytes)) = self.inputs.get(&segment) {
            self.bytes -= bytes;
            self.inputs.remove(&segment);
        }
    }

    /// Takes over a segment that is reserved.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn attach(&mut self, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String> {
        match self.inputs.get_mut(&segment) {
            Some(state @ InputState::Reserved(_)) => {
                *state = InputState::Attached(Arc::new(mapped));
                Ok(())
            }
            _ => Err(format!("segment {segment} is not reserved any more")),
        }
    }

    fn device_bytes(&self) -> u64 {
        self.devices.values().map(|(bytes, _)| bytes).sum()
    }

    /// Reserves a segment of device memory, of which the session may pass `limit` bytes.
    ///
    /// # Errors
    /// When its number is in use, or the session has no room for it.
    pub(crate) fn reserve_device(&mut self, segment: SegmentId, bytes: u64, limit: u64) -> Result<(), String> {
        if self.devices.contains_key(&segment) {
            return Err(format!("segment {segment} of device memory is imported already; give each its own number"));
        }
        let passed = self.device_bytes();
        if bytes > limit.saturating_sub(passed) {
            return Err(format!(
                "segment {segment} of {bytes} bytes of device memory is over the limit of {limit}, arena_bytes_max (--arena-mb), of which {passed} are imported"
            ));
        }
        if self.devices.len() >= SEGMENTS_PER_SESSION_MAX {
            return Err(format!(
                "the session has {SEGMENTS_PER_SESSION_MAX} segments of device memory; use larger ones"
            ));
        }
        self.devices.insert(segment, (bytes, None));
        Ok(())
    }

    /// Takes over a segment of device memory that is reserved, or gives the reservation back with `None`.
    ///
    /// # Errors
    /// When it is not reserved.
    pub(crate) fn finish_device(&mut self, segment: SegmentId, imported: Option<DeviceSegment>) -> Result<(), String> {
        let reserved = self.devices.get(&segment).filter(|(_, state)| state.is_none()).map(|(bytes, _)| *bytes);
        let Some(bytes) = reserved else {
            return Err(format!("segment {segment} of device memory is not reserved any more"));
        };
        match imported {
            Some(imported) => drop(self.devices.insert(segment, (bytes, Some(Arc::new(imported))))),
            None => drop(self.devices.remove(&segment)),
        }
        Ok(())
    }

    /// Reserves the ring.
    ///
    /// # Errors
    /// When it has another capacity than announced, or the session has one.
    pub(crate) fn reserve_ring(&mut self, capacity: u64) -> Result<(), String> {
        if capacity != limits::RING_BYTES as u64 {
            return Err(format!("a ring has {} bytes in each direction, as in Claimed", limits::RING_BYTES));
        }
        if !matches!(self.ring, RingState::Free) {
            return Err("the session has a ring already".to_owned());
        }
        self.ring = RingState::Reserved;
        Ok(())
    }

    /// Gives the reservation of the ring back.
    pub(crate) fn release_ring(&mut self) {
        if matches!(self.ring, RingState::Reserved) {
            self.ring = RingState::Free;
        }
    }

    /// Takes over the ring, which is reserved.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn attach_ring(&mut self, ring: AttachedRing) -> Result<(), String> {
        if !matches!(self.ring, RingState::Reserved) {
            return Err("the ring is not reserved any more".to_owned());
        }
        self.ring = RingState::Attached(ring);
        Ok(())
    }
}

/// Segments of one session; a worker that doubles its segments needs less than a tenth of it.
const SEGMENTS_PER_SESSION_MAX: usize = 1_024;
/// Connections to mem.sock of one session: one for segments and one for the ring; others may
/// be about to close.
const CONNECTIONS_PER_SESSION_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use ronde_shm::Share;

    use super::*;
    use crate::session::gate::{AcceptGate, Admitted};

    const LIMIT: u64 = 1 << 20;
    const TOKEN: [u8; 16] = [5; 16];

    fn with_session<T>(
        segments: &Segments,
        then: impl FnOnce(&mut SessionSegments) -> Result<T, String>,
    ) -> Result<T, String> {
        segments.with_session(&SessionToken::from_bytes(TOKEN), 7, then)
    }

    fn opened() -> Segments {
        let segments = Segments::default();
        segments.open_session(SessionToken::from_bytes(TOKEN), 7, LIMIT);
        segments
    }

    #[test]
    fn connections_are_unclaimed_again_when_their_session_ends() {
        let gate = AcceptGate::new("test.sock", BTreeSet::from([nix::unistd::geteuid().as_raw()]));
        let segments = opened();
        let (_peers, connections): (Vec<_>, Vec<_>) = (0..CONNECTIONS_PER_SESSION_MAX)
            .map(|_| {
                let (peer, stream) = UnixStream::pair().expect("sockets");
                let connection = gate.admit(stream).expect("this process has a uid");
                with_session(&segments, |session| session.add_connection(connection.place())).expect("room");
                (peer, connection)
            })
            .unzip();
        let one_more = with_session(&segments, |session| session.add_connection(connections[0].place()));
        assert!(one_more.is_err_and(|reason| reason.contains("8 connections to mem.sock")));
        with_session(&segments, |session| {
            session.remove_connection(connections[0].place());
            session.add_connection(connections[0].place())
        })
        .expect("one was closed");
        let overdue = || gate.close_overdue(Instant::now() + Duration::from_secs(3_600));
        let closed = || {
            let is_closed = |connection: &&Admitted<UnixStream>| {
                connection.stream().set_nonblocking(true).expect("a socket");
                let mut stream = connection.stream();
                matches!(stream.read(&mut [0]), Ok(0))
            };
            connections.iter().filter(is_closed).count()
        };
        overdue();
        assert_eq!(closed(), 0, "the session uses them");
        segments.close_session(&SessionToken::from_bytes(TOKEN));
        overdue();
        assert_eq!(closed(), CONNECTIONS_PER_SESSION_MAX);
    }

    #[test]
    fn what_is_reserved_counts_before_it_is_mapped() {
        let segments = opened();
        with_session(&segments, |session| session.reserve(SegmentId(1), LIMIT - 4_096)).expect("there is room");
        let cases = [(1, 4_096, "attached already"), (2, 8_192, "over the limit of 1048576")];
        for (segment, bytes, words) in cases {
            let reason = with_session(&segments, |session| session.reserve(SegmentId(segment), bytes));
            assert!(reason.as_ref().is_err_and(|reason| reason.contains(words)), "{reason:?}");
        }
        with_session(&segments, |session| session.reserve(SegmentId(2), 4_096)).expect("the last page");
        assert!(segments.input(&SessionToken::from_bytes(TOKEN), SegmentId(2)).is_none(), "it is not mapped yet");
        with_session(&segments, |session| {
            session.release(SegmentId(1));
            Ok(())
        })
        .expect("it lives");
        assert_eq!(segments.mapped_bytes(), 4_096);
    }

    #[test]
    fn device_memory_counts_by_itself_before_it_is_imported() {
        let segments = opened();
        with_session(&segments, |session| session.reserve(SegmentId(1), LIMIT)).expect("shared memory");
        with_session(&segments, |session| session.reserve_device(SegmentId(1), LIMIT - 1, LIMIT)).expect("room");
        for (segment, bytes, words) in [(1, 1, "imported already"), (2, 2, "over the limit of 1048576")] {
            let reason = with_session(&segments, |session| session.reserve_device(SegmentId(segment), bytes, LIMIT));
            assert!(reason.as_ref().is_err_and(|reason| reason.contains(words)), "{reason:?}");
        }
        assert_eq!(segments.device_bytes(), LIMIT - 1);
        assert!(segments.device(&SessionToken::from_bytes(TOKEN), SegmentId(1)).is_none(), "it is not imported yet");
        with_session(&segments, |session| session.finish_device(SegmentId(1), None)).expect("it is reserved");
        let again = with_session(&segments, |session| session.finish_device(SegmentId(1), None));
        assert!(again.is_err_and(|reason| reason.contains("not reserved")));
        assert_eq!(segments.device_bytes(), 0);
    }

    #[test]
    fn device_memory_is_that_of_its_session() {
        let segments = opened();
        let other = SessionToken::from_bytes([6; 16]);
        segments.open_session(other, 7, LIMIT);
        with_session(&segments, |session| session.reserve_device(SegmentId(1), 4_096, LIMIT)).expect("room");
        // The number is free in the other session, whose account is its own, too.
        segments.with_session(&other, 7, |session| session.reserve_device(SegmentId(1), LIMIT, LIMIT)).expect("room");
        let foreign = segments.with_session(&other, 8, |session| session.reserve_device(SegmentId(2), 1, LIMIT));
        assert!(foreign.is_err_and(|reason| reason.contains("belongs to uid 7")));
        segments.close_session(&SessionToken::from_bytes(TOKEN));
        assert_eq!(segments.device_bytes(), LIMIT);
        let late = with_session(&segments, |session| session.finish_device(SegmentId(1), None));
        assert!(late.is_err_and(|reason| reason.contains("no live session")));
    }

    #[test]
    fn a_segment_of_a_session_that_ended_meanwhile_is_not_attached() {
        let segments = opened();
        with_session(&segments, |session| session.reserve(SegmentId(1), 4_096)).expect("there is room");
        let owned = OwnedSegment::create("late", 4_096, Share::Writable).expect("memory");
        let descriptor = owned.fd().try_clone_to_owned().expect("a descriptor");
        let mapped = WorkerSegment::map_named("late", descriptor, 4_096).expect("mapped");
        segments.close_session(&SessionToken::from_bytes(TOKEN));
        segments.open_session(SessionToken::from_bytes([6; 16]), 7, LIMIT);
        let reason = with_session(&segments, |session| session.attach(SegmentId(1), mapped));
        assert!(reason.as_ref().is_err_and(|reason| reason.contains("no live session")), "{reason:?}");
        assert_eq!(segments.mapped_bytes(), 0);
    }

    #[test]
    fn a_session_has_one_ring() {
        let segments = opened();
        let ring = || with_session(&segments, |session| session.reserve_ring(limits::RING_BYTES as u64));
        ring().expect("the first");
        assert!(ring().is_err_and(|reason| reason.contains("a ring already")));
        with_session(&segments, |session| {
            session.release_ring();
            Ok(())
        })
        .expect("it lives");
        ring().expect("it was given back");
    }
}
