//! [`LaunchedBy`]: detects from environment variables which launcher started this process, its rank and the number of processes.
//!
//! One table describes all launchers. The variables are an argument, so that tests can use recorded environments.

#[cfg(test)]
mod tests;

use std::fmt;

/// A program that starts the processes of a parallel job and sets variables with the rank of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Launcher {
    /// `ronde run`, or `ronde worker` in a job of `ronde run --starter`.
    Ronde,
    /// Horovod's own `horovodrun`, not the one of horovod-compat.
    Horovod,
    /// PyTorch's `torchrun`.
    Torchrun,
    /// IBM's `jsrun`.
    Jsrun,
    /// The `mpirun` of Open MPI or IBM Spectrum MPI.
    OpenMpi,
    /// The `mpiexec` of MPICH, Intel MPI or another MPI with the process manager Hydra.
    Hydra,
    /// Slurm's `srun`.
    Srun,
    /// Another launcher that uses PMI-1 or PMI-2.
    Pmi,
    /// Another launcher that uses PMIx, such as `prterun`.
    Pmix,
    /// A launcher, or a file of Kubernetes, that sets the variables of `torch.distributed`'s `env://`.
    TorchEnvironment,
    /// A file of Kubernetes that sets the variables in which torchrun takes its options, without torchrun.
    TorchrunOptions,
}

impl Launcher {
    /// The command's name, in lower case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ronde => "ronde run",
            Self::Horovod => "horovodrun",
            Self::Torchrun => "torchrun",
            Self::Jsrun => "jsrun",
            Self::OpenMpi => "mpirun",
            Self::Hydra => "mpiexec.hydra",
            Self::Srun => "srun",
            Self::Pmi => "pmi",
            Self::Pmix => "pmix",
            Self::TorchEnvironment => "env://",
            Self::TorchrunOptions => "torchrun options",
        }
    }

    /// The launcher in a sentence.
    const fn described(self) -> &'static str {
        match self {
            Self::Ronde => "`ronde run`",
            Self::Horovod => "Horovod's own launcher",
            Self::Torchrun => "torchrun",
            Self::Jsrun => "jsrun",
            Self::OpenMpi => "Open MPI's mpirun",
            Self::Hydra => "the mpiexec or mpirun of MPICH or Intel MPI",
            Self::Srun => "Slurm's srun",
            Self::Pmi => "a launcher that speaks PMI",
            Self::Pmix => "a launcher that speaks PMIx (such as prterun)",
            Self::TorchEnvironment => "a launcher for torch.distributed",
            Self::TorchrunOptions => "a launcher for torchrun (such as Kubeflow's)",
        }
    }
}

/// How a process was started as one of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchedBy {
    /// The launcher.
    pub launcher: Launcher,
    /// The number of this process among all; `None` when no variable has it.
    pub rank: Option<u32>,
    /// The number of processes; `None` when no variable has it.
    pub size: Option<u32>,
    /// The number of this process on its host; `None` when no variable has it.
    pub local_rank: Option<u32>,
    /// The number of processes on its host; `None` when no variable has it.
    pub local_size: Option<u32>,
    /// The variables with this information, and their values.
    pub variables: Vec<(&'static str, String)>,
}

impl LaunchedBy {
    /// Detects the launcher from the variables that `lookup` returns; `None` when no known launcher has set them. An empty
    /// variable counts as not set.
    #[must_use]
    pub fn detect(lookup: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let lookup = |name: &str| lookup(name).filter(|value| !value.is_empty());
        TABLE.iter().find_map(|row| row.read(&lookup))
    }

    /// Whether there may be other processes. Without a size this is true: a process must not train alone because a variable is
    /// missing.
    #[must_use]
    pub fn is_one_of_several(&self) -> bool {
        self.size.is_none_or(|size| size > 1)
    }

    /// The error text when there is no job of ronde: what was found, why no session started, and what to do.
    #[must_use]
    pub fn refusal(&self) -> String {
        let np = self.size.map_or_else(|| "N".to_owned(), |size| size.to_string());
        format!(
            "{self}, but there is no job of ronde: RONDE_SOCKET, RONDE_JOB and RONDE_RANK are not set. Nothing was started, \
             because each of these processes would be a job of one rank and train alone. Start the program with \
             `ronde run -np {np} COMMAND` instead (on several hosts with `-H host:slots,...`), or run a `ronde sidecar` on \
             each host and set the three variables for each process. A process that is meant to train alone starts with \
             `ronde run -np 1 COMMAND`"
        )
    }
}

impl fmt::Display for LaunchedBy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let launcher = self.launcher.described();
        match self.size {
            Some(size) => write!(formatter, "{launcher} has started this process as one of {size} (")?,
            None => write!(formatter, "{launcher} has started this process as one of several (")?,
        }
        for (index, (name, value)) in self.variables.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{name}={value}")?;
        }
        formatter.write_str(")")
    }
}

/// The variables of one launcher. For each number, the first variable that is set counts.
struct Row {
    launcher: Launcher,
    /// The launcher has started the process when one of these is set,
    any_of: &'static [&'static str],
    /// and one of these too, unless there are none.
    and_any_of: &'static [&'static str],
    rank: &'static [&'static str],
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_size: &'static [&'static str],
    /// Further variables to show to the user.
    shown: &'static [&'static str],
}

