//! Regression with a Gaussian process: what is known about a function from few noisy values of it.
//!
//! Sources: C. E. Rasmussen and C. K. I. Williams, *Gaussian Processes for Machine Learning*, MIT Press 2006: algorithm 2.1
//! (prediction and marginal likelihood by a Cholesky decomposition) and equation 4.17 (the Matérn kernel with ν = 5/2).
//! D. R. Jones, M. Schonlau and W. J. Welch, *Efficient Global Optimization of Expensive Black-Box Functions*, Journal of
//! Global Optimization 13, 1998: expected improvement.

/// The most observations of a process. The time of a fit grows with their cube.
pub(crate) const OBSERVATIONS_MAX: usize = 256;

/// A process that was fitted to observations. Values are standardized inside: mean 0 and variance 1.
#[derive(Clone, Debug)]
pub(crate) struct GaussianProcess {
    points: Vec<Vec<f64>>,
    scales: Vec<f64>,
    factor: Cholesky,
    /// The inverse of the covariance times the standardized values.
    weights: Vec<f64>,
    /// The mean at each observation, standardized.
    smoothed: Vec<f64>,
    mean: f64,
    sigma: f64,
}

/// What a process knows about the function at one point, in the function's unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prediction {
    pub(crate) mean: f64,
    /// The standard deviation, without the noise of an observation.
    pub(crate) sigma: f64,
}

impl GaussianProcess {
    /// Fits a process to points of the unit cube and the values there. `noise` is the standard deviation of a value's error,
    /// as a share of the deviation of all values. The length scale of each coordinate maximizes the marginal likelihood over
    /// [`SCALES`], of [`SCALE_OBSERVATIONS`] observations at most.
    ///
    /// `None` without a point, with more than [`OBSERVATIONS_MAX`], and where a value is not finite.
    pub(crate) fn fit(points: &[Vec<f64>], values: &[f64], noise: f64) -> Option<Self> {
        let usable = !points.is_empty() && points.len() == values.len() && points.len() <= OBSERVATIONS_MAX;
        if !usable || values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let (mean, sigma) = moments(values);
        let standard: Vec<f64> = values.iter().map(|value| (value - mean) / sigma).collect();
        let scales = likeliest_scales(points, &standard, noise)?;
        let factor = Cholesky::of(&covariance(points, &scales, noise))?;
        let weights = factor.solve(&standard);
        // Where the covariance without its noise is K, the mean is K weights, and (K + noise) weights is the value.
        let smooth = |(value, weight): (&f64, &f64)| value - (noise * noise + JITTER) * weight;
        let smoothed = standard.iter().zip(&weights).map(smooth).collect();
        Some(Self { points: points.to_vec(), scales, factor, weights, smoothed, mean, sigma })
    }

    /// Predicts the function's value at a point.
    pub(crate) fn predict(&self, point: &[f64]) -> Prediction {
        let near: Vec<f64> = self.points.iter().map(|known| matern(known, point, &self.scales)).collect();
        let mean = dot(&near, &self.weights);
        let reduced = self.factor.forward(&near);
        let variance = (1.0 - dot(&reduced, &reduced)).max(0.0);
        Prediction { mean: self.mean + self.sigma * mean, sigma: self.sigma * variance.sqrt() }
    }

    /// The mean of [`Self::predict`] at each observation, in a fraction of the time.
    pub(crate) fn smoothed(&self) -> impl Iterator<Item = f64> {
        self.smoothed.iter().map(|mean| self.mean + self.sigma * mean)
    }
}

/// By how much a point is expected to exceed the best known value.
pub(crate) fn expected_improvement(prediction: Prediction, best: f64) -> f64 {
    let Prediction { mean, sigma } = prediction;
    let gain = mean - best;
    if sigma <= f64::EPSILON * best.abs() {
        return gain.max(0.0);
    }
    let z = gain / sigma;
    (gain * normal_distribution(z) + sigma * normal_density(z)).max(0.0)
}

