//! [`Communicator`]: the ranks of a host that perform NCCL's collectives.

#![allow(unsafe_code, reason = "a collective on device memory")]

use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t, ncclUniqueId};

use super::Nccl;
use super::table::Handle;
use crate::driver::{Context, Event, Stream};
use crate::error::GpuError;
use crate::span::DeviceSpan;

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
}

impl ReduceOp {
    fn number(self) -> c_int {
        let op = match self {
            Self::Sum => ncclRedOp_t::ncclSum,
            Self::Max => ncclRedOp_t::ncclMax,
            Self::Min => ncclRedOp_t::ncclMin,
        };
        op as c_int
    }
}

/// A communicator that does not block. It is aborted when it fails, when a wait takes too long, and when it is dropped.
#[derive(Debug)]
pub struct Communicator {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
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
        let numbers = c_int::try_from(rank).ok().zip(c_int::try_from(ranks).ok()).filter(|(rank, ranks)| rank < ranks);
        let Some((number, count)) = numbers else {
            return Err(GpuError::argument(format!("rank {rank} of {ranks} ranks; ranks count from 0")));
        };
        let id = ncclUniqueId { internal: id.0.map(|byte| byte as c_char) };
        let begun = context.with(|| nccl.table.begin(id, count, number))?;
        let handle = nccl.check("ncclCommInitRankConfig", begun)?;
        let mut joined = Self { nccl: Arc::clone(nccl), context: Arc::clone(context), handle: Some(handle), ranks };
        joined.wait_while_in_progress(deadline, || format!("not all {ranks} ranks joined in time"))?;
        Ok(joined)
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Enqueues an all-reduce of float32 on a stream: when this returns, an event of the stream comes after it. Source and
    /// target may be the same memory. [`Communicator::wait`] waits until it is complete.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or of other lengths; [`GpuError::Aborted`], also when NCCL has not
    /// enqueued it by `deadline`.
    pub fn all_reduce_f32(
        &mut self,
        source: &DeviceSpan,
        target: &DeviceSpan,
        op: ReduceOp,
        stream: &Stream,
        deadline: Instant,
    ) -> Result<(), GpuError> {
        let bytes = source.bytes();
        if bytes != target.bytes() || !bytes.is_multiple_of(4) {
            let target = target.bytes();
            return Err(GpuError::argument(format!("{bytes} bytes of float32 into {target} bytes; give as many")));
        }
        self.context.check_span(source)?;
        self.context.check_span(target)?;
        let (handle, table) = (self.handle()?, self.nccl.table);
        let kind = (ncclDataType_t::ncclFloat32 as c_int, op.number());
        let addresses = (source.address(), target.address(), bytes / 4);
        // SAFETY: both spans were checked to be this device's; their owners keep them (contract of `DeviceSpan::new`).
        let enqueue = || unsafe { table.all_reduce(handle, addresses, kind, stream.handle()) };
        let enqueued = self.context.with(enqueue)?;
        let checked = self.nccl.check("ncclAllReduce", enqueued);
        checked.inspect_err(|error| self.abort(&error.to_string()))?;
        // A communicator that does not block may return before the kernel is on the stream.
        self.wait_while_in_progress(deadline, || "NCCL did not enqueue a collective in time".to_owned())
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

    fn handle(&self) -> Result<Handle, GpuError> {
        self.handle.ok_or_else(|| GpuError::Aborted { reason: "it had been aborted before".to_owned() })
    }

    /// Whether something is in progress. Aborts when a rank has failed.
    fn poll(&mut self) -> Result<bool, GpuError> {
        let (handle, table) = (self.handle()?, self.nccl.table);
        let state = self.context.with(|| table.state(handle))?;
        let checked = self.nccl.check("ncclCommGetAsyncError", state);
        checked.map_err(|error| self.aborted(error.to_string()))
    }

    /// Polls until nothing is in progress.
    fn wait_while_in_progress(&mut self, deadline: Instant, late: impl Fn() -> String) -> Result<(), GpuError> {
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

    /// Aborts. NCCL may block in that call, so a thread makes it: this one waits a bounded time.
    fn abort(&mut self, reason: &str) {
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

/// How long an abort may take before it is left to itself.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a wait sleeps between two polls.
const PAUSE_MIN: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(2);
