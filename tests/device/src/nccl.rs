//! The functions of NCCL that ronde calls, for the threads and the processes of one host.

#![expect(unsafe_code, reason = "functions of the C ABI, whose results go to addresses of the caller")]

mod elements;
mod hub;

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::control::{COUNTERS, Code, change, injected, number};
use crate::stream::{self, Work};
use crate::{lock, memory};

const SUCCESS: Code = 0;
const SYSTEM_ERROR: Code = 2;
const INVALID_ARGUMENT: Code = 4;
const REMOTE_ERROR: Code = 6;
const IN_PROGRESS: Code = 7;
/// How long after the call a collective comes onto its stream.
const ENQUEUE_DELAY: Duration = Duration::from_millis(5);
/// The first number of an operation that a communicator makes.
const OWN_OPERATIONS: c_int = 16;
const SUM: c_int = 0;

/// The 128 bytes by which ranks find each other: the name of a socket, and zeros.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

impl UniqueId {
    fn name(&self) -> &[u8] {
        let length = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        &self.0[..length]
    }
}

/// What a rank knows of its communicator.
struct Clique {
    state: Mutex<CliqueState>,
    changed: Condvar,
    hub: Mutex<UnixStream>,
}

#[derive(Default)]
struct CliqueState {
    is_joined: bool,
    is_aborted: bool,
    /// Collectives that were accepted and are not on a stream yet.
    unqueued: usize,
    /// The number of the collective that came onto a stream last: they come in the order of the calls.
    queued: u64,
    /// By round: all ranks' contributions.
    answers: HashMap<u64, Vec<Vec<u8>>>,
}

struct Communicator {
    clique: Arc<Clique>,
    rank: c_int,
    ranks: c_int,
    rounds: u64,
    /// The scalars of operations that it has made.
    operations: HashMap<c_int, [u8; 8]>,
}

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast(c_int),
}

/// A collective on its way to its stream.
struct Call {
    kind: Kind,
    source: u64,
    target: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    round: u64,
    rank: usize,
    ranks: usize,
    /// Multiplies the contribution.
    scalar: Option<[u8; 8]>,
}

static COMMUNICATORS: LazyLock<Mutex<HashMap<usize, Communicator>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicUsize = AtomicUsize::new(1);
static VERSION: LazyLock<AtomicI32> =
    LazyLock::new(|| AtomicI32::new(c_int::try_from(number("RONDE_DEVICE_NCCL_VERSION", 22_304)).unwrap_or_default()));

/// Sets the version that the library reports.
// SAFETY: no other library of the process exports this name.
#[unsafe(no_mangle)]
extern "C" fn ronde_device_set_nccl_version(version: c_int) {
    VERSION.store(version, Ordering::SeqCst);
}

impl Clique {
    /// Connects to the socket of a communicator as one of its ranks.
    fn connect(id: &UniqueId, rank: c_int, ranks: c_int) -> std::io::Result<Arc<Self>> {
        let stream = hub::connect(id.name())?;
        let unsigned = |number: c_int| u64::try_from(number).unwrap_or_default();
        hub::send(&stream, hub::HELLO, unsigned(rank), &unsigned(ranks).to_le_bytes())?;
        let reader = stream.try_clone()?;
        let clique = Arc::new(Self { state: Mutex::default(), changed: Condvar::new(), hub: Mutex::new(stream) });
        let reading = Arc::clone(&clique);
        drop(std::thread::spawn(move || {
            while let Ok(frame) = hub::receive(&reader) {
                reading.change(|state| match frame.kind {
                    hub::JOINED => state.is_joined = true,
                    hub::ABORT => state.is_aborted = true,
                    hub::ROUND => drop(state.answers.insert(frame.number, hub::parts(&frame.content))),
                    _ => {}
                });
            }
        }));
        Ok(clique)
    }

    fn change(&self, change: impl FnOnce(&mut CliqueState)) {
        change(&mut lock(&self.state));
        self.changed.notify_all();
    }

    /// Waits until all collectives before this one are on their streams.
    fn await_turn(&self, round: u64) {
        let waiting = |state: &mut CliqueState| state.queued + 1 < round;
        drop(self.changed.wait_while(lock(&self.state), waiting).unwrap_or_else(PoisonError::into_inner));
    }

    fn abort(&self) {
        self.change(|state| state.is_aborted = true);
        // A process that serves no more has no ranks to notify.
        let _ = hub::send(&lock(&self.hub), hub::ABORT, 0, &[]);
    }

    /// Contributes, and waits for the contributions of all; `None` once the communicator is aborted.
    fn exchange(&self, call: &Call, contribution: &[u8]) -> Option<Vec<Vec<u8>>> {
        let content = [&call.header()[..], contribution].concat();
        // Without an answer it waits, as a kernel would.
        let _ = hub::send(&lock(&self.hub), hub::ROUND, call.round, &content);
        let waiting = |state: &mut CliqueState| !state.is_aborted && !state.answers.contains_key(&call.round);
        change(&COUNTERS.waiting, true);
        let state = self.changed.wait_while(lock(&self.state), waiting);
        change(&COUNTERS.waiting, false);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.answers.remove(&call.round)
    }
}

