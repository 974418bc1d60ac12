//! Detects that a worker was killed by the out-of-memory killer, by the counters of its control group.
//!
//! Such a process ends with SIGKILL like any other killed one. The difference is the counter `oom_kill` of its control
//! group.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The out-of-memory kills in the control groups of all workers of this host.
#[derive(Clone)]
pub(super) struct MemoryWatch {
    /// The directory of processes (`/proc`).
    processes: PathBuf,
    /// The directory of control groups.
    groups: PathBuf,
    /// For each counter, the kills that are accounted for.
    counted: Arc<Mutex<BTreeMap<Counter, u64>>>,
}

/// The file in which a control group counts its kills.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Counter(PathBuf);

/// The control groups of one worker.
pub(super) struct WorkerWatch {
    all: MemoryWatch,
    pid: u32,
    /// The counters of the groups that it was seen in.
    counters: Vec<Counter>,
}

impl MemoryWatch {
    /// Watches the groups of this machine.
    pub(super) fn new() -> Self {
        Self::at(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
    }

    fn at(processes: &Path, groups: &Path) -> Self {
        Self { processes: processes.to_owned(), groups: groups.to_owned(), counted: Arc::default() }
    }

    /// Begins to watch a process.
    pub(super) fn worker(&self, pid: u32) -> WorkerWatch {
        let mut watch = WorkerWatch { all: self.clone(), pid, counters: Vec::new() };
        watch.poll();
        watch
    }

    fn counter_of(&self, pid: u32) -> Option<Counter> {
        let groups = fs::read_to_string(self.processes.join(pid.to_string()).join("cgroup")).ok()?;
        let candidates = groups.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let path = path.trim_start_matches('/');
            match controllers {
                "" => Some(vec![
                    self.groups.join(path).join("memory.events"),
                    self.groups.join("unified").join(path).join("memory.events"),
                ]),
                _ if controllers.split(',').any(|controller| controller == "memory") => {
                    Some(vec![self.groups.join("memory").join(path).join("memory.oom_control")])
                }
                _ => None,
            }
        });
        candidates.flatten().map(Counter).find(|counter| counter.read().is_some())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Counter, u64>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorkerWatch {
    /// Records the group that the worker is in now: some workers move to their own group, and one that is ending appears in
    /// the root group.
    pub(super) fn poll(&mut self) {
        let Some(counter) = self.all.counter_of(self.pid).filter(|now| !self.counters.contains(now)) else { return };
        if self.counters.len() < GROUPS_MAX {
            let count = counter.read().unwrap_or_default();
            self.all.lock().entry(counter.clone()).or_insert(count);
            self.counters.push(counter);
        }
    }

    /// Whether one of its groups has counted a kill that no other worker's exit accounts for. Call it once, after a worker
    /// was killed.
    pub(super) fn has_run_out(&self) -> bool {
        let mut counted = self.all.lock();
        self.counters.iter().any(|counter| {
            let (Some(now), Some(accounted)) = (counter.read(), counted.get_mut(counter)) else { return false };
            let has = now > *accounted;
            *accounted += u64::from(has);
            has
        })
    }
}

impl Counter {
    /// The number of processes killed in the group; `None` where the kernel does not count them.
    fn read(&self) -> Option<u64> {
        let text = fs::read_to_string(&self.0).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|count| count.trim().parse().ok())
    }
}

/// The most groups recorded for one worker.
const GROUPS_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a temporary directory"))
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("below the directory")).expect("writable");
            fs::write(path, text).expect("writable");
        }

        fn watch(&self) -> MemoryWatch {
            MemoryWatch::at(&self.0.path().join("proc"), &self.0.path().join("cgroup"))
        }
    }

    #[test]
    fn an_out_of_memory_kill_counts_for_one_worker() {
        let machine = Machine::new();
        machine.write("cgroup/job/memory.events", "low 0\nmax 9\noom 3\noom_kill 3\n");
        machine.write("proc/7/cgroup", "1:cpu:/\n0::/job\n");
        machine.write("proc/8/cgroup", "0::/job\n");
        let all = machine.watch();
        let (seven, eight) = (all.worker(7), all.worker(8));
        assert!(!seven.has_run_out(), "those before do not count");
        machine.write("cgroup/job/memory.events", "low 0\noom_kill 4\noom_group_kill 9\n");
        assert!(seven.has_run_out());
        assert!(!eight.has_run_out(), "there was one kill");
        machine.write("cgroup/job/memory.events", "oom_kill 5\n");
        assert!(eight.has_run_out());
    }

    #[test]
    fn control_groups_of_version_1_are_read() {
        let machine = Machine::new();
        machine.write("cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
        machine.write("proc/7/cgroup", "9:name=systemd:/x\n4:hugetlb,memory:/a/b\n0::/\n");
        let worker = machine.watch().worker(7);
        machine.write("cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
        assert!(worker.has_run_out());
    }

    #[test]
    fn a_worker_may_change_its_control_group() {
        let machine = Machine::new();
        machine.write("proc/7/cgroup", "0::/first\n");
        let mut worker = machine.watch().worker(7);
        assert!(!worker.has_run_out(), "nothing counts there");
        machine.write("proc/7/cgroup", "0::/second\n");
        machine.write("cgroup/second/memory.events", "oom_kill 6\n");
        worker.poll();
        machine.write("cgroup/second/memory.events", "oom_kill 7\n");
        fs::remove_dir_all(machine.0.path().join("proc")).expect("ours");
        worker.poll();
        assert!(worker.has_run_out());
        // A process that is ending, in the first version of groups.
        machine.write("cgroup/memory/memory.oom_control", "oom_kill 0\n");
        machine.write("proc/7/cgroup", "4:memory:/\n");
        worker.poll();
        machine.write("cgroup/second/memory.events", "oom_kill 8\n");
        assert!(worker.has_run_out());
        machine.write("cgroup/second/memory.events", "oom_kill nonsense\n");
        assert!(!worker.has_run_out() && !machine.watch().worker(9).has_run_out());
    }
}
