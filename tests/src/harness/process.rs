//! Processes of a test, found by the mark in their environment.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A running process.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its process id.
    pub pid: i32,
    /// The process id of its parent.
    pub parent: i32,
    /// Program and arguments.
    pub arguments: Vec<String>,
    /// Its environment at its start.
    pub environment: BTreeMap<String, String>,
}

impl Process {
    /// Sends it a signal; succeeds, too, if it has ended.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.pid), signal);
    }

    /// The most memory that it ever had, bytes; 0 when it has ended.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).map_or(0, |kib| kib * 1_024)
    }

    /// Reads a process; `None` when it has ended, zombies included, or is not this user's.
    fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The second field is the name in parentheses, which may hold anything.
        let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
        let (state, parent): (_, i32) = (fields.next()?, fields.next()?.parse().ok()?);
        if state == "Z" || state == "X" {
            return None;
        }
        let environment_of = |pid: i32| texts(&format!("/proc/{pid}/environ"));
        // Before the arguments: a process that executes its program in between must not have the arguments of its parent with
        // its own environment.
        let own = environment_of(pid);
        let arguments = texts(&format!("/proc/{pid}/cmdline"))?;
        // Only root can read a sidecar's, because it hides its memory; it has that of its agent and a little more.
        let is_sidecar = arguments.get(1).is_some_and(|word| word == "sidecar");
        let environment = own.or_else(|| environment_of(parent).filter(|_| is_sidecar))?;
        let pairs = environment.iter().filter_map(|pair| pair.split_once('='));
        Some(Self {
            pid,
            parent,
            arguments,
            environment: pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (child of {}): {}", self.pid, self.parent, self.arguments.join(" "))
    }
}

/// All processes with the variable `name` set to `value`.
#[must_use]
pub fn marked(name: &str, value: &str) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::read)
        .filter(|process| process.environment.get(name).is_some_and(|found| found == value))
        .collect()
}

fn texts(path: &str) -> Option<Vec<String>> {
    let bytes = fs::read(path).ok()?;
    let parts = bytes.split(|byte| *byte == 0).filter(|part| !part.is_empty());
    Some(parts.map(|part| String::from_utf8_lossy(part).into_owned()).collect())
}
