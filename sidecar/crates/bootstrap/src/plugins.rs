//! Which plugins a sidecar loads.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::tuning::mebibytes;

/// Where plugins come from and which are admitted.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PluginSettings {
    /// A plugin, or a directory of plugins, besides those that come with ronde; the same files at the same
    /// place on every host. May be given several times.
    #[arg(long = "plugin", value_name = "FILE|DIR")]
    pub paths: Vec<PathBuf>,
    /// Admit only plugins that the owner of this public key has signed (`ronde plugin keygen`). May be given several times.
    #[arg(long = "plugin-key", value_name = "FILE", conflicts_with = "digests")]
    pub keys: Vec<PathBuf>,
    /// Admit only the plugin with this digest (`sha256sum`). May be given several times.
    #[arg(long = "plugin-digest", value_name = "SHA256")]
    pub digests: Vec<String>,
    /// The most that codecs keep between operations, residuals and the like. [default: 8192]
    #[arg(long = "plugin-state-mb", value_name = "MB", value_parser = mebibytes(1..=1 << 20))]
    pub state_bytes_max: Option<u64>,
}

impl PluginSettings {
    /// The same with paths as seen from this process's directory.
    pub(crate) fn absolute(self) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        let all = |paths: &[PathBuf]| paths.iter().map(absolute).collect();
        Self { paths: all(&self.paths), keys: all(&self.keys), ..self }
    }
}
