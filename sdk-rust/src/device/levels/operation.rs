//! [`Operation`]: an operation in two levels, and the requests that it makes.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use ronde_gpu::{Arrival, DeviceSpan, Event, GpuError, Staging};
use ronde_shm::LeasedSlot;
use ronde_wire::{Collective, DType, ReduceOp, Request, SetId, Shape, TensorName};

use super::agreement::digest;
use super::plan::{Place, Plan, Shard};
use super::pool::{DeviceResult, Lease};
use crate::device::OutputSlot;
use crate::device::held::Held;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::memory::{Memory, whole};
use crate::result_data::{Order, ResultData, Source};
use crate::session::{Input, Session};

/// What copies for the tensor's device, and the event after which the tensor is computed.
pub(super) type Prepared = (Arc<Staging>, Arc<Event>);

/// An operation until it is complete.
pub(super) struct Operation {
    /// The program's request.
    pub(super) held: Held,
    pub(super) request: Request,
    site: Option<String>,
    /// The contribution, until nothing reads it any more.
    pub(super) tensor: Option<DeviceSpan>,
    pub(super) staging: Arc<Staging>,
    pub(super) submitted: Arc<Event>,
    pub(super) stage: Stage,
    /// Whether the sidecar was asked to withdraw the ticket.
    is_withdrawn: bool,
    /// Once the ranks have agreed on two levels.
    pub(super) work: Option<Work>,
}

/// What an operation works with.
pub(super) struct Work {
    pub(super) plan: Plan,
    pub(super) lease: Lease,
    /// The job-wide number of its ticket, which makes the names of its requests unique.
    seq: u64,
}

/// How far an operation is.
pub(super) enum Stage {
    /// For the contribution, and for what the ranks of the set have to know about each other.
    Waiting,
    /// For all ranks.
    Ticket(InFlight),
    /// For the first phase, since a time.
    First(Arc<Event>, Instant),
    /// For the copy of this rank's part to main memory.
    ToHost(Receiver<Result<LeasedSlot, GpuError>>),
    /// For the collective between hosts.
    Between(InFlight),
    /// For the copy of its result to the device.
    FromHost(Arrival),
    /// For all ranks, before the second phase.
    SecondTicket(InFlight),
    /// For the second phase, since a time.
    Second(Arc<Event>, Instant),
}

impl Operation {
    pub(super) fn new(
        held: Held,
        (request, site): (Request, Option<String>),
        tensor: DeviceSpan,
        (staging, submitted): Prepared,
    ) -> Self {
        let (tensor, stage, is_withdrawn, work) = (Some(tensor), Stage::Waiting, false, None);
        Self { held, request, site, tensor, staging, submitted, stage, is_withdrawn, work }
    }

    /// Its ticket, if it is complete.
    pub(super) fn arrived(&mut self) -> Option<Order> {
        match &mut self.stage {
            // A failed ticket orders nothing.
            Stage::Ticket(ticket) | Stage::SecondTicket(ticket) if ticket.poll() => Some(ticket.order()),
            _ => None,
        }
    }

    /// Whether its progress is found by polling.
    pub(super) fn is_polled(&self) -> bool {
        matches!(self.stage, Stage::Waiting | Stage::First(..) | Stage::FromHost(_) | Stage::Second(..))
    }

    /// Whether other ranks may be in a phase with this one.
    pub(super) fn is_past_ticket(&self) -> bool {
        !matches!(self.stage, Stage::Waiting | Stage::Ticket(_))
    }

    /// Whether its next step needs nothing more from the sidecar, which has answered all requests.
    pub(super) fn can_continue_alone(&mut self) -> bool {
        let has_second = self.work.as_ref().is_some_and(|work| work.plan.has_second);
        match &mut self.stage {
            Stage::Waiting | Stage::ToHost(_) => false,
            Stage::Ticket(request) | Stage::SecondTicket(request) => has_succeeded(request),
            Stage::First(..) | Stage::Second(..) => true,
            Stage::Between(request) => !has_second && has_succeeded(request),
            Stage::FromHost(_) => !has_second,
        }
    }

    /// What all ranks compare; 0 when this rank cannot perform it in two levels.
    pub(super) fn digest(&self, is_possible: bool) -> i64 {
        let Request { collective, dtype, shape, prescale, postscale, codec, .. } = &self.request;
        let scales = (prescale.to_bits(), postscale.to_bits());
        if is_possible { digest(&format!("{collective:?} {dtype:?} {shape:?} {scales:?} {codec:?}")) } else { 0 }
    }

    // === Requests ===

    /// Sends the ticket.
    pub(super) fn send_ticket(&mut self, session: &Arc<Session>, digest: i64) -> Result<(), Error> {
        let Request { set, name, group, .. } = &self.request;
        let request = Request { group: group.clone(), ..sum(*set, name.clone(), 2)? };
        self.stage = Stage::Ticket(self.send(session, &request, &[1, digest])?);
        Ok(())
    }

