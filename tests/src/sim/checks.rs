//! The oracle: records all requests, and checks every answer, every admission and every end of an epoch.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use ronde_engine::{Admission, Completion};
use ronde_wire::{Cause, Detail, Epoch, Failure, Rank, RequestId, Seq, SetId, SidecarIndex};

use super::blame::{blame, is_named};
use super::fake_plugins::FAILS;
use super::faults::Faults;
use super::item::{InjectedError, Item, Kind, SetOf};
use super::workload::Workload;

/// The properties of a correct cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Every rank gets the bytes and the shape that the reference computes, or all get the same.
    Result,
    /// Every request gets exactly one answer, at the latest before its epoch ends.
    Answered,
    /// Answers, admissions and chunks are of the current epoch.
    CurrentEpoch,
    /// All sidecars admit the same operations under the same numbers in ascending order.
    OneOrder,
    /// All sidecars cut an operation in the same way.
    OnePlan,
    /// Ranks agree on whether a request fails, and it fails only for a reason.
    Agreement,
    /// A failure that ends an epoch names a rank or sidecar that a fault hit.
    Culprit,
    /// An operation with a plugin is committed by all of its members or by none: where a plugin has failed no rank has
    /// a result, and codecs keep state of the same number of rounds everywhere.
    Committed,
    /// Buffers for other sidecars stay within what was granted to them.
    Bounds,
    /// No correct sidecar reports a protocol violation of another one.
    Protocol,
    /// No epoch ends because of a bug, and no operation fails at an executor.
    NoBug,
    /// Every member of an epoch is notified in time that a sidecar of it has ended.
    InTime,
    /// When nothing breaks any more, epochs begin again and all work completes.
    Liveness,
}

/// A violated property.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violated {
    /// The property.
    pub property: Property,
    /// What was observed.
    pub text: String,
}

impl fmt::Display for Violated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} does not hold: {}", self.property, self.text)
    }
}

pub(super) fn violated<T>(property: Property, text: impl Into<String>) -> Result<T, Violated> {
    Err(Violated { property, text: text.into() })
}

/// A request without an answer yet.
#[derive(Debug)]
struct OpenRequest {
    rank: Rank,
    workload: Arc<Workload>,
    item: usize,
    /// Whether the first request by this name is still pending.
    twice: bool,
}

/// The outcomes of an item on the ranks that have their answer.
#[derive(Debug, Default)]
struct Outcomes {
    succeeded: Vec<Rank>,
    failed: Vec<Rank>,
    /// The result that all share: what the reference computes; without one, the first result.
    expected: Option<Vec<u8>>,
    /// What the first of them received besides.
    detail: Option<Detail>,
}

/// Results by epoch, the index of the item, and the rank.
pub type Results = BTreeMap<(Epoch, usize, Rank), Vec<u8>>;

/// How often a run met each situation, by name.
pub type Counts = BTreeMap<&'static str, u64>;

#[derive(Debug, Default)]
pub(super) struct Oracle {
    open: BTreeMap<RequestId, OpenRequest>,
    answered: BTreeSet<RequestId>,
    went: BTreeMap<(Epoch, usize), Outcomes>,
    /// The operation under each number, as a text that contains everything that has to be equal.
    orders: BTreeMap<(Epoch, Seq), (String, String)>,
    last_admitted: BTreeMap<(SidecarIndex, u32), (Epoch, Seq)>,
    /// Operations in which a plugin has failed somewhere, and those that are committed.
    broken: BTreeSet<(Epoch, Seq)>,
    committed: BTreeSet<(Epoch, Seq)>,
    /// Sets that were added and not removed, by epoch and the item that added them.
    sets: BTreeMap<(Epoch, usize), SetId>,
    /// The same with those that were removed.
    added: BTreeMap<(Epoch, usize), SetId>,
    /// Requests of epochs up to this one may have any outcome: a sidecar was hostile.
    pub(super) unchecked_through: Option<Epoch>,
    /// For comparison between runs.
    pub(super) results: Results,
    pub(super) met: Counts,
    pub(super) successes: u64,
    pub(super) failures: u64,
}

impl Oracle {
    pub(super) fn asked(&mut self, rank: Rank, request: RequestId, workload: &Arc<Workload>, item: usize) {
        self.open.insert(request, OpenRequest { rank, workload: Arc::clone(workload), item, twice: false });
    }

    /// A rank submits a name that it has a pending request for.
    pub(super) fn asked_twice(&mut self, rank: Rank, request: RequestId, workload: &Arc<Workload>, item: usize) {
        self.open.insert(request, OpenRequest { rank, workload: Arc::clone(workload), item, twice: true });
    }

