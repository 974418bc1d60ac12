//! [`Session`]: the state that a client's calls and its background task share.
//!
//! Requests are kept in [`Pending`]. Calls send over the ring, or on the gRPC stream when there is no ring. Messages of the
//! sidecar are received by the background task, or by a thread that waits for a result and reads the ring.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{Claimed, Completion, Place, Submission, v1};
use ronde_shm::{ForkGuard, SlotHold};
use ronde_wire::{Collective, PluginCall, Rank, Request, RequestId, SetId};
use tokio::sync::{Notify, mpsc};

use crate::buffer::SharedMemory;
use crate::completions::{Completions, NotifyFlag};
use crate::device::{Devices, InputHold, LevelOptions, Line, Order, OutputSlot, Unsent, slots_in_use};
use crate::error::{Error, queue_full, sidecar_gone};
use crate::in_flight::InFlight;
use crate::inline;
use crate::memory::{InputPart, Memory, output_place};
use crate::operation::{Label, Operation};
use crate::pending::{Entry, Event, PartsLimit, Pending, Table, abstention};
use crate::promise::Promise;
use crate::result_data::ResultData;
use crate::ring::{Flush, Ring, spin_time};
use crate::tensor::Layout;
use crate::timeline::Recorder;
use crate::usage::{self, Flight};

mod draft;

pub(crate) use draft::Draft;

/// A worker's session with its sidecar over a Unix socket and shared memory.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) fork_guard: ForkGuard,
    pub(crate) claimed: Claimed,
    /// `None` when tensors travel in messages.
    pub(crate) memory: Option<Arc<Memory>>,
    pub(crate) options: SessionOptions,
    pub(crate) directory: PathBuf,
    pub(crate) pending: Pending<Resources, ResultData>,
    outgoing: mpsc::Sender<v1::ClientMessage>,
    /// `None` when all messages travel on the stream.
    ring: Option<Ring>,
    /// Slots of requests that were pending when the session ended. The sidecar may still read the inputs and write the
    /// results, so they are neither written nor leased again.
    retired: Mutex<Vec<SlotHold>>,
    /// Why results in the sidecar's shared memory are no longer valid: the session's stream has ended.
    results_released: OnceLock<Error>,
    /// Counts completions that no thread waits for.
    pub(crate) completions: Completions,
    pub(crate) closing: Notify,
    pub(crate) recorder: Recorder,
    /// What copies tensors in device memory.
    pub(crate) devices: Devices,
    /// Requests that are not sent yet.
    pub(crate) line: Line,
    /// Completions that were received.
    arrivals: AtomicU64,
}

/// How a session treats its operations.
#[derive(Clone, Debug, Default)]
pub(crate) struct SessionOptions {
    /// After how long a waiter gives up.
    pub(crate) operation_timeout: Option<Duration>,
    /// Whether results may stay in shared memory.
    pub(crate) mapped: bool,
    /// The levels of collectives on GPUs.
    pub(crate) levels: LevelOptions,
}

/// What a session keeps of a request until the sidecar answers.
#[derive(Debug)]
pub(crate) struct Resources {
    /// Whether the completion is counted because no thread waits for it.
    pub(crate) notify_flag: NotifyFlag,
    /// The input, which the sidecar may read.
    pub(crate) input: Option<InputHold>,
    /// The memory for the result, which the sidecar may write.
    pub(crate) output: Option<OutputSlot>,
    /// The time until the answer.
    pub(crate) flight: Flight,
}

/// The input of a submission.
pub(crate) enum Input<'a> {
    /// In shared memory already.
    Leased(InputPart),
    /// Copied by the submission.
    Bytes(&'a [u8]),
}

impl Session {
    pub(crate) fn new(
        (directory, me): (PathBuf, Rank),
        outgoing: mpsc::Sender<v1::ClientMessage>,
        claimed: Claimed,
        (memory, ring): (Option<Arc<Memory>>, Option<Ring>),
        recorder: Recorder,
        options: SessionOptions,
    ) -> Self {
        let devices = Devices::new(options.levels.clone());
        let parts_limit = PartsLimit { bytes: claimed.arena_bytes_max, setting: "arena_bytes_max" };
        Self {
            fork_guard: ForkGuard::new(),
            pending: Pending::new(me, &claimed, parts_limit),
            claimed,
            memory,
            options,
            directory,
            outgoing,
            ring,
            retired: Mutex::default(),
            results_released: OnceLock::new(),
            completions: Completions::default(),
            closing: Notify::new(),
            recorder,
            devices,
            line: Line::default(),
            arrivals: AtomicU64::new(0),
        }
    }

