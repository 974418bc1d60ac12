//! Planted bugs: what a wrong sidecar would do, done to the messages, plans and answers of a right one. Each of them must
//! be caught by the check that is there for it.

use ronde_collectives::plan::Step;
use ronde_engine::Admission;
use ronde_wire::frame::Chunk;
use ronde_wire::{Control, Epoch, Tuning};

use super::link::Message;

/// A planted bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Saboteur {
    /// An order or a rejection never reaches one sidecar.
    LostResponse,
    /// One contribution is reduced twice.
    DoubleCount,
    /// One sidecar gets the operations of two sets in the other order.
    CrossedOrders,
    /// Chunks of an ended epoch are taken for chunks of the current one.
    StaleEpoch,
    /// An answer never reaches its worker.
    ForgottenWaiter,
    /// One sidecar uses another tuning than the ordered one.
    LocalTuning,
}

impl Saboteur {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::LostResponse,
        Self::DoubleCount,
        Self::CrossedOrders,
        Self::StaleEpoch,
        Self::ForgottenWaiter,
        Self::LocalTuning,
    ];

    /// The saboteur of a name as [`Debug`] writes it.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|saboteur| format!("{saboteur:?}") == name)
    }
}

/// A saboteur at work: it waits for some opportunities and then strikes.
#[derive(Debug)]
pub(super) struct Sabotage {
    pub(super) saboteur: Saboteur,
    patience: u32,
    pub(super) struck: bool,
}

impl Sabotage {
    pub(super) fn new(saboteur: Saboteur, patience: u32) -> Self {
        Self { saboteur, patience, struck: false }
    }

    /// A control message that is about to be sent; false when it vanishes. `ahead` is what is on its way already.
    pub(super) fn pass<'a>(&mut self, message: &mut Control, ahead: impl Iterator<Item = &'a mut Message>) -> bool {
        match (self.saboteur, message) {
            (Saboteur::LostResponse, Control::Order(_) | Control::Reject { .. }) => !self.strikes(),
            (Saboteur::LocalTuning, Control::Order(order)) => {
                if self.strikes() {
                    order.tuning = Tuning { window: order.tuning.window % 8 + 1, ..order.tuning };
                }
                true
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
                true
            }
            _ => true,
        }
    }

    /// A plan that is about to be performed.
    pub(super) fn alter(&mut self, admission: &mut Admission) {
        if self.saboteur != Saboteur::DoubleCount {
            return;
        }
        let rounds = admission.plan.strands.iter_mut().flat_map(|strand| &mut strand.rounds);
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

    /// A chunk that arrives in an epoch.
    pub(super) fn restamp(&mut self, chunk: &mut Chunk, now: Epoch) {
        if self.saboteur == Saboteur::StaleEpoch && chunk.epoch < now {
            self.struck = true;
            chunk.epoch = now;
        }
    }

    /// Whether an answer gets lost.
    pub(super) fn forgets(&mut self) -> bool {
        self.saboteur == Saboteur::ForgottenWaiter && self.strikes()
    }

    fn strikes(&mut self) -> bool {
        let now = !self.struck && self.patience == 0;
        self.patience = self.patience.saturating_sub(1);
        self.struck |= now;
        now
    }
}
