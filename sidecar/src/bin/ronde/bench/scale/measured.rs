//! The measured values from which docs/SCALE.md starts. Each names its source.

use super::model::Machine;

/// A machine of the page. Other values are options of the command.
pub(super) const MACHINE: Machine = Machine {
    // `ronde run -np 2 --sidecars 2 --transport tls --measure-cost -- ronde tune-worker` on two virtual cores: the medians of
    // 15 jobs, of which alpha had 280 to 353 us and gamma 2.8e-5 to 8.6e-5.
    alpha_us: 314.0,
    gamma_us_per_byte: 3.3e-5,
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
| 2 | 202 | 30917 | 30917 | 30917 | 4.60 ms | 3.24 ms | 0 | 0.89 ms | 0.90 ms |\n\
| 8 | 1414 | 216419 | 216419 | 216419 | 7.33 ms | 2.77 ms | 0 | 0.93 ms | 0.93 ms |\n\
| 32 | 6285 | 995314 | 291057 | 270124 | 15.97 ms | 3.32 ms | 0 | 1.16 ms | 1.07 ms |\n\
| 64 | 12781 | 2035874 | 301724 | 301724 | 27.18 ms | 3.83 ms | 0 | 1.38 ms | 1.19 ms |\n\
| 128 | 25828 | 4162926 | 391377 | 360696 | 52.51 ms | 4.93 ms | 0 | 1.55 ms | 1.26 ms |\n\
| 256 | 51940 | 8509422 | 503160 | 503160 | 106.59 ms | 8.33 ms | 0 | 1.59 ms | 1.26 ms |\n\
| 512 | 104164 | 17202414 | 788088 | 788088 | 214.38 ms | 12.46 ms | 0 | 1.69 ms | 1.29 ms |\n\
| 1024 | 209051 | 35077005 | 1388625 | 1357944 | 424.63 ms | 17.86 ms | 0 | 1.80 ms | 1.31 ms |";
