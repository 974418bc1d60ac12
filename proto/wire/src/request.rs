//! The request of one rank: a named collective on a tensor of one type and shape.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::codec::Codec;
use crate::collective::Collective;
use crate::dtype::DType;
use crate::ids::{Rank, SetId, TensorName};
use crate::limits;
use crate::plugin::PluginUse;

/// A request of one rank as it is negotiated: all properties of the tensor except its bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The process set that performs it.
    pub set: SetId,
    /// The name by which the ranks agree.
    pub name: TensorName,
    /// The collective.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// The shape of this rank's contribution.
    pub shape: Shape,
    /// Every contribution is multiplied by this before the reduction.
    pub prescale: f64,
    /// The result is multiplied by this after the reduction.
    pub postscale: f64,
    /// How contributions are encoded on the wire; only for an all-reduce.
    pub codec: Codec,
    /// The plugin that encodes ([`Codec::Plugin`]) or reduces ([`crate::ReduceOp::Plugin`]); `None` for neither.
    pub plugin: Option<Arc<PluginUse>>,
    /// The tensors with which it is ordered; `None` when it is ordered alone.
    pub group: Option<Group>,
}

impl Request {
    /// A request without scaling, codec, plugin and group.
    #[must_use]
    pub const fn new(set: SetId, name: TensorName, collective: Collective, dtype: DType, shape: Shape) -> Self {
        let (prescale, postscale, codec) = (1.0, 1.0, Codec::None);
        Self { set, name, collective, dtype, shape, prescale, postscale, codec, plugin: None, group: None }
    }
}

/// Tensors of one set that are ordered together, once all of them are ready on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Group {
    /// The name by which the ranks agree on the group.
    pub name: TensorName,
    /// How many tensors it has: 1 to [`limits::GROUP_TENSORS_MAX`].
    pub size: u32,
}

/// What a completed request reports besides its result.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Detail {
    /// Nothing.
    #[default]
    None,
    /// For an all-to-all: rows received from each rank of the set, in rank order.
    Splits(Vec<u64>),
    /// For a join: the rank that joined last.
    LastJoined(Rank),
    /// For an added process set: its id.
    Set(SetId),
    /// For a received message: the rank that sent it.
    Source(Rank),
}

/// A shape that breaks the rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// More than [`limits::DIMENSIONS_MAX`] dimensions.
    #[error("a tensor has at most {max} dimensions, not {given}", max = limits::DIMENSIONS_MAX)]
    Dimensions {
        /// How many were given.
        given: usize,
    },
    /// The number of elements does not fit 2^48, more than any arena holds.
    #[error("the shape {shape} has more elements than can be addressed")]
    Overflow {
        /// The shape as text.
        shape: String,
    },
}

/// The dimensions of a tensor, outermost first; none for a scalar. The number of elements is known to fit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "Vec<u64>", into = "Vec<u64>")]
pub struct Shape(Vec<u64>);

impl Shape {
    /// Checks and wraps dimensions.
    ///
    /// # Errors
    /// [`ShapeError`] when there are too many dimensions or elements.
    pub fn new(dimensions: Vec<u64>) -> Result<Self, ShapeError> {
        if dimensions.len() > limits::DIMENSIONS_MAX {
            return Err(ShapeError::Dimensions { given: dimensions.len() });
        }
        // Zero dimensions hide an overflow of the others; the product is checked without them.
        let product = dimensions.iter().filter(|d| **d != 0).try_fold(1_u64, |n, d| n.checked_mul(*d));
        match product {
            Some(n) if n <= ELEMENTS_MAX => Ok(Self(dimensions)),
            _ => Err(ShapeError::Overflow { shape: format!("{dimensions:?}") }),
        }
    }

    /// The dimensions, outermost first.
    #[must_use]
    pub fn dimensions(&self) -> &[u64] {
        &self.0
    }

    /// The number of elements; 1 for a scalar.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.0.iter().product()
    }

    /// The number of elements in one row: all dimensions but the first. 1 for a scalar.
    #[must_use]
    pub fn row_elements(&self) -> u64 {
        self.0.iter().skip(1).product()
    }
}

/// 2^48 elements: the product of an element count and a type's size always fits 64 bits.
const ELEMENTS_MAX: u64 = 1 << 48;

impl TryFrom<Vec<u64>> for Shape {
    type Error = ShapeError;
    fn try_from(dimensions: Vec<u64>) -> Result<Self, ShapeError> {
        Self::new(dimensions)
    }
}

impl From<Shape> for Vec<u64> {
    fn from(shape: Shape) -> Self {
        shape.0
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, dimension) in self.0.iter().enumerate() {
            write!(f, "{}{dimension}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str("]")
    }
}
