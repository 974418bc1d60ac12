//! Checks that equal input gives equal output, on new and used instances and in any order. All ranks must end with the
//! same bits, so an instance must not carry anything from one call to the next.

use std::sync::Arc;

use ronde_plugin_abi::Stage;
use ronde_wire::DType;

use crate::error::Fault;
use crate::instance::{Instance, Span};
use crate::manifest::{Parameters, Shape};
use crate::plugin::Plugin;

/// A failed check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// A call failed on ordinary finite values.
    #[error("{what}: {fault}")]
    Fault {
        /// Describes the call.
        what: String,
        /// The fault.
        fault: Fault,
    },
    /// Equal input gave different output.
    #[error(
        "{what} gives other bytes {when} than on a fresh instance: it carries something from one call to the next, or \
         reads what no call has written"
    )]
    Differs {
        /// Describes the call.
        what: String,
        /// What preceded the call.
        when: &'static str,
    },
}

/// Runs a plugin on a fixed set of inputs of every supported type.
///
/// # Errors
/// [`Finding`] with the first call that failed or whose output differed.
pub fn check(plugin: &Arc<Plugin>, parameters: &Parameters) -> Result<(), Finding> {
    let mut cases = cases(plugin);
    add_decoding(&mut cases, plugin, parameters)?;
    let mut expected = Vec::with_capacity(cases.len());
    for case in &cases {
        let mut fresh = plugin.instance(parameters).map_err(|fault| case.failed(fault))?;
        expected.push(case.run(&mut fresh)?);
    }
    let Some(first) = cases.first() else { return Ok(()) };
    let mut used = plugin.instance(parameters).map_err(|fault| first.failed(fault))?;
    let forward: Vec<usize> = (0..cases.len()).collect();
    let backward: Vec<usize> = forward.iter().rev().copied().collect();
    let twice: Vec<usize> = forward.iter().flat_map(|case| [*case, *case]).collect();
    let orders = [("after other calls", forward), ("after later calls", backward), ("when repeated", twice)];
    for (when, order) in orders {
        for place in order {
            if cases[place].run(&mut used)? != expected[place] {
                return Err(Finding::Differs { what: cases[place].name(), when });
            }
        }
    }
    Ok(())
}

/// One input.
struct Case {
    kind: CaseKind,
    /// The stage of encoding and decoding.
    stage: Stage,
    dtype: DType,
    elements: usize,
    seed: u64,
}

enum CaseKind {
    Encode,
    Decode { encoded: Vec<u8> },
    Reduce { shape: Shape, ranks: usize },
}

fn cases(plugin: &Plugin) -> Vec<Case> {
    let manifest = plugin.manifest();
    let mut cases = Vec::new();
    for dtype in manifest.codec.iter().flat_map(|codec| &codec.dtypes).copied() {
        for stage in [Stage::Contribution, Stage::Result] {
            let sizes = LENGTHS.into_iter().zip(1..);
            let encoding = |(elements, seed)| Case { kind: CaseKind::Encode, stage, dtype, elements, seed };
            cases.extend(sizes.map(encoding));
        }
    }
    if let Some(reducer) = &manifest.reducer {
        let ranks = if reducer.shape == Shape::Pairwise { 2 } else { manifest.limits.ranks.min(RANKS) };
        for dtype in reducer.dtypes.iter().copied() {
            let (kind, stage) = (|| CaseKind::Reduce { shape: reducer.shape, ranks }, Stage::Contribution);
            let sizes = LENGTHS.into_iter().zip(1..);
            cases.extend(sizes.map(|(elements, seed)| Case { kind: kind(), stage, dtype, elements, seed }));
        }
    }
    cases
}

/// Adds decoding cases. Each is encoded by its own instance, so that the values are not left in the memory of the
/// decoder.
fn add_decoding(cases: &mut Vec<Case>, plugin: &Arc<Plugin>, parameters: &Parameters) -> Result<(), Finding> {
    let encoding: Vec<&Case> = cases.iter().filter(|case| matches!(case.kind, CaseKind::Encode)).collect();
    let mut decoding = Vec::with_capacity(encoding.len());
    for case in encoding {
        let mut fresh = plugin.instance(parameters).map_err(|fault| case.failed(fault))?;
        let facts = fresh.codec_facts(case.dtype).map_err(|fault| case.failed(fault))?;
        let elements = case.elements.min(facts.block_elements);
        let mut state = vec![0; elements * facts.state_bytes_per_element];
        let mut encoded = Vec::new();
        let values = values(case.dtype, elements, case.seed);
        let done = fresh.encode(&case.span(elements), &values, &mut state, &mut encoded);
        done.map_err(|fault| case.failed(fault))?;
        let Case { stage, dtype, elements, seed, .. } = *case;
        decoding.push(Case { kind: CaseKind::Decode { encoded }, stage, dtype, elements, seed });
    }
    cases.append(&mut decoding);
    Ok(())
}

