//! What a process uses: resident memory, descriptors and processor time, as `/proc` reports them.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::process::Process;

/// Resident memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Private memory.
    pub private: u64,
    /// Mapped pages of shared memory.
    pub shared: u64,
    /// The largest sum of all kinds so far.
    pub peak: u64,
}

impl Resident {
    /// Private and shared memory together.
    #[must_use]
    pub fn sum(self) -> u64 {
        self.private + self.shared
    }
}

impl Process {
    /// Its resident memory.
    ///
    /// # Errors
    /// When it is gone.
    pub fn resident(&self) -> Result<Resident> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let bytes = |field: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(field));
            let line = line.with_context(|| format!("/proc has no {field}"))?;
            let number =
                line.trim().strip_suffix(" kB").with_context(|| format!("{field} {line} is in other units"))?;
            Ok(number.trim().parse::<u64>()? << 10)
        };
        Ok(Resident { private: bytes("RssAnon:")?, shared: bytes("RssShmem:")?, peak: bytes("VmHWM:")? })
    }

    /// The number of its open descriptors.
    ///
    /// # Errors
    /// When it is gone.
    pub fn descriptors(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.pid()))?.count())
    }

    /// The processor time that it has used.
    ///
    /// # Errors
    /// When it is gone.
    pub fn processor_time(&self) -> Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        // The name in brackets may contain spaces; user and system time are the 12th and 13th field after it.
        let (_, fields) = stat.rsplit_once(") ").context("a name in brackets")?;
        let ticks: Vec<u64> = fields.split(' ').skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
        ensure!(ticks.len() == 2, "{stat}");
        Ok(Duration::from_millis(ticks.iter().sum::<u64>() * TICK_MS))
    }

    /// Limits its descriptors: it can open no further ones until the limit is raised again.
    ///
    /// # Errors
    /// When the limit cannot be set.
    pub fn limit_descriptors(&self, most: usize) -> Result<()> {
        let mut command = std::process::Command::new("prlimit");
        command.args(["--pid", &self.pid().to_string(), &format!("--nofile={most}:")]);
        let limited = command.output().context("cannot run prlimit of util-linux")?;
        ensure!(limited.status.success(), "{}", String::from_utf8_lossy(&limited.stderr));
        Ok(())
    }
}

/// The kernel reports processor time in 1/100 s on every architecture that ronde supports.
const TICK_MS: u64 = 10;