    /// Asks the sidecar, once, to withdraw the ticket, whose outcome shows whether that came in time.
    pub(super) fn withdraw_ticket(&mut self, reason: &str) {
        if let Stage::Ticket(ticket) = &self.stage
            && !std::mem::replace(&mut self.is_withdrawn, true)
        {
            ticket.ask_to_withdraw(reason);
        }
    }

    /// Takes the ticket's sums: of the ranks, and of their digests.
    pub(super) fn take_ticket(&mut self) -> Result<(i64, i64, Order), Error> {
        let Stage::Ticket(ticket) = &mut self.stage else { return Err(out_of_order()) };
        let (sums, order) = taken::<2>(ticket)?;
        Ok((sums[0], sums[1], order))
    }

    /// Sends the ticket of the second phase.
    pub(super) fn send_second_ticket(&mut self, session: &Arc<Session>) -> Result<(), Error> {
        let request = self.second_request()?;
        self.stage = Stage::SecondTicket(self.send(session, &request, &[1])?);
        Ok(())
    }

    /// Takes the number of ranks of the second ticket.
    pub(super) fn take_second_ticket(&mut self) -> Result<i64, Error> {
        let Stage::SecondTicket(ticket) = &mut self.stage else { return Err(out_of_order()) };
        taken::<1>(ticket).map(|(sums, _)| sums[0])
    }

    fn send(&self, session: &Arc<Session>, request: &Request, numbers: &[i64]) -> Result<InFlight, Error> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        session.send_past_line(request, self.site.clone(), Input::Bytes(&bytes), None)
    }

    /// Notifies the ranks that wait for this one in later steps that it abandons the operation.
    pub(super) fn abstain(&self, session: &Session, group: Option<SetId>, reason: &str) {
        let Some(work) = &self.work else { return };
        let is_before_shard = matches!(self.stage, Stage::First(..) | Stage::ToHost(_));
        if let (true, Some(group), Some(shard)) = (is_before_shard, group, &work.plan.shard)
            && let Ok(request) = self.shard_request(group, shard)
        {
            session.abstain(request, reason);
        }
        let is_before_second = is_before_shard || matches!(self.stage, Stage::Between(_) | Stage::FromHost(_));
        if is_before_second
            && work.plan.has_second
            && let Ok(request) = self.second_request()
        {
            session.abstain(request, reason);
        }
    }

    fn name_of(&self, step: &str) -> Result<TensorName, Error> {
        let (name, seq) = (self.request.name.as_str(), self.work.as_ref().map_or(0, |work| work.seq));
        TensorName::new(format!("{name}/{step}.{seq}")).map_err(|error| Error::argument(error.to_string()))
    }

    fn second_request(&self) -> Result<Request, Error> {
        sum(self.request.set, self.name_of("gather")?, 1)
    }

    fn shard_request(&self, group: SetId, shard: &Shard) -> Result<Request, Error> {
        let Shard { collective, dtype, postscale, codec, .. } = shard;
        let request = Request::new(group, self.name_of("between")?, collective.clone(), *dtype, shape(&shard.shape)?);
        Ok(Request { postscale: *postscale, codec: *codec, ..request })
    }

    // === Steps between hosts ===

    /// The operation works by a plan from now on.
    pub(super) fn agree(&mut self, plan: Plan, lease: Lease) {
        self.work = Some(Work { plan, lease, seq: 0 });
    }

    /// Its ticket had this number.
    pub(super) fn number(&mut self, seq: u64) {
        if let Some(work) = &mut self.work {
            work.seq = seq;
        }
    }

    /// The plan and the buffer.
    pub(super) fn work(&mut self) -> Result<&mut Work, Error> {
        self.work.as_mut().ok_or_else(out_of_order)
    }

    /// The memory of a place.
    pub(super) fn memory(&self, place: &Place) -> Result<DeviceSpan, Error> {
        match place {
            Place::Input => self.tensor.clone().ok_or_else(out_of_order),
            Place::Buffer(range) => Ok(self.work.as_ref().ok_or_else(out_of_order)?.lease.part(range.clone())?),
        }
    }

    /// Starts to copy this rank's part to main memory after an event, or sends the request if it only receives. Returns the
    /// bytes to copy.
    pub(super) fn begin_between(
        &mut self,
        session: &Arc<Session>,
        group: SetId,
        after: &Arc<Event>,
    ) -> Result<usize, Error> {
        let shard = self.work()?.plan.shard.clone().ok_or_else(out_of_order)?;
        let memory = memory_of(session)?;
        let Some(place) = &shard.source else {
            // Its bytes are of no importance.
            let slot = memory.lease(shard.target.len() as u64)?;
            self.send_shard(session, group, slot)?;
            return Ok(0);
        };
        let source = self.memory(place)?;
        let bytes = source.bytes();
        let slot = memory.lease(bytes as u64)?;
        self.staging.register(&slot)?;
        let (sender, received) = channel();
        let completions = session.completions.clone();
        let filled = move |filled| {
            // The operation may have failed meanwhile.
            let _ = sender.send(filled);
            completions.wake();
        };
        self.staging.fetch(source, Arc::clone(after), slot, Box::new(filled))?;
        self.stage = Stage::ToHost(received);
        Ok(bytes)
    }

    /// Sends the request of the shard group once its input is in main memory. Returns whether it has.
    pub(super) fn continue_between(&mut self, session: &Arc<Session>, group: SetId) -> Result<bool, Error> {
        let Stage::ToHost(received) = &self.stage else { return Err(out_of_order()) };
        let slot = match received.try_recv() {
            Ok(filled) => filled?,
            Err(TryRecvError::Empty) => return Ok(false),
            Err(TryRecvError::Disconnected) => {
                return Err(GpuError::Thread { reason: "it passed no slot on".to_owned() }.into());
            }
        };
        self.send_shard(session, group, slot)?;
        Ok(true)
    }

    fn send_shard(&mut self, session: &Arc<Session>, group: SetId, slot: LeasedSlot) -> Result<(), Error> {
        let shard = self.work()?.plan.shard.clone().ok_or_else(out_of_order)?;
        let request = self.shard_request(group, &shard)?;
        let result_bytes = session.open()?.names.result_bytes(&request);
        let output = result_bytes.and_then(|bytes| memory_of(session).ok()?.lease_result(bytes));
        let output = output.map(OutputSlot::Arena);
        let sent = session.send_past_line(&request, self.site.clone(), Input::Leased(whole(slot)), output)?;
        self.stage = Stage::Between(sent);
        Ok(())
    }

    /// Starts to copy the result of the shard group to the device, once it is there. Returns whether it is.
    pub(super) fn continue_from_host(&mut self, session: &Arc<Session>) -> Result<bool, Error> {
        let Stage::Between(between) = &mut self.stage else { return Err(out_of_order()) };
        if !between.poll() {
            return Ok(false);
        }
        between.wait_timeout(Duration::ZERO);
        let result = between.take()?;
        let submitted = Arc::clone(&self.submitted);
        let work = self.work()?;
        let target = work.plan.shard.as_ref().ok_or_else(out_of_order)?.target.clone();
        let bytes = usize::try_from(result.bytes()).unwrap_or(usize::MAX);
        let span = work.lease.part(target.start..target.start.saturating_add(bytes.min(target.len())))?;
        result.check_bytes(span.bytes() as u64)?;
        let arrival = session.deliver_after(result, span, &submitted)?;
        self.work()?.lease.use_until(arrival.event(), []);
        self.stage = Stage::FromHost(arrival);
        Ok(true)
    }

    // === End ===

    /// Delivers the result. Returns whether the program waits for it.
    pub(super) fn complete(self, ranks: usize, position: usize) -> bool {
        let Self { held, request, staging, work, .. } = self;
        let Some(Work { plan, mut lease, .. }) = work else { return false };
        lease.release_spans();
        let dimensions = result_shape(&request, ranks, position);
        let outcome = shape(&dimensions).map(|shape| ResultData {
            dtype: request.dtype,
            shape,
            detail: ronde_wire::Detail::default(),
            source: Source::Levels(DeviceResult::new(staging.context(), lease, plan.result)),
            order: Order::default(),
        });
        held.complete(outcome)
    }
}

