//! Tests the names of operations and process sets in the messages to the sidecar.

use ronde::{Collective, Operation, ReduceOp, Tensor, TensorRef};

use crate::fake::{Fake, Settings};
use crate::{DATA_PATHS, OVER_RING, connect};

#[test]
fn every_operation_has_its_name_and_its_kind_of_result() {
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let owned = Tensor::of(&[2], &[1_i32, 2]).expect("a tensor");
        let tensor = TensorRef::from(&owned);
        assert_eq!(client.reduce_scatter("x", tensor, ReduceOp::Sum).expect("a result"), owned);
        assert_eq!(client.reduce("x", tensor, 0, ReduceOp::Sum).expect("a result"), Some(owned.clone()));
        assert_eq!(client.gather(None, tensor, 0).expect("a result"), Some(owned.clone()));
        assert_eq!(client.scatter("x", Some(tensor), 0).expect("a result"), owned);
        let exchanged = client.alltoall("x", tensor, None).expect("a result");
        assert_eq!((exchanged.tensor, exchanged.received_splits), (owned.clone(), vec![2]));
        let both = client.grouped_allreduce("x", &[tensor, tensor], ReduceOp::Sum).expect("results");
        assert_eq!(both, [owned.clone(), owned.clone()]);
        assert_eq!(client.grouped_broadcast(None, &[tensor], 0_u32).expect("results"), [owned]);
        let set = client.add_process_set(&[0]).expect("a set");
        assert_eq!((set.id, set.size(), set.position(0)), (ronde::SetId(7), 1, Some(0)));
        client.barrier(set.id).expect("a barrier");
        assert!(client.remove_process_set(set.id).expect("it was there"));
        assert!(!client.remove_process_set(set.id).expect("it is gone"));
        assert!(!client.remove_process_set(ronde::SetId::WORLD).expect("it stays"));
        client.barrier(None).expect("a barrier");
        assert_eq!(client.join().expect("joined"), 0);
        client.barrier(None).expect("numbers restart");
        let names: Vec<String> =
            fake.received().iter().filter_map(|received| received.strip_prefix("submit ").map(str::to_owned)).collect();
        let wanted = [
            "reducescatter.x",
            "reduce.x",
            "gather.noname.0",
            "scatter.x",
            "alltoall.x",
            "grouped_allreduce.x_1of2",
            "grouped_allreduce.x_2of2",
            "grouped_broadcast.noname.0_1of1",
            "add_process_set.noname.0",
            "barrier.noname.4294967296",
            "remove_process_set.noname.0",
            "barrier.noname.0",
            "join.noname.0",
            "barrier.noname.12884901888",
        ];
        assert_eq!(names, wanted);
    }
}

#[test]
fn restarted_numbers_differ_from_those_of_pending_requests() {
    let fake = Fake::start(Settings { size: 2, never: ".0", ..Settings::default() });
    let client = connect(&fake, OVER_RING);
    let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
    let part = TensorRef::from(&tensor);
    let sum = || client.allreduce_async(None, &tensor, ReduceOp::Sum).expect("submitted");
    let names = || {
        let group = client.grouped_allreduce_async(None, &[part], ReduceOp::Sum).expect("submitted");
        let handles = group.into_iter().chain([sum()]);
        let mut names: Vec<_> = handles.map(|handle| handle.name().expect("this process").to_owned()).collect();
        names.push(client.send_async(&tensor, 1, 5).expect("submitted").name().expect("this process").to_owned());
        names
    };
    let pending = sum();
    assert_eq!(pending.name().expect("this process"), "allreduce.noname.0");
    assert_eq!(names(), ["grouped_allreduce.noname.0_1of1", "allreduce.noname.1", "message.0.1.5.0"]);
    for number in ["4294967296", "8589934592"] {
        client.submit_from(&Operation::new("j", Collective::Join, None)).expect("submitted").wait().expect("joined");
        assert!(!pending.poll());
        assert_eq!(
            names(),
            [
                format!("grouped_allreduce.noname.{number}_1of1"),
                format!("allreduce.noname.{number}"),
                format!("message.0.1.5.{number}")
            ]
        );
    }

    // The fake sidecar gives every set the same number.
    let set = |name: &str| {
        let add = Operation::new(name, Collective::AddSet { ranks: vec![ronde::Rank(0)] }, None);
        client.submit_from(&add).expect("submitted").wait().expect("a set");
        let barrier = client.barrier_async(ronde::SetId(7)).expect("submitted");
        barrier.name().expect("this process").to_owned()
    };
    let of_first = set("first");
    let remove = Operation::new("first", Collective::RemoveSet { set: ronde::SetId(7) }, None);
    client.submit_from(&remove).expect("submitted").wait().expect("removed");
    assert_eq!([of_first, set("second")], ["barrier.noname.12884901888", "barrier.noname.21474836480"]);
    // What goes on without change counts on.
    assert_eq!(sum().name().expect("this process"), "allreduce.noname.8589934593");
}

