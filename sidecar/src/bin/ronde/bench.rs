//! `ronde bench`: executes the Python package `ronde.bench`, which measures ronde through its Python client; and
//! `ronde bench scale`, which predicts, and `ronde bench cipher`, which need no Python.

mod cipher;
pub(crate) mod scale;

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, anyhow, ensure};
use clap::Args;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::fail_with;

/// Arguments of `ronde bench`.
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_help = EXAMPLES)]
pub(super) struct BenchArgs {
    /// What to measure, and options; `ronde bench collectives --help` and so on list them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

/// Replaces this process by the benchmark, whose exit code is then this process's; returns only on failure.
pub(super) fn main(args: &BenchArgs) -> ExitCode {
    if let Some((first, rest)) = args.arguments.split_first() {
        if first == "scale" {
            return scale::main(rest);
        }
        if first == "cipher" {
            return cipher::main(rest);
        }
    }
    let error = match prepare(args, &interpreter()) {
        // On success nothing of this process remains.
        Ok(mut command) => anyhow!(command.exec()).context("the benchmark cannot be started"),
        Err(error) => error,
    };
    fail_with(&error, Code::PythonNotRun)
}

/// Builds the benchmark's command line, after checking that the interpreter has the packages that it needs.
fn prepare(args: &BenchArgs, python: &OsStr) -> anyhow::Result<Command> {
    let missing = missing_packages(python, packages(&args.arguments))?;
    let list = missing.join(" ");
    // The SDK comes with its own wheel.
    let install = list.replace("ronde", "dist/ronde-*.whl");
    let shown = python.to_string_lossy();
    ensure!(
        missing.is_empty(),
        anyhow!(
            "{shown} lacks what the benchmark needs: {list}\ninstall it with\n  {shown} -m pip install {install}\nor name \
             another interpreter in {INTERPRETER_VARIABLE}"
        )
        .context(Code::PythonPackages)
    );
    let mut command = Command::new(python);
    command.args(["-m", "ronde.bench"]).args(&args.arguments);
    // The benchmark starts jobs with the binary that the user has called.
    command.env("RONDE_BIN", std::env::current_exe().context("cannot find the ronde binary")?);
    Ok(command)
}

/// Returns the interpreter that is named, else the one of this binary's environment, else the first on `PATH`.
fn interpreter() -> OsString {
    let named = std::env::var_os(INTERPRETER_VARIABLE).filter(|name| !name.is_empty());
    let beside = || std::env::current_exe().ok().map(|ronde| ronde.with_file_name(PYTHON)).filter(|path| path.exists());
    named.or_else(|| beside().map(OsString::from)).unwrap_or_else(|| PYTHON.into())
}

/// Returns the packages needed. Showing a report needs no framework.
fn packages(arguments: &[OsString]) -> &'static [&'static str] {
    match arguments.first().and_then(|word| word.to_str()) {
        Some("report") => &["ronde", "numpy"],
        Some("keras") => &["ronde", "numpy", "tensorflow"],
        _ => &["ronde", "numpy", "torch"],
    }
}

/// Asks an interpreter which packages it lacks; nothing is imported.
fn missing_packages(python: &OsStr, packages: &[&str]) -> anyhow::Result<Vec<String>> {
    let failed = || format!("{} cannot be asked for its packages", python.to_string_lossy());
    let output = Command::new(python)
        .args(["-c", PROBE])
        .args(packages)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("{}; name a Python 3 in {INTERPRETER_VARIABLE}", failed()))?;
    ensure!(output.status.success(), "{}: it ended with {}", failed(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect())
}

const PYTHON: &str = "python3";
/// Names the interpreter.
const INTERPRETER_VARIABLE: &str = "RONDE_PYTHON";
const PROBE: &str =
    "import importlib.util as u, sys; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))";

const ABOUT: &str = "Measure ronde against PyTorch Gloo and Open MPI on this machine, every result checked.

  ronde bench [collectives]  collectives and a training step, backends taking turns
  ronde bench train          samples a second and scaling efficiency of a model
  ronde bench keras          a step of Keras' fit; needs TensorFlow instead of PyTorch
  ronde bench cipher         how fast a core encrypts and decrypts, by each library
  ronde bench report FILE    the tables of an earlier run again; --html PAGE draws runs as one page
  ronde bench scale          predicted steps on up to 512 GPUs and 1,024 hosts; measures nothing

Each lists its options with --help.";

const EXAMPLES: &str = "Examples:
  ronde bench --quick
  ronde bench train --model resnet50 --json resnet50.json";

#[cfg(test)]
mod tests {
    use ronde_bootstrap::codes::coded;

    use super::*;

    #[test]
    fn missing_packages_are_named_with_the_command_that_installs_them() {
        // A program instead of Python that lacks two of the packages.
        let directory = tempfile::tempdir().expect("a directory can be made");
        let python = directory.path().join("python");
        // Another process writes it: one that another thread starts just now would inherit the descriptor, and a file that
        // is open for writing cannot be executed.
        let script = "printf '#!/bin/sh\necho ronde torch\n' > \"$0\" && chmod 755 \"$0\"";
        let written = Command::new("sh").args(["-c", script]).arg(&python).status();
        assert!(written.expect("sh can be started").success());
        let args = BenchArgs { arguments: vec!["--quick".into()] };
        let error = prepare(&args, python.as_os_str()).expect_err("packages are missing");
        let text = coded(&error, Code::PythonNotRun);
        assert!(text.contains("ronde torch [RONDE-E702]\n"), "{text}");
        assert!(text.contains("-m pip install dist/ronde-*.whl torch\n"), "{text}");
    }

    #[test]
    fn an_interpreter_that_is_not_there_is_named() {
        let args = BenchArgs { arguments: Vec::new() };
        let error = prepare(&args, OsStr::new("/no/such/python")).expect_err("it is not there");
        let text = coded(&error, Code::PythonNotRun);
        assert!(text.starts_with("/no/such/python cannot be asked"), "{text}");
        assert!(text.contains("RONDE_PYTHON") && text.contains("[RONDE-E701]"), "{text}");
    }

    #[test]
    fn a_report_needs_no_framework_and_keras_needs_tensorflow() {
        assert_eq!(packages(&["report".into(), "a.json".into()]), ["ronde", "numpy"]);
        assert_eq!(packages(&["keras".into()]), ["ronde", "numpy", "tensorflow"]);
        assert_eq!(packages(&[]), ["ronde", "numpy", "torch"]);
    }
}
