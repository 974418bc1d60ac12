//! What a search may change, and how its values become coordinates of the unit cube.

use ronde_wire::{TuningParameter, limits};
use serde::{Deserialize, Serialize};

/// The values that a search changes. They take effect on the next order of the coordinator, which carries everything that
/// shapes a plan, so that all ranks use the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Knobs {
    /// Bytes of tensors that share a bucket; 0 switches fusion off.
    pub fusion_threshold_bytes: u64,
    /// The chunk size of all plans, a power of two; `None` lets the cost model choose one for each bucket.
    pub chunk_bytes: Option<u32>,
    /// The most lanes of an operation.
    pub lanes: u16,
    /// Bytes of a contribution up to which operations are eager.
    pub eager_bytes: u32,
    /// Whether an all-reduce first reduces the ranks of each sidecar.
    pub hierarchical_allreduce: bool,
    /// The latency of a round in the cost model, in microseconds: algorithms with few rounds are chosen for tensors up to a
    /// size that grows with it.
    pub alpha_us: f64,
}

/// What bounds a search in one membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Lanes of an operation of all ranks: those that sidecars offer each other, or the data threads of a single sidecar.
    pub(crate) lanes: u16,
    /// Whether there is a single sidecar. Its lanes are data threads: values that were found for one kind of lanes mean
    /// nothing for the other. As it sends nothing, it has neither eager operations nor a choice of algorithms or hierarchy.
    pub(crate) is_single: bool,
    /// The most bytes of a contribution that announcements carry.
    pub(crate) eager_bytes: u32,
}

/// The values that a search tries: a grid with one dimension for each of its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Space {
    dimensions: Vec<(TuningParameter, Vec<f64>)>,
}

impl Space {
    /// The grid of these parameters, without those that have a single value, or no effect.
    pub(crate) fn new(parameters: &[TuningParameter], bounds: Bounds) -> Self {
        let levels = |parameter| match parameter {
            TuningParameter::FusionThreshold => powers(FUSION_BYTES_LEAST, FUSION_BYTES_MOST),
            TuningParameter::ChunkBytes => powers(limits::CHUNK_BYTES_MIN as f64, limits::CHUNK_BYTES_MAX as f64),
            TuningParameter::Lanes => (1..=bounds.lanes.max(1)).map(f64::from).collect(),
            TuningParameter::EagerBytes | TuningParameter::Algorithms | TuningParameter::HierarchicalAllreduce
                if bounds.is_single =>
            {
                Vec::new()
            }
            TuningParameter::EagerBytes => {
                let most = f64::from(bounds.eager_bytes);
                [0.0, 64.0, 256.0, 1_024.0, 4_096.0].into_iter().filter(|level| *level <= most).collect()
            }
            TuningParameter::Algorithms => powers(ALPHA_US_LEAST, ALPHA_US_MOST),
            TuningParameter::HierarchicalAllreduce => vec![0.0, 1.0],
        };
        let wanted = TuningParameter::ALL.into_iter().filter(|parameter| parameters.contains(parameter));
        let dimensions = wanted.map(|parameter| (parameter, levels(parameter)));
        Self { dimensions: dimensions.filter(|(_, levels): &(_, Vec<f64>)| levels.len() > 1).collect() }
    }

    /// The number of dimensions.
    pub(crate) fn dimensions(&self) -> usize {
        self.dimensions.len()
    }

    /// The number of points; at least 1.
    pub(crate) fn size(&self) -> usize {
        self.dimensions.iter().map(|(_, levels)| levels.len()).product()
    }

    /// The values of a point of the grid, from 0; values that the search does not change are those of `base`.
    pub(crate) fn knobs(&self, index: usize, base: &Knobs) -> Knobs {
        let mut knobs = *base;
        let mut rest = index;
        for (parameter, levels) in &self.dimensions {
            knobs = knobs.with(*parameter, levels[rest % levels.len()]);
            rest /= levels.len();
        }
        knobs
    }

    /// The point of the grid that is nearest to a point of the unit cube.
    pub(crate) fn nearest(&self, coordinates: &[f64]) -> usize {
        let (mut index, mut stride) = (0, 1);
        for ((parameter, levels), coordinate) in self.dimensions.iter().zip(coordinates) {
            let distance = |at: &usize| (position(*parameter, levels, levels[*at]) - coordinate).abs();
            let nearest = (0..levels.len()).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
            index += nearest * stride;
            stride *= levels.len();
        }
        index
    }

    /// The points one step away from a point in one dimension.
    pub(crate) fn neighbours(&self, index: usize) -> Vec<usize> {
        let (mut found, mut stride) = (Vec::new(), 1);
        for (_, levels) in &self.dimensions {
            let at = index / stride % levels.len();
            found.extend((at > 0).then(|| index - stride));
            found.extend((at + 1 < levels.len()).then(|| index + stride));
            stride *= levels.len();
        }
        found
    }

    /// The coordinates of values in the unit cube, also of values that are not on the grid.
    pub(crate) fn coordinates(&self, knobs: &Knobs) -> Vec<f64> {
        self.dimensions
            .iter()
            .map(|(parameter, levels)| position(*parameter, levels, knobs.value(*parameter)))
            .collect()
    }
}

