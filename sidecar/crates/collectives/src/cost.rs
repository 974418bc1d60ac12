//! Selection of algorithm and chunk size by an alpha-beta-gamma cost model, with a reason as text.
//!
//! The model is R. Hockney's, with a term for arithmetic: a sub-schedule that takes `r` rounds, sends `s` bytes from the busiest
//! member and reduces `c` bytes there costs `r alpha + s beta + c gamma`.
//!
//! **Bucket independence.** Results must not depend on the bucket in which a tensor travelled, and algorithms differ in
//! their order of reduction. So the algorithm is a function of the single tensor ([`algorithm_of`]), only tensors with the same
//! algorithm share a bucket, and [`select`] chooses for the bucket only what cannot change a bit: chunk size, window, lanes.

use std::fmt::Write as _;

use ronde_wire::{Algorithm, SetTopology, Tuning, limits};

use crate::algorithms::{self, Predicted};
use crate::plan::{Span, Work, WorkKind};
use crate::planner::predicted;

/// The costs of a round, a byte sent and a byte reduced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Microseconds for each round: latency, and the handoffs between threads at both ends.
    pub alpha_us: f64,
    /// Microseconds for each byte that a member sends.
    pub beta_us_per_byte: f64,
    /// Microseconds for each byte that a member reduces into another.
    pub gamma_us_per_byte: f64,
}

impl Default for CostModel {
    /// The model before any measurement: 60 us a round, 1 GB/s sealed and sent, 10 GB/s reduced.
    fn default() -> Self {
        Self { alpha_us: 60.0, beta_us_per_byte: 1e-3, gamma_us_per_byte: 1e-4 }
    }
}

/// The result of [`select`].
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The tuning for the order.
    pub tuning: Tuning,
    /// Its predicted time in microseconds; 0 when nothing is sent.
    pub predicted_us: f64,
    /// One line of text: the candidates with their costs, and how the bucket is cut.
    pub reason: String,
}

/// Returns the algorithm for one tensor of so many elements in all, independently of its bucket.
///
/// For work with a count for each rank or pair `elements` is their sum. With one member it is always
/// [`Algorithm::Local`].
///
/// An all-reduce uses the ring unless another algorithm is cheaper by more than [`RING_PREFERENCE`].
#[must_use]
pub fn algorithm_of(
    topology: &SetTopology,
    kind: &WorkKind,
    element_bytes: u32,
    elements: u64,
    model: &CostModel,
) -> Algorithm {
    let mut performing = algorithms::performing(kind, topology.len());
    match (performing.next(), performing.next()) {
        (Some(only), None) => only,
        _ => preferred(&candidates(topology, &even_work(topology, kind, element_bytes, elements), model)),
    }
}

/// One tensor of so many elements in all, with equal counts where the kind has several.
fn even_work(topology: &SetTopology, kind: &WorkKind, element_bytes: u32, elements: u64) -> Work {
    let counts = kind.counts().number(topology.size()) as u64;
    let whole = Span { start: 0, len: elements };
    let tensor = (0..counts).map(|index| whole.split(counts, index).len).collect();
    Work { kind: kind.clone(), element_bytes, tensors: vec![tensor] }
}

/// What is given about the cut of a bucket; the rest is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cutting {
    /// The most lanes.
    pub lanes: u16,
    /// The chunk size in bytes, a power of two; `None` to choose the one with the least predicted cost. Work whose chunks
    /// are defined otherwise ignores it: a codec's blocks, and sums of measures. A bucket has larger chunks than this where
    /// it would have more than [`CHUNKS_MAX`], and smaller ones where more than [`FLIGHT_BYTES_MAX`] would be in flight.
    pub chunk_bytes: Option<u32>,
}

/// The most chunks of a bucket with a given chunk size. Each takes some hundred bytes in its plan.
pub const CHUNKS_MAX: u64 = 1 << 14;

/// Chooses how to cut a bucket, given up to `lanes` lanes: [`select_cut`] with any chunk size.
#[must_use]
pub fn select(topology: &SetTopology, work: &Work, lanes: u16, model: &CostModel) -> Choice {
    select_cut(topology, work, Cutting { lanes, chunk_bytes: None }, model)
}

/// Chooses how to cut a bucket.
///
/// The algorithm is that of the bucket's largest tensor, and of all its tensors if the bucket was built by [`algorithm_of`].
/// The chunk size is the given one, or the power of two with the least predicted cost within [`FLIGHT_BYTES_MAX`] of private
/// memory. Neither changes a bit of the result.
#[must_use]
pub fn select_cut(topology: &SetTopology, work: &Work, cutting: Cutting, model: &CostModel) -> Choice {
    let largest = work.tensors.iter().map(|counts| counts.iter().sum()).max().unwrap_or(0);
    let algorithm = algorithm_of(topology, &work.kind, work.element_bytes, largest, model);
    let cutting = Cutting { lanes: cutting.lanes.clamp(1, LANES_MAX), ..cutting };
    let (tuning, predicted_us) = cut(topology, work, algorithm, cutting, model);
    let reason = reason(topology, work, &tuning, predicted_us, largest, model);
    Choice { tuning, predicted_us, reason }
}

