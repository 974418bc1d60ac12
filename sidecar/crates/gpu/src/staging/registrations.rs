//! [`Registrations`]: the segments of a session that are registered with the driver, each once for all devices.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use ronde_shm::SegmentHold;

use crate::driver::{Context, Registration};
use crate::error::GpuError;

/// Registered (page-locked) segments, by address. Dropping it releases them, so whoever copies holds it.
#[derive(Debug, Default)]
pub struct Registrations(Mutex<HashMap<usize, Registration>>);

impl Registrations {
    /// Registers a segment, unless it is registered.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] when the system cannot lock so much memory, and the driver's other errors.
    pub(crate) fn ensure(&self, context: &Arc<Context>, segment: SegmentHold) -> Result<(), GpuError> {
        // A panic elsewhere leaves the map whole: the only change is an insertion.
        let mut registered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let std::collections::hash_map::Entry::Vacant(vacant) = registered.entry(segment.address()) {
            vacant.insert(Registration::new(context, segment)?);
        }
        Ok(())
    }
}
