//! Support for [`export!`](crate::export!): buffers at fixed addresses as typed slices. This is the only unsafe code of
//! a plugin.

use core::cell::RefCell;

use crate::abi::limits::PARAMETER_BYTES;
use crate::abi::{Call, Table, VERSION};
use crate::parameters::Parameters;
use crate::{Bf16, Bool, Codec, CodecFor, Element, Error, F16, Operands, Plugin, ReducerFor, Span};

/// A type without padding for which every bit pattern is a valid value.
///
/// # Safety
/// The type has these properties, and its alignment is at most 64.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            // SAFETY: numbers, or arrays of numbers, for which every bit pattern is valid.
            unsafe impl Plain for $type {}
        )*
    };
}

plain!((), u8, i8, u16, i16, u32, i32, i64, F16, Bf16, Bool, f32, f64, [f32; 2], [f64; 2]);

/// Bytes aligned to 64.
#[repr(C, align(64))]
struct Aligned<const BYTES: usize>([u8; BYTES]);

/// A buffer at a fixed address that the host accesses between calls.
pub struct Buffer<const BYTES: usize>(RefCell<Aligned<BYTES>>);

/// Holds a plugin's configured value.
pub struct Slot<T>(RefCell<Option<T>>);

/// The table of buffers and the structure that describes a call.
pub struct Place {
    table: RefCell<Table>,
    call: RefCell<Call>,
}

// SAFETY: a module without threads has one thread, and its functions are not called recursively.
#[cfg(all(target_arch = "wasm32", not(target_feature = "atomics")))]
unsafe impl<const BYTES: usize> Sync for Buffer<BYTES> {}
// SAFETY: as above.
#[cfg(all(target_arch = "wasm32", not(target_feature = "atomics")))]
unsafe impl<T> Sync for Slot<T> {}
// SAFETY: as above.
#[cfg(all(target_arch = "wasm32", not(target_feature = "atomics")))]
unsafe impl Sync for Place {}

impl<const BYTES: usize> Buffer<BYTES> {
    /// Creates a zeroed buffer.
    #[allow(clippy::new_without_default, reason = "made in a static")]
    pub const fn new() -> Self {
        Self(RefCell::new(Aligned([0; BYTES])))
    }

    /// Address and size, as in the table.
    #[allow(clippy::cast_possible_truncation, reason = "memories of wasm32 have less than 4 GiB")]
    pub fn place(&self) -> (u32, u32) {
        (address(self.0.as_ptr()), BYTES as u32)
    }

    /// Accesses the bytes.
    pub fn with<T>(&self, f: impl FnOnce(&mut [u8]) -> T) -> T {
        f(&mut self.0.borrow_mut().0)
    }
}

impl<T: Plugin> Slot<T> {
    /// Creates an empty slot.
    #[allow(clippy::new_without_default, reason = "made in a static")]
    pub const fn new() -> Self {
        Self(RefCell::new(None))
    }

    /// Accesses the value.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> Result<R, Error>) -> Result<R, Error> {
        let mut value = self.0.borrow_mut();
        f(value.as_mut().ok_or(Error::unsupported("ronde_configure was not called, or failed"))?)
    }
}

/// The buffers of one module.
pub struct Buffers<'a> {
    /// The block of parameters.
    pub parameters: (u32, u32),
    /// Values, encoded bytes or operands.
    pub input: (u32, u32),
    /// The result.
    pub output: (u32, u32),
    /// A codec's state.
    pub state: (u32, u32),
    /// A reducer's measures.
    pub measures: (u32, u32),
    /// The table.
    pub place: &'a Place,
}

impl Place {
    /// Creates an empty table and call.
    #[allow(clippy::new_without_default, reason = "made in a static")]
    pub const fn new() -> Self {
        let none = (0, 0);
        Self { table: RefCell::new(table(0, none, none, none, none, none)), call: RefCell::new(NO_CALL) }
    }

    /// The description of the current call, written by the host.
    pub fn call(&self) -> Call {
        *self.call.borrow()
    }
}

impl Buffers<'_> {
    /// Fills in the table and returns its address.
    pub fn describe(&self) -> i32 {
        let Self { parameters, input, output, state, measures, place } = self;
        let call = address(place.call.as_ptr());
        *place.table.borrow_mut() = table(call, *parameters, *input, *output, *state, *measures);
        address(place.table.as_ptr()).cast_signed()
    }
}

