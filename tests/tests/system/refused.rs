//! Invalid input through the Rust client over real sidecars: every rank gets the reason, none waits, the next operation
//! works.

use anyhow::{Context, Result, ensure};
use ronde::blocking::Client;
use ronde::{Cause, Codec, DType, Error, ReduceOp, ReduceOptions, SetId, Tensor, TensorRef, Transfer};
use ronde_tests::cluster::Plan;
use ronde_tests::crew::{Crew, floats, numbers};
use serde_json::json;

const PLACEMENT: [u32; 3] = [0, 0, 1];

fn crew() -> Result<Crew> {
    Crew::start(Plan::of(&PLACEMENT), Transfer::Arena)
}

/// A different request on the last rank.
fn odd<T>(client: &Client, usual: T, on_last: T) -> T {
    if client.rank() == client.size() - 1 { on_last } else { usual }
}

#[test]
fn mismatched_requests_fail_on_all_ranks_with_the_same_text() -> Result<()> {
    let crew = crew()?;
    crew.check_fails("Mismatched data types: One rank had type int64, but another rank had type float32", |client| {
        let tensor = odd(client, numbers(&[3], |i| i)?, floats(&[3], |_| 1.0)?);
        client.allreduce("x", &tensor, ReduceOp::Sum)
    })?;
    crew.check_fails("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [3]", |client| {
        client.allreduce("x", &numbers(odd(client, &[3], &[1, 3]), |i| i)?, ReduceOp::Sum)
    })?;
    crew.check_fails("Mismatched REDUCESCATTER tensor shapes", |client| {
        client.reduce_scatter("x", &numbers(odd(client, &[3], &[4]), |i| i)?, ReduceOp::Sum)
    })?;
    crew.check_fails("Mismatched ALLGATHER tensor shapes", |client| {
        client.allgather("x", &numbers(odd(client, &[3, 2], &[3, 3]), |i| i)?)
    })?;
    crew.check_fails("Mismatched ALLTOALL tensor shapes", |client| {
        client.alltoall("x", &numbers(odd(client, &[3, 2], &[3, 3]), |i| i)?, None)
    })?;
    crew.check_fails(
        "Mismatched reduction operation: One rank asked for sum, but another rank asked for max",
        |client| client.allreduce("x", &numbers(&[3], |i| i)?, odd(client, ReduceOp::Sum, ReduceOp::Max)),
    )?;
    crew.check_fails("Mismatched BROADCAST root ranks: One rank specified root rank 0", |client| {
        client.broadcast("x", &numbers(&[3], |i| i)?, odd(client, 0, 1))
    })?;
    crew.check_fails("Mismatched REDUCE root ranks", |client| {
        client.reduce("x", &numbers(&[3], |i| i)?, odd(client, 0, 2), ReduceOp::Sum)
    })?;
    crew.check_fails("Mismatched prescale and/or postscale factors: One rank sent 1 and 1", |client| {
        let prescale = odd(client, 1.0, 2.0);
        client.allreduce("x", &floats(&[3], f32::from)?, ReduceOptions { prescale, ..ReduceOptions::default() })
    })?;
    crew.check_fails("Mismatched codecs", |client| {
        let codec = odd(client, Codec::None, Codec::F16);
        client.allreduce("x", &floats(&[3], f32::from)?, ReduceOptions { codec, ..ReduceOptions::default() })
    })?;
    crew.check_fails("Mismatched process sets", |client| client.add_process_set(odd(client, &[0, 1], &[0, 2])))?;
    // The scatter's roots differ; the root determines who contributes a tensor.
    crew.check_fails("Mismatched SCATTER root ranks", |client| {
        let tensor = numbers(&[3], |i| i)?;
        client.scatter("x", Some((&tensor).into()), odd(client, 0, 2))
    })
}

#[test]
fn unsupported_operations_are_rejected_by_name() -> Result<()> {
    let crew = crew()?;
    let none = ReduceOptions::default();
    let coded = |codec| ReduceOptions { codec, ..ReduceOp::Sum.into() };
    let cases: [(DType, ReduceOptions, &str); 5] = [
        (DType::I32, ReduceOp::Adasum.into(), "reduction adasum takes floating-point types, not int32"),
        (DType::I32, ReduceOp::Median.into(), "reduction median takes floating-point types, not int32"),
        (DType::Bool, none, "cannot average bool"),
        (DType::F64, coded(Codec::F16), "codec float16 takes float32"),
        (DType::F32, ReduceOptions { op: ReduceOp::Max, ..coded(Codec::Bf16) }, "codec bfloat16 takes float32"),
    ];
    for (dtype, options, words) in cases {
        crew.check_fails(words, |client| {
            let bytes = vec![0; 3 * dtype.size_bytes()];
            client.allreduce("x", TensorRef { dtype, shape: &[3], bytes: &bytes }, options.clone())
        })?;
    }
    for op in [ReduceOp::Adasum, ReduceOp::Median, ReduceOp::ClippedMean] {
        let words = format!("REDUCESCATTER with reduction {op} is not supported");
        crew.check_fails(&words, |client| client.reduce_scatter("x", &floats(&[3], f32::from)?, op))?;
        let words = format!("REDUCE with reduction {op} is not supported");
        crew.check_fails(&words, |client| client.reduce("x", &floats(&[3], f32::from)?, 0, op))?;
    }
    crew.check_fails("takes no codec", |client| {
        client.reduce_scatter("x", &floats(&[3], f32::from)?, coded(Codec::F16))
    })?;
    // One rank alone submits an invalid request: the others fail, too, though their requests differ.
    let outcomes = crew.each(|client| {
        let codec = odd(client, Codec::None, Codec::F16);
        let tensor = numbers(&[3], |i| i)?;
        client.allreduce("x", &tensor, ReduceOptions { codec, ..ReduceOp::Sum.into() })
    });
    for outcome in outcomes {
        let error = outcome.expect_err("one rank asks for what there is not");
        let failure = error.failure().context("all ranks receive it")?;
        ensure!(failure.rank.is_some_and(|rank| rank.0 == 2), "{failure}");
    }
    crew.check_next()
}

