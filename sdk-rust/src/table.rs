//! The table of a session's pending requests, and why there can be no more of them.

use std::collections::HashMap;

use ronde_wire::{Rank, RequestId};

use crate::error::Error;
use crate::naming::Names;

/// Requests that the sidecar has not answered yet, with what is kept of each.
#[derive(Debug)]
pub(crate) struct Table<Entry> {
    /// Names and sets.
    pub(crate) names: Names,
    entries: HashMap<RequestId, Entry>,
    over: Option<Error>,
    next: u64,
}

impl<Entry> Table<Entry> {
    /// No requests of a rank.
    pub(crate) fn new(me: Rank) -> Self {
        Self { names: Names::new(me), entries: HashMap::new(), over: None, next: 0 }
    }

    /// Adds a request.
    ///
    /// # Errors
    /// Why the session is over, or [`Error::Limit`] beyond `pending_max`.
    pub(crate) fn insert(&mut self, entry: Entry, pending_max: usize) -> Result<RequestId, Error> {
        self.check_open(pending_max)?;
        self.next += 1;
        let request = RequestId(self.next);
        self.entries.insert(request, entry);
        Ok(request)
    }

    /// Takes a request out.
    pub(crate) fn remove(&mut self, request: RequestId) -> Option<Entry> {
        self.entries.remove(&request)
    }

    /// A request, to add to it.
    pub(crate) fn entry_mut(&mut self, request: RequestId) -> Option<&mut Entry> {
        self.entries.get_mut(&request)
    }

    /// Ends the session: all requests are handed out, to be told `why`, and none is accepted again. The first reason stays.
    pub(crate) fn end(&mut self, why: Error) -> Vec<Entry> {
        self.over.get_or_insert(why);
        self.entries.drain().map(|(_, entry)| entry).collect()
    }

    /// Why nothing can be submitted any more, if so.
    pub(crate) fn over(&self) -> Option<&Error> {
        self.over.as_ref()
    }

    /// Whether a request can be submitted now.
    ///
    /// # Errors
    /// Those of [`Table::insert`].
    pub(crate) fn check_open(&self, pending_max: usize) -> Result<(), Error> {
        if let Some(error) = &self.over {
            return Err(error.clone());
        }
        if self.entries.len() >= pending_max {
            return Err(Error::Limit {
                reason: format!(
                    "{pending_max} requests are pending, the most that a session may have; wait for some first"
                ),
            });
        }
        Ok(())
    }
}