impl Row {
    fn read(&self, lookup: &impl Fn(&str) -> Option<String>) -> Option<LaunchedBy> {
        let is_set = |names: &[&str]| names.iter().any(|name| lookup(name).is_some());
        if !is_set(self.any_of) || !(self.and_any_of.is_empty() || is_set(self.and_any_of)) {
            return None;
        }
        let first = |names: &[&'static str]| names.iter().find_map(|name| lookup(name).map(|value| (*name, value)));
        let numbers = [self.size, self.rank, self.local_size, self.local_rank].map(first);
        let value = |index: usize| numbers[index].as_ref().and_then(|(_, text)| number(text));
        let [size, rank, local_size, local_rank] = [0, 1, 2, 3].map(value);
        let shown = self.shown.iter().filter_map(|name| lookup(name).map(|value| (*name, value)));
        let variables = numbers.iter().flatten().cloned().chain(shown).collect();
        Some(LaunchedBy { launcher: self.launcher, rank, size, local_rank, local_size, variables })
    }
}

/// Parses a whole number, or the upper end of a range (`1:4`, the nodes of an elastic job).
fn number(text: &str) -> Option<u32> {
    text.rsplit(':').next().and_then(|text| text.trim().parse().ok())
}

/// The rows in order of precedence. One launcher may start another, so a process may have the variables of both: the row of the
/// inner launcher comes first. So torchrun comes before mpirun and srun, which start one torchrun on each host; mpirun, mpiexec,
/// `ronde run` and horovodrun come before srun, which starts them or their daemons. Variables that programs or files set by hand
/// come last.
const TABLE: [Row; 11] = [
    Row {
        launcher: Launcher::Torchrun,
        any_of: &["TORCHELASTIC_RUN_ID"],
        and_any_of: &["WORLD_SIZE"],
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        shown: &["TORCHELASTIC_RUN_ID"],
    },
    Row {
        launcher: Launcher::Jsrun,
        any_of: &["JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"],
        and_any_of: &[],
        rank: &["JSM_NAMESPACE_RANK"],
        size: &["JSM_NAMESPACE_SIZE"],
        local_rank: &["JSM_NAMESPACE_LOCAL_RANK"],
        local_size: &["JSM_NAMESPACE_LOCAL_SIZE"],
        shown: &["LSB_JOBID"],
    },
    Row {
        launcher: Launcher::OpenMpi,
        any_of: &["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"],
        and_any_of: &[],
        rank: &["OMPI_COMM_WORLD_RANK"],
        size: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        shown: &[],
    },
    Row {
        launcher: Launcher::Hydra,
        any_of: &["MPI_LOCALNRANKS", "MPI_LOCALRANKID"],
        and_any_of: &[],
        rank: &["PMI_RANK", "PMI_ID"],
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        shown: &[],
    },
    Row {
        launcher: Launcher::Ronde,
        any_of: &["RONDE_SIZE"],
        and_any_of: &[],
        rank: &["RONDE_RANK"],
        size: &["RONDE_SIZE"],
        local_rank: &["RONDE_LOCAL_RANK"],
        local_size: &["RONDE_LOCAL_SIZE"],
        shown: &[],
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
    },
    // The shells of a batch job and of `salloc` have SLURM_NTASKS, too, but are one process. So only a step's variables count.
    Row {
        launcher: Launcher::Srun,
        any_of: &["SLURM_STEP_ID", "SLURM_STEPID"],
        and_any_of: &["SLURM_PROCID"],
        rank: &["SLURM_PROCID"],
        size: &["SLURM_STEP_NUM_TASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_size: &[],
        shown: &["SLURM_STEP_ID", "SLURM_JOB_ID"],
    },
    Row {
        launcher: Launcher::Pmi,
        any_of: &["PMI_SIZE", "PMI_RANK"],
        and_any_of: &[],
        rank: &["PMI_RANK"],
        size: &["PMI_SIZE"],
        local_rank: &[],
        local_size: &[],
        shown: &[],
    },
    Row {
        launcher: Launcher::Pmix,
        any_of: &["PMIX_RANK"],
        and_any_of: &["PMIX_NAMESPACE"],
        rank: &["PMIX_RANK"],
        size: &[],
        local_rank: &[],
        local_size: &[],
        shown: &["PMIX_NAMESPACE"],
    },
    Row {
        launcher: Launcher::TorchEnvironment,
        any_of: &["WORLD_SIZE"],
        and_any_of: &[],
        rank: &["RANK"],
        size: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_size: &["LOCAL_WORLD_SIZE"],
        shown: &["MASTER_ADDR"],
    },
    // PET_NPROC_PER_NODE is the number of processes that torchrun would start on a node. Without torchrun, the process is one of
    // PET_NNODES.
    Row {
        launcher: Launcher::TorchrunOptions,
        any_of: &["PET_NNODES"],
        and_any_of: &[],
        rank: &["PET_NODE_RANK"],
        size: &["PET_NNODES"],
        local_rank: &[],
        local_size: &[],
        shown: &["PET_MASTER_ADDR"],
    },
];
