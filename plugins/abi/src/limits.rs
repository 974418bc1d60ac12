//! All limits between plugin and host.

/// Bytes of a module.
pub const MODULE_BYTES_MAX: usize = 8 << 20;
/// Bytes of a manifest.
pub const MANIFEST_BYTES_MAX: usize = 16 << 10;
/// Bytes of a plugin's name: small letters, digits and hyphens.
pub const NAME_BYTES_MAX: usize = 64;
/// Bytes of a plugin's version: letters, digits, dots, plus signs and hyphens.
pub const VERSION_BYTES_MAX: usize = 32;
/// Bytes of the one-line description of a plugin or parameter.
pub const ABOUT_BYTES_MAX: usize = 256;
/// Parameters of a plugin.
pub const PARAMETERS_MAX: usize = 16;
/// Bytes of a parameter's name, and of each of its choices.
pub const PARAMETER_NAME_BYTES_MAX: usize = 32;
/// Choices of a parameter.
pub const CHOICES_MAX: usize = 32;
/// Bytes of each parameter in the block of parameters: an `i64`, an `f64`, 0 or 1, or the index of a choice.
pub const PARAMETER_BYTES: usize = 8;

/// Bytes of memory that a plugin may request.
pub const MEMORY_BYTES_MAX: usize = 64 << 20;
/// Milliseconds per call that a plugin may request.
pub const CALL_MS_MAX: u32 = 100;
/// Ranks whose values an n-ary reducer receives at once.
pub const RANKS_MAX: u32 = 256;
/// Bytes of state per element that a codec may request.
pub const STATE_BYTES_MAX: u32 = 16;
/// Numbers that a two-pass reducer measures for each rank.
pub const MEASURES_MAX: u32 = 64;

/// Alignment of the table, the call and all buffers in bytes: a cache line.
pub const BUFFER_ALIGN: usize = 64;
/// Blocks of a codec are a multiple of this many elements.
pub const BLOCK_ALIGN: usize = 64;
/// Limit for the encoded bytes of a span; with its framing it fits a chunk.
pub const ENCODED_BYTES_MAX: usize = (1 << 20) - 64;

/// Bytes of one message to the log.
pub const LOG_BYTES_MAX: usize = 1 << 10;
/// Messages to the log that one call may send.
pub const LOG_MESSAGES_MAX: u32 = 64;

/// Bytes of all functions of a module.
pub const CODE_BYTES_MAX: usize = 1 << 20;
/// Bytes of one function of a module; compile time grows faster than the size.
pub const FUNCTION_BYTES_MAX: usize = 128 << 10;
/// Locals of one function of a module.
pub const LOCALS_MAX: usize = 4_096;
/// Elements of a module's table.
pub const TABLE_ELEMENTS_MAX: usize = 16 << 10;
/// Tables of a module.
pub const TABLES_MAX: usize = 4;
