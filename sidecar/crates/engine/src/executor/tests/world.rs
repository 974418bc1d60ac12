//! The executors of all members in one loop, with FIFO links and an order of events from a list of choices.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use ronde_collectives::plan as make_plan;
use ronde_collectives::plan::{Work, WorkKind};
use ronde_wire::frame::Chunk;
use ronde_wire::{DType, Epoch, Lane, Rank, ReduceOp, Seq, SetTopology, SidecarIndex};

use super::jobs::{Job, decode, encode};
use super::plugins::NativePlugins;
use crate::event::{Admission, Arithmetic};
use crate::executor::{Executor, ExecutorAction, ExecutorConfig};
use crate::memory::{Contributions, InputPlace, Memory, MemoryError, OutputPlace};
use crate::plugins::Plugins;

pub(super) const EPOCH: Epoch = Epoch(1);
/// More than any test here needs.
const SWEEPS_MAX: usize = 100_000;

/// Tensors as plain vectors.
#[derive(Default)]
pub(super) struct PlainMemory {
    pub(super) contributions: PlainContributions,
    pub(super) outputs: BTreeMap<(Seq, u32, Option<Rank>), Vec<u8>>,
    plugins: NativePlugins,
}

#[derive(Default)]
pub(super) struct PlainContributions {
    pub(super) inputs: BTreeMap<InputKey, Vec<u8>>,
    /// Ranks whose worker writes into its tensors during an operation.
    pub(super) scribblers: Vec<Rank>,
    /// Ranks whose worker overwrites each byte after its first read.
    pub(super) swappers: Vec<Rank>,
    reads: u64,
    /// The bytes of swappers that were read.
    read_once: BTreeSet<(InputKey, usize)>,
}

type InputKey = (Seq, u32, Rank);

impl Contributions for PlainContributions {
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError> {
        let key = (place.seq, place.tensor, place.rank);
        let input = self.inputs.get(&key).ok_or_else(|| MemoryError(format!("no input at {place:?}")))?;
        let start = usize::try_from(place.offset).expect("small tensors");
        let from = input.get(start..start + into.len()).ok_or_else(|| MemoryError(format!("beyond {place:?}")))?;
        into.copy_from_slice(from);
        self.reads += 1;
        if self.scribblers.contains(&place.rank) {
            let noise = self.reads.to_le_bytes();
            into.iter_mut().zip(noise.iter().cycle()).for_each(|(byte, noise)| *byte ^= noise & 1);
        }
        if self.swappers.contains(&place.rank) {
            for (at, byte) in (start..).zip(into.iter_mut()) {
                let is_first = self.read_once.insert((key, at));
                *byte ^= if is_first { 0 } else { 0x40 };
            }
        }
        Ok(())
    }
}

impl Memory for PlainMemory {
    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError> {
        let output = self.outputs.get_mut(&(place.seq, place.tensor, place.rank));
        let output = output.ok_or_else(|| MemoryError(format!("no output at {place:?}")))?;
        let start = usize::try_from(place.offset).expect("small tensors");
        output[start..start + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn parts(&mut self) -> (&mut dyn Contributions, Option<&mut dyn Plugins>) {
        (&mut self.contributions, Some(&mut self.plugins))
    }
}

enum Message {
    Chunk(Chunk),
    Admitted(Epoch, Seq),
}

pub(super) struct Node {
    pub(super) sidecar: SidecarIndex,
    pub(super) lanes: Vec<Executor>,
    pub(super) memory: PlainMemory,
    /// Admissions not yet passed to each lane.
    waiting: Vec<VecDeque<Arc<Admission>>>,
    /// The operations of the member.
    expected: Vec<Seq>,
    pub(super) done: Vec<Seq>,
}

/// Members whose ranks are reduced before the executor reads their contributions.
pub(super) struct Reduced {
    pub(super) sidecars: Vec<u32>,
    /// What each contribution is multiplied by before.
    pub(super) factor: f64,
}

pub(super) struct Net {
    pub(super) topology: SetTopology,
    pub(super) nodes: Vec<Node>,
    links: BTreeMap<(u16, usize, usize), VecDeque<Message>>,
    up: BTreeMap<(u16, usize, usize), bool>,
    unreported: BTreeMap<(u16, usize, usize), u32>,
    grant_bytes: u64,
    choices: Vec<u8>,
    cursor: usize,
    jobs: u64,
    /// A slow member, which works only when nothing else can happen.
    pub(super) slow: Option<usize>,
    /// The most private bytes seen: registers, parked, early.
    pub(super) peak: [u64; 3],
    /// The most bytes of measured copies seen at one member.
    pub(super) peak_measured: u64,
    pub(super) reduced: Option<Reduced>,
}

impl Node {
    /// Inputs of the local ranks that contribute, and memory for the local results.
    fn take_memory(&mut self, seq: Seq, job: &Job, topology: &SetTopology, input: &impl Fn(u32, Rank, u64) -> Vec<u8>) {
        let ranks = topology.ranks();
        let me = topology.member(self.sidecar).expect("a member");
        let local = &topology.members[me.index()].ranks;
        let present: Vec<Rank> = local.iter().copied().filter(|rank| !job.joined.contains(rank)).collect();
        for (tensor, counts) in (0..).zip(&job.tensors) {
            for &rank in &present {
                if let Some(elements) = job.input(&ranks, counts, rank) {
                    let bytes = (0..elements).flat_map(|element| input(tensor, rank, element)).collect();
                    self.memory.contributions.inputs.insert((seq, tensor, rank), bytes);
                }
            }
            for (whose, elements) in job.outputs(&ranks, counts) {
                if whose.map_or(!present.is_empty(), |rank| present.contains(&rank)) {
                    let bytes = usize::try_from(elements).expect("small") * job.dtype.size_bytes();
                    self.memory.outputs.insert((seq, tensor, whose), vec![0xEE; bytes]);
                }
            }
        }
    }
}

/// The elements of an input, of any type.
#[allow(clippy::cast_precision_loss, reason = "the values are small whole numbers")]
fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    if dtype.is_float() {
        return decode(dtype, bytes);
    }
    let number =
        |element: &[u8]| element.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte)) as f64;
    bytes.chunks(dtype.size_bytes()).map(number).collect()
}

