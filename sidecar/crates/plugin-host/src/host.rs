//! The host: one wasmtime engine, one ticker and one policy for all plugins of a process.

use std::fmt;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use wasmtime::{Cache, CacheConfig, Config, Engine, Linker, Module};

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
        if let Some(path) = &config.cache_dir {
            engine.cache(Some(cache(path)?));
        }
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
        let module = Module::from_binary(self.linker.engine(), bytes);
        let module = module.map_err(|error| LoadError::Compile(format!("{error:#}")))?;
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
    config.cranelift_nan_canonicalization(true);
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

/// Opens a cache in a folder that only this user can write to, because its contents are executed unchecked.
fn cache(path: &Path) -> Result<Cache, HostError> {
    let refused = |problem: String| HostError::Cache { path: path.to_owned(), problem };
    if !path.is_absolute() {
        return Err(refused("it is not an absolute path".to_owned()));
    }
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| refused(format!("it cannot be created: {error}")))?;
    let metadata = fs::symlink_metadata(path).map_err(|error| refused(error.to_string()))?;
    if !metadata.is_dir() {
        return Err(refused("it is no folder".to_owned()));
    }
    let own = nix::unistd::geteuid().as_raw();
    if metadata.uid() != own {
        return Err(refused(format!("it belongs to user {}, but this process is of user {own}", metadata.uid())));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(refused(format!("its mode is {mode:o}, but others must have no access: 700")));
    }
    // The canonical path: symbolic links on the way cannot be redirected later.
    let path = path.canonicalize().map_err(|error| refused(error.to_string()))?;
    path.ancestors().skip(1).try_for_each(|above| check_ancestor(above, own).map_err(&refused))?;
    let mut config = CacheConfig::new();
    config.with_directory(path);
    Cache::new(config).map_err(|error| refused(format!("{error:#}")))
}

/// Checks that nobody else can replace what is in this folder: it belongs to this user or to root, and others may not
/// write to it unless it has the sticky bit, as `/tmp` has.
fn check_ancestor(folder: &Path, own: u32) -> Result<(), String> {
    let named = |problem: String| format!("its parent folder {} {problem}", folder.display());
    let metadata = fs::metadata(folder).map_err(|error| named(format!("cannot be read: {error}")))?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if owner != own && owner != ROOT {
        return Err(named(format!("belongs to user {owner}, who could replace it")));
    }
    if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 {
        return Err(named(format!("has mode {mode:o}, so that others could replace it")));
    }
    Ok(())
}

const ROOT: u32 = 0;
/// The mode bits that let group and others write.
const OTHERS_WRITE: u32 = 0o022;
/// The sticky bit: users can remove only their own files from the folder.
const STICKY: u32 = 0o1000;

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
