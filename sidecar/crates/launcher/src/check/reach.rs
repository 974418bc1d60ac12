//! Checks of other hosts: their facts over the remote shell, and whether UDP and TCP reach them and return.
//!
//! The other host prints its facts, echoes datagrams on a port named there, and exits when its standard input ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ronde_bootstrap::ports::PortRange;

use crate::run::{RemoteShell, remote_command};

use super::judge::{Facts, Finding, fail, ok};

/// Gets a host's facts and sends it datagrams. `judge` makes findings of the facts and of the milliseconds until the
/// answer.
///
/// # Errors
/// Why there is no answer.
pub(super) fn ask(
    shell: &RemoteShell,
    host: &str,
    ronde: &Path,
    ports: Option<PortRange>,
    judge: impl FnOnce(&Facts, u64) -> Vec<Finding>,
) -> Result<Vec<Finding>, String> {
    let ports = ports.map(|range| format!(" --ports {range}")).unwrap_or_default();
    let line = remote_command(ronde, &format!("check --facts{ports}")).map_err(|error| error.to_string())?;
    let command = shell.command(host, &line);
    let (program, arguments) = command.split_first().ok_or("--remote-shell is empty; give a command like ssh")?;
    let mut command = Command::new(program);
    let command = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let began = Instant::now();
    let mut child = command.spawn().map_err(|error| format!("cannot start {program:?}: {error}"))?;
    let answer = facts_of(&mut child);
    let round_trip_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    let findings = answer.and_then(|line| {
        let facts: Facts = serde_json::from_str(&line)
            .map_err(|error| format!("cannot parse its answer; it may run another version: {error}"))?;
        let mut findings = judge(&facts, round_trip_ms);
        findings.push(datagrams(&facts));
        findings.push(connections(&facts));
        Ok(findings)
    });
    end(&mut child);
    findings
}

/// Echoes datagrams until standard input ends, or for a minute.
pub(super) fn echo(socket: &UdpSocket) {
    let over = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&over);
    thread::spawn(move || {
        // An input that cannot be read has ended as well.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        seen.store(true, Ordering::Relaxed);
    });
    echo_while(socket, || !over.load(Ordering::Relaxed));
}

fn echo_while(socket: &UdpSocket, goes_on: impl Fn() -> bool) {
    let deadline = Instant::now() + ECHO_TIME;
    let mut datagram = [0; 2 * DATAGRAM_BYTES];
    if socket.set_read_timeout(Some(ECHO_POLL_INTERVAL)).is_err() {
        return;
    }
    while goes_on() && Instant::now() < deadline {
        if let Ok((bytes, from)) = socket.recv_from(&mut datagram) {
            // The other side detects a lost answer.
            let _ = socket.send_to(&datagram[..bytes], from);
        }
    }
}

/// Checks that a datagram as large as QUIC's first ones reaches one of a host's addresses and returns.
fn datagrams(facts: &Facts) -> Finding {
    let Some(port) = facts.echo_port else {
        return fail("UDP", "it could not open a port".to_owned(), "see that no policy there forbids UDP sockets");
    };
    let tried = outside(facts);
    match tried.iter().find(|address| round_trip(SocketAddr::new(**address, port))) {
        Some(address) => ok("UDP", format!("datagrams of {DATAGRAM_BYTES} bytes reach {address} and return")),
        None => fail(
            "UDP",
            format!("datagrams of {DATAGRAM_BYTES} bytes do not reach {} and return", named(&tried)),
            "open UDP between the hosts in their firewalls and the network's (security groups)",
        ),
    }
}

/// Whether a connection can be made to one of a host's addresses.
fn connections(facts: &Facts) -> Finding {
    let Some(port) = facts.echo_port else {
        return fail("TCP", "it could not open a port".to_owned(), "see that no policy there forbids TCP sockets");
    };
    let tried = outside(facts);
    let connects =
        |address: &&IpAddr| TcpStream::connect_timeout(&SocketAddr::new(**address, port), CONNECT_WAIT).is_ok();
    match tried.iter().find(connects) {
        Some(address) => ok("TCP", format!("connections can be made to {address}")),
        None => fail(
            "TCP",
            format!("no connection can be made to {}", named(&tried)),
            "open TCP between the hosts in their firewalls and the network's (security groups), or give jobs --transport quic",
        ),
    }
}

