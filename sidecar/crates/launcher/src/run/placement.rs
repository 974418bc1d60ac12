//! The placement of ranks and sidecars on hosts.

use std::ops::Range;

use ronde_wire::limits::{LOCAL_RANKS_MAX, RANKS_MAX, SIDECARS_MAX};

use super::hosts::Host;

/// The placement of every rank and sidecar of a job. Sidecar indices, ranks and hosts ascend together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    /// The hosts that have ranks.
    pub(super) hosts: Vec<Host>,
    /// By sidecar index.
    pub(super) sidecars: Vec<SidecarPlace>,
}

/// The host and ranks of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SidecarPlace {
    /// Its host, an index into [`Placement::hosts`].
    pub(super) host: usize,
    /// Its ranks.
    pub(super) ranks: Range<u32>,
}

/// The ranks and sizes of a rank in Horovod's terms. Each sidecar counts as its own host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RankPlace {
    /// The rank.
    pub(super) rank: u32,
    /// The number of ranks.
    pub(super) size: u32,
    /// Its host, an index into [`Placement::hosts`].
    pub(super) host: usize,
    /// Its sidecar.
    pub(super) sidecar: u32,
    /// Its number on its host.
    pub(super) local_rank: u32,
    /// How many ranks its host has.
    pub(super) local_size: u32,
    /// The number of its host among the hosts that have this local rank.
    pub(super) cross_rank: u32,
    /// How many hosts have this local rank.
    pub(super) cross_size: u32,
}

impl Placement {
    /// Fills hosts in their order; one sidecar a host, or `sidecars` of them on a single host, over which the ranks are
    /// spread in contiguous blocks that differ by at most one.
    ///
    /// # Errors
    /// [`PlacementError`] when the ranks do not fit.
    pub(super) fn new(ranks: u32, hosts: &[Host], sidecars: Option<u32>) -> Result<Self, PlacementError> {
        check_count(ranks, hosts)?;
        let filled = fill(ranks, hosts);
        let sidecars = match (sidecars, filled.as_slice()) {
            (Some(count), [_]) => split(ranks, count)?,
            (Some(count), _) if count as usize != filled.len() => {
                return Err(PlacementError::SidecarsOnHosts { sidecars: count, hosts: filled.len() });
            }
            _ => filled,
        };
        let hosts = hosts[..sidecars.last().map_or(0, |last| last.host + 1)].to_vec();
        check_sidecars(&hosts, &sidecars)?;
        Ok(Self { hosts, sidecars })
    }

    /// The number of ranks.
    pub(super) fn size(&self) -> u32 {
        self.sidecars.last().map_or(0, |last| last.ranks.end)
    }

    /// Every rank in ascending order.
    pub(super) fn ranks(&self) -> impl Iterator<Item = RankPlace> {
        (0_u32..).zip(&self.sidecars).flat_map(move |(sidecar, place)| {
            place.ranks.clone().map(move |rank| {
                let local_rank = rank - place.ranks.start;
                RankPlace {
                    rank,
                    size: self.size(),
                    host: place.host,
                    sidecar,
                    local_rank,
                    local_size: place.local_size(),
                    cross_rank: hosts_with(local_rank, &self.sidecars[..sidecar as usize]),
                    cross_size: hosts_with(local_rank, &self.sidecars),
                }
            })
        })
    }

    /// For each rank the index of its sidecar.
    pub(super) fn sidecar_of_ranks(&self) -> Vec<u32> {
        self.ranks().map(|place| place.sidecar).collect()
    }

    /// The name of the host of a sidecar.
    pub(super) fn host_of_sidecar(&self, sidecar: usize) -> &str {
        &self.hosts[self.sidecars[sidecar].host].name
    }

    /// The ranks of a host.
    pub(super) fn ranks_of_host(&self, host: usize) -> Range<u32> {
        let mut places = self.sidecars.iter().filter(|place| place.host == host).map(|place| place.ranks.clone());
        let first = places.next().unwrap_or(0..0);
        first.start..places.next_back().map_or(first.end, |last| last.end)
    }
}

impl SidecarPlace {
    fn local_size(&self) -> u32 {
        self.ranks.end - self.ranks.start
    }
}

