//! Detection of other launchers, such as mpirun, for Python.

use std::collections::HashMap;

use pyo3::prelude::*;

/// How a launcher other than ronde's started a process.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct LaunchedBy(ronde::LaunchedBy);

#[pymethods]
impl LaunchedBy {
    /// Detects the launcher from these variables. Returns `None` if no known launcher has set them.
    #[staticmethod]
    #[expect(clippy::needless_pass_by_value, reason = "values from Python are owned")]
    fn detect(environment: HashMap<String, String>) -> Option<Self> {
        ronde::LaunchedBy::detect(|name| environment.get(name).cloned()).map(Self)
    }

    /// The launcher's command, such as "torchrun".
    #[getter]
    fn launcher(&self) -> &'static str {
        self.0.launcher.name()
    }

    /// The rank of the process.
    #[getter]
    fn rank(&self) -> Option<u32> {
        self.0.rank
    }

    /// The number of processes.
    #[getter]
    fn size(&self) -> Option<u32> {
        self.0.size
    }

    /// The rank of the process within its host.
    #[getter]
    fn local_rank(&self) -> Option<u32> {
        self.0.local_rank
    }

    /// The number of processes on its host.
    #[getter]
    fn local_size(&self) -> Option<u32> {
        self.0.local_size
    }

    /// The number of the process's host.
    #[getter]
    fn node(&self) -> Option<u32> {
        self.0.node
    }

    /// The number of hosts.
    #[getter]
    fn nodes(&self) -> Option<u32> {
        self.0.nodes
    }

    /// The names of the hosts, in their order.
    #[getter]
    fn hosts(&self) -> Option<Vec<String>> {
        self.0.hosts.clone()
    }

    /// The variables that identify this run of the launcher, as text.
    #[getter]
    fn job(&self) -> Option<&str> {
        self.0.job.as_deref()
    }

    /// How often the launcher has started the processes again.
    #[getter]
    fn restarts(&self) -> u32 {
        self.0.restarts
    }

    /// The variable with the rank.
    #[getter]
    fn rank_variable(&self) -> Option<&'static str> {
        self.0.rank_variable
    }

    /// Returns whether the environment shows that all processes are on this host.
    fn is_on_one_host(&self) -> bool {
        self.0.is_on_one_host()
    }

    /// Returns how the process was started, for a message.
    fn __str__(&self) -> String {
        self.0.to_string()
    }

    /// Returns whether there may be other processes.
    fn is_one_of_several(&self) -> bool {
        self.0.is_one_of_several()
    }

    /// Returns why a session cannot begin without a job of ronde.
    fn refusal(&self) -> String {
        self.0.refusal()
    }
}
