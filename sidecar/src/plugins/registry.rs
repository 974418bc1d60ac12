//! Which plugins are there. A module is read, checked and compiled when it is first asked for.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use crate::shipped_plugins;
use anyhow::{Context, bail, ensure};
use ronde_plugin_host::{Given, Host, HostConfig, Parameters, Plugin, Shape, inspect, trust};
use ronde_wire::{DType, PluginCall, PluginUse, PluginValue, PluginWork, ReduceOp, limits};

/// See the module's text.
pub(super) struct Registry {
    /// Made when the first module is loaded: most jobs have none.
    host: Result<Arc<Host>, HostConfig>,
    files: BTreeMap<String, PathBuf>,
    modules: HashMap<String, Module>,
    /// What requests asked for, so that equal ones share one answer.
    resolved: HashMap<Asked, Arc<PluginUse>>,
}

/// A module between the first request for it and the end of the sidecar.
enum Module {
    Loading(Receiver<Result<Arc<Plugin>, String>>),
    Loaded(Arc<Plugin>),
    Refused(String),
}

/// A request's plugin in a form that can be compared.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Asked {
    name: String,
    parameters: Vec<(String, String)>,
    dtype: DType,
    reduces: bool,
}

/// How long the control thread waits for a module: less than the silence for which others give a sidecar up. It is there
/// within milliseconds from the cache, and within a second or so for the first time.
const LOAD_TIMEOUT: Duration = Duration::from_millis(2_500);
/// Different requests that are remembered.
const RESOLVED_MAX: usize = 1_024;
/// Bytes of a module's file.
const MODULE_BYTES_MAX: u64 = 16 << 20;

impl Registry {
    /// Looks at what is there. Modules that were named come before those of directories, and shipped ones last.
    pub(super) fn new(host: HostConfig, paths: &[PathBuf]) -> anyhow::Result<Self> {
        let mut files = BTreeMap::new();
        let (directories, modules): (Vec<&PathBuf>, Vec<&PathBuf>) = paths.iter().partition(|path| path.is_dir());
        for path in modules {
            let bytes = read(path).map_err(anyhow::Error::msg)?;
            let name = inspect(&bytes).with_context(|| format!("{} is no plugin", path.display()))?.manifest.name;
            if let Some(other) = files.insert(name.clone(), path.clone()) {
                bail!("{} and {} are both plugin {name}; leave one of them out", other.display(), path.display());
            }
        }
        for directory in directories
            .into_iter()
            .cloned()
            .chain(shipped_plugins::folders().into_iter().filter(|folder| folder.is_dir()))
        {
            for (name, path) in modules_of(&directory)? {
                files.entry(name).or_insert(path);
            }
        }
        let count = files.len();
        ensure!(count <= limits::PLUGINS_MAX, "{count} plugins are more than the {} of a sidecar", limits::PLUGINS_MAX);
        Ok(Self { host: Err(host), files, modules: HashMap::new(), resolved: HashMap::new() })
    }

    /// What a request's plugin is here.
    pub(super) fn resolve(
        &mut self,
        call: &PluginCall,
        dtype: DType,
        op: Option<ReduceOp>,
    ) -> Result<Arc<PluginUse>, String> {
        let parameters = call.parameters.iter().map(|(name, value)| (name.clone(), format!("{value:?}"))).collect();
        let reduces = op == Some(ReduceOp::Plugin);
        let asked = Asked { name: call.name.clone(), parameters, dtype, reduces };
        if let Some(known) = self.resolved.get(&asked) {
            return Ok(Arc::clone(known));
        }
        let plugin = self.called(&call.name)?;
        let given: Vec<(String, Given)> =
            call.parameters.iter().map(|(name, value)| (name.clone(), given(value))).collect();
        let parameters = Parameters::checked(plugin.manifest(), &given).map_err(|error| error.to_string())?;
        let work = if reduces { reducer_work(&plugin, dtype)? } else { codec_work(&plugin, &parameters, dtype)? };
        let found = Arc::new(PluginUse {
            name: plugin.name().to_owned(),
            version: plugin.version().to_owned(),
            digest: plugin.digest(),
            parameters: words(&parameters),
            work,
        });
        if self.resolved.len() >= RESOLVED_MAX {
            self.resolved.clear();
        }
        self.resolved.insert(asked, Arc::clone(&found));
        Ok(found)
    }

