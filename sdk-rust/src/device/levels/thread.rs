//! [`Thread`]: performs a session's operations in two levels.
//!
//! It calls NCCL in the order in which the tickets of operations are complete. The sidecar delivers a completion to all ranks
//! of the host before it delivers the next one, so this order is the same for all of them, whatever order the program of
//! each submits in, and across process sets.
//!
//! After a failure past a ticket, the ranks no longer agree on what NCCL has been called for. So two levels are over for the
//! set: its communicator is aborted, the ranks that wait are notified, and each later operation fails until the program
//! connects again.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ronde_gpu::nccl::Nccl;
use ronde_gpu::{Context, GpuError, Stream};
use ronde_wire::{Request, SetId};

use super::members::{Members, State};
use super::operation::{Operation, Stage};
use super::plan::Plan;
use super::pool::Pool;
use super::{Counters, LevelOptions, add, phases};
use crate::completions::Completions;
use crate::device::usage::Level;
use crate::device::{fetch, to_error};
use crate::error::Error;
use crate::result_data::Order;
use crate::session::Session;

pub(super) struct Thread {
    session: Weak<Session>,
    completions: Completions,
    received: Receiver<Operation>,
    is_closed: bool,
    options: LevelOptions,
    counters: Arc<Counters>,
    /// `None` until it is needed.
    nccl: Option<Result<Arc<Nccl>, GpuError>>,
    pub(super) operations: Vec<Operation>,
    members: HashMap<SetId, Members>,
    /// One for each device.
    streams: HashMap<u32, Arc<Stream>>,
    pool: Arc<Pool>,
}

/// What has become of an operation.
pub(super) enum Next {
    /// It waits.
    Waits(Operation),
    /// It has gone on.
    Moved(Operation),
    Over,
}

