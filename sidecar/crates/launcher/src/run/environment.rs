//! The environment of workers and sidecars.

use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;

use ronde_bootstrap::logs::{LOG_VARIABLE, LogArgs};
use ronde_wire::JobName;

use super::placement::RankPlace;
use super::world::WORLD;
use crate::envelope::Environment;

/// A `-x` of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Export {
    name: String,
    value: Option<String>,
}

impl Export {
    /// A variable with a value.
    pub(super) fn value(name: &str, value: String) -> Self {
        Self { name: name.to_owned(), value: Some(value) }
    }

    /// Whether `horovodrun` has given it, which gives it in every job.
    pub(super) fn is_horovods(&self) -> bool {
        self.name == "HOROVOD_CONTROLLER"
    }
}

impl FromStr for Export {
    type Err = ExportError;

    fn from_str(text: &str) -> Result<Self, ExportError> {
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value.to_owned())));
        if name.is_empty() || name.contains('\0') {
            return Err(ExportError { given: text.to_owned() });
        }
        Ok(Self { name: name.to_owned(), value })
    }
}

/// An invalid `-x`; the user must correct it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not NAME or NAME=VALUE")]
pub(super) struct ExportError {
    given: String,
}

/// Returns the environment common to all workers: the caller's variables except misleading ones (shell functions, the
/// caller's choice of devices, identities of other launchers), and those of `-x`.
pub(super) fn common(caller: &Environment, exports: &[Export]) -> Environment {
    let mut environment: Environment = caller.iter().filter(|(name, _)| is_passed_on(name)).cloned().collect();
    for (name, value) in added(caller, exports) {
        set(&mut environment, &name, &value);
    }
    environment
}

/// Of that, what the caller's environment does not have or has otherwise: what is asked for.
pub(super) fn added(caller: &Environment, exports: &[Export]) -> Environment {
    let mut environment = vec![("PYTHONUNBUFFERED".to_owned(), "1".to_owned())];
    for export in exports {
        let callers = || caller.iter().find(|(name, _)| *name == export.name).map(|(_, value)| value);
        if let Some(value) = export.value.as_ref().or_else(callers) {
            set(&mut environment, &export.name, value);
        }
    }
    environment
}

/// Notices about variables that workers do not get although they are asked for or the caller has them. `left_out` are the names
/// of the caller's variables that messages cannot carry.
pub(super) fn notices(caller: &Environment, exports: &[Export], left_out: &[String]) -> Vec<String> {
    let is_missing = |export: &&Export| export.value.is_none() && caller.iter().all(|(name, _)| *name != export.name);
    let missing = exports.iter().filter(is_missing).map(|export| &export.name);
    let missing = missing.filter(|name| !left_out.contains(name));
    let missing = missing.map(|name| format!("-x {name} has no effect: no such variable is set; give -x {name}=VALUE"));
    let left_out = left_out.iter().filter(|name| is_passed_on(name));
    let left_out = left_out
        .map(|name| format!("workers do not get the variable {name:?}, because its name or value is not valid UTF-8"));
    missing.chain(left_out).collect()
}

/// The variables of a sidecar: its log settings, and its index, which identifies it in the log.
pub(super) fn for_sidecar(caller: &Environment, sidecar: u32, verbose: bool, logs: &LogArgs) -> Environment {
    let mut environment: Environment = caller.iter().filter(|(name, _)| name == LOG_VARIABLE).cloned().collect();
    if verbose && environment.is_empty() {
        set(&mut environment, LOG_VARIABLE, "info");
    }
    set(&mut environment, "RONDE_SIDECAR_LOG_FORMAT", logs.log_format.name());
    if let Some(level) = logs.log_level {
        set(&mut environment, "RONDE_SIDECAR_LOG_LEVEL", level.name());
    }
    // Said in any case: Horovod's variable may be in the agent's own environment.
    set(&mut environment, "RONDE_SIDECAR_LOG_WITHOUT_TIMESTAMP", if logs.has_time() { "false" } else { "true" });
    set(&mut environment, "RONDE_SIDECAR", &sidecar.to_string());
    environment
}

