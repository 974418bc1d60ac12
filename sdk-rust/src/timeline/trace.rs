//! [`Trace`]: converts the sidecar's events to Chrome's trace format. Pure: its output is lines of text.
//!
//! Each tensor is a "process" of the trace. Its first row shows the negotiation, the second one the operation, and further rows
//! show the work of the threads. The end of a span that began before the recording is left out.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ronde_rpc::convert::dtype_from;
use ronde_rpc::v1;
use ronde_rpc::v1::timeline_event::{Event, Ordered, Performed, Phase, Ready, Settled, Span};
use serde_json::{Value, json};

/// The state of a recording, and lines that have not been taken yet.
#[derive(Debug, Default)]
pub(super) struct Trace {
    tensors: HashMap<Key, Tensor>,
    pids: u64,
    operations: BTreeMap<u64, Operation>,
    dropped: u64,
    last_us: u64,
    lines: Vec<String>,
}

/// A process set and a name in it.
type Key = (u32, String);

#[derive(Debug, Default)]
struct Tensor {
    pid: u64,
    /// The ranks that are ready, during the negotiation.
    negotiating: Option<BTreeSet<u32>>,
    /// Whether an operation is in progress.
    performing: bool,
    /// Rows that have been named.
    rows: BTreeSet<u32>,
}

#[derive(Debug)]
struct Operation {
    tensors: Vec<Key>,
    ordered_us: u64,
    /// When the first thread began and the last thread ended.
    performed_us: Option<(u64, u64)>,
}

impl Trace {
    /// Begins the trace. The recording starts this many microseconds after the Unix epoch.
    pub(super) fn begin(&mut self, since_epoch_us: u64) {
        let args = json!({"name": "ronde", "start_time_since_epoch_in_micros": since_epoch_us});
        self.line(&json!({"name": "process_name", "ph": "M", "pid": 0, "args": args}));
        self.sort(0);
    }

    /// Adds the events of a batch.
    pub(super) fn add(&mut self, batch: v1::TimelineBatch) {
        for v1::TimelineEvent { at_us, event } in batch.events {
            self.last_us = self.last_us.max(at_us);
            match event {
                Some(Event::Ready(ready)) => self.ready(at_us, ready),
                Some(Event::Settled(committed)) => self.committed(at_us, committed),
                Some(Event::Ordered(ordered)) => self.ordered(at_us, ordered),
                Some(Event::Performed(performed)) => self.performed(&performed),
                Some(Event::Over(over)) => self.over(at_us, over.seq, over.dropped),
                Some(Event::CycleStarted(_)) => self.mark(at_us, "CYCLE_START", &json!({})),
                Some(Event::EpochOver(_)) => self.finish(),
                // An event of a later version.
                None => {}
            }
        }
        if batch.dropped > self.dropped {
            self.dropped = batch.dropped;
            self.mark(self.last_us, "EVENTS_DROPPED", &json!({"so_far": batch.dropped}));
        }
    }

    /// Ends all open spans.
    pub(super) fn finish(&mut self) {
        let at = self.last_us;
        for seq in self.operations.keys().copied().collect::<Vec<_>>() {
            self.over(at, seq, true);
        }
        let open = self.tensors.iter().filter(|(_, tensor)| tensor.negotiating.is_some());
        for key in open.map(|(key, _)| key.clone()).collect::<BTreeSet<_>>() {
            self.end_negotiation(at, &key, &json!({"unfinished": true}));
        }
    }