const fn table(
    call: u32,
    parameters: (u32, u32),
    input: (u32, u32),
    output: (u32, u32),
    state: (u32, u32),
    measures: (u32, u32),
) -> Table {
    Table {
        abi: VERSION,
        call,
        parameters: parameters.0,
        parameters_bytes: parameters.1,
        input: input.0,
        input_bytes: input.1,
        output: output.0,
        output_bytes: output.1,
        state: state.0,
        state_bytes: state.1,
        measures: measures.0,
        measures_bytes: measures.1,
        reserved: [0; 4],
    }
}

const NO_CALL: Call = Call {
    kind: 0,
    dtype: 0,
    stage: 0,
    elements: 0,
    offset: 0,
    tensor_elements: 0,
    round: 0,
    tensor: 0,
    encoded_bytes: 0,
    ranks: 0,
    stride: 0,
    measures: 0,
};

/// Creates the plugin's value.
pub fn configure<T: Plugin>(slot: &Slot<T>, parameters: &T::Parameters) -> Result<usize, Error> {
    *slot.0.borrow_mut() = Some(T::new(parameters)?);
    Ok(0)
}

/// Reads the parameters from their block.
pub fn parameters<P: Parameters>(block: &[u8]) -> P {
    P::read(block.as_chunks::<PARAMETER_BYTES>().0)
}

/// The bound of `elements` elements.
pub fn bound<C: Codec>(codec: &mut C, elements: i32) -> Result<usize, Error> {
    Ok(codec.bound(usize::try_from(elements).map_err(|_| TOO_LONG)?))
}

/// Performs an encoding call.
pub fn encode<E: Element, C: CodecFor<E>>(
    codec: &mut C,
    call: &Call,
    input: &[u8],
    state: &mut [u8],
    output: &mut [u8],
) -> Result<usize, Error> {
    let span = Span::of(call)?;
    let values = front(input, span.elements)?;
    let bound = codec.bound(span.elements);
    let output = output.get_mut(..bound).ok_or(TOO_LONG)?;
    codec.encode(&span, values, front_mut(state, span.elements)?, output)
}

/// Performs a decoding call.
pub fn decode<E: Element, C: CodecFor<E>>(
    codec: &mut C,
    call: &Call,
    input: &[u8],
    output: &mut [u8],
) -> Result<usize, Error> {
    let span = Span::of(call)?;
    let encoded = input.get(..call.encoded_bytes as usize).ok_or(TOO_LONG)?;
    codec.decode(&span, encoded, front_mut(output, span.elements)?)?;
    Ok(0)
}

/// Performs a reducing call.
pub fn reduce<E: Element, R: ReducerFor<E>>(
    reducer: &mut R,
    call: &Call,
    adaptive: bool,
    input: &[u8],
    measures: &[u8],
    output: &mut [u8],
) -> Result<usize, Error> {
    let span = Span::of(call)?;
    let elements = input.len() / size_of::<E>();
    let stride = call.stride as usize / size_of::<E>();
    let operands = Operands::within(front(input, elements)?, call.ranks as usize, stride, span.elements);
    let ranks = call.ranks as usize;
    // The measures of an adaptive reducer are its weights.
    let measures = front(measures, if adaptive { ranks } else { ranks * call.measures as usize })?;
    reducer.reduce(&span, &operands.ok_or(TOO_LONG)?, measures, front_mut(output, span.elements)?)?;
    Ok(0)
}

/// Performs a measuring call.
pub fn measure<E: Element, R: ReducerFor<E>>(
    reducer: &mut R,
    call: &Call,
    input: &[u8],
    measures: &mut [u8],
) -> Result<usize, Error> {
    let span = Span::of(call)?;
    reducer.measure(&span, front(input, span.elements)?, front_mut(measures, call.measures as usize)?)?;
    Ok(0)
}

/// Performs a concluding call on all numbers that apply: those of each rank for a two-pass reducer, a matrix for an
/// adaptive one.
pub fn conclude<R: crate::Reducer>(
    reducer: &mut R,
    call: &Call,
    adaptive: bool,
    measures: &mut [u8],
) -> Result<usize, Error> {
    let ranks = call.ranks as usize;
    let count = if adaptive { ranks * (ranks + 1) / 2 } else { ranks * call.measures as usize };
    reducer.conclude(ranks, front_mut(measures, count)?)?;
    Ok(0)
}

/// Logs an error and returns the status for the host.
#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "buffers are below 2 GiB")]
pub fn outcome(result: Result<usize, Error>) -> i32 {
    match result {
        Ok(value) => value as i32,
        Err(error) => {
            log(error.text());
            error.code()
        }
    }
}

