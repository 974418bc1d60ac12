//! Admits streams of workers: their token, and how many they have.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ronde_shm::ring::PeerRing;
use ronde_shm::{StreamRequest, WorkerToken};
use ronde_wire::{WorkerNumber, limits};
use tokio::sync::mpsc;

/// Which workers may have streams; shared by the threads of mem.sock and the control thread.
#[derive(Clone)]
pub(crate) struct StreamGate {
    inner: Arc<Inner>,
}

struct Inner {
    workers: Mutex<HashMap<WorkerNumber, Entry>>,
    /// The lanes with links.
    lanes: Vec<mpsc::Sender<NewStream>>,
    /// The lanes that all sidecars of the membership have.
    common_lanes: AtomicU16,
    /// The streams of all workers, and how many there may be.
    open: Arc<AtomicUsize>,
    streams_max: usize,
}

impl Inner {
    /// The streams that each of so many workers may have in any case.
    fn share(&self, workers: usize) -> usize {
        self.streams_max / workers.max(1)
    }

    /// The streams that other workers may still have in any case.
    fn kept_for_others(&self, workers: &HashMap<WorkerNumber, Entry>, worker: WorkerNumber) -> usize {
        let share = self.share(workers.len());
        let others = workers.iter().filter(|(other, _)| **other != worker);
        others.map(|(_, entry)| share.saturating_sub(entry.open.load(Ordering::Relaxed))).sum()
    }
}

struct Entry {
    token: WorkerToken,
    open: Arc<AtomicUsize>,
}

/// A stream of a worker that counts until this is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    /// The worker.
    pub(crate) worker: WorkerNumber,
    /// The streams of the worker, and those of all workers.
    open: [Arc<AtomicUsize>; 2],
}