/// The addresses of a host that may lead there: its loopback is not the one here, unless there is nothing else.
fn outside(facts: &Facts) -> Vec<IpAddr> {
    let outside: Vec<IpAddr> = facts.addresses.iter().copied().filter(|address| !address.is_loopback()).collect();
    let mut tried = if outside.is_empty() { facts.addresses.clone() } else { outside };
    tried.truncate(ADDRESSES_MAX);
    tried
}

fn named(addresses: &[IpAddr]) -> String {
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    addresses.join(" or ")
}

fn round_trip(to: SocketAddr) -> bool {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let Ok(socket) = UdpSocket::bind((any, 0)) else { return false };
    if socket.connect(to).is_err() || socket.set_read_timeout(Some(DATAGRAM_WAIT)).is_err() {
        return false;
    }
    (0..DATAGRAM_TRIES).any(|number| {
        let datagram = [number; DATAGRAM_BYTES];
        let mut answer = [0; 2 * DATAGRAM_BYTES];
        let sent = socket.send(&datagram).is_ok();
        sent && socket.recv(&mut answer).is_ok_and(|bytes| bytes == DATAGRAM_BYTES)
    })
}

/// The line of facts that a host prints, or how its remote shell ended. A login script may greet before.
fn facts_of(child: &mut Child) -> Result<String, String> {
    let (sender, line) = mpsc::channel();
    let output = child.stdout.take();
    thread::spawn(move || {
        let mut output = output.map(|output| BufReader::new(output.take(ANSWER_BYTES_MAX)));
        let mut line = String::new();
        // An output that cannot be read has no line.
        while output.as_mut().is_some_and(|output| output.read_line(&mut line).is_ok_and(|bytes| bytes > 0))
            && !line.starts_with('{')
        {
            line.clear();
        }
        // Fails only when nothing waits for it.
        let _ = sender.send(line);
    });
    let errors = child.stderr.take();
    let stderr = thread::spawn(move || {
        let mut text = Vec::new();
        // What could be read counts.
        let _ = errors.map(|errors| errors.take(ANSWER_BYTES_MAX).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    });
    match line.recv_timeout(ANSWER_WAIT) {
        Ok(line) if line.ends_with('\n') => Ok(line),
        Ok(_) => {
            let status = child.wait().map_err(|error| error.to_string())?;
            let stderr = stderr.join().unwrap_or_default();
            Err(format!("the remote shell ended with {status}: {}", stderr.lines().last().unwrap_or_default()))
        }
        Err(_) => Err(format!("no answer within {} s", ANSWER_WAIT.as_secs())),
    }
}

/// Ends the input, at which the other side exits, waits for it, and kills it after a while.
fn end(child: &mut Child) {
    drop(child.stdin.take());
    let deadline = Instant::now() + LEAVE_WAIT;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            // It may have ended in this moment.
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        thread::sleep(EXIT_POLL_INTERVAL);
    }
}

/// Prints a line and flushes it.
pub(super) fn print_line(line: &str) {
    let mut output = std::io::stdout();
    // Fails only when the reader has exited.
    let _ = writeln!(output, "{line}").and_then(|()| output.flush());
}

