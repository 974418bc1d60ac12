//! Timelines of real sidecars, recorded by clients of the Rust SDK.

#![forbid(unsafe_code)]

use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde::blocking::Client;
use ronde::{Error, ReduceOp, TimelineOptions, Transfer};
use ronde_tests::cluster::Plan;
use ronde_tests::crew::{Crew, DATA_PATHS, numbers};
use ronde_tests::raw::{RawSession, WELL_BEHAVED, ask_for_timeline};
use serde_json::Value;

/// Two sidecars, with two ranks on the second.
const PLACEMENT: [u32; 3] = [0, 1, 1];
/// More than travels eagerly.
const ELEMENTS: u64 = 100_000;

fn options(path: &Path) -> TimelineOptions {
    TimelineOptions { path: path.to_owned(), mark_cycles: true }
}

fn step(client: &Client) -> Result<()> {
    let sum = client.allreduce("test_allreduce", &numbers(&[ELEMENTS], |i| i)?, ReduceOp::Sum)?;
    ensure!(sum.to_vec::<i64>()?.last() == Some(&(3 * (ELEMENTS.cast_signed() - 1))));
    Ok(())
}

fn read(path: &Path) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(path)?;
    serde_json::from_str(&text).with_context(|| format!("{} is not whole: {text}", path.display()))
}

fn names<'a>(events: &'a [Value], phase: &str) -> Vec<&'a str> {
    events.iter().filter(|event| event["ph"] == phase).filter_map(|event| event["name"].as_str()).collect()
}

#[test]
fn rank_0_records_all_ranks_on_all_data_paths() -> Result<()> {
    for path in DATA_PATHS {
        let directory = tempfile::tempdir()?;
        let crew = Crew::start(Plan::of(&PLACEMENT), path)?;
        for file in ["first", "second"] {
            crew.all(|client| {
                let mine = directory.path().join(format!("{file}.{}", client.rank()));
                client.start_timeline(options(&mine))?;
                client.barrier("recording")?;
                step(client)?;
                client.stop_timeline()?;
                ensure!(mine.exists() == (client.rank() == 0), "rank {}", client.rank());
                Ok(())
            })?;
            let events = read(&directory.path().join(format!("{file}.0")))?;
            ensure!(events[0]["args"]["start_time_since_epoch_in_micros"].is_u64(), "{}", events[0]);
            let count = |phase, name| names(&events, phase).iter().filter(|of| **of == name).count();
            ensure!(count("B", "NEGOTIATE_ALLREDUCE") == 1 && count("B", "ALLREDUCE") == 1, "{events:#?}");
            ensure!(count("i", "CYCLE_START") >= 1, "{events:#?}");
            for phase in ["QUEUE", "PERFORM", "READ_INPUT", "REDUCE", "SEND", "RECEIVE", "COPY_RESULT"] {
                ensure!(count("X", phase) >= 1, "no {phase} by {path:?}: {events:#?}");
            }
            for rank in ["0", "1", "2"] {
                ensure!(count("X", rank) >= 1, "rank {rank} was never ready: {events:#?}");
            }
        }
        crew.check_next()?;
    }
    Ok(())
}

#[test]
fn a_file_that_cannot_be_made_is_named_and_the_session_goes_on() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("nowhere/timeline.json");
    let crew = Crew::start(Plan::of(&[0, 0]), Transfer::Arena)?;
    let error = crew.clients[0].start_timeline(options(&path)).err().context("there is no such directory")?;
    ensure!(matches!(error, Error::Timeline { .. }) && error.is_local_to_call(), "{error:?}");
    ensure!(error.to_string().contains(&path.display().to_string()), "{error}");
    crew.clients[1].start_timeline(options(&path))?;
    crew.check_next()
}

#[test]
fn a_session_that_ends_completes_its_timeline() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("timeline.json");
    let mut crew = Crew::start(Plan::of(&[0, 0]), Transfer::Arena)?;
    crew.all(|client| {
        client.start_timeline(options(&path))?;
        client.barrier("recording")?;
        Ok(())
    })?;
    let last = crew.all(|client| Ok(client.allreduce("last", &numbers(&[3], |i| i)?, ReduceOp::Sum)?))?;
    ensure!(last.len() == 2);
    drop(crew.clients.remove(0));
    let events = read(&path)?;
    let depth = |phase| events.iter().filter(|event| event["ph"] == phase).count();
    ensure!(depth("B") >= 4 && depth("B") == depth("E"), "{events:#?}");
    ensure!(events.iter().any(|event| event["args"]["name"] == "allreduce.last"), "{events:#?}");
    ensure!(crew.clients[0].stop_timeline().is_ok(), "nothing was recorded there");
    Ok(())
}

#[test]
fn only_the_session_of_rank_0_may_record() -> Result<()> {
    let cluster = Plan::of(&[0, 0]).sidecars("")?;
    let directory = cluster.sidecars[0].socket_dir()?;
    let claim = |rank| RawSession::claim(directory, &cluster.job, rank, WELL_BEHAVED);
    let ((_first, of_first), (_second, of_second)) = (claim(0)?, claim(1)?);
    ask_for_timeline(directory, &of_first.session_token)?;
    for (token, words) in [
        (&of_second.session_token[..], "rank 0 records for all ranks"),
        (&[7; 16], "no open session"),
        (&[7; 3], "session_token has 3 bytes, not 16"),
    ] {
        let refusal = ask_for_timeline(directory, token).err().context("it was not refused")?;
        ensure!(format!("{refusal:#}").contains(words), "{refusal:#}");
    }
    Ok(())
}

#[test]
fn a_sidecar_that_dies_is_reported_and_its_recorded_events_are_kept() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("timeline.json");
    let crew = Crew::start(Plan::of(&[0, 0]), Transfer::Arena)?;
    crew.clients[0].start_timeline(options(&path))?;
    crew.cluster.sidecars[0].process.signal(Signal::SIGKILL)?;
    let error = crew.clients[0].stop_timeline().err().context("the rest cannot come")?;
    ensure!(error.to_string().contains(&path.display().to_string()), "{error}");
    ensure!(!read(&path)?.is_empty());
    Ok(())
}
