//! Runs plans on FIFO lanes under adversarial schedules and checks that they complete.
//!
//! A lane is a FIFO from one member to another. A member starts operations in order, begins the sub-schedules of each lane in
//! order up to the window, and posts a round's transfers together. A send completes when the receiver takes the
//! chunk from the lane's head. The schedule chooses the next event among all possible ones.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use ronde_wire::{Lane, Member};

use super::{PlanPosition, Violation};
use crate::plan::{Plan, SubSchedule, Transfer};

/// When a receiver takes the chunk at a lane's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// There are no lanes: a chunk moves directly from the sender's register to the posted receive, without a buffer and
    /// without waiting for another chunk.
    Rendezvous,
    /// As soon as the receiver has started the operation: it buffers a chunk that arrives before its receive is posted.
    /// Senders are subject to backpressure as in the executor: a sub-schedule occupies its slot in the sender's window until
    /// every member to which it only sends has acknowledged its end with a token. That bounds the receiver's buffer.
    Backpressure,
    /// Only when the matching receive is posted: the receiver has no buffer, and a waiting head blocks the chunks after it.
    WhenPosted,
}

/// Which event comes next when several are possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// The one that became possible first.
    Fair,
    /// The one that became possible last.
    NewestFirst,
    /// Any event of this member, then those of others.
    RunAhead(Member),
    /// Events of other members, then those of this one.
    HoldBack(Member),
    /// A random one, from this seed.
    Random(u64),
}

impl Schedule {
    /// Schedules that suffice to find a plan that deadlocks alone.
    #[must_use]
    pub fn few(members: usize) -> Vec<Self> {
        let last = (0..).map(Member).take(members).last().unwrap_or_default();
        vec![Self::Fair, Self::NewestFirst, Self::RunAhead(Member(0)), Self::HoldBack(last)]
    }

    /// Every member once run ahead and once held back, and so many random schedules.
    #[must_use]
    pub fn many(members: usize, random: u64) -> Vec<Self> {
        let members = || (0..).map(Member).take(members);
        let fixed = [Self::Fair, Self::NewestFirst].into_iter();
        let fixed = fixed.chain(members().map(Self::RunAhead)).chain(members().map(Self::HoldBack));
        fixed.chain((0..random).map(Self::Random)).collect()
    }
}

/// Statistics of all runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Explored {
    /// The most chunks of one sender buffered at a receiver before their receives were posted.
    pub early_chunks_max: usize,
}

/// Runs two operations on the same lanes: every member starts `a` before `b`, and all other events interleave in every
/// schedule of [`Schedule::many`], delivered as by the executor ([`Delivery::Backpressure`]).
///
/// # Errors
/// [`Violation::Stuck`] when a schedule reaches a state without possible events.
pub fn check_interleaved(a: &[Plan], b: &[Plan]) -> Result<Explored, Violation> {
    explore(&[a, b], Delivery::Backpressure, &Schedule::many(a.len(), RANDOM_SCHEDULES))
}

/// Random schedules of [`check_interleaved`].
const RANDOM_SCHEDULES: u64 = 8;

/// Runs any number of operations, started in order by every member, in the given schedules. `operations[i][m]` is member
/// `m`'s plan for operation `i`.
///
/// # Errors
/// [`Violation::Stuck`] when a schedule reaches a state without possible events.
pub fn explore(operations: &[&[Plan]], delivery: Delivery, schedules: &[Schedule]) -> Result<Explored, Violation> {
    let mut seen = Explored::default();
    for schedule in schedules {
        let early = Network::new(operations, delivery).run(*schedule)?;
        seen.early_chunks_max = seen.early_chunks_max.max(early);
    }
    Ok(seen)
}

/// An event that is possible now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Start { member: Member },
    Post(Task),
    Take(Link),
    Token(Task),
}

