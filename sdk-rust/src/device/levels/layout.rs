//! [`Layout`]: which ranks of a set share a host. Pure.

use ronde_wire::Rank;

/// The ranks of a set by host. Each host has the same number, at least 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// By host, ascending within each.
    ranks: Vec<Vec<Rank>>,
    /// The set, ascending.
    all: Vec<Rank>,
    /// This rank's host.
    pub(super) host: usize,
    /// This rank's position among those of its host.
    pub(super) index: usize,
}

impl Layout {
    /// The layout for rank `me` of a set whose ranks are on these hosts.
    ///
    /// # Errors
    /// Why operations of the set have one level only.
    pub(super) fn of(me: Rank, placed: &[(Rank, u32)]) -> Result<Self, String> {
        let mut numbers: Vec<u32> = placed.iter().map(|(_, host)| *host).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut all: Vec<Rank> = placed.iter().map(|(rank, _)| *rank).collect();
        all.sort_unstable();
        let on = |host: &u32| {
            let mut ranks: Vec<_> = placed.iter().filter(|(_, other)| other == host).map(|(rank, _)| *rank).collect();
            ranks.sort_unstable();
            ranks
        };
        let ranks: Vec<Vec<Rank>> = numbers.iter().map(on).collect();
        let counts: Vec<usize> = ranks.iter().map(Vec::len).collect();
        let (least, most) = (counts.iter().min().copied(), counts.iter().max().copied());
        if least != most {
            return Err(format!(
                "its hosts have different numbers of ranks, {} to {}",
                least.unwrap_or(0),
                most.unwrap_or(0)
            ));
        }
        if least.unwrap_or(0) < 2 {
            return Err("each of its hosts has one rank".to_owned());
        }
        let host = ranks.iter().position(|ranks| ranks.contains(&me)).ok_or("this rank is not in it")?;
        let index = ranks[host].binary_search(&me).map_err(|_| "this rank is not in it")?;
        Ok(Self { ranks, all, host, index })
    }

    pub(super) fn hosts(&self) -> usize {
        self.ranks.len()
    }

    /// The ranks of each host.
    pub(super) fn local(&self) -> usize {
        self.ranks.first().map_or(0, Vec::len)
    }

    /// The ranks of the set.
    pub(super) fn ranks(&self) -> usize {
        self.all.len()
    }

    /// This rank's position in the set.
    pub(super) fn position(&self) -> usize {
        self.position_of(self.ranks[self.host][self.index])
    }

    fn position_of(&self, rank: Rank) -> usize {
        self.all.partition_point(|other| *other < rank)
    }

    /// A rank's host and position there.
    pub(super) fn find(&self, rank: Rank) -> Option<(usize, usize)> {
        let found = |ranks: &Vec<Rank>| ranks.binary_search(&rank).ok();
        self.ranks.iter().enumerate().find_map(|(host, ranks)| Some((host, found(ranks)?)))
    }

    pub(super) fn rank_at(&self, host: usize, index: usize) -> Option<Rank> {
        self.ranks.get(host)?.get(index).copied()
    }

    /// The first rank of this rank's host.
    pub(super) fn leader(&self) -> Rank {
        self.ranks[self.host][0]
    }

    /// The position of this rank's host among all hosts in the order of their first ranks.
    pub(super) fn host_by_leader(&self) -> usize {
        let leader = self.leader();
        self.ranks.iter().filter(|ranks| ranks[0] < leader).count()
    }

    /// The ranks with a position on all hosts, ascending: a shard group.
    pub(super) fn group_ranks(&self, index: usize) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self.ranks.iter().map(|ranks| ranks[index]).collect();
        ranks.sort_unstable();
        ranks
    }

    /// The positions in the set of the ranks of a shard group, in its order.
    pub(super) fn group(&self, index: usize) -> Vec<usize> {
        self.group_ranks(index).into_iter().map(|rank| self.position_of(rank)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(hosts: &[u32]) -> Vec<(Rank, u32)> {
        (0..).map(Rank).zip(hosts.iter().copied()).collect()
    }

    #[test]
    fn ranks_are_placed_in_any_order() {
        let layout = Layout::of(Rank(3), &placed(&[7, 2, 7, 2])).expect("two hosts with two ranks");
        assert_eq!((layout.hosts(), layout.local(), layout.ranks()), (2, 2, 4));
        assert_eq!((layout.host, layout.index, layout.leader(), layout.host_by_leader()), (0, 1, Rank(1), 1));
        assert_eq!((layout.group(0), layout.group(1)), (vec![0, 1], vec![2, 3]));
        assert_eq!((layout.find(Rank(2)), layout.find(Rank(4))), (Some((1, 1)), None));
    }

    #[test]
    fn other_layouts_have_one_level() {
        let why = |hosts: &[u32]| Layout::of(Rank(0), &placed(hosts)).expect_err("one level");
        assert!(why(&[0, 0, 1]).contains("1 to 2"));
        assert!(why(&[0, 1, 2]).contains("one rank"));
        assert!(why(&[]).contains("one rank"));
    }
}
