//! A job from start to end.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::exit::notice;
use ronde_bootstrap::signals::is_ignored;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::Settings;
use super::agents::{Event, Link, Receivers};
use super::failure::{Failure, ranks};
use super::input::Input;
use super::outlet::Outlet;
use super::output::{Label, PendingBlock, Printer};
use super::placement::Placement;
use super::report::{self, HostReport, Report, SidecarReport};
use super::starter::Starter;
use super::state::{State, WorkerState};
use crate::envelope::{FromAgent, ToAgent};

/// Runs a job and returns the launcher's exit code.
pub(super) async fn run(settings: &Settings, placement: &Placement) -> u8 {
    let began = Instant::now();
    let mut job = match Job::new(settings, placement) {
        Ok(job) => job,
        Err(error) => {
            return not_started(&error);
        }
    };
    let failure = job.work().await.err();
    if let Some(failure) = &failure {
        job.announce(failure).await;
    }
    if matches!(failure, Some(Failure::Worker { .. } | Failure::LeftEarly { .. })) {
        // The other ranks are being notified now; their reports are worth more than a quick end.
        job.wait_for_end(REPORT_WAIT, State::workers_ended).await;
    }
    job.end(failure.is_some()).await;
    let failure = failure.map(|failure| job.reconsidered(failure));
    job.close(failure.as_ref(), began).await
}

/// A job and what the launcher needs to supervise it.
pub(super) struct Job<'a> {
    /// The command line.
    pub(super) settings: &'a Settings,
    pub(super) placement: &'a Placement,
    /// What is known.
    pub(super) state: State,
    /// By index of the host.
    pub(super) links: Vec<Link>,
    /// The command of `--starter`, if it starts the workers.
    pub(super) starter: Option<Starter>,
    /// When everything must have started.
    pub(super) start_deadline: Instant,
    pub(super) printer: Printer,
    /// What reads standard input for a rank.
    pub(super) input: Option<Input>,
    /// Whether the failure is one that ranks are to be blamed for, or what they have lost.
    is_of_ranks: bool,
    /// Whether the failure has been printed.
    is_explained: bool,
    receivers: Option<Receivers>,
    events: mpsc::Receiver<(usize, Event)>,
    pub(super) signals: Signals,
}

impl<'a> Job<'a> {
    fn new(settings: &'a Settings, placement: &'a Placement) -> anyhow::Result<Self> {
        let form = settings.form(Label::Rank);
        let printer =
            Printer::start(placement.size(), settings.output_dir.as_deref(), form).context(Code::OutputFiles)?;
        // It may be in the folder of the output, which has been made.
        report::check(settings.report.as_deref())?;
        let (sender, events) = mpsc::channel(QUEUE_EVENTS);
        Ok(Self {
            state: State::new(placement.clone(), settings.command.first().map_or("", String::as_str)),
            links: Vec::new(),
            starter: None,
            start_deadline: Instant::now() + settings.start_timeout,
            receivers: Some(Receivers { events: sender, output: Outlet::new(printer.sender()) }),
            printer,
            input: None,
            is_of_ranks: false,
            is_explained: false,
            events,
            signals: Signals::install()?,
            settings,
            placement,
        })
    }

    /// Where a new connection's events go.
    pub(super) fn receivers(&self) -> Receivers {
        self.receivers.clone().expect("given up at the end only, when nothing starts any more")
    }

    /// Waits until `done` holds; returns `false` at the deadline.
    ///
    /// # Errors
    /// What ends the job.
    pub(super) async fn wait_until(
        &mut self,
        deadline: Option<Instant>,
        done: impl Fn(&State) -> bool,
    ) -> Result<bool, Failure> {
        loop {
            if done(&self.state) {
                return Ok(true);
            }
            tokio::select! {
                Some((host, event)) = self.events.recv() => self.note(host, event).await?,
                signal = self.signals.recv() => return Err(Failure::Interrupted { signal }),
                reason = self.printer.broken() => return Err(Failure::Output { reason }),
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => return Ok(false),
            }
        }
    }

    /// Prints a notice if `--verbose` is set.
    pub(super) async fn verbose_notice(&self, text: impl FnOnce() -> String) {
        if self.settings.verbose {
            self.printer.notice(text()).await;
        }
    }

