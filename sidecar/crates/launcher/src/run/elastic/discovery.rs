//! The hosts of an elastic job: a script that prints them is run again and again.
//!
//! The script's standard output has a line `host:slots` or `host` for each host. The first run has to succeed, because
//! nothing is known without it. When a later one fails, the last answer stays, and the failure is reported once.

use std::io;
use std::num::NonZeroU32;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::super::hosts::parse_name;
use super::plan::hosts::Listed;

/// The runs of a script.
pub(super) struct Discovery {
    answers: mpsc::Receiver<Answer>,
}

/// What a run of the script found, if it differs from the run before.
pub(super) type Answer = Result<Vec<Listed>, DiscoveryError>;

/// How a script is run.
#[derive(Clone, Debug)]
pub(super) struct Script {
    /// A command line of the shell.
    pub(super) command: String,
    /// The slots of hosts for which it prints no number.
    pub(super) slots_per_host: Option<NonZeroU32>,
    /// How long one run may take.
    pub(super) limit: Duration,
    /// From the end of one run to the next one.
    pub(super) interval: Duration,
}

/// Why a run of the script has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(in super::super) enum DiscoveryError {
    /// It cannot be run.
    #[error("the host discovery script {command:?} cannot be run: {reason}")]
    Start {
        /// The script.
        command: String,
        /// Why not.
        reason: String,
    },
    /// It failed.
    #[error("the host discovery script {command:?} {status}{}", quoted(.stderr))]
    Failed {
        /// The script.
        command: String,
        /// How it ended.
        status: String,
        /// The end of its standard error.
        stderr: String,
    },
    /// It did not end.
    #[error(
        "the host discovery script {command:?} did not end within {seconds} s, so it was killed; it has to print the hosts and exit"
    )]
    Slow {
        /// The script.
        command: String,
        /// The time it had.
        seconds: u64,
    },
    /// It printed too much.
    #[error("the host discovery script {command:?} printed more than {OUTPUT_BYTES_MAX} bytes")]
    Long {
        /// The script.
        command: String,
    },
    /// A line is no host.
    #[error(
        "line {number} of the host discovery script's output, {line:?}, is not host:slots, for example alpha:4 or [fd00::1]:4"
    )]
    Line {
        /// Counted from 1.
        number: usize,
        /// The line.
        line: String,
    },
    /// A line has no number of slots.
    #[error(
        "line {number} of the host discovery script's output, {line:?}, has no number of slots; print host:slots, or give --slots-per-host"
    )]
    NoSlots {
        /// Counted from 1.
        number: usize,
        /// The line.
        line: String,
    },
    /// A host comes twice.
    #[error("the host discovery script printed host {host:?} twice; print it once with all its slots")]
    Twice {
        /// The host.
        host: String,
    },
}

impl Discovery {
    /// Runs a script until this is dropped.
    pub(super) fn start(script: Script) -> Self {
        let (sender, answers) = mpsc::channel(1);
        tokio::spawn(repeat(script, sender));
        Self { answers }
    }

    /// The next answer that differs from the one before.
    pub(super) async fn next(&mut self) -> Answer {
        match self.answers.recv().await {
            Some(answer) => answer,
            // The task ends only when nobody receives.
            None => std::future::pending().await,
        }
    }
}

async fn repeat(script: Script, answers: mpsc::Sender<Answer>) {
    let mut last = None;
    loop {
        let answer = tokio::select! {
            answer = run(&script) => answer,
            () = answers.closed() => return,
        };
        if last.as_ref() != Some(&answer) {
            last = Some(answer.clone());
            if answers.send(answer).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = sleep(script.interval) => {}
            () = answers.closed() => return,
        }
    }
}

/// Runs the script once. Everything it starts ends with it.
async fn run(script: &Script) -> Answer {
    let command = || script.command.clone();
    let start = |error: &io::Error| DiscoveryError::Start { command: command(), reason: error.to_string() };
    let mut child = Command::new("/bin/sh")
        .args(["-c", &script.command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| start(&error))?;
    let group = Group(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw));
    let stdout = child.stdout.take().expect("piped at start");
    let stderr = child.stderr.take().expect("piped at start");
    let ended = async {
        let (output, errors, status) =
            tokio::join!(read(stdout, OUTPUT_BYTES_MAX), read(stderr, STDERR_BYTES_MAX), child.wait());
        io::Result::Ok((output?, errors?, status?))
    };
    let ended = timeout(script.limit, ended).await;
    drop(group);
    let Ok(ended) = ended else {
        // Its end is not waited for: the runtime collects it.
        return Err(DiscoveryError::Slow { command: command(), seconds: script.limit.as_secs() });
    };
    let (output, errors, status) = ended.map_err(|error| start(&error))?;
    if !status.success() {
        return Err(DiscoveryError::Failed { command: command(), status: exit(status), stderr: text(&errors.0) });
    }
    if output.1 {
        return Err(DiscoveryError::Long { command: command() });
    }
    parse(&String::from_utf8_lossy(&output.0), script.slots_per_host)
}

