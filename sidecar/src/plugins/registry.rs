//! Which plugins are there, and what is known of them. Nobody waits here: what takes long is done by the loader's thread.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ronde_plugin_host::{HostConfig, Parameters, Plugin, inspect, trust};
use ronde_wire::{DType, PluginCall, PluginUse, ReduceOp, limits};

use super::loader::{self, Answers, Job, Question, Resolved};
use crate::shipped_plugins;

/// See the module's text.
pub(super) struct Registry {
    jobs: Sender<Job>,
    answers: Answers,
    /// What was asked and has no answer yet, in order.
    asked: VecDeque<Asked>,
    /// Of each thing that was asked: its answer, or `None` while there is none.
    known: HashMap<Asked, Option<Answered>>,
    /// Modules that requests have named, for lanes.
    modules: HashMap<String, Arc<Plugin>>,
}

/// An answer, and when it came.
type Answered = (Result<Resolved, String>, Instant);

/// What a request's plugin is here.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// It is this one.
    Known(Arc<PluginUse>),
    /// There is none for it, in words for the caller.
    Refused(String),
    /// It is being loaded; the question is to be asked again when something has been.
    Later,
}

/// A request's plugin in a form that can be compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Asked {
    name: String,
    parameters: Vec<(String, String)>,
    dtype: DType,
    reduces: bool,
}

/// A plugin that a lane is to run.
pub(super) enum Ordered {
    Here(Arc<Plugin>),
    /// It has not been named by a rank of this sidecar, and comes in a moment.
    Coming(Receiver<Result<Arc<Plugin>, String>>),
}

/// Different requests that are remembered.
const KNOWN_MAX: usize = 1_024;
/// How long a refusal holds: a file that could not be read may be there then.
const REFUSED_FOR: Duration = Duration::from_secs(10);

impl Registry {
    /// Looks at what is there. Modules that were named come before those of directories, and shipped ones last. `answered` is
    /// called, on another thread, when something is known that was asked for.
    pub(super) fn new(
        host: HostConfig,
        paths: &[PathBuf],
        answered: impl Fn() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let files = files(paths)?;
        let (jobs, answers) = loader::start(host, files, answered).map_err(anyhow::Error::msg)?;
        Ok(Self { jobs, answers, asked: VecDeque::new(), known: HashMap::new(), modules: HashMap::new() })
    }

    /// What a request's plugin is here.
    pub(super) fn resolve(&mut self, call: &PluginCall, dtype: DType, op: Option<ReduceOp>) -> Answer {
        self.take_answers();
        let parameters = call.parameters.iter().map(|(name, value)| (name.clone(), format!("{value:?}"))).collect();
        let reduces = op == Some(ReduceOp::Plugin);
        let asked = Asked { name: call.name.clone(), parameters, dtype, reduces };
        match self.known.get(&asked) {
            Some(None) => Answer::Later,
            Some(Some((Err(reason), since))) if since.elapsed() < REFUSED_FOR => Answer::Refused(reason.clone()),
            Some(Some((Ok((uses, plugin)), _))) => match plugin.disabled() {
                Some(reason) => Answer::Refused(format!("plugin {uses}: {reason}")),
                None => Answer::Known(Arc::clone(uses)),
            },
            None | Some(Some((Err(_), _))) => self.ask(asked, Question { call: call.clone(), dtype, reduces }),
        }
    }

    fn ask(&mut self, asked: Asked, question: Question) -> Answer {
        if self.known.len() >= KNOWN_MAX {
            self.known.retain(|_, answer| answer.is_none());
        }
        if self.known.len() >= KNOWN_MAX {
            return Answer::Refused(format!("{KNOWN_MAX} other plugins or parameters are being loaded; ask for fewer"));
        }
        if self.jobs.send(Job::Resolve(question)).is_err() {
            return Answer::Refused("the thread that loads plugins has ended; see the sidecar's log".to_owned());
        }
        self.asked.push_back(asked.clone());
        self.known.insert(asked, None);
        Answer::Later
    }

    fn take_answers(&mut self) {
        for answer in self.answers.try_iter() {
            if let Ok((uses, plugin)) = &answer {
                self.modules.insert(uses.name.clone(), Arc::clone(plugin));
            }
            if let Some(asked) = self.asked.pop_front() {
                self.known.insert(asked, Some((answer, Instant::now())));
            }
        }
    }

    /// The module of an ordered plugin.
    pub(super) fn ordered(&mut self, uses: &PluginUse) -> Result<Ordered, String> {
        self.take_answers();
        if let Some(plugin) = self.modules.get(&uses.name) {
            return Ok(Ordered::Here(Arc::clone(plugin)));
        }
        let (reply, coming) = mpsc::sync_channel(1);
        let sent = self.jobs.send(Job::Module(uses.name.clone(), reply));
        sent.map_err(|_| "the thread that loads plugins has ended; see the sidecar's log".to_owned())?;
        Ok(Ordered::Coming(coming))
    }
}

/// The parameters that a module is ordered with.
///
/// # Errors
/// When it is another module, or does not take these parameters, in words.
pub(super) fn ordered_parameters(plugin: &Plugin, uses: &PluginUse) -> Result<Parameters, String> {
    if plugin.digest() != uses.digest {
        let here = trust::digest_text(&plugin.digest());
        return Err(format!("plugin {uses} was asked for, and here is one of digest {here}; install the same file"));
    }
    let block: Vec<u8> = uses.parameters.iter().flat_map(|word| word.to_le_bytes()).collect();
    Parameters::from_block(plugin.manifest(), &block).map_err(|error| error.to_string())
}

/// The files of plugins, by their names.
fn files(paths: &[PathBuf]) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    let (directories, modules): (Vec<&PathBuf>, Vec<&PathBuf>) = paths.iter().partition(|path| path.is_dir());
    for path in modules {
        let bytes = loader::read(path).map_err(anyhow::Error::msg)?;
        let name = inspect(&bytes).with_context(|| format!("{} is no plugin", path.display()))?.manifest.name;
        if let Some(other) = files.insert(name.clone(), path.clone()) {
            bail!("{} and {} are both plugin {name}; leave one of them out", other.display(), path.display());
        }
    }
    for directory in directories {
        for (name, path) in modules_of(directory)? {
            files.entry(name).or_insert(path);
        }
    }
    // Nobody has named these: what is wrong with them stops no job that needs none.
    for folder in shipped_plugins::folders().into_iter().filter(|folder| folder.is_dir()) {
        match modules_of(&folder) {
            Ok(modules) => {
                for (name, path) in modules {
                    files.entry(name).or_insert(path);
                }
            }
            Err(error) => tracing::warn!("shipped plugins are left out: {error:#}"),
        }
    }
    let count = files.len();
    ensure!(count <= limits::PLUGINS_MAX, "{count} plugins are more than the {} of a sidecar", limits::PLUGINS_MAX);
    Ok(files)
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
