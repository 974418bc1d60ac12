//! `ronde explain`: explains error codes, and generates the document that lists all of them.

use std::process::ExitCode;

use clap::Args;

use ronde_bootstrap::codes::{Code, TABLE};
use ronde_bootstrap::exit::{EXITS, answer, fail};

/// Arguments of `ronde explain`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExplainArgs {
    /// The code: E203, RONDE-E203 or 203; or the attribute `cause` of an exception, such as mismatch.
    #[arg(required_unless_present_any = ["list", "exit_codes"])]
    code: Option<String>,
    /// List all codes with their titles.
    #[arg(long, conflicts_with = "code")]
    list: bool,
    /// List the exit codes of all commands.
    #[arg(long, conflicts_with_all = ["code", "list"])]
    exit_codes: bool,
}

/// Prints one explanation or the list.
pub(super) fn main(args: &ExplainArgs) -> ExitCode {
    let Some(given) = &args.code else {
        return answer(&if args.exit_codes { exit_codes() } else { list() });
    };
    match Code::parse(given).or_else(|| Code::of_cause(given)) {
        Some(code) => answer(&format!("{}\n", code.entry())),
        None => fail(Code::NotExplained, &not_explained(given)),
    }
}

/// A number alone may be the exit code of a command.
fn not_explained(given: &str) -> String {
    let is_number = given.parse::<u8>().is_ok();
    let or = if is_number { ", or `ronde explain --exit-codes` for exit codes" } else { "" };
    format!("{given:?} is not an error code; see `ronde explain --list`{or}")
}

fn list() -> String {
    TABLE.iter().map(|entry| format!("{}  {}\n", entry.code, entry.title)).collect()
}

fn exit_codes() -> String {
    EXITS.iter().map(|entry| format!("{:9}  {}\n", entry.status, entry.meaning)).collect()
}

/// The table of exit codes in `docs/ERRORS.md`.
#[cfg(test)]
fn exit_table() -> String {
    let row = |entry: &ronde_bootstrap::exit::ExitEntry| {
        format!("| {} | {} | {} |\n", entry.status, entry.meaning, entry.commands)
    };
    let heading = "## Exit codes\n\nThe exit codes of all commands of `ronde`, with the same meaning in each \
        (`ronde explain --exit-codes`):\n\n| code | meaning | commands |\n|---|---|---|\n";
    format!("{heading}{}", EXITS.iter().map(row).collect::<String>())
}

/// The table of causes in `docs/ERRORS.md`.
#[cfg(test)]
fn cause_table() -> String {
    let row = |(cause, code): &(&str, Code)| format!("| `{cause}` | {code} | {} |\n", code.entry().title);
    let heading = "## Causes of exceptions\n\nThe attributes `cause` and `code` of the exceptions of the SDK for Python \
        (`ronde.RondeError`):\n\n| cause | code | |\n|---|---|---|\n";
    format!("{heading}{}", ronde_bootstrap::codes::CAUSES.iter().map(row).collect::<String>())
}

/// Builds `docs/ERRORS.md`.
#[cfg(test)]
fn document() -> String {
    let heading = "# Error codes\n\n\
        What an error at a command line means and what to do; `ronde explain E203` prints the same. The first digit is the\n\
        part that failed: 1 the command line and files, 2 hosts and the launcher, 3 workers, 4 sidecars, 5 keys and\n\
        certificates, 6 asking a running job, 7 the benchmark, 8 plugins. Made from the table in `sidecar/crates/bootstrap/src/codes/table.rs`; do not edit.\n";
    let heading = format!("{heading}\n{}\n{}", exit_table(), cause_table());
    TABLE.iter().fold(heading, |text, entry| {
        let (code, title) = (entry.code, entry.title);
        let (meaning, remedy, exit) = (entry.meaning, entry.remedy, entry.exit_text());
        format!("{text}\n## {code}: {title}\n\n{meaning}\n\n*What to do:* {remedy}\n\n*Exit code:* {exit}\n")
    })
}

const EXAMPLES: &str = "Examples:
  ronde explain E203
  ronde explain --list";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_document_lists_every_error_code() {
        crate::documents::hold("ERRORS.md", &document());
    }

    #[test]
    fn the_list_has_a_line_for_each_code() {
        assert_eq!(list().lines().count(), TABLE.len());
        assert!(list().contains("RONDE-E203  ronde could not be started on a host\n"));
    }

    #[test]
    fn a_number_that_may_be_an_exit_code_is_pointed_to_their_table() {
        assert!(not_explained("137").ends_with("or `ronde explain --exit-codes` for exit codes"));
        assert_eq!(not_explained("E999"), "\"E999\" is not an error code; see `ronde explain --list`");
    }

    #[test]
    fn a_cause_of_an_exception_is_explained_by_its_code() {
        assert_eq!(Code::of_cause("mismatch"), Some(Code::RanksDisagree));
        assert_eq!(Code::of_cause("E203"), None);
        let causes: Vec<&str> = ronde_bootstrap::codes::CAUSES.iter().map(|(cause, _)| *cause).collect();
        assert!(causes.is_sorted(), "{causes:?}");
    }

    #[test]
    fn exit_codes_are_defined_in_one_place() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut found = BTreeSet::new();
        for sources in ["src", "crates/bootstrap/src", "crates/launcher/src"] {
            collect(&package.join(sources), &mut |path, text| {
                // In two parts, so that this line is none of them.
                let constant = ["const ", "EXIT_"].concat();
                let defines = text.lines().any(|line| line.contains(&constant) && line.contains(": u8 ="));
                if defines {
                    found.insert(path.strip_prefix(package).expect("below it").to_owned());
                }
            });
        }
        let expected = Path::new("crates/bootstrap/src/exit.rs").to_owned();
        assert_eq!(found, BTreeSet::from([expected]));
        for status in [Code::CommandLine, Code::HostUnfit, Code::OutputLost].map(Code::exit_status) {
            assert!(exit_codes().lines().any(|line| line.starts_with(&format!("{status} "))), "{status}");
        }
    }

    /// The compiler checks that a used code exists. This test checks that the table has it, and has no code that
    /// nothing uses.
    #[test]
    fn every_code_of_the_table_is_used_and_every_used_one_is_in_it() {
        let table: BTreeSet<String> = TABLE.iter().map(|entry| format!("{:?}", entry.code)).collect();
        let mut used = BTreeSet::new();
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        for sources in ["src", "crates/bootstrap/src", "crates/launcher/src"] {
            collect(&package.join(sources), &mut |path, text| collect_uses(path, text, &mut used));
        }
        assert_eq!(used, table);
    }

    fn collect(directory: &Path, handle: &mut impl FnMut(&Path, &str)) {
        for entry in std::fs::read_dir(directory).expect("the sources can be read") {
            let path = entry.expect("the sources can be read").path();
            if path.is_dir() {
                collect(&path, handle);
            } else {
                handle(&path, &std::fs::read_to_string(&path).expect("a source is text"));
            }
        }
    }

    fn collect_uses(path: &Path, text: &str, used: &mut BTreeSet<String>) {
        if !path.ends_with("codes.rs") && !path.ends_with("codes/table.rs") {
            // A test that names a code does not use it.
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            used.extend(text.split("Code::").skip(1).map(name).filter(|name| is_variant(name)));
        }
    }

    fn name(text: &str) -> String {
        text.chars().take_while(char::is_ascii_alphanumeric).collect()
    }

    /// `ExitCode::SUCCESS` and functions are not error codes.
    fn is_variant(name: &str) -> bool {
        name.starts_with(char::is_uppercase) && name.contains(char::is_lowercase)
    }
}
