//! Messages from the coordinator.

use ronde_wire::{Ascent, Control, Enclosed, Epoch, OpId, Seq, SidecarIndex, SidecarSet};

use super::{Path, Relay, RelayEvent, RelayOutput, is_for_one_link};

impl Relay {
    /// At the coordinator: sends a message to other sidecars, in one frame per branch.
    pub(crate) fn send_down(
        &self,
        out: &mut RelayOutput<'_>,
        to: &SidecarSet,
        OpId { epoch, seq }: OpId,
        message: &Control,
    ) {
        let mut enclosed = None;
        for branch in self.tree.branches() {
            let meant = branch.all.and(to);
            if meant.is_empty() {
                continue;
            }
            if meant == [branch.child].into_iter().collect() {
                out.send(branch.child, epoch, seq, message.clone());
                continue;
            }
            let message = enclosed.get_or_insert_with(|| Enclosed::new(message)).clone();
            let to = (meant != branch.all).then_some(meant);
            out.send(branch.child, epoch, seq, Control::Descending { to, message });
        }
    }

    /// At the coordinator: requests that the parent of a sidecar closes its link.
    pub(crate) fn expel(&mut self, out: &mut RelayOutput<'_>, sidecar: SidecarIndex, reason: &str) -> Vec<RelayEvent> {
        let Some(parent) = self.tree.parent_of(sidecar) else { return Vec::new() };
        let reason = super::cut(reason);
        let expel = Control::Expel { sidecar, reason: reason.clone() };
        self.send_down(out, &[parent].into_iter().collect(), OpId { epoch: self.epoch, seq: Seq(0) }, &expel);
        vec![RelayEvent::Down { peers: self.take_joined(sidecar), culprit: sidecar, reason }]
    }

    pub(super) fn descend(
        &mut self,
        out: &mut RelayOutput<'_>,
        id: OpId,
        to: Option<SidecarSet>,
        message: &Enclosed,
    ) -> Result<Vec<RelayEvent>, String> {
        self.epoch = id.epoch;
        let mut here = *self.tree.below();
        here.insert(self.me);
        let to = to.unwrap_or(here);
        if !to.is_within(&here) {
            return Err("relays a message for sidecars elsewhere in the tree".to_owned());
        }
        for branch in self.tree.branches() {
            let meant = branch.all.and(&to);
            let open = self.children.get(&branch.child).is_some_and(|link| link.generation.is_some());
            if open && !meant.is_empty() {
                out.stats.relayed += 1;
                let to = (meant != branch.all).then_some(meant);
                out.send(branch.child, id.epoch, id.seq, Control::Descending { to, message: message.clone() });
            }
        }
        if !to.contains(self.me) {
            return Ok(Vec::new());
        }
        let message = message.open().map_err(|error| format!("relays {error}"))?;
        self.receive_from_coordinator(out, id, message)
    }

    pub(super) fn path_up(&mut self, out: &mut RelayOutput<'_>, epoch: Epoch, generation: u64) -> Vec<RelayEvent> {
        let Some(parent) = self.parent() else { return Vec::new() };
        let events = self.lose_path(out, parent, super::RENEWED);
        self.epoch = epoch;
        if self.is_deep() {
            self.path = Path::Joining(generation);
            let joined = Ascent::Joined { sidecar: self.me, generation, lanes: self.lanes };
            let ascents = vec![joined];
            out.send(parent, Epoch(0), Seq(0), Control::Ascending { generation, ascents });
        } else {
            self.path = Path::Up(generation);
            self.open_branches(out);
        }
        events
    }

    pub(super) fn path_down(
        &mut self,
        out: &mut RelayOutput<'_>,
        culprit: SidecarIndex,
        reason: &str,
    ) -> Result<Vec<RelayEvent>, String> {
        if !self.tree.is_above(culprit) {
            return Err(format!("blames the loss of the coordinator on {culprit}, which is not above it in the tree"));
        }
        Ok(self.lose_path(out, culprit, reason))
    }

    /// Handles a message of the coordinator for this sidecar.
    pub(super) fn receive_from_coordinator(
        &mut self,
        out: &mut RelayOutput<'_>,
        id: OpId,
        message: Control,
    ) -> Result<Vec<RelayEvent>, String> {
        match (message, self.tree.root()) {
            (Control::Welcome { sidecar, generation }, Some(peer)) => {
                if sidecar != self.me || self.path != Path::Joining(generation) {
                    out.stats.stale_frames += 1;
                    return Ok(Vec::new());
                }
                self.path = Path::Up(generation);
                self.open_branches(out);
                Ok(vec![RelayEvent::Up { peer, lanes: 0 }])
            }
            (message, _) if is_for_one_link(&message) => {
                Err("relays a message that is valid on one link only".to_owned())
            }
            _ if !self.is_joined() => {
                out.stats.stale_frames += 1;
                Ok(Vec::new())
            }
            (Control::Expel { sidecar, reason }, _) if self.children.contains_key(&sidecar) => {
                Ok(vec![RelayEvent::Expel { child: sidecar, reason }])
            }
            (message, Some(from)) => Ok(vec![RelayEvent::Message { from, id, message }]),
            (_, None) => Ok(Vec::new()),
        }
    }
}
