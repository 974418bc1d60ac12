//! The executor: performs the plans of admitted operations on one lane, chunk by chunk.
//!
//! **What is touched how often.** In bytes, all members together, where every rank's tensor has `B` bytes (with scatter: the
//! root's), `N` ranks are on `n` members, and `p` is the largest power of two that is not above `n`. A byte that is read is
//! copied once from the input's memory into a register, one that is written once from a register into a result; reducing
//! reads two bytes and writes one, an n-ary reduction reads all operands and writes one of `N`. What is sent is shared with
//! the transport, what is received stays where it was received: copies are made only where a plan writes to what a
//! transport still holds, which no plan does in steady state. Where a member has several ranks, or there is a prescale, a
//! pairwise contribution passes through blocks that stay in a first-level cache.
//!
//! | work | read | reduced | sent | written |
//! |---|---|---|---|---|
//! | all-reduce, ring | N B | (n-1) B | 2 (n-1) B | n B |
//! | all-reduce, recursive doubling | N B | (p log2 p + n-p) B | (p log2 p + 2 (n-p)) B | n B |
//! | all-reduce, halving-doubling | N B | (n-1) B | 2 (n-1) B | n B |
//! | coded; (n+1) B are encoded, 2 n B decoded | N B | (n-1) B | 2 (n-1) B, encoded | n B |
//! | n-ary | N B | N B | (N/n + 1) (n-1) B | n B |
//! | two-pass; N B are measured | 2 N B | N B | (N/n + 1) (n-1) B | n B |
//! | adaptive; N B are measured | 2 N B | N B | (2 N/n + 1) (n-1) B | n B |
//! | reduce-scatter, reduce | N B | (n-1) B | (n-1) B | B |
//! | broadcast | B | 0 | (n-1) B | n B |
//! | all-gather | N B | 0 | (n-1) N B | n N B |
//! | gather | N B | 0 | what is not at the root | N B |
//! | scatter | B | 0 | what is not for the root's member | B |
//! | all-to-all | N B | 0 | what is not for the own member | N B |
//!
//! An average, or a postscale, reads and writes a reduced byte once more where it is complete: `B` in all, and `p B` with
//! recursive doubling. A decoded byte is written to a register before it is reduced or copied to a result.

mod arithmetic;
mod inputs;
mod link;
mod nary;
mod operation;
mod plugin_steps;
mod register;
mod sizes;
mod stats;
mod steps;
mod strand;
#[cfg(test)]
mod tests;
mod violation;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_wire::frame::Chunk;
use ronde_wire::{Epoch, Lane, OpId, Seq, SidecarIndex};

use crate::event::Admission;
use crate::memory::Memory;
use arithmetic::StepError;
use link::{Link, SendPermission};
use operation::{Operation, OperationProgress};
use register::Buffers;

pub use ronde_wire::frame::ROUND_TAKEN;
pub use stats::{ExecutorStats, PrivateBytes};
pub use violation::Violation;

/// What an executor is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorConfig {
    /// The sidecar.
    pub me: SidecarIndex,
    /// The lane.
    pub lane: Lane,
    /// What this sidecar's hello grants each peer on this lane: bytes of early chunks, headers included.
    pub early_grant_bytes: u64,
}

