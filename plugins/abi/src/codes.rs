//! What a function gives when it fails: a negative number. The host repeats it together with what the plugin logged.

/// Parameters that do not go together.
pub const PARAMETERS: i32 = -1;
/// Encoded bytes that no encoding gives.
pub const MALFORMED: i32 = -2;
/// A type, kind or stage that this plugin does not take.
pub const UNSUPPORTED: i32 = -3;
/// A span, or a number of ranks, that its buffers do not hold.
pub const TOO_LONG: i32 = -4;
/// Values that this plugin does not take, such as NaN.
pub const VALUES: i32 = -5;
/// From here down a plugin's own.
pub const OWN: i32 = -64;

/// What a code says, for people.
#[must_use]
pub const fn meaning(code: i32) -> &'static str {
    match code {
        PARAMETERS => "its parameters do not go together",
        MALFORMED => "the encoded bytes are malformed",
        UNSUPPORTED => "it does not take this type or kind of call",
        TOO_LONG => "the span does not fit its buffers",
        VALUES => "it does not take these values",
        _ => "a code of its own",
    }
}
