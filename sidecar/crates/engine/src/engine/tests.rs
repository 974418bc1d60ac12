//! Tests of engines in a small cluster in one thread.

mod any_source;
mod arbitrary;
mod autotune;
mod cluster;
mod collectives;
mod dynamic;
mod eager;
mod epochs;
mod hostile;
mod hung;
mod joins;
mod liveness;
mod member_sets;
mod memberships;
mod messages;
mod mixtures;
mod names;
mod numbers;
mod operations;
mod plugins;
mod request_cache;
mod reused;
mod schedules;
mod set_joins;
mod traces;
mod tree;
