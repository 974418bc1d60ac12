//! The sidecar of ronde: performs the collectives of the workers of one host.
//!
//! The modules are rooms: each holds what happens in one place, and uses only those below it in this table. A test of the
//! repository checks this.
//!
//! | room | what happens there |
//! |---|---|
//! | [`process`] | the process starts, connects everything, and ends; **read this first** |
//! | `web` | workers without Unix sockets are served over gRPC-Web |
//! | `admin` | metrics, status and health are served over HTTP |
//! | `driver` | the control thread connects the engine, the links, the sessions and the lanes |
//! | `operation` | admitted operations are executed, and their results delivered |
//! | `session` | workers connect, submit requests and attach shared memory |
//! | [`plugins`] | plugins are loaded and called |
//! | `timeline` | what happens to tensors is recorded |

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
