//! Searches in a simulated job, whose steps cost what the cost model says: from a wrong start to nearly the best point of
//! the grid.

mod all_parameters;

use ronde_collectives::plan::{Work, WorkKind};
use ronde_collectives::{CostModel, Cutting, select_cut};
use ronde_wire::{SetId, SetTopology, SidecarIndex, TensorName, World};

use super::search::Random;
use super::space::tests::{bounds, defaults};
use super::*;

/// A job that trains: the gradients of its layers become ready one after the other.
struct Job {
    topology: SetTopology,
    model: CostModel,
    /// Bytes of each gradient, in the order in which they become ready.
    gradients: Vec<u64>,
    /// The time of the whole backward pass.
    backward_us: f64,
    /// The round trip of an order.
    order_us: f64,
    lanes: u16,
}

impl Job {
    fn bucket_us(&self, gradients: &[u64], knobs: &Knobs) -> f64 {
        let tensors = gradients.iter().map(|bytes| vec![bytes / 4]).collect();
        let work = Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors };
        let cutting = Cutting { lanes: knobs.lanes, chunk_bytes: knobs.chunk_bytes };
        select_cut(&self.topology, &work, cutting, &self.model).predicted_us
    }
}

/// A job whose steps are computed instead of performed.
trait Simulated {
    /// What a search in it may change.
    fn parameters(&self) -> &'static [TuningParameter];

    fn bounds(&self) -> Bounds;

    /// Bytes of each gradient, in the order in which they become ready.
    fn gradients(&self) -> &[u64];

    /// Microseconds of a step.
    fn step_us(&self, knobs: &Knobs) -> f64;

    fn score(&self, knobs: &Knobs) -> f64 {
        self.gradients().iter().sum::<u64>() as f64 / self.step_us(knobs)
    }

    /// The point with the greatest score on the grid.
    fn best(&self, start: &Knobs) -> Knobs {
        let space = Space::new(self.parameters(), self.bounds());
        let all = (0..space.size()).map(|index| space.knobs(index, start));
        let scored = all.map(|knobs| (self.score(&knobs), knobs));
        scored.max_by(|a, b| a.0.total_cmp(&b.0)).expect("a grid has points").1
    }

    /// The outcome of a search whose steps take up to `noise` more or less than they should.
    fn tuned(&self, start: Knobs, settings: AutotuneSettings, noise: f64) -> AutotuneSample {
        let (mut random, mut now_us) = (Random(settings.seed ^ 0x5eed), 0.0);
        let bytes = self.gradients().iter().sum();
        let name = TensorName::new("gradients").expect("a name");
        let steps = settings.steps();
        let settings = AutotuneSettings { parameters: self.parameters().to_vec(), ..settings };
        let mut autotune = Autotune::new(settings, start, self.bounds());
        let mut step_us = self.step_us(&start);
        for _ in 0..steps {
            let error = noise * (random.next() as f64 / u64::MAX as f64 * 2.0 - 1.0);
            now_us += step_us * (1.0 + error);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "hours at most")]
            autotune.performed(Time(now_us as u64), [&name].into_iter(), bytes);
            match autotune.advance() {
                None => {}
                Some((_, None)) => step_us = self.step_us(&autotune.knobs()),
                Some((_, Some(outcome))) => {
                    assert_eq!((outcome.stage, autotune.knobs()), (AutotuneStage::Finished, outcome.knobs));
                    assert_eq!(autotune.status().best, Some(outcome));
                    return outcome;
                }
            }
        }
        panic!("the search is not over after {steps} steps");
    }
}

impl Simulated for Job {
    fn parameters(&self) -> &'static [TuningParameter] {
        &TuningParameter::KEEP_BITS
    }

    fn bounds(&self) -> Bounds {
        Bounds { lanes: self.lanes, ..bounds() }
    }

    fn gradients(&self) -> &[u64] {
        &self.gradients
    }

    /// Buckets collect what is ready while an earlier one is performed.
    fn step_us(&self, knobs: &Knobs) -> f64 {
        let each_us = self.backward_us / self.gradients.len() as f64;
        let ready_us = |at: usize| each_us * (at + 1) as f64;
        let (mut now_us, mut next) = (0.0_f64, 0);
        while next < self.gradients.len() {
            now_us = now_us.max(ready_us(next));
            let (mut bytes, first) = (0, next);
            while next < self.gradients.len()
                && ready_us(next) <= now_us
                && (next == first || bytes + self.gradients[next] <= knobs.fusion_threshold_bytes)
            {
                bytes += self.gradients[next];
                next += 1;
            }
            now_us += self.order_us + self.bucket_us(&self.gradients[first..next], knobs);
        }
        now_us
    }
}