/// Sends a line to the host's log: at most 1 KiB, and 64 lines per call. Native builds write to standard error.
pub fn log(text: &str) {
    #[cfg(target_arch = "wasm32")]
    {
        #[link(wasm_import_module = "ronde")]
        unsafe extern "C" {
            #[link_name = "log"]
            fn host_log(address: *const u8, bytes: usize);
        }
        // SAFETY: the host reads this many bytes at this address, during the call.
        unsafe { host_log(text.as_ptr(), text.len()) }
    }
    #[cfg(not(target_arch = "wasm32"))]
    std::eprintln!("{text}");
}

/// The first elements of a buffer.
fn front<E: Plain>(bytes: &[u8], elements: usize) -> Result<&[E], Error> {
    let needed = elements.checked_mul(size_of::<E>()).ok_or(TOO_LONG)?;
    let bytes = bytes.get(..needed).ok_or(TOO_LONG)?;
    let first = bytes.as_ptr().cast::<E>();
    if !first.is_aligned() {
        return Err(TOO_LONG);
    }
    // SAFETY: the bytes exist and are borrowed, the address is aligned, and every bit pattern is a valid value.
    Ok(unsafe { core::slice::from_raw_parts(first, elements) })
}

/// The first elements of a buffer, mutable.
fn front_mut<E: Plain>(bytes: &mut [u8], elements: usize) -> Result<&mut [E], Error> {
    let needed = elements.checked_mul(size_of::<E>()).ok_or(TOO_LONG)?;
    let bytes = bytes.get_mut(..needed).ok_or(TOO_LONG)?;
    let first = bytes.as_mut_ptr().cast::<E>();
    if !first.is_aligned() {
        return Err(TOO_LONG);
    }
    // SAFETY: as above, and the bytes are borrowed mutably; a plain type has no padding.
    Ok(unsafe { core::slice::from_raw_parts_mut(first, elements) })
}

/// An address in the module's memory. Native builds do not use it.
#[allow(clippy::cast_possible_truncation, reason = "addresses of wasm32 have 32 bits")]
fn address<T>(pointer: *const T) -> u32 {
    pointer.addr() as u32
}

/// A short line of text, without the code size of formatting. What does not fit is omitted.
#[cfg(target_arch = "wasm32")]
struct Text {
    bytes: [u8; 256],
    len: usize,
}

#[cfg(target_arch = "wasm32")]
impl Text {
    fn push(&mut self, bytes: &[u8]) {
        for (place, byte) in self.bytes[self.len..].iter_mut().zip(bytes) {
            *place = *byte;
            self.len += 1;
        }
    }

    fn push_number(&mut self, number: u32) {
        if number > 9 {
            self.push_number(number / 10);
        }
        self.push(&[b'0' + (number % 10) as u8]);
    }
}

/// Logs the location and traps, which the host reports.
#[cfg(target_arch = "wasm32")]
#[panic_handler]
fn panicked(info: &core::panic::PanicInfo<'_>) -> ! {
    if let Some(location) = info.location() {
        let mut text = Text { bytes: [0; 256], len: 0 };
        text.push(b"panicked at ");
        text.push(location.file().as_bytes());
        text.push(b":");
        text.push_number(location.line());
        log(core::str::from_utf8(&text.bytes[..text.len]).unwrap_or_default());
    }
    core::arch::wasm32::unreachable()
}

