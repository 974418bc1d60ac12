//! Arbitrary frames of an authenticated peer, received by a whole engine and the executor of a lane.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use ronde_engine::{
    Admission, Contributions, Executor, ExecutorAction, ExecutorConfig, InputPlace, Memory, MemoryError, OutputPlace,
    Plugins,
};
use ronde_fuzz::{Outcome, Target};
use ronde_wire::control::decode;
use ronde_wire::frame::{Chunk, ChunkHeader, HEADER_BYTES, MAGIC};
use ronde_wire::{Control, Epoch, Frame, FrameHeader, FrameKind, Lane, Seq, SidecarIndex};

use crate::pair::{Pair, frames_to};
use crate::wire::every_message;

/// Steps of an executor for one small operation.
const STEPS_MAX: usize = 10_000;

/// Control messages after the beginning of an epoch: those of a member to the coordinator, or the other direction. The
/// first byte of an input selects the direction; the rest is frames.
pub(crate) fn engines_control() -> Target {
    let honest = Pair::honest(perform);
    let mut seeds: Vec<Vec<u8>> = vec![seed(0, &honest), seed(1, &honest)];
    let sent: BTreeSet<&str> = honest.iter().map(|(.., message)| message.kind()).collect();
    // What these two never send each other.
    for message in every_message().into_iter().filter(|message| !sent.contains(message.kind())) {
        let alone = |to| vec![(to, Epoch(1), Seq(1), message.clone())];
        seeds.extend([seed(0, &alone(0)), seed(1, &alone(1))]);
    }
    Target::new("engines_control", seeds, |bytes| {
        let Some((to, frames)) = bytes.split_first() else { return Outcome::refused(&"nothing") };
        let mut pair = Pair::started(perform);
        let to = usize::from(*to) % 2;
        let mut outcome = Outcome::read(&"nothing else");
        for frame in controls(frames) {
            match decode::<Control>(FrameKind::Control, &frame.payload) {
                Ok(message) => {
                    let FrameHeader { epoch, seq, .. } = frame.header;
                    pair.deliver(to, epoch, seq, message);
                }
                Err(error) => outcome = Outcome::refused(&error),
            }
        }
        // An engine that receives a malformed message ends the link or the epoch; its actions are part of the outcome.
        if outcome.is_read() { Outcome::read(&pair.seen(to)) } else { outcome }
    })
}

#[test]
fn fuzz_engines_control() {
    engines_control().run();
}

#[test]
fn every_kind_of_message_is_among_the_seeds_of_engines() {
    let seeds = engines_control().seeds;
    let messages = seeds.iter().flat_map(|seed| controls(&seed[1..]).collect::<Vec<_>>());
    let kinds: BTreeSet<&str> =
        messages.map(|frame| decode::<Control>(FrameKind::Control, &frame.payload).expect("a seed").kind()).collect();
    let missing: Vec<&&str> = Control::KINDS.iter().filter(|kind| !kinds.contains(**kind)).collect();
    assert!(missing.is_empty(), "no {missing:?} among the seeds");
}

fn seed(to: u8, messages: &[(usize, Epoch, Seq, Control)]) -> Vec<u8> {
    [&[to], &frames_to(usize::from(to), messages)[..]].concat()
}

/// Unexpected chunks, as whole frames: the executor buffers no more than was granted.
pub(crate) fn engines_chunks() -> Target {
    const GRANT: u64 = 9_000;
    let header = |sub_schedule, start| ChunkHeader { lane: Lane(0), sub_schedule, round: 0, start, len: 1_000 };
    let chunk = |seq, early, sub_schedule| {
        let data = Bytes::from(vec![7; 4_000]);
        let chunk = Chunk { epoch: Epoch(1), seq: Seq(seq), early, header: header(sub_schedule, 1_000), data };
        [&chunk.encode_head()[..], &chunk.data].concat()
    };
    let seeds = vec![chunk(1, true, 0), [chunk(1, true, 0), chunk(2, true, 3)].concat()];
    Target::new("engines_chunks", seeds, |bytes| {
        let config = ExecutorConfig { me: SidecarIndex(0), lane: Lane(0), early_grant_bytes: GRANT };
        let mut executor = Executor::new(config);
        executor.handle_epoch(Epoch(1));
        executor.handle_link_up(SidecarIndex(1), GRANT);
        for frame in frames(bytes).filter(|frame| frame.header.kind == FrameKind::Chunk) {
            let handled = match Chunk::from_frame(frame) {
                Ok(chunk) => executor.handle_chunk(SidecarIndex(1), chunk),
                Err(error) => return Outcome::refused(&error),
            };
            let held = executor.private_bytes();
            assert!(held.early <= GRANT, "{held:?} is more than was granted");
            if let Err(violation) = handled {
                return Outcome::refused(&violation);
            }
        }
        Outcome::read(&executor.private_bytes())
    })
}

