//! Generates `docs/CONFIG.md` from the options.

use clap::{Arg, ArgAction, Args, Command, CommandFactory};

use super::{CONFIGURED, options, variables};
use crate::Cli;

fn document() -> String {
    let cli = Cli::command();
    let sections = CONFIGURED.iter().filter_map(|name| cli.find_subcommand(name)).map(section);
    sections.fold(HEAD.to_owned(), |text, section| text + &section) + TAIL
}

fn section(command: &Command) -> String {
    let name = command.get_name();
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let head = format!(
        "\n## `ronde {name}`, table `[{name}]`\n\n{about}.\n\n| option, key | variable | value | default | what |\n|---|---|---|---|---|\n"
    );
    options(command).fold(head, |text, arg| text + &row(command, arg))
}

fn row(command: &Command, arg: &Arg) -> String {
    let long = arg.get_long().unwrap_or_default();
    let short = arg.get_short().map(|short| format!(", `-{short}`")).unwrap_or_default();
    let (own, horovod) = variables(command, arg);
    let horovod = horovod.map(|name| format!(", else `{name}`")).unwrap_or_default();
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let (what, default) = match help.split_once(" [default: ") {
        Some((what, default)) => (what.to_owned(), default.trim_end_matches(']').to_owned()),
        None => (help.clone(), defaults(arg)),
    };
    format!("| `--{long}`{short} | `{own}`{horovod} | {} | {default} | {what} |\n", value(arg))
}

fn defaults(arg: &Arg) -> String {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return "false".to_owned();
    }
    let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    values.join(",")
}

fn value(arg: &Arg) -> String {
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return "true or false".to_owned();
    }
    let name = arg.get_value_names().and_then(|names| names.first()).map_or("VALUE", |name| name.as_str());
    let list = matches!(arg.get_action(), ArgAction::Append) || arg.get_value_delimiter().is_some();
    if list { format!("`{name}`; in the file also a list") } else { format!("`{name}`") }
}

/// What workers read. It is no option of a command.
const TAIL: &str = "
## Variables of workers

| variable | value | default | what |
|---|---|---|---|
| `RONDE_GPU_STAGING` | `torch` or `ronde` | torch | Who copies tensors on GPUs: PyTorch, or ronde itself, which has not been run on a GPU yet ([GPU.md](GPU.md)). |
| `RONDE_FLIGHT_CALL_SITES` | a switch | 1 | Whether a Python program sends the line of each call along, for flight records and reports of failures. It costs about 1 µs for each call, and more in deep stacks of a framework ([OPERATIONS.md](OPERATIONS.md#a-step-hangs-which-ranks-are-missing)). |
";

const HEAD: &str = "# Configuration

Every option of `ronde run` and `ronde sidecar` can be given on the command line, in the environment, or in a file. If
there are several values, the first in this order counts:

1. the command line;
2. the variable `RONDE_<SUBCOMMAND>_<OPTION>`, then Horovod's variable, if the table names one;
3. the file that `--config` or `RONDE_CONFIG` names;
4. the default.

The file is TOML, with a table for each subcommand whose keys are the long options:

<!-- not run: alpha and beta are not hosts of this network; the tests of `ronde` read such files -->
```toml
[run]
num-proc = 8
hosts = \"alpha:4,beta:4\"
start-timeout = 60
export = [\"NCCL_DEBUG=INFO\"]

[sidecar]
peers = [\"alpha:7400\", \"beta:7400\"]
placement = [0, 0, 0, 0, 1, 1, 1, 1]
```

Mistakes in the file and in variables are reported all at once, each with its line or variable; nothing is started then.
A variable for a switch is true, yes, on or 1, or the opposite; one for a list has commas between its items, but that of
`--export` has one item. Of two options of `ronde run` that exclude each other, the one from the stronger source counts, and
a notice names the other one, unless both are values of one setting, such as `--hosts` and `--hostfile` or a switch and its
opposite. Two from one source are a mistake. `ronde sidecar` refuses such options on its command line only; otherwise
`--local-ranks` counts before options of peers, `--socket-dir` before `--runtime-dir`, and `--listen` before
`--network-interfaces`.
Generated from the options; do not edit.
";

#[test]
fn the_document_lists_every_option() {
    crate::documents::hold("CONFIG.md", &document());
}

#[test]
fn the_example_of_the_document_is_a_good_file() {
    let (_, example) = HEAD.split_once("```toml\n").expect("it is there");
    let (example, _) = example.split_once("```").expect("it ends");
    let mut mistakes = super::Mistakes::default();
    let values = super::file::parse(&Cli::command(), "example", example, &mut mistakes);
    assert_eq!(mistakes.0, Vec::<String>::new());
    assert_eq!(values.len(), 6);
}

#[test]
fn every_option_has_its_own_variable() {
    let cli = Cli::command();
    let commands = CONFIGURED.iter().filter_map(|name| cli.find_subcommand(name));
    let names: Vec<String> =
        commands.flat_map(|command| options(command).map(|arg| variables(command, arg).0)).collect();
    let unique: std::collections::BTreeSet<&String> = names.iter().collect();
    assert!(names.len() > 20 && unique.len() == names.len(), "{names:?}");
}

/// An option of both commands is one field of one struct, so that adding one changes one file.
#[test]
fn an_option_of_both_commands_is_defined_once() {
    let cli = Cli::command();
    let longs = |command: &Command| -> std::collections::BTreeSet<String> {
        command.get_arguments().filter_map(Arg::get_long).map(str::to_owned).collect()
    };
    let of = |name: &str| longs(cli.find_subcommand(name).expect("a command"));
    let shared = ronde_bootstrap::tuning::Tuning::augment_args(Command::new("shared"));
    let shared = longs(&ronde_bootstrap::logs::LogArgs::augment_args(shared));
    let both: Vec<String> = of("run").intersection(&of("sidecar")).cloned().collect();
    assert!(both.len() > 25, "{both:?}");
    let others: Vec<&str> = both.iter().map(String::as_str).filter(|long| !shared.contains(*long)).collect();
    assert_eq!(others, APART, "add a setting of both commands to Tuning");
}

/// Options of the same name with another meaning or default in both commands.
const APART: [&str; 5] = ["config", "job", "network-interfaces", "report", "start-timeout"];
