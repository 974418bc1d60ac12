//! The executor: performs the plans of admitted operations on one lane, chunk by chunk.
//!
//! **Memory traffic.** The table gives bytes, summed over all members: every rank's tensor has `B` bytes (for a
//! scatter, the root's), `N` ranks are on `n` members, and `p` is the largest power of two that is not above `n`. A
//! byte that is read is copied once from the input's memory into a register; a byte that is written is copied once from
//! a register into a result. A reduction reads two bytes and writes one; an n-ary reduction reads all operands and
//! writes one of `N`. Sent buffers are shared with the transport, and received buffers are used in place: a copy is
//! made only where a plan writes to a buffer that a transport still holds, which no plan does in steady state. Where a
//! member has several ranks, or there is a prescale, a pairwise contribution passes through blocks that stay in a
//! first-level cache.
//!
//! | work | read | reduced | sent | written |
//! |---|---|---|---|---|
//! | all-reduce, ring | N B | (n-1) B | 2 (n-1) B | n B |
//! | all-reduce, recursive doubling | N B | (p log2 p + n-p) B | (p log2 p + 2 (n-p)) B | n B |
//! | all-reduce, halving-doubling | N B | (n-1) B | 2 (n-1) B | n B |
//! | coded; (n+1) B are encoded, 2 n B decoded | N B | (n-1) B | 2 (n-1) B, encoded | n B |
//! | n-ary | N B | N B | (N/n + 1) (n-1) B | n B |
//! | two-pass; N B are measured and kept | N B | N B | (N/n + 1) (n-1) B | n B |
//! | adaptive; N B are measured and kept | N B | N B | (2 N/n + 1) (n-1) B | n B |
//! | reduce-scatter, reduce | N B | (n-1) B | (n-1) B | B |
//! | broadcast | B | 0 | (n-1) B | n B |
//! | all-gather | N B | 0 | (n-1) N B | n N B |
//! | gather | N B | 0 | what is not at the root | N B |
//! | scatter | B | 0 | what is not for the root's member | B |
//! | all-to-all | N B | 0 | what is not for the own member | N B |
//!
//! An average or a postscale reads and writes each reduced byte once more: `B` in all, and `p B` with
//! recursive doubling. A decoded byte is written to a register before it is reduced or copied to a result.

mod arithmetic;
mod inputs;
mod link;
mod measured;
mod nary;
mod operation;
mod plugin_steps;
mod register;
mod sizes;
mod stats;
mod steps;
mod sub_schedule;
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

/// The settings of an executor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExecutorConfig {
    /// The sidecar.
    pub me: SidecarIndex,
    /// The lane.
    pub lane: Lane,
    /// The credit of each peer on this lane, from this sidecar's hello: bytes of early chunks, headers included.
    pub early_grant_bytes: u64,
}

/// An output of an executor, which its data thread performs.
#[derive(Debug)]
pub enum ExecutorAction {
    /// Open a link to a peer, which a newly admitted operation needs. Returned once for each peer until its link is
    /// down.
    Open {
        /// The peer.
        peer: SidecarIndex,
    },
    /// Pass a chunk to the port, and report it with [`Executor::handle_sent`] when it has left the port's queue.
    Send {
        /// The receiver; its link is up.
        to: SidecarIndex,
        /// The chunk.
        chunk: Chunk,
    },
    /// Notify a peer that this side has admitted everything up to an operation.
    Admitted {
        /// The receiver.
        to: SidecarIndex,
        /// The epoch.
        epoch: Epoch,
        /// The last admitted operation.
        seq: Seq,
    },
    /// This lane's part of an operation is complete: everything is received and published, and all sent chunks have
    /// left the port's queue.
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
    /// A chunk that was held until its operation was admitted turned out to be wrong: close the link, as for an error
    /// of [`Executor::handle_chunk`].
    Disconnect {
        /// The peer.
        peer: SidecarIndex,
        /// How it broke the protocol.
        violation: Violation,
    },
    /// A step was performed; nothing is to be done for it. Check for other work, then poll again.
    Worked {
        /// The operation and the kind of work; `None` for the end of a sub-schedule.
        work: Option<(Seq, Phase)>,
    },
}

/// The kind of work of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The local ranks' tensors were read, and reduced among themselves where the plan does that.
    ReadInput,
    /// Values of members were reduced or finished.
    Reduce,
    /// A codec encoded or decoded.
    Code,
    /// Part of a result was written.
    CopyResult,
}