/// QUIC's first datagrams have this size (RFC 9000, section 14).
const DATAGRAM_BYTES: usize = 1_200;
const DATAGRAM_TRIES: u8 = 4;
const DATAGRAM_WAIT: Duration = Duration::from_millis(300);
const CONNECT_WAIT: Duration = Duration::from_secs(1);
const ADDRESSES_MAX: usize = 8;
const ECHO_TIME: Duration = Duration::from_secs(60);
const ECHO_POLL_INTERVAL: Duration = Duration::from_millis(100);
const ANSWER_WAIT: Duration = Duration::from_secs(30);
const ANSWER_BYTES_MAX: u64 = 1 << 20;
const LEAVE_WAIT: Duration = Duration::from_secs(2);
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::super::judge::Mark;
    use super::super::probe::probe;
    use super::*;

    /// Calls `ask` with a script as the remote shell.
    fn ask_script(script: &str, judge: impl FnOnce(&Facts, u64) -> Vec<Finding>) -> Result<Vec<Finding>, String> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("shell");
        std::fs::write(&path, script).expect("it is ours");
        let shell = RemoteShell::new(&format!("sh {}", path.display()), None, None).expect("a command");
        ask(&shell, "h", Path::new("/r"), None, judge)
    }

    /// A port of the loopback for UDP, which `bind` binds for TCP. A connection of another process may use the number of a free
    /// UDP port: then another one is tried.
    fn of_both_protocols<T>(bind: impl Fn(SocketAddr) -> std::io::Result<T>) -> (UdpSocket, T, u16) {
        let attempt = || {
            let udp = UdpSocket::bind("127.0.0.1:0").expect("a free port");
            let address = udp.local_addr().expect("it is bound");
            bind(address).ok().map(|tcp| (udp, tcp, address.port()))
        };
        (0..100).find_map(|_| attempt()).expect("a port that is free for both protocols")
    }

    /// A TCP port that refuses connections while the socket exists.
    fn closed(address: SocketAddr) -> std::io::Result<tokio::net::TcpSocket> {
        let bound = tokio::net::TcpSocket::new_v4()?;
        bound.bind(address)?;
        Ok(bound)
    }

    #[test]
    fn a_host_that_answers_is_judged_and_gets_datagrams() {
        let (socket, _listener, port) = of_both_protocols(std::net::TcpListener::bind);
        let (_silent, _closed, silent_port) = of_both_protocols(closed);
        let over = AtomicBool::new(false);
        let facts = |port| {
            let addresses = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
            serde_json::to_string(&Facts { addresses, echo_port: Some(port), ..probe() }).expect("JSON")
        };
        thread::scope(|scope| {
            scope.spawn(|| echo_while(&socket, || !over.load(Ordering::Relaxed)));
            let script = |port| {
                let test = "test \"$1 $2\" = \"h exec /r check --facts\"";
                format!("{test} && cat <<'END' && cat\nWelcome to h\n{}\nEND\n", facts(port))
            };
            let attempt = || ask_script(&script(port), |facts, _| vec![ok("x", facts.version.clone())]);
            let is_good = |found: &Result<Vec<Finding>, String>| {
                found.as_ref().is_ok_and(|found| found.iter().all(|finding| finding.mark == Mark::Ok))
            };
            // A busy machine may answer a datagram too late.
            let mut found = attempt();
            for _ in 0..9 {
                if is_good(&found) {
                    break;
                }
                found = attempt();
            }
            let blocked = ask_script(&script(silent_port), |_, _| Vec::new());
            over.store(true, Ordering::Relaxed);
            let found = found.expect("an answer");
            assert!(found.len() == 3 && found.iter().all(|finding| finding.mark == Mark::Ok), "{found:?}");
            let blocked = blocked.expect("an answer");
            assert!(blocked[0].to_string().contains("do not reach 127.0.0.1 and return; open UDP"), "{blocked:?}");
            assert!(blocked[1].to_string().contains("no connection can be made to 127.0.0.1; open TCP"), "{blocked:?}");
        });
    }

    #[test]
    fn a_host_that_does_not_answer_is_reported_with_the_reason() {
        let fails = |script: &str, words: &str| {
            let error = ask_script(script, |_, _| Vec::new()).expect_err("no answer");
            assert!(error.contains(words), "{error}");
        };
        fails("echo 'Permission denied (publickey).' >&2; exit 255", "255: Permission denied (publickey).");
        fails("echo '{}'", "cannot parse its answer");
        fails("echo hello; echo 'ronde: not found' >&2; exit 127", "127: ronde: not found");
        let shell = RemoteShell::new("/nowhere/ssh", None, None).expect("a command");
        let error = ask(&shell, "h", Path::new("/r"), None, |_, _| Vec::new()).expect_err("it is not there");
        assert!(error.contains("cannot start \"/nowhere/ssh\""), "{error}");
    }
}
