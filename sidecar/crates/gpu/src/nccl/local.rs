//! [`LocalCommunicators`]: communicators of one process, one for each of its devices, which act together.
//!
//! One thread drives all of them in groups of NCCL (`ncclGroupStart`), each on a stream of its own. They fail together: after
//! a failure all of them are aborted.

#![allow(unsafe_code, reason = "collectives on device memory")]

use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::collective::{Collective, ElementType, Reduction, Work};
use super::communicator::{Communicator, Pause};
use super::table::{Call, IN_PROGRESS, accepted};
use super::{Nccl, UniqueId};
use crate::driver::{Context, Event, Stream};
use crate::error::GpuError;
use crate::library::function_table;
use crate::span::DeviceSpan;

function_table! {
    /// What communicators of one process need besides the functions of single ones.
    GroupTable {
        ncclGroupStart();
        ncclGroupEnd();
    }
}

/// A collective of all communicators.
#[derive(Clone, Debug)]
pub struct Step {
    /// Which one.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: ElementType,
    /// How they are combined; of a collective that combines none it is not used.
    pub reduction: Reduction,
    /// The memory of each device, in the order of the communicators.
    pub buffers: Vec<Buffers>,
}

/// The memory of one device in a collective: what it contributes, and where it gets the result. Both may be the same, and the
/// part of a device may be in its place within the whole.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// The contribution.
    pub source: DeviceSpan,
    /// The place of the result.
    pub target: DeviceSpan,
}

/// A checked collective of one communicator.
struct Prepared {
    /// The position of the communicator.
    member: usize,
    call: Call,
    /// The contribution, the result, and NCCL's count.
    addresses: (u64, u64, usize),
    dtype: ElementType,
    reduction: Reduction,
}

/// Communicators of several devices of this process.
#[derive(Debug)]
pub struct LocalCommunicators {
    nccl: Arc<Nccl>,
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    /// Declared first: aborted before its stream is destroyed.
    communicator: Communicator,
    stream: Stream,
}

impl LocalCommunicators {
    /// Makes a communicator for each device, until `deadline`. No device may be named twice. While it waits it calls `check`, whose
    /// error ends it.
    ///
    /// # Errors
    /// [`GpuError::Aborted`] when they are not ready in time, one fails or `check` returns a reason; [`GpuError::Call`]; the driver's.
    pub fn join(
        nccl: &Arc<Nccl>,
        contexts: &[Arc<Context>],
        deadline: Instant,
        check: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<Self, GpuError> {
        let id = UniqueId::new(nccl)?;
        let ranks = u32::try_from(contexts.len()).map_err(|error| GpuError::argument(error.to_string()))?;
        let mut members = Vec::with_capacity(contexts.len());
        let begun = group(nccl, || {
            for (rank, context) in (0..).zip(contexts) {
                let stream = Stream::new(context)?;
                let communicator = Communicator::begin(nccl, context, id, (rank, ranks))?;
                members.push(Member { communicator, stream });
            }
            Ok(())
        });
        let mut joined = Self { nccl: Arc::clone(nccl), members };
        begun.and_then(|()| joined.wait_while_in_progress(deadline, "not all devices joined in time", check))?;
        Ok(joined)
    }

    /// The numbers of the devices, in the order of [`LocalCommunicators::join`].
    pub fn devices(&self) -> impl Iterator<Item = u32> + '_ {
        self.members.iter().map(|member| member.stream.context().ordinal())
    }

    /// Whether a failure has aborted them. They cannot be used then.
    #[must_use]
    pub fn are_aborted(&self) -> bool {
        self.members.iter().any(|member| member.communicator.is_aborted())
    }

    /// Performs collectives in this order, as one group of NCCL, and waits until all are complete. While it waits it calls
    /// `check`, whose error ends them: the kernels end, and results are unspecified.
    ///
    /// # Errors
    /// [`GpuError::Argument`] for memory of another device or lengths that do not fit; the communicators can still be used.
    /// [`GpuError::Aborted`] when a device fails, `check` returns a reason, or `deadline` passes: all communicators are aborted
    /// ([`LocalCommunicators::are_aborted`]).
    pub fn perform(
        &mut self,
        steps: &[Step],
        deadline: Instant,
        check: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), GpuError> {
        let mut prepared = Vec::new();
        for step in steps {
            self.prepare(step, &mut prepared)?;
        }
        let performed =
            self.enqueue(&prepared, deadline, check).and_then(|()| self.wait(&self.events()?, deadline, check));
        performed.inspect_err(|error| self.abandon(&error.to_string(), steps))
    }

    /// Events after the present work of all streams.
    fn events(&self) -> Result<Vec<Event>, GpuError> {
        self.members.iter().map(|member| Event::after(&member.stream)).collect()
    }

