//! The table of launchers: from which variables rank, size, host and job are read.

use std::net::IpAddr;

use super::{LaunchedBy, Launcher, slurm};

/// The variables of one launcher. For each number, the first variable that is set counts.
pub(super) struct Row {
    pub(super) launcher: Launcher,
    /// The launcher has started the process when one of these is set,
    any_of: &'static [&'static str],
    /// and one of these too, unless there are none.
    and_any_of: &'static [&'static str],
    rank: &'static [&'static str],
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    node: &'static [&'static str],
    nodes: &'static [&'static str],
    /// In Slurm's form.
    hosts: &'static [&'static str],
    /// The number of processes on each host, in Slurm's form.
    tasks_per_node: &'static [&'static str],
    /// The address at which all processes meet.
    master: &'static [&'static str],
    /// Sets of variables that together identify a run; the first of which all are set counts.
    job: &'static [&'static [&'static str]],
    restarts: &'static [&'static str],
    /// Further variables to show to the user.
    shown: &'static [&'static str],
}

/// A launcher without variables, for the rows below.
const NONE: Row = Row {
    launcher: Launcher::Ronde,
    any_of: &[],
    and_any_of: &[],
    rank: &[],
    size: &[],
    local_rank: &[],
    local_size: &[],
    node: &[],
    nodes: &[],
    hosts: &[],
    tasks_per_node: &[],
    master: &[],
    job: &[],
    restarts: &[],
    shown: &[],
};

