//! A model small enough to be trained by hand: linear regression by gradient descent with momentum. Trained on several
//! ranks with averaged gradients, it must end as if one process had seen all their samples.

/// Features of a sample.
pub const FEATURES: usize = 16;
/// Samples of one rank in one step.
pub const BATCH: u64 = 8;

/// Weights and momentum.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// What is learnt.
    pub weights: [f32; FEATURES],
    momentum: [f32; FEATURES],
}

impl Model {
    /// The gradient of half the mean squared error over the samples of these ranks.
    #[must_use]
    pub fn gradient(&self, step: u64, ranks: std::ops::Range<u32>) -> [f32; FEATURES] {
        let mut sum = [0.0_f64; FEATURES];
        let mut samples = 0.0_f64;
        for rank in ranks {
            for row in 0..BATCH {
                let features = features(step, rank, row);
                let predicted: f32 = features.iter().zip(&self.weights).map(|(x, w)| x * w).sum();
                let error = f64::from(predicted - target(&features));
                sum.iter_mut().zip(&features).for_each(|(s, x)| *s += error * f64::from(*x));
                samples += 1.0;
            }
        }
        #[allow(clippy::cast_possible_truncation, reason = "gradients are single precision; the sum is kept double")]
        sum.map(|s| (s / samples) as f32)
    }

    /// One step down the gradient.
    pub fn step(&mut self, gradient: &[f32]) {
        for ((weight, momentum), gradient) in self.weights.iter_mut().zip(&mut self.momentum).zip(gradient) {
            *momentum = 0.5 * *momentum + gradient;
            *weight -= 0.05 * *momentum;
        }
    }

    /// A model trained by one process on the samples of all ranks.
    #[must_use]
    pub fn trained_alone(size: u32, steps: u64) -> Self {
        let mut model = Self::default();
        for step in 0..steps {
            let gradient = model.gradient(step, 0..size);
            model.step(&gradient);
        }
        model
    }

    /// The greatest difference of a weight to another model's.
    #[must_use]
    pub fn distance(&self, weights: &[f32]) -> f32 {
        self.weights.iter().zip(weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }
}

fn features(step: u64, rank: u32, row: u64) -> [f32; FEATURES] {
    let seed = crate::script::scatter((step << 32) ^ (u64::from(rank) << 16) ^ row);
    std::array::from_fn(|index| {
        let random = crate::script::scatter(seed ^ index as u64) % 2_001;
        f32::from(u16::try_from(random).unwrap_or(0)) / 1_000.0 - 1.0
    })
}

/// Something that is not linear, so that weights go on changing and depend on the samples.
fn target(features: &[f32; FEATURES]) -> f32 {
    features.iter().enumerate().map(|(index, x)| if index % 3 == 0 { x * x } else { 0.3 * x }).sum()
}
