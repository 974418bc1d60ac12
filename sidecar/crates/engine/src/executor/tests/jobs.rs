//! Operations for tests: their inputs, and their expected results, computed by plain loops.

use std::collections::BTreeMap;
use std::sync::Arc;

use ronde_collectives::plan::WorkKind;
use ronde_wire::{Algorithm, Codec, DType, PluginWork, Rank, ReduceOp, SetTopology, TensorName, Tuning};

use super::plugins;
use crate::event::{AdmittedPlugin, AdmittedTensor};

/// One operation of a test.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) kind: WorkKind,
    pub(super) dtype: DType,
    pub(super) op: Option<ReduceOp>,
    pub(super) codec: Codec,
    pub(super) prescale: f64,
    pub(super) postscale: f64,
    pub(super) tensors: Vec<Vec<u64>>,
    pub(super) tuning: Tuning,
    /// Ranks that have joined.
    pub(super) joined: Vec<Rank>,
    /// The only ranks that take part, if not all do.
    pub(super) only: Vec<Rank>,
    /// Whether a plugin with the same results performs it.
    pub(super) with_plugin: bool,
}

/// An expected result.
#[derive(Debug)]
pub(super) enum Expected {
    Bytes(Vec<u8>),
    /// Up to the rounding of the type.
    Near(Vec<f64>),
}

/// A tensor of an operation and the rank of its result, as in [`crate::OutputPlace`].
pub(super) type Place = (u32, Option<Rank>);

impl Job {
    pub(super) fn new(
        kind: WorkKind,
        dtype: DType,
        op: Option<ReduceOp>,
        tensors: Vec<Vec<u64>>,
        tuning: Tuning,
    ) -> Self {
        let coded = matches!(kind, WorkKind::AllReduceCoded { .. });
        let (codec, prescale, postscale) = (if coded { Codec::F16 } else { Codec::None }, 1.0, 1.0);
        let (joined, only, with_plugin) = (Vec::new(), Vec::new(), false);
        Self { kind, dtype, op, codec, prescale, postscale, tensors, tuning, joined, only, with_plugin }
    }

    /// The same operation with a plugin, where there is one for it.
    pub(super) fn with_plugin(mut self) -> Self {
        let op = self.op.filter(|op| *op == ReduceOp::Max || self.kind.is_coded() || self.kind.is_nary());
        let all_reduces = self.kind == WorkKind::AllReduce || self.kind.is_coded() || self.kind.is_nary();
        let Some(op) = op.filter(|_| all_reduces) else { return self };
        self.with_plugin = true;
        match plugins::like(op).work {
            PluginWork::Codec { block_elements, encoded_bytes } => {
                self.codec = Codec::Plugin;
                self.kind = WorkKind::AllReduceByBlocks { block_elements, encoded_bytes };
            }
            PluginWork::TwoPass { measures } => self.kind = WorkKind::AllReduceTwoPass { measures },
            _ => {}
        }
        self
    }

    /// The reduction in the admission.
    pub(super) fn performed_op(&self) -> Option<ReduceOp> {
        if self.with_plugin && self.codec != Codec::Plugin { Some(ReduceOp::Plugin) } else { self.op }
    }

    pub(super) fn plugin(&self) -> Option<AdmittedPlugin> {
        let op = self.op.filter(|_| self.with_plugin)?;
        let elements = self.tensors.iter().map(|counts| counts.iter().sum()).collect();
        Some(AdmittedPlugin { uses: Arc::new(plugins::like(op)), elements })
    }

    pub(super) fn admitted_tensors(&self) -> Vec<AdmittedTensor> {
        let tensor = |index: usize| {
            let name = TensorName::new(format!("t{index}")).expect("short");
            AdmittedTensor { name, requests: Vec::new(), own: false }
        };
        (0..self.tensors.len()).map(tensor).collect()
    }

