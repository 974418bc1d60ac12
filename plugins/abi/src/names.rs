//! The names of imports, exports and the manifest's section.

/// The module's memory.
pub const MEMORY: &str = "memory";
/// `() -> i32`: [`crate::VERSION`].
pub const ABI: &str = "ronde_abi";
/// `() -> i32`: the address of the [`crate::Table`]. Called once, first; the buffers stay where it says.
pub const PLACE: &str = "ronde_place";
/// `() -> i32`: the block of parameters is filled in; 0, or a code.
pub const CONFIGURE: &str = "ronde_configure";
/// `(elements: i32) -> i32`: the most bytes that so many elements can be encoded to. Called after [`CONFIGURE`]; depends on
/// nothing else and never falls as elements rise.
pub const BOUND: &str = "ronde_bound";
/// `() -> i32`: input and state to output and state; the encoded bytes, or a code.
pub const ENCODE: &str = "ronde_encode";
/// `() -> i32`: encoded bytes in input to values in output; 0, or a code.
pub const DECODE: &str = "ronde_decode";
/// `() -> i32`: operands in input to output; 0, or a code.
pub const REDUCE: &str = "ronde_reduce";
/// `() -> i32`: one rank's values in input to measures of that span; 0, or a code.
pub const MEASURE: &str = "ronde_measure";
/// `() -> i32`: what was measured of all ranks, in place, to what [`REDUCE`] wants to see; 0, or a code.
pub const CONCLUDE: &str = "ronde_conclude";

/// The module of the only import there is.
pub const IMPORTS: &str = "ronde";
/// `(address: i32, bytes: i32)`: UTF-8 text for people, bounded by [`crate::limits::LOG_BYTES_MAX`] and
/// [`crate::limits::LOG_MESSAGES_MAX`].
pub const LOG: &str = "log";

/// The custom section that holds the manifest, as JSON. There is exactly one.
pub const MANIFEST: &str = "ronde.manifest";
