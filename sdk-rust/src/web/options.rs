//! [`Options`]: the URL of the sidecar, the rank of this worker, timeouts.

use std::time::Duration;

use ronde_rpc::RankToken;
use ronde_wire::{JobName, Rank, limits};

use crate::error::Error;

/// How a client finds and uses its sidecar.
#[derive(Clone, Debug)]
pub struct Options {
    /// The sidecar's listener, such as `http://127.0.0.1:7600`.
    pub url: String,
    /// The job.
    pub job: JobName,
    /// The rank to claim.
    pub rank: Rank,
    /// How long to try to connect to the sidecar, which may still be starting.
    pub connect_timeout: Duration,
    /// How long to wait for all other ranks to attach.
    pub start_timeout: Duration,
    /// How long an operation may take before its waiter gives up; `None` for as long as it takes. Not for joins.
    pub operation_timeout: Option<Duration>,
    /// The program's name and version, for the sidecar's logs.
    pub client_name: String,
    /// The number of the process, for reports of failures; 0 where there is none.
    pub pid: u32,
    token: RankToken,
}

impl Options {
    /// Options for a rank with the 32 bytes of its token file.
    ///
    /// # Errors
    /// [`Error::Settings`] with every problem.
    pub fn new(url: impl Into<String>, job: &str, rank: u32, token: &[u8]) -> Result<Self, Error> {
        let url = url.into().trim_end_matches('/').to_owned();
        let mut problems = Vec::new();
        if !url.starts_with("http://") && !url.starts_with("https://") {
            problems.push(format!(
                "the URL is {url:?}, not such as http://127.0.0.1:7600, which `ronde run` gives as RONDE_WEB"
            ));
        }
        if rank as usize >= limits::RANKS_MAX {
            problems.push(format!("the rank is {rank}, but there are at most {} ranks", limits::RANKS_MAX));
        }
        let job = JobName::new(job).map_err(|error| problems.push(format!("the job: {error}")));
        let token = RankToken::new(token).map_err(|error| problems.push(error.to_string()));
        let (true, Ok(job), Ok(token)) = (problems.is_empty(), job, token) else {
            return Err(Error::Settings { problems });
        };
        Ok(Self {
            url,
            job,
            rank: Rank(rank),
            connect_timeout: CONNECT_TIMEOUT,
            start_timeout: START_TIMEOUT,
            operation_timeout: None,
            client_name: concat!("ronde-rust-web ", env!("CARGO_PKG_VERSION")).to_owned(),
            pid: 0,
            token,
        })
    }

    pub(super) fn token(&self) -> RankToken {
        self.token
    }
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const START_TIMEOUT: Duration = Duration::from_secs(120);
