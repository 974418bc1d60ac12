//! The `ronde` binary: sidecar, launcher and command line.
//!
//! Read [`app`] first: it wires a sidecar process from top to bottom.

#![forbid(unsafe_code)]

use std::process::ExitCode;

mod admin;
mod app;
mod bootstrap;
mod cli;
mod config;
mod cores;
mod credentials;
mod delivery;
mod departures;
mod driver;
mod interfaces;
mod lane;
mod local_lane;
mod logging;
mod memory;
mod operations;
mod pace;
mod plugins;
mod ports;
mod presence;
mod prompt;
mod results;
mod ring;
mod runtime_dir;
mod segments;
mod service;
mod sessions;
mod shipped_plugins;
mod standalone;
mod timeline;
mod web;

fn main() -> ExitCode {
    cli::main()
}
