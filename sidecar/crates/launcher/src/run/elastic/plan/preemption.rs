//! Hosts that are about to be taken away: their workers leave in order while there is time.

use super::super::exclusion::{CooldownRange, Time};
use super::{Action, Notice, Plan};

/// How long a host is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaving {
    /// Until when: then the host is gone, if the notice is its own.
    pub(super) until: Time,
    /// Whether its agent got the notice, rather than a worker only.
    is_host: bool,
}

impl Plan {
    /// An agent, or one of its workers, has received SIGTERM.
    pub(super) fn preempted(&mut self, now: Time, agent: u32, worker: Option<u32>) {
        let of_agent = |host: &super::Host| host.agent.is_some_and(|known| known.number == agent);
        let Some(host) = self.hosts.iter_mut().find(|host| of_agent(host)) else { return };
        let is_host = worker.is_none();
        if host.leaving.is_some_and(|leaving| leaving.is_host || !is_host) {
            return;
        }
        host.leaving = Some(Leaving { until: now + self.bounds.preemption_notice, is_host });
        self.actions.push_back(Action::Notice(Notice::Preempted { agent, worker }));
        self.stop_unwanted();
    }

    /// Gives up hosts whose time is over. One of which only a worker got the notice runs on, so it is used again.
    pub(super) fn check_notices(&mut self, now: Time) {
        for index in 0..self.hosts.len() {
            let host = &mut self.hosts[index];
            let Some(leaving) = host.leaving.filter(|leaving| leaving.until <= now) else { continue };
            host.leaving = None;
            match (leaving.is_host, host.agent.map(|agent| agent.number)) {
                (false, _) => {}
                // It may be listed still, or come back.
                (true, None) => self.exclude_host(now, index, CooldownRange::HOST),
                (true, Some(agent)) => {
                    self.actions.push_back(Action::Notice(Notice::NoticeOver { agent }));
                    self.actions.push_back(Action::DropAgent { agent });
                    self.agent_lost(now, agent);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::cluster::{Cluster, bounds, seconds};
    use super::super::{Action, Bounds, Cause, End, Event, Notice};

    #[test]
    fn a_host_with_a_notice_is_left_in_order_and_used_again_after_a_cool_down() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        cluster.event(Event::Preempted { agent: 1, worker: None });
        cluster.run_for(seconds(5));
        assert_eq!((cluster.ranks(), cluster.causes()), (vec![0, 1], vec![Cause::Start, Cause::Preempted]));
        assert!(cluster.log.contains(&Action::DropAgent { agent: 1 }), "nothing is left there");
        cluster.run_for(seconds(24));
        assert_eq!(cluster.agents.len(), 1, "it is not used while it is about to go");
        cluster.run_for(seconds(30));
        assert_eq!(cluster.ranks(), [0, 1, 4, 5], "it may come back");
    }

    #[test]
    fn workers_that_do_not_leave_in_time_are_lost_with_their_host() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        cluster.event(Event::Preempted { agent: 1, worker: None });
        while !cluster.log.iter().any(|action| matches!(action, Action::Enter { .. })) {
            cluster.deliver(0);
        }
        // The workers train on: no sidecar leaves the epoch.
        let entered = std::mem::take(&mut cluster.answers);
        cluster.run_for(seconds(29));
        assert!(cluster.agents.contains_key(&1) && cluster.number() == 1);
        cluster.run_for(seconds(2));
        assert!(cluster.log.contains(&Action::Notice(Notice::NoticeOver { agent: 1 })), "{:?}", cluster.log);
        cluster.answers = entered;
        cluster.deliver_all();
        assert_eq!((cluster.ranks(), cluster.causes()), (vec![0, 1], vec![Cause::Start, Cause::Preempted]));
    }

    #[test]
    fn the_only_host_keeps_its_workers_to_the_end_of_its_time() {
        let mut cluster = Cluster::running(Bounds { has_discovery: false, ..bounds(2, 1, 2) }, &[2]);
        cluster.event(Event::Preempted { agent: 0, worker: None });
        cluster.run_for(seconds(29));
        assert_eq!((cluster.ranks(), cluster.ended), (vec![0, 1], None));
        cluster.run_for(seconds(2));
        assert_eq!(cluster.ended, Some(End::Failed(Cause::Agent(0))));
    }

    #[test]
    fn a_host_that_appears_in_time_takes_over() {
        let mut cluster = Cluster::running(bounds(2, 2, 2), &[2]);
        cluster.event(Event::Preempted { agent: 0, worker: None });
        cluster.run_for(seconds(5));
        cluster.list(&[2, 2]);
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks().len(), 2);
        assert!(!cluster.ranks().iter().any(|worker| [0, 1].contains(worker)), "{:?}", cluster.ranks());
    }

    #[test]
    fn a_worker_with_a_notice_empties_its_host_for_that_time_only() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        cluster.event(Event::Preempted { agent: 1, worker: Some(3) });
        cluster.run_for(seconds(20));
        assert_eq!(cluster.ranks(), [0, 1]);
        cluster.run_for(seconds(30));
        assert_eq!(cluster.ranks(), [0, 1, 4, 5]);
        let mut single = Cluster::running(bounds(2, 1, 2), &[2]);
        single.event(Event::Preempted { agent: 0, worker: Some(1) });
        single.run_for(seconds(100));
        assert_eq!((single.ranks(), single.ended), (vec![0, 1], None), "nothing is lost with a host that runs on");
    }

    #[test]
    fn a_worker_that_sigterm_has_ended_counts_as_a_notice() {
        let mut cluster = Cluster::running(bounds(4, 2, 4), &[2, 2]);
        for round in 0..4 {
            let last = *cluster.ranks().last().expect("some");
            cluster.terminate_worker(last);
            cluster.run_for(seconds(5));
            assert_eq!(cluster.ranks(), [0, 1], "the others of its host leave, too: round {round}");
            cluster.run_for(seconds(50));
            assert_eq!(cluster.ranks().len(), 4, "its slot is not excluded: round {round}");
        }
    }
}
