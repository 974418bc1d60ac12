//! Planted bugs: they make the messages, plans and answers of a correct sidecar wrong. The check for each of them must
//! catch it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ronde_collectives::plan::{Plan, Round, Slice, Step, Target};
use ronde_engine::Admission;
use ronde_wire::control::Intent;
use ronde_wire::frame::Chunk;
use ronde_wire::{Ascent, Collective, Control, Epoch, Rank, Request, Seq, SetId, SidecarIndex, TensorName, Tuning};

use super::item::{Item, Kind};
use super::link::Message;
use super::workload::Workload;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saboteur {
    /// An order or a rejection never reaches one sidecar.
    LostResponse,
    /// One contribution is reduced twice.
    DoubleCount,
    /// One sidecar gets the operations of two sets in the other order.
    CrossedOrders,
    /// Chunks of an ended epoch count as chunks of the current one.
    StaleEpoch,
    /// An answer never reaches its worker.
    ForgottenWaiter,
    /// One sidecar uses another tuning than the ordered one.
    LocalTuning,
    /// A rank that has joined contributes garbage instead of zeros.
    JoinedGarbage,
    /// Two blocks of a result are written to each other's places.
    SwappedBlocks,
    /// Two messages between the same ranks are delivered under each other's tag and turn.
    CrossedMessages,
    /// A rank gets the result of its neighbour on the same host.
    ForeignResult,
    /// The owner of a chunk keeps the exact values of which all others get the encoded ones.
    UnroundedOwner,
    /// A repeated announcement means an older request by the same name.
    StaleAnnouncement,
    /// One sidecar removes a process set before an operation that is in flight.
    EarlyRemoval,
    /// The rest of a group, one of whose tensors was rejected, is ordered twice.
    ReleasedTwice,
    /// A relay forwards an order or a rejection to some of its children only.
    DeafBranch,
    /// Relays do not report lost sidecars.
    ForgottenLoss,
    /// A sidecar sends messages in the name of one that is not below it on the tree.
    BorrowedName,
    /// A sidecar does not report what it has completed of an invalidated schedule.
    ForgottenCompletion,
    /// Some sidecars drop less of a schedule than others.
    LateCancel,
    /// Chunks of a dropped operation count as chunks of one that replaces it.
    KeptChunks,
    /// One sidecar repeats a schedule under other numbers.
    ShiftedSchedule,
    /// One sidecar receives a commit of an operation in which a plugin has failed.
    SpoiltCommit,
    /// A sidecar keeps the codec state of an operation that is not committed.
    KeptFailure,
}

impl Saboteur {
    /// All of them.
    pub const ALL: [Self; 23] = [
        Self::LostResponse,
        Self::DoubleCount,
        Self::CrossedOrders,
        Self::StaleEpoch,
        Self::ForgottenWaiter,
        Self::LocalTuning,
        Self::JoinedGarbage,
        Self::SwappedBlocks,
        Self::CrossedMessages,
        Self::ForeignResult,
        Self::UnroundedOwner,
        Self::StaleAnnouncement,
        Self::EarlyRemoval,
        Self::ReleasedTwice,
        Self::DeafBranch,
        Self::ForgottenLoss,
        Self::BorrowedName,
        Self::ForgottenCompletion,
        Self::LateCancel,
        Self::KeptChunks,
        Self::ShiftedSchedule,
        Self::SpoiltCommit,
        Self::KeptFailure,
    ];

    /// Whether it is about forwarded messages.
    #[must_use]
    pub fn relays(self) -> bool {
        matches!(self, Self::DeafBranch | Self::ForgottenLoss | Self::BorrowedName)
    }

    /// Whether it is about operations that are performed without negotiation.
    #[must_use]
    pub fn schedules(self) -> bool {
        matches!(self, Self::ForgottenCompletion | Self::LateCancel | Self::KeptChunks | Self::ShiftedSchedule)
    }