    /// Takes the lines since the last call.
    pub(super) fn take_lines(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines)
    }

    fn ready(&mut self, at: u64, Ready { name, process_set, collective, rank }: Ready) {
        let key = (process_set, name);
        let pid = self.tensor(&key);
        let Some(tensor) = self.tensors.get_mut(&key) else { return };
        let is_first = tensor.negotiating.is_none();
        // A rank that requests the tensor again after a schedule was ready before.
        if !tensor.negotiating.get_or_insert_default().insert(rank) {
            return;
        }
        if is_first {
            let name = format!("NEGOTIATE_{collective}");
            self.line(&json!({"name": name, "ph": "B", "ts": at, "pid": pid, "tid": NEGOTIATION}));
        }
        let name = rank.to_string();
        self.line(&json!({"name": name, "ph": "X", "ts": at, "dur": 0, "pid": pid, "tid": NEGOTIATION}));
    }

    fn committed(&mut self, at: u64, Settled { name, process_set, collective, failed }: Settled) {
        let key = (process_set, name);
        if failed {
            self.end_negotiation(at, &key, &json!({"failed": true}));
            return;
        }
        let pid = self.tensor(&key);
        self.end_negotiation(at, &key, &json!({}));
        self.line(&json!({"name": collective, "ph": "X", "ts": at, "dur": 0, "pid": pid, "tid": OPERATION}));
    }

    fn ordered(&mut self, at: u64, ordered: Ordered) {
        let Ordered { seq, process_set, collective, tensors, ahead, .. } = ordered;
        // A sidecar of a later release may have types that are unknown here.
        let dtype = dtype_from(ordered.dtype).map_or("unknown", |dtype| dtype.name());
        let fused = tensors.len();
        let mut keys = Vec::with_capacity(fused);
        for tensor in tensors {
            let key = (process_set, tensor.name);
            let pid = self.tensor(&key);
            self.end_negotiation(at, &key, &json!({}));
            self.end_operation(at, &key, false);
            let shape = format!("{:?}", tensor.shape);
            let args = json!({"dtype": dtype, "shape": shape, "seq": seq, "fused": fused, "ahead": ahead});
            self.line(&json!({"name": collective, "ph": "B", "ts": at, "pid": pid, "tid": OPERATION, "args": args}));
            if let Some(tensor) = self.tensors.get_mut(&key) {
                tensor.performing = true;
            }
            keys.push(key);
        }
        if self.operations.len() >= OPERATIONS_MAX
            && let Some(oldest) = self.operations.keys().next().copied()
        {
            self.over(at, oldest, true);
        }
        self.operations.insert(seq, Operation { tensors: keys, ordered_us: at, performed_us: None });
    }

    fn performed(&mut self, Performed { seq, lane, spans }: &Performed) {
        let Some(operation) = self.operations.get_mut(seq) else { return };
        for span in spans {
            let (begin, end) = operation.performed_us.unwrap_or((u64::MAX, 0));
            operation.performed_us = Some((begin.min(span.begin_us), end.max(span.end_us)));
        }
        // The work belongs to the bucket; it is shown at the bucket's first tensor.
        let Some(key) = operation.tensors.first().cloned() else { return };
        let pid = self.tensor(&key);
        for span in spans {
            self.work(&key, pid, *lane, span);
        }
    }

    fn work(&mut self, key: &Key, pid: u64, lane: Option<u32>, span: &Span) {
        let Some(phase) = phase(span.phase()) else { return };
        let row = row(lane, span.phase());
        if self.tensors.get_mut(key).is_some_and(|tensor| tensor.rows.insert(row)) {
            let thread = lane.map_or("control".to_owned(), |lane| format!("lane {lane}"));
            self.name_row(pid, row, &format!("{thread}: {phase}"));
        }
        let args = json!({"busy_us": span.busy_us, "pieces": span.pieces, "bytes": span.bytes});
        let (begin, dur) = (span.begin_us, span.end_us.saturating_sub(span.begin_us));
        self.line(&json!({"name": phase, "ph": "X", "ts": begin, "dur": dur, "pid": pid, "tid": row, "args": args}));
    }

    fn over(&mut self, at: u64, seq: u64, dropped: bool) {
        let Some(Operation { tensors, ordered_us, performed_us }) = self.operations.remove(&seq) else { return };
        for key in tensors {
            let Some(pid) = self.tensors.get(&key).filter(|tensor| tensor.performing).map(|tensor| tensor.pid) else {
                continue;
            };
            if let Some((begin, end)) = performed_us {
                // A chunk of another sidecar may arrive before the order.
                let begin = begin.clamp(ordered_us, at.max(ordered_us));
                let end = end.clamp(begin, at.max(begin));
                for (name, ts, dur) in [("QUEUE", ordered_us, begin - ordered_us), ("PERFORM", begin, end - begin)] {
                    self.line(&json!({"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": OPERATION}));
                }
            }
            self.end_operation(at, &key, dropped);
        }
    }

    fn end_negotiation(&mut self, at: u64, key: &Key, args: &Value) {
        let Some(tensor) = self.tensors.get_mut(key) else { return };
        if tensor.negotiating.take().is_some() {
            let pid = tensor.pid;
            self.line(&json!({"ph": "E", "ts": at, "pid": pid, "tid": NEGOTIATION, "args": args}));
        }
    }

    fn end_operation(&mut self, at: u64, key: &Key, dropped: bool) {
        let Some(tensor) = self.tensors.get_mut(key) else { return };
        if std::mem::take(&mut tensor.performing) {
            let pid = tensor.pid;
            let args = if dropped { json!({"dropped": true}) } else { json!({}) };
            self.line(&json!({"ph": "E", "ts": at, "pid": pid, "tid": OPERATION, "args": args}));
        }
    }

    /// The number of a tensor. A new tensor gets its rows.
    fn tensor(&mut self, key: &Key) -> u64 {
        if let Some(tensor) = self.tensors.get(key) {
            return tensor.pid;
        }
        if self.tensors.len() >= TENSORS_MAX {
            // Idle tensors are dropped; they get new numbers when they are used again.
            self.tensors.retain(|_, tensor| tensor.performing || tensor.negotiating.is_some());
        }
        self.pids += 1;
        let pid = self.pids;
        let (set, name) = key;
        let name = if *set == 0 { name.clone() } else { format!("{name} (process set {set})") };
        self.line(&json!({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}));
        self.sort(pid);
        self.name_row(pid, NEGOTIATION, "negotiation");
        self.name_row(pid, OPERATION, "operation");
        self.tensors.insert(key.clone(), Tensor { pid, ..Tensor::default() });
        pid
    }

    fn sort(&mut self, pid: u64) {
        self.line(&json!({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}));
    }

    fn name_row(&mut self, pid: u64, row: u32, name: &str) {
        self.line(&json!({"name": "thread_name", "ph": "M", "pid": pid, "tid": row, "args": {"name": name}}));
        self.line(
            &json!({"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": row, "args": {"sort_index": row}}),
        );
    }

    fn mark(&mut self, at: u64, name: &str, args: &Value) {
        self.line(&json!({"name": name, "ph": "i", "s": "g", "ts": at, "pid": 0, "tid": 0, "args": args}));
    }

    fn line(&mut self, event: &Value) {
        self.lines.push(event.to_string());
    }
}

/// The name of a phase; `None` for one of a later version.
const fn phase(phase: Phase) -> Option<&'static str> {
    Some(match phase {
        Phase::Unspecified => return None,
        Phase::ReadInput => "READ_INPUT",
        Phase::Reduce => "REDUCE",
        Phase::Code => "CODE",
        Phase::Send => "SEND",
        Phase::Receive => "RECEIVE",
        Phase::CopyResult => "COPY_RESULT",
    })
}

/// The row of a thread's work of one kind. Kinds have separate rows because they overlap.
fn row(lane: Option<u32>, phase: Phase) -> u32 {
    let thread = lane.map_or(0, |lane| lane.saturating_add(1));
    OPERATION.saturating_add(thread.saturating_mul(KINDS)).saturating_add(phase as u32)
}

const NEGOTIATION: u32 = 0;
const OPERATION: u32 = 1;
/// Kinds of work.
const KINDS: u32 = 6;
/// Tensors whose numbers are kept.
const TENSORS_MAX: usize = 65_536;
/// Operations in progress at once. An engine has fewer, but the event of an end may have been dropped.
const OPERATIONS_MAX: usize = 16_384;

#[cfg(test)]
mod tests;
