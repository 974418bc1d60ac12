//! Conversion of the arguments of collectives from Python.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt};
use ronde::{Codec, Collective, DType, PluginCall, PluginValue, Rank, ReduceOp, SetId};

/// Keyword arguments of a submission. Each kind of collective uses its own subset.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) op: i64,
    pub(crate) prescale: Option<f64>,
    pub(crate) postscale: Option<f64>,
    pub(crate) codec: String,
    pub(crate) plugin: Option<PluginCall>,
    /// The root, or the other rank of a message.
    pub(crate) root: u32,
    /// Whether to receive a message from any rank.
    pub(crate) any_source: bool,
    pub(crate) splits: Vec<u64>,
    pub(crate) tag: u32,
    pub(crate) ranks: Vec<u32>,
    /// Whether the ranks of a process set form it by themselves.
    pub(crate) members_only: bool,
    pub(crate) removed: u32,
}

/// Options of an operation that are not part of the collective itself.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    prescale: f64,
    postscale: f64,
    codec: Codec,
    plugin: Option<PluginCall>,
}

impl Arguments {
    /// Returns the collective of this kind.
    pub(crate) fn collective(&self, kind: &str) -> PyResult<Collective> {
        let root = Rank(self.root);
        Ok(match kind {
            "allreduce" => Collective::AllReduce { op: self.reduce_op()? },
            "allgather" => Collective::AllGather,
            "reducescatter" => Collective::ReduceScatter { op: self.reduce_op()? },
            "broadcast" => Collective::Broadcast { root },
            "alltoall" => Collective::AllToAll { splits: self.splits.clone() },
            "reduce" => Collective::Reduce { op: self.reduce_op()?, root },
            "gather" => Collective::Gather { root },
            "scatter" => Collective::Scatter { root },
            "send" => Collective::Send { to: root, tag: self.tag },
            "recv" if self.any_source => Collective::RecvAny { tag: self.tag },
            "recv" => Collective::Recv { from: root, tag: self.tag },
            "barrier" => Collective::Barrier,
            "join" => Collective::Join,
            "add_process_set" if self.members_only => Collective::AddSetOfMembers { ranks: self.set_ranks() },
            "add_process_set" => Collective::AddSet { ranks: self.set_ranks() },
            "remove_process_set" => Collective::RemoveSet { set: SetId(self.removed) },
            _ => return Err(PyValueError::new_err(format!("{kind} is no collective of this client"))),
        })
    }

    /// Returns scales, codec and plugin, with defaults for those not given.
    pub(crate) fn options(&self) -> PyResult<Options> {
        let codec = Codec::from_name(&self.codec).ok_or_else(|| {
            let names: Vec<&str> =
                Codec::ALL.iter().map(|codec| codec.name()).filter(|name| !name.is_empty()).collect();
            let (given, names) = (&self.codec, names.join(", "));
            PyValueError::new_err(format!(
                "codec {given} is not known; give {names}, or None; a plugin is given as ronde.Plugin({given:?})"
            ))
        })?;
        let (prescale, postscale) = (self.prescale.unwrap_or(1.0), self.postscale.unwrap_or(1.0));
        Ok(Options { prescale, postscale, codec, plugin: self.plugin.clone() })
    }

    /// Returns the reduction.
    fn reduce_op(&self) -> PyResult<ReduceOp> {
        let op = self.op;
        let op_of_plugin = (op == PLUGIN && self.plugin.is_some()).then_some(ReduceOp::Plugin);
        op_of_plugin.or_else(|| reduce_op_of(op)).ok_or_else(|| {
            PyValueError::new_err(format!(
                "op {op} is none of Average, Sum, Adasum, Min, Max, Product, Median, ClippedMean, BitAnd, BitOr, BitXor"
            ))
        })
    }

    /// Returns the ranks in ascending order, which the wire requires. Users give them in any order.
    fn set_ranks(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.ranks.iter().copied().map(Rank).collect();
        ranks.sort_unstable();
        ranks
    }
}

impl Options {
    /// Returns the operation with these options.
    pub(crate) fn apply<'a>(&self, operation: ronde::Operation<'a>) -> ronde::Operation<'a> {
        let Self { prescale, postscale, codec, plugin } = self.clone();
        ronde::Operation { prescale, postscale, codec, plugin, ..operation }
    }
}

impl<'py> FromPyObject<'_, 'py> for Arguments {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let mut arguments = Self::default();
        for (name, value) in given.cast::<PyDict>()?.iter() {
            match name.extract::<String>()?.as_str() {
                "op" => arguments.op = value.extract()?,
                "prescale" => arguments.prescale = Some(value.extract()?),
                "postscale" => arguments.postscale = Some(value.extract()?),
                "codec" => arguments.codec = value.extract()?,
                "plugin" => arguments.plugin = Some(plugin(&value)?),
                "root" => arguments.root = value.extract()?,
                "any_source" => arguments.any_source = value.extract()?,
                "splits" => arguments.splits = value.extract()?,
                "tag" => arguments.tag = value.extract()?,
                "ranks" => arguments.ranks = value.extract()?,
                "members_only" => arguments.members_only = value.extract()?,
                "removed" => arguments.removed = value.extract()?,
                other => return Err(PyValueError::new_err(format!("{other} is no argument of a collective"))),
            }
        }
        Ok(arguments)
    }
}

/// Converts a plugin from a pair of its name and the list of its parameters' names and values.
fn plugin(given: &Bound<'_, PyAny>) -> PyResult<PluginCall> {
    let (name, parameters): (String, Vec<(String, Bound<'_, PyAny>)>) = given.extract()?;
    let parameters = parameters.into_iter().map(|(name, value)| Ok((name, plugin_value(&value)?)));
    Ok(PluginCall { name, parameters: parameters.collect::<PyResult<_>>()? })
}

/// Converts a parameter, whose type and range the package has checked. Bool comes first: Python's are integers.
fn plugin_value(given: &Bound<'_, PyAny>) -> PyResult<PluginValue> {
    Ok(if given.is_instance_of::<PyBool>() {
        PluginValue::Bool(given.extract()?)
    } else if given.is_instance_of::<PyInt>() {
        PluginValue::Int(given.extract()?)
    } else if given.is_instance_of::<PyFloat>() {
        PluginValue::Float(given.extract()?)
    } else {
        PluginValue::Choice(given.extract()?)
    })
}

/// The number of a reduction by a plugin.
const PLUGIN: i64 = 8;

/// Returns the reduction with this number, unless a plugin performs it. The numbers are Horovod's, like the constants of the
/// package.
pub(crate) fn reduce_op_of(number: i64) -> Option<ReduceOp> {
    Some(match number {
        0 => ReduceOp::Average,
        1 => ReduceOp::Sum,
        2 => ReduceOp::Adasum,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::Product,
        6 => ReduceOp::Median,
        7 => ReduceOp::ClippedMean,
        9 => ReduceOp::BitAnd,
        10 => ReduceOp::BitOr,
        11 => ReduceOp::BitXor,
        _ => return None,
    })
}

/// Returns the type of this name.
pub(crate) fn dtype_of(name: &str) -> PyResult<DType> {
    DType::from_name(name).ok_or_else(|| PyValueError::new_err(format!("dtype {name} is not supported")))
}