/// Gradients like those of a residual network, some like a language model's, and many small ones.
fn jobs() -> Vec<Job> {
    let topology = |sidecars| {
        let world = World::new((0..sidecars).map(SidecarIndex).collect()).expect("a world");
        world.topology(SetId::WORLD).expect("the set of all ranks")
    };
    let residual = (0..160).map(|at| if at % 3 == 0 { 4_096 } else { 64_000 * (1 + at % 11) }).collect::<Vec<u64>>();
    let language = (0..50).map(|at| if at == 49 { 90 << 20 } else { (at % 4) * (2 << 20) + 4_096 }).collect();
    let small = (0..400).map(|at| 8_192 + 512 * (at % 7)).collect();
    let link = |alpha_us: f64, gigabytes: f64| CostModel {
        alpha_us,
        beta_us_per_byte: 1e-3 / gigabytes,
        ..CostModel::default()
    };
    let job = |sidecars, gradients, model, backward_us, order_us| {
        let topology = topology(sidecars);
        Job { topology, model, gradients, backward_us, order_us, lanes: 4 }
    };
    vec![
        job(2, residual, link(60.0, 1.0), 20_000.0, 150.0),
        job(8, language, link(200.0, 3.0), 40_000.0, 400.0),
        job(4, small, link(30.0, 1.2), 3_000.0, 200.0),
    ]
}

/// A search takes a second in an unoptimized build.
const SEEDS: u64 = 6;

/// 1 MB, 4 KiB chunks, one lane.
fn wrong() -> Knobs {
    Knobs { fusion_threshold_bytes: 1 << 20, chunk_bytes: Some(4_096), ..defaults() }
}

#[test]
fn from_a_wrong_start_a_search_reaches_nine_tenths_of_the_best_within_sixty_samples() {
    for (number, job) in jobs().iter().enumerate() {
        let best = job.score(&job.best(&wrong()));
        let started = job.score(&wrong()) / best;
        assert!(started < 0.75, "job {number} starts too well for a test: {started:.2} of the best");
        for seed in 0..SEEDS {
            let settings = AutotuneSettings { samples_max: 60, steps_per_sample: 2, seed, ..Default::default() };
            let outcome = job.tuned(wrong(), settings, 0.1);
            let reached = job.score(&outcome.knobs) / best;
            println!("job {number}, seed {seed}: from {started:.2} to {reached:.3} of the best");
            assert!(reached >= 0.9, "job {number}, seed {seed}: {reached:.3} of the best with {:?}", outcome.knobs);
            assert!(outcome.gain > 1.0 && outcome.samples == 60, "{outcome:?}");
        }
    }
}

#[test]
fn horovods_number_of_samples_gets_far() {
    for (number, job) in jobs().iter().enumerate() {
        let best = job.score(&job.best(&wrong()));
        for seed in 0..SEEDS {
            let outcome = job.tuned(wrong(), AutotuneSettings { seed, ..Default::default() }, 0.1);
            let reached = job.score(&outcome.knobs) / best;
            assert!(reached >= 0.8, "job {number}, seed {seed}: {reached:.3} of the best with {:?}", outcome.knobs);
        }
    }
}

#[test]
fn a_good_start_is_kept() {
    for job in jobs() {
        let start = job.best(&wrong());
        let outcome = job.tuned(start, AutotuneSettings::default(), 0.05);
        let kept = job.score(&outcome.knobs) / job.score(&start);
        assert!(kept >= 0.93, "{kept:.3} of the start with {:?}", outcome.knobs);
    }
}