#[test]
fn wrong_arguments_fail_on_their_caller_only() -> Result<()> {
    let crew = crew()?;
    let scalar = TensorRef { dtype: DType::U8, shape: &[], bytes: &[1] };
    let rows = numbers(&[3, 2], |i| i)?;
    crew.check_fails("REDUCESCATTER does not support scalar tensors", |c| {
        c.reduce_scatter("x", scalar, ReduceOp::Sum)
    })?;
    crew.check_fails("ALLGATHER does not support scalar tensors", |c| c.allgather("x", scalar))?;
    crew.check_fails("ALLTOALL does not support scalar tensors", |c| c.alltoall("x", scalar, None))?;
    crew.check_fails("[1, 1, 2] of ALLTOALL do not add up to the 3 rows", |c| {
        c.alltoall("x", &rows, Some(&[1, 1, 2]))
    })?;
    crew.check_fails("2 splits, but process set 0 has 3 ranks", |c| c.alltoall("x", &rows, Some(&[1, 2])))?;
    let four = numbers(&[4], |i| i)?;
    crew.check_fails("4 rows of the tensor cannot be divided equally by the 3", |c| c.alltoall("x", &four, None))?;
    crew.check_fails("invalid root rank 3", |c| c.broadcast("x", &rows, 3))?;
    crew.check_fails("has no messages for itself", |c| c.send(&rows, c.rank(), 0))?;
    crew.check_fails("rank 7, which is not in process set 0", |c| c.recv(7, 0))?;
    crew.check_fails("prescale is inf", |c| {
        c.allreduce("x", &rows, ReduceOptions { prescale: f64::INFINITY, ..ReduceOptions::default() })
    })
}

#[test]
fn unknown_process_sets_and_ranks_outside_of_a_set_are_rejected() -> Result<()> {
    let crew = crew()?;
    let mine = numbers(&[3], |i| i)?;
    crew.check_fails("Process set provided does not exist, or has not been registered", |client| {
        client.allreduce(("x", SetId(77)), &mine, ReduceOp::Sum)
    })?;
    let sets = crew.all(|client| Ok(client.add_process_set(&[0, 2])?))?;
    let set = &sets[0];
    let outcomes = crew.each(|client| client.allreduce(("x", set.id), &mine, ReduceOp::Sum));
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(sum) => ensure!(rank != 1 && sum == numbers(&[3], |i| 2 * i)?, "rank {rank}: {sum:?}"),
            Err(error) => {
                ensure!(rank == 1 && error.to_string().contains("Rank 1 is not a member"), "rank {rank}: {error}");
            }
        }
    }
    crew.check_next()?;
    crew.check_fails("names rank 0 twice", |client| client.add_process_set(&[0, 0]))?;
    crew.check_fails("at least one rank", |client| client.add_process_set(&[]))?;
    crew.check_fails("cannot have rank 9", |client| client.add_process_set(&[0, 9]))?;
    crew.check_fails("duplicate process set", |client| client.add_process_set(&[2, 0]))
}

