//! Receives from any source, at the sidecar of the receiving rank.
//!
//! The coordinator decides which message such a receive takes (`matching`). Receives of one rank, set and tag take
//! messages in posting order, as in MPI: those posted after one from any source are held until its source is known. No
//! message waits for that: a message that matches a held receive also matches the receive before it.
//!
//! A worker numbers its receives from each source and does not count receives from any source that took messages of it.
//! So this module raises the numbers of its later receives from that source.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use ronde_wire::{
    AnySource, Cause, Collective, Failure, Pair, Rank, Request, RequestId, Seq, SetId, TensorName, limits,
};

use super::Participant;
use super::requests::{RankKey, TakenRequest};
use crate::engine::shared::context::Context;
use crate::engine::shared::{Mailbox, RequestKey, Submission, TensorKey, validation};

/// Receives that wait for a receive from any source before them.
#[derive(Debug, Default)]
pub(crate) struct AnySources {
    mailboxes: BTreeMap<Mailbox, Receives>,
}

/// The receives of a mailbox from the first one from any source on.
#[derive(Debug, Default)]
struct Receives {
    /// The number of messages of each source that receives from any source took.
    taken: BTreeMap<Rank, u64>,
    /// Whether a receive from any source waits for the coordinator; it is one of the pending requests.
    waits: bool,
    /// The receives posted after it, in order.
    held: VecDeque<Held>,
}

/// A receive that is held.
#[derive(Debug)]
struct Held {
    what: Request,
    /// The request; or the failure of a refused or withdrawn one, which its message will fail with.
    request: Result<RequestId, Failure>,
}

impl AnySources {
    /// The number of held receives of a rank.
    pub(crate) fn of(&self, rank: Rank) -> usize {
        self.wanted().filter(|key| key.rank == rank).count()
    }

    /// Whether a held receive of the rank has this number.
    pub(crate) fn has_number(&self, key: RequestKey) -> bool {
        self.wanted().any(|held| held == key)
    }

    /// The number of held receives.
    pub(crate) fn len(&self) -> usize {
        self.wanted().count()
    }

    /// Clears everything; returns the requests that were held.
    pub(crate) fn clear(&mut self) -> Vec<RequestKey> {
        let wanted = self.wanted().collect();
        self.mailboxes.clear();
        wanted
    }

    /// Removes a set; returns the requests that were held, with their names.
    pub(crate) fn remove_set(&mut self, set: SetId) -> Vec<TakenRequest> {
        let mut taken = Vec::new();
        for (mailbox, receives) in self.mailboxes.extract_if(.., |mailbox, _| mailbox.set == set) {
            let rank = mailbox.any.to;
            let wanted = receives.held.into_iter().filter_map(|held| {
                let key = RequestKey { rank, request: held.request.ok()? };
                Some(TakenRequest { key, name: held.what.name })
            });
            taken.extend(wanted);
        }
        taken
    }

    /// The tag of a receive of a rank in a set that is held after one from any source.
    fn held_tag(&self, set: SetId, rank: Rank) -> Option<u32> {
        let of_rank = self.mailboxes.iter().filter(|(mailbox, _)| mailbox.set == set && mailbox.any.to == rank);
        let mut holding = of_rank.filter(|(_, receives)| receives.held.iter().any(|held| held.request.is_ok()));
        holding.next().map(|(mailbox, _)| mailbox.any.tag)
    }

    /// Withdraws a held request. It keeps its position, at which its message will fail.
    fn withdraw(&mut self, RequestKey { rank, request }: RequestKey, failure: &Failure) -> bool {
        let of_rank = self.mailboxes.iter_mut().filter(|(mailbox, _)| mailbox.any.to == rank);
        let mut held = of_rank.flat_map(|(_, receives)| &mut receives.held);
        let found = held.find(|held| held.request == Ok(request));
        found.map(|held| held.request = Err(failure.clone())).is_some()
    }

    fn waits(&self, mailbox: Mailbox) -> bool {
        self.mailboxes.get(&mailbox).is_some_and(|receives| receives.waits)
    }