/// The shape of a rank's result.
fn result_shape(request: &Request, ranks: usize, position: usize) -> Vec<u64> {
    let mut dimensions = request.shape.dimensions().to_vec();
    if let Some(rows) = dimensions.first_mut() {
        let (ranks, position) = (ranks as u64, position as u64);
        match request.collective {
            Collective::AllGather => *rows *= ranks,
            Collective::ReduceScatter { .. } => *rows = *rows / ranks + u64::from(position < *rows % ranks),
            _ => {}
        }
    }
    dimensions
}

/// A sum of integers.
fn sum(set: SetId, name: TensorName, count: u64) -> Result<Request, Error> {
    Ok(Request::new(set, name, Collective::AllReduce { op: ReduceOp::Sum }, DType::I64, shape(&[count])?))
}

fn shape(dimensions: &[u64]) -> Result<Shape, Error> {
    Shape::new(dimensions.to_vec()).map_err(|error| Error::argument(error.to_string()))
}

/// Whether a request has a result.
fn has_succeeded(request: &mut InFlight) -> bool {
    request.wait_timeout(Duration::ZERO) && matches!(request.result(), Ok(Some(_)))
}

/// Takes the integers of a ticket that is complete.
fn taken<const N: usize>(ticket: &mut InFlight) -> Result<([i64; N], Order), Error> {
    ticket.wait_timeout(Duration::ZERO);
    let mut bytes = vec![0; 8 * N];
    let order = ticket.take_into(&mut bytes)?.order;
    let mut numbers = [0; N];
    for (number, part) in numbers.iter_mut().zip(bytes.chunks_exact(8)) {
        *number = i64::from_le_bytes(part.try_into().unwrap_or_default());
    }
    Ok((numbers, order))
}

fn memory_of(session: &Session) -> Result<&Arc<Memory>, Error> {
    session.memory.as_ref().ok_or_else(|| Error::argument("two levels need shared memory; connect without inline"))
}

fn out_of_order() -> Error {
    Error::argument("a step of an operation in two levels is out of order; this is a bug of ronde")
}
