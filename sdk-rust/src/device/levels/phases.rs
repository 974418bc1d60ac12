//! The phases within a host: copies and collectives of NCCL on ronde's stream.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ronde_gpu::nccl::collective::Work;
use ronde_gpu::{Event, GpuError, Stream};

use super::members::{Members, State};
use super::operation::Operation;
use super::plan::{Phase, Place};
use super::{Counters, add};
use crate::error::Error;
use crate::session::Session;

/// Enqueues the copies and the first phase of an operation. Returns the event after them; `None` if it has neither.
pub(super) fn first(
    session: &Session,
    (operation, members): (&mut Operation, &mut Members),
    stream: &Stream,
    counters: &Counters,
) -> Result<Option<Arc<Event>>, Error> {
    let (copies, phase) = {
        let plan = &operation.work()?.plan;
        (plan.copies.clone(), plan.first.clone())
    };
    if copies.is_empty() && phase.is_none() {
        return Ok(None);
    }
    stream.wait(&operation.submitted)?;
    for (range, at) in copies {
        let source = operation.memory(&Place::Input)?.part(range.clone())?;
        stream.copy_device(&source, &operation.memory(&Place::Buffer(at..at + range.len()))?)?;
        add(&counters.bytes_copied, range.len());
    }
    if let Some(phase) = phase {
        enqueue(session, (operation, members), &phase, stream, counters)?;
    }
    end(operation, stream).map(Some)
}

/// Enqueues the second phase of an operation. Returns the event after it; `None` if this rank has none.
pub(super) fn second(
    session: &Session,
    (operation, members): (&mut Operation, &mut Members),
    stream: &Stream,
    counters: &Counters,
) -> Result<Option<Arc<Event>>, Error> {
    let Some(phase) = operation.work()?.plan.second.clone() else { return Ok(None) };
    enqueue(session, (operation, members), &phase, stream, counters)?;
    end(operation, stream).map(Some)
}

fn enqueue(
    session: &Session,
    (operation, members): (&Operation, &mut Members),
    phase: &Phase,
    stream: &Stream,
    counters: &Counters,
) -> Result<(), Error> {
    let (source, target) = (operation.memory(&phase.source)?, operation.memory(&Place::Buffer(phase.target.clone()))?);
    let Phase { collective, dtype, reduction, .. } = *phase;
    let work = Work { collective, source: &source, target: &target, dtype, reduction };
    let deadline = Instant::now() + timeout(session);
    members.communicator(session)?.enqueue(&work, stream, deadline)?;
    add(&counters.bytes_inside, source.bytes());
    Ok(())
}

/// An event after the work of the stream, until which the buffer and the contribution are in use.
fn end(operation: &mut Operation, stream: &Stream) -> Result<Arc<Event>, Error> {
    let event = Arc::new(Event::after(stream)?);
    let tensor = operation.tensor.clone();
    operation.work()?.lease.use_until(&event, tensor);
    Ok(event)
}

/// Whether a phase is complete.
///
/// # Errors
/// [`GpuError::Aborted`] when a rank of the host has failed, or nothing was completed for the peer timeout.
pub(super) fn is_complete(
    session: &Session,
    members: &mut Members,
    event: &Event,
    since: Instant,
) -> Result<bool, Error> {
    let has_occurred = event.has_occurred()?;
    // A kernel that an abort has ended counts as executed, too.
    members.communicator(session)?.is_ready()?;
    let State::Ready(ready) = members.state() else { return Ok(has_occurred) };
    if has_occurred {
        ready.progress = Instant::now();
        return Ok(true);
    }
    let limit = timeout(session);
    if ready.progress.max(since).elapsed() >= limit {
        let reason = format!("the other ranks of this host did not complete a collective within {} s", limit.as_secs());
        return Err(GpuError::Aborted { reason }.into());
    }
    Ok(false)
}

/// How long NCCL may take without completing anything: as long as a peer may be silent.
fn timeout(session: &Session) -> Duration {
    Duration::from_millis(session.claimed.peer_timeout_ms.into())
}
