//! Process sets, joins and groups through the Rust client over real sidecars.

use anyhow::{Context, Result, ensure};
use ronde::blocking::{Client, Handle};
use ronde::{Cause, Error, Operation, ProcessSet, ReduceOp, SetId, TensorRef, Transfer};
use ronde_tests::cluster::Plan;
use ronde_tests::crew::{Crew, numbers};
use serde_json::{Value, json};

/// Two ranks on the first and on the last sidecar, one on the one between.
const PLACEMENT: [u32; 5] = [0, 0, 1, 2, 2];

fn crew() -> Result<Crew> {
    Crew::start(Plan::of(&PLACEMENT), Transfer::Arena)
}

/// The sum of a rank's number plus `plus` over the ranks of a set.
fn sum_on(client: &Client, set: &ProcessSet, plus: i64) -> Result<()> {
    let mine = numbers(&[3], |i| i64::from(client.rank()) + plus + i)?;
    let expected = numbers(&[3], |i| set.ranks.iter().map(|rank| i64::from(*rank) + plus + i).sum())?;
    let sum = client.allreduce(("same name", set.id), &mine, ReduceOp::Sum)?;
    ensure!(sum == expected, "on {}: {sum:?} instead of {expected:?}", set.id);
    Ok(())
}

#[test]
fn sets_on_some_of_the_sidecars_work_at_once_and_by_the_same_names() -> Result<()> {
    let crew = crew()?;
    let sets = crew.all(|client| {
        // One on a single sidecar, two that share a rank and span sidecars, one of a single rank.
        let lists: [&[u32]; 4] = [&[0, 1], &[4, 2], &[1, 3, 4], &[2]];
        lists.iter().map(|ranks| client.add_process_set(ranks).context("adding")).collect::<Result<Vec<_>>>()
    })?;
    ensure!(sets.iter().all(|of_rank| *of_rank == sets[0]), "ranks know different sets: {sets:?}");
    let sets = &sets[0];
    ensure!(sets[1].ranks == [2, 4], "ranks are sorted: {:?}", sets[1]);
    crew.all(|client| {
        let mine: Vec<&ProcessSet> = sets.iter().filter(|set| set.position(client.rank()).is_some()).collect();
        for round in 0..3 {
            // All in flight at once, by the same name, in each rank's own order.
            let mut handles = Vec::new();
            let first = client.rank() as usize + round;
            let world = ProcessSet { id: SetId::WORLD, ranks: (0..client.size()).collect() };
            let all: Vec<&ProcessSet> = mine.iter().copied().chain([&world]).collect();
            for index in 0..all.len() {
                let set = all[(index + first) % all.len()];
                let tensor = numbers(&[100, 3], |i| i64::from(client.rank()) * 1000 + i)?;
                handles.push((set, client.allreduce_async(("x", set.id), &tensor, ReduceOp::Sum)?));
            }
            for (set, handle) in handles {
                let ranks: i64 = set.ranks.iter().map(|rank| i64::from(*rank)).sum();
                let size = i64::try_from(set.size())?;
                ensure!(handle.wait()? == numbers(&[100, 3], |i| ranks * 1000 + size * i)?, "on {}", set.id);
            }
        }
        // Unnamed operations are numbered by set: not every rank is in all of them.
        for set in &mine {
            client.barrier(set.id)?;
            let rows = client.allgather(set.id, &numbers(&[1], |_| i64::from(client.rank()))?)?.to_vec::<i64>()?;
            ensure!(rows == set.ranks.iter().map(|rank| i64::from(*rank)).collect::<Vec<_>>(), "{rows:?}");
        }
        client.barrier(None)?;
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn members_form_sets_without_the_other_ranks() -> Result<()> {
    let crew = crew()?;
    let (here, beside): ([u32; 2], [u32; 3]) = ([0, 1], [1, 3, 4]);
    crew.all(|client| {
        let me = client.rank();
        // Rank 2 takes no part and is not waited for. Rank 1 has both in flight, in another order than the others.
        let wanted = [&beside[..], &here[..]].into_iter().filter(|ranks| ranks.contains(&me));
        let started = wanted.map(|ranks| client.add_process_set_of_members_async(ranks));
        let handles = started.collect::<Result<Vec<_>, _>>()?;
        for handle in handles.into_iter().rev() {
            let set = handle.wait()?;
            sum_on(client, &set, 5)?;
            let again = client.add_process_set_of_members(&set.ranks)?;
            ensure!(again == set, "{again:?} instead of {set:?}");
            client.barrier(set.id)?;
        }
        Ok(())
    })?;
    let formed = crew.all(|client| {
        let all: Vec<u32> = (0..client.size()).rev().collect();
        ensure!(client.add_process_set_of_members(&all)?.id == SetId::WORLD, "the set of all ranks exists");
        // The numbers of a set that all ranks add do not depend on how many were formed by some of them.
        let set = client.add_process_set(&[0, 2, 4])?;
        if set.position(client.rank()).is_some() {
            client.barrier(set.id)?;
            ensure!(client.add_process_set_of_members(&set.ranks)? == set, "it was added by all");
        }
        let named = |ranks: &[u32]| {
            let operation = Operation::add_process_set_of_members(ranks);
            let operation = Operation { label: "disputed".into(), ..operation };
            client.submit_from(&operation)?.wait().map(|output| output.detail)
        };
        Ok(match client.rank() {
            1 => Some(named(&[1, 3])),
            3 | 4 => Some(named(&[1, 3, 4])),
            _ => None,
        })
    })?;
    for error in formed.into_iter().flatten().map(|outcome| outcome.expect_err("they disagree").to_string()) {
        let words = "Mismatched process sets: One rank asked for ranks 1, 3, but another rank for ranks 1, 3-4.";
        ensure!(error.contains(words), "{error}");
    }
    crew.check_next()
}

#[test]
fn every_collective_of_a_set_uses_ranks_within_the_set() -> Result<()> {
    let crew = crew()?;
    crew.all(|client| {
        let set = client.add_process_set(&[1, 2, 4])?;
        let Some(position) = set.position(client.rank()) else { return Ok(()) };
        let (id, position) = (set.id, i64::try_from(position)?);
        let mine = numbers(&[4, 2], |i| i64::from(client.rank()) + i)?;
        // 4 rows for 3 ranks: two for the first.
        let (first, rows) = if position == 0 { (0, 2) } else { (position + 1, 1) };
        let share = numbers(&[rows, 2], |i| 7 + 3 * (first * 2 + i))?;
        ensure!(client.reduce_scatter(("x", id), &mine, ReduceOp::Sum)? == share, "reduce-scatter");
        let root = client.reduce(("x", id), &mine, 4, ReduceOp::Max)?;
        ensure!(root == (client.rank() == 4).then(|| numbers(&[4, 2], |i| 4 + i)).transpose()?, "reduce: {root:?}");
        let gathered = client.gather(("x", id), &mine, 2)?;
        ensure!(gathered.map(|tensor| tensor.shape) == (client.rank() == 2).then(|| vec![12, 2]), "gather");
        let share = numbers(&[rows, 2], |i| 1 + first * 2 + i)?;
        let handed = (client.rank() == 1).then_some(TensorRef::from(&mine));
        ensure!(client.scatter(("x", id), handed, 1)? == share, "scatter");
        let exchanged = client.alltoall(("x", id), &mine, Some(&[2, 1, 1]))?;
        ensure!(exchanged.received_splits == vec![if position == 0 { 2 } else { 1 }; 3], "{exchanged:?}");
        ensure!(client.broadcast(("x", id), &mine, 4)? == numbers(&[4, 2], |i| 4 + i)?, "broadcast");
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn removed_sets_are_gone_and_their_numbers_are_used_again() -> Result<()> {
    let crew = crew()?;
    let ids = crew.all(|client| {
        let (first, second) = (client.add_process_set(&[0, 3])?, client.add_process_set(&[1, 2])?);
        if first.position(client.rank()).is_some() {
            client.barrier(first.id)?;
        }
        ensure!(client.remove_process_set(first.id)?, "the set was there");
        ensure!(!client.remove_process_set(first.id)?, "the set is gone");
        let third = client.add_process_set(&[2, 3, 4])?;
        ensure!(third.id == first.id && third.id != second.id, "{third:?} instead of {first:?}");
        // The numbers of unnamed operations restart with the set.
        if third.position(client.rank()).is_some() {
            client.barrier(third.id)?;
            sum_on(client, &third, 1)?;
        }
        if second.position(client.rank()).is_some() {
            sum_on(client, &second, 2)?;
        }
        Ok((second.id, third.id))
    })?;
    let (set, _) = ids[0];
    // Operations that wait on a removed set fail, and so do later ones.
    crew.all(|client| {
        let waiting = if client.rank() == 1 { Some(client.barrier_async(("never", set))?) } else { None };
        client.barrier("before")?;
        ensure!(client.remove_process_set(set)?, "the set was there");
        if let Some(waiting) = waiting {
            let error = waiting.wait().expect_err("the set is gone");
            ensure!(error.to_string().contains(&format!("{set} was removed")), "{error}");
            let error = client.barrier(("later", set)).expect_err("the set is gone");
            ensure!(error.to_string().contains("does not exist"), "{error}");
        }
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn ranks_with_fewer_steps_join_and_the_others_go_on() -> Result<()> {
    let crew = crew()?;
    let steps = |rank: u32| [3, 1, 0, 6, 4][rank as usize];
    for round in 0..2 {
        let last = crew.all(|client| {
            for step in 0..steps(client.rank()) {
                // Unnamed: numbers restart after each join.
                let sum = client.allreduce(None, &numbers(&[4], |_| 1)?, ReduceOp::Sum)?;
                let left = (0..client.size()).filter(|rank| steps(*rank) > step).count();
                ensure!(sum == numbers(&[4], |_| left as i64)?, "round {round}, step {step}: {sum:?}");
                let mean = client.allreduce(None, &numbers(&[1], |_| 10)?, ReduceOp::Average)?;
                ensure!(mean == numbers(&[1], |_| left as i64 * 10 / 5)?, "it divides by all ranks: {mean:?}");
                client.barrier(None)?;
            }
            Ok(client.join()?)
        })?;
        ensure!(last == [3; 5], "round {round}: the last rank to join is 3, not {last:?}");
    }
    crew.check_next()
}

#[test]
fn operations_not_supported_with_join_fail_on_the_other_ranks() -> Result<()> {
    let crew = crew()?;
    crew.all(|client| {
        if client.rank() == 2 {
            // No other rank passes this barrier before the join is known: both come from one sidecar, in order.
            let joined = client.join_async()?;
            ensure!(joined.wait()? < client.size());
            return Ok(());
        }
        client.barrier("2 has joined")?;
        let mine = numbers(&[5], |i| i)?;
        let refused = [
            (client.allgather("x", &mine).map(drop), "Allgather is not supported with Join"),
            (client.broadcast("x", &mine, 0).map(drop), "Broadcast is not supported with Join"),
            (client.reduce_scatter("x", &mine, ReduceOp::Sum).map(drop), "Reducescatter is not supported with Join"),
            (
                client.allreduce("x", &mine, ReduceOp::Min).map(drop),
                "Allreduce with reduction min is not supported with Join",
            ),
        ];
        for (outcome, words) in refused {
            let error = outcome.expect_err(words);
            ensure!(error.to_string().contains(words), "{error}");
        }
        ensure!(client.allreduce("x", &mine, ReduceOp::Sum)? == numbers(&[5], |i| 4 * i)?);
        client.join()?;
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn groups_are_ready_together_and_go_on_without_a_member_that_fails() -> Result<()> {
    let crew = crew()?;
    crew.all(|client| {
        let parts =
            [numbers(&[2], |i| i)?, numbers(&[3, 2], |i| 10 + i)?, numbers(&[1], |_| i64::from(client.rank()))?];
        let tensors: Vec<TensorRef<'_>> = parts.iter().map(TensorRef::from).collect();
        let sums = client.grouped_allreduce("sums", &tensors, ReduceOp::Sum)?;
        ensure!(sums == [numbers(&[2], |i| 5 * i)?, numbers(&[3, 2], |i| 50 + 5 * i)?, numbers(&[1], |_| 10)?]);
        ensure!(client.grouped_allgather(None, &tensors)?[2] == numbers(&[5], |i| i)?, "all-gather");
        let shares = client.grouped_reduce_scatter(None, &tensors[..2], ReduceOp::Sum)?;
        ensure!(shares[0].shape == [u64::from(client.rank() < 2)], "reduce-scatter: {shares:?}");
        ensure!(client.grouped_broadcast(None, &tensors, 3_u32)?[2] == numbers(&[1], |_| 3)?, "broadcast");
        // Rank 4 has another shape for the second member.
        let odd = numbers(&[if client.rank() == 4 { 2 } else { 1 }], |_| 1)?;
        let operations = [&parts[0], &odd, &parts[2]].map(|tensor| Operation::allreduce(None, tensor, ReduceOp::Sum));
        let outcomes: Vec<_> = client.submit_group_from("odd", &operations)?.into_iter().map(Handle::wait).collect();
        let failure = outcomes[1].as_ref().err().and_then(Error::failure).context("the second member differs")?;
        ensure!(failure.cause == Cause::Mismatch && failure.rank.is_some_and(|rank| rank.0 == 4), "{failure}");
        ensure!(outcomes[0].is_ok() && outcomes[2].is_ok(), "{outcomes:?}");
        Ok(())
    })?;
    // Nothing of a group begins before all of it is submitted everywhere.
    crew.all(|client| {
        let parts = [numbers(&[2], |i| i)?, numbers(&[3], |i| i)?];
        let tensors: Vec<TensorRef<'_>> = parts.iter().map(TensorRef::from).collect();
        if client.rank() == 0 {
            client.barrier("the others have theirs")?;
            client.allreduce("alone", &parts[0], ReduceOp::Sum)?;
            client.grouped_allreduce("late", &tensors, ReduceOp::Sum)?;
        } else {
            let handles = client.grouped_allreduce_async("late", &tensors, ReduceOp::Sum)?;
            client.barrier("the others have theirs")?;
            client.allreduce("alone", &parts[0], ReduceOp::Sum)?;
            handles.into_iter().try_for_each(|handle| handle.wait().map(drop))?;
        }
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn pages_show_sets_joined_ranks_and_cached_announcements() -> Result<()> {
    let crew = Crew::start(Plan::of(&PLACEMENT).never_ahead(), Transfer::Arena)?;
    let joined = crew.all(|client| {
        client.add_process_set(&[1, 3])?;
        for _ in 0..3 {
            client.allreduce("again", &numbers(&[4], |i| i)?, ReduceOp::Sum)?;
        }
        let joined = (client.rank() == 1).then(|| client.join_async()).transpose()?;
        if client.rank() != 1 {
            // Passed when rank 1 has joined.
            client.barrier("joined")?;
        }
        Ok(joined)
    })?;
    let coordinator = &crew.cluster.sidecars[0];
    let status: Value = coordinator.status()?;
    ensure!(status["process_sets"] == json!([{ "id": 1, "ranks": [1, 3] }]) && status["sets"] == 2, "{status:#}");
    ensure!(status["ranks_joined"] == json!([1]), "{status:#}");
    let (_, metrics) = coordinator.page("/metrics")?;
    for wanted in ["ronde_process_sets 2", "ronde_ranks_joined 1"] {
        ensure!(metrics.contains(wanted), "no {wanted:?} in {metrics}");
    }
    // The second sidecar has one rank, which announced the same sum three times.
    let (_, metrics) = crew.cluster.sidecars[1].page("/metrics")?;
    ensure!(metrics.contains("ronde_requests_announced_again_total 2"), "{metrics}");
    crew.all(|client| if client.rank() == 1 { Ok(0) } else { Ok(client.join()?) })?;
    joined.into_iter().flatten().try_for_each(|handle| handle.wait().map(drop))?;
    crew.check_next()
}

/// All together, the orders of such a group are longer than the queue of a control link.
#[test]
fn a_group_of_many_small_tensors_does_not_overflow_the_links() -> Result<()> {
    let placement: Vec<u32> = (0..16).map(|rank| rank / 8).collect();
    let crew = Crew::start(Plan::of(&placement), Transfer::Arena)?;
    crew.all(|client| {
        let part = numbers(&[512], |i| i + i64::from(client.rank()))?;
        let tensors: Vec<TensorRef<'_>> = (0..400).map(|_| TensorRef::from(&part)).collect();
        let sums = client.grouped_allreduce("many", &tensors, ReduceOp::Sum)?;
        let expected = numbers(&[512], |i| 16 * i + 120)?;
        ensure!(sums.iter().all(|sum| *sum == expected), "a sum is wrong");
        Ok(())
    })?;
    crew.check_next()
}