/// Ranks, hosts and sidecars that do not fit; the user must correct them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PlacementError {
    /// No ranks.
    #[error("a job has at least one process; give -np 1 or more")]
    NoRanks,
    /// More ranks than a job may have.
    #[error("a job has at most {RANKS_MAX} processes, not {ranks}")]
    Ranks {
        /// How many were asked for.
        ranks: u32,
    },
    /// More ranks than slots.
    #[error(
        "Requested more processes ({ranks}) than there are available slots ({slots}); give fewer with -np or more slots with -H"
    )]
    Slots {
        /// How many were asked for.
        ranks: u32,
        /// How many there are.
        slots: u64,
    },
    /// More hosts than a job may have sidecars.
    #[error("a job has at most {SIDECARS_MAX} sidecars, not {sidecars}")]
    Sidecars {
        /// How many would be needed.
        sidecars: usize,
    },
    /// More ranks than a sidecar serves.
    #[error("a sidecar serves at most {LOCAL_RANKS_MAX} processes, but host {host} would get {ranks}; use more hosts{}", if *.single { ", or --sidecars" } else { "" })]
    LocalRanks {
        /// The host.
        host: String,
        /// How many it would get.
        ranks: u32,
        /// Whether it is the only host, so that more sidecars are possible.
        single: bool,
    },
    /// `--sidecars` with several hosts.
    #[error(
        "--sidecars {sidecars} does not fit {hosts} hosts: with several hosts each has one sidecar; leave --sidecars out"
    )]
    SidecarsOnHosts {
        /// How many were asked for.
        sidecars: u32,
        /// How many hosts have ranks.
        hosts: usize,
    },
    /// More sidecars than ranks, or none.
    #[error("--sidecars {sidecars} does not fit {ranks} processes: give 1 to {ranks}")]
    SidecarsOfRanks {
        /// How many were asked for.
        sidecars: u32,
        /// How many ranks there are.
        ranks: u32,
    },
}

fn check_count(ranks: u32, hosts: &[Host]) -> Result<(), PlacementError> {
    let slots = hosts.iter().map(|host| u64::from(host.slots.get())).sum();
    if ranks == 0 {
        Err(PlacementError::NoRanks)
    } else if ranks as usize > RANKS_MAX {
        Err(PlacementError::Ranks { ranks })
    } else if u64::from(ranks) > slots {
        Err(PlacementError::Slots { ranks, slots })
    } else {
        Ok(())
    }
}

fn check_sidecars(hosts: &[Host], sidecars: &[SidecarPlace]) -> Result<(), PlacementError> {
    if sidecars.len() > SIDECARS_MAX {
        return Err(PlacementError::Sidecars { sidecars: sidecars.len() });
    }
    let crowded = sidecars.iter().find(|place| place.local_size() as usize > LOCAL_RANKS_MAX);
    crowded.map_or(Ok(()), |place| {
        let host = hosts[place.host].name.clone();
        Err(PlacementError::LocalRanks { host, ranks: place.local_size(), single: hosts.len() == 1 })
    })
}

fn fill(ranks: u32, hosts: &[Host]) -> Vec<SidecarPlace> {
    let mut places = Vec::new();
    let mut next = 0;
    for (host, slots) in hosts.iter().map(|host| host.slots.get()).enumerate() {
        if next == ranks {
            break;
        }
        let end = ranks.min(next.saturating_add(slots));
        places.push(SidecarPlace { host, ranks: next..end });
        next = end;
    }
    places
}

fn split(ranks: u32, sidecars: u32) -> Result<Vec<SidecarPlace>, PlacementError> {
    if !(1..=ranks).contains(&sidecars) {
        return Err(PlacementError::SidecarsOfRanks { sidecars, ranks });
    }
    let (share, larger) = (ranks / sidecars, ranks % sidecars);
    let start = |sidecar: u32| sidecar * share + sidecar.min(larger);
    Ok((0..sidecars).map(|sidecar| SidecarPlace { host: 0, ranks: start(sidecar)..start(sidecar + 1) }).collect())
}

fn hosts_with(local_rank: u32, sidecars: &[SidecarPlace]) -> u32 {
    (0..).zip(sidecars.iter().filter(|place| place.local_size() > local_rank)).last().map_or(0, |(last, _)| last + 1)
}

#[cfg(test)]
mod tests {
    use super::super::hosts::parse_list;
    use super::*;
    use proptest::prelude::*;

    fn placed(ranks: u32, hosts: &str, sidecars: Option<u32>) -> Result<Placement, PlacementError> {
        Placement::new(ranks, &parse_list(hosts).expect("valid hosts"), sidecars)
    }

