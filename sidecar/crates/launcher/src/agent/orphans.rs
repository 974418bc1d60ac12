//! Orphaned processes of workers. The agent is a subreaper, so a process whose parents have exited becomes its child, even in
//! its own session.

use std::fs;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{Pid, getpid};

/// Kills all children, and processes that become children thereby, until none is left.
///
/// Call it at the end of the agent only: it reaps children that other tasks may wait for.
pub(super) fn kill_all() {
    for _ in 0..GENERATIONS_MAX {
        let children = children_of(getpid());
        if children.is_empty() {
            return;
        }
        for child in children {
            // A failure means that it has ended by itself.
            let _ = kill(child, Signal::SIGKILL);
            // A killed process ends at once, unless it is blocked in the kernel.
            while waitpid(child, Some(WaitPidFlag::empty())) == Err(Errno::EINTR) {}
        }
    }
}

fn children_of(parent: Pid) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| parent_of(*pid) == Some(parent.as_raw()))
        .map(Pid::from_raw)
        .collect()
}

/// The fourth field of `/proc/<pid>/stat`; the second is the name in parentheses, which may hold anything.
fn parent_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// The most generations of children to search; no accident leaves more.
const GENERATIONS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_found_by_its_parent() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep exists");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process id"));
        assert!(children_of(getpid()).contains(&pid));
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        assert!(!children_of(getpid()).contains(&pid));
    }
}
