//! Measures a plugin's throughput, compared with the native kernel and a plain copy.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use ronde_collectives::kernels::{BLOCK_BYTES_MAX, Side, reduce_into};
use ronde_plugin_abi::Stage;
use ronde_wire::copying::copy;
use ronde_wire::{DType, ReduceOp};

use crate::determinism::values;
use crate::error::Fault;
use crate::instance::{Instance, Span};
use crate::manifest::{Parameters, Shape};
use crate::plugin::Plugin;

/// Bytes of values per second, including all copies.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Describes the measured operation.
    pub what: &'static str,
    /// The plugin.
    pub plugin: f64,
    /// The native sum of two operands of the same type.
    pub native: f64,
    /// The native sum of operands that are copied to private blocks first and back afterwards, as operands in shared
    /// memory are.
    pub native_copied: f64,
    /// A plain copy.
    pub copy: f64,
}

/// Measures every operation of a plugin, with tensors of about `bytes` bytes, for about `time` each.
///
/// # Errors
/// [`Fault`] if a call fails.
pub fn measure(
    plugin: &Arc<Plugin>,
    parameters: &Parameters,
    dtype: DType,
    bytes: usize,
    time: Duration,
) -> Result<Vec<Rates>, Fault> {
    let mut instance = plugin.instance(parameters)?;
    let bytes = bytes.next_multiple_of(64);
    let span = Span {
        dtype,
        stage: Stage::Contribution,
        offset: 0,
        tensor_elements: (bytes / dtype.size_bytes()) as u64,
        round: 0,
        tensor: 0,
    };
    let mut rates = Vec::new();
    if plugin.manifest().codec.as_ref().is_some_and(|codec| codec.dtypes.contains(&dtype)) {
        rates.extend(codec(&mut instance, &span, bytes, time)?);
    }
    if let Some(reducer) = plugin.manifest().reducer.as_ref().filter(|reducer| reducer.dtypes.contains(&dtype)) {
        let shape = reducer.shape;
        rates.extend(reduction(&mut instance, &span, shape, bytes, time)?);
    }
    Ok(rates)
}

/// Nanoseconds of the smallest call: one element in, one out.
///
/// # Errors
/// [`Fault`] if a call fails.
pub fn call_nanoseconds(
    plugin: &Arc<Plugin>,
    parameters: &Parameters,
    dtype: DType,
    time: Duration,
) -> Result<f64, Fault> {
    let rates = measure(plugin, parameters, dtype, dtype.size_bytes(), time)?;
    // Sizes are rounded up to a cache line, so each call moves one.
    Ok(rates.iter().map(|rates| 64e9 / rates.plugin).fold(f64::INFINITY, f64::min))
}

fn codec(instance: &mut Instance, span: &Span, bytes: usize, time: Duration) -> Result<[Rates; 2], Fault> {
    let facts = instance.codec_facts(span.dtype)?;
    let block = facts.block_elements * span.dtype.size_bytes();
    // Random values, because the work of a codec depends on them.
    let values = values(span.dtype, bytes / span.dtype.size_bytes(), 1);
    let mut state = vec![0; bytes / span.dtype.size_bytes() * facts.state_bytes_per_element];
    let mut encoded = vec![(vec![0; facts.block_bound], 0); bytes.div_ceil(block)];
    let at = |index: usize| Span { offset: (index * facts.block_elements) as u64, ..*span };
    let encoding = rate(bytes, time, || {
        let mut state = state.chunks_mut((facts.block_elements * facts.state_bytes_per_element).max(1));
        for (index, (part, (encoded, length))) in values.chunks(block).zip(&mut encoded).enumerate() {
            *length = instance.encode_into(&at(index), part, state.next().unwrap_or_default(), encoded)?;
        }
        Ok(())
    })?;
    let mut decoded = vec![0; bytes];
    let decoding = rate(bytes, time, || {
        for (index, (part, (encoded, length))) in decoded.chunks_mut(block).zip(&encoded).enumerate() {
            instance.decode(&at(index), &encoded[..*length], part)?;
        }
        Ok(())
    })?;
    let (native, native_copied, copy) = natively(span.dtype, bytes, time)?;
    Ok([("encode", encoding), ("decode", decoding)].map(|(what, plugin)| Rates {
        what,
        plugin,
        native,
        native_copied,
        copy,
    }))
}

