//! Selection by an alpha-beta-gamma cost model, with its reason in words.
//!
//! The model is R. Hockney's, with a term for arithmetic: a strand that takes `r` rounds, sends `s` bytes from the busiest
//! member and reduces `c` bytes there costs `r alpha + s beta + c gamma`.
//!
//! **Bucket independence.** Results must not depend on the bucket in which a tensor travelled, and algorithms differ in
//! their order of reduction. So the algorithm is a function of the single tensor ([`algorithm_of`]), only tensors of equal
//! algorithm share a bucket, and [`select`] decides for the bucket what cannot change a bit: chunk size, window, lanes.

use std::fmt::Write as _;

use ronde_wire::{Algorithm, SetTopology, Tuning, limits};

use crate::algorithms::Predicted;
use crate::plan::{Work, WorkKind};
use crate::planner::predicted;

/// What a round, a byte sent and a byte reduced cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Microseconds for each round: latency, and the hand-overs between threads at both ends.
    pub alpha_us: f64,
    /// Microseconds for each byte that a member sends.
    pub beta_us_per_byte: f64,
    /// Microseconds for each byte that a member reduces into another.
    pub gamma_us_per_byte: f64,
}

impl Default for CostModel {
    /// Before anything is measured: 60 us a round, 1 GB/s sealed and sent, 10 GB/s reduced.
    fn default() -> Self {
        Self { alpha_us: 60.0, beta_us_per_byte: 1e-3, gamma_us_per_byte: 1e-4 }
    }
}

/// What [`select`] decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// To be ordered.
    pub tuning: Tuning,
    /// What the model expects of it, in microseconds; 0 when nothing is sent.
    pub predicted_us: f64,
    /// One line for people: the candidates with their costs, and how the bucket is cut.
    pub reason: String,
}

/// The algorithm for one tensor of so many elements in all, whatever bucket it will travel in.
///
/// For an all-gather `elements` counts all ranks' contributions. With one member it is always [`Algorithm::Local`].
#[must_use]
pub fn algorithm_of(
    topology: &SetTopology,
    kind: &WorkKind,
    element_bytes: u32,
    elements: u64,
    model: &CostModel,
) -> Algorithm {
    if topology.len() <= 1 {
        return Algorithm::Local;
    }
    match kind {
        WorkKind::AllReduce => {
            let work = Work { kind: WorkKind::AllReduce, element_bytes, tensors: vec![vec![elements]] };
            let costs = candidates(topology, &work, model);
            costs.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)).map_or(Algorithm::Ring, |cheapest| cheapest.0)
        }
        WorkKind::AllReduceCoded { .. }
        | WorkKind::AllReduceNAry
        | WorkKind::AllReduceTwoPass { .. }
        | WorkKind::AllReduceAdaptive => Algorithm::Direct,
        WorkKind::Broadcast { .. } | WorkKind::Reduce { .. } => Algorithm::BinomialTree,
        WorkKind::AllGather | WorkKind::ReduceScatter => Algorithm::Ring,
        WorkKind::Gather { .. } | WorkKind::Scatter { .. } => Algorithm::Linear,
        WorkKind::AllToAll => Algorithm::Pairwise,
        WorkKind::Barrier => Algorithm::Dissemination,
    }
}

/// How a bucket is cut, given up to `lanes` lanes.
///
/// The algorithm is the one of the bucket's largest tensor, which is every tensor's when the bucket was put together by
/// [`algorithm_of`]. The chunk size is the power of two with the least predicted cost, where private memory is bounded by
/// [`FLIGHT_BYTES_MAX`].
#[must_use]
pub fn select(topology: &SetTopology, work: &Work, lanes: u16, model: &CostModel) -> Choice {
    let largest = work.tensors.iter().map(|counts| counts.iter().sum()).max().unwrap_or(0);
    let algorithm = algorithm_of(topology, &work.kind, work.element_bytes, largest, model);
    let lanes = lanes.clamp(1, LANES_MOST);
    let (tuning, predicted_us) = cut(topology, work, algorithm, lanes, model);
    let reason = reason(topology, work, &tuning, predicted_us, largest, model);
    Choice { tuning, predicted_us, reason }
}

/// Bytes that the strands in flight of one plan may hold for sending: what bounds private memory (a strand has up to
/// three registers of a chunk each).
pub const FLIGHT_BYTES_MAX: u64 = 8 << 20;

/// Strands of a lane that can do something at once: one is received, one reduced, one sent, one waits for its peer.
const WINDOW_USEFUL: u16 = 4;

/// The smallest chunk that is worth its headers and hand-overs, in bytes.
const CHUNK_BYTES_LEAST: u32 = 64 << 10;

/// The largest chunk that a plan may have, as a tuning holds it.
#[allow(clippy::cast_possible_truncation, reason = "1 MiB, checked by the assertion below")]
const CHUNK_BYTES_MOST: u32 = limits::CHUNK_BYTES_MAX as u32;

