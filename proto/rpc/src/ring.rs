//! Messages as they go over a session's ring: the same bytes that gRPC carries, without its framing.

use prost::{DecodeError, Message};

/// Writes a message into `bytes`, whose content is replaced and whose memory is used again.
pub fn encode(message: &impl Message, bytes: &mut Vec<u8>) {
    bytes.clear();
    message.encode(bytes).expect("a Vec grows as needed");
}

/// Reads a message.
///
/// # Errors
/// [`DecodeError`] for bytes that are none.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, DecodeError> {
    M::decode(bytes)
}
