//! Requests that wait for their plugin to load. They are accepted, but not announced to other ranks yet.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use ronde_rpc::convert::Submission;
use ronde_wire::RequestId;

use crate::session::table::SessionId;

/// How long a request waits for its plugin. Compiling one takes seconds at most, unless it was built to take long.
pub(crate) const PARKED_FOR_MAX: Duration = Duration::from_secs(30);

/// The parked requests of each session, in their order of arrival. The limit on pending requests of sessions bounds their
/// number.
#[derive(Default)]
pub(crate) struct Parked(BTreeMap<SessionId, VecDeque<ParkedRequest>>);

/// A request that waits for its plugin.
pub(crate) struct ParkedRequest {
    pub(crate) session: SessionId,
    pub(crate) submission: Submission,
    pub(crate) since: Instant,
}

impl Parked {
    pub(crate) fn park(&mut self, request: ParkedRequest) {
        self.0.entry(request.session).or_default().push_back(request);
    }

    /// The sessions that have requests here.
    pub(crate) fn sessions(&self) -> Vec<SessionId> {
        self.0.keys().copied().collect()
    }

    /// Takes all requests of a session, to resolve their plugins again.
    pub(crate) fn take(&mut self, session: SessionId) -> VecDeque<ParkedRequest> {
        self.0.remove(&session).unwrap_or_default()
    }

    /// Parks requests of a session that were not looked at, after those that are parked again.
    pub(crate) fn park_rest(&mut self, session: SessionId, mut rest: VecDeque<ParkedRequest>) {
        let again = self.take(session);
        // These are few, and the rest may be many.
        again.into_iter().rev().for_each(|request| rest.push_front(request));
        if !rest.is_empty() {
            self.0.insert(session, rest);
        }
    }

    /// Takes the request that is withdrawn, if it is parked.
    pub(crate) fn withdraw(&mut self, session: SessionId, request: RequestId) -> Option<Submission> {
        let requests = self.0.get_mut(&session)?;
        let place = requests.iter().position(|parked| parked.submission.request == request)?;
        let withdrawn = requests.remove(place)?;
        if requests.is_empty() {
            self.0.remove(&session);
        }
        Some(withdrawn.submission)
    }

    /// Returns when the first of them times out.
    pub(crate) fn due(&self) -> Option<Instant> {
        let oldest = self.0.values().filter_map(VecDeque::front);
        oldest.map(|parked| parked.since + PARKED_FOR_MAX).min()
    }

    /// Takes those that have timed out.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<ParkedRequest> {
        let mut due = Vec::new();
        for requests in self.0.values_mut() {
            let count = requests.partition_point(|parked| parked.since + PARKED_FOR_MAX <= now);
            due.extend(requests.drain(..count));
        }
        self.0.retain(|_, requests| !requests.is_empty());
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

    fn numbers<'a>(requests: impl IntoIterator<Item = &'a ParkedRequest>) -> Vec<u64> {
        requests.into_iter().map(|parked| parked.submission.request.0).collect()
    }

    #[test]
    fn parked_requests_leave_in_order_or_on_timeout_or_withdrawal() {
        let (mut parked, begin) = (Parked::default(), Instant::now());
        assert_eq!(parked.due(), None);
        for (session, request, seconds) in [(7, 1, 1), (8, 2, 0), (7, 3, 2), (7, 4, 2)] {
            park(&mut parked, session, request, begin + Duration::from_secs(seconds));
        }
        assert_eq!(parked.due(), Some(begin + PARKED_FOR_MAX));
        assert!(parked.withdraw(SessionId(8), RequestId(1)).is_none(), "another session's");
        assert_eq!(numbers(&parked.take_due(begin + PARKED_FOR_MAX)), [2]);
        assert_eq!(parked.sessions(), [SessionId(7)]);
        assert_eq!(
            parked.withdraw(SessionId(7), RequestId(3)).map(|submission| submission.request),
            Some(RequestId(3))
        );
        assert_eq!(numbers(&parked.take(SessionId(7))), [1, 4]);
        assert_eq!((parked.sessions(), parked.due()), (vec![], None));
    }

    #[test]
    fn requests_that_are_parked_again_stay_before_the_rest() {
        let (mut parked, begin) = (Parked::default(), Instant::now());
        (1..=4).for_each(|request| park(&mut parked, 7, request, begin));
        let mut all = parked.take(SessionId(7));
        let again: Vec<ParkedRequest> = all.drain(..2).collect();
        again.into_iter().for_each(|request| parked.park(request));
        parked.park_rest(SessionId(7), all);
        assert_eq!(numbers(&parked.take(SessionId(7))), [1, 2, 3, 4]);
        parked.park_rest(SessionId(7), VecDeque::new());
        assert_eq!(parked.sessions(), []);
    }
}