impl Node {
    /// Replaces the inputs of the local ranks by that of the first one, the reduction of all.
    fn reduce_inputs(&mut self, job: &Job, admission: &Admission, factor: f64) {
        let inputs = &mut self.memory.contributions.inputs;
        for tensor in (0..).take(job.tensors.len()) {
            let of_ranks =
                admission.local_ranks.iter().filter_map(|rank| inputs.remove(&(admission.seq, tensor, *rank)));
            let values: Vec<Vec<f64>> = of_ranks.map(|bytes| numbers(job.dtype, &bytes)).collect();
            let combined = (0..values[0].len()).map(|element| {
                let each = values.iter().map(|of_rank| of_rank[element] * factor);
                match job.op {
                    Some(ReduceOp::Product) => each.product(),
                    Some(ReduceOp::Min) => each.fold(f64::INFINITY, f64::min),
                    _ => each.sum::<f64>(),
                }
            });
            let bytes = combined.flat_map(|value| encode(job.dtype, value)).collect();
            inputs.insert((admission.seq, tensor, admission.local_ranks[0]), bytes);
        }
    }
}

impl Net {
    pub(super) fn new(topology: SetTopology, lanes: u16, grant_bytes: u64, choices: Vec<u8>) -> Self {
        let node = |sidecar: SidecarIndex| {
            let executor = |lane| {
                let config = ExecutorConfig { me: sidecar, lane: Lane(lane), early_grant_bytes: grant_bytes };
                let mut executor = Executor::new(config);
                executor.handle_epoch(EPOCH);
                executor
            };
            let waiting = (0..lanes).map(|_| VecDeque::new()).collect();
            let lanes = (0..lanes).map(executor).collect();
            Node { sidecar, lanes, memory: PlainMemory::default(), waiting, expected: Vec::new(), done: Vec::new() }
        };
        let nodes = topology.members.iter().map(|member| node(member.sidecar)).collect();
        let (links, up, unreported) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let mut net = Self {
            topology,
            nodes,
            links,
            up,
            unreported,
            grant_bytes,
            choices,
            cursor: 0,
            jobs: 0,
            slow: None,
            peak: [0; 3],
            peak_measured: 0,
            reduced: None,
        };
        net.choices.push(1);
        net
    }