/// The most lanes that a plan may use, as a tuning holds it.
#[allow(clippy::cast_possible_truncation, reason = "16, checked by the assertion below")]
const LANES_MOST: u16 = limits::LANES_MAX as u16;

const _: () = assert!(CHUNK_BYTES_MOST as usize == limits::CHUNK_BYTES_MAX && LANES_MOST as usize == limits::LANES_MAX);

/// Microseconds of processor time for each chunk, whatever its size: the reason not to cut ever finer.
const CHUNK_US: f64 = 4.0;

/// The algorithms that perform the work, with the cost of one uncut strand.
fn candidates(topology: &SetTopology, work: &Work, model: &CostModel) -> Vec<(Algorithm, f64)> {
    let algorithms: &[Algorithm] = match work.kind {
        _ if topology.len() <= 1 => &[Algorithm::Local],
        WorkKind::AllReduce => &[Algorithm::RecursiveDoubling, Algorithm::Ring],
        WorkKind::AllReduceCoded { .. }
        | WorkKind::AllReduceNAry
        | WorkKind::AllReduceTwoPass { .. }
        | WorkKind::AllReduceAdaptive => &[Algorithm::Direct],
        WorkKind::Broadcast { .. } | WorkKind::Reduce { .. } => &[Algorithm::BinomialTree],
        WorkKind::AllGather | WorkKind::ReduceScatter => &[Algorithm::Ring],
        WorkKind::Gather { .. } | WorkKind::Scatter { .. } => &[Algorithm::Linear],
        WorkKind::AllToAll => &[Algorithm::Pairwise],
        WorkKind::Barrier => &[Algorithm::Dissemination],
    };
    let cost = |&algorithm: &Algorithm| {
        let tuning = Tuning { algorithm, chunk_bytes: CHUNK_BYTES_MOST, lanes: 1, window: 1 };
        let form = predicted(topology, work, &tuning).ok()?;
        Some((algorithm, Strands::of(&form, 1, model).once_us))
    };
    algorithms.iter().filter_map(cost).collect()
}

/// The cheapest cut around an algorithm.
fn cut(topology: &SetTopology, work: &Work, algorithm: Algorithm, lanes: u16, model: &CostModel) -> (Tuning, f64) {
    let mut best = (Tuning { algorithm, chunk_bytes: CHUNK_BYTES_MOST, lanes: 1, window: 1 }, f64::INFINITY);
    let Ok(form) = predicted(topology, work, &best.0) else {
        return (best.0, 0.0);
    };
    let mut chunk_bytes = CHUNK_BYTES_LEAST;
    while chunk_bytes <= CHUNK_BYTES_MOST {
        let strands = form.strands(u64::from(chunk_bytes / work.element_bytes));
        let lanes = lanes.min(u16::try_from(strands).unwrap_or(u16::MAX)).max(1);
        let window = window_for(strands, lanes, chunk_bytes);
        let cost_us = Strands::of(&form, strands, model).total_us(u64::from(lanes * window));
        if cost_us < best.1 {
            best = (Tuning { algorithm, chunk_bytes, lanes, window }, cost_us);
        }
        chunk_bytes *= 2;
    }
    best
}

/// As many strands at once as there are, as private memory allows, and as are of use: 1 to [`WINDOW_USEFUL`].
fn window_for(strands: u64, lanes: u16, chunk_bytes: u32) -> u16 {
    let needed = strands.div_ceil(u64::from(lanes));
    let bounded = FLIGHT_BYTES_MAX / (u64::from(lanes) * u64::from(chunk_bytes));
    let window = needed.min(bounded).clamp(1, u64::from(WINDOW_USEFUL));
    u16::try_from(window).unwrap_or(WINDOW_USEFUL)
}

/// Equal strands of one plan, as its busiest member sees them.
struct Strands {
    count: u64,
    /// One strand alone.
    once_us: f64,
    /// The part of a strand that does not overlap with the same part of others: its sending or its reducing.
    busy_us: f64,
}

impl Strands {
    fn of(form: &Predicted, count: u64, model: &CostModel) -> Self {
        let count = count.max(1);
        let share = |bytes: &[u64]| bytes.iter().max().map_or(0.0, |most| *most as f64 / count as f64);
        let rounds = f64::from(form.rounds);
        let sending_us = rounds * CHUNK_US + share(&form.sent_bytes) * model.beta_us_per_byte;
        let reducing_us = share(&form.reduced_bytes) * model.gamma_us_per_byte;
        let once_us = rounds * model.alpha_us + sending_us + reducing_us;
        Self { count, once_us, busy_us: sending_us.max(reducing_us) }
    }

    /// All strands, `in_flight` at once: the first one's way, then one more for each busy part, or, when too few are in
    /// flight to hide latency, for each share of a strand's way.
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
