//! The coordinator's negotiation of one epoch: from announcements to orders and rejections.

use std::collections::BTreeSet;
use std::sync::Arc;

use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    AnySource, Cause, Collective, Control, Epoch, Failure, Group, Pair, Rank, Request, Seq, SetId, SidecarIndex,
    TensorName, is_set_of_members_name,
};

use super::groups::{Groups, Overflow, Ready, USES_MAX};
use super::joins::Joins;
use super::matching::Matching;
use super::member_sets::MemberSets;
use super::mismatch;
use super::negotiation::{Announced, Complete, Negotiation, Void, VoidCause, Voided};
use super::ordering::{Ordering, ready_tensor};
use super::process_sets::ProcessSets;
use super::request_cache::RequestCaches;
use super::scheduling::Scheduling;
use super::{Violation, check_served};
use crate::engine::shared::context::Context;
use crate::engine::shared::sets::SetView;
use crate::engine::shared::{POISONED_MAX, RankContributions, RankRequests, Submission, TensorKey};
use crate::engine::shared::{eager, validation};
use crate::event::Time;
use crate::trace::{Trace, operation};

/// The negotiation of one epoch.
#[derive(Debug, Default)]
pub(crate) struct Agreement {
    pub(super) epoch: Epoch,
    pub(super) negotiation: Negotiation,
    pub(super) matching: Matching,
    pub(super) ordering: Ordering,
    pub(super) groups: Groups,
    pub(super) process_sets: ProcessSets,
    pub(super) member_sets: MemberSets,
    pub(super) joins: Joins,
    request_caches: RequestCaches,
    pub(super) scheduling: Scheduling,
    /// The failure that has to end the epoch.
    pub(super) fatal: Option<Failure>,
    /// The rank whose announcement completed the newest round, and for how many microseconds the others had waited.
    pub(super) last_to_be_ready: Option<(Rank, Time)>,
}

impl Agreement {
    /// Starts a new epoch, or none.
    pub(crate) fn reset(&mut self, epoch: Epoch) {
        *self = Self { epoch, ..Self::default() };
    }

    /// Handles one announcement of a sidecar.
    ///
    /// # Errors
    /// How it breaks the protocol.
    pub(crate) fn announced(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        Announcement { rank, intent, contribution }: Announcement,
    ) -> Result<(), Violation> {
        check_served(cx, from, &[rank])?;
        match &intent {
            Intent::Ready(request) if matches!(request.collective, Collective::AddSetOfMembers { .. }) => {
                return if contribution.is_empty() {
                    self.form_set(cx, rank, request)
                } else {
                    Err(format!("sends {} bytes along with {}", contribution.len(), request.name))
                };
            }
            Intent::VoidSet { name, ranks, failure } => return self.void_set(cx, rank, name, ranks, failure),
            _ => {}
        }
        if self.scheduling.is_busy() {
            // Sent before the sender received the schedule; it will be sent again.
            return match intent {
                Intent::Remember { slot, request } => self.request_caches.insert(from, slot, &request),
                _ => Ok(()),
            };
        }
        match intent {
            Intent::Ready(request) => self.ready(cx, from, rank, Submission { what: request, contribution }),
            Intent::Remember { slot, request } => {
                self.request_caches.insert(from, slot, &request)?;
                self.ready(cx, from, rank, Submission { what: request, contribution })
            }
            Intent::Again { slot } => {
                let request = self.request_caches.get(from, slot)?;
                self.ready(cx, from, rank, Submission { what: request, contribution })
            }
            Intent::Void { set, name, failure, group } => {
                let Some(view) = self.scope(cx, from, rank, set, &name)? else { return Ok(()) };
                if AnySource::of_receive(&name).is_some() {
                    self.withdraw_receive(cx, set, &name, &failure);
                    return Ok(());
                }
                let key = TensorKey { set, name };
                self.void(cx, &view, rank, &key, &failure, group)?;
                self.match_message(cx, set, &key.name);
                Ok(())
            }
            // Handled above.
            Intent::VoidSet { .. } => Ok(()),
        }
    }

    /// Takes the failure that has to end the epoch, if there is one.
    pub(crate) fn take_fatal(&mut self) -> Option<Failure> {
        self.fatal.take()
    }

    /// Takes the rank whose announcement completed the last round, and for how many microseconds the others waited.
    pub(crate) fn take_last_to_be_ready(&mut self) -> Option<(Rank, Time)> {
        self.last_to_be_ready.take()
    }

    /// A sidecar acknowledges that a set is removed.
    ///
    /// # Errors
    /// When the set was not removed.
    pub(crate) fn forgotten(&mut self, from: SidecarIndex, set: SetId) -> Result<(), Violation> {
        self.process_sets.forgotten(from, set)
    }

