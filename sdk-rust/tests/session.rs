//! Tests the client against a fake sidecar over real sockets: its messages, its results, and that every waiter gets an answer.

mod buffers;
mod fake;
mod names;
mod plugins;

use std::process::Command;
use std::time::Duration;

use fake::{Fake, Settings};
use ronde::blocking::{self, Progress};
use ronde::{
    Blame, Cause, Client, DType, Error, Operation, Options, ReduceOp, ReduceOptions, Ring, Tensor, TensorRef, Transfer,
};

/// How tensors and messages reach the sidecar.
type DataPath = (Transfer, Ring);

/// Tensors in shared memory, messages over a ring.
const OVER_RING: DataPath = (Transfer::Arena, Ring::Auto);
/// Tensors in shared memory, messages on the stream.
const OVER_STREAM: DataPath = (Transfer::Arena, Ring::Off);
/// All paths, which pass the same tests.
const DATA_PATHS: [DataPath; 3] = [OVER_RING, OVER_STREAM, (Transfer::Inline, Ring::Auto)];
/// The paths with shared memory.
const SHARED_MEMORY_PATHS: [DataPath; 2] = [OVER_RING, OVER_STREAM];

fn options(fake: &Fake, path: DataPath) -> Options {
    let mut options = fake.options();
    (options.transfer, options.ring) = path;
    options
}

fn connect(fake: &Fake, path: DataPath) -> blocking::Client {
    let client = blocking::Client::connect(options(fake, path)).expect("a session");
    assert_eq!(client.submission_path(), if path == OVER_RING { "ring" } else { "grpc" });
    client
}

fn numbers(count: u64) -> Vec<f32> {
    (0..count).map(|i| (i % 1000) as f32).collect()
}

#[test]
fn tensors_come_back_as_they_were_sent() {
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        assert_eq!((client.rank(), client.size()), (0, 1));
        for count in [0, 1, 3, 1_000, 250_000] {
            let values = numbers(count);
            let shape = [count];
            let tensor = TensorRef::of(&shape, &values).expect("a tensor");
            let sum = client.allreduce("x", tensor, ReduceOp::Sum);
            assert_eq!(sum.expect("a result").to_vec::<f32>().expect("floats"), values);
            let all = client.allgather(None, tensor).expect("a result");
            assert_eq!(all.shape, vec![count]);
            assert_eq!(client.broadcast(None, tensor, 0).expect("a result").bytes, tensor.bytes);
        }
        client.barrier(None).expect("a barrier");
        let names: Vec<String> =
            fake.received().into_iter().filter(|received| received.starts_with("submit")).collect();
        assert_eq!(
            names[0..4],
            ["submit allreduce.x", "submit allgather.noname.0", "submit broadcast.noname.0", "submit allreduce.x"]
        );
        assert_eq!(names.last().map(String::as_str), Some("submit barrier.noname.0"));
    }
}

#[test]
fn every_result_in_shared_memory_is_released_once() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        for _ in 0..5 {
            client.allgather(None, TensorRef::of(&[2], &[1_i64, 2]).expect("a tensor")).expect("a result");
        }
        drop(client);
        fake.wait_for("closed");
        let count = |word: &str| fake.received().iter().filter(|received| *received == word).count();
        assert_eq!(count("release"), 5);
        assert_eq!(count("goodbye"), 1);
    }
}

#[test]
fn a_connection_for_segments_that_the_sidecar_closed_is_replaced() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { exchanges_max: 1, ..Settings::default() });
        let client = connect(&fake, path);
        let (values, shape) = (numbers(5 << 20), [5 << 20]);
        // Three exchanges: a segment for the buffer, one for the input, and the one with the result.
        let kept = client.buffer(DType::F32, &shape).expect("memory");
        let all = client.allgather(None, TensorRef::of(&shape, &values).expect("a tensor")).expect("a result");
        assert_eq!(all.to_vec::<f32>().expect("floats"), values);
        drop(kept);
    }
}