/// The process group of a run, which is killed in the end, whatever is left of it.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // Fails when it is empty.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Reads to the end and keeps the first bytes; returns whether there were more.
async fn read(mut source: impl AsyncRead + Unpin, bytes_max: usize) -> io::Result<(Vec<u8>, bool)> {
    let (mut kept, mut has_more) = (Vec::new(), false);
    let mut buffer = [0; 4 << 10];
    loop {
        let count = source.read(&mut buffer).await?;
        if count == 0 {
            return Ok((kept, has_more));
        }
        let room = count.min(bytes_max - kept.len());
        kept.extend_from_slice(&buffer[..room]);
        has_more |= room < count;
    }
}

fn exit(status: ExitStatus) -> String {
    crate::envelope::Status::from(status).to_string()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end().to_owned()
}

/// The script's lines, indented, so that none passes for a line of the launcher.
fn quoted(stderr: &str) -> String {
    let lines: Vec<String> = stderr.lines().map(ronde_wire::Failure::line).collect();
    if lines.is_empty() { String::new() } else { format!("\nits stderr:\n  {}", lines.join("\n  ")) }
}

/// Reads the output of a script; empty lines are ignored, and no line at all means that there is no host.
fn parse(output: &str, slots_per_host: Option<NonZeroU32>) -> Answer {
    let mut hosts: Vec<Listed> = Vec::new();
    for (number, line) in (1..).zip(output.lines().map(str::trim)) {
        if line.is_empty() {
            continue;
        }
        let host = parse_line(number, line, slots_per_host)?;
        if hosts.iter().any(|known| known.name == host.name) {
            return Err(DiscoveryError::Twice { host: host.name });
        }
        hosts.push(host);
    }
    Ok(hosts)
}

fn parse_line(number: usize, line: &str, slots_per_host: Option<NonZeroU32>) -> Result<Listed, DiscoveryError> {
    let invalid = || DiscoveryError::Line { number, line: shortened(line) };
    // The colons of an IPv6 address are within brackets.
    let end = line.rfind(']').map_or(0, |bracket| bracket + 1);
    let (name, slots) = match line[end..].find(':') {
        Some(colon) => (&line[..end + colon], Some(&line[end + colon + 1..])),
        None => (line, None),
    };
    let name = parse_name(name).ok_or_else(invalid)?;
    let slots = match (slots, slots_per_host) {
        (Some(slots), _) => slots.trim().parse().map_err(|_| invalid())?,
        (None, Some(slots)) => slots.get(),
        (None, None) => return Err(DiscoveryError::NoSlots { number, line: shortened(line) }),
    };
    Ok(Listed { name, slots })
}

fn shortened(line: &str) -> String {
    line.chars().take(LINE_CHARACTERS_MAX).collect()
}