    /// An operation from random bytes.
    pub(super) fn from_seed(seed: &[u8; 12], world: &SetTopology, lanes: u16) -> Self {
        let pick = |index: usize, count: usize| usize::from(seed[index]) % count;
        let ranks = world.ranks();
        let root = ranks[pick(1, ranks.len())];
        let (kind, algorithm) = kind_of(pick(0, KINDS), root);
        let op = op_of(&kind, pick(5, PAIRWISE.len()));
        let mut only = Vec::new();
        if pick(0, KINDS) == MESSAGE && ranks.len() > 1 {
            only = vec![root, ranks[(pick(1, ranks.len()) + 1 + pick(8, ranks.len() - 1)) % ranks.len()]];
        }
        let topology = if only.is_empty() { world.clone() } else { world.restricted_to(&only) };
        let algorithm = if topology.len() == 1 { Algorithm::Local } else { algorithm };
        let tuning = Tuning { algorithm, chunk_bytes: 4_096, lanes, window: 1 + u16::from(seed[7]) % 4 };
        let tensors = match kind {
            WorkKind::Barrier => 0,
            WorkKind::AllReduceTwoPass { .. } | WorkKind::AllReduceAdaptive => 1,
            _ => 1 + pick(4, 3),
        };
        let tensors = (0..tensors).map(|tensor| counts(&kind, &topology.ranks(), &only, &seed[2..4], tensor)).collect();
        let mut job = Self::new(kind, dtype_of(pick(6, DType::ALL.len()), op), op, tensors, tuning);
        if job.codec != Codec::None {
            (job.dtype, job.codec) = (DType::F32, [Codec::F16, Codec::Bf16][pick(6, 2)]);
        }
        if job.dtype.size_bytes() > 1 && op.is_some_and(|op| op != ReduceOp::Product) {
            (job.prescale, job.postscale) = ([1.0, 2.0][pick(9, 2)], [1.0, 2.0][pick(10, 2)]);
        }
        if job.may_join() && pick(11, 2) == 0 {
            let stays = ranks[pick(8, ranks.len())];
            let joins = |rank: &Rank| *rank != stays && (usize::from(seed[11]) >> 1 >> (rank.index() % 7)) & 1 == 1;
            job.joined = ranks.iter().copied().filter(joins).collect();
        }
        job.only = only;
        if seed[7] & 4 == 0 { job } else { job.with_plugin() }
    }

    /// The participating ranks of a world.
    pub(super) fn topology(&self, world: &SetTopology) -> SetTopology {
        if self.only.is_empty() { world.clone() } else { world.restricted_to(&self.only) }
    }

    /// The number of elements that a rank contributes; `None` when it contributes nothing.
    pub(super) fn input(&self, ranks: &[Rank], counts: &[u64], rank: Rank) -> Option<u64> {
        let position = ranks.binary_search(&rank).expect("a rank of the set");
        match self.kind {
            _ if self.joined.contains(&rank) => None,
            WorkKind::Broadcast { root } | WorkKind::Scatter { root } if root != rank => None,
            WorkKind::AllGather | WorkKind::Gather { .. } => Some(counts[position]),
            WorkKind::AllToAll => Some(counts[position * ranks.len()..][..ranks.len()].iter().sum()),
            _ => Some(counts.iter().sum()),
        }
    }

    /// The results of a tensor, with their elements.
    pub(super) fn outputs(&self, ranks: &[Rank], counts: &[u64]) -> Vec<(Option<Rank>, u64)> {
        let each = |elements: &dyn Fn(usize) -> u64| {
            ranks.iter().enumerate().map(|(position, rank)| (Some(*rank), elements(position))).collect()
        };
        let all = counts.iter().sum();
        match self.kind {
            WorkKind::ReduceScatter | WorkKind::Scatter { .. } => each(&|position| counts[position]),
            WorkKind::AllToAll => each(&|position| counts.iter().skip(position).step_by(ranks.len()).sum()),
            WorkKind::Reduce { root } | WorkKind::Gather { root } => vec![(Some(root), all)],
            _ => vec![(None, all)],
        }
    }

    /// Small whole numbers whose sums, products and averages are exact in every type.
    pub(super) fn value(&self, ranks: usize, tensor: u32, rank: Rank, element: u64) -> f64 {
        let mixed = element.wrapping_mul(31) ^ u64::from(tensor * 7 + rank.0 * 13);
        let value = match self.op {
            _ if self.joined.contains(&rank) => 0,
            _ if self.dtype == DType::Bool => mixed & 1,
            Some(ReduceOp::Product) if self.dtype.size_bytes() == 1 => {
                1 + u64::from(mixed.is_multiple_of(5) && rank.0 < 6)
            }
            Some(ReduceOp::Product) => 1 + (mixed & 1),
            Some(ReduceOp::Average) => (mixed & 1) * ranks as u64,
            _ => mixed % 8,
        };
        value as f64
    }

