//! `ronde explain`: what an error code means and what to do; and the document that says the same of all.

use std::process::ExitCode;

use clap::Args;

use super::codes::{Code, TABLE};

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

/// Prints what was asked for.
pub(super) fn main(args: &ExplainArgs) -> ExitCode {
    let Some(given) = &args.code else {
        super::print(&list());
        return ExitCode::SUCCESS;
    };
    match Code::parse(given) {
        Some(code) => {
            super::print(&format!("{}\n", code.entry()));
            ExitCode::SUCCESS
        }
        None => super::fail(
            Code::NotExplained,
            &format!("{given:?} is no error code; see `ronde explain --list`"),
            super::EXIT_USAGE,
        ),
    }
}

fn list() -> String {
    TABLE.iter().map(|entry| format!("{}  {}\n", entry.code, entry.title)).collect()
}

/// `docs/ERRORS.md`.
#[cfg(test)]
fn document() -> String {
    let heading = "# Error codes\n\n\
        What an error at a command line means and what to do; `ronde explain E203` prints the same. The first digit is the\n\
        part that failed: 1 the command line and files, 2 hosts and the launcher, 3 workers, 4 sidecars, 5 keys and\n\
        certificates, 6 asking a running job, 7 the benchmark, 8 plugins. Made from the table in `sidecar/src/cli/codes/table.rs`; do not edit.\n";
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
    use super::*;

    #[test]
    fn the_document_says_what_the_table_says() {
        crate::cli::documents::hold("ERRORS.md", &document());
    }

    #[test]
    fn the_list_has_a_line_for_each_code() {
        assert_eq!(list().lines().count(), TABLE.len());
        assert!(list().contains("RONDE-E203  ronde could not be started on a host\n"));
    }
}