/// The length scales that are tried for each coordinate, in widths of the unit cube.
const SCALES: [f64; 6] = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2];
const FIRST_SCALE: f64 = 0.4;
/// Added to the diagonal so that equal points do not make the covariance singular.
const JITTER: f64 = 1e-6;

/// Mean and standard deviation; the latter is 1 where all values are equal.
fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let sigma = variance.sqrt();
    (mean, if sigma > f64::EPSILON * mean.abs() { sigma } else { 1.0 })
}

/// Observations whose likelihood chooses the scales. It is computed for each candidate, and its time grows with their cube.
const SCALE_OBSERVATIONS: usize = 48;

/// Improves the scale of one coordinate after the other, once.
fn likeliest_scales(points: &[Vec<f64>], standard: &[f64], noise: f64) -> Option<Vec<f64>> {
    let kept = points.len().min(SCALE_OBSERVATIONS);
    // Evenly spread over all, the newest included.
    let at = |number: usize| (number + 1) * points.len() / kept - 1;
    let standard: Vec<f64> = (0..kept).map(|number| standard[at(number)]).collect();
    let points: Vec<Vec<f64>> = (0..kept).map(|number| points[at(number)].clone()).collect();
    let mut scales = vec![FIRST_SCALE; points.first()?.len()];
    for coordinate in 0..scales.len() {
        let likelihood = |scale: f64| {
            let mut tried = scales.clone();
            tried[coordinate] = scale;
            (scale, log_likelihood(&points, &standard, &tried, noise))
        };
        let best = SCALES.iter().map(|scale| likelihood(*scale)).max_by(|a, b| a.1.total_cmp(&b.1))?;
        scales[coordinate] = best.0;
    }
    Some(scales)
}

/// The logarithm of the marginal likelihood, less a constant; the least number where it cannot be computed.
fn log_likelihood(points: &[Vec<f64>], standard: &[f64], scales: &[f64], noise: f64) -> f64 {
    let Some(factor) = Cholesky::of(&covariance(points, scales, noise)) else { return f64::NEG_INFINITY };
    -0.5 * dot(standard, &factor.solve(standard)) - factor.log_diagonal()
}

/// The lower triangle of the covariance of observations, which is symmetric.
fn covariance(points: &[Vec<f64>], scales: &[f64], noise: f64) -> Vec<Vec<f64>> {
    let row = |at: usize| points[..=at].iter().map(|other| matern(&points[at], other, scales)).collect::<Vec<_>>();
    let mut matrix: Vec<Vec<f64>> = (0..points.len()).map(row).collect();
    for (at, row) in matrix.iter_mut().enumerate() {
        row[at] += noise * noise + JITTER;
    }
    matrix
}

/// The Matérn kernel with ν = 5/2: functions that are differentiable twice, such as costs, not infinitely often.
fn matern(one: &[f64], other: &[f64], scales: &[f64]) -> f64 {
    #[cfg(test)]
    KERNELS.with(|count| count.set(count.get() + 1));
    let parts = one.iter().zip(other).zip(scales);
    let squared: f64 = parts.map(|((one, other), scale)| ((one - other) / scale).powi(2)).sum();
    let distance = (5.0 * squared).sqrt();
    (1.0 + distance + distance * distance / 3.0) * (-distance).exp()
}

/// The lower triangle whose product with its transpose is a positive definite matrix.
#[derive(Clone, Debug)]
struct Cholesky(Vec<Vec<f64>>);

impl Cholesky {
    /// `None` when the matrix, given by its lower triangle, is not positive definite.
    fn of(matrix: &[Vec<f64>]) -> Option<Self> {
        let mut lower: Vec<Vec<f64>> = Vec::with_capacity(matrix.len());
        for (at, given) in matrix.iter().enumerate() {
            let mut row = Vec::with_capacity(at + 1);
            for (column, above) in lower.iter().enumerate() {
                row.push((given[column] - dot(&row, &above[..column])) / above[column]);
            }
            let square = given[at] - dot(&row, &row);
            if !square.is_finite() || square <= 0.0 {
                return None;
            }
            row.push(square.sqrt());
            lower.push(row);
        }
        Some(Self(lower))
    }