    /// Plans an operation for all members; the choices determine when their executors get it. `input` returns the bytes
    /// of an element by tensor, rank and index.
    pub(super) fn submit(&mut self, job: &Job, input: impl Fn(u32, Rank, u64) -> Vec<u8>) -> Seq {
        self.jobs += 1;
        let seq = Seq(self.jobs);
        let element_bytes = u32::try_from(job.dtype.size_bytes()).expect("at most 8");
        let work = Work { kind: job.kind.clone(), element_bytes, tensors: job.tensors.clone() };
        let topology = job.topology(&self.topology);
        for node in &mut self.nodes {
            let Some(me) = topology.member(node.sidecar) else { continue };
            node.take_memory(seq, job, &topology, &input);
            let admission = Admission {
                epoch: EPOCH,
                seq,
                plan: Arc::new(make_plan(me, &topology, &work, &job.tuning).expect("a plan")),
                arithmetic: Arithmetic {
                    dtype: job.dtype,
                    op: job.performed_op(),
                    ranks: u32::try_from(topology.size()).expect("few"),
                    prescale: job.prescale,
                    postscale: job.postscale,
                    codec: job.codec,
                    at_once: topology.len() == 1 || job.kind == WorkKind::AllReduceNAry,
                },
                plugin: job.plugin(),
                tensors: job.admitted_tensors(),
                local_ranks: topology.members[me.index()].ranks.clone(),
                served: topology.members[me.index()].ranks.clone(),
                set_served: topology.members[me.index()].ranks.as_slice().into(),
                joined: topology.members[me.index()].ranks.iter().copied().filter(|r| job.joined.contains(r)).collect(),
                topology: Arc::new(topology.clone()),
                contributions: Vec::new(),
                scheduled: false,
            };
            let reduced = self.reduced.as_ref().filter(|reduced| reduced.sidecars.contains(&node.sidecar.0));
            let admission = Arc::new(reduced.map_or_else(
                || admission.clone(),
                |Reduced { factor, .. }| {
                    node.reduce_inputs(job, &admission, *factor);
                    admission.with_reduced_ranks(*factor)
                },
            ));
            node.expected.extend(node.waiting.iter().map(|_| seq));
            node.waiting.iter_mut().for_each(|queue| queue.push_back(Arc::clone(&admission)));
        }
        seq
    }

    /// Submits a job whose inputs are its own values.
    pub(super) fn submit_values(&mut self, job: &Job) -> Seq {
        let ranks = job.topology(&self.topology).size();
        self.submit(job, |tensor, rank, element| encode(job.dtype, job.value(ranks, tensor, rank, element)))
    }

    /// Compares all results of a job with the expected ones; results of all ranks are equal bit by bit.
    pub(super) fn assert_results(&self, seq: Seq, job: &Job) {
        let topology = job.topology(&self.topology);
        for ((tensor, whose), expected) in job.expected(&self.topology) {
            let results = self.results(seq, tensor, whose);
            let joined = |ranks: &[Rank]| ranks.iter().all(|rank| job.joined.contains(rank));
            let having = |whose| match whose {
                None => topology.members.iter().filter(|member| !joined(&member.ranks)).count(),
                Some(_) => 1,
            };
            assert_eq!(results.len(), having(whose), "{seq} of {job:?}");
            expected.assert_equals(job.dtype, results[0], &format!("tensor {tensor} for {whose:?}, {seq} of {job:?}"));
            assert!(results.iter().all(|result| *result == results[0]), "all ranks end bit-equal: {seq} of {job:?}");
        }
    }

    /// A result, at each member that has it.
    pub(super) fn results(&self, seq: Seq, tensor: u32, whose: Option<Rank>) -> Vec<&[u8]> {
        self.nodes.iter().filter_map(|node| node.memory.outputs.get(&(seq, tensor, whose))).map(Vec::as_slice).collect()
    }

    /// Performs events in the order of the choices until none is left.
    pub(super) fn run(&mut self) {
        let mut quiet = false;
        for _ in 0..SWEEPS_MAX {
            let mut happened = false;
            let (nodes, lanes) = (self.nodes.len(), self.nodes[0].lanes.len());
            let mut turns: Vec<(usize, usize, usize)> = Vec::new();
            for node in 0..nodes {
                for lane in 0..lanes {
                    turns.push((node, lane, nodes));
                    turns.extend((0..nodes).map(|peer| (node, lane, peer)));
                }
            }
            while !turns.is_empty() {
                let (node, lane, peer) = turns.swap_remove(self.choose(turns.len()));
                let times = self.choose(4);
                if peer == nodes && self.slow == Some(node) && !quiet {
                    continue;
                }
                for _ in 0..=times {
                    happened |= if peer == nodes { self.work(node, lane) } else { self.receive(node, lane, peer) };
                }
            }
            if quiet && !happened {
                return;
            }
            quiet = !happened;
        }
        panic!("it does not come to rest");
    }

    /// Admits the submitted operations, and returns why each member cannot perform them.
    pub(super) fn failures(&mut self) -> Vec<String> {
        let mut reasons = Vec::new();
        for node in &mut self.nodes {
            for (executor, waiting) in node.lanes.iter_mut().zip(&mut node.waiting) {
                waiting.drain(..).for_each(|admission| executor.handle_admission(admission));
                while let Some(action) = executor.poll_action(&mut node.memory) {
                    if let ExecutorAction::Failed { reason, .. } = action {
                        reasons.push(reason);
                    }
                }
            }
        }
        reasons
    }

