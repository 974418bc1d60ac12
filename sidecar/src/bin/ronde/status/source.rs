//! Finds the sidecars of this host, and requests their status pages.

use std::fmt;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::directory::{self, ADMIN_FILE};
use ronde_wire::Failure;

/// The admin pages of a sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Their address.
    pub(crate) address: SocketAddr,
    /// The directory with the sidecar's sockets, if the address was read there.
    pub(crate) directory: Option<PathBuf>,
}

impl Target {
    fn at(url: &str) -> anyhow::Result<Self> {
        Ok(Self { address: address_of(url)?, directory: None })
    }

    fn within(directory: &Path) -> anyhow::Result<Self> {
        Ok(Self { address: address_in(directory)?, directory: Some(directory.to_owned()) })
    }
}

/// Its directory, which users can remove, or else its address.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.directory {
            Some(directory) => directory.display().fmt(f),
            None => self.address.fmt(f),
        }
    }
}

/// Returns the admin pages at a URL, in a directory with a sidecar's sockets, or else of all sidecars that are found.
pub(crate) fn targets(url: Option<&str>, socket: Option<&Path>) -> anyhow::Result<Vec<Target>> {
    match (url, socket) {
        (Some(url), _) => Ok(vec![Target::at(url)?]),
        (None, Some(directory)) => Ok(vec![Target::within(directory)?]),
        (None, None) => found(std::env::var_os("RONDE_SOCKET").map(PathBuf::from), &directory::default_base()),
    }
}

/// Returns the admin pages of the given directory, or of all this user's below `base`.
fn found(given: Option<PathBuf>, base: &Path) -> anyhow::Result<Vec<Target>> {
    if let Some(directory) = given {
        return Ok(vec![Target::within(&directory)?]);
    }
    let directories = directories(base)?;
    let found: Vec<Target> = directories.iter().filter_map(|directory| Target::within(directory).ok()).collect();
    // A sidecar that ends meanwhile has removed its directory. If no file can be read, the first one says why.
    if found.is_empty() { directories.iter().map(|directory| Target::within(directory)).collect() } else { Ok(found) }
}

/// Returns the directories of this user's sidecars below `base`, at least one.
pub(crate) fn directories(base: &Path) -> anyhow::Result<Vec<PathBuf>> {
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
    Ok(directories)
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

/// Reads the address of the admin pages from a sidecar's directory.
pub(crate) fn address_in(directory: &Path) -> anyhow::Result<SocketAddr> {
    let path = directory.join(ADMIN_FILE);
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()));
    let text = text.context(Code::NoSidecarFound)?;
    text.trim()
        .parse()
        .with_context(|| format!("{} does not contain an address", path.display()))
        .context(Code::NoSidecarFound)
}

/// Returns the address of `http://HOST:PORT`; a path after it is ignored. A name is resolved.
///
/// # Errors
/// When it is no such URL, or the name has no address.
pub(crate) fn address_of(url: &str) -> anyhow::Result<SocketAddr> {
    let rest = url.strip_prefix("http://").unwrap_or(url);
    let authority = rest.split('/').next().unwrap_or_default();
    if let Ok(address) = authority.parse() {
        return Ok(address);
    }
    let named = authority.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains([':', '[', ']']));
    let Some((host, Ok(port))) = named.map(|(host, port)| (host, port.parse::<u16>())) else {
        return Err(anyhow!("{url:?} is not http://HOST:PORT, for example http://127.0.0.1:41234"))
            .context(Code::CommandLine);
    };
    let found = (host, port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
    let found =
        found.with_context(|| format!("the host {host:?} of --url is not found")).context(Code::StatusUnreachable)?;
    let address = preferred(&found).with_context(|| format!("the host {host:?} of --url has no address"));
    address.context(Code::StatusUnreachable)
}

/// The first IPv4 address, else the first one: unless --admin-listen names another address, the pages are those of
/// 127.0.0.1, while `localhost` may have ::1 first.
fn preferred(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    addresses.iter().find(|address| address.is_ipv4()).or(addresses.first()).copied()
}