/// Only its members get the answer to a request for a set, so it restarts no numbers that others count, too.
#[test]
fn sets_of_members_are_named_by_their_ranks_and_keep_other_numbers() {
    let fake = Fake::start(Settings { size: 3, ..Settings::default() });
    let client = connect(&fake, OVER_RING);
    let form = |ranks: &[u32]| {
        let handle = client.add_process_set_of_members_async(ranks).expect("submitted");
        let name = handle.name().expect("this process").to_owned();
        (name, handle.wait().expect("a set"))
    };
    let barrier = |set| client.barrier_async(set).expect("submitted").name().expect("this process").to_owned();
    let (first, set) = form(&[2, 0]);
    assert_eq!((set.id, set.ranks), (ronde::SetId(7), vec![0, 2]));
    let stem = first.strip_suffix(".0").expect("the first of its ranks").to_owned();
    assert!(stem.starts_with("add_process_set.members.noname."), "{stem}");
    assert_eq!(barrier(ronde::SetId(7)), "barrier.noname.0");
    // The order of the ranks does not matter; a set that is known goes on with its numbers.
    assert_eq!(form(&[0, 2]).0, format!("{stem}.1"));
    assert_eq!(barrier(ronde::SetId(7)), "barrier.noname.1");
    assert!(form(&[0]).0.ends_with(".0"));
    // A set that all ranks remove and add: greater numbers, the same on ranks that were in fewer sets.
    assert!(client.remove_process_set(ronde::SetId(7)).expect("it was there"));
    form(&[0, 2]);
    assert_eq!(barrier(ronde::SetId(7)), format!("barrier.noname.{}", 1_u64 << 32));
    client.add_process_set(&[0, 1]).expect("a set");
    assert_eq!(barrier(ronde::SetId(7)), format!("barrier.noname.{}", 2_u64 << 32));
    client.join().expect("joined");
    assert_eq!(form(&[0, 2]).0, format!("{stem}.{}", 3_u64 << 32));
}

/// Ranks that are not in the set get no answer to its join, so it changes the numbers of that set alone.
#[test]
fn a_join_in_a_set_restarts_the_numbers_of_that_set() {
    let fake = Fake::start(Settings { size: 3, ..Settings::default() });
    let client = connect(&fake, OVER_RING);
    let set = client.add_process_set(&[0, 2]).expect("a set").id;
    let first = 1_u64 << 32;
    let barrier = |set| client.barrier_async(set).expect("submitted").name().expect("this process").to_owned();
    assert_eq!(
        (barrier(set), barrier(set)),
        (format!("barrier.noname.{first}"), format!("barrier.noname.{}", first + 1))
    );
    assert_eq!(barrier(ronde::SetId::WORLD), "barrier.noname.0");
    for joins in 1..3_u64 {
        assert_eq!(client.join_in(set).expect("joined"), 0);
        assert_eq!(barrier(set), format!("barrier.noname.{}", (joins << 48) + first));
        assert_eq!(barrier(ronde::SetId::WORLD), format!("barrier.noname.{joins}"));
    }
    // The next generation of all sets is that after the one set that was added.
    client.join().expect("joined");
    assert_eq!(barrier(ronde::SetId::WORLD), format!("barrier.noname.{}", 2_u64 << 32));
    assert_eq!(barrier(set), format!("barrier.noname.{}", (2_u64 << 48) + first + 1));
}

#[test]
fn a_process_set_that_was_not_removed_stays_usable() {
    let fake = Fake::start(Settings { size: 2, ..Settings::default() });
    let client = connect(&fake, OVER_RING);
    for set in [ronde::SetId::WORLD, ronde::SetId(8)] {
        client.remove_process_set_async(set).expect("submitted").wait().expect("there was none to remove");
    }
    let tensor = Tensor::of(&[2], &[1_i32, 2]).expect("a tensor");
    let error = client.broadcast(None, &tensor, 2).expect_err("the set of all ranks is known");
    assert!(error.to_string().contains("invalid root rank 2"), "{error}");
    assert_eq!(client.alltoall(None, &tensor, None).expect("divided by two ranks").received_splits, [1, 1]);
}

#[test]
fn the_ranks_of_a_new_process_set_may_come_in_any_order() {
    let fake = Fake::start(Settings { size: 3, ..Settings::default() });
    let client = connect(&fake, OVER_RING);
    let ranks = [2, 1, 0].map(ronde::Rank).to_vec();
    let add = Operation::new(None, Collective::AddSet { ranks }, None);
    client.submit_from(&add).expect("submitted").wait().expect("a set");
    let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
    for root in 0..3 {
        client.broadcast(ronde::SetId(7), &tensor, root).expect("a rank of the set");
    }
}

#[test]
fn messages_are_counted_for_each_pair_of_ranks_and_tag() {
    let fake = Fake::start(Settings { size: 3, ..Settings::default() });
    let client = connect(&fake, OVER_RING);
    let tensor = Tensor::of(&[2], &[1_i32, 2]).expect("a tensor");
    client.send(&tensor, 1, 5).expect("sent");
    client.send(&tensor, 1, 5).expect("sent");
    client.send(&tensor, 2, 5).expect("sent");
    let received = client.recv(1, 5).expect("received");
    assert_eq!((received.shape, received.bytes), (vec![0], Vec::new()), "the fake sidecar echoes what it is given");
    let names: Vec<String> = fake.received().into_iter().filter(|received| received.starts_with("submit")).collect();
    assert_eq!(
        names,
        ["submit message.0.1.5.0", "submit message.0.1.5.1", "submit message.0.2.5.0", "submit message.1.0.5.0"]
    );
}
