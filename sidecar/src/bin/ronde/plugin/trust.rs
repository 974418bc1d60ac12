//! `ronde plugin keygen`, `sign` and `verify`.

use std::path::PathBuf;

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_plugin_host::trust::{
    Signature, TrustError, create_key, read_public_key, read_signature, read_signing_key, signature_path,
    write_signature,
};

use super::read;

/// Arguments of `ronde plugin keygen`.
#[derive(Args, Debug)]
#[command(after_help = KEYGEN_EXAMPLES)]
pub(super) struct KeygenArgs {
    /// The private key's file to make, with mode 0600. The public key goes to FILE.pub.
    file: PathBuf,
}

/// Arguments of `ronde plugin sign`.
#[derive(Args, Debug)]
#[command(after_help = SIGN_EXAMPLES)]
pub(super) struct SignArgs {
    /// The private key's file.
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    /// The modules. Each signature is written next to its module, with .sig appended to the name.
    #[arg(required = true, value_name = "PLUGIN.wasm")]
    plugins: Vec<PathBuf>,
}

/// Arguments of `ronde plugin verify`.
#[derive(Args, Debug)]
#[command(after_help = VERIFY_EXAMPLES)]
pub(super) struct VerifyArgs {
    /// The public key's file.
    #[arg(long, value_name = "FILE.pub")]
    key: PathBuf,
    /// The modules.
    #[arg(required = true, value_name = "PLUGIN.wasm")]
    plugins: Vec<PathBuf>,
}

pub(super) fn keygen(args: &KeygenArgs) -> anyhow::Result<String> {
    let (key, public) = create_key(&args.file).context(Code::PluginTrust)?;
    let (file, id) = (args.file.display(), key.id());
    Ok(format!(
        "{file}: signs plugins as {id}; keep it secret\n{}: the public key, for those who trust it\n",
        public.display()
    ))
}

pub(super) fn sign(args: &SignArgs) -> anyhow::Result<String> {
    let key = read_signing_key(&args.key).context(Code::PluginTrust)?;
    // Inspect all of them before signing any: only plugins are signed.
    let mut signed = Vec::new();
    for path in &args.plugins {
        let bytes = read(path)?;
        ronde_plugin_host::inspect(&bytes).with_context(|| format!("{} is not a plugin", path.display()))?;
        signed.push((path, Signature::of(&bytes, &key)));
    }
    let mut text = String::new();
    for (path, signature) in signed {
        let written = write_signature(path, &signature).context(Code::PluginTrust)?;
        text.push_str(&format!("{}: {} signs {}\n", written.display(), key.public_key().id(), path.display()));
    }
    Ok(text)
}

pub(super) fn verify(args: &VerifyArgs) -> anyhow::Result<String> {
    let key = read_public_key(&args.key).context(Code::PluginTrust)?;
    let mut text = String::new();
    for path in &args.plugins {
        let verified = || {
            let signature = read_signature(path)?
                .ok_or_else(|| anyhow!("it is not signed: there is no {}", signature_path(path).display()))?;
            signature.verify(&read(path)?)?;
            let other = TrustError::UnknownKey { key: signature.key().id(), keys: vec![key.id()] };
            ensure!(*signature.key() == key, other);
            Ok(())
        };
        verified().with_context(|| path.display().to_string()).context(Code::PluginTrust)?;
        text.push_str(&format!("ok: {} is unchanged since {} signed it\n", path.display(), key.id()));
    }
    Ok(text)
}

const KEYGEN_EXAMPLES: &str = "Examples:
  ronde plugin keygen release
  ronde plugin keygen ~/.config/ronde/plugins.key";
const SIGN_EXAMPLES: &str = "Examples:
  ronde plugin sign --key release my-codec.wasm
  ronde plugin sign --key release topk.wasm median.wasm";
const VERIFY_EXAMPLES: &str = "Examples:
  ronde plugin verify --key release.pub my-codec.wasm
  ronde plugin verify --key release.pub topk.wasm median.wasm";
