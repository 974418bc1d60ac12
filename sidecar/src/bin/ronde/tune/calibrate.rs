//! `ronde run --calibrate`: measures the cost model with a job of its own, before the one that was asked for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use ronde_bootstrap::profile::Cost;

use super::child::Signals;
use super::found::Reported;

/// Measures the cost model with a job of the same options, before the one that was asked for. `arguments` is the command line
/// of that, whose last `command_words` words are its command.
///
/// # Errors
/// When that job fails, or the user ends it.
pub(crate) fn calibrated(arguments: &[OsString], command_words: usize) -> anyhow::Result<Cost> {
    let signals = Signals::install()?;
    let folder = private_folder()?;
    let report = folder.join("report.json");
    let options = &arguments[1..arguments.len().saturating_sub(command_words)];
    let ended = measuring(options, &report).and_then(|command| signals.run(&command));
    let reported = Reported::read(&report);
    drop(std::fs::remove_dir_all(&folder));
    ended?;
    let Reported { sidecars, cost } = reported?;
    ensure!(
        sidecars > 1,
        "nothing was measured: the job has one sidecar, so that nothing is sent; leave out --calibrate"
    );
    cost.context("nothing was measured: too few operations were performed alone; run it again")
}

/// The measuring job. It has no use for the input of the job that was asked for, and must leave it to that.
fn measuring(options: &[OsString], report: &Path) -> anyhow::Result<Command> {
    let ronde = std::env::current_exe().context("cannot find the ronde binary")?;
    let mut command = Command::new(&ronde);
    command.args(without(options, &SWITCHES, &VALUED));
    for variable in ["HOROVOD_TIMELINE", "RONDE_RUN_TIMELINE_FILENAME", "RONDE_RUN_STDIN"] {
        command.env_remove(variable);
    }
    command.env("RONDE_RUN_CALIBRATE", "0").env("RONDE_RUN_AUTOTUNE", "0");
    command.args(["--no-autotune", "--measure-cost", "--report"]).arg(report).arg("--");
    command.arg(&ronde).arg("tune-worker");
    Ok(command)
}

/// Makes a folder that only this user can enter, under a name that nobody can foresee.
fn private_folder() -> anyhow::Result<PathBuf> {
    use std::hash::{BuildHasher, RandomState};
    use std::os::unix::fs::DirBuilderExt;
    let number = RandomState::new().hash_one(std::process::id());
    let folder = std::env::temp_dir().join(format!("ronde-calibration-{number:016x}"));
    let made = std::fs::DirBuilder::new().mode(0o700).create(&folder);
    made.with_context(|| format!("cannot make the folder {}", folder.display()))?;
    Ok(folder)
}

/// Switches that a measurement sets itself.
pub(super) const SWITCHES: [&str; 4] = ["--calibrate", "--measure-cost", "--autotune", "--no-autotune"];
/// Options for the job that was asked for alone.
const VALUED: [&str; 4] = ["--report", "--output-filename", "--timeline-filename", "--stdin"];

/// Options without some of them: those that take no value, those that take one, and `--`.
pub(super) fn without(options: &[OsString], switches: &[&str], valued: &[&str]) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut rest = options.iter();
    while let Some(option) = rest.next() {
        let text = option.to_string_lossy();
        if valued.contains(&&*text) {
            rest.next();
            continue;
        }
        let name = text.split('=').next().unwrap_or_default();
        if text != "--" && !switches.contains(&&*text) && !valued.contains(&name) {
            kept.push(option.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_the_measuring_job_are_the_same_but_for_a_few() {
        let words = |line: &str| line.split_whitespace().map(OsString::from).collect::<Vec<_>>();
        let line =
            "run --num-proc 2 --calibrate --report a.json -H a:1,b:1 --report=b.json --output-filename d --stdin 1 --";
        let kept = without(&words(line), &SWITCHES, &VALUED);
        assert_eq!(kept, words("run --num-proc 2 -H a:1,b:1"));
    }
}
