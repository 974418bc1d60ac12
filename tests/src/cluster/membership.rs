//! Memberships of an elastic job, with the test as its launcher.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::sidecar::message;
use super::{Authority, Cluster, PATIENCE, Plan, Sidecar, Worker};

/// A worker and its sidecar, by rank.
pub type Seats = [(u32, u32)];

impl Plan<'_> {
    /// Starts an elastic job: sidecars, their first membership, and a worker for each rank, which has its number.
    ///
    /// # Errors
    /// What did not start, with its output.
    pub fn start_elastic(self, program: &str) -> Result<(Cluster, Authority)> {
        let authority = Authority::new("test")?;
        let plan = Plan { authority: Some(&authority), elastic: true, ..self.without_authority() };
        let mut cluster = plan.sidecars(program)?;
        let everybody: Vec<usize> = (0..cluster.sidecars.len()).collect();
        cluster.commit(&everybody, 1)?;
        for worker in 0..cluster.size() {
            let sidecar = cluster.placement[worker as usize];
            let started = cluster.elastic_worker(worker, sidecar)?;
            cluster.workers.push(started);
        }
        cluster.workers.iter_mut().try_for_each(Worker::await_connected)?;
        Ok((cluster, authority))
    }
}

impl Cluster {
    /// Starts a process of a worker without waiting for it.
    ///
    /// # Errors
    /// When it cannot be started, or the sidecar has no token for it.
    pub fn elastic_worker(&self, worker: u32, sidecar: u32) -> Result<Worker> {
        Worker::start_with(&self.program, &self.job, worker, &self.sidecars[sidecar as usize], |command| {
            command.env("RONDE_WORKER", worker.to_string()).env("RONDE_ELASTIC", "1");
        })
    }

    /// The next membership, as the launcher sends it.
    #[must_use]
    pub fn membership(&self, number: u64, seats: &Seats) -> Value {
        let is_seated = |sidecar: &&Sidecar| seats.iter().any(|(_, of)| *of == sidecar.index);
        let peers: Vec<Value> = self.sidecars.iter().filter(is_seated).map(Sidecar::as_peer).collect();
        let seat = |(worker, sidecar): &(u32, u32)| json!({ "worker": worker, "sidecar": sidecar });
        json!({ "number": number, "peers": peers, "seats": seats.iter().map(seat).collect::<Vec<_>>() })
    }

    /// Announces the next membership to these sidecars, which write the tokens of new workers.
    ///
    /// # Errors
    /// When one does not answer.
    pub fn change(&mut self, sidecars: &[usize], number: u64, seats: &Seats) -> Result<()> {
        let membership = self.membership(number, seats);
        for &sidecar in sidecars {
            self.sidecars[sidecar].send_membership("change", membership.clone())?;
        }
        for &sidecar in sidecars {
            self.sidecars[sidecar].await_prepared(number)?;
        }
        Ok(())
    }

    /// Releases it on these sidecars, and waits until they have entered.
    ///
    /// # Errors
    /// When one does not.
    pub fn enter(&mut self, sidecars: &[usize], number: u64, (added, removed): (u32, u32)) -> Result<()> {
        self.release(sidecars, number, (added, removed))?;
        self.await_entered(sidecars, number)
    }

    /// Releases it on these sidecars.
    ///
    /// # Errors
    /// When one does not read.
    pub fn release(&mut self, sidecars: &[usize], number: u64, (added, removed): (u32, u32)) -> Result<()> {
        let enter = json!({ "type": "enter", "membership": number, "added": added, "removed": removed });
        sidecars.iter().try_for_each(|&sidecar| self.sidecars[sidecar].process.write_line(&enter.to_string()))
    }

    /// Waits until these sidecars have entered.
    ///
    /// # Errors
    /// When one does not.
    pub fn await_entered(&mut self, sidecars: &[usize], number: u64) -> Result<()> {
        for &sidecar in sidecars {
            let of = |line: &super::Line| message(line, "entered").filter(|entered| entered["membership"] == number);
            self.sidecars[sidecar].process.await_line("that it has entered", PATIENCE, of)?;
        }
        Ok(())
    }

    /// Commits it on these sidecars.
    ///
    /// # Errors
    /// When one does not read.
    pub fn commit(&mut self, sidecars: &[usize], number: u64) -> Result<()> {
        let commit = json!({ "type": "commit", "membership": number });
        sidecars.iter().try_for_each(|&sidecar| self.sidecars[sidecar].process.write_line(&commit.to_string()))
    }

    /// Ends the processes of all workers, and starts those of a membership, each with its number.
    ///
    /// # Errors
    /// When one does not connect, or gets another rank than its position.
    pub fn restart_workers(&mut self, seats: &Seats) -> Result<()> {
        self.workers.clear();
        let started =
            seats.iter().map(|&(worker, sidecar)| self.elastic_worker(worker, sidecar)).collect::<Result<_>>()?;
        self.seat_workers(started, seats)
    }

    /// Waits until these workers, which have the numbers of the seats, are connected with their new ranks.
    ///
    /// # Errors
    /// When one does not connect, or gets another rank than its position.
    pub fn seat_workers(&mut self, workers: Vec<Worker>, seats: &Seats) -> Result<()> {
        self.workers = workers;
        self.placement = seats.iter().map(|(_, sidecar)| *sidecar).collect();
        for (rank, worker) in (0..).zip(&mut self.workers) {
            worker.rank = rank;
            worker.await_rank(rank).with_context(|| format!("worker {}", seats[rank as usize].0))?;
        }
        Ok(())
    }
}

impl Sidecar {
    /// Sends a message with a membership.
    ///
    /// # Errors
    /// When it does not read.
    pub fn send_membership(&mut self, kind: &str, membership: Value) -> Result<()> {
        let mut line = membership;
        line["type"] = kind.into();
        self.process.write_line(&line.to_string())
    }

    /// Waits until it has prepared a membership, and keeps the token files of the workers that it adds.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn await_prepared(&mut self, number: u64) -> Result<()> {
        let of = |line: &super::Line| message(line, "prepared").filter(|prepared| prepared["membership"] == number);
        let prepared = self.process.await_line("that it is prepared", PATIENCE, of)?;
        let added = prepared["token_files"].as_array().context("a list of files")?.clone();
        if let Some(known) = self.serving["token_files"].as_array_mut() {
            known.extend(added);
        }
        Ok(())
    }
}