/// Something to be done by the data thread that owns an executor.
#[derive(Debug)]
pub enum ExecutorAction {
    /// A newly admitted operation needs a link to this peer: to send, to receive or both. Once for each peer until its
    /// link is down.
    Open {
        /// The peer.
        peer: SidecarIndex,
    },
    /// Give a chunk to the port, and report it with [`Executor::handle_sent`] when it has left the port's queue.
    Send {
        /// The receiver; its link is up.
        to: SidecarIndex,
        /// The chunk.
        chunk: Chunk,
    },
    /// Tell a peer that this side has admitted everything up to an operation.
    Admitted {
        /// The receiver.
        to: SidecarIndex,
        /// The epoch.
        epoch: Epoch,
        /// The last admitted operation.
        seq: Seq,
    },
    /// This lane's part of an operation is complete: everything is received and published, all that was sent has left the
    /// port's queue.
    Done {
        /// The epoch.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
    },
    /// An operation cannot be performed here.
    Failed {
        /// The epoch.
        epoch: Epoch,
        /// The operation.
        seq: Seq,
        /// Why.
        reason: String,
        /// Whether a plugin is at fault.
        plugin: bool,
    },
    /// A chunk that was held until its operation was admitted turned out to be wrong: close the link, as for an error of
    /// [`Executor::handle_chunk`].
    Disconnect {
        /// The peer.
        peer: SidecarIndex,
        /// What it did.
        violation: Violation,
    },
    /// A piece of work was done that needs nothing from outside. Poll again, after a look at what else is to be done.
    Worked {
        /// For which operation, and what it was; `None` for the end of a part of one.
        work: Option<(Seq, Phase)>,
    },
}

/// The kind of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The local ranks' tensors were read, and what is to be reduced of them was, among themselves.
    ReadInput,
    /// Members' values were reduced, or finished.
    Reduce,
    /// A codec encoded or decoded.
    Code,
    /// A part of a result was written.
    CopyResult,
}

/// Performs admitted operations on one lane. Pure: it is told what happened (`handle_*`) and says what to do
/// ([`poll_action`](Self::poll_action)).
///
/// Operations overlap freely and take turns, so that a small one is not stuck behind a large one. Chunks of operations
/// that are not admitted yet are held within what was granted to their sender, chunks that come before their round are
/// parked within the bound given in `operation.rs`; both are taken at once, so the lane never stops being read.
///
/// Chunks of an older epoch are dropped. Those of a newer one are held like those of an operation that is not admitted:
/// the peer may have heard earlier that the epoch began.
#[derive(Debug)]
pub struct Executor {
    config: ExecutorConfig,
    /// The newest epoch that began here.
    epoch: Epoch,
    /// Whether it has not ended.
    running: bool,
    /// Everything that concerns this sidecar is admitted up to here.
    admitted: Seq,
    /// Ascending by seq.
    operations: Vec<Operation>,
    /// Operations that failed here: their chunks are dropped. Each of them ends the epoch or is cancelled, so there are few.
    failed: BTreeSet<Seq>,
    /// Chunks up to here may be of operations that were dropped.
    withdrawn: Seq,
    /// The operation that was served last: the next one is first in turn.
    served: Seq,
    links: BTreeMap<SidecarIndex, Link>,
    outbox: VecDeque<ExecutorAction>,
    buffers: Buffers,
    stats: ExecutorStats,
}

impl Executor {
    /// An executor before the first epoch.
    #[must_use]
    pub fn new(config: ExecutorConfig) -> Self {
        Self {
            config,
            epoch: Epoch(0),
            running: false,
            admitted: Seq(0),
            operations: Vec::new(),
            failed: BTreeSet::new(),
            withdrawn: Seq(0),
            served: Seq(0),
            links: BTreeMap::new(),
            outbox: VecDeque::new(),
            buffers: Buffers::default(),
            stats: ExecutorStats::default(),
        }
    }

    /// An epoch begins: everything of other epochs is dropped. An epoch that is not newer than the last one is ignored.
    pub fn handle_epoch(&mut self, epoch: Epoch) {
        if epoch <= self.epoch {
            return;
        }
        self.drop_operations();
        (self.epoch, self.running, self.admitted, self.served) = (epoch, true, Seq(0), Seq(0));
        self.withdrawn = Seq(0);
        for link in self.links.values_mut() {
            link.begin(epoch);
        }
    }