#[test]
fn completions_reach_their_waiters_in_any_order() {
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let handles: Vec<_> = (0..40_u32)
            .map(|i| {
                let bytes = i.to_le_bytes();
                let name = format!("hold.{i}");
                let tensor = TensorRef { dtype: ronde::DType::I32, shape: &[1], bytes: &bytes };
                client.allgather_async(name.as_str(), tensor).expect("submitted")
            })
            .collect();
        assert!(handles.iter().all(|handle| !handle.poll()));
        client.barrier("flush").expect("a barrier");
        for (i, handle) in (0_u32..).zip(handles) {
            assert!(handle.poll());
            assert_eq!(handle.wait().expect("a result").bytes, i.to_le_bytes());
        }
    }
}

#[test]
fn a_result_is_read_into_the_callers_memory() {
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let bytes = [1_u8, 2, 3, 4];
        let tensor = TensorRef { dtype: ronde::DType::U8, shape: &[2, 2], bytes: &bytes };
        let mut handle = client.allgather_async(None, tensor).expect("submitted");
        while handle.wait_timeout(Duration::from_secs(1)).expect("alive") == Progress::NotReady {}
        assert_eq!(handle.shape().expect("a shape").dimensions(), [2, 2]);
        let mut small = [0; 3];
        let refused = handle.read_into(&mut small).expect_err("too small");
        assert!(refused.to_string().contains("has 4 bytes, but the target has 3"), "{refused}");
        let mut target = [0; 4];
        handle.read_into(&mut target).expect("fits");
        assert_eq!(target, bytes);
        assert!(handle.read_into(&mut target).is_err(), "read twice");
        assert!(handle.poll());
        assert_eq!(handle.wait_timeout(Duration::ZERO).expect("alive"), Progress::Ready, "nothing more will come");
        let error = handle.wait().expect_err("read already");
        assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("read already"), "{error}");
    }
}

#[test]
fn a_result_in_shared_memory_is_valid_until_the_sessions_stream_ends() {
    for path in SHARED_MEMORY_PATHS {
        let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let mut fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let finished = |client: &blocking::Client| {
            let mut handle = client.allgather_async(None, &tensor).expect("submitted");
            while handle.wait_timeout(Duration::from_secs(1)).expect("alive") == Progress::NotReady {}
            handle
        };
        let (before, after) = (finished(&client), finished(&client));
        client.allgather("end", &tensor).expect_err("the epoch ends");
        assert_eq!(before.wait().expect("the stream goes on"), tensor);
        drop(client);
        assert!(matches!(after.wait(), Err(Error::Closed)), "its memory may be another's");

        let client = connect(&fake, path);
        let (after, never) = (finished(&client), Operation::allgather(Some("never"), &tensor));
        let never = client.submit_from(&never).expect("submitted");
        fake.die();
        never.wait().expect_err("gone");
        let error = after.wait().expect_err("its memory may be another's");
        assert_eq!(error.failure().map(|failure| failure.cause), Some(Cause::SidecarLost));
    }
}

#[test]
fn results_received_in_messages_outlive_the_session() {
    let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
    let fake = Fake::start(Settings::default());
    let client = connect(&fake, (Transfer::Inline, Ring::Auto));
    let mut handle = client.allgather_async(None, &tensor).expect("submitted");
    while handle.wait_timeout(Duration::from_secs(1)).expect("alive") == Progress::NotReady {}
    drop(client);
    assert_eq!(handle.wait().expect("private bytes"), tensor);
}

#[test]
fn a_failed_operation_names_the_failed_rank_and_the_session_goes_on() {
    for path in DATA_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let tensor = Tensor::of(&[3], &[1.0_f32; 3]).expect("a tensor");
        let error = client.allreduce("mismatch", &tensor, ReduceOptions::default()).expect_err("mismatch");
        let failure = error.failure().expect("a failure of all ranks");
        assert_eq!((failure.cause, failure.rank), (Cause::Mismatch, Some(ronde::Rank(1))));
        assert_eq!(failure.tensor.as_ref().map(ToString::to_string), Some("allreduce.mismatch".to_owned()));
        assert_eq!((error.blame(), error.is_local_to_call()), (Blame::Caller, true));
        assert_eq!(client.allreduce("fine", &tensor, ReduceOptions::default()).expect("a result"), tensor);
    }
}

