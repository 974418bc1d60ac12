//! A worker's session with its sidecar, for Python.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use ronde::blocking::{Client, Connecting};
use ronde::gpu::{CallerStream, DeviceSpan};
use ronde::{
    DType, DeviceTensor, EpochView, Error, InputTensor, Label, Options, SetId, TensorRef, TimelineOptions, Transfer,
};

use crate::address::{Device, Source};
use crate::arguments::{Arguments, dtype_of};
use crate::completions::Completions;
use crate::errors::raise;
use crate::memory::Memory;
use crate::operation::Operation;
use crate::wait_in_slices;

/// A tensor of a group.
struct Part {
    dtype: DType,
    shape: Vec<u64>,
    /// Its bytes; none if it is in device memory.
    host: Source,
    device: Option<(DeviceSpan, CallerStream)>,
}

impl Part {
    fn new(
        (dtype, shape, address, nbytes): (String, Vec<u64>, usize, usize),
        device: Option<Device>,
    ) -> PyResult<Self> {
        let dtype = dtype_of(&dtype)?;
        let (host, device) = match device {
            Some(device) => (Source::new(0, 0)?, Some(device.memory(address, nbytes))),
            None => (Source::new(address, nbytes)?, None),
        };
        Ok(Self { dtype, shape, host, device })
    }

    fn input<'a>(&'a self, bytes: &'a [u8]) -> InputTensor<'a> {
        let (dtype, shape) = (self.dtype, self.shape.as_slice());
        match &self.device {
            None => InputTensor::Host(TensorRef { dtype, shape, bytes }),
            Some((memory, stream)) => {
                InputTensor::Device(DeviceTensor { dtype, shape, memory: memory.clone(), stream: *stream })
            }
        }
    }
}

/// Python's search path, below which PyTorch's NCCL is.
pub(crate) fn search_path(py: Python<'_>) -> PyResult<Vec<PathBuf>> {
    let path = py.import("sys")?.getattr("path")?;
    // Importers may have put other objects there.
    Ok(path.try_iter()?.filter_map(|entry| entry.ok()?.extract::<PathBuf>().ok()).collect())
}

/// A worker's session with its sidecar.
#[pyclass(frozen, module = "ronde._ronde")]
pub(crate) struct Session {
    submission_path: &'static str,
    is_inline: bool,
    /// `None` once closed. Locked for a moment and only while attached, so that no thread holds it when another one forks.
    client: Mutex<Option<Arc<Client>>>,
    view: EpochView,
}

impl Session {
    pub(crate) fn client(&self) -> PyResult<Arc<Client>> {
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
        options.nccl_folders = search_path(py)?;
        let mut connecting = Connecting::start(options).map_err(|error| raise(&error))?;
        let client = wait_in_slices(py, |slice| connecting.wait_timeout(slice).map_err(|error| raise(&error)))?;
        let (submission_path, view) = (client.submission_path(), *client.view());
        Ok(Self { submission_path, is_inline: inline, client: Mutex::new(Some(Arc::new(client))), view })
    }

    /// Submits a collective on the tensor at `address`. Its bytes are copied before this returns, unless they are in memory
    /// from `empty`. Without a type there is no tensor. With `mapped`, the result may stay in shared memory.
    ///
    /// With `device`, as number of the GPU, handle of the stream and owner, the address is one of that GPU. Its bytes are copied
    /// later, after the present work of the stream.
    #[pyo3(signature = (kind, dtype, shape, address, nbytes, *, device=None, mapped=false, notify=false, name=None, set=0, site=None, **arguments))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python are the options struct of this call")]
    #[expect(clippy::needless_pass_by_value, reason = "values from Python are owned")]
    fn submit(
        &self,
        py: Python<'_>,
        kind: &str,
        dtype: Option<&str>,
        shape: Vec<u64>,
        address: usize,
        nbytes: usize,
        device: Option<Device>,
        mapped: bool,
        notify: bool,
        name: Option<String>,
        set: u32,
        site: Option<String>,
        arguments: Option<Arguments>,
    ) -> PyResult<Operation> {
        let client = self.client()?;
        let arguments = arguments.unwrap_or_default();
        let collective = arguments.collective(kind)?;
        let options = arguments.options()?;
        let dtype = dtype.map(dtype_of).transpose()?;
        if let (Some(dtype), Some(device)) = (dtype, device) {
            let (memory, stream) = device.memory(address, nbytes);
            return py.detach(|| {
                let label = Label { name: name.as_deref(), set: SetId(set) };
                let operation = options.apply(ronde::Operation::new(label, collective, None));
                let operation = ronde::Operation { site, mapped, notify, ..operation };
                let tensor = DeviceTensor { dtype, shape: &shape, memory, stream };
                let handle = client.submit_input(&operation, InputTensor::Device(tensor));
                handle.map(Operation::new).map_err(|error| raise(&error))
            });
        }
        let source = Source::new(address, nbytes)?;
        py.detach(|| {
            let label = Label { name: name.as_deref(), set: SetId(set) };
            let handle = source.with(|bytes| {
                let tensor = dtype.map(|dtype| TensorRef { dtype, shape: &shape, bytes });
                let operation = options.apply(ronde::Operation::new(label, collective, tensor));
                client.submit_from(&ronde::Operation { site, mapped, notify, ..operation })
            });
            handle.map(Operation::new).map_err(|error| raise(&error))
        })
    }

