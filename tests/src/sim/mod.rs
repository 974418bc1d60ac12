//! A whole cluster in one thread under one seed: engines and executors of one to seven sidecars, scripted workers, a network
//! that delays, reorders between connections, is cut and heals, processes that crash, hang and are started again.
//!
//! [`run`] lets a seed's cluster live until all work is done. Safety is checked whenever something happens, liveness once
//! nothing breaks any more; [`Property`] lists what is checked. A planted [`Saboteur`] must be caught.
//!
//! Nothing here is real but the engine and the executor: no clock, no socket, no thread, no other source of chance than
//! the seed. So a failure can be replayed: [`Failed`] says how.

mod blame;
mod checks;
mod cluster;
mod driving;
mod faults;
mod host;
mod item;
mod link;
mod mix;
mod reference;
mod saboteur;
mod schedule;
mod script;
mod stand_ins;
mod worker;
mod workload;

use std::fmt;

pub use checks::{Counts, Property, Results, Violated};
pub use cluster::{Options, Report};
pub use saboteur::Saboteur;

/// A seed whose run violates a property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The seed.
    pub seed: u64,
    /// What the run was like.
    pub options: Options,
    /// What does not hold.
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
/// [`Failed`] with the first property that does not hold.
pub fn run(seed: u64, options: &Options) -> Result<Report, Box<Failed>> {
    let failed = |violated| Box::new(Failed { seed, options: *options, violated });
    cluster::Cluster::new(seed, options).run().map_err(failed)
}
