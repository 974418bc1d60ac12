//! The sidecar of ronde: performs the collectives of the workers of one host.
//!
//! Read [`app`] first: it wires a sidecar process from top to bottom.

#![forbid(unsafe_code)]

mod admin;
pub mod app;
pub mod arguments;
mod config;
mod container;
mod cores;
pub mod credentials;
mod delivery;
mod departures;
#[cfg(test)]
mod documents;
mod driver;
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
pub mod shipped_plugins;
mod standalone;
mod timeline;
mod web;