impl Knobs {
    fn value(&self, parameter: TuningParameter) -> f64 {
        match parameter {
            TuningParameter::FusionThreshold => self.fusion_threshold_bytes as f64,
            TuningParameter::ChunkBytes => f64::from(self.chunk_bytes.unwrap_or(CHUNK_BYTES_USUAL)),
            TuningParameter::Lanes => f64::from(self.lanes),
            TuningParameter::EagerBytes => f64::from(self.eager_bytes),
            TuningParameter::Algorithms => self.alpha_us,
            TuningParameter::HierarchicalAllreduce => f64::from(u8::from(self.hierarchical_allreduce)),
        }
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "levels are whole numbers within the types of their values"
    )]
    fn with(self, parameter: TuningParameter, level: f64) -> Self {
        match parameter {
            TuningParameter::FusionThreshold => Self { fusion_threshold_bytes: level as u64, ..self },
            TuningParameter::ChunkBytes => Self { chunk_bytes: Some(level as u32), ..self },
            TuningParameter::Lanes => Self { lanes: level as u16, ..self },
            TuningParameter::EagerBytes => Self { eager_bytes: level as u32, ..self },
            TuningParameter::Algorithms => Self { alpha_us: level, ..self },
            TuningParameter::HierarchicalAllreduce => Self { hierarchical_allreduce: level > 0.5, ..self },
        }
    }
}

/// The place of a value between the least and the most level, 0 to 1. Sizes and times count by their logarithm.
fn position(parameter: TuningParameter, levels: &[f64], value: f64) -> f64 {
    let scaled = |value: f64| match parameter {
        TuningParameter::HierarchicalAllreduce | TuningParameter::Lanes => value,
        TuningParameter::EagerBytes => (value + EAGER_UNIT).log2(),
        TuningParameter::FusionThreshold | TuningParameter::ChunkBytes | TuningParameter::Algorithms => {
            value.max(1.0).log2()
        }
    };
    let (least, most) = (scaled(levels[0]), scaled(levels[levels.len() - 1]));
    ((scaled(value) - least) / (most - least)).clamp(0.0, 1.0)
}

/// The powers of two times `least`, up to `most`.
fn powers(least: f64, most: f64) -> Vec<f64> {
    std::iter::successors(Some(least), |level| Some(level * 2.0)).take_while(|level| *level <= most).collect()
}

/// Below this, buckets of typical layers hold one tensor each.
const FUSION_BYTES_LEAST: f64 = 65_536.0;
/// 256 MiB; larger buckets only delay the first of them.
const FUSION_BYTES_MOST: f64 = 268_435_456.0;
const ALPHA_US_LEAST: f64 = 7.5;
const ALPHA_US_MOST: f64 = 1_920.0;
/// Where a search begins that has no chunk size; the cost model chooses such chunks for large buckets.
const CHUNK_BYTES_USUAL: u32 = 256 << 10;
/// Keeps the logarithm of the eager limit 0 finite.
const EAGER_UNIT: f64 = 16.0;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The defaults of an engine.
    pub(crate) fn defaults() -> Knobs {
        Knobs {
            fusion_threshold_bytes: 64 << 20,
            chunk_bytes: None,
            lanes: 1,
            eager_bytes: 4_096,
            hierarchical_allreduce: true,
            alpha_us: 60.0,
        }
    }

    /// Four lanes between several sidecars.
    pub(crate) fn bounds() -> Bounds {
        Bounds { lanes: 4, is_single: false, eager_bytes: 4_096 }
    }

    #[test]
    fn every_point_has_its_values_and_is_nearest_to_its_own_coordinates() {
        let space = Space::new(&TuningParameter::ALL, bounds());
        assert_eq!((space.dimensions(), space.size()), (6, 13 * 9 * 4 * 5 * 9 * 2));
        for index in (0..space.size()).step_by(97) {
            let knobs = space.knobs(index, &defaults());
            assert_eq!(space.nearest(&space.coordinates(&knobs)), index, "{knobs:?}");
            for neighbour in space.neighbours(index) {
                assert!(space.neighbours(neighbour).contains(&index));
            }
        }
        let corner = space.knobs(0, &defaults());
        assert_eq!((corner.fusion_threshold_bytes, corner.chunk_bytes, corner.eager_bytes), (65_536, Some(4_096), 0));
        assert_eq!(space.neighbours(0).len(), 6);
    }

    #[test]
    fn a_parameter_with_one_value_is_none() {
        let none = Knobs { eager_bytes: 0, ..defaults() };
        let bounds = Bounds { eager_bytes: 0, lanes: 1, ..bounds() };
        let space = Space::new(&[TuningParameter::Lanes, TuningParameter::EagerBytes], bounds);
        assert_eq!((space.dimensions(), space.size()), (0, 1));
        assert_eq!(space.knobs(0, &none), none);
        assert_eq!(space.nearest(&[]), 0);
    }

    #[test]
    fn a_single_sidecar_has_only_parameters_with_an_effect() {
        let space = Space::new(&TuningParameter::ALL, Bounds { is_single: true, ..bounds() });
        assert_eq!((space.dimensions(), space.size()), (3, 13 * 9 * 4));
        let last = space.knobs(space.size() - 1, &defaults());
        let Knobs { eager_bytes, hierarchical_allreduce, alpha_us, .. } = defaults();
        assert_eq!(last, Knobs { eager_bytes, hierarchical_allreduce, alpha_us, ..last });
    }

    #[test]
    fn values_beside_the_grid_have_coordinates_within_the_cube() {
        let space = Space::new(&TuningParameter::ALL, bounds());
        for bytes in [0, 1, 77, 100 << 20, u64::MAX] {
            let knobs = Knobs { fusion_threshold_bytes: bytes, lanes: 9, alpha_us: 1e9, ..defaults() };
            assert!(space.coordinates(&knobs).iter().all(|at| (0.0..=1.0).contains(at)), "{bytes}");
        }
    }
}
