//! Requests for process sets that their members form by themselves, at the coordinator. They are independent of other
//! negotiation: a schedule neither ends nor holds them.

use ronde_wire::{Cause, Collective, Control, Failure, Rank, Request, Seq, SetId, TensorName, limits};

use super::Violation;
use super::agreement::Agreement;
use super::member_sets::{Asked, Ended};
use crate::engine::shared::context::Context;
use crate::engine::shared::validation;
use crate::trace::{Trace, operation};

impl Agreement {
    /// Handles the announcement of a request for a set of its members.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(super) fn form_set(&mut self, cx: &mut Context, rank: Rank, request: &Request) -> Result<(), Violation> {
        let Request { set, name, collective, .. } = request;
        let Collective::AddSetOfMembers { ranks } = collective else { return Ok(()) };
        let Some(world) = self.process_sets.sets.view(cx, SetId::WORLD).filter(|_| *set == SetId::WORLD) else {
            return Err(format!("announces {name} in {set}"));
        };
        // The sidecar has checked the same.
        validation::check_message(&world, rank, request)
            .and_then(|()| validation::check(&cx.config.world, &world, request))
            .map_err(|why| format!("announces {name} for {rank}, which is invalid: {why}"))?;
        let mut ranks = ranks.clone();
        ranks.sort_unstable();
        let asked = self.member_sets.ask(cx.now, name, rank, &ranks, self.joins.of(SetId::WORLD))?;
        cx.traces.note(|| Trace::Ready { set: *set, name: name.clone(), operation: operation(collective), rank });
        match asked {
            Asked::Waits => {}
            Asked::Complete(since) => {
                self.last_to_be_ready = Some((rank, since));
                match self.process_sets.form(cx, self.epoch, name, &ranks) {
                    Ok(()) => {
                        let operation = Some(operation(collective));
                        cx.traces.note(|| Trace::Concluded { set: *set, name: name.clone(), operation });
                    }
                    Err(why) => {
                        let failure = Failure::new(Cause::Refused, format!("{name}: {why}")).with_tensor(name.clone());
                        self.set_refused(cx, name, Ended { ranks, failure });
                    }
                }
            }
            Asked::Failed(ended) => self.set_refused(cx, name, ended),
        }
        self.check_failed_sets();
        Ok(())
    }

    /// Handles the refusal or withdrawal of such a request. `ranks` are those of the set, as far as they are known.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(super) fn void_set(
        &mut self,
        cx: &mut Context,
        rank: Rank,
        name: &TensorName,
        ranks: &[Rank],
        failure: &Failure,
    ) -> Result<(), Violation> {
        let size = cx.config.world.size();
        let valid = ranks.is_sorted_by(|a, b| a < b)
            && ranks.last().is_some_and(|last| last.index() < size)
            && ranks.binary_search(&rank).is_ok();
        if !valid || !ronde_wire::is_set_of_members_name(name) {
            return Err(format!("voids {name} of {rank} with an invalid list of ranks"));
        }
        let why = &failure.reason;
        let voided = |verb: &str| {
            Failure::new(Cause::Refused, format!("the request of {rank} for a process set, {name}, {verb}: {why}"))
                .with_rank(rank)
                .with_tensor(name.clone())
        };
        let joined = self.joins.of(SetId::WORLD);
        let ended = match failure.cause {
            Cause::TimedOut => self.member_sets.withdraw(name, rank, joined, voided("was withdrawn")),
            _ => self.member_sets.refuse(name, rank, ranks, joined, voided("was refused"))?,
        };
        if let Some(ended) = ended {
            self.set_refused(cx, name, ended);
        }
        self.check_failed_sets();
        Ok(())
    }

    /// Ends the epoch when too many failed requests wait for other ranks. The rank that most of them name is at fault,
    /// not the one that came last.
    fn check_failed_sets(&mut self) {
        let Some((cause, ranks)) = self.member_sets.overflow() else { return };
        let who = cause.map_or_else(|| "no rank".to_owned(), |rank| rank.to_string());
        let (own, all) = (limits::SETS_OF_MEMBERS_FAILED_OF_RANK_MAX, limits::SETS_OF_MEMBERS_FAILED_MAX);
        let reason = format!(
            "requests for process sets have failed, for which other members never asked, more often than a job may have: \
             {who} is the cause of most, with {ranks} ranks in their lists (at most {own} for one rank, \
             SETS_OF_MEMBERS_FAILED_OF_RANK_MAX, and {all} for all, SETS_OF_MEMBERS_FAILED_MAX in docs/PROTOCOL.md). Make \
             all members of a set ask for it equally often"
        );
        let failure = Failure::new(Cause::Bug, reason);
        self.fatal = Some(match cause {
            Some(rank) => failure.with_rank(rank),
            None => failure,
        });
    }

    /// A rank joins in the set of all ranks: requests that need it fail.
    pub(super) fn join_fails_sets(&mut self, cx: &mut Context, rank: Rank) {
        for (name, ended) in self.member_sets.join(rank, self.joins.of(SetId::WORLD)) {
            self.set_refused(cx, &name, ended);
        }
    }

    /// Answers requests with a failure.
    fn set_refused(&mut self, cx: &mut Context, name: &TensorName, Ended { ranks, failure }: Ended) {
        cx.stats.mismatches += u64::from(failure.cause == Cause::Mismatch);
        cx.traces.note(|| Trace::Concluded { set: SetId::WORLD, name: name.clone(), operation: None });
        let sidecars = ranks.iter().filter_map(|rank| cx.config.world.sidecar_of(*rank)).collect();
        let refused = Control::SetRefused { name: name.clone(), ranks, failure };
        cx.send_down(&sidecars, self.epoch, Seq(0), refused);
    }
}
