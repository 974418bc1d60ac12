//! Which plugins a sidecar loads.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where plugins come from and which are let in, as the launcher or the command line says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PluginSettings {
    /// Modules, or directories with modules. A plugin goes by the name in its manifest.
    pub paths: Vec<PathBuf>,
    /// Files with public keys: only what one of them has signed is let in.
    pub keys: Vec<PathBuf>,
    /// SHA-256 digests in hexadecimal digits: only these modules are let in.
    pub digests: Vec<String>,
    /// Bytes of state that codecs keep. Default: `limits::PLUGIN_STATE_BYTES` of ronde-wire.
    pub state_bytes_max: Option<u64>,
}
