//! The program `ronde`: reads the command line and calls the sidecar, the launcher or a tool.
//!
//! | subcommand | what | where |
//! |---|---|---|
//! | `run`, `agent`, `exec-worker`, `worker` | starts a job and watches over it | [`ronde_launcher`] |
//! | `sidecar` | serves the workers of one host | [`ronde_sidecar`] |
//! | `check` | checks whether hosts are fit for jobs | [`ronde_launcher::check`] |
//! | `certs` | makes and shows keys and certificates | [`certs`] |
//! | `debug` | reads what sidecars have recorded | [`debug`] |
//! | `status`, `top` | shows what sidecars are doing | [`status`], [`top`] |
//! | `job` | shows and changes an elastic job | [`job`] |
//! | `plugin` | builds, tests and signs plugins | [`plugin`] |
//! | `tune` | searches for the best settings of jobs | [`tune`] |
//! | `bench` | measures ronde against its peers | [`mod@bench`] |
//! | `explain` | explains an error code | [`explain`] |
//! | `completions`, `version` | prints a shell's completion script, the versions | here |

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{answer, answered, fail};
use ronde_bootstrap::terminal::has_sequences;
use ronde_launcher::{agent, check, job, run};
use ronde_sidecar::process;
use ronde_sidecar::process::arguments::SidecarArgs;
use ronde_wire::frame::{PLANNER_VERSION, WIRE_VERSION, WIRE_VERSION_MIN};

mod arguments;
mod bench;
mod certs;
#[cfg(test)]
#[path = "../../closed_port.rs"]
mod closed_port;
mod debug;
#[cfg(test)]
#[path = "../../documents.rs"]
mod documents;
mod explain;
mod layers;
mod plugin;
mod status;
mod top;
mod tune;

/// Encrypted communication for data-parallel training.
#[derive(Parser)]
#[command(name = "ronde", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start a job: its sidecars and workers, and supervise them.
    Run(Box<run::RunArgs>),
    /// Serve the workers of this host.
    Sidecar(Box<SidecarArgs>),
    /// Start and supervise processes on this host for a launcher on standard input and output.
    #[command(hide = true)]
    Agent,
    /// Become a worker that ends with its agent.
    #[command(hide = true)]
    ExecWorker(agent::exec::ExecArgs),
    /// Become a worker of the job whose workers the command of `ronde run --starter` starts.
    Worker(run::WorkerArgs),
    /// Make and inspect keys and certificates of jobs without the launcher.
    Certs(certs::CertsArgs),
    /// Check whether this host, and others, are fit for jobs.
    Check(check::CheckArgs),
    /// Show what the sidecars of this host are doing.
    Status(status::StatusArgs),
    /// Read the newest operations that sidecars have recorded: which ranks are missing, and what was slow.
    Debug(debug::DebugArgs),
    /// Show running jobs in this terminal: ranks, links, throughput, and who waits for whom.
    Top(top::TopArgs),
    /// Show an elastic job that runs, drain one of its hosts, or change its number of workers.
    Job(job::JobArgs),
    /// Write, build, test, sign and inspect plugins: codecs and reducers in a sandbox.
    Plugin(plugin::PluginArgs),
    /// Search for the settings with which jobs are fastest on this machine or these hosts, and write them as a profile.
    Tune(Box<tune::TuneArgs>),
    /// Perform the steps of a training program for `ronde tune`.
    #[command(hide = true)]
    TuneWorker(tune::TuneWorkerArgs),
    /// Measure ronde against its peers on this machine, and check every result.
    Bench(bench::BenchArgs),
    /// Print a shell's completion script for `ronde`.
    Completions(CompletionsArgs),
    /// Explain an error code and what to do.
    Explain(explain::ExplainArgs),
    /// Print the versions: of ronde, and of what two sidecars have to agree on.
    #[command(after_help = VERSION_EXAMPLES)]
    Version,
}

/// Arguments of `ronde completions`.
#[derive(clap::Args, Debug)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
struct CompletionsArgs {
    /// The shell.
    shell: clap_complete::Shell,
}