/// A job has at most 4,096 ranks; a line with a long name has about 70 bytes.
const OUTPUT_BYTES_MAX: usize = 512 << 10;
const STDERR_BYTES_MAX: usize = 4 << 10;
const LINE_CHARACTERS_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn listed(name: &str, slots: u32) -> Listed {
        Listed { name: name.to_owned(), slots }
    }

    fn script(directory: &Path, text: &str) -> Script {
        let path = directory.join("discover.sh");
        std::fs::write(&path, format!("{text}\n")).expect("a temporary directory is writable");
        Script {
            // A shell reads it. Executing it fails while a process that another thread starts just now has inherited its
            // descriptor, which is open for writing.
            command: format!("sh '{}'", path.display()),
            slots_per_host: NonZeroU32::new(2),
            limit: Duration::from_secs(20),
            interval: Duration::from_millis(10),
        }
    }

    #[test]
    fn lines_name_hosts_and_slots() {
        let slots = NonZeroU32::new(3);
        let hosts = parse("alpha:4\n\n beta \n[fd00::1]:2\n[fd00::2]\n10.0.0.1:0\n", slots).expect("valid");
        let expected =
            [listed("alpha", 4), listed("beta", 3), listed("fd00::1", 2), listed("fd00::2", 3), listed("10.0.0.1", 0)];
        assert_eq!(hosts, expected);
        assert_eq!(parse("", slots), Ok(Vec::new()), "no host is an answer");
        for line in
            ["alpha:", "alpha:x", "alpha:-1", "-oProxyCommand=x:1", "a b", "fd00::1:2", "[fd00::1", ":4", "a:1 b:2"]
        {
            let error = parse(line, slots).expect_err(line);
            assert_eq!(error, DiscoveryError::Line { number: 1, line: line.to_owned() });
        }
        assert_eq!(parse("a:1\nb", None), Err(DiscoveryError::NoSlots { number: 2, line: "b".to_owned() }));
        assert_eq!(parse("a:1\na:2", None), Err(DiscoveryError::Twice { host: "a".to_owned() }));
    }

    #[tokio::test]
    async fn a_change_is_reported_and_a_repetition_is_not() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let list = directory.path().join("hosts");
        std::fs::write(&list, "alpha:1\n").expect("writable");
        let mut discovery = Discovery::start(script(directory.path(), &format!("cat '{}'", list.display())));
        assert_eq!(discovery.next().await, Ok(vec![listed("alpha", 1)]));
        let same = timeout(Duration::from_millis(300), discovery.next()).await;
        assert!(same.is_err(), "{same:?}");
        std::fs::write(directory.path().join("new"), "alpha:1\nbeta\n").expect("writable");
        std::fs::rename(directory.path().join("new"), &list).expect("writable");
        assert_eq!(discovery.next().await, Ok(vec![listed("alpha", 1), listed("beta", 2)]));
    }

    #[tokio::test]
    async fn a_failure_has_the_status_and_what_the_script_wrote() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let script = script(directory.path(), "echo alpha:1; echo 'no cloud' >&2; exit 3");
        let error = run(&script).await.expect_err("it fails");
        let expected =
            format!("the host discovery script {:?} exited with code 3\nits stderr:\n  no cloud", script.command);
        assert_eq!(error.to_string(), expected);
        let missing = Script { command: "/no/such/script".to_owned(), ..script };
        let error = run(&missing).await.expect_err("it is not there").to_string();
        assert!(error.starts_with("the host discovery script \"/no/such/script\" exited with code 127"), "{error}");
    }

    #[tokio::test]
    async fn a_later_failure_is_reported_once_and_then_the_hosts_again() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let broken = directory.path().join("broken");
        let text = format!("test -e '{}' && exit 1; echo alpha:1", broken.display());
        let mut discovery = Discovery::start(script(directory.path(), &text));
        discovery.next().await.expect("it succeeds");
        std::fs::write(&broken, "").expect("writable");
        assert!(matches!(discovery.next().await, Err(DiscoveryError::Failed { .. })));
        let same = timeout(Duration::from_millis(300), discovery.next()).await;
        assert!(same.is_err(), "{same:?}");
        std::fs::remove_file(&broken).expect("it is there");
        assert_eq!(discovery.next().await, Ok(vec![listed("alpha", 1)]));
    }

    #[tokio::test]
    async fn a_script_that_hangs_is_killed_with_all_it_started() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let pid = directory.path().join("pid");
        let text = format!("sleep 1000 & echo $! > '{}'; wait", pid.display());
        let mut number = String::new();
        // On a busy machine, the script takes longer to write the number.
        for limit in [500, 2_000, 8_000, 30_000].map(Duration::from_millis) {
            let script = Script { limit, ..script(directory.path(), &text) };
            let error = run(&script).await.expect_err("it hangs").to_string();
            let words = format!("did not end within {} s, so it was killed", limit.as_secs());
            assert!(error.contains(&words), "{error}");
            number = std::fs::read_to_string(&pid).unwrap_or_default();
            if !number.is_empty() {
                break;
            }
        }
        let pid: u32 = number.trim().parse().expect("it ran");
        let status = format!("/proc/{pid}/stat");
        for _ in 0..3_000 {
            let stat = std::fs::read_to_string(&status).unwrap_or_default();
            if stat.is_empty() || stat.contains(" Z ") {
                return;
            }
            sleep(Duration::from_millis(10)).await;
        }
        panic!("process {pid} still runs");
    }

    #[tokio::test]
    async fn endless_output_and_nonsense_are_failures() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let long = script(directory.path(), "head -c 600000 /dev/zero");
        assert!(matches!(run(&long).await, Err(DiscoveryError::Long { .. })));
        let nonsense = script(directory.path(), "echo 'Traceback (most recent call last):'");
        let error = run(&nonsense).await.expect_err("it is no host").to_string();
        assert!(error.starts_with("line 1 of the host discovery script's output, \"Traceback"), "{error}");
        let twice = script(directory.path(), "echo alpha:1; echo alpha:2");
        let error = run(&twice).await.expect_err("it comes twice").to_string();
        assert!(error.contains("printed host \"alpha\" twice"), "{error}");
    }
}