    /// The ranks that negotiate a name; `None` when its set is removed and the sender has not acknowledged it.
    pub(super) fn scope(
        &self,
        cx: &mut Context,
        from: SidecarIndex,
        rank: Rank,
        set: SetId,
        name: &TensorName,
    ) -> Result<Option<Arc<SetView>>, Violation> {
        if is_set_of_members_name(name) {
            return Err(format!("announces {name}, a name of requests for process sets, for another operation"));
        }
        match self.process_sets.sets.scope(cx, set, name) {
            _ if self.process_sets.is_leaving(from, set) => Ok(None),
            Some(view) if view.contains(rank) => Ok(Some(view)),
            Some(_) => Err(format!("announces {name} in {set} for {rank}, which takes no part in it")),
            None => Err(format!("announces tensor {name} of {set}, which does not exist")),
        }
    }

    fn ready(
        &mut self,
        cx: &mut Context,
        from: SidecarIndex,
        rank: Rank,
        submission: Submission,
    ) -> Result<(), Violation> {
        let what = &submission.what;
        if matches!(what.collective, Collective::RecvAny { .. }) {
            return self.receive_any(cx, from, rank, submission.what);
        }
        let key = TensorKey::of(what);
        let Some(view) = self.scope(cx, from, rank, key.set, &key.name)? else { return Ok(()) };
        let is_receive_name = AnySource::of_receive(&key.name).is_some();
        if is_receive_name || what.collective.pair(rank) != Pair::of_message(&key.name).map(|(pair, _)| pair) {
            return Err(format!("announces {} of {rank} as {}", what.collective.name(), key.name));
        }
        let (given, due) =
            (submission.contribution.len(), eager::contribution_bytes(&view, rank, what, cx.config.eager_bytes));
        if given != due.unwrap_or(0) {
            return Err(format!(
                "sends {given} bytes along with tensor {} of {}, not {}",
                key.name,
                key.set,
                due.unwrap_or(0)
            ));
        }
        self.check_ended(&key, rank)?;
        let joins = what.collective == Collective::Join;
        let operation = operation(&what.collective);
        match self.negotiation.announce(cx.now, &view, rank, submission) {
            Announced::Open => {
                cx.traces.note(|| Trace::Ready { set: key.set, name: key.name.clone(), operation, rank });
                if joins {
                    self.join(cx, rank, &key);
                }
                if let Some(since) = self.decide(cx, &key) {
                    self.last_to_be_ready = Some((rank, since));
                }
                self.match_message(cx, key.set, &key.name);
                Ok(())
            }
            Announced::Poisoned(group) => {
                self.leave_group(cx, &key, group);
                Ok(())
            }
            Announced::Contradiction => Err(format!("announces tensor {} of {} twice for {rank}", key.name, key.set)),
        }
    }

    /// Checks that the earlier request of this name may have ended at the rank's sidecar. Otherwise the name would get
    /// a second round, whose rejection would reach other ranks before the order of the first.
    fn check_ended(&self, key: &TensorKey, rank: Rank) -> Result<(), Violation> {
        if !self.ordering.waits(key) && !self.groups.waits(key) {
            return Ok(());
        }
        let TensorKey { set, name } = key;
        Err(format!("announces tensor {name} of {set} for {rank} before its earlier request is ordered or rejected"))
    }

    /// Orders or rejects a name when all ranks have announced it, and returns since when it waited. `None` while it
    /// waits.
    pub(super) fn decide(&mut self, cx: &mut Context, key: &TensorKey) -> Option<Time> {
        let mut complete = self.negotiation.take_complete(key, self.joins.of(key.set))?;
        let contributions = std::mem::take(&mut complete.contributions);
        if let Err(failure) = self.perform(cx, key, &complete, contributions) {
            cx.stats.mismatches += 1;
            self.reject(cx, &complete.view, key, &failure, &complete.excused);
            self.failed(cx, key, &complete.requests);
        }
        Some(complete.since)
    }

    fn perform(
        &mut self,
        cx: &mut Context,
        key: &TensorKey,
        complete: &Complete,
        contributions: RankContributions,
    ) -> Result<(), Failure> {
        let Complete { view, requests, excused, .. } = complete;
        mismatch::check_modules(requests, |rank| cx.config.world.sidecar_of(rank))?;
        mismatch::check(requests, excused)?;
        for (rank, request) in requests {
            // The sidecars have checked the same; their messages are untrusted.
            validation::check(&cx.config.world, view, request).map_err(|why| refusal(key, &why).with_rank(*rank))?;
        }
        let Some((_, first)) = requests.first_key_value() else { return Ok(()) };
        let refused = |why: String| refusal(key, &why);
        match &first.collective {
            Collective::Join => self.all_joined(cx, view, key),
            Collective::AddSet { ranks } => self.process_sets.add(cx, self.epoch, &key.name, ranks).map_err(refused)?,
            Collective::RemoveSet { set } => {
                self.check_no_joins(*set).map_err(refused)?;
                self.remove_set(cx, &key.name, *set);
            }
            _ => {
                let tensor = ready_tensor(cx, view, requests, contributions, excused.clone()).map_err(refused)?;
                let ready = Ready { view: Arc::clone(view), tensor };
                let released = match &first.group {
                    Some(group) => self.groups.ready(cx.now, group, ready),
                    None => vec![ready],
                };
                self.push(released);
                return Ok(());
            }
        }
        let what = Some(operation(&first.collective));
        cx.traces.note(|| Trace::Concluded { set: key.set, name: key.name.clone(), operation: what });
        Ok(())
    }

