//! The canonical bytes of a plan's inputs. Two sidecars compute parts of the same schedule exactly if these bytes agree.

use ronde_wire::{SetTopology, Tuning, frame::PLANNER_VERSION};

use crate::plan::{Work, WorkKind};

/// Encodes all inputs of a plan except the member: planner version, set, members with their ranks, kind with its root or
/// size, element size, tensors and tuning. The engine hashes the bytes and puts the hash into the order.
///
/// Every number is eight bytes, little-endian, and every list is preceded by its length, so that no two different
/// inputs have the same bytes. The format is private to a planner version.
#[must_use]
pub fn digest_input(topology: &SetTopology, work: &Work, tuning: &Tuning) -> Vec<u8> {
    let mut out = Canonical::default();
    out.number(PLANNER_VERSION);
    out.number(topology.set.0);
    out.length(topology.members.len());
    for member in &topology.members {
        out.number(member.sidecar.0);
        out.length(member.ranks.len());
        member.ranks.iter().for_each(|rank| out.number(rank.0));
    }
    let (kind, parameter) = match work.kind {
        WorkKind::AllReduce => (0, 0),
        WorkKind::Broadcast { root } => (1, root.0),
        WorkKind::AllGather => (2, 0),
        WorkKind::Barrier => (3, 0),
        WorkKind::AllReduceCoded { encoded_bytes } => (4, encoded_bytes),
        WorkKind::AllReduceNAry => (5, 0),
        WorkKind::AllReduceTwoPass { measures } => (6, measures),
        WorkKind::AllReduceAdaptive => (7, 0),
        WorkKind::ReduceScatter => (8, 0),
        WorkKind::Reduce { root } => (9, root.0),
        WorkKind::Gather { root } => (10, root.0),
        WorkKind::Scatter { root } => (11, root.0),
        WorkKind::AllToAll => (12, 0),
        WorkKind::AllReduceByBlocks { block_elements, .. } => (13, block_elements),
    };
    out.number(kind);
    out.number(parameter);
    if let WorkKind::AllReduceByBlocks { encoded_bytes, .. } = work.kind {
        out.number(encoded_bytes);
    }
    out.number(work.element_bytes);
    out.length(work.tensors.len());
    for counts in &work.tensors {
        out.length(counts.len());
        counts.iter().for_each(|count| out.count(*count));
    }
    out.number(tuning.algorithm as u32);
    out.number(tuning.chunk_bytes);
    out.number(u32::from(tuning.lanes));
    out.number(u32::from(tuning.window));
    out.bytes
}

#[derive(Default)]
struct Canonical {
    bytes: Vec<u8>,
}

impl Canonical {
    fn number(&mut self, number: u32) {
        self.count(u64::from(number));
    }

    fn length(&mut self, length: usize) {
        self.count(length as u64);
    }

    fn count(&mut self, count: u64) {
        self.bytes.extend_from_slice(&count.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ronde_wire::{Algorithm, Rank, SidecarIndex, World};

    use super::*;

    fn topology(placement: &[u32]) -> SetTopology {
        let world = World::new(placement.iter().copied().map(SidecarIndex).collect()).expect("a small world");
        world.topology(ronde_wire::SetId::WORLD).expect("the set of all ranks")
    }

    #[test]
    fn every_input_changes_the_bytes() {
        let tuning = Tuning { algorithm: Algorithm::Ring, chunk_bytes: 65_536, lanes: 1, window: 2 };
        let work = Work { kind: WorkKind::AllReduce, element_bytes: 4, tensors: vec![vec![5], vec![7]] };
        let base = topology(&[0, 1]);
        let digests = [
            digest_input(&base, &work, &tuning),
            digest_input(&topology(&[0, 2]), &work, &tuning),
            digest_input(&topology(&[1, 0]), &work, &tuning),
            digest_input(&topology(&[0, 1, 1]), &work, &tuning),
            digest_input(&base, &Work { element_bytes: 8, ..work.clone() }, &tuning),
            digest_input(&base, &Work { tensors: vec![vec![5, 7]], ..work.clone() }, &tuning),
            digest_input(&base, &Work { tensors: vec![vec![7], vec![5]], ..work.clone() }, &tuning),
            digest_input(&base, &Work { kind: WorkKind::Broadcast { root: Rank(0) }, ..work.clone() }, &tuning),
            digest_input(&base, &Work { kind: WorkKind::Broadcast { root: Rank(1) }, ..work.clone() }, &tuning),
            digest_input(&base, &work, &Tuning { algorithm: Algorithm::RecursiveDoubling, ..tuning }),
            digest_input(&base, &work, &Tuning { chunk_bytes: 4_096, ..tuning }),
            digest_input(&base, &work, &Tuning { lanes: 2, ..tuning }),
            digest_input(&base, &work, &Tuning { window: 1, ..tuning }),
        ];
        let distinct: BTreeSet<&Vec<u8>> = digests.iter().collect();
        assert_eq!(distinct.len(), digests.len());
    }

    #[test]
    fn numbers_of_algorithms_never_change() {
        use Algorithm as A;
        let numbered = [
            A::Local,
            A::Ring,
            A::RecursiveDoubling,
            A::BinomialTree,
            A::Dissemination,
            A::HalvingDoubling,
            A::Pairwise,
            A::Linear,
            A::Direct,
            A::Eager,
        ];
        assert!((0..).zip(numbered).all(|(number, algorithm)| algorithm as u32 == number));
    }
}