    /// The module of an ordered plugin.
    pub(super) fn ordered(&mut self, uses: &PluginUse) -> Result<(Arc<Plugin>, Parameters), String> {
        let plugin = self.called(&uses.name)?;
        if plugin.digest() != uses.digest {
            let here = trust::digest_text(&plugin.digest());
            return Err(format!(
                "plugin {uses} was asked for, and here is one of digest {here}; install the same file"
            ));
        }
        let block: Vec<u8> = uses.parameters.iter().flat_map(|word| word.to_le_bytes()).collect();
        let parameters = Parameters::from_block(plugin.manifest(), &block).map_err(|error| error.to_string())?;
        Ok((plugin, parameters))
    }

    /// The plugin called `name` or `name@version`.
    fn called(&mut self, called: &str) -> Result<Arc<Plugin>, String> {
        let (name, version) = match called.split_once('@') {
            Some((name, version)) => (name, Some(version)),
            None => (called, None),
        };
        let plugin = self.module(name)?;
        match version {
            Some(version) if version != plugin.version() => {
                Err(format!("plugin {called} is not here; {name} is of version {}", plugin.version()))
            }
            _ => Ok(plugin),
        }
    }

    fn module(&mut self, name: &str) -> Result<Arc<Plugin>, String> {
        if !self.modules.contains_key(name) {
            let Some(path) = self.files.get(name) else { return Err(self.unknown(name)) };
            let path = path.clone();
            let receiver = load(self.host()?, name.to_owned(), path)?;
            self.modules.insert(name.to_owned(), Module::Loading(receiver));
        }
        let Some(module) = self.modules.get_mut(name) else { return Err(self.unknown(name)) };
        if let Module::Loading(receiver) = module {
            let loaded = match receiver.try_recv() {
                Err(TryRecvError::Empty) => receiver.recv_timeout(LOAD_TIMEOUT),
                other => other.map_err(|_| RecvTimeoutError::Disconnected),
            };
            *module = match loaded {
                Ok(Ok(plugin)) => Module::Loaded(plugin),
                Ok(Err(reason)) => Module::Refused(reason),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("plugin {name} is still being compiled; ask again in a moment"));
                }
                Err(RecvTimeoutError::Disconnected) => Module::Refused(format!("plugin {name} cannot be loaded")),
            };
        }
        match module {
            Module::Loaded(plugin) => Ok(Arc::clone(plugin)),
            Module::Refused(reason) => Err(reason.clone()),
            Module::Loading(_) => Err(format!("plugin {name} is still being compiled; ask again in a moment")),
        }
    }

    fn host(&mut self) -> Result<Arc<Host>, String> {
        let config = match &self.host {
            Ok(host) => return Ok(Arc::clone(host)),
            Err(config) => config.clone(),
        };
        let host = Host::new(config.clone()).or_else(|error| {
            tracing::warn!("compiled plugins are not kept: {error}");
            Host::new(HostConfig { cache_dir: None, ..config })
        });
        let host = Arc::new(host.map_err(|error| format!("plugins cannot be run here: {error}"))?);
        self.host = Ok(Arc::clone(&host));
        Ok(host)
    }

    fn unknown(&self, name: &str) -> String {
        let known: Vec<&str> = self.files.keys().map(String::as_str).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        format!("there is no plugin {name} on this sidecar, which has: {known}; name others by --plugin")
    }
}