    /// Submits a group of one collective on tensors, each given as type, shape, address and length. With `devices`, each also has
    /// None or a `device` as for `submit`.
    #[pyo3(signature = (kind, tensors, *, devices=None, mapped=false, notify=false, name=None, set=0, site=None, **arguments))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    #[expect(clippy::needless_pass_by_value, reason = "values from Python are owned")]
    fn submit_group(
        &self,
        py: Python<'_>,
        kind: &str,
        tensors: Vec<(String, Vec<u64>, usize, usize)>,
        devices: Option<Vec<Option<Device>>>,
        mapped: bool,
        notify: bool,
        name: Option<String>,
        set: u32,
        site: Option<String>,
        arguments: Option<Arguments>,
    ) -> PyResult<Vec<Operation>> {
        let client = self.client()?;
        let arguments = arguments.unwrap_or_default();
        let collective = arguments.collective(kind)?;
        let options = arguments.options()?;
        let devices = devices.unwrap_or_default().into_iter().chain(std::iter::repeat_with(|| None));
        let parts = tensors.into_iter().zip(devices).map(|(tensor, device)| Part::new(tensor, device));
        let parts = parts.collect::<PyResult<Vec<_>>>()?;
        py.detach(|| {
            let label = Label { name: name.as_deref(), set: SetId(set) };
            let sources: Vec<&Source> = parts.iter().map(|part| &part.host).collect();
            let handles = Source::with_all(&sources, |contents| {
                let operation = options.apply(ronde::Operation::new(label, collective, None));
                let operation = ronde::Operation { site, mapped, notify, ..operation };
                let inputs = contents.iter().zip(&parts).map(|(bytes, part)| (operation.clone(), part.input(bytes)));
                client.submit_group_input(label, &inputs.collect::<Vec<_>>())
            });
            let handles = handles.map_err(|error| raise(&error))?;
            Ok(handles.into_iter().map(Operation::new).collect())
        })
    }

    /// Returns the counter of operations submitted with `notify` that complete while no thread waits for them.
    fn completions(&self) -> PyResult<Completions> {
        self.client()?.completions().map(Completions::new).map_err(|error| raise(&error))
    }

    /// Allocates shared memory, from which tensors are submitted without a copy. Do not write there while one is in flight.
    fn empty(&self, py: Python<'_>, nbytes: u64) -> PyResult<Memory> {
        let client = self.client()?;
        let buffer = py.detach(|| client.buffer(DType::U8, &[nbytes]));
        buffer.map(Memory::new).map_err(|error| raise(&error))
    }

    /// Shuts the session down, and sends the reason, if there is one, to the other ranks. A second call does nothing.
    #[pyo3(signature = (reason=None))]
    fn close(&self, py: Python<'_>, reason: Option<&str>) {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| {
            if let (Some(client), Some(reason)) = (&client, reason) {
                client.part(reason);
            }
            drop(client);
        });
    }

    /// Abandons the session without a shutdown: when the process ends, the rank counts as lost, and the other ranks receive
    /// its traceback. For a program that an exception ends. Nothing can be submitted afterwards.
    fn abandon(&self) {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Dropping it would shut the session down.
        std::mem::forget(client);
    }

    /// Records what happens to each tensor in a file, from now on.
    fn start_timeline(&self, py: Python<'_>, path: PathBuf, mark_cycles: bool) -> PyResult<()> {
        let options = TimelineOptions { path, mark_cycles };
        let change = self.client()?.begin_timeline(options).map_err(|error| raise(&error))?;
        wait_in_slices(py, |slice| change.wait_timeout(slice).map_err(|error| raise(&error)))
    }

    /// Completes the timeline's file.
    fn stop_timeline(&self, py: Python<'_>) -> PyResult<()> {
        let change = self.client()?.end_timeline().map_err(|error| raise(&error))?;
        wait_in_slices(py, |slice| change.wait_timeout(slice).map_err(|error| raise(&error)))
    }

    /// Whether operations can be submitted: the session is not closed and its epoch has not ended.
    #[getter]
    fn is_open(&self) -> bool {
        self.client
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .is_some_and(|client| client.over().is_none())
    }

    /// Returns the sidecar's notices for the user since the last call.
    fn take_notices(&self) -> Vec<String> {
        self.client().map(|client| client.take_notices()).unwrap_or_default()
    }

    /// Returns the newest change of an elastic job's membership since the last call, as its number and how many workers it
    /// adds and removes.
    fn membership_change(&self) -> Option<(u64, u32, u32)> {
        let change = self.client().ok()?.membership_change()?;
        Some((change.membership, change.added, change.removed))
    }

    /// Returns the bytes of all segments, the bytes in use, the slots and the segments.
    fn shared_memory(&self) -> (u64, u64, usize, usize) {
        let memory = self.client().map(|client| client.shared_memory()).unwrap_or_default();
        (memory.mapped_bytes, memory.in_use_bytes, memory.slots, memory.segments)
    }

    /// Returns what this session has done in two levels on GPUs: operations, those that had one level although they might have had
    /// two, and the bytes within the host, between hosts and copied within the device.
    fn level_counts(&self) -> (u64, u64, u64, u64, u64) {
        let counts = self.client().map(|client| client.level_counts()).unwrap_or_default();
        (counts.operations, counts.one_level, counts.bytes_inside, counts.bytes_between, counts.bytes_copied)
    }

    /// The path by which operations reach the sidecar, "ring" or "grpc".
    #[getter]
    fn submission_path(&self) -> &'static str {
        self.submission_path
    }

    /// Whether tensors travel inside messages.
    #[getter]
    fn is_inline(&self) -> bool {
        self.is_inline
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
