//! Collectives on GPUs in two levels: by NCCL among the ranks of a host, by ronde between hosts.
//!
//! NCCL's calls have to be in one order on all ranks of a host, while ronde matches operations by name in any order. So each
//! operation is preceded by a *ticket*: a small all-reduce under the operation's own name, in which the ranks agree that all of
//! them are there with the same arguments. A sidecar delivers the completions of its ranks' tickets in one order, and that is
//! the order of NCCL's calls ([`mod@thread`]). A second ticket precedes the second phase.
//!
//! A ticket is sent once the input has been computed, so no kernel of NCCL waits for a slow rank. After it nothing depends on
//! the program any more: all ranks have submitted, and a thread of each performs the rest.
//!
//! To the program, the operation is one of its pending requests like others, which is completed apart from the sidecar
//! ([`super::held`]). Where the ranks' arguments differ, or some have joined, the sidecar performs it in one level.

mod agreement;
mod finish;
mod layout;
mod members;
mod operation;
mod phases;
mod plan;
mod pool;
mod scaling;
mod thread;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use ronde_wire::Request;

use super::held::Held;
use super::{DeviceTensor, Submitted};
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::options::GpuLevels;
use crate::session::{Draft, Session};
use operation::Operation;
pub(crate) use pool::DeviceResult;

/// How operations on GPUs are performed.
#[derive(Clone, Debug, Default)]
pub(crate) struct LevelOptions {
    pub(crate) choice: GpuLevels,
    /// Below which NCCL's package may be.
    pub(crate) nccl_folders: Vec<PathBuf>,
}

impl LevelOptions {
    /// The least contribution that is performed in two levels.
    fn bytes_min(&self) -> Option<u64> {
        match self.choice {
            GpuLevels::One => None,
            GpuLevels::Auto => Some(AUTO_BYTES_MIN),
            GpuLevels::Two => Some(0),
        }
    }
}

/// Checks that not both the workers and their sidecar would run NCCL. `device_bytes_max` is the device memory that the sidecar
/// takes of a session; 0 if it uses no GPUs.
///
/// # Errors
/// [`Error::Argument`] with the two settings.
pub(crate) fn check_levels(choice: GpuLevels, device_bytes_max: u64) -> Result<(), Error> {
    let given = match choice {
        GpuLevels::Two => "2",
        GpuLevels::Auto => "auto",
        GpuLevels::One => return Ok(()),
    };
    if device_bytes_max == 0 {
        return Ok(());
    }
    Err(Error::argument(format!(
        "RONDE_GPU_LEVELS={given} makes workers run NCCL, but the sidecar runs it for them (--gpu); unset RONDE_GPU_LEVELS, or start the job without --gpu"
    )))
}

/// What a session has done in two levels.
#[derive(Debug, Default)]
struct Counters {
    /// Operations that were completed in two levels.
    operations: AtomicU64,
    /// Operations that could have been, and had one level.
    one_level: AtomicU64,
    /// Bytes that NCCL took of this rank.
    bytes_inside: AtomicU64,
    /// Bytes that this rank contributed to collectives between hosts.
    bytes_between: AtomicU64,
    /// Bytes that were copied within the device.
    bytes_copied: AtomicU64,
}

/// A view of what a session has done in two levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelCounts {
    /// Operations that were completed in two levels.
    pub operations: u64,
    /// Operations that could have been, and had one level.
    pub one_level: u64,
    /// Bytes that NCCL took of this rank.
    pub bytes_inside: u64,
    /// Bytes that this rank contributed to collectives between hosts.
    pub bytes_between: u64,
    /// Bytes that were copied within the device.
    pub bytes_copied: u64,
}

fn add(counter: &AtomicU64, number: usize) {
    counter.fetch_add(number as u64, Ordering::Relaxed);
}

/// Passes operations on to the thread that performs them, which the first one starts.
#[derive(Debug)]
pub(crate) struct Levels {
    options: LevelOptions,
    thread: Mutex<Option<Sender<Operation>>>,
    counters: Arc<Counters>,
}

