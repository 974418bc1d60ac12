//! A worker that executes a test's commands from standard input: see `ronde_tests::script`.

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use ronde::{Client, Error, Operation, Options, ReduceOp, TensorRef};
use ronde_tests::regression::{FEATURES, Model};
use ronde_tests::script::{Answer, Ask, Wanted, digest};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::task::{AbortHandle, LocalSet};

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("threads can be started");
    let code = LocalSet::new().block_on(&runtime, run());
    // Reading standard input cannot be interrupted.
    runtime.shutdown_background();
    code
}

async fn run() -> ExitCode {
    if let Some(stop) = std::env::var_os("RONDE_TEST_COUNT_UNTIL") {
        return ronde_tests::elastic_worker::count(stop.as_ref()).await;
    }
    let connected = match Options::from_env() {
        Ok(options) => Client::connect(options).await,
        Err(error) => Err(error),
    };
    let client = match connected {
        Ok(client) => Rc::new(client),
        Err(error) => {
            send(&Answer::NotConnected { text: error.to_string() });
            return ExitCode::from(EXIT_NOT_CONNECTED);
        }
    };
    send(&Answer::Connected { rank: client.rank(), size: client.size() });
    let watching = tokio::task::spawn_local(watch(Rc::clone(&client)));
    if std::env::var_os("RONDE_TEST_ENDLESS").is_some() {
        return endless(&client).await;
    }
    let waiting: Waiting = Rc::default();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line).expect("tests send what they define") {
            Ask::Submit { id, operation } => submit(&client, &waiting, id, &operation).await,
            Ask::Abandon { id } => drop(waiting.borrow_mut().remove(&id).map(|task| task.abort())),
            Ask::Train { steps, identity } => train(&client, steps, identity).await,
            Ask::Close => break,
        }
    }
    waiting.borrow_mut().drain().for_each(|(_, task)| task.abort());
    watching.abort();
    // Both only end: an aborted task drops its client in its next turn.
    drop(watching.await);
    tokio::task::yield_now().await;
    if let Some(client) = Rc::into_inner(client) {
        // Wait until the shutdown message is sent: a process that exits immediately looks like one that died.
        client.close().await;
    }
    ExitCode::SUCCESS
}

type Waiting = Rc<RefCell<HashMap<u64, AbortHandle>>>;

async fn submit(client: &Client, waiting: &Waiting, id: u64, wanted: &Wanted) {
    let Wanted { name, collective, dtype, shape, fill } = wanted;
    let elements = shape.iter().product::<u64>();
    let bytes =
        fill.bytes(client.rank(), usize::try_from(elements).expect("test tensors are small") * dtype.size_bytes());
    let tensor = TensorRef { dtype: *dtype, shape, bytes: &bytes };
    let tensor = collective.has_input(ronde::Rank(client.rank())).then_some(tensor);
    let operation = Operation::new(name.as_deref(), collective.clone(), tensor);
    match client.submit(&operation).await {
        Err(error) => send(&failed(id, &error)),
        Ok(handle) => {
            send(&Answer::Submitted { id });
            let task = tokio::task::spawn_local(async move {
                send(&match handle.wait().await {
                    Ok(output) => {
                        let (bytes, shape) = output.tensor.map_or((Vec::new(), vec![0]), |t| (t.bytes, t.shape));
                        Answer::Done { id, digest: digest(&bytes), shape }
                    }
                    Err(error) => failed(id, &error),
                });
            });
            waiting.borrow_mut().insert(id, task.abort_handle());
        }
    }
}

async fn train(client: &Client, steps: u64, identity: bool) {
    let mut model = Model::default();
    for step in 0..steps {
        let gradient = model.gradient(step, client.rank()..client.rank() + 1);
        let shape = [FEATURES as u64];
        let tensor = TensorRef::of(&shape, &gradient).expect("the shape is the gradient's");
        let averaged =
            client.allreduce("gradient", tensor, ReduceOp::Average).await.expect("nobody fails while training");
        let averaged = averaged.to_vec::<f32>().expect("what went in as f32 comes out as f32");
        model.step(if identity { &gradient } else { &averaged });
    }
    send(&Answer::Trained { weights: model.weights.to_vec() });
}

/// Reduces one tensor after the other until that fails, for tests in which the launcher owns standard input.
async fn endless(client: &Client) -> ExitCode {
    let shape = [1_u64 << 20];
    let contribution = vec![1.0_f32; 1 << 20];
    for id in 0.. {
        let tensor = TensorRef::of(&shape, &contribution).expect("the shape is the contribution's");
        match client.allreduce("endless", tensor, ReduceOp::Average).await {
            Ok(result) => send(&Answer::Done { id, shape: result.shape, digest: digest(&result.bytes) }),
            Err(error) => {
                send(&failed(id, &error));
                break;
            }
        }
    }
    ExitCode::FAILURE
}

/// Reports notices and the end of the session.
async fn watch(client: Rc<Client>) {
    let mut reported = false;
    loop {
        client.take_notices().into_iter().for_each(|text| send(&Answer::Notice { text }));
        if let Some(change) = client.membership_change() {
            let (membership, added, removed) = (change.membership, change.added, change.removed);
            send(&Answer::MembershipChange { membership, added, removed });
        }
        if let Some(error) = client.over().filter(|_| !reported) {
            reported = true;
            send(&Answer::Over { text: error.to_string() });
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

fn failed(id: u64, error: &Error) -> Answer {
    let failure = error.failure();
    Answer::Failed {
        id,
        cause: failure.map(|failure| failure.cause),
        rank: failure.and_then(|failure| failure.rank).map(|rank| rank.0),
        sidecar: failure.and_then(|failure| failure.sidecar).map(|sidecar| sidecar.0),
        text: error.to_string(),
    }
}

fn send(answer: &Answer) {
    println!("{}", serde_json::to_string(answer).expect("answers are plain data"));
}

const EXIT_NOT_CONNECTED: u8 = 3;
const WATCH_INTERVAL: Duration = Duration::from_millis(5);
