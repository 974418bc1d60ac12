//! A process that calls the net plugin as NCCL does, on command.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::process::{Line, Process};
use super::{Cluster, Network, PATIENCE, ronde_binary};

/// A running driver of the plugin; `tests/nccl` describes its commands.
#[derive(Debug)]
pub struct NcclDriver {
    /// The process.
    pub process: Process,
    /// Keeps the plugin under the name that NCCL loads.
    _directory: tempfile::TempDir,
}

impl NcclDriver {
    /// Starts one as a rank of a job, with a version of the plugin's table, and initialises the plugin.
    ///
    /// # Errors
    /// When it cannot be started, or has no sidecar.
    pub fn start(cluster: &Cluster, rank: u32, version: u32) -> Result<Self> {
        Self::start_by(Command::new(built(DRIVER)?), cluster, rank, version)
    }

    /// The same on a host of a network.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_on(network: &Network, host: u32, cluster: &Cluster, rank: u32) -> Result<Self> {
        let program = built(DRIVER)?;
        let program = program.to_str().context("the path of the driver is text")?;
        Self::start_by(network.command(host, program), cluster, rank, NEWEST)
    }

    fn start_by(command: Command, cluster: &Cluster, rank: u32, version: u32) -> Result<Self> {
        let sidecar = cluster.sidecar_of(rank);
        let mut driver = Self::with_program(command, version, |command| {
            command
                .env("RONDE_SOCKET", sidecar.socket_dir()?)
                .env("RONDE_RANK", rank.to_string())
                .env("RONDE_TOKEN_FILE", sidecar.token_file(rank)?);
            Ok(())
        })?;
        ensure!(driver.ask("init")? == "1", "there is another number of devices");
        Ok(driver)
    }

    /// Starts one in any environment.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn with(version: u32, adjust: impl FnOnce(&mut Command) -> Result<()>) -> Result<Self> {
        Self::with_program(Command::new(built(DRIVER)?), version, adjust)
    }

    fn with_program(
        mut command: Command,
        version: u32,
        adjust: impl FnOnce(&mut Command) -> Result<()>,
    ) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let library = directory.path().join(LIBRARY);
        std::fs::copy(built("libnccl_net_ronde.so")?, &library)?;
        command.arg(&library).arg(version.to_string());
        adjust(&mut command)?;
        Ok(Self { process: Process::start("a driver of the net plugin", &mut command)?, _directory: directory })
    }

    /// Sends a command without waiting for its answer.
    ///
    /// # Errors
    /// When it has ended.
    pub fn begin(&mut self, command: &str) -> Result<()> {
        self.process.write_line(command)
    }

    /// Waits for the answer of the oldest command.
    ///
    /// # Errors
    /// When there is none, or an error.
    pub fn finish(&mut self) -> Result<String> {
        match self.answer()? {
            Ok(text) => Ok(text),
            Err(text) => bail!("the driver answered err {text}; its log:\n{}", self.process.log()),
        }
    }

    /// Executes a command.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.begin(command)?;
        self.finish().with_context(|| format!("it was asked to {}", command.get(..40).unwrap_or(command)))
    }

    /// Executes a command that has to fail, and returns NCCL's code and the line of the log that has this text.
    ///
    /// # Errors
    /// When it does not fail.
    pub fn fails(&mut self, command: &str, text: &str) -> Result<String> {
        self.begin(command)?;
        match self.answer()? {
            Ok(answer) => bail!("{command} does not fail, but answers {answer}"),
            Err(code) => {
                let found = |line: &Line| line.text.contains(text).then_some(());
                self.process.await_log(text, PATIENCE, found)?;
                Ok(code)
            }
        }
    }

    /// Executes a command until it fails, for a time.
    ///
    /// # Errors
    /// When it does not fail in this time.
    pub fn fails_within(&mut self, command: &str, within: Duration) -> Result<String> {
        let begin = std::time::Instant::now();
        while begin.elapsed() < within {
            self.begin(command)?;
            if let Err(code) = self.answer()? {
                return Ok(code);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!("{command} did not fail within {within:?}")
    }

    /// Listens; the listener's name and the handle.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn listen(&mut self) -> Result<(String, String)> {
        let answer = self.ask("listen")?;
        let (listener, handle) = answer.split_once(' ').context("a listener has a handle")?;
        Ok((listener.to_owned(), handle.to_owned()))
    }

    /// Connects to another driver, which accepts: the names of the sender here and of the receiver there.
    ///
    /// # Errors
    /// As [`Self::finish`].
    pub fn connect(&mut self, other: &mut Self) -> Result<(String, String)> {
        let (listener, handle) = other.listen()?;
        self.begin(&format!("connect {handle}"))?;
        let receiver = other.ask(&format!("accept {listener}"))?;
        other.ask(&format!("close {listener}"))?;
        Ok((self.finish()?, receiver))
    }

    fn answer(&mut self) -> Result<Result<String, String>> {
        self.process.await_line("an answer", Duration::from_secs(90), |line| {
            let ok = line.text.strip_prefix("ok ").map(|text| Ok(text.to_owned()));
            ok.or_else(|| line.text.strip_prefix("err ").map(|text| Err(text.to_owned())))
        })
    }
}

/// The bytes that a driver sends for a number.
#[must_use]
pub fn pattern(seed: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed).to_le_bytes()[0]).collect()
}

/// The digest that a driver prints for bytes.
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// A file that was built next to the binary under test.
fn built(name: &str) -> Result<PathBuf> {
    let binary = ronde_binary()?;
    let path = binary.parent().unwrap_or(Path::new(".")).join(name);
    ensure!(path.is_file(), "{} does not exist; build it with `cargo build --workspace --all-targets`", path.display());
    Ok(path)
}

/// The program that calls the plugin.
const DRIVER: &str = "ronde-test-nccl";
/// The newest version of the plugin's table.
const NEWEST: u32 = 8;
/// What NCCL loads with `NCCL_NET_PLUGIN=ronde`.
const LIBRARY: &str = "libnccl-net-ronde.so";