impl Levels {
    pub(crate) fn new(options: LevelOptions) -> Self {
        Self { options, thread: Mutex::default(), counters: Arc::default() }
    }

    /// Whether a request is performed in two levels, unless the ranks find out that it cannot.
    pub(crate) fn takes(&self, request: &Request) -> bool {
        self.options.bytes_min().is_some_and(|bytes_min| plan::is_eligible(request, bytes_min))
    }

    pub(crate) fn counts(&self) -> LevelCounts {
        let Counters { operations, one_level, bytes_inside, bytes_between, bytes_copied } = &*self.counters;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LevelCounts {
            operations: read(operations),
            one_level: read(one_level),
            bytes_inside: read(bytes_inside),
            bytes_between: read(bytes_between),
            bytes_copied: read(bytes_copied),
        }
    }

    fn pass_on(&self, session: &Arc<Session>, operation: Operation) -> Result<(), Error> {
        // A panic elsewhere leaves the value whole: the only change is the insertion.
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &mut *thread {
            Some(sender) => sender,
            none => {
                let (sender, received) = channel();
                let performing =
                    thread::Thread::new(session, received, self.options.clone(), Arc::clone(&self.counters));
                let named = std::thread::Builder::new().name("ronde-gpu-levels".to_owned());
                // Detached: it ends with the session, and no drop waits for NCCL.
                let spawned = named.spawn(move || performing.run());
                spawned.map_err(|error| Error::Thread { reason: error.to_string() })?;
                none.insert(sender)
            }
        };
        // The thread has ended with the session; dropping the operation reports that.
        drop(sender.send(operation));
        session.completions.wake();
        Ok(())
    }
}

impl Session {
    /// Submits an operation that is performed in two levels.
    pub(super) fn submit_in_levels(
        self: &Arc<Self>,
        draft: Draft,
        tensor: &DeviceTensor<'_>,
    ) -> Result<InFlight, Error> {
        let prepared = self.prepare_levels(tensor);
        let (staging, submitted) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(draft.reject(error)),
        };
        let Some(request) = draft.request.clone() else { return Err(Error::Closed) };
        let site = draft.site.clone();
        let (held, in_flight) = Held::insert(draft, None)?;
        if let Some(id) = held.id() {
            self.pending.set_apart(id, true);
        }
        let in_flight = in_flight.submitted_after(Submitted::new(Arc::clone(&submitted), tensor));
        let operation = Operation::new(held, (request, site), tensor.memory.clone(), (staging, submitted));
        self.devices.levels.pass_on(self, operation)?;
        Ok(in_flight)
    }

    fn prepare_levels(&self, tensor: &DeviceTensor<'_>) -> Result<operation::Prepared, Error> {
        self.fork_guard.check()?;
        self.pending.check_room()?;
        let staging = self.devices.get(tensor.memory.device())?;
        staging.check(&tensor.memory)?;
        let submitted = Arc::new(staging.mark(tensor.stream)?);
        Ok((staging, submitted))
    }

    /// What this session has done in two levels.
    pub(crate) fn level_counts(&self) -> LevelCounts {
        self.devices.levels.counts()
    }
}

/// With `auto`, smaller contributions have one level: two tickets cost more than they save.
const AUTO_BYTES_MIN: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_or_their_sidecar_run_nccl() {
        for choice in [GpuLevels::One, GpuLevels::Auto, GpuLevels::Two] {
            check_levels(choice, 0).expect("the sidecar uses no GPU");
        }
        check_levels(GpuLevels::One, 1).expect("one level is what the sidecar needs");
        for (choice, words) in [(GpuLevels::Auto, "RONDE_GPU_LEVELS=auto"), (GpuLevels::Two, "RONDE_GPU_LEVELS=2")] {
            let error = check_levels(choice, 1 << 30).expect_err("both would").to_string();
            assert!(error.contains(words) && error.contains("--gpu"), "{error}");
        }
    }
}
