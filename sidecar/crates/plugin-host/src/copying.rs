//! Copies of what a call sees: a few KiB each, into the first-level cache and out of it again.

use std::hint::black_box;

use ronde_wire::copying;

/// Copies bytes; short ones by vectors, in order, and without another call.
///
/// The C library's copy begins with the last bytes, which no prefetcher expects, and takes up string instructions from 2 KiB
/// on. For the three copies around a sum that fits the first-level cache it takes a third longer, and a seventh in pieces that
/// are too short for those (AMD EPYC, Zen 3).
///
/// # Panics
/// When the lengths differ.
pub(crate) fn copy(into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "both sides of a copy have one length");
    if into.len() > NEAR_BYTES_MAX {
        return copying::copy(into, from);
    }
    // The compiler does not know that this changes nothing; it would make a call of the C library's copy of the loop.
    let all = black_box(u8::MAX);
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (into, from) in into.iter_mut().zip(from) {
                *into = *from & all;
            }
        },
    );
}

/// Longer copies are the C library's.
const NEAR_BYTES_MAX: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_whole() {
        let from: Vec<u8> = (0..=250).cycle().take(NEAR_BYTES_MAX + 300).collect();
        for length in [0, 1, 31, 32, 33, 4_000, NEAR_BYTES_MAX, NEAR_BYTES_MAX + 200] {
            for (begin, place) in [(0, 0), (1, 0), (0, 3), (99, 77)] {
                let mut into = vec![255; from.len()];
                copy(&mut into[place..place + length], &from[begin..begin + length]);
                assert!(into[place..place + length] == from[begin..begin + length], "{length} bytes");
                let rest = into[..place].iter().chain(&into[place + length..]);
                assert!(rest.copied().all(|byte| byte == 255), "{length} bytes");
            }
        }
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn lengths_are_equal() {
        copy(&mut [0], &[1, 2]);
    }
}