    /// The coordinator begins an epoch. After a restart of all sidecars it may have the number of an earlier one.
    pub(super) fn epoch_begins(&mut self, epoch: Epoch) {
        self.orders.retain(|(e, _), _| *e != epoch);
        self.went.retain(|(e, _), _| *e != epoch);
        self.broken.retain(|(e, _)| *e != epoch);
        self.committed.retain(|(e, _)| *e != epoch);
        self.sets.clear();
        self.added.retain(|(e, _), _| *e != epoch);
    }

    /// A sidecar is gone with the requests of its ranks; the workers know.
    pub(super) fn forget(&mut self, ranks: &[Rank]) {
        self.open.retain(|_, asked| !ranks.contains(&asked.rank));
    }

    /// Whether a rank has requests without answers.
    pub(super) fn is_waiting(&self, rank: Rank) -> bool {
        self.open.values().any(|asked| asked.rank == rank)
    }

    /// Describes a rank's pending requests.
    pub(super) fn waiting(&self) -> String {
        let one = |asked: &OpenRequest| {
            let item = &asked.workload.items[asked.item];
            format!("{} waits for item {} ({} of {:?})", asked.rank, asked.item, item.name, item.place)
        };
        self.open.values().map(one).collect::<Vec<_>>().join(", ")
    }

    /// Checks an answer; returns the item that is over.
    pub(super) fn completed(
        &mut self,
        (rank, request): (Rank, RequestId),
        outcome: Result<(&Completion, &[u8]), &Failure>,
        faults: &Faults,
    ) -> Result<Option<(Epoch, usize)>, Violated> {
        if !self.answered.insert(request) {
            return violated(Property::Answered, format!("{request} of {rank} got two answers"));
        }
        let Some(asked) = self.open.remove(&request).filter(|asked| asked.rank == rank) else {
            return violated(Property::Answered, format!("{rank} got an answer to {request}, which it did not ask"));
        };
        if self.unchecked_through.is_some_and(|last| asked.workload.epoch <= last) {
            return Ok((!asked.twice).then_some((asked.workload.epoch, asked.item)));
        }
        match outcome {
            Ok(_) if asked.twice => {
                return violated(Property::Agreement, format!("{} got a result twice", who(&asked)));
            }
            Ok((completion, bytes)) => self.succeeded(&asked, completion, bytes)?,
            Err(failure) => self.failed(&asked, failure, faults)?,
        }
        Ok((!asked.twice).then_some((asked.workload.epoch, asked.item)))
    }

    /// Checks an admission.
    pub(super) fn admitted(&mut self, host: SidecarIndex, life: u32, admission: &Admission) -> Result<(), Violated> {
        let now = (admission.epoch, admission.seq);
        let last = self.last_admitted.insert((host, life), now).unwrap_or_default();
        if last >= now {
            let text = format!("{host} admits {} of {} after {} of {}", now.1, now.0, last.1, last.0);
            return violated(Property::OneOrder, text);
        }
        let names: Vec<&str> = admission.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let what = format!("{} of {}", names.join(" "), admission.topology.set);
        let lanes: Vec<u16> = admission.plan.sub_schedules.iter().map(|sub_schedule| sub_schedule.lane.0).collect();
        let how =
            format!("window {}, lanes of sub-schedules {lanes:?}, {:?}", admission.plan.window, admission.plan.layout);
        let (first_what, first_how) = self.orders.entry(now).or_insert_with(|| (what.clone(), how.clone()));
        if *first_what != what {
            let text = format!("{} of {} is {first_what} on one sidecar, but {what} on {host}", now.1, now.0);
            return violated(Property::OneOrder, text);
        }
        if *first_how != how {
            return violated(Property::OnePlan, format!("{} of {} is cut in another way on {host}", now.1, now.0));
        }
        Ok(())
    }

    /// A plugin has failed in an operation on one of its members.
    pub(super) fn plugin_failed(&mut self, operation: (Epoch, Seq)) -> Result<(), Violated> {
        self.broken.insert(operation);
        *self.met.entry("plugin failed on a member").or_default() += 1;
        self.check_committed(operation)
    }

    /// A member commits the codec state of an operation.
    pub(super) fn committed(&mut self, host: SidecarIndex, operation: (Epoch, Seq)) -> Result<(), Violated> {
        if self.committed.insert(operation) {
            *self.met.entry("committed").or_default() += 1;
        }
        self.check_committed(operation)
            .map_err(|violated| Violated { text: format!("{host}: {}", violated.text), ..violated })
    }