    /// All expected results.
    pub(super) fn expected(&self, world: &SetTopology) -> BTreeMap<Place, Expected> {
        let ranks = self.topology(world).ranks();
        let mut expected = BTreeMap::new();
        for (tensor, counts) in (0..).zip(&self.tensors) {
            for (position, (whose, _)) in self.outputs(&ranks, counts).into_iter().enumerate() {
                expected.insert((tensor, whose), self.expected_of(&ranks, tensor, counts, position));
            }
        }
        expected
    }

    fn expected_of(&self, ranks: &[Rank], tensor: u32, counts: &[u64], position: usize) -> Expected {
        let at = |rank: Rank, element| self.value(ranks.len(), tensor, rank, element);
        let before = |position: usize| counts[..position].iter().sum::<u64>();
        let all: u64 = counts.iter().sum();
        let block = |position: usize| before(position)..before(position) + counts[position];
        let moved: Vec<f64> = match self.kind {
            WorkKind::Broadcast { root } => (0..all).map(|element| at(root, element)).collect(),
            WorkKind::Scatter { root } => block(position).map(|element| at(root, element)).collect(),
            WorkKind::AllGather | WorkKind::Gather { .. } => {
                let of = |(rank, count): (&Rank, &u64)| (0..*count).map(|e| at(*rank, e)).collect::<Vec<_>>();
                ranks.iter().zip(counts).flat_map(of).collect()
            }
            WorkKind::AllToAll => {
                let row = |sender: usize| &counts[sender * ranks.len()..][..ranks.len()];
                let start = |sender: usize| row(sender)[..position].iter().sum::<u64>();
                let of = |sender: usize| {
                    (0..row(sender)[position]).map(move |e| at(ranks[sender], start(sender) + e)).collect::<Vec<_>>()
                };
                (0..ranks.len()).flat_map(of).collect()
            }
            WorkKind::ReduceScatter => return self.reduced(ranks, tensor, block(position)),
            _ => return self.reduced(ranks, tensor, 0..all),
        };
        Expected::Bytes(moved.into_iter().flat_map(|value| encode(self.dtype, value)).collect())
    }

    fn reduced(&self, ranks: &[Rank], tensor: u32, elements: std::ops::Range<u64>) -> Expected {
        let op = self.op.expect("a reduction");
        let prescaled =
            |rank: &Rank| elements.clone().map(|e| self.value(ranks.len(), tensor, *rank, e) * self.prescale).collect();
        let values: Vec<Vec<f64>> = ranks.iter().map(prescaled).collect();
        let len = values[0].len();
        let near = match op {
            ReduceOp::Adasum => adaptive_sum(values),
            ReduceOp::ClippedMean => clipped_mean(&values),
            _ => {
                let element = |index: usize| {
                    let column: Vec<f64> = values.iter().map(|rank| rank[index]).collect();
                    encode(self.dtype, self.combined(op, &column) * self.postscale)
                };
                return Expected::Bytes((0..len).flat_map(element).collect());
            }
        };
        Expected::Near(near.into_iter().map(|value| value * self.postscale).collect())
    }

