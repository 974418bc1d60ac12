//! Warnings and errors that the native client reports through `tracing`, for Python's log.

use std::collections::HashSet;
use std::fmt::{Debug, Write};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Collects events. A thread of the client cannot call Python, which may wait for that thread.
struct Collector;

/// What was reported.
#[derive(Default)]
struct Reported {
    /// Not taken yet.
    new: Vec<String>,
    /// All texts so far: each is reported once.
    known: HashSet<String>,
}

static REPORTED: Mutex<Option<Reported>> = Mutex::new(None);
static HAS_NEW: AtomicBool = AtomicBool::new(false);
/// The process that collects.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Begins to collect. This module's copy of `tracing` has no other subscriber.
pub(crate) fn collect() {
    // Fails when the module is initialised again in the same process; the first one collects.
    if tracing::subscriber::set_global_default(Collector).is_ok() {
        PROCESS.store(std::process::id(), Ordering::Relaxed);
    }
}

/// Returns the warnings since the last call, each text once in the process.
#[pyfunction]
pub(crate) fn take_warnings() -> Vec<String> {
    // In a forked child, a thread that does not exist there may hold the lock, and the parent reports what is new.
    if PROCESS.load(Ordering::Relaxed) != std::process::id() || !HAS_NEW.swap(false, Ordering::Relaxed) {
        return Vec::new();
    }
    lock().as_mut().map(|reported| std::mem::take(&mut reported.new)).unwrap_or_default()
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let target = metadata.target();
        metadata.is_event() && *metadata.level() <= Level::WARN && target.starts_with("ronde") && target != NOTICES
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        if std::process::id() != PROCESS.load(Ordering::Relaxed) {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        let Text { message, fields } = text;
        let text = if fields.is_empty() { message } else { format!("{message} ({fields})") };
        let mut guard = lock();
        let reported = guard.get_or_insert_default();
        if reported.known.len() < TEXTS_MAX && reported.known.insert(text.clone()) {
            reported.new.push(text);
            HAS_NEW.store(true, Ordering::Relaxed);
        }
    }

    // Spans carry nothing that a warning needs.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event in words.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // A string cannot fail to be written to.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name if self.fields.is_empty() => write!(self.fields, "{name}: {value:?}"),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }
}

/// Ignores poisoning: each change is a single call.
fn lock() -> MutexGuard<'static, Option<Reported>> {
    REPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The target of the sidecar's notices, which the client passes on by themselves.
const NOTICES: &str = "ronde::notice";
/// Texts that are remembered; later ones are left out.
const TEXTS_MAX: usize = 256;
