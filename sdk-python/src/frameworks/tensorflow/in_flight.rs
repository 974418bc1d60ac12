//! Operations in flight. One thread for each session waits for them, writes their outputs, and ends their kernels.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ronde::blocking::{Client, Handle, Progress};
use ronde::{Collective, Completions, Detail, Error, Label, Operation, SetId, TensorRef};

use super::abi::{Code, Failed, Tensor};
use super::done::Call;
use super::kernel::{Kind, Spec};
use super::self_test::write_number;
use super::session::{Attached, attached};
use super::types::{INT32, dtype_of};
use crate::frameworks::status::{code_of, text_of};

/// How often the thread checks deadlines.
const SLICE: Duration = Duration::from_millis(500);

/// The operations in flight of a session.
pub(super) struct InFlight {
    /// The session's. Weak: the session ends when Python closes it.
    client: Weak<Client>,
    completions: Completions,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Submitted since the last poll.
    new: Vec<Submitted>,
    /// Names in flight: ranks match one operation at a time by a name.
    names: HashMap<Key, Turn>,
    is_closed: bool,
    /// Whether the thread has ended, so that nothing would complete an operation.
    has_ended: bool,
}

/// What identifies a named operation on all ranks.
type Key = (Kind, SetId, String);

/// The operation of a name that is in flight, and its repetitions that wait for their turn.
struct Turn {
    spec: Arc<Spec>,
    waiting: VecDeque<Task>,
}

/// An operation that is to be submitted.
struct Task {
    spec: Arc<Spec>,
    name: Option<String>,
    call: Call,
}

/// A submitted operation.
struct Submitted {
    spec: Arc<Spec>,
    key: Option<Key>,
    call: Call,
    handles: Vec<Handle>,
    /// TensorFlow's number of the type of each output that is a tensor.
    dtypes: Vec<c_int>,
}

/// Starts the operation of a running kernel.
pub(super) fn start(spec: &Arc<Spec>, call: Call) {
    match attached() {
        Ok(attached) => match number(spec, &attached) {
            Some(value) => {
                let outcome = value.and_then(|value| write_number(&call, value));
                call.end(outcome);
            }
            None => attached.in_flight.submit_in_turn(spec, call),
        },
        Err(_) if spec.kind == Kind::Included => {
            let outcome = write_number(&call, NOT_INITIALIZED);
            call.end(outcome);
        }
        Err(failed) => call.end(Err(failed)),
    }
}

/// Horovod's answer to whether a process is in a set, without a session.
const NOT_INITIALIZED: i32 = -1;
/// Horovod's answer for a set that does not exist.
const UNKNOWN_SET: i32 = -3;

/// The answer to a query; `None` for a collective.
fn number(spec: &Spec, attached: &Attached) -> Option<Result<i32, Failed>> {
    let facts = &attached.facts;
    let of_set = || match facts.sets.get(&spec.set) {
        _ if spec.set == SetId::WORLD => Ok((facts.size, true)),
        Some(known) => Ok(*known),
        None => Err(Failed::new(
            Code::InvalidArgument,
            format!("process set {} does not exist, or has not been registered", spec.set.0),
        )),
    };
    Some(match spec.kind {
        Kind::Rank => Ok(facts.rank),
        Kind::Size => of_set().map(|(size, _)| size),
        Kind::LocalRank => Ok(facts.local_rank),
        Kind::LocalSize => Ok(facts.local_size),
        Kind::Included => Ok(of_set().map_or(UNKNOWN_SET, |(_, is_included)| i32::from(is_included))),
        _ => return None,
    })
}

impl InFlight {
    /// Starts the thread of a session, which ends after [`InFlight::close`] with the last operation.
    pub(super) fn begin(client: &Arc<Client>) -> Result<Arc<Self>, Error> {
        let completions = client.completions()?;
        let begun = Arc::new(Self { client: Arc::downgrade(client), completions, state: Mutex::default() });
        let mine = Arc::clone(&begun);
        let started = std::thread::Builder::new().name("ronde-tensorflow".to_owned()).spawn(move || mine.run());
        started.map_err(|error| Error::Thread { reason: error.to_string() })?;
        Ok(begun)
    }

