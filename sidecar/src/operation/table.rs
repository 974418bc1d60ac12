//! The operations that are admitted here: their memory while lanes perform them, and their results until all local
//! ranks have read them.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ronde_engine::{Admission, AdmittedRequest, AdmittedTensor};
use ronde_wire::{Epoch, Failure, OpId, Rank, RequestId, Seq, TensorName};

use crate::operation::memory::{Destination, OperationMemory, TensorMemory};
use crate::operation::results::{ResultSlot, Results};
use crate::session::request::{Input, ResultId};
use crate::session::table::{SessionId, Sessions};

/// The table of operations and results.
pub(crate) struct Operations {
    results: Results,
    lanes: usize,
    running: HashMap<(Epoch, Seq), Running>,
    readable: HashMap<ResultId, Readable>,
    /// Ended epochs whose memory lanes may still use, with the number of lanes that have not released it.
    draining: HashMap<Epoch, usize>,
    /// Operations that are being dropped, keyed by the last one, with the number of lanes that have not dropped them.
    cancelling: HashMap<(Epoch, Seq), Cancelling>,
    /// Failures whose operations no lane performs any more.
    released: Vec<FailedRequest>,
}

/// A request whose worker has yet to receive its failure.
pub(crate) struct FailedRequest {
    pub(crate) session: SessionId,
    pub(crate) request: RequestId,
    pub(crate) failure: Failure,
}

struct Running {
    /// The first tensor's name, for logs.
    name: Option<TensorName>,
    memory: Arc<OperationMemory>,
    threads_left: usize,
    /// Whether its results are copied to devices when the other threads have done their parts.
    is_staged: bool,
    /// Whether it is cancelled.
    cancelled: bool,
    /// Its failed requests; at most one for each contribution.
    failed: Vec<FailedRequest>,
}

/// How far an operation is after one more thread has done its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Other threads have not done theirs, or it does not matter any more.
    Running,
    /// The results are on the host, and not yet on the devices.
    OnHost,
    /// All parts are done.
    Done,
}

/// The number of lanes that have not dropped some operations yet, and these operations.
type Cancelling = (usize, Arc<[Seq]>);

struct Readable {
    slot: ResultSlot,
    readers_left: Vec<Rank>,
}

impl Operations {
    /// Creates an empty table for a sidecar with this many lanes.
    pub(crate) fn new(results: Results, lanes: usize) -> Self {
        let (running, readable, draining, cancelling) = Default::default();
        Self { results, lanes, running, readable, draining, cancelling, released: Vec::new() }
    }

    /// Reserves an operation's results and builds its memory. `threads` is the number of threads that perform a part of
    /// it.
    ///
    /// # Errors
    /// When there is no memory for the results; nothing is reserved then.
    pub(crate) fn admit(
        &mut self,
        admission: &Admission,
        threads: usize,
        sessions: &mut Sessions,
    ) -> anyhow::Result<Arc<OperationMemory>> {
        let operation = OpId { epoch: admission.epoch, seq: admission.seq };
        let mut tensors = Vec::with_capacity(admission.tensors.len());
        for (index, tensor) in admission.tensors.iter().enumerate() {
            match self.lease_outputs(admission, tensor, sessions) {
                Ok(outputs) => {
                    let mut input = |of: &AdmittedRequest| (of.rank, sessions.input(of.rank, of.request, operation));
                    let inputs = match admission.contributions.get(index) {
                        Some(came) => contributed(admission, came),
                        None => tensor.requests.iter().map(&mut input).collect(),
                    };
                    tensors.push(TensorMemory { inputs, outputs });
                }
                Err(error) => {
                    self.release_outputs(&tensors);
                    return Err(error);
                }
            }
        }
        let memory = Arc::new(OperationMemory { tensors, notice: None });
        let name = admission.tensors.first().map(|tensor| tensor.name.clone());
        let (is_staged, cancelled, failed) = (false, false, Vec::new());
        let running =
            Running { name, memory: Arc::clone(&memory), threads_left: threads, is_staged, cancelled, failed };
        self.running.insert((admission.epoch, admission.seq), running);
        Ok(memory)
    }

