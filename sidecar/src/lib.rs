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
//! | [`plugins`] | loads and calls plugins |
//! | `timeline` | records what happens to tensors |

#![forbid(unsafe_code)]

mod admin;
#[cfg(test)]
mod documents;
mod driver;
mod operation;
pub mod plugins;
pub mod process;
mod session;
mod timeline;
mod web;
