//! Encoding of messages for a session's ring: the bytes of a gRPC message without framing.

use prost::{DecodeError, Message};

/// Encodes a message into `bytes`, replacing its contents and reusing its allocation.
pub fn encode(message: &impl Message, bytes: &mut Vec<u8>) {
    bytes.clear();
    message.encode(bytes).expect("a Vec grows as needed");
}

/// Decodes a message.
///
/// # Errors
/// [`DecodeError`] if the bytes are not such a message.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, DecodeError> {
    M::decode(bytes)
}