    /// The name of a receive with its raised number; other names are unchanged.
    fn numbered(&self, set: SetId, name: TensorName) -> TensorName {
        let Some((pair, tag)) = Pair::of_message(&name) else { return name };
        let receives = self.mailboxes.get(&Mailbox { set, any: AnySource { to: pair.to, tag } });
        let taken = receives.and_then(|receives| receives.taken.get(&pair.from));
        match (taken, Pair::message_count(&name)) {
            (Some(taken), Some(count)) => pair.message_name(tag, count.saturating_add(*taken)),
            _ => name,
        }
    }

    /// The next held receive, when none from any source waits.
    fn next(&mut self, mailbox: Mailbox) -> Option<Held> {
        let receives = self.mailboxes.get_mut(&mailbox).filter(|receives| !receives.waits)?;
        receives.held.pop_front()
    }

    fn wanted(&self) -> impl Iterator<Item = RequestKey> {
        self.mailboxes.iter().flat_map(|(mailbox, receives)| {
            let wanted = receives.held.iter().filter_map(|held| held.request.as_ref().ok());
            wanted.map(|request| RequestKey { rank: mailbox.any.to, request: *request })
        })
    }
}

impl Participant {
    /// The request to submit now; `None` when it is held or refused.
    pub(super) fn in_posting_order(&mut self, cx: &mut Context, key: RequestKey, mut what: Request) -> Option<Request> {
        let rank = key.rank;
        let Some(any) = receives(rank, &what.collective) else { return Some(what) };
        let mailbox = Mailbox { set: what.set, any };
        if !self.any_sources.waits(mailbox) {
            if matches!(what.collective, Collective::Recv { .. }) {
                what.name = self.any_sources.numbered(what.set, what.name);
            }
            return Some(what);
        }
        if let Err(failure) = self.check_takes_part(rank).and_then(|()| self.check_held(cx, key, &what)) {
            self.refuse(cx, key, failure);
            return None;
        }
        let checked = self.check_room(rank).and_then(|()| {
            let view = self.sets.scope(cx, what.set, &what.name).ok_or("its process set is gone")?;
            validation::check(&cx.config.world, &view, &what)
        });
        let request = match checked {
            Ok(()) => Ok(key.request),
            Err(reason) => {
                let failure = Failure::new(Cause::Refused, reason).with_rank(rank).with_tensor(what.name.clone());
                self.refuse(cx, key, failure.clone());
                Err(failure)
            }
        };
        self.hold_receive(cx, mailbox, what, request);
        None
    }

    /// Handles a receive that the service refused. Returns the name of the message that fails with it; `None` when it
    /// is not known yet, or there is none.
    pub(super) fn refused_in_posting_order(
        &mut self,
        cx: &mut Context,
        rank: Rank,
        TensorKey { set, name }: TensorKey,
        failure: &Failure,
    ) -> Option<TensorName> {
        if AnySource::of_receive(&name).is_some() {
            // No other rank knows of it.
            return None;
        }
        let Some((pair, tag)) = Pair::of_message(&name).filter(|(pair, _)| pair.to == rank) else { return Some(name) };
        let mailbox = Mailbox { set, any: AnySource { to: rank, tag } };
        if self.any_sources.waits(mailbox) {
            let (collective, dtype) = (Collective::Recv { from: pair.from, tag }, ronde_wire::DType::U8);
            let what = Request::new(set, name, collective, dtype, crate::engine::shared::shapes::empty());
            self.hold_receive(cx, mailbox, what, Err(failure.clone()));
            return None;
        }
        Some(self.any_sources.numbered(set, name))
    }

    /// Refuses a join while a receive from any source waits: a joined rank takes no part in operations that it has not
    /// announced, such as the message of that receive and the receives held after it.
    pub(super) fn check_join(&self, rank: Rank, what: &Request) -> Result<(), String> {
        if what.collective != Collective::Join {
            return Ok(());
        }
        let waiting = self.requests.iter().find_map(|(of, pending)| match pending.what.collective {
            // One that was withdrawn is over for its rank.
            Collective::RecvAny { tag } if of == rank && pending.what.set == what.set => {
                pending.withdrawn.is_none().then_some(tag)
            }
            _ => None,
        });
        let waiting = waiting.or_else(|| self.any_sources.held_tag(what.set, rank));
        waiting.map_or(Ok(()), |tag| {
            Err(format!(
                "{rank} has joined while its receive from any source with tag {tag} waits; wait for it before the join"
            ))
        })
    }