    fn combined(&self, op: ReduceOp, column: &[f64]) -> f64 {
        let boolean = self.dtype == DType::Bool;
        let (least, greatest) =
            (column.iter().copied().fold(f64::MAX, f64::min), column.iter().copied().fold(0.0, f64::max));
        match op {
            ReduceOp::Sum if boolean => greatest,
            ReduceOp::Product if boolean => least,
            ReduceOp::Average => column.iter().sum::<f64>() / column.len() as f64,
            ReduceOp::Min => least,
            ReduceOp::Max => greatest,
            ReduceOp::Product => column.iter().product(),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => bitwise(op, column),
            ReduceOp::Median => {
                let mut sorted = column.to_vec();
                sorted.sort_by(f64::total_cmp);
                (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
            }
            _ => column.iter().sum(),
        }
    }

    fn may_join(&self) -> bool {
        let all_reduce = match self.kind {
            WorkKind::AllReduce | WorkKind::AllReduceAdaptive => true,
            _ if self.kind.is_coded() => true,
            WorkKind::Barrier => return true,
            _ => false,
        };
        all_reduce && matches!(self.op, Some(ReduceOp::Sum | ReduceOp::Average | ReduceOp::Adasum))
    }
}

/// The number of kinds that [`Job::from_seed`] distinguishes.
pub(super) const KINDS: usize = 16;
/// The kind that is a message from one rank to another.
const MESSAGE: usize = 15;

/// The kinds of work by number, with an algorithm for several members.
pub(super) fn kind_of(number: usize, root: Rank) -> (WorkKind, Algorithm) {
    match number {
        0 => (WorkKind::AllReduce, Algorithm::Ring),
        1 => (WorkKind::AllReduce, Algorithm::RecursiveDoubling),
        2 => (WorkKind::AllReduce, Algorithm::HalvingDoubling),
        3 => (WorkKind::AllReduceCoded { encoded_bytes: 2 }, Algorithm::Direct),
        4 => (WorkKind::AllReduceNAry, Algorithm::Direct),
        5 => (WorkKind::AllReduceTwoPass { measures: 1 }, Algorithm::Direct),
        6 => (WorkKind::AllReduceAdaptive, Algorithm::Direct),
        7 => (WorkKind::ReduceScatter, Algorithm::Ring),
        8 => (WorkKind::Reduce { root }, Algorithm::BinomialTree),
        9 => (WorkKind::Broadcast { root }, Algorithm::BinomialTree),
        10 => (WorkKind::AllGather, Algorithm::Ring),
        11 => (WorkKind::Gather { root }, Algorithm::Linear),
        12 => (WorkKind::AllToAll, Algorithm::Pairwise),
        13 => (WorkKind::Barrier, Algorithm::Dissemination),
        _ => (WorkKind::Scatter { root }, Algorithm::Linear),
    }
}

/// A reduction for a kind that reduces, one of [`PAIRWISE`] where there is a choice.
pub(super) fn op_of(kind: &WorkKind, number: usize) -> Option<ReduceOp> {
    match kind {
        WorkKind::AllReduce | WorkKind::ReduceScatter | WorkKind::Reduce { .. } => Some(PAIRWISE[number]),
        WorkKind::AllReduceCoded { .. } => Some(PAIRWISE[number % 2]),
        WorkKind::AllReduceNAry => Some(ReduceOp::Median),
        WorkKind::AllReduceTwoPass { .. } => Some(ReduceOp::ClippedMean),
        WorkKind::AllReduceAdaptive => Some(ReduceOp::Adasum),
        _ => None,
    }
}

/// The bitwise reduction of whole numbers that are not negative.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the values are small whole numbers")]
fn bitwise(op: ReduceOp, column: &[f64]) -> f64 {
    let combine: fn(u64, u64) -> u64 = match op {
        ReduceOp::BitAnd => |a, b| a & b,
        ReduceOp::BitOr => |a, b| a | b,
        _ => |a, b| a ^ b,
    };
    column.iter().map(|value| *value as u64).reduce(combine).unwrap_or(0) as f64
}

/// Reductions in pairs; codecs have the first two.
const PAIRWISE: [ReduceOp; 8] = [
    ReduceOp::Sum,
    ReduceOp::Average,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
];

fn dtype_of(number: usize, op: Option<ReduceOp>) -> DType {
    let dtype = DType::ALL[number];
    match op {
        Some(ReduceOp::Average) if dtype == DType::Bool => DType::F16,
        Some(op) if op.is_bitwise() && dtype.is_float() => [DType::U8, DType::I64, DType::Bool, DType::I16][number % 4],
        Some(ReduceOp::Median | ReduceOp::ClippedMean | ReduceOp::Adasum) if !dtype.is_float() => {
            [DType::F16, DType::Bf16, DType::F32, DType::F64][number % 4]
        }
        _ => dtype,
    }
}

/// The element counts of a tensor of this kind.
fn counts(kind: &WorkKind, ranks: &[Rank], only: &[Rank], salts: &[u8], tensor: usize) -> Vec<u64> {
    let number = |salt: usize| usize::from(salts[0]) + salt * usize::from(salts[1]);
    let count = |salt: usize| [0, 1, 2, 7, 1_025, 5_000][number(salt) % 6];
    match kind {
        WorkKind::AllGather | WorkKind::Gather { .. } | WorkKind::ReduceScatter => {
            (0..ranks.len()).map(|rank| count(tensor + rank)).collect()
        }
        // The receiver of a message gets everything.
        WorkKind::Scatter { .. } if !only.is_empty() => {
            ranks.iter().map(|rank| if *rank == only[1] { count(tensor) } else { 0 }).collect()
        }
        WorkKind::Scatter { .. } => (0..ranks.len()).map(|rank| count(tensor + rank)).collect(),
        WorkKind::AllToAll => {
            (0..ranks.len().pow(2)).map(|pair| [0, 1, 7, 300, 1_100][number(tensor + pair) % 5]).collect()
        }
        _ => vec![count(tensor)],
    }
}

/// Pairs of neighbours are combined until one is left; so many of the first ranks before that the rest is a power of
/// two.
fn adaptive_sum(mut operands: Vec<Vec<f64>>) -> Vec<f64> {
    let ranks = operands.len();
    let power = 1 << ranks.ilog2();
    let mut pairs = if ranks == power { ranks / 2 } else { ranks - power };
    while operands.len() > 1 {
        let rest = operands.split_off(2 * pairs);
        operands = operands.chunks(2).map(|pair| combine_adaptively(&pair[0], &pair[1])).chain(rest).collect();
        pairs = operands.len() / 2;
    }
    operands.remove(0)
}

fn combine_adaptively(a: &[f64], b: &[f64]) -> Vec<f64> {
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let factor = |own: &[f64]| {
        let square = product(own, own);
        if square == 0.0 { 1.0 } else { 1.0 - product(a, b) / (2.0 * square) }
    };
    let (left, right) = (factor(a), factor(b));
    a.iter().zip(b).map(|(a, b)| left * a + right * b).collect()
}

fn clipped_mean(values: &[Vec<f64>]) -> Vec<f64> {
    let norm = |values: &Vec<f64>| values.iter().map(|value| value * value).sum::<f64>().sqrt();
    let norms: Vec<f64> = values.iter().map(norm).collect();
    let mut sorted = norms.clone();
    sorted.sort_by(f64::total_cmp);
    let middle = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
    let factor = |norm: f64| if norm <= middle { 1.0 } else { middle / norm };
    let element = |index: usize| {
        let clipped = values.iter().zip(&norms).map(|(rank, norm)| rank[index] * factor(*norm));
        clipped.sum::<f64>() / values.len() as f64
    };
    (0..values[0].len()).map(element).collect()
}

/// A value that the type holds exactly; written out by hand, so that it shares nothing with the kernels.
#[allow(clippy::cast_possible_truncation, reason = "the values are small, and exact in the type")]
pub(super) fn encode(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::F32 => (value as f32).to_le_bytes().to_vec(),
        DType::Bf16 => (value as f32).to_le_bytes()[2..].to_vec(),
        DType::F16 if value == 0.0 => vec![0, 0],
        DType::F16 => {
            let bits = value.to_bits();
            let exponent = (bits >> 52 & 0x7ff) - (1_023 - 15);
            (bits >> 63 << 15 | exponent << 10 | (bits >> 42 & 0x3ff)).to_le_bytes()[..2].to_vec()
        }
        _ => (value as i64).to_le_bytes()[..dtype.size_bytes()].to_vec(),
    }
}

