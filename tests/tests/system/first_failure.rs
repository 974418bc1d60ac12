//! The failure that the other ranks receive when a rank is gone and no launcher watches it.
//! `sdk-python/tests/test_first_failure.py` tests the rest: with a launcher, and with places in a program.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{PATIENCE, Plan, sum};
use ronde_tests::script::Fill;
use ronde_wire::Cause;

use crate::WORKER;

#[test]
fn without_a_launcher_the_first_failure_has_the_last_call_and_marks_the_rest_unknown() -> Result<()> {
    let mut cluster = Plan::of(&[0, 0, 1]).start(WORKER)?;
    let fill = Fill::Whole { seed: 1 };
    let submitted = Instant::now();
    cluster.workers[2].submit(sum("only here", 100, fill))?;
    let pending = [0, 1].map(|rank| (rank, cluster.workers[rank].submit(sum("elsewhere", 100, fill))));
    cluster.workers[2].process.signal(Signal::SIGKILL)?;
    let mut texts = Vec::new();
    for (rank, id) in pending {
        let (_, failed) = cluster.workers[rank].failure(id?, PATIENCE)?;
        ensure!(failed.cause == Some(Cause::RankLost) && failed.rank == Some(2), "{failed:?}");
        texts.push(failed.text);
    }
    println!("{}", texts[0]);
    ensure!(texts[0] == texts[1], "all ranks receive the same text: {texts:?}");
    let lines: Vec<&str> = texts[0].lines().collect();
    let first = lines.first().context("a text has a line")?;
    ensure!(first.starts_with("rank 2 on sidecar 1 is gone: ") && first.contains("no launcher watches it"), "{first}");
    let call = lines.get(1).and_then(|line| line.strip_prefix("Its last call was allreduce 'only here', "));
    let age = call.and_then(|call| call.strip_suffix(" seconds before.")).with_context(|| format!("{lines:?}"))?;
    let (age, most) = (age.parse::<f64>()?, submitted.elapsed().as_secs_f64());
    ensure!(age <= most + ROUNDING, "{lines:?}: it was called {most} seconds ago");
    ensure!(lines.len() == 2, "{lines:?}");
    Ok(())
}

/// The text has tenths of a second.
const ROUNDING: f64 = 0.1;
