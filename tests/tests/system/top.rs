//! `ronde top` in a pseudo-terminal, beside a real job.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::pty::{OpenptyResult, Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::{Termios, tcgetattr};
use nix::unistd::Pid;
use ronde_tests::closed_port::ClosedPort;
use ronde_tests::cluster::{Cluster, PATIENCE, Plan, ronde_binary, sum};
use ronde_tests::script::Fill;

use crate::WORKER;

/// A program in a terminal, and what is on its screen.
struct Screen {
    process: Child,
    keys: File,
    output: Receiver<Vec<u8>>,
    parser: vt100::Parser,
    /// The other end, which has the terminal's settings, and those before the program.
    end: OwnedFd,
    before: Termios,
}

impl Screen {
    fn start(words: &[String]) -> Result<Self> {
        let size = Winsize { ws_row: ROWS, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
        let OpenptyResult { master, slave } = openpty(Some(&size), None).context("no pseudo-terminal can be opened")?;
        let before = tcgetattr(&slave)?;
        let stream = || -> Result<Stdio> { Ok(Stdio::from(slave.try_clone()?)) };
        let mut command = Command::new(ronde_binary()?);
        command.args(words).stdin(stream()?).stdout(stream()?).stderr(stream()?).env("TERM", "xterm");
        let process = command.spawn()?;
        drop(command);
        let keys = File::from(master);
        let mut reader = keys.try_clone()?;
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut part = vec![0; 1 << 16];
            // It ends when no process has the other end any more.
            while let Ok(count @ 1..) = reader.read(&mut part) {
                if sender.send(part[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        Ok(Self { process, keys, output, parser: vt100::Parser::new(ROWS, COLUMNS, 0), end: slave, before })
    }

    fn press(&mut self, keys: &[u8]) -> Result<()> {
        self.keys.write_all(keys).context("the terminal takes no keys")
    }

    /// Waits until the screen has all of these pieces, and returns it.
    fn await_screen(&mut self, pieces: &[&str]) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let text = self.parser.screen().contents();
            if pieces.iter().all(|piece| text.contains(piece)) {
                return Ok(text);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.parser.process(&bytes),
                Err(_) => bail!("{pieces:?} is not on the screen within {PATIENCE:?}:\n{text}"),
            }
        }
    }

    /// Waits for the program's end, and checks that the terminal is as it was.
    fn await_exit(&mut self) -> Result<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            while let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(20)) {
                self.parser.process(&bytes);
            }
            if let Some(status) = self.process.try_wait()? {
                break status;
            }
            ensure!(Instant::now() < deadline, "it has not ended:\n{}", self.parser.screen().contents());
        };
        // What it has written last can come later than its exit status.
        while self.parser.screen().alternate_screen() || self.parser.screen().hide_cursor() {
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = self.output.recv_timeout(left).context("the screen and the cursor from before are not back")?;
            self.parser.process(&bytes);
        }
        ensure!(tcgetattr(&self.end)? == self.before, "the terminal's settings are not restored");
        Ok(status)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // It may have ended; then there is nothing to end.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The command for the sidecars of a job.
fn words(cluster: &Cluster, more: &[&str]) -> Result<Vec<String>> {
    let mut words = vec!["top".to_owned()];
    for sidecar in &cluster.sidecars {
        words.extend(["--url".to_owned(), format!("http://{}", sidecar.admin()?)]);
    }
    words.extend(more.iter().map(|word| (*word).to_owned()));
    Ok(words)
}

#[test]
fn a_terminal_shows_ranks_links_and_missing_ranks() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    cluster.check_sum("before", 100_000)?;
    let mut screen = Screen::start(&words(&cluster, &[])?)?;
    let job = format!("job {}: 3 ranks", cluster.job);
    let overview = screen.await_screen(&[&job, "runs, coordinator", "0 to 1", "1 to 0", "_SHA", "B/s"])?;
    println!("{overview}");
    screen.press(b"2")?;
    println!("{}", screen.await_screen(&["Ranks", "in the epoch", "rank 0 on sidecar 0"])?);
    let fill = Fill::Whole { seed: 1 };
    let first = cluster.workers[0].submit(sum("late", 100, fill))?;
    screen.press(b"4")?;
    println!("{}", screen.await_screen(&["for ranks 1, 2"])?);
    let others =
        [cluster.workers[1].submit(sum("late", 100, fill))?, cluster.workers[2].submit(sum("late", 100, fill))?];
    for (worker, id) in cluster.workers.iter_mut().zip([first, others[0], others[1]]) {
        worker.digest(id, PATIENCE)?;
    }
    screen.await_screen(&["No operation waits for a rank."])?;
    screen.press(b"?")?;
    screen.await_screen(&["the next view, the previous one"])?;
    screen.press(b"qq")?;
    let status = screen.await_exit()?;
    ensure!(status.success(), "{status}");
    Ok(())
}

