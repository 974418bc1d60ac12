//! An elastic job from start to end: hands the plan what happens, and executes what it decides.

use std::collections::{BTreeMap, VecDeque};
use std::time::SystemTime;

use anyhow::Context;
use ronde_bootstrap::codes::Code;
use ronde_transport::{JobCa, TrustDomain, Validity};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::super::agents::{Event as AgentEvent, Link, Receivers};
use super::super::failure::Failure;
use super::super::job::{
    BLAME_WAIT, DRAIN, GRACE, LEAVE, QUEUE_EVENTS, SLACK, Signals, finish_output, not_started, report_lost_output,
    written,
};
use super::super::outlet::Outlet;
use super::super::output::{Label, Printer};
use super::super::report;
use super::super::scope::Rights;
use super::super::start::{CERTIFICATE_VALIDITY, TRUST_DOMAIN, milliseconds};
use super::super::{Settings, address};
use super::discovery::{Answer, Discovery};
use super::exclusion::Time;
use super::failure::{ElasticFailure, Loss};
use super::notices::Text;
use super::plan::hosts::Listed;
use super::plan::{Cause, End, Event, Plan};
use super::report::MembershipReport;
use super::settings::{ElasticSettings, HostSource};
use super::table::{Consequence, Table};
use crate::envelope::{Environment, ToAgent};
use crate::job::socket::{Asked, JobSocket};

/// Runs an elastic job and returns the launcher's exit code.
pub(in super::super) async fn run(settings: &Settings, elastic: &ElasticSettings) -> u8 {
    let mut job = match ElasticJob::new(settings, elastic) {
        Ok(job) => job,
        Err(error) => {
            return not_started(&error);
        }
    };
    let failure = job.work().await.err();
    if let Some(failure) = &failure {
        job.announce(failure).await;
    }
    job.end(failure.is_some()).await;
    job.close(failure.as_ref()).await
}

/// A job and what the launcher needs to supervise it.
pub(super) struct ElasticJob<'a> {
    pub(super) settings: &'a Settings,
    pub(super) elastic: &'a ElasticSettings,
    pub(super) plan: Plan,
    pub(super) table: Table,
    /// By the number of the agent.
    pub(super) links: BTreeMap<u32, Link>,
    /// What each agent may send messages about.
    pub(super) rights: BTreeMap<u32, Rights>,
    /// Signs the certificates of all sidecars that the job ever has.
    pub(super) authority: JobCa,
    pub(super) validity: Validity,
    /// The environment that all workers have in common.
    pub(super) environment: Environment,
    /// Whether the sidecars listen on the loopback alone.
    pub(super) loopback_only: Option<bool>,
    /// What the plan has yet to learn of.
    pub(super) pending: VecDeque<Event>,
    /// Texts for the user, which are printed when the plan has nothing to do.
    pub(super) notices: Vec<Text>,
    pub(super) memberships: Vec<MembershipReport>,
    pub(super) began: Instant,
    pub(super) printer: Printer,
    /// Where `ronde job` asks.
    pub(super) socket: Option<JobSocket>,
    discovery: Option<Discovery>,
    has_hosts: bool,
    receivers: Option<Receivers>,
    events: mpsc::Receiver<(usize, AgentEvent)>,
    signals: Signals,
}

impl<'a> ElasticJob<'a> {
    fn new(settings: &'a Settings, elastic: &'a ElasticSettings) -> anyhow::Result<Self> {
        let form = settings.form(Label::Worker);
        let printer = Printer::start(0, settings.output_dir.as_deref(), form).context(Code::OutputFiles)?;
        // It may be in the folder of the output, which has been made.
        report::check(settings.report.as_deref())?;
        let (sender, events) = mpsc::channel(QUEUE_EVENTS);
        let validity = Validity::starting(SystemTime::now(), CERTIFICATE_VALIDITY);
        let domain = TrustDomain::new(TRUST_DOMAIN).context(Code::CertificateNotIssued)?;
        let authority = JobCa::generate(settings.job.clone(), domain, validity).context(Code::CertificateNotIssued)?;
        let discovery = match &elastic.source {
            HostSource::Script(script) => Some(Discovery::start(script.clone())),
            HostSource::Fixed(_) => None,
        };
        let command = settings.command.first().map_or_else(String::new, Clone::clone);
        Ok(Self {
            plan: Plan::new(elastic.bounds.clone()),
            table: Table::of(command),
            links: BTreeMap::new(),
            rights: BTreeMap::new(),
            authority,
            validity,
            environment: super::super::environment::common(&settings.caller, &settings.exports),
            loopback_only: None,
            pending: VecDeque::new(),
            notices: Vec::new(),
            memberships: Vec::new(),
            began: Instant::now(),
            receivers: Some(Receivers { events: sender, output: Outlet::new(printer.sender()) }),
            printer,
            socket: None,
            discovery,
            has_hosts: false,
            events,
            signals: Signals::install()?,
            settings,
            elastic,
        })
    }

