//! One rank's part in a program.

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use ronde::blocking::{Client, Handle};
use ronde::{Collective, Detail, Label, Operation, Output, Rank, SetId, Tensor, TensorRef};

use super::reference::Expected;
use super::{Grouping, Kind, Program, Step};

/// Runs a rank's steps and compares what it gets.
///
/// # Errors
/// The first difference or failure.
pub(super) fn perform(client: &Client, program: &Program) -> Result<()> {
    let all: Vec<u32> = (0..client.size()).collect();
    let mut sets = vec![(SetId::WORLD, all)];
    for ranks in &program.sets {
        sets.push((client.add_process_set(ranks)?.id, ranks.clone()));
    }
    let mut rng = Rng::with_seed(program.seed ^ u64::from(client.rank()) << 48);
    for steps in &program.phases {
        phase(client, (program.seed, &sets), steps, &mut rng)?;
    }
    for (set, _) in sets.iter().skip(1) {
        ensure!(client.remove_process_set(*set)?, "{set} is there");
    }
    Ok(())
}

/// An operation in flight, and its expected result.
struct InFlight<'a> {
    step: &'a Step,
    handle: Handle,
    expected: Expectation,
}

enum Expectation {
    Nothing,
    One(Expected),
    /// A message from any of the other ranks, each of which must arrive once.
    FromAny,
}

fn phase(client: &Client, (seed, sets): (u64, &[(SetId, Vec<u32>)]), steps: &[Step], rng: &mut Rng) -> Result<()> {
    let mut mine: Vec<&Step> = steps.iter().filter(|step| sets[step.set].1.contains(&client.rank())).collect();
    rng.shuffle(&mut mine);
    let mut flying = Vec::new();
    for step in mine {
        let at = RankInSet::new(client, seed, &sets[step.set]);
        flying.extend(at.submit(step).with_context(|| format!("submitting {step:?}"))?);
    }
    rng.shuffle(&mut flying);
    let mut sources = Vec::new();
    for InFlight { step, handle, expected } in flying {
        let output = handle.wait().with_context(|| format!("waiting for {step:?}"))?;
        let (_, ranks) = &sets[step.set];
        compare((seed, ranks), step, &expected, output, &mut sources).with_context(|| format!("{step:?}"))?;
    }
    let messages = sources.len();
    sources.sort_unstable();
    sources.dedup();
    ensure!(sources.len() == messages, "a message was received twice: {sources:?}");
    Ok(())
}

/// A rank in a set.
struct RankInSet<'a> {
    client: &'a Client,
    seed: u64,
    set: SetId,
    ranks: &'a [u32],
    place: usize,
}

impl<'a> RankInSet<'a> {
    fn new(client: &'a Client, seed: u64, (set, ranks): &'a (SetId, Vec<u32>)) -> Self {
        let place = ranks.iter().position(|rank| *rank == client.rank()).unwrap_or_default();
        Self { client, seed, set: *set, ranks, place }
    }

