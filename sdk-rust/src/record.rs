//! What is known of the rank that failed first, which is told with the first failure of its kind only.

use std::sync::{Arc, OnceLock};

use ronde_wire::{Failure, Record};

/// The record of a session's first failure, once it was told.
#[derive(Debug, Default)]
pub(crate) struct FirstRecord(OnceLock<Arc<Record>>);

impl FirstRecord {
    /// A failure that was told, with the record where it belongs.
    pub(crate) fn with(&self, mut failure: Failure) -> Failure {
        if let Some(record) = &failure.record {
            // An epoch ends once in a session, so what is there already is of the same failure.
            let _ = self.0.set(Arc::clone(record));
        } else if failure.cause.ends_epoch() {
            failure.record = self.0.get().cloned().filter(|record| failure.rank == Some(record.rank));
        }
        failure
    }
}