    pub(super) fn assert_all_done(&self) {
        for node in &self.nodes {
            let mut done = node.done.clone();
            done.sort_unstable();
            assert_eq!(done, node.expected, "{} completed", node.sidecar);
            for executor in &node.lanes {
                let left = executor.private_bytes();
                assert_eq!((left.registers, left.measured, left.parked, left.early), (0, 0, 0, 0), "{left:?}");
            }
        }
    }

    fn choose(&mut self, count: usize) -> usize {
        self.cursor += 1;
        let choice = usize::from(self.choices[self.cursor % self.choices.len()]);
        // Every pass over the choices reads them differently, so that no cycle of events repeats for ever: the
        // multiples of an odd number modulo 2^64 (Weyl's sequence) do not come back within any run.
        let pass = (self.cursor as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        (choice + usize::try_from(pass).expect("24 bits")) % count
    }

    /// One admission or one poll.
    fn work(&mut self, index: usize, lane: usize) -> bool {
        if self.choose(3) == 0
            && let Some(admission) = self.nodes[index].waiting[lane].pop_front()
        {
            self.nodes[index].lanes[lane].handle_admission(admission);
            return true;
        }
        let node = &mut self.nodes[index];
        let action = node.lanes[lane].poll_action(&mut node.memory);
        let private = node.lanes[lane].private_bytes();
        let now = [private.registers, private.parked, private.early];
        self.peak_measured = self.peak_measured.max(private.measured);
        self.peak = std::array::from_fn(|i| self.peak[i].max(now[i]));
        let Some(action) = action else { return !self.nodes[index].waiting[lane].is_empty() };
        self.act(index, lane, action);
        true
    }

    fn act(&mut self, index: usize, lane: usize, action: ExecutorAction) {
        let number = u16::try_from(lane).expect("few lanes");
        match action {
            ExecutorAction::Open { peer } => {
                let other = self.index(peer);
                // The link comes up at both ends, once, whichever of them asks first.
                self.up.entry((number, index, other)).or_insert(false);
                self.up.entry((number, other, index)).or_insert(false);
            }
            ExecutorAction::Send { to, chunk } => {
                let key = (number, index, self.index(to));
                *self.unreported.entry(key).or_default() += 1;
                self.links.entry(key).or_default().push_back(Message::Chunk(chunk));
            }
            ExecutorAction::Admitted { to, epoch, seq } => {
                let key = (number, index, self.index(to));
                self.links.entry(key).or_default().push_back(Message::Admitted(epoch, seq));
            }
            ExecutorAction::Done { epoch, seq } => {
                assert_eq!(epoch, EPOCH);
                self.nodes[index].done.push(seq);
            }
            ExecutorAction::Worked { .. } => {}
            other => panic!("{other:?}"),
        }
    }

    /// Delivers the next item of a link from one peer: its opening, a message, or a report of sent chunks.
    fn receive(&mut self, index: usize, lane: usize, peer: usize) -> bool {
        let number = u16::try_from(lane).expect("few lanes");
        let from = self.nodes[peer].sidecar;
        if let Some(up) = self.up.get_mut(&(number, index, peer))
            && !*up
        {
            *up = true;
            self.nodes[index].lanes[lane].handle_link_up(from, self.grant_bytes);
            return true;
        }
        if self.choose(2) == 0
            && let Some(chunks) = self.unreported.remove(&(number, index, peer))
        {
            self.nodes[index].lanes[lane].handle_sent(from, chunks);
            return true;
        }
        let link = self.links.get_mut(&(number, peer, index));
        match link.and_then(VecDeque::pop_front) {
            Some(Message::Chunk(chunk)) => {
                // As on a real link, the receiver gets separate buffers, into which it may write.
                let data = bytes::Bytes::from(chunk.data.to_vec());
                let executor = &mut self.nodes[index].lanes[lane];
                executor.handle_chunk(from, Chunk { data, ..chunk }).expect("no violation among correct peers");
                true
            }
            Some(Message::Admitted(epoch, seq)) => {
                self.nodes[index].lanes[lane].handle_admitted(from, epoch, seq);
                true
            }
            None => self.unreported.contains_key(&(number, index, peer)),
        }
    }

    fn index(&self, sidecar: SidecarIndex) -> usize {
        self.nodes.iter().position(|node| node.sidecar == sidecar).expect("a member")
    }
}
