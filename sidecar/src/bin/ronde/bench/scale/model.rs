//! The time of a training step on many hosts, predicted by ronde's own planner and cost model. Pure.
//!
//! The planner chooses algorithm, chunks and lanes for each bucket as a coordinator would (`select_cut`) and predicts its
//! time. Around that, a step has a GPU that computes and one path to the other hosts, which perform buckets one after the
//! other. A step that repeats is not negotiated, so that control messages cost nothing here.

use ronde_collectives::plan::{Span, Work, WorkKind};
use ronde_collectives::{CostModel, Cutting, select_cut};
use ronde_wire::{SetId, SetTopology, SidecarIndex, World};

use super::workloads::{Exchange, Workload};

/// A host and its network.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Machine {
    /// Microseconds of a round between two sidecars.
    pub(super) alpha_us: f64,
    /// Microseconds of one core for each byte that it reduces.
    pub(super) gamma_us_per_byte: f64,
    /// Microseconds of processor time of a host for each byte that it sends to others, the byte that it receives included.
    pub(super) cpu_us_per_byte: f64,
    /// Cores that a host has for communication.
    pub(super) cores: f64,
    /// The rate of a host's link in each direction.
    pub(super) link_gbit: f64,
    /// Microseconds for each byte between a GPU and host memory. Each GPU has a path of its own.
    pub(super) staging_us_per_byte: f64,
}

/// Where a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cluster {
    pub(super) hosts: u32,
    pub(super) gpus_per_host: u32,
}

/// What bounds a job first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Limit {
    /// The GPUs: at most [`HIDDEN`] of a step is communication.
    Gpu,
    /// Bytes between hosts, for which the link takes longer than the processors.
    Link,
    /// Bytes between hosts, for which the processors take longer than the link.
    Cpu,
    /// The latency of rounds.
    Rounds,
    /// Copies between GPU and host memory, and sums.
    Local,
}

impl Limit {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Link => "link",
            Self::Cpu => "processor",
            Self::Rounds => "rounds",
            Self::Local => "copies and sums",
        }
    }
}

/// A prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) us: f64,
    /// The step of one GPU alone, as a share of this one.
    pub(super) efficiency: f64,
    pub(super) limit: Limit,
}

/// Communication of so little more than no step is no limit.
const HIDDEN: f64 = 0.02;
/// Of a link's bits, those of tensors: the rest is Ethernet's, IP's, TCP's and TLS's, at 1,500 bytes a packet.
const PAYLOAD_SHARE: f64 = 0.94;
/// Of a step, the forward pass. A backward pass computes twice as much.
const FORWARD_SHARE: f64 = 1.0 / 3.0;
/// ronde's default fusion threshold.
const FUSION_BYTES: u64 = ronde_wire::limits::FUSION_THRESHOLD_BYTES;

impl Machine {
    fn link_us_per_byte(&self) -> f64 {
        8e-3 / (self.link_gbit * PAYLOAD_SHARE)
    }

    /// The cores that keep the link busy.
    pub(super) fn cores_at_line_rate(&self) -> f64 {
        self.cpu_us_per_byte / self.link_us_per_byte()
    }

    /// The cost model of the planner: a byte takes as long as the slower one of link and processor does.
    fn cost(&self) -> CostModel {
        let beta_us_per_byte = self.link_us_per_byte().max(self.cpu_us_per_byte / self.cores);
        CostModel { alpha_us: self.alpha_us, beta_us_per_byte, gamma_us_per_byte: self.gamma_us_per_byte }
    }

    /// What bounds bytes between hosts.
    fn slower(&self) -> Limit {
        if self.link_us_per_byte() >= self.cpu_us_per_byte / self.cores { Limit::Link } else { Limit::Cpu }
    }

    /// The same machine without one of its limits. Bytes between hosts cost nothing without either of theirs, as one of them
    /// alone often hides the other.
    fn without(self, limit: Limit) -> Self {
        match limit {
            Limit::Gpu => self,
            Limit::Link | Limit::Cpu => Self { link_gbit: f64::INFINITY, cpu_us_per_byte: 0.0, ..self },
            Limit::Rounds => Self { alpha_us: 0.0, ..self },
            Limit::Local => Self { gamma_us_per_byte: 0.0, staging_us_per_byte: 0.0, ..self },
        }
    }
}

/// Predicts a step of a workload.
pub(super) fn step(workload: &Workload, cluster: Cluster, machine: &Machine) -> Step {
    let us = step_us(workload, cluster, machine);
    let efficiency = workload.compute_us / us;
    let limits = [machine.slower(), Limit::Rounds, Limit::Local];
    let without = limits.map(|limit| (limit, step_us(workload, cluster, &machine.without(limit))));
    let first = without.into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let limit = first.filter(|_| efficiency < 1.0 - HIDDEN).map_or(Limit::Gpu, |(limit, _)| limit);
    Step { us, efficiency, limit }
}

fn step_us(workload: &Workload, cluster: Cluster, machine: &Machine) -> f64 {
    let path = Path::new(cluster, machine);
    match workload.exchange {
        Exchange::AllReduce => all_reduced_us(workload, &path),
        Exchange::Sharded => sharded_us(workload, &path),
    }
}

