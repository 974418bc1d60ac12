//! The coordinator's copy of each sidecar's request cache: a repeated request is announced by its slot alone.

use std::collections::BTreeMap;

use ronde_wire::{Request, SidecarIndex, limits};

use crate::engine::shared::request_cache::is_cacheable;

/// The coordinator's table.
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

    /// The request that a sidecar remembers under a number from here on.
    ///
    /// # Errors
    /// What is wrong with it, in words that follow "it".
    pub(crate) fn insert(&mut self, from: SidecarIndex, slot: u16, request: &Request) -> Result<(), String> {
        if usize::from(slot) >= limits::ANNOUNCE_SLOTS_MAX {
            return Err(format!("remembers a request as {slot}; numbers are below {}", limits::ANNOUNCE_SLOTS_MAX));
        }
        if !is_cacheable(request) {
            return Err(format!("remembers a request for {}, which is never remembered", request.collective.name()));
        }
        self.slots.insert((from, slot), request.clone());
        Ok(())
    }

    /// # Errors
    /// In words that follow "it".
    pub(crate) fn get(&self, from: SidecarIndex, slot: u16) -> Result<Request, String> {
        let known = self.slots.get(&(from, slot));
        known.cloned().ok_or_else(|| format!("repeats the request {slot}, which it never made"))
    }
}
