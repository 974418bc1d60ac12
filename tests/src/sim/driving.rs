//! The simulated driver and data threads of a sidecar: they pass events to the engine and the executors, and perform
//! their actions.

use std::sync::Arc;

use ronde_engine::{Action, Admission, Completion, Event, ExecutorAction};
use ronde_wire::frame::Chunk;
use ronde_wire::{Ascent, Control, Detail, Epoch, Failure, Rank, RequestId, Seq, SidecarIndex};

use super::blame::blame;
use super::checks::{Property, Violated, violated};
use super::cluster::Cluster;
use super::fake_plugins::{FAILS, HostPlugins};
use super::host::{Command, LaneMemory, LaneOperations, Report};
use super::link::{ConnectionId, Direction, Message, Plane};
use super::saboteur::Saboteur;
use super::schedule::SimEvent;

/// The control thread.
impl Cluster {
    /// Passes an event to a sidecar's engine.
    pub(super) fn handle_event(&mut self, host: usize, event: Event) {
        let now = self.schedule.now();
        let process = &mut self.hosts[host];
        process.engine.handle_event(now, event);
        if !process.draining {
            process.draining = true;
            let (life, delay_us) = (process.life, self.rng.u64(..40));
            self.schedule.after(delay_us, SimEvent::Drain { host, life });
        }
    }

    /// Performs the engine's actions, then sets its timer.
    pub(super) fn drain(&mut self, host: usize) -> Result<(), Violated> {
        let me = self.hosts[host].index;
        self.hosts[host].draining = false;
        let mut ended = None;
        while let Some(action) = self.hosts[host].engine.poll_action() {
            if let Action::EpochEnded { epoch, .. } = action {
                ended = Some(epoch);
            }
            self.perform(host, action)?;
        }
        // Requests after the end are answered after it.
        if let Some(epoch) = ended {
            self.oracle.epoch_ended(epoch, &self.setup.world.ranks_of(me))?;
        }
        if let Some(at) = self.hosts[host].engine.poll_timeout()
            && at.0 < self.hosts[host].timer_us
        {
            let life = self.hosts[host].life;
            self.hosts[host].timer_us = at.0;
            self.schedule.at(at.0, SimEvent::Timeout { host, life });
        }
        Ok(())
    }

    /// Handles the engine's timer; the sessions of living workers send heartbeats at the same time.
    pub(super) fn timeout(&mut self, host: usize) {
        let now = self.schedule.now();
        self.hosts[host].timer_us = u64::MAX;
        let healthy = |w: &&super::worker::Worker| w.host == host && w.alive && now.0 >= w.hung_until_us;
        let ranks: Vec<Rank> = self.workers.iter().filter(healthy).map(|worker| worker.rank).collect();
        for rank in ranks {
            self.handle_event(host, Event::RankAlive { rank });
        }
        let process = &mut self.hosts[host];
        process.engine.handle_timeout(now);
        if !process.draining {
            process.draining = true;
            let life = process.life;
            self.schedule.after(1, SimEvent::Drain { host, life });
        }
    }

    /// Handles a lane's report on the control thread.
    pub(super) fn handle_report(&mut self, host: usize, lane: usize) {
        let process = &mut self.hosts[host];
        match process.lanes[lane].reports.pop_front() {
            Some(Report::Done(epoch, seq)) => {
                let Some(operation) = process.operations.get_mut(&(epoch, seq)) else { return };
                operation.lanes_left -= 1;
                if operation.lanes_left == 0 {
                    self.handle_event(host, Event::Executed { epoch, seq });
                }
            }
            Some(Report::Dropped(epoch, last)) => {
                let left = process.dropping.entry((epoch, last)).or_default();
                *left = left.saturating_sub(1);
                if *left == 0 {
                    process.dropping.remove(&(epoch, last));
                    // An operation with a plugin is dropped separately.
                    if self.sabotage.as_mut().is_some_and(super::saboteur::Sabotage::keeps_what_failed) {
                        process.kept.commit((epoch, last));
                    } else {
                        process.kept.discard((epoch, last));
                    }
                    self.handle_event(host, Event::Cancelled { epoch, last });
                }
            }
            Some(Report::Failed(epoch, seq, reason)) => {
                self.handle_event(host, Event::ExecutionFailed { epoch, seq, reason, plugin: true });
            }
            Some(Report::LinkDown(peer, reason)) => {
                self.handle_event(host, Event::LaneDown { peer, closed: false, reason: reason.to_owned() });
            }
            None => {}
        }
    }

