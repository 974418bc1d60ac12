//! Why a module is not loaded, and what goes wrong in a call.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use ronde_plugin_abi::{codes, limits};

use crate::manifest::ManifestError;
use crate::trust::TrustError;

/// Why there is no host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The compiler cannot be set up for this machine.
    #[error("WebAssembly cannot run on this machine: {0}")]
    Engine(String),
    /// The folder of compiled modules cannot be used.
    #[error("the folder of compiled plugins {}: {problem}; name another one, or remove it", path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A limit is above what any host grants.
    #[error("the limit on {what} is {given}, but may be 1 to {max}")]
    Limit {
        /// Which one.
        what: &'static str,
        /// What was given.
        given: u64,
        /// The most.
        max: u64,
    },
    /// A thread cannot be started.
    #[error("the thread that watches over deadlines cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Why a module is not loaded. Whoever knows where it came from names the file.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// It is longer than a module may be.
    #[error("the module has {bytes} bytes, but may have {max} of {what}")]
    TooLong {
        /// What is counted.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The most.
        max: usize,
    },
    /// The policy does not let it in, or its signature is wrong.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// It is no WebAssembly module, or uses what plugins may not use.
    #[error("this is no module that plugins may be: {0}")]
    Invalid(String),
    /// It lacks a manifest, or has several.
    #[error("the module has {found} sections named {}, but has exactly one", ronde_plugin_abi::names::MANIFEST)]
    Manifests {
        /// How many there are.
        found: usize,
    },
    /// Its manifest is wrong.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// It imports something.
    #[error(
        "the module imports {module:?} {name:?}; a plugin imports nothing but the function \"ronde\" \"log\" of (i32, i32)"
    )]
    Import {
        /// From where.
        module: String,
        /// What.
        name: String,
    },
    /// An export is missing or of another type.
    #[error("the module exports {found} as {name}, but has {wanted} of that name")]
    Export {
        /// Its name.
        name: &'static str,
        /// What there is.
        found: String,
        /// What there should be.
        wanted: &'static str,
    },
    /// It wants more than this host grants.
    #[error("the plugin wants {wanted} {what}, but this host grants {granted}")]
    Wants {
        /// Of what.
        what: &'static str,
        /// What it wants.
        wanted: u64,
        /// What it gets.
        granted: u64,
    },
    /// It cannot be compiled.
    #[error("the module cannot be compiled: {0}")]
    Compile(String),
    /// It does not start, or does not take its own defaults.
    #[error("the plugin does not start: {kind}{}", logged(log))]
    Start {
        /// What went wrong.
        kind: FaultKind,
        /// What the plugin logged.
        log: Vec<String>,
    },
}

/// What went wrong in a call: which plugin, what, and what it logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name and version.
    pub plugin: Arc<str>,
    /// What went wrong.
    pub kind: FaultKind,
    /// What the plugin logged during the call, within bounds.
    pub log: Vec<String>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plugin {}: {}{}", self.plugin, self.kind, logged(&self.log))
    }
}

impl std::error::Error for Fault {}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// The plugin did what WebAssembly does not allow.
    #[error("{function} trapped: {reason}")]
    Trap {
        /// The function that was called.
        function: &'static str,
        /// What it did.
        reason: String,
    },
    /// The plugin took too long.
    #[error("{function} took longer than {milliseconds} ms")]
    Deadline {
        /// The function that was called.
        function: &'static str,
        /// What a call may take.
        milliseconds: u32,
    },
    /// The plugin gave a length that it had ruled out.
    #[error("{function} gave {bytes} bytes for {elements} elements, but ronde_bound says at most {bound}")]
    Length {
        /// The function that was called.
        function: &'static str,
        /// What it gave.
        bytes: i64,
        /// For so many elements.
        elements: usize,
        /// The most.
        bound: usize,
    },
    /// The plugin's bound is no bound.
    #[error("ronde_bound says {bound} bytes for {elements} elements, which {problem}")]
    Bound {
        /// What it says.
        bound: i64,
        /// For so many elements.
        elements: usize,
        /// What is wrong with that.
        problem: String,
    },
    /// A function gave something else than zero or a code.
    #[error("{function} gave {value}, but gives 0 or a negative code")]
    Result {
        /// The function that was called.
        function: &'static str,
        /// What it gave.
        value: i32,
    },
    /// The plugin refused the call.
    #[error("{function} failed with code {code}: {}", codes::meaning(*code))]
    Code {
        /// The function that was called.
        function: &'static str,
        /// Its code.
        code: i32,
    },
    /// It is started, but not what its manifest says: another ABI version, buffers that do not lie as they have to.
    #[error("{0}")]
    Start(String),
    /// This host could not start it, for want of memory or room for it; the plugin is not to blame.
    #[error(
        "it could not be started, as this host lacks memory: {0}; give the sidecar more (ulimit -v, the limit of its \
         container), or use fewer plugins"
    )]
    Host(String),
    /// The plugin does not run any more.
    #[error("it is disabled since it failed {faults} times, at last so: {last}")]
    Disabled {
        /// How often it failed.
        faults: u32,
        /// The last failure.
        last: String,
    },
    /// The call is not one that this plugin takes; the plugin was not called.
    #[error("{0}")]
    Refused(String),
}

impl FaultKind {
    /// Whether the plugin broke the rules, which counts towards its being disabled. To fail with a code is within them.
    #[must_use]
    pub const fn is_misbehaviour(&self) -> bool {
        match self {
            Self::Trap { .. } | Self::Deadline { .. } | Self::Length { .. } | Self::Bound { .. } => true,
            Self::Result { .. } | Self::Start(_) => true,
            Self::Code { .. } | Self::Host(_) | Self::Disabled { .. } | Self::Refused(_) => false,
        }
    }
}

/// What a plugin logged, behind what went wrong.
fn logged(log: &[String]) -> String {
    if log.is_empty() { String::new() } else { format!("; it logged: {}", log.join(" / ")) }
}

/// Too much of something in a module.
pub(crate) fn too_long(what: &'static str, bytes: usize, max: usize) -> Result<(), LoadError> {
    if bytes > max { Err(LoadError::TooLong { what, bytes, max }) } else { Ok(()) }
}

/// Text of a plugin or a library in one short line without control characters.
pub(crate) fn one_line(text: &str) -> String {
    let line = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    line.take(limits::LOG_BYTES_MAX).collect()
}
