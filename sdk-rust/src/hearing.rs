//! What the sidecar says, handed to those who wait for it. Called by the session's task, and by whichever thread reads the ring.

use std::sync::Arc;

use ronde_rpc::v1::server_message::Message as Heard;
use ronde_rpc::{Completion, EpochView, v1};
use ronde_shm::{LeasedSlot, SlotHold};
use ronde_wire::{Collective, RequestId};

use crate::completions::Attention;
use crate::error::Error;
use crate::handle::Arrived;
use crate::promise::Fulfil;
use crate::session::Session;

/// A request that is pending.
#[derive(Debug)]
pub(crate) struct Entry {
    /// What was asked for.
    pub(crate) collective: Collective,
    /// The waiter; `None` once it has gone.
    pub(crate) waiter: Option<Fulfil<Arrived>>,
    /// Whether the answer is counted for a thread that waits for none in particular.
    pub(crate) attention: Attention,
    /// The input, which the sidecar may read until it answers.
    pub(crate) input: Option<SlotHold>,
    /// Where the result is wanted, which the sidecar may write until it answers.
    pub(crate) output: Option<LeasedSlot>,
    /// Results that came in parts.
    pub(crate) parts: Vec<u8>,
}

impl Session {
    /// Hears one message.
    ///
    /// # Errors
    /// [`Error::Protocol`] for one that ends the session.
    pub(crate) fn hear(self: &Arc<Self>, message: v1::ServerMessage) -> Result<(), Error> {
        match message.message {
            Some(Heard::Completed(message)) => return self.complete(message),
            Some(Heard::ResultPart(part)) => return self.add_part(&part),
            Some(Heard::Failed(message)) => {
                let failure = self.recorded(message.failure);
                self.answer(RequestId(message.request), Err(failure.into()));
            }
            Some(Heard::EpochEnded(message)) => {
                let error = Error::Failure(self.recorded(message.failure));
                self.end(&error);
                self.tell_began(Err(error));
            }
            Some(Heard::EpochBegan(message)) => {
                let view = EpochView::parse(&message).map_err(|error| Error::protocol(&error))?;
                self.lock_table().names.begin(view.size);
                self.tell_began(Ok(view));
            }
            Some(Heard::Notice(notice)) => self.note(notice.text),
            // A second answer to the claim says nothing new; an empty message is one of a later version. The task looks
            // for RingTaken itself.
            Some(Heard::Claimed(_) | Heard::Alive(_) | Heard::RingTaken(_)) | None => {}
        }
        Ok(())
    }

    /// Whoever waits for the begin is told what became of it.
    pub(crate) fn tell_began(&self, outcome: Result<EpochView, Error>) {
        if let Some(began) = self.lock_began().take() {
            // Nobody listens when `connect` was given up.
            let _ = began.send(outcome);
        }
    }

    fn complete(self: &Arc<Self>, message: v1::Completed) -> Result<(), Error> {
        let completion = Completion::parse(message).map_err(|error| Error::protocol(&error))?;
        let request = completion.request;
        let entry = {
            let mut table = self.lock_table();
            let entry = table.remove(request);
            if let Some(entry) = &entry {
                // Before the waiter hears of it and goes on with the next operation.
                table.names.learn(&entry.collective, &completion.detail);
            }
            entry
        };
        let Some(entry) = entry else {
            // A result that came after its request ended is of no use, but must be given back.
            drop(Arrived::new(self, completion, Vec::new()));
            return Ok(());
        };
        let Entry { waiter, attention, input, output, parts, .. } = entry;
        // Before the waiter goes on, for which there is room again.
        drop(input);
        let arrived = match (completion.in_output, output) {
            (false, _) => Arrived::new(self, completion, parts),
            (true, Some(output)) => Arrived::in_output(completion, output),
            (true, None) => {
                let reason = format!("the result of {request} lies where this session wanted none");
                return Err(Error::Protocol { reason });
            }
        };
        if let Some(waiter) = waiter {
            waiter.with(Ok(arrived));
        }
        self.count(&attention);
        Ok(())
    }

    fn add_part(&self, part: &v1::ResultPart) -> Result<(), Error> {
        let mut table = self.lock_table();
        let Some(entry) = table.entry_mut(RequestId(part.request)) else { return Ok(()) };
        let limit = self.claimed.arena_bytes_max;
        if (entry.parts.len() + part.data.len()) as u64 > limit {
            return Err(Error::Protocol { reason: format!("a result in parts is over arena_bytes_max = {limit}") });
        }
        entry.parts.extend_from_slice(&part.data);
        Ok(())
    }

    fn answer(&self, request: RequestId, outcome: Result<Arrived, Error>) {
        let Some(Entry { waiter, attention, input, output, .. }) = self.lock_table().remove(request) else { return };
        drop((input, output));
        if let Some(waiter) = waiter {
            waiter.with(outcome);
        }
        self.count(&attention);
    }

    /// Counts an answer that no thread waits for. Called after it has been delivered: see [`Attention::set_missing`].
    fn count(&self, attention: &Attention) {
        if attention.is_missing() {
            self.completions.add();
        }
    }

    fn note(&self, text: String) {
        tracing::warn!(target: "ronde", "{text}");
        let mut notices = self.lock_notices();
        notices.truncate(NOTICES_MAX - 1);
        notices.push_back(text);
    }
}

/// Notices kept for the program; further ones replace the newest.
pub(crate) const NOTICES_MAX: usize = 64;
