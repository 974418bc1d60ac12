//! `ronde plugin`: write, build, test, sign and inspect codecs and reducers.
//!
//! | subcommand | what | where |
//! |---|---|---|
//! | `new` | begins a plugin in Rust | [`new`] |
//! | `build` | compiles it to a module | [`build`] |
//! | `check`, `test` | checks whether a module conforms | [`conform`] |
//! | `bench` | measures it against the native kernels | [`speed`] |
//! | `inspect` | shows its description | [`inspect`] |
//! | `keygen`, `sign`, `verify` | signs modules and checks signatures | [`trust`] |

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use ronde_plugin_host::trust::{Policy, Signature, read_signature};
use ronde_plugin_host::{Given, Host, HostConfig, LoadError, Parameters, Plugin};

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{answer, fail_with};
use ronde_sidecar::plugins::shipped;

mod build;
mod conform;
mod inspect;
mod new;
mod speed;
mod trust;

/// Arguments of `ronde plugin`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct PluginArgs {
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(Subcommand, Debug)]
enum PluginCommand {
    /// Start a plugin in Rust: a package that builds and passes its tests.
    New(new::NewArgs),
    /// Build a plugin's package for WebAssembly and write NAME.wasm.
    Build(build::BuildArgs),
    /// Check whether a sidecar would run a plugin, and whether it gives equal output for equal input.
    Check(conform::CheckArgs),
    /// Run the conformance list: lengths, extremes, NaN, malformed bytes, cuts, orders.
    Test(conform::TestArgs),
    /// Measure a plugin against the native sum and a plain copy.
    Bench(speed::BenchArgs),
    /// Show a plugin's description, digest, imports and exports.
    Inspect(inspect::InspectArgs),
    /// Make a key that signs plugins.
    Keygen(trust::KeygenArgs),
    /// Sign plugins.
    Sign(trust::SignArgs),
    /// Check whether a key has signed plugins, and whether they are unchanged.
    Verify(trust::VerifyArgs),
}

/// A plugin in a file.
#[derive(Args, Debug)]
struct PluginFile {
    /// The module: a file, or the name of a plugin that comes with ronde.
    #[arg(value_name = "PLUGIN", value_parser = file)]
    plugin: PathBuf,
}

/// A plugin and the values of its parameters.
#[derive(Args, Debug)]
struct PluginWithParameters {
    #[command(flatten)]
    file: PluginFile,
    /// Set a parameter; the others have their defaults.
    #[arg(long, value_name = "NAME=VALUE", value_parser = given)]
    set: Vec<(String, Given)>,
}

/// Runs the subcommand; prints what was made or found.
pub(super) fn main(args: &PluginArgs) -> ExitCode {
    let done = match &args.command {
        PluginCommand::New(args) => new::perform(args),
        PluginCommand::Build(args) => build::perform(args),
        PluginCommand::Check(args) => conform::check(args),
        PluginCommand::Test(args) => conform::test(args),
        PluginCommand::Bench(args) => speed::perform(args),
        PluginCommand::Inspect(args) => inspect::perform(args),
        PluginCommand::Keygen(args) => trust::keygen(args),
        PluginCommand::Sign(args) => trust::sign(args),
        PluginCommand::Verify(args) => trust::verify(args),
    };
    match done {
        Ok(text) => answer(&text),
        Err(error) => fail_with(&error, Code::PluginFile),
    }
}

impl PluginFile {
    fn read(&self) -> anyhow::Result<Vec<u8>> {
        read(&self.plugin)
    }

    /// Loads it as a sidecar with this policy would, but never disables it: each test sees its behaviour.
    fn load(&self, policy: Policy) -> anyhow::Result<Arc<Plugin>> {
        let host = Host::new(HostConfig { policy, disable_after: 0, ..HostConfig::default() })?;
        let signature = self.signature()?;
        let loaded = host.load(&self.read()?, signature.as_ref());
        let code = if matches!(loaded, Err(LoadError::Trust(_))) { Code::PluginTrust } else { Code::PluginFile };
        loaded.with_context(|| format!("{} cannot be loaded", self.plugin.display())).context(code)
    }

    /// Reads the signature next to it, if there is one.
    fn signature(&self) -> anyhow::Result<Option<Signature>> {
        let read = read_signature(&self.plugin);
        read.with_context(|| format!("the signature of {}", self.plugin.display())).context(Code::PluginTrust)
    }
}

impl PluginWithParameters {
    fn load(&self, policy: Policy) -> anyhow::Result<(Arc<Plugin>, Parameters)> {
        let plugin = self.file.load(policy)?;
        let parameters = Parameters::checked(plugin.manifest(), &self.set).context(Code::PluginParameters)?;
        Ok((plugin, parameters))
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns a file, else the module of a shipped plugin, else a path that does not exist.
fn file(text: &str) -> Result<PathBuf, Infallible> {
    let path = PathBuf::from(text);
    Ok(if path.is_file() { path } else { shipped::find(text).unwrap_or(path) })
}

/// Parses `NAME=VALUE`.
fn given(text: &str) -> anyhow::Result<(String, Given)> {
    let (name, value) = text.split_once('=').ok_or_else(|| anyhow!("{text:?} is not NAME=VALUE"))?;
    Ok((name.trim().to_owned(), Given::Text(value.trim().to_owned())))
}

/// Formats a count with separated thousands.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

const EXAMPLES: &str = "Examples:
  ronde plugin new my-codec
  ronde plugin test my-codec.wasm";

#[cfg(test)]
mod tests;
