//! A running module: its wasmtime store, memory and functions, and the limits of its calls.

use std::sync::Arc;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use ronde_plugin_abi::{Call, limits, names};
use wasmtime::{
    Caller, Extern, InstancePre, Linker, Memory, ResourceLimiter, Store, StoreContextMut, Trap, TypedFunc,
    UpdateDeadline, WasmResults,
};

use crate::error::{FaultKind, HostError, one_line};
use crate::manifest::{Limits, Manifest, Parameters};
use crate::placement::Placement;
use crate::ticker::{Ticker, ticks};

/// Limit in milliseconds for all calls of one span together. A span has a few MiB at most, and each call has its own
/// limit.
const ATTEMPT_MS: u32 = 1_000;
/// How often a call that gets no processor time may extend its deadline.
const EXTENSIONS_MAX: u32 = 50;

/// The data of a store: limits, log and deadlines.
pub(crate) struct State {
    limits: Limits,
    ticker: Arc<Ticker>,
    /// Whether the memory has its final size.
    placed: bool,
    log: Log,
    /// The thread's processor time when the call's deadline first expired, and the number of extensions since.
    overdue: Option<(Duration, u32)>,
    /// When the current attempt began, in ticks, and the processor time when its limit first expired.
    attempt_began: u64,
    late: Option<Duration>,
}

/// Log messages of one call.
#[derive(Default)]
struct Log {
    messages: Vec<String>,
    dropped: u32,
}

/// A running module that is configured and ready for calls.
pub(crate) struct Guest {
    store: Store<State>,
    memory: Memory,
    pub(crate) placement: Placement,
    functions: Functions,
    deadline_ticks: u64,
    /// The last answer to `ronde_bound`: elements and bytes.
    last_bound: Option<(usize, i32)>,
}

/// The module's exported functions, as far as its kinds have them.
#[derive(Clone)]
struct Functions {
    configure: TypedFunc<(), i32>,
    bound: Option<TypedFunc<i32, i32>>,
    encode: Option<TypedFunc<(), i32>>,
    decode: Option<TypedFunc<(), i32>>,
    reduce: Option<TypedFunc<(), i32>>,
    measure: Option<TypedFunc<(), i32>>,
    conclude: Option<TypedFunc<(), i32>>,
}

/// Stops a call whose deadline has expired.
#[derive(Debug, thiserror::Error)]
#[error("the call's deadline has expired")]
struct DeadlineExceeded;

impl Guest {
    /// Starts a module and passes its parameters.
    pub(crate) fn start(
        module: &InstancePre<State>,
        manifest: &Manifest,
        ticker: &Arc<Ticker>,
        parameters: &Parameters,
    ) -> Result<Self, (FaultKind, Vec<String>)> {
        let deadline_ticks = ticks(manifest.limits.call_ms);
        let mut store = Store::new(module.module().engine(), State::new(manifest.limits, Arc::clone(ticker)));
        store.limiter(|state| state);
        store.epoch_deadline_callback(move |context| on_epoch_deadline(context, deadline_ticks));
        let (memory, placement, functions) = match instantiate(&mut store, module, manifest, deadline_ticks) {
            Ok(placed) => placed,
            Err(kind) => return Err((kind, store.data_mut().log.take())),
        };
        let mut guest = Self { store, memory, placement, functions, deadline_ticks, last_bound: None };
        match guest.configure(parameters) {
            Ok(()) => Ok(guest),
            Err(kind) => Err((kind, guest.take_log())),
        }
    }

    fn configure(&mut self, parameters: &Parameters) -> Result<(), FaultKind> {
        let block = parameters.block();
        let at = self.placement.parameters.start;
        self.memory()[at..at + block.len()].copy_from_slice(&block);
        let configure = self.functions.configure.clone();
        let value = timed(&mut self.store, self.deadline_ticks, names::CONFIGURE, &configure, ())?;
        check_status(names::CONFIGURE, value)
    }

