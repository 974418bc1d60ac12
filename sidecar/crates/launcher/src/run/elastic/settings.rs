//! The options of elastic jobs.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use clap::builder::TypedValueParser;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::numbers::whole;
use ronde_wire::limits::{LOCAL_RANKS_MAX, RANKS_MAX, SIDECARS_MAX};

use super::super::hosts::Host;
use super::discovery::Script;
use super::exclusion::CooldownRange;
use super::plan::Bounds;
use super::plan::hosts::Listed;

/// Options of `ronde run` that make a job elastic.
#[derive(Args, Debug, Default)]
pub(in super::super) struct ElasticArgs {
    /// Run an elastic job, which goes on while it can have N processes. When a process, a sidecar or a host fails, the others
    /// continue at once; free slots and new hosts are used again. Lines of output begin with `[worker N]`, a number that a
    /// process keeps while its rank changes.
    #[arg(long, visible_alias = "min-num-proc", value_name = "N", value_parser = whole::<u32>(0..=u32::MAX.into()))]
    pub(in super::super) min_np: Option<u32>,
    /// The most processes of an elastic job. [default: as many as there are slots; with --spares those of -np]
    #[arg(long, visible_alias = "max-num-proc", value_name = "N", value_parser = whole::<u32>(0..=u32::MAX.into()))]
    pub(in super::super) max_np: Option<u32>,
    /// A command that prints the hosts of an elastic job, a line `HOST:SLOTS` or `HOST` for each. It runs each second; hosts
    /// that appear get processes, and those of hosts that disappear are removed.
    #[arg(long, value_name = "COMMAND", conflicts_with_all = ["hosts", "hostfile"])]
    pub(in super::super) host_discovery_script: Option<String>,
    /// The slots of a host for which that command prints no number.
    #[arg(
        long,
        visible_alias = "slots",
        value_name = "N",
        value_parser = whole::<u32>(1..=u32::MAX.into()).try_map(NonZeroU32::try_from)
    )]
    pub(in super::super) slots_per_host: Option<NonZeroU32>,
    /// How long an elastic job waits for enough slots. [default: 600]
    #[arg(long, value_name = "SECONDS", env = "HOROVOD_ELASTIC_TIMEOUT", value_parser = whole::<u64>(1..=864_000))]
    pub(in super::super) elastic_timeout: Option<u64>,
    /// How often the processes of an elastic job may change. A further failure ends the job; new hosts are not used any more.
    /// [default: any number]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(0..=u32::MAX.into()))]
    pub(in super::super) reset_limit: Option<u32>,
    /// How long a host lives on after its agent, or a worker there, got SIGTERM: its workers leave at their next commit, and
    /// count as lost when they have not in this time. [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64>(1..=86_400))]
    pub(in super::super) preemption_notice: Option<u64>,
    /// How many more processes to start, in free slots, that wait for a loss: they have imported their framework and take the
    /// place of a lost one at once. [default: 0]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(0..=1_024))]
    pub(in super::super) spares: Option<u32>,
    /// Kill a worker that hangs, and start another one in its place: when a collective has waited so long for this rank
    /// alone, while its process is connected and waits for nothing itself. [default: it is named only]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64>(1..=86_400))]
    pub(in super::super) replace_stalled: Option<u64>,
    /// How many seconds a slot is left out after three quick failures, or a host after its loss; MIN doubles with each
    /// exclusion, up to MAX. [default: such a slot is not used again, a host after 2 to 300 seconds]
    #[arg(
        long,
        num_args = 2,
        value_names = ["MIN", "MAX"],
        value_delimiter = ' ',
        value_parser = whole::<u64>(1..=3_600)
    )]
    pub(in super::super) blacklist_cooldown_range: Vec<u64>,
}

/// Where the hosts of an elastic job come from.
#[derive(Clone, Debug)]
pub(in super::super) enum HostSource {
    /// They are given.
    Fixed(Vec<Listed>),
    /// A script prints them.
    Script(Script),
}

/// The validated options.
#[derive(Clone, Debug)]
pub(in super::super) struct ElasticSettings {
    pub(super) bounds: Bounds,
    pub(super) source: HostSource,
    /// After which silence a peer counts as dead.
    pub(super) peer_timeout: Duration,
    /// After how long a worker for which others wait counts as hung.
    pub(super) replace_stalled: Option<Duration>,
}

/// What the other options contribute.
pub(in super::super) struct Given {
    /// `--num-proc`.
    pub(in super::super) num_proc: Option<u32>,
    /// Whether `--sidecars` or `--starter` is given, with its name.
    pub(in super::super) conflict: Option<&'static str>,
    /// How long hosts and sidecars may take to start.
    pub(in super::super) start_timeout: Duration,
    /// How long workers may take to attach.
    pub(in super::super) attach_timeout: Duration,
    /// After which silence a sidecar counts as dead.
    pub(in super::super) peer_timeout: Duration,
}

