//! Loops over elements that the compiler vectorises, with several vectors per iteration.

/// Elements of one iteration: eight vectors of f32. The host checks its deadline, and the loop its end, once per
/// iteration.
const ROUND: usize = 32;

/// Calls `each` for each pair of elements in order, up to the end of the shorter slice.
#[inline(always)]
pub fn zip<A, B: Copy>(into: &mut [A], from: &[B], each: impl Fn(&mut A, B)) {
    let count = into.len().min(from.len());
    let (into_rounds, into_rest) = into[..count].as_chunks_mut::<ROUND>();
    let (from_rounds, from_rest) = from[..count].as_chunks::<ROUND>();
    for (into, from) in into_rounds.iter_mut().zip(from_rounds) {
        // A constant trip count, which the compiler unrolls.
        for index in 0..ROUND {
            each(&mut into[index], from[index]);
        }
    }
    into_rest.iter_mut().zip(from_rest).for_each(|(into, from)| each(into, *from));
}

/// The largest `key` of all elements; 0 if there are none.
#[inline(always)]
pub fn greatest<E: Copy>(values: &[E], key: impl Fn(E) -> u32) -> u32 {
    let (rounds, rest) = values.as_chunks::<ROUND>();
    let mut lanes = [0; ROUND];
    for round in rounds {
        for index in 0..ROUND {
            lanes[index] = lanes[index].max(key(round[index]));
        }
    }
    let rest = rest.iter().map(|value| key(*value));
    lanes.into_iter().chain(rest).fold(0, u32::max)
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::{greatest, zip};

    #[test]
    fn every_element_comes_once() {
        for count in [0, 1, 31, 32, 33, 100] {
            let from: Vec<u32> = (0..count).collect();
            let mut into: Vec<u32> = (0..count + 3).map(|index| 2 * index).collect();
            zip(&mut into, &from, |into, from| *into += from);
            assert!(into.iter().zip(0..count).all(|(value, index)| *value == 3 * index), "{count}");
            assert!(into.iter().zip(0..).skip(from.len()).all(|(value, index)| *value == 2 * index), "{count}");
            assert_eq!(greatest(&from, |value| value + 1), count);
        }
    }
}
