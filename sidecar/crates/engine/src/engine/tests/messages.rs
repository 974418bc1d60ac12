//! Tests of messages between two ranks: only these negotiate, and no other rank delays them.

use ronde_wire::{Cause, Codec, Collective, Control, DType, Group, Pair, Rank, Request, RequestId, SetId};

use super::cluster::{Cluster, name, request, sum};

const SIX_ON_THREE: [u32; 6] = [0, 0, 1, 1, 2, 2];

fn named(from: u32, to: u32, count: u64, collective: Collective, shape: &[u64]) -> Request {
    let pair = Pair { from: Rank(from), to: Rank(to) };
    request(pair.message_name(9, count).as_str(), collective, shape)
}

fn send(from: u32, to: u32, count: u64, shape: &[u64]) -> Request {
    named(from, to, count, Collective::Send { to: Rank(to), tag: 9 }, shape)
}

fn receive(from: u32, to: u32, count: u64) -> Request {
    let what = named(from, to, count, Collective::Recv { from: Rank(from), tag: 9 }, &[0]);
    Request { dtype: DType::U8, ..what }
}

fn shape(cluster: &Cluster, rank: u32, request: RequestId) -> (String, DType, bool) {
    let done = cluster.outcome(rank, request).as_ref().expect("a result");
    (done.shape.to_string(), done.dtype, done.own)
}

#[test]
fn a_message_involves_only_its_two_ranks() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    for (from, to) in [(2, 5), (5, 2), (2, 3), (0, 4)] {
        let admitted: Vec<usize> = cluster.admitted.iter().map(Vec::len).collect();
        let receiver = cluster.submit(to, receive(from, to, 0));
        cluster.run();
        assert!(cluster.is_pending(receiver));
        let sender = cluster.submit(from, send(from, to, 0, &[2, 3]));
        cluster.run();
        assert_eq!(shape(&cluster, to, receiver), ("[2, 3]".to_owned(), DType::F32, true), "{from} to {to}");
        assert_eq!(shape(&cluster, from, sender), ("[0]".to_owned(), DType::F32, true));
        for (sidecar, before) in admitted.into_iter().enumerate() {
            let takes_part = [from, to].iter().any(|rank| cluster.home(Rank(*rank)) == sidecar);
            assert_eq!(cluster.admitted[sidecar].len() - before, usize::from(takes_part));
        }
    }
    let admission = &cluster.admitted[2][0];
    assert_eq!(admission.topology.ranks(), [Rank(2), Rank(5)]);
    assert_eq!((admission.local_ranks.as_slice(), admission.arithmetic.ranks), ([Rank(5)].as_slice(), 2));
}

#[test]
fn messages_do_not_wait_for_other_ranks() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    cluster.executes = false;
    for tensor in ["a", "b", "c", "d"] {
        cluster.submit_all(&request(tensor, Collective::Barrier, &[0]));
    }
    cluster.submit(1, send(1, 4, 0, &[5]));
    cluster.run();
    assert_eq!(cluster.admitted[2].len(), 2, "the set of all ranks has two in flight and more that are ready");
    let there = [cluster.submit(2, send(2, 5, 0, &[5])), cluster.submit(5, receive(2, 5, 0))];
    let back = [cluster.submit(5, send(5, 2, 0, &[7])), cluster.submit(2, receive(5, 2, 0))];
    cluster.run();
    assert_eq!(cluster.admitted[2].len(), 4, "both directions are under way");
    cluster.execute_all();
    assert!(cluster.outcome(2, there[0]).is_ok() && cluster.outcome(5, there[1]).is_ok());
    assert!(cluster.outcome(5, back[0]).is_ok() && cluster.outcome(2, back[1]).is_ok());
}

#[test]
fn the_kth_send_meets_the_kth_receive() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let sends: Vec<_> = (0..8).map(|k| cluster.submit(0, send(0, 3, k, &[k + 1]))).collect();
    cluster.run();
    let receives: Vec<_> = (0..8).rev().map(|k| (k, cluster.submit(3, receive(0, 3, k)))).collect();
    cluster.run();
    for (k, request) in receives {
        assert_eq!(shape(&cluster, 3, request).0, format!("[{}]", k + 1));
    }
    assert!(sends.iter().all(|request| cluster.outcome(0, *request).is_ok()));
}

#[test]
fn an_invalid_message_is_refused_locally() {
    let mut cluster = Cluster::with_sets(&SIX_ON_THREE, &[&[0, 2, 4]]).started();
    let in_set = |what: Request| Request { set: SetId(1), ..what };
    let to_itself = send(2, 2, 0, &[1]);
    let misnamed = Request { name: name("t"), ..send(2, 4, 0, &[1]) };
    let other_tag = Request { collective: Collective::Send { to: Rank(4), tag: 8 }, ..send(2, 4, 0, &[1]) };
    let other_pair = Request { name: send(2, 5, 0, &[1]).name, ..send(2, 4, 0, &[1]) };
    let taken = Request { name: send(2, 4, 0, &[1]).name, ..sum("t", &[1]) };
    let cases = [
        (to_itself, "SEND: rank 2 cannot exchange messages with itself"),
        (receive(2, 2, 0), "RECV: rank 2 cannot exchange messages with itself"),
        (send(2, 9, 0, &[1]), "SEND: rank 9 is not in process set 0"),
        (in_set(send(2, 3, 0, &[1])), "SEND: rank 3 is not in process set 1"),
        (in_set(receive(5, 2, 0)), "RECV: rank 5 is not in process set 1"),
        (misnamed, "SEND with tag 9 must be named message.2.4.9.<count>, not t"),
        (other_tag, "SEND with tag 8 must be named message.2.4.8.<count>, not message.2.4.9.0"),
        (other_pair, "SEND with tag 9 must be named message.2.4.9.<count>, not message.2.5.9.0"),
        (taken, "the name message.2.4.9.0 is reserved for messages; give ALLREDUCE another one"),
    ];
    for (what, words) in cases {
        let request = cluster.submit(2, what);
        cluster.run();
        let failure = cluster.failure(2, request);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Refused, "{failure} lacks {words}");
    }
    let pair = [cluster.submit(2, send(2, 4, 0, &[1])), cluster.submit(4, receive(2, 4, 0))];
    cluster.run();
    assert!(cluster.outcome(2, pair[0]).is_ok() && cluster.outcome(4, pair[1]).is_ok() && cluster.ended.is_empty());
}

