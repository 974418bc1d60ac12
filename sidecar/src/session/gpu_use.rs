//! How workers use GPUs, as they report it: for status and metrics.

use std::collections::BTreeMap;

use ronde_rpc::v1;
use ronde_shm::PciAddress;

/// What a worker has done on one GPU since its session began, by level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuUse {
    /// Contributions that the worker copied to shared memory.
    pub(crate) copied: LevelUse,
    /// Contributions of operations in two levels.
    pub(crate) two_levels: LevelUse,
    /// Contributions that the sidecar got in device memory.
    pub(crate) shared: LevelUse,
    /// The version of NCCL that the worker uses, such as 22304; 0 for none.
    pub(crate) nccl_version: u32,
}

/// Operations, and the bytes of this worker's contributions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LevelUse {
    pub(crate) operations: u64,
    pub(crate) bytes: u64,
}

/// The GPUs of a session.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionGpus(BTreeMap<PciAddress, GpuUse>);

impl GpuUse {
    /// Reads what a worker reports.
    ///
    /// # Errors
    /// Why the session ends.
    pub(crate) fn parse(message: &v1::GpuUse) -> Result<(PciAddress, Self), String> {
        let gpu = message.gpu.parse().map_err(|_| format!("{:?} is not the address of a GPU", message.gpu))?;
        let level = |used: &Option<v1::GpuLevelUse>| {
            used.as_ref().map_or_else(LevelUse::default, |v1::GpuLevelUse { operations, bytes }| LevelUse {
                operations: (*operations).min(FIGURE_MAX),
                bytes: (*bytes).min(FIGURE_MAX),
            })
        };
        let v1::GpuUse { copied, two_levels, shared, nccl_version, .. } = message;
        let used = Self {
            copied: level(copied),
            two_levels: level(two_levels),
            shared: level(shared),
            nccl_version: *nccl_version,
        };
        Ok((gpu, used))
    }

    /// The larger of each figure: the newer one, of a worker that counts as it should.
    fn at_least(self, newer: Self) -> Self {
        Self {
            copied: self.copied.at_least(newer.copied),
            two_levels: self.two_levels.at_least(newer.two_levels),
            shared: self.shared.at_least(newer.shared),
            nccl_version: newer.nccl_version,
        }
    }

    /// The sums of two workers.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            copied: self.copied.plus(other.copied),
            two_levels: self.two_levels.plus(other.two_levels),
            shared: self.shared.plus(other.shared),
            nccl_version: self.nccl_version.max(other.nccl_version),
        }
    }
}

impl LevelUse {
    fn at_least(self, newer: Self) -> Self {
        Self { operations: self.operations.max(newer.operations), bytes: self.bytes.max(newer.bytes) }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            operations: self.operations.saturating_add(other.operations),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }
}

impl SessionGpus {
    /// Notes the newest figures of a GPU, which never fall. A worker uses no more GPUs than a host has; further ones are left
    /// out.
    pub(crate) fn note(&mut self, gpu: PciAddress, used: GpuUse) {
        if self.0.len() < GPUS_MAX || self.0.contains_key(&gpu) {
            let known = self.0.entry(gpu).or_default();
            *known = known.at_least(used);
        }
    }

    /// The figures of each GPU.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PciAddress, GpuUse)> + '_ {
        self.0.iter().map(|(gpu, used)| (*gpu, *used))
    }

    /// The sums of all GPUs.
    pub(crate) fn total(&self) -> GpuUse {
        self.0.values().fold(GpuUse::default(), |sum, used| sum.plus(*used))
    }
}

/// More than any host has.
const GPUS_MAX: usize = 64;
/// The largest figure of a session: sums of many sessions do not saturate, and metrics show it exactly.
const FIGURE_MAX: u64 = 1 << 53;

#[cfg(test)]
mod tests {
    use super::*;

    fn reported(gpu: &str, bytes: u64) -> Result<(PciAddress, GpuUse), String> {
        let level = |operations| Some(v1::GpuLevelUse { operations, bytes });
        let (copied, two_levels) = (level(2), level(3));
        GpuUse::parse(&v1::GpuUse { gpu: gpu.to_owned(), copied, two_levels, shared: None, nccl_version: 22_304 })
    }

    #[test]
    fn the_newest_figures_of_each_gpu_count() {
        let mut gpus = SessionGpus::default();
        // The last figure is smaller than one before: a worker that lies makes no counter fall.
        let figures = [("0000:01:00.0", 10), ("0000:02:00.0", 5), ("0000:01:00.0", 30), ("0000:01:00.0", 20)];
        for (gpu, bytes) in figures {
            let (gpu, used) = reported(gpu, bytes).expect("an address");
            gpus.note(gpu, used);
        }
        let total = gpus.total();
        assert_eq!(total.copied, LevelUse { operations: 4, bytes: 35 });
        assert_eq!(total.two_levels, LevelUse { operations: 6, bytes: 35 });
        assert_eq!((total.shared, total.nccl_version), (LevelUse::default(), 22_304));
        assert_eq!(gpus.iter().count(), 2);
    }

    #[test]
    fn figures_of_no_gpu_and_of_too_many_do_not_count() {
        assert!(reported("nowhere", 1).is_err_and(|reason| reason.contains("nowhere")));
        let mut gpus = SessionGpus::default();
        for bus in 0..=GPUS_MAX {
            let (gpu, used) = reported(&format!("0000:{bus:02x}:00.0"), u64::MAX).expect("an address");
            gpus.note(gpu, used);
        }
        assert_eq!(gpus.iter().count(), GPUS_MAX);
        assert_eq!(gpus.total().copied.bytes, 64 * FIGURE_MAX);
    }
}