    /// The time since the start.
    pub(super) fn now(&self) -> Time {
        self.began.elapsed()
    }

    /// Where a new connection's events go.
    pub(super) fn receivers(&self) -> Receivers {
        self.receivers.clone().expect("given up at the end only, when nothing starts any more")
    }

    async fn work(&mut self) -> Result<(), Failure> {
        if let HostSource::Fixed(hosts) = &self.elastic.source {
            self.list(hosts.clone());
        }
        self.open_socket();
        loop {
            let outcome = match self.act() {
                Some(end) => Some(self.outcome(end).await),
                None => None,
            };
            self.print_notices(outcome.as_ref().and_then(|outcome| outcome.as_ref().err())).await;
            if let Some(outcome) = outcome {
                return outcome;
            }
            let due = self.plan.deadline(self.now()).map(|due| self.began + due);
            tokio::select! {
                Some((agent, event)) = self.events.recv() => self.note(agent, event),
                answer = next_answer(&mut self.discovery) => self.discovered(answer)?,
                asked = next_request(&mut self.socket) => self.answer(asked),
                signal = self.signals.recv() => return Err(Failure::Interrupted { signal }),
                reason = self.printer.broken() => return Err(Failure::Output { reason }),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    self.plan.handle(self.now(), Event::Tick);
                }
            }
        }
    }

    /// Prints the texts for the user but for what the block at the end has, such as the loss that ends the job: users read it
    /// there.
    async fn print_notices(&mut self, failure: Option<&Failure>) {
        let block = failure.map(ToString::to_string);
        let is_in_block = |notice: &Text| block.as_ref().is_some_and(|block| notice.is_in(block));
        for notice in std::mem::take(&mut self.notices).into_iter().filter(|notice| !is_in_block(notice)) {
            self.printer.notice(notice.to_string()).await;
        }
    }

    /// Executes what the plan decides, until it waits.
    fn act(&mut self) -> Option<End> {
        loop {
            while let Some(action) = self.plan.poll_action() {
                if let Some(end) = self.execute(action) {
                    return Some(end);
                }
            }
            let event = self.pending.pop_front()?;
            self.plan.handle(self.now(), event);
        }
    }

    fn discovered(&mut self, answer: Answer) -> Result<(), Failure> {
        match answer {
            Ok(hosts) => self.list(hosts),
            Err(error) if !self.has_hosts => return Err(ElasticFailure::Discovery(error).into()),
            Err(error) => {
                self.notices.push(Text::Other(format!("{error}\nits last answer is used until it has another one")));
            }
        }
        Ok(())
    }

    fn list(&mut self, hosts: Vec<Listed>) {
        self.has_hosts = true;
        let is_fixed = matches!(self.elastic.source, HostSource::Fixed(_));
        let stays_local = |listed: &Listed| {
            let is_loopback = listed.name == super::super::hosts::LOCAL
                || listed.name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
            is_loopback || (is_fixed && address::is_local_name(&listed.name))
        };
        // The first host decides. A list without one, with which jobs on Spark begin, leaves that open.
        if !hosts.is_empty() {
            self.loopback_only
                .get_or_insert_with(|| self.settings.network_interfaces.is_empty() && hosts.iter().all(stays_local));
        }
        self.plan.handle(self.began.elapsed(), Event::Hosts(hosts));
    }

    fn note(&mut self, agent: usize, event: AgentEvent) {
        let agent = u32::try_from(agent).expect("an agent's number");
        let consequence = self.consequence(agent, event);
        let lost = if let Some(Event::SidecarLost { sidecar }) = consequence.event { Some(sidecar) } else { None };
        self.follow(consequence);
        // One that cannot continue ends by itself, unless its messages cannot even be read.
        lost.into_iter().for_each(|sidecar| self.end_sidecar(sidecar));
    }

    fn consequence(&mut self, agent: u32, event: AgentEvent) -> Consequence {
        match event {
            AgentEvent::Message(message) => {
                let is_hello = matches!(message, crate::envelope::FromAgent::Hello { .. });
                let consequence = self.table.handle_message(agent, message);
                if is_hello && consequence.event.is_none() {
                    self.send(agent, ToAgent::Beat { interval_ms: BEAT_MS });
                    let notice_ms = milliseconds(self.elastic.bounds.preemption_notice);
                    self.send(agent, ToAgent::TakeNotices { notice_ms });
                    return self.greeted(agent);
                }
                consequence
            }
            AgentEvent::Resolved(addresses) => {
                self.table.agent(agent).resolved = Some(addresses);
                self.greeted(agent)
            }
            AgentEvent::Violation(what) => {
                self.table.unusable(agent, Code::HostRefused, format!("it {what}; see that host"))
            }
            AgentEvent::Silent(time) => {
                let reason = format!("nothing has come from it for {} s", time.as_secs());
                self.table.unusable(agent, Code::HostLost, reason)
            }
            AgentEvent::RemoteShellOutput(text) => {
                if self.settings.verbose {
                    let host = self.table.host_of_agent(agent);
                    self.notices.push(Text::Other(format!("host {host}: {text}")));
                }
                self.table.agent(agent).output.push(&text);
                Consequence::default()
            }
            AgentEvent::Closed(status) => self.table.closed(agent, status),
            AgentEvent::StarterOutput(_) | AgentEvent::StarterEnded(_) => Consequence::default(),
        }
    }

    pub(super) fn report_loss(&mut self, loss: Loss) {
        self.notices.push(Text::Loss(loss));
    }

    /// Turns the plan's end into the job's.
    async fn outcome(&mut self, end: End) -> Result<(), Failure> {
        let bounds = &self.elastic.bounds;
        let (elastic_timeout, attach_timeout) = (bounds.elastic_timeout.as_secs(), bounds.attach_timeout.as_secs());
        let failure = match end {
            End::Success => return Ok(()),
            End::Failed(cause) => {
                if let Cause::Worker(worker) = cause {
                    // A worker that left before may be the cause and about to exit; its last lines explain the failure.
                    let explained = |table: &Table| table.is_explained(worker);
                    self.wait_for(BLAME_WAIT, explained).await;
                }
                ElasticFailure::Lost(self.loss_of(cause))
            }
            End::TooFew { have, needed, cause } => {
                let seconds = bounds.has_discovery.then_some(elastic_timeout);
                ElasticFailure::TooFew { have, needed, seconds, last: cause.map(|cause| self.loss_of(cause).marked()) }
            }
            End::ResetLimit { limit, cause } => {
                ElasticFailure::ResetLimit { limit, last: Some(self.loss_of(cause).marked()) }
            }
            End::NeverJoined { worker } => {
                let agent = self.table.worker(worker).agent;
                ElasticFailure::NeverJoined { worker, host: self.table.host_of_agent(agent), seconds: attach_timeout }
            }
        };
        Err(failure.into())
    }

    /// What a membership or the job ended with.
    fn loss_of(&self, cause: Cause) -> Loss {
        let known = match cause {
            Cause::Worker(worker) => self.table.loss_of_worker(self.table.culprit(worker)),
            Cause::Sidecar(sidecar) => self.table.sidecars.get(&sidecar).and_then(|facts| facts.loss.clone()),
            Cause::Agent(agent) => self.table.agents.get(&agent).and_then(|facts| facts.loss.clone()),
            Cause::Start | Cause::Added | Cause::Removed | Cause::Drained | Cause::Preempted | Cause::Scaled => None,
        };
        known.unwrap_or_else(|| Loss::Unusable {
            host: String::new(),
            reason: "its hosts were removed".to_owned(),
            code: Code::ElasticEnded,
            output: Vec::new(),
        })
    }

    /// Prints at once, in brief, why workers are being ended. The block with the cause and its code follows after their
    /// output.
    async fn announce(&mut self, failure: &Failure) {
        if !self.table.workers_ended() {
            // Ending the workers can take seconds, and users see why they wait. Only the block has the code.
            let brief = failure.brief();
            let what = match failure {
                Failure::Interrupted { .. } => format!("{brief}: ending the workers; once more kills them at once"),
                _ => format!("{brief}; ending the workers that still run"),
            };
            self.printer.notice(what).await;
        }
    }

    /// Ends everything that runs, in order: workers, sidecars, agents. Every wait is bounded.
    async fn end(&mut self, failed: bool) {
        (self.discovery, self.socket) = (None, None);
        self.table.note_end();
        if failed {
            self.broadcast(&ToAgent::StopWorkers { grace_ms: u64::try_from(GRACE.as_millis()).unwrap_or(u64::MAX) });
        }
        self.wait_for(GRACE + SLACK, Table::workers_ended).await;
        if failed && !self.table.workers_ended() {
            self.close_output();
            self.wait_for(SLACK, Table::workers_ended).await;
        }
        self.table.sidecars.values_mut().for_each(|sidecar| sidecar.is_closed = true);
        self.broadcast(&ToAgent::CloseSidecars);
        self.wait_for(DRAIN + SLACK, Table::sidecars_ended).await;
        self.links.values_mut().for_each(Link::hang_up);
        self.wait_for(LEAVE, Table::links_closed).await;
        if !self.table.links_closed() {
            self.links.values().for_each(Link::kill);
            self.wait_for(SLACK, Table::links_closed).await;
        }
    }

    /// Waits for what follows from the outcome, which is known; a signal of the user now kills everything.
    async fn wait_for(&mut self, bound: std::time::Duration, done: impl Fn(&Table) -> bool) {
        let deadline = Instant::now() + bound;
        while !done(&self.table) {
            tokio::select! {
                Some((agent, event)) = self.events.recv() => {
                    let agent = u32::try_from(agent).expect("an agent's number");
                    // Losses are consequences now. What a sidecar cannot continue for is not in its log.
                    let consequence = self.consequence(agent, event);
                    self.notices.extend(consequence.loss.filter(|loss| matches!(loss, Loss::Fatal { .. })).map(Text::Loss));
                    self.notices.extend(consequence.text.map(Text::Other));
                }
                () = self.signals.again() => {
                    self.close_output();
                    self.broadcast(&ToAgent::Kill);
                }
                () = sleep_until(deadline) => return,
            }
        }
    }

    fn close_output(&self) {
        self.receivers.iter().for_each(|receivers| receivers.output.close());
    }

    fn broadcast(&self, command: &ToAgent) {
        self.links.values().for_each(|link| link.send(command.clone()));
    }

    /// The lines about the workers that failed besides what the job ends with.
    fn others(&self, failure: &Failure) -> Vec<String> {
        let Failure::Elastic(failure) = failure else { return Vec::new() };
        self.table.others(failure.culprit())
    }

    /// Writes the report and the last notices.
    async fn close(mut self, failure: Option<&Failure>) -> u8 {
        let mut exit = failure.map_or(0, Failure::exit_code);
        self.print_notices(failure).await;
        if let Some(failure) = failure {
            let lines = self.others(failure).into_iter().chain(self.table.records.line());
            let below: String = lines.map(|line| format!("\n{line}")).collect();
            self.printer.block(failure.code().mark(&format!("{failure}{below}"))).await;
        }
        let report = self.settings.report.as_deref().map(|path| (self.report(failure, exit), path));
        if let Some((report, path)) = &report {
            exit = written(report, path, &self.printer).await;
        }
        if let Some(notice) = self.receivers.as_ref().and_then(|receivers| receivers.output.notice()) {
            self.printer.notice(notice).await;
        }
        if self.settings.verbose {
            self.printer.notice(format!("the job ended after {:.1} s", self.began.elapsed().as_secs_f64())).await;
        }
        self.receivers = None;
        let lost = finish_output(self.printer, &mut self.signals, failure.is_some()).await;
        match lost {
            Some(lost) if exit == 0 => report_lost_output(&lost, report, self.settings).await,
            _ => exit,
        }
    }
}

async fn next_answer(discovery: &mut Option<Discovery>) -> Answer {
    match discovery {
        Some(discovery) => discovery.next().await,
        None => std::future::pending().await,
    }
}

async fn next_request(socket: &mut Option<JobSocket>) -> Asked {
    match socket {
        Some(socket) => socket.next().await,
        None => std::future::pending().await,
    }
}

/// How often agents report that their host is up.
const BEAT_MS: u64 = 1_000;
