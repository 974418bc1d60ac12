//! Fuzz target for a ring whose peer writes arbitrary bytes.

use std::sync::atomic::Ordering;

use ronde_fuzz::{Outcome, fuzz};

use super::tests::{CAPACITY, Pair, pair};
use super::{Pushed, RingError, Wait};

/// Runs the sidecar's end while the input acts as the worker: each step is a byte that selects the action and eight
/// bytes with a number. The sidecar must read within the ring only, and its own positions must never decrease.
#[test]
fn fuzz_ring() {
    // Two messages that are read; waiting for room; an impossible position and length.
    let seeds = [&[(0, 40), (0, 500), (4, 0), (4, 0), (6, 1)][..], &[(5, 900), (5, 1_500), (5, 8), (7, 8), (1, 0)]];
    let seeds = seeds.map(|steps| steps.iter().flat_map(|step| written(*step)).collect::<Vec<u8>>());
    fuzz("ring", seeds.to_vec(), |bytes| {
        let mut pair = pair();
        let mut outcome: Result<usize, RingError> = Ok(0);
        for step in bytes.chunks_exact(STEP_BYTES).take(STEPS_MAX) {
            let number = u64::from_le_bytes(step[1..].try_into().expect("eight"));
            outcome = outcome.and_then(|read| Ok(read + perform(&mut pair, step[0] % 10, number)?));
        }
        outcome.as_ref().map_or_else(Outcome::refused, |read| Outcome::read(&"x".repeat((*read).min(9))))
    });
}

/// Performs one step and returns how many messages the sidecar has read or written.
fn perform(pair: &mut Pair, kind: u8, number: u64) -> Result<usize, RingError> {
    let Pair { worker, sidecar, to_sidecar, to_worker } = pair;
    let mut message = Vec::new();
    match kind {
        // The worker follows the protocol, as far as its earlier writes allow.
        0 => _ = worker.producer.push(&vec![7; usize::try_from(number % 3_000).expect("small")]),
        1 => _ = worker.consumer.pop(&mut message),
        2 => to_sidecar.produced().store(number, Ordering::SeqCst),
        // A length where the sidecar reads next, or bytes anywhere.
        3 => to_sidecar.write(number & !7, &number.to_le_bytes()[..4]),
        4 => {
            let got = sidecar.consumer.pop(&mut message)?;
            assert!(message.len() as u64 <= CAPACITY / 2, "{} bytes", message.len());
            return Ok(usize::from(got));
        }
        5 => {
            let bytes = vec![9; usize::try_from(number % (CAPACITY / 2)).expect("small")];
            return Ok(usize::from(sidecar.producer.push(&bytes)? == Pushed::Done));
        }
        6 => _ = sidecar.consumer.arm(if number.is_multiple_of(2) { Wait::Bell } else { Wait::Futex })?,
        7 => to_worker.consumed().store(number, Ordering::SeqCst),
        8 => _ = sidecar.producer.want_room(number % CAPACITY)?,
        _ => {
            // The low bits are the value of a word, the next bit selects the word.
            #[allow(clippy::cast_possible_truncation, reason = "the low half")]
            let word = number as u32;
            let words = [to_worker.sleeps(), to_sidecar.wants_room()];
            words[usize::from((number >> 32) & 1 == 1)].store(word, Ordering::SeqCst);
            sidecar.producer.wake();
        }
    }
    Ok(0)
}

fn written((kind, number): (u8, u64)) -> Vec<u8> {
    [&[kind], &number.to_le_bytes()[..]].concat()
}

const STEP_BYTES: usize = 9;
const STEPS_MAX: usize = 64;