    /// The plugin's memory. Its size is fixed, and it contains all ranges of the placement.
    #[inline]
    pub(crate) fn memory(&mut self) -> &mut [u8] {
        self.memory.data_mut(&mut self.store)
    }

    /// The plugin's bound for `elements` elements; the last answer is cached.
    pub(crate) fn bound(&mut self, elements: usize) -> Result<i32, FaultKind> {
        if let Some((_, bound)) = self.last_bound.filter(|(known, _)| *known == elements) {
            return Ok(bound);
        }
        let Ok(count) = i32::try_from(elements) else {
            return Err(FaultKind::Refused(format!("{elements} elements are more than any span has")));
        };
        let function = self.functions.bound.as_ref().ok_or_else(|| missing(names::BOUND))?;
        let bound = timed(&mut self.store, self.deadline_ticks, names::BOUND, function, count)?;
        self.last_bound = Some((elements, bound));
        Ok(bound)
    }

    /// Encodes the input buffer. Returns the number of bytes in the output buffer, or an error code.
    pub(crate) fn encode(&mut self, call: &Call) -> Result<i32, FaultKind> {
        self.describe(call);
        let function = self.functions.encode.as_ref().ok_or_else(|| missing(names::ENCODE))?;
        timed(&mut self.store, self.deadline_ticks, names::ENCODE, function, ())
    }

    /// Decodes the input buffer.
    pub(crate) fn decode(&mut self, call: &Call) -> Result<(), FaultKind> {
        self.describe(call);
        let function = self.functions.decode.as_ref().ok_or_else(|| missing(names::DECODE))?;
        check_status(names::DECODE, timed(&mut self.store, self.deadline_ticks, names::DECODE, function, ())?)
    }

    /// Reduces the operands that `fill` copies into the input buffer within the given memory.
    #[inline]
    pub(crate) fn reduce(&mut self, call: &Call, fill: impl FnOnce(&mut [u8])) -> Result<(), FaultKind> {
        self.fill_and_describe(call, fill);
        let function = self.functions.reduce.as_ref().ok_or_else(|| missing(names::REDUCE))?;
        check_status(names::REDUCE, timed(&mut self.store, self.deadline_ticks, names::REDUCE, function, ())?)
    }

    /// Measures the values in the input buffer.
    pub(crate) fn measure(&mut self, call: &Call) -> Result<(), FaultKind> {
        self.describe(call);
        let function = self.functions.measure.as_ref().ok_or_else(|| missing(names::MEASURE))?;
        check_status(names::MEASURE, timed(&mut self.store, self.deadline_ticks, names::MEASURE, function, ())?)
    }

    /// Whether the plugin exports `ronde_conclude`.
    pub(crate) fn concludes(&self) -> bool {
        self.functions.conclude.is_some()
    }

    /// Concludes from the block of measures, in place.
    pub(crate) fn conclude(&mut self, call: &Call) -> Result<(), FaultKind> {
        self.describe(call);
        let function = self.functions.conclude.as_ref().ok_or_else(|| missing(names::CONCLUDE))?;
        check_status(names::CONCLUDE, timed(&mut self.store, self.deadline_ticks, names::CONCLUDE, function, ())?)
    }

    /// Starts an attempt: the following calls share one time limit.
    pub(crate) fn begin_attempt(&mut self) {
        let state = self.store.data_mut();
        (state.attempt_began, state.late) = (state.ticker.now(), None);
    }

    /// Whether anything was logged since [`Self::take_log`].
    pub(crate) fn has_logged(&self) -> bool {
        !self.store.data().log.is_empty()
    }

    /// Takes the logged messages, which makes room for more.
    pub(crate) fn take_log(&mut self) -> Vec<String> {
        self.store.data_mut().log.take()
    }

    fn describe(&mut self, call: &Call) {
        self.fill_and_describe(call, |_| {});
    }

    /// Calls `fill`, then writes the call structure; looking up the memory only once.
    #[inline]
    fn fill_and_describe(&mut self, call: &Call, fill: impl FnOnce(&mut [u8])) {
        let at = self.placement.call.start;
        let memory = self.memory();
        fill(memory);
        memory[at..at + Call::BYTES].copy_from_slice(&call.to_bytes());
    }
}

