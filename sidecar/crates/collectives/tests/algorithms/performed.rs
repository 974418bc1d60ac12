//! Performs all members' plans of one all-reduce of f32 on numbers, round by round.

use std::collections::{BTreeMap, HashMap};

use ronde_collectives::kernels::{self, BlockReducer, KernelError, Side};
use ronde_collectives::plan::{Form, Register, Span, Step, Transfer};
use ronde_collectives::{Plan, Work};
use ronde_wire::{Codec, DType, Rank, ReduceOp, SetTopology, Tuning};

use crate::worlds::plans;

/// An all-reduce with its inputs.
pub(crate) struct Task<'a> {
    pub(crate) topology: &'a SetTopology,
    pub(crate) work: Work,
    pub(crate) op: ReduceOp,
    pub(crate) codec: Codec,
    pub(crate) postscale: f64,
    /// For each rank of the set, ascending, its tensors.
    pub(crate) inputs: Vec<Vec<Vec<u8>>>,
}

/// What came of it.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The tensors of all ranks, which are equal.
    pub(crate) results: Vec<Vec<u8>>,
    /// What was concluded, in rank order.
    pub(crate) weights: Vec<f64>,
    pub(crate) sent_bytes: Vec<u64>,
    pub(crate) reduced_bytes: Vec<u64>,
    /// Rounds from the first to the last one with transfers, in the longest sub-schedule.
    pub(crate) rounds: u32,
}

