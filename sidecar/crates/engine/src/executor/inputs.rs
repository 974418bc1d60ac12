//! Reads of the local ranks' contributions.

use ronde_collectives::kernels;
use ronde_collectives::plan::Slice;
use ronde_wire::Rank;

use super::arithmetic::StepError;
use super::sizes::Sizes;
use super::stats::ExecutorStats;
use crate::event::Admission;
use crate::memory::{Contributions, InputPlace, MemoryError};
use crate::plugins::Plugins;

/// The contributions of the local ranks to one operation. Ranks that have joined contribute zeros.
pub(super) struct Inputs<'a> {
    pub(super) admission: &'a Admission,
    pub(super) sizes: Sizes,
    pub(super) stats: &'a mut ExecutorStats,
    pub(super) memory: &'a mut dyn Contributions,
    pub(super) plugins: Option<&'a mut dyn Plugins>,
}

impl Inputs<'_> {
    /// Fills a buffer with a rank's elements of a slice, after `skipped_bytes` of it.
    pub(super) fn read(
        &mut self,
        slice: &Slice,
        rank: Rank,
        skipped_bytes: usize,
        into: &mut [u8],
    ) -> Result<(), MemoryError> {
        if self.admission.joined.binary_search(&rank).is_ok() {
            into.fill(0);
            return Ok(());
        }
        self.stats.contributed_bytes += into.len() as u64;
        let offset = slice.input_start * self.sizes.element_bytes as u64 + skipped_bytes as u64;
        self.memory.read(InputPlace { seq: self.admission.seq, tensor: slice.tensor, rank, offset }, into)
    }

    /// The same with the prescale applied.
    pub(super) fn read_prescaled(
        &mut self,
        slice: &Slice,
        rank: Rank,
        skipped_bytes: usize,
        into: &mut [u8],
    ) -> Result<(), StepError> {
        self.read(slice, rank, skipped_bytes, into)?;
        let arithmetic = &self.admission.arithmetic;
        Ok(kernels::scale(arithmetic.dtype, arithmetic.prescale, into)?)
    }
}
