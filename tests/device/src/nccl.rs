//! The functions of NCCL that ronde calls, for the threads of one process.

#![expect(unsafe_code, reason = "functions of the C ABI, whose results go to addresses of the caller")]

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use crate::control::{COUNTERS, Code, change, injected, number};
use crate::stream::{self, Work};
use crate::{lock, memory};

const SUCCESS: Code = 0;
const INVALID_ARGUMENT: Code = 4;
const REMOTE_ERROR: Code = 6;
const IN_PROGRESS: Code = 7;
const FLOAT32: c_int = 7;
/// How long after the call a collective comes onto its stream.
const ENQUEUE_DELAY: Duration = Duration::from_millis(5);
const SUM: c_int = 0;

/// The 128 bytes by which ranks find each other.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// What the ranks of a communicator share.
#[derive(Default)]
struct Clique {
    state: Mutex<CliqueState>,
    changed: Condvar,
}

#[derive(Default)]
struct CliqueState {
    joined: c_int,
    is_aborted: bool,
    /// Collectives that were accepted and are not on a stream yet.
    unqueued: usize,
    /// For each all-reduce: the contributions so far.
    rounds: HashMap<u64, Vec<Vec<f32>>>,
}

struct Communicator {
    clique: Arc<Clique>,
    ranks: c_int,
    rounds: u64,
}

static CLIQUES: LazyLock<Mutex<HashMap<u64, Arc<Clique>>>> = LazyLock::new(Mutex::default);
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
    fn abort(&self) {
        lock(&self.state).is_aborted = true;
        self.changed.notify_all();
    }

    /// Adds a contribution, waits for the others', and returns their sum; `None` once the communicator is aborted.
    fn sum(&self, round: u64, ranks: c_int, mine: Vec<f32>) -> Option<Vec<f32>> {
        let ranks = usize::try_from(ranks).ok()?;
        let mut state = lock(&self.state);
        state.rounds.entry(round).or_default().push(mine);
        self.changed.notify_all();
        let is_open = |state: &mut CliqueState| !state.is_aborted && state.rounds[&round].len() < ranks;
        let state = self.changed.wait_while(state, is_open).unwrap_or_else(PoisonError::into_inner);
        if state.rounds[&round].len() < ranks {
            return None;
        }
        let mut all = state.rounds[&round].iter().cloned();
        let first = all.next()?;
        Some(all.fold(first, |sum, each| sum.iter().zip(each).map(|(one, other)| one + other).collect()))
    }
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
    let number = NEXT.fetch_add(1, Ordering::SeqCst) as u64;
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    match injected("ncclGetUniqueId") {
        SUCCESS => give(id, UniqueId(bytes)),
        code => code,
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
    let number = u64::from_le_bytes(id.0[..8].try_into().unwrap_or_default());
    let clique = Arc::clone(lock(&CLIQUES).entry(number).or_default());
    lock(&clique.state).joined += 1;
    let handle = NEXT.fetch_add(1, Ordering::SeqCst);
    lock(&COMMUNICATORS).insert(handle, Communicator { clique, ranks, rounds: 0 });
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
        SUCCESS if state.joined < communicator.ranks || state.unqueued > 0 => IN_PROGRESS,
        code => code,
    };
    give(code, found)
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    source: u64,
    target: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    handle: usize,
    stream: usize,
) -> Code {
    if dtype != FLOAT32 || op != SUM {
        return INVALID_ARGUMENT;
    }
    match injected("ncclAllReduce") {
        SUCCESS => {}
        code => return code,
    }
    let (clique, ranks, round) = {
        let mut communicators = lock(&COMMUNICATORS);
        let Some(communicator) = communicators.get_mut(&handle) else { return INVALID_ARGUMENT };
        communicator.rounds += 1;
        (Arc::clone(&communicator.clique), communicator.ranks, communicator.rounds)
    };
    if !stream::exists(stream) {
        return INVALID_ARGUMENT;
    }
    lock(&clique.state).unqueued += 1;
    // Not blocking: the kernel comes onto the stream later, and `ncclCommGetAsyncError` says when.
    drop(std::thread::spawn(move || {
        std::thread::sleep(ENQUEUE_DELAY);
        let reducing = Arc::clone(&clique);
        let call = Box::new(move || reduce(&reducing, (round, ranks), source, target, count));
        let _ = stream::enqueue(stream, Work::Call(call));
        lock(&clique.state).unqueued -= 1;
    }));
    IN_PROGRESS
}

/// The work of an all-reduce on its stream. Ends, as the kernel does, when the communicator is aborted.
fn reduce(clique: &Clique, (round, ranks): (u64, c_int), source: u64, target: u64, count: usize) -> Code {
    let floats = |bytes: &mut [u8]| {
        let elements = bytes.chunks_exact(4).map(|each| f32::from_le_bytes(each.try_into().unwrap_or_default()));
        elements.collect::<Vec<_>>()
    };
    let Some(mine) = memory::with(source, count * 4, floats) else { return memory::INVALID_VALUE };
    let Some(sum) = clique.sum(round, ranks, mine) else { return 0 };
    let write = |bytes: &mut [u8]| {
        for (place, value) in bytes.chunks_exact_mut(4).zip(&sum) {
            place.copy_from_slice(&value.to_le_bytes());
        }
    };
    memory::with(target, count * 4, write).map_or(memory::INVALID_VALUE, |()| 0)
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