fn reduction(
    instance: &mut Instance,
    span: &Span,
    shape: Shape,
    bytes: usize,
    time: Duration,
) -> Result<Vec<Rates>, Fault> {
    let ranks = if shape == Shape::Pairwise { 2 } else { instance.plugin().manifest().limits.ranks.min(RANKS) };
    let values = ordinary(span.dtype, bytes);
    let mut into = values.clone();
    let operands = vec![values.as_slice(); ranks];
    let measures = match shape {
        Shape::Pairwise | Shape::Nary => Vec::new(),
        Shape::TwoPass { measures } => vec![1.0; ranks * measures],
        Shape::Adaptive => vec![1.0; ranks],
    };
    let reduced = if shape == Shape::Pairwise {
        let pair = rate(bytes, time, || instance.reduce_pair(span, &mut into, &values))?;
        // The values of all ranks but the first are added to others.
        let several = vec![values.as_slice(); RANKS];
        let fold = rate((RANKS - 1) * bytes, time, || instance.fold(span, &several, &mut into))?;
        vec![("reduce 2 ranks", pair), ("reduce 4 ranks", fold)]
    } else {
        let reduced = rate(bytes, time, || instance.reduce(span, &operands, &measures, &mut into))?;
        vec![("reduce up to 4 ranks", reduced)]
    };
    let (native, native_copied, copy) = natively(span.dtype, bytes, time)?;
    Ok(reduced.into_iter().map(|(what, plugin)| Rates { what, plugin, native, native_copied, copy }).collect())
}

/// The native sum, the native sum with copies, and a plain copy.
fn natively(dtype: DType, bytes: usize, time: Duration) -> Result<(f64, f64, f64), Fault> {
    let values = ordinary(dtype, bytes);
    let mut into = values.clone();
    let native = rate(bytes, time, || {
        let summed = reduce_into(dtype, ReduceOp::Sum, black_box(&mut into), black_box(&values), Side::AccumulatorLeft);
        summed.expect("there is a sum of every type, and the lengths are equal");
        Ok(())
    })?;
    let mut blocks = [[0; BLOCK_BYTES_MAX], [0; BLOCK_BYTES_MAX]];
    let native_copied = rate(bytes, time, || {
        for (into, values) in black_box(&mut into).chunks_mut(BLOCK_BYTES_MAX).zip(values.chunks(BLOCK_BYTES_MAX)) {
            let [left, right] = blocks.each_mut().map(|block| &mut block[..values.len()]);
            copy(left, into);
            copy(right, values);
            let summed = reduce_into(dtype, ReduceOp::Sum, left, right, Side::AccumulatorLeft);
            summed.expect("there is a sum of every type, and the lengths are equal");
            copy(into, left);
        }
        Ok(())
    })?;
    let copy = rate(bytes, time, || {
        copy(black_box(&mut into), black_box(&values));
        Ok(())
    })?;
    Ok((native, native_copied, copy))
}

/// Zeros: valid for every type, without overflow or slow denormals. They are written explicitly, because unwritten zero
/// pages of the kernel share one physical page, which stays in the first-level cache.
fn ordinary(dtype: DType, bytes: usize) -> Vec<u8> {
    let mut values = black_box(vec![1; bytes / dtype.size_bytes() * dtype.size_bytes()]);
    values.fill(0);
    values
}

/// Bytes per second of this thread's processor time: the median of rounds of some hundred microseconds. Other programs
/// therefore matter only as far as they evict caches.
fn rate(bytes: usize, time: Duration, mut work: impl FnMut() -> Result<(), Fault>) -> Result<f64, Fault> {
    // Twice, because the first run touches new memory.
    work()?;
    let once = processor_time();
    work()?;
    let once = processor_time().saturating_sub(once).max(Duration::from_nanos(1));
    let repeats = (ROUND.as_nanos() / once.as_nanos()).clamp(1, REPEATS_MAX);
    let (begin, mut rounds) = (Instant::now(), Vec::new());
    while begin.elapsed() < time || rounds.is_empty() {
        let round = processor_time();
        for _ in 0..repeats {
            work()?;
        }
        rounds.push(processor_time().saturating_sub(round).as_secs_f64());
    }
    rounds.sort_by(f64::total_cmp);
    let median = rounds[rounds.len() / 2].max(1e-9);
    Ok(bytes as f64 * repeats as f64 / median)
}

/// The processor time of this thread.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Approximate duration of a round.
const ROUND: Duration = Duration::from_micros(500);
/// Repetitions in one round.
const REPEATS_MAX: u128 = 100_000;
/// Ranks whose values are reduced at once.
const RANKS: usize = 4;
