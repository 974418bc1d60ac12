//! The launcher of ronde: starts jobs on hosts and supervises them.
//!
//! | module | command | what |
//! |---|---|---|
//! | [`run`] | `ronde run` | starts and supervises a job |
//! | [`run::worker`] | `ronde worker` | runs a worker that another program, such as `mpirun`, starts |
//! | [`agent`] | `ronde agent` (hidden) | starts and supervises processes on one host for the launcher |
//! | [`agent::exec`] | `ronde exec-worker` (hidden) | ties a worker's lifetime to its agent, then executes it |
//! | [`job`] | `ronde job` | shows and changes an elastic job that runs |
//! | [`check`] | `ronde check` | checks whether hosts are fit for jobs |

#![forbid(unsafe_code)]

pub mod agent;
pub mod check;
mod envelope;
pub mod job;
mod private_socket;

/// Decides the memberships of elastic jobs, as a pure state machine; public for simulations.
pub mod memberships {
    pub use crate::run::elastic::{
        Action, Bounds, Cause, CooldownRange, End, Event, Listed, Members, Notice, Plan, Seat, Time, WorkerEnd,
    };
}

mod rows;
pub mod run;
