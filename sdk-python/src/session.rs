//! A session with the sidecar, as Python holds it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ronde::blocking::{Client, Connecting};
use ronde::{Collective, DType, EpochView, Error, Options, Rank, ReduceOp, SetId, Transfer};

use crate::address::Source;
use crate::errors::raise;
use crate::operation::Operation;
use crate::wait_in_slices;

/// A session with the sidecar.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Session {
    /// `None` once closed. Locked for a moment and only while attached, so that no thread holds it when another one forks.
    client: Mutex<Option<Arc<Client>>>,
    view: EpochView,
}

impl Session {
    fn client(&self) -> PyResult<Arc<Client>> {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        client.ok_or_else(|| raise(&Error::Closed))
    }
}

#[pymethods]
impl Session {
    /// Connects, claims the rank and waits for all ranks. Settings that `settings` lacks come from the environment.
    #[staticmethod]
    #[expect(clippy::needless_pass_by_value, reason = "values from Python are owned")]
    fn connect(py: Python<'_>, settings: HashMap<String, String>, inline: bool, client_name: String) -> PyResult<Self> {
        let lookup = |name: &str| settings.get(name).cloned().or_else(|| std::env::var(name).ok());
        let mut options = Options::from_lookup(lookup).map_err(|error| raise(&error))?;
        options.transfer = if inline { Transfer::Inline } else { Transfer::Arena };
        options.client_name = client_name;
        let mut connecting = Connecting::start(options).map_err(|error| raise(&error))?;
        let client = wait_in_slices(py, |slice| connecting.wait_timeout(slice).map_err(|error| raise(&error)))?;
        let view = *client.view();
        Ok(Self { client: Mutex::new(Some(Arc::new(client))), view })
    }

    /// Submits a collective on the tensor at `address`, whose bytes have been copied when this returns.
    #[pyo3(signature = (kind, dtype, shape, address, nbytes, *, name=None, op=0, root=0, prescale=1.0, postscale=1.0, set=0))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python are the options struct of this call")]
    #[expect(clippy::needless_pass_by_value, reason = "values from Python are owned")]
    fn submit(
        &self,
        py: Python<'_>,
        kind: &str,
        dtype: &str,
        shape: Vec<u64>,
        address: usize,
        nbytes: usize,
        name: Option<String>,
        op: u32,
        root: u32,
        prescale: f64,
        postscale: f64,
        set: u32,
    ) -> PyResult<Operation> {
        let client = self.client()?;
        let collective = collective(kind, op, root)?;
        let dtype =
            DType::from_name(dtype).ok_or_else(|| PyValueError::new_err(format!("dtype {dtype} is not supported")))?;
        let source = Source::new(address, nbytes)?;
        let set = SetId(set);
        py.detach(|| {
            let name = name.as_deref();
            let label = ronde::Label { name, set };
            let handle = source.with(|bytes| {
                let tensor = Some(ronde::TensorRef { dtype, shape: &shape, bytes });
                let operation = ronde::Operation::new(label, collective, tensor);
                client.submit_from(&ronde::Operation { prescale, postscale, ..operation })
            });
            handle.map(Operation::new).map_err(|error| raise(&error))
        })
    }

    /// Ends the session in order. Does nothing the second time.
    fn close(&self, py: Python<'_>) {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(client));
    }

    /// Whether operations can be submitted: it is neither closed nor has its epoch ended.
    #[getter]
    fn is_open(&self) -> bool {
        self.client
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .is_some_and(|client| client.over().is_none())
    }

    /// The sidecar's messages for people since the last call.
    fn take_notices(&self) -> Vec<String> {
        self.client().map(|client| client.take_notices()).unwrap_or_default()
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.view.epoch.0
    }

    #[getter]
    fn rank(&self) -> u32 {
        self.view.rank.0
    }

    #[getter]
    fn size(&self) -> u32 {
        self.view.size
    }

    #[getter]
    fn local_rank(&self) -> u32 {
        self.view.local_rank
    }

    #[getter]
    fn local_size(&self) -> u32 {
        self.view.local_size
    }

    #[getter]
    fn cross_rank(&self) -> u32 {
        self.view.cross_rank
    }

    #[getter]
    fn cross_size(&self) -> u32 {
        self.view.cross_size
    }

    #[getter]
    fn is_homogeneous(&self) -> bool {
        self.view.homogeneous
    }
}

fn collective(kind: &str, op: u32, root: u32) -> PyResult<Collective> {
    Ok(match kind {
        "allreduce" => Collective::AllReduce { op: reduce_op(op)? },
        "allgather" => Collective::AllGather,
        "broadcast" => Collective::Broadcast { root: Rank(root) },
        "barrier" => Collective::Barrier,
        _ => return Err(PyValueError::new_err(format!("{kind} is no collective of this client"))),
    })
}

/// The numbers are Horovod's, as the constants of the package are.
fn reduce_op(number: u32) -> PyResult<ReduceOp> {
    Ok(match number {
        0 => ReduceOp::Average,
        1 => ReduceOp::Sum,
        2 => ReduceOp::Adasum,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::Product,
        _ => {
            return Err(PyValueError::new_err(format!(
                "op {number} is none of Average, Sum, Adasum, Min, Max, Product"
            )));
        }
    })
}
