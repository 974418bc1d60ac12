//! What an executor knows of one peer: credit on the way out, the early buffer on the way in.
//!
//! **Why credit cannot deadlock.** A chunk waits only while its receiver is not known to have admitted the operation and
//! credit is lacking. The receiver admits every operation that concerns it without waiting for any chunk. It says so
//! when it holds, or later gets, an early chunk of the operation, or when the plan has a chunk that no credit covers. So
//! if something is outstanding, its `Admitted` comes and gives the credit back; if nothing is, the chunk fits into the
//! whole credit and goes; and if it is larger than that, the receiver knows the same and speaks unasked. `Admitted` is
//! cumulative over all operations in which both take part, because each side admits in ascending order.

use std::collections::{BTreeMap, VecDeque};

use ronde_wire::frame::{CHUNK_HEADER_BYTES, Chunk, HEADER_BYTES};
use ronde_wire::{Epoch, OpId, Seq};

use super::violation::Violation;

#[derive(Debug, Default)]
pub(super) struct Link {
    /// Whether the caller was asked to open it.
    pub(super) open_requested: bool,
    /// What the peer's hello grants, while the link is up.
    credit_bytes: Option<u64>,
    /// Bytes sent early, by operation of which no `Admitted` was heard.
    sent_early: BTreeMap<Seq, u64>,
    sent_early_bytes: u64,
    /// Up to where the peer has admitted, by its last word; that may be of an epoch that has yet to begin here.
    peer_admitted: OpId,
    /// Up to where the peer was told that this side has admitted.
    notified: Seq,
    /// What it is to be told once the link is up.
    pending_notice: Seq,
    /// Chunks given to the port and not yet reported as sent, in order; over all epochs, as the port reports them all.
    in_flight: VecDeque<InFlight>,
    held: Held,
}

/// A chunk in the port's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlight {
    pub(super) epoch: Epoch,
    pub(super) seq: Seq,
    pub(super) strand: u32,
    pub(super) round: u32,
}

/// Chunks of operations that are not yet admitted, all of one epoch.
#[derive(Debug, Default)]
struct Held {
    epoch: Epoch,
    chunks: BTreeMap<Seq, Vec<Chunk>>,
    bytes: u64,
}

/// How a chunk may be sent now.
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
    /// The link is new; gives what the peer is to be told.
    pub(super) fn handle_up(&mut self, credit_bytes: u64) -> Option<Seq> {
        self.handle_down();
        self.open_requested = true;
        self.credit_bytes = Some(credit_bytes);
        self.notify(self.pending_notice)
    }

    /// What was in flight is lost, and so is what it was sent for; the engine hears of it by other ways. What the peer has
    /// admitted it says again on the next link, unless it is another process by then, which knows of nothing.
    pub(super) fn handle_down(&mut self) {
        *self = Self { pending_notice: self.pending_notice.max(self.notified), ..Self::default() };
    }

    /// Whether the peer was told that an operation is admitted.
    pub(super) fn was_notified(&self, seq: Seq) -> bool {
        seq <= self.notified
    }

    /// Whether the peer is to be told of an admission now; when the link is not up, it will be.
    pub(super) fn notify(&mut self, seq: Seq) -> Option<Seq> {
        if self.credit_bytes.is_none() {
            self.pending_notice = self.pending_notice.max(seq);
            return None;
        }
        let newly_admitted = seq > self.notified;
        self.notified = self.notified.max(seq);
        newly_admitted.then_some(seq)
    }

    /// Everything of other epochs is dropped but what came early for the new one.
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

    /// Notes a chunk that was given to the port.
    pub(super) fn note_sent(&mut self, chunk: &Chunk) {
        let (epoch, seq, header) = (chunk.epoch, chunk.seq, chunk.header);
        self.in_flight.push_back(InFlight { epoch, seq, strand: header.strand, round: header.round });
        if chunk.early {
            let cost = cost_bytes(chunk.data.len());
            *self.sent_early.entry(seq).or_default() += cost;
            self.sent_early_bytes += cost;
        }
    }

    pub(super) fn take_in_flight(&mut self) -> Option<InFlight> {
        self.in_flight.pop_front()
    }

    /// Keeps a chunk until its operation is admitted. A chunk of a newer epoch shows that the peer has left the older
    /// one, so that what is held for that is of no use any more and the bound holds for both together.
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

    /// What is held for an operation, in the order in which it came.
    pub(super) fn release(&mut self, epoch: Epoch, seq: Seq) -> Vec<Chunk> {
        if self.held.epoch != epoch {
            return Vec::new();
        }
        let chunks = self.held.chunks.remove(&seq).unwrap_or_default();
        self.held.bytes -= chunks.iter().map(|chunk| cost_bytes(chunk.data.len())).sum::<u64>();
        chunks
    }

    /// The epoch of which chunks are held.
    pub(super) fn held_epoch(&self) -> Epoch {
        self.held.epoch
    }

    /// Whether a chunk of an operation that concerns nobody here is held: it was skipped by a later admission.
    pub(super) fn held_before(&self, epoch: Epoch, seq: Seq) -> Option<Seq> {
        let first = self.held.chunks.keys().next().copied()?;
        (self.held.epoch == epoch && first < seq).then_some(first)
    }

    /// Drops what is held for operations up to one, and says how many chunks that are.
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

/// What a chunk costs of the credit: its data and its headers, so that empty chunks are bounded as well.
pub(super) const fn cost_bytes(data_bytes: usize) -> u64 {
    (HEADER_BYTES + CHUNK_HEADER_BYTES + data_bytes) as u64
}