impl Call {
    /// What all ranks have to agree on.
    fn header(&self) -> [u8; hub::HEADER_BYTES] {
        let (kind, root) = match self.kind {
            Kind::AllReduce => (0, 0),
            Kind::ReduceScatter => (1, 0),
            Kind::AllGather => (2, 0),
            Kind::Broadcast(root) => (3, root),
        };
        let mut header = [0; hub::HEADER_BYTES];
        for (place, value) in header.chunks_exact_mut(4).zip([kind, root, self.dtype, self.op]) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        header[16..].copy_from_slice(&(self.count as u64).to_le_bytes());
        header
    }

    /// The bytes of the contribution and of the result.
    fn lengths(&self) -> (usize, usize) {
        let bytes = self.count * elements::bytes_of(self.dtype).unwrap_or(1);
        match self.kind {
            Kind::AllReduce | Kind::Broadcast(_) => (bytes, bytes),
            Kind::ReduceScatter => (bytes * self.ranks, bytes),
            Kind::AllGather => (bytes, bytes * self.ranks),
        }
    }

    /// This rank's result of all contributions.
    fn result(&self, mut all: Vec<Vec<u8>>) -> Vec<u8> {
        match self.kind {
            Kind::AllGather => return all.concat(),
            Kind::Broadcast(root) => return all.swap_remove(usize::try_from(root).unwrap_or_default()),
            Kind::AllReduce => {}
            Kind::ReduceScatter => {
                let bytes = self.lengths().1;
                all = all.iter().map(|each| each[self.rank * bytes..][..bytes].to_vec()).collect();
            }
        }
        let mut all = all.into_iter();
        let mut sum = all.next().unwrap_or_default();
        for each in all {
            elements::reduce(self.dtype, self.op, &mut sum, &each);
        }
        sum
    }

    /// The work on its stream. Ends, as the kernel does, when the communicator is aborted.
    fn perform(&self, clique: &Clique) -> Code {
        let (contributed, resulting) = self.lengths();
        let takes_part = !matches!(self.kind, Kind::Broadcast(root) if usize::try_from(root) != Ok(self.rank));
        let read = || memory::with(self.source, contributed, |bytes| bytes.to_vec());
        let Some(mut mine) = (if takes_part { read() } else { Some(Vec::new()) }) else { return memory::INVALID_VALUE };
        let average = if self.op == elements::AVERAGE { elements::inverse(self.dtype, self.ranks) } else { None };
        if let Some(scalar) = self.scalar.or(average) {
            elements::scale(self.dtype, &mut mine, scalar);
        }
        let Some(all) = clique.exchange(self, &mine) else { return SUCCESS };
        let result = self.result(all);
        memory::with(self.target, resulting, |bytes| bytes.copy_from_slice(&result))
            .map_or(memory::INVALID_VALUE, |()| SUCCESS)
    }
}

/// Accepts a collective, which comes onto its stream later, as without blocking.
fn enqueue(function: &str, handle: usize, stream: usize, mut call: Call) -> Code {
    match injected(function) {
        SUCCESS => {}
        code => return code,
    }
    let clique = {
        let mut communicators = lock(&COMMUNICATORS);
        let Some(communicator) = communicators.get_mut(&handle) else { return INVALID_ARGUMENT };
        call.scalar = communicator.operations.get(&call.op).copied();
        if call.scalar.is_some() {
            call.op = SUM;
        }
        let is_known = elements::bytes_of(call.dtype).is_some() && elements::is_operation(call.op);
        if !is_known || !stream::exists(stream) {
            return INVALID_ARGUMENT;
        }
        communicator.rounds += 1;
        call.round = communicator.rounds;
        call.rank = usize::try_from(communicator.rank).unwrap_or_default();
        call.ranks = usize::try_from(communicator.ranks).unwrap_or_default();
        Arc::clone(&communicator.clique)
    };
    lock(&clique.state).unqueued += 1;
    drop(std::thread::spawn(move || {
        std::thread::sleep(ENQUEUE_DELAY);
        let round = call.round;
        clique.await_turn(round);
        let performing = Arc::clone(&clique);
        let _ = stream::enqueue(stream, Work::Call(Box::new(move || call.perform(&performing))));
        clique.change(|state| {
            state.unqueued -= 1;
            state.queued = round;
        });
    }));
    IN_PROGRESS
}

