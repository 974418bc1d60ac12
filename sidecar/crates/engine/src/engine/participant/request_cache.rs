//! The request cache of the announcing side (Horovod's response cache): a training step repeats the requests of the
//! last one, so a repeated request is announced by its slot alone.

use std::collections::BTreeMap;

use ronde_wire::Request;
use ronde_wire::control::Intent;

use crate::engine::shared::TensorKey;
use crate::engine::shared::request_cache::{is_cacheable, is_same};

/// The cache of the announcing side. It evicts the least recently used request.
#[derive(Debug, Default)]
pub(crate) struct RequestCache {
    slots: Vec<Slot>,
    by_name: BTreeMap<TensorKey, u16>,
    /// Slots by time of last use, oldest first.
    by_use: BTreeMap<u64, u16>,
    uses: u64,
}

#[derive(Debug)]
struct Slot {
    request: Request,
    used: u64,
}

/// The intent that announces a request.
#[derive(Debug)]
pub(crate) struct CachedIntent {
    pub(crate) intent: Intent,
    /// Whether another request was evicted for it.
    pub(crate) evicts: bool,
}

impl RequestCache {
    /// The intent for a request that is announced next; caches the request.
    ///
    /// The cache holds at most `slots` requests. This number is constant within an epoch.
    pub(crate) fn announce(&mut self, request: &Request, slots: usize) -> CachedIntent {
        if slots == 0 || !is_cacheable(request) {
            return CachedIntent { intent: Intent::Ready(request.clone()), evicts: false };
        }
        let key = TensorKey::of(request);
        let (slot, evicts) = match self.by_name.get(&key) {
            Some(slot) => (*slot, false),
            None => self.free_slot(slots),
        };
        self.uses += 1;
        let index = usize::from(slot);
        let known = self.slots.get(index).is_some_and(|slot| is_same(&slot.request, request));
        let now = Slot { request: request.clone(), used: self.uses };
        match self.slots.get_mut(index) {
            Some(slot) => {
                self.by_use.remove(&slot.used);
                *slot = now;
            }
            None => self.slots.push(now),
        }
        self.by_use.insert(self.uses, slot);
        self.by_name.insert(key, slot);
        let intent = if known { Intent::Again { slot } } else { Intent::Remember { slot, request: request.clone() } };
        CachedIntent { intent, evicts }
    }

    /// Clears the cache, as the coordinator does when an epoch begins.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// A free slot, or the least recently used one, and whether its request was evicted.
    fn free_slot(&mut self, slots: usize) -> (u16, bool) {
        match u16::try_from(self.slots.len()) {
            Ok(next) if self.slots.len() < slots => (next, false),
            _ => {
                let oldest = self.by_use.first_key_value().map_or(0, |(_, slot)| *slot);
                if let Some(Slot { request, .. }) = self.slots.get(usize::from(oldest)) {
                    self.by_name.remove(&TensorKey::of(request));
                }
                (oldest, true)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ronde_wire::{Collective, DType, ReduceOp, SetId, Shape, TensorName, limits};

    use super::*;

    const SLOTS: usize = limits::ANNOUNCE_SLOTS_MAX;

    #[test]
    fn the_request_cache_holds_at_most_the_requested_number_of_slots() {
        let mut request_cache = RequestCache::default();
        assert!(matches!(request_cache.announce(&sum("a", 1), 0).intent, Intent::Ready(_)));
        assert!(matches!(request_cache.announce(&sum("a", 1), 0).intent, Intent::Ready(_)));
        let mut request_cache = RequestCache::default();
        for (name, evicts) in [("a", false), ("b", false), ("c", true), ("a", true)] {
            assert_eq!(request_cache.announce(&sum(name, 1), 2).evicts, evicts, "{name}");
        }
    }

    fn sum(name: &str, rows: u64) -> Request {
        let (name, shape) = (TensorName::new(name).expect("a name"), Shape::new(vec![rows]).expect("a shape"));
        Request::new(SetId::WORLD, name, Collective::AllReduce { op: ReduceOp::Sum }, DType::F32, shape)
    }

    #[test]
    fn the_least_recently_used_request_is_forgotten_first() {
        let mut request_cache = RequestCache::default();
        let most = limits::ANNOUNCE_SLOTS_MAX;
        for n in 0..most {
            assert!(!request_cache.announce(&sum(&n.to_string(), 1), SLOTS).evicts);
        }
        assert!(matches!(request_cache.announce(&sum("0", 1), SLOTS).intent, Intent::Again { slot: 0 }));
        let cached = request_cache.announce(&sum("new", 1), SLOTS);
        assert!(cached.evicts && matches!(cached.intent, Intent::Remember { slot: 1, .. }));
        assert!(matches!(request_cache.announce(&sum("0", 1), SLOTS).intent, Intent::Again { .. }));
        assert!(matches!(request_cache.announce(&sum("1", 1), SLOTS).intent, Intent::Remember { slot: 2, .. }));
    }

    #[test]
    fn any_difference_is_a_miss() {
        let base = sum("t", 4);
        let different = [
            sum("t", 5),
            Request { prescale: 2.0, ..base.clone() },
            Request { dtype: DType::F64, ..base.clone() },
            Request { codec: ronde_wire::Codec::Bf16, ..base.clone() },
            Request { collective: Collective::ReduceScatter { op: ReduceOp::Sum }, ..base.clone() },
            Request { prescale: 0.0, ..base.clone() },
        ];
        for other in different {
            let mut request_cache = RequestCache::default();
            request_cache.announce(&base, SLOTS);
            assert!(
                matches!(request_cache.announce(&other, SLOTS).intent, Intent::Remember { slot: 0, .. }),
                "{other:?}"
            );
            assert!(
                matches!(request_cache.announce(&base, SLOTS).intent, Intent::Remember { slot: 0, .. }),
                "{other:?}"
            );
        }
        let zero = Request { prescale: 0.0, ..base.clone() };
        let minus_zero = Request { prescale: -0.0, ..base };
        let mut request_cache = RequestCache::default();
        request_cache.announce(&zero, SLOTS);
        assert!(
            matches!(request_cache.announce(&minus_zero, SLOTS).intent, Intent::Remember { .. }),
            "they differ in a bit"
        );
    }
}
