//! `ronde plugin check` and `ronde plugin test`.

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::print;
use ronde_plugin_host::trust::{Policy, digest_from_text, digest_text, read_public_key};
use ronde_plugin_host::{conformance, determinism};

use super::PluginWithParameters;

/// Arguments of `ronde plugin check`.
#[derive(Args, Debug)]
#[command(after_help = CHECK_EXAMPLES)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    plugin: PluginWithParameters,
    /// Trust it only if this key has signed it: a public key's file. Several: any of them.
    #[arg(long, value_name = "KEY.pub", conflicts_with = "digest")]
    key: Vec<PathBuf>,
    /// Trust it only if this is its SHA-256. Several: any of them.
    #[arg(long, value_name = "SHA256")]
    digest: Vec<String>,
}

/// Arguments of `ronde plugin test`.
#[derive(Args, Debug)]
#[command(after_help = TEST_EXAMPLES)]
pub(super) struct TestArgs {
    #[command(flatten)]
    plugin: PluginWithParameters,
}

pub(super) fn check(args: &CheckArgs) -> anyhow::Result<String> {
    let (plugin, parameters) = args.plugin.load(policy(args).context(Code::PluginTrust)?)?;
    determinism::check(&plugin, &parameters).context(Code::PluginFailed)?;
    let signed = plugin.signer().map_or_else(|| "not signed".to_owned(), |key| format!("signed by {key}"));
    let shown = parameters.to_string();
    let with = if shown.is_empty() { String::new() } else { format!(" with {shown}") };
    Ok(format!(
        "ok: {}{with} loads, and gives equal output for equal input\n    SHA-256 {}, {signed}\n",
        plugin.label(),
        digest_text(&plugin.digest())
    ))
}

fn policy(args: &CheckArgs) -> anyhow::Result<Policy> {
    if !args.key.is_empty() {
        return Ok(Policy::Keys(args.key.iter().map(|path| read_public_key(path)).collect::<Result<_, _>>()?));
    }
    if !args.digest.is_empty() {
        return Ok(Policy::Digests(args.digest.iter().map(|text| digest_from_text(text)).collect::<Result<_, _>>()?));
    }
    Ok(Policy::Unsigned)
}

pub(super) fn test(args: &TestArgs) -> anyhow::Result<String> {
    let (plugin, parameters) = args.plugin.load(Policy::Unsigned)?;
    let (mut text, mut passed, mut failed) = (String::new(), 0, 0);
    conformance::run(&plugin, &parameters, |outcome| {
        let dtype = outcome.dtype.map_or_else(String::new, |dtype| format!(" of {dtype}"));
        match &outcome.problem {
            None => {
                passed += 1;
                text.push_str(&format!("ok    {}{dtype}\n", outcome.check));
            }
            Some(problem) => {
                failed += 1;
                text.push_str(&format!("fail  {}{dtype}: {problem}\n", outcome.check));
            }
        }
    });
    let label = plugin.label();
    if failed > 0 {
        print(&text)?;
        return Err(anyhow!("{label} fails {failed} of {} checks", passed + failed)).context(Code::PluginFailed);
    }
    text.push_str(&format!("{label} passes {passed} checks\n"));
    Ok(text)
}

const CHECK_EXAMPLES: &str = "Examples:
  ronde plugin check my-codec.wasm
  ronde plugin check --key release.pub --set ratio=0.05 topk";
const TEST_EXAMPLES: &str = "Examples:
  ronde plugin test my-codec.wasm
  ronde plugin test --set ratio=0.5 topk";