#[test]
fn a_restarted_search_begins_with_its_best_and_a_finished_one_keeps_it() {
    let name = TensorName::new("t").expect("a name");
    let settings = AutotuneSettings { warmup_samples: 0, steps_per_sample: 1, samples_max: 4, ..Default::default() };
    let mut autotune = Autotune::new(settings, wrong(), bounds());
    let mut now = 0;
    let mut sample = |autotune: &mut Autotune| {
        // The more is fused, the faster.
        let step_us = 1_000_000_000 / autotune.knobs().fusion_threshold_bytes.max(1);
        loop {
            now += step_us;
            autotune.performed(Time(now), [&name].into_iter(), 1_000);
            if let Some(found) = autotune.advance() {
                return found;
            }
        }
    };
    sample(&mut autotune);
    sample(&mut autotune);
    let best = autotune.status().best.expect("two samples");
    let restarted = autotune.clone().restarted(bounds(), &defaults());
    assert_eq!(restarted.knobs(), best.knobs);
    assert_eq!((restarted.status().samples, restarted.status().best), (0, None));
    sample(&mut autotune);
    let (last, outcome) = sample(&mut autotune);
    assert_eq!(last.stage, AutotuneStage::Searching);
    let outcome = outcome.expect("the fourth sample was the last");
    assert_eq!(autotune.clone().restarted(Bounds { lanes: 2, ..bounds() }, &defaults()).knobs(), outcome.knobs);
    autotune.performed(Time(now), [&name].into_iter(), 1);
    assert_eq!(autotune.advance(), None);
}

/// Takes samples whose scores are `score` of the values.
fn sampled(autotune: &mut Autotune, samples: usize, score: impl Fn(&Knobs) -> u64) {
    let name = TensorName::new("t").expect("a name");
    let (mut now, mut taken) = (0, 0);
    while taken < samples {
        now += 1_000;
        autotune.performed(Time(now), [&name].into_iter(), score(&autotune.knobs()));
        taken += usize::from(autotune.advance().is_some());
    }
}

#[test]
fn a_restarted_search_tries_eager_limits_above_its_best_one() {
    let parameters = vec![TuningParameter::EagerBytes];
    let settings = AutotuneSettings { parameters, warmup_samples: 0, steps_per_sample: 1, ..Default::default() };
    let mut autotune = Autotune::new(settings, defaults(), bounds());
    sampled(&mut autotune, 4, |knobs| u64::from(8_192 - knobs.eager_bytes));
    let mut restarted = autotune.restarted(bounds(), &defaults());
    assert!(restarted.knobs().eager_bytes < 4_096, "{:?}", restarted.knobs());
    // In this membership much is better.
    sampled(&mut restarted, 5, |knobs| u64::from(8_192 + knobs.eager_bytes));
    let status = restarted.status();
    assert_eq!((status.stage, status.knobs.eager_bytes), (AutotuneStage::Finished, 4_096));
}

/// The given values, with so many lanes.
fn given(lanes: u16) -> Knobs {
    Knobs { lanes, ..defaults() }
}

#[test]
fn lanes_of_a_single_sidecar_are_no_start_for_those_between_sidecars() {
    let parameters = vec![TuningParameter::Lanes];
    let settings = AutotuneSettings { parameters, warmup_samples: 0, steps_per_sample: 1, ..Default::default() };
    let single = Bounds { lanes: 8, is_single: true, ..bounds() };
    let mut autotune = Autotune::new(settings, Knobs { lanes: 8, ..defaults() }, single);
    sampled(&mut autotune, 3, |knobs| u64::from(1_000 - knobs.lanes));
    assert!(autotune.clone().restarted(single, &given(8)).knobs().lanes < 8);
    assert_eq!(autotune.clone().restarted(bounds(), &given(2)).knobs().lanes, 2);
    sampled(&mut autotune, 5, |knobs| u64::from(1_000 - knobs.lanes));
    let finished = autotune.status();
    assert_eq!((finished.stage, finished.knobs.lanes), (AutotuneStage::Finished, 1));
    assert_eq!(autotune.clone().restarted(single, &given(8)).knobs().lanes, 1);
    assert_eq!(autotune.restarted(bounds(), &given(2)).knobs().lanes, 2);
}

#[test]
fn values_without_an_effect_on_a_single_sidecar_are_the_given_ones_there_and_afterwards() {
    let parameters = TuningParameter::ALL.to_vec();
    let settings = AutotuneSettings { parameters, warmup_samples: 0, steps_per_sample: 1, ..Default::default() };
    let found = Knobs { eager_bytes: 64, hierarchical_allreduce: false, alpha_us: 7.5, ..defaults() };
    let autotune = Autotune::new(settings, found, bounds());
    let single = autotune.clone().restarted(Bounds { is_single: true, ..bounds() }, &defaults());
    assert_eq!(single.knobs(), defaults());
    assert_eq!(single.restarted(bounds(), &found).knobs(), found);
    assert_eq!(autotune.restarted(bounds(), &defaults()).knobs(), found);
}