impl Case {
    fn name(&self) -> String {
        let what = match (&self.kind, self.stage) {
            (CaseKind::Encode, Stage::Contribution) => "encoding a contribution of",
            (CaseKind::Encode, Stage::Result) => "encoding a result of",
            (CaseKind::Decode { .. }, Stage::Contribution) => "decoding a contribution of",
            (CaseKind::Decode { .. }, Stage::Result) => "decoding a result of",
            (CaseKind::Reduce { .. }, _) => "reducing",
        };
        format!("{what} {} elements of {}", self.elements, self.dtype)
    }

    fn failed(&self, fault: Fault) -> Finding {
        Finding::Fault { what: self.name(), fault }
    }

    fn span(&self, elements: usize) -> Span {
        let (offset, tensor_elements) = (64 * self.seed, 64 * self.seed + elements as u64);
        Span { dtype: self.dtype, stage: self.stage, offset, tensor_elements, round: 0, tensor: self.seed }
    }

    /// Runs the case and returns its concatenated output.
    fn run(&self, instance: &mut Instance) -> Result<Vec<u8>, Finding> {
        let output = match &self.kind {
            CaseKind::Encode => self.encode(instance),
            CaseKind::Decode { encoded } => self.decode(instance, encoded),
            CaseKind::Reduce { shape, ranks } => self.reduce(instance, *shape, *ranks),
        };
        output.map_err(|fault| self.failed(fault))
    }

    /// Two rounds, so that the state is used as well.
    fn encode(&self, instance: &mut Instance) -> Result<Vec<u8>, Fault> {
        let facts = instance.codec_facts(self.dtype)?;
        let elements = self.elements.min(facts.block_elements);
        let mut state = vec![0; elements * facts.state_bytes_per_element];
        let (mut output, mut encoded) = (Vec::new(), Vec::new());
        for round in 0..2 {
            let span = Span { round, ..self.span(elements) };
            let values = values(self.dtype, elements, self.seed + round);
            instance.encode(&span, &values, &mut state, &mut encoded)?;
            output.extend(encoded.iter().chain(&state));
        }
        Ok(output)
    }

    fn decode(&self, instance: &mut Instance, encoded: &[u8]) -> Result<Vec<u8>, Fault> {
        let elements = self.elements.min(instance.codec_facts(self.dtype)?.block_elements);
        let mut decoded = vec![0; elements * self.dtype.size_bytes()];
        instance.decode(&self.span(elements), encoded, &mut decoded)?;
        Ok(decoded)
    }

    fn reduce(&self, instance: &mut Instance, shape: Shape, ranks: usize) -> Result<Vec<u8>, Fault> {
        let span = self.span(self.elements);
        let operands: Vec<Vec<u8>> =
            (0..ranks as u64).map(|rank| values(self.dtype, self.elements, self.seed << 8 | rank)).collect();
        let mut measures = match shape {
            Shape::Pairwise | Shape::Nary => Vec::new(),
            Shape::TwoPass { measures } => {
                let mut all = Vec::new();
                for operand in &operands {
                    let mut own = vec![0.0; measures];
                    instance.measure(&span, operand, &mut own)?;
                    all.extend(own);
                }
                all
            }
            // Plausible inner products: a rank's product with itself is the largest.
            Shape::Adaptive => {
                let products =
                    (0..ranks).flat_map(|row| (row..ranks).map(move |column| if row == column { 2.0 } else { 0.5 }));
                products.collect()
            }
        };
        instance.conclude(&span, ranks, &mut measures)?;
        let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
        let mut output = vec![0; self.elements * self.dtype.size_bytes()];
        instance.reduce(&span, &operands, &measures, &mut output)?;
        output.extend(measures.iter().flat_map(|measure| measure.to_le_bytes()));
        Ok(output)
    }
}

/// Ordinary finite values, the same for equal seeds.
pub(crate) fn values(dtype: DType, elements: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(elements * dtype.size_bytes());
    for _ in 0..elements {
        // SplitMix64, by Steele, Lea and Flood.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let random = mixed ^ mixed >> 31;
        // Between -1 and 1, in steps that f32 represents.
        let [a, b, c, ..] = random.to_le_bytes();
        let fraction = f32::from(i16::from_le_bytes([a, b])) / 32_768.0;
        match dtype {
            DType::F32 => bytes.extend(fraction.to_le_bytes()),
            DType::F64 => bytes.extend(f64::from(fraction).to_le_bytes()),
            DType::Bf16 => bytes.extend(&fraction.to_le_bytes()[2..]),
            // Random sign and fraction, with exponents between 2^-8 and 2^7.
            DType::F16 => {
                bytes.extend((u16::from_le_bytes([a, b]) & 0x83ff | u16::from(c % 16 + 7) << 10).to_le_bytes());
            }
            DType::Bool => bytes.push(c & 1),
            _ => bytes.extend(&random.to_le_bytes()[..dtype.size_bytes()]),
        }
    }
    bytes
}

/// Element counts: one, partial cache lines, full ones, many.
const LENGTHS: [usize; 6] = [1, 3, 64, 65, 1_000, 20_000];
/// Number of ranks in a reduction.
const RANKS: usize = 5;
