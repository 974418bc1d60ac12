//! Every collective through the Rust client over three real sidecars, with tensors in shared memory and inside
//! messages, with messages over a ring and over gRPC.

use anyhow::{Context, Result, ensure};
use ronde::blocking::{Client, Handle};
use ronde::{Codec, Error, Operation, Output, ReduceOp, ReduceOptions, Tensor, TensorRef, Transfer};
use ronde_tests::cluster::Plan;
use ronde_tests::crew::{Crew, DATA_PATHS, floats, nothing, numbers};

/// Two ranks on the first and on the last sidecar, one on the one between.
const PLACEMENT: [u32; 5] = [0, 0, 1, 2, 2];
const SIZE: i64 = 5;

fn each_way(check: impl Fn(&Crew) -> Result<()>) -> Result<()> {
    for path in DATA_PATHS {
        check(&Crew::start(Plan::of(&PLACEMENT), path)?)?;
    }
    Ok(())
}

fn me(client: &Client) -> i64 {
    i64::from(client.rank())
}

/// A rank's contribution: from 1 to 11.
fn drawn(rank: i64, i: i64) -> i64 {
    (rank * 7 + i * 3) % 11 + 1
}

/// Element i of a result.
type Reference = fn(i64) -> i64;

fn fold(i: i64, fold: fn(i64, i64) -> i64) -> i64 {
    (0..SIZE).map(|rank| drawn(rank, i)).reduce(fold).unwrap_or(0)
}

#[test]
fn reductions() -> Result<()> {
    each_way(|crew| {
        let expected: [(ReduceOp, Reference); 8] = [
            (ReduceOp::Sum, |i| fold(i, |a, b| a + b)),
            (ReduceOp::Average, |i| fold(i, |a, b| a + b) / SIZE),
            (ReduceOp::Min, |i| fold(i, i64::min)),
            (ReduceOp::Max, |i| fold(i, i64::max)),
            (ReduceOp::Product, |i| fold(i, |a, b| a * b)),
            (ReduceOp::BitAnd, |i| fold(i, |a, b| a & b)),
            (ReduceOp::BitOr, |i| fold(i, |a, b| a | b)),
            (ReduceOp::BitXor, |i| fold(i, |a, b| a ^ b)),
        ];
        crew.all(|client| {
            for (op, expected) in expected {
                let mine = numbers(&[7, 3], |i| drawn(me(client), i))?;
                let whole = numbers(&[7, 3], expected)?;
                ensure!(client.allreduce("x", &mine, op)? == whole, "all-reduce with {op}");
                // 7 rows: two each for the first two ranks, one each for the others.
                let (first, rows) = if me(client) < 2 { (2 * me(client), 2) } else { (me(client) + 2, 1) };
                let share = numbers(&[u64::try_from(rows)?, 3], |i| expected(first * 3 + i))?;
                ensure!(client.reduce_scatter("x", &mine, op)? == share, "reduce-scatter with {op}");
                let reduced = client.reduce("x", &mine, 3, op)?;
                ensure!(reduced == (client.rank() == 3).then_some(whole), "reduce with {op}: {reduced:?}");
            }
            Ok(())
        })?;
        Ok(())
    })
}

#[test]
fn scales_and_codecs() -> Result<()> {
    each_way(|crew| {
        crew.all(|client| {
            let mine = floats(&[100], |i| f32::from(i) + client.rank() as f32)?;
            let scaled = ReduceOptions { prescale: 0.5, postscale: 4.0, ..ReduceOp::Sum.into() };
            let expected = floats(&[100], |i| (f32::from(i) * 5.0 + 10.0) * 2.0)?;
            ensure!(client.allreduce("x", &mine, scaled)? == expected, "scaled");
            for codec in [Codec::F16, Codec::Bf16] {
                // Whole numbers below 256 have an exact form in both, and so have the sums of ones and twos.
                let mine = floats(&[33], |i| f32::from(i % 2) + 1.0)?;
                let expected = floats(&[33], |i| 5.0 * (f32::from(i % 2) + 1.0))?;
                let options = ReduceOptions { codec, ..ReduceOp::Sum.into() };
                ensure!(client.allreduce("coded", &mine, options)? == expected, "codec {codec}");
            }
            Ok(())
        })?;
        Ok(())
    })
}