/// Gradients become ready at an even rate in the backward pass, the last layer's first. While a bucket is performed the
/// next one collects what is ready.
fn all_reduced_us(workload: &Workload, path: &Path<'_>) -> f64 {
    let count = workload.elements.len();
    let backward_us = workload.compute_us * (1.0 - FORWARD_SHARE);
    let ready_us = |at: usize| backward_us * (at + 1) as f64 / count as f64;
    let gradients: Vec<u64> = workload.elements.iter().rev().copied().collect();
    let (mut now_us, mut next) = (0.0_f64, 0);
    while next < count {
        now_us = now_us.max(ready_us(next));
        let (first, mut bytes) = (next, 0);
        while next < count && ready_us(next) <= now_us {
            let more = gradients[next] * u64::from(workload.element_bytes);
            if next > first && bytes + more > FUSION_BYTES {
                break;
            }
            bytes += more;
            next += 1;
        }
        let tensors = gradients[first..next].iter().map(|elements| vec![*elements]).collect();
        now_us += path.us(WorkKind::AllReduce, workload.element_bytes, tensors);
    }
    workload.compute_us * FORWARD_SHARE + now_us
}

/// A block is gathered while the one before it computes, in the backward pass in the other direction. Its gradients are
/// reduced and scattered after the next gather.
fn sharded_us(workload: &Workload, path: &Path<'_>) -> f64 {
    let whole = workload.parameters() as f64;
    let compute_us = |elements: u64| workload.compute_us * elements as f64 / whole;
    let exchange_us = |kind, elements| path.sharded_us(kind, workload.element_bytes, elements);
    let (mut net_us, mut gpu_us) = (0.0_f64, 0.0_f64);
    for elements in &workload.elements {
        // A gather starts when the one before it has ended, at most one block ahead of the GPU.
        let forward_us = compute_us(*elements) * FORWARD_SHARE;
        net_us = net_us.max(gpu_us - forward_us) + exchange_us(WorkKind::AllGather, *elements);
        gpu_us = gpu_us.max(net_us) + forward_us;
    }
    let mut scattered: Option<(f64, u64)> = None;
    for elements in workload.elements.iter().rev() {
        net_us += exchange_us(WorkKind::AllGather, *elements);
        if let Some((ready_us, elements)) = scattered.take() {
            net_us = net_us.max(ready_us) + exchange_us(WorkKind::ReduceScatter, elements);
        }
        gpu_us = gpu_us.max(net_us) + compute_us(*elements) * (1.0 - FORWARD_SHARE);
        scattered = Some((gpu_us, *elements));
    }
    let last_us = scattered.map_or(0.0, |(_, elements)| exchange_us(WorkKind::ReduceScatter, elements));
    gpu_us.max(net_us) + last_us
}

/// The path of a bucket: between GPUs and host memory, then between hosts.
struct Path<'a> {
    machine: &'a Machine,
    cost: CostModel,
    gpus_per_host: u32,
    topology: SetTopology,
    /// Sharded work of equal blocks is predicted once.
    known: std::cell::RefCell<Vec<((WorkKind, u64), f64)>>,
}

impl<'a> Path<'a> {
    fn new(cluster: Cluster, machine: &'a Machine) -> Self {
        let Cluster { hosts, gpus_per_host } = cluster;
        let placement = (0..hosts).flat_map(|host| (0..gpus_per_host).map(move |_| SidecarIndex(host))).collect();
        let topology = World::new(placement).ok().and_then(|world| world.topology(SetId::WORLD));
        let topology = topology.expect("clusters are within the limits of a world");
        Self { machine, cost: machine.cost(), gpus_per_host, topology, known: std::cell::RefCell::default() }
    }

    /// The time of a bucket. Its parts are pipelined block by block, so that the slowest one counts.
    fn us(&self, kind: WorkKind, element_bytes: u32, tensors: Vec<Vec<u64>>) -> f64 {
        let elements: u64 = tensors.iter().flatten().sum();
        let bytes = elements as f64 * f64::from(element_bytes);
        let work = Work { kind, element_bytes, tensors };
        let cutting = Cutting { lanes: LANES, chunk_bytes: None };
        let between_us = match self.topology.len() {
            1 => 0.0,
            _ => select_cut(&self.topology, &work, cutting, &self.cost).predicted_us,
        };
        between_us.max(bytes * self.local_us_per_byte())
    }

    /// A sidecar reads the tensors of all its ranks; each rank copies its own.
    fn local_us_per_byte(&self) -> f64 {
        let reading = f64::from(self.gpus_per_host) * self.machine.gamma_us_per_byte / self.machine.cores;
        if self.gpus_per_host == 1 && self.topology.len() == 1 {
            return 0.0;
        }
        reading.max(self.machine.staging_us_per_byte)
    }