#[test]
fn a_terminal_shows_what_waits_under_a_schedule() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let deadline = Instant::now() + PATIENCE;
    while !cluster.runs_ahead()? {
        ensure!(Instant::now() < deadline, "there is no schedule");
        for _ in 0..10 {
            cluster.check_sum("step", 100_000)?;
        }
    }
    let mut screen = Screen::start(&words(&cluster, &["--view", "waits"])?)?;
    let fill = Fill::Whole { seed: 1 };
    let first = cluster.workers[0].submit(sum("step", 100_000, fill))?;
    let pieces = [
        "allreduce.step has been in flight under a schedule for",
        "rank 1 has no request in flight",
        "A schedule runs: operations are not negotiated",
        "allreduce.step, in flight under a schedule",
    ];
    println!("{}", screen.await_screen(&pieces)?);
    let second = cluster.workers[1].submit(sum("step", 100_000, fill))?;
    cluster.workers[0].digest(first, PATIENCE)?;
    cluster.workers[1].digest(second, PATIENCE)?;
    screen.await_screen(&["No rank waits."])?;
    screen.press(b"q")?;
    ensure!(screen.await_exit()?.success(), "it exits with 0");
    Ok(())
}

#[test]
fn a_lost_sidecar_is_shown_in_words_until_a_signal_ends_the_view() -> Result<()> {
    let cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let mut screen = Screen::start(&words(&cluster, &[])?)?;
    screen.await_screen(&["runs, coordinator", "0 to 1"])?;
    cluster.sidecars[1].process.signal(Signal::SIGKILL)?;
    // A chunk of the output can end within a frame, so all is waited for.
    let pieces =
        ["sidecar 1 has not answered for", "it may have ended", "the last epoch ended: sidecar 1", "0 to 1    down"];
    println!("{}", screen.await_screen(&pieces)?);
    kill(Pid::from_raw(i32::try_from(screen.process.id())?), Signal::SIGTERM)?;
    let status = screen.await_exit()?;
    ensure!(status.code() == Some(128 + 15), "{status}");
    Ok(())
}

#[test]
fn a_view_waits_for_a_job_and_ends_at_control_c() -> Result<()> {
    let closed = ClosedPort::bind()?;
    let mut screen = Screen::start(&["top".to_owned(), "--url".to_owned(), format!("http://{}", closed.address())])?;
    screen.await_screen(&["no sidecar has answered yet", "has not answered for"])?;
    screen.press(&[3])?;
    let status = screen.await_exit()?;
    ensure!(status.success(), "{status}");
    Ok(())
}

#[test]
fn one_frame_is_text_and_a_view_without_a_terminal_is_refused() -> Result<()> {
    let cluster = Plan::of(&[0, 1]).start(WORKER)?;
    let run = |words: Vec<String>| -> Result<(Option<i32>, String, String)> {
        let output = Command::new(ronde_binary()?).args(words).stdin(Stdio::null()).env("COLUMNS", "90").output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok((output.status.code(), text(&output.stdout), text(&output.stderr)))
    };
    let job = format!("job {}: 2 ranks", cluster.job);
    let pieces = [job.as_str(), "runs, coordinator", "0 to 1", "Engine of sidecar 0"];
    // A busy machine makes answers late: such a frame reports that.
    let deadline = Instant::now() + PATIENCE;
    let (status, text, error) = loop {
        let frame = run(words(&cluster, &["--once"])?)?;
        if pieces.iter().all(|piece| frame.1.contains(piece)) || Instant::now() > deadline {
            break frame;
        }
    };
    println!("{text}");
    ensure!(status == Some(0) && error.is_empty(), "{status:?}: {error}");
    ensure!(!text.contains('\x1b'), "{text:?}");
    for piece in pieces {
        ensure!(text.contains(piece), "{piece:?} is not in:\n{text}");
    }
    let (status, _, error) = run(words(&cluster, &[])?)?;
    ensure!(status == Some(64) && error.contains("`ronde status --watch`"), "{status:?}: {error}");
    drop(cluster);
    let closed = ClosedPort::bind()?;
    let (status, text, error) =
        run(vec!["top".into(), "--once".into(), "--url".into(), format!("http://{}", closed.address())])?;
    ensure!(status == Some(69) && text.is_empty() && error.contains("no sidecar answers at"), "{status:?}: {error}");
    Ok(())
}

const ROWS: u16 = 40;
const COLUMNS: u16 = 110;
