//! A worker of an elastic job: it counts steps together with the others, and goes on when the membership changes.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use ronde::{Client, Error, Options, ReduceOp, TensorRef};

/// How a session ended.
enum Session {
    /// All ranks saw that the job is to end.
    Finished,
    /// The membership changes.
    Changed,
}

/// Counts until the file `stop` is there. Prints a line whenever it gets a rank, and one at the end. The worker whose number
/// is RONDE_TEST_STAYS_AWAY does not return after its first session, and that of RONDE_TEST_HANGS hangs in one step.
pub async fn count(stop: &Path) -> ExitCode {
    let mut step = 0_i64;
    loop {
        let client = match connect().await {
            Ok(client) => client,
            Err(error) => {
                eprintln!("not connected: {error}");
                return ExitCode::from(EXIT_NOT_CONNECTED);
            }
        };
        let outcome = session(&client, stop, &mut step).await;
        let ranks = format!("rank={} size={} step={step}", client.rank(), client.size());
        client.close().await;
        match outcome {
            Ok(Session::Finished) => {
                println!("finished {ranks}");
                return ExitCode::SUCCESS;
            }
            Ok(Session::Changed) => println!("interrupted {ranks}"),
            Err(error) => println!("failed {ranks}: {error}"),
        }
        if std::env::var("RONDE_TEST_STAYS_AWAY") == std::env::var("RONDE_WORKER") {
            println!("stays away {ranks}");
            std::future::pending::<()>().await;
        }
    }
}

async fn connect() -> Result<Client, Error> {
    Client::connect(Options::from_env()?).await
}

/// Takes the most advanced worker's step, then counts. Every rank leaves in the same step.
async fn session(client: &Client, stop: &Path, step: &mut i64) -> Result<Session, Error> {
    let furthest = reduce(client, "start", &[*step], ReduceOp::Max).await?;
    *step = furthest[0];
    println!("connected rank={} size={} step={step}", client.rank(), client.size());
    let mut changed = false;
    loop {
        changed |= client.membership_change().is_some();
        if std::env::var("RONDE_TEST_HANGS") == std::env::var("RONDE_WORKER") && *step == STEP_OF_HANG {
            println!("hangs rank={} step={step}", client.rank());
            std::future::pending::<()>().await;
        }
        let own = [1, *step, i64::from(changed), i64::from(stop.exists())];
        let sums = reduce(client, "step", &own, ReduceOp::Sum).await?;
        let size = i64::from(client.size());
        assert!(sums[0] == size && sums[1] == *step * size, "{sums:?} of {size} ranks in step {step}");
        *step += 1;
        if sums[3] > 0 {
            return Ok(Session::Finished);
        }
        if sums[2] > 0 {
            return Ok(Session::Changed);
        }
        tokio::time::sleep(STEP).await;
    }
}

async fn reduce(client: &Client, name: &str, values: &[i64], op: ReduceOp) -> Result<Vec<i64>, Error> {
    let shape = [values.len() as u64];
    let tensor = TensorRef::of(&shape, values).expect("the shape is that of the values");
    let reduced = client.allreduce(name, tensor, op).await?;
    Ok(reduced.to_vec::<i64>().expect("what went in as i64 comes out as i64"))
}

const STEP_OF_HANG: i64 = 40;
const EXIT_NOT_CONNECTED: u8 = 3;
const STEP: Duration = Duration::from_millis(5);
