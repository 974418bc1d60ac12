//! Requests that wait for their plugin to load. They are accepted, but not announced to other ranks yet.

use std::time::{Duration, Instant};

use ronde_rpc::convert::Submission;
use ronde_wire::RequestId;

use crate::session::table::SessionId;

/// How long a request waits for its plugin. Compiling one takes seconds at most, unless it was built to take long.
pub(crate) const PARKED_FOR_MAX: Duration = Duration::from_secs(30);

/// The parked requests. The limit on pending requests of sessions bounds their number.
#[derive(Default)]
pub(crate) struct Parked(Vec<ParkedRequest>);

/// A request that waits for its plugin.
pub(crate) struct ParkedRequest {
    pub(crate) session: SessionId,
    pub(crate) submission: Submission,
    pub(crate) since: Instant,
}

impl Parked {
    pub(crate) fn park(&mut self, request: ParkedRequest) {
        self.0.push(request);
    }

    /// Takes all of them, to resolve their plugins again.
    pub(crate) fn take(&mut self) -> Vec<ParkedRequest> {
        std::mem::take(&mut self.0)
    }

    /// Takes the request that is withdrawn, if it is parked.
    pub(crate) fn withdraw(&mut self, session: SessionId, request: RequestId) -> Option<Submission> {
        let is_it = |parked: &ParkedRequest| parked.session == session && parked.submission.request == request;
        let place = self.0.iter().position(is_it)?;
        Some(self.0.remove(place).submission)
    }

    /// Returns when the first of them times out.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.0.iter().map(|parked| parked.since + PARKED_FOR_MAX).min()
    }

    /// Takes those that have timed out.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<ParkedRequest> {
        let (due, rest) = self.take().into_iter().partition(|parked| parked.since + PARKED_FOR_MAX <= now);
        self.0 = rest;
        due
    }
}

#[cfg(test)]
mod tests {
    use ronde_rpc::convert::Place;
    use ronde_wire::{Collective, DType, Request, SetId, Shape, TensorName};

    use super::*;

    fn park(parked: &mut Parked, session: u64, request: u64, since: Instant) {
        let (name, shape) = (TensorName::new("t").expect("a name"), Shape::new(vec![0]).expect("a shape"));
        let what = Request::new(SetId::WORLD, name, Collective::Barrier, DType::U8, shape);
        let (request, place) = (RequestId(request), Place::Inline(Vec::new().into()));
        let submission = Submission { request, what, plugin: None, place, output: None, site: None };
        parked.park(ParkedRequest { session: SessionId(session), submission, since });
    }

    fn numbers(requests: &[ParkedRequest]) -> Vec<u64> {
        requests.iter().map(|parked| parked.submission.request.0).collect()
    }

    #[test]
    fn parked_requests_leave_in_order_or_on_timeout_or_withdrawal() {
        let (mut parked, begin) = (Parked::default(), Instant::now());
        assert_eq!(parked.due(), None);
        for (request, seconds) in [(1, 2), (2, 0), (3, 1)] {
            park(&mut parked, 7, request, begin + Duration::from_secs(seconds));
        }
        assert_eq!(parked.due(), Some(begin + PARKED_FOR_MAX));
        assert!(parked.withdraw(SessionId(8), RequestId(2)).is_none(), "another session's");
        assert_eq!(numbers(&parked.take_due(begin + PARKED_FOR_MAX)), [2]);
        assert_eq!(
            parked.withdraw(SessionId(7), RequestId(3)).map(|submission| submission.request),
            Some(RequestId(3))
        );
        park(&mut parked, 7, 4, begin);
        assert_eq!(numbers(&parked.take()), [1, 4]);
        assert!(parked.take().is_empty());
    }
}
