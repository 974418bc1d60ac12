//! `ronde bench cipher`: the rates of AES-128-GCM on this processor, which the cost of a byte between hosts is compared with.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::Parser;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{answer, fail};
use ronde_transport::{CIPHER_RECORD_BYTES, CipherRate, cipher_rates};
use serde::Serialize;

/// Arguments of `ronde bench cipher`.
#[derive(Parser, Debug)]
#[command(
    name = "ronde bench cipher",
    about = "Measure how fast one core encrypts and decrypts records of tensors, by each library that ronde has.",
    after_help = "Example:\n  ronde bench cipher --json"
)]
struct CipherArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// What `--json` prints. Rates are in 10^9 bytes per second.
#[derive(Serialize)]
struct Report {
    cipher: &'static str,
    record_bytes: usize,
    libraries: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    name: &'static str,
    encrypts_gb_s: f64,
    decrypts_gb_s: f64,
    used: bool,
}

/// Measures, and prints. `arguments` begin after `cipher`.
pub(super) fn main(arguments: &[std::ffi::OsString]) -> ExitCode {
    let words = std::iter::once("ronde bench cipher".into()).chain(arguments.iter().cloned());
    let args = match CipherArgs::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => return crate::refused(&error),
    };
    let report = match cipher_rates() {
        Ok(rates) => Report::of(&rates),
        Err(error) => return fail(Code::Bug, &format!("{:#}", anyhow::Error::new(error))),
    };
    answer(&if args.json { report.json() } else { report.table() })
}

impl Report {
    fn of(rates: &[CipherRate]) -> Self {
        let row = |rate: &CipherRate| Row {
            name: rate.library,
            encrypts_gb_s: rate.encrypts / GB,
            decrypts_gb_s: rate.decrypts / GB,
            used: rate.is_used,
        };
        Self { cipher: "AES-128-GCM", record_bytes: CIPHER_RECORD_BYTES, libraries: rates.iter().map(row).collect() }
    }

    fn json(&self) -> String {
        // Numbers and fixed names have no reason to fail.
        serde_json::to_string_pretty(self).map(|text| text + "\n").unwrap_or_default()
    }

    fn table(&self) -> String {
        let Self { cipher, record_bytes, libraries } = self;
        let mut text = format!("{cipher}, records of {record_bytes} bytes in the cache of one core\n");
        for Row { name, encrypts_gb_s, decrypts_gb_s, used } in libraries {
            let used = if *used { "  used for tensors between hosts over TCP" } else { "" };
            // A string cannot fail to be written to.
            let _ = writeln!(
                text,
                "  {name:<8} encrypts {encrypts_gb_s:>6.2} GB/s, decrypts {decrypts_gb_s:>6.2} GB/s{used}"
            );
        }
        text
    }
}

const GB: f64 = 1e9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_in_use_is_marked() {
        let rate = |library, is_used| CipherRate { library, encrypts: 2.5e9, decrypts: 1e9, is_used };
        let report = Report::of(&[rate("aws-lc", false), rate("ring", true)]);
        let table = report.table();
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines[0], "AES-128-GCM, records of 16384 bytes in the cache of one core");
        assert_eq!(lines[1], "  aws-lc   encrypts   2.50 GB/s, decrypts   1.00 GB/s");
        assert!(lines[2].starts_with("  ring ") && lines[2].ends_with("  used for tensors between hosts over TCP"));
        let json: serde_json::Value = serde_json::from_str(&report.json()).expect("JSON");
        assert_eq!(json["libraries"][1]["used"], true);
        assert_eq!(json["libraries"][0]["encrypts_gb_s"], 2.5);
    }
}
