//! `ronde worker`: a worker that another program than an agent starts. It reads the job from the variable RONDE_WORLD and sets
//! the environment that agents set for other workers.
//!
//! The variable holds directories and numbers, no secrets. The token of a rank is a file that only its user can read.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::fail_with;
use ronde_rpc::paths;
use ronde_wire::{JobName, WorkerNumber};
use serde::{Deserialize, Serialize};

use super::environment::Identity;
use super::hosts::Host;
use super::placement::{Placement, RankPlace, SidecarPlace};
use crate::agent::exec;
use crate::envelope::Environment;

/// Arguments of `ronde worker`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct WorkerArgs {
    /// The worker's command; everything after its first word belongs to it.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Executes a worker of the job that RONDE_WORLD describes; returns only on failure.
pub fn main(args: &WorkerArgs) -> ExitCode {
    let environment = environment(|name| std::env::var(name).ok(), &hostname()).context(Code::WorkerPlace);
    match environment {
        Ok(environment) => exec::become_worker(&args.command, |command| command.envs(environment).env_remove(WORLD)),
        Err(error) => fail_with(&error, Code::WorkerPlace),
    }
}

/// The placement of all of a job's workers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct World {
    /// The job.
    pub(super) job: JobName,
    /// An address of the host of rank 0 and a port that is free there.
    pub(super) master: SocketAddr,
    /// The names of the hosts.
    pub(super) hosts: Vec<String>,
    /// By sidecar index.
    pub(super) sidecars: Vec<Served>,
    /// The variables that the job adds to the environment of all workers.
    pub(super) environment: Environment,
}

/// A sidecar and the ranks that it serves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Served {
    /// Its host, an index.
    pub(super) host: usize,
    /// Its first rank.
    pub(super) first: u32,
    /// How many ranks it serves.
    pub(super) count: u32,
    /// The directory with its sockets.
    pub(super) socket_dir: PathBuf,
    /// Its address for gRPC-Web, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) web: Option<SocketAddr>,
}

impl World {
    fn placement(&self) -> Placement {
        let host = |name: &String| Host { name: name.clone(), slots: NonZeroU32::MIN };
        let place =
            |served: &Served| SidecarPlace { host: served.host, ranks: served.first..served.first + served.count };
        Placement { hosts: self.hosts.iter().map(host).collect(), sidecars: self.sidecars.iter().map(place).collect() }
    }

    fn environment_of(self, placement: &Placement, place: RankPlace) -> Environment {
        let served = &self.sidecars[place.sidecar as usize];
        let identity = Identity {
            job: &self.job,
            place,
            hostname: &placement.hosts[place.host].name,
            socket_dir: &served.socket_dir,
            token_file: &paths::token_file(&served.socket_dir, WorkerNumber(place.rank)),
            web: served.web,
            master: self.master,
        };
        let own = identity.environment();
        self.environment.into_iter().chain(own).collect()
    }
}

/// Returns the variables to add for this worker. `lookup` reads its present environment, with the variables of mpirun.
fn environment(lookup: impl Fn(&str) -> Option<String>, hostname: &str) -> anyhow::Result<Environment> {
    let text = lookup(WORLD).with_context(|| {
        format!(
            "{WORLD} is not set: `ronde worker` is for the command that `ronde run --starter` runs, which has to export \
             that variable (with Open MPI: mpirun -x {WORLD})"
        )
    })?;
    let world: World = serde_json::from_str(&text).with_context(|| format!("cannot parse {WORLD}"))?;
    let placement = world.placement();
    let (rank, size) = (number(&lookup, "RANK")?, number(&lookup, "SIZE")?);
    ensure!(
        size == placement.size(),
        "mpirun has started {size} processes, but the job has {}: give both the same -np",
        placement.size()
    );
    let Some(place) = placement.ranks().find(|place| place.rank == rank) else { bail!("there is no rank {rank}") };
    let on_host = placement.ranks_of_host(place.host);
    let beside = number(&lookup, "LOCAL_SIZE")?;
    let is_there = paths::token_file(&world.sidecars[place.sidecar as usize].socket_dir, WorkerNumber(rank)).exists();
    if !is_there || beside != on_host.end - on_host.start {
        bail!(
            "rank {rank} runs on {hostname}, as one of {beside} there, but the job's sidecar expects it on host {}, which has \
             {}: let mpirun fill the same hosts in the same order (-H, --map-by slot)",
            placement.hosts[place.host].name,
            super::failure::ranks(&on_host)
        );
    }
    Ok(world.environment_of(&placement, place))
}

