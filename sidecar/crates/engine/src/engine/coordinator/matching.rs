//! Receives from any source at the coordinator, which matches each of them with the message that was announced first
//! among those for its rank and tag that no earlier receive takes. Messages of one source are taken in their order.
//!
//! A sidecar announces a receive from any source when all earlier receives of the same rank, set and tag have their
//! messages, so at most one of them waits here.

use std::collections::BTreeMap;
use std::sync::Arc;

use ronde_wire::{
    AnySource, Cause, Collective, Control, Failure, Pair, Rank, Request, Seq, SetId, SidecarIndex, TensorName,
};

use super::Violation;
use super::agreement::Agreement;
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::{Mailbox, TensorKey};
use crate::event::Time;

/// The receives from any source that wait for a message.
#[derive(Debug, Default)]
pub(crate) struct Matching {
    waiting: BTreeMap<Mailbox, Waiting>,
}

/// A receive that waits.
#[derive(Debug)]
struct Waiting {
    name: TensorName,
    since: Time,
    /// The set.
    view: Arc<SetView>,
}

impl Matching {
    /// Whether no receive waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A set is removed.
    pub(crate) fn remove_set(&mut self, set: SetId) {
        self.waiting.retain(|mailbox, _| mailbox.set != set);
    }

    /// Descriptions of the receives that have waited for so long.
    pub(crate) fn waiting(&self, now: Time, age_ms: u64) -> impl Iterator<Item = String> {
        let old = self.waiting.iter().filter(move |(_, waiting)| now.ms_since(waiting.since) >= age_ms);
        old.map(move |(mailbox, waiting)| {
            let seconds = now.ms_since(waiting.since) / 1_000;
            format!(
                "{} has waited for a message from any source for {seconds} seconds: {}.",
                mailbox.any.to,
                no_sender_text(*mailbox)
            )
        })
    }
}

impl Agreement {
    /// Handles the announcement of a receive from any source.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(super) fn receive_any(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        rank: Rank,
        Request { set, name, collective, .. }: Request,
    ) -> Result<(), Violation> {
        let any = AnySource::of_receive(&name).filter(|any| collective == Collective::RecvAny { tag: any.tag });
        let Some(any) = any.filter(|any| any.to == rank) else {
            return Err(format!("announces a receive of {rank} from any source as {name}"));
        };
        if self.scope(cx, from, rank, set, &name)?.is_none() {
            return Ok(());
        }
        let Some(view) = self.process_sets.sets.view(cx, set) else { return Ok(()) };
        let mailbox = Mailbox { set, any };
        if self.matching.waiting.contains_key(&mailbox) {
            return Err(format!("announces {name} of {set} while an earlier receive from any source waits"));
        }
        self.matching.waiting.insert(mailbox, Waiting { name, since: cx.now, view });
        self.match_receive(cx, mailbox);
        Ok(())
    }

    /// Withdraws a receive from any source, unless it is matched already.
    pub(super) fn withdraw_receive(&mut self, cx: &mut Context, set: SetId, name: &TensorName, failure: &Failure) {
        let Some(any) = AnySource::of_receive(name) else { return };
        let mailbox = Mailbox { set, any };
        if self.matching.waiting.get(&mailbox).is_none_or(|waiting| waiting.name != *name) {
            return;
        }
        let why = format!(
            "the request of {} for {name} was withdrawn: {}; {}",
            any.to,
            failure.reason,
            no_sender_text(mailbox)
        );
        self.reject_receive(cx, mailbox, &why);
    }

    /// A message was announced or refused: matches it with a waiting receive from any source.
    pub(super) fn match_message(&mut self, cx: &mut Context, set: SetId, name: &TensorName) {
        if self.matching.is_empty() {
            return;
        }
        if let Some((pair, tag)) = Pair::of_message(name) {
            self.match_receive(cx, Mailbox { set, any: AnySource { to: pair.to, tag } });
        }
    }

    /// A rank has joined in a set, so it sends nothing more there: checks the waiting receives of the set.
    pub(super) fn match_after_join(&mut self, cx: &mut Context, set: SetId) {
        let of_set = self.matching.waiting.keys().copied().filter(|mailbox| mailbox.set == set);
        for mailbox in of_set.collect::<Vec<_>>() {
            self.match_receive(cx, mailbox);
        }
    }

    fn match_receive(&mut self, cx: &mut Context, mailbox: Mailbox) {
        let Mailbox { set, any } = mailbox;
        let Some(waiting) = self.matching.waiting.get(&mailbox) else { return };
        let others = || waiting.view.ranks.iter().copied().filter(|rank| *rank != any.to);
        let message = |from| self.negotiation.first_message(set, Pair { from, to: any.to }, any.tag);
        if let Some((_, message)) = others().filter_map(message).min() {
            let receive = waiting.name.clone();
            self.matching.waiting.remove(&mailbox);
            let to = cx.config.world.sidecar_of(any.to).into_iter().collect();
            cx.send_down(&to, self.epoch, Seq(0), Control::Matched { set, receive, message });
            return;
        }
        let joined = self.joins.of(set);
        if others().all(|rank| joined.contains(&rank)) {
            let why = "Recv from any source is not supported with Join: all other ranks have joined";
            self.reject_receive(cx, mailbox, why);
        }
    }

    fn reject_receive(&mut self, cx: &mut Context, mailbox: Mailbox, why: &str) {
        let Mailbox { set, any } = mailbox;
        let Some(Waiting { name, .. }) = self.matching.waiting.remove(&mailbox) else { return };
        let Some(view) = self.process_sets.sets.scope(cx, set, &name) else { return };
        let failure = Failure::new(Cause::Refused, why).with_rank(any.to).with_tensor(name.clone());
        self.reject(cx, &view, &TensorKey { set, name }, &failure, &[]);
    }
}

/// Why a receive waits.
fn no_sender_text(Mailbox { set, any }: Mailbox) -> String {
    format!("no other rank of {set} has sent {} a message with tag {}", any.to, any.tag)
}
