//! Operations inside the graphs of frameworks. Nothing here is linked to a framework: its functions are found by name in
//! the library that Python has loaded.

mod library;
pub(crate) mod tensorflow;