/// Performs admitted operations on one lane. It is pure: `handle_*` takes inputs, [`poll_action`](Self::poll_action)
/// returns outputs.
///
/// Operations overlap and take turns, so that a small one does not wait for a large one. Chunks of operations that are
/// not admitted yet are held within the credit of their sender. Chunks that arrive before their round are parked within
/// the bound given in `operation.rs`. Both are accepted at once, so the lane is always read.
///
/// Chunks of an older epoch are dropped. Those of a newer one are held like those of an operation that is not admitted:
/// the peer may have entered the epoch earlier.
#[derive(Debug)]
pub struct Executor {
    config: ExecutorConfig,
    /// The newest epoch that began here.
    epoch: Epoch,
    /// Whether the epoch is active.
    running: bool,
    /// The last admitted operation.
    admitted: Seq,
    /// Ascending by seq.
    operations: Vec<Operation>,
    /// Operations that failed here, whose chunks are dropped. Each of them ends the epoch or is cancelled, so there are
    /// few.
    failed: BTreeSet<Seq>,
    /// The last operation of a cancelled range: chunks up to it may belong to dropped operations.
    withdrawn: Seq,
    /// The operation that was served last; the next one takes its turn first.
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

    /// The epoch is over: its operations are dropped in any state.
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

    /// A link to a peer is up, with this side's credit of early chunks on this lane from the peer's hello.
    pub fn handle_link_up(&mut self, peer: SidecarIndex, credit_bytes: u64) {
        let pending_notice = self.link(peer).handle_up(credit_bytes);
        self.push_admitted(peer, pending_notice);
    }

    /// A link is lost, and with it everything in flight. Operations with the peer are blocked until their epoch ends.
    pub fn handle_link_down(&mut self, peer: SidecarIndex) {
        self.link(peer).handle_down();
        self.outbox.retain(|action| !matches!(action, ExecutorAction::Send { to, .. } | ExecutorAction::Admitted { to, .. } if *to == peer));
    }

    /// Another membership of the job begins, and all links are closed: forgets them. No epoch runs.
    pub fn handle_membership(&mut self) {
        self.links.clear();
        self.outbox.retain(|action| {
            !matches!(
                action,
                ExecutorAction::Open { .. }
                    | ExecutorAction::Send { .. }
                    | ExecutorAction::Admitted { .. }
                    | ExecutorAction::Disconnect { .. }
            )
        });
    }

    /// Starts an operation; the caller keeps the order of seqs. An operation of another epoch is ignored.
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

    /// Drops operations in any state. Nothing else up to `last` will be admitted, and late chunks of unknown operations
    /// up to it are dropped. Returns those of `dropped` that were not done here.
    ///
    /// Peers that sent such chunks on credit are notified that everything up to `last` is admitted, which returns their
    /// credit. They cannot reclaim it themselves, as the receiver may hold the chunks for longer.
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

    /// Handles a chunk from a peer.
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

    /// A peer has admitted everything up to an operation. Its epoch may be one that has yet to begin here; a report of
    /// an older epoch is ignored.
    pub fn handle_admitted(&mut self, from: SidecarIndex, epoch: Epoch, seq: Seq) {
        let now = self.epoch;
        if epoch >= now {
            self.link(from).handle_admitted(now, OpId { epoch, seq });
        }
    }

    /// This number of chunks to a peer has left the port's queue, in the order of sending.
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

    /// Performs at most one step of a plan and returns the next action. A step works on one chunk, or on one chunk of
    /// each member. `None` when there is nothing to do before the next input.
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

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> &ExecutorStats {
        &self.stats
    }

    /// The private memory in use.
    #[must_use]
    pub fn private_bytes(&self) -> PrivateBytes {
        PrivateBytes {
            registers: self.operations.iter().map(Operation::register_bytes).sum(),
            measured: self.operations.iter().map(Operation::measured_bytes).sum(),
            parked: self.operations.iter().map(Operation::parked_bytes).sum(),
            early: self.links.values().map(Link::held_bytes).sum(),
            free: self.buffers.bytes(),
        }
    }

    /// Tries the operations in turn until one of them makes progress.
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
            Ok(OperationProgress::SubScheduleOver(tokens)) => {
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

    /// Accepts the held chunks of an operation that is now admitted, and notifies their senders.
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

    /// Notifies a peer, once its link is up, of everything that is admitted by now, at least up to `seq`.
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

    /// Drops the operations of the epoch; links are unchanged.
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
