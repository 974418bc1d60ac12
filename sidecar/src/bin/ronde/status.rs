//! `ronde status`: shows the state of the sidecars of this host, from their admin pages.

use std::io::{ErrorKind, Write};
use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde_json::Value;

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::{fail_with, notice, print, unless_reader_left};
use ronde_bootstrap::numbers::whole;
use ronde_bootstrap::terminal::has_sequences;
use ronde_wire::Failure;

mod render;
mod source;

pub(super) use render::{bytes, duration};
pub(super) use source::{NotReady, Target, address_in, address_of, ask_all, directories, fetch, get, targets};

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
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = whole::<u64>(1..=60))]
    measure: u64,
    /// Print the pages as JSON, one line for each sidecar.
    #[arg(long)]
    json: bool,
    /// Show the state again and again, each time after it was measured, until the sidecars have ended.
    #[arg(long)]
    watch: bool,
}

/// Prints the state of each sidecar that is found.
pub(super) fn main(args: &StatusArgs) -> ExitCode {
    let state = || targets(args.url.as_deref(), args.socket.as_deref()).and_then(|targets| state_of(targets, args));
    let shown = if args.watch {
        watch(state, &mut std::io::stdout(), &mut std::io::stderr(), has_sequences(&std::io::stdout()) && !args.json)
    } else {
        state().and_then(|state| {
            let printed = print(&state.text);
            state.silent.iter().for_each(|line| notice(line));
            printed
        })
    };
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail_with(&error, Code::StatusUnreachable),
    }
}

/// The state of the sidecars that answer.
#[derive(Debug)]
struct State {
    text: String,
    /// The line that names those that do not answer, if there are any.
    silent: Option<String>,
}

/// Shows states until the sidecars have ended or nobody reads. A terminal shows the last one only. Sidecars that do not
/// answer are named in `notices`, each time that they are others, and so is the reason why none answers for now.
fn watch(
    mut state: impl FnMut() -> anyhow::Result<State>,
    output: &mut impl Write,
    notices: &mut impl Write,
    is_terminal: bool,
) -> anyhow::Result<()> {
    let mut now = state()?;
    let mut named = None;
    loop {
        let clear = if is_terminal { CLEAR } else { "" };
        let written = write!(output, "{clear}{}", now.text).and_then(|()| output.flush());
        if written.is_err() {
            return unless_reader_left(written);
        }
        // In a terminal the line would be cleared with the rest.
        if let Some(line) = now.silent.as_ref().filter(|_| is_terminal || named != now.silent) {
            // Nobody may read these.
            let _ = writeln!(notices, "ronde: {line}");
        }
        named = now.silent;
        now = match next(&mut state, notices) {
            Some(now) => now,
            None => return Ok(()),
        };
    }
}

/// The next state, after any number of attempts; `None` when the sidecars have ended. A reason is written once while it stays
/// the same.
fn next(state: &mut impl FnMut() -> anyhow::Result<State>, notices: &mut impl Write) -> Option<State> {
    let mut written = None;
    loop {
        match state() {
            Ok(now) => return Some(now),
            Err(error) if have_ended(&error) => return None,
            Err(error) => {
                let line = Failure::line(&format!("{error:#}"));
                if written.as_ref() != Some(&line) && writeln!(notices, "ronde: {line}; trying again").is_err() {
                    return None;
                }
                written = Some(line);
                std::thread::sleep(RETRY_PAUSE);
            }
        }
    }
}

/// Whether an error shows that sidecars that answered before have ended: nothing listens at their ports, or their directories
/// are gone.
fn have_ended(error: &anyhow::Error) -> bool {
    match error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>()) {
        Some(cause) => matches!(cause.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound),
        // A file without an address is of a sidecar that is just starting or ending.
        None => {
            let is_empty_file = error.chain().any(|cause| cause.downcast_ref::<AddrParseError>().is_some());
            error.downcast_ref() == Some(&Code::NoSidecarFound) && !is_empty_file
        }
    }
}

