//! Real sidecars, workers and launchers, on this host or in network namespaces.
//!
//! They form one program: its libraries are linked once, and the waits of one test overlap those of the others.

mod agents;
mod ahead;
mod autotune;
mod averages;
mod blocks;
mod certs;
mod collectives;
mod containers;
mod elastic;
mod elastic_commands;
mod elastic_jobs;
mod endings;
mod exhaustion;
mod exit_codes;
mod faults;
mod first_failure;
mod fork;
mod hostile;
mod hosts;
mod isolation;
mod launcher;
mod logs;
mod nccl_net;
mod otlp;
mod outputs;
mod pages;
mod plugins;
mod programs;
mod refused;
mod rejected_peers;
mod ring;
mod scribbling;
mod sealed;
mod secrets;
mod semantics;
mod sets;
mod settings;
mod timeline;
mod top;
mod unread;
mod web;

/// A worker that executes a script from its standard input.
const WORKER: &str = env!("CARGO_BIN_EXE_ronde-test-worker");
