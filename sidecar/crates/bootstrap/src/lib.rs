//! What the launcher and a sidecar share.
//!
//! | module | what |
//! |---|---|
//! | [`messages`] | the messages between a launcher and a sidecar |
//! | [`tuning`], [`autotune`], [`logs`], [`otlp`], [`plugins`], [`ports`], [`web`] | settings that both take |
//! | [`numbers`] | a parser of whole numbers for options |
//! | [`flight`] | flight records: their format, and their files |
//! | [`profile`] | settings that `ronde tune` has found |
//! | [`interfaces`] | the addresses of a host, and which of them a job uses |
//! | [`directory`] | where sockets are found |
//! | [`streams`], [`output`] | a sidecar's standard output and standard error, which may not be read |
//! | [`terminal`] | what a terminal understands |
//! | [`codes`], [`exit`] | error codes and exit statuses |

#![forbid(unsafe_code)]

pub mod autotune;
pub mod codes;
pub mod directory;
pub mod exit;
pub mod flight;
pub mod interfaces;
pub mod logs;
pub mod messages;
pub mod numbers;
pub mod otlp;
pub mod output;
pub mod plugins;
pub mod ports;
pub mod profile;
pub mod signals;
pub mod streams;
pub mod terminal;
pub mod tuning;
pub mod web;