impl Event {
    fn member(self) -> Member {
        match self {
            Self::Start { member } => member,
            Self::Post(task) | Self::Token(task) => task.member,
            Self::Take(link) => link.to,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Link {
    from: Member,
    to: Member,
    lane: Lane,
    /// Without lanes, the operation and sub-schedule that the link is for.
    own: Option<(usize, usize)>,
}

/// One member's part of a sub-schedule of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Task {
    member: Member,
    operation: usize,
    sub_schedule: usize,
}

/// A chunk on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    operation: usize,
    sub_schedule: usize,
    round: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingTransfer {
    SendTo(Member),
    ReceiveFrom(Member),
}

#[derive(Default)]
struct Queue {
    chunks: VecDeque<Chunk>,
    /// Whether taking its head is among the ready events.
    offered: bool,
}

#[derive(Default)]
struct Progress {
    round: usize,
    posted: bool,
    done: bool,
    /// Expected tokens, less those received before the sub-schedule ended here.
    tokens: isize,
    /// Transfers of the posted round that are not complete.
    open: Vec<PendingTransfer>,
    /// Chunks received before their receive was posted.
    early: Vec<(usize, Member)>,
}

#[derive(Clone, Default)]
struct Window {
    next: usize,
    in_flight: usize,
}

struct Network<'a> {
    operations: &'a [&'a [Plan]],
    delivery: Delivery,
    /// Operations that each member has started.
    started: Vec<usize>,
    progress: Vec<Vec<Vec<Progress>>>,
    windows: HashMap<(Member, usize, Lane), Window>,
    links: BTreeMap<Link, Queue>,
    ready: VecDeque<Event>,
    /// Chunks buffered at a receiver before their receive is posted, by sender and receiver, and the maximum.
    early: HashMap<(Member, Member), usize>,
    early_max: usize,
}