impl Permit {
    /// Counts one more stream. Returns how many there were.
    fn count(worker: WorkerNumber, open: [&Arc<AtomicUsize>; 2]) -> (Self, [usize; 2]) {
        let before = open.map(|open| open.fetch_add(1, Ordering::Relaxed));
        (Self { worker, open: open.map(Arc::clone) }, before)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        for open in &self.open {
            open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A ring that a worker has attached for a stream.
pub(crate) struct NewStream {
    /// The memory.
    pub(crate) ring: PeerRing,
    /// The connection that is its bell.
    pub(crate) bell: UnixStream,
    /// The worker's.
    pub(crate) permit: Permit,
}

impl StreamGate {
    /// Creates a gate before any worker is known. A stream goes to one of the first `common_lanes` lanes.
    pub(crate) fn new(lanes: Vec<mpsc::Sender<NewStream>>, common_lanes: u16) -> Self {
        // A file that cannot be read bounds nothing; the limit itself still does.
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        Self::with_max(lanes, common_lanes, streams_max(&limits))
    }

    fn with_max(lanes: Vec<mpsc::Sender<NewStream>>, common_lanes: u16, streams_max: usize) -> Self {
        let (workers, common_lanes, open) = (Mutex::default(), AtomicU16::new(common_lanes), Arc::default());
        Self { inner: Arc::new(Inner { workers, lanes, common_lanes, open, streams_max }) }
    }

    /// Admits a worker with this token.
    pub(crate) fn add_worker(&self, worker: WorkerNumber, token: WorkerToken) {
        self.lock().insert(worker, Entry { token, open: Arc::default() });
    }

    /// Admits a worker no longer. Its streams stay.
    pub(crate) fn remove_worker(&self, worker: WorkerNumber) {
        self.lock().remove(&worker);
    }

    /// Sets the lanes that all sidecars of the membership have.
    pub(crate) fn set_common_lanes(&self, lanes: u16) {
        self.inner.common_lanes.store(lanes, Ordering::Relaxed);
    }

    /// Admits a stream.
    ///
    /// # Errors
    /// The text for the worker.
    pub(crate) fn admit(&self, request: &StreamRequest) -> Result<Permit, String> {
        let worker = WorkerNumber(request.worker);
        let workers = self.lock();
        let Some(entry) = workers.get(&worker) else {
            return Err(format!("{worker} is not placed on this sidecar; check RONDE_RANK and RONDE_SOCKET"));
        };
        if entry.token != request.token {
            return Err(format!("the token does not belong to {worker}; check RONDE_TOKEN_FILE"));
        }
        let least_most = limits::STREAM_RING_BYTES_MIN..=limits::STREAM_RING_BYTES_MAX;
        if !least_most.contains(&request.capacity) {
            let (least, most) = (least_most.start(), least_most.end());
            return Err(format!("a stream's ring has {least} to {most} bytes, not {}", request.capacity));
        }
        let kept = self.inner.kept_for_others(&workers, worker);
        // Counted first: several connections may ask at the same time.
        let (permit, [of_worker, of_all]) = Permit::count(worker, [&entry.open, &self.inner.open]);
        if of_worker >= limits::STREAMS_PER_WORKER_MAX {
            let most = limits::STREAMS_PER_WORKER_MAX;
            return Err(format!("{worker} has {most} streams, the limit STREAMS_PER_WORKER_MAX"));
        }
        if of_all >= self.inner.streams_max {
            return Err(format!(
                "the workers of this sidecar have {of_all} connections of NCCL, which take half of the files that it may open; raise its limit of open files (ulimit -Hn, or LimitNOFILE= of its service)"
            ));
        }
        if of_worker >= self.inner.share(workers.len()) && of_all + kept >= self.inner.streams_max {
            return Err(format!(
                "{worker} has {of_worker} connections of NCCL, and the other {kept} that the files of this sidecar suffice for are kept for its other workers; raise its limit of open files (ulimit -Hn, or LimitNOFILE= of its service)"
            ));
        }
        Ok(permit)
    }

    /// Hands a ring to its lane.
    ///
    /// # Errors
    /// The text for the worker.
    pub(crate) fn open(&self, lane: u16, stream: NewStream) -> Result<(), String> {
        let common = self.inner.common_lanes.load(Ordering::Relaxed).max(1);
        let lane = self.inner.lanes.get(usize::from(lane % common)).ok_or("this sidecar has no lanes")?;
        lane.try_send(stream).map_err(|_| "the sidecar is ending, or opens too many streams at once".to_owned())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<WorkerNumber, Entry>> {
        // Every change is one insert or one remove.
        self.inner.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many streams take half of the descriptors that a process may open. `limits` is the content of `/proc/self/limits`.
fn streams_max(limits: &str) -> usize {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok());
    soft.map_or(usize::MAX, |soft| soft / 2 / DESCRIPTORS_PER_STREAM)
}

/// The bell, its copy that is polled, and the ring while it is mapped.
const DESCRIPTORS_PER_STREAM: usize = 3;

/// Rings that wait until their lane takes them.
pub(crate) const NEW_STREAMS_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(worker: u32, token: u8, capacity: u64) -> StreamRequest {
        StreamRequest { worker, token: WorkerToken::from_bytes([token; 32]), capacity, lane: 0 }
    }

    #[test]
    fn streams_leave_half_of_the_descriptors_to_all_else() {
        let limits = "Limit      Soft Limit  Hard Limit  Units\nMax processes  5  5  processes\nMax open files    1024    524288    files\n";
        assert_eq!(streams_max(limits), 170);
        for unlimited in ["", "Max open files  unlimited  unlimited  files\n"] {
            assert_eq!(streams_max(unlimited), usize::MAX);
        }
        let gate = StreamGate::with_max(Vec::new(), 1, 3);
        for worker in [1, 2] {
            gate.add_worker(WorkerNumber(worker), WorkerToken::from_bytes([7; 32]));
        }
        let admit = |worker| gate.admit(&request(worker, 7, 1 << 20));
        let (first, _second, _third) = (admit(1), admit(2), admit(2).expect("there are three"));
        let refused = admit(1).expect_err("together they have three");
        assert!(refused.contains("have 3 connections") && refused.contains("ulimit -Hn"), "{refused}");
        drop(first);
        drop(admit(1).expect("one is free, and it has none"));
    }

    #[test]
    fn no_worker_takes_the_streams_of_others() {
        let gate = StreamGate::with_max(Vec::new(), 1, 7);
        for worker in [1, 2, 3] {
            gate.add_worker(WorkerNumber(worker), WorkerToken::from_bytes([7; 32]));
        }
        let admit = |worker| gate.admit(&request(worker, 7, 1 << 20));
        // Two for each in any case, and one that is nobody's share.
        let mut first: Vec<Permit> = (0..3).map(|_| admit(1).expect("its share and one more")).collect();
        let refused = admit(1).expect_err("the rest is the others'");
        assert!(refused.contains("the other 4") && refused.contains("kept for its other workers"), "{refused}");
        let others: Vec<Permit> = [2, 2, 3, 3].map(|worker| admit(worker).expect("its share")).into();
        admit(2).expect_err("there are seven");
        drop(others);
        drop(first.pop());
        // Those that have gone keep nothing.
        gate.remove_worker(WorkerNumber(2));
        gate.remove_worker(WorkerNumber(3));
        let _all: Vec<Permit> = (0..5).map(|_| admit(1).expect("it is alone")).collect();
        assert!(admit(1).expect_err("there are seven").contains("have 7 connections"));
    }

    #[test]
    fn only_known_workers_have_streams_and_not_too_many() {
        let gate = StreamGate::new(Vec::new(), 1);
        gate.add_worker(WorkerNumber(3), WorkerToken::from_bytes([7; 32]));
        let refused = |request| gate.admit(&request).expect_err("it is refused");
        assert!(refused(request(2, 7, 1 << 20)).contains("is not placed on this sidecar"));
        assert!(refused(request(3, 8, 1 << 20)).contains("the token does not belong to"));
        assert!(refused(request(3, 7, 4_096)).contains("65536 to 1048576 bytes, not 4096"));
        let admit = || gate.admit(&request(3, 7, 1 << 20));
        let mut permits: Vec<Permit> =
            (0..limits::STREAMS_PER_WORKER_MAX).map(|_| admit().expect("it may have more")).collect();
        assert!(admit().expect_err("it has too many").contains("STREAMS_PER_WORKER_MAX"));
        drop(permits.pop());
        drop(admit().expect("one is free"));
        gate.remove_worker(WorkerNumber(3));
        assert!(admit().is_err());
    }
}
