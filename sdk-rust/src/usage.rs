//! [`usage`]: what the clients of this process have done.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ronde_shm::ForkGuard;
use ronde_wire::Request;

/// What the clients of a process have done since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The operations that they submitted.
    pub operations: u64,
    /// The bytes of their inputs.
    pub bytes: u64,
    /// How long at least one operation was in flight.
    pub in_flight: Duration,
    /// How long threads waited for results; threads that wait at the same time count each for itself.
    pub waiting: Duration,
}

/// What all clients of this process have done since it began. A forked process begins with zeros; a descendant beyond tens of
/// forks, each by the child of the one before, counts nothing.
#[must_use]
pub fn usage() -> Usage {
    let Some((process, _)) = Process::current() else { return Usage::default() };
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Usage {
        operations: load(&process.operations),
        bytes: load(&process.bytes),
        in_flight: process.flights().total(Instant::now()),
        waiting: Duration::from_nanos(load(&process.waiting_ns)),
    }
}

/// The counters of a process, because sessions end and begin in an elastic job while its program counts on.
#[derive(Debug)]
struct Process {
    operations: AtomicU64,
    bytes: AtomicU64,
    waiting_ns: AtomicU64,
    /// Locked for a few instructions, twice for each operation.
    flights: Mutex<Flights>,
}

/// The counters of each generation of forked processes: each process uses those of its own, which no parent has used, so no
/// thread of a parent can have held their lock during the fork. They are made before the program runs, because a cell that the
/// first use fills would stay locked in a child if another thread filled it during the fork.
static PROCESSES: [Process; GENERATIONS_MAX] = [const { Process::new() }; GENERATIONS_MAX];
const GENERATIONS_MAX: usize = 64;

impl Process {
    const fn new() -> Self {
        Self {
            operations: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            waiting_ns: AtomicU64::new(0),
            flights: Mutex::new(Flights { count: 0, since: None, total: Duration::ZERO }),
        }
    }

    /// The counters of this process, and what detects that it is another one.
    fn current() -> Option<(&'static Self, ForkGuard)> {
        let guard = ForkGuard::new();
        let generation = usize::try_from(guard.generation()).ok()?;
        PROCESSES.get(generation).map(|process| (process, guard))
    }

    fn flights(&self) -> MutexGuard<'_, Flights> {
        // Every change is complete in itself.
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts an operation that was submitted.
pub(crate) fn count_operation(request: &Request) {
    let Some((process, _)) = Process::current() else { return };
    process.operations.fetch_add(1, Ordering::Relaxed);
    process.bytes.fetch_add(bytes(request), Ordering::Relaxed);
}

/// Counts the time that a thread has waited for a result.
pub(crate) fn count_wait(time: Duration) {
    let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    if let Some((process, _)) = Process::current() {
        process.waiting_ns.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

fn bytes(request: &Request) -> u64 {
    request.shape.elements().saturating_mul(request.dtype.size_bytes() as u64)
}

/// One operation in flight, until this is dropped.
#[derive(Debug)]
pub(crate) struct Flight(Option<(&'static Process, ForkGuard)>);

impl Flight {
    pub(crate) fn begin() -> Self {
        let current = Process::current();
        if let Some((process, _)) = current {
            process.flights().begin(Instant::now());
        }
        Self(current)
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some((process, guard)) = self.0
            && !guard.is_child()
        {
            process.flights().end(Instant::now());
        }
    }
}

/// The time for which at least one operation is in flight.
#[derive(Debug)]
struct Flights {
    count: u64,
    /// Since when there is one.
    since: Option<Instant>,
    /// The time before.
    total: Duration,
}

impl Flights {
    fn begin(&mut self, now: Instant) {
        self.count += 1;
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) {
        self.count = self.count.saturating_sub(1);
        if self.count == 0 {
            self.total = self.total(now);
            self.since = None;
        }
    }

    fn total(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use ronde_wire::{Collective, DType, ReduceOp, SetId, Shape, TensorName};

    use super::*;

    #[test]
    fn bytes_are_those_of_the_input() {
        let of = |dtype, shape: &[u64]| {
            let name = TensorName::new("a").expect("a name");
            let shape = Shape::new(shape.to_vec()).expect("a shape");
            bytes(&Request::new(SetId::WORLD, name, Collective::AllReduce { op: ReduceOp::Sum }, dtype, shape))
        };
        assert_eq!(of(DType::F32, &[3, 5]), 60);
        assert_eq!(of(DType::F64, &[]), 8);
        assert_eq!(of(DType::F64, &[0, 7]), 0);
    }

    #[test]
    fn time_with_several_operations_in_flight_counts_once() {
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let mut flights = Flights { count: 0, since: None, total: Duration::ZERO };
        assert_eq!(flights.total(at(5)), Duration::ZERO);
        flights.begin(at(10));
        flights.begin(at(12));
        flights.end(at(15));
        assert_eq!(flights.total(at(16)), Duration::from_millis(6), "one is in flight still");
        flights.end(at(20));
        assert_eq!(flights.total(at(90)), Duration::from_millis(10));
        flights.begin(at(100));
        flights.end(at(103));
        assert_eq!(flights.total(at(110)), Duration::from_millis(13));
    }
}