impl Thread {
    pub(super) fn new(
        session: &Arc<Session>,
        received: Receiver<Operation>,
        options: LevelOptions,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            session: Arc::downgrade(session),
            completions: session.completions.clone(),
            received,
            is_closed: false,
            options,
            counters,
            nccl: None,
            operations: Vec::new(),
            members: HashMap::new(),
            streams: HashMap::new(),
            pool: Arc::default(),
        }
    }

    /// Runs until the session is over.
    pub(super) fn run(mut self) {
        let mut interval = POLL_INTERVAL_MIN;
        loop {
            let seen = self.completions.wait(0, Duration::ZERO);
            self.receive();
            let Some(session) = self.session.upgrade() else { return self.end(&Error::Closed) };
            if let Some(error) = session.pending.over() {
                if error.is_shutdown() {
                    self.finish(&session, &error);
                }
                return self.end(&error);
            }
            if self.is_closed && self.operations.is_empty() {
                return;
            }
            let has_moved = self.turn(&session);
            self.pool.sweep();
            drop(session);
            interval = if has_moved { POLL_INTERVAL_MIN } else { (interval * 2).min(POLL_INTERVAL_MAX) };
            if !has_moved {
                let is_polled = self.operations.iter().any(Operation::is_polled);
                let _ = self.completions.wait(seen, if is_polled { interval } else { IDLE_INTERVAL });
            }
        }
    }

    pub(super) fn receive(&mut self) {
        loop {
            match self.received.try_recv() {
                Ok(operation) => self.operations.push(operation),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.is_closed = true;
                    return;
                }
            }
        }
    }

    /// Everything that can be done without waiting. Returns whether something was.
    fn turn(&mut self, session: &Arc<Session>) -> bool {
        let mut has_moved = false;
        for members in self.members.values_mut() {
            has_moved |= members.advance(session);
        }
        for operation in std::mem::take(&mut self.operations) {
            match self.advance(session, operation) {
                Next::Waits(operation) => self.operations.push(operation),
                Next::Moved(operation) => {
                    has_moved = true;
                    self.operations.push(operation);
                }
                Next::Over => has_moved = true,
            }
        }
        has_moved | self.take_tickets(session)
    }

    /// The session is over: all waiters are notified.
    fn end(&mut self, error: &Error) {
        self.receive();
        let is_idle = !self.operations.iter().any(Operation::is_past_ticket);
        for members in self.members.values_mut() {
            if is_idle { members.leave(error) } else { members.fail(error) }
        }
        for operation in self.operations.drain(..) {
            operation.held.complete(Err(error.clone()));
        }
    }

    // === Tickets ===

    /// Acts on all tickets that are complete, in the order of their completions.
    pub(super) fn take_tickets(&mut self, session: &Arc<Session>) -> bool {
        // Completions are delivered in order. So when the last one that the first pass has found was delivered, all earlier
        // ones were, and the second pass finds them. Later ones wait for the next turn.
        let Some(last) = self.operations.iter_mut().filter_map(Operation::arrived).max() else { return false };
        let mut found: Vec<(Order, usize)> = self
            .operations
            .iter_mut()
            .enumerate()
            .filter_map(|(at, operation)| Some((operation.arrived()?, at)))
            .filter(|(order, _)| *order <= last)
            .collect();
        found.sort_unstable();
        let mut operations: Vec<Option<Operation>> =
            std::mem::take(&mut self.operations).into_iter().map(Some).collect();
        for (_, at) in found {
            let Some(operation) = operations[at].take() else { continue };
            if let Next::Waits(operation) | Next::Moved(operation) = self.take_ticket(session, operation) {
                operations[at] = Some(operation);
            }
        }
        self.operations = operations.into_iter().flatten().collect();
        true
    }

    fn take_ticket(&mut self, session: &Arc<Session>, mut operation: Operation) -> Next {
        let taken = match &operation.stage {
            Stage::SecondTicket(_) => self.take_second_ticket(session, &mut operation),
            _ => self.take_first_ticket(session, &mut operation),
        };
        match taken {
            Ok(Taken::Goes) => Next::Moved(operation),
            Ok(Taken::Done) => self.complete(session, operation),
            Ok(Taken::OneLevel) => self.in_one_level(session, operation),
            Err(error) => self.fail(session, operation, &error),
        }
    }

    fn take_first_ticket(&mut self, session: &Arc<Session>, operation: &mut Operation) -> Result<Taken, Error> {
        let (ranks, digests, order) = operation.take_ticket()?;
        let device = operation.staging.ordinal();
        let Some(members) = self.members.get_mut(&operation.request.set) else { return Err(Error::Closed) };
        // Known also after a failure of the set: what the sums lead to must not depend on what only this rank knows.
        let size = i64::try_from(members.place().0).unwrap_or(i64::MAX);
        let own = operation.digest(operation.work.is_some() && device == members.device());
        // Fewer ranks: some have joined. Other digests: the sidecar will name what differs.
        if ranks != size || own == 0 || own.checked_mul(size) != Some(digests) {
            return Ok(Taken::OneLevel);
        }
        operation.number(order.seq);
        // Before anything that may fail: from here on other ranks may be in this phase, and are notified of a failure.
        let begun = Instant::now();
        operation.stage = Stage::First(Arc::clone(&operation.submitted), begun);
        let State::Ready(ready) = members.state() else { return Err(failed(members)) };
        let group = ready.group;
        let stream = stream_of(&mut self.streams, operation.staging.context())?;
        match phases::first(session, (operation, members), &stream, &self.counters) {
            Ok(Some(event)) => operation.stage = Stage::First(event, begun),
            Ok(None) => {
                let after = Arc::clone(&operation.submitted);
                self.begin_between(session, operation, group, &after)?;
            }
            Err(error) => return Err(error),
        }
        Ok(Taken::Goes)
    }

    fn take_second_ticket(&mut self, session: &Arc<Session>, operation: &mut Operation) -> Result<Taken, Error> {
        let ranks = operation.take_second_ticket()?;
        let Some(members) = self.members.get_mut(&operation.request.set) else { return Err(Error::Closed) };
        let State::Ready(ready) = members.state() else { return Err(failed(members)) };
        if i64::try_from(ready.layout.ranks()) != Ok(ranks) {
            return Err(Error::Protocol { reason: format!("{ranks} ranks have come to a second phase, and not all") });
        }
        let stream = stream_of(&mut self.streams, operation.staging.context())?;
        match phases::second(session, (operation, members), &stream, &self.counters)? {
            None => Ok(Taken::Done),
            Some(event) => {
                operation.stage = Stage::Second(event, Instant::now());
                Ok(Taken::Goes)
            }
        }
    }

    // === Everything else ===

    fn advance(&mut self, session: &Arc<Session>, mut operation: Operation) -> Next {
        match &operation.stage {
            Stage::Waiting => self.begin(session, operation),
            Stage::Ticket(_) => {
                // If the ticket is complete already, the other ranks are in the first phase and need this one, whose outcome
                // nobody reads.
                if let Some(reason) = withdrawal(session, &operation) {
                    operation.withdraw_ticket(reason);
                }
                Next::Waits(operation)
            }
            Stage::SecondTicket(_) => match self.failure(&operation) {
                None => Next::Waits(operation),
                Some(error) => self.fail(session, operation, &error),
            },
            _ => self.continue_past_ticket(session, operation),
        }
    }

    /// Sends the ticket when its time has come.
    fn begin(&mut self, session: &Arc<Session>, mut operation: Operation) -> Next {
        if let Some(reason) = withdrawal(session, &operation) {
            session.abstain(operation.request.clone(), reason);
            operation.held.complete(Err(Error::argument(reason)));
            return Next::Over;
        }
        let set = operation.request.set;
        if !self.members.contains_key(&set) {
            let nccl = self.nccl();
            let members = Members::begin(session, set, operation.staging.context(), nccl, self.options.choice);
            self.members.insert(set, members);
        }
        let Some(members) = self.members.get_mut(&set) else { return Next::Waits(operation) };
        let device = members.device();
        let plan = match members.state() {
            State::Pending => return Next::Waits(operation),
            State::One => return self.in_one_level(session, operation),
            State::Failed(error) => {
                // Where all ranks have found that out together, none of them waits for this one.
                let is_known = matches!(error, Error::Device(GpuError::Unavailable { .. }));
                if !is_known {
                    session.abstain(operation.request.clone(), &error.to_string());
                }
                operation.held.complete(Err(error));
                return Next::Over;
            }
            State::Ready(ready) => Plan::of(&operation.request, &ready.layout),
        };
        let Some(plan) = plan else { return self.in_one_level(session, operation) };
        match self.send_ticket(session, &mut operation, plan, device) {
            Ok(true) => Next::Moved(operation),
            Ok(false) => Next::Waits(operation),
            Err(error) => {
                session.abstain(operation.request.clone(), &error.to_string());
                operation.held.complete(Err(error));
                Next::Over
            }
        }
    }

    /// Sends the ticket if the contribution has been computed and no earlier request has to be sent before.
    fn send_ticket(
        &mut self,
        session: &Arc<Session>,
        operation: &mut Operation,
        plan: Plan,
        device: u32,
    ) -> Result<bool, Error> {
        // Before the first query, because it relaxes the capture mode of this thread.
        stream_of(&mut self.streams, operation.staging.context())?;
        if !operation.submitted.has_occurred()? || !operation.held.is_next() {
            return Ok(false);
        }
        let is_possible = operation.staging.ordinal() == device;
        if is_possible {
            let lease = self.pool.lease(operation.staging.context(), plan.buffer_bytes)?;
            operation.agree(plan, lease);
        }
        operation.send_ticket(session, operation.digest(is_possible))?;
        Ok(true)
    }

    pub(super) fn continue_past_ticket(&mut self, session: &Arc<Session>, mut operation: Operation) -> Next {
        if let Some(error) = self.failure(&operation) {
            return self.fail(session, operation, &error);
        }
        match self.step(session, &mut operation) {
            Ok(None) => Next::Waits(operation),
            Ok(Some(Taken::Done)) => self.complete(session, operation),
            Ok(Some(_)) => Next::Moved(operation),
            Err(error) => self.fail(session, operation, &error),
        }
    }

    /// One step past the ticket; `None` if it has to wait.
    fn step(&mut self, session: &Arc<Session>, operation: &mut Operation) -> Result<Option<Taken>, Error> {
        let Some(members) = self.members.get_mut(&operation.request.set) else { return Err(Error::Closed) };
        match &operation.stage {
            Stage::First(event, since) => {
                let (event, since) = (Arc::clone(event), *since);
                if !phases::is_complete(session, members, &event, since)? {
                    return Ok(None);
                }
                let State::Ready(ready) = members.state() else { return Err(failed(members)) };
                let group = ready.group;
                if operation.work()?.plan.shard.is_none() {
                    return Ok(Some(Taken::Done));
                }
                self.begin_between(session, operation, group, &event)?;
                Ok(Some(Taken::Goes))
            }
            Stage::Second(event, since) => {
                let (event, since) = (Arc::clone(event), *since);
                Ok(phases::is_complete(session, members, &event, since)?.then_some(Taken::Done))
            }
            Stage::ToHost(_) => {
                let State::Ready(ready) = members.state() else { return Err(failed(members)) };
                let group = ready.group.ok_or(Error::Closed)?;
                Ok(operation.continue_between(session, group)?.then_some(Taken::Goes))
            }
            Stage::Between(_) => Ok(operation.continue_from_host(session)?.then_some(Taken::Goes)),
            Stage::FromHost(arrival) => {
                if !arrival.has_occurred().map_err(to_error)? {
                    return Ok(None);
                }
                if !operation.work()?.plan.has_second {
                    return Ok(Some(Taken::Done));
                }
                operation.send_second_ticket(session)?;
                Ok(Some(Taken::Goes))
            }
            Stage::Waiting | Stage::Ticket(_) | Stage::SecondTicket(_) => Ok(None),
        }
    }

    fn begin_between(
        &self,
        session: &Arc<Session>,
        operation: &mut Operation,
        group: Option<SetId>,
        after: &Arc<ronde_gpu::Event>,
    ) -> Result<(), Error> {
        let bytes = operation.begin_between(session, group.ok_or(Error::Closed)?, after)?;
        add(&self.counters.bytes_between, bytes);
        Ok(())
    }

    // === Ends ===

    fn complete(&self, session: &Session, operation: Operation) -> Next {
        let Some(members) = self.members.get(&operation.request.set) else { return Next::Over };
        let (ranks, position) = members.place();
        let Request { shape, dtype, .. } = &operation.request;
        let (ordinal, bytes) = (operation.staging.ordinal(), shape.elements() * dtype.size_bytes() as u64);
        if let Some(Ok(nccl)) = &self.nccl {
            session.devices.uses.note_nccl(ordinal, nccl.version_number());
        }
        session.devices.count(ordinal, Level::Two, bytes);
        self.counters.operations.fetch_add(1, Ordering::Relaxed);
        operation.complete(ranks, position);
        Next::Over
    }

    /// Lets the sidecar perform an operation.
    fn in_one_level(&self, session: &Arc<Session>, operation: Operation) -> Next {
        self.counters.one_level.fetch_add(1, Ordering::Relaxed);
        let has_ticket = matches!(operation.stage, Stage::Ticket(_));
        let Operation { mut held, mut request, tensor, staging, submitted, .. } = operation;
        let Some((id, tensor)) = held.id().zip(tensor) else { return Next::Over };
        if has_ticket {
            // The tickets were the members of the group. What stays in two levels is not submitted once more, and the sidecar
            // would wait for it.
            request.group = None;
            session.pending.leave_group(id);
        }
        if !session.pending.set_apart(id, false) {
            session.abstain(request, WITHDRAWN);
            session.remove_waiting(id);
            return Next::Over;
        }
        // A request that was performed apart has outlived an orderly shutdown.
        if let Some(over) = session.pending.over() {
            held.complete(Err(over));
            return Next::Over;
        }
        let leased = session.memory_for_devices().and_then(|memory| memory.lease(tensor.bytes() as u64));
        let slot = leased.and_then(|slot| staging.register(&slot).map(|()| slot).map_err(to_error));
        match slot {
            Ok(slot) => {
                session.devices.count(staging.ordinal(), Level::Copied, tensor.bytes() as u64);
                // A failure has been delivered to its waiter.
                drop(fetch(&staging, held, tensor, (submitted, slot)));
            }
            Err(error) => held.fail(&error),
        }
        Next::Over
    }

    /// Ends an operation, and after its ticket two levels in its set.
    fn fail(&mut self, session: &Arc<Session>, operation: Operation, error: &Error) -> Next {
        if operation.is_past_ticket()
            && let Some(members) = self.members.get_mut(&operation.request.set)
        {
            // The first reason stays, so only the first failure of a set waits for it.
            let is_known = matches!(members.state(), State::Failed(_));
            let error = if is_known { error.clone() } else { cause_of(session, error) };
            if session.pending.over().is_none() {
                operation.abstain(session, members.group(), &error.to_string());
            }
            members.fail(&error);
            operation.held.complete(Err(error));
            return Next::Over;
        }
        operation.held.complete(Err(error.clone()));
        Next::Over
    }

    /// Why two levels are over in the set of an operation.
    fn failure(&mut self, operation: &Operation) -> Option<Error> {
        match self.members.get_mut(&operation.request.set)?.state() {
            State::Failed(error) => Some(error),
            _ => None,
        }
    }

    fn nccl(&mut self) -> Result<Arc<Nccl>, GpuError> {
        let folders = &self.options.nccl_folders;
        self.nccl.get_or_insert_with(|| Nccl::find(folders)).clone()
    }
}