    /// Ends the thread once nothing is in flight.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.completions.wake();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Submits an operation, or lets it wait for an earlier one of the same node. One of another node that has its name is
    /// refused: which of them is first differs between ranks, so that they would be mixed.
    fn submit_in_turn(&self, spec: &Arc<Spec>, call: Call) {
        // Iterations of a loop run in another order on each rank.
        let name = spec.name.as_ref().map(|name| match call.iteration() {
            Some((frame, iteration)) => format!("{name}#{frame:x}.{iteration}"),
            None => name.clone(),
        });
        let task = Task { spec: Arc::clone(spec), name, call };
        if let Some(key) = task.key() {
            let mut state = self.lock();
            if let Some(turn) = state.names.get_mut(&key) {
                if Arc::ptr_eq(&turn.spec, spec) {
                    turn.waiting.push_back(task);
                    return;
                }
                drop(state);
                return task.call.end(Err(name_in_use(&key.2)));
            }
            state.names.insert(key, Turn { spec: Arc::clone(spec), waiting: VecDeque::new() });
        }
        self.submit(task);
    }

    /// Submits an operation whose turn it is. When that fails, the next one of its name follows.
    fn submit(&self, task: Task) {
        // Never to a later session: its other ranks do not know of this operation.
        let client = self.client.upgrade().ok_or_else(ended);
        let mut next = Some(task);
        while let Some(task) = next.take() {
            let key = task.key();
            let submitted = client.as_ref().map_err(Failed::clone).and_then(|client| task.submit(client));
            match submitted {
                Ok((handles, dtypes)) => {
                    let Task { spec, call, .. } = task;
                    let submitted = Submitted { spec, key, call, handles, dtypes };
                    next = self.push(submitted).and_then(|refused| self.end_refused(refused));
                }
                Err(failed) => {
                    next = self.next_of(key.as_ref());
                    task.call.end(Err(failed));
                }
            }
        }
    }

    /// Hands an operation to the thread. Returns it if the thread has ended.
    fn push(&self, submitted: Submitted) -> Option<Submitted> {
        let mut state = self.lock();
        if state.has_ended {
            return Some(submitted);
        }
        state.new.push(submitted);
        drop(state);
        self.completions.wake();
        None
    }

    /// Ends an operation that no thread would complete, and returns the next one of its name.
    fn end_refused(&self, refused: Submitted) -> Option<Task> {
        let Submitted { key, call, .. } = refused;
        let next = self.next_of(key.as_ref());
        call.end(Err(ended()));
        next
    }

    /// The next operation of a name, which is free if there is none. Called before TensorFlow receives the end of the earlier
    /// one, as it may start another node with this name from there.
    fn next_of(&self, key: Option<&Key>) -> Option<Task> {
        let key = key?;
        let mut state = self.lock();
        let next = state.names.get_mut(key).and_then(|turn| turn.waiting.pop_front());
        if next.is_none() {
            state.names.remove(key);
        }
        next
    }

    fn run(&self) {
        let _ending = Ending(self);
        let mut in_flight: Vec<Submitted> = Vec::new();
        let (mut seen, mut checked) = (0, Instant::now());
        loop {
            seen = self.completions.wait(seen, SLICE);
            let is_closed = {
                let mut state = self.lock();
                in_flight.append(&mut state.new);
                state.is_closed
            };
            let (ready, rest) = in_flight.into_iter().partition(Submitted::is_ready);
            in_flight = rest;
            for submitted in ready {
                self.finish(submitted);
            }
            if checked.elapsed() >= SLICE {
                checked = Instant::now();
                in_flight = self.finish_overdue(in_flight);
            }
            if is_closed && in_flight.is_empty() && self.end_if_idle() {
                return;
            }
        }
    }

