//! Plugins in a sidecar: which are installed, how a request's plugin is resolved, and what lanes call.

mod calls;
mod loader;
mod registry;
mod residuals;
pub mod shipped;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::plugins::PluginSettings;
use ronde_engine::Admission;
use ronde_plugin_host::trust::{self, Policy};
use ronde_plugin_host::{HostConfig, Plugin};
use ronde_wire::{Epoch, PluginCall, PluginUse, Request, Seq, SetId, limits};

pub(crate) use calls::LanePlugins;
pub(crate) use registry::{Answer, OPEN_PER_SESSION_MAX};
use registry::{LanePlugin, Registry};
use residuals::Residuals;

/// How long a lane waits for a module: less than the silence after which peers declare a sidecar dead.
const LOAD_TIMEOUT: Duration = Duration::from_millis(2_500);

/// The plugins of a sidecar; all threads share it.
pub(crate) struct Plugins {
    registry: Mutex<Registry>,
    residuals: Mutex<Residuals>,
    work: Work,
}

/// Counters of the lanes' calls.
#[derive(Debug, Default)]
struct Work {
    spans: AtomicU64,
    faults: AtomicU64,
    nanoseconds: AtomicU64,
}

/// Counters of plugins, and the size of the state that codecs keep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PluginStats {
    /// Spans of tensors that plugins were called for.
    pub(crate) spans: u64,
    /// Those of them that failed.
    pub(crate) faults: u64,
    /// Time of all lanes in plugins, copies included.
    pub(crate) time: Duration,
    /// State that codecs keep between operations, in bytes.
    pub(crate) state_bytes: u64,
}

impl Work {
    fn note(&self, time: Duration, failed: bool) {
        self.spans.fetch_add(1, Ordering::Relaxed);
        self.faults.fetch_add(u64::from(failed), Ordering::Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

impl Plugins {
    /// Lists the installed plugins. Modules are read when they are first requested. `answered` is called, on another
    /// thread, when one is loaded or has failed to load.
    ///
    /// # Errors
    /// When a key or a digest cannot be read, or a path does not exist.
    pub(crate) fn new(settings: &PluginSettings, answered: impl Fn() + Send + 'static) -> anyhow::Result<Arc<Self>> {
        let policy = policy(settings)?;
        let host = HostConfig { cache_dir: cache_dir(), policy, ..HostConfig::default() };
        let registry = Registry::new(host, &settings.paths, answered).context(Code::PluginFile)?;
        let residuals = Residuals::new(settings.state_bytes_max.unwrap_or(limits::PLUGIN_STATE_BYTES));
        Ok(Arc::new(Self { registry: Mutex::new(registry), residuals: Mutex::new(residuals), work: Work::default() }))
    }

    /// Resolves the plugin of a request of the session with this number, if it is known. The request's process set has this many ranks.
    pub(crate) fn resolve(&self, session: u64, call: &PluginCall, what: &Request, set_ranks: usize) -> Answer {
        self.registry().resolve(session, call, what, set_ranks)
    }

    /// Returns the module of an ordered plugin. It waits for one that no rank of this sidecar has requested, as all
    /// have joined.
    fn module(&self, uses: &PluginUse) -> Result<Arc<Plugin>, String> {
        // Wait without the registry's lock, which others need.
        let ordered = self.registry().ordered(uses)?;
        match ordered {
            LanePlugin::Here(plugin) => Ok(plugin),
            LanePlugin::Coming(coming) => coming
                .recv_timeout(LOAD_TIMEOUT)
                .map_err(|_| format!("plugin {uses} was not loaded within {} ms", LOAD_TIMEOUT.as_millis()))?,
        }
    }

    /// An operation with a plugin begins.
    pub(crate) fn begin(&self, admission: &Admission) {
        let Some(plugin) = &admission.plugin else { return };
        let names = admission.tensors.iter().map(|tensor| &tensor.name).zip(plugin.elements.iter().copied());
        let operation = (admission.epoch, admission.seq);
        let of = (&plugin.uses, admission.arithmetic.dtype);
        let removed = self.residuals().begin(operation, admission.topology.set, of, names);
        drop(removed);
    }

    /// Commits an operation's codec state.
    pub(crate) fn commit(&self, epoch: Epoch, seq: Seq) {
        let removed = self.residuals().commit((epoch, seq));
        drop(removed);
    }

    /// Discards an operation's codec state; no lane works on it any more.
    pub(crate) fn discard(&self, epoch: Epoch, seq: Seq) {
        let removed = self.residuals().discard((epoch, seq));
        drop(removed);
    }

    /// Removes a process set that has no operation in progress; a later set may reuse its id.
    pub(crate) fn forget_set(&self, set: SetId) {
        let removed = self.residuals().remove_set(set);
        let_go(removed);
    }

    /// Begins an epoch: state lasts for one epoch only, because peers may be new.
    pub(crate) fn clear(&self) {
        let old = self.residuals().clear();
        let_go(Some(old).filter(|old| old.bytes() > 0));
    }

    /// Returns the counters.
    pub(crate) fn stats(&self) -> PluginStats {
        PluginStats {
            spans: self.work.spans.load(Ordering::Relaxed),
            faults: self.work.faults.load(Ordering::Relaxed),
            time: Duration::from_nanos(self.work.nanoseconds.load(Ordering::Relaxed)),
            state_bytes: self.residuals().bytes(),
        }
    }

    // A thread that panicked ends the sidecar; its data is not used.
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state of codecs. Bind what a method removes with `let`, and drop it in a later statement: the lock is
    /// released at the end of the `let` statement.
    fn residuals(&self) -> MutexGuard<'_, Residuals> {
        self.residuals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops codec state on another thread: freeing gigabytes takes a while.
fn let_go(kept: Option<impl Send + 'static>) {
    let Some(kept) = kept else { return };
    if let Err(error) = std::thread::Builder::new().name("plugins' state".to_owned()).spawn(move || drop(kept)) {
        tracing::warn!("cannot start a thread to free memory: {error}");
    }
}

/// Rejects a configuration with both lists, which would leave open whether one of them is enough.
fn policy(settings: &PluginSettings) -> anyhow::Result<Policy> {
    match (settings.keys.as_slice(), settings.digests.as_slice()) {
        ([], []) => Ok(Policy::Unsigned),
        (keys, []) => {
            let key = |path: &PathBuf| {
                trust::read_public_key(path).with_context(|| format!("the key {} cannot be used", path.display()))
            };
            Ok(Policy::Keys(keys.iter().map(key).collect::<Result<_, _>>()?))
        }
        ([], digests) => {
            let digest = |text: &String| {
                trust::digest_from_text(text).with_context(|| format!("{text:?} is not a SHA-256 digest of a plugin"))
            };
            Ok(Policy::Digests(digests.iter().map(digest).collect::<Result<_, _>>()?))
        }
        _ => anyhow::bail!("plugins are trusted by key or by digest, not by both; remove one of the two lists"),
    }
}

/// Returns the directory for compiled modules: among this user's caches, if there is one.
fn cache_dir() -> Option<PathBuf> {
    let of = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")))?;
    caches.is_dir().then(|| caches.join("ronde-plugins"))
}