#[test]
fn the_end_of_the_epoch_reaches_current_and_later_waiters() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let waiting = client.submit_from(&Operation::allgather(Some("never"), &tensor));
        let waiting = waiting.expect("submitted");
        for error in [
            client.allgather("end", &tensor).expect_err("ended"),
            waiting.wait().expect_err("ended"),
            client.allgather("later", &tensor).expect_err("ended"),
            client.over().expect("over"),
        ] {
            let failure = error.failure().unwrap_or_else(|| panic!("{error}"));
            assert_eq!((failure.cause, failure.rank), (Cause::RankLost, Some(ronde::Rank(2))));
            assert_eq!(failure.reason, "rank 2 was killed");
            assert_eq!((error.blame(), error.is_local_to_call()), (Blame::Peer, false));
        }
        drop(client);
        let again = connect(&fake, path);
        assert_eq!(again.allgather("later", &tensor).expect("a new epoch"), tensor);
    }
}

#[test]
fn the_death_of_the_sidecar_reaches_every_waiter() {
    for path in SHARED_MEMORY_PATHS {
        let mut fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let operation = Operation::allgather(Some("never"), &tensor);
        let waiting = client.submit_from(&operation).expect("submitted");
        fake.die();
        let error = waiting.wait().expect_err("gone");
        assert_eq!(error.failure().map(|failure| failure.cause), Some(Cause::SidecarLost));
        let wanted = format!("the sidecar at {} is gone: ", fake.directory.path().display());
        assert!(error.to_string().starts_with(&wanted), "{error}");
        let later = client.allgather(None, &tensor).expect_err("gone");
        assert_eq!(later.failure().map(|failure| failure.cause), Some(Cause::SidecarLost));
    }
}

#[test]
fn a_sidecar_that_stops_answering_ends_the_session() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { peer_timeout_ms: 2_000, ..Settings::default() });
        let client = connect(&fake, path);
        fake.fall_silent();
        let error = client.barrier("never").expect_err("silent");
        assert_eq!(error.failure().map(|failure| failure.cause), Some(Cause::SidecarLost));
        assert!(error.to_string().contains("silent for 2.0 s"), "{error}");
    }
}

#[test]
fn a_dropped_handle_withdraws_and_a_finished_one_does_not() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let submit = |name| client.submit_from(&Operation::allgather(Some(name), &tensor));
        let finished = submit("fine").expect("submitted");
        client.barrier(None).expect("a barrier");
        assert!(finished.poll());
        drop(finished);
        fake.wait_for("release");
        assert!(!fake.received().contains(&"withdraw".to_owned()));
        drop(submit("never").expect("submitted"));
        fake.wait_for("withdraw");
    }
}

#[test]
fn the_callers_own_deadline_withdraws_the_operation() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let mut options = options(&fake, path);
        options.operation_timeout = Some(Duration::from_millis(20));
        let client = blocking::Client::connect(options).expect("a session");
        let error = client.barrier("never").expect_err("late");
        assert_eq!(error.failure().map(|failure| failure.cause), Some(Cause::TimedOut));
        assert!(error.to_string().contains("barrier.never"), "{error}");
        fake.wait_for("withdraw");
    }
}

#[test]
fn a_join_has_no_deadline_and_is_not_withdrawn() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { never: "join", ..Settings::default() });
        let mut options = options(&fake, path);
        options.operation_timeout = Some(Duration::from_millis(10));
        let client = blocking::Client::connect(options).expect("a session");
        let mut join = client.join_async().expect("submitted");
        for _ in 0..3 {
            assert_eq!(join.wait_timeout(Duration::from_millis(20)).expect("alive"), Progress::NotReady);
        }
        drop(join);
        // The join is not withdrawn, and operations after it are submitted.
        let _next = client.barrier_async("after it").expect("the session goes on");
        fake.wait_for("submit barrier.after it");
        assert!(!fake.received().contains(&"withdraw".to_owned()));
    }
}

