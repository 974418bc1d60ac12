//! The launcher of ronde: starts jobs on hosts and watches over them.
//!
//! | module | command | what |
//! |---|---|---|
//! | [`run`] | `ronde run` | starts a job and watches over it |
//! | [`run::worker`] | `ronde worker` | becomes a worker of a job whose workers another program, such as `mpirun`, starts |
//! | [`agent`] | `ronde agent` (hidden) | starts and watches processes on one host for the launcher |
//! | [`agent::exec`] | `ronde exec-worker` (hidden) | ties a worker's life to its agent's, then becomes the worker |
//! | [`check`] | `ronde check` | says whether hosts are fit for jobs |

#![forbid(unsafe_code)]

pub mod agent;
pub mod check;
mod envelope;
pub mod run;
