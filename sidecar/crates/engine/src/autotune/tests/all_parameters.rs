//! A search over all parameters, compared with every point of their grid.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ronde_collectives::algorithm_of;
use ronde_collectives::planner::predicted;
use ronde_wire::{Algorithm, Tuning, limits};

use super::*;

/// A job in which all parameters have an effect: its coordinator selects algorithms by the alpha that is tried, and a
/// step takes as long as the selected plans do with the true alpha.
struct Cluster {
    topology: SetTopology,
    /// The true costs.
    model: CostModel,
    /// Bytes of each gradient, in the order in which they become ready.
    gradients: Vec<u64>,
    /// The time of the whole backward pass.
    backward_us: f64,
    /// The round trip of an order.
    order_us: f64,
    /// By the bytes of a tensor, alpha and hierarchy.
    selected: RefCell<BTreeMap<(u64, u64, bool), Algorithm>>,
    /// Microseconds of a bucket.
    performed: RefCell<BTreeMap<Bucket, f64>>,
}

/// The bytes of its tensors, their algorithm, the chunk size, and the most lanes.
type Bucket = (Vec<u64>, Algorithm, Option<u32>, u16);

impl Cluster {
    /// `ranks` on each of so many sidecars, connected at 1 GB/s.
    fn new(sidecars: u32, ranks: u32, alpha_us: f64, gradients: Vec<u64>, backward_us: f64, order_us: f64) -> Self {
        let placement = (0..sidecars * ranks).map(|rank| SidecarIndex(rank / ranks)).collect();
        let world = World::new(placement).expect("a world");
        let topology = world.topology(SetId::WORLD).expect("the set of all ranks");
        let model = CostModel { alpha_us, ..CostModel::default() };
        let (selected, performed) = Default::default();
        Self { topology, model, gradients, backward_us, order_us, selected, performed }
    }

    fn kind(knobs: &Knobs) -> WorkKind {
        if knobs.hierarchical_allreduce { WorkKind::AllReduce } else { WorkKind::AllReduceNAry }
    }

    /// The cost model by which the coordinator selects.
    fn tried(&self, knobs: &Knobs) -> CostModel {
        CostModel { alpha_us: knobs.alpha_us, ..self.model }
    }

    fn algorithm(&self, bytes: u64, knobs: &Knobs) -> Algorithm {
        let eager_most = limits::EAGER_ORDER_BYTES_MAX / self.topology.size();
        if bytes <= u64::from(knobs.eager_bytes).min(eager_most as u64) {
            return Algorithm::Eager;
        }
        let key = (bytes, knobs.alpha_us.to_bits(), knobs.hierarchical_allreduce);
        let select = || algorithm_of(&self.topology, &Self::kind(knobs), 4, bytes / 4, &self.tried(knobs));
        *self.selected.borrow_mut().entry(key).or_insert_with(select)
    }

    fn bucket_us(&self, bucket: Vec<u64>, algorithm: Algorithm, knobs: &Knobs) -> f64 {
        if algorithm == Algorithm::Eager {
            // The coordinator sends all contributions to each other sidecar.
            let copies = self.topology.size() * (self.topology.len() - 1);
            return (bucket.iter().sum::<u64>() * copies as u64) as f64 * self.model.beta_us_per_byte;
        }
        let key = (bucket, algorithm, knobs.chunk_bytes, knobs.lanes);
        if let Some(us) = self.performed.borrow().get(&key) {
            return *us;
        }
        let tensors = key.0.iter().map(|bytes| vec![bytes / 4]).collect();
        let work = Work { kind: Self::kind(knobs), element_bytes: 4, tensors };
        let cutting = Cutting { lanes: knobs.lanes, chunk_bytes: knobs.chunk_bytes };
        let tuning = select_cut(&self.topology, &work, cutting, &self.tried(knobs)).tuning;
        assert_eq!(tuning.algorithm, algorithm);
        let us = self.plan_us(&work, &tuning);
        self.performed.borrow_mut().insert(key, us);
        us
    }

    /// The time of the sub-schedules of a plan: that of the first, and of each other one what does not overlap.
    fn plan_us(&self, work: &Work, tuning: &Tuning) -> f64 {
        let CostModel { alpha_us, beta_us_per_byte, gamma_us_per_byte } = self.model;
        let form = predicted(&self.topology, work, tuning).expect("it was selected");
        let chunks = form.chunks_per_block(u64::from(tuning.chunk_bytes / 4)).max(1) as f64;
        let share = |bytes: &[u64]| bytes.iter().max().map_or(0.0, |most| *most as f64 / chunks);
        let sending_us = f64::from(form.chunk_transfers) * CHUNK_US + share(&form.sent_bytes) * beta_us_per_byte;
        let reducing_us = share(&form.reduced_bytes) * gamma_us_per_byte;
        let once_us = f64::from(form.rounds) * alpha_us + sending_us + reducing_us;
        let in_flight = (u32::from(tuning.lanes) * u32::from(tuning.window)).div_ceil(form.siblings);
        let busy_us = sending_us.max(reducing_us);
        let hidden = chunks <= f64::from(in_flight);
        let each_us = if hidden { busy_us } else { busy_us.max(once_us / f64::from(in_flight)) };
        once_us + (chunks - 1.0) * each_us
    }
}