/// How much cheaper than the ring another algorithm must be. A member of a ring needs connections to two peers instead of
/// `log2 n`, and sends its chunks at an even rate. The model includes neither.
pub const RING_PREFERENCE: f64 = 0.05;

/// Bytes that the sub-schedules in flight of one plan may hold for their peers. This bounds private memory (a sub-schedule
/// has one or two more registers of a chunk each).
pub const FLIGHT_BYTES_MAX: u64 = 8 << 20;

/// Sub-schedules of a lane that can be active at once: one is received, one reduced, one sent, one waits for its peer.
const WINDOW_USEFUL: u64 = 4;

/// The smallest chunk that is worth its headers and handoffs, in bytes. Chunks are smaller where a sub-schedule holds one for
/// each of many members.
const CHUNK_BYTES_WORTHWHILE: u32 = 64 << 10;

/// The smallest and the largest chunk that a plan may have, as a tuning holds it.
#[allow(clippy::cast_possible_truncation, reason = "4 KiB, checked by the assertion below")]
const CHUNK_BYTES_MIN: u32 = limits::CHUNK_BYTES_MIN as u32;
#[allow(clippy::cast_possible_truncation, reason = "1 MiB, checked by the assertion below")]
const CHUNK_BYTES_MAX: u32 = limits::CHUNK_BYTES_MAX as u32;

/// The most lanes that a plan may use, as a tuning holds it.
#[allow(clippy::cast_possible_truncation, reason = "16, checked by the assertion below")]
const LANES_MAX: u16 = limits::LANES_MAX as u16;

const _: () = assert!(CHUNK_BYTES_MIN as usize == limits::CHUNK_BYTES_MIN);
const _: () = assert!(CHUNK_BYTES_MAX as usize == limits::CHUNK_BYTES_MAX && LANES_MAX as usize == limits::LANES_MAX);

/// Microseconds of processor time for each chunk, independent of its size. This limits how fine chunks get.
const CHUNK_US: f64 = 4.0;

/// The algorithms that perform the work, with the cost of one uncut sub-schedule.
fn candidates(topology: &SetTopology, work: &Work, model: &CostModel) -> Vec<(Algorithm, f64)> {
    let cost = |algorithm: Algorithm| {
        let tuning = Tuning { algorithm, chunk_bytes: CHUNK_BYTES_MAX, lanes: 1, window: 1 };
        let form = predicted(topology, work, &tuning).ok()?;
        Some((algorithm, Pipeline::of(&form, 1, model).once_us))
    };
    algorithms::performing(&work.kind, topology.len()).filter_map(cost).collect()
}

/// The cheapest candidate, or the ring if it is almost as cheap.
fn preferred(costs: &[(Algorithm, f64)]) -> Algorithm {
    let cheapest = costs.iter().min_by(|a, b| a.1.total_cmp(&b.1)).copied().unwrap_or((Algorithm::Ring, 0.0));
    let ring = costs.iter().find(|(algorithm, _)| *algorithm == Algorithm::Ring);
    match ring {
        Some((_, ring_us)) if ring_us * (1.0 - RING_PREFERENCE) < cheapest.1 => Algorithm::Ring,
        _ => cheapest.0,
    }
}

/// The tuning of an algorithm with the least predicted cost.
fn cut(
    topology: &SetTopology,
    work: &Work,
    algorithm: Algorithm,
    cutting: Cutting,
    model: &CostModel,
) -> (Tuning, f64) {
    let mut best = (Tuning { algorithm, chunk_bytes: CHUNK_BYTES_MAX, lanes: 1, window: 1 }, f64::INFINITY);
    let Ok(form) = predicted(topology, work, &best.0) else {
        return (best.0, 0.0);
    };
    let lanes = if work.kind.measures() { 1 } else { cutting.lanes };
    let held = u64::from(form.held_chunks);
    let (least, most) = chunk_range(work, cutting.chunk_bytes);
    let mut chunk_bytes = least;
    while u64::from(chunk_bytes) * held > FLIGHT_BYTES_MAX && chunk_bytes > least.min(CHUNK_BYTES_MIN) {
        chunk_bytes /= 2;
    }
    while chunk_bytes <= most {
        let chunks_in_flight = (FLIGHT_BYTES_MAX / (u64::from(chunk_bytes) * held)).max(1);
        let elements = u64::from(chunk_bytes / work.element_bytes);
        let (lanes, window) = lanes_and_window(&form, form.sub_schedules(elements), lanes, chunks_in_flight);
        let in_flight = u64::from(lanes * window).div_ceil(u64::from(form.siblings));
        let cost_us = Pipeline::of(&form, form.chunks_per_block(elements), model).total_us(in_flight);
        if cost_us < best.1 {
            best = (Tuning { algorithm, chunk_bytes, lanes, window }, cost_us);
        }
        chunk_bytes *= 2;
        if u64::from(chunk_bytes) * held > FLIGHT_BYTES_MAX {
            break;
        }
    }
    best
}