/// Parses the command line and runs its subcommand.
fn main() -> ExitCode {
    let arguments = arguments::normalise(&Cli::command(), std::env::args_os().collect());
    let layered = layers::layered(with_negative_numbers(Cli::command()), &arguments, &environment());
    let (cli, notices) = match layered {
        Ok(layered) => layered,
        Err(mistakes) => return fail(Code::ConfigFile, &mistakes.to_string()),
    };
    let parsed = cli.try_get_matches_from(arguments.clone()).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            let command = Cli::command();
            let error = arguments::without_wrong_suggestion(&command, &arguments, error);
            return refused(&arguments::with_tip(&command, &arguments, error));
        }
    };
    match cli.command {
        Command::Run(args) => run_job(*args, &arguments, &notices),
        Command::Sidecar(args) => process::main(&args),
        Command::Agent => agent::main(),
        Command::ExecWorker(args) => agent::exec::main(&args),
        Command::Worker(args) => run::worker(&args),
        Command::Certs(args) => certs::main(&args),
        Command::Check(args) => check::main(&args),
        Command::Status(args) => status::main(&args),
        Command::Debug(args) => debug::main(&args),
        Command::Top(args) => top::main(&args),
        Command::Job(args) => job::main(&args),
        Command::Plugin(args) => plugin::main(&args),
        Command::Tune(args) => tune::main(&args),
        Command::TuneWorker(args) => tune::worker(&args),
        Command::Bench(args) => bench::main(&args),
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut shown(&Cli::command()), "ronde", &mut script);
            answer(&String::from_utf8_lossy(&script))
        }
        Command::Explain(args) => explain::main(&args),
        Command::Version => answer(&version()),
    }
}

/// Lets the values of all options and arguments be negative numbers: their parsers name the range, where clap would take
/// such a number for an option that does not exist.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command.allow_negative_numbers(true).mut_subcommands(with_negative_numbers)
}

/// The command with the subcommands that its help shows: shells would offer the others as well.
fn shown(whole: &clap::Command) -> clap::Command {
    let subcommands = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    clap::Command::new("ronde").version(env!("CARGO_PKG_VERSION")).subcommands(subcommands)
}

/// The variables whose names are valid Unicode, as those of all options are.
fn environment() -> BTreeMap<String, OsString> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect()
}

/// Runs a job, after a measurement of the cost model if it was asked for.
fn run_job(args: run::RunArgs, arguments: &[OsString], notices: &[String]) -> ExitCode {
    if !args.calibrate {
        return run::main(args, notices);
    }
    match tune::calibrated(arguments, args.command.len()) {
        Ok(cost) => run::main(args.with_cost(cost), notices),
        Err(error) => tune::failed(&error.context("the cost model was not measured, and the job not started")),
    }
}

/// Prints help and version as answers; everything else is a wrong command line.
fn refused(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return answered(error.print());
    }
    let text = error.render();
    let text = if has_sequences(&std::io::stderr()) { text.ansi().to_string() } else { text.to_string() };
    let _ = write!(std::io::stderr(), "{}", with_code(error.kind(), &text));
    ExitCode::from(Code::CommandLine.exit_status())
}

/// Adds the code to the text of a wrong command line. Without a subcommand clap's text is the help, whose end is seen.
fn with_code(kind: ErrorKind, text: &str) -> String {
    if kind == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return format!("{text}\n{}\n", Code::CommandLine.append_to("error: a subcommand is missing"));
    }
    Code::CommandLine.append_to(text)
}

/// Builds the output of `ronde version`. Two installations work together if their wire versions overlap and their
/// planner versions are equal; the commit is shown if the build knew it.
fn version() -> String {
    let commit = match option_env!("RONDE_COMMIT") {
        Some(commit) if !commit.is_empty() => format!("commit {commit}\n"),
        _ => String::new(),
    };
    let wire = if WIRE_VERSION_MIN == WIRE_VERSION {
        WIRE_VERSION.to_string()
    } else {
        format!("{WIRE_VERSION_MIN} to {WIRE_VERSION}")
    };
    format!("ronde {}\nwire {wire}\nplanner {PLANNER_VERSION}\n{commit}", env!("CARGO_PKG_VERSION"))
}

const EXAMPLES: &str = "Examples:
  ronde run -np 4 python train.py
  ronde run -np 8 -H alpha:4,beta:4 python train.py --epochs 3";

const COMPLETIONS_EXAMPLES: &str = "Examples:
  ronde completions bash > ~/.local/share/bash-completion/completions/ronde
  ronde completions zsh > ~/.zfunc/_ronde";

