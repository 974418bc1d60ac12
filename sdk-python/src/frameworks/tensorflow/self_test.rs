//! The self-test: an operation that ends in another thread, some time after its start.

use std::time::Duration;

use super::abi::{Code, Failed};
use super::done::Call;
use super::types;

/// What the operation gives.
pub(super) const ANSWER: i32 = 30;
/// Long enough that the compute function has returned.
const PAUSE: Duration = Duration::from_millis(2);

/// Ends a self-test from another thread.
pub(super) fn answer_later(call: Call) {
    let started = std::thread::Builder::new().name("ronde-self-test".to_owned()).spawn(move || {
        std::thread::sleep(PAUSE);
        let outcome = write_number(&call, ANSWER);
        call.end(outcome);
    });
    // The call that was moved into the thread has ended with an error if there is none.
    drop(started);
}

/// Writes a number to the only output.
pub(super) fn write_number(call: &Call, value: i32) -> Result<(), Failed> {
    let output = call.output((0, types::INT32), &[], size_of::<i32>());
    let mut output = output.map_err(|reason| Failed::new(Code::Internal, reason))?;
    output.bytes_mut().copy_from_slice(&value.to_ne_bytes());
    Ok(())
}