    /// Whether nothing was submitted since the last poll. Then the thread ends, and nothing more is submitted.
    fn end_if_idle(&self) -> bool {
        let mut state = self.lock();
        state.has_ended = state.new.is_empty();
        state.has_ended
    }

    /// Ends a complete operation, and submits the next one of its name.
    fn finish(&self, submitted: Submitted) {
        let next = self.next_of(submitted.key.as_ref());
        submitted.end();
        if let Some(next) = next {
            self.submit(next);
        }
    }

    /// Ends the operations whose deadline has passed, and returns the others.
    fn finish_overdue(&self, in_flight: Vec<Submitted>) -> Vec<Submitted> {
        let mut rest = Vec::with_capacity(in_flight.len());
        for mut submitted in in_flight {
            if submitted.is_overdue() {
                self.finish(submitted);
            } else {
                rest.push(submitted);
            }
        }
        rest
    }
}

/// The end of the thread, by a panic too: what it leaves ends with an error, so that no graph waits for ever.
struct Ending<'a>(&'a InFlight);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let (new, names) = {
            let mut state = self.0.lock();
            state.has_ended = true;
            (std::mem::take(&mut state.new), std::mem::take(&mut state.names))
        };
        let waiting = names.into_values().flat_map(|turn| turn.waiting).map(|task| task.call);
        for call in new.into_iter().map(|submitted| submitted.call).chain(waiting) {
            call.end(Err(ended()));
        }
    }
}

/// Horovod's text for two tensors of one name, and what to do in a graph.
fn name_in_use(name: &str) -> Failed {
    Failed::new(
        Code::InvalidArgument,
        format!(
            "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is \
             currently being processed: {name} is in flight for another operation of this graph, and which of them is \
             first differs between ranks. Give them different names, or let one depend on the other \
             (tf.control_dependencies); if a tf.function is called twice within another one, call its Python function"
        ),
    )
}

fn ended() -> Failed {
    Failed::new(
        Code::Aborted,
        "the session of this operation has ended; call hvd.shutdown() and hvd.init() for another",
    )
}

impl Task {
    fn key(&self) -> Option<Key> {
        self.name.as_ref().map(|name| (self.spec.kind, self.spec.set, name.clone()))
    }

    /// Submits the operation. The inputs are copied into shared memory from where the graph has them.
    fn submit(&self, client: &Client) -> Result<(Vec<Handle>, Vec<c_int>), Failed> {
        let inputs = self.call.inputs().map_err(|reason| Failed::new(Code::Internal, reason))?;
        let mut shapes: Vec<Vec<u64>> = inputs.iter().map(Tensor::shape).collect();
        let label = Label { name: self.name.as_deref(), set: self.spec.set };
        let collective = self.collective(&inputs)?;
        if let (Collective::AllToAll { splits }, Some([rows, ..])) =
            (&collective, shapes.first_mut().map(Vec::as_mut_slice))
        {
            // Rows after those of the splits stay here.
            let sent: u64 = splits.iter().sum();
            *rows = if splits.is_empty() { *rows } else { sent.min(*rows) };
        }
        let tensors = if self.spec.kind == Kind::AllToAll { inputs.get(..1).unwrap_or_default() } else { &inputs };
        let operations =
            tensors.iter().zip(&shapes).map(|(tensor, shape)| self.operation(label, &collective, (tensor, shape)));
        let operations = operations.collect::<Result<Vec<_>, _>>()?;
        let handles = match self.spec.kind {
            Kind::GroupedAllReduce | Kind::GroupedAllGather | Kind::GroupedReduceScatter => {
                client.submit_group_from(label, &operations)
            }
            Kind::AllReduceMany | Kind::BroadcastMany => self.submit_many(client, operations),
            Kind::Barrier | Kind::Join => {
                client.submit_from(&Operation::new(label, collective, None).notify()).map(|handle| vec![handle])
            }
            _ => operations.iter().map(|operation| client.submit_from(operation)).collect(),
        };
        Ok((handles.map_err(|error| failed(&error))?, tensors.iter().map(Tensor::dtype).collect()))
    }

