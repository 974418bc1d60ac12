//! Checks of a gRPC-Web call before it is decoded: the bearer token in its headers, and its body, which is one frame.
//!
//! Decoding a few bytes may allocate several hundred, so the fields of a body are counted first.

use std::fmt::Write as _;

use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use ronde_wire::limits;

use crate::convert::{RankToken, TOKEN_BYTES};
use crate::v1;

/// The value of the `authorization` header for a rank's token.
#[must_use]
pub fn bearer(token: &RankToken) -> String {
    let digits = token.as_bytes().iter().fold(String::with_capacity(2 * TOKEN_BYTES), |mut digits, byte| {
        write!(digits, "{byte:02x}").expect("a String grows as needed");
        digits
    });
    format!("{SCHEME} {digits}")
}

/// The token in the value of an `authorization` header; `None` if there is no valid one.
#[must_use]
pub fn token_in(value: &[u8]) -> Option<RankToken> {
    let (scheme, digits) = value.split_at_checked(SCHEME.len())?;
    let digits = digits.strip_prefix(b" ").filter(|digits| digits.len() == 2 * TOKEN_BYTES)?;
    if !scheme.eq_ignore_ascii_case(SCHEME.as_bytes()) {
        return None;
    }
    let digit = |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let byte = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(pair[1])?);
    let bytes: Vec<u8> = digits.chunks_exact(2).map(byte).collect::<Option<_>>()?;
    RankToken::new(&bytes).ok()
}

/// Checks the body of a call: one frame with an uncompressed message and at most `FIELDS_MAX` fields.
///
/// # Errors
/// [`BodyError`] with the first problem.
pub fn check_body(body: &[u8]) -> Result<(), BodyError> {
    let Some((head, mut message)) = body.split_at_checked(FRAME_HEAD_BYTES) else {
        return Err(BodyError::Short { given: body.len() });
    };
    match head[0] {
        0 => {}
        1 => return Err(BodyError::Compressed),
        kind => return Err(BodyError::Kind { kind }),
    }
    let announced = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    if announced as usize != message.len() {
        return Err(BodyError::Length { announced, given: message.len() });
    }
    let mut fields = 0;
    while !message.is_empty() {
        let key = decode_key(&mut message);
        let skipped = key.and_then(|(tag, kind)| skip_field(kind, tag, &mut message, DecodeContext::default()));
        skipped.map_err(|error| BodyError::Unreadable { reason: error.to_string() })?;
        fields += 1;
        if fields > FIELDS_MAX {
            return Err(BodyError::Fields);
        }
    }
    Ok(())
}

/// The bytes that a message occupies in the body of a [`v1::SayRequest`], rounded up slightly.
#[must_use]
pub fn element_bytes(message: &v1::ClientMessage) -> usize {
    message.encoded_len() + ELEMENT_HEAD_BYTES
}

/// Why a body is not decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// The body is shorter than a frame header.
    #[error("the body has {given} bytes, but a frame of gRPC begins with {FRAME_HEAD_BYTES}")]
    Short {
        /// How many there are.
        given: usize,
    },
    /// The message is compressed, so its decoded size is unknown.
    #[error("the message is compressed, which this sidecar does not accept; send it uncompressed")]
    Compressed,
    /// The frame does not contain a message.
    #[error("the body begins with a frame of kind {kind:#04x}, not with a message")]
    Kind {
        /// The first byte.
        kind: u8,
    },
    /// The body is not exactly one frame.
    #[error("the frame announces {announced} bytes, but {given} follow; a call has one message")]
    Length {
        /// The length in the frame header.
        announced: u32,
        /// The bytes that follow.
        given: usize,
    },
    /// The message is not valid protobuf.
    #[error("the message cannot be read: {reason}")]
    Unreadable {
        /// The decoder's reason.
        reason: String,
    },
    /// The message has too many fields.
    #[error(
        "the message has more than {FIELDS_MAX} fields; say at most {} things in one call",
        limits::WEB_MESSAGES_MAX
    )]
    Fields,
}