    /// Returns the destinations of a tensor's results that have bytes. Only a result that ranks read from the sidecar
    /// gets a slot.
    fn lease_outputs(
        &mut self,
        admission: &Admission,
        tensor: &AdmittedTensor,
        sessions: &mut Sessions,
    ) -> anyhow::Result<Vec<(Option<Rank>, Destination)>> {
        let operation = OpId { epoch: admission.epoch, seq: admission.seq };
        let element_bytes = admission.arithmetic.dtype.size_bytes() as u64;
        let mut outputs: Vec<(Option<Rank>, Destination)> = Vec::new();
        for wanted in &tensor.requests {
            let key = tensor.own.then_some(wanted.rank);
            // Shared results are equal.
            let bytes = wanted.output.elements() * element_bytes;
            if bytes == 0 {
                continue;
            }
            if let Some(output) = sessions.output(wanted.rank, wanted.request, bytes, operation) {
                outputs.push((key, Destination::of(output, wanted.rank)));
            } else if let Some(readers) = outputs.iter_mut().find_map(|output| readers_of(output, key)) {
                readers.push(wanted.rank);
            } else {
                match self.results.lease(&admission.set_served, bytes) {
                    Ok(slot) => outputs.push((key, Destination::Slot(slot, vec![wanted.rank]))),
                    Err(error) => {
                        self.release_slots(&outputs);
                        return Err(error);
                    }
                }
            }
        }
        Ok(outputs)
    }

    fn release_outputs(&mut self, tensors: &[TensorMemory]) {
        tensors.iter().for_each(|tensor| self.release_slots(&tensor.outputs));
    }

    fn release_slots(&mut self, outputs: &[(Option<Rank>, Destination)]) {
        for (_, output) in outputs {
            if let Destination::Slot(slot, _) = output {
                self.results.release(slot);
            }
        }
    }

    /// Returns the name of the first tensor of a running operation.
    pub(crate) fn name(&self, epoch: Epoch, seq: Seq) -> Option<&TensorName> {
        self.running.get(&(epoch, seq))?.name.as_ref()
    }

    /// Notes that the lane of operations in device memory performs an admitted operation: alone, or as a thread more, which
    /// acts before and after the others.
    pub(crate) fn hand_to_gpu(&mut self, epoch: Epoch, seq: Seq, is_staged: bool) {
        if let Some(running) = self.running.get_mut(&(epoch, seq)) {
            running.threads_left = if is_staged { running.threads_left + 1 } else { 1 };
            running.is_staged = is_staged;
        }
    }

    /// Notes that a thread has done its part. After the last one the results are readable, unless the operation was
    /// cancelled.
    pub(crate) fn part_done(&mut self, epoch: Epoch, seq: Seq) -> Progress {
        // An operation that completed just before the epoch ended has no readers any more; releasing it frees it.
        if self.draining.contains_key(&epoch) {
            return Progress::Running;
        }
        let Some(running) = self.running.get_mut(&(epoch, seq)) else { return Progress::Running };
        running.threads_left -= 1;
        if running.cancelled {
            return Progress::Running;
        }
        match running.threads_left {
            0 => {}
            1 if running.is_staged => return Progress::OnHost,
            _ => return Progress::Running,
        }
        if let Some(running) = self.running.remove(&(epoch, seq)) {
            for (tensor, memory) in (0..).zip(&running.memory.tensors) {
                for (rank, output) in &memory.outputs {
                    let Destination::Slot(slot, readers) = output else { continue };
                    let id = ResultId { epoch, seq, tensor, rank: *rank };
                    self.readable.insert(id, Readable { slot: slot.clone(), readers_left: readers.clone() });
                }
            }
            self.released.extend(running.failed);
        }
        Progress::Done
    }

    /// Cancels operations, which the lanes drop up to `last`; their results have no readers. Their memory is free when
    /// all lanes have reported so, or immediately if the operation was performed already.
    pub(crate) fn cancel(&mut self, (epoch, last): (Epoch, Seq), dropped: &Arc<[Seq]>) {
        for seq in dropped.iter() {
            if let Some(running) = self.running.get_mut(&(epoch, *seq)) {
                running.cancelled = true;
                continue;
            }
            let of_operation = self.readable.keys().filter(|id| (id.epoch, id.seq) == (epoch, *seq));
            for id in of_operation.copied().collect::<Vec<_>>() {
                if let Some(readable) = self.readable.remove(&id) {
                    self.results.release(&readable.slot);
                }
            }
        }
        self.cancelling.insert((epoch, last), (self.lanes, Arc::clone(dropped)));
    }

