//! The thread that loads plugins: it reads, checks and compiles modules, and queries the facts that plans need. A
//! hostile module can delay this thread, and with it only operations with plugins that are not loaded yet.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

use ronde_plugin_host::{FaultKind, Given, Host, HostConfig, LoadError, Parameters, Plugin, Shape, limits, trust};
use ronde_wire::{DType, Failure, PluginCall, PluginUse, PluginValue, PluginWork};

/// A job for the thread.
pub(super) enum Job {
    /// Resolve a request's plugin; the answer goes to all.
    Resolve(PluginQuery),
    /// Load the module of a plugin, for one caller that waits.
    Module(String, SyncSender<Result<Arc<Plugin>, String>>),
}

/// A request's plugin and its parameters.
#[derive(Clone, Debug)]
pub(super) struct PluginQuery {
    pub(super) call: PluginCall,
    pub(super) dtype: DType,
    pub(super) reduces: bool,
}

/// A request's resolved plugin, and the module.
pub(super) type Resolved = (Arc<PluginUse>, Arc<Plugin>);

/// Answers in the order of the questions.
pub(super) type Answers = Receiver<Result<Resolved, String>>;

/// The state of the thread.
struct Loader {
    /// Created when the first module is loaded: most jobs have none.
    host: Result<Arc<Host>, HostConfig>,
    files: BTreeMap<String, PathBuf>,
    /// The result for each module that was requested.
    modules: HashMap<String, Result<Arc<Plugin>, String>>,
}

/// Starts the thread. It calls `answered` after each answer, and ends when its senders are gone.
///
/// # Errors
/// When the thread cannot be started.
pub(super) fn start(
    host: HostConfig,
    files: BTreeMap<String, PathBuf>,
    answered: impl Fn() + Send + 'static,
) -> Result<(Sender<Job>, Answers), String> {
    let (jobs, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let mut loader = Loader { host: Err(host), files, modules: HashMap::new() };
    let thread = std::thread::Builder::new().name("plugins".to_owned()).spawn(move || {
        for job in asked {
            match job {
                Job::Resolve(question) => {
                    if answer.send(loader.resolve(&question)).is_err() {
                        return;
                    }
                    answered();
                }
                // The caller may have given up.
                Job::Module(name, reply) => drop(reply.try_send(loader.module(&name))),
            }
        }
    });
    thread.map_err(|error| format!("a thread for plugins cannot be started: {error}"))?;
    Ok((jobs, answers))
}

impl Loader {
    fn resolve(&mut self, question: &PluginQuery) -> Result<Resolved, String> {
        let PluginQuery { call, dtype, reduces } = question;
        let plugin = self.called(&call.name)?;
        let given: Vec<(String, Given)> =
            call.parameters.iter().map(|(name, value)| (name.clone(), given(value))).collect();
        let parameters = Parameters::checked(plugin.manifest(), &given).map_err(|error| error.to_string())?;
        let work = if *reduces { reducer_work(&plugin, *dtype)? } else { codec_work(&plugin, &parameters, *dtype)? };
        let uses = PluginUse {
            name: plugin.name().to_owned(),
            version: plugin.version().to_owned(),
            digest: plugin.digest(),
            parameters: words(&parameters),
            work,
        };
        Ok((Arc::new(uses), plugin))
    }

    /// Returns the plugin called `name` or `name@version`.
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
        if let Some(known) = self.modules.get(name) {
            return known.clone();
        }
        let Some(path) = self.files.get(name).cloned() else { return Err(self.unknown(name)) };
        // A file that cannot be read now may be readable later.
        let bytes = read(&path)?;
        let host = self.host()?;
        let (loaded, lasts) = match load(&host, name, &path, &bytes) {
            Ok(plugin) => (Ok(plugin), true),
            Err((reason, lasts)) => (Err(reason), lasts),
        };
        match &loaded {
            Ok(plugin) => tracing::info!(plugin = %plugin.label(), "a plugin is loaded"),
            Err(reason) => tracing::warn!("{}", Failure::line(reason)),
        }
        if lasts {
            self.modules.insert(name.to_owned(), loaded.clone());
        }
        loaded
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

/// Loads a module. The error says whether it is permanent: a host that lacks memory now may have some later.
fn load(host: &Arc<Host>, name: &str, path: &Path, bytes: &[u8]) -> Result<Arc<Plugin>, (String, bool)> {
    let refused = |reason: String| (format!("plugin {} is refused: {reason}", path.display()), true);
    let signature = trust::read_signature(path).map_err(|error| refused(error.to_string()))?;
    let plugin = host.load(bytes, signature.as_ref()).map_err(|error| match &error {
        LoadError::Start { kind: FaultKind::Host(_), .. } => (format!("plugin {}: {error}", path.display()), false),
        _ => refused(error.to_string()),
    })?;
    if plugin.name() == name { Ok(plugin) } else { Err(refused(format!("it is named {}", plugin.name()))) }
}

/// Reads the bytes of a module, up to the limit.
///
/// # Errors
/// When it cannot be read; the text is the reason.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, String> {
    let refused = |reason: String| format!("plugin {} cannot be read: {reason}", path.display());
    let file = File::open(path).map_err(|error| refused(error.to_string()))?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    if !is_file {
        return Err(refused("it is not a file".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(limits::MODULE_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| refused(error.to_string()))?;
    if bytes.len() > limits::MODULE_BYTES_MAX {
        return Err(refused(format!("it has more than {} bytes", limits::MODULE_BYTES_MAX)));
    }
    Ok(bytes)
}

fn reducer_work(plugin: &Plugin, dtype: DType) -> Result<PluginWork, String> {
    let label = plugin.label();
    let reducer = plugin.manifest().reducer.as_ref();
    let reducer = reducer.ok_or_else(|| format!("plugin {label} is a codec, not a reduction; give it as the codec"))?;
    if !reducer.dtypes.contains(&dtype) {
        return Err(not_taken(label, "reduces", &reducer.dtypes, dtype));
    }
    Ok(match reducer.shape {
        Shape::Pairwise if reducer.commutative => PluginWork::Pairwise,
        // A ring begins with another rank for each chunk: if the order of ranks matters, all values are gathered first.
        Shape::Pairwise | Shape::Nary => PluginWork::NAry,
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
        // A codec that encodes to zero bytes still needs a position in the frame.
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

/// Encodes the block of parameters for the wire.
fn words(parameters: &Parameters) -> Vec<u64> {
    let block = parameters.block();
    let (words, _) = block.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