#[test]
fn limits_are_errors_at_once() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { arena_bytes_max: 1 << 20, pending_max: 2, ..Settings::default() });
        let client = connect(&fake, path);
        let large = vec![0_u8; 2 << 20];
        let tensor = TensorRef::of(&[2 << 20], &large).expect("a tensor");
        let error = client.allgather(None, tensor).expect_err("too large");
        assert!(matches!(error, Error::Limit { .. }) && error.to_string().contains("arena_bytes_max"), "{error}");

        let small = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let submit = || client.submit_from(&Operation::allgather(None, &small));
        client.allgather("fine", &small).expect("the session goes on");
        let operation = Operation::allgather(Some("never"), &small);
        let _held: Vec<_> = (0..2).map(|_| client.submit_from(&operation).expect("room")).collect();
        let error = submit().expect_err("too many");
        assert!(
            matches!(error, Error::Limit { .. }) && error.to_string().contains("2 requests are pending"),
            "{error}"
        );

        let inline = connect(&fake, (Transfer::Inline, Ring::Auto));
        let error = inline.allgather(None, tensor).expect_err("too large");
        assert!(matches!(error, Error::Limit { .. }) && error.to_string().contains("inline_bytes_max"), "{error}");
    }
}

#[test]
fn an_operation_rejected_by_a_limit_is_reported_to_the_other_ranks_and_takes_a_number() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { arena_bytes_max: 1 << 20, pending_max: 2, ..Settings::default() });
        let client = connect(&fake, path);
        let large = vec![0_u8; 2 << 20];
        let tensor = TensorRef::of(&[2 << 20], &large).expect("a tensor");
        client.allgather(None, tensor).expect_err("too large for the arena");
        fake.wait_for("abstain 0 allgather.noname.0");
        let small = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let second = client.allgather_async(None, &small).expect("submitted");
        assert_eq!(second.name().expect("this process"), "allgather.noname.1");
        second.wait().expect("a result");
        let never = Operation::allgather("never", &small);
        let held: Vec<_> = (0..2).map(|_| client.submit_from(&never).expect("room")).collect();
        client.allgather(("third", ronde::SetId(4)), &small).expect_err("too many");
        fake.wait_for("abstain 4 allgather.third");
        drop(held);
        drop(client);

        // The rest of a rejected group is reported, and its submitted operations are withdrawn.
        let client = connect(&fake, path);
        let small = TensorRef::from(&small);
        client.grouped_allgather("never", &[small, small, small]).expect_err("three are too many");
        fake.wait_for("submit grouped_allgather.never_2of3");
        fake.wait_for("abstain 0 grouped_allgather.never_3of3 of 3 of grouped_allgather.never");
        fake.wait_for("withdraw");
    }
}

#[test]
fn wrong_arguments_never_reach_the_sidecar() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let bytes = [0_u8; 7];
        let wrong_length = TensorRef { dtype: ronde::DType::F32, shape: &[2], bytes: &bytes };
        let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let long = "x".repeat(600);
        let scalar = TensorRef { dtype: ronde::DType::U8, shape: &[], bytes: &[1] };
        for (error, words) in [
            (client.reduce_scatter(None, scalar, ReduceOp::Sum).expect_err("scalar"), "does not support scalar"),
            (client.allgather(None, scalar).expect_err("scalar"), "does not support scalar"),
            (
                client.alltoall(None, &tensor, Some(&[1, 0])).expect_err("splits"),
                "2 splits, but process set 0 has 1 ranks",
            ),
            (client.alltoall(None, &tensor, Some(&[2])).expect_err("splits"), "do not add up to the 1 rows"),
            (client.broadcast(None, &tensor, 1).expect_err("root"), "invalid root rank 1"),
            (client.scatter(None, None, 0).expect_err("no tensor"), "SCATTER needs a tensor on this rank"),
            (client.send(&tensor, 0, 0).expect_err("itself"), "no messages for itself"),
            (client.recv(4, 0).expect_err("no such rank"), "rank 4, which is not in"),
            (client.grouped_allgather(None, &[]).expect_err("empty"), "at least one tensor"),
        ] {
            assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains(words), "{error}");
        }
        for error in [
            client.allgather(None, wrong_length).expect_err("7 bytes"),
            client.allgather(long.as_str(), &tensor).expect_err("name"),
            client.allreduce(None, &tensor, ReduceOptions { prescale: 0.0, ..Default::default() }).expect_err("scale"),
            client
                .allreduce(None, &tensor, ReduceOptions { postscale: f64::NAN, ..Default::default() })
                .expect_err("scale"),
        ] {
            assert!(matches!(error, Error::Argument { .. }), "{error}");
        }
        assert!(TensorRef::of(&[3], &[1.0_f32]).is_err());
        assert!(!fake.received().iter().any(|received| received.starts_with("submit")));
    }
}

