//! The protocol between a test and a scripted worker (`ronde-test-worker`): one JSON object a line in each direction.

use std::hash::{DefaultHasher, Hasher};

use ronde_wire::{Cause, Collective, DType};
use serde::{Deserialize, Serialize};

/// A message from the test.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Ask {
    /// Submit an operation; answered by [`Answer::Submitted`], then by [`Answer::Done`] or [`Answer::Failed`].
    Submit {
        /// The test's number for it.
        id: u64,
        /// What to do.
        operation: Wanted,
    },
    /// Stop waiting for an operation.
    Abandon {
        /// The test's number for it.
        id: u64,
    },
    /// Train the model of [`crate::regression`]; answered by [`Answer::Trained`].
    Train {
        /// How many steps.
        steps: u64,
        /// Whether gradients are used without a reduction, as a broken reduction would do.
        identity: bool,
    },
    /// End the session with a shutdown, and the process.
    Close,
}

/// An operation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Wanted {
    /// Its name; `None` for a number.
    pub name: Option<String>,
    /// Its kind.
    pub collective: Collective,
    /// The type of the elements.
    pub dtype: DType,
    /// This rank's shape.
    pub shape: Vec<u64>,
    /// This rank's elements.
    pub fill: Fill,
}

/// The elements of a contribution, as a function of rank and position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fill {
    /// Whole numbers from -500 to 500 as f32, whose sums are exact in any order.
    Whole {
        /// Chooses the numbers.
        seed: u64,
    },
    /// Arbitrary f32 of many magnitudes, whose sums depend on the order.
    Rough {
        /// Chooses the numbers.
        seed: u64,
    },
    /// 1 as f32.
    Ones,
    /// [`MARKER`], repeated.
    Marker,
}

/// A message to the test.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// The epoch has begun.
    Connected {
        /// The rank.
        rank: u32,
        /// The number of ranks.
        size: u32,
    },
    /// The client could not connect; the process ends.
    NotConnected {
        /// The error text.
        text: String,
    },
    /// An operation was submitted.
    Submitted {
        /// Its number.
        id: u64,
    },
    /// An operation is complete.
    Done {
        /// Its number.
        id: u64,
        /// The result's shape.
        shape: Vec<u64>,
        /// [`digest`] of the result's bytes.
        digest: u64,
    },
    /// An operation has failed, or was not accepted.
    Failed {
        /// Its number.
        id: u64,
        /// The kind of failure, where it is one of the job.
        cause: Option<Cause>,
        /// The rank at fault.
        rank: Option<u32>,
        /// The sidecar at fault.
        sidecar: Option<u32>,
        /// The error text.
        text: String,
    },
    /// The weights after training.
    Trained {
        /// All of them.
        weights: Vec<f32>,
    },
    /// The membership of an elastic job is about to change.
    MembershipChange {
        /// The number of the next one.
        membership: u64,
        /// How many workers it adds.
        added: u32,
        /// How many workers it removes.
        removed: u32,
    },
    /// The sidecar's notice for the user.
    Notice {
        /// Its text.
        text: String,
    },
    /// Nothing can be submitted any more.
    Over {
        /// Why.
        text: String,
    },
}

impl Fill {
    /// A contribution's bytes.
    #[must_use]
    pub fn bytes(self, rank: u32, bytes: usize) -> Vec<u8> {
        match self {
            Self::Whole { seed } => floats(bytes, |index| whole(seed, rank, index)),
            Self::Rough { seed } => floats(bytes, |index| rough(seed, rank, index)),
            Self::Ones => floats(bytes, |_| 1.0),
            Self::Marker => MARKER.iter().copied().cycle().take(bytes).collect(),
        }
    }

    /// The digest of the sum over `ranks`, where it is exact: not for [`Fill::Rough`].
    #[must_use]
    pub fn digest_of_sum(self, ranks: &[u32], bytes: usize) -> u64 {
        let value = |rank: u32, index| match self {
            Self::Whole { seed } => whole(seed, rank, index),
            Self::Ones => 1.0,
            Self::Rough { .. } | Self::Marker => f32::NAN,
        };
        digest(&floats(bytes, |index| ranks.iter().map(|rank| value(*rank, index)).sum()))
    }
}

/// Distinguishes results.
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// A pseudorandom number, for each input.
#[must_use]
pub fn scatter(input: u64) -> u64 {
    // SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    let mut z = input.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn floats(bytes: usize, value: impl Fn(u64) -> f32) -> Vec<u8> {
    let mut filled = Vec::with_capacity(bytes + size_of::<f32>());
    for index in 0..bytes.div_ceil(size_of::<f32>()) as u64 {
        filled.extend_from_slice(&value(index).to_le_bytes());
    }
    filled.truncate(bytes);
    filled
}

fn whole(seed: u64, rank: u32, index: u64) -> f32 {
    let number = u16::try_from(mixed(seed, rank, index) % 1_001).unwrap_or(0);
    f32::from(number) - 500.0
}

fn rough(seed: u64, rank: u32, index: u64) -> f32 {
    let random = mixed(seed, rank, index);
    let fraction = f32::from(u16::try_from(random & 0xFFFF).unwrap_or(0)) / 65_536.0 + 0.5;
    let exponent = i32::try_from((random >> 16) % 40).unwrap_or(0) - 20;
    let sign = if random >> 63 == 0 { 1.0 } else { -1.0 };
    sign * fraction * 2.0_f32.powi(exponent)
}

fn mixed(seed: u64, rank: u32, index: u64) -> u64 {
    scatter(scatter(seed ^ (u64::from(rank) << 48)) ^ index)
}

/// A pattern that no cipher text contains, at least not 64 bytes of it.
pub const MARKER: &[u8; 64] = b"ronde-marker: if this line can be read, then it was not sealed. ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_whole_numbers_are_exact_in_any_order() {
        let fill = Fill::Whole { seed: 7 };
        assert_eq!(fill.digest_of_sum(&[0, 1, 2, 3, 4, 5], 4_000), fill.digest_of_sum(&[5, 3, 1, 0, 2, 4], 4_000));
        assert_ne!(fill.digest_of_sum(&[0, 1], 4_000), fill.digest_of_sum(&[0, 2], 4_000));
    }

    #[test]
    fn sums_of_rough_numbers_depend_on_the_order() {
        let bytes = |rank| Fill::Rough { seed: 7 }.bytes(rank, 40_000);
        let of = |rank| {
            bytes(rank).chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<_>>()
        };
        let (a, b, c) = (of(0), of(1), of(2));
        let differing = (0..a.len()).filter(|&i| (a[i] + b[i]) + c[i] != a[i] + (b[i] + c[i])).count();
        assert!(differing > a.len() / 20, "only {differing} of {} sums depend on the order", a.len());
    }
}
