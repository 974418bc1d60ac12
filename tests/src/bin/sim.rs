//! Replays seeds of the simulation: `sim [--elastic] --seed N [--count M] [--trace] [--saboteur NAME] [--floats VARIANT]`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use ronde_tests::sim::{Counts, ElasticReport, Options, Saboteur, run, run_elastic};

fn main() -> anyhow::Result<ExitCode> {
    if std::env::args().any(|arg| arg == "--elastic") {
        return elastic(std::env::args().skip(1).filter(|arg| arg != "--elastic"));
    }
    let (first, count, options) = parse(std::env::args().skip(1))?;
    let (mut failures, mut met) = (0, Counts::new());
    for seed in first..first + count {
        match run(seed, &options) {
            Ok(report) if count == 1 => {
                let results = report.results.len();
                println!("seed {seed}: {:?}", ronde_tests::sim::Report { results: Default::default(), ..report });
                println!("{results} results to compare");
            }
            Ok(report) => {
                for (what, count) in report.met {
                    *met.entry(what).or_default() += count;
                }
            }
            Err(failed) => {
                failures += 1;
                println!("{failed}");
            }
        }
    }
    if !met.is_empty() {
        println!("met: {met:?}");
    }
    println!("{count} seeds from {first}, {failures} failed");
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Simulates elastic jobs.
fn elastic(args: impl Iterator<Item = String>) -> anyhow::Result<ExitCode> {
    let (first, count, options) = parse(args)?;
    let (mut failures, mut sum) = (0, ElasticReport::default());
    for seed in first..first + count {
        match run_elastic(seed, None, options.trace) {
            Ok(report) => {
                sum.memberships += report.memberships;
                sum.replaced += report.replaced;
                sum.epochs += report.epochs;
                sum.steps += report.steps;
                sum.added += report.added;
                sum.notices += report.notices;
                sum.crashes = (sum.crashes.0 + report.crashes.0, sum.crashes.1 + report.crashes.1);
            }
            Err(failed) => {
                failures += 1;
                println!("{failed}");
            }
        }
    }
    println!("{sum:?}");
    println!("{count} elastic seeds from {first}, {failures} failed");
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parse(mut args: impl Iterator<Item = String>) -> anyhow::Result<(u64, u64, Options)> {
    let (mut first, mut count, mut options) = (0, 1, Options::default());
    while let Some(arg) = args.next() {
        let mut number = || -> anyhow::Result<u64> {
            let value = args.next().with_context(|| format!("{arg} needs a number"))?;
            value.parse().with_context(|| format!("{arg} needs a number, not {value:?}"))
        };
        match arg.as_str() {
            "--seed" => first = number()?,
            "--count" => count = number()?,
            "--floats" => options.floats_variant = Some(number()?),
            "--trace" => options.trace = true,
            "--saboteur" => {
                let name = args.next().unwrap_or_default();
                let saboteur = Saboteur::from_name(&name);
                options.saboteur = Some(saboteur.with_context(|| format!("there is no saboteur {name:?}"))?);
            }
            _ => bail!(
                "unknown argument {arg:?}: [--elastic] --seed N [--count M] [--trace] [--saboteur NAME] [--floats VARIANT]"
            ),
        }
    }
    Ok((first, count, options))
}
