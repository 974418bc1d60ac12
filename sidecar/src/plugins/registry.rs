//! The installed plugins and what is known of them. Nothing blocks here: the loader's thread does what takes long.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque, btree_map};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ronde_plugin_host::{HostConfig, Parameters, Plugin, Shape, inspect, trust};
use ronde_wire::{DType, PluginCall, PluginUse, ReduceOp, Request, SetId, limits};

use super::loader::{self, Answers, Job, PluginQuery, Resolved};
use crate::plugins::shipped;

/// The registry of plugins.
pub(super) struct Registry {
    jobs: Sender<Job>,
    answers: Answers,
    /// Questions without an answer yet, in order, each with the number of the session that asked.
    asked: VecDeque<(RequestKey, u64)>,
    /// How many of them each session has.
    open: HashMap<u64, usize>,
    /// The answer to each question, or `None` while it is open.
    known: HashMap<RequestKey, Option<Answered>>,
    /// Modules that requests have named, for lanes.
    modules: HashMap<String, Arc<Plugin>>,
}

/// An answer, when it arrived, and when a request needed it last.
struct Answered {
    answer: Result<Resolved, String>,
    since: Instant,
    used: Instant,
}

/// The result of resolving a request's plugin.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// The plugin is loaded.
    Known(Arc<PluginUse>),
    /// It cannot be used; the text is for the caller.
    Refused(String),
    /// It is being loaded; ask again after the next notification.
    Later,
}

/// A request's plugin in a form that can be compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RequestKey {
    name: String,
    parameters: Vec<(String, String)>,
    dtype: DType,
    reduces: bool,
}

/// A plugin that a lane must run.
pub(super) enum LanePlugin {
    Here(Arc<Plugin>),
    /// No rank of this sidecar has named it; the loader delivers it.
    Coming(Receiver<Result<Arc<Plugin>, String>>),
}

/// The most requests that are kept.
const KNOWN_MAX: usize = 1_024;
/// The most questions of one session without an answer: another session waits for no more of them.
pub(crate) const OPEN_PER_SESSION_MAX: usize = 64;
/// How long a refusal is kept: a file that could not be read may exist later.
const REFUSED_FOR: Duration = Duration::from_secs(10);

impl Registry {
    /// Lists the installed plugins. Named modules take precedence over those of directories, and shipped ones come
    /// last. `answered` is called, on another thread, after each answer.
    pub(super) fn new(
        host: HostConfig,
        paths: &[PathBuf],
        answered: impl Fn() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let files = files(paths)?;
        let (jobs, answers) = loader::start(host, files, answered).map_err(anyhow::Error::msg)?;
        let (asked, open, known, modules) = (VecDeque::new(), HashMap::new(), HashMap::new(), HashMap::new());
        Ok(Self { jobs, answers, asked, open, known, modules })
    }

    /// Resolves the plugin of a request of the session with this number. Its process set has this many ranks.
    pub(super) fn resolve(&mut self, session: u64, call: &PluginCall, what: &Request, set_ranks: usize) -> Answer {
        self.take_answers();
        let parameters = call.parameters.iter().map(|(name, value)| (name.clone(), format!("{value:?}"))).collect();
        let (dtype, reduces) = (what.dtype, what.collective.reduce_op() == Some(ReduceOp::Plugin));
        let asked = RequestKey { name: call.name.clone(), parameters, dtype, reduces };
        match self.known.get_mut(&asked) {
            Some(None) => Answer::Later,
            Some(Some(Answered { answer: Err(reason), since, .. })) if since.elapsed() < REFUSED_FOR => {
                Answer::Refused(reason.clone())
            }
            Some(Some(Answered { answer: Ok((uses, plugin)), used, .. })) => {
                *used = Instant::now();
                match unusable(uses, plugin, (what.set, set_ranks)) {
                    Some(reason) => Answer::Refused(format!("plugin {uses}: {reason}")),
                    None => Answer::Known(Arc::clone(uses)),
                }
            }
            None | Some(Some(_)) => self.ask(session, asked, PluginQuery { call: call.clone(), dtype, reduces }),
        }
    }

    /// Asks the loader, unless the session or all of them have too many questions open: then the request waits until some
    /// are answered.
    fn ask(&mut self, session: u64, asked: RequestKey, question: PluginQuery) -> Answer {
        if self.open.get(&session).is_some_and(|open| *open >= OPEN_PER_SESSION_MAX) || !self.make_room(&asked) {
            return Answer::Later;
        }
        if self.jobs.send(Job::Resolve(question)).is_err() {
            return Answer::Refused("the thread that loads plugins has ended; see the sidecar's log".to_owned());
        }
        self.asked.push_back((asked.clone(), session));
        *self.open.entry(session).or_default() += 1;
        self.known.insert(asked, None);
        Answer::Later
    }

    /// Returns whether the table has room for a question, after forgetting the answer that was needed longest ago.
    fn make_room(&mut self, asked: &RequestKey) -> bool {
        if self.known.len() < KNOWN_MAX || self.known.contains_key(asked) {
            return true;
        }
        let answered = self.known.iter().filter_map(|(key, answered)| Some((answered.as_ref()?.used, key)));
        let oldest = answered.min_by_key(|(used, _)| *used).map(|(_, key)| key.clone());
        oldest.is_some_and(|oldest| self.known.remove(&oldest).is_some())
    }

