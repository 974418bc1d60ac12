//! [`Tensor`] and [`TensorRef`]: a type, a shape and bytes in row-major order.

use ronde_wire::{DType, Shape};

use crate::error::Error;

/// A borrowed tensor.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, outermost first; none for a scalar.
    pub shape: &'a [u64],
    /// The elements in row-major order, little-endian.
    pub bytes: &'a [u8],
}

impl<'a> TensorRef<'a> {
    /// A tensor of these elements.
    ///
    /// # Errors
    /// [`Error::Argument`] when the shape has another number of elements.
    pub fn of<T: Element>(shape: &'a [u64], elements: &'a [T]) -> Result<Self, Error> {
        let tensor = Self { dtype: T::DTYPE, shape, bytes: bytemuck::cast_slice(elements) };
        tensor.checked_shape()?;
        Ok(tensor)
    }

    /// The shape, after a check that it fits the bytes.
    pub(crate) fn checked_shape(&self) -> Result<Shape, Error> {
        checked_shape(self.dtype, self.shape, self.bytes.len())
    }
}

/// The type, the shape and the length of a contribution, wherever it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    pub(crate) dtype: DType,
    pub(crate) shape: &'a [u64],
    pub(crate) bytes: usize,
}

/// An owned tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions, outermost first; none for a scalar.
    pub shape: Vec<u64>,
    /// The elements in row-major order, little-endian.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// A tensor of these elements.
    ///
    /// # Errors
    /// [`Error::Argument`] when the shape has another number of elements.
    pub fn of<T: Element>(shape: &[u64], elements: &[T]) -> Result<Self, Error> {
        let bytes = TensorRef::of(shape, elements)?.bytes.to_vec();
        Ok(Self { dtype: T::DTYPE, shape: shape.to_vec(), bytes })
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Argument`] when they are of another type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        check_type::<T>(self.dtype)?;
        Ok(self.bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect())
    }
}

impl<'a> From<&'a Tensor> for TensorRef<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self { dtype: tensor.dtype, shape: &tensor.shape, bytes: &tensor.bytes }
    }
}

/// A Rust type that can be the element of a tensor.
pub trait Element: bytemuck::Pod {
    /// Its type in a tensor.
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {
        $(impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })*
    };
}

element!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, i32 => I32, i64 => I64, f32 => F32, f64 => F64);

/// Checks that elements are of a Rust type.
pub(crate) fn check_type<T: Element>(dtype: DType) -> Result<(), Error> {
    if T::DTYPE == dtype {
        return Ok(());
    }
    Err(Error::argument(format!("the tensor is of type {dtype}, not {}", T::DTYPE)))
}

/// The shape of a tensor, after a check that it fits the bytes.
pub(crate) fn checked_shape(dtype: DType, shape: &[u64], bytes: usize) -> Result<Shape, Error> {
    let shape = Shape::new(shape.to_vec()).map_err(|error| Error::argument(error.to_string()))?;
    let wanted = shape.elements() * dtype.size_bytes() as u64;
    if wanted != bytes as u64 {
        return Err(Error::argument(format!(
            "a tensor of type {dtype} and shape {shape} has {wanted} bytes, not {bytes}"
        )));
    }
    Ok(shape)
}