    /// Solves `lower x = values`.
    fn forward(&self, values: &[f64]) -> Vec<f64> {
        let mut solved = Vec::with_capacity(values.len());
        for (row, value) in self.0.iter().zip(values) {
            let at = solved.len();
            solved.push((value - dot(&row[..at], &solved)) / row[at]);
        }
        solved
    }

    /// Solves `matrix x = values`.
    fn solve(&self, values: &[f64]) -> Vec<f64> {
        let mut solved = self.forward(values);
        for at in (0..solved.len()).rev() {
            let below: f64 = (at + 1..solved.len()).map(|row| self.0[row][at] * solved[row]).sum();
            solved[at] = (solved[at] - below) / self.0[at][at];
        }
        solved
    }

    /// The sum of the logarithms of the diagonal: half the logarithm of the determinant.
    fn log_diagonal(&self) -> f64 {
        self.0.iter().filter_map(|row| row.last()).map(|value| value.ln()).sum()
    }
}

/// The sum of products, in eight sums that a processor adds at once.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let (ones, others) = (one.chunks_exact(LANES), other.chunks_exact(LANES));
    let rest: f64 = ones.remainder().iter().zip(&other[ones.len() * LANES..]).map(|(one, other)| one * other).sum();
    for (one, other) in ones.zip(others) {
        for (sum, (one, other)) in sums.iter_mut().zip(one.iter().zip(other)) {
            *sum += one * other;
        }
    }
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
thread_local! {
    /// Kernels that this thread has computed: a measure of the time of a proposal that no other load changes.
    pub(crate) static KERNELS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn normal_density(z: f64) -> f64 {
    (-0.5 * z * z).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

/// The standard normal distribution function, with an error below 7.5e-8: M. Abramowitz and I. A. Stegun, *Handbook of
/// Mathematical Functions*, formula 26.2.17.
fn normal_distribution(z: f64) -> f64 {
    const COEFFICIENTS: [f64; 5] = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let polynomial = COEFFICIENTS.iter().rev().fold(0.0, |sum, coefficient| (sum + coefficient) * t);
    let tail = normal_density(z) * polynomial;
    if z < 0.0 { tail } else { 1.0 - tail }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(count: usize) -> Vec<Vec<f64>> {
        (0..count).map(|at| vec![at as f64 / (count.max(2) - 1) as f64]).collect()
    }

    #[test]
    fn the_normal_distribution_has_its_known_values() {
        for (z, expected) in [(0.0, 0.5), (1.0, 0.841_344_746), (-1.96, 0.024_997_895), (3.0, 0.998_650_102)] {
            assert!((normal_distribution(z) - expected).abs() < 1e-7, "{z}");
        }
    }

    #[test]
    fn without_noise_a_process_goes_through_its_observations_and_doubts_elsewhere() {
        let points = line(6);
        let values: Vec<f64> = points.iter().map(|point| 50.0 + 10.0 * (4.0 * point[0]).sin()).collect();
        let process = GaussianProcess::fit(&points, &values, 0.0).expect("six points");
        for (point, value) in points.iter().zip(&values) {
            let found = process.predict(point);
            assert!((found.mean - value).abs() < 0.01 && found.sigma < 0.1, "{point:?}: {found:?}");
        }
        let between = process.predict(&[0.5]);
        assert!((between.mean - (50.0 + 10.0 * 2.0_f64.sin())).abs() < 0.5, "{between:?}");
        assert!(process.predict(&[0.9]).sigma > process.predict(&[0.8]).sigma);
    }

    #[test]
    fn a_coordinate_without_effect_gets_a_large_scale() {
        let points: Vec<Vec<f64>> = (0..25).map(|at| vec![f64::from(at % 5) / 4.0, f64::from(at / 5) / 4.0]).collect();
        let values: Vec<f64> = points.iter().map(|point| (6.0 * point[0]).sin()).collect();
        let process = GaussianProcess::fit(&points, &values, 0.05).expect("25 points");
        assert!(process.scales[1] > 2.0 * process.scales[0], "{:?}", process.scales);
    }

    #[test]
    fn what_cannot_be_fitted_is_refused() {
        assert!(GaussianProcess::fit(&[], &[], 0.1).is_none());
        assert!(GaussianProcess::fit(&line(2), &[1.0, f64::NAN], 0.1).is_none());
        assert!(GaussianProcess::fit(&line(2), &[1.0], 0.1).is_none());
        assert!(GaussianProcess::fit(&line(257), &[1.0; 257], 0.1).is_none());
        let same = vec![vec![0.5]; 5];
        let process = GaussianProcess::fit(&same, &[7.0; 5], 0.0).expect("equal points and values are no fault");
        assert!((process.predict(&[0.5]).mean - 7.0).abs() < 1e-9);
    }

    #[test]
    fn improvement_is_expected_where_the_mean_is_high_or_unsure() {
        let at = |mean, sigma| expected_improvement(Prediction { mean, sigma }, 10.0);
        assert_eq!(at(9.0, 0.0), 0.0);
        assert_eq!(at(12.0, 0.0), 2.0);
        assert!(at(10.0, 1.0) > at(9.0, 1.0) && at(9.0, 2.0) > at(9.0, 1.0) && at(9.0, 1.0) > 0.0);
        // With the mean at the best value it is the deviation over the root of 2 pi.
        assert!((at(10.0, 1.0) - 0.398_942).abs() < 1e-5);
    }

    proptest! {
        #[test]
        fn predictions_are_finite_and_no_surer_than_possible(
            points in prop::collection::vec(prop::collection::vec(0.0..1.0_f64, 3), 1..24),
            noise in 0.0..1.0_f64,
            seed in 1.0..1e9_f64,
        ) {
            let values: Vec<f64> = points.iter().map(|point| seed * (point[0] - point[1] * point[2])).collect();
            let process = GaussianProcess::fit(&points, &values, noise).expect("finite values");
            for (point, smoothed) in points.iter().zip(process.smoothed()) {
                let mean = process.predict(point).mean;
                prop_assert!((smoothed - mean).abs() <= 1e-6 * process.sigma, "{smoothed} instead of {mean}");
            }
            for point in points.iter().chain([&vec![0.0; 3], &vec![1.0; 3]]) {
                let found = process.predict(point);
                prop_assert!(found.mean.is_finite() && found.sigma >= 0.0, "{found:?}");
                prop_assert!(found.sigma <= process.sigma * 1.000_001);
            }
        }

        #[test]
        fn a_factor_times_its_transpose_is_the_matrix(points in prop::collection::vec(prop::collection::vec(0.0..1.0_f64, 2), 1..12)) {
            let matrix = covariance(&points, &[0.4, 0.4], 0.3);
            let factor = Cholesky::of(&matrix).expect("positive definite by its noise");
            for (row, given) in matrix.iter().enumerate() {
                for (column, given) in given.iter().enumerate().take(row + 1) {
                    let product = dot(&factor.0[row][..=column], &factor.0[column]);
                    prop_assert!((product - given).abs() < 1e-9);
                }
            }
            let values: Vec<f64> = (0..points.len()).map(|at| at as f64).collect();
            let solved = factor.solve(&values);
            let full = |row: usize, column: usize| matrix[row.max(column)][row.min(column)];
            for (row, value) in values.iter().enumerate() {
                let product: f64 = (0..values.len()).map(|column| full(row, column) * solved[column]).sum();
                prop_assert!((product - value).abs() < 1e-6);
            }
        }
    }
}
