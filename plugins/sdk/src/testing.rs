//! Native tests of plugins: what sidecars do with a codec, without sidecars.
//!
//! These helpers test a plugin's logic. `ronde plugin test` runs the conformance checks on the module itself.

use std::vec;
use std::vec::Vec;

use crate::abi::Stage;
use crate::math::Random;
use crate::{Codec, CodecFor, Element, Error, Span};

/// The result of encoding and decoding a span.
#[derive(Clone, Debug, PartialEq)]
pub struct Trip<E> {
    /// The encoded bytes.
    pub encoded: Vec<u8>,
    /// The decoded values.
    pub decoded: Vec<E>,
}

/// Encodes and decodes a span.
///
/// # Errors
/// Those of the codec.
///
/// # Panics
/// If the encoded bytes exceed the bound.
pub fn round_trip<E: Element, C: CodecFor<E>>(
    codec: &mut C,
    span: &Span,
    values: &[E],
    state: &mut [C::State],
) -> Result<Trip<E>, Error> {
    let mut encoded = vec![0xa5; codec.bound(values.len())];
    let bytes = codec.encode(span, values, state, &mut encoded)?;
    assert!(bytes <= encoded.len(), "{bytes} bytes were encoded, {} are the bound", encoded.len());
    encoded.truncate(bytes);
    let mut decoded = vec![E::default(); values.len()];
    codec.decode(span, &encoded, &mut decoded)?;
    Ok(Trip { encoded, decoded })
}

/// Decodes malformed bytes: truncated, extended, changed and random ones. Each must give values or
/// [`Error::malformed`]. A panic, which the host would report as a trap, fails the test.
///
/// # Panics
/// If the codec panics or returns another error.
pub fn decode_hostile_bytes<E: Element, C: CodecFor<E>>(codec: &mut C, encoded: &[u8], elements: usize) {
    let mut values = vec![E::default(); elements];
    let span = Span::whole(elements);
    let mut decode = |bytes: &[u8]| {
        if let Err(error) = codec.decode(&span, bytes, &mut values) {
            assert_eq!(error.code(), Error::malformed("").code(), "{error}");
        }
    };
    let mut random = Random::new(7);
    (0..encoded.len()).for_each(|length| decode(&encoded[..length]));
    for extra in 1..70 {
        let longer: Vec<u8> = encoded.iter().copied().chain(vec![0xff; extra]).collect();
        decode(&longer);
    }
    for _ in 0..2_000 {
        let mut changed = encoded.to_vec();
        for _ in 0..=random.below(4) {
            let length = u32::try_from(changed.len()).unwrap_or(u32::MAX);
            if let Some(byte) = changed.get_mut(random.below(length) as usize) {
                *byte = random.byte();
            }
        }
        decode(&changed);
        changed.iter_mut().for_each(|byte| *byte = random.byte());
        decode(&changed);
    }
}

/// Workers that average tensors of f32 with a codec as sidecars do: each encodes its contribution; the sum of the
/// decoded contributions is encoded once more, and all decode that.
#[derive(Debug)]
pub struct Workers<C: Codec> {
    codec: C,
    /// Elements of a span.
    block: usize,
    /// Whether residuals are kept from round to round.
    has_state: bool,
    round: u64,
    contributions: Vec<Vec<C::State>>,
    result: Vec<C::State>,
}

impl<C: CodecFor<f32>> Workers<C> {
    /// Creates `workers` workers with a tensor of `elements` elements each.
    #[must_use]
    pub fn new(codec: C, workers: usize, elements: usize, block: usize) -> Self {
        let fresh = || vec![C::State::default(); elements];
        let contributions = (0..workers).map(|_| fresh()).collect();
        Self { codec, block, has_state: true, round: 0, contributions, result: fresh() }
    }

    /// Drops the residuals after each round.
    #[must_use]
    pub fn forgetful(self) -> Self {
        Self { has_state: false, ..self }
    }