    /// The epoch is over: its operations are dropped where they stand.
    pub fn handle_epoch_end(&mut self, epoch: Epoch) {
        if epoch != self.epoch {
            return;
        }
        self.running = false;
        self.drop_operations();
        for link in self.links.values_mut().filter(|link| link.held_epoch() <= epoch) {
            link.drop_held();
        }
    }

    /// A link to a peer is up. Its hello grants this side so many bytes of early chunks on this lane.
    pub fn handle_link_up(&mut self, peer: SidecarIndex, credit_bytes: u64) {
        let pending_notice = self.link(peer).handle_up(credit_bytes);
        self.push_admitted(peer, pending_notice);
    }

    /// A link is gone, and with it what was in flight. Operations with the peer stand still until their epoch ends.
    pub fn handle_link_down(&mut self, peer: SidecarIndex) {
        self.link(peer).handle_down();
        self.outbox.retain(|action| !matches!(action, ExecutorAction::Send { to, .. } | ExecutorAction::Admitted { to, .. } if *to == peer));
    }

    /// An operation is to be performed; strictly in order of seq. One of another epoch is ignored.
    pub fn handle_admission(&mut self, admission: Arc<Admission>) {
        let seq = admission.seq;
        if !self.running || admission.epoch != self.epoch || seq <= self.admitted {
            return;
        }
        self.admitted = seq;
        match Operation::new(admission, self.config.lane) {
            Ok(operation) => {
                let peers = operation.peers(self.config.early_grant_bytes);
                self.operations.push(operation);
                peers.all.iter().for_each(|peer| self.open(*peer));
                self.release_held(seq);
                peers.beyond_credit.iter().for_each(|peer| self.notify_admitted(*peer, seq));
            }
            Err(error) => {
                let failed = self.fail(seq, &error);
                self.outbox.push_back(failed);
            }
        }
    }

    /// Operations are dropped where they stand, and nothing up to `last` will be admitted any more. What still comes of an
    /// operation up to there that is not here is dropped. Gives those of `dropped` that were not done here.
    ///
    /// Who has sent such chunks on credit is told that everything up to `last` is admitted: that gives the credit back. It is
    /// not given back on the sender's side alone, as the receiver may hold the chunks for longer.
    pub fn handle_cancel(&mut self, epoch: Epoch, last: Seq, dropped: &[Seq]) -> Vec<Seq> {
        if !self.running || epoch != self.epoch {
            return Vec::new();
        }
        let is_dropped = |seq: &Seq| dropped.binary_search(seq).is_ok();
        self.failed.retain(|seq| !is_dropped(seq));
        let stopped = self.operations.iter().map(|operation| operation.admission.seq).filter(is_dropped).collect();
        self.operations.retain(|operation| !is_dropped(&operation.admission.seq));
        self.outbox.retain(|action| match action {
            ExecutorAction::Send { chunk, .. } => !is_dropped(&chunk.seq),
            _ => true,
        });
        (self.admitted, self.withdrawn) = (self.admitted.max(last), self.withdrawn.max(last));
        for peer in self.links.keys().copied().collect::<Vec<_>>() {
            let chunks = self.link(peer).drop_held_until(epoch, last);
            if chunks > 0 {
                self.stats.chunks_dropped += chunks;
                self.notify_admitted(peer, last);
            }
        }
        stopped
    }

    /// A chunk came from a peer.
    ///
    /// # Errors
    /// [`Violation`] when no correct peer sends it; the caller closes the link.
    pub fn handle_chunk(&mut self, from: SidecarIndex, chunk: Chunk) -> Result<(), Violation> {
        self.stats.chunks_received += 1;
        self.stats.received_bytes += chunk.data.len() as u64;
        let lane = self.config.lane;
        if chunk.header.lane != lane {
            return Err(Violation::Lane { seq: chunk.seq, lane, found: chunk.header.lane });
        }
        if chunk.epoch < self.epoch || (chunk.epoch == self.epoch && !self.running) {
            self.stats.chunks_dropped += 1;
            return Ok(());
        }
        if chunk.epoch > self.epoch || chunk.seq > self.admitted {
            self.stats.chunks_held += 1;
            let granted_bytes = self.config.early_grant_bytes;
            return self.link(from).hold(chunk, granted_bytes);
        }
        let (seq, early) = (chunk.seq, chunk.early);
        self.accept(from, chunk)?;
        if early {
            self.notify_admitted(from, seq);
        }
        Ok(())
    }

