//! Sidecars that the launcher reaches and that do not reach each other: the network between their hosts is cut.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::super::exclusion::{CooldownRange, Time};
use super::{Action, Notice, Plan, SidecarState, Stage};

/// What sidecars of the committed membership have reported. A pair has the lower index first.
#[derive(Clone, Debug, Default)]
pub(super) struct Unreachable {
    /// Two sidecars that do not reach each other, and the one of them that reported it.
    pairs: BTreeMap<(u32, u32), u32>,
    /// Two sidecars with a link. Sidecars link along a tree, so that most pairs are neither here nor there.
    linked: BTreeSet<(u32, u32)>,
    since: Option<Time>,
}

impl Unreachable {
    /// When the plan decides.
    pub(super) fn due(&self) -> Option<Time> {
        self.since.map(|since| since + REPORTS_WAIT)
    }

    /// How many more others a sidecar does not reach than it does.
    fn isolation(&self, sidecar: u32) -> i64 {
        let is_of = |pair: &&(u32, u32)| pair.0 == sidecar || pair.1 == sidecar;
        let count = |pairs: usize| i64::try_from(pairs).unwrap_or(i64::MAX);
        count(self.pairs.keys().filter(is_of).count()) - count(self.linked.iter().filter(is_of).count())
    }

    fn sidecars(&self) -> BTreeSet<u32> {
        self.pairs.keys().flat_map(|(one, other)| [*one, *other]).collect()
    }

    /// A peer of a sidecar that it does not reach, and which of both reported it.
    fn report_of(&self, sidecar: u32) -> Option<(u32, u32)> {
        let pair = self.pairs.iter().find(|((one, other), _)| *one == sidecar || *other == sidecar);
        pair.map(|((one, other), reporter)| (if *one == sidecar { *other } else { *one }, *reporter))
    }
}

impl Plan {
    /// A sidecar of the committed membership has dialled a peer in vain for the start timeout. One of both has to leave, once
    /// others have had time to report what they do not reach. A loss or change that is under way explains the silence.
    pub(super) fn unreachable(&mut self, now: Time, sidecar: u32, peer: u32, membership: u64) {
        let is_current = membership == self.number() && self.is_undisturbed();
        if is_current && sidecar != peer && self.trains(sidecar) && self.trains(peer) {
            let pair = (sidecar.min(peer), sidecar.max(peer));
            self.unreachable.linked.remove(&pair);
            self.unreachable.pairs.insert(pair, sidecar);
            self.unreachable.since.get_or_insert(now);
        }
    }

    /// Two sidecars have a link, which takes back what one of them has reported.
    pub(super) fn linked(&mut self, sidecar: u32, peer: u32) {
        let pair = (sidecar.min(peer), sidecar.max(peer));
        self.unreachable.linked.insert(pair);
        self.unreachable.pairs.remove(&pair);
        if self.unreachable.pairs.is_empty() {
            self.unreachable.since = None;
        }
    }

    /// Gives up the sidecar that is the most isolated; of several, the one with the fewest workers, then the one whose
    /// workers are the youngest. So rank 0 and its host stay when two hosts do not reach each other.
    pub(super) fn check_unreachable(&mut self, now: Time) {
        if self.unreachable.due().is_none_or(|due| due > now) {
            return;
        }
        let reports = self.unreachable.clone();
        (self.unreachable.pairs, self.unreachable.since) = (BTreeMap::new(), None);
        if !self.is_undisturbed() {
            return;
        }
        let order =
            |sidecar: &u32| (reports.isolation(*sidecar), Reverse(self.seats_of(*sidecar)), self.first_seat(*sidecar));
        let lost = reports.sidecars().into_iter().filter(|sidecar| self.trains(*sidecar)).max_by_key(order);
        if let Some((sidecar, (peer, reporter))) = lost.and_then(|lost| Some((lost, reports.report_of(lost)?))) {
            self.actions.push_back(Action::Notice(Notice::Unreachable { sidecar, peer, reporter }));
            self.give_up_sidecar(now, sidecar, CooldownRange::UNREACHABLE);
        }
    }

    /// Whether nothing but the network can keep the members of the committed membership from each other.
    fn is_undisturbed(&self) -> bool {
        let is_entering = self.change.as_ref().is_some_and(|change| change.stage == Stage::Entering);
        !(is_entering || self.is_released || self.loss.is_some() || self.finishing.is_some())
    }

    fn trains(&self, sidecar: u32) -> bool {
        let serves = self.sidecars.get(&sidecar).is_some_and(|sidecar| sidecar.state == SidecarState::Serving);
        serves && self.seats_of(sidecar) > 0
    }

    /// How many live workers of the committed membership a sidecar serves.
    fn seats_of(&self, sidecar: u32) -> usize {
        let seats = self.committed.iter().flat_map(|members| members.seats.iter());
        seats.filter(|seat| seat.sidecar == sidecar && self.is_live(seat.worker)).count()
    }

