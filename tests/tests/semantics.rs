//! What a job promises to whoever trains with it: right results, the same bits everywhere, disagreements told to all.

use anyhow::Result;
use ronde_tests::cluster::Plan;

const WORKER: &str = env!("CARGO_BIN_EXE_ronde-test-worker");

#[test]
fn two_sidecars_sum() -> Result<()> {
    let mut cluster = Plan::of(&[0, 1]).start(WORKER)?;
    cluster.check_sum("first", 1_000)?;
    cluster.check_sum("second", 1_000_000)
}
