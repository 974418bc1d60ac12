//! The sidecar of ronde: performs the collectives of the workers of one host.
//!
//! Each module has one job and uses only modules below it in this table. A tidy test checks this.
//!
//! | module | what it does |
//! |---|---|
//! | [`process`] | starts the process, connects everything, and shuts down; **read this first** |
//! | `web` | serves workers without Unix sockets over gRPC-Web |
//! | `admin` | serves metrics, status and health over HTTP |
//! | `driver` | runs the control thread, which connects engine, links, sessions and lanes |
//! | `operation` | executes admitted operations and delivers their results |
//! | `session` | accepts workers, their requests and their shared memory |
//! | `streams` | carries the connections of NCCL's net plugin between workers |
//! | [`plugins`] | loads and calls plugins |
//! | `flight` | keeps the newest operations for the time after a failure |
//! | `timeline` | records what happens to tensors |

#![forbid(unsafe_code)]

mod admin;
#[cfg(test)]
mod closed_port;
#[cfg(test)]
mod documents;
mod driver;
mod flight;
mod operation;
pub mod plugins;
pub mod process;
mod session;
mod streams;
mod timeline;
mod web;
