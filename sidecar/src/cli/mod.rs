//! The command line: what `ronde` answers to.
//!
//! | subcommand | what | where |
//! |---|---|---|
//! | `run` | starts a job and watches over it | [`run`] |
//! | `sidecar` | serves the workers of one host | [`sidecar`] |
//! | `agent` (hidden) | the launcher's hand on one host | [`agent`] |
//! | `exec-worker` (hidden) | ties a worker's life to its agent's, then becomes the worker | [`agent::exec`] |
//! | `explain` | says what an error code means | [`explain`] |
//! | `version` | prints the version | here |

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use codes::Code;

mod agent;
mod arguments;
pub(crate) mod codes;
#[cfg(test)]
mod documents;
mod envelope;
mod explain;
mod run;
mod sidecar;

pub(crate) use sidecar::SidecarArgs;

/// Encrypted communication for data-parallel training.
#[derive(Parser)]
#[command(name = "ronde", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a job: sidecars, workers, and a watch over both.
    Run(Box<run::RunArgs>),
    /// Serve the workers of this host.
    Sidecar(SidecarArgs),
    /// Start and watch processes on this host for a launcher on standard input and output.
    #[command(hide = true)]
    Agent,
    /// Become a worker that ends with its agent.
    #[command(hide = true)]
    ExecWorker(agent::exec::ExecArgs),
    /// Say what an error code means and what to do.
    Explain(explain::ExplainArgs),
    /// Print the version.
    #[command(after_help = VERSION_EXAMPLES)]
    Version,
}

/// Parses the command line and does what it says.
pub(crate) fn main() -> ExitCode {
    let arguments = arguments::normalise(&Cli::command(), std::env::args_os().collect());
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return refused(&error),
    };
    match cli.command {
        Command::Run(args) => run::main(*args),
        Command::Sidecar(args) => crate::app::main(&args),
        Command::Agent => agent::main(),
        Command::ExecWorker(args) => agent::exec::main(&args),
        Command::Explain(args) => explain::main(&args),
        Command::Version => {
            print(concat!("ronde ", env!("CARGO_PKG_VERSION"), "\n"));
            ExitCode::SUCCESS
        }
    }
}

/// Help and version are answers, everything else is a wrong command line.
fn refused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        // A closed terminal cannot be told anything.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render();
    let text = if std::io::stderr().is_terminal() { text.ansi().to_string() } else { text.to_string() };
    let _ = write!(std::io::stderr(), "{}", Code::CommandLine.mark(&text));
    ExitCode::from(EXIT_USAGE)
}

/// Says why a command cannot do what it was asked for.
fn fail(code: Code, text: &str, exit: u8) -> ExitCode {
    // A closed terminal cannot be told anything.
    let _ = writeln!(std::io::stderr(), "ronde: {}", code.mark(text));
    ExitCode::from(exit)
}

/// Prints an answer; a reader that has gone needs none.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// The exit code of a command line or input file that cannot be used (`EX_USAGE`).
const EXIT_USAGE: u8 = 64;

const EXAMPLES: &str = "Examples:
  ronde run -np 4 python train.py
  ronde run -np 8 -H alpha:4,beta:4 python train.py --epochs 3";

const VERSION_EXAMPLES: &str = "Examples:
  ronde version
  ronde --version";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_help_ends_with_two_examples() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples = help.lines().filter(|line| line.starts_with("  ronde")).count();
            assert_eq!(examples, 2, "{}: {help}", command.get_name());
        }
    }

    #[test]
    fn everything_behind_the_command_belongs_to_it() {
        let given =
            ["ronde", "run", "-np", "2", "-H", "a:1,b:1", "python", "train.py", "-np", "9", "--verbose", "--", "-x"];
        let arguments = arguments::normalise(&Cli::command(), given.iter().map(Into::into).collect());
        let Command::Run(args) = Cli::try_parse_from(arguments).expect("a valid command line").command else {
            panic!("not `run`");
        };
        assert_eq!(args.command, ["python", "train.py", "-np", "9", "--verbose", "--", "-x"]);
        assert_eq!(args.num_proc, 2);
        assert!(!args.verbose);
    }

    #[test]
    fn an_unknown_flag_is_not_taken_for_the_command() {
        assert!(Cli::try_parse_from(["ronde", "run", "--num-proc", "2", "--bogus", "python"]).is_err());
    }
}
