//! Each message has one spelling, and nothing else is read.

use proptest::prelude::*;

use super::*;

const TOKEN: &str = "00112233445566778899aabbccddeeff";

fn token() -> SessionToken {
    TOKEN.parse().expect("a token")
}

fn requests() -> impl Strategy<Value = MemRequest> {
    let token = any::<[u8; 16]>().prop_map(SessionToken::from_bytes);
    prop_oneof![
        (token.clone(), any::<u32>(), any::<u64>()).prop_map(|(token, segment, bytes)| MemRequest::Attach {
            token,
            segment: SegmentId(segment),
            bytes
        }),
        (token.clone(), any::<u32>())
            .prop_map(|(token, segment)| MemRequest::Result { token, segment: SegmentId(segment) }),
        (token.clone(), any::<u64>()).prop_map(|(token, capacity)| MemRequest::Ring { token, capacity }),
        (token, any::<u32>(), any::<u64>(), any::<(u32, u8, u8, u8)>()).prop_map(|(token, segment, bytes, at)| {
            let gpu = format!("{:x}:{:x}:{:x}.{:x}", at.0, at.1, at.2, at.3).parse().expect("an address");
            MemRequest::Device { token, segment: SegmentId(segment), bytes, gpu }
        }),
        (any::<u32>(), any::<[u8; 32]>(), any::<u64>(), any::<u16>()).prop_map(|(worker, token, capacity, lane)| {
            MemRequest::Stream(StreamRequest { worker, token: WorkerToken::from_bytes(token), capacity, lane })
        }),
    ]
}

/// Text near the protocol: its words, separators, numbers at the edges and noise, in any order.
fn near_lines() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("ATTACH".to_owned()),
        Just("RESULT".to_owned()),
        Just("RING".to_owned()),
        Just("STREAM".to_owned()),
        Just("DEVICE".to_owned()),
        Just("0000:01:00.0".to_owned()),
        Just("OK".to_owned()),
        Just("ERR".to_owned()),
        Just(" ".to_owned()),
        Just(TOKEN.to_owned()),
        Just(u64::MAX.to_string()),
        "[0-9]{1,21}",
        "\\PC{0,4}",
        "[\\x00-\\x20]{0,2}",
    ];
    prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn requests_are_read_back(request in requests()) {
        let line = request.to_line();
        prop_assert!(line.len() <= LINE_BYTES_MAX);
        let line = line.strip_suffix('\n').expect("a newline at the end");
        prop_assert_eq!(MemRequest::parse(line), Ok(request));
    }

    #[test]
    fn what_is_read_as_a_request_is_its_only_spelling(line in near_lines()) {
        if let Ok(request) = MemRequest::parse(&line) {
            prop_assert_eq!(request.to_line(), line + "\n");
        }
    }

    #[test]
    fn what_is_read_as_a_reply_is_its_only_spelling(line in near_lines()) {
        if let Ok(reply) = MemReply::parse(&line) {
            prop_assert_eq!(reply.to_line(), line + "\n");
        }
    }

    #[test]
    fn every_reason_fits_a_line(reason in "\\PC{0,400}") {
        let line = MemReply::Refused { reason }.to_line();
        prop_assert!(line.len() <= LINE_BYTES_MAX);
        let line = line.strip_suffix('\n').expect("a newline at the end");
        let refused = matches!(MemReply::parse(line), Ok(MemReply::Refused { .. }));
        prop_assert!(refused);
    }

    #[test]
    fn damage_to_one_byte_never_panics(request in requests(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut line = request.to_line().into_bytes();
        line.pop();
        let at = at.index(line.len());
        line[at] = byte;
        if let Ok(text) = std::str::from_utf8(&line)
            && let Ok(read) = MemRequest::parse(text)
        {
            prop_assert_eq!(read.to_line(), format!("{text}\n"));
        }
    }
}