    /// Aborts all communicators, and keeps the memory for good if a kernel still uses it afterwards.
    fn abandon(&mut self, reason: &str, steps: &[Step]) {
        self.members.iter_mut().for_each(|member| member.communicator.abort(reason));
        let mut pause = Pause::new(Instant::now() + KERNELS_END_TIMEOUT);
        let ended = self.events().and_then(|events| {
            events.iter().try_for_each(|event| {
                while !event.has_occurred()? {
                    pause.take("its kernels have not ended")?;
                }
                Ok(())
            })
        });
        if let Err(error) = ended {
            tracing::warn!(target: "ronde", %error, "the memory of an aborted collective is kept until the process ends");
            std::mem::forget(steps.to_vec());
        }
    }

    /// Checks a collective of all communicators.
    fn prepare(&self, step: &Step, prepared: &mut Vec<Prepared>) -> Result<(), GpuError> {
        let Step { collective, dtype, reduction, buffers } = step;
        let (given, devices) = (buffers.len(), self.members.len());
        if given != devices {
            return Err(GpuError::argument(format!("memory of {given} devices for {devices} communicators")));
        }
        let lengths = |Buffers { source, target }: &Buffers| (source.bytes(), target.bytes());
        let first = buffers.first().map(lengths);
        if buffers.iter().any(|each| Some(lengths(each)) != first) {
            return Err(GpuError::argument("the contributions and results of a collective have different lengths"));
        }
        for (member, Buffers { source, target }) in buffers.iter().enumerate() {
            let of = &self.members[member];
            of.stream.context().check_span(source)?;
            of.stream.context().check_span(target)?;
            let work = Work { collective: *collective, source, target, dtype: *dtype, reduction: *reduction };
            let (call, count) = work.call(of.communicator.ranks())?;
            let addresses = (source.address(), target.address(), count);
            prepared.push(Prepared { member, call, addresses, dtype: *dtype, reduction: *reduction });
        }
        Ok(())
    }

    /// Enqueues collectives: when this returns, events of the streams come after them.
    fn enqueue(
        &mut self,
        prepared: &[Prepared],
        deadline: Instant,
        check: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), GpuError> {
        // An operation of a communicator's own is made before the group, and released when NCCL has read it.
        let own = |each: &Prepared| self.members[each.member].communicator.scaled_sum(each.dtype, each.reduction);
        let own = prepared.iter().map(own).collect::<Result<Vec<Option<c_int>>, GpuError>>()?;
        group(&self.nccl, || {
            prepared.iter().zip(&own).try_for_each(|(each, own)| {
                let Member { communicator, stream } = &self.members[each.member];
                let (handle, table) = (communicator.handle()?, self.nccl.table);
                let numbers = (each.dtype.number(), own.unwrap_or(each.reduction.op.number()));
                // SAFETY: the spans were checked to be the device's and to have the lengths that the collective uses; their
                // owners keep them until it is complete (contract of `DeviceSpan::new`).
                let call = || unsafe { table.collective(handle, each.call, each.addresses, numbers, stream.handle()) };
                self.nccl.check("a collective of NCCL", stream.context().with(call)?)
            })
        })?;
        self.wait_while_in_progress(deadline, "NCCL did not enqueue a collective in time", check)?;
        prepared
            .iter()
            .zip(own)
            .try_for_each(|(each, own)| own.map_or(Ok(()), |op| self.members[each.member].communicator.destroy_op(op)))
    }

    /// Waits until events after the work of all streams have occurred.
    fn wait(
        &mut self,
        events: &[Event],
        deadline: Instant,
        check: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), GpuError> {
        let mut pause = Pause::new(deadline);
        for event in events {
            while !event.has_occurred()? {
                check().map_err(|reason| GpuError::Aborted { reason })?;
                for member in &mut self.members {
                    member.communicator.poll()?;
                }
                pause.take("a collective did not complete in time")?;
            }
        }
        // A kernel that an abort has ended counts as executed, too.
        self.wait_while_in_progress(deadline, "a collective did not complete in time", check)
    }

    fn wait_while_in_progress(
        &mut self,
        deadline: Instant,
        late: &str,
        check: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), GpuError> {
        let mut pause = Pause::new(deadline);
        for member in &mut self.members {
            while member.communicator.poll()? {
                check().map_err(|reason| GpuError::Aborted { reason })?;
                pause.take(late)?;
            }
        }
        Ok(())
    }
}

/// Makes calls as one group of NCCL.
fn group(nccl: &Nccl, calls: impl FnOnce() -> Result<(), GpuError>) -> Result<(), GpuError> {
    // SAFETY: allowed in every state.
    nccl.check("ncclGroupStart", accepted(unsafe { (nccl.group.ncclGroupStart)() }))?;
    let called = calls();
    // SAFETY: this thread has started a group.
    let ended = match unsafe { (nccl.group.ncclGroupEnd)() } {
        IN_PROGRESS => Ok(()),
        code => nccl.check("ncclGroupEnd", accepted(code)),
    };
    called.and(ended)
}

/// How long the kernels of an aborted collective may take to end.
const KERNELS_END_TIMEOUT: Duration = Duration::from_secs(2);
