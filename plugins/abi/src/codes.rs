//! The negative error codes of a plugin's functions. The host reports the code with the plugin's log messages.

/// Incompatible parameters.
pub const PARAMETERS: i32 = -1;
/// Malformed encoded bytes.
pub const MALFORMED: i32 = -2;
/// An unsupported type, kind or stage.
pub const UNSUPPORTED: i32 = -3;
/// A span, or a number of ranks, that does not fit the buffers.
pub const TOO_LONG: i32 = -4;
/// Unsupported values, for example NaN.
pub const VALUES: i32 = -5;
/// The first code for a plugin's own errors, which count downwards.
pub const OWN: i32 = -64;

/// The meaning of a code.
#[must_use]
pub const fn meaning(code: i32) -> &'static str {
    match code {
        PARAMETERS => "its parameters do not go together",
        MALFORMED => "the encoded bytes are malformed",
        UNSUPPORTED => "it does not take this type or kind of call",
        TOO_LONG => "the span does not fit its buffers",
        VALUES => "it does not take these values",
        _ => "an error code of the plugin's own",
    }
}
