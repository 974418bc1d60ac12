//! Applies backpressure from control links to the engine, and bounds the work of one turn of the control thread.
//!
//! The engine may produce many actions at once: a group of thousands of small tensors is ordered together, with all
//! their bytes. A link's queue is bounded, and its writer runs on this thread. While a queue is long, the actions stay
//! in the engine; nothing is lost. After [`HELD_MAX`] they are performed anyway; a queue that overflows then closes its
//! link.

use std::time::{Duration, Instant};

use ronde_transport::NetworkPort;
use ronde_wire::SidecarIndex;
use tokio::time::Instant as Deadline;

/// Decides whether the control thread polls the engine for another action in this turn.
#[derive(Debug, Default)]
pub(crate) struct Backpressure {
    /// Operations that were executed inline in this turn.
    performed: usize,
    /// A peer whose queue was long when something was sent to it.
    long: Option<SidecarIndex>,
    /// When the engine's actions began to be held, and whether a link's queue is the reason.
    held: Option<(Instant, bool)>,
}

impl Backpressure {
    /// Begins a turn.
    pub(crate) fn begin(&mut self) {
        self.performed = 0;
    }

    /// Returns whether another action may be performed in this turn.
    pub(crate) fn allows(&mut self, control: &NetworkPort) -> bool {
        self.long = self.long.filter(|peer| control.queued_bytes(*peer) > QUEUED_BYTES_MAX);
        let since = self.held.map_or_else(Instant::now, |(since, _)| since);
        if self.long.is_some() && since.elapsed() < HELD_MAX {
            self.held = Some((since, true));
            return false;
        }
        if self.performed >= PERFORMED_MAX {
            self.held = Some((since, false));
            return false;
        }
        true
    }

    /// Notes that the engine has no more actions.
    pub(crate) fn finish(&mut self) {
        self.held = None;
    }

    /// Notes that a message was queued for a peer, for which so many bytes are queued now.
    pub(crate) fn sent(&mut self, to: SidecarIndex, queued_bytes: usize) {
        if queued_bytes > QUEUED_BYTES_MAX {
            self.long = Some(to);
        }
    }

    /// Notes that an operation was executed inline.
    pub(crate) fn performed(&mut self) {
        self.performed += 1;
    }

    /// Returns when the engine is to be polled again.
    pub(crate) fn resumes_at(&self) -> Option<Deadline> {
        self.held.map(|(_, for_a_link)| if for_a_link { Deadline::now() + DRAIN_TIME } else { Deadline::now() })
    }
}

/// A quarter of the bound of a control link's queue.
const QUEUED_BYTES_MAX: usize = 4 << 20;
/// How long a long queue may delay the engine's actions.
const HELD_MAX: Duration = Duration::from_secs(2);
/// The time in which a queue becomes notably shorter.
const DRAIN_TIME: Duration = Duration::from_millis(1);
/// Operations of up to 64 KiB each: some milliseconds.
const PERFORMED_MAX: usize = 256;