#[test]
fn a_result_of_the_wrong_length_is_a_protocol_error_of_the_sidecar() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let client = connect(&fake, path);
        let tensor = Tensor::of(&[2], &[1_i32, 2]).expect("a tensor");
        let error = client.allgather("short", &tensor).expect_err("one byte");
        assert!(matches!(error, Error::Protocol { .. }) && error.blame() == Blame::Peer, "{error}");
    }
}

#[test]
fn a_wrong_token_or_none_is_refused_with_the_reason() {
    let fake = Fake::start(Settings::default());
    let mut options = fake.options();
    options.token_file = fake.directory.path().join("other.token");
    let error = blocking::Client::connect(options.clone()).expect_err("no file");
    assert!(matches!(error, Error::Token { .. }), "{error}");
    std::fs::write(&options.token_file, [1; 5]).expect("a file");
    let error = blocking::Client::connect(options.clone()).expect_err("5 bytes");
    assert!(error.to_string().contains("5 bytes, not 32"), "{error}");
    std::fs::write(&options.token_file, [1; 32]).expect("a file");
    let error = blocking::Client::connect(options).expect_err("wrong token");
    assert!(matches!(error, Error::Claim { rank: 0, .. }), "{error}");
    assert!(error.to_string().contains("does not belong to rank 0"), "{error}");
}

#[test]
fn a_sidecar_of_another_user_gets_nothing() {
    let fake = Fake::start(Settings::default());
    let mut options = fake.options();
    let own = std::fs::metadata(fake.directory.path()).map(|found| std::os::unix::fs::MetadataExt::uid(&found));
    let own = own.expect("a directory");
    options.sidecar_uid = Some(own + 1);
    let error = blocking::Client::connect(options.clone()).expect_err("another user's");
    assert!(
        matches!(error, Error::SidecarUser { found, accepted, .. } if (found, accepted) == (own, own + 1)),
        "{error}"
    );
    assert!(fake.received().is_empty(), "{:?}", fake.received());
    options.sidecar_uid = Some(own);
    let client = blocking::Client::connect(options).expect("one's own");
    let all = client.allgather(None, TensorRef::of(&[2], &[1_i64, 2]).expect("a tensor")).expect("a result");
    assert_eq!(all.shape, [2]);
}

#[test]
fn the_error_names_the_missing_rank_when_the_job_does_not_start() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { begins: false, ..Settings::default() });
        let mut options = options(&fake, path);
        let notice = "waiting for rank 3 of sidecar 1";
        for milliseconds in [500, 2_000, 8_000, 30_000] {
            options.start_timeout = Duration::from_millis(milliseconds);
            let error = blocking::Client::connect(options.clone()).expect_err("not started");
            assert!(matches!(error, Error::Start { .. }), "{error}");
            if error.to_string().contains(notice) {
                break;
            }
            // On a busy machine, the sidecar's notice takes longer.
            assert!(milliseconds < 30_000, "{error}");
        }
        fake.wait_for("goodbye");

        options.socket_dir = fake.directory.path().join("nowhere");
        options.connect_timeout = Duration::from_millis(20);
        let error = blocking::Client::connect(options).expect_err("no sidecar");
        assert!(matches!(error, Error::Connect { .. }), "{error}");
        assert!(error.to_string().contains("RONDE_SOCKET"), "{error}");
    }
}

#[test]
fn giving_up_while_connecting_ends_the_session_in_order() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings { begins: false, ..Settings::default() });
        let mut connecting = blocking::Connecting::start(options(&fake, path)).expect("a thread");
        fake.wait_for("heartbeat");
        assert!(connecting.wait_timeout(Duration::ZERO).expect("still waiting").is_none());
        drop(connecting);
        fake.wait_for("goodbye");
        fake.wait_for("closed");
    }
}

#[test]
fn heartbeats_go_on_while_the_program_does_nothing() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let _client = connect(&fake, path);
        fake.wait_until("5 heartbeats", |received| received.iter().filter(|word| *word == "heartbeat").count() >= 5);
    }
}

