//! The state of a link to one peer: credit for outgoing chunks, and the buffer of early incoming chunks.
//!
//! **Why credit cannot deadlock.** A chunk waits only while its receiver is not known to have admitted the operation
//! and credit is lacking. The receiver admits all its operations without waiting for any chunk. It sends `Admitted`
//! when it holds, or later receives, an early chunk of the operation, or when the plan has a chunk that exceeds the
//! credit. So if early chunks are outstanding, their `Admitted` arrives and returns the credit. If none are, the chunk
//! fits into the full credit and is sent. If it is larger than the full credit, the receiver knows that and sends
//! `Admitted` unasked. `Admitted` is cumulative over all operations in which both take part, because each side admits
//! in ascending order.

use std::collections::{BTreeMap, VecDeque};

use ronde_wire::frame::{CHUNK_HEADER_BYTES, Chunk, HEADER_BYTES};
use ronde_wire::{Epoch, OpId, Seq};

use super::violation::Violation;

#[derive(Debug, Default)]
pub(super) struct Link {
    /// Whether the caller was asked to open it.
    pub(super) open_requested: bool,
    /// The credit from the peer's hello, while the link is up.
    credit_bytes: Option<u64>,
    /// Bytes sent early, by operation for which no `Admitted` has arrived.
    sent_early: BTreeMap<Seq, u64>,
    sent_early_bytes: u64,
    /// The last operation that the peer reported as admitted; its epoch may be one that has yet to begin here.
    peer_admitted: OpId,
    /// The last operation that was reported to the peer as admitted.
    notified: Seq,
    /// The operation to report once the link is up.
    pending_notice: Seq,
    /// Chunks passed to the port and not yet reported as sent, in order, of all epochs.
    in_flight: VecDeque<InFlight>,
    held: Held,
}

/// A chunk in the port's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) epoch: Epoch,
    pub(super) seq: Seq,
    pub(super) sub_schedule: u32,
    pub(super) round: u32,
}

/// Chunks of operations that are not yet admitted, all of one epoch.
#[derive(Debug, Default)]
struct Held {
    epoch: Epoch,
    chunks: BTreeMap<Seq, Vec<Chunk>>,
    bytes: u64,
}

/// Whether a chunk may be sent now, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendPermission {
    /// The peer has admitted the operation.
    Admitted,
    /// On credit.
    Early,
    /// Not yet.
    Wait,
}

impl Link {
    /// The link is new. Returns the operation to report to the peer as admitted.
    pub(super) fn handle_up(&mut self, credit_bytes: u64) -> Option<Seq> {
        self.handle_down();
        self.open_requested = true;
        self.credit_bytes = Some(credit_bytes);
        self.notify(self.pending_notice)
    }

    /// The link is lost, and with it everything in flight; the engine learns of it separately. The peer reports its
    /// admissions again on the next link, unless it is another process by then.
    pub(super) fn handle_down(&mut self) {
        *self = Self { pending_notice: self.pending_notice.max(self.notified), ..Self::default() };
    }

    /// Whether an operation was reported to the peer as admitted.
    pub(super) fn was_notified(&self, seq: Seq) -> bool {
        seq <= self.notified
    }

    /// Returns the admission to report to the peer now; without a link it is reported later.
    pub(super) fn notify(&mut self, seq: Seq) -> Option<Seq> {
        if self.credit_bytes.is_none() {
            self.pending_notice = self.pending_notice.max(seq);
            return None;
        }
        let newly_admitted = seq > self.notified;
        self.notified = self.notified.max(seq);
        newly_admitted.then_some(seq)
    }

    /// An epoch begins: drops all state of other epochs except early chunks of the new one.
    pub(super) fn begin(&mut self, epoch: Epoch) {
        self.sent_early.clear();
        self.sent_early_bytes = 0;
        self.notified = Seq(0);
        self.pending_notice = Seq(0);
        if self.held.epoch < epoch {
            self.held = Held { epoch, ..Held::default() };
        }
    }

    pub(super) fn handle_admitted(&mut self, now: Epoch, admitted: OpId) {
        self.peer_admitted = self.peer_admitted.max(admitted);
        while admitted.epoch == now
            && let Some(entry) = self.sent_early.first_entry()
            && *entry.key() <= admitted.seq
        {
            self.sent_early_bytes -= entry.remove();
        }
    }

