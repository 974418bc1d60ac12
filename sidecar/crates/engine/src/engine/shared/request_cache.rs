//! Which requests are cacheable, and when two requests are equal.

use ronde_wire::{Collective, Request};

/// Whether a request is of a kind that training steps repeat, so that the request cache holds it.
pub(crate) fn is_cacheable(request: &Request) -> bool {
    let repeats = matches!(
        request.collective,
        Collective::AllReduce { .. }
            | Collective::AllGather
            | Collective::ReduceScatter { .. }
            | Collective::Broadcast { .. }
            | Collective::Barrier
    );
    repeats && request.group.is_none()
}

/// Whether two requests are equal in every bit: 0 is not -0.
pub(crate) fn is_same(one: &Request, other: &Request) -> bool {
    let scales = |request: &Request| (request.prescale.to_bits(), request.postscale.to_bits());
    one == other && scales(one) == scales(other)
}
