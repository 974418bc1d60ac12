//! Arbitrary frames of an authenticated peer, received by a whole engine and the executor of a lane.

use bytes::Bytes;
use ronde_engine::{
    Action, Admission, Contributions, Engine, EngineConfig, Event, Executor, ExecutorAction, ExecutorConfig,
    InputPlace, Memory, MemoryError, OutputPlace, Plugins, Time,
};
use ronde_fuzz::{Outcome, fuzz};
use ronde_wire::control::{decode, encode};
use ronde_wire::frame::{Chunk, ChunkHeader, HEADER_BYTES, MAGIC};
use ronde_wire::{
    Collective, Control, DType, Epoch, Frame, FrameHeader, FrameKind, Lane, Rank, ReduceOp, Request, RequestId, Seq,
    SetId, Shape, SidecarIndex, TensorName, World, limits,
};

const NOW: Time = Time(1_000_000);
/// Actions that one engine may want after so few messages.
const ACTIONS_MAX: usize = 10_000;

/// Control messages after the beginning of an epoch: those of a member to the coordinator, or the other direction. The
/// first byte of an input selects the direction; the rest is frames.
#[test]
fn fuzz_engines_control() {
    let seeds: Vec<Vec<u8>> = (0..2).map(|to| [&[to], &Pair::honest().sent_to(usize::from(to))[..]].concat()).collect();
    assert!(seeds.iter().all(|seed| seed.len() > 100), "the engines send little");
    fuzz("engines_control", seeds, |bytes| {
        let Some((to, frames)) = bytes.split_first() else { return Outcome::refused(&"nothing") };
        let mut pair = Pair::started();
        pair.submit();
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
    });
}

/// Unexpected chunks, as whole frames: the executor buffers no more than was granted.
#[test]
fn fuzz_engines_chunks() {
    const GRANT: u64 = 9_000;
    let header = |sub_schedule, start| ChunkHeader { lane: Lane(0), sub_schedule, round: 0, start, len: 1_000 };
    let chunk = |seq, early, sub_schedule| {
        let data = Bytes::from(vec![7; 4_000]);
        let chunk = Chunk { epoch: Epoch(1), seq: Seq(seq), early, header: header(sub_schedule, 1_000), data };
        [&chunk.encode_head()[..], &chunk.data].concat()
    };
    let seeds = vec![chunk(1, true, 0), [chunk(1, true, 0), chunk(2, true, 3)].concat()];
    fuzz("engines_chunks", seeds, |bytes| {
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
    });
}

/// Two engines, of which sidecar 0 has rank 0 and thus the coordinator, and sidecar 1 has rank 1.
struct Pair {
    engines: [Engine; 2],
    sent: Vec<(usize, Epoch, Seq, Control)>,
    answered: Vec<(Rank, RequestId, bool)>,
    admitted: usize,
    ended: Vec<String>,
}

impl Pair {
    /// In the middle of an epoch.
    fn started() -> Self {
        let world = World::new(vec![SidecarIndex(0), SidecarIndex(1)]).expect("a world");
        let engine = |me| Engine::new(EngineConfig::new(SidecarIndex(me), world.clone()), NOW);
        let engines = [engine(0), engine(1)];
        let (sent, answered, ended) = (Vec::new(), Vec::new(), Vec::new());
        let mut pair = Self { engines, sent, answered, admitted: 0, ended };
        for (me, peer) in [(0, 1), (1, 0)] {
            pair.event(me, Event::LinkUp { peer: SidecarIndex(peer), lanes: 1 });
        }
        for (me, rank) in [(0, 0), (1, 1)] {
            pair.event(me, Event::RankAttached { rank: Rank(rank) });
        }
        pair.deliver_all();
        pair
    }

    /// Runs an epoch in which both ranks submit the same and complete it; with all messages.
    fn honest() -> Self {
        let mut pair = Self::started();
        pair.sent.clear();
        pair.submit();
        let from = pair.deliver_all();
        assert!(pair.answered.iter().filter(|(_, _, good)| *good).count() >= 4, "{:?}", pair.answered);
        pair.sent = from;
        pair
    }

    /// Small tensors, which travel with their announcements, and one that does not.
    fn submit(&mut self) {
        for (me, rank) in [(0, Rank(0)), (1, Rank(1))] {
            for (number, elements) in [(1, 3_u64), (2, 16), (3, 100_000)] {
                let name = TensorName::new(format!("grad.{number}")).expect("a name");
                let shape = Shape::new(vec![elements]).expect("a shape");
                let sum = Collective::AllReduce { op: ReduceOp::Sum };
                let what = Request::new(SetId::WORLD, name, sum, DType::F32, shape);
                let contribution = vec![1; self.engines[me].contribution_bytes(rank, &what)].into();
                self.event(me, Event::Submitted { rank, request: RequestId(number), what, contribution });
            }
        }
    }