impl<'a> Network<'a> {
    fn new(operations: &'a [&'a [Plan]], delivery: Delivery) -> Self {
        let fresh = |plan: &Plan| plan.sub_schedules.iter().map(|_| Progress::default()).collect();
        let members = operations.first().map_or(0, |plans| plans.len());
        Self {
            operations,
            delivery,
            started: vec![0; members],
            progress: operations.iter().map(|plans| plans.iter().map(fresh).collect()).collect(),
            windows: HashMap::new(),
            links: BTreeMap::new(),
            early: HashMap::new(),
            early_max: 0,
            ready: (0..).map(Member).take(members).map(|member| Event::Start { member }).collect(),
        }
    }

    fn run(mut self, schedule: Schedule) -> Result<usize, Violation> {
        let mut random = match schedule {
            Schedule::Random(seed) => seed,
            _ => 0,
        };
        while let Some(event) = self.next(schedule, &mut random) {
            match event {
                Event::Start { member } => self.start(member),
                Event::Post(task) => self.post(task),
                Event::Take(link) => self.take(link),
                Event::Token(task) => self.receive_token(task),
            }
        }
        self.check_done(schedule)?;
        Ok(self.early_max)
    }

    fn next(&mut self, schedule: Schedule, random: &mut u64) -> Option<Event> {
        let found = |wanted: &dyn Fn(Member) -> bool| self.ready.iter().position(|event| wanted(event.member()));
        let index = match schedule {
            Schedule::Fair => 0,
            Schedule::NewestFirst => self.ready.len().saturating_sub(1),
            Schedule::RunAhead(member) => found(&|other| other == member).unwrap_or(0),
            Schedule::HoldBack(member) => found(&|other| other != member).unwrap_or(0),
            Schedule::Random(_) => below(self.ready.len(), random),
        };
        self.ready.remove(index)
    }

    fn start(&mut self, member: Member) {
        let operation = self.started[member.index()];
        self.started[member.index()] += 1;
        if self.started[member.index()] < self.operations.len() {
            self.ready.push_back(Event::Start { member });
        }
        let plan = &self.operations[operation][member.index()];
        let mut lanes: Vec<Lane> = plan.sub_schedules.iter().map(|sub_schedule| sub_schedule.lane).collect();
        lanes.sort_unstable();
        lanes.dedup();
        for lane in lanes {
            self.begin(member, operation, lane);
        }
        self.offer_all(member);
    }

    /// Begins sub-schedules of a lane while the window has room.
    fn begin(&mut self, member: Member, operation: usize, lane: Lane) {
        let plan = &self.operations[operation][member.index()];
        let mut window = self.windows.get(&(member, operation, lane)).cloned().unwrap_or_default();
        while window.in_flight < plan.window && window.next < plan.sub_schedules.len() {
            let sub_schedule = window.next;
            if plan.prelude && sub_schedule > 0 && !self.progress[operation][member.index()][0].done {
                break;
            }
            window.next += 1;
            if plan.sub_schedules[sub_schedule].lane != lane {
                continue;
            }
            let progress = &mut self.progress[operation][member.index()][sub_schedule];
            if let Some(round) = next_transfers(&plan.sub_schedules[sub_schedule], 0) {
                progress.round = round;
                window.in_flight += 1;
                self.ready.push_back(Event::Post(Task { member, operation, sub_schedule }));
            } else {
                progress.done = true;
            }
        }
        self.windows.insert((member, operation, lane), window);
    }

    /// Checks the heads of all lanes that lead to a member.
    fn offer_all(&mut self, member: Member) {
        let links: Vec<Link> = self.links.keys().filter(|link| link.to == member).copied().collect();
        links.into_iter().for_each(|link| self.offer(link));
    }

    fn post(&mut self, task: Task) {
        let Task { member, operation, sub_schedule } = task;
        let content = &self.operations[operation][member.index()].sub_schedules[sub_schedule];
        let lane = content.lane;
        let own = (self.delivery == Delivery::Rendezvous).then_some((operation, sub_schedule));
        let progress = &mut self.progress[operation][member.index()][sub_schedule];
        let round = progress.round;
        progress.posted = true;
        progress.open.clear();
        let mut links = Vec::new();
        for transfer in &content.rounds[round].transfers {
            match *transfer {
                Transfer::Send { to, .. } => {
                    progress.open.push(PendingTransfer::SendTo(to));
                    let link = Link { from: member, to, lane, own };
                    let chunk = Chunk { operation, sub_schedule, round };
                    self.links.entry(link).or_default().chunks.push_back(chunk);
                    links.push(link);
                }
                Transfer::Receive { from, .. } => {
                    match progress.early.iter().position(|early| *early == (round, from)) {
                        Some(index) => {
                            progress.early.swap_remove(index);
                            self.early.entry((from, member)).and_modify(|chunks| *chunks -= 1);
                        }
                        None => progress.open.push(PendingTransfer::ReceiveFrom(from)),
                    }
                    links.push(Link { from, to: member, lane, own });
                }
            }
        }
        self.advance_when_complete(task);
        links.into_iter().for_each(|link| self.offer(link));
    }

    fn take(&mut self, link: Link) {
        let Some(queue) = self.links.get_mut(&link) else { return };
        queue.offered = false;
        let Some(head) = queue.chunks.pop_front() else { return };
        if queue.chunks.is_empty() {
            self.links.remove(&link);
        }
        let Chunk { operation, sub_schedule, round } = head;
        let receiver = Task { member: link.to, operation, sub_schedule };
        let sender = Task { member: link.from, operation, sub_schedule };
        if self.posted(link, head) {
            self.complete_transfer(receiver, PendingTransfer::ReceiveFrom(link.from));
        } else {
            self.progress[operation][link.to.index()][sub_schedule].early.push((round, link.from));
            let chunks = self.early.entry((link.from, link.to)).or_default();
            *chunks += 1;
            self.early_max = self.early_max.max(*chunks);
        }
        self.complete_transfer(sender, PendingTransfer::SendTo(link.to));
        self.offer(link);
    }

    /// Puts taking a lane's head among the ready events when it can be taken.
    fn offer(&mut self, link: Link) {
        let Some(queue) = self.links.get(&link).filter(|queue| !queue.offered) else { return };
        let Some(&head) = queue.chunks.front() else { return };
        let can = match self.delivery {
            Delivery::Backpressure => head.operation < self.started[link.to.index()],
            Delivery::Rendezvous | Delivery::WhenPosted => self.posted(link, head),
        };
        if can && let Some(queue) = self.links.get_mut(&link) {
            queue.offered = true;
            self.ready.push_back(Event::Take(link));
        }
    }

    /// Whether the receive for a chunk is posted.
    fn posted(&self, link: Link, head: Chunk) -> bool {
        let progress = &self.progress[head.operation][link.to.index()][head.sub_schedule];
        let open = progress.open.contains(&PendingTransfer::ReceiveFrom(link.from));
        progress.posted && progress.round == head.round && open
    }

    fn complete_transfer(&mut self, task: Task, transfer: PendingTransfer) {
        let progress = &mut self.progress[task.operation][task.member.index()][task.sub_schedule];
        progress.open.retain(|open| *open != transfer);
        self.advance_when_complete(task);
    }

    fn advance_when_complete(&mut self, task: Task) {
        let Task { member, operation, sub_schedule } = task;
        let content = &self.operations[operation][member.index()].sub_schedules[sub_schedule];
        let progress = &mut self.progress[operation][member.index()][sub_schedule];
        if !progress.posted || !progress.open.is_empty() {
            return;
        }
        progress.posted = false;
        if let Some(round) = next_transfers(content, progress.round + 1) {
            progress.round = round;
            self.ready.push_back(Event::Post(task));
        } else {
            progress.done = true;
            self.end(task);
        }
    }

    /// Ends a sub-schedule: its window slot becomes free at once, or with the last token.
    fn end(&mut self, task: Task) {
        let Task { member, operation, sub_schedule } = task;
        let content = &self.operations[operation][member.index()].sub_schedules[sub_schedule];
        if self.delivery == Delivery::Backpressure {
            let (send_only, receive_only) = one_directional(content);
            let tokens = receive_only.into_iter().map(|member| Event::Token(Task { member, operation, sub_schedule }));
            self.ready.extend(tokens);
            let progress = &mut self.progress[operation][member.index()][sub_schedule];
            progress.tokens += isize::try_from(send_only.len()).unwrap_or(isize::MAX);
            if progress.tokens > 0 {
                return;
            }
        }
        self.release(member, operation, content.lane);
    }

    fn receive_token(&mut self, task: Task) {
        let Task { member, operation, sub_schedule } = task;
        let progress = &mut self.progress[operation][member.index()][sub_schedule];
        progress.tokens -= 1;
        if progress.done && progress.tokens == 0 {
            self.release(
                member,
                operation,
                self.operations[operation][member.index()].sub_schedules[sub_schedule].lane,
            );
        }
    }

    fn release(&mut self, member: Member, operation: usize, lane: Lane) {
        if let Some(window) = self.windows.get_mut(&(member, operation, lane)) {
            window.in_flight -= 1;
        }
        self.begin(member, operation, lane);
    }

    fn check_done(&self, schedule: Schedule) -> Result<(), Violation> {
        for (operation, members) in self.progress.iter().enumerate() {
            for (member, sub_schedules) in (0..).map(Member).zip(members) {
                let undone = sub_schedules.iter().position(|progress| !progress.done);
                let begun = sub_schedules.iter().position(|progress| !progress.done && progress.posted);
                if let Some(sub_schedule) = begun.or(undone) {
                    return Err(self.stuck(Task { member, operation, sub_schedule }, schedule));
                }
            }
        }
        Ok(())
    }

    fn stuck(&self, task: Task, schedule: Schedule) -> Violation {
        let Task { member, operation, sub_schedule } = task;
        let progress = &self.progress[operation][member.index()][sub_schedule];
        let at = PlanPosition { member, sub_schedule, round: progress.round };
        let blocked = self.links.iter().find(|(link, queue)| link.to == member && !queue.chunks.is_empty());
        let head = blocked.and_then(|(link, queue)| queue.chunks.front().map(|head| (link, head)));
        let head = head.map(|(link, head)| {
            (head.operation, PlanPosition { member: link.from, sub_schedule: head.sub_schedule, round: head.round })
        });
        Violation::Stuck { operation, at, head, schedule: format!("{schedule:?}") }
    }
}

/// The members to which a member only sends in a sub-schedule, and those from which it only receives.
fn one_directional(sub_schedule: &SubSchedule) -> (Vec<Member>, Vec<Member>) {
    let (mut send_only, mut receive_only) = (BTreeSet::new(), BTreeSet::new());
    for transfer in sub_schedule.rounds.iter().flat_map(|round| &round.transfers) {
        match *transfer {
            Transfer::Send { to, .. } => send_only.insert(to),
            Transfer::Receive { from, .. } => receive_only.insert(from),
        };
    }
    (send_only.difference(&receive_only).copied().collect(), receive_only.difference(&send_only).copied().collect())
}

/// The first round from `round` on that has transfers.
fn next_transfers(sub_schedule: &SubSchedule, round: usize) -> Option<usize> {
    let later = sub_schedule.rounds.iter().enumerate().skip(round);
    later.filter(|(_, content)| !content.transfers.is_empty()).map(|(index, _)| index).next()
}

/// A number below `bound` from S. Vigna's SplitMix64.
fn below(bound: usize, state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    usize::try_from(mixed % bound.max(1) as u64).unwrap_or(0)
}
