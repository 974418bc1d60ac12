//! Tests of receives from any source: the message that each takes, and the effect of failures on later messages.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;
use ronde_wire::control::{Announcement, Intent};
use ronde_wire::{
    AnySource, Collective, Control, DType, Detail, Pair, Rank, Request, RequestId, SetId, SidecarIndex, World,
};

use super::cluster::{Cluster, name, request, sum};
use crate::engine::EngineConfig;
use crate::event::Event;

const SIX_ON_THREE: [u32; 6] = [0, 0, 1, 1, 2, 2];
const TAG: u32 = 9;

fn send(from: u32, to: u32, count: u64, shape: &[u64]) -> Request {
    let pair = Pair { from: Rank(from), to: Rank(to) };
    request(pair.message_name(TAG, count).as_str(), Collective::Send { to: Rank(to), tag: TAG }, shape)
}

fn receive(from: u32, to: u32, count: u64) -> Request {
    let pair = Pair { from: Rank(from), to: Rank(to) };
    let what = request(pair.message_name(TAG, count).as_str(), Collective::Recv { from: Rank(from), tag: TAG }, &[0]);
    Request { dtype: DType::U8, ..what }
}

fn receive_any(to: u32, count: u64) -> Request {
    let name = AnySource { to: Rank(to), tag: TAG }.receive_name(count);
    Request { dtype: DType::U8, ..request(name.as_str(), Collective::RecvAny { tag: TAG }, &[0]) }
}

/// The source and the number of elements of a received message.
fn received(cluster: &Cluster, rank: u32, request: RequestId) -> (u32, u64) {
    let done = cluster.outcome(rank, request).as_ref().expect("a message");
    let Detail::Source(source) = done.detail else { panic!("{:?} names no source", done.detail) };
    (source.0, done.shape.elements())
}

#[test]
fn a_receive_from_any_source_takes_the_message_announced_first() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    for (count, from) in (0..).zip([5, 0, 3]) {
        let sent = cluster.submit(from, send(from, 2, 0, &[u64::from(from) + 1]));
        cluster.run();
        assert!(cluster.is_pending(sent), "message {count} waits for a receive");
    }
    for (count, from) in (0..).zip([5, 0, 3]) {
        let taken = cluster.submit(2, receive_any(2, count));
        cluster.run();
        assert_eq!(received(&cluster, 2, taken), (from, u64::from(from) + 1));
    }
    let waits = cluster.submit(2, receive_any(2, 3));
    cluster.run();
    assert!(cluster.is_pending(waits));
    let sent = cluster.submit(4, send(4, 2, 0, &[7]));
    cluster.run();
    assert_eq!(received(&cluster, 2, waits), (4, 7));
    assert!(cluster.outcome(4, sent).is_ok());
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0);
}

#[test]
fn receives_match_in_the_order_in_which_they_are_posted() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    // The first receive is from rank 0 only: the one from any source must not take its message.
    let named = cluster.submit(2, receive(0, 2, 0));
    let any = cluster.submit(2, receive_any(2, 0));
    let after = cluster.submit(2, receive(0, 2, 1));
    let last = cluster.submit(2, receive_any(2, 1));
    for (count, elements) in [(0, 10), (1, 11), (2, 12)] {
        cluster.submit(0, send(0, 2, count, &[elements]));
    }
    cluster.run();
    assert_eq!(received(&cluster, 2, named), (0, 10));
    assert_eq!(received(&cluster, 2, any), (0, 11));
    assert_eq!(received(&cluster, 2, after), (0, 12), "it is not starved, and takes what comes after");
    assert!(cluster.is_pending(last));
    cluster.submit(5, send(5, 2, 0, &[13]));
    cluster.run();
    assert_eq!(received(&cluster, 2, last), (5, 13));
    // From here on the worker's numbers are 2 less than those of rank 0's messages.
    let later = cluster.submit(2, receive(0, 2, 2));
    cluster.submit(0, send(0, 2, 3, &[14]));
    cluster.run();
    assert_eq!(received(&cluster, 2, later), (0, 14));
}

#[test]
fn receives_with_different_tags_sets_or_receivers_do_not_match() {
    let mut cluster = Cluster::with_sets(&SIX_ON_THREE, &[&[0, 2, 4]]).started();
    let in_set = |what: Request| Request { set: SetId(1), ..what };
    let world = cluster.submit(2, receive_any(2, 0));
    let set = cluster.submit(2, in_set(receive_any(2, 0)));
    let other = cluster.submit(4, receive_any(4, 0));
    cluster.submit(0, in_set(send(0, 2, 0, &[1])));
    cluster.submit(0, send(0, 4, 0, &[2]));
    cluster.run();
    assert!(cluster.is_pending(world));
    assert_eq!((received(&cluster, 2, set), received(&cluster, 4, other)), ((0, 1), (0, 2)));
    cluster.submit(5, send(5, 2, 0, &[3]));
    cluster.run();
    assert_eq!(received(&cluster, 2, world), (5, 3));
}

