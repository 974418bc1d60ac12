//! Errors of the host, of loading a module, and of calls.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use ronde_plugin_abi::{codes, limits};

use crate::manifest::ManifestError;
use crate::trust::TrustError;

/// Why a host cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The compiler cannot be set up for this machine.
    #[error("WebAssembly cannot run on this machine: {0}")]
    Engine(String),
    /// The folder of compiled modules is unusable.
    #[error("the folder of compiled plugins {}: {problem}; name another one, or remove it", path.display())]
    Cache {
        /// The folder.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A limit exceeds what any host may grant.
    #[error("the limit on {what} is {given}, but may be 1 to {max}")]
    Limit {
        /// The name of the limit.
        what: &'static str,
        /// The given value.
        given: u64,
        /// The largest value.
        max: u64,
    },
    /// The ticker thread cannot be started.
    #[error("the thread that enforces deadlines cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Why a module is not loaded. The caller, which knows the file, adds its name.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The module is too large.
    #[error("the module has {bytes} bytes, but may have {max} of {what}")]
    TooLong {
        /// What was measured.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The policy rejects the plugin, or its signature is wrong.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The module is invalid or uses features that plugins may not use.
    #[error("this is not a valid plugin module: {0}")]
    Invalid(String),
    /// The module does not have exactly one manifest.
    #[error("the module has {found} sections named {}, but must have exactly one", ronde_plugin_abi::names::MANIFEST)]
    Manifests {
        /// Number of manifests.
        found: usize,
    },
    /// The manifest is invalid.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// The module has an import that plugins may not have.
    #[error(
        "the module imports {module:?} {name:?}; a plugin imports nothing but the function \"ronde\" \"log\" of (i32, i32)"
    )]
    Import {
        /// The imported module.
        module: String,
        /// The imported name.
        name: String,
    },
    /// An export is missing or has another type.
    #[error("the module exports {found} as {name}, but must export {wanted} by that name")]
    Export {
        /// Its name.
        name: &'static str,
        /// What is exported.
        found: String,
        /// What must be exported.
        wanted: &'static str,
    },
    /// The plugin requests more than this host grants.
    #[error("the plugin requests {wanted} {what}, but this host grants {granted}")]
    Wants {
        /// The resource.
        what: &'static str,
        /// The requested amount.
        wanted: u64,
        /// The granted amount.
        granted: u64,
    },
    /// The module cannot be compiled.
    #[error("the module cannot be compiled: {0}")]
    Compile(String),
    /// This program was built without the compiler.
    #[error("this build of ronde has no compiler for plugins, as that of `make demo`; `make build` makes one that has")]
    NoCompiler,
    /// The plugin does not start, or rejects its own defaults.
    #[error("the plugin does not start: {kind}{}", logged(log))]
    Start {
        /// The problem.
        kind: FaultKind,
        /// What the plugin logged.
        log: Vec<String>,
    },
}

/// A failed call: the plugin, the problem, and the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The plugin's name and version.
    pub plugin: Arc<str>,
    /// The problem.
    pub kind: FaultKind,
    /// The plugin's log messages during the call, within limits.
    pub log: Vec<String>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "plugin {}: {}{}", self.plugin, self.kind, logged(&self.log))
    }
}

impl std::error::Error for Fault {}

/// What went wrong in a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    /// The module trapped.
    #[error("{function} trapped: {reason}")]
    Trap {
        /// The called function.
        function: &'static str,
        /// wasmtime's reason.
        reason: String,
    },
    /// The call exceeded its deadline.
    #[error("{function} took longer than {milliseconds} ms")]
    Deadline {
        /// The called function.
        function: &'static str,
        /// The limit for a call.
        milliseconds: u32,
    },
    /// The plugin returned more bytes than its bound allows.
    #[error("{function} returned {bytes} bytes for {elements} elements, but the bound is {bound}")]
    Length {
        /// The called function.
        function: &'static str,
        /// The returned number of bytes.
        bytes: i64,
        /// The number of elements.
        elements: usize,
        /// The bound.
        bound: usize,
    },
    /// The plugin's bound is invalid.
    #[error("ronde_bound returned {bound} bytes for {elements} elements, which {problem}")]
    Bound {
        /// The returned bound.
        bound: i64,
        /// The number of elements.
        elements: usize,
        /// The problem with the bound.
        problem: String,
    },
    /// The function returned neither zero nor an error code.
    #[error("{function} returned {value}, but must return 0 or a negative error code")]
    Result {
        /// The called function.
        function: &'static str,
        /// The returned value.
        value: i32,
    },
    /// The plugin returned an error code.
    #[error("{function} failed with code {code}: {}", codes::meaning(*code))]
    Code {
        /// The called function.
        function: &'static str,
        /// The error code.
        code: i32,
    },
    /// The started module contradicts its manifest: another ABI version, or invalid buffers.
    #[error("{0}")]
    Start(String),
    /// This host lacks memory or address space to start the plugin; the plugin is not to blame.
    #[error(
        "it could not be started, because this host lacks memory: {0}; give the sidecar more (ulimit -v, the limit of its \
         container), or use fewer plugins"
    )]
    Host(String),
    /// The plugin is disabled.
    #[error("it is disabled because it failed {faults} times; the last failure: {last}")]
    Disabled {
        /// Number of failures.
        faults: u32,
        /// The last failure.
        last: String,
    },
    /// The plugin does not support this call; it was not called.
    #[error("{0}")]
    Refused(String),
}

impl FaultKind {
    /// Whether the plugin violated the interface, which counts towards disabling it. Returning an error code does not.
    #[must_use]
    pub const fn is_misbehaviour(&self) -> bool {
        match self {
            Self::Trap { .. } | Self::Deadline { .. } | Self::Length { .. } | Self::Bound { .. } => true,
            Self::Result { .. } | Self::Start(_) => true,
            Self::Code { .. } | Self::Host(_) | Self::Disabled { .. } | Self::Refused(_) => false,
        }
    }
}

/// Formats a plugin's log messages, to append to an error.
fn logged(log: &[String]) -> String {
    if log.is_empty() { String::new() } else { format!("; it logged: {}", log.join(" / ")) }
}

/// Returns [`LoadError::TooLong`] if a part of a module exceeds its limit.
pub(crate) fn too_long(what: &'static str, bytes: usize, max: usize) -> Result<(), LoadError> {
    if bytes > max { Err(LoadError::TooLong { what, bytes, max }) } else { Ok(()) }
}

/// Shortens foreign text to one line without control characters.
pub(crate) fn one_line(text: &str) -> String {
    let line = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter });
    line.take(limits::LOG_BYTES_MAX).collect()
}
