//! Admits connections to the two local sockets, before and after they prove that they belong to a worker.
//!
//! The kernel reports the uid of each peer. Until a connection belongs to a session it is *unclaimed*: it has a deadline,
//! and each uid may have a share of unclaimed connections. Beyond its share the oldest one of the same uid is closed, so
//! that neither idle connections nor a flood keep a worker out. A connection that a session uses is claimed; sessions
//! bound the number of those.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use nix::sys::socket::{Shutdown, getsockopt, shutdown, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tonic::transport::server::Connected;

/// The gate of one socket; cheap to clone.
#[derive(Clone)]
pub(crate) struct AcceptGate {
    inner: Arc<Inner>,
}

struct Inner {
    /// The socket's name, for logs.
    socket: &'static str,
    /// Users that may claim a rank; all others have one share together, in which they are refused.
    allowed: BTreeSet<u32>,
    /// Unclaimed connections that one uid may have.
    share: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// The open connections by number.
    open: BTreeMap<u64, Entry>,
    /// Failures to accept in a row, for the log.
    failures: u64,
}

struct Entry {
    /// `None` for a user that is not allowed.
    uid: Option<u32>,
    /// Open for as long as the entry exists: a connection leaves the table before it closes its descriptor.
    descriptor: RawFd,
    /// Since when no session uses it; `None` while one does.
    unclaimed_since: Option<Instant>,
}

/// A connection's place in the table of its gate.
pub(crate) struct Place {
    gate: AcceptGate,
    number: u64,
    uid: u32,
    /// Sessions and recordings that use the connection.
    claims: AtomicUsize,
}

/// Keeps a connection claimed.
pub(crate) struct Claim(Arc<Place>);

impl AcceptGate {
    /// Creates the gate of a socket.
    pub(crate) fn new(socket: &'static str, allowed: BTreeSet<u32>) -> Self {
        let share = (UNCLAIMED_MAX / (allowed.len() + 1)).max(SHARE_MIN);
        Self { inner: Arc::new(Inner { socket, allowed, share, table: Mutex::default() }) }
    }

    /// Admits a connection, whose peer has connected already; `None` if the kernel does not know its user.
    pub(crate) fn admit<S: AsFd + AsRawFd>(&self, stream: S) -> Option<Admitted<S>> {
        let uid = getsockopt(&stream, sockopt::PeerCredentials)
            .inspect_err(|error| tracing::warn!(socket = self.inner.socket, %error, "a peer has no credentials"))
            .ok()?
            .uid();
        Some(self.admit_user(stream, uid))
    }

    fn admit_user<S: AsRawFd>(&self, stream: S, uid: u32) -> Admitted<S> {
        let of_user = Some(uid).filter(|uid| self.inner.allowed.contains(uid));
        let mut table = self.lock();
        table.failures = 0;
        let number = table.next;
        table.next += 1;
        let (descriptor, unclaimed_since) = (stream.as_raw_fd(), Some(Instant::now()));
        table.open.insert(number, Entry { uid: of_user, descriptor, unclaimed_since });
        table.close_over(of_user, self.inner.share);
        drop(table);
        let place = Place { gate: self.clone(), number, uid, claims: AtomicUsize::new(0) };
        Admitted { place: Arc::new(place), unclaimed_bytes: 0, stream }
    }

    /// Notes that accepting failed, for example for want of descriptors; wait for [`ACCEPT_PAUSE`] before another try.
    pub(crate) fn note_failure(&self, error: &io::Error) {
        let mut table = self.lock();
        table.failures += 1;
        // The first one, and then one in each ten seconds.
        if table.failures % FAILURES_PER_LINE == 1 {
            let (socket, failures) = (self.inner.socket, table.failures);
            tracing::warn!(socket, failures, %error, "accepting connections fails; it is tried again");
        }
    }

