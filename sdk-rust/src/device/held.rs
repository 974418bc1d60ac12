//! [`Held`]: a request that is pending here and not sent, because its input is on its way from a device.

use std::sync::Arc;
use std::time::Duration;

use ronde_gpu::{Event, GpuError};
use ronde_rpc::v1::client_message::Message;
use ronde_rpc::{Place, Submission};
use ronde_shm::LeasedSlot;
use ronde_wire::{PluginCall, Request, RequestId};

use crate::completions::NotifyFlag;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::memory::whole;
use crate::ring::Flush;
use crate::session::{Draft, Resources, Session, output_place};

/// A request to send when its input has arrived. Dropping it fails the request.
pub(super) struct Held {
    session: Arc<Session>,
    id: RequestId,
    /// `None` once it has been sent or has failed.
    request: Option<Request>,
    plugin: Option<PluginCall>,
    site: Option<String>,
}

impl Held {
    /// Makes a draft's request pending. The other ranks learn when that is not possible.
    pub(super) fn insert(
        mut draft: Draft,
        output: Option<LeasedSlot>,
        submitted: Arc<Event>,
    ) -> Result<(Self, InFlight), Error> {
        let Some(request) = draft.request.as_ref() else { return Err(Error::Closed) };
        let session = Arc::clone(&draft.session);
        let notify_flag = NotifyFlag::new(draft.notify);
        let resources = Resources { notify_flag: notify_flag.clone(), input: None, output };
        let (id, promise) = match session.pending.insert_held(request, resources) {
            Ok(inserted) => inserted,
            Err(error) => return Err(draft.reject(error)),
        };
        let named = (request.name.clone(), request.collective.clone());
        let in_flight = InFlight::new(Arc::clone(&session), id, named, (promise, SPIN, notify_flag));
        let in_flight = in_flight.submitted_after(submitted);
        let (request, plugin, site) = (draft.request.take(), draft.plugin.take(), draft.site.take());
        Ok((Self { session, id, request, plugin, site }, in_flight))
    }

    /// Sends the request with the slot that now has its input, or fails it.
    pub(super) fn finish(mut self, filled: Result<LeasedSlot, GpuError>) {
        let sent = filled.map_err(Error::from).and_then(|slot| self.send(slot));
        if let Err(error) = sent {
            self.fail(&error);
        }
    }

    fn send(&mut self, slot: LeasedSlot) -> Result<(), Error> {
        let (hold, part) = whole(slot);
        let mut output = None;
        let add = |resources: &mut Resources| {
            output = resources.output.as_ref().map(|slot| output_place(slot.slot()));
            resources.input = Some(hold);
        };
        if !self.session.pending.fill(self.id, add) {
            return Err(self.session.pending.over().unwrap_or_else(|| Error::argument(ABANDONED)));
        }
        let Some(what) = self.request.clone() else { return Err(Error::Closed) };
        let (plugin, site) = (self.plugin.take(), self.site.take());
        let place = Place::from(output_place(part));
        let message = Submission { request: self.id, what, plugin, place, output, site }.into_message();
        self.session.send(Message::Submit(message), Flush::Now)?;
        self.request = None;
        if let Some(withdrawal) = self.session.pending.release_held(self.id) {
            self.session.send_or_end(withdrawal);
        }
        Ok(())
    }

    /// Fails the request here and on the other ranks. Once only.
    fn fail(&mut self, error: &Error) {
        let Some(request) = self.request.take() else { return };
        let resources = self.session.pending.fail_held(self.id, error);
        self.session.abstain(request, &error.to_string());
        if let Some(Resources { notify_flag, .. }) = resources {
            self.session.count(&notify_flag);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.session.fork_guard.is_child() {
            self.fail(&Error::argument(ABANDONED));
        }
    }
}

/// Why a request was not sent though its input arrived, or could not be copied any more.
const ABANDONED: &str = "nobody waited any more for the operation when its input arrived from the GPU: its handle was dropped, or its operation timeout passed";
/// A wait does not spin: the copies from and to the device take longer.
const SPIN: Duration = Duration::ZERO;
