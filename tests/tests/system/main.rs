//! Real sidecars, workers and launchers, on this host or in network namespaces.
//!
//! One program for all of them: what they link is linked once, and the waits of one overlap those of the others.

mod ahead;
mod averages;
mod certs;
mod collectives;
mod containers;
mod faults;
mod first_failure;
mod fork;
mod hostile;
mod hosts;
mod launcher;
mod logs;
mod outputs;
mod pages;
mod plugins;
mod programs;
mod refused;
mod rejected_peers;
mod ring;
mod sealed;
mod secrets;
mod semantics;
mod sets;
mod settings;
mod timeline;
mod web;

/// A worker that does what a script on its standard input says.
const WORKER: &str = env!("CARGO_BIN_EXE_ronde-test-worker");