#[test]
fn a_refused_or_withdrawn_message_fails_its_other_rank_and_no_one_else() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    let odd = [
        (Request { prescale: 2.0, ..send(2, 5, 0, &[1]) }, "SEND does not reduce, so its prescale and postscale are 1"),
        (Request { codec: Codec::F16, ..send(2, 5, 0, &[1]) }, "SEND takes no codec"),
        (
            Request { group: Some(Group { name: name("g"), size: 1 }), ..send(2, 5, 0, &[1]) },
            "SEND cannot be in a group",
        ),
    ];
    for (what, words) in odd {
        let refused = cluster.submit(2, what);
        let receiver = cluster.submit(5, receive(2, 5, 0));
        cluster.run();
        assert!(cluster.failure(2, refused).reason.contains(words));
        assert!(cluster.failure(5, receiver).reason.contains(words), "{}", cluster.failure(5, receiver));
    }
    let receiver = cluster.submit(5, receive(2, 5, 0));
    cluster.run();
    cluster.withdraw(5, receiver);
    cluster.run();
    let sender = cluster.submit(2, send(2, 5, 0, &[1]));
    cluster.run();
    assert!(cluster.failure(2, sender).reason.contains("was withdrawn: the deadline"));
    let _ = cluster.failure(5, receiver);
    let pair = [cluster.submit(2, send(2, 5, 0, &[1])), cluster.submit(5, receive(2, 5, 0))];
    cluster.run();
    assert!(cluster.outcome(2, pair[0]).is_ok() && cluster.outcome(5, pair[1]).is_ok());
    assert_eq!(cluster.engines[0].status(cluster.now).negotiating, 0, "no round waits for ranks that have no part");
}

#[test]
fn an_order_for_a_pair_outside_the_set_ends_the_epoch_with_the_reason() {
    type Change = fn(&mut ronde_wire::control::Order);
    let changes: [(Change, &str); 5] = [
        (|order| order.pair = None, "SEND is not performed as a separate operation"),
        (|order| order.pair = Some(Pair { from: Rank(0), to: Rank(0) }), "exchange no messages in process set 0"),
        (|order| order.pair = Some(Pair { from: Rank(0), to: Rank(77) }), "exchange no messages in process set 0"),
        (|order| order.pair = Some(Pair { from: Rank(1), to: Rank(0) }), "was ordered"),
        (|order| order.collective = Collective::Send { to: Rank(1), tag: 8 }, "was ordered"),
    ];
    for (change, words) in changes {
        let mut cluster = Cluster::new(&[0, 1]).started();
        cluster.submit(0, send(0, 1, 0, &[4]));
        let receiver = cluster.submit(1, receive(0, 1, 0));
        cluster.drain_all();
        cluster.deliver((1, 0));
        cluster.drain_all();
        cluster.tamper((0, 1), |_, message| {
            if let Control::Order(order) = message {
                change(order);
                super::arbitrary::seal_for(&[0, 1], order);
            }
        });
        cluster.run();
        let failure = cluster.failure(1, receiver);
        assert!(failure.reason.contains(words) && failure.cause == Cause::Bug, "{failure} lacks {words}");
    }
}

#[test]
fn a_message_is_announced_under_its_own_name_only() {
    use ronde_wire::control::{Announcement, Intent};
    let wrong = [
        Request { name: name("t"), ..send(2, 4, 0, &[1]) },
        Request { name: receive(4, 2, 0).name, ..send(2, 4, 0, &[1]) },
        Request { name: receive(2, 4, 0).name, ..sum("t", &[1]) },
        send(2, 77, 0, &[1]),
    ];
    for request in wrong {
        let mut cluster = Cluster::new(&SIX_ON_THREE).started();
        let announcements = vec![Announcement::new(Rank(2), Intent::Ready(request))];
        cluster.control(0, 1, (1, 0), Control::Announce { announcements });
        cluster.run();
        assert_eq!(cluster.disconnects.len(), 1);
    }
}

#[test]
fn messages_between_ranks_of_one_sidecar_need_no_network() {
    let mut cluster = Cluster::new(&SIX_ON_THREE).started();
    cluster.submit(4, send(4, 5, 0, &[4]));
    cluster.submit(5, receive(4, 5, 0));
    cluster.run();
    let admission = &cluster.admitted[2][0];
    assert!(
        admission.topology.len() == 1
            && admission
                .plan
                .sub_schedules
                .iter()
                .all(|sub_schedule| { sub_schedule.rounds.iter().all(|round| round.transfers.is_empty()) })
    );
}
