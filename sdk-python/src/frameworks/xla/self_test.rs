//! The self-test of the handler: a call that is complete some time after its return.

use std::time::Duration;

use super::ffi::{Call, Failure};
use crate::address::Target;
use crate::frameworks::status::Code;

/// The attribute `kind` of a self-test.
pub(super) const KIND: &str = "self_test";
/// What the call returns, as an int32.
pub(super) const ANSWER: i32 = 30;
/// Long enough that the handler has returned.
const PAUSE: Duration = Duration::from_millis(2);

/// Writes the answer, from another thread if this XLA waits for that.
pub(super) fn answer(call: &Call<'_>) -> Result<(), Failure> {
    let results = call.results();
    let address =
        results.first().map(|result| result.address).ok_or_else(|| internal("a self-test without a result"))?;
    let target =
        Target::new(address, size_of::<i32>()).map_err(|_| internal("the result of a self-test has no address"))?;
    let Some(promise) = call.promise() else {
        write(target);
        return Ok(());
    };
    let started = std::thread::Builder::new().name("ronde-self-test".to_owned()).spawn(move || {
        std::thread::sleep(PAUSE);
        write(target);
        promise.complete(Ok(()));
    });
    // The promise that was moved into the thread has ended the call with a failure if there is none.
    drop(started);
    Ok(())
}

fn write(mut target: Target) {
    target.with(|bytes| bytes.copy_from_slice(&ANSWER.to_ne_bytes()));
}

fn internal(text: &str) -> Failure {
    Failure { code: Code::Internal, text: text.to_owned() }
}
