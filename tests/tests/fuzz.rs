//! Decoders of what comes from other processes, on bytes that nobody encoded: docs/adr/0020-fuzzing.md says how, and
//! docs/SECURITY.md where the targets of private decoders are. `make fuzz` runs them for longer.

#![forbid(unsafe_code)]

#[path = "fuzz/codecs.rs"]
mod codecs;
#[path = "fuzz/engines.rs"]
mod engines;
#[path = "fuzz/lines.rs"]
mod lines;
#[path = "fuzz/messages.rs"]
mod messages;
#[path = "fuzz/web.rs"]
mod web;
#[path = "fuzz/wire.rs"]
mod wire;
