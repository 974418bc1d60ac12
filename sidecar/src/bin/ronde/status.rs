//! `ronde status`: shows the state of the sidecars of this host, from their admin pages.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use clap::Args;
use serde_json::Value;

use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::directory::{self, ADMIN_FILE};
use ronde_bootstrap::exit::EXIT_UNAVAILABLE;

mod render;

/// Arguments of `ronde status`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct StatusArgs {
    /// The directory with a sidecar's sockets. [default: RONDE_SOCKET, else all of this user's jobs on this host]
    #[arg(long, value_name = "DIR", conflicts_with = "url")]
    socket: Option<PathBuf>,
    /// The address of a sidecar's admin pages.
    #[arg(long, value_name = "http://HOST:PORT")]
    url: Option<String>,
    /// How long to measure traffic, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=60))]
    measure: u64,
    /// Print the pages as JSON, one line for each sidecar.
    #[arg(long)]
    json: bool,
}

/// Prints the state of each sidecar that is found.
pub(super) fn main(args: &StatusArgs) -> ExitCode {
    match run(args) {
        Ok(text) => {
            ronde_bootstrap::exit::print(&text);
            ExitCode::SUCCESS
        }
        Err(error) => ronde_bootstrap::exit::fail(
            Code::StatusUnreachable,
            &coded(&error, Code::StatusUnreachable),
            EXIT_UNAVAILABLE,
        ),
    }
}

fn run(args: &StatusArgs) -> anyhow::Result<String> {
    let addresses = match (&args.url, &args.socket) {
        (Some(url), _) => vec![address_of(url)?],
        (None, Some(directory)) => vec![address_in(directory)?],
        (None, None) => found(std::env::var_os("RONDE_SOCKET").map(PathBuf::from), &directory::default_base())?,
    };
    let first: Vec<Value> = addresses.iter().map(|address| page(*address)).collect::<anyhow::Result<_>>()?;
    if args.json {
        return Ok(first.iter().map(|page| format!("{page}\n")).collect());
    }
    let began = Instant::now();
    std::thread::sleep(Duration::from_secs(args.measure));
    let second: Vec<Value> = addresses.iter().map(|address| page(*address)).collect::<anyhow::Result<_>>()?;
    let seconds = began.elapsed().as_secs_f64();
    let texts: Vec<String> =
        first.iter().zip(&second).map(|(before, now)| render::render(before, now, seconds)).collect();
    Ok(texts.join("\n"))
}

/// Returns the admin pages of the given directory, or of all this user's below `base`.
fn found(given: Option<PathBuf>, base: &Path) -> anyhow::Result<Vec<SocketAddr>> {
    if let Some(directory) = given {
        return Ok(vec![address_in(&directory)?]);
    }
    let entries = std::fs::read_dir(base).with_context(|| format!("cannot read {}", base.display()));
    let entries = entries.context(Code::NoSidecarFound)?;
    let mut directories: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("ronde-") && is_own(entry))
        .map(|entry| entry.path())
        .filter(|path| path.join(ADMIN_FILE).exists())
        .collect();
    directories.sort();
    let text = "no sidecar is found below {}; start a job, or name its socket directory with --socket";
    ensure_some(&directories, &text.replace("{}", &base.display().to_string()))?;
    directories.iter().map(|directory| address_in(directory)).collect()
}

/// Whether an entry is a directory of this user; another user's could lead to any address.
fn is_own(entry: &std::fs::DirEntry) -> bool {
    let user = nix::unistd::geteuid().as_raw();
    // Root looks at the jobs of all users. Links are not followed.
    entry.metadata().is_ok_and(|found| found.is_dir() && (found.uid() == user || user == 0))
}

fn ensure_some(directories: &[PathBuf], text: &str) -> anyhow::Result<()> {
    if directories.is_empty() { Err(anyhow!(text.to_owned())).context(Code::NoSidecarFound) } else { Ok(()) }
}

fn address_in(directory: &Path) -> anyhow::Result<SocketAddr> {
    let path = directory.join(ADMIN_FILE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()));
    let text = text.context(Code::NoSidecarFound)?;
    text.trim()
        .parse()
        .with_context(|| format!("{} does not contain an address", path.display()))
        .context(Code::NoSidecarFound)
}

/// Parses `http://HOST:PORT` with an IP address as the host; a path after it is ignored.
fn address_of(url: &str) -> anyhow::Result<SocketAddr> {
    let rest = url.strip_prefix("http://").unwrap_or(url);
    let host = rest.split('/').next().unwrap_or_default().replace("localhost", "127.0.0.1");
    host.parse().with_context(|| format!("{url:?} is not http://ADDRESS:PORT, for example http://127.0.0.1:41234"))
}

/// Requests the status page.
fn page(address: SocketAddr) -> anyhow::Result<Value> {
    let ask = || -> anyhow::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET /status HTTP/1.1\r\nHost: sidecar\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.take(PAGE_BYTES_MAX).read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().with_context(|| format!("no sidecar answers at {address}; it may have ended"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let line = head.lines().next().unwrap_or_default();
    ensure!(line.contains(" 200 "), "the sidecar at {address} answers {line:?}; it may be ending");
    serde_json::from_str(body).with_context(|| format!("the answer of {address} is not a status page"))
}

const PATIENCE: Duration = Duration::from_secs(5);
const PAGE_BYTES_MAX: u64 = 16 << 20;

const EXAMPLES: &str = "Examples:
  ronde status
  ronde status --url http://127.0.0.1:41234 --measure 5";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let address: SocketAddr = "127.0.0.1:41234".parse().expect("an address");
        for url in
            ["http://127.0.0.1:41234", "http://127.0.0.1:41234/status", "127.0.0.1:41234", "http://localhost:41234/"]
        {
            assert_eq!(address_of(url).expect("good"), address, "{url}");
        }
        assert!(address_of("http://example.org").is_err());
    }

    #[test]
    fn session_directories_are_found_and_a_missing_one_is_an_error() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let error = found(None, base.path()).expect_err("nothing is there");
        assert!(coded(&error, Code::StatusUnreachable).contains("no sidecar is found below"), "{error:#}");
        for (name, address) in [("ronde-b-0-1", "127.0.0.1:2\n"), ("ronde-a-0-1", "127.0.0.1:1\n"), ("other", "x")] {
            let directory = base.path().join(name);
            std::fs::create_dir(&directory).expect("ours");
            std::fs::write(directory.join(ADMIN_FILE), address).expect("ours");
        }
        let ports =
            |given| found(given, base.path()).map(|found| found.iter().map(SocketAddr::port).collect::<Vec<_>>());
        assert_eq!(ports(None).expect("two"), [1, 2]);
        assert_eq!(ports(Some(base.path().join("ronde-b-0-1"))).expect("one"), [2]);
        let error = ports(Some(base.path().join("other"))).expect_err("no address");
        assert!(coded(&error, Code::StatusUnreachable).contains("[RONDE-E602]"), "{error:#}");
    }

    #[test]
    fn a_sidecar_that_has_ended_is_reported() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        drop(listener);
        let error = page(address).expect_err("no listener");
        assert!(coded(&error, Code::StatusUnreachable).contains("no sidecar answers at 127.0.0.1:"), "{error:#}");
    }
}