#[test]
fn hostile_requests_are_refused_for_the_right_reason() {
    let number = |what| ProtocolError::Number { what };
    let cases = [
        (String::new(), ProtocolError::WordCount),
        (" ".to_owned(), ProtocolError::WordCount),
        ("ATTACH".to_owned(), ProtocolError::WordCount),
        (format!("ATTACH {TOKEN}"), ProtocolError::WordCount),
        (format!("ATTACH {TOKEN} 1"), ProtocolError::WordCount),
        (format!("ATTACH {TOKEN} 1 "), ProtocolError::WordCount),
        (format!("ATTACH {TOKEN} 1 2 3"), ProtocolError::WordCount),
        (format!("ATTACH {TOKEN} 1 2 "), ProtocolError::WordCount),
        (format!("ATTACH  {TOKEN} 1 2"), ProtocolError::WordCount),
        (format!(" ATTACH {TOKEN} 1 2"), ProtocolError::WordCount),
        (format!("RESULT {TOKEN} 1 2"), ProtocolError::WordCount),
        (format!("RING {TOKEN}"), ProtocolError::WordCount),
        (format!("RING {TOKEN} 4096 1"), ProtocolError::WordCount),
        (format!("RING {TOKEN} 04096"), number("number of bytes")),
        (format!("attach {TOKEN} 1 2"), ProtocolError::UnknownWord),
        (format!("DETACH {TOKEN} 1"), ProtocolError::UnknownWord),
        ("OK".to_owned(), ProtocolError::UnknownWord),
        (format!("ATTACH {} 1 2", &TOKEN[1..]), ProtocolError::Token),
        (format!("RESULT {TOKEN}0 1"), ProtocolError::Token),
        (format!("RESULT {} 1", TOKEN.to_uppercase()), ProtocolError::Token),
        (format!("RESULT {TOKEN} -1"), number("segment number")),
        (format!("RESULT {TOKEN} +1"), number("segment number")),
        (format!("RESULT {TOKEN} 01"), number("segment number")),
        (format!("RESULT {TOKEN} 0x1"), number("segment number")),
        (format!("RESULT {TOKEN} 1.0"), number("segment number")),
        (format!("RESULT {TOKEN} 4294967296"), number("segment number")),
        (format!("ATTACH {TOKEN} 1 18446744073709551616"), number("number of bytes")),
        (format!("ATTACH {TOKEN} 1 00"), number("number of bytes")),
        (format!("ATTACH {TOKEN} 1 2\n"), ProtocolError::NotText),
        (format!("ATTACH {TOKEN} 1\t2"), ProtocolError::NotText),
        (format!("ATTACH {TOKEN} 1 2\0"), ProtocolError::NotText),
        (format!("ATTACH {TOKEN} 1 ²"), ProtocolError::NotText),
        ("A".repeat(LINE_BYTES_MAX), ProtocolError::LineTooLong { limit: LINE_BYTES_MAX }),
    ];
    for (line, error) in cases {
        assert_eq!(MemRequest::parse(&line), Err(error), "{line:?}");
    }
    let smallest = MemRequest::Attach { token: token(), segment: SegmentId(0), bytes: 0 };
    assert_eq!(MemRequest::parse(&format!("ATTACH {TOKEN} 0 0")), Ok(smallest));
}

#[test]
fn hostile_replies_are_refused_for_the_right_reason() {
    let number = ProtocolError::Number { what: "number of bytes" };
    let cases = [
        ("", ProtocolError::WordCount),
        ("OK ", ProtocolError::WordCount),
        ("OK  5", ProtocolError::WordCount),
        ("OK 5 6", ProtocolError::WordCount),
        ("OK five", number),
        ("OK -5", number),
        ("OKAY", ProtocolError::UnknownWord),
        ("ok", ProtocolError::UnknownWord),
        ("ERR", ProtocolError::WordCount),
        ("ERR a\x1b[2J", ProtocolError::NotText),
    ];
    for (line, error) in cases {
        assert_eq!(MemReply::parse(line), Err(error), "{line:?}");
    }
    assert_eq!(MemReply::parse("OK"), Ok(MemReply::Attached));
    assert_eq!(MemReply::parse("OK 4096"), Ok(MemReply::Result { bytes: 4_096 }));
}

#[test]
fn descriptions_and_debug_hold_no_token() {
    let request = MemRequest::Attach { token: token(), segment: SegmentId(3), bytes: 4_096 };
    assert_eq!(request.describe(), "to attach input segment 3 of 4096 bytes");
    assert!(!format!("{request:?}").contains(TOKEN));
}