    /// A peer has admitted everything up to an operation. It may be in an epoch that has yet to begin here; what it says of
    /// an older one is void.
    pub fn handle_admitted(&mut self, from: SidecarIndex, epoch: Epoch, seq: Seq) {
        let now = self.epoch;
        if epoch >= now {
            self.link(from).handle_admitted(now, OpId { epoch, seq });
        }
    }

    /// So many chunks to a peer have left the port's queue, in the order of sending.
    pub fn handle_sent(&mut self, peer: SidecarIndex, chunks: u32) {
        for _ in 0..chunks {
            let Some(sent) = self.link(peer).take_in_flight() else { return };
            if sent.epoch == self.epoch
                && let Some(operation) = self.operation(sent.seq)
            {
                operation.handle_sent(sent);
            }
        }
    }

    /// The next thing to do, after at most one step of a plan: a chunk's work, or that of a chunk of each member where a
    /// step sees all of them. `None` until something happens.
    pub fn poll_action(&mut self, memory: &mut dyn Memory) -> Option<ExecutorAction> {
        let action = match self.outbox.pop_front() {
            Some(action) => action,
            None => self.advance(memory)?,
        };
        if let ExecutorAction::Send { to, chunk } = &action {
            self.stats.chunks_sent += 1;
            self.stats.sent_bytes += chunk.data.len() as u64;
            self.stats.chunks_sent_early += u64::from(chunk.early);
            self.links.entry(*to).or_default().note_sent(chunk);
        }
        Some(action)
    }

    /// Counters since it was made.
    #[must_use]
    pub fn stats(&self) -> &ExecutorStats {
        &self.stats
    }

    /// Private memory at this moment.
    #[must_use]
    pub fn private_bytes(&self) -> PrivateBytes {
        PrivateBytes {
            registers: self.operations.iter().map(Operation::register_bytes).sum(),
            parked: self.operations.iter().map(Operation::parked_bytes).sum(),
            early: self.links.values().map(Link::held_bytes).sum(),
            free: self.buffers.bytes(),
        }
    }

    /// Gives every operation its turn until one of them can do something.
    fn advance(&mut self, memory: &mut dyn Memory) -> Option<ExecutorAction> {
        let first = self.operations.partition_point(|operation| operation.admission.seq <= self.served);
        let count = self.operations.len();
        for index in (first..count).chain(0..first) {
            let seq = self.operations[index].admission.seq;
            let (links, now) = (&self.links, self.epoch);
            let may_send = |to, bytes| {
                links.get(&to).is_some_and(|link| link.send_permission(now, seq, bytes) != SendPermission::Wait)
            };
            let progress = self.operations[index].advance(&mut self.buffers, &mut self.stats, memory, &may_send);
            if let Some(action) = self.act(index, seq, progress) {
                self.served = seq;
                return Some(action);
            }
        }
        None
    }

    fn act(
        &mut self,
        index: usize,
        seq: Seq,
        progress: Result<OperationProgress, StepError>,
    ) -> Option<ExecutorAction> {
        match progress {
            Ok(OperationProgress::Idle) => None,
            Ok(OperationProgress::Worked(phase)) => Some(ExecutorAction::Worked { work: Some((seq, phase)) }),
            Ok(OperationProgress::Send { to, mut chunk }) => {
                chunk.early =
                    self.link(to).send_permission(chunk.epoch, seq, chunk.data.len()) == SendPermission::Early;
                Some(ExecutorAction::Send { to, chunk })
            }
            Ok(OperationProgress::StrandOver(tokens)) => {
                self.outbox.extend(tokens.into_iter().map(|(to, chunk)| ExecutorAction::Send { to, chunk }));
                Some(self.outbox.pop_front().unwrap_or(ExecutorAction::Worked { work: None }))
            }
            Ok(OperationProgress::Done) => {
                self.operations.remove(index);
                self.stats.operations_done += 1;
                Some(ExecutorAction::Done { epoch: self.epoch, seq })
            }
            Err(error) => {
                self.operations.remove(index);
                Some(self.fail(seq, &error))
            }
        }
    }