#[test]
fn reducers_that_see_all_ranks() -> Result<()> {
    each_way(|crew| {
        crew.all(|client| {
            let rank = client.rank();
            // 0, 1, 4, 9, 16 in turns.
            let mine = floats(&[64], |i| f32::from(u16::try_from((rank + u32::from(i)) % 5).unwrap_or(0)).powi(2))?;
            let median = client.allreduce("median", &mine, ReduceOp::Median)?;
            ensure!(median == floats(&[64], |_| 4.0)?, "{median:?}");
            // Of equal tensors the mean and the adaptive sum are the tensor itself.
            let same = floats(&[64], |i| f32::from(i) - 32.0)?;
            for op in [ReduceOp::ClippedMean, ReduceOp::Adasum] {
                let result = client.allreduce("same", &same, op)?.to_vec::<f32>()?;
                let wanted = same.to_vec::<f32>()?;
                let distance = result.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                ensure!(distance < 1e-4, "{op}: {distance}");
            }
            // Tensors at right angles are simply added.
            let apart = floats(&[5], |i| if u32::from(i) == rank { f32::from(i) + 1.0 } else { 0.0 })?;
            let sum = client.allreduce("apart", &apart, ReduceOp::Adasum)?;
            ensure!(sum == floats(&[5], |i| f32::from(i) + 1.0)?, "{sum:?}");
            // A tensor that is much longer than the others is cut down to their length.
            let long = floats(&[4], |_| if rank == 2 { 1e6 } else { 2.0 })?;
            let clipped = client.allreduce("long", &long, ReduceOp::ClippedMean)?.to_vec::<f32>()?;
            ensure!(clipped.iter().all(|value| (value - 2.0).abs() < 1e-5), "{clipped:?}");
            Ok(())
        })?;
        Ok(())
    })
}

#[test]
fn rows_are_gathered_and_scattered() -> Result<()> {
    each_way(|crew| {
        crew.all(|client| {
            // Rank 0 has no rows, rank 4 has four.
            let rank = me(client);
            let mine = numbers(&[u64::from(client.rank()), 2], |i| rank * 100 + i)?;
            let all: Vec<i64> = (0..SIZE).flat_map(|rank| (0..rank * 2).map(move |i| rank * 100 + i)).collect();
            let all = Tensor::of(&[10, 2], &all)?;
            ensure!(client.allgather("x", &mine)? == all, "all-gather");
            let gathered = client.gather("x", &mine, 4)?;
            ensure!(gathered == (rank == 4).then(|| all.clone()), "gather: {gathered:?}");
            // 7 rows: two each for the first two ranks, one each for the others.
            let whole = numbers(&[7, 2], |i| i)?;
            let (first, rows) = if rank < 2 { (2 * rank, 2) } else { (rank + 2, 1) };
            let share = numbers(&[u64::try_from(rows)?, 2], |i| first * 2 + i)?;
            let handed = (rank == 1).then_some(TensorRef::from(&whole));
            ensure!(client.scatter("x", handed, 1)? == share, "scatter");
            ensure!(client.broadcast("x", &mine_or(&all, &mine, rank == 2)?, 2)? == all, "broadcast");
            Ok(())
        })?;
        Ok(())
    })
}

/// The whole tensor at the root, another one of its shape elsewhere.
fn mine_or(whole: &Tensor, mine: &Tensor, root: bool) -> Result<Tensor> {
    let first = mine.to_vec::<i64>()?.first().copied().unwrap_or(-1);
    Ok(if root { whole.clone() } else { numbers(&whole.shape, |_| first)? })
}

