//! An in-process mesh of ports for tests: the same hellos, checks and ordering as on a network, without sockets.
//!
//! A mesh is one value behind one lock; ports are handles to it. Tests can partition a pair of sidecars, heal the
//! partition, or delay messages.

mod mesh;

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use ronde_wire::control::{Hello, Purpose};
use ronde_wire::{Incarnation, JobName, SidecarIndex};
use tokio::time::{Instant, Sleep};

use crate::hello::LocalHello;
use crate::port::{Outgoing, Port, PortEvent, PortStats, Role, SendError};
use mesh::{Address, Mesh};

/// A mesh on which the ports of one process connect to each other. Clones refer to the same mesh.
#[derive(Clone)]
pub struct MemoryMesh {
    job: JobName,
    start_timeout: Duration,
    mesh: Arc<Mutex<Mesh>>,
}

impl MemoryMesh {
    /// Creates an empty mesh for a job. `start_timeout` is how long an opened link waits for its peer.
    #[must_use]
    pub fn new(job: JobName, start_timeout: Duration) -> Self {
        Self { job, start_timeout, mesh: Arc::default() }
    }

    /// Creates the port of a sidecar with a default hello: an incarnation equal to the index, one lane, and on lanes
    /// the full early credit. An earlier port of the same sidecar and purpose is closed.
    #[must_use]
    pub fn port(&self, sidecar: SidecarIndex, purpose: Purpose) -> MemoryPort {
        let early_credit_bytes = match purpose {
            Purpose::Control => 0,
            Purpose::Data(_) => ronde_wire::limits::EARLY_BUFFER_BYTES as u64,
        };
        let incarnation = Incarnation(u64::from(sidecar.0));
        let local =
            LocalHello { job: self.job.clone(), incarnation, purpose, early_credit_bytes, lanes: 1, membership: 1 };
        self.port_with_hello(sidecar, purpose, local.hello(sidecar))
    }

    /// Like [`Self::port`], with a custom hello: for tests of other releases and of false claims.
    #[must_use]
    pub fn port_with_hello(&self, sidecar: SidecarIndex, purpose: Purpose, hello: Hello) -> MemoryPort {
        let address = Address { sidecar, purpose };
        let serial = lock(&self.mesh).insert(address, hello, Instant::now());
        MemoryPort { address, serial, start_timeout: self.start_timeout, mesh: self.mesh.clone(), timer: None }
    }

    /// Partitions two sidecars: messages between them are held back until [`Self::heal`].
    pub fn cut(&self, one: SidecarIndex, other: SidecarIndex) {
        lock(&self.mesh).set_cut(one, other, true, Instant::now());
    }

    /// Ends a partition: the held-back messages are delivered in order.
    pub fn heal(&self, one: SidecarIndex, other: SidecarIndex) {
        lock(&self.mesh).set_cut(one, other, false, Instant::now());
    }

    /// Delays all further messages between two sidecars.
    pub fn delay(&self, one: SidecarIndex, other: SidecarIndex, delay: Duration) {
        lock(&self.mesh).set_delay(one, other, delay);
    }
}

impl fmt::Debug for MemoryMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryMesh").field("job", &self.job).finish_non_exhaustive()
    }
}

/// A port of a [`MemoryMesh`]. When it is dropped, its peers receive `Down`, as when a network port closes.
pub struct MemoryPort {
    address: Address,
    serial: u64,
    start_timeout: Duration,
    mesh: Arc<Mutex<Mesh>>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Port for MemoryPort {
    fn open(&mut self, peer: SidecarIndex, role: Role) {
        let now = Instant::now();
        lock(&self.mesh).open(self.address, peer, role, now + self.start_timeout, now);
    }

    fn send(&mut self, to: SidecarIndex, message: Outgoing) -> Result<(), SendError> {
        lock(&self.mesh).send(self.address, to, message, Instant::now())
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<PortEvent> {
        loop {
            let wake_at = match lock(&self.mesh).next_event(self.address, Instant::now(), cx.waker()) {
                Ok(event) => return Poll::Ready(event),
                Err(wake_at) => wake_at,
            };
            let Some(wake_at) = wake_at else { return Poll::Pending };
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(wake_at)));
            timer.as_mut().reset(wake_at);
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }

    fn close(&mut self, peer: SidecarIndex, reason: &str) {
        lock(&self.mesh).close(self.address, peer, reason, Instant::now());
    }

    fn stats(&self) -> PortStats {
        lock(&self.mesh).stats(self.address)
    }
}

impl Drop for MemoryPort {
    fn drop(&mut self) {
        lock(&self.mesh).remove(self.address, self.serial, Instant::now());
    }
}

impl fmt::Debug for MemoryPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryPort").field("address", &self.address).finish_non_exhaustive()
    }
}

/// The lock is poisoned only when a test has panicked; the state is still consistent enough to report it.
fn lock(mesh: &Mutex<Mesh>) -> MutexGuard<'_, Mesh> {
    mesh.lock().unwrap_or_else(PoisonError::into_inner)
}
