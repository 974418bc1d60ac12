//! Manages the control links: opens them, handles received frames, and sends messages.

use std::sync::Arc;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::messages::FromSidecar;
use ronde_engine::Event;
use ronde_transport::{DownReason, Identity, Outgoing, Port, PortEvent, Role, SendError};
use ronde_wire::{Control, Epoch, Failure, FrameKind, Seq, SidecarIndex};

use super::Driver;
use crate::operation::lanes::LaneCommand;

impl Driver {
    /// Opens the links of the control tree.
    pub(crate) fn open_control_links(&mut self) {
        let neighbours: Vec<_> =
            self.engine.control_parent().into_iter().chain(self.engine.control_children()).collect();
        for peer in neighbours {
            if self.control_role(peer) == Role::Dial {
                FromSidecar::Dialling { peer: peer.0 }.send();
            }
            self.links.control.open(peer, self.control_role(peer));
        }
    }

    pub(super) fn install_identity(&mut self, identity: &Arc<Identity>) {
        if let Err(error) = self.links.control.install_identity(Arc::clone(identity)) {
            tracing::warn!(%error, "the control port keeps its certificate");
        }
        if let Some(Err(error)) = self.links.web_tls.as_ref().map(|tls| tls.install_identity(identity)) {
            tracing::warn!(%error, "gRPC-Web keeps its certificate");
        }
        self.send_to_lanes(|| LaneCommand::Identity(Arc::clone(identity)));
    }

    pub(super) fn handle_port(&mut self, event: PortEvent) {
        match event {
            PortEvent::Up { peer, hello } => {
                if let Some(path) = self.links.control.path(peer) {
                    FromSidecar::Linked { peer: peer.0, address: path.peer_address.ip() }.send();
                }
                self.handle(Event::LinkUp { peer, lanes: hello.lanes });
            }
            PortEvent::Frame { from, frame } if frame.header.kind == FrameKind::Control => {
                match Control::from_frame(&frame) {
                    Ok(message) => {
                        let (epoch, seq) = (frame.header.epoch, frame.header.seq);
                        self.handle(Event::Control { from, epoch, seq, message });
                    }
                    Err(error) => self.disconnect(from, &error.to_string()),
                }
            }
            PortEvent::Frame { from, frame } => {
                self.disconnect(from, &format!("a {:?} frame on the control connection", frame.header.kind));
            }
            PortEvent::Sent { .. } | PortEvent::StreamSent { .. } => {}
            PortEvent::Down { peer, reason } => {
                // A peer that closes before the first epoch is shutting down because the job is over; one that failed
                // reports its reason to the launcher itself.
                if self.memberships.is_elastic() {
                    let is_final = match reason {
                        DownReason::Unanswered(_) | DownReason::Refused(_) => true,
                        DownReason::Protocol(_) | DownReason::Expired(_) => !self.epoch.has_begun,
                        _ => false,
                    };
                    if is_final && self.control_role(peer) == Role::Dial {
                        self.report_unreachable(peer, &reason);
                    }
                } else if !self.epoch.has_begun {
                    self.liveness.note_peer_left();
                    if !matches!(reason, DownReason::ClosedByPeer(_)) {
                        self.fatal = Some(Code::PeerMissing.mark(&format!("{peer} did not connect: {reason}")));
                    }
                }
                let reason = reason.to_string();
                self.handle(Event::LinkDown { peer, reason });
            }
        }
    }

    pub(super) fn send(&mut self, to: SidecarIndex, epoch: Epoch, seq: Seq, message: Control) {
        let frame = Outgoing::Frame(message.into_frame(epoch, seq));
        let sent = match self.links.control.send(to, frame.clone()) {
            Err(SendError::NoLink(_)) => {
                self.links.control.open(to, self.control_role(to));
                self.links.control.send(to, frame)
            }
            sent => sent,
        };
        match sent {
            Ok(()) => self.backpressure.sent(to, self.links.control.queued_bytes(to)),
            Err(SendError::NoLink(_)) => {
                tracing::debug!(peer = to.0, "a control message is not sent: the link is gone");
            }
            // Every sidecar depends on control messages, so a peer that does not accept them is disconnected.
            Err(full @ SendError::Full { .. }) => self.disconnect(to, &full.to_string()),
        }
    }

    /// Returns whether this sidecar dials a peer. A sidecar dials its parent on the control tree.
    pub(super) fn control_role(&self, peer: SidecarIndex) -> Role {
        if self.engine.control_parent() == Some(peer) { Role::Dial } else { Role::Await }
    }

    pub(super) fn disconnect(&mut self, peer: SidecarIndex, reason: &str) {
        tracing::error!(peer = peer.0, reason = Failure::line(reason), "a peer broke the protocol");
        self.links.control.close(peer, reason);
        self.handle(Event::LinkDown { peer, reason: format!("protocol violation: {reason}") });
    }
}