    fn perform(&mut self, host: usize, action: Action) -> Result<(), Violated> {
        let me = self.hosts[host].index;
        match action {
            Action::Send { to, epoch, seq, message } => self.send_control(host, to, (epoch, seq, message)),
            Action::EpochBegan { epoch } => self.epoch_began(host, epoch)?,
            Action::EpochEnded { epoch, failure } => self.epoch_ended(host, epoch, &failure)?,
            Action::Admit(admission) => self.admit(host, admission)?,
            Action::Commit { epoch, seq } => self.commit(host, (epoch, seq))?,
            Action::SetForgotten { set } => {
                self.note(|| format!("{me} has nothing to do for {set} any more"));
                self.hosts[host].kept.forget(set);
            }
            Action::Cancel { epoch, last, dropped } => {
                self.note(|| format!("{me} drops {dropped:?}, up to {last}"));
                let lanes = self.hosts[host].lanes.len();
                self.hosts[host].dropping.insert((epoch, last), lanes);
                self.send_to_lanes(host, &Command::Cancel(epoch, last, dropped));
            }
            Action::Complete { rank, request, outcome } => self.complete(host, (rank, request), &outcome)?,
            Action::Autotuned(_) => self.report.tuned += 1,
            Action::Notice { text, .. } | Action::Hung { text, .. } => self.note(|| format!("{me} notices: {text}")),
            Action::Disconnect { peer, reason } => self.break_off(host, peer, &reason)?,
            Action::EndSession { rank, failure } => self.end_session(rank, &failure)?,
        }
        Ok(())
    }

    fn send_control(&mut self, host: usize, to: SidecarIndex, frame: (Epoch, Seq, Control)) {
        let (epoch, seq, message) = frame;
        let direction = Direction { plane: Plane::Control, from: host, to: self.position(to) };
        if let Some(hostile) = &mut self.hostile {
            hostile.observe(seq, &message);
        }
        let sent = match &mut self.sabotage {
            Some(sabotage) => {
                let ahead = self.network.undelivered(direction).iter_mut();
                sabotage.pass((direction.from, direction.to), (seq, message), ahead)
            }
            None => vec![(seq, message)],
        };
        for (seq, message) in sent {
            if !matches!(message, Control::Heartbeat { .. }) {
                let me = self.hosts[host].index;
                self.note(|| format!("{me} to {to}: {epoch}, {seq}, {}", brief(&message)));
            }
            self.network.send(&mut self.schedule, &mut self.rng, direction, Message::Control(epoch, seq, message));
        }
    }

    fn epoch_ended(&mut self, host: usize, epoch: Epoch, failure: &Failure) -> Result<(), Violated> {
        let me = self.hosts[host].index;
        self.note(|| format!("{me}: {epoch} ends: {failure}"));
        let by_hostile =
            self.hostile.as_ref().is_some_and(|hostile| hostile.host() == host || hostile.is_named(failure));
        if failure.cause == ronde_wire::Cause::Bug && !by_hostile {
            return violated(Property::NoBug, format!("{epoch} ends on {me}: {failure}"));
        }
        let workload = self.workload(epoch);
        if !by_hostile {
            blame(failure, &self.faults, &workload, &format!("{me} at the end of {epoch}: {failure}"))?;
        }
        self.detach_all(host);
        self.send_to_lanes(host, &Command::EpochEnd(epoch));
        Ok(())
    }

