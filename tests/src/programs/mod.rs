//! Random programs of collectives: the ranks of a real job and a sequential interpreter run each of them, and all ranks
//! must get the interpreter's results.
//!
//! A program has phases. Within a phase every rank submits its steps in its own order, waits for them in another one,
//! and compares. Steps have names, so any order is allowed; messages are distinguished by tags.
//!
//! A program that fails is made shorter: steps are removed as long as the rest still fails.

mod draw;
mod perform;
mod reference;

use std::fmt::Write as _;

use anyhow::{Result, bail};
use ronde::{Codec, DType, ReduceOp};

pub use draw::Drawing;

use crate::cluster::Plan;
use crate::crew::{Crew, DataPath};

/// What the ranks of a job do, one phase after another.
#[derive(Clone, Debug)]
pub struct Program {
    /// What its values and orders are drawn from.
    pub seed: u64,
    /// The process sets besides that of all ranks: added before the first phase.
    pub sets: Vec<Vec<u32>>,
    /// The steps of each phase.
    pub phases: Vec<Vec<Step>>,
}

/// One operation of the ranks of a set.
#[derive(Clone, Debug)]
pub struct Step {
    /// A number that no other step of the program has; names, values and tags contain it.
    pub id: u32,
    /// The index among the program's sets, counted from 1; 0 for all ranks.
    pub set: usize,
    /// What is done.
    pub kind: Kind,
    /// The type of the elements.
    pub dtype: DType,
    /// Elements of a row.
    pub columns: u64,
    /// Rows that each rank of the set contributes, in the order of the ranks; all equal where the kind requires that.
    pub rows: Vec<u64>,
    /// Factors before and after a reduction.
    pub scales: (f64, f64),
    /// The codec between sidecars.
    pub codec: Codec,
}

/// Kinds of steps. Ranks are positions within the set.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Of one tensor, or of several that become ready together.
    AllReduce(ReduceOp, Grouping),
    /// A reduction whose rows are divided.
    ReduceScatter(ReduceOp),
    /// To one rank.
    Reduce(ReduceOp, usize),
    /// Of any number of rows each.
    AllGather,
    /// To one rank.
    Gather(usize),
    /// From one rank.
    Broadcast(usize),
    /// From one rank, rows are divided.
    Scatter(usize),
    /// Rows from each rank to each.
    AllToAll(Vec<Vec<u64>>),
    /// From one rank to another.
    Message(usize, usize),
    /// To one rank from all others, which it receives from any source.
    FromAny(usize),
    /// Without elements.
    Barrier,
}

/// Whether an all-reduce is one of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// By itself.
    Alone,
    /// With so many tensors, each a row longer than the one before.
    Of(u64),
}

/// A job on which programs run, restarted after a program that failed.
#[derive(Debug)]
pub struct Job {
    placement: Vec<u32>,
    path: DataPath,
    crew: Option<Crew>,
}

impl Job {
    /// A job of ranks on sidecars, which starts with its first program.
    #[must_use]
    pub fn new(placement: &[u32], path: DataPath) -> Self {
        Self { placement: placement.to_vec(), path, crew: None }
    }

    /// Runs a program; reports a failing one in the shortest form that was found.
    ///
    /// # Errors
    /// The difference, the program and how to run it again.
    pub fn check(&mut self, program: &Program) -> Result<()> {
        let Err(error) = self.run(program) else { return Ok(()) };
        let (program, error) = self.shorten(program.clone(), error);
        bail!("{error:#}\non {:?} by {:?}, with\n{}", self.placement, self.path, program.describe());
    }

    /// Runs a program once.
    ///
    /// # Errors
    /// The first rank's difference or failure.
    pub fn run(&mut self, program: &Program) -> Result<()> {
        let crew = match self.crew.take() {
            Some(crew) => crew,
            None => Crew::start(Plan::of(&self.placement), self.path)?,
        };
        let outcomes = crew.each(|client| perform::perform(client, program));
        let mut failures = (0..).zip(outcomes).filter_map(|(rank, outcome): (u32, _)| Some((rank, outcome.err()?)));
        let Some((rank, error)) = failures.next() else {
            self.crew = Some(crew);
            return Ok(());
        };
        let others: Vec<u32> = failures.map(|(rank, _)| rank).collect();
        Err(error.context(format!("rank {rank}, and as well {others:?}")))
    }

    /// Removes steps that the failure does not need.
    fn shorten(&mut self, mut program: Program, mut error: anyhow::Error) -> (Program, anyhow::Error) {
        let mut left = ATTEMPTS_MAX;
        let mut part = program.steps().div_ceil(2);
        while part > 0 {
            let mut first = 0;
            while first < program.steps() && left > 0 {
                left -= 1;
                let shorter = program.without(first..first + part);
                match self.run(&shorter) {
                    Err(again) => (program, error) = (shorter, again),
                    Ok(()) => first += part,
                }
            }
            part /= 2;
        }
        (program, error)
    }
}

impl Program {
    fn steps(&self) -> usize {
        self.phases.iter().map(Vec::len).sum()
    }

    /// The program without some of its steps, counted through all phases.
    fn without(&self, left_out: std::ops::Range<usize>) -> Self {
        let mut at = 0;
        let mut keeps = |_: &Step| {
            at += 1;
            !left_out.contains(&(at - 1))
        };
        let phases = self.phases.iter().map(|steps| steps.iter().filter(|step| keeps(step)).cloned().collect());
        Self { phases: phases.collect(), ..self.clone() }
    }

    fn describe(&self) -> String {
        let mut text = format!("seed {}, sets {:?}", self.seed, self.sets);
        for (number, steps) in self.phases.iter().enumerate() {
            for step in steps {
                write!(text, "\n  phase {number}: {step:?}").expect("strings grow");
            }
        }
        text
    }
}

/// Runs of a program while it is shortened.
const ATTEMPTS_MAX: usize = 60;