fn give<T>(place: *mut T, value: T) -> Code {
    if place.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: the caller of the C function passes an address for a result of this type.
    unsafe { place.write(value) };
    SUCCESS
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(version: *mut c_int) -> Code {
    match injected("ncclGetVersion") {
        SUCCESS => give(version, VERSION.load(Ordering::SeqCst)),
        code => code,
    }
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> Code {
    match injected("ncclGetUniqueId") {
        SUCCESS => {}
        code => return code,
    }
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::SeqCst));
    let name = format!("ronde-software-device/{process}/{number}");
    let mut bytes = [0; 128];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    match hub::serve(name.as_bytes()) {
        Ok(()) => give(id, UniqueId(bytes)),
        Err(_) => SYSTEM_ERROR,
    }
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    found: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    _config: *mut c_void,
) -> Code {
    match injected("ncclCommInitRankConfig") {
        SUCCESS | IN_PROGRESS => {}
        code => return code,
    }
    if !(0..ranks).contains(&rank) {
        return INVALID_ARGUMENT;
    }
    let Ok(clique) = Clique::connect(&id, rank, ranks) else { return SYSTEM_ERROR };
    let handle = NEXT.fetch_add(1, Ordering::SeqCst);
    let operations = HashMap::new();
    lock(&COMMUNICATORS).insert(handle, Communicator { clique, rank, ranks, rounds: 0, operations });
    change(&COUNTERS.communicators, true);
    // Not blocking: `ncclCommGetAsyncError` shows when all ranks are there.
    match give(found, handle) {
        SUCCESS => IN_PROGRESS,
        code => code,
    }
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(handle: usize, code: *mut Code) -> Code {
    let communicators = lock(&COMMUNICATORS);
    let Some(communicator) = communicators.get(&handle) else { return INVALID_ARGUMENT };
    let state = lock(&communicator.clique.state);
    let found = match injected("async") {
        SUCCESS if state.is_aborted => REMOTE_ERROR,
        SUCCESS if !state.is_joined || state.unqueued > 0 => IN_PROGRESS,
        code => code,
    };
    give(code, found)
}

/// Exports collectives.
macro_rules! collectives {
    ($($name:ident($($argument:ident: $kind:ty),*) => $call:expr, $dtype:ident, $op:expr;)*) => {
        $(
            // SAFETY: the name is that of the library that this one takes the place of.
            #[unsafe(no_mangle)]
            extern "C" fn $name(
                source: u64, target: u64, count: usize, $($argument: $kind,)* handle: usize, stream: usize,
            ) -> Code {
                let (round, rank, ranks, scalar) = (0, 0, 0, None);
                let call = Call { kind: $call, source, target, count, dtype: $dtype, op: $op, round, rank, ranks, scalar };
                enqueue(stringify!($name), handle, stream, call)
            }
        )*
    };
}

collectives! {
    ncclAllReduce(dtype: c_int, op: c_int) => Kind::AllReduce, dtype, op;
    ncclReduceScatter(dtype: c_int, op: c_int) => Kind::ReduceScatter, dtype, op;
    ncclAllGather(dtype: c_int) => Kind::AllGather, dtype, SUM;
    ncclBroadcast(dtype: c_int, root: c_int) => Kind::Broadcast(root), dtype, SUM;
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *const u8,
    dtype: c_int,
    _residence: c_int,
    handle: usize,
) -> Code {
    match injected("ncclRedOpCreatePreMulSum") {
        SUCCESS => {}
        code => return code,
    }
    let mut communicators = lock(&COMMUNICATORS);
    let Some(communicator) = communicators.get_mut(&handle) else { return INVALID_ARGUMENT };
    let Some(bytes) = elements::bytes_of(dtype).filter(|_| !scalar.is_null()) else { return INVALID_ARGUMENT };
    let mut value = [0; 8];
    // SAFETY: the caller of the C function passes the address of a scalar of the type.
    unsafe { std::ptr::copy_nonoverlapping(scalar, value.as_mut_ptr(), bytes) };
    let number = (OWN_OPERATIONS..).find(|number| !communicator.operations.contains_key(number)).unwrap_or_default();
    communicator.operations.insert(number, value);
    give(op, number)
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclRedOpDestroy(op: c_int, handle: usize) -> Code {
    let mut communicators = lock(&COMMUNICATORS);
    let removed = communicators.get_mut(&handle).and_then(|communicator| communicator.operations.remove(&op));
    removed.map_or(INVALID_ARGUMENT, |_| SUCCESS)
}

fn end(handle: usize, is_abort: bool) -> Code {
    let Some(communicator) = lock(&COMMUNICATORS).remove(&handle) else { return INVALID_ARGUMENT };
    change(&COUNTERS.communicators, false);
    if is_abort {
        communicator.clique.abort();
    }
    SUCCESS
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(handle: usize) -> Code {
    match injected("ncclCommAbort") {
        SUCCESS => end(handle, true),
        code => code,
    }
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(handle: usize) -> Code {
    if lock(&COMMUNICATORS).contains_key(&handle) { injected("ncclCommFinalize") } else { INVALID_ARGUMENT }
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(handle: usize) -> Code {
    match injected("ncclCommDestroy") {
        SUCCESS => end(handle, false),
        code => code,
    }
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        _ => c"error of the test",
    };
    text.as_ptr()
}