#[test]
fn a_name_that_is_pending_is_refused_and_the_first_stays_valid() -> Result<()> {
    let crew = crew()?;
    crew.all(|client| {
        let mine = numbers(&[3], |i| i)?;
        if client.rank() == 0 {
            let first = client.allreduce_async("twice", &mine, ReduceOp::Sum)?;
            let error = client.allreduce("twice", &mine, ReduceOp::Sum).expect_err("the name is in use");
            ensure!(error.to_string().contains("same name"), "{error}");
            client.barrier("refused")?;
            ensure!(first.wait()? == numbers(&[3], |i| 3 * i)?);
        } else {
            client.barrier("refused")?;
            ensure!(client.allreduce("twice", &mine, ReduceOp::Sum)? == numbers(&[3], |i| 3 * i)?);
        }
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn tensors_and_results_over_the_limit_fail_on_every_rank() -> Result<()> {
    let crew = Crew::start(Plan::of(&PLACEMENT).arena_bytes_max(ARENA_BYTES), Transfer::Arena)?;
    let bytes = vec![1_u8; 8 * QUARTER];
    let of =
        |quarters: usize| TensorRef { dtype: DType::U8, shape: &SHAPES[quarters], bytes: &bytes[..quarters * QUARTER] };
    // Two arenas' worth on every rank, then on one rank only: the others fail instead of waiting.
    crew.check_fails("arena_bytes_max", |client| client.allreduce("x", of(8), ReduceOp::Sum))?;
    crew.check_each_fails(&["arena_bytes_max"; 3], |client| client.allgather("x", of(odd(client, 0, 8))))?;
    let outcomes = crew.each(|client| client.allgather(None, of(odd(client, 0, 8))));
    let refused: Vec<Error> = outcomes.into_iter().filter_map(Result::err).collect();
    ensure!(refused.len() == 3 && matches!(refused[2], Error::Limit { .. }), "{refused:?}");
    let failure = refused[0].failure().context("the others receive it")?;
    ensure!(failure.cause == Cause::Refused && failure.rank.is_some_and(|rank| rank.0 == 2), "{failure}");
    // Numbers of unnamed operations stay in step.
    crew.all(|client| Ok(client.allgather(None, of(0))?))?;
    // Each contribution fits, all of them together do not.
    for words in ["ALLGATHER", "arena"] {
        crew.check_fails(words, |client| client.allgather("x", of(2)))?;
    }
    crew.check_fails("GATHER", |client| client.gather("x", of(2), 1))?;
    crew.check_fails("ALLTOALL", |client| client.alltoall("x", of(2), Some(&[0, 8 << 20, 0])))?;
    // A tensor that fits succeeds.
    crew.all(|client| Ok(client.allgather("x", of(1))?))?;
    Ok(())
}

const ARENA_BYTES: u64 = 16 << 20;
const QUARTER: usize = 4 << 20;
/// By the number of quarters of an arena.
const SHAPES: [[u64; 1]; 9] =
    [[0], [4 << 20], [8 << 20], [12 << 20], [16 << 20], [20 << 20], [24 << 20], [28 << 20], [32 << 20]];

#[test]
fn nan_and_infinity_are_preserved() -> Result<()> {
    let crew = crew()?;
    crew.all(|client| {
        let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let ones = [1.0_f32; 4];
        let mine = Tensor::of(&[4], odd(client, &ones, &special))?;
        let same = |result: Tensor, wanted: [f32; 4]| -> Result<()> {
            let result = result.to_vec::<f32>()?;
            let fits = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
            ensure!(result.iter().zip(&wanted).all(fits), "{result:?} instead of {wanted:?}");
            Ok(())
        };
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        same(client.allreduce("x", &mine, ReduceOp::Sum)?, [nan, inf, -inf, 3.0])?;
        same(client.allreduce("x", &mine, ReduceOp::Max)?, [nan, inf, 1.0, 1.0])?;
        same(client.allreduce("x", &mine, ReduceOp::Min)?, [nan, 1.0, -inf, 1.0])?;
        same(client.allreduce("x", &mine, ReduceOp::Median)?, [nan, 1.0, 1.0, 1.0])?;
        same(client.broadcast("x", &mine, 2)?, special)?;
        ensure!(client.broadcast("x", &mine, 2)?.bytes == Tensor::of(&[4], &special)?.bytes, "the same bits");
        Ok(())
    })?;
    crew.check_next()
}

#[test]
fn a_tensor_that_waits_too_long_is_reported_and_then_ends_the_job() -> Result<()> {
    let crew = Crew::start(Plan::of(&PLACEMENT).stall_ms(200, 10_000), Transfer::Arena)?;
    let outcomes = std::thread::scope(|scope| -> Result<Vec<Result<(), Error>>> {
        let submit = |client: &Client| client.allreduce("waits", &numbers(&[3], |i| i)?, ReduceOp::Sum).map(drop);
        let threads: Vec<_> = crew.clients[..2].iter().map(|client| scope.spawn(move || submit(client))).collect();
        // They have submitted the tensor before: that one exceeds the limit first.
        crew.cluster.sidecars[0].await_status(|status| status["waiting_tensors"][0]["missing"] == json!([2]))?;
        let last = crew.clients[2].barrier("never").map(drop);
        let others = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        Ok(others.chain([last]).collect())
    })?;
    for outcome in outcomes {
        let error = outcome.err().context("nobody completes")?;
        let text = error.to_string();
        ensure!(text.contains("for more than 10.0 seconds, the limit of stall_shutdown"), "{text}");
        ensure!(text.contains("Missing ranks:") && text.contains("2: [allreduce.waits]"), "{text}");
        ensure!(error.failure().is_some_and(|failure| failure.rank.is_some()), "{text}");
    }
    let notices = crew.clients[0].take_notices().join("\n");
    ensure!(notices.contains("One or more tensors were submitted to be reduced"), "{notices}");
    Ok(())
}