#[tokio::test]
async fn the_asynchronous_client_overlaps_operations() {
    for path in DATA_PATHS {
        let fake = tokio::task::spawn_blocking(|| Fake::start(Settings::default())).await.expect("started");
        let mut options = fake.options();
        (options.transfer, options.ring) = path;
        let client = Client::connect(options).await.expect("a session");
        let values = numbers(200_000);
        let shape = [200_000];
        let tensor = TensorRef::of(&shape, &values).expect("a tensor");
        let held = client.allreduce_async("hold", tensor, ReduceOptions::default()).await.expect("submitted");
        let other = client.allgather("other", tensor).await.expect("a result");
        assert_eq!(other.bytes, tensor.bytes);
        assert!(!held.poll());
        client.barrier("flush").await.expect("a barrier");
        let mut target = vec![0; tensor.bytes.len()];
        assert_eq!(held.wait_into(&mut target).await.expect("a result").dimensions(), shape);
        assert_eq!(target, tensor.bytes);
        let pending = client.allgather_async("never", tensor).await.expect("submitted");
        client.close().await;
        assert!(matches!(pending.wait().await, Err(Error::Closed)));
        tokio::task::spawn_blocking(move || {
            fake.wait_for("goodbye");
            drop(fake);
        })
        .await
        .expect("ended");
    }
}

#[tokio::test]
async fn unnamed_operations_are_numbered_in_the_order_of_their_calls() {
    let fake = tokio::task::spawn_blocking(|| Fake::start(Settings::default())).await.expect("started");
    let client = Client::connect(fake.options()).await.expect("a session");
    let small = Tensor::of(&[1], &[1_i32]).expect("a tensor");
    client.allgather("first", &small).await.expect("the arena has a segment");
    let large = vec![0_u8; 20 << 20];
    let large = TensorRef::of(&[20 << 20], &large).expect("a tensor");
    // Only the first one has to wait until the arena has grown.
    let (first, second) = tokio::join!(client.allgather_async(None, large), client.allgather_async(None, &small));
    assert_eq!(first.expect("submitted").name().expect("this process"), "allgather.noname.0");
    assert_eq!(second.expect("submitted").name().expect("this process"), "allgather.noname.1");
    client.close().await;
    tokio::task::spawn_blocking(move || drop(fake)).await.expect("ended");
}

#[test]
fn the_end_of_the_runtime_reaches_every_waiter() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
        let client = runtime.block_on(Client::connect(options(&fake, path))).expect("a session");
        let waiting = runtime.block_on(client.allgather_async("never", &tensor)).expect("submitted");
        drop(runtime);
        assert!(waiting.poll());
        assert!(matches!(client.over(), Some(Error::Closed)));
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        assert!(matches!(other.block_on(waiting.wait()), Err(Error::Closed)));
        assert!(matches!(other.block_on(client.allgather("later", &tensor)), Err(Error::Closed)));
    }
}

// Forking needs unsafe code, which this crate forbids: ronde-shm forks in its own tests, and the Python SDK in its.
#[test]
fn the_end_of_the_process_ends_its_session() {
    for path in SHARED_MEMORY_PATHS {
        let fake = Fake::start(Settings::default());
        let me = std::env::current_exe().expect("this test");
        let mut child = Command::new(me)
            .args(["--exact", "worker_that_is_killed", "--ignored", "--nocapture"])
            .env("RONDE_TEST_SOCKET", fake.directory.path())
            .env("RONDE_TEST_RING", if path == OVER_RING { "1" } else { "0" })
            .spawn()
            .expect("a process");
        fake.wait_for("submit allgather.never");
        child.kill().expect("killed");
        child.wait().expect("ended");
        fake.wait_for("closed");
        assert!(!fake.received().contains(&"goodbye".to_owned()));
    }
}

#[test]
#[ignore = "a helper of the_end_of_the_process_ends_its_session"]
fn worker_that_is_killed() {
    let Some(directory) = std::env::var_os("RONDE_TEST_SOCKET") else { return };
    let job = ronde::JobName::new("test").expect("a name");
    let mut options = Options::new(directory, job, fake::RANK);
    options.ring = if std::env::var("RONDE_TEST_RING").as_deref() == Ok("1") { Ring::Auto } else { Ring::Off };
    let client = blocking::Client::connect(options).expect("a session");
    let tensor = Tensor::of(&[1], &[1_i32]).expect("a tensor");
    let _ = client.allgather("never", &tensor);
}