    fn fail(&mut self, seq: Seq, error: &StepError) -> ExecutorAction {
        self.failed.insert(seq);
        self.stats.operations_failed += 1;
        let plugin = matches!(error, StepError::Plugin(_));
        ExecutorAction::Failed { epoch: self.epoch, seq, reason: error.to_string(), plugin }
    }

    fn accept(&mut self, from: SidecarIndex, chunk: Chunk) -> Result<(), Violation> {
        let seq = chunk.seq;
        if self.failed.contains(&seq) {
            self.stats.chunks_dropped += 1;
            return Ok(());
        }
        let withdrawn = self.withdrawn;
        match self.operation(seq) {
            Some(operation) => operation.handle_chunk(from, chunk),
            None if seq <= withdrawn => {
                self.stats.chunks_dropped += 1;
                Ok(())
            }
            None => Err(Violation::Over { seq }),
        }
    }

    /// Hands over what came early for an operation that is now admitted, and says so to those who sent it.
    fn release_held(&mut self, seq: Seq) {
        let epoch = self.epoch;
        let peers: Vec<SidecarIndex> = self.links.keys().copied().collect();
        for peer in peers {
            let link = self.link(peer);
            let skipped = link.held_before(epoch, seq);
            let chunks = link.release(epoch, seq);
            let had_chunks = !chunks.is_empty();
            let accepted = chunks.into_iter().try_for_each(|chunk| self.accept(peer, chunk));
            let accepted = accepted.and(skipped.map_or(Ok(()), |seq| Err(Violation::Over { seq })));
            if let Err(violation) = accepted {
                self.outbox.push_back(ExecutorAction::Disconnect { peer, violation });
            } else if had_chunks {
                self.notify_admitted(peer, seq);
            }
        }
    }

    /// Tells a peer, once its link is up, that an operation is admitted; with it everything else that is by now.
    fn notify_admitted(&mut self, to: SidecarIndex, seq: Seq) {
        let admitted = self.admitted;
        let link = self.link(to);
        let newly_admitted = if link.was_notified(seq) { None } else { link.notify(admitted) };
        self.push_admitted(to, newly_admitted);
    }

    fn push_admitted(&mut self, to: SidecarIndex, newly_admitted: Option<Seq>) {
        let epoch = self.epoch;
        self.outbox.extend(newly_admitted.map(|seq| ExecutorAction::Admitted { to, epoch, seq }));
    }

    fn open(&mut self, peer: SidecarIndex) {
        let link = self.link(peer);
        if !link.open_requested {
            link.open_requested = true;
            self.outbox.push_back(ExecutorAction::Open { peer });
        }
    }

    /// Forgets what the epoch wanted; links stay as they are.
    fn drop_operations(&mut self) {
        self.operations.clear();
        self.failed.clear();
        self.outbox.retain(|action| matches!(action, ExecutorAction::Open { .. } | ExecutorAction::Disconnect { .. }));
    }

    fn operation(&mut self, seq: Seq) -> Option<&mut Operation> {
        let index = self.operations.binary_search_by_key(&seq, |operation| operation.admission.seq).ok()?;
        self.operations.get_mut(index)
    }

    fn link(&mut self, peer: SidecarIndex) -> &mut Link {
        self.links.entry(peer).or_default()
    }
}
