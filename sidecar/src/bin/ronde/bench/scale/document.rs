//! The tables of `ronde bench scale`, and the page docs/SCALE.md, which has them.

use std::fmt::Write as _;
use std::ops::Range;

#[cfg(test)]
use ronde_collectives::CostModel;

#[cfg(test)]
use super::measured::{CONTROL_ROWS, MACHINE};
use super::model::{Cluster, Machine, Step, step};
use super::workloads::{Exchange, Workload, workloads};

/// GPUs of a host, as in Horovod's benchmark. 1,024 such hosts have as many ranks as a job can have.
pub(super) const GPUS_PER_HOST: u32 = 4;
pub(super) const HOSTS: [u32; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024];
pub(super) const LINKS_GBIT: [f64; 3] = [25.0, 100.0, 400.0];
/// Among the models: the two of Horovod's headline, and the others.
const HEADLINE: Range<usize> = 0..2;
const LARGER: Range<usize> = 2..4;
const GPUS: [u32; 9] = [2, 4, 8, 16, 32, 64, 128, 256, 512];

/// All tables.
pub(super) fn tables(machine: &Machine) -> String {
    let Machine { alpha_us, gamma_us_per_byte, cpu_us_per_byte, cores, link_gbit, .. } = machine;
    format!(
        "Modelled, not measured, from alpha {alpha_us} us, gamma {gamma_us_per_byte:.3e} us a byte, {cpu_us_per_byte:.3e} \
         us of processor time a byte, {cores} cores.\n\n{}\n{link_gbit} Gbit/s, {GPUS_PER_HOST} GPUs a host:\n\n{}\n{}\n{}\n{}",
        assumptions(),
        by_gpus(machine, HEADLINE),
        by_gpus(machine, LARGER),
        by_hosts(machine),
        by_link(machine)
    )
}

/// docs/SCALE.md.
#[cfg(test)]
pub(super) fn page() -> String {
    let machine = &MACHINE;
    let mut text = include_str!("page.template").to_owned();
    for (name, table) in [
        ("assumptions", assumptions()),
        ("by_gpus", by_gpus(machine, HEADLINE)),
        ("larger_by_gpus", by_gpus(machine, LARGER)),
        ("by_hosts", by_hosts(machine)),
        ("by_link", by_link(machine)),
        ("headline", headline(machine)),
        ("headline_default", headline(&Machine { alpha_us: CostModel::default().alpha_us, ..*machine })),
        ("control_rows", CONTROL_ROWS.to_owned()),
        ("alpha_us", machine.alpha_us.to_string()),
        ("gamma", format!("{:.1}", 1e-3 / machine.gamma_us_per_byte)),
        ("cpu", format!("{:.2}", machine.cpu_us_per_byte * 1e3)),
        ("cores", machine.cores.to_string()),
        ("staging", format!("{:.0}", 1e-3 / machine.staging_us_per_byte)),
    ] {
        let place = format!("{{{name}}}");
        assert!(text.contains(&place), "the page has no place for {name}");
        text = text.replace(&place, table.trim_end());
    }
    text
}

fn assumptions() -> String {
    let mut text =
        "| model | parameters | bytes that are exchanged | step of one GPU | assumes |\n|---|---:|---:|---:|---|\n"
            .to_owned();
    for workload in workloads() {
        let Workload { name, compute_us, assumed, .. } = workload;
        let times = match workload.exchange {
            Exchange::AllReduce => "",
            Exchange::Sharded => "3 x ",
        };
        let (millions, bytes) = (workload.parameters() as f64 / 1e6, workload.bytes() as f64 / 1e6);
        // A string cannot fail to be written to.
        let _ = writeln!(
            text,
            "| {name} | {millions:.1} M | {times}{bytes:.0} MB | {:.0} ms | {assumed} |",
            compute_us / 1e3
        );
    }
    text
}

/// Two models by the number of GPUs.
fn by_gpus(machine: &Machine, models: Range<usize>) -> String {
    let all = workloads();
    let models = &all[models];
    let mut text = "| GPUs | hosts |".to_owned();
    for workload in models {
        let _ = write!(text, " {}: step | efficiency | first limit |", workload.name);
    }
    text.push_str("\n|---:|---:|---:|---:|---|---:|---:|---|\n");
    for gpus in GPUS {
        let hosts = gpus.div_ceil(GPUS_PER_HOST);
        let _ = write!(text, "| {gpus} | {hosts} |");
        for workload in models {
            let cluster = Cluster { hosts, gpus_per_host: gpus.min(GPUS_PER_HOST) };
            let Step { us, efficiency, limit } = step(workload, cluster, machine);
            let _ = write!(text, " {:.0} ms | {:.0} % | {} |", us / 1e3, efficiency * 100.0, limit.name());
        }
        text.push('\n');
    }
    text
}

/// The last row's efficiencies.
#[cfg(test)]
fn headline(machine: &Machine) -> String {
    let cluster = Cluster { hosts: GPUS[GPUS.len() - 1] / GPUS_PER_HOST, gpus_per_host: GPUS_PER_HOST };
    let all = workloads();
    let percent = |workload| format!("{:.0} %", step(workload, cluster, machine).efficiency * 100.0);
    format!("{} | {}", percent(&all[0]), percent(&all[1]))
}

/// All models at all rates.
fn by_hosts(machine: &Machine) -> String {
    let mut text = "| model | Gbit/s |".to_owned();
    for hosts in HOSTS {
        let _ = write!(text, " {hosts} |");
    }
    let _ =
        writeln!(text, " first limit at {} |\n|---|---:|{}---|", HOSTS[HOSTS.len() - 1], "---:|".repeat(HOSTS.len()));
    for workload in workloads() {
        for link_gbit in LINKS_GBIT {
            let machine = Machine { link_gbit, ..*machine };
            let _ = write!(text, "| {} | {link_gbit} |", workload.name);
            let mut limit = "";
            for hosts in HOSTS {
                let found = step(&workload, Cluster { hosts, gpus_per_host: GPUS_PER_HOST }, &machine);
                let _ = write!(text, " {:.0} % |", found.efficiency * 100.0);
                limit = found.limit.name();
            }
            let _ = writeln!(text, " {limit} |");
        }
    }
    text
}

/// How many cores keep a link busy.
fn by_link(machine: &Machine) -> String {
    let mut text = "| link | cores of a host that keep it busy |\n|---:|---:|\n".to_owned();
    for link_gbit in LINKS_GBIT {
        let cores = Machine { link_gbit, ..*machine }.cores_at_line_rate();
        let _ = writeln!(text, "| {link_gbit} Gbit/s | {cores:.1} |");
    }
    text
}