    fn take_answers(&mut self) {
        for answer in self.answers.try_iter() {
            if let Ok((uses, plugin)) = &answer {
                self.modules.insert(uses.name.clone(), Arc::clone(plugin));
            }
            let Some((asked, session)) = self.asked.pop_front() else { continue };
            if let Entry::Occupied(mut open) = self.open.entry(session) {
                *open.get_mut() -= 1;
                if *open.get() == 0 {
                    open.remove();
                }
            }
            let now = Instant::now();
            self.known.insert(asked, Some(Answered { answer, since: now, used: now }));
        }
    }

    /// Returns the module of an ordered plugin.
    pub(super) fn ordered(&mut self, uses: &PluginUse) -> Result<LanePlugin, String> {
        self.take_answers();
        if let Some(plugin) = self.modules.get(&uses.name) {
            return Ok(LanePlugin::Here(Arc::clone(plugin)));
        }
        let (reply, coming) = mpsc::sync_channel(1);
        let sent = self.jobs.send(Job::Module(uses.name.clone(), reply));
        sent.map_err(|_| "the thread that loads plugins has ended; see the sidecar's log".to_owned())?;
        Ok(LanePlugin::Coming(coming))
    }
}

/// Returns why a loaded plugin cannot serve a request, before any data moves.
fn unusable(uses: &PluginUse, plugin: &Plugin, (set, ranks): (SetId, usize)) -> Option<String> {
    let disabled = plugin.disabled();
    let most = plugin.manifest().limits.ranks;
    let is_pairwise = plugin.manifest().reducer.as_ref().is_some_and(|reducer| reducer.shape == Shape::Pairwise);
    let takes_any = uses.work.is_codec() || is_pairwise;
    disabled.or_else(|| {
        (!takes_any && ranks > most).then(|| {
            format!(
                "it reduces the values of at most {most} ranks at once, the limit of its manifest, and {set} has {ranks}; \
                 use a smaller process set, or a plugin that takes more"
            )
        })
    })
}

/// Returns the parameters that a module is ordered with.
///
/// # Errors
/// When it is another module, or does not accept these parameters; the text is the reason.
pub(super) fn ordered_parameters(plugin: &Plugin, uses: &PluginUse) -> Result<Parameters, String> {
    if plugin.digest() != uses.digest {
        let here = trust::digest_text(&plugin.digest());
        return Err(format!("plugin {uses} was asked for, and here is one of digest {here}; install the same file"));
    }
    let block: Vec<u8> = uses.parameters.iter().flat_map(|word| word.to_le_bytes()).collect();
    Parameters::from_block(plugin.manifest(), &block).map_err(|error| error.to_string())
}

/// Returns the files of plugins, by their names.
fn files(paths: &[PathBuf]) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    let (directories, modules): (Vec<&PathBuf>, Vec<&PathBuf>) = paths.iter().partition(|path| path.is_dir());
    for path in modules {
        let bytes = loader::read(path).map_err(anyhow::Error::msg)?;
        let name = inspect(&bytes).with_context(|| format!("{} is not a plugin", path.display()))?.manifest.name;
        take(&mut files, name, path.clone())?;
    }
    for directory in directories {
        let modules = modules_of(directory)?;
        ensure!(!modules.is_empty(), "{} holds no plugin (*.wasm)", directory.display());
        for (name, path) in modules {
            files.entry(name).or_insert(path);
        }
    }
    // No request names these: an unusable one fails no job that does not need it.
    for folder in shipped::folders().into_iter().filter(|folder| folder.is_dir()) {
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

/// Returns the modules of a directory, by the names in their manifests. A module without a readable manifest is listed
/// by its file's name, so that a request for it fails with the reason.
fn modules_of(directory: &Path) -> anyhow::Result<BTreeMap<String, PathBuf>> {
    let mut modules = BTreeMap::new();
    let mut unreadable = Vec::new();
    for path in wasm_files(directory)? {
        match loader::read(&path).map(|bytes| ronde_plugin_host::name(&bytes)) {
            Ok(Ok(name)) => take(&mut modules, name, path)?,
            Ok(Err(_)) | Err(_) => unreadable.push(path),
        }
    }
    for path in unreadable {
        if let Some(stem) = path.file_stem().and_then(|stem| stem.to_str()) {
            modules.entry(stem.to_owned()).or_insert(path);
        }
    }
    Ok(modules)
}

/// Returns the files of a directory whose names end in `.wasm`, in order.
fn wasm_files(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let cannot = || format!("the plugins of {} cannot be listed", directory.display());
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if path.extension().is_some_and(|end| end == "wasm") {
            paths.push(path);
            let most = limits::PLUGINS_MAX;
            ensure!(paths.len() <= most, "{} has more than the {most} plugins of a sidecar", directory.display());
        }
    }
    paths.sort_unstable();
    Ok(paths)
}