/// Asks sidecars at the same time, each by a thread, so that those that do not answer take the time of one. Where no more
/// threads can be started, this one asks. The answers are in the order of the addresses.
pub(crate) fn ask_all<T: Send>(
    addresses: &[SocketAddr],
    ask: impl Fn(SocketAddr) -> anyhow::Result<T> + Sync,
) -> Vec<anyhow::Result<T>> {
    let ask = &ask;
    let of_some = |some: &[SocketAddr]| {
        std::thread::scope(|scope| {
            let start = |address: &SocketAddr| {
                let address = *address;
                std::thread::Builder::new().spawn_scoped(scope, move || ask(address))
            };
            let asked: Vec<_> = some.iter().map(start).collect();
            let answer = |(asked, address): (std::io::Result<ScopedJoinHandle<'_, anyhow::Result<T>>>, &SocketAddr)| {
                let Ok(thread) = asked else { return ask(*address) };
                thread.join().unwrap_or_else(|_| Err(anyhow!("the thread that asks it has panicked")))
            };
            asked.into_iter().zip(some).map(answer).collect::<Vec<_>>()
        })
    };
    addresses.chunks(ASKED_MAX).flat_map(of_some).collect()
}

/// Requests the status page of a sidecar, and returns its text, within this time.
pub(crate) fn fetch(address: SocketAddr, within: Duration) -> anyhow::Result<String> {
    get(address, "/status", STATUS_BYTES_MAX, within)
}

