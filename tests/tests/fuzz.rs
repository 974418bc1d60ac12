//! Fuzzes decoders of input from other processes: docs/adr/0020-fuzzing.md explains how, docs/SECURITY.md lists the
//! targets, also those of private decoders. `make fuzz` runs them for longer.

#![forbid(unsafe_code)]

#[path = "fuzz/codecs.rs"]
mod codecs;
#[path = "fuzz/engines.rs"]
mod engines;
#[path = "fuzz/identity.rs"]
mod identity;
#[path = "fuzz/lines.rs"]
mod lines;
#[path = "fuzz/messages.rs"]
mod messages;
#[path = "fuzz/pair.rs"]
mod pair;
#[path = "fuzz/web.rs"]
mod web;
#[path = "fuzz/wire.rs"]
mod wire;
