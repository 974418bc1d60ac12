//! [`LaunchedBy`]: detects from environment variables which launcher started this process, its rank and the number of processes.
//!
//! One table describes all launchers. The variables are an argument, so that tests can use recorded environments.

mod slurm;
mod table;
#[cfg(test)]
mod tests;

use std::fmt;

use table::TABLE;

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
    /// An indexed Job of Kubernetes, alone or in a JobSet.
    IndexedJob,
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
            Self::IndexedJob => "indexed job",
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
            Self::IndexedJob => "an indexed Job of Kubernetes",
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
    /// The number of its host among the job's; `None` when no variable has it.
    pub node: Option<u32>,
    /// The number of hosts; `None` when no variable has it.
    pub nodes: Option<u32>,
    /// The names of the hosts, in their order; `None` when no variable has them.
    pub hosts: Option<Vec<String>>,
    /// The variables that together identify this run of the launcher, as text; `None` when it sets none. No two jobs that run on
    /// one host at one time have the same.
    pub job: Option<String>,
    /// How often the launcher has started the processes again; 0 when no variable has it.
    pub restarts: u32,
    /// The variable with the rank, if one is set.
    pub rank_variable: Option<&'static str>,
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

    /// Whether the environment shows that all processes are on this host.
    #[must_use]
    pub fn is_on_one_host(&self) -> bool {
        self.size.is_some() && self.local_size == self.size
    }

    /// The error text when there is no job of ronde: what was found, why no session started, and what to do.
    #[must_use]
    pub fn refusal(&self) -> String {
        let np = self.size.map_or_else(|| "N".to_owned(), |size| size.to_string());
        format!(
            "{self}, but there is no job of ronde: RONDE_SOCKET, RONDE_JOB and RONDE_RANK are not set. Nothing was started, \
             because each of these processes would be a job of one rank and train alone. Start the program with \
             `ronde run -np {np} COMMAND` instead (on several hosts with `-H host:slots,...`), or run a `ronde sidecar` on \
             each host, with a certificate directory (--certs) or the job's secret (--job-secret-file), and set RONDE_SOCKET \
             to its session directory, RONDE_JOB to the job's name and, where this launcher sets no rank, RONDE_RANK for \
             each process. A process that is meant to train alone starts with \
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
