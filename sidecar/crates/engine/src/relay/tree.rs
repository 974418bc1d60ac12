//! The shape of the tree of control links.

use ronde_wire::{SidecarIndex, SidecarSet};

/// The tree from the position of one sidecar. The coordinator has position 0, the others follow by ascending index;
/// below the sidecar at position `p` are those at `p * fan_out + 1` to `p * fan_out + fan_out`.
#[derive(Debug)]
pub(crate) struct Tree {
    fan_out: usize,
    /// By position.
    order: Vec<SidecarIndex>,
    parent: Option<SidecarIndex>,
    /// From the parent to the coordinator.
    ancestors: Vec<SidecarIndex>,
    branches: Vec<Branch>,
    /// All sidecars below.
    below: SidecarSet,
}

/// A child with the sidecars below it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Branch {
    pub(crate) child: SidecarIndex,
    /// The child and all sidecars below it.
    pub(crate) all: SidecarSet,
    /// Whether there are sidecars below it.
    pub(crate) relays: bool,
}

impl Tree {
    /// The tree of sidecars in ascending order, one of which is the coordinator.
    pub(crate) fn new(sidecars: &[SidecarIndex], coordinator: SidecarIndex, me: SidecarIndex, fan_out: usize) -> Self {
        let others = sidecars.iter().copied().filter(|sidecar| *sidecar != coordinator);
        let order: Vec<SidecarIndex> = std::iter::once(coordinator).chain(others).collect();
        let mut tree = Self {
            fan_out: fan_out.max(1),
            order,
            parent: None,
            ancestors: Vec::new(),
            branches: Vec::new(),
            below: SidecarSet::EMPTY,
        };
        let Some(position) = tree.position(me) else { return tree };
        tree.ancestors = tree.above(position).map(|at| tree.order[at]).collect();
        tree.parent = tree.ancestors.first().copied();
        for at in tree.children(position) {
            let child = tree.order[at];
            let all = tree.subtree(child);
            tree.branches.push(Branch { child, all, relays: tree.children(at).next().is_some() });
        }
        tree.below = tree.branches.iter().flat_map(|branch| branch.all.iter().collect::<Vec<_>>()).collect();
        tree
    }

    /// The coordinator; `None` in a world without sidecars.
    pub(crate) fn root(&self) -> Option<SidecarIndex> {
        self.order.first().copied()
    }

    /// `None` at the coordinator.
    pub(crate) fn parent(&self) -> Option<SidecarIndex> {
        self.parent
    }

    pub(crate) fn parent_of(&self, sidecar: SidecarIndex) -> Option<SidecarIndex> {
        self.above(self.position(sidecar)?).next().map(|at| self.order[at])
    }

    pub(crate) fn is_above(&self, sidecar: SidecarIndex) -> bool {
        self.ancestors.contains(&sidecar)
    }

    pub(crate) fn branches(&self) -> &[Branch] {
        &self.branches
    }

    /// The branch of a child.
    pub(crate) fn branch(&self, child: SidecarIndex) -> Option<&Branch> {
        self.branches.iter().find(|branch| branch.child == child)
    }

    /// All sidecars below this one.
    pub(crate) fn below(&self) -> &SidecarSet {
        &self.below
    }

    /// A sidecar and all below it.
    pub(crate) fn subtree(&self, top: SidecarIndex) -> SidecarSet {
        let Some(top) = self.position(top) else { return SidecarSet::EMPTY };
        let under = |at: &usize| *at == top || self.above(*at).any(|above| above == top);
        (0..self.order.len()).filter(under).map(|at| self.order[at]).collect()
    }

    fn children(&self, position: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, count) = (position * self.fan_out + 1, self.order.len());
        (first..first + self.fan_out).take_while(move |at| *at < count)
    }

    fn above(&self, position: usize) -> impl Iterator<Item = usize> + use<> {
        let fan_out = self.fan_out;
        let parent = move |at: usize| (at > 0).then(|| (at - 1) / fan_out);
        std::iter::successors(parent(position), move |at| parent(*at))
    }

    fn position(&self, sidecar: SidecarIndex) -> Option<usize> {
        let coordinator = *self.order.first()?;
        if sidecar == coordinator {
            return Some(0);
        }
        self.order[1..].binary_search(&sidecar).ok().map(|at| at + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ronde_wire::limits::{CONTROL_FAN_OUT, SIDECARS_MAX};

    fn tree(count: u32, coordinator: u32, me: u32, fan_out: usize) -> Tree {
        let sidecars: Vec<SidecarIndex> = (0..count).map(SidecarIndex).collect();
        Tree::new(&sidecars, SidecarIndex(coordinator), SidecarIndex(me), fan_out)
    }

    fn children(tree: &Tree) -> Vec<u32> {
        tree.branches().iter().map(|branch| branch.child.0).collect()
    }

    #[test]
    fn few_sidecars_are_a_star() {
        for me in 0..9 {
            let tree = tree(9, 4, me, CONTROL_FAN_OUT);
            let centre = me == 4;
            assert_eq!(tree.parent(), (!centre).then_some(SidecarIndex(4)));
            assert_eq!(children(&tree), if centre { vec![0, 1, 2, 3, 5, 6, 7, 8] } else { vec![] });
            assert!(tree.branches().iter().all(|branch| !branch.relays));
        }
    }

    #[test]
    fn a_tree_of_two_has_levels() {
        // 3 over 0 and 1; 0 over 2 and 4; 1 over 5 and 6.
        let root = tree(7, 3, 3, 2);
        assert_eq!(children(&root), [0, 1]);
        assert_eq!(root.branches()[0].all, [0, 2, 4].map(SidecarIndex).into_iter().collect());
        assert_eq!(root.below().iter().count(), 6);
        let leaf = tree(7, 3, 6, 2);
        assert_eq!((leaf.parent(), leaf.is_above(SidecarIndex(3))), (Some(SidecarIndex(1)), true));
        assert!(!leaf.is_above(SidecarIndex(0)) && leaf.branches().is_empty());
        assert_eq!(leaf.parent_of(SidecarIndex(4)), Some(SidecarIndex(0)));
        assert_eq!((leaf.parent_of(SidecarIndex(3)), leaf.parent_of(SidecarIndex(9))), (None, None));
    }

    #[test]
    fn every_sidecar_has_one_parent_and_few_ancestors() {
        let count = u32::try_from(SIDECARS_MAX).expect("fits");
        let trees: Vec<Tree> = (0..count).map(|me| tree(count, 17, me, CONTROL_FAN_OUT)).collect();
        let mut parents = 0;
        for (me, tree) in (0..count).map(SidecarIndex).zip(&trees) {
            assert!(tree.branches().len() <= CONTROL_FAN_OUT && tree.ancestors.len() <= 4);
            for branch in tree.branches() {
                parents += 1;
                assert_eq!(trees[branch.child.index()].parent(), Some(me));
                assert!(branch.all.is_within(tree.below()));
            }
        }
        assert_eq!(parents, count - 1);
    }
}