    /// Submits operations that are independent of each other, each with a name of its own.
    fn submit_many(&self, client: &Client, operations: Vec<Operation<'_>>) -> Result<Vec<Handle>, Error> {
        let names: Vec<_> =
            (0..operations.len()).map(|index| self.name.as_ref().map(|name| format!("{name}.{index}"))).collect();
        let named = operations.into_iter().zip(&names);
        let labelled = named.map(|(operation, name)| {
            let label = Label { name: name.as_deref(), set: self.spec.set };
            client.submit_from(&Operation { label, ..operation })
        });
        labelled.collect()
    }

    fn operation<'a>(
        &self,
        label: Label<'a>,
        collective: &Collective,
        (tensor, shape): (&'a Tensor, &'a [u64]),
    ) -> Result<Operation<'a>, Failed> {
        let number = tensor.dtype();
        let dtype = dtype_of(number).ok_or_else(|| {
            Failed::new(Code::InvalidArgument, format!("type {number} of TensorFlow is not supported"))
        })?;
        let wanted = shape.iter().product::<u64>().saturating_mul(dtype.size_bytes() as u64);
        let bytes = tensor.bytes();
        let bytes = usize::try_from(wanted).ok().and_then(|wanted| bytes.get(..wanted)).unwrap_or(bytes);
        let tensor = Some(TensorRef { dtype, shape, bytes });
        let Spec { prescale, postscale, .. } = *self.spec;
        Ok(Operation { prescale, postscale, ..Operation::new(label, collective.clone(), tensor).notify() })
    }

    fn collective(&self, inputs: &[Tensor]) -> Result<Collective, Failed> {
        let Spec { kind, op, root, .. } = *self.spec;
        Ok(match kind {
            Kind::AllReduce | Kind::AllReduceMany | Kind::GroupedAllReduce => Collective::AllReduce { op },
            Kind::AllGather | Kind::GroupedAllGather => Collective::AllGather,
            Kind::Broadcast | Kind::BroadcastMany => Collective::Broadcast { root: ronde::Rank(root) },
            Kind::ReduceScatter | Kind::GroupedReduceScatter => Collective::ReduceScatter { op },
            Kind::AllToAll => Collective::AllToAll { splits: splits(inputs.get(1))? },
            Kind::Join => Collective::Join,
            _ => Collective::Barrier,
        })
    }
}

/// The splits of an all-to-all, of int32 in one dimension; none for equal ones.
fn splits(given: Option<&Tensor>) -> Result<Vec<u64>, Failed> {
    let invalid = |what: String| Failed::new(Code::InvalidArgument, format!("alltoall: splits {what}"));
    let given = given.ok_or_else(|| invalid("are missing".to_owned()))?;
    if given.shape().len() != 1 {
        return Err(invalid(format!("have shape {:?}; give one dimension", given.shape())));
    }
    let numbers = given.bytes().chunks_exact(size_of::<i32>()).map(|bytes| {
        let number = i32::from_ne_bytes(bytes.try_into().unwrap_or_default());
        u64::try_from(number).map_err(|_| invalid(format!("contain {number}; give numbers of rows from 0")))
    });
    numbers.collect()
}

impl Submitted {
    fn is_ready(&self) -> bool {
        self.handles.iter().all(Handle::poll)
    }

    /// Whether waiting has failed: the deadline of this rank has passed, or this is a forked child.
    fn is_overdue(&mut self) -> bool {
        self.handles.iter_mut().all(|handle| !matches!(handle.wait_timeout(Duration::ZERO), Ok(Progress::NotReady)))
    }