    /// Closes connections whose deadline has passed.
    pub(crate) fn close_overdue(&self, now: Instant) {
        let mut table = self.lock();
        let overdue = |since: Instant| now.saturating_duration_since(since) >= UNCLAIMED_FOR_MAX;
        for entry in table.open.values_mut().filter(|entry| entry.unclaimed_since.is_some_and(overdue)) {
            entry.close();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Every change is whole: an insert, a remove, or one field of an entry.
        self.inner.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Closes the oldest unclaimed connections of a user that has more than its share.
    fn close_over(&mut self, uid: Option<u32>, share: usize) {
        let of_user = |entry: &&mut Entry| entry.uid == uid && entry.unclaimed_since.is_some();
        let mut unclaimed: Vec<&mut Entry> = self.open.values_mut().filter(of_user).collect();
        let over = unclaimed.len().saturating_sub(share);
        unclaimed.sort_by_key(|entry| entry.unclaimed_since);
        unclaimed.into_iter().take(over).for_each(Entry::close);
    }
}

impl Entry {
    /// Ends the connection in both directions; its owner notices and closes it.
    fn close(&mut self) {
        self.unclaimed_since = None;
        // It fails only if the peer has closed the connection already.
        let _ = shutdown(self.descriptor, Shutdown::Both);
    }
}

impl Place {
    /// The peer's uid.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Marks that a session uses the connection, for as long as the result lives.
    pub(crate) fn claim(self: &Arc<Self>) -> Claim {
        if self.claims.fetch_add(1, Ordering::Relaxed) == 0
            && let Some(entry) = self.gate.lock().open.get_mut(&self.number)
        {
            entry.unclaimed_since = None;
        }
        Claim(Arc::clone(self))
    }

    fn is_claimed(&self) -> bool {
        self.claims.load(Ordering::Relaxed) > 0
    }
}

impl Claim {
    /// Whether it keeps this connection claimed.
    pub(crate) fn is_of(&self, place: &Arc<Place>) -> bool {
        Arc::ptr_eq(&self.0, place)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let place = &self.0;
        if place.claims.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        let (mut table, share) = (place.gate.lock(), place.gate.inner.share);
        if let Some(entry) = table.open.get_mut(&place.number) {
            entry.unclaimed_since = Some(Instant::now());
            let uid = entry.uid;
            table.close_over(uid, share);
        }
    }
}

/// A connection that was admitted.
pub(crate) struct Admitted<S> {
    place: Arc<Place>,
    /// Bytes read since the connection was last claimed.
    unclaimed_bytes: usize,
    stream: S,
}

impl<S> Admitted<S> {
    /// Its place.
    pub(crate) fn place(&self) -> &Arc<Place> {
        &self.place
    }

    /// The stream itself.
    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }
}

impl<S> Drop for Admitted<S> {
    /// Leaves the table. The stream, and with it the descriptor in the table, is closed after that.
    fn drop(&mut self) {
        self.place.gate.lock().open.remove(&self.place.number);
    }
}

impl Connected for Admitted<UnixStream> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer(Arc::clone(&self.place))
    }
}

/// The peer of a call on rpc.sock.
#[derive(Clone)]
pub(crate) struct Peer(pub(crate) Arc<Place>);

impl AsyncRead for Admitted<UnixStream> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.place.is_claimed() {
            self.unclaimed_bytes = 0;
            return Pin::new(&mut self.stream).poll_read(context, into);
        }
        if self.unclaimed_bytes > UNCLAIMED_BYTES_MAX {
            let reason = format!("it sent more than {UNCLAIMED_BYTES_MAX} bytes without a claim");
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, reason)));
        }
        let before = into.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, into);
        self.unclaimed_bytes += into.filled().len() - before;
        polled
    }
}

impl AsyncWrite for Admitted<UnixStream> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Accepts connections and passes them on, until nobody takes them any more.
pub(crate) async fn accept(
    listener: UnixListener,
    gate: AcceptGate,
    admitted: mpsc::Sender<io::Result<Admitted<UnixStream>>>,
) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Some(connection) = gate.admit(stream)
                    && admitted.send(Ok(connection)).await.is_err()
                {
                    return;
                }
            }
            Err(error) => {
                gate.note_failure(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Closes overdue connections of these gates, for as long as the process runs.
pub(crate) async fn keep_deadlines(gates: [AcceptGate; 2]) {
    let mut interval = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        interval.tick().await;
        gates.iter().for_each(|gate| gate.close_overdue(Instant::now()));
    }
}

/// Unclaimed connections to one socket, in equal shares for each allowed user and all other users together. A share is
/// enough for all workers of a host to connect in the same moment.
const UNCLAIMED_MAX: usize = 256;
/// The smallest share.
const SHARE_MIN: usize = 8;
/// How long a connection may be unclaimed: twice the timeout of a claim, so that its refusal arrives first.
const UNCLAIMED_FOR_MAX: Duration = Duration::from_secs(10);
/// Bytes after which nothing more is read from an unclaimed connection: a claim with HTTP/2 around it has less than 4 KiB.
const UNCLAIMED_BYTES_MAX: usize = 64 << 10;
/// How exact the deadline is.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// The pause after a failed accept, which an immediate retry would meet again.
pub(crate) const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Failures for one line of the log.
const FAILURES_PER_LINE: u64 = 100;

#[cfg(test)]
mod tests;
