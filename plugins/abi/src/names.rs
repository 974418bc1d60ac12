//! The names of imports, exports, and the manifest's section.

/// The module's memory.
pub const MEMORY: &str = "memory";
/// `() -> i32`: returns [`crate::VERSION`].
pub const ABI: &str = "ronde_abi";
/// `() -> i32`: returns the address of the [`crate::Table`]. Called once, first; the buffers must not move afterwards.
pub const PLACE: &str = "ronde_place";
/// `() -> i32`: reads the block of parameters. Returns 0 or an error code.
pub const CONFIGURE: &str = "ronde_configure";
/// `(elements: i32) -> i32`: returns the most bytes that `elements` elements can be encoded to. Called after
/// [`CONFIGURE`]. It depends on nothing else, and never decreases as `elements` increases.
pub const BOUND: &str = "ronde_bound";
/// `() -> i32`: encodes the input to the output and updates the state. Returns the number of bytes or an error code.
pub const ENCODE: &str = "ronde_encode";
/// `() -> i32`: decodes the input to values in the output. Returns 0 or an error code.
pub const DECODE: &str = "ronde_decode";
/// `() -> i32`: reduces the operands in the input to the output. Returns 0 or an error code.
pub const REDUCE: &str = "ronde_reduce";
/// `() -> i32`: measures one rank's values in the input. Returns 0 or an error code.
pub const MEASURE: &str = "ronde_measure";
/// `() -> i32`: converts the measures of all ranks, in place, to what [`REDUCE`] needs. Returns 0 or an error code.
pub const CONCLUDE: &str = "ronde_conclude";

/// The module name of the only import.
pub const IMPORTS: &str = "ronde";
/// `(address: i32, bytes: i32)`: UTF-8 text for people, bounded by [`crate::limits::LOG_BYTES_MAX`] and
/// [`crate::limits::LOG_MESSAGES_MAX`].
pub const LOG: &str = "log";

/// The custom section with the manifest in JSON. There must be exactly one.
pub const MANIFEST: &str = "ronde.manifest";