#[test]
fn a_receive_without_any_possible_sender_is_refused() {
    let mut cluster = Cluster::with_sets(&SIX_ON_THREE, &[&[2]]).started();
    let alone = Request { set: SetId(1), ..receive_any(2, 0) };
    let misnamed = Request { name: receive_any(3, 0).name, ..receive_any(2, 0) };
    let taken = Request { name: receive_any(2, 0).name, ..sum("t", &[1]) };
    let cases = [
        (alone, "RECV from any source: rank 2 is alone in process set 1, so no rank can send to it"),
        (misnamed, "RECV from any source with tag 9 must be named message.any.2.9.<count>, not message.any.3.9.0"),
        (taken, "the name message.any.2.9.0 is reserved for messages; give ALLREDUCE another one"),
        (Request { prescale: 2.0, ..receive_any(2, 0) }, "RECV does not reduce, so its prescale and postscale are 1"),
    ];
    for (what, words) in cases {
        let request = cluster.submit(2, what);
        cluster.run();
        let failure = cluster.failure(2, request);
        assert!(failure.reason.contains(words), "{failure} lacks {words}");
    }
    let any = cluster.submit(2, receive_any(2, 0));
    cluster.submit(5, send(5, 2, 0, &[1]));
    cluster.run();
    assert_eq!(received(&cluster, 2, any), (5, 1));
    assert!(cluster.ended.is_empty());
}

#[test]
fn a_message_that_was_refused_fails_the_receive_that_takes_it() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let refused = cluster.submit(5, Request { prescale: 2.0, ..send(5, 2, 0, &[1]) });
    cluster.run();
    let any = cluster.submit(2, receive_any(2, 0));
    cluster.run();
    assert!(cluster.failure(5, refused).reason.contains("SEND does not reduce"));
    assert!(cluster.failure(2, any).reason.contains("SEND does not reduce"), "{}", cluster.failure(2, any));
    // The reverse order: the receive waits, and the message is refused.
    let any = cluster.submit(2, receive_any(2, 1));
    cluster.run();
    cluster.submit(5, Request { prescale: 2.0, ..send(5, 2, 1, &[1]) });
    cluster.run();
    assert!(cluster.failure(2, any).reason.contains("SEND does not reduce"));
    let named = cluster.submit(2, receive(5, 2, 0));
    cluster.submit(5, send(5, 2, 2, &[4]));
    cluster.run();
    assert_eq!(received(&cluster, 2, named), (5, 4));
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0);
}

#[test]
fn a_withdrawn_receive_names_the_missing_sender_and_others_go_on() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let any = cluster.submit(2, receive_any(2, 0));
    let held = cluster.submit(2, receive(5, 2, 0));
    let after = cluster.submit(2, receive(5, 2, 1));
    cluster.run();
    cluster.withdraw(2, held);
    cluster.run();
    assert!(cluster.failure(2, held).reason.contains("the deadline"));
    cluster.withdraw(2, any);
    cluster.run();
    let failure = &cluster.failure(2, any).reason;
    let words = "was withdrawn: the deadline of 3 s passed; no other rank of process set 0 has sent rank 2 a message with tag 9";
    assert!(failure.contains(words), "{failure}");
    // The held receive would have taken rank 5's first message, which fails with it; the other receive takes the next
    // one.
    let first = cluster.submit(5, send(5, 2, 0, &[1]));
    cluster.submit(5, send(5, 2, 1, &[2]));
    cluster.run();
    assert!(cluster.failure(5, first).reason.contains("the deadline"));
    assert_eq!(received(&cluster, 2, after), (5, 2));
}

#[test]
fn a_withdrawal_that_crosses_a_match_fails_only_that_message() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let any = cluster.submit(2, receive_any(2, 0));
    cluster.run();
    let sent = cluster.submit(0, send(0, 2, 0, &[1]));
    cluster.drain_all();
    assert_eq!(cluster.wire_len((0, 1)), 1, "the coordinator's answer is under way");
    cluster.withdraw(2, any);
    cluster.run();
    assert!(cluster.failure(0, sent).reason.contains("the deadline"), "{}", cluster.failure(0, sent));
    assert!(cluster.failure(2, any).reason.contains("the deadline"));
    let next = cluster.submit(2, receive_any(2, 1));
    cluster.submit(0, send(0, 2, 1, &[2]));
    cluster.run();
    assert_eq!(received(&cluster, 2, next), (0, 2));
}

