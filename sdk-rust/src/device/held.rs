//! Requests that are pending here and not sent: their input is on its way from a device, or they must not overtake one whose
//! input is.

use std::sync::Arc;
use std::time::Duration;

use ronde_gpu::GpuError;
use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{Place, Submission};
use ronde_wire::{PluginCall, RequestId};

use super::line::{Order, Unsent};
use super::{InputHold, OutputSlot};
use crate::completions::NotifyFlag;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::result_data::ResultData;
use crate::ring::Flush;
use crate::session::{Draft, Resources, Session};
use crate::usage::{Flight, count_operation};

/// A request to send when its input has arrived. Dropping it fails the request.
pub(super) struct Held {
    session: Arc<Session>,
    /// `None` once it has its input or has failed.
    id: Option<RequestId>,
    plugin: Option<PluginCall>,
    site: Option<String>,
}

impl Held {
    /// Makes a draft's request pending. The other ranks are notified when that is not possible.
    pub(super) fn insert(mut draft: Draft, output: Option<OutputSlot>) -> Result<(Self, InFlight), Error> {
        let Some(request) = draft.request.as_ref() else { return Err(Error::Closed) };
        let session = Arc::clone(&draft.session);
        let notify_flag = NotifyFlag::new(draft.notify);
        let resources = Resources { notify_flag: notify_flag.clone(), input: None, output, flight: Flight::begin() };
        let order = Order::of(&request.collective);
        let mut line = session.line.lock();
        let (id, promise) = match session.pending.insert_held(request, resources) {
            Ok(inserted) => inserted,
            Err(error) => {
                drop(line);
                return Err(draft.reject(error));
            }
        };
        line.push(id, order, None);
        drop(line);
        count_operation(request);
        let named = (request.name.clone(), request.collective.clone());
        let in_flight = InFlight::new(Arc::clone(&session), id, named, (promise, SPIN, notify_flag));
        let (plugin, site) = (draft.plugin.take(), draft.site.take());
        draft.request = None;
        Ok((Self { session, id: Some(id), plugin, site }, in_flight))
    }

    /// Sends the request with the memory that now has its input, as soon as its turn has come, or fails it.
    pub(super) fn finish(mut self, filled: Result<(Place, InputHold), GpuError>) {
        match filled {
            Err(error) => self.fail(&error.into()),
            Ok((place, hold)) => {
                let Some(id) = self.id.take() else { return };
                let (plugin, site) = (self.plugin.take(), self.site.take());
                self.session.line.lock().fill(id, Unsent { plugin, place, site, input: Some(hold) });
                self.session.send_waiting();
            }
        }
    }

    /// The request's number, until it has its input or has failed.
    pub(super) fn id(&self) -> Option<RequestId> {
        self.id
    }

    /// Whether no earlier request has to be sent before it.
    pub(super) fn is_next(&self) -> bool {
        self.id.is_none_or(|id| self.session.line.lock().is_next(id))
    }

    /// Delivers the outcome of a request that was performed apart, without a notice to other ranks, and sends those that
    /// waited for it. Returns whether it had a waiter.
    pub(super) fn complete(mut self, outcome: Result<ResultData, Error>) -> bool {
        let Some(id) = self.id.take() else { return false };
        let resources = self.session.pending.complete_apart(id, outcome);
        if let Some(Resources { notify_flag, .. }) = &resources {
            self.session.count(notify_flag);
        }
        self.session.remove_waiting(id);
        resources.is_some()
    }

    /// Fails the request here and on the other ranks, unless it has been withdrawn. Once only.
    pub(super) fn fail(&mut self, error: &Error) {
        if let Some(id) = self.id.take() {
            self.session.fail_held(id, error);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.session.fork_guard.is_child() {
            let over = self.session.pending.over();
            self.fail(&over.unwrap_or_else(|| Error::argument(ABANDONED)));
        }
    }
}

impl Session {
    /// Sends all unsent requests whose turn has come. Does not block.
    pub(crate) fn send_waiting(&self) {
        let mut failed = Vec::new();
        let mut line = self.line.lock();
        while let Some((id, unsent)) = line.pop() {
            if let Err(error) = self.send_unsent(id, unsent) {
                failed.push((id, error));
            }
        }
        drop(line);
        for (id, error) in failed {
            self.fail_held(id, &error);
        }
    }

    fn send_unsent(&self, id: RequestId, unsent: Unsent) -> Result<(), Error> {
        let Unsent { plugin, place, site, input } = unsent;
        let mut output = None;
        let add = |resources: &mut Resources| {
            output = resources.output.as_ref().map(OutputSlot::place);
            resources.input = input;
        };
        // None: it was withdrawn, or the session is over.
        let Some(what) = self.pending.begin_send(id, add) else { return Ok(()) };
        let message = Submission { request: id, what, plugin, place, output, site }.into_message();
        self.send(Message::Submit(message), Flush::Now)?;
        if let Some(withdrawal) = self.pending.end_send(id) {
            self.send_or_end(withdrawal);
        }
        Ok(())
    }

    /// Fails an unsent request here and on the other ranks, and sends those that waited for it.
    fn fail_held(&self, id: RequestId, error: &Error) {
        if let Some((request, Resources { notify_flag, .. })) = self.pending.fail_held(id, error) {
            self.abstain(request, &error.to_string());
            self.count(&notify_flag);
        }
        self.remove_waiting(id);
    }

    /// Withdraws a request whose waiter stays, because the operation may have been ordered: then its result comes.
    pub(crate) fn ask_to_withdraw(&self, request: RequestId, reason: &str) {
        if !self.fork_guard.is_child()
            && let Some(message) = self.pending.withdrawal_of(request, reason)
        {
            self.send_or_end(message);
        }
    }

    /// Removes an unsent request, and sends those that waited for it.
    pub(crate) fn remove_waiting(&self, id: RequestId) {
        self.line.lock().remove(id);
        self.send_waiting();
    }
}

/// Why a request is not sent though its waiter waits.
const ABANDONED: &str =
    "the thread that copies from the GPU ended before the input had arrived; its error is in the log";
/// A wait does not spin: the copies from and to the device take longer.
const SPIN: Duration = Duration::ZERO;

#[cfg(test)]
mod tests {
    use ronde_wire::{DType, ReduceOp};

    use super::*;
    use crate::operation::Operation;
    use crate::session::tests::unread_session;
    use crate::tensor::{Layout, TensorRef};
    use crate::usage::usage;

    /// More bytes than all other tests of this process submit.
    const ELEMENTS: usize = 1 << 30;

    #[test]
    fn a_held_operation_counts_as_submitted() {
        let (session, _unread) = unread_session(8);
        let small = TensorRef { dtype: DType::F64, shape: &[1], bytes: &[0; 8] };
        let operation = Operation::allreduce("held", small, ReduceOp::Sum);
        let layout = Layout { dtype: DType::F64, shape: &[ELEMENTS as u64], bytes: ELEMENTS * 8 };
        let draft = session.draft_of(&operation, Some(layout)).expect("it is open");
        let before = usage();
        let (_held, _in_flight) = Held::insert(draft, None).expect("there is room");
        let after = usage();
        assert!(after.operations > before.operations && after.bytes - before.bytes >= ELEMENTS as u64 * 8, "{after:?}");
    }
}
