//! Tensor fusion: which ready tensors share the next bucket.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use ronde_collectives::inputs::BLOCKS_MAX;
use ronde_wire::{
    Algorithm, Codec, Collective, DType, Group, PluginUse, PluginWork, Rank, control::OrderedTensor, limits,
};

use crate::engine::shared::config::EngineConfig;
use crate::engine::shared::planning::may_share;

/// A tensor that all ranks have announced with matching requests.
#[derive(Clone, Debug)]
pub(crate) struct ReadyTensor {
    pub(crate) tensor: OrderedTensor,
    pub(crate) collective: Collective,
    pub(crate) dtype: DType,
    pub(crate) prescale: f64,
    pub(crate) postscale: f64,
    pub(crate) codec: Codec,
    pub(crate) plugin: Option<Arc<PluginUse>>,
    /// The group of its requests.
    pub(crate) group: Option<Group>,
    /// The use of its group that released it; 0 for none.
    pub(crate) group_use: u64,
    /// Ranks of the set without a request, because they have joined, ascending.
    pub(crate) joined: Vec<Rank>,
    pub(crate) algorithm: Algorithm,
    /// Bytes that count against the threshold: of the tensor, summed over all ranks where they differ, or of all
    /// contributions of an eager tensor.
    pub(crate) bytes: u64,
    /// For an eager tensor the contribution of each rank of the set, in rank order; empty otherwise.
    pub(crate) contributions: Vec<Bytes>,
}

/// Which tensors may share a bucket, besides compatible ones only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusionLimits {
    /// Bytes of tensors in a bucket; 0 switches fusion off.
    pub(crate) threshold_bytes: u64,
    /// See [`EngineConfig::separates_small_tensors`].
    pub(crate) separates_small: bool,
}

impl FusionLimits {
    /// The limits of these settings.
    pub(crate) fn of(config: &EngineConfig) -> Self {
        let EngineConfig { fusion_threshold_bytes, separates_small_tensors, .. } = *config;
        Self { threshold_bytes: fusion_threshold_bytes, separates_small: separates_small_tensors }
    }

    fn may_share(self, one: &ReadyTensor, other: &ReadyTensor) -> bool {
        one.is_compatible(other) && (!self.separates_small || one.is_small() == other.is_small())
    }
}

/// Takes the next bucket: the first tensor and all after it that may share its bucket, in order, as long as they fit. The
/// remaining tensors keep their order. Empty only when the queue is.
pub(crate) fn next_bucket(queue: &mut VecDeque<ReadyTensor>, limits: FusionLimits) -> Vec<ReadyTensor> {
    let Some(first) = queue.pop_front() else { return Vec::new() };
    let is_eager = first.algorithm == Algorithm::Eager;
    let threshold_bytes = if is_eager { limits.threshold_bytes.min(EAGER_BYTES) } else { limits.threshold_bytes };
    let mut room = Room::new(&first, threshold_bytes);
    let mut bucket = vec![first];
    if !may_share(&bucket[0].collective, bucket[0].plugin.as_deref())
        || threshold_bytes == 0
        || bucket[0].bytes > threshold_bytes
    {
        return bucket;
    }
    let mut passed_over = Vec::new();
    while passed_over.len() < SKIPPED_TENSORS_MAX {
        let Some(next) = queue.pop_front() else { break };
        if !limits.may_share(&next, &bucket[0]) {
            passed_over.push(next);
        } else if room.take(&next) {
            bucket.push(next);
        } else {
            passed_over.push(next);
            break;
        }
    }
    for tensor in passed_over.into_iter().rev() {
        queue.push_front(tensor);
    }
    bucket
}

/// Tensors that are skipped in search of compatible ones; bounds the work for a bucket.
const SKIPPED_TENSORS_MAX: usize = 1_024;

/// The rest of a bucket's limits.
struct Room {
    bytes: u64,
    frame_bytes: usize,
    tensors: usize,
    blocks: u64,
}

impl Room {
    fn new(first: &ReadyTensor, threshold_bytes: u64) -> Self {
        Self {
            bytes: threshold_bytes.saturating_sub(first.bytes),
            frame_bytes: ORDER_FRAME_BYTES.saturating_sub(first.frame_bytes() + 5 * first.joined.len()),
            tensors: limits::BUCKET_TENSORS_MAX - 1,
            blocks: BLOCKS_MAX.saturating_sub(first.blocks()),
        }
    }

    /// Reserves room for a tensor; false when there is none.
    fn take(&mut self, tensor: &ReadyTensor) -> bool {
        let fits = tensor.bytes <= self.bytes
            && tensor.frame_bytes() <= self.frame_bytes
            && self.tensors > 0
            && tensor.blocks() <= self.blocks;
        if fits {
            self.bytes -= tensor.bytes;
            self.frame_bytes -= tensor.frame_bytes();
            self.tensors -= 1;
            self.blocks -= tensor.blocks();
        }
        fits
    }
}

/// The most bytes that the length of a contribution takes in a frame.
const LENGTH_BYTES: usize = 2;