/// Asks the sidecars twice, and shows what they have done in between. At least one has to answer.
fn state_of(targets: Vec<Target>, args: &StatusArgs) -> anyhow::Result<State> {
    let mut silent = Vec::new();
    let first = ask(targets, &mut silent)?;
    if args.json {
        if args.watch {
            std::thread::sleep(Duration::from_secs(args.measure));
        }
        let text = first.iter().map(|(_, page)| format!("{}\n", page.content)).collect();
        return Ok(State { text, silent: silent_line(&silent) });
    }
    std::thread::sleep(Duration::from_secs(args.measure));
    let second = ask(first.iter().map(|(target, _)| target.clone()).collect(), &mut silent)?;
    let before = |target: &Target| first.iter().find(|(asked, _)| asked == target).map(|(_, page)| page);
    let text = |(target, now): &(Target, Page)| {
        let before = before(target)?;
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        Some(render::render(target.address, &before.content, &now.content, seconds))
    };
    let texts: Vec<String> = second.iter().filter_map(text).collect();
    Ok(State { text: texts.join("\n"), silent: silent_line(&silent) })
}

/// Requests the status pages, of all sidecars at the same time. A sidecar that was killed leaves its directory behind, so
/// those that do not answer are added to `silent`.
///
/// # Errors
/// When none answers: that of one that may still run, if there is one.
fn ask(targets: Vec<Target>, silent: &mut Vec<Target>) -> anyhow::Result<Vec<(Target, Page)>> {
    let (mut pages, mut problem) = (Vec::new(), None);
    let addresses: Vec<SocketAddr> = targets.iter().map(|target| target.address).collect();
    for (target, answer) in targets.into_iter().zip(ask_all(&addresses, page)) {
        match answer {
            Ok(page) => pages.push((target, page)),
            Err(error) => {
                let error = with_directory(error, &target);
                problem = Some(problem.filter(|first| !have_ended(first) || have_ended(&error)).unwrap_or(error));
                silent.push(target);
            }
        }
    }
    match problem {
        Some(error) if pages.is_empty() => Err(error),
        _ => Ok(pages),
    }
}

/// Adds what to do about the directory of a sidecar that has ended without removing it.
fn with_directory(error: anyhow::Error, target: &Target) -> anyhow::Error {
    match &target.directory {
        Some(directory) if have_ended(&error) => {
            let directory = Failure::line(&directory.display().to_string());
            error.context(format!(
                "the sidecar of {directory} does not answer; remove that directory if its job has ended"
            ))
        }
        _ => error,
    }
}

/// One line that names the sidecars that do not answer.
fn silent_line(silent: &[Target]) -> Option<String> {
    let names: Vec<String> = silent.iter().take(NAMED_MAX).map(Target::to_string).collect();
    let more = silent.len() - names.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let (who, left) = match silent.len() {
        0 => return None,
        1 => ("1 sidecar does not answer, and is left out".to_owned(), "its directory if its job has"),
        count => (format!("{count} sidecars do not answer, and are left out"), "their directories if their jobs have"),
    };
    Some(format!("{who}: {}{more}; remove {left} ended", Failure::line(&names.join(", "))))
}

/// A status page.
#[derive(Debug)]
struct Page {
    /// When it arrived. Others may have been waited for since.
    at: Instant,
    content: Value,
}

/// Requests the status page of a sidecar.
fn page(address: SocketAddr) -> anyhow::Result<Page> {
    let (body, at) = (fetch(address, PATIENCE)?, Instant::now());
    let content =
        serde_json::from_str(&body).with_context(|| format!("the answer of {address} is not a status page"))?;
    Ok(Page { at, content })
}

/// How many sidecars that do not answer are named.
const NAMED_MAX: usize = 8;
/// Moves a terminal's cursor to the upper left corner and clears what follows.
const CLEAR: &str = "\x1b[H\x1b[J";
/// The pause after an error that an immediate retry would meet again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// How long a sidecar may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