    #[test]
    fn hosts_are_filled_in_order_and_empty_ones_left_out() {
        let placement = placed(4, "a:3,b:2,c:1", None).expect("fits");
        assert_eq!(placement.hosts.len(), 2);
        assert_eq!(placement.sidecar_of_ranks(), [0, 0, 0, 1]);
        let last = placement.ranks().last().expect("four ranks");
        let expected = RankPlace {
            rank: 3,
            size: 4,
            host: 1,
            sidecar: 1,
            local_rank: 0,
            local_size: 1,
            cross_rank: 1,
            cross_size: 2,
        };
        assert_eq!(last, expected);
        assert_eq!(placement.ranks_of_host(0), 0..3);
        assert_eq!(placement.host_of_sidecar(1), "b");
    }

    #[test]
    fn sidecars_of_one_host_count_as_hosts() {
        let placement = placed(5, "localhost:5", Some(2)).expect("fits");
        assert_eq!(placement.hosts.len(), 1);
        assert_eq!(placement.sidecar_of_ranks(), [0, 0, 0, 1, 1]);
        let cross: Vec<_> =
            placement.ranks().map(|place| (place.local_rank, place.cross_rank, place.cross_size)).collect();
        assert_eq!(cross, [(0, 0, 2), (1, 0, 2), (2, 0, 1), (0, 1, 2), (1, 1, 2)]);
        assert_eq!(placement.ranks_of_host(0), 0..5);
    }

    #[test]
    fn errors_name_what_does_not_fit() {
        let error = placed(5, "a:2,b:2", None).expect_err("too many");
        assert!(error.to_string().starts_with("Requested more processes (5) than there are available slots (4)"));
        assert_eq!(placed(0, "a:2", None), Err(PlacementError::NoRanks));
        assert_eq!(placed(5_000, "a:5000", None), Err(PlacementError::Ranks { ranks: 5_000 }));
        assert_eq!(placed(2, "a:1,b:1", Some(3)), Err(PlacementError::SidecarsOnHosts { sidecars: 3, hosts: 2 }));
        assert_eq!(placed(2, "a:2", Some(3)), Err(PlacementError::SidecarsOfRanks { sidecars: 3, ranks: 2 }));
        assert_eq!(placed(2, "a:2", Some(0)), Err(PlacementError::SidecarsOfRanks { sidecars: 0, ranks: 2 }));
        let crowded = placed(65, "a:65", None).expect_err("one sidecar serves 64");
        assert!(crowded.to_string().ends_with("use more hosts, or --sidecars"), "{crowded}");
    }

    fn worlds() -> impl Strategy<Value = (u32, Vec<u32>, Option<u32>)> {
        (1_u32..200, proptest::collection::vec(1_u32..70, 1..12), proptest::option::of(0_u32..9))
    }

    proptest! {
        #[test]
        fn every_rank_has_one_place_and_the_numbers_agree((ranks, slots, sidecars) in worlds()) {
            let list: Vec<String> = slots.iter().enumerate().map(|(host, slots)| format!("h{host}:{slots}")).collect();
            let Ok(placement) = placed(ranks, &list.join(","), sidecars) else { return Ok(()) };
            let places: Vec<RankPlace> = placement.ranks().collect();
            prop_assert_eq!(places.iter().map(|place| place.rank).collect::<Vec<_>>(), (0..ranks).collect::<Vec<_>>());
            for place in &places {
                let same_sidecar = places.iter().filter(|other| other.sidecar == place.sidecar);
                prop_assert_eq!(u32::try_from(same_sidecar.count()).expect("few"), place.local_size);
                let across: Vec<u32> = places.iter().filter(|other| other.local_rank == place.local_rank).map(|other| other.rank).collect();
                prop_assert_eq!(u32::try_from(across.len()).expect("few"), place.cross_size);
                prop_assert_eq!(across[place.cross_rank as usize], place.rank);
                prop_assert!(placement.ranks_of_host(place.host).contains(&place.rank));
                prop_assert!(place.local_size <= slots[place.host]);
            }
            let sizes: Vec<u32> = places.iter().map(|place| place.local_size).collect();
            if let (Some(_), 1) = (sidecars, placement.hosts.len()) {
                prop_assert!(sizes.iter().max().expect("some") - sizes.iter().min().expect("some") <= 1);
            }
        }
    }
}
