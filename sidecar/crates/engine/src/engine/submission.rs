//! Requests of local ranks: checked, announced, withdrawn, rejected.

use ronde_collectives::kernels;
use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    Cause, Collective, Control, DType, Failure, Rank, ReduceOp, Request, RequestId, Seq, SetId, TensorName, limits,
};

use super::context::Context;
use super::participant::{Participant, Phase};
use super::requests::{Key, Rejected};

impl Participant {
    /// A worker's request.
    pub(crate) fn submit(&mut self, cx: &mut Context, rank: Rank, request: RequestId, what: Request) {
        cx.stats.submitted += 1;
        self.heard(cx, rank);
        let key = (what.set, what.name.clone(), rank);
        if let Err(failure) = self.check_accepts(cx, rank, request, &what) {
            let rank_at_fault = failure.rank.or(Some(rank));
            self.refuse(cx, (rank, request), Failure { rank: rank_at_fault, ..failure });
            return;
        }
        if let Err(reason) = self.check_room(rank).and_then(|()| check_performed(cx, &what)) {
            let failure = Failure::new(Cause::Refused, reason).with_rank(rank).with_tensor(what.name);
            self.void(key, failure.clone());
            self.refuse(cx, (rank, request), failure);
            return;
        }
        if let Some(failure) = self.requests.take_rejection(&key) {
            // This round of the name has failed already. The coordinator counts who has taken part.
            self.announce_void(&key, failure.clone());
            self.complete(cx, rank, request, Err(failure));
            return;
        }
        self.outbox.push(Announcement { rank, intent: Intent::Ready(what.clone()) });
        self.requests.insert(key, request, what, cx.now);
    }

    /// The service has refused a request by itself.
    pub(crate) fn refused_by_service(&mut self, cx: &mut Context, rank: Rank, set: SetId, name: TensorName, why: &str) {
        cx.stats.refused += 1;
        let member = cx.set(set).is_some_and(|view| view.contains(rank));
        let key = (set, name, rank);
        // While a request by this name is pending, the refused one was a second: the first stays valid.
        if self.is_active() && member && self.takes_part(rank) && !self.requests.has(&key) {
            let failure = Failure::new(Cause::Refused, why).with_rank(rank).with_tensor(key.1.clone());
            self.void(key, failure);
        }
    }

    /// A worker no longer waits. When the request is not ordered yet it fails on all ranks; otherwise the operation
    /// completes. Either way its `Complete` comes, once nothing touches its memory any more.
    pub(crate) fn withdraw(&mut self, cx: &mut Context, rank: Rank, request: RequestId, reason: &str) {
        cx.stats.withdrawn += 1;
        self.heard(cx, rank);
        if !self.is_active() {
            return;
        }
        let Some(what) = self.requests.unordered(rank, request) else { return };
        let (set, name) = (what.set, what.name.clone());
        let failure = Failure::new(Cause::TimedOut, reason).with_rank(rank).with_tensor(name.clone());
        self.outbox.push(Announcement { rank, intent: Intent::Void { set, name, failure } });
    }