impl Row {
    pub(super) fn read(&self, lookup: &impl Fn(&str) -> Option<String>) -> Option<LaunchedBy> {
        let is_set = |names: &[&str]| names.iter().any(|name| lookup(name).is_some());
        if !is_set(self.any_of) || !(self.and_any_of.is_empty() || is_set(self.and_any_of)) {
            return None;
        }
        let first = |names: &[&'static str]| names.iter().find_map(|name| lookup(name).map(|value| (*name, value)));
        let text = |names: &[&'static str]| first(names).map(|(_, value)| value);
        let value = |names: &[&'static str]| text(names).as_deref().and_then(number);
        let (size, rank) = (value(self.size), value(self.rank));
        let is_local = text(self.master).is_some_and(|address| is_loopback(&address));
        let nodes = value(self.nodes).or(is_local.then_some(1));
        let node = value(self.node).or(if nodes == Some(1) { Some(0) } else { None });
        let alone = |number: Option<u32>| number.filter(|_| nodes == Some(1));
        let tasks = || slurm::tasks_on(&text(self.tasks_per_node)?, node?);
        let numbers = [self.size, self.rank, self.local_size, self.local_rank].into_iter().filter_map(first);
        let shown = self.shown.iter().filter_map(|name| lookup(name).map(|value| (*name, value)));
        Some(LaunchedBy {
            launcher: self.launcher,
            rank,
            size,
            local_rank: value(self.local_rank).or(alone(rank)),
            local_size: value(self.local_size).or_else(tasks).or(alone(size)),
            node,
            nodes,
            hosts: text(self.hosts).as_deref().and_then(slurm::hosts),
            job: self.job.iter().find_map(|names| identified(names, lookup)),
            restarts: value(self.restarts).unwrap_or(0),
            rank_variable: first(self.rank).map(|(name, _)| name),
            variables: numbers.chain(shown).collect(),
        })
    }
}

/// The variables and their values, if all are set.
fn identified(names: &[&str], lookup: &impl Fn(&str) -> Option<String>) -> Option<String> {
    let parts: Option<Vec<String>> = names.iter().map(|name| Some(format!("{name}={}", lookup(name)?))).collect();
    parts.map(|parts| parts.join(" "))
}

/// Whether an address can be reached from its own host only.
fn is_loopback(address: &str) -> bool {
    let address = address.trim_start_matches('[').trim_end_matches(']');
    address == "localhost" || address.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Parses a whole number, or the upper end of a range (`1:4`, the nodes of an elastic job).
fn number(text: &str) -> Option<u32> {
    text.rsplit(':').next().and_then(|text| text.trim().parse().ok())
}

/// The rows in order of precedence. One launcher may start another, so a process may have the variables of both: the row of the
/// inner launcher comes first. So torchrun comes before mpirun and srun, which start one torchrun on each host; mpirun, mpiexec,
/// `ronde run` and horovodrun come before srun, which starts them or their daemons. Variables that programs or files set by hand
/// come last.
pub(super) const TABLE: [Row; 12] = [
    Row {
        launcher: Launcher::Torchrun,
        any_of: &["TORCHELASTIC_RUN_ID"],
        and_any_of: &["WORLD_SIZE"],
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        shown: &["TORCHELASTIC_RUN_ID"],
        node: &["GROUP_RANK"],
        nodes: &["GROUP_WORLD_SIZE"],
        job: &[&["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"]],
        restarts: &["TORCHELASTIC_RESTART_COUNT"],
        ..NONE
    },
    Row {
        launcher: Launcher::Jsrun,
        any_of: &["JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"],
        rank: &["JSM_NAMESPACE_RANK"],
        size: &["JSM_NAMESPACE_SIZE"],
        local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
        local_size: &["JSM_NAMESPACE_LOCAL_SIZE"],
        shown: &["LSB_JOBID"],
        job: &[&["LSB_JOBID", "PMIX_NAMESPACE"], &["PMIX_NAMESPACE"]],
        ..NONE
    },
    Row {
        launcher: Launcher::OpenMpi,
        any_of: &["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"],
        rank: &["OMPI_COMM_WORLD_RANK"],
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &[&["PMIX_NAMESPACE"], &["OMPI_MCA_ess_base_jobid"]],
        ..NONE
    },
    Row {
        launcher: Launcher::Hydra,
        any_of: &["MPI_LOCALNRANKS", "MPI_LOCALRANKID"],
        rank: &["PMI_RANK", "PMI_ID"],
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        job: &[&["I_MPI_HYDRA_UUID"]],
        ..NONE
    },
    Row {
        launcher: Launcher::Ronde,
        any_of: &["RONDE_SIZE"],
        rank: &["RONDE_RANK"],
        size: &["RONDE_SIZE"],
        local_rank: &["RONDE_LOCAL_RANK"],
        local_size: &["RONDE_LOCAL_SIZE"],
        job: &[&["RONDE_JOB"]],
        ..NONE
    },
    Row {
        launcher: Launcher::Horovod,
        any_of: &["HOROVOD_SIZE"],
        and_any_of: &["HOROVOD_RANK"],
        rank: &["HOROVOD_RANK"],
        size: &["HOROVOD_SIZE"],
        local_rank: &["HOROVOD_LOCAL_RANK"],
        local_size: &["HOROVOD_LOCAL_SIZE"],
        shown: &["HOROVOD_GLOO_RENDEZVOUS_ADDR"],
        job: &[&["HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"]],
        ..NONE
    },
    // The shells of a batch job and of `salloc` have SLURM_NTASKS, too, but are one process. So only a step's variables count.
    Row {
        launcher: Launcher::Srun,
        any_of: &["SLURM_STEP_ID", "SLURM_STEPID"],
        and_any_of: &["SLURM_PROCID"],
        rank: &["SLURM_PROCID"],
        size: &["SLURM_STEP_NUM_TASKS"],
        local_rank: &["SLURM_LOCALID"],
        shown: &["SLURM_STEP_ID", "SLURM_JOB_ID"],
        node: &["SLURM_NODEID"],
        nodes: &["SLURM_STEP_NUM_NODES"],
        hosts: &["SLURM_STEP_NODELIST"],
        tasks_per_node: &["SLURM_STEP_TASKS_PER_NODE"],
        job: &[&["SLURM_JOB_ID", "SLURM_STEP_ID"]],
        restarts: &["SLURM_RESTART_COUNT"],
        ..NONE
    },
    Row {
        launcher: Launcher::Pmi,
        any_of: &["PMI_SIZE", "PMI_RANK"],
        rank: &["PMI_RANK"],
        size: &["PMI_SIZE"],
        ..NONE
    },
    Row {
        launcher: Launcher::Pmix,
        any_of: &["PMIX_RANK"],
        and_any_of: &["PMIX_NAMESPACE"],
        rank: &["PMIX_RANK"],
        shown: &["PMIX_NAMESPACE"],
        job: &[&["PMIX_NAMESPACE"]],
        ..NONE
    },
    Row {
        launcher: Launcher::TorchEnvironment,
        any_of: &["WORLD_SIZE"],
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        shown: &["MASTER_ADDR"],
        node: &["GROUP_RANK", "NODE_RANK"],
        nodes: &["GROUP_WORLD_SIZE", "NNODES"],
        master: &["MASTER_ADDR"],
        job: &[&["MASTER_ADDR", "MASTER_PORT"]],
        ..NONE
    },
    // PET_NPROC_PER_NODE is the number of processes that torchrun would start on a node. Without torchrun, the process is one of
    // PET_NNODES.
    Row {
        launcher: Launcher::TorchrunOptions,
        any_of: &["PET_NNODES"],
        rank: &["PET_NODE_RANK"],
        size: &["PET_NNODES"],
        shown: &["PET_MASTER_ADDR"],
        node: &["PET_NODE_RANK"],
        nodes: &["PET_NNODES"],
        job: &[&["PET_RDZV_ID"], &["PET_MASTER_ADDR", "PET_MASTER_PORT"]],
        ..NONE
    },
    // The environment of a pod has its index, but not the number of pods. A program gets that from a file that also sets
    // WORLD_SIZE or RONDE_SOCKET.
    Row {
        launcher: Launcher::IndexedJob,
        any_of: &["JOB_COMPLETION_INDEX"],
        rank: &["JOB_COMPLETION_INDEX"],
        node: &["JOB_COMPLETION_INDEX"],
        shown: &["JOBSET_NAME", "REPLICATED_JOB_NAME"],
        ..NONE
    },
];