fn number(lookup: impl Fn(&str) -> Option<String>, name: &str) -> anyhow::Result<u32> {
    // jsrun sets some of the first ones, too.
    let names = [format!("OMPI_COMM_WORLD_{name}"), format!("JSM_NAMESPACE_{name}")];
    let (name, text) = names.iter().find_map(|name| Some((name, lookup(name)?))).with_context(|| {
        format!("{} is not set: Open MPI's mpirun or jsrun has to start `ronde worker`, and nothing else", names[0])
    })?;
    text.parse().with_context(|| format!("{name} is {text:?}, which is not a number"))
}

fn hostname() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The variable that holds a [`World`].
pub(super) const WORLD: &str = "RONDE_WORLD";

const EXAMPLES: &str = "Examples:
  ronde run --starter -np 2 mpirun -np 2 -x RONDE_WORLD ronde worker python train.py
  ronde run --starter -np 4 -H alpha:2,beta:2 mpirun -np 4 -H alpha:2,beta:2 -x RONDE_WORLD ronde worker python train.py";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn world(directory: &Path) -> World {
        let served = |host, first, count| Served { host, first, count, socket_dir: directory.to_owned(), web: None };
        World {
            job: JobName::new("night").expect("valid"),
            master: "10.0.0.1:29500".parse().expect("valid"),
            hosts: vec!["alpha".into(), "beta".into()],
            sidecars: vec![served(0, 0, 2), served(1, 2, 1)],
            environment: vec![("RONDE_TIMELINE".into(), "t.json".into())],
        }
    }

    /// As mpirun sets it: rank, size, local size.
    fn read(world: Option<&World>, places: [u32; 3]) -> Result<Environment, String> {
        let text = world.map(|world| serde_json::to_string(world).expect("it is JSON"));
        let names = ["RANK", "SIZE", "LOCAL_SIZE"].map(|name| format!("OMPI_COMM_WORLD_{name}"));
        let lookup = |name: &str| {
            let at = names.iter().position(|known| known == name);
            if name == WORLD { text.clone() } else { at.map(|at| places[at].to_string()) }
        };
        environment(lookup, "gamma").map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn a_worker_finds_its_place_by_its_rank() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        (0..3).for_each(|rank| {
            std::fs::write(paths::token_file(directory.path(), WorkerNumber(rank)), "token")
                .expect("it can be written");
        });
        let world = world(directory.path());
        let found = read(Some(&world), [2, 3, 1]).expect("it is where it belongs");
        let value = |name: &str| found.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        let expected = [
            ("RONDE_RANK", "2"),
            ("RONDE_JOB", "night"),
            ("RONDE_TIMELINE", "t.json"),
            ("HOROVOD_CROSS_RANK", "1"),
            ("HOROVOD_HOSTNAME", "beta"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("WORLD_SIZE", "3"),
        ];
        expected.iter().for_each(|(name, expected)| assert_eq!(value(name), Some(*expected), "{name}"));
        assert_eq!(value("RONDE_TOKEN_FILE"), directory.path().join("rank-2.token").to_str());
    }

    #[test]
    fn a_worker_on_the_wrong_host_gets_an_error_with_the_right_one() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let world = world(directory.path());
        for (world, places, text) in [
            (None, [0, 3, 2], "export that variable (with Open MPI: mpirun -x RONDE_WORLD)"),
            (Some(&world), [0, 4, 2], "started 4 processes, but the job has 3: give both the same -np"),
            (Some(&world), [1, 3, 1], "rank 1 runs on gamma, as one of 1 there"),
            (Some(&world), [1, 3, 2], "expects it on host alpha, which has ranks 0-1: let mpirun fill"),
        ] {
            let error = read(world, places).expect_err(text);
            assert!(error.contains(text), "{error}");
        }
    }
}
