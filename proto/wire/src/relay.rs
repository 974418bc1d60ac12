//! Messages that sidecars relay for each other along the tree of control links, to the coordinator and from it.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::control::{self, Control};
use crate::frame::{FrameError, FrameKind};
use crate::ids::{Epoch, Seq, SidecarIndex};
use crate::limits::ENCLOSED_BYTES_MAX;

/// One item that is relayed to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ascent {
    /// A message of a sidecar to the coordinator, with the numbers of its frame header.
    Message {
        /// The sender.
        origin: SidecarIndex,
        /// The epoch.
        epoch: Epoch,
        /// The seq, 0 for none.
        seq: Seq,
        /// The message.
        message: Enclosed,
    },
    /// The path between a sidecar and the coordinator is new: nothing from an older path arrives after this. The
    /// coordinator answers with [`Control::Welcome`].
    Joined {
        /// Which sidecar.
        sidecar: SidecarIndex,
        /// The generation under which its parent lets it join.
        generation: u64,
        /// How many lanes it offers.
        lanes: u16,
    },
    /// A sidecar is lost, and with it the path to all sidecars below it.
    Lost {
        /// Which one.
        sidecar: SidecarIndex,
        /// What its parent observed.
        reason: String,
    },
}

/// A control message as bytes that relays do not parse: at most [`ENCLOSED_BYTES_MAX`] bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Enclosed(Bytes);

impl Enclosed {
    /// Encloses a message.
    #[must_use]
    pub fn new(message: &Control) -> Self {
        Self(control::encode(message))
    }

    /// The message.
    ///
    /// # Errors
    /// [`FrameError::Payload`] when the bytes are no message, or one that itself encloses messages.
    pub fn open(&self) -> Result<Control, FrameError> {
        match control::decode(FrameKind::Control, &self.0)? {
            Control::Ascending { .. } | Control::Descending { .. } => {
                Err(FrameError::Payload { kind: FrameKind::Control, reason: "a message is enclosed twice".to_owned() })
            }
            message => Ok(message),
        }
    }

    /// The length in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

impl fmt::Debug for Enclosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..].fmt(f)
    }
}

impl Serialize for Enclosed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Enclosed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_bytes(BytesVisitor)
    }
}

struct BytesVisitor;

impl de::Visitor<'_> for BytesVisitor {
    type Value = Enclosed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {ENCLOSED_BYTES_MAX} bytes of a control message")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Enclosed, E> {
        if bytes.len() > ENCLOSED_BYTES_MAX {
            return Err(E::invalid_length(bytes.len(), &self));
        }
        Ok(Enclosed(Bytes::copy_from_slice(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::CONTROL_FRAME_BYTES_MAX;

    fn ascending(message: Enclosed) -> Control {
        let origin = SidecarIndex(u32::MAX);
        let ascent = Ascent::Message { origin, epoch: Epoch(u64::MAX), seq: Seq(u64::MAX), message };
        Control::Ascending { generation: u64::MAX, ascents: vec![ascent] }
    }

    fn decoded(message: &Control) -> Result<Control, FrameError> {
        control::decode(FrameKind::Control, &control::encode(message))
    }

    #[test]
    fn an_enclosed_message_survives_the_wire() {
        let message = ascending(Enclosed::new(&Control::Done));
        let again = decoded(&message).expect("it was encoded");
        assert_eq!(again, message);
        let Control::Ascending { ascents, .. } = again else { panic!("another message") };
        let Ascent::Message { message, .. } = &ascents[0] else { panic!("another ascent") };
        assert_eq!((message.open(), message.bytes()), (Ok(Control::Done), 1));
    }

    #[test]
    fn a_message_cannot_be_enclosed_twice() {
        let twice = Enclosed::new(&ascending(Enclosed::new(&Control::Done)));
        let error = twice.open().expect_err("refused").to_string();
        assert!(error.contains("enclosed twice"), "{error}");
    }

    #[test]
    fn every_enclosed_message_fits_a_frame_of_any_relay() {
        let largest = Enclosed(Bytes::from(vec![0; ENCLOSED_BYTES_MAX]));
        assert!(control::encode(&ascending(largest.clone())).len() <= CONTROL_FRAME_BYTES_MAX);
        let to = Some((0..1_024).map(SidecarIndex).collect());
        let down = Control::Descending { to, message: largest };
        assert!(control::encode(&down).len() <= CONTROL_FRAME_BYTES_MAX);
        let larger = ascending(Enclosed(Bytes::from(vec![0; ENCLOSED_BYTES_MAX + 1])));
        assert!(decoded(&larger).is_err());
    }
}
