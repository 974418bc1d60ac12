//! The kinds of control messages by name, for tools and tests that must not miss any.

use crate::control::Control;

/// A variant that is missing here does not compile.
macro_rules! kinds {
    ($($kind:ident)+) => {
        impl Control {
            /// The names of all kinds, in the order of their numbers on the wire.
            pub const KINDS: &'static [&'static str] = &[$(stringify!($kind)),+];

            /// The name of the message's kind.
            #[must_use]
            pub const fn kind(&self) -> &'static str {
                match self {
                    $(Self::$kind { .. } => stringify!($kind)),+
                }
            }
        }
    };
}

kinds! {
    Heartbeat Attached Left Unreachable EpochBegin EpochEnd Announce Order Reject SetAdded SetRemoved SetForgotten
    AllJoined Done Failed Suspects SuspectRanks AskActivity Activities Ascending Descending PathUp PathDown Welcome Expel
    Silent Schedule Invalidated Withdraw Frozen Resume Performed Commit Matched SetRefused
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::encode;

    #[test]
    fn kinds_are_in_the_order_of_the_wire() {
        let heartbeat = Control::Heartbeat { sent_us: 0, echo_us: 0, held_us: 0 };
        for message in [heartbeat, Control::Done, Control::Withdraw { number: 1 }, Control::Commit { failure: None }] {
            let number = usize::from(encode(&message)[0]);
            assert_eq!(Control::KINDS.get(number), Some(&message.kind()));
        }
    }
}
