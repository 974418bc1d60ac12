//! Operations that are admitted here: their memory while lanes perform them, and their results until all local ranks have
//! read them.

use std::collections::HashMap;
use std::sync::Arc;

use ronde_engine::{Admission, AdmittedRequest};
use ronde_shm::Slot;
use ronde_wire::{Epoch, Seq};

use crate::memory::{Input, OperationMemory};
use crate::results::{ResultSlot, Results};

/// Names one tensor's result: shared by the local ranks of its operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ResultId {
    /// The epoch.
    pub(crate) epoch: Epoch,
    /// The operation.
    pub(crate) seq: Seq,
    /// The tensor within it.
    pub(crate) tensor: u32,
}

/// The table of operations and results.
pub(crate) struct Operations {
    results: Results,
    lanes: usize,
    running: HashMap<(Epoch, Seq), Running>,
    readable: HashMap<ResultId, Readable>,
    /// Ended epochs whose memory lanes may still touch, with the number of lanes that have not let go.
    draining: HashMap<Epoch, usize>,
}

struct Running {
    memory: Arc<OperationMemory>,
    lanes_left: usize,
    /// Readers of each tensor's result: the local ranks of the set.
    readers: usize,
}

struct Readable {
    slot: ResultSlot,
    readers_left: usize,
}

impl Operations {
    /// An empty table for a sidecar with this many lanes.
    pub(crate) fn new(results: Results, lanes: usize) -> Self {
        Self { results, lanes, running: HashMap::new(), readable: HashMap::new(), draining: HashMap::new() }
    }

    /// Reserves an operation's results and puts its memory together. `input` finds a request's contribution.
    ///
    /// # Errors
    /// When there is no memory for the results; nothing is reserved then.
    pub(crate) fn admit(
        &mut self,
        admission: &Admission,
        mut input: impl FnMut(ronde_wire::Rank, ronde_wire::RequestId) -> Input,
    ) -> anyhow::Result<Arc<OperationMemory>> {
        let element_bytes = admission.arithmetic.dtype.size_bytes() as u64;
        let mut outputs = Vec::with_capacity(admission.tensors.len());
        for tensor in &admission.tensors {
            let output = tensor.requests.first().map_or(0, |answered| answered.output.elements());
            let bytes = output * element_bytes;
            if bytes == 0 {
                outputs.push(None);
                continue;
            }
            match self.results.lease(bytes) {
                Ok(slot) => outputs.push(Some(slot)),
                Err(error) => {
                    outputs.into_iter().flatten().for_each(|slot: ResultSlot| self.results.release(slot.slot));
                    return Err(error);
                }
            }
        }
        let of_tensor = |requests: &[AdmittedRequest], input: &mut dyn FnMut(_, _) -> Input| {
            requests.iter().map(|answered| (answered.rank, input(answered.rank, answered.request))).collect()
        };
        let inputs = admission.tensors.iter().map(|tensor| of_tensor(&tensor.requests, &mut input)).collect();
        let memory = Arc::new(OperationMemory { inputs, outputs });
        let running =
            Running { memory: Arc::clone(&memory), lanes_left: self.lanes, readers: admission.local_ranks.len() };
        self.running.insert((admission.epoch, admission.seq), running);
        Ok(memory)
    }

    /// A lane has done its part. True when it was the last: the results are readable now.
    pub(crate) fn lane_done(&mut self, epoch: Epoch, seq: Seq) -> bool {
        // What was done just before the epoch ended has no readers any more; letting go frees it.
        if self.draining.contains_key(&epoch) {
            return false;
        }
        let Some(running) = self.running.get_mut(&(epoch, seq)) else { return false };
        running.lanes_left -= 1;
        if running.lanes_left > 0 {
            return false;
        }
        if let Some(running) = self.running.remove(&(epoch, seq)) {
            for (tensor, slot) in (0..).zip(&running.memory.outputs) {
                if let Some(slot) = slot.clone() {
                    let id = ResultId { epoch, seq, tensor };
                    self.readable.insert(id, Readable { slot, readers_left: running.readers });
                }
            }
        }
        true
    }

    /// Where a result lies; `None` for an operation without one.
    pub(crate) fn result(&self, id: ResultId) -> Option<&ResultSlot> {
        self.readable.get(&id).map(|readable| &readable.slot)
    }

    /// One reader is through with a result.
    pub(crate) fn release(&mut self, id: ResultId) {
        let Some(readable) = self.readable.get_mut(&id) else { return };
        readable.readers_left -= 1;
        if readable.readers_left == 0
            && let Some(readable) = self.readable.remove(&id)
        {
            self.results.release(readable.slot.slot);
        }
    }

    /// An epoch is over: what runs is dropped, but its slots are not reused before every lane has let go of them.
    pub(crate) fn end_epoch(&mut self, epoch: Epoch) {
        self.draining.insert(epoch, self.lanes);
    }

    /// A lane no longer touches the memory of an ended epoch.
    pub(crate) fn lane_let_go(&mut self, epoch: Epoch) {
        let Some(left) = self.draining.get_mut(&epoch) else { return };
        *left -= 1;
        if *left > 0 {
            return;
        }
        self.draining.remove(&epoch);
        let ended: Vec<_> = self.running.keys().filter(|(of, _)| *of == epoch).copied().collect();
        for key in ended {
            let outputs = self.running.remove(&key).map(|running| running.memory.outputs.clone());
            let slots: Vec<Slot> = outputs.into_iter().flatten().flatten().map(|slot| slot.slot).collect();
            slots.into_iter().for_each(|slot| self.results.release(slot));
        }
    }

    /// Numbers for metrics.
    pub(crate) fn results(&self) -> &Results {
        &self.results
    }
}