const SCHEME: &str = "Bearer";
/// Bytes of a frame header: its kind, and the length of the message.
const FRAME_HEAD_BYTES: usize = 5;
/// Limit for the fields of a message: the elements of a [`v1::SayRequest`], and its other fields.
const FIELDS_MAX: usize = limits::WEB_MESSAGES_MAX + 16;
/// Bytes of a list element's key and length; the length is below 2 MiB.
const ELEMENT_HEAD_BYTES: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames a message.
    fn framed(message: &impl Message) -> Vec<u8> {
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).expect("small");
        [&[0][..], &length.to_be_bytes(), &message].concat()
    }

    fn announced(count: usize) -> v1::SayRequest {
        let message = v1::ClientMessage { message: None };
        v1::SayRequest { session_token: vec![7; 16].into(), number: 1, messages: vec![message; count] }
    }

    #[test]
    fn only_one_bearer_token_is_accepted() {
        let token =
            RankToken::new(&std::array::from_fn::<u8, TOKEN_BYTES, _>(|i| u8::try_from(i * 7 % 251).expect("small")));
        let token = token.expect("of the right length");
        let value = bearer(&token);
        assert_eq!(token_in(value.as_bytes()), Some(token));
        assert_eq!(token_in(value.to_uppercase().as_bytes()), Some(token), "digits and scheme of either case");
        let digits = &value[SCHEME.len() + 1..];
        let wrong = ["", "Bearer", "Bearer ", &value[..value.len() - 1], &format!("{value}0"), digits, "Basic YQ=="];
        for wrong in
            wrong.into_iter().map(str::to_owned).chain([value.replace(' ', "  "), format!("Bearer {}g", &digits[1..])])
        {
            assert_eq!(token_in(wrong.as_bytes()), None, "{wrong:?}");
        }
        assert_eq!(token_in(&[0xFF; 71]), None);
    }

    #[test]
    fn a_body_is_one_frame_of_bounded_fields() {
        assert_eq!(check_body(&framed(&announced(limits::WEB_MESSAGES_MAX))), Ok(()));
        assert_eq!(check_body(&framed(&v1::StatusRequest {})), Ok(()), "an empty message");
        assert_eq!(check_body(&framed(&announced(2 * limits::WEB_MESSAGES_MAX))), Err(BodyError::Fields));
        assert_eq!(check_body(&[0, 0]), Err(BodyError::Short { given: 2 }));
        assert_eq!(check_body(&[1, 0, 0, 0, 0]), Err(BodyError::Compressed));
        assert_eq!(check_body(&[0x80, 0, 0, 0, 0]), Err(BodyError::Kind { kind: 0x80 }));
        let two = [framed(&announced(1)), framed(&announced(1))].concat();
        assert!(matches!(check_body(&two), Err(BodyError::Length { .. })));
        assert_eq!(
            check_body(&[0, 0xFF, 0xFF, 0xFF, 0xFF, 1]),
            Err(BodyError::Length { announced: u32::MAX, given: 1 })
        );
        assert!(matches!(check_body(&[0, 0, 0, 0, 1, 0xFF]), Err(BodyError::Unreadable { .. })));
    }

    #[test]
    fn the_counted_size_bounds_the_encoded_one() {
        let large = v1::Submit { name: "n".repeat(100_000), ..v1::Submit::default() };
        let large = v1::ClientMessage { message: Some(v1::client_message::Message::Submit(large)) };
        let small = v1::ClientMessage { message: Some(v1::client_message::Message::Heartbeat(v1::Heartbeat {})) };
        let messages = vec![large, small.clone(), small];
        let counted: usize = messages.iter().map(element_bytes).sum();
        let alone = v1::SayRequest { messages: Vec::new(), ..announced(0) }.encoded_len();
        let all = v1::SayRequest { messages, ..announced(0) }.encoded_len();
        assert!(all - alone <= counted && counted <= all - alone + 3 * ELEMENT_HEAD_BYTES, "{all} {alone} {counted}");
    }
}
