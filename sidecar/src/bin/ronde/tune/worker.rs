//! `ronde tune-worker`: a worker of `ronde tune`, which performs the steps of a training program without training.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use ronde::blocking::Client;
use ronde::{Operation, Options, ReduceOp, TensorRef};
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::exit::fail_with;

/// Arguments of `ronde tune-worker`.
#[derive(Args, Debug)]
pub(crate) struct TuneWorkerArgs {
    /// How many steps to perform before latency and bandwidth are measured.
    #[arg(long, default_value_t = 0)]
    steps: u64,
    /// The bytes of the gradients of a step.
    #[arg(long, value_delimiter = ',')]
    tensors: Vec<u64>,
}

pub(crate) fn main(args: &TuneWorkerArgs) -> ExitCode {
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail_with(&error, Code::TuneFailed),
    }
}

fn run(args: &TuneWorkerArgs) -> anyhow::Result<()> {
    let options = Options::from_env().context("`ronde tune` starts this command; it is not for use by itself")?;
    let client = Client::connect(options)?;
    let elements: Vec<usize> = args.tensors.iter().map(|bytes| elements(*bytes)).collect::<anyhow::Result<_>>()?;
    let most = elements.iter().copied().chain([elements_of(MEASURED_BYTES_MOST)]).max().unwrap_or(0);
    let values = vec![1.0_f32; most];
    let names: Vec<String> = (0..elements.len()).map(|at| format!("gradient.{at}")).collect();
    for _ in 0..args.steps {
        step(&client, &names, &elements, &values)?;
    }
    measure(&client, &values)
}

/// Submits all gradients, then waits for all of them, as the end of a backward pass does.
fn step(client: &Client, names: &[String], elements: &[usize], values: &[f32]) -> anyhow::Result<()> {
    let mut handles = Vec::with_capacity(names.len());
    for (name, count) in names.iter().zip(elements) {
        let shape = [*count as u64];
        let tensor = TensorRef::of(&shape, &values[..*count])?;
        handles.push(client.submit_from(&Operation::allreduce(name.as_str(), tensor, ReduceOp::Sum))?);
    }
    for handle in handles {
        handle.wait()?;
    }
    Ok(())
}

/// Performs all-reduces of several sizes one after the other. Each has a new name, so that it begins when all ranks are ready
/// for it. A broadcast would say nothing: its root is done as soon as its connection has accepted the bytes.
fn measure(client: &Client, values: &[f32]) -> anyhow::Result<()> {
    for repetition in 0..REPETITIONS {
        let sizes = std::iter::successors(Some(MEASURED_BYTES_LEAST), |bytes| Some(bytes * 2));
        for bytes in sizes.take_while(|bytes| *bytes <= MEASURED_BYTES_MOST) {
            let count = elements_of(bytes);
            let shape = [count as u64];
            let tensor = TensorRef::of(&shape, &values[..count])?;
            let name = format!("cost.{bytes}.{repetition}");
            client.submit_from(&Operation::allreduce(name.as_str(), tensor, ReduceOp::Sum))?.wait()?;
        }
    }
    Ok(())
}

fn elements(bytes: u64) -> anyhow::Result<usize> {
    Ok(usize::try_from(bytes.div_ceil(ELEMENT_BYTES))?.max(1))
}

/// The elements of a measured size, which is small.
fn elements_of(bytes: u64) -> usize {
    usize::try_from(bytes / ELEMENT_BYTES).unwrap_or(usize::MAX)
}

/// Of an f32.
const ELEMENT_BYTES: u64 = 4;
/// Above the eager limit, as eager operations are no plans.
const MEASURED_BYTES_LEAST: u64 = 8 << 10;
const MEASURED_BYTES_MOST: u64 = 8 << 20;
const REPETITIONS: usize = 7;