/// Instantiates a module and reads the table of its buffers.
fn instantiate(
    store: &mut Store<State>,
    module: &InstancePre<State>,
    manifest: &Manifest,
    deadline_ticks: u64,
) -> Result<(Memory, Placement, Functions), FaultKind> {
    store.set_epoch_deadline(deadline_ticks);
    store.data().ticker.call();
    let instance = module.instantiate(&mut *store).map_err(|error| start_fault(store, &error))?;
    let function = |store: &mut Store<State>, name| instance.get_typed_func::<(), i32>(store, name).ok();
    let place = function(&mut *store, names::PLACE).ok_or_else(|| missing(names::PLACE))?;
    let abi = function(&mut *store, names::ABI).ok_or_else(|| missing(names::ABI))?;
    let memory = instance.get_memory(&mut *store, names::MEMORY).ok_or_else(|| missing(names::MEMORY))?;
    let functions = Functions {
        configure: function(&mut *store, names::CONFIGURE).ok_or_else(|| missing(names::CONFIGURE))?,
        bound: instance.get_typed_func(&mut *store, names::BOUND).ok(),
        encode: function(&mut *store, names::ENCODE),
        decode: function(&mut *store, names::DECODE),
        reduce: function(&mut *store, names::REDUCE),
        measure: function(&mut *store, names::MEASURE),
        conclude: function(&mut *store, names::CONCLUDE),
    };
    let version = timed(store, deadline_ticks, names::ABI, &abi, ())?;
    if version.cast_unsigned() != ronde_plugin_abi::VERSION {
        let expected = ronde_plugin_abi::VERSION;
        let problem = format!("it has ABI version {version}, but this host has version {expected}");
        return Err(FaultKind::Start(problem + "; build the plugin with the matching SDK"));
    }
    let address = timed(store, deadline_ticks, names::PLACE, &place, ())?;
    let placement = Placement::read(memory.data(&*store), address, manifest);
    let placement =
        placement.map_err(|problem| FaultKind::Start(format!("its table of buffers is invalid: {problem}")))?;
    Ok((memory, placement, functions))
}

/// Calls a function with a deadline.
fn timed<P: wasmtime::WasmParams, R: WasmResults>(
    store: &mut Store<State>,
    deadline_ticks: u64,
    name: &'static str,
    function: &TypedFunc<P, R>,
    params: P,
) -> Result<R, FaultKind> {
    let state = store.data_mut();
    state.overdue = None;
    state.ticker.call();
    state.check_time(name)?;
    store.set_epoch_deadline(deadline_ticks);
    function.call(&mut *store, params).map_err(|error| fault(store, name, &error))
}

/// Converts the status that a function returned.
fn check_status(function: &'static str, value: i32) -> Result<(), FaultKind> {
    match value {
        0 => Ok(()),
        code if code < 0 => Err(FaultKind::Code { function, code }),
        value => Err(FaultKind::Result { function, value }),
    }
}

fn missing(name: &str) -> FaultKind {
    FaultKind::Start(format!("it does not export {name}, although the inspection of its module found it"))
}

/// Converts an error of wasmtime.
fn fault(store: &Store<State>, function: &'static str, error: &wasmtime::Error) -> FaultKind {
    if error.is::<DeadlineExceeded>() {
        return FaultKind::Deadline { function, milliseconds: store.data().limits.call_ms };
    }
    let reason = match error.downcast_ref::<Trap>() {
        Some(trap) => trap.to_string(),
        None => format!("{error:#}"),
    };
    FaultKind::Trap { function, reason: one_line(&reason) }
}

/// Converts an error of instantiation. A trap or timeout of the start function is the plugin's fault; anything else is
/// a lack of resources, because the module was found to respect all limits.
fn start_fault(store: &Store<State>, error: &wasmtime::Error) -> FaultKind {
    if error.is::<DeadlineExceeded>() || error.is::<Trap>() {
        return fault(store, "its start function", error);
    }
    FaultKind::Host(one_line(&format!("{error:#}")))
}

