//! `ronde explain`: explains error codes, and generates the document that lists all of them.

use std::process::ExitCode;

use clap::Args;

use ronde_bootstrap::codes::{Code, TABLE};
use ronde_bootstrap::exit::{EXIT_USAGE, fail, print};

/// Arguments of `ronde explain`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExplainArgs {
    /// The code: E203, RONDE-E203 or 203.
    #[arg(required_unless_present = "list")]
    code: Option<String>,
    /// List all codes with their titles.
    #[arg(long, conflicts_with = "code")]
    list: bool,
}

/// Prints one explanation or the list.
pub(super) fn main(args: &ExplainArgs) -> ExitCode {
    let Some(given) = &args.code else {
        print(&list());
        return ExitCode::SUCCESS;
    };
    match Code::parse(given) {
        Some(code) => {
            print(&format!("{}\n", code.entry()));
            ExitCode::SUCCESS
        }
        None => {
            fail(Code::NotExplained, &format!("{given:?} is not an error code; see `ronde explain --list`"), EXIT_USAGE)
        }
    }
}

fn list() -> String {
    TABLE.iter().map(|entry| format!("{}  {}\n", entry.code, entry.title)).collect()
}

/// Builds `docs/ERRORS.md`.
#[cfg(test)]
fn document() -> String {
    let heading = "# Error codes\n\n\
        What an error at a command line means and what to do; `ronde explain E203` prints the same. The first digit is the\n\
        part that failed: 1 the command line and files, 2 hosts and the launcher, 3 workers, 4 sidecars, 5 keys and\n\
        certificates, 6 asking a running job, 7 the benchmark, 8 plugins. Made from the table in `sidecar/crates/bootstrap/src/codes/table.rs`; do not edit.\n";
    TABLE.iter().fold(heading.to_owned(), |text, entry| {
        let (code, title) = (entry.code, entry.title);
        format!("{text}\n## {code}: {title}\n\n{}\n\n*What to do:* {}\n", entry.meaning, entry.remedy)
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

    /// The compiler checks that a used code exists. This test checks that the table has it, and has no code that
    /// nothing uses.
    #[test]
    fn every_code_of_the_table_is_used_and_every_used_one_is_in_it() {
        let table: BTreeSet<String> = TABLE.iter().map(|entry| format!("{:?}", entry.code)).collect();
        let mut used = BTreeSet::new();
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        for sources in ["src", "crates/bootstrap/src", "crates/launcher/src"] {
            collect_uses(&package.join(sources), &mut used);
        }
        assert_eq!(used, table);
    }

    fn collect_uses(directory: &Path, used: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(directory).expect("the sources can be read") {
            let path = entry.expect("the sources can be read").path();
            if path.is_dir() {
                collect_uses(&path, used);
            } else if !path.ends_with("codes.rs") && !path.ends_with("codes/table.rs") {
                let text = std::fs::read_to_string(&path).expect("a source is text");
                // A test that names a code does not use it.
                let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
                used.extend(text.split("Code::").skip(1).map(name).filter(|name| is_variant(name)));
            }
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
