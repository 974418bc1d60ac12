//! The session that operations of graphs use: that of Python's `hvd.init`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use ronde::SetId;
use ronde::blocking::Client;

use super::abi::{Code, Failed};
use super::in_flight::InFlight;

/// What queries about this process answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    pub(super) rank: i32,
    pub(super) size: i32,
    pub(super) local_rank: i32,
    pub(super) local_size: i32,
    /// The number of ranks of each process set but that of all ranks, and whether this process is one of them.
    pub(super) sets: HashMap<SetId, (i32, bool)>,
}

/// A session in use.
#[derive(Clone)]
pub(super) struct Attached {
    /// Weak: the session ends when Python closes it.
    client: Weak<Client>,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) facts: Arc<Facts>,
}

static ATTACHED: Mutex<Option<Attached>> = Mutex::new(None);

/// Makes operations use a session, instead of an earlier one.
pub(super) fn attach(client: &Arc<Client>, facts: Facts) -> Result<(), ronde::Error> {
    let mut attached = ATTACHED.lock().unwrap_or_else(PoisonError::into_inner);
    let facts = Arc::new(facts);
    let of_same = attached.as_ref().filter(|known| known.client.ptr_eq(&Arc::downgrade(client)));
    let in_flight = match of_same {
        Some(known) => Arc::clone(&known.in_flight),
        None => InFlight::begin(client)?,
    };
    let earlier =
        attached.replace(Attached { client: Arc::downgrade(client), in_flight: Arc::clone(&in_flight), facts });
    if let Some(earlier) = earlier.filter(|earlier| !Arc::ptr_eq(&earlier.in_flight, &in_flight)) {
        earlier.in_flight.close();
    }
    Ok(())
}

/// Makes operations fail until the next session.
pub(super) fn detach() {
    if let Some(earlier) = ATTACHED.lock().unwrap_or_else(PoisonError::into_inner).take() {
        earlier.in_flight.close();
    }
}

/// The session in use.
pub(super) fn attached() -> Result<Attached, Failed> {
    ATTACHED.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(not_initialized)
}

fn not_initialized() -> Failed {
    Failed::new(Code::FailedPrecondition, "Horovod has not been initialized; use hvd.init().")
}