    fn check_committed(&self, operation @ (epoch, seq): (Epoch, Seq)) -> Result<(), Violated> {
        if self.broken.contains(&operation) && self.committed.contains(&operation) {
            return violated(
                Property::Committed,
                format!("a plugin has failed in {seq} of {epoch}, which is committed"),
            );
        }
        Ok(())
    }

    /// An epoch is over for a sidecar's ranks: they have all their answers.
    pub(super) fn epoch_ended(&self, epoch: Epoch, ranks: &[Rank]) -> Result<(), Violated> {
        let left = |asked: &&OpenRequest| ranks.contains(&asked.rank) && asked.workload.epoch <= epoch;
        match self.open.values().find(left) {
            Some(asked) => {
                let name = &asked.workload.items[asked.item].name;
                violated(
                    Property::Answered,
                    format!("{epoch} ended, but {} never got an answer for {name}", asked.rank),
                )
            }
            None => Ok(()),
        }
    }

    fn succeeded(&mut self, asked: &OpenRequest, completion: &Completion, bytes: &[u8]) -> Result<(), Violated> {
        self.successes += 1;
        self.count(&asked.workload.items[asked.item], "");
        let (rank, epoch) = (asked.rank, asked.workload.epoch);
        let item = &asked.workload.items[asked.item];
        let who = who(asked);
        if completion.epoch != epoch {
            return violated(Property::CurrentEpoch, format!("{who} got a result of {} in {epoch}", completion.epoch));
        }
        if item.plugin.is_some() && !self.committed.contains(&(epoch, completion.seq)) {
            return violated(
                Property::Committed,
                format!("{who} got a result of {}, which no member has committed", completion.seq),
            );
        }
        if item.must_fail() {
            return violated(Property::Agreement, format!("{who} got a result in spite of {:?}", item.injected));
        }
        let went = self.went.entry((epoch, asked.item)).or_default();
        if !went.failed.is_empty() {
            return violated(Property::Agreement, format!("{who} got a result, but {:?} did not", went.failed));
        }
        went.succeeded.push(rank);
        let exact = if item.is_own() { asked.workload.expected(asked.item, rank) } else { went.expected.clone() };
        let expected = exact.or_else(|| asked.workload.expected(asked.item, rank)).unwrap_or_else(|| bytes.to_vec());
        if let Some(at) = first_difference(bytes, &expected) {
            return violated(Property::Result, format!("{who} got a wrong byte at {at} of {}", expected.len()));
        }
        if !item.is_own() {
            went.expected = Some(expected);
        }
        if completion.shape != item.output(rank) || item.is_performed() && completion.own != item.is_own() {
            let text = format!("{who} got the shape {}, its own: {}", completion.shape, completion.own);
            return violated(Property::Result, text);
        }
        let learned = item.detail(rank).or_else(|| went.detail.clone()).unwrap_or_else(|| completion.detail.clone());
        if completion.detail != learned {
            return violated(Property::Result, format!("{who} learned {:?}, not {learned:?}", completion.detail));
        }
        if went.detail.replace(completion.detail.clone()).is_none() {
            self.first_success(asked, &who, &completion.detail)?;
        }
        if asked.workload.any_floats {
            self.results.insert((epoch, asked.item, rank), bytes.to_vec());
        }
        Ok(())
    }

    fn count(&mut self, item: &Item, failure: &str) {
        let mut met = |what| *self.met.entry(what).or_default() += 1;
        match item.injected {
            _ if failure.contains("arena_bytes_max") => met("too large"),
            _ if failure.contains(FAILS) => met("plugin failed"),
            _ if failure.is_empty() => {
                met(item.what());
                if item.group.is_some() {
                    met("group");
                }
                if item.askers.len() < item.ranks.len() && item.supports_join() {
                    met("with joined ranks");
                }
                if matches!(item.place, SetOf::Added(_)) {
                    met("in an added set");
                }
                if item.kind == Kind::Join && item.place != SetOf::Fixed(SetId::WORLD) {
                    met("join in a set");
                }
            }
            InjectedError::Mismatch(..) => met("mismatch"),
            InjectedError::Refused(_) => met("refused"),
            InjectedError::Absurd(_) => met("absurd"),
            InjectedError::Withdrawn(_) => met("withdrawn"),
            InjectedError::Nonsense(_) => met("nonsense"),
            InjectedError::Joined => met("not with join"),
            InjectedError::None | InjectedError::Missing => {
                met(if failure.contains("was removed") { "removed" } else { "join failed" });
            }
        }
    }