/// Compiles on a thread of its own: nobody waits for longer than [`LOAD_TIMEOUT`].
fn load(host: Arc<Host>, name: String, path: PathBuf) -> Result<Receiver<Result<Arc<Plugin>, String>>, String> {
    let (sender, receiver) = mpsc::channel();
    let loaded = move || {
        let bytes = read(&path)?;
        let refused = |reason: String| format!("plugin {} is refused: {reason}", path.display());
        let signature = trust::read_signature(&path).map_err(|error| refused(error.to_string()))?;
        let plugin = host.load(&bytes, signature.as_ref()).map_err(|error| refused(error.to_string()))?;
        if plugin.name() == name { Ok(plugin) } else { Err(refused(format!("it is named {}", plugin.name()))) }
    };
    let thread = std::thread::Builder::new().name("plugins".to_owned()).spawn(move || {
        let loaded = loaded();
        match &loaded {
            Ok(plugin) => tracing::info!(plugin = %plugin.label(), "a plugin is loaded"),
            Err(reason) => tracing::warn!("{reason}"),
        }
        // Whoever asked may have gone.
        let _ = sender.send(loaded);
    });
    thread.map_err(|error| format!("a thread for plugins cannot be started: {error}"))?;
    Ok(receiver)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    let refused = |reason: String| format!("plugin {} cannot be read: {reason}", path.display());
    let bytes = fs::metadata(path).map_err(|error| refused(error.to_string()))?.len();
    if bytes > MODULE_BYTES_MAX {
        return Err(refused(format!("its {bytes} bytes are more than {MODULE_BYTES_MAX}")));
    }
    fs::read(path).map_err(|error| refused(error.to_string()))
}

/// The modules of a directory, by the names of their files.
fn modules_of(directory: &Path) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let cannot = || format!("the plugins of {} cannot be listed", directory.display());
    let mut modules = BTreeMap::new();
    for entry in fs::read_dir(directory).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if let (Some("wasm"), Some(stem)) =
            (path.extension().and_then(|end| end.to_str()), path.file_stem().and_then(|stem| stem.to_str()))
        {
            modules.insert(stem.to_owned(), path);
        }
    }
    Ok(modules)
}

fn reducer_work(plugin: &Plugin, dtype: DType) -> Result<PluginWork, String> {
    let label = plugin.label();
    let reducer = plugin.manifest().reducer.as_ref();
    let reducer = reducer.ok_or_else(|| format!("plugin {label} is a codec, not a reduction; give it as the codec"))?;
    if !reducer.dtypes.contains(&dtype) {
        return Err(not_taken(label, "reduces", &reducer.dtypes, dtype));
    }
    Ok(match reducer.shape {
        Shape::Pairwise => PluginWork::Pairwise,
        Shape::Nary => PluginWork::NAry,
        Shape::TwoPass { measures } => PluginWork::TwoPass { measures: u32::try_from(measures).unwrap_or(u32::MAX) },
        Shape::Adaptive => PluginWork::Adaptive,
    })
}

fn codec_work(plugin: &Arc<Plugin>, parameters: &Parameters, dtype: DType) -> Result<PluginWork, String> {
    let label = plugin.label();
    let codec = plugin.manifest().codec.as_ref();
    let codec = codec.ok_or_else(|| format!("plugin {label} is a reduction, not a codec; give it as the op"))?;
    if !codec.dtypes.contains(&dtype) {
        return Err(not_taken(label, "encodes", &codec.dtypes, dtype));
    }
    let instance = plugin.instance(parameters).map_err(|fault| fault.to_string())?;
    let facts = instance.codec_facts(dtype).map_err(|fault| fault.to_string())?;
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(PluginWork::Codec {
        block_elements: number(facts.block_elements),
        // A codec that encodes to nothing at all still has a place for it.
        encoded_bytes: number(facts.block_bound.max(1)),
    })
}

fn not_taken(label: &str, does: &str, taken: &[DType], dtype: DType) -> String {
    let taken: Vec<&str> = taken.iter().map(|dtype| dtype.name()).collect();
    format!("plugin {label} {does} {}, not {dtype}", taken.join(", "))
}

fn given(value: &PluginValue) -> Given {
    match value {
        PluginValue::Int(value) => Given::Int(*value),
        PluginValue::Float(value) => Given::Float(*value),
        PluginValue::Bool(value) => Given::Bool(*value),
        PluginValue::Choice(value) => Given::Text(value.clone()),
    }
}

/// The block of parameters as the wire has it.
fn words(parameters: &Parameters) -> Vec<u64> {
    let block = parameters.block();
    let (words, _) = block.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