    /// Whether it is about operations with plugins.
    #[must_use]
    pub fn commits(self) -> bool {
        matches!(self, Self::SpoiltCommit | Self::KeptFailure)
    }

    /// The saboteur of a name as [`Debug`] writes it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|saboteur| format!("{saboteur:?}") == name)
    }
}

/// A saboteur at work: it waits for some opportunities and then acts.
#[derive(Debug)]
pub(super) struct Sabotage {
    pub(super) saboteur: Saboteur,
    coordinator: SidecarIndex,
    patience: u32,
    pub(super) struck: bool,
    /// Requests by the sidecar that announces them and their number in the request cache.
    cached: BTreeMap<(usize, u16), Request>,
    /// The groups of tensors that were announced.
    groups: BTreeMap<(SetId, TensorName), TensorName>,
    /// The names by which sidecars ask for the removal of sets.
    removals: BTreeMap<(usize, SetId), TensorName>,
    /// Groups with a tensor that was rejected.
    reduced_groups: BTreeSet<TensorName>,
}

impl Sabotage {
    pub(super) fn new(saboteur: Saboteur, coordinator: SidecarIndex, patience: u32) -> Self {
        let (cached, groups, removals, reduced_groups) = Default::default();
        Self { saboteur, coordinator, patience, struck: false, cached, groups, removals, reduced_groups }
    }

