//! The connection to one agent: a child process, either the agent itself or the remote shell that reaches it.

use std::io;
use std::net::IpAddr;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use ronde_bootstrap::exit::notice;
use ronde_wire::Failure;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

use super::outlet::Outlet;
use super::output::Item;
use super::scope::Scope;
use crate::envelope::{self, FromAgent, Status, TEXT_BYTES_MAX, ToAgent};
use crate::rows::LastLines;

/// The connection to an agent.
pub(super) struct Link {
    commands: Option<mpsc::Sender<ToAgent>>,
    input: mpsc::Sender<ToAgent>,
    kill: watch::Sender<bool>,
}

/// Events of a connection, in order; output goes to the printer instead.
#[derive(Debug)]
pub(super) enum Event {
    /// A message of the agent, which its [`Scope`] accepts.
    Message(FromAgent),
    /// The agent breaks the protocol, as this text behind "it" says; nothing more is read from it.
    Violation(String),
    /// The agent or the remote shell wrote a line to its standard error.
    RemoteShellOutput(String),
    /// The agent of an elastic job has sent nothing for this time; nothing more is read from it.
    Silent(Duration),
    /// The addresses for which the host's name stands, in an elastic job.
    Resolved(Vec<IpAddr>),
    /// The connection has ended; nothing follows.
    Closed(Status),
    /// The command of `--starter` wrote a line to its standard error.
    StarterOutput(String),
    /// The command of `--starter` has ended.
    StarterEnded(Status),
}

/// The receivers of a connection's events and output.
#[derive(Clone)]
pub(super) struct Receivers {
    /// Events, each with the index of its host.
    pub(super) events: mpsc::Sender<(usize, Event)>,
    /// Output.
    pub(super) output: Outlet,
}

impl Link {
    /// Starts the agent of the host with index `host`, or the remote shell that reaches it, and accepts what is within
    /// `scope`. At most `commands_max` commands may ever be sent.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub(super) fn start(
        (host, scope): (usize, Scope),
        command: &[String],
        commands_max: usize,
        receivers: Receivers,
    ) -> io::Result<Self> {
        let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A terminal's Ctrl-C is for the launcher, which then ends everything in order.
            .process_group(0)
            .spawn()?;
        let (commands, queue) = mpsc::channel(commands_max);
        let (input, inputs) = mpsc::channel(1);
        let (kill, killed) = watch::channel(false);
        tokio::spawn(supervise((host, scope), child, (queue, inputs), killed, receivers));
        Ok(Self { commands: Some(commands), input, kill })
    }

    /// Sends the agent a command. Does nothing when the connection has ended, which an event reports.
    ///
    /// # Errors
    /// The command, when the agent has not read those before.
    pub(super) fn try_send(&self, command: ToAgent) -> Result<(), Box<ToAgent>> {
        let Some(commands) = &self.commands else { return Ok(()) };
        match commands.try_send(command) {
            Err(mpsc::error::TrySendError::Full(command)) => Err(Box::new(command)),
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => Ok(()),
        }
    }

    /// Sends the agent a command, of those that its queue has room for.
    pub(super) fn send(&self, command: ToAgent) {
        if let Err(command) = self.try_send(command) {
            // The queue has room for all commands of a job, so this is a bug; the job's deadlines end it.
            notice(&format!("bug: the command queue of an agent is full; dropped {command:?}"));
        }
    }

    /// The queue of the input of a worker, which has no part in the bound of commands.
    pub(super) fn input(&self) -> mpsc::Sender<ToAgent> {
        self.input.clone()
    }

    /// Ends the agent's input, at which it ends everything and exits.
    pub(super) fn hang_up(&mut self) {
        self.commands = None;
    }

    /// Kills the process if it still runs after this time.
    pub(super) fn kill_after(&self, time: Duration) {
        let kill = self.kill.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = kill.closed() => {}
                () = sleep(time) => drop(kill.send_replace(true)),
            }
        });
    }

    /// Kills the process, but not what the agent started: only for an agent that does not exit by itself.
    pub(super) fn kill(&self) {
        self.kill.send_replace(true);
    }
}

async fn supervise(
    (host, scope): (usize, Scope),
    mut child: Child,
    queues: (mpsc::Receiver<ToAgent>, mpsc::Receiver<ToAgent>),
    mut killed: watch::Receiver<bool>,
    receivers: Receivers,
) {
    let group = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let input = child.stdin.take().expect("piped at start");
    let output = child.stdout.take().expect("piped at start");
    let stderr = child.stderr.take().expect("piped at start");
    let writer = tokio::spawn(write_commands(input, queues));
    let mut reader = tokio::spawn(read_messages((host, scope), output, receivers.clone()));
    let mut stderr_reader = tokio::spawn(read_stderr(host, stderr, receivers.clone()));
    let status = tokio::select! {
        status = child.wait() => status,
        () = kill_requested(&mut reader, &mut killed) => {
            if let Some(group) = group {
                // Fails only when it has ended.
                let _ = killpg(group, Signal::SIGKILL);
            }
            child.wait().await
        }
    };
    writer.abort();
    let rest = async {
        if !reader.is_finished() {
            let _ = (&mut reader).await;
        }
        (&mut stderr_reader).await
    };
    // Another process may hold the pipes open; the launcher does not wait for it.
    let _ = timeout(REST_WAIT, rest).await;
    reader.abort();
    stderr_reader.abort();
    let _ = receivers.events.send((host, Event::Closed(status.map_or(Status::Code(-1), Status::from)))).await;
}