#[test]
fn rows_are_exchanged() -> Result<()> {
    each_way(|crew| {
        let rows = |from: i64, to: i64| u64::try_from((from + 2 * to) % 4).unwrap_or(0);
        crew.all(|client| {
            let rank = me(client);
            let splits: Vec<u64> = (0..SIZE).map(|to| rows(rank, to)).collect();
            let mut mine = Vec::new();
            for to in 0..SIZE {
                mine.extend((0..rows(rank, to) * 2).map(|_| rank * 10 + to));
            }
            let mine = Tensor::of(&[splits.iter().sum(), 2], &mine)?;
            let exchanged = client.alltoall("uneven", &mine, Some(&splits))?;
            let received: Vec<u64> = (0..SIZE).map(|from| rows(from, rank)).collect();
            ensure!(exchanged.received_splits == received, "{exchanged:?}");
            let wanted: Vec<i64> =
                (0..SIZE).flat_map(|from| (0..rows(from, rank) * 2).map(move |_| from * 10 + rank)).collect();
            ensure!(exchanged.tensor == Tensor::of(&[received.iter().sum(), 2], &wanted)?, "{exchanged:?}");
            let even = client.alltoall("even", &numbers(&[10], |i| rank * 10 + i / 2)?, None)?;
            ensure!(even.tensor == numbers(&[10], |i| i / 2 * 10 + rank)?, "{even:?}");
            Ok(())
        })?;
        Ok(())
    })
}

#[test]
fn messages_go_between_and_within_sidecars() -> Result<()> {
    each_way(|crew| {
        crew.all(|client| {
            let (rank, size) = (client.rank(), client.size());
            let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
            // Two rounds on one tag, one on another that is received first.
            let mut sent = Vec::new();
            for (tag, round) in [(7, 0), (7, 1), (8, 2)] {
                let tensor = numbers(&[u64::from(rank) + 1, 2], |i| me(client) * 100 + round * 10 + i)?;
                sent.push(client.send_async(&tensor, next, tag)?);
            }
            for (tag, round) in [(8, 2), (7, 0), (7, 1)] {
                let from = i64::from(previous);
                let wanted = numbers(&[u64::from(previous) + 1, 2], |i| from * 100 + round * 10 + i)?;
                let received = client.recv(previous, tag)?;
                ensure!(received == wanted, "tag {tag}, round {round}: {received:?}");
            }
            sent.into_iter().try_for_each(Handle::wait)?;
            Ok(())
        })?;
        Ok(())
    })
}

#[test]
fn messages_from_any_source() -> Result<()> {
    each_way(|crew| {
        crew.all(|client| {
            let (rank, size) = (client.rank(), client.size());
            let message =
                |rank: u32, round: i64| numbers(&[u64::from(rank), 2], |i| i64::from(rank) * 100 + round * 10 + i);
            if rank > 0 {
                let sent = (0..ROUNDS).map(|round| Ok(client.send_async(&message(rank, round)?, 0, 7)?));
                let sent = sent.collect::<Result<Vec<_>>>()?;
                sent.into_iter().try_for_each(Handle::wait)?;
                client.barrier("received")?;
                return Ok(());
            }
            // The last rank's second message is for a receive that names it, whichever other messages arrive.
            let mut rounds = vec![0; size as usize];
            let first = client.recv_from_async(size - 1, 7)?;
            let others = (0..i64::from(size - 1) * ROUNDS - 2).map(|_| Ok(client.recv_from_async(None, 7)?));
            let others = others.collect::<Result<Vec<_>>>()?;
            for handle in std::iter::once(first).chain(others) {
                let ronde::Received { tensor, source } = handle.wait()?;
                let round = &mut rounds[source as usize];
                ensure!(tensor == message(source, *round)?, "round {round} of rank {source}: {tensor:?}");
                *round += 1;
            }
            let source = (1..size).find(|source| rounds[*source as usize] < ROUNDS).context("one message is left")?;
            ensure!(client.recv(source, 7)? == message(source, ROUNDS - 1)?, "the last one");
            client.barrier("received")?;
            Ok(())
        })?;
        crew.check_next()
    })
}

const ROUNDS: i64 = 5;