    /// A receive from any source is submitted: later receives are held.
    pub(super) fn waits_for_source(&mut self, mailbox: Mailbox) {
        self.any_sources.mailboxes.entry(mailbox).or_default().waits = true;
    }

    /// Withdraws a held receive. Returns whether there was one.
    pub(super) fn withdraw_held(&mut self, cx: &mut Context, key: RequestKey, reason: &str) -> bool {
        let failure = Failure::new(Cause::TimedOut, reason).with_rank(key.rank);
        let held = self.any_sources.withdraw(key, &failure);
        if held {
            self.complete(cx, key, Err(failure));
        }
        held
    }

    /// Handles the coordinator's match of a receive from any source with a message.
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
            let pending = self.requests.take_pending(&RankKey::new(set, receive, any.to))?;
            Some((any, pair, pending))
        });
        let Some((any, pair, pending)) = found else {
            let reason = format!("{receive} of {set} was matched with {message}, which no rank here has asked for");
            self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason).with_tensor(receive.clone()));
            return;
        };
        let receives = self.any_sources.mailboxes.entry(Mailbox { set, any }).or_default();
        *receives.taken.entry(pair.from).or_default() += 1;
        let collective = Collective::Recv { from: pair.from, tag: any.tag };
        let key = RankKey::new(set, &message, any.to);
        let what = Request { name: message, collective, ..pending.what };
        match pending.withdrawn {
            None => {
                let submission = Submission { what, contribution: Bytes::new() };
                self.enqueue(cx, &key, pending.request, pending.since, submission);
            }
            // No other receive can take the message any more: it fails for its sender.
            Some(failure) => {
                self.void(cx, key, failure.clone(), None);
                self.complete(cx, RequestKey { rank: any.to, request: pending.request }, Err(failure));
            }
        }
        self.release_held(cx, Mailbox { set, any });
    }

    /// A receive from any source no longer waits: the receives held after it are submitted, up to the next one from any
    /// source.
    pub(super) fn release_held(&mut self, cx: &mut Context, mailbox: Mailbox) {
        let Some(receives) = self.any_sources.mailboxes.get_mut(&mailbox) else { return };
        receives.waits = false;
        let rank = mailbox.any.to;
        while let Some(Held { mut what, request }) = self.any_sources.next(mailbox) {
            what.name = self.any_sources.numbered(what.set, what.name);
            match request {
                Ok(request) => {
                    let submission = Submission { what, contribution: Bytes::new() };
                    self.submit_in_turn(cx, RequestKey { rank, request }, submission);
                }
                Err(failure) if matches!(what.collective, Collective::Recv { .. }) => {
                    self.void(cx, RankKey { set: what.set, name: what.name, rank }, failure, None);
                }
                // No other rank knows of it.
                Err(_) => {}
            }
        }
    }

    fn hold_receive(&mut self, cx: &mut Context, mailbox: Mailbox, what: Request, request: Result<RequestId, Failure>) {
        let receives = self.any_sources.mailboxes.entry(mailbox).or_default();
        if receives.held.len() < HELD_MAX {
            receives.held.push_back(Held { what, request });
            return;
        }
        let any = mailbox.any;
        let rank = any.to;
        let reason = format!(
            "{rank} has had more than {HELD_MAX} receives with tag {} refused or withdrawn after one from any source",
            any.tag
        );
        self.fail(cx, Seq(0), &Failure::new(Cause::Bug, reason).with_rank(rank));
    }

    fn check_held(&mut self, cx: &mut Context, key: RequestKey, what: &Request) -> Result<(), Failure> {
        let RequestKey { rank, request } = key;
        self.check_set(cx, rank, what).map_err(|reason| Failure::new(Cause::Refused, reason).with_rank(rank))?;
        if self.has_number(key) {
            let reason = format!("{request} of {rank} is in use; number requests once");
            return Err(Failure::new(Cause::Refused, reason).with_rank(rank));
        }
        Ok(())
    }
}

/// The most held receives of one mailbox, refused and withdrawn ones included.
const HELD_MAX: usize = 2 * limits::PENDING_PER_SESSION_MAX;

/// The mailbox of a receive.
fn receives(rank: Rank, collective: &Collective) -> Option<AnySource> {
    match *collective {
        Collective::Recv { tag, .. } | Collective::RecvAny { tag } => Some(AnySource { to: rank, tag }),
        _ => None,
    }
}