    fn admit(&mut self, host: usize, mut admission: Arc<Admission>) -> Result<(), Violated> {
        let (me, life) = (self.hosts[host].index, self.hosts[host].life);
        self.note(|| format!("{me} admits {}: {} tensors", admission.seq, admission.tensors.len()));
        self.oracle.admitted(me, life, &admission)?;
        if let Some(sabotage) = &mut self.sabotage {
            sabotage.alter(Arc::make_mut(&mut admission));
        }
        let sub_schedules = admission.plan.sub_schedules.len();
        self.report.piped += u64::from(sub_schedules > usize::from(self.setup.lanes) * admission.plan.window);
        if admission.tensors.len() > 1 {
            self.report.fused += admission.tensors.len() as u64;
        }
        let garbage = self.sabotage.as_ref().is_some_and(|sabotage| sabotage.saboteur == Saboteur::JoinedGarbage);
        self.hosts[host].reserve(&admission, garbage);
        self.hosts[host].kept.begin(&admission);
        self.send_to_lanes(host, &Command::Admit(admission));
        Ok(())
    }

    /// Commits the codec state of an operation: its lanes are done, and no member has failed.
    fn commit(&mut self, host: usize, operation: (Epoch, Seq)) -> Result<(), Violated> {
        let (process, (epoch, seq)) = (&mut self.hosts[host], operation);
        let me = process.index;
        let performed = process.operations.get(&operation).is_some_and(|operation| operation.lanes_left == 0);
        if !process.kept.commit(operation) || !performed {
            return violated(Property::NoBug, format!("{me} commits {seq} of {epoch}, which it has not performed"));
        }
        self.note(|| format!("{me} keeps what {seq} has left"));
        self.oracle.committed(me, operation)
    }

    fn complete(
        &mut self,
        host: usize,
        (rank, request): (Rank, RequestId),
        outcome: &Result<Completion, Failure>,
    ) -> Result<(), Violated> {
        if self.sabotage.as_mut().is_some_and(super::saboteur::Sabotage::forgets) {
            return Ok(());
        }
        let process = &mut self.hosts[host];
        process.inputs.remove(&(rank, request));
        let result = match outcome {
            Ok(completion) => {
                let operation = process.operations.get(&(completion.epoch, completion.seq));
                let source = match (&mut self.sabotage, operation) {
                    (Some(sabotage), Some(operation)) => {
                        sabotage.result_of(rank, operation.ranks_like(completion.tensor, rank))
                    }
                    _ => rank,
                };
                let place = (completion.tensor, completion.own.then_some(source));
                match operation.and_then(|operation| operation.outputs.get(&place)) {
                    Some(bytes) => Ok((completion, bytes.as_slice())),
                    // An agreement by messages alone has no operation.
                    None if completion.shape.dimensions() == [0] => Ok((completion, &[][..])),
                    None => {
                        let text = format!("{rank} got a result of nothing: {completion:?}");
                        return violated(Property::CurrentEpoch, text);
                    }
                }
            }
            Err(failure) => Err(failure),
        };
        let Some((epoch, item)) = self.oracle.completed((rank, request), result, &self.faults)? else { return Ok(()) };
        self.note(|| match outcome {
            Ok(_) => format!("{rank} has item {item}"),
            Err(failure) => format!("{rank} fails with item {item}: {failure}"),
        });
        self.progress_us = self.schedule.now_us();
        let set = match outcome {
            Ok(Completion { detail: Detail::Set(set), .. }) => Some(*set),
            _ => None,
        };
        self.item_is_over(rank, (epoch, item), set);
        Ok(())
    }

    pub(super) fn send_to_lanes(&mut self, host: usize, command: &Command) {
        let (now_us, process) = (self.schedule.now_us(), &mut self.hosts[host]);
        let life = process.life;
        for (lane, thread) in process.lanes.iter_mut().enumerate() {
            let delay_us = self.rng.u64(..100) + if self.rng.u8(..50) == 0 { 5_000 } else { 0 };
            thread.commands_us = thread.commands_us.max(now_us + delay_us);
            thread.commands.push_back(command.clone());
            self.schedule.at(thread.commands_us, SimEvent::Command { host, life, lane });
        }
    }

