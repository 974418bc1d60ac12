//! Reads a flight record from untrusted bytes.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use ronde_wire::{Failure, JobName, limits};
use serde::Deserialize;

use super::{FILE_BYTES_MAX, FORMAT, FlightRecord, OPERATIONS_MAX, RankRecord, RequestRecord, VERSION, WAITING_MAX};

/// Why a record cannot be read, as a sentence that follows the file's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// It cannot be opened or read.
    #[error("cannot be read: {0}")]
    File(String),
    /// It is too large.
    #[error("has more than {FILE_BYTES_MAX} bytes, which no flight record has")]
    Large,
    /// It is not a JSON document, or not a whole one.
    #[error("is not a flight record, or is truncated: {0}")]
    Json(String),
    /// It is another JSON document.
    #[error("is not a flight record of ronde")]
    Foreign,
    /// Another version wrote it.
    #[error(
        "is a flight record of format {0}, but this ronde reads format {VERSION}; read it with the version of ronde that wrote it"
    )]
    Version(u32),
    /// It contains more than sidecars write.
    #[error("is damaged: it has {0}")]
    Bounds(String),
}

/// The fields that every version has.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    format: String,
    #[serde(default)]
    version: u32,
}

impl FlightRecord {
    /// Reads a record from a regular file. Neither a pipe without a writer nor an endless file holds it up.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn read(path: &Path) -> Result<Self, Unreadable> {
        let failed = |error: std::io::Error| Unreadable::File(error.to_string());
        let open = OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path);
        let file = open.map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Unreadable::File("it is not a regular file".to_owned()));
        }
        let mut bytes = Vec::new();
        let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(failed)?;
        Self::parse(&bytes)
    }

    /// Parses a record. Its texts are safe to print afterwards.
    ///
    /// # Errors
    /// Why it cannot be used.
    pub fn parse(bytes: &[u8]) -> Result<Self, Unreadable> {
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(Unreadable::Large);
        }
        let json = |error: serde_json::Error| Unreadable::Json(Failure::line(&error.to_string()));
        let head: Head = serde_json::from_slice(bytes).map_err(json)?;
        if head.format != FORMAT {
            return Err(Unreadable::Foreign);
        }
        if head.version != VERSION {
            return Err(Unreadable::Version(head.version));
        }
        let mut record: Self = serde_json::from_slice(bytes).map_err(json)?;
        record.check()?;
        record.make_printable();
        Ok(record)
    }

    fn check(&self) -> Result<(), Unreadable> {
        // The name becomes part of a file's name.
        let is_name = JobName::new(self.job.as_str()).is_ok();
        is_name.then_some(()).ok_or_else(|| Unreadable::Bounds("an impossible job name".to_owned()))?;
        bounded("ranks", self.placement.len(), limits::RANKS_MAX)?;
        bounded("ranks of this sidecar", self.ranks.len(), limits::LOCAL_RANKS_MAX)?;
        bounded("operations", self.operations.len(), OPERATIONS_MAX)?;
        bounded("counts of ranks", self.last_to_be_ready.len().max(self.waited_for_us.len()), limits::RANKS_MAX)?;
        bounded("waiting operations", self.waiting.len(), WAITING_MAX)?;
        bounded("process sets", self.sets.len(), WAITING_MAX)?;
        for ranks in self.waiting.iter().map(|waiting| &waiting.missing).chain(self.sets.iter().map(|set| &set.ranks)) {
            bounded("ranks of one operation or process set", ranks.len(), limits::RANKS_MAX)?;
        }
        self.ranks.iter().try_for_each(|rank| bounded("requests of a rank", rank.requests.len(), OPERATIONS_MAX))
    }

    fn make_printable(&mut self) {
        let Self { run, failure, ranks, operations, waiting, .. } = self;
        clean(run);
        failure.iter_mut().for_each(clean);
        ranks.iter_mut().flat_map(|rank: &mut RankRecord| &mut rank.requests).for_each(clean_request);
        operations.iter_mut().for_each(|operation| {
            clean(&mut operation.name);
            operation.failed.iter_mut().for_each(clean);
        });
        waiting.iter_mut().for_each(|waiting| {
            clean(&mut waiting.name);
            clean(&mut waiting.collective);
        });
    }
}

fn clean_request(request: &mut RequestRecord) {
    clean(&mut request.name);
    clean(&mut request.collective);
    request.site.iter_mut().for_each(clean);
    if let Some(failed) = request.ended.as_mut().and_then(|end| end.failed.as_mut()) {
        clean(&mut failed.cause);
        clean(&mut failed.reason);
    }
}

/// Removes control characters and bounds the length.
fn clean(text: &mut String) {
    let is_plain = text.len() <= limits::REASON_BYTES_MAX && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if !is_plain {
        *text = Failure::line(text);
    }
}

fn bounded(what: &str, count: usize, most: usize) -> Result<(), Unreadable> {
    if count > most {
        Err(Unreadable::Bounds(format!("{count} {what}, but at most {most} are possible")))
    } else {
        Ok(())
    }
}
