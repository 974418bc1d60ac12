//! `ronde check`: checks whether this host and others are fit for jobs. It prints one line per finding, with the fix, and a summary.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Context;
use clap::Args;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{fail as refuse, fail_with as refuse_with, print};
use ronde_bootstrap::numbers::whole;
use ronde_bootstrap::ports::PortRange;

use crate::run::{RemoteShell, SSH, names};
use answer::Answer;
use judge::{Facts, Finding, Mark, compare, fail, judge, ok};

mod answer;
mod judge;
mod pci;
mod probe;
mod reach;

/// Arguments of `ronde check`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CheckArgs {
    /// Also check these hosts: compare versions and clocks, send datagrams and connect there. Slots are ignored.
    #[arg(short = 'H', long, value_name = "HOST[:SLOTS],...")]
    hosts: Option<String>,
    /// The command that reaches other hosts; ronde appends host and command line.
    #[arg(long, value_name = "CMD", default_value = SSH)]
    remote_shell: String,
    /// The port of ssh on other hosts. [default: that of ssh's configuration]
    #[arg(short = 'p', long, value_name = "PORT", value_parser = whole::<u16>(1..=u16::MAX.into()))]
    ssh_port: Option<u16>,
    /// The private key for ssh. [default: that of ssh's configuration]
    #[arg(short = 'i', long, value_name = "FILE")]
    ssh_identity_file: Option<PathBuf>,
    /// The path of the ronde binary on other hosts. [default: its path on this one]
    #[arg(long, value_name = "PATH")]
    remote_ronde: Option<PathBuf>,
    /// The range that jobs will use with --ports: check that its ports are free and reachable.
    #[arg(long, value_name = "LOW-HIGH")]
    ports: Option<PortRange>,
    /// Print one object of JSON instead of lines: the findings, and a summary.
    #[arg(long)]
    json: bool,
    /// Print the facts as JSON instead, for the requesting host.
    #[arg(long, hide = true)]
    facts: bool,
}

/// Prints all findings and their summary; the exit code is 1 when one of them is a failure.
pub fn main(args: &CheckArgs) -> ExitCode {
    let own = probe::probe();
    if args.facts {
        return answer(own, args.ports);
    }
    let remote = match Remote::of(args) {
        Ok(remote) => remote,
        Err(error) => return refuse_with(&error, Code::CommandLine),
    };
    let mut findings = judge(&own);
    findings.extend(args.ports.map(of_range));
    let mut answer = Answer::default();
    answer.add(None, findings, args.json);
    for host in &remote.hosts {
        answer.add(Some(host.as_str()), remote.check(host, args.ports, &own), args.json);
    }
    let summary = answer.summary();
    if let Err(error) = print(&if args.json { answer.json() + "\n" } else { format!("{summary}\n") }) {
        return refuse_with(&error, Code::OutputLost);
    }
    match answer.worst() {
        Mark::Fail => refuse(Code::HostUnfit, "jobs cannot run on these hosts; fix what the lines marked fail name"),
        Mark::Ok | Mark::Warn => ExitCode::SUCCESS,
    }
}

/// Serves a check from another host: prints the facts, echoes datagrams and accepts connections until its input ends.
fn answer(mut own: Facts, ports: Option<PortRange>) -> ExitCode {
    let socket = match ports {
        Some(range) => range.ports().find_map(|port| bind(port).ok()),
        None => bind(0).ok(),
    };
    own.echo_port = socket.as_ref().map(|(socket, _)| socket.local_addr().map_or(0, |address| address.port()));
    match serde_json::to_string(&own) {
        Ok(text) => reach::print_line(&text),
        Err(error) => {
            return refuse(Code::HostUnfit, &format!("cannot encode the facts as JSON: {error}"));
        }
    }
    // The kernel accepts connections to a listener.
    if let Some((socket, _listener)) = socket {
        reach::echo(&socket);
    }
    ExitCode::SUCCESS
}

/// Binds UDP and TCP to one port at all addresses, of both families where available.
fn bind(port: u16) -> std::io::Result<(UdpSocket, TcpListener)> {
    let any = |port| [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
    let mut tries = if port == 0 { BIND_TRIES } else { 1 };
    loop {
        tries -= 1;
        let socket = UdpSocket::bind(&any(port)[..])?;
        match TcpListener::bind(&any(socket.local_addr()?.port())[..]) {
            Ok(listener) => return Ok((socket, listener)),
            // The port is free for UDP but not for TCP.
            Err(_) if tries > 0 => {}
            Err(error) => return Err(error),
        }
    }
}

fn of_range(range: PortRange) -> Finding {
    let (all, free) = (range.ports().count(), range.ports().filter(|port| bind(*port).is_ok()).count());
    let text = format!("{free} of the {all} ports {range} are free for UDP and TCP");
    match free {
        0 => fail(
            "ports",
            text,
            "end the processes that use them (`ss -tulpn`), or give jobs another range with --ports",
        ),
        _ => ok("ports", text),
    }
}

/// Other hosts, and the way to them.
struct Remote {
    hosts: Vec<String>,
    shell: RemoteShell,
    ronde: PathBuf,
}

impl Remote {
    /// Reads it from the options, of which jobs have the same.
    fn of(args: &CheckArgs) -> anyhow::Result<Self> {
        Ok(Self {
            hosts: args.hosts.as_deref().map_or(Ok(Vec::new()), names).context(Code::Hosts)?,
            shell: RemoteShell::new(&args.remote_shell, args.ssh_port, args.ssh_identity_file.as_deref())?,
            ronde: args.remote_ronde.clone().map_or_else(std::env::current_exe, Ok)?,
        })
    }

    fn check(&self, host: &str, ports: Option<PortRange>, own: &Facts) -> Vec<Finding> {
        let asked_unix_ms = unix_ms();
        let judged = |facts: &Facts, round_trip_ms: u64| {
            let mut findings = compare(own, facts, asked_unix_ms + round_trip_ms / 2, round_trip_ms);
            // The comparison already reports the version.
            findings.extend(judge(facts).into_iter().filter(|finding| finding.topic != "version"));
            findings
        };
        reach::ask(&self.shell, host, &self.ronde, ports, judged).unwrap_or_else(|reason| {
            let fix = "check that `ssh HOST true` works without a password and that ronde is installed there";
            vec![fail("reach", reason, fix)]
        })
    }
}

fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

const BIND_TRIES: u32 = 16;

const EXAMPLES: &str = "Examples:
  ronde check --json
  ronde check -H alpha:4,beta:4 -p 2222 -i ~/.ssh/cluster_key";
