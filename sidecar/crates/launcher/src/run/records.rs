//! Where sidecars have written flight records, as a line below a failure.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ronde_wire::Failure;

use super::hosts::LOCAL;

/// The directories with flight records, each with its host.
#[derive(Debug, Default)]
pub(super) struct FlightRecords(BTreeSet<(String, PathBuf)>);

impl FlightRecords {
    /// A sidecar on a host has written a file.
    pub(super) fn add(&mut self, host: String, file: &Path) {
        if self.0.len() < DIRECTORIES_MAX
            && let Some(directory) = file.parent()
        {
            self.0.insert((host, directory.to_owned()));
        }
    }

    /// The line that names the directories and says how to read them; nothing if there are none.
    pub(super) fn line(&self) -> Option<String> {
        let hosts: BTreeSet<&str> = self.0.iter().map(|(host, _)| host.as_str()).collect();
        let directories: BTreeSet<&PathBuf> = self.0.iter().map(|(_, directory)| directory).collect();
        let first = Failure::line(&directories.first()?.display().to_string());
        if directories.len() > 1 {
            let all = self.0.iter().map(|(host, directory)| format!("{} on {host}", directory.display()));
            let all = Failure::line(&all.collect::<Vec<_>>().join(", "));
            return Some(format!(
                "flight records: {all}; collect them and read them with `ronde debug analyze FILE...`"
            ));
        }
        if hosts.len() > 1 {
            let count = hosts.len();
            return Some(format!(
                "flight records: {first} on {count} hosts; collect them and read them with `ronde debug analyze FILE...`"
            ));
        }
        // A name that a shell cannot be given stays as it is shown.
        let quoted = shlex::try_quote(&first).unwrap_or_else(|_| first.as_str().into());
        Some(match hosts.first() {
            Some(host) if *host != LOCAL => format!(
                "flight records: {first} on {}; read them there with `ronde debug analyze {quoted}`",
                Failure::line(host)
            ),
            _ => format!("flight records: {first}; read them with `ronde debug analyze {quoted}`"),
        })
    }
}

/// The directories that are remembered.
const DIRECTORIES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn line(files: &[(&str, &str)]) -> Option<String> {
        let mut records = FlightRecords::default();
        files.iter().for_each(|(host, file)| records.add((*host).to_owned(), Path::new(file)));
        records.line()
    }

    #[test]
    fn the_line_names_directories_and_hosts() {
        assert_eq!(line(&[]), None);
        let one = line(&[("localhost", "/f/j/a.flight.json"), ("localhost", "/f/j/b.flight.json")]).expect("two files");
        assert_eq!(one, "flight records: /f/j; read them with `ronde debug analyze /f/j`");
        let remote = line(&[("alpha", "/f/my job/a")]).expect("a file");
        assert_eq!(
            remote,
            "flight records: /f/my job on alpha; read them there with `ronde debug analyze '/f/my job'`"
        );
        let two = line(&[("alpha", "/f/j/a"), ("beta", "/f/j/b")]).expect("two files");
        assert!(two.starts_with("flight records: /f/j on 2 hosts; collect them"), "{two}");
        let apart = line(&[("alpha", "/f/j/a"), ("beta", "/g/j/\u{1b}b"), ("beta", "/g/\u{1b}/b")]).expect("three");
        assert!(apart.starts_with("flight records: /f/j on alpha, /g/\\u{1b} on beta, /g/j on beta; "), "{apart}");
        let many: Vec<String> = (0..1_000).map(|number| format!("/{number}/file")).collect();
        let many = line(&many.iter().map(|file| ("alpha", file.as_str())).collect::<Vec<_>>()).expect("many");
        assert!(many.len() < 4_096, "{many}");
    }
}
