//! Answers the requests of `ronde job`.

use ronde_bootstrap::directory;

use super::job::ElasticJob;
use super::notices::Text;
use super::plan::Refusal;
use crate::job::messages::{Answer, JobStatus, PastMembership, Request};
use crate::job::socket::{self, Asked};

impl ElasticJob<'_> {
    /// Opens the socket for `ronde job`. A job without one goes on.
    pub(super) fn open_socket(&mut self) {
        match socket::open(&directory::default_base(), &self.settings.job) {
            Ok(socket) => self.socket = Some(socket),
            Err(error) => {
                let text = format!("`ronde job` cannot reach this job, which goes on: {error:#}");
                self.notices.push(Text::Other(text));
            }
        }
    }

    /// Executes a request.
    pub(super) fn answer(&mut self, (request, reply): Asked) {
        let now = self.now();
        let answer = match request {
            Request::Status => Answer::Status(Box::new(self.job_status())),
            Request::Drain { host, undo } => match self.plan.drain(now, &host, undo) {
                Ok(_) if undo => self.done(format!("host {host} is used again")),
                Ok(drained) => self.done(drain_text(&host, drained.workers, drained.waits)),
                Err(refusal) => refused(&refusal, &host),
            },
            Request::Scale { workers } => match self.plan.scale(now, workers) {
                Ok(scaled) => self.done(scale_text(workers, scaled.workers, scaled.slots)),
                Err(refusal) => refused(&refusal, ""),
            },
        };
        // The command may have been interrupted meanwhile.
        let _ = reply.send(answer);
    }

    /// The answer to a command; the launcher's own output has it, too.
    fn done(&mut self, text: String) -> Answer {
        self.notices.push(Text::Other(format!("by `ronde job`: {text}")));
        Answer::Done { text }
    }

    fn job_status(&self) -> JobStatus {
        let mut status = self.plan.status(self.now());
        for worker in &mut status.workers {
            worker.pid = self.table.workers.get(&worker.worker).and_then(|facts| facts.pid);
        }
        let past = self.memberships.iter().rev().take(MEMBERSHIPS_MAX).rev();
        let past = past.map(|of| PastMembership {
            number: of.number,
            began_s: of.began_s,
            ranks: of.ranks,
            cause: of.cause.clone(),
        });
        JobStatus {
            job: self.settings.job.to_string(),
            launcher_pid: std::process::id(),
            seconds: self.now().as_secs_f64(),
            memberships: past.collect(),
            ..status
        }
    }
}

fn drain_text(host: &str, workers: u32, waits: bool) -> String {
    match workers {
        0 => format!("host {host} is drained: it has no workers, and gets none"),
        _ if waits => format!(
            "host {host} is drained: its {} until other hosts have enough slots; add some, or undo it with `ronde job \
             drain {host} --undo`",
            counted(workers, "worker stays", "workers stay")
        ),
        _ => format!(
            "host {host} is drained: its {}",
            counted(workers, "worker leaves at the next commit", "workers leave at the next commit")
        ),
    }
}

fn scale_text(wanted: u32, workers: u32, slots: u32) -> String {
    let has = counted(workers, "worker", "workers");
    if wanted < workers {
        let fewer = counted(workers - wanted, "of them, the youngest, leaves", "of them, the youngest, leave");
        return format!("the job is to have {wanted} workers, and has {has}: {fewer} at the next commit");
    }
    let more = if wanted > slots && wanted > workers {
        format!("; there are {slots} slots, and others are used when they appear")
    } else {
        String::new()
    };
    format!("the job is to have {wanted} workers, and has {has}{more}")
}

fn counted(count: u32, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn refused(refusal: &Refusal, host: &str) -> Answer {
    let reason = match refusal {
        Refusal::Ending => {
            "the job is ending: a worker has ended with status 0, after which nothing changes".to_owned()
        }
        Refusal::UnknownHost { known } if known.is_empty() => {
            format!("the job has no host yet, so it cannot drain {host}; see `ronde job status` in a moment")
        }
        Refusal::UnknownHost { known } => {
            format!("the job has no host {host}; it has {}, named as -H or the discovery script does", known.join(", "))
        }
        Refusal::BelowMin { min } => format!(
            "the job cannot go on with fewer than {min} workers (--min-np); give {min} or more, or end it with Ctrl-C or \
             SIGTERM at its launcher"
        ),
        Refusal::BelowFirst { first } => {
            format!("the job needs {first} workers to start (-np); give {first} or more, or fewer when it has started")
        }
        Refusal::AboveMax { max } => format!("the job has at most {max} workers (--max-np); give {max} or fewer"),
        Refusal::NoResets { limit } => format!(
            "the membership has changed {limit} times, which is the limit of the job (--reset-limit), so it stays as it is"
        ),
    };
    Answer::Refused { reason }
}

/// Memberships of which the state consists.
const MEMBERSHIPS_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_name_what_happens_and_the_way_out() {
        assert_eq!(drain_text("b", 1, false), "host b is drained: its 1 worker leaves at the next commit");
        assert_eq!(drain_text("b", 0, false), "host b is drained: it has no workers, and gets none");
        let waits = drain_text("b", 2, true);
        assert!(waits.contains("its 2 workers stay until") && waits.contains("`ronde job drain b --undo`"), "{waits}");
        assert_eq!(
            scale_text(1, 3, 3),
            "the job is to have 1 workers, and has 3 workers: 2 of them, the youngest, leave at the next commit"
        );
        assert_eq!(
            scale_text(4, 2, 3),
            "the job is to have 4 workers, and has 2 workers; there are 3 slots, and others are used when they appear"
        );
        let known = vec!["a".to_owned(), "b".to_owned()];
        for (refusal, text) in [
            (Refusal::UnknownHost { known }, "no host c; it has a, b"),
            (Refusal::UnknownHost { known: Vec::new() }, "has no host yet"),
            (Refusal::BelowMin { min: 2 }, "give 2 or more"),
            (Refusal::BelowFirst { first: 3 }, "needs 3 workers to start"),
            (Refusal::AboveMax { max: 8 }, "give 8 or fewer"),
            (Refusal::NoResets { limit: 5 }, "has changed 5 times"),
            (Refusal::Ending, "the job is ending"),
        ] {
            let Answer::Refused { reason } = refused(&refusal, "c") else { panic!("it is refused") };
            assert!(reason.contains(text), "{reason}");
        }
    }
}
