//! Operations in two levels that are under way when another rank shuts down.
//!
//! That rank may have completed them, because the ranks of a host do not see the end of a collective of NCCL at the same
//! time. The sidecar completes what it has ordered before it ends the epoch, so here, too, what needs no further message is
//! completed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::operation::Stage;
use super::thread::{Next, POLL_INTERVAL_MAX, Thread};
use crate::error::Error;
use crate::session::Session;

impl Thread {
    /// Completes the operations that need nothing more from the sidecar, and fails the others. After `FINISH_TIMEOUT`, and
    /// what a call of NCCL may take in addition, it leaves the rest to `end`: a rank that shuts down while its own operations
    /// are under way leaves NCCL's kernels here without their peer.
    pub(super) fn finish(&mut self, session: &Arc<Session>, why: &Error) {
        let deadline = Instant::now() + FINISH_TIMEOUT;
        self.receive();
        loop {
            for mut operation in std::mem::take(&mut self.operations) {
                if operation.can_continue_alone() {
                    self.operations.push(operation);
                } else {
                    operation.held.complete(Err(why.clone()));
                }
            }
            if self.operations.is_empty() || Instant::now() >= deadline {
                return;
            }
            self.take_tickets(session);
            self.step_all(session);
            std::thread::sleep(POLL_INTERVAL_MAX);
        }
    }

    fn step_all(&mut self, session: &Arc<Session>) {
        for operation in std::mem::take(&mut self.operations) {
            let has_ticket = matches!(operation.stage, Stage::Ticket(_) | Stage::SecondTicket(_));
            let next = if has_ticket { Next::Waits(operation) } else { self.continue_past_ticket(session, operation) };
            if let Next::Waits(operation) | Next::Moved(operation) = next {
                self.operations.push(operation);
            }
        }
    }
}

/// How long the last phases may take after a shutdown: they wait for no program, only for the ranks of this host.
pub(super) const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