    /// Writes the outputs and ends the kernel.
    fn end(self) {
        let Self { spec, call, mut handles, dtypes, .. } = self;
        let written = handles.iter_mut().try_for_each(|handle| handle.wait_timeout(Duration::ZERO).map(drop));
        let outcome = written.map_err(|error| failed(&error)).and_then(|()| match spec.kind {
            Kind::Barrier => is_over(&handles),
            Kind::Join => last_joined(&handles).and_then(|rank| write_number(&call, rank)),
            // Reading a result drops the splits.
            Kind::AllToAll => write_splits(&call, &handles).and_then(|()| write_tensors(&call, &mut handles, &dtypes)),
            _ => write_tensors(&call, &mut handles, &dtypes),
        });
        call.end(outcome);
    }
}

/// Whether operations without a result have succeeded.
fn is_over(handles: &[Handle]) -> Result<(), Failed> {
    handles.iter().try_for_each(|handle| handle.detail().map(drop).map_err(|error| failed(&error)))
}

fn write_tensors(call: &Call, handles: &mut [Handle], dtypes: &[c_int]) -> Result<(), Failed> {
    // Before anything is written: one failure is that of the operation.
    let shapes = handles.iter().map(|handle| handle.shape().map(|shape| shape.dimensions().to_vec()));
    let shapes = shapes.collect::<Result<Vec<_>, _>>().map_err(|error| failed(&error))?;
    for (index, ((handle, shape), &dtype)) in handles.iter_mut().zip(&shapes).zip(dtypes).enumerate() {
        let size = dtype_of(dtype).map_or(0, ronde::DType::size_bytes);
        let bytes = shape.iter().product::<u64>().saturating_mul(size as u64);
        let bytes = usize::try_from(bytes).map_err(|error| Failed::new(Code::Internal, error.to_string()))?;
        let index = c_int::try_from(index).map_err(|error| Failed::new(Code::Internal, error.to_string()))?;
        let output = call.output((index, dtype), shape, bytes);
        let mut output = output.map_err(|reason| Failed::new(Code::ResourceExhausted, reason))?;
        handle.read_into(output.bytes_mut()).map_err(|error| failed(&error))?;
    }
    Ok(())
}

/// Writes how many rows came from each rank.
fn write_splits(call: &Call, handles: &[Handle]) -> Result<(), Failed> {
    let [handle] = handles else { return Err(Failed::new(Code::Internal, "alltoall: no handle")) };
    let Detail::Splits(splits) = handle.detail().map_err(|error| failed(&error))? else {
        return Err(Failed::new(Code::Internal, "the answer to an all-to-all lacks splits"));
    };
    let internal = |reason: String| Failed::new(Code::Internal, reason);
    let mut output =
        call.output((1, INT32), &[splits.len() as u64], splits.len() * size_of::<i32>()).map_err(internal)?;
    for (place, &split) in output.bytes_mut().chunks_exact_mut(size_of::<i32>()).zip(splits) {
        let split = i32::try_from(split).map_err(|error| internal(error.to_string()))?;
        place.copy_from_slice(&split.to_ne_bytes());
    }
    Ok(())
}

fn last_joined(handles: &[Handle]) -> Result<i32, Failed> {
    let [handle] = handles else { return Err(Failed::new(Code::Internal, "join: no handle")) };
    match handle.detail().map_err(|error| failed(&error))? {
        Detail::LastJoined(rank) => {
            i32::try_from(rank.0).map_err(|error| Failed::new(Code::Internal, error.to_string()))
        }
        other => Err(Failed::new(Code::Internal, format!("the answer to a join lacks the last rank: {other:?}"))),
    }
}

/// The failure of a kernel: the text is that of the client, so it is the same on all ranks.
fn failed(error: &Error) -> Failed {
    Failed::new(code_of(error), text_of(error))
}