    /// The lowest rank that a sidecar serves.
    fn first_seat(&self, sidecar: u32) -> Option<usize> {
        self.committed.as_ref()?.seats.iter().position(|seat| seat.sidecar == sidecar)
    }
}

/// How long the plan waits for the reports of others: they dial at about the same time, for equally long.
const REPORTS_WAIT: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::super::cluster::{Cluster, bounds, seconds};
    use super::super::{Action, Event, Notice};

    fn report(cluster: &mut Cluster, pairs: &[(u32, u32)]) {
        let membership = cluster.number();
        for (sidecar, peer) in pairs {
            cluster.event(Event::Unreachable { sidecar: *sidecar, peer: *peer, membership });
        }
    }

    fn given_up(cluster: &Cluster) -> Vec<u32> {
        let notice = |action: &Action| match action {
            Action::Notice(Notice::Unreachable { sidecar, .. }) => Some(*sidecar),
            _ => None,
        };
        cluster.log.iter().filter_map(notice).collect()
    }

    #[test]
    fn of_two_hosts_the_one_of_rank_0_stays() {
        for pair in [(0, 1), (1, 0)] {
            let mut cluster = Cluster::running(bounds(4, 1, 4), &[2, 2]);
            report(&mut cluster, &[pair]);
            assert_eq!(given_up(&cluster), [0_u32; 0], "others may have something to report");
            cluster.run_for(seconds(20));
            assert_eq!(given_up(&cluster), [1]);
            assert_eq!(cluster.ranks(), [0, 1]);
        }
    }

    #[test]
    fn a_host_that_nobody_reaches_leaves_even_if_it_has_rank_0() {
        let mut cluster = Cluster::running(bounds(4, 1, 4), &[1, 1, 1, 1]);
        report(&mut cluster, &[(1, 0)]);
        cluster.pass(seconds(1));
        report(&mut cluster, &[(2, 0), (3, 0)]);
        cluster.run_for(seconds(20));
        assert_eq!(given_up(&cluster), [0]);
        assert_eq!(cluster.ranks(), [1, 2, 3]);
    }

    #[test]
    fn the_larger_half_stays() {
        let mut cluster = Cluster::running(bounds(4, 1, 4), &[1, 3]);
        report(&mut cluster, &[(1, 0)]);
        cluster.run_for(seconds(20));
        assert_eq!(given_up(&cluster), [0]);
        assert_eq!(cluster.ranks(), [1, 2, 3]);
    }

    #[test]
    fn a_host_that_others_reach_stays_with_fewer_workers_than_the_one_that_nobody_does() {
        let mut cluster = Cluster::running(bounds(8, 1, 8), &[2, 4, 2]);
        cluster.event(Event::Linked { sidecar: 2, peer: 0 });
        report(&mut cluster, &[(1, 0)]);
        cluster.run_for(seconds(20));
        assert_eq!(given_up(&cluster), [1]);
    }

    #[test]
    fn of_two_halves_of_four_hosts_the_one_of_rank_0_stays() {
        let mut cluster = Cluster::running(bounds(4, 1, 4), &[1, 1, 1, 1]);
        for peer in 1..4 {
            cluster.event(Event::Linked { sidecar: 0, peer });
        }
        report(&mut cluster, &[(2, 0), (3, 0)]);
        cluster.run_for(seconds(20));
        cluster.event(Event::Linked { sidecar: 1, peer: 0 });
        report(&mut cluster, &[(2, 0)]);
        cluster.run_for(seconds(20));
        assert_eq!(given_up(&cluster), [3, 2]);
        assert_eq!(cluster.ranks(), [0, 1]);
    }

    #[test]
    fn a_link_that_comes_up_takes_its_report_back() {
        let mut cluster = Cluster::running(bounds(4, 1, 4), &[2, 2]);
        report(&mut cluster, &[(1, 0)]);
        cluster.pass(seconds(1));
        cluster.event(Event::Linked { sidecar: 0, peer: 1 });
        cluster.run_for(seconds(60));
        assert_eq!(given_up(&cluster), [0_u32; 0]);
    }

    #[test]
    fn silence_that_something_else_explains_costs_nobody_its_place() {
        let mut cluster = Cluster::running(bounds(4, 4, 4), &[2, 2]);
        cluster.event(Event::Unreachable { sidecar: 1, peer: 0, membership: 0 });
        cluster.event(Event::Unreachable { sidecar: 1, peer: 1, membership: 1 });
        cluster.event(Event::Unreachable { sidecar: 1, peer: 7, membership: 1 });
        cluster.run_for(seconds(20));
        report(&mut cluster, &[(0, 1)]);
        cluster.end_sidecar(1);
        cluster.run_for(seconds(1));
        report(&mut cluster, &[(0, 1)]);
        cluster.run_for(seconds(60));
        assert_eq!(given_up(&cluster), [0_u32; 0], "too few slots: the survivors wait, and dial a peer that is gone");
    }
}
