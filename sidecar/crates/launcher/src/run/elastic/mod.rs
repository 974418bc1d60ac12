//! Elastic jobs: their membership changes while they run.
//!
//! | module | what |
//! |---|---|
//! | `settings` | the options |
//! | `plan` | decides memberships; pure |
//! | `exclusion` | when a slot or host may be used again; pure |
//! | `table` | what is known of agents, sidecars and workers; pure |
//! | `discovery` | runs the script that prints the hosts |
//! | `job` | the loop: events to the plan, its actions executed |
//! | `actions` | messages to agents |
//! | `notices` | what users are notified of |
//! | `requests` | answers `ronde job` |
//! | `failure`, `report` | what was lost, why the job ends, and its report |
//!
//! A job that is not elastic does not use this module.

mod actions;
mod discovery;
mod exclusion;
mod failure;
mod job;
mod notices;
mod plan;
mod report;
mod requests;
mod settings;
mod table;

pub use exclusion::{CooldownRange, Time};
pub(super) use failure::ElasticFailure;
pub(super) use job::run;
pub use plan::hosts::Listed;
pub use plan::{Action, Bounds, Cause, End, Event, Members, Notice, Plan, Seat, WorkerEnd};
pub(super) use report::MembershipReport;
pub(super) use settings::ElasticArgs;
pub(super) use settings::{ELASTIC_TIMEOUT_SECONDS, ElasticSettings, Given};
