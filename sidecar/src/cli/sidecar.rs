//! `ronde sidecar`: its arguments. The work is [`crate::app`]'s.

use clap::Args;

/// Arguments of `ronde sidecar`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SidecarArgs {
    /// Take configuration and certificate from a launcher: one JSON object a line on standard input and output.
    #[arg(long)]
    pub(crate) bootstrap: bool,
}

const EXAMPLES: &str = "A sidecar is normally started by `ronde run`.

Examples:
  ronde sidecar --bootstrap
  ronde sidecar --bootstrap < launcher.jsonl";
