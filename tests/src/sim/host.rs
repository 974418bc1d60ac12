//! A simulated sidecar: the engine, the executors of its lanes, the queues between their threads, and the memory of its
//! workers. `driving.rs` simulates its driver and data threads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use ronde_engine::{
    Admission, Contributions, Engine, EngineConfig, Executor, ExecutorConfig, InputPlace, Memory, MemoryError,
    OutputPlace, Plugins, Time,
};
use ronde_wire::{Epoch, Lane, Rank, Request, RequestId, Seq, SidecarIndex};

use super::fake_plugins::{HostPlugins, Kept};

/// A sidecar's process; a new one after a crash.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) index: SidecarIndex,
    pub(super) alive: bool,
    /// Counts the processes: what was scheduled for an earlier one is void.
    pub(super) life: u32,
    pub(super) paused_until_us: u64,
    pub(super) engine: Engine,
    pub(super) lanes: Vec<LaneThread>,
    /// Contributions of local ranks that are not yet admitted.
    pub(super) inputs: BTreeMap<(Rank, RequestId), Arc<Vec<u8>>>,
    pub(super) operations: BTreeMap<(Epoch, Seq), Operation>,
    /// Lanes that have not dropped cancelled operations yet, by the last of these.
    pub(super) dropping: BTreeMap<(Epoch, Seq), usize>,
    /// The state of codecs.
    pub(super) kept: Kept,
    pub(super) draining: bool,
    pub(super) timer_us: u64,
}

/// A data thread.
#[derive(Debug)]
pub(super) struct LaneThread {
    pub(super) executor: Executor,
    /// The epoch that this thread knows.
    pub(super) epoch: Epoch,
    pub(super) commands: VecDeque<Command>,
    pub(super) commands_us: u64,
    pub(super) reports: VecDeque<Report>,
    pub(super) reports_us: u64,
    pub(super) working: bool,
    /// What was dropped here in this epoch, and the newest operation.
    pub(super) dropped: BTreeSet<Seq>,
    pub(super) newest: Seq,
    /// The links that this thread knows to be up, by peer: which generation of the connection.
    pub(super) links: BTreeMap<usize, u64>,
}

/// A command of the control thread to a lane.
#[derive(Clone, Debug)]
pub(super) enum Command {
    Epoch(Epoch),
    EpochEnd(Epoch),
    Admit(Arc<Admission>),
    Cancel(Epoch, Seq, Vec<Seq>),
}

/// A report of a lane to the control thread.
#[derive(Clone, Debug)]
pub(super) enum Report {
    Done(Epoch, Seq),
    Dropped(Epoch, Seq),
    /// A plugin has failed.
    Failed(Epoch, Seq, String),
    LinkDown(SidecarIndex, &'static str),
}

/// The memory of an admitted operation.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) lanes_left: usize,
    inputs: BTreeMap<(u32, Rank), Arc<Vec<u8>>>,
    /// Results by tensor, and by rank where each has its own.
    pub(super) outputs: BTreeMap<(u32, Option<Rank>), Vec<u8>>,
    /// A planted bug: missing contributions are read as garbage.
    pub(super) reads_garbage: bool,
}

impl Host {
    pub(super) fn new(config: EngineConfig, grant_bytes: u64, life: u32, now: Time) -> Self {
        let (index, lanes) = (config.me, config.lanes);
        let lane = |lane| LaneThread {
            executor: Executor::new(ExecutorConfig { me: index, lane: Lane(lane), early_grant_bytes: grant_bytes }),
            epoch: Epoch(0),
            commands: VecDeque::new(),
            commands_us: 0,
            reports: VecDeque::new(),
            reports_us: 0,
            working: false,
            dropped: BTreeSet::new(),
            newest: Seq(0),
            links: BTreeMap::new(),
        };
        Self {
            index,
            alive: true,
            life,
            paused_until_us: 0,
            lanes: (0..lanes).map(lane).collect(),
            engine: Engine::new(config, now),
            inputs: BTreeMap::new(),
            operations: BTreeMap::new(),
            dropping: BTreeMap::new(),
            kept: Kept::default(),
            draining: false,
            timer_us: u64::MAX,
        }
    }

