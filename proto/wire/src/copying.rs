//! Copies of many bytes.

/// Bytes of a piece of a copy: below what makes the GNU C library use the processor's string instructions (2,112 bytes where
/// they count as fast).
///
/// On AMD's third generation (Zen 3) these copy 2.6 GB/s instead of 95, where the target lies 1 to 31 bytes behind the
/// source in its page. That is no rare case: what the allocator maps for itself begins 16 bytes behind a page's begin, and
/// shared memory at one.
const PIECE_BYTES: usize = 2_048;

/// Bytes of a page, as the processor compares addresses.
const PAGE_BYTES: usize = 4_096;
/// A target that lies less than this behind its source in its page is copied to in pieces; with a margin of a cache line.
const NEAR_BYTES: usize = 64;
/// From here on string instructions are worth their start: 4 % to 15 % of what a plugin's memory takes and gives on AMD's
/// fifth generation (Zen 5).
const WHOLE_BYTES_MIN: usize = 8 << 10;

/// Copies bytes: many at once as the C library likes it, but in pieces of 2 KiB where that may be slow.
///
/// # Panics
/// When the lengths differ.
#[inline]
pub fn copy(into: &mut [u8], from: &[u8]) {
    assert_eq!(into.len(), from.len(), "both sides of a copy have one length");
    let step = step(into.as_ptr().addr(), from);
    for (into, from) in into.chunks_mut(step).zip(from.chunks(step)) {
        into.copy_from_slice(from);
    }
}

/// How many bytes are best copied at once to an address: all, or 2 KiB.
#[inline]
fn step(into: usize, from: &[u8]) -> usize {
    let offset = into.wrapping_sub(from.as_ptr().addr()) % PAGE_BYTES;
    if from.len() >= WHOLE_BYTES_MIN && !(1..NEAR_BYTES).contains(&offset) { from.len() } else { PIECE_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_in_pieces_equal_the_source() {
        let from: Vec<u8> = (0..9_000_u32).map(|index| (index * 7 % 251) as u8).collect();
        let mut place = vec![0; from.len() + PAGE_BYTES];
        for length in [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, WHOLE_BYTES_MIN - 1, 9_000] {
            for offset in [0, 1, NEAR_BYTES - 1, NEAR_BYTES, PAGE_BYTES - 1] {
                let skew = from.as_ptr().addr().wrapping_add(offset).wrapping_sub(place.as_ptr().addr()) % PAGE_BYTES;
                let into = &mut place[skew..skew + length];
                into.fill(255);
                copy(into, &from[..length]);
                assert!(*into == from[..length], "{length} bytes, {offset} behind");
            }
        }
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn different_lengths_panic() {
        copy(&mut [0], &[1, 2]);
    }
}
