//! Random programs of collectives on random sets, each on a real job and by a sequential interpreter.
//!
//! These are a few of them; `make differential-rust SECONDS=n` runs more for that time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ronde::{ReduceOp, Ring, Transfer};
use ronde_tests::crew::{DATA_PATHS, DataPath};
use ronde_tests::programs::{Drawing, Grouping, Job, Kind, Program};

/// Ranks on one to four sidecars.
const PLACEMENTS: [&[u32]; 5] = [&[0, 0, 0], &[0, 1], &[0, 0, 1, 2], &[0, 1, 1, 2, 2], &[0, 1, 2, 2, 3, 3]];
/// Programs of each job here.
const PROGRAMS: u64 = 6;

#[test]
fn random_programs_match_the_sequential_interpreter() -> Result<()> {
    let seconds = std::env::var(SECONDS).ok();
    let seconds = seconds.map(|text| text.parse().with_context(|| format!("{SECONDS} is a number, not {text}")));
    match seconds.transpose()? {
        Some(seconds) => for_a_while(Duration::from_secs(seconds)),
        None => (0..).zip(PLACEMENTS).try_for_each(|(number, placement)| {
            run(
                placement,
                DATA_PATHS[number % DATA_PATHS.len()],
                (number as u64 * PROGRAMS)..(number as u64 + 1) * PROGRAMS,
            )
        }),
    }
}

/// All placements with all data paths in turn, under seeds that no short run uses.
fn for_a_while(time: Duration) -> Result<()> {
    let (began, mut seed) = (Instant::now(), FIRST_LONG);
    while began.elapsed() < time {
        for (number, placement) in PLACEMENTS.into_iter().enumerate() {
            let turn = usize::try_from(seed / 20).unwrap_or_default();
            let path = DATA_PATHS[(turn + number) % DATA_PATHS.len()];
            run(placement, path, seed..seed + 20)?;
            seed += 20;
            eprintln!("{} programs in {} seconds", seed - FIRST_LONG, began.elapsed().as_secs());
            if began.elapsed() >= time {
                break;
            }
        }
    }
    Ok(())
}

fn run(placement: &[u32], path: DataPath, seeds: std::ops::Range<u64>) -> Result<()> {
    let mut job = Job::new(placement, path);
    let ranks = u32::try_from(placement.len())?;
    seeds.into_iter().try_for_each(|seed| job.check(&Drawing::program(seed, ranks)))
}

/// The comparison detects one wrong element, and the shortened program is the step that has it.
#[test]
fn a_wrong_result_is_found_and_the_program_made_short() -> Result<()> {
    let mut program = Drawing::program(3, 3);
    program.phases = (0..20)
        .map(|seed| Drawing::program(seed, 3))
        .filter(|program| program.sets.is_empty())
        .flat_map(|program| program.phases)
        .take(2)
        .collect();
    program.sets.clear();
    let number = |program: &Program| program.phases.iter().map(Vec::len).sum::<usize>();
    ensure!(number(&program) > 4, "a program of several steps: {program:?}");
    let step = program.phases[0].first_mut().context("a step")?;
    // Two ranks submit other reductions of one tensor than the third.
    step.kind = Kind::AllReduce(ReduceOp::Adasum, Grouping::Alone);
    step.dtype = ronde::DType::I32;
    let error = Job::new(&[0, 0, 0], DataPath(Transfer::Arena, Ring::Auto)).check(&program).expect_err("it is refused");
    let text = error.to_string();
    ensure!(text.contains("adasum takes floating-point types"), "{text}");
    ensure!(text.matches("\n  phase").count() == 1, "one step is left: {text}");
    Ok(())
}

const SECONDS: &str = "RONDE_DIFFERENTIAL_SECONDS";
const FIRST_LONG: u64 = 1_000_000;
