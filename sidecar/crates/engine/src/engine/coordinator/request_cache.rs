//! The coordinator's copy of each sidecar's request cache: a repeated request is announced by its slot.

use std::collections::BTreeMap;

use ronde_wire::{Request, SidecarIndex, limits};

use crate::engine::shared::request_cache::is_cacheable;

/// The cached requests of all sidecars, by slot.
#[derive(Debug, Default)]
pub(crate) struct RequestCaches {
    slots: BTreeMap<(SidecarIndex, u16), Request>,
}

impl RequestCaches {
    /// How many requests are cached, of all sidecars.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Caches a request in a slot of a sidecar.
    ///
    /// # Errors
    /// How this breaks the protocol, as a text after "it".
    pub(crate) fn insert(&mut self, from: SidecarIndex, slot: u16, request: &Request) -> Result<(), String> {
        if usize::from(slot) >= limits::ANNOUNCE_SLOTS_MAX {
            return Err(format!("caches a request in slot {slot}; slots are below {}", limits::ANNOUNCE_SLOTS_MAX));
        }
        if !is_cacheable(request) {
            return Err(format!("caches a request for {}, which is never cached", request.collective.name()));
        }
        self.slots.insert((from, slot), request.clone());
        Ok(())
    }

    /// The request in a slot of a sidecar.
    ///
    /// # Errors
    /// How this breaks the protocol, as a text after "it".
    pub(crate) fn get(&self, from: SidecarIndex, slot: u16) -> Result<Request, String> {
        let known = self.slots.get(&(from, slot));
        known.cloned().ok_or_else(|| format!("announces cache slot {slot}, which is empty"))
    }
}