    async fn work(&mut self) -> Result<(), Failure> {
        self.start().await?;
        self.joined().await?;
        self.wait_until(None, |state| state.first_failed.is_some() || state.workers_ended()).await?;
        if let Some(failure) = self.state.starter_failure() {
            return Err(failure);
        }
        if self.state.first_failed.is_some() {
            // A rank that left before may be the cause and about to exit; its last lines explain the failure.
            let deadline = Instant::now() + BLAME_WAIT;
            let waited = self.wait_until(Some(deadline), State::worker_failure_is_complete).await;
            let failure = self.state.worker_failure();
            self.is_of_ranks = failure.is_some();
            return failure.map_or_else(|| waited.map(drop), Err);
        }
        Ok(())
    }

    async fn note(&mut self, host: usize, event: Event) -> Result<(), Failure> {
        if let Event::RemoteShellOutput(text) = &event {
            let name = &self.placement.hosts[host].name;
            self.verbose_notice(|| format!("host {name}: {text}")).await;
        }
        if let (Event::Message(FromAgent::InputTaken { .. }), Some(input)) = (&event, &self.input) {
            input.note_taken();
        }
        self.state.handle_event(host, event)
    }

    /// Prints at once, in brief, why ranks are being ended. The block with the cause and its code follows after the
    /// output of all ranks; if they have ended, it is printed now.
    async fn announce(&mut self, failure: &Failure) {
        if self.state.workers_ended() {
            // Records are named at the end, when all are written.
            self.explain(failure, None).await;
            self.is_explained = true;
            return;
        }
        let runs = |worker: &&WorkerState| worker.started && worker.exited.is_none();
        let ranks = match self.state.workers.iter().filter(runs).count() {
            0 => return,
            1 => "the rank that still runs".to_owned(),
            more => format!("the {more} ranks that still run"),
        };
        // Ending the ranks can take seconds, and users see why they wait. Only the block has the code.
        let brief = failure.brief();
        let text = match failure {
            Failure::Interrupted { .. } => format!("{brief}: ending {ranks}; once more kills them at once"),
            _ => format!("{brief}; ending {ranks}"),
        };
        self.printer.notice(text).await;
    }

    /// The failure by what is known at the end: a rank that seemed to have left may have failed since then, and the loss of
    /// a sidecar may have become known.
    fn reconsidered(&self, failure: Failure) -> Failure {
        if !self.is_of_ranks || self.is_explained {
            return failure;
        }
        self.state.worker_failure().unwrap_or(failure)
    }

    /// Prints the one block that names the root cause, with the line about flight records.
    async fn explain(&self, failure: &Failure, records: Option<String>) {
        let hint = failure.input_hint(self.settings.stdin).map(|line| format!("\n{line}")).unwrap_or_default();
        let records = records.map(|line| format!("\n{line}")).unwrap_or_default();
        let text = format!("{failure}{hint}{}{records}", self.state.consequences(failure));
        self.printer.block(failure.code().mark(&text)).await;
    }

    /// Ends everything that runs, in order: workers, sidecars, agents. Every wait is bounded.
    async fn end(&mut self, failed: bool) {
        self.state.note_end();
        if failed {
            self.broadcast(&ToAgent::StopWorkers { grace_ms: u64::try_from(GRACE.as_millis()).unwrap_or(u64::MAX) });
        }
        self.wait_for_end(GRACE + SLACK, State::workers_ended).await;
        if failed && !self.state.workers_ended() {
            self.close_output();
            self.wait_for_end(SLACK, State::workers_ended).await;
        }
        self.broadcast(&ToAgent::CloseSidecars);
        self.wait_for_end(DRAIN + SLACK, State::sidecars_ended).await;
        self.links.iter_mut().for_each(Link::hang_up);
        let links = self.links.len();
        self.wait_for_end(LEAVE, |state| state.links_closed(links)).await;
        if !self.state.links_closed(links) {
            self.links.iter().for_each(Link::kill);
            self.wait_for_end(SLACK, |state| state.links_closed(links)).await;
        }
    }

