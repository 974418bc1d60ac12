//! The secret that joins a connection to `mem.sock` with a session on `rpc.sock`.

use std::fmt;
use std::hint::black_box;
use std::str::FromStr;

use crate::error::ProtocolError;

/// A session's 128-bit token, drawn by the sidecar from the system's random numbers.
///
/// Equality takes the same time wherever tokens differ, and there is deliberately no `Hash` nor order: look a token up by
/// comparing it with each of the at most 64 sessions. `Debug` shows nothing of it; `Display` writes it out, for the wire.
#[derive(Clone, Copy)]
pub struct SessionToken([u8; 16]);

impl SessionToken {
    /// A token of these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The token's bytes, for messages that carry it in binary.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        self.0
    }
}

impl PartialEq for SessionToken {
    fn eq(&self, other: &Self) -> bool {
        let difference = self.0.iter().zip(&other.0).fold(0, |difference, (a, b)| black_box(difference | (a ^ b)));
        difference == 0
    }
}

impl Eq for SessionToken {}

impl fmt::Debug for SessionToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("SessionToken(secret)")
    }
}

impl fmt::Display for SessionToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(formatter, "{byte:02x}"))
    }
}

impl FromStr for SessionToken {
    type Err = ProtocolError;

    fn from_str(text: &str) -> Result<Self, ProtocolError> {
        let digits = text.as_bytes();
        let mut bytes = [0; 16];
        if digits.len() != 2 * bytes.len() {
            return Err(ProtocolError::Token);
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = hex_digit(pair[0])? << 4 | hex_digit(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

fn hex_digit(digit: u8) -> Result<u8, ProtocolError> {
    match digit {
        b'0'..=b'9' => Ok(digit - b'0'),
        b'a'..=b'f' => Ok(digit - b'a' + 10),
        _ => Err(ProtocolError::Token),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hex_is_read_back(bytes in any::<[u8; 16]>(), other in any::<[u8; 16]>()) {
            let token = SessionToken::from_bytes(bytes);
            prop_assert_eq!(token.to_string().parse::<SessionToken>(), Ok(token));
            prop_assert_eq!(token == SessionToken::from_bytes(other), bytes == other);
        }

        #[test]
        fn one_bit_makes_another_token(bytes in any::<[u8; 16]>(), bit in 0..128_usize) {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(SessionToken::from_bytes(bytes), SessionToken::from_bytes(flipped));
        }
    }

    #[test]
    fn debug_shows_nothing() {
        assert_eq!(format!("{:?}", SessionToken::from_bytes([0xab; 16])), "SessionToken(secret)");
    }

    #[test]
    fn other_spellings_are_refused() {
        let good = "00112233445566778899aabbccddeeff";
        assert!(good.parse::<SessionToken>().is_ok());
        let long = format!("{good}0");
        let upper = good.to_uppercase();
        let signed = format!("+{}", &good[1..]);
        let wide = format!("{}é", &good[2..]);
        for bad in ["", "00", &good[1..], &long, &upper, &signed, &wide, "0x112233445566778899aabbccddeeff"] {
            assert_eq!(bad.parse::<SessionToken>(), Err(ProtocolError::Token), "{bad:?}");
        }
    }
}
