//! Symbolic values: trees over ranks, where equal trees share a node.

use std::collections::HashMap;

use ronde_wire::{Member, Rank, SetTopology};

/// A node; equal if and only if the trees are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Expression(u32);

/// Why two values cannot be combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CombineError {
    /// This rank is in both.
    Twice(Rank),
    /// The right one's members do not follow the left one's.
    Order,
    /// One of them is finished.
    Finished,
    /// This rank is missing.
    Missing(Rank),
    /// Only one of them has been decoded.
    Plain,
}

/// All nodes of one proof.
#[derive(Debug)]
pub(super) struct Expressions {
    nodes: Vec<Node>,
    known: HashMap<Tree, Expression>,
    ranks: Vec<Rank>,
    members: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tree {
    Rank(Rank),
    Reduced(Expression, Expression),
    Finished(Expression),
    Decoded(Expression),
    All,
}

#[derive(Debug)]
struct Node {
    tree: Tree,
    /// A bit for each rank of the set, by position.
    ranks: Vec<u64>,
    /// The members of the first and last contribution.
    first: Member,
    last: Member,
    finished: bool,
    /// Whether a codec decoded it, or all values that it is reduced from.
    decoded: bool,
}

impl Expressions {
    pub(super) fn new(topology: &SetTopology) -> Self {
        let members = u32::try_from(topology.len()).expect("members are at most SIDECARS_MAX");
        Self { nodes: Vec::new(), known: HashMap::new(), ranks: topology.ranks(), members }
    }

    /// The input of one rank.
    pub(super) fn rank(&mut self, rank: Rank, member: Member) -> Expression {
        let position = self.ranks.partition_point(|other| *other < rank);
        let mut ranks = vec![0; self.ranks.len().div_ceil(64)];
        ranks[position / 64] |= 1 << (position % 64);
        self.node(Node { tree: Tree::Rank(rank), ranks, first: member, last: member, finished: false, decoded: false })
    }

    /// A member's contribution: its ranks in order.
    pub(super) fn contribution(&mut self, ranks: &[Rank], member: Member) -> Expression {
        let mut leaves: Vec<Expression> = ranks.iter().map(|rank| self.rank(*rank, member)).collect();
        let first = leaves.remove(0);
        leaves.into_iter().fold(first, |sum, leaf| self.join(sum, leaf))
    }

    /// The n-ary reduction of all ranks' values.
    pub(super) fn all(&mut self) -> Expression {
        let ranks = vec![u64::MAX; self.ranks.len().div_ceil(64)];
        let (first, last) = (Member(0), Member(self.members - 1));
        self.node(Node { tree: Tree::All, ranks, first, last, finished: false, decoded: false })
    }

    /// The decoded value.
    pub(super) fn decoded(&mut self, value: Expression) -> Expression {
        let node = self.at(value);
        let (ranks, first, last, finished) = (node.ranks.clone(), node.first, node.last, node.finished);
        self.node(Node { tree: Tree::Decoded(value), ranks, first, last, finished, decoded: true })
    }

    /// `op(left, right)`: disjoint, in member order up to rotation, both unfinished and both or neither decoded.
    pub(super) fn reduce(&mut self, left: Expression, right: Expression) -> Result<Expression, CombineError> {
        let (a, b) = (self.at(left), self.at(right));
        if a.finished || b.finished {
            return Err(CombineError::Finished);
        }
        let both: Vec<u64> = a.ranks.iter().zip(&b.ranks).map(|(a, b)| a & b).collect();
        if let Some(rank) = self.first_of(&both) {
            return Err(CombineError::Twice(rank));
        }
        if a.decoded != b.decoded {
            return Err(CombineError::Plain);
        }
        // Decoded values are reduced left to right from member 0 on.
        let turned = a.decoded && (a.first != Member(0) || b.first != b.last);
        if turned || (a.last.0 + 1) % self.members != b.first.0 {
            return Err(CombineError::Order);
        }
        Ok(self.join(left, right))
    }

    pub(super) fn finish(&mut self, value: Expression) -> Result<Expression, CombineError> {
        if self.at(value).finished {
            return Err(CombineError::Finished);
        }
        self.complete(value)?;
        let node = self.at(value);
        let (ranks, first, last) = (node.ranks.clone(), node.first, node.last);
        Ok(self.node(Node { tree: Tree::Finished(value), ranks, first, last, finished: true, decoded: false }))
    }

    /// Whether every rank of the set contributes.
    pub(super) fn complete(&self, value: Expression) -> Result<(), CombineError> {
        let missing: Vec<u64> = self.at(value).ranks.iter().map(|word| !word).collect();
        self.first_of(&missing).map_or(Ok(()), |rank| Err(CombineError::Missing(rank)))
    }

    pub(super) fn is_finished(&self, value: Expression) -> bool {
        self.at(value).finished
    }

    pub(super) fn is_decoded(&self, value: Expression) -> bool {
        self.at(value).decoded
    }

    /// See [`super::Proof::result`].
    pub(super) fn text(&self, value: Expression) -> String {
        match self.at(value).tree {
            Tree::Rank(rank) => format!("r{}", rank.0),
            Tree::Reduced(left, right) => format!("({} {})", self.text(left), self.text(right)),
            Tree::Finished(value) => format!("[{}]", self.text(value)),
            Tree::Decoded(value) => format!("<{}>", self.text(value)),
            Tree::All => {
                let ranks: Vec<String> = self.ranks.iter().map(|rank| format!("r{}", rank.0)).collect();
                format!("{{{}}}", ranks.join(" "))
            }
        }
    }

    fn join(&mut self, left: Expression, right: Expression) -> Expression {
        let (a, b) = (self.at(left), self.at(right));
        let ranks = a.ranks.iter().zip(&b.ranks).map(|(a, b)| a | b).collect();
        let (first, last, decoded) = (a.first, b.last, a.decoded && b.decoded);
        self.node(Node { tree: Tree::Reduced(left, right), ranks, first, last, finished: false, decoded })
    }

    fn node(&mut self, node: Node) -> Expression {
        if let Some(known) = self.known.get(&node.tree) {
            return *known;
        }
        let expression = Expression(u32::try_from(self.nodes.len()).expect("memory ends before 2^32 nodes"));
        self.known.insert(node.tree, expression);
        self.nodes.push(node);
        expression
    }

    fn at(&self, value: Expression) -> &Node {
        &self.nodes[value.0 as usize]
    }

    /// The first rank whose bit is set; bits beyond the set do not count.
    fn first_of(&self, bits: &[u64]) -> Option<Rank> {
        let word = bits.iter().position(|word| *word != 0)?;
        self.ranks.get(64 * word + bits[word].trailing_zeros() as usize).copied()
    }
}
