//! [`Communicator`]: the ranks of a host that perform NCCL's collectives.

#![allow(unsafe_code, reason = "a collective on device memory")]

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclRedOp_t, ncclUniqueId};

use super::Nccl;
use super::table::Handle;
use crate::driver::{Context, Event};
use crate::error::GpuError;

/// The bytes by which the ranks of a communicator find each other. One rank makes them, and gives them to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl UniqueId {
    /// Makes one.
    ///
    /// # Errors
    /// [`GpuError::Call`], for example without a network interface.
    pub fn new(nccl: &Nccl) -> Result<Self, GpuError> {
        let id = nccl.check("ncclGetUniqueId", nccl.table.unique_id())?;
        Ok(Self(id.internal.map(|byte| byte as u8)))
    }
}

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Their sum.
    Sum,
    /// Their greatest.
    Max,
    /// Their least.
    Min,
    /// Their product.
    Product,
    /// Their mean; of floating-point numbers only.
    Average,
}

impl ReduceOp {
    pub(super) fn number(self) -> c_int {
        let op = match self {
            Self::Sum => ncclRedOp_t::ncclSum,
            Self::Max => ncclRedOp_t::ncclMax,
            Self::Min => ncclRedOp_t::ncclMin,
            Self::Product => ncclRedOp_t::ncclProd,
            Self::Average => ncclRedOp_t::ncclAvg,
        };
        op as c_int
    }
}

/// A communicator that does not block. It is aborted when it fails, when a wait takes too long, and when it is dropped.
#[derive(Debug)]
pub struct Communicator {
    pub(super) nccl: Arc<Nccl>,
    pub(super) context: Arc<Context>,
    /// `None` once it has ended.
    handle: Option<Handle>,
    ranks: u32,
}

impl Communicator {
    /// Joins a communicator of `ranks` ranks as rank `rank`, and waits for the others until `deadline`.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for a rank that is not below `ranks`; [`GpuError::Aborted`] when not all ranks join in time or
    /// one fails; [`GpuError::Call`].
    pub fn join(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: UniqueId,
        (rank, ranks): (u32, u32),
        deadline: Instant,
    ) -> Result<Self, GpuError> {
        let mut joined = Self::begin(nccl, context, id, (rank, ranks))?;
        joined.wait_while_in_progress(deadline, || format!("not all {ranks} ranks joined in time"))?;
        Ok(joined)
    }

    /// Begins to join a communicator of `ranks` ranks as rank `rank`. It is usable once it [is ready](Self::is_ready).
    ///
    /// # Errors
    /// [`GpuError::Argument`] for a rank that is not below `ranks`; [`GpuError::Call`].
    pub fn begin(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: UniqueId,
        (rank, ranks): (u32, u32),
    ) -> Result<Self, GpuError> {
        let numbers = c_int::try_from(rank).ok().zip(c_int::try_from(ranks).ok()).filter(|(rank, ranks)| rank < ranks);
        let Some((number, count)) = numbers else {
            return Err(GpuError::argument(format!("rank {rank} of {ranks} ranks; ranks count from 0")));
        };
        let id = ncclUniqueId { internal: id.0.map(|byte| byte as c_char) };
        let begun = context.with(|| nccl.table.begin(id, count, number))?;
        let handle = nccl.check("ncclCommInitRankConfig", begun)?;
        Ok(Self { nccl: Arc::clone(nccl), context: Arc::clone(context), handle: Some(handle), ranks })
    }

