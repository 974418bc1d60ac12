//! The measured values from which docs/SCALE.md starts. Each names its source.

use super::model::Machine;

/// A machine of the page. Other values are options of the command.
pub(super) const MACHINE: Machine = Machine {
    // `ronde run -np 2 --sidecars 2 --transport tls --measure-cost -- ronde tune-worker` on two cores with a load of 50.
    // Measured before the fit counted rounds as the planner does: for all-reduces of two sidecars it is up to twice too low.
    alpha_us: 217.0,
    gamma_us_per_byte: 3.1e-5,
    // docs/PERFORMANCE.md, Intel Xeon 6, two hosts with one rank each, all-reduce of 256 MB: 1.51 s/GB in place, of both
    // hosts. Each sends as many bytes as a tensor has.
    cpu_us_per_byte: 1.51e-3 / 2.0,
    // Assumed.
    cores: 8.0,
    link_gbit: 25.0,
    // Assumed: 12 GB/s, a PCI Express 3.0 slot with 16 lanes.
    staging_us_per_byte: 1e-3 / 12.0,
};

/// What `cargo test -p ronde-tests --test scale -- --ignored --nocapture` has printed.
#[cfg(test)]
pub(super) const CONTROL_ROWS: &str = "\
| 2 | 202 | 30917 | 30917 | 30917 | 6.21 ms | 4.35 ms | 0 | 1.16 ms | 1.17 ms |\n\
| 8 | 1414 | 216419 | 216419 | 216419 | 10.84 ms | 3.58 ms | 0 | 1.45 ms | 1.35 ms |\n\
| 32 | 6285 | 995314 | 291057 | 270124 | 29.50 ms | 5.33 ms | 0 | 1.82 ms | 1.58 ms |\n\
| 64 | 12781 | 2035874 | 301724 | 301724 | 51.45 ms | 6.79 ms | 0 | 1.76 ms | 1.45 ms |\n\
| 128 | 25828 | 4162926 | 391377 | 360696 | 92.81 ms | 9.92 ms | 0 | 1.84 ms | 1.49 ms |\n\
| 256 | 51940 | 8509422 | 503160 | 503160 | 181.51 ms | 14.01 ms | 0 | 1.97 ms | 1.53 ms |\n\
| 512 | 104164 | 17202414 | 788088 | 788088 | 338.94 ms | 20.33 ms | 0 | 2.13 ms | 1.57 ms |";