    /// The time of a block of which each rank has a shard.
    fn sharded_us(&self, kind: WorkKind, element_bytes: u32, elements: u64) -> f64 {
        let key = (kind.clone(), elements);
        if let Some((_, us)) = self.known.borrow().iter().find(|(known, _)| *known == key) {
            return *us;
        }
        let ranks = self.topology.size() as u64;
        let whole = Span { start: 0, len: elements };
        let counts = (0..ranks).map(|rank| whole.split(ranks, rank).len).collect();
        let us = self.us(kind, element_bytes, vec![counts]);
        self.known.borrow_mut().push((key, us));
        us
    }
}

/// ronde's default on a host of 16 cores or more.
const LANES: u16 = 4;

#[cfg(test)]
mod tests {
    use super::super::measured::MACHINE;
    use super::super::workloads::workloads;
    use super::*;

    fn cluster(hosts: u32, gpus_per_host: u32) -> Cluster {
        Cluster { hosts, gpus_per_host }
    }

    /// A job whose GPUs compute nothing.
    fn bare(elements: Vec<u64>) -> Workload {
        Workload { elements, compute_us: 0.0, ..workloads()[0].clone() }
    }

    #[test]
    fn one_gpu_alone_computes_only() {
        for workload in workloads() {
            let step = step(&workload, cluster(1, 1), &MACHINE);
            assert!((step.efficiency - 1.0).abs() < 1e-9 && step.limit == Limit::Gpu, "{}: {step:?}", workload.name);
        }
    }

    /// 2 (n - 1) rounds and 2 E (n - 1) / n bytes: what every text about rings says, without ronde's planner.
    #[test]
    fn a_large_all_reduce_takes_the_time_of_the_closed_form_of_a_ring() {
        let bytes = 64 << 20_u64;
        for hosts in [2_u32, 4, 8, 32] {
            let n = f64::from(hosts);
            let machine = Machine { alpha_us: 1.0, ..MACHINE };
            let us = step_us(&bare(vec![bytes / 4]), cluster(hosts, 1), &machine);
            let form = 2.0 * (n - 1.0) * machine.alpha_us
                + 2.0 * (n - 1.0) / n * bytes as f64 * machine.cost().beta_us_per_byte;
            assert!((0.95..1.2).contains(&(us / form)), "{hosts} hosts: {us:.0} us instead of {form:.0}");
        }
    }

    #[test]
    fn a_bucket_takes_what_the_planner_predicts() {
        let machine = Machine { gamma_us_per_byte: 1e-9, staging_us_per_byte: 0.0, ..MACHINE };
        for hosts in [2, 3, 8] {
            let path = Path::new(cluster(hosts, 2), &machine);
            let work = Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors: vec![vec![1 << 20]] };
            let cutting = Cutting { lanes: LANES, chunk_bytes: None };
            let expected = select_cut(&path.topology, &work, cutting, &machine.cost()).predicted_us;
            assert_eq!(step_us(&bare(vec![1 << 20]), cluster(hosts, 2), &machine), expected);
        }
    }

    #[test]
    fn a_step_is_no_faster_on_more_hosts_and_no_slower_on_better_ones() {
        for workload in workloads() {
            let mut last_us = 0.0;
            // Other times make other buckets, which are a little better or worse.
            for hosts in [1, 2, 4, 16, 64] {
                let cluster = cluster(hosts, 4);
                let us = step_us(&workload, cluster, &MACHINE);
                assert!(us >= last_us * 0.98, "{} on {hosts} hosts: {us} after {last_us}", workload.name);
                assert!(us >= workload.compute_us, "{}", workload.name);
                last_us = us;
                for limit in [Limit::Link, Limit::Rounds, Limit::Local] {
                    let better = step_us(&workload, cluster, &MACHINE.without(limit));
                    assert!(better <= us * 1.02, "{} without {limit:?}: {better} instead of {us}", workload.name);
                }
            }
        }
    }

    #[test]
    fn the_first_limit_is_the_one_that_was_made_tight() {
        let vgg = &workloads()[1];
        let wide = Machine { link_gbit: 1e4, cores: 1e3, alpha_us: 0.1, staging_us_per_byte: 1e-9, ..MACHINE };
        let of = |machine: &Machine| step(vgg, cluster(16, 4), machine).limit;
        assert_eq!(of(&wide), Limit::Gpu);
        assert_eq!(of(&Machine { link_gbit: 5.0, ..wide }), Limit::Link);
        assert_eq!(of(&Machine { cores: 0.1, ..wide }), Limit::Cpu);
        assert_eq!(of(&Machine { alpha_us: 20_000.0, ..wide }), Limit::Rounds);
        assert_eq!(of(&Machine { staging_us_per_byte: 1e-2, ..wide }), Limit::Local);
    }

    /// Parameters are gathered twice and gradients scattered once, of which each host sends (n - 1) / n.
    #[test]
    fn a_sharded_step_moves_three_times_the_parameters() {
        let mut workload = workloads()[3].clone();
        workload.compute_us = 1.0;
        let machine = Machine { alpha_us: 0.1, staging_us_per_byte: 0.0, ..MACHINE };
        let us = step_us(&workload, cluster(4, 4), &machine);
        let form = 3.0 * 0.75 * workload.bytes() as f64 * machine.cost().beta_us_per_byte;
        assert!((0.95..1.1).contains(&(us / form)), "{us:.0} us instead of {form:.0}");
    }
}