    /// Returns what is sent instead of a control message; `ahead` is what is in flight already.
    pub(super) fn pass<'a>(
        &mut self,
        (from, to): (usize, usize),
        (mut seq, mut message): (Seq, Control),
        ahead: impl Iterator<Item = &'a mut Message>,
    ) -> Vec<(Seq, Control)> {
        self.bend(to, &mut seq, &mut message);
        let reduced_group = self.is_reduced_group(&message);
        match (self.saboteur, &mut message) {
            (Saboteur::LostResponse, Control::Order(_) | Control::Reject { .. }) if self.strikes() => {
                return Vec::new();
            }
            (Saboteur::LocalTuning, Control::Order(order)) if self.strikes() => {
                order.tuning = Tuning { window: order.tuning.window % 8 + 1, ..order.tuning };
            }
            (Saboteur::CrossedOrders, Control::Order(order)) => {
                let other = ahead.filter_map(|message| match message {
                    Message::Control(_, _, Control::Order(other)) if other.set != order.set => Some(other),
                    _ => None,
                });
                if let Some(other) = other.last()
                    && self.strikes()
                {
                    std::mem::swap(other, order);
                }
            }
            (Saboteur::StaleAnnouncement, Control::Announce { announcements }) => {
                for announcement in announcements {
                    self.repeat_wrongly(from, &mut announcement.intent);
                }
            }
            (Saboteur::EarlyRemoval, Control::Announce { announcements }) => {
                for announcement in announcements {
                    self.note_removal(from, &announcement.intent);
                }
            }
            (Saboteur::EarlyRemoval, Control::Order(order)) => {
                if let Some(name) = self.removals.get(&(to, order.set)).cloned()
                    && self.strikes()
                {
                    let removed = Control::SetRemoved { name, set: order.set };
                    return vec![(Seq(0), removed), (seq, message)];
                }
            }
            (Saboteur::DeafBranch, Control::Descending { message: passed, .. }) if from != 0 => {
                let matters = matches!(passed.open(), Ok(Control::Order(_) | Control::Reject { .. }));
                if matters && self.strikes() {
                    return Vec::new();
                }
            }
            (Saboteur::ForgottenLoss, Control::Ascending { ascents, .. }) => {
                let before = ascents.len();
                ascents.retain(|ascent| !matches!(ascent, Ascent::Lost { .. }));
                self.struck |= ascents.len() < before;
            }
            (Saboteur::BorrowedName, Control::Ascending { ascents, .. }) => {
                if let Some(Ascent::Message { origin, .. }) = ascents.last_mut()
                    && self.strikes()
                {
                    *origin = self.coordinator;
                }
            }
            (Saboteur::ReleasedTwice, _) if reduced_group && self.strikes() => {
                return vec![(seq, message.clone()), (Seq(seq.0 + 1), message)];
            }
            _ => {}
        }
        vec![(seq, message)]
    }

    /// Whether codec state is kept although its operation is not committed.
    pub(super) fn keeps_what_failed(&mut self) -> bool {
        self.saboteur == Saboteur::KeptFailure && self.strikes()
    }

    /// Changes messages about commits and schedules.
    fn bend(&mut self, to: usize, number: &mut Seq, message: &mut Control) {
        match (self.saboteur, message) {
            (Saboteur::SpoiltCommit, Control::Commit { failure }) if failure.is_some() && self.strikes() => {
                *failure = None;
            }
            (Saboteur::ForgottenCompletion, Control::Frozen { completed, .. }) => {
                self.struck |= !completed.is_empty();
                completed.clear();
            }
            (Saboteur::LateCancel, Control::Resume { last, completed, .. }) if to % 2 == 1 => {
                for (_, seq) in completed {
                    self.struck |= *seq < *last;
                    *seq = *last;
                }
            }
            (Saboteur::ShiftedSchedule, Control::Schedule { .. }) if self.strikes() => number.0 += 1,
            _ => {}
        }
    }

    /// Changes a plan that is about to be performed.
    pub(super) fn alter(&mut self, admission: &mut Admission) {
        match self.saboteur {
            Saboteur::DoubleCount => self.reduce_twice(Arc::make_mut(&mut admission.plan)),
            Saboteur::SwappedBlocks => self.swap_blocks(admission),
            Saboteur::UnroundedOwner => self.publish_early(Arc::make_mut(&mut admission.plan)),
            Saboteur::JoinedGarbage => {
                let takes_part = admission.tensors.iter().any(|tensor| !tensor.requests.is_empty());
                if takes_part && !admission.joined.is_empty() && admission.plan.layout.elements > 0 && self.strikes() {
                    admission.joined.clear();
                }
            }
            _ => {}
        }
    }

    /// Changes a chunk that arrives in an epoch.
    pub(super) fn restamp(&mut self, chunk: &mut Chunk, now: Epoch) {
        if self.saboteur == Saboteur::StaleEpoch && chunk.epoch < now {
            self.struck = true;
            chunk.epoch = now;
        }
    }

    /// Changes a chunk that arrives where some operations were dropped.
    pub(super) fn renumber(&mut self, chunk: &mut Chunk, dropped: &BTreeSet<Seq>, newest: Seq) {
        let late = dropped.contains(&chunk.seq) && newest > chunk.seq && !dropped.contains(&newest);
        if self.saboteur == Saboteur::KeptChunks && late {
            self.struck = true;
            chunk.seq = newest;
        }
    }

    /// Whether an answer gets lost.
    pub(super) fn forgets(&mut self) -> bool {
        self.saboteur == Saboteur::ForgottenWaiter && self.strikes()
    }

    /// Whose result a rank gets; `others` have results, too.
    pub(super) fn result_of(&mut self, rank: Rank, mut others: impl Iterator<Item = Rank>) -> Rank {
        let other = others.find(|other| *other != rank);
        other.filter(|_| self.saboteur == Saboteur::ForeignResult && self.strikes()).unwrap_or(rank)
    }

    /// Which item's tensor a rank submits for one.
    pub(super) fn hands_over(&mut self, rank: Rank, workload: &Workload, item: usize) -> usize {
        let wanted = &workload.items[item];
        let Kind::Message(pair, _) = wanted.kind else { return item };
        let like = |(index, other): &(usize, &Item)| {
            let alike = matches!(other.kind, Kind::Message(others, _) if others == pair) && other.place == wanted.place;
            *index != item && alike && other.elements_of(rank) > 0
        };
        let other = workload.items.iter().enumerate().find(like).map(|(index, _)| index);
        let confuses = self.saboteur == Saboteur::CrossedMessages && pair.from == rank;
        other.filter(|_| confuses && self.strikes()).unwrap_or(item)
    }

    fn reduce_twice(&mut self, plan: &mut Plan) {
        let rounds = plan.sub_schedules.iter_mut().flat_map(|sub_schedule| &mut sub_schedule.rounds);
        for round in rounds {
            let reduce = round.steps.iter().position(|step| matches!(step, Step::Reduce { .. }));
            if let Some(at) = reduce
                && self.strikes()
            {
                round.steps.insert(at, round.steps[at]);
                return;
            }
        }
    }

    /// Finds two parts of one local rank's own result, of equal length and from different ranks.
    fn swap_blocks(&mut self, admission: &mut Admission) {
        let slices = &mut Arc::make_mut(&mut admission.plan).layout.slices;
        let of_local = |slice: &Slice| match slice.target {
            Target::One(rank) => admission.local_ranks.contains(&rank),
            Target::EveryRank => false,
        };
        for first in 0..slices.len() {
            let (a, rest) = (slices[first], first + 1..slices.len());
            let alike = |b: &Slice| {
                (a.target, a.tensor, a.span.len) == (b.target, b.tensor, b.span.len) && a.source != b.source
            };
            let Some(second) = rest.clone().find(|second| of_local(&a) && alike(&slices[*second])) else { continue };
            if self.strikes() {
                let start = slices[second].output_start;
                slices[second].output_start = std::mem::replace(&mut slices[first].output_start, start);
                return;
            }
        }
    }

    fn publish_early(&mut self, plan: &mut Plan) {
        for sub_schedule in &mut plan.sub_schedules {
            let finish = |round: &Round| round.steps.iter().position(|step| matches!(step, Step::Finish { .. }));
            let found = sub_schedule.rounds.iter().enumerate().find_map(|(index, round)| Some((index, finish(round)?)));
            let Some((index, at)) = found else { continue };
            let Step::Finish { register, .. } = sub_schedule.rounds[index].steps[at] else { continue };
            let publishes = |step: &Step| matches!(step, Step::Publish { from, .. } if *from == register);
            let Some(last) = sub_schedule.rounds.get_mut(index + 1) else { continue };
            let Some(publish) = last.steps.iter().position(publishes) else { continue };
            if self.strikes() {
                let publish = last.steps.remove(publish);
                sub_schedule.rounds[index].steps.insert(at + 1, publish);
                return;
            }
        }
    }

    fn note_removal(&mut self, from: usize, intent: &Intent) {
        if let Intent::Ready(request) = intent
            && let Collective::RemoveSet { set } = request.collective
        {
            self.removals.insert((from, set), request.name.clone());
        }
    }

    /// Announces the request that was cached before under its number.
    fn repeat_wrongly(&mut self, from: usize, intent: &mut Intent) {
        let Intent::Remember { slot, request } = intent else { return };
        let (slot, request) = (*slot, request.clone());
        let name = request.name.clone();
        let before = self.cached.insert((from, slot), request);
        if before.is_some_and(|before| before.name == name) && self.strikes() {
            *intent = Intent::Again { slot };
        }
    }

    fn is_reduced_group(&mut self, message: &Control) -> bool {
        match message {
            Control::Announce { announcements } => {
                for announcement in announcements {
                    if let Intent::Ready(Request { set, name, group: Some(group), .. }) = &announcement.intent {
                        self.groups.insert((*set, name.clone()), group.name.clone());
                    }
                }
                false
            }
            Control::Reject { set, name, .. } => {
                self.reduced_groups.extend(self.groups.get(&(*set, name.clone())).cloned());
                false
            }
            Control::Order(order) => order.tensors.iter().any(|tensor| {
                let group = self.groups.get(&(order.set, tensor.name.clone()));
                group.is_some_and(|group| self.reduced_groups.contains(group))
            }),
            _ => false,
        }
    }

    fn strikes(&mut self) -> bool {
        let now = !self.struck && self.patience == 0;
        self.patience = self.patience.saturating_sub(1);
        self.struck |= now;
        now
    }
}