    pub(super) fn position(&self, sidecar: SidecarIndex) -> usize {
        self.sidecars.binary_search(&sidecar).expect("only sidecars of the world are named")
    }
}

/// The data threads.
impl Cluster {
    /// Handles a command on a lane.
    pub(super) fn command(&mut self, host: usize, lane: usize) {
        let thread = &mut self.hosts[host].lanes[lane];
        match thread.commands.pop_front() {
            Some(Command::Epoch(epoch)) => {
                thread.epoch = epoch;
                (thread.dropped, thread.newest) = Default::default();
                thread.executor.handle_epoch(epoch);
            }
            Some(Command::EpochEnd(epoch)) => thread.executor.handle_epoch_end(epoch),
            Some(Command::Admit(admission)) => {
                thread.newest = admission.seq;
                thread.executor.handle_admission(admission);
            }
            Some(Command::Cancel(epoch, last, dropped)) => {
                thread.executor.handle_cancel(epoch, last, &dropped);
                thread.dropped.extend(dropped);
                self.report(host, lane, Report::Dropped(epoch, last));
            }
            None => {}
        }
        self.wake(host, lane);
    }

    /// Handles a message that arrives at a sidecar.
    pub(super) fn deliver(&mut self, direction: Direction, generation: u64) -> Result<(), Violated> {
        let Some(message) = self.network.deliver(&mut self.schedule, direction, generation) else { return Ok(()) };
        if !self.hosts[direction.to].alive {
            return Ok(());
        }
        match direction.plane {
            Plane::Control => self.deliver_control(direction, message),
            Plane::Lane(lane) => self.deliver_to_lane(direction, lane, generation, message)?,
        }
        Ok(())
    }

    /// A chunk has left the port's queue.
    pub(super) fn sent(&mut self, direction: Direction, generation: u64) {
        let Plane::Lane(lane) = direction.plane else { return };
        let peer = self.hosts[direction.to].index;
        let thread = &mut self.hosts[direction.from].lanes[lane];
        if thread.links.get(&direction.to) == Some(&generation) {
            thread.executor.handle_sent(peer, 1);
            self.wake(direction.from, lane);
        }
    }

    /// Runs a lane's executor for a few steps.
    pub(super) fn work(&mut self, host: usize, lane: usize) -> Result<(), Violated> {
        for _ in 0..self.rng.u8(1..=6) {
            let process = &mut self.hosts[host];
            let thread = &mut process.lanes[lane];
            let operations = LaneOperations { all: &mut process.operations, epoch: thread.epoch };
            let plugins = HostPlugins { me: process.index, kept: &mut process.kept };
            let action = thread.executor.poll_action(&mut LaneMemory { operations, plugins });
            if let Some(wrong) = process.kept.wrong.take() {
                return violated(Property::Committed, format!("on {}, lane {lane}: {wrong}", process.index));
            }
            let Some(action) = action else {
                thread.working = false;
                return self.check_bounds(host, lane);
            };
            self.act(host, lane, action)?;
        }
        let (life, delay_us) = (self.hosts[host].life, self.rng.u64(1..20));
        self.schedule.after(delay_us, SimEvent::Work { host, life, lane });
        Ok(())
    }

    fn wake(&mut self, host: usize, lane: usize) {
        let process = &mut self.hosts[host];
        if process.alive && !process.lanes[lane].working {
            process.lanes[lane].working = true;
            let (life, delay_us) = (process.life, self.rng.u64(..20));
            self.schedule.after(delay_us, SimEvent::Work { host, life, lane });
        }
    }

    fn deliver_control(&mut self, direction: Direction, message: Message) {
        let (host, from) = (direction.to, self.hosts[direction.from].index);
        let event = match message {
            Message::Up => Event::LinkUp { peer: from, lanes: self.setup.lanes },
            Message::Down(reason) => Event::LinkDown { peer: from, reason: reason.to_owned() },
            Message::Control(epoch, seq, message) => Event::Control { from, epoch, seq, message },
            Message::Chunk(_) | Message::Admitted(..) => return,
        };
        let me = self.hosts[host].index;
        if matches!(event, Event::LinkUp { .. } | Event::LinkDown { .. }) {
            self.note(|| format!("{me}: {event:?}"));
        }
        self.handle_event(host, event);
    }

