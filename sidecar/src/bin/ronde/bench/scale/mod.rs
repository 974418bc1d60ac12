//! `ronde bench scale`: predicts training steps on more hosts than there are here, and draws them.

mod document;
mod measured;
mod model;
mod plot;
pub(crate) mod workloads;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{fail_with, print};
use ronde_bootstrap::profile::Profile;

use self::measured::MACHINE;
use self::model::Machine;

/// Predict the time of training steps on up to 512 GPUs and 1,024 hosts by ronde's cost model, and say what limits them.
#[derive(Parser, Debug)]
#[command(name = "ronde bench scale", after_help = EXAMPLES, allow_negative_numbers = true)]
struct ScaleArgs {
    /// Take alpha and gamma from a profile of `ronde tune`, instead of those that docs/SCALE.md has.
    #[arg(long, value_name = "FILE")]
    tuning: Option<PathBuf>,
    /// The rate of each host's link in Gbit/s, for the tables of one rate.
    #[arg(long, value_name = "RATE", default_value_t = MACHINE.link_gbit, value_parser = positive)]
    link_gbit: f64,
    /// Cores of each host that are free for communication.
    #[arg(long, value_name = "N", default_value_t = MACHINE.cores, value_parser = positive)]
    cores: f64,
    /// Microseconds of a host's processor time for each byte that it sends (and receives).
    #[arg(long, value_name = "US", default_value_t = MACHINE.cpu_us_per_byte, value_parser = positive)]
    cpu_us_per_byte: f64,
    /// Write the plot to FILE, as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Prints the tables, and writes the plot. `arguments` begin behind `scale`.
pub(super) fn main(arguments: &[std::ffi::OsString]) -> ExitCode {
    let words = std::iter::once("ronde bench scale".into()).chain(arguments.iter().cloned());
    let args = match ScaleArgs::try_parse_from(words) {
        Ok(args) => args,
        Err(error) => return crate::refused(&error),
    };
    let machine = match args.machine() {
        Ok(machine) => machine,
        Err(error) => return fail_with(&error, Code::Profile),
    };
    if let Err(error) = print(&document::tables(&machine)) {
        return fail_with(&error, Code::OutputLost);
    }
    match args.plot.as_ref().map_or(Ok(()), |path| write(path, &plot::plot(&machine))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail_with(&error, Code::ResultUnwritable),
    }
}

impl ScaleArgs {
    fn machine(&self) -> anyhow::Result<Machine> {
        let Self { link_gbit, cores, cpu_us_per_byte, .. } = *self;
        let given = Machine { cpu_us_per_byte, cores, link_gbit, ..MACHINE };
        let Some(path) = &self.tuning else { return Ok(given) };
        let cost = Profile::read(path)?.cost;
        let cost = cost.with_context(|| format!("{} has no [cost]; ronde tune writes it", path.display()))?;
        Ok(Machine { alpha_us: cost.alpha_us, gamma_us_per_byte: cost.gamma_us_per_byte, ..given })
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.trim().parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("it must be above 0".to_owned()) }
}

const EXAMPLES: &str = "Examples:
  ronde bench scale --plot scale.svg
  ronde bench scale --link-gbit 100 --cores 16
  ronde bench scale --tuning cluster.toml";

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> ScaleArgs {
        ScaleArgs::try_parse_from(format!("x {line}").split_whitespace()).expect("good arguments")
    }

    #[test]
    fn a_profile_gives_alpha_and_gamma() {
        let profile = tempfile::NamedTempFile::new().expect("a file can be made");
        let text = "[cost]\nalpha-us = 9.0\nbeta-us-per-byte = 0.1\ngamma-us-per-byte = 0.002\n";
        std::fs::write(profile.path(), text).expect("ours");
        let machine = args(&format!("--tuning {} --link-gbit 100", profile.path().display())).machine().expect("good");
        assert_eq!(machine, Machine { alpha_us: 9.0, gamma_us_per_byte: 0.002, link_gbit: 100.0, ..MACHINE });
        std::fs::write(profile.path(), "[tuning]\nlanes = 2\n").expect("ours");
        let error = args(&format!("--tuning {}", profile.path().display())).machine().expect_err("no model");
        assert!(format!("{error:#}").contains("has no [cost]"), "{error:#}");
        for line in ["--cores 0", "--link-gbit nan", "--cpu-us-per-byte -1"] {
            let error = ScaleArgs::try_parse_from(format!("x {line}").split_whitespace()).expect_err(line).to_string();
            assert!(error.contains("it must be above 0"), "{error}");
        }
    }

    #[test]
    fn the_document_has_the_tables_and_the_plot_of_the_command() {
        crate::documents::hold("SCALE.md", &document::page());
        crate::documents::hold("scale.svg", &plot::plot(&MACHINE));
    }
}
