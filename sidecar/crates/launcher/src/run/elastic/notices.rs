//! What users are notified of: memberships, losses, what is left out, what the job waits for.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use ronde_bootstrap::codes::Code;

use super::super::failure::has_first_line;
use super::failure::Loss;
use super::job::ElasticJob;
use super::plan::{Cause, Members, Notice};
use super::report::MembershipReport;

/// A text for users that has not been printed yet.
pub(super) enum Text {
    Loss(Loss),
    Other(String),
}

impl Text {
    /// Whether a job's failure has it, too.
    pub(super) fn is_in(&self, failure: &str) -> bool {
        match self {
            // All sidecars may end for one reason.
            Self::Loss(Loss::Fatal { reason, .. }) => has_first_line(failure, reason),
            Self::Loss(loss) => has_first_line(failure, &loss.to_string()),
            Self::Other(_) => false,
        }
    }
}

impl fmt::Display for Text {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loss(loss) => formatter.write_str(&loss.marked()),
            Self::Other(text) => formatter.write_str(text),
        }
    }
}

impl ElasticJob<'_> {
    /// Prints a notice, and records a loss or a membership.
    pub(super) fn notify(&mut self, notice: &Notice) {
        if let Notice::Committed { members, cause, since } = notice {
            return self.committed(members, *cause, *since);
        }
        match self.loss_in(notice) {
            Some(loss) => self.report_loss(loss),
            None => self.notices.extend(self.text_of(notice).map(Text::Other)),
        }
    }

    /// The loss that a notice is about.
    fn loss_in(&mut self, notice: &Notice) -> Option<Loss> {
        let bounds = &self.elastic.bounds;
        let attach_s = bounds.attach_timeout.as_secs();
        match *notice {
            Notice::Silent { sidecar, awaited } => {
                let host = self.table.host_of_sidecar(sidecar);
                let facts = self.table.sidecar(sidecar);
                let loss = Loss::Silent { sidecar, host, awaited: awaited.to_owned(), log_tail: facts.log.lines() };
                facts.loss.get_or_insert_with(|| loss.clone());
                Some(loss)
            }
            Notice::SilentAgent { agent } => {
                let seconds = bounds.start_timeout.as_secs();
                let reason = format!("ronde on it has not answered within {seconds} s (--start-timeout)");
                self.table.unusable(agent, Code::StartTimeout, reason).loss
            }
            Notice::NoticeOver { agent } => {
                let seconds = bounds.preemption_notice.as_secs();
                let reason = format!(
                    "it got SIGTERM, and its workers have not left within {seconds} s (--preemption-notice), because they \
                     did not commit their state or there are too few others"
                );
                self.table.unusable(agent, Code::NoticeOver, reason).loss
            }
            Notice::NotAttached { worker } => {
                Some(self.lose(worker, |_, _, host| Loss::NotAttached { worker, host, seconds: attach_s }))
            }
            Notice::NotReturned { worker, membership } => Some(self.lose(worker, |rank, _, host| Loss::NotReturned {
                worker,
                rank,
                host,
                membership,
                seconds: attach_s,
            })),
            Notice::Hung { worker } => {
                Some(self.lose(worker, |rank, text, host| Loss::Hung { worker, rank, host, text }))
            }
            Notice::Unreachable { sidecar, peer, reporter } => Some(self.lose_unreachable(sidecar, peer, reporter)),
            _ => None,
        }
    }

    /// Records the loss of a sidecar that does not reach another one.
    fn lose_unreachable(&mut self, sidecar: u32, peer: u32, reporter: u32) -> Loss {
        let [host, peer_host] = [sidecar, peer].map(|index| self.table.host_of_sidecar(index));
        let other = if reporter == sidecar { peer } else { sidecar };
        let text = self.table.sidecar(reporter).unreachable.get(&other).cloned().unwrap_or_default();
        let loss = Loss::Unreachable { sidecar, host, peer, peer_host, reporter, text };
        self.table.sidecar(sidecar).loss.get_or_insert_with(|| loss.clone());
        loss
    }

    /// Records the loss of a worker, made of its rank, what was reported of it, and its host.
    fn lose(&mut self, worker: u32, loss: impl FnOnce(Option<u32>, String, String) -> Loss) -> Loss {
        let facts = self.table.worker(worker);
        let (agent, rank, text) = (facts.agent, facts.rank, facts.hung.clone().unwrap_or_default());
        let loss = loss(rank, text, self.table.host_of_agent(agent));
        self.table.worker(worker).loss = Some(loss.clone());
        loss
    }

    fn text_of(&self, notice: &Notice) -> Option<String> {
        Some(match notice {
            Notice::Waiting { have, needed } => {
                let seconds = self.elastic.bounds.elastic_timeout.as_secs();
                format!(
                    "the job needs {needed} slots, and there are {have}; it waits for more, for {seconds} s at most"
                )
            }
            Notice::SlotExcluded { host, slot, cooldown } => {
                format!("slot {slot} of host {host} is {}", left_out(*cooldown, "after repeated failures"))
            }
            Notice::HostExcluded { host, cooldown } => {
                format!("host {host} is {}", left_out(*cooldown, "after a loss"))
            }
            Notice::Preempted { agent, worker } => {
                let host = self.table.host_of_agent(*agent);
                let seconds = self.elastic.bounds.preemption_notice.as_secs();
                let who = worker.map_or_else(String::new, |worker| format!("worker {worker} on "));
                format!(
                    "{who}host {host} got SIGTERM: the workers of that host leave at the next commit, and it is not used \
                     for {seconds} s (--preemption-notice)"
                )
            }
            Notice::Spares { workers } => {
                let numbers: Vec<String> = workers.iter().map(ToString::to_string).collect();
                match &numbers[..] {
                    [one] => format!("worker {one} is a spare one and has started; it waits for a loss"),
                    all => format!("workers {} are spare ones and have started; they wait for a loss", all.join(", ")),
                }
            }
            Notice::NotEntered { membership } => format!(
                "new workers are ready, but the others train on; membership {membership} begins when they commit their state \
                 (`state.commit()` or `state.check_host_updates()`)"
            ),
            Notice::Committed { .. }
            | Notice::Silent { .. }
            | Notice::SilentAgent { .. }
            | Notice::NoticeOver { .. }
            | Notice::NotAttached { .. }
            | Notice::NotReturned { .. }
            | Notice::Hung { .. }
            | Notice::Unreachable { .. } => return None,
        })
    }

    fn committed(&mut self, members: &Rc<Members>, cause: Cause, since: Duration) {
        let now = self.now();
        self.table.committed(members);
        let seconds = now.saturating_sub(since).as_secs_f64();
        let is_recovery = matches!(cause, Cause::Worker(_) | Cause::Sidecar(_) | Cause::Agent(_));
        let cause = match cause {
            Cause::Start => "the job starts".to_owned(),
            Cause::Worker(worker) => format!("worker {worker} was lost"),
            Cause::Sidecar(sidecar) => format!("sidecar {sidecar} was lost"),
            Cause::Agent(agent) => format!("host {} was lost", self.table.host_of_agent(agent)),
            Cause::Added => "slots were added".to_owned(),
            Cause::Removed => "slots were removed".to_owned(),
            Cause::Drained => "a host is drained".to_owned(),
            Cause::Preempted => "a host got SIGTERM".to_owned(),
            Cause::Scaled => "fewer workers are wanted".to_owned(),
        };
        let (ranks, hosts) = (members.seats.len(), self.table.hosts(members));
        let ranks_text = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
        let hosts_text = if hosts == 1 { "1 host".to_owned() } else { format!("{hosts} hosts") };
        let after = if is_recovery { format!(", {seconds:.3} s after the loss") } else { String::new() };
        let number = members.number;
        let text = format!("membership {number}: {ranks_text} on {hosts_text}, because {cause}{after}");
        self.notices.push(Text::Other(text));
        self.memberships.push(MembershipReport {
            number,
            began_s: now.as_secs_f64(),
            ranks,
            workers: members.seats.iter().map(|seat| seat.worker).collect(),
            cause,
            recovery_s: is_recovery.then_some(seconds),
        });
    }
}

fn left_out(cooldown: Option<Duration>, why: &str) -> String {
    match cooldown {
        Some(cooldown) => format!("left out for {:.0} s {why}", cooldown.as_secs_f64()),
        None => format!("not used again {why}"),
    }
}