    fn deliver_to_lane(
        &mut self,
        direction: Direction,
        lane: usize,
        generation: u64,
        message: Message,
    ) -> Result<(), Violated> {
        let (host, from) = (direction.to, self.hosts[direction.from].index);
        let me = self.hosts[host].index;
        self.note(|| format!("{me}, lane {lane}: from {from}: {}", brief_message(&message)));
        let thread = &mut self.hosts[host].lanes[lane];
        match message {
            Message::Up => {
                thread.links.insert(direction.from, generation);
                thread.executor.handle_link_up(from, self.setup.grant_bytes);
            }
            Message::Down(reason) => {
                thread.links.remove(&direction.from);
                thread.executor.handle_link_down(from);
                self.report(host, lane, Report::LinkDown(from, reason));
            }
            Message::Admitted(epoch, seq) => thread.executor.handle_admitted(from, epoch, seq),
            Message::Chunk(chunk) => self.deliver_chunk(host, lane, from, chunk)?,
            Message::Control(..) => {}
        }
        self.wake(host, lane);
        self.check_bounds(host, lane)
    }

    fn deliver_chunk(
        &mut self,
        host: usize,
        lane: usize,
        from: SidecarIndex,
        mut chunk: Chunk,
    ) -> Result<(), Violated> {
        let me = self.hosts[host].index;
        let thread = &mut self.hosts[host].lanes[lane];
        let (born, seq) = (chunk.epoch, chunk.seq);
        if let Some(sabotage) = &mut self.sabotage {
            sabotage.restamp(&mut chunk, thread.epoch);
            sabotage.renumber(&mut chunk, &thread.dropped, thread.newest);
        }
        let dropped = thread.executor.stats().chunks_dropped;
        let taken = thread.executor.handle_chunk(from, chunk);
        if born < thread.epoch && thread.executor.stats().chunks_dropped == dropped {
            let text = format!("{me} takes a chunk of {born} from {from} in {}: {taken:?}", thread.epoch);
            return violated(Property::CurrentEpoch, text);
        }
        match taken {
            Ok(()) => Ok(()),
            Err(violation) => {
                violated(Property::Protocol, format!("{me} refuses a chunk of {born}, {seq} from {from}: {violation}"))
            }
        }
    }

    fn act(&mut self, host: usize, lane: usize, action: ExecutorAction) -> Result<(), Violated> {
        let me = self.hosts[host].index;
        self.note(|| format!("{me}, lane {lane}: {}", brief_action(&action)));
        match action {
            ExecutorAction::Open { peer } => {
                let peer = self.position(peer);
                let id = ConnectionId { plane: Plane::Lane(lane), low: host.min(peer), high: host.max(peer) };
                self.network.open(&mut self.schedule, &mut self.rng, id);
            }
            ExecutorAction::Send { to, chunk } => self.send_on_lane(host, lane, to, Message::Chunk(chunk)),
            ExecutorAction::Admitted { to, epoch, seq } => {
                self.send_on_lane(host, lane, to, Message::Admitted(epoch, seq));
            }
            ExecutorAction::Done { epoch, seq } => self.report(host, lane, Report::Done(epoch, seq)),
            ExecutorAction::Failed { epoch, seq, reason, plugin: true } if reason.contains(FAILS) => {
                self.oracle.plugin_failed((epoch, seq))?;
                self.report(host, lane, Report::Failed(epoch, seq, reason));
            }
            ExecutorAction::Failed { epoch, seq, reason, .. } => {
                return violated(Property::NoBug, format!("{seq} of {epoch} fails on lane {lane} of {me}: {reason}"));
            }
            ExecutorAction::Disconnect { peer, violation } => {
                return violated(Property::Protocol, format!("lane {lane} of {me} disconnects {peer}: {violation}"));
            }
            ExecutorAction::Worked { .. } => {}
        }
        Ok(())
    }

