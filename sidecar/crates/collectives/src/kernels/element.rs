//! What the kernels need of an element type.

/// A value in the form in which it is computed; in memory it may be narrower.
pub(super) trait Element: Copy {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
    /// Multiplied as the module's header says.
    fn scale(self, factor: f64) -> Self;
    /// The same by a factor that f32 holds exactly, for which some types need no f64.
    #[inline(always)]
    fn scale_single(self, factor: f32) -> Self {
        self.scale(f64::from(factor))
    }
    /// Divided by a number of ranks, integers toward zero.
    fn quotient(self, ranks: u32) -> Self;

    /// `accumulator[i] = f(accumulator[i], other[i])` on buffers of equal length that hold whole elements.
    fn zip(accumulator: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self);
    /// `bytes[i] = f(bytes[i])` on a buffer that holds whole elements.
    fn map(bytes: &mut [u8], f: impl Fn(Self) -> Self);
}

/// What the bitwise operations need of an element type: integers have it, and booleans as one bit.
pub(super) trait Bits: Element {
    fn bit_and(self, other: Self) -> Self;
    fn bit_or(self, other: Self) -> Self;
    fn bit_xor(self, other: Self) -> Self;
}

/// The two loops for a type whose form in memory is its little-endian bytes.
macro_rules! plain_loops {
    ($type:ty) => {
        #[inline(always)]
        fn zip(accumulator: &mut [u8], other: &[u8], f: impl Fn(Self, Self) -> Self) {
            const BYTES: usize = size_of::<$type>();
            let pairs = accumulator.as_chunks_mut::<BYTES>().0.iter_mut().zip(other.as_chunks::<BYTES>().0);
            for (a, b) in pairs {
                *a = f(<$type>::from_le_bytes(*a), <$type>::from_le_bytes(*b)).to_le_bytes();
            }
        }

        #[inline(always)]
        fn map(bytes: &mut [u8], f: impl Fn(Self) -> Self) {
            const BYTES: usize = size_of::<$type>();
            for a in bytes.as_chunks_mut::<BYTES>().0 {
                *a = f(<$type>::from_le_bytes(*a)).to_le_bytes();
            }
        }
    };
}

/// Evaluates an expression with the element type of a [`ronde_wire::DType`]; returns an error for types to come.
macro_rules! with_element {
    ($dtype:expr, $op:expr, $element:ident => $expression:expr) => {{
        macro_rules! with {
            ($type:ty) => {{
                type $element = $type;
                $expression
            }};
        }
        match $dtype {
            ronde_wire::DType::U8 => with!(u8),
            ronde_wire::DType::I8 => with!(i8),
            ronde_wire::DType::U16 => with!(u16),
            ronde_wire::DType::I16 => with!(i16),
            ronde_wire::DType::I32 => with!(i32),
            ronde_wire::DType::I64 => with!(i64),
            ronde_wire::DType::F16 => with!($crate::kernels::float::Half),
            ronde_wire::DType::Bf16 => with!($crate::kernels::float::Brain),
            ronde_wire::DType::F32 => with!(f32),
            ronde_wire::DType::F64 => with!(f64),
            ronde_wire::DType::Bool => with!($crate::kernels::integer::Truth),
            dtype => return Err($crate::kernels::KernelError::Operation { dtype, op: $op }),
        }
    }};
}

pub(super) use {plain_loops, with_element};