/// The error of a call for a type that is not in the manifest.
pub const OTHER_DTYPE: Error = Error::unsupported("the manifest does not have this type of elements");
const TOO_LONG: Error = Error::too_long("a span does not fit the plugin's buffers");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Codec, Reducer};

    /// A codec that changes nothing, and a reducer that adds.
    struct Same;

    impl Plugin for Same {
        type Parameters = ();

        fn new((): &()) -> Result<Self, Error> {
            Ok(Self)
        }
    }

    impl Codec for Same {
        type State = ();

        fn bound(&self, elements: usize) -> usize {
            4 * elements
        }
    }

    impl CodecFor<i32> for Same {
        fn encode(&mut self, _: &Span, values: &[i32], state: &mut [()], encoded: &mut [u8]) -> Result<usize, Error> {
            assert_eq!((values.len(), encoded.len()), (state.len(), 4 * values.len()));
            let places = encoded.as_chunks_mut().0.iter_mut();
            places.zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
            Ok(encoded.len())
        }

        fn decode(&mut self, _: &Span, encoded: &[u8], values: &mut [i32]) -> Result<(), Error> {
            let sent = encoded.as_chunks().0.iter();
            values.iter_mut().zip(sent).for_each(|(value, bytes)| *value = i32::from_le_bytes(*bytes));
            Ok(())
        }
    }

    impl Reducer for Same {
        fn conclude(&mut self, _: usize, measures: &mut [f64]) -> Result<(), Error> {
            measures.fill(measures.len() as f64);
            Ok(())
        }
    }

    impl ReducerFor<i32> for Same {
        fn reduce(
            &mut self,
            _: &Span,
            operands: &Operands<'_, i32>,
            measures: &[f64],
            output: &mut [i32],
        ) -> Result<(), Error> {
            assert_eq!(measures.len(), 2);
            operands.fold_into(output, |left, right| left + right);
            Ok(())
        }
    }

    fn filled(values: &[i32]) -> Buffer<256> {
        let buffer = Buffer::new();
        buffer.with(|bytes| {
            let places = bytes.as_chunks_mut().0.iter_mut();
            places.zip(values).for_each(|(place, value)| *place = value.to_le_bytes());
        });
        buffer
    }

    #[test]
    fn a_call_sees_the_elements_that_the_host_names() {
        let (input, output, state) = (filled(&[1, -2, 3]), Buffer::<256>::new(), Buffer::<0>::new());
        let call = Call { elements: 2, tensor_elements: 2, ..NO_CALL };
        let encode = |input: &mut [u8], output: &mut [u8]| {
            state.with(|state| encode::<i32, _>(&mut Same, &call, input, state, output))
        };
        assert_eq!(input.with(|input| output.with(|output| encode(input, output))), Ok(8));
        let call = Call { encoded_bytes: 8, ..call };
        let decoded = input.with(|values| output.with(|bytes| decode::<i32, _>(&mut Same, &call, bytes, values)));
        assert_eq!(decoded, Ok(0));
        input.with(|bytes| assert_eq!(front::<i32>(bytes, 3), Ok(&[1, -2, 3][..])));
    }

    #[test]
    fn operands_and_measures_are_those_that_the_host_names() {
        let (input, output, measures) = (filled(&[1, 2, 0, 10, 20]), Buffer::<256>::new(), Buffer::<32>::new());
        let call = Call { elements: 2, ranks: 2, stride: 12, measures: 1, ..NO_CALL };
        let reduced = input.with(|input| {
            measures.with(|measures| {
                output.with(|output| reduce::<i32, _>(&mut Same, &call, false, input, measures, output))
            })
        });
        assert_eq!(reduced, Ok(0));
        output.with(|bytes| assert_eq!(front::<i32>(bytes, 2), Ok(&[11, 22][..])));
        let concluded = |adaptive| {
            measures.with(|bytes| {
                conclude(&mut Same, &call, adaptive, bytes).map(|_| front::<f64>(bytes, 1).map(|numbers| numbers[0]))
            })
        };
        assert_eq!((concluded(false), concluded(true)), (Ok(Ok(2.0)), Ok(Ok(3.0))), "two numbers, or a triangle");
    }

    /// The host checks all of this, but a module does not rely on it.
    #[test]
    fn what_does_not_fit_is_refused() {
        let (buffer, other) = (Buffer::<256>::new(), Buffer::<256>::new());
        let fails = |call: Call| {
            let encoded =
                buffer.with(|input| other.with(|output| encode::<i32, _>(&mut Same, &call, input, &mut [], output)));
            let decoded = buffer.with(|input| other.with(|output| decode::<i32, _>(&mut Same, &call, input, output)));
            (encoded.err(), decoded.err())
        };
        let long = Call { elements: 65, ..NO_CALL };
        assert_eq!(fails(long), (Some(TOO_LONG), Some(TOO_LONG)));
        assert_eq!(fails(Call { encoded_bytes: 257, ..NO_CALL }), (None, Some(TOO_LONG)));
        assert_eq!(fails(Call { elements: u32::MAX, ..NO_CALL }), (Some(TOO_LONG), Some(TOO_LONG)));
        assert!(fails(Call { stage: 2, ..NO_CALL }).0.is_some_and(|error| error.code() < 0));
        buffer.with(|bytes| assert_eq!(front::<f64>(&bytes[4..], 1), Err(TOO_LONG), "not aligned"));
        assert_eq!(outcome(Err(TOO_LONG)), -4);
        assert_eq!(outcome(Ok(7)), 7);
    }

    #[test]
    fn a_value_is_there_once_it_is_configured() {
        let slot = Slot::<Same>::new();
        assert!(slot.with(|_| Ok(())).is_err());
        assert_eq!(configure(&slot, &()), Ok(0));
        assert_eq!(slot.with(|same| bound(same, 3)), Ok(12));
        assert!(slot.with(|same| bound(same, -1)).is_err());
    }
}