/// Contributions of an order, in bytes.
const EAGER_BYTES: u64 = limits::EAGER_ORDER_BYTES_MAX as u64;

/// Bytes of an order's tensors; the rest of the frame is for the other fields.
const ORDER_FRAME_BYTES: usize = limits::CONTROL_FRAME_BYTES_MAX - 4_096;

impl ReadyTensor {
    /// Whether both are equal requests of the same ranks.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.tensor == other.tensor && self.group == other.group && self.is_compatible(other)
    }

    fn is_compatible(&self, other: &Self) -> bool {
        self.collective == other.collective
            && self.dtype == other.dtype
            && self.prescale.to_bits() == other.prescale.to_bits()
            && self.postscale.to_bits() == other.postscale.to_bits()
            && self.algorithm == other.algorithm
            && self.codec == other.codec
            && self.plugin == other.plugin
            && self.joined == other.joined
    }

    /// Whether workers keep it in main memory, wherever their tensor is.
    fn is_small(&self) -> bool {
        self.bytes <= limits::EAGER_BYTES_MAX as u64
    }

    /// The most blocks of a codec plugin; 0 without one.
    pub(crate) fn blocks(&self) -> u64 {
        match self.plugin.as_deref().map(|plugin| plugin.work) {
            Some(PluginWork::Codec { block_elements, .. }) => {
                self.tensor.shape.elements().div_ceil(u64::from(block_elements.max(1)))
            }
            _ => 0,
        }
    }

    /// The most bytes of it in an order's frame; a number has at most ten.
    fn frame_bytes(&self) -> usize {
        let numbers = self.tensor.shape.dimensions().len() + self.tensor.rows.len() + 3;
        let contributions: usize = self.contributions.iter().map(|bytes| bytes.len() + LENGTH_BYTES).sum();
        self.tensor.name.as_str().len() + 10 * numbers + contributions
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use ronde_wire::{Rank, ReduceOp, Shape, TensorName};

    use super::*;

    /// A sum of bytes.
    pub(in crate::engine) fn tensor(name: &str, bytes: u64) -> ReadyTensor {
        ReadyTensor {
            tensor: OrderedTensor {
                name: TensorName::new(name).expect("a name"),
                shape: Shape::new(vec![bytes]).expect("a shape"),
                rows: Vec::new(),
            },
            collective: Collective::AllReduce { op: ReduceOp::Sum },
            dtype: DType::U8,
            prescale: 1.0,
            postscale: 1.0,
            codec: Codec::None,
            plugin: None,
            group: None,
            group_use: 0,
            joined: Vec::new(),
            algorithm: Algorithm::Ring,
            bytes,
            contributions: Vec::new(),
        }
    }

    fn names(tensors: &[ReadyTensor]) -> Vec<&str> {
        tensors.iter().map(|t| t.tensor.name.as_str()).collect()
    }

    fn limits_of(threshold_bytes: u64) -> FusionLimits {
        FusionLimits { threshold_bytes, separates_small: false }
    }

    fn buckets(tensors: Vec<ReadyTensor>, threshold: u64) -> Vec<Vec<String>> {
        buckets_within(tensors, limits_of(threshold))
    }

    fn buckets_within(tensors: Vec<ReadyTensor>, limits: FusionLimits) -> Vec<Vec<String>> {
        let mut queue: VecDeque<ReadyTensor> = tensors.into();
        let mut all = Vec::new();
        while !queue.is_empty() {
            all.push(names(&next_bucket(&mut queue, limits)).into_iter().map(str::to_owned).collect());
        }
        all
    }

    #[test]
    fn compatible_tensors_share_up_to_the_threshold() {
        let tensors = vec![tensor("a", 40), tensor("b", 0), tensor("c", 60), tensor("d", 1)];
        assert_eq!(buckets(tensors, 100), [vec!["a", "b", "c"], vec!["d"]]);
    }

    #[test]
    fn a_tensor_larger_than_the_threshold_travels_alone() {
        let tensors = vec![tensor("a", 500), tensor("b", 1), tensor("c", 99)];
        assert_eq!(buckets(tensors, 100), [vec!["a"], vec!["b", "c"]]);
    }

    /// A plan has a sub-schedule for each block, and a bound for sub-schedules.
    #[test]
    fn blocks_of_plugins_share_up_to_what_a_plan_holds() {
        let work = PluginWork::Codec { block_elements: 64, encoded_bytes: 64 };
        let uses = PluginUse { name: "a".into(), version: "1".into(), digest: [0; 32], parameters: Vec::new(), work };
        let plugin = Some(Arc::new(uses));
        let of_blocks = |name, blocks: u64| ReadyTensor { plugin: plugin.clone(), ..tensor(name, blocks * 64) };
        let most = [of_blocks("a", BLOCKS_MAX - 2), of_blocks("b", 2), of_blocks("c", 1)];
        assert_eq!(most[0].blocks(), BLOCKS_MAX - 2);
        assert_eq!(buckets(most.into(), 1 << 40), [vec!["a", "b"], vec!["c"]]);
    }

    #[test]
    fn threshold_zero_switches_fusion_off() {
        assert_eq!(buckets(vec![tensor("a", 0), tensor("b", 0)], 0), [["a"], ["b"]]);
    }

    #[test]
    fn small_tensors_are_separate_where_long_ones_may_be_in_device_memory() {
        let most = limits::EAGER_BYTES_MAX as u64;
        let tensors = vec![tensor("a", most + 1), tensor("b", most), tensor("c", 1 << 20), tensor("d", 0)];
        let limits = FusionLimits { separates_small: true, ..limits_of(1 << 30) };
        assert_eq!(buckets_within(tensors.clone(), limits), [["a", "c"], ["b", "d"]]);
        assert_eq!(buckets(tensors, 1 << 30), [["a", "b", "c", "d"]]);
    }

    #[test]
    fn every_difference_separates_buckets() {
        let different = [
            ReadyTensor { collective: Collective::AllReduce { op: ReduceOp::Max }, ..tensor("b", 1) },
            ReadyTensor { collective: Collective::Broadcast { root: Rank(0) }, ..tensor("b", 1) },
            ReadyTensor { dtype: DType::I8, ..tensor("b", 1) },
            ReadyTensor { prescale: 2.0, ..tensor("b", 1) },
            ReadyTensor { postscale: 2.0, ..tensor("b", 1) },
            ReadyTensor { algorithm: Algorithm::RecursiveDoubling, ..tensor("b", 1) },
            ReadyTensor { codec: Codec::Bf16, ..tensor("b", 1) },
            ReadyTensor { joined: vec![Rank(1)], ..tensor("b", 1) },
        ];
        for other in different {
            let tensors = vec![tensor("a", 1), other.clone(), tensor("c", 1)];
            assert_eq!(buckets(tensors, 100), [vec!["a", "c"], vec!["b"]], "{other:?}");
        }
    }

    #[test]
    fn only_shareable_collectives_share_a_bucket() {
        let root = Rank(0);
        let reduce = |op| Collective::AllReduce { op };
        let cases = [
            (reduce(ReduceOp::Median), true),
            (Collective::AllGather, true),
            (Collective::ReduceScatter { op: ReduceOp::Min }, true),
            (Collective::Broadcast { root }, true),
            (reduce(ReduceOp::Adasum), false),
            (reduce(ReduceOp::ClippedMean), false),
            (Collective::Barrier, false),
            (Collective::AllToAll { splits: vec![] }, false),
            (Collective::Reduce { op: ReduceOp::Sum, root }, false),
            (Collective::Gather { root }, false),
            (Collective::Scatter { root }, false),
            (Collective::Send { to: root, tag: 0 }, false),
        ];
        for (collective, shares) in cases {
            let one = |name| ReadyTensor { collective: collective.clone(), ..tensor(name, 1) };
            let together = buckets(vec![one("a"), one("b")], 100).len() == 1;
            assert_eq!(together, shares, "{collective:?}");
        }
    }

    #[test]
    fn a_bucket_with_the_longest_names_fits_a_frame() {
        let long = |n: usize| tensor(&format!("{n:0512}"), 0);
        let mut queue: VecDeque<ReadyTensor> = (0..3_000).map(long).collect();
        let bucket = next_bucket(&mut queue, limits_of(u64::MAX));
        let encoded: usize = bucket.iter().map(|t| ronde_wire::control::encode(&t.tensor).len()).sum();
        assert!(bucket.len() == limits::BUCKET_TENSORS_MAX && encoded < ORDER_FRAME_BYTES, "{encoded}");
    }

    proptest! {
        #[test]
        fn no_tensor_is_lost_and_buckets_stay_within_limits(sizes in prop::collection::vec((0_u64..120, 0..3_u8), 0..60), threshold in 0_u64..200) {
            let kinds = [DType::U8, DType::I8, DType::Bool];
            let tensors: Vec<ReadyTensor> = sizes.iter().enumerate()
                .map(|(n, (bytes, kind))| ReadyTensor { dtype: kinds[usize::from(*kind)], ..tensor(&n.to_string(), *bytes) })
                .collect();
            let mut queue: VecDeque<ReadyTensor> = tensors.clone().into();
            let mut seen = Vec::new();
            while !queue.is_empty() {
                let oldest = queue[0].tensor.name.clone();
                let bucket = next_bucket(&mut queue, limits_of(threshold));
                prop_assert_eq!(&bucket[0].tensor.name, &oldest);
                let bytes: u64 = bucket.iter().map(|t| t.bytes).sum();
                prop_assert!(bucket.len() == 1 || bytes <= threshold);
                prop_assert!(bucket.iter().all(|t| t.is_compatible(&bucket[0])));
                seen.extend(bucket);
            }
            // Within a kind the order of readiness holds.
            for kind in kinds {
                let of = |list: &[ReadyTensor]| list.iter().filter(|t| t.dtype == kind)
                    .map(|t| t.tensor.name.clone()).collect::<Vec<_>>();
                prop_assert_eq!(of(&seen), of(&tensors));
            }
            prop_assert_eq!(seen.len(), tensors.len());
        }
    }
}