/// Called when a call's deadline expires. On a busy machine wall time says little about the work of a call, so from the
/// first expiry on the thread's processor time counts: an endless loop ends after twice its time.
fn on_epoch_deadline(mut context: StoreContextMut<'_, State>, deadline_ticks: u64) -> wasmtime::Result<UpdateDeadline> {
    let state = context.data_mut();
    // Keeps the ticker running even if no other call begins.
    state.ticker.call();
    let now = Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?);
    match &mut state.overdue {
        None => state.overdue = Some((now, 0)),
        Some((since, extensions)) => {
            let used = now.saturating_sub(*since);
            if used >= Duration::from_millis(state.limits.call_ms.into()) || *extensions >= EXTENSIONS_MAX {
                return Err(DeadlineExceeded.into());
            }
            *extensions += 1;
        }
    }
    Ok(UpdateDeadline::Continue(deadline_ticks))
}

/// Provides the only import.
pub(crate) fn link(linker: &mut Linker<State>) -> Result<(), HostError> {
    let linked = linker.func_wrap(names::IMPORTS, names::LOG, |mut caller: Caller<'_, State>, at: i32, bytes: i32| {
        let Some(Extern::Memory(memory)) = caller.get_export(names::MEMORY) else { return };
        let (memory, state) = memory.data_and_store_mut(&mut caller);
        let (start, length) = (at.cast_unsigned() as usize, bytes.cast_unsigned() as usize);
        state.log.record(start.checked_add(length).and_then(|end| memory.get(start..end)));
    });
    linked.map(drop).map_err(|error| HostError::Engine(format!("{error:#}")))
}

impl Log {
    fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.dropped == 0
    }

    /// Records a message. A message that is outside of memory, too long, or one too many is dropped and counted.
    fn record(&mut self, bytes: Option<&[u8]>) {
        let short = bytes.filter(|bytes| bytes.len() <= limits::LOG_BYTES_MAX);
        match short {
            Some(bytes) if self.messages.len() < limits::LOG_MESSAGES_MAX as usize => {
                self.messages.push(one_line(&String::from_utf8_lossy(bytes)));
            }
            _ => self.dropped = self.dropped.saturating_add(1),
        }
    }

    fn take(&mut self) -> Vec<String> {
        let Self { mut messages, dropped } = std::mem::take(self);
        if dropped > 0 {
            messages.push(format!("({dropped} messages were dropped)"));
        }
        messages
    }
}

impl State {
    fn new(limits: Limits, ticker: Arc<Ticker>) -> Self {
        let attempt_began = ticker.now();
        Self { limits, ticker, placed: false, log: Log::default(), overdue: None, attempt_began, late: None }
    }

    /// Returns an error if all calls of an attempt together have taken too long, by the same rule as
    /// [`on_epoch_deadline`].
    fn check_time(&mut self, function: &'static str) -> Result<(), FaultKind> {
        if self.ticker.now().wrapping_sub(self.attempt_began) < ticks(ATTEMPT_MS) {
            return Ok(());
        }
        let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::MAX, Duration::from);
        let since = *self.late.get_or_insert(now);
        if now.saturating_sub(since) < Duration::from_millis(ATTEMPT_MS.into()) {
            return Ok(());
        }
        Err(FaultKind::Deadline { function, milliseconds: ATTEMPT_MS })
    }
}

/// The memory gets its size when the module starts, and keeps it.
impl ResourceLimiter for State {
    fn memory_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let first = !std::mem::replace(&mut self.placed, true);
        Ok(first && desired <= self.limits.memory_bytes)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= limits::TABLE_ELEMENTS_MAX)
    }

    fn instances(&self) -> usize {
        1
    }

    fn tables(&self) -> usize {
        limits::TABLES_MAX
    }

    fn memories(&self) -> usize {
        1
    }
}
