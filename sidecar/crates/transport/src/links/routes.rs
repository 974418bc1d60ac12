//! The addresses at which peers were reached, shared by the ports of one sidecar.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ronde_wire::SidecarIndex;

/// The address at which each peer was last reached. The first link to a peer finds it; later ones dial it first. Clones
/// share one table, which has at most one entry for each sidecar of the job.
#[derive(Clone, Debug, Default)]
pub struct Routes(Arc<Mutex<HashMap<SidecarIndex, IpAddr>>>);

impl Routes {
    /// The address at which the peer was last reached.
    #[must_use]
    pub fn to(&self, peer: SidecarIndex) -> Option<IpAddr> {
        self.lock().get(&peer).copied()
    }

    pub(super) fn record(&self, peer: SidecarIndex, address: IpAddr) {
        self.lock().insert(peer, address.to_canonical());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SidecarIndex, IpAddr>> {
        // Every change is complete in itself.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
