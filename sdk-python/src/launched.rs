//! The table of launchers, for Python.

use std::collections::HashMap;

use pyo3::prelude::*;

/// How a launcher that is not ronde's has started a process.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct LaunchedBy(ronde::LaunchedBy);

#[pymethods]
impl LaunchedBy {
    /// What these variables say; `None` when no known launcher has set them.
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

    /// The number of the process among all.
    #[getter]
    fn rank(&self) -> Option<u32> {
        self.0.rank
    }

    /// How many processes there are.
    #[getter]
    fn size(&self) -> Option<u32> {
        self.0.size
    }

    /// The number of the process among those of its host.
    #[getter]
    fn local_rank(&self) -> Option<u32> {
        self.0.local_rank
    }

    /// How many processes its host has.
    #[getter]
    fn local_size(&self) -> Option<u32> {
        self.0.local_size
    }

    /// Whether there may be other processes.
    fn is_one_of_several(&self) -> bool {
        self.0.is_one_of_several()
    }

    /// Why a session cannot begin without a job of ronde.
    fn refusal(&self) -> String {
        self.0.refusal()
    }
}