#[test]
fn tensors_without_elements() -> Result<()> {
    each_way(|crew| {
        crew.all(|client| {
            let shapes: [&[u64]; 2] = [&[0], &[0, 3]];
            for shape in shapes {
                let none = nothing(shape);
                let results = [
                    client.allreduce("x", none, ReduceOp::Sum)?,
                    client.allreduce("x", none, ReduceOp::Median)?,
                    client.allreduce("x", none, ReduceOp::ClippedMean)?,
                    client.allreduce("x", none, ReduceOp::Adasum)?,
                    client.reduce_scatter("x", none, ReduceOp::Sum)?,
                    client.allgather("x", none)?,
                    client.broadcast("x", none, 4)?,
                    client.scatter("x", Some(none), 2)?,
                    client.alltoall("x", none, None)?.tensor,
                ];
                for result in results {
                    ensure!(result.shape == shape && result.bytes.is_empty(), "{result:?}");
                }
                let roots = [client.reduce("x", none, 0, ReduceOp::Sum)?, client.gather("x", none, 0)?];
                ensure!(roots.iter().all(|result| result.is_some() == (client.rank() == 0)), "{roots:?}");
            }
            match client.rank() {
                0 => client.send(nothing(&[0]), 4, 0)?,
                4 => ensure!(client.recv(0, 0)?.shape == [0], "an empty message"),
                _ => {}
            }
            client.barrier(None)?;
            Ok(())
        })?;
        crew.check_next()
    })
}

#[test]
fn several_of_all_kinds_are_in_flight_at_once() -> Result<()> {
    let crew = Crew::start(Plan::of(&PLACEMENT), Transfer::Arena)?;
    let all = crew.all(|client| {
        let mine = numbers(&[10, 3], |i| me(client) * 100 + i)?;
        let tensor = TensorRef::from(&mine);
        let operations = [
            Operation::allreduce("a", tensor, ReduceOp::Sum),
            Operation::allgather("b", tensor),
            Operation::broadcast("c", tensor, 1),
            Operation::allreduce("d", tensor, ReduceOp::Max),
            Operation::reduce_scatter("e", tensor, ReduceOp::Sum),
            Operation::barrier("f"),
        ];
        // Each rank begins elsewhere in the list.
        let mut handles: Vec<_> = operations.iter().map(|_| None).collect();
        for index in (0..operations.len()).map(|index| (index + client.rank() as usize) % operations.len()) {
            handles[index] = Some(client.submit_from(&operations[index])?);
        }
        let outputs: Result<Vec<Output>, Error> = handles.into_iter().flatten().map(Handle::wait).collect();
        Ok(outputs?)
    })?;
    for name in [0, 1, 2, 3] {
        ensure!(all.iter().all(|outputs| outputs[name] == all[0][name]), "ranks have different results of {name}");
    }
    Ok(())
}

#[test]
fn results_do_not_depend_on_fusion() -> Result<()> {
    let bits = |plan: Plan<'_>| -> Result<Vec<Vec<u8>>> {
        let crew = Crew::start(plan, Transfer::Arena)?;
        let results = crew.all(|client| {
            let mut handles = Vec::new();
            for tensor in 0..30_u16 {
                let rough =
                    floats(&[u64::from(tensor) * 37 + 1], |i| 1.0 / f32::from(i * 7 + tensor + 3) + me(client) as f32)?;
                handles.push(client.allreduce_async(format!("{tensor}").as_str(), &rough, ReduceOp::Average)?);
            }
            let results: Result<Vec<Tensor>, Error> = handles.into_iter().map(Handle::wait).collect();
            Ok(results?.into_iter().map(|tensor| tensor.bytes).collect::<Vec<_>>())
        })?;
        ensure!(results.iter().all(|of_rank| *of_rank == results[0]), "ranks have different bits");
        results.into_iter().next().context("there are ranks")
    };
    let fused = bits(Plan::of(&PLACEMENT))?;
    ensure!(bits(Plan::of(&PLACEMENT).fusion_threshold_bytes(0))? == fused, "without fusion there are other bits");
    ensure!(bits(Plan::of(&PLACEMENT).fusion_threshold_bytes(5_000))? == fused, "small buckets give other bits");
    Ok(())
}