/// Adds a plugin's file; two files of one name are an error.
fn take(files: &mut BTreeMap<String, PathBuf>, name: String, path: PathBuf) -> anyhow::Result<()> {
    match files.entry(name) {
        btree_map::Entry::Occupied(other) => {
            let (name, other) = (other.key(), other.get().display());
            bail!("{other} and {} are both plugin {name}; remove one of them", path.display())
        }
        btree_map::Entry::Vacant(free) => {
            free.insert(path);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use ronde_wire::{Collective, TensorName};

    use super::*;

    /// A module that is its manifest.
    fn module(name: &str) -> Vec<u8> {
        let section = "ronde.manifest";
        let manifest = format!(
            r#"{{"abi":1,"name":"{name}","version":"1","kinds":{{"reducer":{{"dtypes":["float32"],"shape":"n-ary",
            "commutative":true,"measures":0}}}},"limits":{{"memory_bytes":65536,"call_ms":10,"ranks":4}}}}"#
        );
        let length = 1 + section.len() + manifest.len();
        let byte = |number: usize| u8::try_from(number).expect("it is short");
        // A length of two groups of seven bits.
        let length = [byte(length % 128 + 128), byte(length / 128)];
        let name = [&[byte(section.len())], section.as_bytes()].concat();
        [b"\0asm\x01\0\0\0\0".as_slice(), &length, &name, manifest.as_bytes()].concat()
    }

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, bytes) in files {
            fs::write(folder.path().join(name), bytes).expect("a file");
        }
        folder
    }

    fn ask(registry: &mut Registry, session: u64, name: &str) -> Answer {
        let (tensor, shape) =
            (TensorName::new("t").expect("a name"), ronde_wire::Shape::new(vec![1]).expect("a shape"));
        let what = Request::new(SetId::WORLD, tensor, Collective::Barrier, DType::F32, shape);
        let call = PluginCall { name: name.to_owned(), parameters: Vec::new() };
        registry.resolve(session, &call, &what, 2)
    }

    /// Asks until there is an answer, which is a refusal here: there are no plugins.
    fn refusal(registry: &mut Registry, session: u64, name: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            match ask(registry, session, name) {
                Answer::Refused(reason) => return reason,
                _ => assert!(Instant::now() < deadline, "{name} is not answered"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_session_that_asks_for_thousands_of_plugins_refuses_nobody_elses() {
        // Answers come only when the test lets the loader go on.
        let (go, may_go) = mpsc::channel::<()>();
        let waits = move || {
            let _ = may_go.recv();
        };
        let mut registry = Registry::new(HostConfig::default(), &[], waits).expect("it starts");
        for number in 0..2 * KNOWN_MAX {
            assert!(matches!(ask(&mut registry, 1, &format!("flood-{number}")), Answer::Later));
        }
        assert!(registry.asked.len() <= OPEN_PER_SESSION_MAX);
        assert!(matches!(ask(&mut registry, 2, "mine"), Answer::Later));
        drop(go);
        assert!(refusal(&mut registry, 2, "mine").contains("mine"));
        for number in 0..KNOWN_MAX + 100 {
            assert!(refusal(&mut registry, 1, &format!("flood-{number}")).contains("flood"));
        }
        assert!(registry.known.len() <= KNOWN_MAX && registry.open.is_empty());
    }

    #[test]
    fn a_plugin_in_a_folder_goes_by_the_name_in_its_manifest() {
        let folder = folder(&[
            ("build-17.wasm", &module("mean")),
            ("mean.wasm", b"not one"),
            ("broken.wasm", b"nor this"),
            ("readme.txt", b"text"),
        ]);
        let modules = modules_of(folder.path()).expect("a folder with a plugin");
        let path = |name: &str| folder.path().join(name);
        // A request for the broken one fails with the reason.
        let expected = [("broken".to_owned(), path("broken.wasm")), ("mean".to_owned(), path("build-17.wasm"))];
        assert_eq!(modules, expected.into());
    }

    #[test]
    fn a_folder_without_a_plugin_is_named() {
        let folder = folder(&[("readme.txt", b"text")]);
        let error = files(&[folder.path().to_owned()]).expect_err("which plugin is it").to_string();
        assert_eq!(error, format!("{} holds no plugin (*.wasm)", folder.path().display()));
    }

    #[test]
    fn two_files_of_one_plugin_are_named() {
        let folder = folder(&[("a.wasm", &module("mean")), ("mean.wasm", &module("mean"))]);
        let error = modules_of(folder.path()).expect_err("which of them is it").to_string();
        assert!(error.contains("a.wasm and ") && error.contains("mean.wasm are both plugin mean"), "{error}");
    }

    #[test]
    fn a_folder_with_too_many_modules_is_not_read() {
        let names: Vec<String> = (0..=limits::PLUGINS_MAX).map(|number| format!("{number}.wasm")).collect();
        let folder = folder(&names.iter().map(|name| (name.as_str(), b"".as_slice())).collect::<Vec<_>>());
        let error = modules_of(folder.path()).expect_err("too many").to_string();
        assert!(error.contains("more than the 256 plugins"), "{error}");
    }
}