/// Where a worker stands; secrets are not here, only the path of a file that holds the rank's token.
pub(super) struct Identity<'a> {
    /// The job.
    pub(super) job: &'a JobName,
    /// The rank among the others.
    pub(super) place: RankPlace,
    /// The name of its host.
    pub(super) hostname: &'a str,
    /// The directory with the sidecar's sockets.
    pub(super) socket_dir: &'a Path,
    /// The file with the rank's token.
    pub(super) token_file: &'a Path,
    /// Where the sidecar answers gRPC-Web, if anywhere.
    pub(super) web: Option<SocketAddr>,
    /// An address of the host of rank 0 and a port that is free there.
    pub(super) master: SocketAddr,
}

impl Identity<'_> {
    /// The variables of one worker.
    pub(super) fn environment(&self) -> Environment {
        let mut environment = Environment::new();
        let mut add = |name: &str, value: &str| environment.push((name.to_owned(), value.to_owned()));
        for (name, value) in self.numbers() {
            let value = value.to_string();
            add(&format!("RONDE_{name}"), &value);
            add(&format!("HOROVOD_{name}"), &value);
            if let Some((_, torch)) = TORCH_NAMES.iter().find(|(ours, _)| *ours == name) {
                add(torch, &value);
            }
        }
        add("RONDE_JOB", &self.job.to_string());
        add("RONDE_SOCKET", &self.socket_dir.to_string_lossy());
        add("RONDE_TOKEN_FILE", &self.token_file.to_string_lossy());
        if let Some(web) = self.web {
            add("RONDE_WEB", &format!("http://{web}"));
        }
        add("HOROVOD_HOSTNAME", self.hostname);
        add("MASTER_ADDR", &self.master.ip().to_string());
        add("MASTER_PORT", &self.master.port().to_string());
        environment
    }

    fn numbers(&self) -> [(&'static str, u32); 6] {
        let place = &self.place;
        [
            ("RANK", place.rank),
            ("SIZE", place.size),
            ("LOCAL_RANK", place.local_rank),
            ("LOCAL_SIZE", place.local_size),
            ("CROSS_RANK", place.cross_rank),
            ("CROSS_SIZE", place.cross_size),
        ]
    }
}

