//! Simulates a whole cluster in one thread under one seed: engines and executors of one to seven sidecars, scripted
//! workers, a network that delays, reorders between connections, is cut and heals, and processes that crash, hang and
//! restart.
//!
//! [`run`] simulates a seed's cluster until all work is done. Safety is checked at every event, liveness once nothing
//! breaks any more; [`Property`] lists what is checked. A planted [`Saboteur`] must be caught. Every fourth seed has a
//! hostile sidecar, which sends messages of every kind.
//!
//! Only the engine and the executor are real: there is no clock, no socket, no thread, and no randomness besides the
//! seed. So a failure can be replayed: [`Failed`] shows how.

mod blame;
mod checks;
mod cluster;
mod driving;
mod elastic;
mod fake_plugins;
mod faults;
mod host;
mod hostile;
mod item;
mod link;
mod mix;
mod reference;
mod saboteur;
mod schedule;
mod script;
mod worker;
mod workload;

use std::fmt;

pub use checks::{Counts, Property, Results, Violated};
pub use cluster::{Options, Report};
pub use elastic::{ElasticBug, ElasticFailed, ElasticReport, run_elastic};
pub use saboteur::Saboteur;

/// A seed whose run violates a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The seed.
    pub seed: u64,
    /// The options of the run.
    pub options: Options,
    /// The violated property.
    pub violated: Violated,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, options, violated } = self;
        write!(f, "seed {seed}: {violated}\nreplay: cargo run -p ronde-tests --bin sim -- --seed {seed} --trace")?;
        if let Some(saboteur) = options.saboteur {
            write!(f, " --saboteur {saboteur:?}")?;
        }
        if let Some(variant) = options.floats_variant {
            write!(f, " --floats {variant}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failed {}

/// Runs the cluster of a seed.
///
/// # Errors
/// [`Failed`] with the first violated property.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failed>> {
    let failed = |violated| Box::new(Failed { seed, options: *options, violated });
    cluster::Cluster::new(seed, options).run().map_err(failed)
}
