//! [`Draft`]: an operation between its name and its submission.

use std::sync::Arc;

use ronde_wire::{PluginCall, Request};

use super::Session;
use crate::error::Error;

/// An operation that has a name and is not submitted yet. Dropping it notifies the other ranks that this rank takes no part.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) session: Arc<Session>,
    /// `None` once it has been submitted or rejected.
    pub(crate) request: Option<Request>,
    /// Whether its completion is counted when no thread waits for it.
    pub(crate) notify: bool,
    pub(crate) plugin: Option<PluginCall>,
    /// The caller's file and line.
    pub(crate) site: Option<String>,
    /// The bytes of the result, when it may stay in shared memory.
    pub(super) result_bytes: Option<u64>,
}

impl Draft {
    /// Reports to the other ranks that the operation is not submitted because of `error`.
    pub(crate) fn reject(mut self, error: Error) -> Error {
        if let Some(request) = self.request.take() {
            self.session.abstain(request, &error.to_string());
        }
        error
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Some(request) = self.request.take() {
            self.session.abstain(request, "its call was cancelled");
        }
    }
}
