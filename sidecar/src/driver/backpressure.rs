//! How much the control thread does before links, sessions and the clock get their turn.
//!
//! The engine may want much at once: a group of thousands of small tensors is ordered in one go, with all their bytes. A
//! link's queue is bounded, and its writer runs on this thread. So what the engine wants waits where it is while a queue is
//! long: nothing is lost, only later. A queue that stays long is the link's problem again after [`HELD_MAX`].

use std::time::{Duration, Instant};

use ronde_transport::NetworkPort;
use ronde_wire::SidecarIndex;
use tokio::time::Instant as Deadline;

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Backpressure {
    /// Operations performed in this turn.
    performed: usize,
    /// A peer whose queue was long when something was sent to it.
    long: Option<SidecarIndex>,
    /// When the engine was first left with something to do, and whether it is for a link's sake.
    held: Option<(Instant, bool)>,
}

impl Backpressure {
    /// A turn begins.
    pub(crate) fn begin(&mut self) {
        self.performed = 0;
    }

    /// Whether there may be more in this turn.
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

    /// The engine wants nothing more.
    pub(crate) fn finish(&mut self) {
        self.held = None;
    }

    /// Something was queued for a peer, for which so many bytes wait now.
    pub(crate) fn sent(&mut self, to: SidecarIndex, queued_bytes: usize) {
        if queued_bytes > QUEUED_BYTES_MAX {
            self.long = Some(to);
        }
    }

    /// An operation was performed on this thread.
    pub(crate) fn performed(&mut self) {
        self.performed += 1;
    }

    /// When the rest is to be done.
    pub(crate) fn resumes_at(&self) -> Option<Deadline> {
        self.held.map(|(_, for_a_link)| if for_a_link { Deadline::now() + DRAIN_TIME } else { Deadline::now() })
    }
}

/// A quarter of the bound of a control link's queue.
const QUEUED_BYTES_MAX: usize = 4 << 20;
/// How long a long queue holds the engine up.
const HELD_MAX: Duration = Duration::from_secs(2);
/// In which a queue becomes notably shorter.
const DRAIN_TIME: Duration = Duration::from_millis(1);
/// Operations of up to 64 KiB each: some milliseconds.
const PERFORMED_MAX: usize = 256;
