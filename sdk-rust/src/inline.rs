//! [`place`]: puts tensors inside messages.

use bytes::Bytes;
use ronde_rpc::Place;

use crate::error::Error;

/// Copies a tensor's bytes into a message, which takes at most `limit` bytes.
///
/// # Errors
/// [`Error::Limit`] for more bytes.
pub(crate) fn place(bytes: &[u8], limit: u64) -> Result<Place, Error> {
    if bytes.len() as u64 > limit {
        let given = bytes.len();
        let reason = format!(
            "a tensor of {given} bytes is over inline_bytes_max = {limit}; use shared memory for large tensors"
        );
        return Err(Error::Limit { reason });
    }
    Ok(Place::Inline(Bytes::copy_from_slice(bytes)))
}