const EXAMPLES: &str = "Examples:
  ronde status --watch
  ronde status --url http://127.0.0.1:41234 --measure 5";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::closed_port::closed_port;

    /// The error of a request to a sidecar.
    fn refused(kind: ErrorKind) -> anyhow::Error {
        anyhow::Error::from(std::io::Error::from(kind)).context("no sidecar answers")
    }

    #[test]
    fn an_error_of_sidecars_that_may_still_run_is_named_and_the_watch_goes_on() {
        let timed_out = || Err(refused(ErrorKind::TimedOut));
        let shown = || Ok(State { text: "page\n".to_owned(), silent: None });
        let ended = || Err(anyhow::anyhow!("no sidecar is found").context(Code::NoSidecarFound));
        let mut states = vec![shown(), timed_out(), timed_out(), shown(), ended(), shown()].into_iter();
        let (mut output, mut notices) = (Vec::new(), Vec::new());
        let state = || states.next().expect("it is asked no more");
        watch(state, &mut output, &mut notices, false).expect("they have ended");
        assert_eq!(String::from_utf8_lossy(&output), "page\npage\n");
        let notices = String::from_utf8_lossy(&notices);
        assert_eq!(notices, "ronde: no sidecar answers: timed out; trying again\n");
        assert_eq!(states.len(), 1, "nothing is asked after the end");
    }

    #[test]
    fn sidecars_have_ended_when_their_ports_are_closed_or_their_directories_gone() {
        let folder = tempfile::tempdir().expect("a directory");
        let gone = targets(None, Some(&folder.path().join("gone"))).expect_err("no directory");
        assert!(have_ended(&gone), "{gone:#}");
        std::fs::write(folder.path().join(ronde_bootstrap::directory::ADMIN_FILE), "").expect("ours");
        let starting = targets(None, Some(folder.path())).expect_err("no address");
        assert!(!have_ended(&starting), "{starting:#}");
        let (_bound, closed) = closed_port();
        let closed = Target { address: closed, directory: None };
        let ended = ask(vec![closed.clone()], &mut Vec::new()).expect_err("nothing listens");
        assert!(have_ended(&ended), "{ended:#}");
        let left = Target { directory: Some("/run/ronde-x".into()), ..closed.clone() };
        let ended = ask(vec![left], &mut Vec::new()).expect_err("nothing listens");
        assert!(have_ended(&ended), "{ended:#}");
        let text = "the sidecar of /run/ronde-x does not answer; remove that directory if its job has ended: ";
        assert!(format!("{ended:#}").starts_with(text), "{ended:#}");
        // It accepts a request and closes the connection, as one does that is just ending.
        let runs = Target { address: broken_server(), directory: None };
        let error = ask(vec![closed.clone(), runs.clone()], &mut Vec::new()).expect_err("none answers");
        assert!(!have_ended(&error), "one of them may still run: {error:#}");
        let error = ask(vec![runs, closed], &mut Vec::new()).expect_err("none answers");
        assert!(!have_ended(&error), "whatever their order: {error:#}");
    }

    /// The address of a server that closes each connection without an answer.
    fn broken_server() -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        std::thread::spawn(move || listener.incoming().for_each(drop));
        address
    }

    #[test]
    fn states_are_shown_until_the_sidecars_have_ended() {
        let states = |count: usize| {
            let mut left = count;
            move || {
                left = left.checked_sub(1).ok_or(ErrorKind::ConnectionRefused).map_err(refused)?;
                Ok(State { text: format!("state {left}\n"), silent: None })
            }
        };
        let mut output = Vec::new();
        watch(states(2), &mut output, &mut Vec::new(), false).expect("they have ended");
        assert_eq!(String::from_utf8_lossy(&output), "state 1\nstate 0\n");
        output.clear();
        watch(states(2), &mut output, &mut Vec::new(), true).expect("they have ended");
        assert_eq!(String::from_utf8_lossy(&output), "\x1b[H\x1b[Jstate 1\n\x1b[H\x1b[Jstate 0\n");
        let error = watch(states(0), &mut Vec::new(), &mut Vec::new(), false).expect_err("there was none");
        assert_eq!(error.to_string(), "no sidecar answers");
        let (reader, mut pipe) = std::io::pipe().expect("a pipe");
        drop(reader);
        watch(states(9), &mut pipe, &mut Vec::new(), false).expect("nobody reads");
        let full: &mut [u8] = &mut [];
        let error = watch(states(9), &mut std::io::Cursor::new(full), &mut Vec::new(), false).expect_err("no space");
        assert_eq!(Code::of_error(&error, Code::StatusUnreachable), Code::OutputLost);
    }

    #[test]
    fn the_sidecars_that_do_not_answer_are_named_once_while_they_stay_the_same() {
        let lines = ["one", "one", "two"];
        let mut left = lines.iter();
        let states = || {
            let silent = left.next().ok_or(ErrorKind::ConnectionRefused).map_err(refused)?;
            let silent = Some((*silent).to_owned());
            Ok(State { text: "page\n".to_owned(), silent })
        };
        let mut notices = Vec::new();
        watch(states, &mut Vec::new(), &mut notices, false).expect("they have ended");
        assert_eq!(String::from_utf8_lossy(&notices), "ronde: one\nronde: two\n");
    }

    /// The address of a server that answers so many times with an empty page.
    fn server(answers: usize) -> SocketAddr {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        std::thread::spawn(move || {
            for _ in 0..answers {
                let (mut stream, _) = listener.accept().expect("it connects");
                let mut request = Vec::new();
                // To its end: the kernel resets a connection that is closed with unread bytes.
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    std::io::Read::read_exact(&mut stream, &mut byte).expect("a request");
                    request.push(byte[0]);
                }
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n{\"job\":\"night\"}").expect("it reads");
            }
        });
        address
    }

    #[test]
    fn stopped_sidecars_take_the_time_of_one() {
        // Their kernels accept connections, and no program answers.
        let stopped: Vec<_> =
            (0..3).map(|_| std::net::TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
        let addresses = stopped.iter().map(|listener| listener.local_addr().expect("it is bound"));
        let mut targets: Vec<_> = addresses.map(|address| Target { address, directory: None }).collect();
        targets.push(Target { address: server(1), directory: None });
        let (began, mut silent) = (Instant::now(), Vec::new());
        let pages = ask(targets.clone(), &mut silent).expect("one answers");
        assert_eq!(pages.iter().map(|(target, _)| target).collect::<Vec<_>>(), [&targets[3]]);
        assert_eq!(silent, targets[..3]);
        assert!(began.elapsed() < 2 * PATIENCE, "{:?}", began.elapsed());
        assert!(
            pages[0].1.at.elapsed() > PATIENCE / 2,
            "its counters are of the time before the others were waited for"
        );
    }

    fn args(json: bool) -> StatusArgs {
        StatusArgs { socket: None, url: None, measure: 1, json, watch: false }
    }

    #[test]
    fn a_sidecar_that_was_killed_is_left_out_and_named() {
        let (_bound, closed) = closed_port();
        let killed = Target { address: closed, directory: Some("/run/ronde-night-1-a\u{1b}".into()) };
        let lives = |answers| Target { address: server(answers), directory: Some("/run/ronde-night-0-a".into()) };
        let state = state_of(vec![killed.clone(), lives(1)], &args(true)).expect("one answers");
        assert_eq!(state.text, "{\"job\":\"night\"}\n");
        let expected = "1 sidecar does not answer, and is left out: /run/ronde-night-1-a\\u{1b}; remove its directory if its \
                        job has ended";
        assert_eq!(state.silent.as_deref(), Some(expected));
        let state = state_of(vec![killed.clone(), lives(2)], &args(false)).expect("one answers");
        assert!(state.text.contains("night") && state.silent.is_some(), "{state:?}");
        let ended = state_of(vec![lives(2), lives(1)], &args(false)).expect("one answers");
        assert!(ended.silent.is_some_and(|line| line.starts_with("1 sidecar does not answer")), "it ended meanwhile");
        let error = state_of(vec![killed], &args(true)).expect_err("none answers");
        assert!(format!("{error:#}").contains("no sidecar answers at 127.0.0.1:"), "{error:#}");
    }

    #[test]
    fn many_silent_sidecars_are_counted_in_one_line() {
        let target = Target { address: "127.0.0.1:1".parse().expect("an address"), directory: None };
        let line = silent_line(&vec![target; 1_000]).expect("many");
        assert!(line.starts_with("1000 sidecars do not answer, and are left out: 127.0.0.1:1, "), "{line}");
        assert!(line.contains(" and 992 more; ") && line.len() < 400, "{line}");
        assert_eq!(silent_line(&[]), None);
    }
}