#[test]
fn fuzz_engines_chunks() {
    engines_chunks().run();
}

/// Performs an operation that arrived with all its inputs: it may read these bytes only.
fn perform(me: SidecarIndex, admission: &Arc<Admission>) {
    let mut executor = Executor::new(ExecutorConfig { me, lane: Lane(0), early_grant_bytes: 0 });
    executor.handle_epoch(admission.epoch);
    executor.handle_admission(admission.clone());
    let mut memory = EagerInputs { admission };
    for _ in 0..STEPS_MAX {
        match executor.poll_action(&mut memory) {
            Some(ExecutorAction::Done { .. }) => return,
            Some(ExecutorAction::Worked { .. } | ExecutorAction::Admitted { .. }) => {}
            other => panic!("an eager operation wants {other:?}"),
        }
    }
    panic!("an eager operation is not done after {STEPS_MAX} steps");
}

/// The contributions of an eager operation.
struct EagerInputs<'a> {
    admission: &'a Admission,
}

impl Contributions for EagerInputs<'_> {
    fn read(&mut self, place: InputPlace, into: &mut [u8]) -> Result<(), MemoryError> {
        let tensor = &self.admission.contributions[place.tensor as usize];
        let at = self.admission.local_ranks.iter().position(|rank| *rank == place.rank).expect("a rank of it");
        let start = usize::try_from(place.offset).expect("small");
        into.copy_from_slice(&tensor[at][start..start + into.len()]);
        Ok(())
    }
}

impl Memory for EagerInputs<'_> {
    fn parts(&mut self) -> (&mut dyn Contributions, Option<&mut dyn Plugins>) {
        (self, None)
    }

    fn write(&mut self, place: OutputPlace, from: &[u8]) -> Result<(), MemoryError> {
        let tensor = &self.admission.tensors[place.tensor as usize];
        let of = |request: &&ronde_engine::AdmittedRequest| place.rank.is_none_or(|rank| rank == request.rank);
        let element_bytes = self.admission.arithmetic.dtype.size_bytes() as u64;
        let room = tensor.requests.iter().find(of).map_or(0, |request| request.output.elements() * element_bytes);
        assert!(place.offset + from.len() as u64 <= room, "{} bytes at {place:?} of {room}", from.len());
        Ok(())
    }
}

/// Splits at each magic number, and makes each part a frame of its length: a mutated payload leaves the others intact.
fn controls(bytes: &[u8]) -> impl Iterator<Item = Frame> {
    let starts: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at..].starts_with(&MAGIC)).collect();
    let ends = starts.clone().into_iter().skip(1).chain([bytes.len()]);
    starts.into_iter().zip(ends).filter_map(|(start, end)| {
        let (header, payload) = bytes[start..end].split_first_chunk::<HEADER_BYTES>()?;
        let mut header = *header;
        header[8..12].copy_from_slice(&u32::try_from(payload.len()).ok()?.to_le_bytes());
        let header = FrameHeader::decode(&header).ok().filter(|header| header.kind == FrameKind::Control)?;
        Some(Frame { header, payload: Bytes::copy_from_slice(payload) })
    })
}

/// The whole frames at the beginning of a stream.
fn frames(mut bytes: &[u8]) -> impl Iterator<Item = Frame> {
    std::iter::from_fn(move || {
        let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let header = FrameHeader::decode(header).ok()?;
        let (payload, rest) = rest.split_at_checked(header.length as usize)?;
        bytes = rest;
        Some(Frame { header, payload: Bytes::copy_from_slice(payload) })
    })
}