/// Resolves when the launcher requests the process's end, or when its output is invalid.
async fn kill_requested(reader: &mut tokio::task::JoinHandle<bool>, killed: &mut watch::Receiver<bool>) {
    let nonsense = async {
        if !matches!(reader.await, Ok(false)) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = nonsense => {}
        _ = killed.wait_for(|killed| *killed) => {}
    }
}

/// Writes commands until their queue is closed, and inputs of workers between them.
async fn write_commands(
    mut input: ChildStdin,
    (mut queue, mut inputs): (mpsc::Receiver<ToAgent>, mpsc::Receiver<ToAgent>),
) {
    loop {
        let command = tokio::select! {
            biased;
            command = queue.recv() => command,
            Some(command) = inputs.recv() => Some(command),
        };
        let Some(command) = command else { return };
        // The waiting task detects that the connection has ended.
        if envelope::write(&mut input, &command).await.is_err() || input.flush().await.is_err() {
            return;
        }
    }
}

/// Reads messages to the end; returns false for one that is invalid or out of scope.
async fn read_messages(
    (host, mut scope): (usize, Scope),
    output: impl AsyncRead + Unpin,
    receivers: Receivers,
) -> bool {
    let mut output = BufReader::with_capacity(READ_BYTES, output);
    let mut banner_lines = 0;
    let mut greeted = false;
    loop {
        // A connection from which nothing comes is read all the time; one whose messages wait for the output is not silent.
        let line = match scope.silence() {
            Some(silence) => match timeout(silence, envelope::read_line(&mut output)).await {
                Ok(line) => line,
                Err(_) => {
                    let _ = receivers.events.send((host, Event::Silent(silence))).await;
                    return false;
                }
            },
            None => envelope::read_line(&mut output).await,
        };
        let event = match line {
            Ok(None) => return true,
            // A login script of the other host may greet before the agent does.
            Ok(Some(line)) if !greeted && !line.starts_with(b"{") && banner_lines < BANNER_LINES_MAX => {
                banner_lines += 1;
                continue;
            }
            Ok(Some(line)) => match serde_json::from_slice(&line).map(|message| scope.accept(message)) {
                Ok(Ok(message)) => {
                    greeted = true;
                    deliver(host, message, &receivers).await;
                    continue;
                }
                Ok(Err(violation)) => Event::Violation(violation),
                Err(error) => unparsable(&error),
            },
            Err(error) => unparsable(&error),
        };
        let _ = receivers.events.send((host, event)).await;
        return false;
    }
}

fn unparsable(error: &dyn std::error::Error) -> Event {
    Event::RemoteShellOutput(format!("ronde: cannot parse the output of the host: {error}"))
}

/// The receivers live as long as the launcher, so sending fails only at its very end.
async fn deliver(host: usize, message: FromAgent, receivers: &Receivers) {
    match message {
        FromAgent::Output { worker, stream, text } => {
            receivers.output.send(Item::Output { worker, stream, text }).await;
        }
        FromAgent::Notice { text } => {
            receivers.output.send(Item::Notice(text)).await;
        }
        FromAgent::SidecarLog { sidecar, text } => {
            let log = Item::Log { sidecar, text: text.clone() };
            receivers.output.send(log).await;
            let _ = receivers.events.send((host, Event::Message(FromAgent::SidecarLog { sidecar, text }))).await;
        }
        FromAgent::Beat => {}
        message => {
            let _ = receivers.events.send((host, Event::Message(message))).await;
        }
    }
}

async fn read_stderr(host: usize, stderr: ChildStderr, receivers: Receivers) {
    let mut stderr = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        match (&mut stderr).take(STDERR_LINE_BYTES_MAX).read_until(b'\n', &mut line).await {
            Ok(count) if count > 0 => {}
            _ => return,
        }
        let text = Failure::line(String::from_utf8_lossy(&line).trim_end());
        let _ = receivers.events.send((host, Event::RemoteShellOutput(text))).await;
    }
}

/// The last lines of a stream, without the earlier states of progress bars.
#[derive(Clone, Debug)]
pub(super) struct Tail(LastLines);

