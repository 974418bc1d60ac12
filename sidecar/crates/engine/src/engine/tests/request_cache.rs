//! Tests of the request cache: the announcing side and the coordinator's copy stay equal.

use ronde_wire::control::Intent;
use ronde_wire::{Collective, DType, ReduceOp, Request, SetId, Shape, SidecarIndex, TensorName, limits};

use crate::engine::coordinator::request_cache::RequestCaches;
use crate::engine::participant::request_cache::RequestCache;

/// Both sides agree on every announcement of a long, repetitive sequence that overflows the cache.
#[test]
fn a_cached_request_equals_the_announced_one() {
    let (mut request_cache, mut request_caches) = (RequestCache::default(), RequestCaches::default());
    let from = SidecarIndex(3);
    let (mut again, mut evictions) = (0, 0);
    for n in 0_u64..20_000 {
        // Two names recur in every turn among more names than there are slots; some change their shape.
        let name = if n % 3 == 0 { n % 2 } else { 2 + n * 7_919 % 1_999 };
        let request = sum(&name.to_string(), n / 5_000);
        let words = request_cache.announce(&request, limits::ANNOUNCE_SLOTS_MAX);
        evictions += u64::from(words.evicts);
        let announced = match words.intent {
            Intent::Remember { slot, request } => {
                request_caches.insert(from, slot, &request).expect("a slot within the limit");
                request
            }
            Intent::Again { slot } => {
                again += 1;
                request_caches.get(from, slot).expect("remembered before")
            }
            intent => panic!("{intent:?}"),
        };
        assert_eq!(announced, request);
    }
    assert!(again > 6_000 && evictions > 0, "{again} of 20,000, {evictions}");
    assert!(request_caches.len() <= limits::ANNOUNCE_SLOTS_MAX);
}

fn sum(name: &str, rows: u64) -> Request {
    let (name, shape) = (TensorName::new(name).expect("a name"), Shape::new(vec![rows]).expect("a shape"));
    Request::new(SetId::WORLD, name, Collective::AllReduce { op: ReduceOp::Sum }, DType::F32, shape)
}