    /// How a chunk of an operation of the current epoch may be sent.
    pub(super) fn send_permission(&self, now: Epoch, seq: Seq, data_bytes: usize) -> SendPermission {
        let admitted = self.peer_admitted.epoch == now && seq <= self.peer_admitted.seq;
        match self.credit_bytes {
            None => SendPermission::Wait,
            Some(_) if admitted => SendPermission::Admitted,
            Some(credit) if self.sent_early_bytes + cost_bytes(data_bytes) <= credit => SendPermission::Early,
            Some(_) => SendPermission::Wait,
        }
    }

    /// Records a chunk that was passed to the port.
    pub(super) fn note_sent(&mut self, chunk: &Chunk) {
        let (epoch, seq, header) = (chunk.epoch, chunk.seq, chunk.header);
        self.in_flight.push_back(InFlight { epoch, seq, sub_schedule: header.sub_schedule, round: header.round });
        if chunk.early {
            let cost = cost_bytes(chunk.data.len());
            *self.sent_early.entry(seq).or_default() += cost;
            self.sent_early_bytes += cost;
        }
    }

    pub(super) fn take_in_flight(&mut self) -> Option<InFlight> {
        self.in_flight.pop_front()
    }

    /// Holds a chunk until its operation is admitted. A chunk of a newer epoch shows that the peer has left the older
    /// one, so the held chunks of that are dropped and the bound covers one epoch.
    pub(super) fn hold(&mut self, chunk: Chunk, granted_bytes: u64) -> Result<(), Violation> {
        if !chunk.early {
            return Err(Violation::Unadmitted { seq: chunk.seq });
        }
        if chunk.epoch > self.held.epoch {
            self.held = Held { epoch: chunk.epoch, ..Held::default() };
        }
        let more_bytes = cost_bytes(chunk.data.len());
        if self.held.bytes + more_bytes > granted_bytes {
            return Err(Violation::Credit { held_bytes: self.held.bytes, more_bytes, granted_bytes });
        }
        self.held.bytes += more_bytes;
        self.held.chunks.entry(chunk.seq).or_default().push(chunk);
        Ok(())
    }

    /// Takes the held chunks of an operation, in the order of arrival.
    pub(super) fn release(&mut self, epoch: Epoch, seq: Seq) -> Vec<Chunk> {
        if self.held.epoch != epoch {
            return Vec::new();
        }
        let chunks = self.held.chunks.remove(&seq).unwrap_or_default();
        self.held.bytes -= chunks.iter().map(|chunk| cost_bytes(chunk.data.len())).sum::<u64>();
        chunks
    }

    /// The epoch of the held chunks.
    pub(super) fn held_epoch(&self) -> Epoch {
        self.held.epoch
    }

    /// The first operation before `seq` with held chunks: the sidecar takes no part in it, as a later one was admitted.
    pub(super) fn held_before(&self, epoch: Epoch, seq: Seq) -> Option<Seq> {
        let first = self.held.chunks.keys().next().copied()?;
        (self.held.epoch == epoch && first < seq).then_some(first)
    }

    /// Drops the held chunks of operations up to `last` and returns their number.
    pub(super) fn drop_held_until(&mut self, epoch: Epoch, last: Seq) -> u64 {
        let mut dropped = 0;
        while self.held.epoch == epoch
            && let Some(entry) = self.held.chunks.first_entry()
            && *entry.key() <= last
        {
            let chunks = entry.remove();
            dropped += chunks.len() as u64;
            self.held.bytes -= chunks.iter().map(|chunk| cost_bytes(chunk.data.len())).sum::<u64>();
        }
        dropped
    }

    pub(super) fn drop_held(&mut self) {
        self.held.chunks.clear();
        self.held.bytes = 0;
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.held.bytes
    }
}

/// The credit that a chunk costs: its data and its headers, so that empty chunks are bounded as well.
pub(super) const fn cost_bytes(data_bytes: usize) -> u64 {
    (HEADER_BYTES + CHUNK_HEADER_BYTES + data_bytes) as u64
}