    /// Sends on a link that this thread knows to be up and that still is; otherwise its end is about to be reported.
    fn send_on_lane(&mut self, host: usize, lane: usize, to: SidecarIndex, message: Message) {
        let direction = Direction { plane: Plane::Lane(lane), from: host, to: self.position(to) };
        let generation = self.network.generation(direction);
        if self.hosts[host].lanes[lane].links.get(&direction.to) != Some(&generation) {
            return;
        }
        if matches!(message, Message::Chunk(_)) {
            let delay_us = self.rng.u64(..100) + if self.rng.u8(..50) == 0 { 3_000 } else { 0 };
            self.schedule.after(delay_us, SimEvent::Sent { direction, generation });
        }
        self.network.send(&mut self.schedule, &mut self.rng, direction, message);
    }

    fn report(&mut self, host: usize, lane: usize, report: Report) {
        let (now_us, life) = (self.schedule.now_us(), self.hosts[host].life);
        let delay_us = self.rng.u64(..60);
        let thread = &mut self.hosts[host].lanes[lane];
        thread.reports_us = thread.reports_us.max(now_us + delay_us);
        thread.reports.push_back(report);
        self.schedule.at(thread.reports_us, SimEvent::Report { host, life, lane });
    }

    fn check_bounds(&self, host: usize, lane: usize) -> Result<(), Violated> {
        let peers = self.hosts.len() as u64 - 1;
        let early = self.hosts[host].lanes[lane].executor.private_bytes().early;
        if early <= peers * self.setup.grant_bytes {
            return Ok(());
        }
        let (me, grant) = (self.hosts[host].index, self.setup.grant_bytes);
        violated(Property::Bounds, format!("lane {lane} of {me} holds {early} early bytes; {grant} a peer are granted"))
    }
}

fn brief(message: &Control) -> String {
    match message {
        Control::Order(order) => {
            let names: Vec<&str> = order.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
            format!("order {} of {}: {:?}", names.join(" "), order.set, order.tuning)
        }
        Control::Schedule { number, buckets, patience_us } => {
            let tensors = buckets.iter().flat_map(|bucket| &bucket.order.tensors);
            let names: Vec<&str> = tensors.map(|tensor| tensor.name.as_str()).collect();
            format!("schedule {number}: {}, patience {patience_us} us", names.join(" "))
        }
        Control::Descending { to, message } => match message.open() {
            Ok(message) => format!("for {to:?}: {}", brief(&message)),
            Err(error) => error.to_string(),
        },
        Control::Ascending { generation, ascents } => {
            let each = |ascent: &Ascent| match ascent {
                Ascent::Message { origin, epoch, message, .. } => match message.open() {
                    Ok(message) => format!("{origin}, {epoch}: {}", brief(&message)),
                    Err(error) => error.to_string(),
                },
                other => format!("{other:?}"),
            };
            format!("{generation}: {}", ascents.iter().map(each).collect::<Vec<_>>().join("; "))
        }
        other => format!("{other:?}").chars().take(160).collect(),
    }
}

fn brief_action(action: &ExecutorAction) -> String {
    match action {
        ExecutorAction::Send { to, chunk } => format!("to {to}: {}", brief_chunk(chunk)),
        other => format!("{other:?}"),
    }
}

fn brief_message(message: &Message) -> String {
    match message {
        Message::Chunk(chunk) => brief_chunk(chunk),
        other => format!("{other:?}"),
    }
}

fn brief_chunk(chunk: &Chunk) -> String {
    let (header, early) = (chunk.header, if chunk.early { ", early" } else { "" });
    let place =
        format!("sub-schedule {}, round {}, {} and {} on", header.sub_schedule, header.round, header.start, header.len);
    format!("{}, {}, {place}{early}", chunk.epoch, chunk.seq)
}