    /// Whether nothing that was started is in progress.
    ///
    /// # Errors
    /// [`GpuError::Aborted`] when a rank has failed.
    pub fn is_ready(&mut self) -> Result<bool, GpuError> {
        self.poll().map(|is_in_progress| !is_in_progress)
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Waits until an event after the communicator's work has occurred.
    ///
    /// # Errors
    /// [`GpuError::Aborted`] when a rank fails or `deadline` passes: then the communicator is aborted, which ends its kernels.
    pub fn wait(&mut self, event: &Event, deadline: Instant) -> Result<(), GpuError> {
        let mut pause = PAUSE_MIN;
        while !event.has_occurred()? {
            self.poll()?;
            if Instant::now() >= deadline {
                return Err(self.aborted("a collective did not complete in time".to_owned()));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        // A kernel that an abort has ended counts as executed, too.
        self.wait_while_in_progress(deadline, || "a collective did not complete in time".to_owned())
    }

    /// Leaves in order, after all enqueued work.
    ///
    /// # Errors
    /// [`GpuError::Aborted`] when it is not done by `deadline`.
    pub fn finish(mut self, deadline: Instant) -> Result<(), GpuError> {
        let (handle, table) = (self.handle()?, self.nccl.table);
        let finalized = self.context.with(|| table.finalize(handle))?;
        self.nccl.check("ncclCommFinalize", finalized)?;
        self.wait_while_in_progress(deadline, || "the communicator could not be finalized in time".to_owned())?;
        self.handle = None;
        let destroyed = self.context.with(|| table.destroy(handle))?;
        self.nccl.check("ncclCommDestroy", destroyed)
    }

    pub(super) fn handle(&self) -> Result<Handle, GpuError> {
        self.handle.ok_or_else(|| GpuError::Aborted { reason: "it had been aborted before".to_owned() })
    }

    pub(super) fn is_aborted(&self) -> bool {
        self.handle.is_none()
    }

    /// Whether something is in progress. Aborts when a rank has failed.
    pub(super) fn poll(&mut self) -> Result<bool, GpuError> {
        let (handle, table) = (self.handle()?, self.nccl.table);
        let state = self.context.with(|| table.state(handle))?;
        let checked = self.nccl.check("ncclCommGetAsyncError", state);
        checked.map_err(|error| self.aborted(error.to_string()))
    }

    /// Polls until nothing is in progress.
    pub(super) fn wait_while_in_progress(
        &mut self,
        deadline: Instant,
        late: impl Fn() -> String,
    ) -> Result<(), GpuError> {
        let mut pause = PAUSE_MIN;
        while self.poll()? {
            if Instant::now() >= deadline {
                return Err(self.aborted(late()));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        Ok(())
    }

    /// Aborts, and returns the error.
    fn aborted(&mut self, reason: String) -> GpuError {
        self.abort(&reason);
        GpuError::Aborted { reason }
    }

    /// Aborts it, which ends its kernels, unless it has ended. Takes a bounded time.
    pub fn end(&mut self, reason: &str) {
        self.abort(reason);
    }

    /// Aborts. NCCL may block in that call, so a thread makes it: this one waits a bounded time.
    pub(super) fn abort(&mut self, reason: &str) {
        let Some(handle) = self.handle.take() else { return };
        let (nccl, context) = (Arc::clone(&self.nccl), Arc::clone(&self.context));
        let (done, ended) = channel();
        let run = move || {
            let aborted = context.with(|| nccl.table.abort(handle));
            let _ = done.send(aborted.map(|aborted| nccl.check("ncclCommAbort", aborted)).and_then(|checked| checked));
        };
        let outcome = match std::thread::Builder::new().name("ronde-nccl-abort".to_owned()).spawn(run) {
            Ok(_) => ended.recv_timeout(ABORT_TIMEOUT).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match outcome {
            Ok(Ok(())) => tracing::debug!(target: "ronde", reason, "an NCCL communicator was aborted"),
            Ok(Err(error)) => {
                tracing::warn!(target: "ronde", reason, %error, "an NCCL communicator could not be aborted");
            }
            Err(error) => {
                tracing::warn!(target: "ronde", reason, error, "the abort of an NCCL communicator has not ended");
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.abort("it was dropped");
    }
}

/// The pauses of a wait that polls, which ends at a deadline.
pub(super) struct Pause {
    deadline: Instant,
    next: Duration,
}

impl Pause {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { deadline, next: PAUSE_MIN }
    }

    /// Sleeps; an error with the reason once the deadline has passed.
    pub(super) fn take(&mut self, late: &str) -> Result<(), GpuError> {
        if Instant::now() >= self.deadline {
            return Err(GpuError::Aborted { reason: late.to_owned() });
        }
        std::thread::sleep(self.next);
        self.next = (self.next * 2).min(PAUSE_MAX);
        Ok(())
    }
}

/// How long an abort may take before it is left to itself.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a wait sleeps between two polls.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(2);
