//! What frameworks call from threads of their own, without Python. Nothing here is linked to a framework: functions of
//! TensorFlow are found by name in the library that Python has loaded, and XLA passes its own to the handler of compiled
//! programs.

pub(crate) mod cuda;
mod library;
mod status;
pub(crate) mod tensorflow;
pub(crate) mod xla;
