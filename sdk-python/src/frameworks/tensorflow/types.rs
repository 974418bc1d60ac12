//! TensorFlow's numbers of types.

use std::ffi::c_int;

use ronde::DType;

pub(super) const INT32: c_int = 3;

/// Returns the type with one of TensorFlow's numbers. The operations accept no other types.
pub(super) fn dtype_of(number: c_int) -> Option<DType> {
    Some(match number {
        1 => DType::F32,
        2 => DType::F64,
        INT32 => DType::I32,
        4 => DType::U8,
        5 => DType::I16,
        6 => DType::I8,
        9 => DType::I64,
        10 => DType::Bool,
        14 => DType::Bf16,
        17 => DType::U16,
        19 => DType::F16,
        _ => return None,
    })
}
