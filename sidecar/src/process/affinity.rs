//! Sets the CPU affinity of the threads of this process.

use anyhow::{Context, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Pins all threads of this process, and those that it starts later, to these cores; without cores it does nothing.
///
/// # Errors
/// When a core does not exist or is not available to this process; the error names the core.
pub(crate) fn pin(cores: &[usize]) -> anyhow::Result<()> {
    if cores.is_empty() {
        return Ok(());
    }
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("cannot find out which cores there are")?;
    let is_allowed = |core: usize| allowed.is_set(core).unwrap_or(false);
    let mut wanted = CpuSet::new();
    for &core in cores {
        let there = || (0..CpuSet::count()).filter(|core| is_allowed(*core)).map(|core| core.to_string());
        ensure!(
            is_allowed(core),
            "core {core} of --thread-affinity is not one on which this sidecar may run; these are {}",
            there().collect::<Vec<_>>().join(",")
        );
        wanted.set(core).with_context(|| format!("core {core} cannot be named to the system"))?;
    }
    // Threads inherit the affinity of the thread that starts them, so the existing threads are enough.
    for thread in std::fs::read_dir("/proc/self/task").context("cannot list the threads of this process")? {
        let name = thread.context("cannot list the threads of this process")?.file_name();
        let Some(id) = name.to_str().and_then(|id| id.parse().ok()) else { continue };
        match sched_setaffinity(Pid::from_raw(id), &wanted) {
            // The thread has ended in the meantime.
            Err(nix::Error::ESRCH) => {}
            set => set.with_context(|| format!("cannot keep thread {id} on the cores of --thread-affinity"))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_is_not_there_is_named_with_those_that_are() {
        let error = pin(&[100_000]).expect_err("there are fewer").to_string();
        assert!(error.contains("core 100000 of --thread-affinity") && error.contains("these are "), "{error}");
        pin(&[]).expect("nothing is asked");
    }
}
