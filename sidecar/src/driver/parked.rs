//! Requests whose plugin is being loaded. They have been accepted, and no other rank knows of them yet.

use std::time::{Duration, Instant};

use ronde_rpc::convert::Submission;
use ronde_wire::RequestId;

use crate::sessions::SessionId;

/// How long a request waits for its plugin. Compiling one takes seconds at most, unless it was made to take long.
pub(crate) const PARKED_FOR_MAX: Duration = Duration::from_secs(30);

/// See the module's text. How many there are is bounded by what sessions may have pending.
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

    /// All of them, to be asked for again.
    pub(crate) fn take(&mut self) -> Vec<ParkedRequest> {
        std::mem::take(&mut self.0)
    }

    /// The one that is withdrawn, if it is among them.
    pub(crate) fn withdraw(&mut self, session: SessionId, request: RequestId) -> Option<Submission> {
        let is_it = |parked: &ParkedRequest| parked.session == session && parked.submission.request == request;
        let place = self.0.iter().position(is_it)?;
        Some(self.0.remove(place).submission)
    }

    /// When the first of them has waited for too long.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.0.iter().map(|parked| parked.since + PARKED_FOR_MAX).min()
    }

    /// Those that have waited for too long.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<ParkedRequest> {
        let (due, rest) = self.take().into_iter().partition(|parked| parked.since + PARKED_FOR_MAX <= now);
        self.0 = rest;
        due
    }
}