impl ElasticArgs {
    /// Whether the job is elastic.
    pub(in super::super) fn is_elastic(&self) -> bool {
        self.min_np.is_some() || self.host_discovery_script.is_some()
    }

    /// Rejects options of elastic jobs for other ones.
    ///
    /// # Errors
    /// When there are some.
    pub(in super::super) fn check_fixed(&self) -> anyhow::Result<()> {
        let given = [
            ("--max-np", self.max_np.is_some()),
            ("--slots-per-host", self.slots_per_host.is_some()),
            ("--reset-limit", self.reset_limit.is_some()),
            ("--spares", self.spares.is_some()),
            ("--replace-stalled", self.replace_stalled.is_some()),
            ("--preemption-notice", self.preemption_notice.is_some()),
            ("--blacklist-cooldown-range", !self.blacklist_cooldown_range.is_empty()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => {
                bail!("{option} is for elastic jobs; give --min-np or --host-discovery-script with it, or leave it out")
            }
            None => Ok(()),
        }
    }

    /// How many slots the local host has without a list of hosts.
    pub(in super::super) fn local_slots(&self, num_proc: Option<u32>) -> u32 {
        let most = self.max_np.or(num_proc).or(self.min_np);
        most.map_or(0, |most| most.saturating_add(self.spares.unwrap_or(0)))
    }

    /// Validates the options of an elastic job.
    ///
    /// # Errors
    /// When they do not fit together.
    pub(in super::super) fn settings(&self, hosts: &[Host], given: &Given) -> anyhow::Result<ElasticSettings> {
        if let Some(option) = given.conflict {
            bail!("{option} is for jobs that are not elastic; leave it out, or --min-np and --host-discovery-script");
        }
        let (first, min, max) = self.counts(given.num_proc).context(Code::Placement)?;
        let source = match &self.host_discovery_script {
            Some(command) => HostSource::Script(Script {
                command: command.clone(),
                slots_per_host: self.slots_per_host,
                limit: SCRIPT_LIMIT,
                interval: SCRIPT_INTERVAL,
            }),
            None => {
                ensure!(
                    self.slots_per_host.is_none(),
                    "--slots-per-host is for --host-discovery-script; without it each host is given with its slots"
                );
                let listed = |host: &Host| Listed { name: host.name.clone(), slots: host.slots.get() };
                HostSource::Fixed(hosts.iter().map(listed).collect())
            }
        };
        let bounds = Bounds {
            first,
            min,
            max,
            elastic_timeout: Duration::from_secs(self.elastic_timeout.unwrap_or(ELASTIC_TIMEOUT_SECONDS)),
            reset_limit: self.reset_limit,
            cooldown: self.cooldown()?,
            has_discovery: matches!(source, HostSource::Script(_)),
            start_timeout: given.start_timeout,
            attach_timeout: given.attach_timeout,
            answer_timeout: given.peer_timeout + ANSWER_SLACK,
            spares: self.spares.unwrap_or(0),
            replaces_stalled: self.replace_stalled.is_some(),
            preemption_notice: Duration::from_secs(self.preemption_notice.unwrap_or(PREEMPTION_NOTICE_SECONDS)),
            local_max: LOCAL_RANKS_MAX,
            sidecars_max: u32::try_from(SIDECARS_MAX).unwrap_or(u32::MAX),
            seed: random_seed(),
        };
        let replace_stalled = self.replace_stalled.map(Duration::from_secs);
        Ok(ElasticSettings { bounds, source, peer_timeout: given.peer_timeout, replace_stalled })
    }

    /// The processes that are needed to start, that are needed later, and the most.
    fn counts(&self, num_proc: Option<u32>) -> anyhow::Result<(u32, u32, u32)> {
        let ranks_max = u32::try_from(RANKS_MAX).unwrap_or(u32::MAX);
        let min = self.min_np.or(num_proc).context(
            "how many processes the job needs is not given; give --min-np, or -np, with --host-discovery-script",
        )?;
        let first = num_proc.unwrap_or(min);
        // Else all slots would have workers, and none a spare one.
        let max = self.max_np.unwrap_or(if self.spares.is_some() { first } else { ranks_max });
        ensure!(min >= 1, "a job has at least one process; give --min-np 1 or more");
        ensure!(max <= ranks_max, "a job has at most {RANKS_MAX} processes, not {max} (--max-np)");
        ensure!(min <= first, "-np {first} is less than --min-np {min}; give -np {min} or more, or leave it out");
        ensure!(first <= max, "--max-np {max} is less than the {first} processes that the job starts with; give more");
        Ok((first, min, max))
    }

    fn cooldown(&self) -> anyhow::Result<Option<CooldownRange>> {
        let [min, max] = self.blacklist_cooldown_range[..] else {
            ensure!(
                self.blacklist_cooldown_range.is_empty(),
                "--blacklist-cooldown-range has two values, the shortest and the longest time in seconds"
            );
            return Ok(None);
        };
        ensure!(min <= max, "--blacklist-cooldown-range {min} {max}: the first value is the smaller one");
        Ok(Some(CooldownRange { min: Duration::from_secs(min), max: Duration::from_secs(max) }))
    }
}

fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Horovod's.
pub(in super::super) const ELASTIC_TIMEOUT_SECONDS: u64 = 600;
/// Between the notices of the large clouds, which are 30 s and 120 s, the shorter one.
const PREEMPTION_NOTICE_SECONDS: u64 = 30;
/// How long one run of the discovery script may take.
const SCRIPT_LIMIT: Duration = Duration::from_secs(10);
const SCRIPT_INTERVAL: Duration = Duration::from_secs(1);
/// A sidecar answers later than it notices that a peer is dead, and lets others finish.
const ANSWER_SLACK: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::super::super::hosts::parse_list;
    use super::*;