    /// Keeps the failure of a request until no lane performs its operation any more. Until then a lane may read the
    /// worker's input and write to the location of its result, and the worker reuses both when it receives the failure.
    /// Returns the failure if no lane performs the operation.
    pub(crate) fn hold_failure(&mut self, operation: Option<OpId>, failed: FailedRequest) -> Option<FailedRequest> {
        match operation.and_then(|OpId { epoch, seq }| self.running.get_mut(&(epoch, seq))) {
            Some(running) => {
                running.failed.push(failed);
                None
            }
            None => Some(failed),
        }
    }

    /// Takes the failures whose operations no lane performs any more.
    pub(crate) fn take_released(&mut self) -> Vec<FailedRequest> {
        std::mem::take(&mut self.released)
    }

    /// Returns whether lanes may still use memory of an ended epoch.
    pub(crate) fn is_draining(&self, epoch: Epoch) -> bool {
        self.draining.contains_key(&epoch)
    }

    /// Notes that a lane has dropped the cancelled operations up to `last`. Returns whether it was the last lane: their
    /// memory is unused from then on.
    pub(crate) fn lane_dropped(&mut self, epoch: Epoch, last: Seq) -> bool {
        let Some((lanes_left, _)) = self.cancelling.get_mut(&(epoch, last)) else { return false };
        *lanes_left -= 1;
        if *lanes_left > 0 {
            return false;
        }
        for seq in self.cancelling.remove(&(epoch, last)).into_iter().flat_map(|(_, dropped)| dropped.to_vec()) {
            self.forget(epoch, seq);
        }
        true
    }

    fn forget(&mut self, epoch: Epoch, seq: Seq) {
        if let Some(running) = self.running.remove(&(epoch, seq)) {
            self.release_outputs(&running.memory.tensors);
            self.released.extend(running.failed);
        }
    }

    /// Returns where a rank reads a result; `None` for an operation without one, and when the worker has it already.
    pub(crate) fn result(&self, id: ResultId, reader: Rank) -> Option<&ResultSlot> {
        let readable = self.readable.get(&id)?;
        readable.readers_left.contains(&reader).then_some(&readable.slot)
    }

    /// Releases a result for a reader; does nothing for a rank that does not read it.
    pub(crate) fn release(&mut self, id: ResultId, reader: Rank) {
        let Some(readable) = self.readable.get_mut(&id) else { return };
        readable.readers_left.retain(|rank| *rank != reader);
        if readable.readers_left.is_empty()
            && let Some(readable) = self.readable.remove(&id)
        {
            self.results.release(&readable.slot);
        }
    }

    /// Whether no lane uses memory of any operation.
    pub(crate) fn is_unused(&self) -> bool {
        self.running.is_empty() && self.draining.is_empty() && self.cancelling.is_empty()
    }

    /// Forgets all results: another membership begins. No lane uses memory of an operation.
    pub(crate) fn enter(&mut self, limit_bytes: u64, served: Vec<Rank>) {
        self.readable.clear();
        self.results.enter(limit_bytes, served);
    }

    /// Ends an epoch: drops its operations, whose slots are reused only after every lane has released them.
    pub(crate) fn end_epoch(&mut self, epoch: Epoch) {
        self.draining.insert(epoch, self.lanes);
    }

    /// Notes that a lane no longer uses the memory of an ended epoch.
    pub(crate) fn lane_released(&mut self, epoch: Epoch) {
        let Some(left) = self.draining.get_mut(&epoch) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        self.draining.remove(&epoch);
        // A cancellation that waited for its turn was dropped with the epoch: no lane answers it.
        self.cancelling.retain(|(of, _), _| *of != epoch);
        let ended: Vec<_> = self.running.keys().filter(|(of, _)| *of == epoch).copied().collect();
        for (epoch, seq) in ended {
            self.forget(epoch, seq);
        }
    }

    /// Returns the figures for metrics.
    pub(crate) fn results(&self) -> &Results {
        &self.results
    }
}

/// Returns the readers of the slot of the result under this key.
fn readers_of(output: &mut (Option<Rank>, Destination), key: Option<Rank>) -> Option<&mut Vec<Rank>> {
    match output {
        (of, Destination::Slot(_, readers)) if *of == key => Some(readers),
        _ => None,
    }
}

/// Returns the contributions to a tensor that arrived with the order, by rank.
fn contributed(admission: &Admission, came: &[Bytes]) -> Vec<(Rank, Input)> {
    let inline = |(rank, bytes): (&Rank, &Bytes)| (*rank, Input::Inline(bytes.clone()));
    admission.local_ranks.iter().zip(came).map(inline).collect()
}
