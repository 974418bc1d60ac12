//! Which requests the request cache holds, and when two requests are the same.

use ronde_wire::{Collective, Request};

/// What a training step asks for again and again.
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

/// Equal in every bit: 0 is not -0.
pub(crate) fn is_same(one: &Request, other: &Request) -> bool {
    let scales = |request: &Request| (request.prescale.to_bits(), request.postscale.to_bits());
    one == other && scales(one) == scales(other)
}