#[test]
fn a_stall_report_names_the_receiver_that_waits_for_any_source() {
    let world = World::new([0, 1, 2].map(SidecarIndex).into()).expect("a world");
    let mut cluster = Cluster::of(world, |config| EngineConfig { stall_warning_ms: 2_000, ..config }).started();
    cluster.submit(2, receive_any(2, 0));
    cluster.run();
    cluster.advance(2_600);
    let about =
        |(.., text): &&(usize, Vec<SidecarIndex>, Vec<Rank>, String)| text.contains("from any source have waited");
    let (_, _, _, text) = cluster.notices.iter().find(about).expect("a report");
    let words = "no other rank of process set 0 has sent rank 2 a message with tag 9";
    assert!(text.contains("rank 2 has waited for a message from any source for") && text.contains(words), "{text}");
    cluster.submit(1, send(1, 2, 0, &[1]));
    cluster.run();
    cluster.advance(2_100);
    assert!(cluster.notices.iter().any(|(.., text)| text.contains("The stall is over")), "{:?}", cluster.notices);
}

#[test]
fn ranks_that_have_joined_send_nothing() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let join = || Request { dtype: DType::U8, ..request("join", Collective::Join, &[0]) };
    let any = cluster.submit(2, receive_any(2, 0));
    let held = cluster.submit(2, receive(5, 2, 0));
    for rank in [0, 1, 3, 4] {
        cluster.submit(rank, join());
    }
    cluster.run();
    assert!(cluster.is_pending(any), "rank 5 may send");
    cluster.submit(5, join());
    cluster.run();
    assert!(cluster.failure(2, any).reason.contains("all other ranks have joined"));
    assert!(cluster.failure(2, held).reason.contains("Recv is not supported with Join: rank 5 joined"));
    let late = cluster.submit(2, receive_any(2, 1));
    cluster.run();
    assert!(cluster.failure(2, late).reason.contains("all other ranks have joined"));
    let joined = cluster.submit(2, join());
    cluster.run();
    assert!(cluster.outcome(2, joined).is_ok());
    let again = cluster.submit(2, receive_any(2, 1 << 40));
    cluster.submit(5, send(5, 2, 1 << 40, &[1]));
    cluster.run();
    assert_eq!(received(&cluster, 2, again), (5, 1));
}

#[test]
fn a_join_is_refused_while_a_receive_waits_and_the_message_still_arrives() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let join = || Request { dtype: DType::U8, ..request("join", Collective::Join, &[0]) };
    let any = cluster.submit(2, receive_any(2, 0));
    let held = cluster.submit(2, receive(5, 2, 0));
    let joins = [0, 1, 2, 3, 4, 5].map(|rank| (rank, cluster.submit(rank, join())));
    cluster.run();
    for (rank, request) in joins {
        let failure = cluster.failure(rank, request);
        assert_eq!(failure.rank, Some(Rank(2)));
        let words = "rank 2 has joined while its receive from any source with tag 9 waits; wait for it before the join";
        assert!(failure.reason.contains(words), "{}", failure.reason);
    }
    cluster.submit(5, send(5, 2, 0, &[6]));
    cluster.submit(5, send(5, 2, 1, &[7]));
    cluster.run();
    assert_eq!((received(&cluster, 2, any), received(&cluster, 2, held)), ((5, 6), (5, 7)));
    // Messages that have their receives do not hinder a join, and arrive after it.
    let last = cluster.submit(2, receive_any(2, 1));
    cluster.submit(4, send(4, 2, 0, &[8]));
    cluster.run();
    let joins = [2, 0, 1, 3, 4, 5].map(|rank| (rank, cluster.submit(rank, join())));
    cluster.run();
    assert_eq!(received(&cluster, 2, last), (4, 8));
    for (rank, request) in joins {
        assert!(cluster.outcome(rank, request).is_ok(), "rank {rank}");
    }
}

#[test]
fn a_join_right_after_a_withdrawn_receive_succeeds() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let join = || Request { dtype: DType::U8, ..request("join", Collective::Join, &[0]) };
    let any = cluster.submit(2, receive_any(2, 0));
    cluster.run();
    // The coordinator has yet to answer the withdrawal.
    cluster.withdraw(2, any);
    let joins = [2, 0, 1, 3, 4, 5].map(|rank| (rank, cluster.submit(rank, join())));
    cluster.run();
    assert!(cluster.failure(2, any).reason.contains("the deadline of 3 s passed"));
    for (rank, request) in joins {
        assert!(cluster.outcome(rank, request).is_ok(), "rank {rank}");
    }
}