    fn void(
        &mut self,
        cx: &mut Context,
        view: &Arc<SetView>,
        rank: Rank,
        key: &TensorKey,
        failure: &Failure,
        group: Option<Group>,
    ) -> Result<(), Violation> {
        // A withdrawal that comes too late must not affect the name's next round.
        let (cause, verb) = match failure.cause {
            Cause::TimedOut => (VoidCause::Withdrawn, "was withdrawn"),
            _ => (VoidCause::Refused, "was refused"),
        };
        if cause == VoidCause::Refused {
            self.check_ended(key, rank)?;
        }
        let why = &failure.reason;
        let reason = format!("the request of {rank} for tensor {} of {} {verb}: {why}", key.name, key.set);
        let failure = Failure::new(Cause::Refused, reason).with_rank(rank).with_tensor(key.name.clone());
        match self.negotiation.void(cx.now, view, key, Void { rank, cause, group }, self.joins.of(key.set)) {
            Voided::Now { requests, excused, group } => {
                self.reject(cx, view, key, &failure, &excused);
                self.leave_group(cx, key, group);
                self.unjoin(cx, key.set, &requests);
            }
            Voided::Poisoned(group) => self.leave_group(cx, key, group),
            Voided::Late => {
                // Ready on all ranks, but its group is not.
                if let Some(Ready { view, tensor }) = self.groups.withdraw(key) {
                    self.reject(cx, &view, key, &failure, &tensor.joined);
                }
            }
            Voided::Overflow => {
                let reason = format!(
                    "{rank} has had more than {POISONED_MAX} requests refused that other ranks never asked for"
                );
                self.fatal = Some(Failure::new(Cause::Bug, reason).with_rank(rank));
            }
        }
        Ok(())
    }

    /// A round was rejected: its groups continue without it, and its joins are undone.
    fn failed(&mut self, cx: &mut Context, key: &TensorKey, requests: &RankRequests) {
        let group = |request: &Request| request.group.as_ref().map(|group| (group.name.clone(), group.size));
        let groups: BTreeSet<(TensorName, u32)> = requests.values().filter_map(group).collect();
        for (name, size) in groups {
            self.leave_group(cx, key, Some(Group { name, size }));
        }
        self.unjoin(cx, key.set, requests);
    }

    fn leave_group(&mut self, cx: &Context, TensorKey { set, name }: &TensorKey, group: Option<Group>) {
        let Some(group) = group else { return };
        match self.groups.rejected(cx.now, *set, &group, name) {
            Ok(released) => self.push(released),
            Err(Overflow) => {
                let reason = format!(
                    "tensor {name} of {set} has failed in {USES_MAX} uses of group {}, of which other tensors were never \
                     asked for; ask for all tensors of a group in every step",
                    group.name
                );
                self.fatal = Some(Failure::new(Cause::Bug, reason).with_tensor(name.clone()));
            }
        }
    }

    fn push(&mut self, released: Vec<Ready>) {
        for Ready { view, tensor } in released {
            self.ordering.push(&view, tensor);
        }
    }

    pub(super) fn reject_each(&self, cx: &mut Context, tensors: Vec<Ready>, why: &str) {
        for ready in tensors {
            let key = ready.key();
            self.reject(cx, &ready.view, &key, &refusal(&key, why), &ready.tensor.joined);
        }
    }

    /// Removes a set. Unknown sets and the set of all ranks are unchanged; the ranks are answered all the same.
    fn remove_set(&mut self, cx: &mut Context, name: &TensorName, set: SetId) {
        if self.process_sets.remove(cx, self.epoch, name, set) {
            self.negotiation.remove_set(set);
            self.matching.remove_set(set);
            self.groups.remove_set(set);
            self.ordering.remove_set(set);
            // Steps with operations of the set do not repeat.
            self.scheduling.repetition.reset();
        }
    }

    pub(super) fn reject(
        &self,
        cx: &mut Context,
        view: &SetView,
        TensorKey { set, name }: &TensorKey,
        failure: &Failure,
        excused: &[Rank],
    ) {
        cx.traces.note(|| Trace::Concluded { set: *set, name: name.clone(), operation: None });
        let (failure, excused) = (failure.clone(), excused.to_vec());
        let reject = Control::Reject { set: *set, name: name.clone(), failure, excused };
        cx.send_down(&view.sidecars, self.epoch, Seq(0), reject);
    }
}

fn refusal(TensorKey { set, name }: &TensorKey, why: &str) -> Failure {
    Failure::new(Cause::Refused, format!("tensor {name} of {set}: {why}")).with_tensor(name.clone())
}
