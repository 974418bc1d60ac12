//! Plugins for tests, which compute with kernels, so that their results equal those of native operations.

use ronde_collectives::kernels::{self, Side};
use ronde_wire::{PluginUse, PluginWork, ReduceOp};

use crate::plugins::{PluginFault, PluginSpan, Plugins, RankValues};

/// A plugin that performs a native reduction, or, with a sum, encodes without loss.
pub(super) fn like(op: ReduceOp) -> PluginUse {
    let work = match op {
        ReduceOp::Median => PluginWork::NAry,
        ReduceOp::ClippedMean => PluginWork::TwoPass { measures: 2 },
        ReduceOp::Adasum => PluginWork::Adaptive,
        ReduceOp::Max => PluginWork::Pairwise,
        _ => PluginWork::Codec { block_elements: BLOCK_ELEMENTS, encoded_bytes: 1 + 8 * BLOCK_ELEMENTS },
    };
    PluginUse { name: op.name().to_owned(), version: "1".to_owned(), digest: [7; 32], parameters: vec![1, 2], work }
}

pub(super) const BLOCK_ELEMENTS: u32 = 128;

/// The plugins of one executor.
#[derive(Debug, Default)]
pub(super) struct NativePlugins;

impl Plugins for NativePlugins {
    /// Zeros are encoded as nothing, other values after a mark.
    fn encode(&mut self, at: &PluginSpan<'_>, values: &[u8], into: &mut [u8]) -> Result<usize, PluginFault> {
        check(at, values);
        assert!(at.elements <= u64::from(BLOCK_ELEMENTS) && matches!(at.plugin.work, PluginWork::Codec { .. }));
        if values.iter().all(|byte| *byte == 0) {
            return Ok(0);
        }
        into[0] = b'v';
        into[1..=values.len()].copy_from_slice(values);
        Ok(1 + values.len())
    }

    fn decode(&mut self, at: &PluginSpan<'_>, encoded: &[u8], into: &mut [u8]) -> Result<(), PluginFault> {
        check(at, into);
        match encoded.split_first() {
            None => into.fill(0),
            Some((b'v', values)) => into.copy_from_slice(values),
            Some((other, _)) => return Err(PluginFault(format!("{other} is no mark"))),
        }
        Ok(())
    }

    fn reduce_pair(
        &mut self,
        at: &PluginSpan<'_>,
        accumulator: &mut [u8],
        other: &[u8],
        side: Side,
    ) -> Result<(), PluginFault> {
        check(at, accumulator);
        kernels::reduce_into(at.dtype, op(at), accumulator, other, side).map_err(|error| PluginFault(error.to_string()))
    }

    /// Reads in parts of three elements, as a host may.
    fn reduce_in_pairs(
        &mut self,
        at: &PluginSpan<'_>,
        ranks: usize,
        values: &mut dyn RankValues,
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        check(at, into);
        let bytes = 3 * at.dtype.size_bytes();
        for (number, part) in into.chunks_mut(bytes).enumerate() {
            values.read(0, number * bytes, part);
            for rank in 1..ranks {
                let mut other = vec![0; part.len()];
                values.read(rank, number * bytes, &mut other);
                kernels::reduce_into(at.dtype, op(at), part, &other, Side::AccumulatorLeft)
                    .map_err(|error| PluginFault(error.to_string()))?;
            }
        }
        Ok(())
    }

    fn reduce(
        &mut self,
        at: &PluginSpan<'_>,
        operands: &[&[u8]],
        concluded: &[f64],
        into: &mut [u8],
    ) -> Result<(), PluginFault> {
        check(at, into);
        kernels::reduce_n(at.dtype, op(at), operands, concluded, into).map_err(|error| PluginFault(error.to_string()))
    }

    /// The sum of squares, and the number of elements.
    fn measure(&mut self, at: &PluginSpan<'_>, values: &[u8], sums: &mut [f64]) -> Result<(), PluginFault> {
        check(at, values);
        sums[1] += at.elements as f64;
        kernels::add_sum_of_squares(at.dtype, values, &mut sums[0]).map_err(|error| PluginFault(error.to_string()))
    }

    fn conclude(&mut self, at: &PluginSpan<'_>, ranks: usize, measures: Vec<f64>) -> Result<Vec<f64>, PluginFault> {
        let measures: Vec<f64> = match at.plugin.work {
            PluginWork::TwoPass { .. } => {
                assert!(measures.chunks(2).all(|of_rank| of_rank[1] == at.tensor_elements as f64), "{measures:?}");
                measures.into_iter().step_by(2).collect()
            }
            _ => measures,
        };
        kernels::weights(op(at), ranks, &measures).map_err(|error| PluginFault(error.to_string()))
    }
}

/// Checks that a call covers a span of one tensor completely.
fn check(at: &PluginSpan<'_>, values: &[u8]) {
    assert!(at.elements > 0 && at.offset + at.elements <= at.tensor_elements, "{at:?}");
    assert_eq!(values.len() as u64, at.elements * at.dtype.size_bytes() as u64, "{at:?}");
}

fn op(at: &PluginSpan<'_>) -> ReduceOp {
    let ops = [ReduceOp::Median, ReduceOp::ClippedMean, ReduceOp::Adasum, ReduceOp::Max];
    ops.into_iter().find(|op| op.name() == at.plugin.name).expect("a reduction that a plugin of tests does")
}