/// Requests an admin page of at most so many bytes, and returns its text, within this time.
pub(crate) fn get(address: SocketAddr, path: &str, bytes_max: u64, within: Duration) -> anyhow::Result<String> {
    let answer = exchange(address, path, bytes_max, within);
    let answer = answer.with_context(|| format!("no sidecar answers at {address}; it may have ended"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let line = head.lines().next().unwrap_or_default();
    // Anything may serve at this port, and the text goes to a terminal.
    let reason = excerpt(body.trim());
    ensure!(!line.contains(" 404 "), "the sidecar at {address} has no page {path}: {reason}");
    if line.contains(" 503 ") && !reason.is_empty() {
        return Err(NotReady { address, reason }.into());
    }
    ensure!(line.contains(" 200 "), "the sidecar at {address} answers {:?}; it may be ending", excerpt(line));
    Ok(body.to_owned())
}

/// The answer of a sidecar that is busy, and may answer soon.
#[derive(Debug, thiserror::Error)]
#[error("the sidecar at {address} is not ready: {reason}")]
pub(crate) struct NotReady {
    address: SocketAddr,
    reason: String,
}

/// The begin of a text from elsewhere, without control characters.
fn excerpt(text: &str) -> String {
    let mut end = text.len().min(EXCERPT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Failure::line(&text[..end])
}

fn exchange(address: SocketAddr, path: &str, bytes_max: u64, within: Duration) -> std::io::Result<String> {
    let deadline = Instant::now() + within;
    // A timeout of zero would be none.
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let mut stream = TcpStream::connect_timeout(&address, left())?;
    stream.set_write_timeout(Some(left()))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: sidecar\r\nConnection: close\r\n\r\n");
    // In one packet: `write!` would send one for each part of the text.
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    let mut part = [0; 1 << 16];
    loop {
        stream.set_read_timeout(Some(left()))?;
        match stream.read(&mut part)? {
            0 => return String::from_utf8(answer).map_err(|error| Error::new(ErrorKind::InvalidData, error)),
            count => answer.extend_from_slice(&part[..count]),
        }
        if answer.len() as u64 > bytes_max {
            return Err(Error::new(ErrorKind::InvalidData, format!("it sends more than {bytes_max} bytes")));
        }
        if Instant::now() >= deadline {
            return Err(Error::new(ErrorKind::TimedOut, format!("it has not sent all of its page in {within:?}")));
        }
    }
}

const STATUS_BYTES_MAX: u64 = 16 << 20;
/// The sidecars that are asked at the same time.
const ASKED_MAX: usize = 256;
const EXCERPT_BYTES_MAX: usize = 1 << 10;

#[cfg(test)]
mod tests {
    use ronde_bootstrap::codes::coded;

    use super::*;
    use crate::closed_port::closed_port;

    #[test]
    fn addresses_are_read() {
        let address: SocketAddr = "127.0.0.1:41234".parse().expect("an address");
        for url in ["http://127.0.0.1:41234", "http://127.0.0.1:41234/status", "127.0.0.1:41234"] {
            assert_eq!(address_of(url).expect("good"), address, "{url}");
        }
        let address: SocketAddr = "[::1]:9400".parse().expect("an address");
        assert_eq!(address_of("http://[::1]:9400/").expect("good"), address);
    }

    #[test]
    fn a_host_of_a_url_is_resolved() {
        // Names are compared without regard to capitals.
        for url in ["http://localhost:41234/", "localhost:41234", "http://LocalHost:41234/status"] {
            let address = address_of(url).expect("a name of this host");
            assert!(address.ip().is_loopback() && address.port() == 41_234, "{url}: {address}");
        }
        // A name with an empty label is rejected before a name server is asked.
        let error = address_of("http://a..b:9400").expect_err("no name");
        let text = coded(&error, Code::CommandLine);
        assert!(
            text.starts_with("the host \"a..b\" of --url is not found: ") && text.ends_with("[RONDE-E603]"),
            "{text}"
        );
        let [six, four] = ["[::1]:1", "127.0.0.1:1"].map(|text| text.parse::<SocketAddr>().expect("an address"));
        assert_eq!(preferred(&[six, four]), Some(four));
        assert_eq!((preferred(&[six]), preferred(&[])), (Some(six), None));
    }

    #[test]
    fn what_is_no_url_is_a_mistake_of_the_command_line() {
        for url in ["http://example.org", "x", "", ":80", "https://127.0.0.1:9400", "a:b", "a:70000", "[::1:80", "::1"]
        {
            let text = coded(&address_of(url).expect_err(url), Code::StatusUnreachable);
            let expected = format!("{url:?} is not http://HOST:PORT, for example http://127.0.0.1:41234 [RONDE-E101]");
            assert_eq!(text, expected);
        }
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
        let ports = |given| {
            found(given, base.path()).map(|found| found.iter().map(|one| one.address.port()).collect::<Vec<_>>())
        };
        assert_eq!(ports(None).expect("two"), [1, 2]);
        assert_eq!(ports(Some(base.path().join("ronde-b-0-1"))).expect("one"), [2]);
        std::fs::write(base.path().join("ronde-b-0-1").join(ADMIN_FILE), "").expect("ours");
        assert_eq!(ports(None).expect("the other one"), [1], "one that is just starting or ending is left out");
        let error = ports(Some(base.path().join("other"))).expect_err("no address");
        assert!(coded(&error, Code::StatusUnreachable).contains("[RONDE-E602]"), "{error:#}");
    }

    #[test]
    fn a_sidecar_that_has_ended_is_reported() {
        let (_bound, closed) = closed_port();
        let error = fetch(closed, Duration::from_secs(5)).expect_err("no listener");
        assert!(coded(&error, Code::StatusUnreachable).contains("no sidecar answers at 127.0.0.1:"), "{error:#}");
    }

    #[test]
    fn what_another_server_answers_cannot_control_a_terminal() {
        for (head, expected) in [("404 Not Found", "has no page /status: "), ("503 Busy", "is not ready: ")] {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
            let address = listener.local_addr().expect("it is bound");
            let server = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("it connects");
                let mut request = [0; 1 << 10];
                let _ = stream.read(&mut request).expect("a request in one packet");
                let body = "\u{1b}[2Jé".repeat(100_000);
                stream.write_all(format!("HTTP/1.1 {head}\r\n\r\n{body}").as_bytes()).expect("it reads");
            });
            let error = format!("{:#}", fetch(address, Duration::from_secs(5)).expect_err("no page"));
            server.join().expect("it has ended");
            assert!(error.contains(expected) && error.contains("\\u{1b}[2Jé"), "{error}");
            assert!(!error.contains(char::is_control) && error.len() < 5_000, "{} bytes", error.len());
        }
    }

    #[test]
    fn a_page_that_never_ends_is_given_up() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("it connects");
            // One byte at a time comes within each wait, until the client has gone.
            while stream.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let began = Instant::now();
        let error = fetch(address, Duration::from_millis(200)).expect_err("it never ends");
        assert!(format!("{error:#}").contains("no sidecar answers"), "{error:#}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        server.join().expect("it has ended");
    }
}