/// What a ticket or a step leads to.
enum Taken {
    /// The operation goes on.
    Goes,
    /// It is complete.
    Done,
    /// The sidecar performs it.
    OneLevel,
}

/// Why nobody waits for an operation any more, if that is so.
fn withdrawal(session: &Session, operation: &Operation) -> Option<&'static str> {
    let id = operation.held.id()?;
    (!session.pending.is_pending(id)).then_some(WITHDRAWN)
}

/// The reason of an error of NCCL, if it is the loss of a rank, of which the sidecar may report only a moment later.
fn cause_of(session: &Session, error: &Error) -> Error {
    if !matches!(error, Error::Device(GpuError::Aborted { .. } | GpuError::Call { .. })) {
        return error.clone();
    }
    let until = Instant::now() + CAUSE_TIMEOUT;
    while Instant::now() < until {
        if let Some(over) = session.pending.over() {
            return over;
        }
        std::thread::sleep(POLL_INTERVAL_MAX);
    }
    error.clone()
}

fn failed(members: &mut Members) -> Error {
    match members.state() {
        State::Failed(error) => error,
        _ => Error::Closed,
    }
}

fn stream_of(streams: &mut HashMap<u32, Arc<Stream>>, context: &Arc<Context>) -> Result<Arc<Stream>, Error> {
    if let Some(stream) = streams.get(&context.ordinal()) {
        return Ok(Arc::clone(stream));
    }
    let stream = Arc::new(Stream::new(context)?);
    stream.relax_capture()?;
    streams.insert(context.ordinal(), Arc::clone(&stream));
    Ok(stream)
}

/// Why an operation that no longer has a waiter is not performed.
const WITHDRAWN: &str = "its handle was dropped, or its operation timeout passed";
/// How often the thread checks the device. The interval doubles while nothing happens.
const POLL_INTERVAL_MIN: Duration = Duration::from_micros(20);
pub(super) const POLL_INTERVAL_MAX: Duration = Duration::from_micros(500);
/// How long a failure of NCCL waits for a better reason. The sidecar reports the loss of a rank within a second.
const CAUSE_TIMEOUT: Duration = Duration::from_millis(1_500);
/// How often it checks for dropped handles when it waits for other ranks only.
const IDLE_INTERVAL: Duration = Duration::from_millis(50);