impl Default for Tail {
    fn default() -> Self {
        Self::of(TAIL_LINES)
    }
}

impl Tail {
    /// At most so many lines.
    pub(super) fn of(lines_max: usize) -> Self {
        Self(LastLines::of(lines_max, TEXT_BYTES_MAX))
    }

    /// Adds the lines of a text, whose last one is complete unless a carriage return ends it.
    pub(super) fn push(&mut self, text: &str) {
        self.0.push(text);
        if !text.ends_with(['\n', '\r']) {
            self.0.push("\n");
        }
    }

    /// The lines, oldest first.
    pub(super) fn lines(&self) -> Vec<String> {
        self.0.lines()
    }
}

const READ_BYTES: usize = 256 << 10;
const STDERR_LINE_BYTES_MAX: u64 = 8 << 10;
const BANNER_LINES_MAX: usize = 100;
const TAIL_LINES: usize = 20;
/// The longest wait for the last lines of an ended connection.
const REST_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::super::hosts::parse_list;
    use super::super::placement::Placement;
    use super::*;

    /// What the launcher gets of an agent on the second of two hosts with one rank each.
    async fn received(lines: &str) -> (bool, Vec<Event>, usize) {
        let placement = Placement::new(2, &parse_list("a:1,b:1").expect("valid"), None).expect("fits");
        let (events, mut seen) = mpsc::channel(8);
        let (output, mut printed) = mpsc::channel(8);
        let receivers = Receivers { events, output: Outlet::new(output) };
        let is_valid = read_messages((1, Scope::new(&placement, 1)), lines.as_bytes(), receivers).await;
        let mut all = Vec::new();
        while let Some((host, event)) = seen.recv().await {
            assert_eq!(host, 1);
            all.push(event);
        }
        let mut lines = 0;
        while printed.recv().await.is_some() {
            lines += 1;
        }
        (is_valid, all, lines)
    }

    const HELLO: &str = "{\"type\":\"hello\",\"version\":\"1\",\"hostname\":\"h\",\"interfaces\":[],\"port\":1}\n";

    fn output(rank: u32) -> String {
        format!("{{\"type\":\"output\",\"worker\":{rank},\"stream\":\"stdout\",\"text\":\"hi\\n\"}}\n")
    }

    #[tokio::test]
    async fn output_of_ranks_elsewhere_is_not_printed_and_ends_the_connection() {
        let (is_valid, events, printed) = received(&format!("{HELLO}{}", output(1))).await;
        assert!(is_valid && events.len() == 1 && printed == 1, "{events:?}");
        for rank in [0, 2, u32::MAX] {
            let (is_valid, events, printed) = received(&format!("{HELLO}{}{}", output(rank), output(1))).await;
            let Some(Event::Violation(violation)) = events.last() else { panic!("{events:?}") };
            assert_eq!(violation, &format!("sent a message about rank {rank}, which does not run there"));
            assert!(!is_valid && printed == 0, "nothing is read after it");
        }
    }

    #[test]
    fn a_tail_has_one_state_of_a_progress_bar() {
        let mut tail = Tail::of(3);
        for text in ["Connecting", "1 %\r", "2 %\r", "3 %\r4 %", "failed: a\n\nfailed: b\n"] {
            tail.push(text);
        }
        assert_eq!(tail.lines(), ["4 %", "failed: a", "failed: b"]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_vanishes_is_noticed_by_its_silence() {
        use tokio::io::AsyncWriteExt;
        let silence = Duration::from_secs(3);
        let scope = Scope::elastic("b".into(), super::super::scope::Rights::default(), silence);
        let (events, mut seen) = mpsc::channel(8);
        let (output, _printed) = mpsc::channel(8);
        let (mut agent, connection) = tokio::io::duplex(1 << 10);
        let reading =
            tokio::spawn(read_messages((1, scope), connection, Receivers { events, output: Outlet::new(output) }));
        agent.write_all(HELLO.as_bytes()).await.expect("it is read");
        for _ in 0..16 {
            sleep(silence / 12).await;
            agent.write_all(b"{\"type\":\"beat\"}\n").await.expect("it is read");
        }
        assert!(matches!(seen.recv().await, Some((1, Event::Message(FromAgent::Hello { .. })))));
        assert!(matches!(seen.recv().await, Some((1, Event::Silent(of))) if of == silence));
        assert!(!reading.await.expect("it ends"), "nothing is read after it");
    }

    #[tokio::test]
    async fn logs_of_sidecars_elsewhere_are_not_printed() {
        let log = "{\"type\":\"sidecar_log\",\"sidecar\":0,\"text\":\"forged\\n\"}\n";
        let (is_valid, events, printed) = received(&format!("{HELLO}{log}")).await;
        assert!(!is_valid && printed == 0 && matches!(events.last(), Some(Event::Violation(_))), "{events:?}");
    }
}
