//! Messages between sidecars. The seeds are the examples of docs/PROTOCOL.md, which another test checks against the
//! code.

use bytes::Bytes;
use ronde_fuzz::{Outcome, Target};
use ronde_wire::control::{Close, Hello, Refusal, decode, encode};
use ronde_wire::frame::{Chunk, HEADER_BYTES};
use ronde_wire::stream::StreamFrame;
use ronde_wire::{
    Ascent, Cause, Control, Enclosed, Epoch, Failure, Frame, FrameError, FrameHeader, FrameKind, Rank, Seq, SetId,
    SidecarIndex, TensorName, limits,
};
use serde::{Deserialize, Serialize};

/// A stream of frames, read as a link reads it.
pub(crate) fn wire_frames() -> Target {
    let (mut seeds, all) = (examples(), examples().concat());
    seeds.push(all);
    seeds.extend(other_messages().iter().map(|message| frame(FrameKind::Control, message)));
    seeds.push(frame(FrameKind::Close, &Close { code: 3, reason: "the job is over".to_owned() }));
    Target::new("wire_frames", seeds, move |bytes| {
        let mut rest = bytes;
        loop {
            match first_frame(rest) {
                Ok(None) => return Outcome::read(&bytes.len().checked_ilog2()),
                Ok(Some((frame, rest_of_input))) => {
                    if let Err(error) = content(&frame) {
                        return Outcome::refused(&error);
                    }
                    rest = rest_of_input;
                }
                Err(error) => return Outcome::refused(&error),
            }
        }
    })
}

#[test]
fn fuzz_wire_frames() {
    wire_frames().run();
}

/// The payload of a control frame, and what is enclosed in it.
pub(crate) fn wire_control() -> Target {
    let mut seeds = controls();
    assert!(seeds.len() > 12, "docs/PROTOCOL.md shows only {} control messages; the scan is broken", seeds.len());
    seeds.extend(other_messages().iter().map(|message| encode(message).to_vec()));
    Target::new("wire_control", seeds, move |bytes| {
        let message: Result<Control, _> = decode(FrameKind::Control, bytes);
        message.as_ref().map_or_else(Outcome::refused, |message| {
            same_again(message);
            let opened = enclosed(message).into_iter().find_map(|enclosed| enclosed.open().err());
            opened.map_or_else(|| Outcome::read(message), |error| Outcome::refused(&error))
        })
    })
}

#[test]
fn fuzz_wire_control() {
    wire_control().run();
}

/// The hello: the first frame of a peer, read before the peer is authenticated to the job.
pub(crate) fn wire_hello() -> Target {
    let is_hello = |frame: &Vec<u8>| frame[6] == FrameKind::Hello as u8;
    let seeds: Vec<_> = examples().into_iter().filter(is_hello).map(|frame| frame[HEADER_BYTES..].to_vec()).collect();
    let own: Hello = decode(FrameKind::Hello, &seeds[0]).expect("an example");
    Target::new("wire_hello", seeds, move |bytes| {
        let hello: Hello = match decode(FrameKind::Hello, bytes) {
            Ok(hello) => hello,
            Err(error) => return Outcome::refused(&error),
        };
        same_again(&hello);
        assert!(hello.job.as_str().len() <= limits::JOB_NAME_BYTES_MAX);
        let refusal = hello.refusal(&own.job, own.sidecar);
        let claims = (&hello.job, hello.sidecar, hello.planner_version);
        if refusal.is_none() {
            assert_eq!(claims, (&own.job, own.sidecar, own.planner_version), "let in");
        }
        refusal.map_or_else(|| Outcome::read(&hello), |refusal| Outcome::refused(&refusal.reason))
    })
}

#[test]
fn fuzz_wire_hello() {
    wire_hello().run();
}

/// Splits the input after the first frame; nothing when there are not enough bytes.
fn first_frame(bytes: &[u8]) -> Result<Option<(Frame, &[u8])>, FrameError> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let parsed = FrameHeader::decode(header)?;
    assert_eq!(parsed.encode(), *header, "a header has one spelling");
    let length = parsed.length as usize;
    assert!(length <= parsed.kind.payload_bytes_max());
    let Some((payload, rest)) = rest.split_at_checked(length) else { return Ok(None) };
    Ok(Some((Frame { header: parsed, payload: Bytes::copy_from_slice(payload) }, rest)))
}

/// Decodes a frame's payload, which then encodes to the same value.
fn content(frame: &Frame) -> Result<(), FrameError> {
    let (kind, payload) = (frame.header.kind, &frame.payload[..]);
    match kind {
        FrameKind::Hello => decode(kind, payload).map(|hello: Hello| same_again(&hello)),
        FrameKind::Refusal => decode(kind, payload).map(|refusal: Refusal| same_again(&refusal)),
        FrameKind::Close => decode(kind, payload).map(|close: Close| same_again(&close)),
        FrameKind::Control => Control::from_frame(frame).map(|message| same_again(&message)),
        FrameKind::Chunk => Chunk::from_frame(frame.clone()).map(|chunk| {
            assert!(chunk.data.len() <= limits::CHUNK_BYTES_MAX);
            let again = [&chunk.encode_head()[HEADER_BYTES..], &chunk.data].concat();
            assert_eq!(again, payload, "a chunk has one spelling");
        }),
        FrameKind::Stream => {
            if let Ok((stream, frame)) = StreamFrame::decode(&frame.payload) {
                assert_eq!(StreamFrame::decode(&frame.encode(stream)), Ok((stream, frame)));
            }
            Ok(())
        }
        FrameKind::Admitted | FrameKind::Renew => Ok(()),
    }
}

