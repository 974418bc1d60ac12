//! [`Split`]: which part of a tensor each GPU of a host reduces and exchanges. Pure.

use std::ops::Range;

/// A tensor in equal parts, one for each GPU, and a rest, which all of them reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// The bytes of the tensor.
    bytes: usize,
    /// The bytes of a part; 0 if the tensor is all rest.
    part: usize,
    /// The number of parts.
    parts: usize,
}

impl Split {
    /// Splits a tensor among GPUs. Parts begin where NCCL's kernels are fast, so the rest has less than that for each GPU.
    pub(super) fn new(bytes: usize, parts: usize) -> Self {
        let part = bytes.checked_div(parts).unwrap_or(0) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
        Self { bytes, part, parts }
    }

    /// The part of a GPU.
    pub(super) fn part(self, number: usize) -> Range<usize> {
        number * self.part..(number + 1) * self.part
    }

    /// All parts together.
    pub(super) fn whole(self) -> Range<usize> {
        0..self.parts * self.part
    }

    /// The bytes after the parts.
    pub(super) fn rest(self) -> Range<usize> {
        self.parts * self.part..self.bytes
    }
}

/// A multiple of the size of each type, and of what NCCL's kernels load at once.
const ALIGNMENT_BYTES: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_rest_are_the_tensor() {
        for bytes in [1, 8, 255, 256, 511, 512, 513, 4_104, 16_400, 1 << 20, (1 << 20) + 8] {
            for parts in 1..=9 {
                let split = Split::new(bytes, parts);
                let of_each: Vec<_> = (0..parts).map(|number| split.part(number)).collect();
                assert_eq!(of_each[0].start, 0);
                assert!(of_each.windows(2).all(|pair| pair[0].end == pair[1].start), "{of_each:?}");
                assert_eq!(split.whole(), 0..of_each[parts - 1].end);
                assert_eq!((split.rest().start, split.rest().end), (split.whole().end, bytes));
                assert!(of_each.iter().all(|part| part.start % ALIGNMENT_BYTES == 0 && part.len() == of_each[0].len()));
                assert!(
                    split.rest().len() < parts * ALIGNMENT_BYTES + parts,
                    "{bytes} bytes in {parts} parts: {split:?}"
                );
            }
        }
    }

    #[test]
    fn a_tensor_without_gpus_is_all_rest() {
        let split = Split::new(100, 0);
        assert_eq!((split.whole(), split.rest()), (0..0, 0..100));
    }
}