    /// Waits for expected exits; a signal of the user now kills everything.
    async fn wait_for_end(&mut self, bound: Duration, done: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + bound;
        while !done(&self.state) {
            tokio::select! {
                Some((host, event)) = self.events.recv() => {
                    // The outcome is known; later failures are its consequences.
                    let _ = self.state.handle_event(host, event);
                }
                () = self.signals.again() => {
                    self.close_output();
                    self.broadcast(&ToAgent::Kill);
                }
                () = sleep_until(deadline) => return,
            }
        }
    }

    /// Reads what agents report past output that nobody reads.
    fn close_output(&self) {
        self.receivers.iter().for_each(|receivers| receivers.output.close());
    }

    fn broadcast(&self, command: &ToAgent) {
        self.starter.iter().for_each(|starter| starter.send(command));
        self.links.iter().for_each(|link| link.send(command.clone()));
    }

    /// Writes the report and the last notices.
    async fn close(mut self, failure: Option<&Failure>, began: Instant) -> u8 {
        let mut exit = failure.map_or(0, Failure::exit_code);
        if failure.is_none() {
            self.warn_of_sidecars().await;
        }
        let report = self.settings.report.as_deref().map(|path| (self.report(failure, began, exit), path));
        if let Some((report, path)) = &report {
            exit = written(report, path, &self.printer).await;
        }
        if let Some(notice) = self.receivers.as_ref().and_then(|receivers| receivers.output.notice()) {
            self.printer.notice(notice).await;
        }
        self.print_other_reasons(failure).await;
        let records = failure.and_then(|_| self.state.records.line());
        match failure {
            Some(failure) if !self.is_explained => self.explain(failure, records).await,
            _ => {
                if let Some(line) = records {
                    self.printer.notice(line).await;
                }
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        self.verbose_notice(|| format!("the job ended after {seconds:.1} s")).await;
        // The printer ends when nothing can send to it.
        (self.receivers, self.input) = (None, None);
        let lost = finish_output(self.printer, &mut self.signals, failure.is_some()).await;
        match lost {
            Some(lost) if exit == 0 => report_lost_output(&lost, report, self.settings).await,
            _ => exit,
        }
    }

    /// Prints why sidecars could not go on, besides what the failure has.
    async fn print_other_reasons(&self, failure: Option<&Failure>) {
        let (reasons, more) = self.state.other_fatal_reasons(failure);
        for (sidecar, reason) in reasons {
            if !self.printer.fatal(sidecar, reason).await {
                return;
            }
        }
        if more > 0 {
            let are = if more == 1 { "reason, which is" } else { "reasons, which are" };
            self.printer.notice(format!("other sidecars reported {more} more {are} not printed")).await;
        }
    }

    async fn warn_of_sidecars(&self) {
        for (place, sidecar) in self.placement.sidecars.iter().zip(&self.state.sidecars) {
            if let Some(status) = sidecar.exited.filter(|status| !status.is_success()) {
                let served = ranks(&place.ranks);
                self.printer.notice(format!("all ranks succeeded, but the sidecar of {served} {status}")).await;
            }
        }
    }

    fn report(&self, failure: Option<&Failure>, began: Instant, exit: u8) -> Report {
        let placement = self.placement;
        let hosts = placement.hosts.iter().enumerate();
        let sidecars = (0_u32..).zip(placement.sidecars.iter().zip(&self.state.sidecars));
        Report {
            job: self.settings.job.to_string(),
            ranks: placement.size(),
            hosts: hosts
                .map(|(index, host)| HostReport {
                    host: host.name.clone(),
                    ranks: placement.ranks_of_host(index).collect(),
                })
                .collect(),
            sidecars: sidecars
                .map(|(index, (place, state))| SidecarReport {
                    sidecar: index,
                    host: placement.hosts[place.host].name.clone(),
                    ranks: place.ranks.clone().collect(),
                    summary: state.summary.clone(),
                })
                .collect(),
            seconds: began.elapsed().as_secs_f64(),
            exit,
            failure: failure.map(ToString::to_string),
            code: failure.map(|failure| failure.code().to_string()),
            starter_output: self.state.starter_output(),
            memberships: Vec::new(),
        }
    }
}

/// Writes why a launcher cannot start; returns its exit code.
pub(super) fn not_started(error: &anyhow::Error) -> u8 {
    notice(&coded(error, Code::LauncherStart));
    Code::of_error(error, Code::LauncherStart).exit_status()
}

/// Writes the report. Returns the exit code: the report's own, or that of a file that cannot be written.
pub(super) async fn written(report: &Report, path: &Path, printer: &Printer) -> u8 {
    let Err(error) = report.write(path) else { return report.exit };
    printer.notice(coded(&error, Code::ReportUnwritable)).await;
    if report.exit == 0 { Code::ReportUnwritable.exit_status() } else { report.exit }
}

/// Waits until all output is printed; returns the failure if it could not be. After success a slow reader gets all of it,
/// unless the user sends a signal. After a failure the block that names its cause is written in any case, past output that
/// nobody reads.
pub(super) async fn finish_output(printer: Printer, signals: &mut Signals, failed: bool) -> Option<Failure> {
    let patience = if failed { SLACK } else { Duration::MAX };
    let block = printer.pending_block();
    let lost = tokio::select! {
        ended = timeout(patience, printer.finish()) => ended.ok().flatten(),
        _ = signals.recv() => None,
    };
    block.write_past_the_queue(SLACK).await;
    lost.map(|reason| Failure::Output { reason })
}

/// Reports that the last output of a job could not be written, when all else had succeeded. Returns the exit code.
pub(super) async fn report_lost_output(lost: &Failure, report: Option<(Report, &Path)>, settings: &Settings) -> u8 {
    let mut text = lost.code().mark(&lost.to_string());
    // The one that was written says that the job has succeeded.
    if let Some((mut report, path)) = report {
        report.fail(lost);
        if let Err(error) = report.write(path) {
            text = format!("{text}\n{}", coded(&error, Code::ReportUnwritable));
        }
    }
    let block = PendingBlock::default();
    block.put(settings.form(Label::Rank).notice(&text));
    block.write_past_the_queue(SLACK).await;
    lost.exit_code()
}

/// The signals by which a user ends a job. One that is ignored from the start, as under `nohup`, stays ignored.
pub(super) struct Signals([(Signal, Option<tokio::signal::unix::Signal>); 3]);

impl Signals {
    pub(super) fn install() -> anyhow::Result<Self> {
        let install =
            |kind, of: Signal| anyhow::Ok((of, if is_ignored(of as i32) { None } else { Some(signal(kind)?) }));
        Ok(Self([
            install(SignalKind::interrupt(), Signal::SIGINT)?,
            install(SignalKind::terminate(), Signal::SIGTERM)?,
            install(SignalKind::hangup(), Signal::SIGHUP)?,
        ]))
    }

    pub(super) async fn recv(&mut self) -> Signal {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            signal = next(interrupt) => signal,
            signal = next(terminate) => signal,
            signal = next(hangup) => signal,
        }
    }

    /// Resolves when the user asks again, while the job ends. SIGHUP does not: a terminal that is closed sends it twice.
    pub(super) async fn again(&mut self) {
        while self.recv().await == Signal::SIGHUP {}
    }
}

async fn next((signal, installed): &mut (Signal, Option<tokio::signal::unix::Signal>)) -> Signal {
    match installed {
        Some(installed) => installed.recv().await,
        None => std::future::pending().await,
    };
    *signal
}

/// Events that wait to be handled.
pub(super) const QUEUE_EVENTS: usize = 256;
/// The time between SIGTERM and SIGKILL of workers.
pub(super) const GRACE: Duration = Duration::from_secs(5);
/// The time that sidecars have to drain; then their agents kill them.
pub(super) const DRAIN: Duration = Duration::from_secs(10);
/// The time that an agent has to exit after all its processes have ended.
pub(super) const LEAVE: Duration = Duration::from_secs(5);
/// The time that a message may take.
pub(super) const SLACK: Duration = Duration::from_secs(3);
/// The time that the other ranks have to report the first failure before they get SIGTERM.
const REPORT_WAIT: Duration = Duration::from_secs(1);
/// The time that a failed worker's last lines may take.
pub(super) const BLAME_WAIT: Duration = Duration::from_secs(3);
