//! `ronde plugin inspect`: describes a module without running it.

use anyhow::Context;
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_plugin_host::trust::digest_text;
use ronde_plugin_host::{CodecManifest, Inspection, Parameter, Parameters, ReducerManifest};
use serde_json::json;

use super::{PluginFile, grouped};

/// Arguments of `ronde plugin inspect`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct InspectArgs {
    #[command(flatten)]
    file: PluginFile,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

pub(super) fn perform(args: &InspectArgs) -> anyhow::Result<String> {
    let bytes = args.file.read()?;
    let shown = args.file.plugin.display();
    let inspection = ronde_plugin_host::inspect(&bytes).with_context(|| format!("{shown} is not a plugin"))?;
    let signer = match args.file.signature()? {
        None => None,
        Some(signature) => {
            signature.verify(&bytes).with_context(|| format!("{shown}")).context(Code::PluginTrust)?;
            Some(signature.key().id().to_string())
        }
    };
    let signer = signer.as_deref();
    Ok(if args.json { as_json(&inspection, bytes.len(), signer)? } else { as_text(&inspection, bytes.len(), signer) })
}

fn as_text(found: &Inspection, bytes: usize, signer: Option<&str>) -> String {
    let manifest = &found.manifest;
    let mut text = format!("{}: {}\n", manifest.label(), manifest.about);
    let mut line = |name: &str, value: String| text.push_str(&format!("  {name:<11} {value}\n"));
    if let Some(codec) = &manifest.codec {
        line("codec", describe_codec(codec));
    }
    if let Some(reducer) = &manifest.reducer {
        line("reducer", describe_reducer(reducer));
    }
    let defaults = Parameters::defaults(manifest).to_string();
    line("parameters", if defaults.is_empty() { "none".to_owned() } else { format!("{defaults} by default") });
    for Parameter { name, kind, about } in &manifest.parameters {
        line("", format!("{name}: {kind}. {about}"));
    }
    let limits = &manifest.limits;
    let kib = limits.memory_bytes / 1_024;
    line("wants", format!("{kib} KiB of memory, {} ms a call, {} ranks", limits.call_ms, limits.ranks));
    line("file", format!("{} bytes, SHA-256 {}", grouped(bytes), digest_text(&found.digest)));
    line("signed", signer.map_or_else(|| "no".to_owned(), |key| format!("by {key}, rightly")));
    let code = format!("{} functions, {} bytes of code", grouped(found.functions), grouped(found.code_bytes));
    line("module", format!("{code}, {} KiB of memory", found.memory_bytes / 1_024));
    line("imports", if found.imports.is_empty() { "nothing".to_owned() } else { found.imports.join(", ") });
    for (index, (name, kind)) in found.exports.iter().enumerate() {
        line(if index == 0 { "exports" } else { "" }, format!("{name}: {kind}"));
    }
    text
}

fn describe_codec(codec: &CodecManifest) -> String {
    let dtypes: Vec<&str> = codec.dtypes.iter().map(|dtype| dtype.name()).collect();
    let lossless = if codec.lossless { "lossless" } else { "lossy" };
    let elementwise = if codec.elementwise { ", each element by itself" } else { "" };
    let state = codec.state_bytes;
    format!("of {}; {lossless}{elementwise}; {state} bytes of state an element", dtypes.join(", "))
}

fn describe_reducer(reducer: &ReducerManifest) -> String {
    let dtypes: Vec<&str> = reducer.dtypes.iter().map(|dtype| dtype.name()).collect();
    let order = if reducer.commutative { "in any order of ranks" } else { "in the order of ranks" };
    format!("of {}; {}, {order}", dtypes.join(", "), reducer.shape.name())
}

fn as_json(found: &Inspection, bytes: usize, signer: Option<&str>) -> anyhow::Result<String> {
    let manifest: serde_json::Value = serde_json::from_str(&found.manifest_json).context("the manifest is not JSON")?;
    let exports: Vec<_> = found.exports.iter().map(|(name, kind)| json!({"name": name, "type": kind})).collect();
    let value = json!({
        "manifest": manifest,
        "sha256": digest_text(&found.digest),
        "bytes": bytes,
        "signed_by": signer,
        "functions": found.functions,
        "code_bytes": found.code_bytes,
        "memory_bytes": found.memory_bytes,
        "imports": found.imports,
        "exports": exports,
    });
    Ok(format!("{value:#}\n"))
}

const EXAMPLES: &str = "Examples:
  ronde plugin inspect my-codec.wasm
  ronde plugin inspect --json topk";
