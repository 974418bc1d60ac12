//! Sets of sidecars, as wide as a job may have sidecars.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::SidecarIndex;
use crate::limits::SIDECARS_MAX;

/// A set of sidecars. It is encoded as bytes: sidecar `i` is bit `i % 8` of byte `i / 8`, without trailing zeros.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub struct SidecarSet([u64; WORDS]);

impl SidecarSet {
    /// The empty set.
    pub const EMPTY: Self = Self([0; WORDS]);

    /// Adds a sidecar. An index beyond [`SIDECARS_MAX`], which no world has, is ignored.
    pub fn insert(&mut self, sidecar: SidecarIndex) {
        if let Some(word) = self.0.get_mut(sidecar.index() / 64) {
            *word |= 1 << (sidecar.index() % 64);
        }
    }

    /// Whether the set contains a sidecar.
    #[must_use]
    pub fn contains(&self, sidecar: SidecarIndex) -> bool {
        self.0.get(sidecar.index() / 64).is_some_and(|word| word & (1 << (sidecar.index() % 64)) != 0)
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Whether this set is a subset of the other.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        self.without(other).is_empty()
    }

    /// The intersection.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & b)
    }

    /// The difference: the sidecars that are not in the other set.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a & !b)
    }

    /// The sidecars, ascending.
    pub fn iter(&self) -> impl Iterator<Item = SidecarIndex> + '_ {
        (0..).take(SIDECARS_MAX).map(SidecarIndex).filter(|sidecar| self.contains(*sidecar))
    }

    fn zip(&self, other: &Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self(std::array::from_fn(|at| with(self.0[at], other.0[at])))
    }
}

impl fmt::Debug for SidecarSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Vec::from(*self).fmt(f)
    }
}

impl FromIterator<SidecarIndex> for SidecarSet {
    fn from_iter<T: IntoIterator<Item = SidecarIndex>>(sidecars: T) -> Self {
        let mut set = Self::EMPTY;
        sidecars.into_iter().for_each(|sidecar| set.insert(sidecar));
        set
    }
}

impl From<SidecarSet> for Vec<u8> {
    fn from(set: SidecarSet) -> Self {
        let mut bytes: Self = set.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        bytes.truncate(used);
        bytes
    }
}

impl TryFrom<Vec<u8>> for SidecarSet {
    type Error = TooManySidecars;
    fn try_from(bytes: Vec<u8>) -> Result<Self, TooManySidecars> {
        if bytes.len() > WORDS * 8 {
            return Err(TooManySidecars { bytes: bytes.len() });
        }
        let mut words = [0; WORDS];
        for (at, byte) in bytes.into_iter().enumerate() {
            words[at / 8] |= u64::from(byte) << (at % 8 * 8);
        }
        Ok(Self(words))
    }
}

/// A set that is wider than a job may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a set of sidecars has at most {max} bytes, not {bytes}", max = WORDS * 8)]
pub struct TooManySidecars {
    /// The length of the encoded set, in bytes.
    pub bytes: usize,
}

const WORDS: usize = SIDECARS_MAX.div_ceil(64);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(sidecars: &[u32]) -> SidecarSet {
        sidecars.iter().copied().map(SidecarIndex).collect()
    }

    proptest! {
        #[test]
        fn a_set_survives_the_wire(sidecars: Vec<u16>) {
            let sidecars: Vec<u32> = sidecars.into_iter().map(|s| u32::from(s) % 1_024).collect();
            let set = of(&sidecars);
            prop_assert!(sidecars.iter().all(|s| set.contains(SidecarIndex(*s))));
            prop_assert_eq!(SidecarSet::try_from(Vec::<u8>::from(set)), Ok(set));
            let mut sorted = sidecars;
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(set.iter().map(|s| s.0).collect::<Vec<_>>(), sorted);
        }
    }

    #[test]
    fn sets_are_compared() {
        let (a, b) = (of(&[0, 63, 64, 1_023]), of(&[63, 64]));
        assert!(b.is_within(&a) && !a.is_within(&b));
        assert_eq!((a.and(&b), a.without(&b)), (b, of(&[0, 1_023])));
        assert!(SidecarSet::EMPTY.is_empty() && !b.is_empty());
        assert_eq!(Vec::<u8>::from(of(&[9])), [0, 2]);
    }

    #[test]
    fn sidecars_beyond_the_limit_are_ignored() {
        assert!(of(&[1_024, u32::MAX]).is_empty());
        assert!(!of(&[0]).contains(SidecarIndex(u32::MAX)));
        assert_eq!(SidecarSet::try_from(vec![1; 129]), Err(TooManySidecars { bytes: 129 }));
    }
}
