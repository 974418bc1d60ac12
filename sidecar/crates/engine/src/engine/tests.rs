//! Engines driven by hand: a tiny cluster in one thread.

mod cluster;
mod epochs;
mod hostile;
mod liveness;
mod names;
mod operations;
mod schedules;
