//! Whether memory ran out: what the control group of a worker has counted.
//!
//! A process that the kernel's out-of-memory killer ends looks like one that somebody killed. The difference is the
//! counter `oom_kill` of its control group.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the control groups of all workers of this host have counted.
#[derive(Clone)]
pub(super) struct MemoryWatch {
    /// Where processes are described.
    processes: PathBuf,
    /// Where control groups are.
    groups: PathBuf,
    /// For each counter, the kills that are accounted for.
    counted: Arc<Mutex<BTreeMap<Counter, u64>>>,
}

/// Where a control group counts its kills.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Counter(PathBuf);

/// The watch over one worker.
pub(super) struct WorkerWatch {
    all: MemoryWatch,
    pid: u32,
    /// Of the groups that it was seen in.
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
    /// Looks which group the worker is in now: some put themselves into one of their own, and one that is ending shows up
    /// in the topmost.
    pub(super) fn poll(&mut self) {
        let Some(counter) = self.all.counter_of(self.pid).filter(|now| !self.counters.contains(now)) else { return };
        if self.counters.len() < GROUPS_MAX {
            let count = counter.read().unwrap_or_default();
            self.all.lock().entry(counter.clone()).or_insert(count);
            self.counters.push(counter);
        }
    }

    /// Whether a group of it has counted a kill that no other worker's end accounts for. Asked once, when a worker was
    /// killed.
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
    /// How many processes of the group memory has cost; `None` where that is not counted.
    fn read(&self) -> Option<u64> {
        let text = fs::read_to_string(&self.0).ok()?;
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")).and_then(|count| count.trim().parse().ok())
    }
}

/// Groups that one worker is watched in.
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
