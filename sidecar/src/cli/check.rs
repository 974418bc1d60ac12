//! `ronde check`: whether this host, and others, are fit for jobs. One line a finding, with the fix.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant, SystemTime};

use clap::Args;

use super::codes::Code;
use super::run::SSH;
use judge::{Facts, Finding, Mark, compare, fail, judge};

mod judge;
mod probe;

/// Arguments of `ronde check`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArgs {
    /// Also look at these hosts, and compare versions and clocks with theirs.
    #[arg(long, value_name = "HOST,...", value_delimiter = ',')]
    hosts: Vec<String>,
    /// The command that reaches other hosts; host and command line are added to it.
    #[arg(long, value_name = "CMD", default_value = SSH)]
    remote_shell: String,
    /// Where the ronde binary is on other hosts. [default: where it is on this one]
    #[arg(long, value_name = "PATH")]
    remote_ronde: Option<PathBuf>,
    /// Print the facts as JSON instead, for the host that asks.
    #[arg(long, hide = true)]
    facts: bool,
}

/// Prints all findings; the exit code is 1 when one of them is a failure.
pub(super) fn main(args: &CheckArgs) -> ExitCode {
    let own = probe::probe();
    if args.facts {
        return match serde_json::to_string(&own) {
            Ok(text) => {
                super::print(&format!("{text}\n"));
                ExitCode::SUCCESS
            }
            Err(error) => super::fail(Code::HostUnfit, &format!("the facts are no JSON: {error}"), EXIT_FAILURE),
        };
    }
    let mut worst = report("", &judge(&own));
    for host in &args.hosts {
        worst = worst.max(report(&format!("{host}: "), &of_host(args, host, &own)));
    }
    match worst {
        Mark::Fail => {
            super::fail(Code::HostUnfit, "jobs will not run here as it is; see the lines marked fail", EXIT_FAILURE)
        }
        Mark::Ok | Mark::Warn => ExitCode::SUCCESS,
    }
}

/// Prints findings; the worst mark of them.
fn report(prefix: &str, findings: &[Finding]) -> Mark {
    for finding in findings {
        super::print(&format!("{prefix}{finding}\n"));
    }
    findings.iter().map(|finding| finding.mark).max().unwrap_or(Mark::Ok)
}

fn of_host(args: &CheckArgs, host: &str, own: &Facts) -> Vec<Finding> {
    let began = Instant::now();
    let asked_unix_ms = unix_ms();
    match ask(args, host) {
        Ok(facts) => {
            let round_trip_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            let mut findings = compare(own, &facts, asked_unix_ms + round_trip_ms / 2, round_trip_ms);
            // Said by the comparison already.
            findings.extend(judge(&facts).into_iter().filter(|finding| finding.topic != "version"));
            findings
        }
        Err(reason) => {
            let fix = "check that `ssh HOST true` works without a password and that ronde is installed there";
            vec![fail("reach", reason, fix)]
        }
    }
}

/// Asks a host for its facts by the remote shell.
fn ask(args: &CheckArgs, host: &str) -> Result<Facts, String> {
    let ronde = args.remote_ronde.clone().map_or_else(std::env::current_exe, Ok).map_err(|error| error.to_string())?;
    let quoted = ronde.to_string_lossy().replace('\'', r"'\''");
    let mut words = args.remote_shell.split_whitespace();
    let program = words.next().ok_or("--remote-shell is empty; give a command like ssh")?;
    let mut command = Command::new(program);
    command.args(words).arg(host).arg(format!("exec '{quoted}' check --facts"));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| format!("cannot start {program:?}: {error}"))?;
    let (answer, said) = (drain(child.stdout.take()), drain(child.stderr.take()));
    let deadline = Instant::now() + ANSWER_WAIT;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                // It may have ended in this moment.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("no answer within {} s", ANSWER_WAIT.as_secs()));
            }
            None => std::thread::sleep(ANSWER_POLL),
        }
    };
    let (answer, said) = (answer.join().unwrap_or_default(), said.join().unwrap_or_default());
    let last = said.lines().last().unwrap_or_default();
    if !status.success() {
        return Err(format!("the remote shell ended with {status}: {last}"));
    }
    serde_json::from_str(&answer)
        .map_err(|error| format!("its answer is not understood, it may run another version: {error}"))
}

/// Reads a pipe in a thread of its own, so that a full one does not stop the process behind it.
fn drain(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        // What could be read counts.
        let _ = pipe.map(|pipe| pipe.take(ANSWER_BYTES_MAX).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    })
}

fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

const ANSWER_WAIT: Duration = Duration::from_secs(30);
const ANSWER_POLL: Duration = Duration::from_millis(20);
const ANSWER_BYTES_MAX: u64 = 1 << 20;
const EXIT_FAILURE: u8 = 1;

const EXAMPLES: &str = "Examples:
  ronde check
  ronde check --hosts alpha,beta --remote-ronde /opt/ronde/bin/ronde";

#[cfg(test)]
mod tests {
    use super::*;

    fn args(remote_shell: &str) -> CheckArgs {
        CheckArgs {
            hosts: vec![],
            remote_shell: remote_shell.to_owned(),
            remote_ronde: Some("/r".into()),
            facts: false,
        }
    }

    /// A remote shell that does what a script says.
    fn shell(script: &str) -> (tempfile::TempDir, CheckArgs) {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("shell");
        std::fs::write(&path, script).expect("it is ours");
        let args = args(&format!("sh {}", path.display()));
        (directory, args)
    }

    #[test]
    fn a_host_that_answers_is_judged_and_compared() {
        let own = probe::probe();
        let facts = serde_json::to_string(&Facts { version: "0.0.1".to_owned(), ..own.clone() }).expect("JSON");
        let (_directory, args) =
            shell(&format!("test \"$1 $2\" = \"h exec '/r' check --facts\" && cat <<'END'\n{facts}\nEND\n"));
        let findings = of_host(&args, "h", &own);
        assert_eq!(findings[0].mark, Mark::Fail);
        assert!(findings[0].found.contains("ronde 0.0.1 there"), "{findings:?}");
        assert!(findings.len() > 5, "{findings:?}");
    }

    #[test]
    fn a_host_that_does_not_answer_says_why() {
        let own = probe::probe();
        let (_directory, args) = shell("echo 'Permission denied (publickey).' >&2; exit 255");
        let findings = of_host(&args, "h", &own);
        assert!(findings[0].to_string().contains("255: Permission denied (publickey)."), "{findings:?}");
        let (_directory, args) = shell("echo hello");
        assert!(of_host(&args, "h", &own)[0].to_string().contains("not understood"));
        let findings = of_host(&self::args("/nowhere/ssh"), "h", &own);
        assert!(findings[0].to_string().contains("cannot start \"/nowhere/ssh\""), "{findings:?}");
    }
}
