//! Receives from any source, at the sidecar of the receiving rank.
//!
//! Which message such a receive takes is decided by the coordinator (`matching`). Receives of one rank, set and tag take
//! messages in the order in which they are posted, as in MPI: those posted after one from any source are held until its
//! source is known. No message waits for that: one that fits a held receive fits the receive before it, too.
//!
//! A worker numbers its receives from each source, and does not count receives from any source that took messages of it. So
//! the numbers of its later receives from that source are raised here.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use ronde_wire::{
    AnySource, Cause, Collective, Failure, Pair, Rank, Request, RequestId, Seq, SetId, TensorName, limits,
};

use super::Participant;
use crate::engine::shared::context::Context;
use crate::engine::shared::validation;

/// Receives whose messages are not known.
#[derive(Debug, Default)]
pub(crate) struct AnySources {
    mailboxes: BTreeMap<Mailbox, Receives>,
}

/// What messages are matched by.
type Mailbox = (SetId, AnySource);

/// The receives of a mailbox from the first one from any source on.
#[derive(Debug, Default)]
struct Receives {
    /// For each source how many of its messages were taken by receives from any source.
    taken: BTreeMap<Rank, u64>,
    /// Whether a receive from any source waits for the coordinator; it is among the requests.
    waits: bool,
    /// What was posted after it, in order.
    held: VecDeque<Held>,
}

/// A receive that is held.
#[derive(Debug)]
struct Held {
    what: Request,
    /// The request; or why there is none any more, with which the message that it would have taken fails.
    request: Result<RequestId, Failure>,
}

impl AnySources {
    /// How many receives of a rank are held.
    pub(crate) fn of(&self, rank: Rank) -> usize {
        self.wanted().filter(|(of, _)| *of == rank).count()
    }

    /// Whether a held receive of the rank has this number.
    pub(crate) fn has_number(&self, rank: Rank, request: RequestId) -> bool {
        self.wanted().any(|held| held == (rank, request))
    }

    /// How many receives are held.
    pub(crate) fn len(&self) -> usize {
        self.wanted().count()
    }

    /// Forgets everything; gives the requests that were held.
    pub(crate) fn clear(&mut self) -> Vec<(Rank, RequestId)> {
        let wanted = self.wanted().collect();
        self.mailboxes.clear();
        wanted
    }

    /// Forgets a set; gives the requests that were held, with their names.
    pub(crate) fn remove_set(&mut self, set: SetId) -> Vec<(Rank, RequestId, TensorName)> {
        let mut taken = Vec::new();
        for ((_, any), receives) in self.mailboxes.extract_if(.., |(of, _), _| *of == set) {
            let wanted = receives.held.into_iter().filter_map(|held| Some((held.request.ok()?, held.what.name)));
            taken.extend(wanted.map(|(request, name)| (any.to, request, name)));
        }
        taken
    }

    /// The tag of a receive from any source that waits, of a rank in a set.
    fn waiting_tag(&self, set: SetId, rank: Rank) -> Option<u32> {
        let waiting =
            self.mailboxes.iter().find(|((of, any), receives)| *of == set && any.to == rank && receives.waits);
        waiting.map(|((_, any), _)| any.tag)
    }

    /// Takes a held request out. Its turn comes all the same, and with it the failure of the message.
    fn withdraw(&mut self, rank: Rank, request: RequestId, failure: &Failure) -> bool {
        let of_rank = self.mailboxes.iter_mut().filter(|((_, any), _)| any.to == rank);
        let mut held = of_rank.flat_map(|(_, receives)| &mut receives.held);
        let found = held.find(|held| held.request == Ok(request));
        found.map(|held| held.request = Err(failure.clone())).is_some()
    }

    fn waits(&self, mailbox: Mailbox) -> bool {
        self.mailboxes.get(&mailbox).is_some_and(|receives| receives.waits)
    }

    /// The name that a receive has among those of its source; others keep theirs.
    fn numbered(&self, set: SetId, name: TensorName) -> TensorName {
        let Some((pair, tag)) = Pair::of_message(&name) else { return name };
        let receives = self.mailboxes.get(&(set, AnySource { to: pair.to, tag }));
        let taken = receives.and_then(|receives| receives.taken.get(&pair.from));
        match (taken, Pair::message_count(&name)) {
            (Some(taken), Some(count)) => pair.message_name(tag, count.saturating_add(*taken)),
            _ => name,
        }
    }