    /// Returns what this rank submits for a step: nothing for a message of others.
    fn submit<'s>(&self, step: &'s Step) -> Result<Vec<InFlight<'s>>> {
        match step.kind {
            Kind::AllReduce(op, Grouping::Of(count)) => self.group(step, op, count),
            Kind::Message(from, to) if ![from, to].contains(&self.place) => Ok(Vec::new()),
            Kind::FromAny(to) if to == self.place => {
                let receive = |_| {
                    let receive = Operation::new(self.set, Collective::RecvAny { tag: step.id }, None);
                    self.fly(step, &receive, Expectation::FromAny)
                };
                (1..self.ranks.len()).map(receive).collect()
            }
            _ => Ok(vec![self.single(step)?]),
        }
    }

    fn group<'s>(&self, step: &'s Step, op: ronde::ReduceOp, count: u64) -> Result<Vec<InFlight<'s>>> {
        let inputs = (0..count).map(|longer| step.input(self.seed, self.place, longer)).collect::<Result<Vec<_>>>()?;
        let name = format!("group {}", step.id);
        let label = Label { name: Some(&name), set: self.set };
        let one =
            |tensor| Operation { label: Label { name: None, set: self.set }, ..self.all_reduce(step, op, tensor) };
        let operations: Vec<Operation<'_>> = inputs.iter().map(one).collect();
        let handles = self.client.submit_group_from(label, &operations)?;
        let flying = (0..).zip(handles).map(|(longer, handle)| {
            let expected = step.expected(self.seed, self.place, longer);
            InFlight { step, handle, expected: expected.map_or(Expectation::Nothing, Expectation::One) }
        });
        Ok(flying.collect())
    }

    fn all_reduce<'t>(&self, step: &Step, op: ronde::ReduceOp, tensor: &'t Tensor) -> Operation<'t> {
        let (prescale, postscale) = step.scales;
        let operation = Operation::new(self.set, Collective::AllReduce { op }, Some(tensor.into()));
        Operation { prescale, postscale, codec: step.codec, ..operation }
    }

    fn single<'s>(&self, step: &'s Step) -> Result<InFlight<'s>> {
        let collective = self.collective(step);
        let input = collective.has_input(Rank(self.client.rank())).then(|| step.input(self.seed, self.place, 0));
        let input = input.transpose()?;
        let (name, (prescale, postscale)) = (format!("step {}", step.id), step.scales);
        // Messages are counted.
        let message = matches!(collective, Collective::Send { .. } | Collective::Recv { .. });
        let label = Label { name: Some(name.as_str()).filter(|_| !message), set: self.set };
        let operation = Operation::new(label, collective, input.as_ref().map(TensorRef::from));
        let operation = Operation { prescale, postscale, codec: step.codec, ..operation };
        let expected = step.expected(self.seed, self.place, 0);
        self.fly(step, &operation, expected.map_or(Expectation::Nothing, Expectation::One))
    }

    fn fly<'s>(&self, step: &'s Step, operation: &Operation<'_>, expected: Expectation) -> Result<InFlight<'s>> {
        Ok(InFlight { step, handle: self.client.submit_from(operation)?, expected })
    }

    fn collective(&self, step: &Step) -> Collective {
        let rank = |place: usize| Rank(self.ranks[place]);
        let tag = step.id;
        match &step.kind {
            Kind::AllReduce(op, _) => Collective::AllReduce { op: *op },
            Kind::ReduceScatter(op) => Collective::ReduceScatter { op: *op },
            Kind::Reduce(op, root) => Collective::Reduce { op: *op, root: rank(*root) },
            Kind::AllGather => Collective::AllGather,
            Kind::Gather(root) => Collective::Gather { root: rank(*root) },
            Kind::Broadcast(root) => Collective::Broadcast { root: rank(*root) },
            Kind::Scatter(root) => Collective::Scatter { root: rank(*root) },
            Kind::AllToAll(splits) => Collective::AllToAll { splits: splits[self.place].clone() },
            Kind::Message(from, to) if *from == self.place => Collective::Send { to: rank(*to), tag },
            Kind::Message(from, _) => Collective::Recv { from: rank(*from), tag },
            Kind::FromAny(to) => Collective::Send { to: rank(*to), tag },
            Kind::Barrier => Collective::Barrier,
        }
    }
}

fn compare(
    (seed, ranks): (u64, &[u32]),
    step: &Step,
    expected: &Expectation,
    output: Output,
    sources: &mut Vec<(u32, u32)>,
) -> Result<()> {
    match (expected, output.tensor) {
        (Expectation::One(expected), Some(tensor)) => expected.compare(&tensor, step.dtype),
        (Expectation::Nothing, None) => Ok(()),
        (Expectation::Nothing, Some(tensor)) if tensor.bytes.is_empty() => Ok(()),
        (Expectation::FromAny, Some(tensor)) => {
            let Detail::Source(source) = output.detail else { bail!("{:?} names no source", output.detail) };
            sources.push((step.id, source.0));
            let place = ranks.iter().position(|rank| *rank == source.0).context("the source is not in the set")?;
            step.sent_by(seed, place).compare(&tensor, step.dtype)
        }
        (_, tensor) => bail!("the result is {tensor:?}"),
    }
}