#[test]
fn waiting_receives_fail_when_their_set_or_epoch_ends() {
    let mut cluster = Cluster::with_sets(&SIX_ON_THREE, &[&[0, 2, 4]]).started();
    let in_set = |what: Request| Request { set: SetId(1), ..what };
    let of_set = [in_set(receive_any(2, 0)), in_set(receive(0, 2, 0)), in_set(receive_any(2, 1))];
    let of_set = of_set.map(|what| cluster.submit(2, what));
    let of_world = [receive_any(2, 0), receive(0, 2, 0)].map(|what| cluster.submit(2, what));
    cluster.run();
    cluster.submit_all(&request("remove", Collective::RemoveSet { set: SetId(1) }, &[0]));
    cluster.run();
    for request in of_set {
        assert!(cluster.failure(2, request).reason.contains("process set 1 was removed"));
    }
    assert!(of_world.iter().all(|request| cluster.is_pending(*request)));
    cluster.close_session(0);
    cluster.run();
    for request in of_world {
        assert!(cluster.failure(2, request).reason.contains("shut down"));
    }
}

#[test]
fn a_receive_refused_by_the_service_keeps_its_place_in_the_posting_order() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let any = cluster.submit(2, receive_any(2, 0));
    let refuse = |cluster: &mut Cluster, what: Request| {
        let (set, name, reason) = (what.set, what.name, "there is no room".to_owned());
        let home = cluster.home(Rank(2));
        cluster.event(home, Event::Refused { rank: Rank(2), set, name, group: None, members: Vec::new(), reason });
    };
    refuse(&mut cluster, receive(5, 2, 0));
    refuse(&mut cluster, receive_any(2, 1));
    let after = cluster.submit(2, receive(5, 2, 1));
    cluster.run();
    let sent: Vec<_> = (0..3).map(|count| cluster.submit(5, send(5, 2, count, &[count + 1]))).collect();
    cluster.run();
    assert_eq!(received(&cluster, 2, any), (5, 1));
    assert!(cluster.failure(5, sent[1]).reason.contains("there is no room"));
    assert_eq!(received(&cluster, 2, after), (5, 3));
}

#[test]
fn invalid_announcements_of_receives_are_protocol_violations() {
    let wrong = [
        Request { name: name("t"), ..receive_any(2, 0) },
        Request { name: receive_any(3, 0).name, ..receive_any(2, 0) },
        Request { collective: Collective::RecvAny { tag: 8 }, ..receive_any(2, 0) },
    ];
    for request in wrong {
        let mut cluster = Cluster::new(&SIX_ON_THREE).started();
        let announcements = vec![Announcement::new(Rank(2), Intent::Ready(request))];
        cluster.control(0, 1, (1, 0), Control::Announce { announcements });
        cluster.run();
        assert_eq!(cluster.disconnects.len(), 1);
    }
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let twice = (0..2).map(|count| Announcement::new(Rank(2), Intent::Ready(receive_any(2, count)))).collect();
    cluster.control(0, 1, (1, 0), Control::Announce { announcements: twice });
    cluster.run();
    assert_eq!(cluster.disconnects.len(), 1, "the second has to wait at its sidecar");
}

/// An action of a rank on one mailbox.
#[derive(Clone, Copy, Debug)]
enum Step {
    Send(u32),
    Receive(u32),
    ReceiveAny,
}

const RECEIVER: u32 = 2;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let source = prop::sample::select(vec![0_u32, 3, 5]);
    let step = prop_oneof![
        4 => source.clone().prop_map(Step::Send),
        2 => source.prop_map(Step::Receive),
        2 => Just(Step::ReceiveAny),
    ];
    prop::collection::vec(step, 1..40)
}

/// The rules of MPI: a message matches the first posted receive that fits, a receive matches the first message that
/// arrived.
#[derive(Default)]
struct Model {
    posted: VecDeque<(usize, Option<u32>)>,
    unexpected: VecDeque<(u32, u64)>,
    matched: BTreeMap<usize, (u32, u64)>,
}

impl Model {
    fn send(&mut self, from: u32, id: u64) {
        match self.posted.iter().position(|(_, wants)| wants.is_none_or(|wants| wants == from)) {
            Some(at) => {
                let (receive, _) = self.posted.remove(at).expect("it is there");
                self.matched.insert(receive, (from, id));
            }
            None => self.unexpected.push_back((from, id)),
        }
    }