/// The further variables of a worker in an elastic job. `is_new`: it comes to a job that trains already, whose state it does
/// not have.
pub(super) fn of_worker(worker: u32, is_new: bool) -> Environment {
    let number = |is: bool| u32::from(is).to_string();
    let variables = [
        ("RONDE_ELASTIC", number(true)),
        ("RONDE_WORKER", worker.to_string()),
        ("RONDE_NEW_WORKER", number(is_new)),
        ("HOROVOD_ELASTIC", number(true)),
    ];
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The variable by which a spare worker waits for its membership as long as the job runs.
pub(super) fn patient() -> (String, String) {
    (super::WORKER_START_TIMEOUT.to_owned(), SPARE_WAIT_SECONDS.to_string())
}

/// A year; the launcher ends the workers of a job that ends.
const SPARE_WAIT_SECONDS: u64 = 365 * 24 * 3_600;

/// Sets a variable, replacing its former value.
fn set(environment: &mut Environment, name: &str, value: &str) {
    environment.retain(|(present, _)| present != name);
    environment.push((name.to_owned(), value.to_owned()));
}

fn is_passed_on(name: &str) -> bool {
    let is_identity = || {
        let numbers = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"];
        let ours = name.strip_prefix("RONDE_").or_else(|| name.strip_prefix("HOROVOD_"));
        ours.is_some_and(|rest| numbers.contains(&rest)) || WITHHELD.contains(&name)
    };
    !name.starts_with("BASH_FUNC_") && !name.ends_with("CUDA_VISIBLE_DEVICES") && !is_identity()
}

const TORCH_NAMES: [(&str, &str); 4] =
    [("RANK", "RANK"), ("SIZE", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_RANK"), ("LOCAL_SIZE", "LOCAL_WORLD_SIZE")];

const WITHHELD: [&str; 12] = [
    "OLDPWD",
    "_HOROVOD_SECRET_KEY",
    "RONDE_JOB",
    "RONDE_SOCKET",
    "RONDE_TOKEN_FILE",
    "RONDE_WEB",
    "RONDE_ELASTIC",
    "RONDE_WORKER",
    "RONDE_NEW_WORKER",
    "RONDE_NOTICE_SOCKET",
    "HOROVOD_ELASTIC",
    WORLD,
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use ronde_bootstrap::logs::{LogFormat, LogLevel};

    fn environment(pairs: &[(&str, &str)]) -> Environment {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn value<'a>(environment: &'a Environment, name: &str) -> Option<&'a str> {
        environment.iter().find(|(present, _)| present == name).map(|(_, value)| value.as_str())
    }

    #[test]
    fn the_callers_variables_are_inherited_except_misleading_ones() {
        let caller = environment(&[
            ("PATH", "/bin"),
            ("BASH_FUNC_module%%", "() { :; }"),
            ("OLDPWD", "/"),
            ("CUDA_VISIBLE_DEVICES", "0"),
            ("SLURM_CUDA_VISIBLE_DEVICES", "0"),
            ("_HOROVOD_SECRET_KEY", "x"),
            ("RONDE_TOKEN_FILE", "/old"),
            ("RONDE_WORKER", "3"),
            ("HOROVOD_RANK", "7"),
            ("HOROVOD_FUSION_THRESHOLD", "1"),
        ]);
        let names: Vec<String> = common(&caller, &[]).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["PATH", "HOROVOD_FUSION_THRESHOLD", "PYTHONUNBUFFERED"]);
    }

    #[test]
    fn an_export_restores_or_sets_a_variable() {
        let caller = environment(&[("CUDA_VISIBLE_DEVICES", "0,1"), ("A", "caller's")]);
        let exports = ["CUDA_VISIBLE_DEVICES", "A=mine=1", "ABSENT"].map(|text| text.parse().expect("valid"));
        let common = common(&caller, &exports);
        assert_eq!(value(&common, "CUDA_VISIBLE_DEVICES"), Some("0,1"));
        assert_eq!(value(&common, "A"), Some("mine=1"));
        assert_eq!(value(&common, "ABSENT"), None);
        assert_eq!("=x".parse::<Export>(), Err(ExportError { given: "=x".into() }));
    }

    #[test]
    fn a_worker_has_every_documented_variable() {
        let place = RankPlace {
            rank: 5,
            size: 8,
            host: 1,
            sidecar: 1,
            local_rank: 1,
            local_size: 4,
            cross_rank: 1,
            cross_size: 2,
        };
        let identity = Identity {
            job: &JobName::new("j").expect("valid"),
            place,
            hostname: "beta",
            socket_dir: Path::new("/run/j"),
            token_file: Path::new("/run/j/t5"),
            web: Some("127.0.0.1:7600".parse().expect("valid")),
            master: "[fd00::1]:29500".parse().expect("valid"),
        };
        let found = identity.environment();
        let expected = [
            ("RONDE_RANK", "5"),
            ("RONDE_SIZE", "8"),
            ("RONDE_LOCAL_RANK", "1"),
            ("RONDE_LOCAL_SIZE", "4"),
            ("RONDE_CROSS_RANK", "1"),
            ("RONDE_CROSS_SIZE", "2"),
            ("RONDE_JOB", "j"),
            ("RONDE_SOCKET", "/run/j"),
            ("RONDE_TOKEN_FILE", "/run/j/t5"),
            ("RONDE_WEB", "http://127.0.0.1:7600"),
            ("HOROVOD_RANK", "5"),
            ("HOROVOD_SIZE", "8"),
            ("HOROVOD_LOCAL_RANK", "1"),
            ("HOROVOD_LOCAL_SIZE", "4"),
            ("HOROVOD_CROSS_RANK", "1"),
            ("HOROVOD_CROSS_SIZE", "2"),
            ("HOROVOD_HOSTNAME", "beta"),
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "fd00::1"),
            ("MASTER_PORT", "29500"),
        ];
        for (name, expected) in expected {
            assert_eq!(value(&found, name), Some(expected), "{name}");
        }
        assert_eq!(found.len(), expected.len());
    }

    #[test]
    fn a_worker_of_an_elastic_job_has_its_number() {
        let found = of_worker(7, false);
        let expected =
            [("RONDE_ELASTIC", "1"), ("RONDE_WORKER", "7"), ("RONDE_NEW_WORKER", "0"), ("HOROVOD_ELASTIC", "1")];
        expected.iter().for_each(|(name, expected)| assert_eq!(value(&found, name), Some(*expected), "{name}"));
        assert_eq!(value(&of_worker(8, true), "RONDE_NEW_WORKER"), Some("1"));
    }

    #[test]
    fn verbose_raises_the_sidecars_log_unless_the_caller_chose() {
        let plain = LogArgs {
            log_format: LogFormat::Text,
            log_level: None,
            log_with_timestamp: false,
            log_without_timestamp: false,
        };
        let level = |caller: &Environment, verbose| {
            value(&for_sidecar(caller, 3, verbose, &plain), "RONDE_LOG").map(str::to_owned)
        };
        assert_eq!(level(&environment(&[("A", "1")]), false), None);
        assert_eq!(level(&Environment::new(), true), Some("info".to_owned()));
        assert_eq!(level(&environment(&[("RONDE_LOG", "trace")]), true), Some("trace".to_owned()));
        let logs = LogArgs {
            log_format: LogFormat::Json,
            log_level: Some(LogLevel::Debug),
            log_without_timestamp: true,
            ..plain
        };
        let variables = for_sidecar(&Environment::new(), 3, false, &logs);
        assert_eq!(value(&variables, "RONDE_SIDECAR_LOG_FORMAT"), Some("json"));
        assert_eq!(value(&variables, "RONDE_SIDECAR_LOG_LEVEL"), Some("debug"));
        assert_eq!(value(&variables, "RONDE_SIDECAR_LOG_WITHOUT_TIMESTAMP"), Some("true"));
    }

    #[test]
    fn variables_that_workers_do_not_get_are_named() {
        let exports: [Export; 4] = ["SET", "GIVEN=1", "UNSET", "LATIN"].map(|text| text.parse().expect("valid"));
        let left_out = ["LATIN", "LATIN_TOO", "OLDPWD"].map(str::to_owned);
        assert_eq!(
            notices(&environment(&[("SET", "1")]), &exports, &left_out),
            [
                "-x UNSET has no effect: no such variable is set; give -x UNSET=VALUE",
                "workers do not get the variable \"LATIN\", because its name or value is not valid UTF-8",
                "workers do not get the variable \"LATIN_TOO\", because its name or value is not valid UTF-8",
            ]
        );
    }

    proptest! {
        #[test]
        fn no_name_comes_twice(caller in proptest::collection::btree_map("[A-C_]{1,3}", "[a-z]{0,3}", 0..20), exports in proptest::collection::vec("[A-C_]{1,3}(=[a-z]{0,3})?", 0..8)) {
            let caller: Environment = caller.into_iter().collect();
            let exports: Vec<Export> = exports.iter().map(|text| text.parse().expect("valid")).collect();
            let mut names: Vec<String> = common(&caller, &exports).into_iter().map(|(name, _)| name).collect();
            let count = names.len();
            names.sort();
            names.dedup();
            prop_assert_eq!(names.len(), count);
        }
    }
}
