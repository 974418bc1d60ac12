//! Serves mem.sock on its own threads: one that accepts, and one for each connection, mostly blocked.

use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use ronde_shm::ring::PeerRing;
use ronde_shm::{
    MemHost, OwnedSegment, PciAddress, SegmentId, ServeOutcome, SessionToken, StreamRequest, WorkerSegment, serve_one,
};
use ronde_wire::Rank;

use crate::session::command::Access;
use crate::session::gate::{ACCEPT_PAUSE, AcceptGate, Admitted};
use crate::session::ring::AttachedRing;
use crate::session::segments::{Segments, SessionSegments};
use crate::session::worker_uids::WorkerUids;
use crate::streams::{NewStream, Permit, StreamGate};

/// Who may have streams.
#[derive(Clone)]
pub(crate) struct StreamAccess {
    /// By token.
    pub(crate) gate: StreamGate,
    /// By user.
    pub(crate) uids: Arc<WorkerUids>,
}

/// Serves mem.sock for as long as the process runs, with the table of the sessions' segments, and with streams. Connections
/// are subject to `gate`.
///
/// # Errors
/// When the socket cannot be bound.
pub(crate) fn serve(socket: &Path, served: (Segments, StreamAccess), gate: AcceptGate) -> anyhow::Result<()> {
    let listener = UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
    let accept = move || {
        loop {
            match listener.accept() {
                Ok((stream, _)) => gate.admit(stream).into_iter().for_each(|admitted| start(&served, admitted)),
                Err(error) => {
                    gate.note_failure(&error);
                    std::thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    };
    std::thread::Builder::new().name("ronde-mem".into()).spawn(accept).context("cannot start the mem.sock thread")?;
    Ok(())
}

fn start((segments, streams): &(Segments, StreamAccess), connection: Admitted<UnixStream>) {
    let host = ConnectionHost {
        segments: segments.clone(),
        streams: streams.clone(),
        connection: Arc::new(connection),
        session: None,
        permit: None,
    };
    let spawned = std::thread::Builder::new().name("ronde-mem-conn".into()).spawn(move || serve_connection(host));
    if let Err(error) = spawned {
        tracing::warn!(%error, "mem.sock: cannot start a thread; a connection is closed");
        // What there is too little of may be there again after a moment.
        std::thread::sleep(ACCEPT_PAUSE);
    }
}

fn serve_connection(mut host: ConnectionHost) {
    let connection = Arc::clone(&host.connection);
    let stream = connection.stream();
    if stream.set_read_timeout(Some(REQUEST_TIMEOUT)).and(stream.set_write_timeout(Some(REQUEST_TIMEOUT))).is_err() {
        return;
    }
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
    streams: StreamAccess,
    connection: Arc<Admitted<UnixStream>>,
    /// The session that uses the connection: that of the last request.
    session: Option<SessionToken>,
    /// That of a stream whose ring is not mapped yet.
    permit: Option<Permit>,
}

impl ConnectionHost {
    fn uid(&self) -> u32 {
        self.connection.place().uid()
    }

    /// Calls `then` with the session of a token, which uses the connection from now on.
    fn with_session<T>(
        &mut self,
        token: &SessionToken,
        then: impl FnOnce(&mut SessionSegments) -> Result<T, String>,
    ) -> Result<T, String> {
        let uid = self.uid();
        if self.session.as_ref() != Some(token) {
            self.segments.with_session(token, uid, |session| session.add_connection(self.connection.place()))?;
            self.leave_session();
            self.session = Some(*token);
        }
        self.segments.with_session(token, uid, then)
    }

    /// Stops counting the connection for its session.
    fn leave_session(&mut self) {
        if let Some(token) = self.session.take() {
            // A session that has ended counts nothing any more.
            drop(self.segments.with_session(&token, self.uid(), |session| {
                session.remove_connection(self.connection.place());
                Ok(())
            }));
        }
    }
}

impl Drop for ConnectionHost {
    fn drop(&mut self) {
        self.leave_session();
    }
}

impl MemHost for ConnectionHost {
    fn reserve(&mut self, token: &SessionToken, segment: SegmentId, bytes: u64) -> Result<(), String> {
        self.with_session(token, |session| session.reserve(segment, bytes))
    }

    fn release(&mut self, token: &SessionToken, segment: SegmentId) {
        // Without its session the reservation is gone, too.
        drop(self.with_session(token, |session| {
            session.release(segment);
            Ok(())
        }));
    }

    fn attach(&mut self, token: &SessionToken, segment: SegmentId, mapped: WorkerSegment) -> Result<(), String> {
        self.with_session(token, |session| session.attach(segment, mapped))
    }

    fn result(&mut self, token: &SessionToken, segment: SegmentId) -> Result<Arc<OwnedSegment>, String> {
        let rank = self.with_session(token, |session| session.rank())?;
        self.segments.result(segment, rank)
    }

    fn reserve_ring(&mut self, token: &SessionToken, capacity: u64) -> Result<(), String> {
        self.with_session(token, |session| session.reserve_ring(capacity))
    }

    fn release_ring(&mut self, token: &SessionToken) {
        // As above.
        drop(self.with_session(token, |session| {
            session.release_ring();
            Ok(())
        }));
    }

    fn ring(&mut self, token: &SessionToken, ring: PeerRing, bell: UnixStream) -> Result<(), String> {
        self.with_session(token, |session| session.attach_ring(AttachedRing { ring, bell }))
    }

    fn reserve_stream(&mut self, request: &StreamRequest) -> Result<(), String> {
        let uid = self.uid();
        self.streams.uids.check(uid)?;
        self.streams.uids.check_claim(Rank(request.worker), Access::Socket { uid })?;
        self.permit = Some(self.streams.gate.admit(request)?);
        Ok(())
    }

    fn release_stream(&mut self) {
        self.permit = None;
    }

    fn stream(&mut self, request: &StreamRequest, ring: PeerRing, bell: UnixStream) -> Result<(), String> {
        let permit = self.permit.take().ok_or("the stream was not admitted")?;
        self.streams.gate.open(request.lane, NewStream { ring, bell, permit })
    }

    fn device(
        &mut self,
        token: &SessionToken,
        segment: SegmentId,
        memory: (u64, PciAddress),
        descriptor: OwnedFd,
    ) -> Result<(), String> {
        let gpus = self.segments.gpus().cloned();
        let gpus = gpus.ok_or("the sidecar uses no GPUs; start it with --gpu, or let the worker copy")?;
        self.with_session(token, |session| session.reserve_device(segment, memory.0, gpus.bytes_max()))?;
        match gpus.import(memory, &descriptor) {
            Ok(imported) => self.with_session(token, |session| session.finish_device(segment, Some(imported))),
            Err(reason) => {
                // Without its session the reservation is gone, too.
                drop(self.with_session(token, |session| session.finish_device(segment, None)));
                Err(reason)
            }
        }
    }
}

/// The timeout of one read or write on mem.sock; an idle connection is only polled this often.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
