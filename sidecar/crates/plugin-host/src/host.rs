//! The host: one wasmtime engine, one ticker and one policy for all plugins of a process.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use wasmtime::{Config, Engine, Linker};

use crate::compiler;
use crate::error::{HostError, LoadError};
use crate::guest::{State, link};
use crate::manifest::{Limits, Parameters};
use crate::module::{FEATURES, inspect};
use crate::plugin::Plugin;
use crate::ticker::Ticker;
use crate::trust::{Policy, Signature};

/// Default for the number of faults after which a plugin is disabled.
pub const DISABLE_AFTER: u32 = 3;

/// Bytes of the calling thread's stack that a plugin may use.
const STACK_BYTES: usize = 256 << 10;

/// The configuration of a host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// The folder for compiled modules. It is created if necessary; others must neither be able to write to it nor to
    /// replace it. Without a folder, every load compiles.
    pub cache_dir: Option<PathBuf>,
    /// The limits that the host grants.
    pub limits: Limits,
    /// Which plugins may be loaded.
    pub policy: Policy,
    /// Number of traps, timeouts and invalid results that disable a plugin; 0 disables none.
    pub disable_after: u32,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self { cache_dir: None, limits: Limits::MAX, policy: Policy::Unsigned, disable_after: DISABLE_AFTER }
    }
}

/// Loads plugins. Loaded plugins stay usable after the host is dropped.
pub struct Host {
    linker: Linker<State>,
    ticker: Arc<Ticker>,
    config: HostConfig,
}

impl Host {
    /// Sets up the compiler, its cache, and the ticker.
    ///
    /// # Errors
    /// [`HostError`] if a limit is out of range, the cache is not private, or this machine cannot run WebAssembly.
    pub fn new(config: HostConfig) -> Result<Self, HostError> {
        check_limits(&config.limits)?;
        let mut engine = engine_config();
        compiler::configure(&mut engine, config.cache_dir.as_deref())?;
        let engine = Engine::new(&engine).map_err(|error| HostError::Engine(format!("{error:#}")))?;
        let mut linker = Linker::new(&engine);
        link(&mut linker)?;
        let ticker = Arc::new(Ticker::start(engine).map_err(HostError::Thread)?);
        Ok(Self { linker, ticker, config })
    }

    /// Loads a plugin: applies the policy, inspects the module, compiles it, and starts it once with its defaults.
    /// Compiling takes milliseconds to seconds, so do not call this on a thread that others wait for.
    ///
    /// # Errors
    /// [`LoadError`] with the violated rule.
    pub fn load(&self, bytes: &[u8], signature: Option<&Signature>) -> Result<Arc<Plugin>, LoadError> {
        let signer = self.config.policy.admit(bytes, signature)?;
        let inspection = inspect(bytes)?;
        check_requested(&inspection.manifest.limits, &self.config.limits)?;
        let module = compiler::compile(self.linker.engine(), bytes)?;
        let module = self.linker.instantiate_pre(&module);
        let module = module.map_err(|error| LoadError::Compile(format!("{error:#}")))?;
        let ticker = Arc::clone(&self.ticker);
        let plugin = Arc::new(Plugin::new(inspection, signer, module, ticker, self.config.disable_after));
        let trial = plugin.instance(&Parameters::defaults(plugin.manifest()));
        trial.map_err(|fault| LoadError::Start { kind: fault.kind, log: fault.log })?;
        Ok(plugin)
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &HostConfig {
        &self.config
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("config", &self.config).finish_non_exhaustive()
    }
}

/// An engine configuration with deterministic results and no unneeded features; [`FEATURES`] applies to modules
/// accordingly.
fn engine_config() -> Config {
    let has = |feature| FEATURES.contains(feature);
    let mut config = Config::new();
    config.epoch_interruption(true);
    config.max_wasm_stack(STACK_BYTES);
    config.generate_address_map(false);
    config.wasm_backtrace_max_frames(None);
    config.wasm_simd(has(wasmparser::WasmFeatures::SIMD));
    config.wasm_relaxed_simd(has(wasmparser::WasmFeatures::RELAXED_SIMD));
    config.wasm_bulk_memory(has(wasmparser::WasmFeatures::BULK_MEMORY));
    config.wasm_multi_value(has(wasmparser::WasmFeatures::MULTI_VALUE));
    config.wasm_multi_memory(has(wasmparser::WasmFeatures::MULTI_MEMORY));
    config.wasm_memory64(has(wasmparser::WasmFeatures::MEMORY64));
    config.wasm_tail_call(has(wasmparser::WasmFeatures::TAIL_CALL));
    config.wasm_extended_const(has(wasmparser::WasmFeatures::EXTENDED_CONST));
    config
}

fn check_limits(limits: &Limits) -> Result<(), HostError> {
    let max = Limits::MAX;
    check_range("memory_bytes", limits.memory_bytes as u64, max.memory_bytes as u64)?;
    check_range("call_ms", limits.call_ms.into(), max.call_ms.into())?;
    check_range("ranks", limits.ranks as u64, max.ranks as u64)
}

fn check_range(what: &'static str, given: u64, max: u64) -> Result<(), HostError> {
    if (1..=max).contains(&given) { Ok(()) } else { Err(HostError::Limit { what, given, max }) }
}

fn check_requested(wants: &Limits, granted: &Limits) -> Result<(), LoadError> {
    let within = |what, wanted, granted| {
        if wanted <= granted { Ok(()) } else { Err(LoadError::Wants { what, wanted, granted }) }
    };
    within("bytes of memory", wants.memory_bytes as u64, granted.memory_bytes as u64)?;
    within("ms for a call", wants.call_ms.into(), granted.call_ms.into())?;
    within("ranks at once", wants.ranks as u64, granted.ranks as u64)
}
