//! Whether the sidecar uses the host's GPUs (`--gpu`), and why not if it cannot.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use ronde_gpu::GpuError;
use ronde_wire::{Lane, World};

use crate::driver::{DeviceExecution, GpuState};
use crate::operation::device::lane::GpuLaneConfig;
use crate::process::settings::Settings;
use crate::session::gpus::Gpus;

/// The GPUs of this host.
pub(super) enum GpuChoice {
    /// Not asked for.
    Off,
    /// Asked for, and not usable.
    Unavailable(GpuError),
    /// Used.
    Used(Arc<Gpus>),
}

/// Opens the driver and NCCL if the settings ask for them. Without them the sidecar serves all the same, and workers copy their
/// tensors to shared memory; the log has the reason.
///
/// # Errors
/// When the job is elastic.
pub(super) fn open(settings: &Settings) -> anyhow::Result<GpuChoice> {
    if !settings.tuning.gpu {
        return Ok(GpuChoice::Off);
    }
    check_job(settings.elastic)?;
    let opened = Gpus::open(settings.tuning.arena_bytes_max());
    Ok(match opened {
        Ok(gpus) => {
            let (major, minor, patch) = gpus.nccl().version();
            tracing::info!(gpus = gpus.count(), nccl = format!("{major}.{minor}.{patch}"), "the sidecar uses GPUs");
            GpuChoice::Used(Arc::new(gpus))
        }
        Err(error) => {
            tracing::warn!(%error, "--gpu: the sidecar uses no GPU, so workers copy their tensors to shared memory");
            GpuChoice::Unavailable(error)
        }
    })
}

/// Checks that NCCL in the sidecar serves a job: its workers have to stay.
fn check_job(elastic: bool) -> anyhow::Result<()> {
    let instead = "start it without --gpu, and NCCL runs in the workers with RONDE_GPU_LEVELS=auto (docs/GPU.md)";
    ensure!(!elastic, "--gpu serves jobs whose workers stay, and this one is elastic; {instead}");
    Ok(())
}

impl GpuChoice {
    /// The GPUs, if they are used.
    pub(super) fn used(&self) -> Option<&Arc<Gpus>> {
        if let Self::Used(gpus) = self { Some(gpus) } else { None }
    }

    /// What the control thread knows of operations in device memory. Their lane is the last one.
    pub(super) fn execution(&self, lanes: usize, is_hierarchical: bool) -> DeviceExecution {
        let lane = self.used().and(lanes.checked_sub(1));
        DeviceExecution { lane, is_hierarchical, gpus: self.state(), ..DeviceExecution::default() }
    }

    /// The choice, for display.
    pub(super) fn state(&self) -> GpuState {
        match self {
            Self::Off => GpuState::Off,
            Self::Unavailable(error) => GpuState::Unavailable(error.to_string()),
            Self::Used(gpus) => GpuState::Used { gpus: gpus.count(), nccl: gpus.nccl().version() },
        }
    }
}

/// The configuration of the lane of operations in device memory.
pub(super) fn lane_config(settings: &Settings, (lane, world): (Lane, &World), gpus: &Arc<Gpus>) -> GpuLaneConfig {
    let timeout = Duration::from_millis(settings.tuning.peer_timeout_ms());
    // As much for each worker as it may have in shared memory.
    let workers = world.ranks_of(settings.me).len() as u64;
    let host_bytes_max = settings.tuning.arena_bytes_max().saturating_mul(workers.max(1));
    GpuLaneConfig { lane, gpus: Arc::clone(gpus), host_bytes_max, timeout }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elastic_jobs_are_refused_by_name() {
        check_job(false).expect("its workers stay");
        let error = check_job(true).expect_err("it is not served").to_string();
        assert!(error.contains("--gpu") && error.contains("is elastic"), "{error}");
    }
}