/// Processor time of a chunk.
const CHUNK_US: f64 = 4.0;

impl Simulated for Cluster {
    fn parameters(&self) -> &'static [TuningParameter] {
        &TuningParameter::ALL
    }

    fn bounds(&self) -> Bounds {
        Bounds { lanes: 2, ..bounds() }
    }

    fn gradients(&self) -> &[u64] {
        &self.gradients
    }

    /// A bucket takes what is ready of one algorithm.
    fn step_us(&self, knobs: &Knobs) -> f64 {
        let each_us = self.backward_us / self.gradients.len() as f64;
        let ready_us = |at: usize| each_us * (at + 1) as f64;
        let algorithms: Vec<Algorithm> = self.gradients.iter().map(|bytes| self.algorithm(*bytes, knobs)).collect();
        let mut left: Vec<usize> = (0..self.gradients.len()).collect();
        let mut now_us = 0.0_f64;
        while let Some(first) = left.first().copied() {
            now_us = now_us.max(ready_us(first));
            let (mut bytes, mut is_full, mut bucket) = (0, false, Vec::new());
            left.retain(|at| {
                let may_share = !is_full && ready_us(*at) <= now_us && algorithms[*at] == algorithms[first];
                let fits = bucket.is_empty() || bytes + self.gradients[*at] <= knobs.fusion_threshold_bytes;
                is_full |= may_share && !fits;
                if may_share && fits {
                    bytes += self.gradients[*at];
                    bucket.push(self.gradients[*at]);
                }
                !(may_share && fits)
            });
            now_us += self.order_us + self.bucket_us(bucket, algorithms[first], knobs);
        }
        now_us
    }
}

/// A job of two ranks on each sidecar, one of small layers, and one whose tiny tensors alternate with larger ones.
fn clusters() -> [Cluster; 3] {
    let mixed = (0..40_u64).map(|at| match at % 4 {
        0 => 4_096,
        1 => 1_024,
        2 => 65_536 * (1 + at % 7),
        _ => 1 << 20,
    });
    let small = [[1_024_u64; 4].as_slice(), &[16_384; 36]].concat();
    let alternating = [65_536_u64, 256].repeat(20);
    [
        Cluster::new(4, 2, 150.0, mixed.collect(), 10_000.0, 200.0),
        Cluster::new(4, 1, 400.0, small, 2_000.0, 50.0),
        Cluster::new(4, 1, 400.0, alternating, 20_000.0, 50.0),
    ]
}

#[test]
fn a_search_over_all_parameters_reaches_nine_tenths_of_the_best_within_sixty_samples() {
    for (number, job) in clusters().iter().enumerate() {
        let best = job.best(&wrong());
        let reached = |knobs: &Knobs| job.score(knobs) / job.score(&best);
        let started = reached(&wrong());
        assert!(started < 0.75, "job {number} starts too well for a test: {started:.2} of the best");
        for seed in 0..SEEDS {
            let settings = AutotuneSettings { samples_max: 60, steps_per_sample: 2, seed, ..Default::default() };
            let found = job.tuned(wrong(), settings, 0.1).knobs;
            let share = reached(&found);
            println!("job {number}, seed {seed}: from {started:.2} to {share:.3} of the best");
            assert!(share >= 0.9, "job {number}, seed {seed}: {share:.3} of {best:?} with {found:?}");
        }
    }
}

/// Otherwise a search over all of them would be one over few.
#[test]
fn each_parameter_has_an_effect_on_a_simulated_job() {
    let jobs = clusters();
    let best = jobs.each_ref().map(|job| job.best(&wrong()));
    for parameter in TuningParameter::ALL {
        let worst = |(job, best): (&Cluster, &Knobs)| {
            let space = Space::new(&[parameter], job.bounds());
            let scores = (0..space.size()).map(|index| job.score(&space.knobs(index, best)));
            scores.fold(f64::INFINITY, f64::min) / job.score(best)
        };
        let least = jobs.iter().zip(&best).map(worst).fold(f64::INFINITY, f64::min);
        assert!(least < 0.98, "the worst {parameter} has {least:.3} of the best rate");
    }
}
