//! Where peers were reached, shared by the ports of one sidecar.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ronde_wire::SidecarIndex;

/// The address at which each peer was reached last: what the first link finds out spares the others the search. Clones
/// are the same table; it has as many entries as the job has sidecars.
#[derive(Clone, Debug, Default)]
pub struct Routes(Arc<Mutex<HashMap<SidecarIndex, IpAddr>>>);

impl Routes {
    /// The address of a peer, when it was reached before.
    #[must_use]
    pub fn to(&self, peer: SidecarIndex) -> Option<IpAddr> {
        self.lock().get(&peer).copied()
    }

    pub(super) fn record(&self, peer: SidecarIndex, address: IpAddr) {
        self.lock().insert(peer, address.to_canonical());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SidecarIndex, IpAddr>> {
        // Each change is whole in itself.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