const VERSION_EXAMPLES: &str = "Examples:
  ronde version
  ronde --version";

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_sidecar_of_one_host_takes_all_options_but_those_of_peers() {
        let parsed = |line: &str| Cli::try_parse_from(format!("ronde sidecar --local-ranks 1 {line}").split(' '));
        let of_container = "--socket-dir s --exit-with-workers 9 --worker-uids 7 --admin-listen a:1 --report r";
        for line in [of_container, "--runtime-dir r --end-with-input"] {
            assert!(parsed(line).is_ok(), "{line}");
        }
        let of_peers =
            ["--certs d", "--job-secret-file f", "--peers a:1", "--placement 0", "--listen ::", "--bootstrap"];
        for line in of_peers.into_iter().chain(["--network-interfaces lo", "--socket-dir s --runtime-dir r"]) {
            assert!(parsed(line).is_err_and(|error| error.to_string().contains("cannot be used with")), "{line}");
        }
    }

    #[test]
    fn every_help_ends_with_two_examples() {
        fn check(command: &clap::Command) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let (_, examples) = help.rsplit_once("Examples:\n").unwrap_or_default();
            let examples: Vec<&str> = examples.lines().collect();
            assert_eq!(examples.len(), 2, "{}: {help}", command.get_name());
            assert!(examples.iter().all(|line| line.starts_with("  ronde ")), "{}: {help}", command.get_name());
            command.get_subcommands().filter(|command| !command.is_hide_set()).for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn arguments_after_the_command_belong_to_the_command() {
        let given =
            ["ronde", "run", "-np", "2", "-H", "a:1,b:1", "python", "train.py", "-np", "9", "--verbose", "--", "-x"];
        let arguments = arguments::normalise(&Cli::command(), given.iter().map(Into::into).collect());
        let Command::Run(args) = Cli::try_parse_from(arguments).expect("a valid command line").command else {
            panic!("not `run`");
        };
        assert_eq!(args.command, ["python", "train.py", "-np", "9", "--verbose", "--", "-x"]);
        assert_eq!(args.num_proc, Some(2));
        assert!(!args.verbose);
    }

    #[test]
    fn every_shell_gets_a_script_that_knows_the_subcommands() {
        for shell in clap::ValueEnum::value_variants() {
            let mut script = Vec::new();
            let command = &mut shown(&Cli::command());
            clap_complete::generate::<clap_complete::Shell, _>(*shell, command, "ronde", &mut script);
            let script = String::from_utf8(script).expect("a script is text");
            for word in ["certs", "num-proc", "completions", "version"] {
                assert!(script.contains(word), "{shell:?}: {word}");
            }
            // Help texts of options have the word `agent`, too; bash has no help texts.
            for hidden in ["exec-worker", "tune-worker", "Start and supervise processes", " sidecar agent "] {
                assert!(!script.contains(hidden), "{shell:?} offers {hidden}");
            }
        }
    }

    #[test]
    fn an_unknown_option_is_not_suggested_as_the_command() {
        let text = |line: &str| {
            let words: Vec<_> = line.split(' ').map(Into::into).collect();
            let arguments = arguments::normalise(&Cli::command(), words);
            let error = Cli::command().try_get_matches_from(arguments.clone()).expect_err(line);
            arguments::without_wrong_suggestion(&Cli::command(), &arguments, error).to_string()
        };
        for line in ["run --admin-listen X -np 2 sh", "tune --bogus X -np 2", "worker --bogus x", "run -np 2 -z sh"] {
            let text = text(&format!("ronde {line}"));
            assert!(text.contains("unexpected argument '-") && !text.contains("tip:"), "{line}: {text}");
        }
        let similar = text("ronde run --verbos -np 2 python x");
        assert!(similar.contains("tip: a similar argument exists: '--verbose'"), "{similar}");
        assert!(!similar.contains("-- --verbos"), "{similar}");
        assert!(text("ronde explain --E203").contains("'-- --E203'"), "it is an argument there");
    }

    #[test]
    fn a_command_line_without_a_subcommand_is_shown_how_jobs_are_started() {
        let text = |line: &str| {
            let arguments: Vec<OsString> = line.split(' ').map(Into::into).collect();
            let error = Cli::command().try_get_matches_from(arguments.clone()).expect_err(line);
            arguments::with_tip(&Cli::command(), &arguments, error).to_string()
        };
        let tip = "tip: jobs are started by 'ronde run', as in 'ronde run -np 2 python train.py'";
        for line in ["-np 2 python train.py", "--np 2 python train.py", "-H a:2 python train.py", "python train.py"] {
            let text = text(&format!("ronde {line}"));
            assert!(text.contains(tip), "{line}: {text}");
        }
        for line in ["runn -np 2 python train.py", "help nothing", "run --bogus sh", "status --bogus", "debug bogus"] {
            let text = text(&format!("ronde {line}"));
            assert!(!text.contains(tip), "{line}: {text}");
        }
    }

    #[test]
    fn a_missing_subcommand_is_named_below_the_help() {
        for line in ["ronde", "ronde debug", "ronde certs"] {
            let error = Cli::command().try_get_matches_from(line.split(' ')).expect_err(line);
            let text = with_code(error.kind(), &error.to_string());
            assert!(
                text.contains("\nUsage: ronde ") && text.ends_with("\nerror: a subcommand is missing [RONDE-E101]\n")
            );
            assert_eq!(text.matches("[RONDE-").count(), 1, "{text}");
        }
        let error = Cli::command().try_get_matches_from(["ronde", "status", "--bogus"]).expect_err("unknown");
        let text = with_code(error.kind(), &error.to_string());
        assert!(text.starts_with("error: unexpected argument '--bogus' found [RONDE-E101]\n"), "{text}");
    }

    #[test]
    fn an_argument_that_is_not_unicode_is_shown() {
        let latin = OsString::from_vec(b"tr\xe4in.py".to_vec());
        let words = ["ronde", "run", "-np", "2", "python"].map(OsString::from);
        let arguments = arguments::normalise(&Cli::command(), words.into_iter().chain([latin]).collect());
        let error = Cli::command().try_get_matches_from(arguments.clone()).expect_err("it is not Unicode");
        let text = arguments::with_tip(&Cli::command(), &arguments, error).to_string();
        assert!(text.contains("tip: it is \"tr\\xE4in.py\"; hosts receive"), "{text}");
    }

    #[test]
    fn the_version_shows_what_sidecars_have_to_agree_on() {
        let version = version();
        let lines: Vec<&str> = version.lines().collect();
        assert_eq!(lines[0], concat!("ronde ", env!("CARGO_PKG_VERSION")));
        assert!(lines[1].starts_with("wire ") && lines[1].ends_with(&WIRE_VERSION.to_string()), "{version}");
        assert_eq!(lines[2], format!("planner {PLANNER_VERSION}"));
    }

    #[test]
    fn a_negative_number_is_a_value_of_every_command_and_refused_with_the_range() {
        for (line, range) in [
            ("run -np -2 python", "--num-proc <N>': it must be a whole number from 1 to 4294967295"),
            (
                "run -np 2 --start-timeout -5 python",
                "--start-timeout <SECONDS>': it must be a whole number from 1 to 86400",
            ),
            ("run -np 2 --arena-mb -1 python", "--arena-mb <MB>': it must be a whole number from 1 to 1048576"),
            ("sidecar --start-timeout -5", "--start-timeout <SECONDS>': it must be a whole number from 1 to 86400"),
            ("status --measure -1", "--measure <SECONDS>': it must be a whole number from 1 to 60"),
            ("top --interval -1", "--interval <SECONDS>': it must be a whole number from 1 to 60"),
            ("check --ssh-port -1", "--ssh-port <PORT>': it must be a whole number from 1 to 65535"),
            ("job scale -3", "<WORKERS>': it must be a whole number from 0 to 4294967295"),
            ("tune -np 2 --samples -1", "--samples <N>': it must be a whole number from 1 to 256"),
            ("plugin bench --time -1 int8", "--time <MS>': it must be a whole number from 1 to 60000"),
            (
                "certs issue --days -1 --authority a --sidecars 0 b",
                "--days <DAYS>': it must be a whole number from 1 to 3650",
            ),
        ] {
            let words = format!("ronde {line}").split(' ').map(Into::into).collect();
            let cli = with_negative_numbers(Cli::command());
            let error = cli.try_get_matches_from(arguments::normalise(&Cli::command(), words)).expect_err(line);
            assert!(error.to_string().contains(range), "{line}: {error}");
        }
    }

    #[test]
    fn an_unknown_flag_is_not_taken_for_the_command() {
        assert!(Cli::try_parse_from(["ronde", "run", "--num-proc", "2", "--bogus", "python"]).is_err());
    }
}