/// The smallest and greatest chunk size to consider. Where a codec defines blocks, a chunk holds one block.
fn chunk_range(work: &Work, given: Option<u32>) -> (u32, u32) {
    let WorkKind::AllReduceByBlocks { block_elements, encoded_bytes } = work.kind else {
        let Some(given) = given.filter(|_| !work.kind.measures()) else {
            return (CHUNK_BYTES_WORTHWHILE, CHUNK_BYTES_MAX);
        };
        let bytes = work.elements().saturating_mul(u64::from(work.element_bytes));
        let least = bytes.div_ceil(CHUNKS_MAX).min(u64::from(CHUNK_BYTES_MAX)).max(u64::from(given));
        let size = least.next_power_of_two().clamp(u64::from(CHUNK_BYTES_MIN), u64::from(CHUNK_BYTES_MAX));
        let size = u32::try_from(size).unwrap_or(CHUNK_BYTES_MAX);
        return (size, size);
    };
    let block = block_elements.saturating_mul(work.element_bytes).max(encoded_bytes).min(CHUNK_BYTES_MAX);
    let size = block.next_power_of_two().max(CHUNK_BYTES_MIN);
    (size, size)
}

/// Lanes and window: as many sub-schedules in flight as exist, fit private memory, and are useful.
fn lanes_and_window(form: &Predicted, sub_schedules: u64, lanes: u16, in_flight_max: u64) -> (u16, u16) {
    let small = |number: u64| u16::try_from(number).unwrap_or(u16::MAX);
    let lanes = lanes.min(small(sub_schedules)).min(small(in_flight_max)).max(1);
    let needed = sub_schedules.div_ceil(u64::from(lanes));
    let useful =
        (WINDOW_USEFUL * u64::from(form.siblings)).div_ceil(if form.siblings > 1 { u64::from(lanes) } else { 1 });
    let window = needed.min(in_flight_max / u64::from(lanes)).min(useful).clamp(1, limits::WINDOW_MAX as u64);
    (lanes, small(window))
}

/// The sub-schedules of a plan as a pipeline of equal stages, as the busiest member runs it. A stage is one sub-schedule or
/// several siblings.
struct Pipeline {
    count: u64,
    /// The time of one stage alone.
    once_us: f64,
    /// The time that does not overlap with other stages: its sending or its reducing.
    busy_us: f64,
}

impl Pipeline {
    fn of(form: &Predicted, count: u64, model: &CostModel) -> Self {
        let count = count.max(1);
        let share = |bytes: &[u64]| bytes.iter().max().map_or(0.0, |most| *most as f64 / count as f64);
        let sending_us = f64::from(form.chunk_transfers) * CHUNK_US + share(&form.sent_bytes) * model.beta_us_per_byte;
        let reducing_us = share(&form.reduced_bytes) * model.gamma_us_per_byte;
        let once_us = f64::from(form.rounds) * model.alpha_us + sending_us + reducing_us;
        Self { count, once_us, busy_us: sending_us.max(reducing_us) }
    }

    /// The time of all stages, `in_flight` at once: that of the first, then the busy time of each other one or, when too few
    /// are in flight to hide latency, a share of its full time.
    fn total_us(&self, in_flight: u64) -> f64 {
        let more = (self.count - 1) as f64;
        let step_us =
            if self.count <= in_flight { self.busy_us } else { self.busy_us.max(self.once_us / in_flight as f64) };
        self.once_us + more * step_us
    }
}

fn reason(
    topology: &SetTopology,
    work: &Work,
    tuning: &Tuning,
    predicted_us: f64,
    largest: u64,
    model: &CostModel,
) -> String {
    let members = topology.len();
    let total = bytes_text(work.elements().saturating_mul(u64::from(work.element_bytes)));
    let mut line = format!("{} of {total} over {members} members", work.kind.name());
    if members <= 1 {
        line.push_str(": local, nothing is sent");
        return line;
    }
    let tensors = if work.kind == WorkKind::AllReduce { vec![vec![largest]] } else { work.tensors.clone() };
    let single = Work { kind: work.kind.clone(), element_bytes: work.element_bytes, tensors };
    let costs = candidates(topology, &single, model);
    if work.tensors.len() > 1 {
        let largest = bytes_text(largest.saturating_mul(u64::from(work.element_bytes)));
        let _ = write!(line, " in {} tensors of up to {largest}", work.tensors.len());
    }
    let costs: Vec<String> = costs.iter().map(|(algorithm, us)| format!("{algorithm} {}", time_text(*us))).collect();
    let _ = write!(
        line,
        ": {}; chosen {}, chunks of {} on {} lanes x window {}, {} for all",
        costs.join(", "),
        tuning.algorithm,
        bytes_text(u64::from(tuning.chunk_bytes)),
        tuning.lanes,
        tuning.window,
        time_text(predicted_us),
    );
    line
}

fn bytes_text(bytes: u64) -> String {
    match bytes {
        0..10_240 => format!("{bytes} B"),
        10_240..10_485_760 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

fn time_text(us: f64) -> String {
    if us < 10_000.0 { format!("{us:.0} us") } else { format!("{:.1} ms", us / 1_000.0) }
}