    /// Averages the workers' tensors.
    ///
    /// # Errors
    /// Those of the codec.
    pub fn average(&mut self, tensors: &[Vec<f32>]) -> Result<Vec<f32>, Error> {
        let mut sum = vec![0.0; self.result.len()];
        for (worker, tensor) in tensors.iter().enumerate() {
            let mut state = core::mem::take(&mut self.contributions[worker]);
            let sent = self.pass(Stage::Contribution, tensor, &mut state)?;
            sum.iter_mut().zip(&sent).for_each(|(sum, value)| *sum += value);
            self.contributions[worker] = state;
        }
        let mut state = core::mem::take(&mut self.result);
        let result = self.pass(Stage::Result, &sum, &mut state)?;
        self.result = state;
        self.round += 1;
        Ok(result.iter().map(|value| value / tensors.len() as f32).collect())
    }

    fn pass(&mut self, stage: Stage, tensor: &[f32], state: &mut [C::State]) -> Result<Vec<f32>, Error> {
        let mut sent = Vec::with_capacity(tensor.len());
        if !self.has_state {
            state.fill(C::State::default());
        }
        let mut offset = 0;
        for (values, state) in tensor.chunks(self.block).zip(state.chunks_mut(self.block)) {
            let tensor_elements = tensor.len() as u64;
            let span = Span { stage, elements: values.len(), offset, tensor_elements, round: self.round, tensor: 1 };
            sent.extend(round_trip(&mut self.codec, &span, values, state)?.decoded);
            offset += values.len() as u64;
        }
        Ok(sent)
    }
}

/// A convex problem: worker `w` has the loss `|x - t_w|^2 / 2`, so the optimum of all is the mean of the targets `t_w`.
#[derive(Debug)]
pub struct Quadratic {
    targets: Vec<Vec<f32>>,
    minimum: Vec<f32>,
}

impl Quadratic {
    /// The workers' gradients are largest in the first sixteenth of the dimensions, where they cancel out.
    #[must_use]
    pub fn cancelling(workers: usize, dimensions: usize) -> Self {
        let sign = |worker: usize| if worker.is_multiple_of(2) { 2.0 } else { -2.0 };
        Self::new(workers, dimensions, |worker, index| if index < dimensions / 16 { sign(worker) } else { 0.0 })
    }

    /// Near the minimum, one worker's gradient outweighs those of all others, which have the opposite sign.
    #[must_use]
    pub fn lopsided(workers: usize, dimensions: usize) -> Self {
        Self::new(workers, dimensions, |worker, _| if worker == 0 { 0.5 * (workers - 1) as f32 } else { -0.5 })
    }

    fn new(workers: usize, dimensions: usize, offset: impl Fn(usize, usize) -> f32) -> Self {
        let mut random = Random::new(42);
        let minimum: Vec<f32> =
            (0..dimensions).map(|_| (random.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).collect();
        let target = |worker: usize| minimum.iter().enumerate().map(|(at, value)| value + offset(worker, at)).collect();
        Self { targets: (0..workers).map(target).collect(), minimum }
    }

    /// Runs gradient descent from 0. Returns the distance from the minimum, relative to that of 0.
    ///
    /// # Errors
    /// Those of the codec.
    pub fn descend<C: CodecFor<f32>>(&self, mut workers: Workers<C>, rate: f32, steps: usize) -> Result<f32, Error> {
        let mut x = vec![0.0; self.minimum.len()];
        let start = self.distance(&x);
        for _ in 0..steps {
            let gradient = |target: &Vec<f32>| x.iter().zip(target).map(|(x, target)| x - target).collect();
            let gradients: Vec<Vec<f32>> = self.targets.iter().map(gradient).collect();
            let average = workers.average(&gradients)?;
            x.iter_mut().zip(&average).for_each(|(x, slope)| *x -= rate * slope);
        }
        Ok(self.distance(&x) / start)
    }

    fn distance(&self, x: &[f32]) -> f32 {
        x.iter().zip(&self.minimum).map(|(x, minimum)| (x - minimum) * (x - minimum)).sum::<f32>().sqrt()
    }
}