    fn receive(&mut self, receive: usize, wants: Option<u32>) {
        match self.unexpected.iter().position(|(from, _)| wants.is_none_or(|wants| wants == *from)) {
            Some(at) => {
                let message = self.unexpected.remove(at).expect("it is there");
                self.matched.insert(receive, message);
            }
            None => self.posted.push_back((receive, wants)),
        }
    }
}

/// Requests of a list of steps, with the numbers that a worker gives them.
#[derive(Default)]
struct Worker {
    sent: BTreeMap<u32, u64>,
    named: BTreeMap<u32, u64>,
    any: u64,
}

impl Worker {
    fn request(&mut self, step: Step, elements: u64) -> (u32, Request) {
        let count = |counts: &mut BTreeMap<u32, u64>, from| {
            let count = counts.entry(from).or_default();
            *count += 1;
            *count - 1
        };
        match step {
            Step::Send(from) => (from, send(from, RECEIVER, count(&mut self.sent, from), &[elements])),
            Step::Receive(from) => (RECEIVER, receive(from, RECEIVER, count(&mut self.named, from))),
            Step::ReceiveAny => {
                self.any += 1;
                (RECEIVER, receive_any(RECEIVER, self.any - 1))
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    /// Each step is delivered everywhere before the next, so the result is that of MPI.
    #[test]
    fn receives_match_messages_as_in_mpi(steps in steps()) {
        let mut cluster = Cluster::new(&SIX_ON_THREE).started();
        let (mut model, mut worker) = (Model::default(), Worker::default());
        let mut receives = BTreeMap::new();
        for (at, step) in steps.into_iter().enumerate() {
            let elements = at as u64 + 1;
            match step {
                Step::Send(from) => model.send(from, elements),
                Step::Receive(from) => model.receive(at, Some(from)),
                Step::ReceiveAny => model.receive(at, None),
            }
            let (rank, what) = worker.request(step, elements);
            let request = cluster.submit(rank, what);
            if rank == RECEIVER {
                receives.insert(at, request);
            }
            cluster.run();
            for (at, request) in &receives {
                match model.matched.get(at) {
                    Some(message) => prop_assert_eq!(received(&cluster, RECEIVER, *request), *message),
                    None => prop_assert!(cluster.is_pending(*request)),
                }
            }
        }
        prop_assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
    }

    /// With any delivery order each message matches one receive, those of one source in order, and no receive waits
    /// while a message fits.
    #[test]
    fn every_message_is_received_once_and_in_order_under_any_interleaving(
        steps in steps(),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 300),
    ) {
        let mut cluster = Cluster::new(&SIX_ON_THREE).started();
        let mut worker = Worker::default();
        let mut receives = Vec::new();
        let mut choices = choices.into_iter().cycle();
        for (at, step) in steps.iter().enumerate() {
            let (rank, what) = worker.request(*step, at as u64 + 1);
            let request = cluster.submit(rank, what);
            if rank == RECEIVER {
                receives.push((*step, request));
            }
            cluster.drain_all();
            for _ in 0..2 {
                let loaded = cluster.loaded();
                if let (false, Some(choice)) = (loaded.is_empty(), choices.next()) {
                    cluster.deliver(loaded[choice.index(loaded.len())]);
                    cluster.drain_all();
                }
            }
        }
        cluster.run();
        let mut last: BTreeMap<u32, u64> = BTreeMap::new();
        let mut pending: Vec<Step> = Vec::new();
        for (step, request) in receives {
            if cluster.is_pending(request) {
                pending.push(step);
                continue;
            }
            let (source, id) = received(&cluster, RECEIVER, request);
            prop_assert!(matches!(step, Step::ReceiveAny) || matches!(step, Step::Receive(from) if from == source));
            prop_assert!(last.insert(source, id).is_none_or(|earlier| earlier < id), "order of rank {}", source);
        }
        // The remaining receives wait for messages that do not exist.
        for (source, sent) in worker.sent {
            let taken = cluster.completed.iter().filter(|(_, _, outcome)| {
                outcome.as_ref().is_ok_and(|done| done.detail == Detail::Source(Rank(source)))
            });
            let left = sent - taken.count() as u64;
            let wanted = pending.iter().any(|step| match step {
                Step::Receive(from) => *from == source,
                _ => true,
            });
            prop_assert!(left == 0 || !wanted, "{} messages of rank {} are left, and {:?} wait", left, source, pending);
        }
        prop_assert!(cluster.ended.is_empty() && cluster.disconnects.is_empty());
    }
}
