//! Programs for `--remote-shell`: other hosts that are this one, or hosts of a [`Network`].

use std::fs;
use std::path::{Path, PathBuf};

use super::write_executable;
use crate::cluster::Network;

/// A remote shell as a script, which records every call.
pub struct RemoteShell {
    directory: tempfile::TempDir,
}

impl RemoteShell {
    /// Creates a script with this body: the host is `$1`, the command line `$2`. Calls are recorded before the body
    /// runs.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn script(body: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("ronde-shell-").tempdir().expect("a temporary directory");
        let shell = Self { directory };
        // One `echo` is one write, so that calls of several hosts do not mix.
        let text = format!("#!/bin/sh\necho \"$1|$2|$#\" >> '{}'\n{body}\n", shell.calls_file().display());
        write_executable(&shell.path(), &text);
        shell
    }

    /// A script that is found as `ssh` in [`RemoteShell::directory`]: `$host` and `$command` are the last two
    /// arguments. Whole command lines are noted.
    ///
    /// # Panics
    /// When it cannot be written.
    #[must_use]
    pub fn as_ssh(body: &str) -> Self {
        let shell = Self::script("exit 1");
        let words = "for word; do host=$command; command=$word; done";
        let text = format!("#!/bin/sh\necho \"$*\" >> '{}'\n{words}\n{body}\n", shell.calls_file().display());
        write_executable(&shell.directory().join("ssh"), &text);
        shell
    }

    /// Where the script is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Every host is this one.
    #[must_use]
    pub fn here() -> Self {
        Self::script("exec sh -c \"$2\"")
    }

    /// Reaches the first `hosts` hosts of a network by their addresses.
    #[must_use]
    pub fn into_network(network: &Network, hosts: u32) -> Self {
        Self::by_name(network, &(0..hosts).map(|host| network.address(host)).collect::<Vec<_>>())
    }

    /// Reaches the first hosts of a network by these names.
    #[must_use]
    pub fn by_name(network: &Network, names: &[impl AsRef<str>]) -> Self {
        let names: String = (0..)
            .zip(names)
            .map(|(host, name)| format!("{}) name={};;\n", name.as_ref(), network.host(host)))
            .collect();
        Self::script(&format!(
            "case \"$1\" in\n{names}*) echo \"no host $1\" >&2; exit 255;;\nesac\nexec ip netns exec \"$name\" sh -c \"$2\""
        ))
    }

    /// The script, for `--remote-shell`.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("remote-shell")
    }

    /// Each call so far: host, command line and number of arguments, separated by bars.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.calls_file()).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn calls_file(&self) -> PathBuf {
        self.directory().join("calls")
    }
}
