//! What the sidecar says, handed to those who wait for it. Called by the session's task, and by whichever thread reads the ring.

use std::sync::Arc;

use ronde_rpc::v1::server_message;
use ronde_rpc::{Completion, EpochView, v1};
use ronde_shm::{LeasedSlot, SlotHold};
use ronde_wire::{Collective, RequestId};

use crate::completions::NotifyFlag;
use crate::error::Error;
use crate::handle::ResultData;
use crate::promise::Fulfil;
use crate::session::Session;

/// A request that is pending.
#[derive(Debug)]
pub(crate) struct Entry {
    /// What was asked for.
    pub(crate) collective: Collective,
    /// The waiter; `None` once it has gone.
    pub(crate) waiter: Option<Fulfil<ResultData>>,
    /// Whether the answer is counted for a thread that waits for none in particular.
    pub(crate) notify_flag: NotifyFlag,
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
    pub(crate) fn receive(self: &Arc<Self>, message: v1::ServerMessage) -> Result<(), Error> {
        match message.message {
            Some(server_message::Message::Completed(message)) => return self.complete(message),
            Some(server_message::Message::ResultPart(part)) => return self.add_part(&part),
            Some(server_message::Message::Failed(message)) => {
                let failure = self.recorded(message.failure);
                self.answer(RequestId(message.request), Err(failure.into()));
            }
            Some(server_message::Message::EpochEnded(message)) => {
                let error = Error::Failure(self.recorded(message.failure));
                self.end(&error);
                self.report_begin(Err(error));
            }
            Some(server_message::Message::EpochBegan(message)) => {
                let view = EpochView::parse(&message).map_err(|error| Error::protocol(&error))?;
                self.lock_table().names.begin(view.size);
                self.report_begin(Ok(view));
            }
            Some(server_message::Message::Notice(notice)) => self.note(notice.text),
            // A second answer to the claim says nothing new; an empty message is one of a later version. The task looks
            // for RingTaken itself.
            Some(
                server_message::Message::Claimed(_)
                | server_message::Message::Alive(_)
                | server_message::Message::RingTaken(_),
            )
            | None => {}
        }
        Ok(())
    }

    /// Whoever waits for the begin is told what became of it.
    pub(crate) fn report_begin(&self, outcome: Result<EpochView, Error>) {
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
            drop(ResultData::new(self, completion, Vec::new()));
            return Ok(());
        };
        let Entry { waiter, notify_flag, input, output, parts, .. } = entry;
        // Before the waiter goes on, for which there is room again.
        drop(input);
        let arrived = match (completion.in_output, output) {
            (false, _) => ResultData::new(self, completion, parts),
            (true, Some(output)) => ResultData::in_output(completion, output),
            (true, None) => {
                let reason = format!("the result of {request} lies where this session wanted none");
                return Err(Error::Protocol { reason });
            }
        };
        if let Some(waiter) = waiter {
            waiter.with(Ok(arrived));
        }
        self.count(&notify_flag);
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

    fn answer(&self, request: RequestId, outcome: Result<ResultData, Error>) {
        let Some(Entry { waiter, notify_flag, input, output, .. }) = self.lock_table().remove(request) else { return };
        drop((input, output));
        if let Some(waiter) = waiter {
            waiter.with(outcome);
        }
        self.count(&notify_flag);
    }

    /// Counts an answer that no thread waits for. Called after it has been delivered: see [`Attention::set_missing`].
    fn count(&self, notify_flag: &NotifyFlag) {
        if notify_flag.is_set() {
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