    fn deliver(&mut self, to: usize, epoch: Epoch, seq: Seq, message: Control) {
        let from = SidecarIndex(if to == 0 { 1 } else { 0 });
        self.event(to, Event::Control { from, epoch, seq, message });
    }

    /// Delivers messages until none is left; returns all of them.
    fn deliver_all(&mut self) -> Vec<(usize, Epoch, Seq, Control)> {
        let mut all = Vec::new();
        for _ in 0..100 {
            let sent = std::mem::take(&mut self.sent);
            if sent.is_empty() {
                return all;
            }
            for (to, epoch, seq, message) in sent {
                all.push((to, epoch, seq, message.clone()));
                self.deliver(to, epoch, seq, message);
            }
        }
        panic!("the engines do not stop sending");
    }

    /// Returns the messages to one of them, as frames.
    fn sent_to(&self, to: usize) -> Vec<u8> {
        let of = |(_, epoch, seq, message): &(usize, Epoch, Seq, Control)| {
            let frame = Frame::new(FrameKind::Control, *epoch, *seq, encode(message));
            [&frame.header.encode()[..], &frame.payload].concat()
        };
        self.sent.iter().filter(|sent| sent.0 == to).flat_map(of).collect()
    }

    fn event(&mut self, me: usize, event: Event) {
        self.engines[me].handle_event(NOW, event);
        for _ in 0..ACTIONS_MAX {
            let Some(action) = self.engines[me].poll_action() else { return };
            self.perform(me, action);
        }
        panic!("an engine wants more than {ACTIONS_MAX} actions");
    }

    fn perform(&mut self, me: usize, action: Action) {
        match action {
            Action::Send { to, epoch, seq, message } => {
                assert!(encode(&message).len() <= limits::CONTROL_FRAME_BYTES_MAX, "a message that fits no frame");
                self.sent.push((to.index(), epoch, seq, message));
            }
            Action::Admit(admission) => {
                self.admitted += 1;
                let (epoch, seq) = (admission.epoch, admission.seq);
                if admission.is_eager() {
                    performed(me, &admission);
                }
                self.engines[me].handle_event(NOW, Event::Executed { epoch, seq });
            }
            Action::Cancel { epoch, last, .. } => {
                self.engines[me].handle_event(NOW, Event::Cancelled { epoch, last });
            }
            Action::Complete { rank, request, outcome } => {
                assert_eq!(rank.0 as usize, me, "an answer to a rank that is not here");
                let twice = self.answered.iter().any(|(r, q, _)| (*r, *q) == (rank, request));
                assert!(!twice, "{request} of {rank} is answered twice");
                self.answered.push((rank, request, outcome.is_ok()));
            }
            Action::EpochEnded { failure, .. } => self.ended.push(failure.reason),
            Action::Disconnect { reason, .. } => self.ended.push(reason),
            Action::EpochBegan { .. } | Action::Commit { .. } | Action::Notice { .. } => {}
            Action::SetForgotten { .. } | Action::EndSession { .. } => {}
        }
    }

    /// The outcome of an input.
    fn seen(&self, at: usize) -> impl std::fmt::Debug + use<> {
        let good = self.answered.iter().filter(|(_, _, good)| *good).count();
        let status = self.engines[at].status(NOW);
        let kind = |count: usize| "x".repeat(count.min(5));
        (kind(self.admitted), kind(good), self.ended.clone(), format!("{:?}", status.phase))
    }
}

/// Performs an operation that arrived with all its inputs: it may read these bytes only.
fn performed(me: usize, admission: &std::sync::Arc<Admission>) {
    let me = SidecarIndex(u32::try_from(me).expect("two"));
    let mut executor = Executor::new(ExecutorConfig { me, lane: Lane(0), early_grant_bytes: 0 });
    executor.handle_epoch(admission.epoch);
    executor.handle_admission(admission.clone());
    let mut memory = EagerInputs { admission };
    for _ in 0..ACTIONS_MAX {
        match executor.poll_action(&mut memory) {
            Some(ExecutorAction::Done { .. }) => return,
            Some(ExecutorAction::Worked { .. } | ExecutorAction::Admitted { .. }) => {}
            other => panic!("an eager operation wants {other:?}"),
        }
    }
    panic!("an eager operation is not done after {ACTIONS_MAX} steps");
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