    /// The coordinator rejects a name.
    pub(crate) fn rejected(&mut self, cx: &mut Context, set: SetId, name: &TensorName, failure: &Failure) {
        let Some(view) = cx.set(set) else { return };
        cx.stats.rejected += 1;
        let failure =
            Failure { reason: Failure::new(failure.cause, failure.reason.as_str()).reason, ..failure.clone() };
        for &rank in &view.local_ranks {
            match self.requests.reject((set, name.clone(), rank), &failure) {
                Rejected::Request(request) => self.complete(cx, rank, request, Err(failure.clone())),
                Rejected::Answered | Rejected::Ahead => {}
                Rejected::Overflow => {
                    let reason =
                        format!("more than {} rejections wait for {rank}", super::requests::REJECTED_AHEAD_MAX);
                    self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason));
                    return;
                }
            }
        }
    }

    /// Sends what was submitted, in as few messages as frames allow.
    pub(crate) fn flush(&mut self, cx: &mut Context) {
        let mut batch = Vec::new();
        let mut bytes = 0;
        for announcement in std::mem::take(&mut self.outbox) {
            let size = frame_bytes(&announcement.intent);
            if bytes + size > ANNOUNCE_FRAME_BYTES && !batch.is_empty() {
                let announcements = std::mem::take(&mut batch);
                self.to_coordinator(cx, Seq(0), Control::Announce { announcements });
                bytes = 0;
            }
            bytes += size;
            batch.push(announcement);
        }
        if !batch.is_empty() {
            self.to_coordinator(cx, Seq(0), Control::Announce { announcements: batch });
        }
    }

    /// What does not concern other ranks: they cannot know of this request.
    fn check_accepts(&self, cx: &mut Context, rank: Rank, request: RequestId, what: &Request) -> Result<(), Failure> {
        let refused = |reason: String| Err(Failure::new(Cause::Refused, reason));
        if let Phase::Closing(failure) = &self.phase {
            return Err(failure.clone());
        }
        if !self.is_active() {
            return Err(self.last_failure.clone().unwrap_or_else(|| no_epoch(rank)));
        }
        if !self.takes_part(rank) {
            return refused(format!("{rank} does not take part in {}; attach and wait for the next epoch", self.epoch));
        }
        let Some(view) = cx.set(what.set) else {
            return refused(format!(
                "Process set provided does not exist, or has not been registered. It is {}.",
                what.set
            ));
        };
        if !view.contains(rank) {
            return refused(format!(
                "Rank {} is not a member of the provided process set. It is {}.",
                rank.0, what.set
            ));
        }
        if self.requests.has(&(what.set, what.name.clone(), rank)) || self.requests.has_number(rank, request) {
            return refused(format!(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is \
                 currently being processed. Wait for tensor {} first, or use another name.",
                what.name
            ));
        }
        Ok(())
    }

    fn check_room(&self, rank: Rank) -> Result<(), String> {
        let most = limits::PENDING_PER_SESSION_MAX;
        if self.requests.of(rank) < most {
            return Ok(());
        }
        Err(format!("{rank} has {most} requests pending, the most that one session may have; wait for some of them"))
    }

    fn takes_part(&self, rank: Rank) -> bool {
        self.present.get(&rank).is_some_and(|presence| !presence.left)
    }

    fn refuse(&self, cx: &mut Context, (rank, request): (Rank, RequestId), failure: Failure) {
        cx.stats.refused += 1;
        self.complete(cx, rank, request, Err(failure));
    }

    /// The rank's part in the next round of a name is a refusal: all other ranks' requests of the round fail.
    fn void(&mut self, key: Key, failure: Failure) {
        self.announce_void(&key, failure);
        self.requests.refuse(key);
    }

    fn announce_void(&mut self, (set, name, rank): &Key, failure: Failure) {
        // The cause says that this is no withdrawal.
        let failure = Failure { cause: Cause::Refused, ..failure };
        let intent = Intent::Void { set: *set, name: name.clone(), failure };
        self.outbox.push(Announcement { rank: *rank, intent });
    }
}

fn no_epoch(rank: Rank) -> Failure {
    let reason = format!("no epoch has begun: {rank} has to wait until all ranks of the job have attached");
    Failure::new(Cause::Refused, reason)
}

/// What the other ranks' requests of the same name fail with, too.
fn check_performed(cx: &mut Context, what: &Request) -> Result<(), String> {
    let name = what.collective.name();
    match what.collective {
        Collective::AllGather | Collective::Barrier => Ok(()),
        Collective::AllReduce { op } if kernels::supports(what.dtype, op) && !kernels::is_nary(op) => Ok(()),
        Collective::AllReduce { op: ReduceOp::Average } if what.dtype == DType::Bool => {
            Err(format!("{name} cannot average bool; use max (any rank's) or min (every rank's), or cast to float32"))
        }
        Collective::AllReduce { op } => Err(format!("{name} with reduction {op} is not supported by this version")),
        Collective::Broadcast { root } => {
            let in_set = cx.set(what.set).is_some_and(|view| view.contains(root));
            if in_set {
                Ok(())
            } else {
                Err(format!("received invalid root rank: rank {} is not in {}", root.0, what.set))
            }
        }
        _ => Err(format!("{name} is not supported by this version")),
    }
}

/// The most bytes that an intent takes in a frame: numbers have at most ten.
fn frame_bytes(intent: &Intent) -> usize {
    match intent {
        Intent::Again { .. } => 24,
        Intent::Ready(request) | Intent::Remember { request, .. } => {
            request.name.as_str().len() + 10 * (request.shape.dimensions().len() + 8) + 16
        }
        Intent::Void { name, failure, .. } => 2 * name.as_str().len() + failure.reason.len() + 10 * 8,
    }
}

/// Bytes of announcements in one message.
const ANNOUNCE_FRAME_BYTES: usize = limits::CONTROL_FRAME_BYTES_MAX - 1_024;