    /// Checks that the first rank's extra result is plausible, and that all others receive the same.
    fn first_success(&mut self, asked: &OpenRequest, who: &str, detail: &Detail) -> Result<(), Violated> {
        let (epoch, item) = (asked.workload.epoch, &asked.workload.items[asked.item]);
        let plausible = match (&item.kind, detail) {
            (Kind::Join, Detail::LastJoined(rank)) => item.ranks.contains(rank),
            (Kind::AddSet(_), Detail::Set(set)) => {
                let fixed = asked.workload.items.iter().any(|item| item.place == SetOf::Fixed(*set));
                let free = !fixed && !self.sets.values().any(|other| other == set);
                self.sets.insert((epoch, asked.item), *set);
                self.added.insert((epoch, asked.item), *set);
                free
            }
            (Kind::FormSet(_, Some(known)), Detail::Set(set)) => set == known,
            (Kind::FormSet(..), Detail::Set(set)) => self.formed((epoch, asked.item), &asked.workload, *set),
            (Kind::RemoveSet(Some(adding)), Detail::Set(set)) => {
                self.sets.remove(&(epoch, *adding));
                self.added.get(&(epoch, *adding)) == Some(set)
            }
            (Kind::Join | Kind::AddSet(_) | Kind::FormSet(..) | Kind::RemoveSet(Some(_)), _) => false,
            _ => true,
        };
        if plausible {
            return Ok(());
        }
        violated(Property::Result, format!("{who} learned {detail:?}, with {:?}", self.sets))
    }

    /// Whether the members of a set have got the one that they formed before, or a new one.
    fn formed(&mut self, (epoch, item): (Epoch, usize), workload: &Workload, set: SetId) -> bool {
        let is_like = |other: usize| {
            matches!(workload.items[other].kind, Kind::FormSet(..))
                && workload.items[other].ranks == workload.items[item].ranks
        };
        let mut earlier = self.sets.iter().filter(|((e, other), _)| *e == epoch && is_like(*other));
        if let Some((_, earlier)) = earlier.next() {
            return *earlier == set;
        }
        let fixed = workload.items.iter().any(|item| item.place == SetOf::Fixed(set));
        let free = !fixed && !self.sets.values().any(|other| *other == set);
        self.sets.insert((epoch, item), set);
        self.added.insert((epoch, item), set);
        free
    }

    fn failed(&mut self, asked: &OpenRequest, failure: &Failure, faults: &Faults) -> Result<(), Violated> {
        self.failures += 1;
        let item = &asked.workload.items[asked.item];
        let who = format!("{}: {failure}", who(asked));
        match failure.cause {
            Cause::Bug => return violated(Property::NoBug, who),
            cause if cause.ends_epoch() => {
                let stalls = failure.cause == Cause::ShutDown && asked.workload.staller.is_some();
                *self.met.entry("stalled").or_default() += u64::from(stalls);
                return blame(failure, faults, &asked.workload, &who);
            }
            _ => {}
        }
        if asked.twice && failure.cause == Cause::Refused && failure.reason.contains("a tensor with the same name") {
            *self.met.entry("the same name twice").or_default() += 1;
            return Ok(());
        }
        if item.injected == InjectedError::None && item.excuse.is_none() && !item.too_large && !item.may_fail {
            return violated(Property::Agreement, format!("without any reason {who}"));
        }
        if !is_named(failure, item) {
            let text = format!(
                "{:?}, {:?} is the cause, which the failure of {who} does not name",
                item.injected, item.excuse
            );
            return violated(Property::Culprit, text);
        }
        self.count(item, &failure.reason);
        let went = self.went.entry((asked.workload.epoch, asked.item)).or_default();
        went.failed.push(asked.rank);
        if went.succeeded.is_empty() {
            Ok(())
        } else {
            violated(Property::Agreement, format!("{:?} got a result, but not {who}", went.succeeded))
        }
    }
}

fn who(asked: &OpenRequest) -> String {
    let Item { name, place, kind, dtype, plugin, .. } = &asked.workload.items[asked.item];
    let by = plugin.map_or_else(String::new, |plugin| format!(" by {plugin:?}"));
    format!("{} with item {}, {name} of {place:?} ({kind:?} of {dtype}{by})", asked.rank, asked.item)
}

fn first_difference(found: &[u8], expected: &[u8]) -> Option<usize> {
    let differs = found.iter().zip(expected).position(|(a, b)| a != b);
    differs.or_else(|| (found.len() != expected.len()).then_some(found.len().min(expected.len())))
}