    /// The next receive whose turn has come.
    fn next(&mut self, mailbox: Mailbox) -> Option<Held> {
        let receives = self.mailboxes.get_mut(&mailbox).filter(|receives| !receives.waits)?;
        receives.held.pop_front()
    }

    fn wanted(&self) -> impl Iterator<Item = (Rank, RequestId)> {
        let held = |receives: &'_ Receives| receives.held.iter().filter_map(|held| held.request.clone().ok()).collect();
        self.mailboxes.iter().flat_map(move |((_, any), receives)| {
            let wanted: Vec<RequestId> = held(receives);
            wanted.into_iter().map(|request| (any.to, request))
        })
    }
}

impl Participant {
    /// The request as it is to be submitted now; `None` when it is held, or refused.
    pub(super) fn in_posting_order(
        &mut self,
        cx: &mut Context,
        (rank, request): (Rank, RequestId),
        mut what: Request,
    ) -> Option<Request> {
        let Some(any) = receives(rank, &what.collective) else { return Some(what) };
        if !self.any_sources.waits((what.set, any)) {
            if matches!(what.collective, Collective::Recv { .. }) {
                what.name = self.any_sources.numbered(what.set, what.name);
            }
            return Some(what);
        }
        if let Err(failure) = self.check_takes_part(rank).and_then(|()| self.check_held(cx, (rank, request), &what)) {
            self.refuse(cx, (rank, request), failure);
            return None;
        }
        let checked = self.check_room(rank).and_then(|()| {
            let view = self.sets.scope(cx, what.set, &what.name).ok_or("its process set is gone")?;
            validation::check(&cx.config.world, &view, &what)
        });
        let request = match checked {
            Ok(()) => Ok(request),
            Err(reason) => {
                let failure = Failure::new(Cause::Refused, reason).with_rank(rank).with_tensor(what.name.clone());
                self.refuse(cx, (rank, request), failure.clone());
                Err(failure)
            }
        };
        self.hold_receive(cx, any, what, request);
        None
    }

    /// The service has refused a receive by itself. The name of the message that fails with it; `None` when that is not known
    /// yet, or there is none.
    pub(super) fn refused_in_posting_order(
        &mut self,
        cx: &mut Context,
        rank: Rank,
        (set, name): (SetId, TensorName),
        failure: &Failure,
    ) -> Option<TensorName> {
        if AnySource::of_receive(&name).is_some() {
            // Nobody else knows of it.
            return None;
        }
        let Some((pair, tag)) = Pair::of_message(&name).filter(|(pair, _)| pair.to == rank) else { return Some(name) };
        let any = AnySource { to: rank, tag };
        if self.any_sources.waits((set, any)) {
            let (collective, dtype) = (Collective::Recv { from: pair.from, tag }, ronde_wire::DType::U8);
            let what = Request::new(set, name, collective, dtype, crate::engine::shared::shapes::empty());
            self.hold_receive(cx, any, what, Err(failure.clone()));
            return None;
        }
        Some(self.any_sources.numbered(set, name))
    }

    /// A rank that joins takes no part in what it has not announced, such as the message that a receive from any source is
    /// yet to be matched with, and the receives that are held after it.
    pub(super) fn check_join(&self, rank: Rank, what: &Request) -> Result<(), String> {
        let waiting = match what.collective {
            Collective::Join => self.any_sources.waiting_tag(what.set, rank),
            _ => None,
        };
        waiting.map_or(Ok(()), |tag| {
            Err(format!(
                "{rank} has joined while its receive from any source with tag {tag} waits; wait for it before the join"
            ))
        })
    }

    /// A receive from any source is submitted: what is posted after it is held.
    pub(super) fn waits_for_source(&mut self, set: SetId, any: AnySource) {
        self.any_sources.mailboxes.entry((set, any)).or_default().waits = true;
    }

    /// Takes a receive back that is held. Whether there is such.
    pub(super) fn withdraw_held(&mut self, cx: &mut Context, rank: Rank, request: RequestId, reason: &str) -> bool {
        let failure = Failure::new(Cause::TimedOut, reason).with_rank(rank);
        let held = self.any_sources.withdraw(rank, request, &failure);
        if held {
            self.complete(cx, rank, request, Err(failure));
        }
        held
    }

