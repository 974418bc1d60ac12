//! Messages towards the coordinator.

use ronde_wire::limits::{ENCLOSED_BYTES_MAX, REASON_BYTES_MAX};
use ronde_wire::{Ascent, Control, Enclosed, Epoch, OpId, Seq, SidecarIndex};

use super::{Path, Relay, RelayEvent, RelayOutput, is_for_one_link};

impl Relay {
    /// Sends the collected items. Called when all pending messages are handled, so that items share frames.
    pub(crate) fn flush(&mut self, out: &mut RelayOutput<'_>) {
        let (Some(parent), Path::Up(generation)) = (self.parent(), self.path) else { return };
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for ascent in std::mem::take(&mut self.ascents) {
            let size = frame_bytes(&ascent);
            if bytes + size > ENCLOSED_BYTES_MAX && !batch.is_empty() {
                let ascents = std::mem::take(&mut batch);
                out.send(parent, Epoch(0), Seq(0), Control::Ascending { generation, ascents });
                bytes = 0;
            }
            bytes += size;
            batch.push(ascent);
        }
        if !batch.is_empty() {
            out.send(parent, Epoch(0), Seq(0), Control::Ascending { generation, ascents: batch });
        }
    }

    pub(super) fn enclose(&mut self, epoch: Epoch, seq: Seq, message: &Control) {
        let message = Enclosed::new(message);
        self.ascents.push(Ascent::Message { origin: self.me, epoch, seq, message });
    }

    pub(super) fn ascend(
        &mut self,
        out: &mut RelayOutput<'_>,
        child: SidecarIndex,
        generation: u64,
        ascents: Vec<Ascent>,
    ) -> Result<Vec<RelayEvent>, String> {
        if self.children.get(&child).and_then(|link| link.generation) != Some(generation) {
            out.stats.stale_frames += 1;
            return Ok(Vec::new());
        }
        ascents.iter().try_for_each(|ascent| self.check(child, ascent))?;
        let mut events = Vec::new();
        for ascent in ascents {
            if self.parent().is_some() {
                out.stats.relayed += 1;
                self.ascents.push(ascent);
            } else {
                events.extend(self.receive_ascent(out, ascent));
            }
        }
        Ok(events)
    }

    /// Checks that a child may send this item: it relays for sidecars below it, and, unless this is the coordinator,
    /// for itself.
    fn check(&self, child: SidecarIndex, ascent: &Ascent) -> Result<(), String> {
        let (about, itself) = match ascent {
            Ascent::Message { origin, .. } => (*origin, self.parent().is_some()),
            Ascent::Joined { sidecar, .. } => (*sidecar, self.parent().is_some()),
            Ascent::Lost { sidecar, .. } => (*sidecar, false),
        };
        let below = self.tree.branch(child).is_some_and(|branch| branch.all.contains(about));
        if !below || about == child && !itself {
            return Err(format!("sends a message for {about}, which is not below it in the tree"));
        }
        match ascent {
            Ascent::Lost { reason, .. } if reason.len() > REASON_BYTES_MAX => {
                Err(format!("gives a reason of {} bytes", reason.len()))
            }
            _ => Ok(()),
        }
    }

    /// Handles an item at the coordinator.
    fn receive_ascent(&mut self, out: &mut RelayOutput<'_>, ascent: Ascent) -> Vec<RelayEvent> {
        match ascent {
            Ascent::Joined { sidecar, generation, lanes } => {
                // Its parent reports the loss before the sidecar joins again; if that report was lost, this replaces
                // it.
                let mut events = self.lost(sidecar, super::RENEWED.to_owned());
                self.joined.insert(sidecar);
                self.send_down(
                    out,
                    &[sidecar].into_iter().collect(),
                    OpId { epoch: self.epoch, seq: Seq(0) },
                    &Control::Welcome { sidecar, generation },
                );
                events.push(RelayEvent::Up { peer: sidecar, lanes });
                events
            }
            Ascent::Lost { sidecar, reason } => self.lost(sidecar, reason),
            Ascent::Message { origin, .. } if !self.joined.contains(origin) => {
                out.stats.stale_frames += 1;
                Vec::new()
            }
            Ascent::Message { origin, epoch, seq, message } => vec![match message.open() {
                Ok(message) if is_for_one_link(&message) => {
                    let what = "sends the coordinator a message that is valid on one link only".to_owned();
                    RelayEvent::Violation { peer: origin, what }
                }
                Ok(message) => RelayEvent::Message { from: origin, id: OpId { epoch, seq }, message },
                Err(error) => RelayEvent::Violation { peer: origin, what: format!("sends {error}") },
            }],
        }
    }

    fn lost(&mut self, culprit: SidecarIndex, reason: String) -> Vec<RelayEvent> {
        let peers = self.take_joined(culprit);
        if peers.is_empty() { Vec::new() } else { vec![RelayEvent::Down { peers, culprit, reason }] }
    }
}

/// An upper bound of the encoded length.
fn frame_bytes(ascent: &Ascent) -> usize {
    let content = match ascent {
        Ascent::Message { message, .. } => message.bytes(),
        Ascent::Joined { .. } => 0,
        Ascent::Lost { reason, .. } => reason.len(),
    };
    content + ASCENT_HEAD_BYTES_MAX
}

/// Kind, sidecar, epoch, seq and length at their longest.
const ASCENT_HEAD_BYTES_MAX: usize = 40;