/// Checks that a decoded value survives encoding. The bytes are compared: a NaN does not equal itself.
fn same_again<T: Serialize + for<'a> Deserialize<'a>>(value: &T) {
    let once = encode(value);
    let again: T = decode(FrameKind::Control, &once).expect("what was encoded decodes");
    assert_eq!(encode(&again), once, "another value comes back");
}

fn enclosed(message: &Control) -> Vec<&Enclosed> {
    match message {
        Control::Ascending { ascents, .. } => {
            let messages = ascents.iter().filter_map(|ascent| match ascent {
                Ascent::Message { message, .. } => Some(message),
                Ascent::Joined { .. } | Ascent::Lost { .. } => None,
            });
            messages.collect()
        }
        Control::Descending { message, .. } => vec![message],
        _ => Vec::new(),
    }
}

/// A message of every kind: those of the document, and others.
pub(crate) fn every_message() -> Vec<Control> {
    let shown = controls().into_iter().map(|payload| decode(FrameKind::Control, &payload).expect("an example"));
    shown.chain(other_messages()).collect()
}

/// The payloads of the control frames that the document shows.
fn controls() -> Vec<Vec<u8>> {
    let is_control = |frame: &Vec<u8>| frame[6] == FrameKind::Control as u8;
    examples().into_iter().filter(is_control).map(|frame| frame[HEADER_BYTES..].to_vec()).collect()
}

/// Messages that the document has no examples of.
fn other_messages() -> Vec<Control> {
    let sidecar = SidecarIndex(3);
    let ranks = vec![Rank(1), Rank(5)];
    let failure = Failure::new(Cause::SidecarLost, "gone");
    let reason = "it broke the protocol".to_owned();
    let name = |name| TensorName::new(name).expect("a name");
    let (set, excused) = (SetId(4), vec![Rank(2)]);
    vec![
        Control::Left { rank: Rank(1), failure: failure.clone() },
        Control::Reject { set, name: name("grad"), failure: failure.clone(), excused },
        Control::SetRemoved { name: name("remove_process_set.0"), set },
        Control::SetForgotten { set },
        Control::AllJoined { set: SetId(2), name: name("join"), last: Rank(1) },
        Control::Suspects { sidecars: vec![sidecar], ranks: ranks.clone() },
        Control::SuspectRanks { ranks },
        Control::Unreachable { sidecar, reason: reason.clone() },
        Control::PathDown { sidecar, reason: reason.clone() },
        Control::Expel { sidecar, reason },
        Control::Silent { sidecars: vec![(sidecar, 700)] },
        Control::Welcome { sidecar, generation: 2 },
        Control::Failed { failure: failure.clone() },
        Control::Performed { failure: Some(failure) },
        Control::Commit { failure: None },
        Control::Matched { set, receive: name("receive.1.9.0"), message: name("message.0.1.9.0") },
    ]
}

#[test]
fn every_kind_of_message_is_among_the_seeds_of_decoders() {
    for (seeds, head) in [(wire_control().seeds, 0), (wire_frames().seeds, HEADER_BYTES)] {
        let payloads = seeds.iter().filter(|seed| head == 0 || seed[6] == FrameKind::Control as u8);
        let kinds: std::collections::BTreeSet<&str> = payloads
            .filter_map(|seed| decode::<Control>(FrameKind::Control, &seed[head..]).ok())
            .map(|message| message.kind())
            .collect();
        let missing: Vec<&&str> = Control::KINDS.iter().filter(|kind| !kinds.contains(**kind)).collect();
        assert!(missing.is_empty(), "no {missing:?} among the seeds");
    }
}

fn frame(kind: FrameKind, message: &impl Serialize) -> Vec<u8> {
    let frame = Frame::new(kind, Epoch(0), Seq(0), encode(message));
    [&frame.header.encode()[..], &frame.payload].concat()
}

/// The frames that docs/PROTOCOL.md shows in hexadecimal: lines that are indented by four, under a name.
pub(super) fn examples() -> Vec<Vec<u8>> {
    let document = include_str!("../../../docs/PROTOCOL.md");
    let (_, rest) = document.split_once("<!-- examples: begin").expect("the document has examples");
    let (shown, _) = rest.split_once("<!-- examples: end").expect("the examples have an end");
    let mut frames: Vec<Vec<u8>> = Vec::new();
    for line in shown.lines().skip(2) {
        if !line.starts_with(' ') {
            frames.push(Vec::new());
        } else if let (Some(hex), Some(frame)) = (line.strip_prefix("    "), frames.last_mut()) {
            frame.extend(hex.split(' ').map(|byte| u8::from_str_radix(byte, 16).expect("hexadecimal")));
        }
    }
    frames.retain(|frame| !frame.is_empty());
    assert!(frames.len() > 15, "docs/PROTOCOL.md shows only {} frames; the scan is broken", frames.len());
    frames
}