/// The inverse of `encode`, for floating-point types.
pub(super) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let f16 = |bits: u16| {
        let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff) / 1_024.0);
        let magnitude = match exponent {
            0 => fraction * 2_f64.powi(-14),
            31 if fraction == 0.0 => f64::INFINITY,
            31 => f64::NAN,
            _ => (1.0 + fraction) * 2_f64.powi(exponent - 15),
        };
        if bits >> 15 == 1 { -magnitude } else { magnitude }
    };
    let element = |bytes: &[u8]| match *bytes {
        [a, b] if dtype == DType::F16 => f16(u16::from_le_bytes([a, b])),
        [a, b] => f64::from(f32::from_le_bytes([0, 0, a, b])),
        [a, b, c, d] => f64::from(f32::from_le_bytes([a, b, c, d])),
        _ => f64::from_le_bytes(bytes.try_into().expect("eight bytes")),
    };
    bytes.chunks(dtype.size_bytes()).map(element).collect()
}

impl Expected {
    pub(super) fn assert_equals(&self, dtype: DType, found: &[u8], what: &str) {
        match self {
            Self::Bytes(expected) => assert!(found == expected, "{what}"),
            Self::Near(expected) => {
                let found = decode(dtype, found);
                assert_eq!(found.len(), expected.len(), "{what}");
                let scale = expected.iter().fold(0.0_f64, |scale, value| scale.max(value.abs()));
                let tolerance = scale * [1e-12, 2_f64.powi(-22), 2_f64.powi(-8), 2_f64.powi(-10)][precision(dtype)];
                for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
                    assert!((found - expected).abs() <= tolerance, "{what}: {found} for {expected} at {index}");
                }
            }
        }
    }
}

fn precision(dtype: DType) -> usize {
    [DType::F64, DType::F32, DType::Bf16, DType::F16].iter().position(|other| *other == dtype).expect("a float type")
}