/// # Panics
/// When the plans do not fit together, or members disagree.
pub(crate) fn perform(task: &Task<'_>, tuning: &Tuning) -> Outcome {
    let plans = plans(task.topology, &task.work, tuning);
    let mut members: Vec<Participant<'_>> = (0..plans.len()).map(|me| Participant::new(me, task, &plans[me])).collect();
    let mut rounds = 0;
    for sub_schedule in 0..plans[0].sub_schedules.len() {
        let last = plans.iter().map(|plan| plan.sub_schedules[sub_schedule].rounds.len()).max().unwrap_or(0);
        let mut first = None;
        for round in 0..u32::try_from(last).expect("few rounds") {
            if perform_round(&plans, &mut members, sub_schedule, round as usize) {
                rounds = rounds.max(round + 1 - *first.get_or_insert(round));
            }
        }
        members.iter_mut().for_each(|member| member.registers.clear());
    }
    for member in &members[1..] {
        assert!(member.results == members[0].results, "members disagree");
    }
    let all = |number: fn(&Participant<'_>) -> u64| members.iter().map(number).collect();
    Outcome {
        sent_bytes: all(|member| member.sent_bytes),
        reduced_bytes: all(|member| member.reduced_bytes),
        results: members[0].results.clone(),
        weights: members[0].weights.clone().unwrap_or_default(),
        rounds,
    }
}

/// Whether something travelled.
fn perform_round(plans: &[Plan], members: &mut [Participant<'_>], sub_schedule: usize, round: usize) -> bool {
    let of = |me: usize| plans[me].sub_schedules[sub_schedule].rounds.get(round);
    let mut travelling = BTreeMap::new();
    for (me, member) in members.iter_mut().enumerate() {
        let Some(round) = of(me) else { continue };
        round.steps.iter().for_each(|step| member.step(*step));
        for transfer in &round.transfers {
            if let Transfer::Send { to, from, span, form } = *transfer {
                let bytes = match form {
                    // Nobody had something to measure for this member.
                    Form::Measures if !member.registers.contains_key(&from) => vec![0; 2 * bytes(span.len)],
                    _ => member.held(from),
                };
                member.sent_bytes += bytes.len() as u64;
                assert!(travelling.insert((me, to.index()), (bytes, span, form)).is_none(), "sent twice");
            }
        }
    }
    let travels = !travelling.is_empty();
    for (me, member) in members.iter_mut().enumerate() {
        for transfer in of(me).into_iter().flat_map(|round| &round.transfers) {
            if let Transfer::Receive { from, into, span, form } = *transfer {
                let (bytes, sent_span, sent_form) = travelling.remove(&(from.index(), me)).expect("somebody sends");
                assert_eq!((sent_span, sent_form), (span, form));
                assert_eq!(bytes.len(), member.bytes_of(form, span, from.index()), "{form:?}");
                member.registers.insert(into, bytes);
            }
        }
    }
    assert!(travelling.is_empty(), "nobody receives {:?}", travelling.keys());
    travels
}

struct Participant<'a> {
    me: usize,
    task: &'a Task<'a>,
    plan: &'a Plan,
    registers: HashMap<Register, Vec<u8>>,
    weights: Option<Vec<f64>>,
    results: Vec<Vec<u8>>,
    sent_bytes: u64,
    reduced_bytes: u64,
}

impl<'a> Participant<'a> {
    fn new(me: usize, task: &'a Task<'a>, plan: &'a Plan) -> Self {
        let results = task.inputs[0].iter().map(|tensor| vec![0xff; tensor.len()]).collect();
        let registers = HashMap::new();
        Self { me, task, plan, registers, weights: None, results, sent_bytes: 0, reduced_bytes: 0 }
    }

    fn step(&mut self, step: Step) {
        let (dtype, op, codec) = (DType::F32, self.task.op, self.task.codec);
        match step {
            Step::Contribute { into, span } => {
                let sum = self.local_sum(span);
                self.registers.insert(into, sum);
            }
            Step::ContributeEach { into, span } => {
                let each = self.local_ranks().into_iter().flat_map(|rank| self.input(rank, span)).collect();
                self.registers.insert(into, each);
            }
            Step::Reduce { left, right, into, span } => {
                let (mut sum, other) = (self.held(left), self.held(right));
                kernels::reduce_into(dtype, op, &mut sum, &other, Side::AccumulatorLeft).expect("equal lengths");
                self.reduced_bytes += 4 * span.len;
                self.registers.insert(into, sum);
            }
            Step::ReduceN { first, into, span } => {
                let operands = self.of_all_ranks(first, span);
                let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
                let mut result = vec![0; self.bytes_of(Form::Values, span, self.me)];
                let weights = self.weights.as_deref().unwrap_or(&[]);
                kernels::reduce_n(dtype, op, &operands, weights, &mut result).expect("equal lengths");
                self.reduced_bytes += 4 * span.len * operands.len() as u64;
                self.registers.insert(into, result);
            }
            Step::Finish { register, .. } => {
                let mut values = self.held(register);
                let ranks = u32::try_from(self.task.inputs.len()).expect("few ranks");
                kernels::finish(dtype, op, ranks, self.task.postscale, &mut values).expect("whole elements");
                self.registers.insert(register, values);
            }
            Step::Encode { register, span } => {
                let mut encoded = vec![0; self.bytes_of(Form::Encoded, span, self.me)];
                kernels::encode(codec, dtype, &self.held(register), &mut encoded).expect("lengths fit");
                self.registers.insert(register, encoded);
            }
            Step::Decode { register, span } => {
                let mut values = vec![0; self.bytes_of(Form::Values, span, self.me)];
                kernels::decode(codec, dtype, &self.held(register), &mut values).expect("lengths fit");
                self.registers.insert(register, values);
            }
            Step::MeasureOwn { into, span } => {
                let sums = self.with_sums_of_squares(into, span);
                self.registers.insert(into, measures_bytes(&sums));
            }
            Step::MeasureAll { first, into, span } => {
                let gram = self.with_products(first, into, span);
                self.registers.insert(into, measures_bytes(&gram));
            }
            Step::Conclude { first } => self.conclude(first),
            Step::Publish { from, span } => self.publish(from, span),
        }
    }

    /// Block by block, as a lane does it.
    fn local_sum(&self, span: Span) -> Vec<u8> {
        let mut reducer = BlockReducer::new(DType::F32, self.task.op, 1.0).expect("elementwise");
        let ranks: Vec<Vec<u8>> = self.local_ranks().into_iter().map(|rank| self.input(rank, span)).collect();
        let mut sum = vec![0; ranks.first().map_or(0, Vec::len)];
        reducer
            .reduce(ranks.len(), &mut sum, |rank, start, block| {
                block.copy_from_slice(&ranks[rank][start..start + block.len()]);
                Ok::<(), KernelError>(())
            })
            .expect("whole elements");
        sum
    }

    fn with_sums_of_squares(&self, into: Register, span: Span) -> Vec<f64> {
        let ranks = self.local_ranks();
        let mut sums = self.measures(into, ranks.len());
        for (rank, sum) in ranks.into_iter().zip(&mut sums) {
            kernels::add_sum_of_squares(DType::F32, &self.input(rank, span), sum).expect("whole elements");
        }
        sums
    }

    fn with_products(&self, first: Register, into: Register, span: Span) -> Vec<f64> {
        let operands = self.of_all_ranks(first, span);
        let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
        let mut gram = self.measures(into, operands.len() * (operands.len() + 1) / 2);
        kernels::add_products(DType::F32, &operands, &mut gram).expect("equal lengths");
        gram
    }

    fn conclude(&mut self, first: Register) {
        let order = self.task.topology.ranks();
        let pairs = order.len() * (order.len() + 1) / 2;
        let members = self.task.topology.members.iter().zip(first.0..);
        let measures = if self.task.op == ReduceOp::ClippedMean {
            let each = members.flat_map(|(member, register)| {
                let measures = self.measures(Register(register), member.ranks.len());
                member.ranks.iter().copied().zip(measures)
            });
            each.collect::<BTreeMap<Rank, f64>>().into_values().collect()
        } else {
            let of_members = members.map(|(_, register)| self.measures(Register(register), pairs));
            of_members.fold(vec![0.0; pairs], |sum, part| sum.iter().zip(part).map(|(a, b)| a + b).collect())
        };
        let weights = kernels::weights(self.task.op, order.len(), &measures).expect("as many as needed");
        assert!(self.weights.replace(weights).is_none(), "concluded twice");
    }

    fn publish(&mut self, from: Register, span: Span) {
        let values = self.held(from);
        assert_eq!(values.len(), self.bytes_of(Form::Values, span, self.me));
        let mut rest = &values[..];
        for slice in self.plan.layout.within(span) {
            let (chunk, remaining) = rest.split_at(bytes(slice.span.len));
            self.results[slice.tensor as usize][bytes(slice.output_start)..][..chunk.len()].copy_from_slice(chunk);
            rest = remaining;
        }
    }

    /// Each rank's values out of the members' registers, ascending by rank.
    fn of_all_ranks(&self, first: Register, span: Span) -> Vec<Vec<u8>> {
        let mut values = BTreeMap::new();
        for (member, register) in self.task.topology.members.iter().zip(first.0..) {
            let held = self.held(Register(register));
            assert_eq!(held.len(), member.ranks.len() * bytes(span.len));
            for (rank, each) in member.ranks.iter().zip(held.chunks(bytes(span.len))) {
                values.insert(*rank, each.to_vec());
            }
        }
        values.into_values().collect()
    }

    fn local_ranks(&self) -> Vec<Rank> {
        self.task.topology.members[self.me].ranks.clone()
    }

    fn input(&self, rank: Rank, span: Span) -> Vec<u8> {
        let position = self.task.topology.ranks().iter().position(|other| *other == rank).expect("a rank of the set");
        let part = |slice: ronde_collectives::Slice| {
            self.task.inputs[position][slice.tensor as usize][bytes(slice.input_start)..][..bytes(slice.span.len)]
                .to_vec()
        };
        self.plan.layout.within(span).flat_map(part).collect()
    }

    fn held(&self, register: Register) -> Vec<u8> {
        self.registers.get(&register).cloned().unwrap_or_else(|| panic!("{register:?} holds nothing"))
    }

    fn measures(&self, register: Register, count: usize) -> Vec<f64> {
        let Some(held) = self.registers.get(&register) else { return vec![0.0; count] };
        assert_eq!(held.len(), 8 * count);
        held.chunks(8).map(|number| f64::from_le_bytes(number.try_into().expect("eight bytes"))).collect()
    }

    fn bytes_of(&self, form: Form, span: Span, from: usize) -> usize {
        match form {
            Form::Values => bytes(span.len),
            Form::Encoded => bytes(span.len) / 2,
            Form::EachRank => bytes(span.len) * self.task.topology.members[from].ranks.len(),
            Form::Measures => 2 * bytes(span.len),
        }
    }
}

fn measures_bytes(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn bytes(elements: u64) -> usize {
    usize::try_from(4 * elements).expect("small tensors")
}