    /// The bytes that travel with a request whose input is here. A request that differs from the other ranks' may have
    /// another length than its input.
    pub(super) fn contribution(&mut self, rank: Rank, request: RequestId, what: &Request) -> Bytes {
        let due = self.engine.contribution_bytes(rank, what);
        let mut bytes = self.inputs.get(&(rank, request)).map(|input| input.to_vec()).unwrap_or_default();
        bytes.resize(due, 0);
        bytes.into()
    }

    /// Reserves the results of an operation and pins its inputs.
    pub(super) fn reserve(&mut self, admission: &Admission, reads_garbage: bool) {
        let (mut inputs, mut outputs) = (BTreeMap::new(), BTreeMap::new());
        let element_bytes = admission.arithmetic.dtype.size_bytes();
        for (index, tensor) in (0..).zip(&admission.tensors) {
            for answered in &tensor.requests {
                let (rank, request) = (answered.rank, answered.request);
                let bytes = self.inputs.get(&(rank, request)).cloned().unwrap_or_default();
                inputs.insert((index, rank), bytes);
                let elements = usize::try_from(answered.output.elements()).expect("small tensors");
                outputs.insert((index, tensor.own.then_some(rank)), vec![0xEE; elements * element_bytes]);
            }
        }
        for (index, contributions) in (0..).zip(&admission.contributions) {
            for (rank, came) in admission.local_ranks.iter().zip(contributions).filter(|(_, came)| !came.is_empty()) {
                inputs.insert((index, *rank), Arc::new(came.to_vec()));
            }
        }
        let operation = Operation { lanes_left: self.lanes.len(), inputs, outputs, reads_garbage };
        self.operations.insert((admission.epoch, admission.seq), operation);
    }
}

impl Operation {
    /// Ranks whose own results of a tensor are as long as a rank's, but others.
    pub(super) fn ranks_like(&self, tensor: u32, rank: Rank) -> impl Iterator<Item = Rank> {
        let own = self.outputs.get(&(tensor, Some(rank)));
        let alike = move |bytes: &Vec<u8>| own.is_some_and(|own| own.len() == bytes.len() && own != bytes);
        let of_tensor = self.outputs.iter().filter(move |((of, _), bytes)| *of == tensor && alike(bytes));
        of_tensor.filter_map(|((_, rank), _)| *rank)
    }
}

/// The memory that one lane's executor works on, and what it may call.
pub(super) struct LaneMemory<'a> {
    pub(super) operations: LaneOperations<'a>,
    pub(super) plugins: HostPlugins<'a>,
}

/// The operations of a lane's epoch.
pub(super) struct LaneOperations<'a> {
    pub(super) all: &'a mut BTreeMap<(Epoch, Seq), Operation>,
    pub(super) epoch: Epoch,
}

impl Contributions for LaneOperations<'_> {
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError> {
        let gone = || MemoryError(format!("nothing is at {place:?}"));
        let operation = self.all.get(&(self.epoch, place.seq)).ok_or_else(gone)?;
        let Some(input) = operation.inputs.get(&(place.tensor, place.rank)) else {
            into.fill(0x41);
            return if operation.reads_garbage { Ok(()) } else { Err(gone()) };
        };
        let start = usize::try_from(place.offset).map_err(|_| gone())?;
        into.copy_from_slice(input.get(start..start + into.len()).ok_or_else(gone)?);
        Ok(())
    }
}

impl Memory for LaneMemory<'_> {
    fn parts(&mut self) -> (&mut dyn Contributions, Option<&mut dyn Plugins>) {
        (&mut self.operations, Some(&mut self.plugins))
    }

    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError> {
        let gone = || MemoryError(format!("nothing is at {place:?}"));
        let operation = self.operations.all.get_mut(&(self.operations.epoch, place.seq)).ok_or_else(gone)?;
        let output = operation.outputs.get_mut(&(place.tensor, place.rank)).ok_or_else(gone)?;
        let start = usize::try_from(place.offset).map_err(|_| gone())?;
        output.get_mut(start..start + from.len()).ok_or_else(gone)?.copy_from_slice(from);
        Ok(())
    }
}