    /// The coordinator says which message a receive from any source takes.
    pub(crate) fn matched(&mut self, cx: &mut Context, set: SetId, receive: &TensorName, message: TensorName) {
        if !self.is_active() {
            cx.stats.stale_frames += 1;
            return;
        }
        let fits = |any: &AnySource| {
            Pair::of_message(&message).filter(|(pair, tag)| pair.to == any.to && *tag == any.tag).map(|(pair, _)| pair)
        };
        let any = AnySource::of_receive(receive);
        let found = any.and_then(|any| {
            let pair = fits(&any)?;
            let pending = self.requests.take_pending(&(set, receive.clone(), any.to))?;
            Some((any, pair, pending))
        });
        let Some((any, pair, pending)) = found else {
            let reason = format!("{receive} of {set} was matched with {message}, which no rank here has asked for");
            self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason).with_tensor(receive.clone()));
            return;
        };
        let receives = self.any_sources.mailboxes.entry((set, any)).or_default();
        *receives.taken.entry(pair.from).or_default() += 1;
        let collective = Collective::Recv { from: pair.from, tag: any.tag };
        let key = (set, message.clone(), any.to);
        let what = Request { name: message, collective, ..pending.what };
        match pending.withdrawn {
            None => self.enqueue(cx, &key, (pending.request, pending.since), (what, Bytes::new())),
            // Too late for the message to be another's: it fails for its sender.
            Some(failure) => {
                self.void(cx, key, failure.clone(), None);
                self.complete(cx, any.to, pending.request, Err(failure));
            }
        }
        self.release_held(cx, (set, any));
    }

    /// A receive from any source does not wait any more: what was posted after it is submitted, up to the next one from any
    /// source.
    pub(super) fn release_held(&mut self, cx: &mut Context, mailbox: (SetId, AnySource)) {
        let Some(receives) = self.any_sources.mailboxes.get_mut(&mailbox) else { return };
        receives.waits = false;
        let rank = mailbox.1.to;
        while let Some(Held { mut what, request }) = self.any_sources.next(mailbox) {
            what.name = self.any_sources.numbered(what.set, what.name);
            match request {
                Ok(request) => self.submit_in_turn(cx, rank, request, (what, Bytes::new())),
                Err(failure) if matches!(what.collective, Collective::Recv { .. }) => {
                    self.void(cx, (what.set, what.name, rank), failure, None);
                }
                // Nobody else knows of it.
                Err(_) => {}
            }
        }
    }

    fn hold_receive(&mut self, cx: &mut Context, any: AnySource, what: Request, request: Result<RequestId, Failure>) {
        let receives = self.any_sources.mailboxes.entry((what.set, any)).or_default();
        if receives.held.len() < HELD_MAX {
            receives.held.push_back(Held { what, request });
            return;
        }
        let rank = any.to;
        let reason = format!(
            "{rank} has had more than {HELD_MAX} receives with tag {} refused or withdrawn behind one from any source",
            any.tag
        );
        self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason).with_rank(rank));
    }

    fn check_held(
        &mut self,
        cx: &mut Context,
        (rank, request): (Rank, RequestId),
        what: &Request,
    ) -> Result<(), Failure> {
        self.check_set(cx, rank, what).map_err(|reason| Failure::new(Cause::Refused, reason).with_rank(rank))?;
        if self.requests.has_number(rank, request) || self.any_sources.has_number(rank, request) {
            let reason = format!("{request} of {rank} is in use; number requests once");
            return Err(Failure::new(Cause::Refused, reason).with_rank(rank));
        }
        Ok(())
    }
}

/// Receives of one mailbox that may be held, those included whose requests were refused or withdrawn.
const HELD_MAX: usize = 2 * limits::PENDING_PER_SESSION_MAX;

/// The mailbox of a receive.
fn receives(rank: Rank, collective: &Collective) -> Option<AnySource> {
    match *collective {
        Collective::Recv { tag, .. } | Collective::RecvAny { tag } => Some(AnySource { to: rank, tag }),
        _ => None,
    }
}