    fn given(num_proc: Option<u32>) -> Given {
        let second = Duration::from_secs(1);
        Given { num_proc, conflict: None, start_timeout: second, attach_timeout: second, peer_timeout: second }
    }

    fn bounds(args: &ElasticArgs, num_proc: Option<u32>) -> Result<(u32, u32, u32), String> {
        let hosts = parse_list("a:2,b:2").expect("valid");
        let settings = args.settings(&hosts, &given(num_proc)).map_err(|error| error.to_string());
        settings.map(|settings| (settings.bounds.first, settings.bounds.min, settings.bounds.max))
    }

    #[test]
    fn counts_have_horovods_defaults() {
        let min = |min| ElasticArgs { min_np: Some(min), ..ElasticArgs::default() };
        assert_eq!(bounds(&min(2), None), Ok((2, 2, 4_096)));
        assert_eq!(bounds(&min(2), Some(3)), Ok((3, 2, 4_096)));
        assert_eq!(bounds(&ElasticArgs { max_np: Some(4), ..min(2) }, Some(3)), Ok((3, 2, 4)));
        assert_eq!(bounds(&ElasticArgs { spares: Some(1), ..min(2) }, Some(3)), Ok((3, 2, 3)));
        let script = ElasticArgs { host_discovery_script: Some("true".into()), ..ElasticArgs::default() };
        assert_eq!(bounds(&script, Some(3)), Ok((3, 3, 4_096)));
        assert!(script.settings(&[], &given(None)).is_err());
        for (args, num_proc) in [
            (min(0), None),
            (min(3), Some(2)),
            (ElasticArgs { max_np: Some(1), ..min(2) }, None),
            (ElasticArgs { max_np: Some(5_000), ..min(2) }, None),
            (ElasticArgs { slots_per_host: NonZeroU32::new(2), ..min(2) }, None),
            (ElasticArgs { blacklist_cooldown_range: vec![20, 10], ..min(2) }, None),
            (ElasticArgs { blacklist_cooldown_range: vec![20], ..min(2) }, None),
        ] {
            assert!(bounds(&args, num_proc).is_err(), "{args:?}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_range() {
        let run = super::super::super::RunArgs::augment_args(clap::Command::new("run")).no_binary_name(true);
        let cli = || run.clone().allow_negative_numbers(true);
        for (option, value, range) in [
            ("--min-np", "-1", "0 to 4294967295"),
            ("--slots-per-host", "0", "1 to 4294967295"),
            ("--elastic-timeout", "-5", "1 to 864000"),
            ("--spares", "1025", "0 to 1024"),
            ("--preemption-notice", "soon", "1 to 86400"),
            ("--replace-stalled", "-3", "1 to 86400"),
        ] {
            let error = cli().try_get_matches_from([option, value]).expect_err(option).to_string();
            let reason = format!("invalid value '{value}' for '{option} ");
            assert!(
                error.contains(&reason) && error.contains(&format!("it must be a whole number from {range}\n")),
                "{error}"
            );
        }
    }

    #[test]
    fn options_of_elastic_jobs_are_rejected_for_others() {
        let max = ElasticArgs { max_np: Some(4), ..ElasticArgs::default() };
        let error = max.check_fixed().expect_err("it is for elastic jobs").to_string();
        assert!(error.starts_with("--max-np is for elastic jobs"), "{error}");
        assert!(ElasticArgs::default().check_fixed().is_ok() && !max.is_elastic());
    }
}