    pub(crate) fn open(&self) -> Result<std::sync::MutexGuard<'_, Table<Resources, ResultData>>, Error> {
        self.fork_guard.check()?;
        self.pending.open()
    }

    /// Whether this rank knows the process set.
    ///
    /// # Errors
    /// Why the session is over.
    pub(crate) fn knows_set(&self, set: SetId) -> Result<bool, Error> {
        Ok(self.open()?.names.knows_set(set))
    }

    /// The ring, if there is one.
    pub(crate) fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }

    /// How submissions reach the sidecar: `ring` or `grpc`.
    pub(crate) fn submission_path(&self) -> &'static str {
        if self.ring.is_some() { "ring" } else { "grpc" }
    }

    /// What this worker has in shared memory.
    pub(crate) fn shared_memory(&self) -> SharedMemory {
        self.memory.as_ref().map(|memory| memory.usage()).unwrap_or_default()
    }

    // === Submission ===

    /// Checks an operation and names it. From here on other ranks may wait for it.
    ///
    /// # Errors
    /// [`Error::Argument`], or why the session is over.
    pub(crate) fn draft(self: &Arc<Self>, operation: &Operation<'_>) -> Result<Draft, Error> {
        self.draft_of(operation, operation.layout())
    }

    /// [`Session::draft`] of an operation whose contribution may be in device memory.
    pub(crate) fn draft_of(
        self: &Arc<Self>,
        operation: &Operation<'_>,
        layout: Option<Layout<'_>>,
    ) -> Result<Draft, Error> {
        let mut table = self.open()?;
        let request = table.names.request_of(operation, layout)?;
        Ok(self.drafted(&table, request, operation))
    }

    /// [`Session::draft`] for operations that become ready together.
    ///
    /// # Errors
    /// Those of [`Session::draft`]; then none of them has a name.
    pub(crate) fn draft_group(
        self: &Arc<Self>,
        label: Label<'_>,
        operations: &[Operation<'_>],
    ) -> Result<Vec<Draft>, Error> {
        let described = operations.iter().map(|operation| (operation.clone(), operation.layout()));
        self.draft_group_of(label, &described.collect::<Vec<_>>())
    }

    /// [`Session::draft_group`] of operations whose contributions may be in device memory.
    pub(crate) fn draft_group_of(
        self: &Arc<Self>,
        label: Label<'_>,
        operations: &[(Operation<'_>, Option<Layout<'_>>)],
    ) -> Result<Vec<Draft>, Error> {
        let mut table = self.open()?;
        let requests = table.names.group_of(label, operations)?.into_iter().zip(operations);
        Ok(requests.map(|(request, (operation, _))| self.drafted(&table, request, operation)).collect())
    }

    fn drafted(
        self: &Arc<Self>,
        table: &Table<Resources, ResultData>,
        request: Request,
        operation: &Operation<'_>,
    ) -> Draft {
        let result_bytes = if operation.mapped { table.names.result_bytes(&request) } else { None };
        let (plugin, site) = (operation.plugin.clone(), operation.site.clone());
        let notify = operation.notify;
        Draft { session: Arc::clone(self), request: Some(request), notify, plugin, site, result_bytes }
    }

    /// Submits an operation from the calling thread, which blocks while the arena grows.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Limit`], or why the session is over.
    pub(crate) fn submit_from(self: &Arc<Self>, operation: &Operation<'_>) -> Result<InFlight, Error> {
        self.submit_bytes(self.draft(operation)?, operation.bytes())
    }

    /// Submits operations that become ready together; `wrap` makes a handle of each.
    ///
    /// # Errors
    /// Those of [`Session::submit_from`].
    pub(crate) fn submit_group_from<H>(
        self: &Arc<Self>,
        label: Label<'_>,
        operations: &[Operation<'_>],
        wrap: impl Fn(InFlight) -> H,
    ) -> Result<Vec<H>, Error> {
        let drafts = self.draft_group(label, operations)?.into_iter().zip(operations);
        drafts.map(|(draft, operation)| self.submit_bytes(draft, operation.bytes()).map(&wrap)).collect()
    }

    pub(crate) fn submit_bytes(self: &Arc<Self>, draft: Draft, bytes: &[u8]) -> Result<InFlight, Error> {
        // The input gets a slot first, because it needs one and the result does not.
        let input = match self.memory.as_ref().filter(|_| !bytes.is_empty() && self.result_slot(&draft).is_some()) {
            Some(memory) => match memory.input(bytes) {
                Ok(part) => Input::Leased(part),
                Err(error) => return Err(draft.reject(error)),
            },
            None => Input::Bytes(bytes),
        };
        let output = self.result_slot(&draft).and_then(|(memory, bytes)| memory.lease_result(bytes));
        self.submit(draft, input, output.map(OutputSlot::Arena))
    }

    /// The memory and the bytes for the result of a draft, when it may stay in shared memory and there is room.
    pub(crate) fn result_slot(&self, draft: &Draft) -> Option<(&Arc<Memory>, u64)> {
        let (memory, bytes) = (self.memory.as_ref().filter(|_| self.options.mapped)?, draft.result_bytes?);
        memory.has_room_for_result(bytes).then_some((memory, bytes))
    }

    /// Submits a draft. Copies the input; blocks only while the arena grows. When it is rejected, the other ranks learn that
    /// this rank takes no part.
    pub(crate) fn submit(
        self: &Arc<Self>,
        mut draft: Draft,
        input: Input<'_>,
        output: Option<OutputSlot>,
    ) -> Result<InFlight, Error> {
        let Some(request) = draft.request.as_ref() else { return Err(Error::Closed) };
        let (named, notify_flag) = ((draft.plugin.take(), draft.site.take()), NotifyFlag::new(draft.notify));
        match self.send_submission((request, notify_flag), named, input, output) {
            Ok(in_flight) => {
                usage::count_operation(request);
                draft.request = None;
                Ok(in_flight)
            }
            Err(error) => Err(draft.reject(error)),
        }
    }

    fn send_submission(
        self: &Arc<Self>,
        (what, notify_flag): (&Request, NotifyFlag),
        (plugin, site): (Option<PluginCall>, Option<String>),
        input: Input<'_>,
        output: Option<OutputSlot>,
    ) -> Result<InFlight, Error> {
        self.fork_guard.check()?;
        self.pending.check_room()?;
        let (place, input) = self.place_input(&what.collective, input)?;
        let (name, collective) = (what.name.clone(), what.collective.clone());
        let spin = spin_time(&place);
        let order = Order::of(&collective);
        let mut line = self.line.lock();
        if line.delays(order) {
            let resources =
                Resources { notify_flag: notify_flag.clone(), input: None, output, flight: Flight::begin() };
            let (request, promise) = self.pending.insert_held(what, resources)?;
            line.push(request, order, Some(Unsent { plugin, place, site, input }));
            return Ok(InFlight::new(Arc::clone(self), request, (name, collective), (promise, spin, notify_flag)));
        }
        drop(line);
        self.send_placed((what, notify_flag), (plugin, site), (place, input), output)
    }

    /// Sends a request past all unsent ones. Its completion is counted when no thread waits for it.
    ///
    /// # Errors
    /// [`Error::Limit`], or why the session is over.
    pub(crate) fn send_past_line(
        self: &Arc<Self>,
        what: &Request,
        site: Option<String>,
        input: Input<'_>,
        output: Option<OutputSlot>,
    ) -> Result<InFlight, Error> {
        self.fork_guard.check()?;
        let placed = self.place_input(&what.collective, input)?;
        self.send_placed((what, NotifyFlag::new(true)), (None, site), placed, output)
    }

    fn send_placed(
        self: &Arc<Self>,
        (what, notify_flag): (&Request, NotifyFlag),
        (plugin, site): (Option<PluginCall>, Option<String>),
        (place, input): (Place, Option<InputHold>),
        output: Option<OutputSlot>,
    ) -> Result<InFlight, Error> {
        let wanted = output.as_ref().map(OutputSlot::place);
        let (name, collective) = (what.name.clone(), what.collective.clone());
        let spin = spin_time(&place);
        let resources = Resources { notify_flag: notify_flag.clone(), input, output, flight: Flight::begin() };
        let (request, promise) = self.pending.insert(what, resources)?;
        let message = Submission { request, what: what.clone(), plugin, place, output: wanted, site }.into_message();
        if let Err(error) = self.send(Message::Submit(message), Flush::Now) {
            self.pending.remove(request);
            return Err(error);
        }
        Ok(InFlight::new(Arc::clone(self), request, (name, collective), (promise, spin, notify_flag)))
    }

    fn place_input(&self, collective: &Collective, input: Input<'_>) -> Result<(Place, Option<InputHold>), Error> {
        if !collective.has_input(self.pending.me()) {
            // Empty bytes in the message request the result inside messages, too.
            let place = if self.memory.is_some() { Place::None } else { Place::Inline(Bytes::new()) };
            return Ok((place, None));
        }
        let (hold, part) = match (input, &self.memory) {
            (Input::Leased(part), _) => part,
            (Input::Bytes(bytes), Some(memory)) => memory.input(bytes)?,
            (Input::Bytes(bytes), None) => {
                return Ok((inline::place(bytes, self.claimed.inline_bytes_max)?, None));
            }
        };
        Ok((output_place(part).into(), Some(InputHold::Arena(hold))))
    }

    /// Reports that this rank takes no part in an operation that other ranks may wait for.
    pub(crate) fn abstain(&self, request: Request, reason: &str) {
        if !self.fork_guard.is_child() {
            self.send_or_end(abstention(request, reason));
        }
    }

    /// Withdraws a request whose waiter has gone. Does nothing when it has been answered, nor for a join.
    pub(crate) fn withdraw(&self, request: RequestId, reason: &str) {
        if self.fork_guard.is_child() {
            return;
        }
        let Some(message) = self.pending.withdraw(request, reason) else { return };
        let is_unsent = matches!(message, Message::Abstain(_));
        self.send_or_end(message);
        if is_unsent {
            self.remove_waiting(request);
        }
    }

    /// Reports that a result has been read. The sidecar needs to know only with the next message.
    pub(crate) fn release(&self, request: RequestId) {
        if !self.fork_guard.is_child() {
            let sent = self.send(Message::Release(v1::Release { request: request.0 }), Flush::Later);
            self.end_if_full(sent);
        }
    }

    /// Prepares the ring for a thread that submits next and waits for the result.
    pub(crate) fn expect_wait(&self) {
        if let Some(ring) = &self.ring {
            ring.expect_leader();
        }
    }

    // === Completion ===

    /// Waits at most `slice` for a result. The thread that waits reads the ring for all threads.
    pub(crate) fn wait(
        self: &Arc<Self>,
        promise: &Promise<ResultData>,
        (slice, spin): (Duration, Duration),
    ) -> Option<Result<ResultData, Error>> {
        match &self.ring {
            Some(ring) => ring.wait(promise, (slice, spin), &|message| self.receive(message)),
            None => promise.wait_timeout(slice),
        }
    }

    /// Whether a result is there. Reads the ring if no other thread does.
    pub(crate) fn poll(self: &Arc<Self>, promise: &Promise<ResultData>) -> bool {
        if !promise.is_ready() {
            self.poll_ring();
        }
        promise.is_ready()
    }

    /// Reads the ring, if there is one and no other thread does.
    pub(crate) fn poll_ring(self: &Arc<Self>) {
        if let Some(ring) = &self.ring {
            ring.poll(&|message| self.receive(message));
        }
    }

    /// Handles a message of the sidecar.
    ///
    /// # Errors
    /// [`Error::Protocol`] for a message that ends the session.
    pub(crate) fn receive(self: &Arc<Self>, message: v1::ServerMessage) -> Result<(), Error> {
        match self.pending.receive(message)? {
            Event::Handled => {}
            Event::Completed(completion, entry) => return self.complete(completion, entry),
            Event::Failed(failure, Entry { waiter, resources, .. }) => {
                let Resources { notify_flag, input, output, flight } = resources;
                drop((input, output, flight));
                if let Some(waiter) = waiter {
                    waiter.with(Err(failure.into()));
                }
                self.count(&notify_flag);
            }
            Event::EpochEnded(failure) => self.end_and(&Error::Failure(failure), drop),
            Event::SessionEnded(failure) => self.end(&Error::Failure(failure)),
        }
        Ok(())
    }

    fn complete(
        self: &Arc<Self>,
        completion: Completion,
        entry: Option<Entry<Resources, ResultData>>,
    ) -> Result<(), Error> {
        let Some(Entry { waiter, parts, resources, .. }) = entry else {
            // The request has ended, so nobody reads the result; its memory is given back.
            drop(ResultData::new(self, completion, Vec::new()));
            return Ok(());
        };
        let Resources { notify_flag, input, output, flight } = resources;
        // Before the waiter is woken, so that its next operation has room.
        drop((input, flight));
        let mut result = match (completion.in_output, output) {
            (false, _) => ResultData::new(self, completion, parts),
            (true, Some(output)) => ResultData::in_output(completion, output.into()),
            (true, None) => {
                let reason = format!("the result of {} was written to a slot that was not given", completion.request);
                return Err(Error::Protocol { reason });
            }
        };
        result.order.arrival = self.arrivals.fetch_add(1, Ordering::SeqCst);
        if let Some(waiter) = waiter {
            waiter.with(Ok(result));
        }
        self.count(&notify_flag);
        Ok(())
    }

    /// Counts a completion that no thread waits for. Called after it has been delivered: see [`NotifyFlag::set`].
    pub(crate) fn count(&self, notify_flag: &NotifyFlag) {
        if notify_flag.is_set() {
            self.completions.add();
        }
    }

    /// The memory of a result in a segment of the sidecar.
    pub(crate) fn memory_of_result(&self, segment: u32) -> Result<&Arc<Memory>, Error> {
        self.memory.as_ref().ok_or_else(|| Error::Protocol {
            reason: format!("a result is in segment {segment}, but this session has no shared memory"),
        })
    }

    /// The reason why a result could not be mapped: the end of the epoch, with which an elastic job gives up its segments, else
    /// `error`.
    pub(crate) fn reason_of(&self, error: Error) -> Error {
        self.pending.over().unwrap_or(error)
    }

    /// Checks that bytes just copied from the sidecar's shared memory were still this session's result. Call it after the
    /// copy.
    pub(crate) fn check_results_held(&self) -> Result<(), Error> {
        // The copy's reads come before the load of the flag.
        fence(Ordering::SeqCst);
        self.results_released.get().map_or(Ok(()), |why| Err(why.clone()))
    }

    /// Marks results in the sidecar's shared memory as invalid: from now on the sidecar may reuse their slots. Not called
    /// when only the epoch ends. The first reason stays.
    pub(crate) fn release_results(&self, why: &Error) {
        let _ = self.results_released.set(why.clone());
        fence(Ordering::SeqCst);
    }

    // === End ===

    /// Closes the session in order. Every waiter gets [`Error::Closed`].
    pub(crate) fn close(&self, reason: &str) {
        if self.fork_guard.is_child() {
            return;
        }
        self.recorder.close();
        // First, because after the Goodbye the sidecar may reuse the results' memory.
        self.release_results(&Error::Closed);
        self.report_gpus();
        // Fails when the stream has ended. Then there is no one to notify.
        let _ = self.send_on_stream(Message::Goodbye(v1::Goodbye { reason: reason.to_owned() }));
        self.end(&Error::Closed);
        self.closing.notify_one();
    }

    /// Ends the session: nothing can be submitted, and every waiter gets `why`. The first reason stays.
    pub(crate) fn end(&self, why: &Error) {
        self.end_and(why, |Resources { input, output, .. }| {
            let slots = slots_in_use(input, output);
            self.retired.lock().unwrap_or_else(PoisonError::into_inner).extend(slots);
        });
    }

    fn end_and(&self, why: &Error, retire: impl FnMut(Resources)) {
        self.pending.end(why, retire);
        self.completions.add();
        if let Some(ring) = &self.ring {
            ring.kick();
        }
    }

    // === Sending ===

    /// Sends a message over the ring if there is one, else on the stream.
    pub(crate) fn send(&self, message: Message, flush: Flush) -> Result<(), Error> {
        let Some(ring) = &self.ring else { return self.send_on_stream(message) };
        if ring.is_over() {
            return Err(self.stream_closed());
        }
        ring.send(&v1::ClientMessage { message: Some(message) }, flush)
    }

    /// Sends a message on the stream, also when there is a ring: heartbeats and the end of the session.
    pub(crate) fn send_on_stream(&self, message: Message) -> Result<(), Error> {
        use mpsc::error::TrySendError;
        self.outgoing.try_send(v1::ClientMessage { message: Some(message) }).map_err(|error| match error {
            TrySendError::Full(_) => queue_full(self.outgoing.max_capacity()),
            TrySendError::Closed(_) => self.stream_closed(),
        })
    }

    /// Sends a message that other ranks depend on: when the queue is full, the session ends.
    pub(crate) fn send_or_end(&self, message: Message) {
        let sent = self.send(message, Flush::Now);
        self.end_if_full(sent);
    }

    fn end_if_full(&self, sent: Result<(), Error>) {
        // When the stream or the ring has ended, the background task reports a better reason.
        if let Err(full @ Error::Limit { .. }) = sent {
            self.end(&full);
            self.closing.notify_one();
        }
    }

    /// The error of a closed queue. The background task reports the actual reason a moment later.
    fn stream_closed(&self) -> Error {
        Error::Failure(sidecar_gone(self.directory.display(), "the session's stream is closed"))
    }
}

/// Messages that wait to be sent: a submission and a release or withdrawal for every request that may be pending, and room
/// for heartbeats and the Goodbye.
pub(crate) const OUTGOING_MAX: usize = 2 * ronde_wire::limits::PENDING_PER_SESSION_MAX + 64;

#[cfg(test)]
pub(crate) mod tests;
