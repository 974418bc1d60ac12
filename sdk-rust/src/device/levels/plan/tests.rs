//! All ranks' plans, performed by an interpreter on vectors, give what one level gives.

use ronde_wire::{SetId, Shape, TensorName};

use super::*;

/// Layouts by the host of each rank: one host, several, and ranks that alternate.
const HOSTS: [&[u32]; 6] =
    [&[0, 0], &[0, 0, 0], &[0, 0, 1, 1], &[1, 0, 0, 1], &[0, 1, 2, 0, 1, 2], &[5, 5, 5, 2, 2, 2]];
const COUNTS: [u64; 7] = [1, 2, 3, 5, 8, 13, 100];

fn request(collective: Collective, dtype: DType, shape: &[u64]) -> Request {
    let name = TensorName::new("x".to_owned()).expect("a name");
    Request::new(SetId::WORLD, name, collective, dtype, Shape::new(shape.to_vec()).expect("small"))
}

fn layouts(hosts: &[u32]) -> Vec<Layout> {
    let placed: Vec<(Rank, u32)> = (0..).map(Rank).zip(hosts.iter().copied()).collect();
    placed.iter().map(|(rank, _)| Layout::of(*rank, &placed).expect("equal hosts")).collect()
}

/// A rank of the interpreter.
struct Simulated {
    plan: Plan,
    layout: Layout,
    input: Vec<f64>,
    width: usize,
    buffer: Vec<f64>,
}

impl Simulated {
    fn elements(&self, range: &Range<usize>) -> Range<usize> {
        assert!(range.start.is_multiple_of(self.width) && range.end.is_multiple_of(self.width), "{range:?}");
        range.start / self.width..range.end / self.width
    }

    fn read(&self, place: &Place) -> Vec<f64> {
        match place {
            Place::Input => self.input.clone(),
            Place::Buffer(range) => self.buffer[self.elements(range)].to_vec(),
        }
    }

    fn write(&mut self, range: &Range<usize>, values: &[f64]) {
        let range = self.elements(range);
        self.buffer[range.start..range.start + values.len()].copy_from_slice(values);
        assert!(values.len() <= range.len());
    }
}

fn summed(op: InsideOp, all: &[Vec<f64>], factor: f64) -> Vec<f64> {
    let combine = |one: f64, other: f64| match op {
        InsideOp::Sum => one + other,
        InsideOp::Min => one.min(other),
        InsideOp::Max => one.max(other),
        InsideOp::Product => one * other,
        InsideOp::Average => unreachable!("averages are sums with a factor"),
    };
    let scaled = |values: &Vec<f64>| values.iter().map(|value| value * factor).collect::<Vec<_>>();
    let mut all = all.iter().map(scaled);
    let first = all.next().expect("a rank");
    all.fold(first, |sum, each| sum.iter().zip(each).map(|(one, other)| combine(*one, other)).collect())
}

fn phase(ranks: &mut [Simulated], is_first: bool) {
    let hosts: Vec<usize> = ranks.iter().map(|rank| rank.layout.host).collect();
    for host in 0..ranks[0].layout.hosts() {
        let mut local: Vec<&mut Simulated> =
            ranks.iter_mut().zip(&hosts).filter(|(_, other)| **other == host).map(|(rank, _)| rank).collect();
        local.sort_by_key(|rank| rank.layout.index);
        let phases: Vec<Option<Phase>> = local
            .iter()
            .map(|rank| if is_first { rank.plan.first.clone() } else { rank.plan.second.clone() })
            .collect();
        assert!(phases.iter().all(|each| each.is_some() == phases[0].is_some()), "all ranks of a host call NCCL");
        let Some(first) = phases[0].clone() else { continue };
        let given: Vec<Vec<f64>> =
            local.iter().zip(&phases).map(|(rank, phase)| rank.read(&phase.as_ref().expect("all").source)).collect();
        for (number, (rank, phase)) in local.iter_mut().zip(&phases).enumerate() {
            let phase = phase.as_ref().expect("all");
            assert_eq!((phase.collective, phase.dtype), (first.collective, first.dtype));
            let Reduction { op, factor } = phase.reduction;
            let result = match phase.collective {
                Inside::AllReduce => summed(op, &given, factor),
                Inside::AllGather => given.concat(),
                Inside::Broadcast { root } => given[root as usize].clone(),
                Inside::ReduceScatter => {
                    let sum = summed(op, &given, factor);
                    let each = sum.len() / given.len();
                    sum[number * each..(number + 1) * each].to_vec()
                }
            };
            rank.write(&phase.target, &result);
        }
    }
}

fn between(ranks: &mut [Simulated]) {
    for index in 0..ranks[0].layout.local() {
        let group = ranks[0].layout.group(index);
        let shards: Vec<Option<Shard>> = group.iter().map(|rank| ranks[*rank].plan.shard.clone()).collect();
        let Some(first) = shards[0].clone() else { continue };
        let given: Vec<Option<Vec<f64>>> = group
            .iter()
            .zip(&shards)
            .map(|(rank, shard)| shard.as_ref().expect("all").source.as_ref().map(|place| ranks[*rank].read(place)))
            .collect();
        let count = first.shape.iter().product::<u64>() * first.dtype.size_bytes() as u64;
        for (number, (rank, shard)) in group.iter().zip(&shards).enumerate() {
            let shard = shard.as_ref().expect("all");
            assert_eq!((&shard.collective, &shard.shape, shard.dtype), (&first.collective, &first.shape, first.dtype));
            let rank = &mut ranks[*rank];
            let scale = if first.dtype == DType::U8 { 1 } else { rank.width };
            for values in given.iter().flatten() {
                let elements = values.len() * scale.max(rank.width / first.dtype.size_bytes());
                assert_eq!(elements as u64, count);
            }
            let all: Vec<Vec<f64>> = given.iter().flatten().cloned().collect();
            let mut result = match &shard.collective {
                Collective::AllReduce { op } | Collective::ReduceScatter { op } => {
                    let inside = match op {
                        ReduceOp::Max => InsideOp::Max,
                        _ => InsideOp::Sum,
                    };
                    let mut sum = summed(inside, &all, 1.0);
                    if *op == ReduceOp::Average {
                        sum.iter_mut().for_each(|value| *value /= group.len() as f64);
                    }
                    sum
                }
                Collective::AllGather => all.concat(),
                Collective::Broadcast { root } => {
                    assert!(rank.layout.group_ranks(index).contains(root));
                    all[0].clone()
                }
                other => panic!("{other:?}"),
            };
            if matches!(shard.collective, Collective::ReduceScatter { .. }) {
                let each = result.len() / group.len();
                result = result[number * each..(number + 1) * each].to_vec();
            }
            result.iter_mut().for_each(|value| *value *= shard.postscale);
            rank.write(&shard.target, &result);
        }
    }
}

/// The results of all ranks.
fn performed(hosts: &[u32], request: &Request, inputs: &[Vec<f64>], width: usize) -> Vec<Vec<f64>> {
    let mut ranks: Vec<Simulated> = layouts(hosts)
        .into_iter()
        .zip(inputs)
        .map(|(layout, input)| {
            let plan = Plan::of(request, &layout).expect("it can be performed");
            let buffer = vec![f64::NAN; plan.buffer_bytes.div_ceil(width)];
            Simulated { plan, layout, input: input.clone(), width, buffer }
        })
        .collect();
    for rank in &mut ranks {
        for (range, at) in rank.plan.copies.clone() {
            let values = rank.input[rank.elements(&range)].to_vec();
            rank.write(&(at..at + range.len()), &values);
        }
    }
    assert!(ranks.iter().all(|rank| rank.plan.has_second == ranks[0].plan.has_second));
    phase(&mut ranks, true);
    between(&mut ranks);
    phase(&mut ranks, false);
    let read =
        |rank: &Simulated| rank.plan.result.iter().flat_map(|range| rank.read(&Place::Buffer(range.clone()))).collect();
    ranks.iter().map(read).collect()
}

fn inputs(ranks: usize, count: u64) -> Vec<Vec<f64>> {
    (0..ranks).map(|rank| (0..count).map(|at| (rank as u64 * 1000 + at) as f64).collect()).collect()
}

fn close(found: &[f64], right: &[f64]) {
    assert_eq!(found.len(), right.len());
    for (one, other) in found.iter().zip(right) {
        assert!((one - other).abs() <= 1e-9 * other.abs().max(1.0), "{one} is not {other}");
    }
}

#[test]
fn all_reduces_have_the_sum_everywhere() {
    for (hosts, count) in HOSTS.iter().flat_map(|hosts| COUNTS.map(|count| (*hosts, count))) {
        let given = inputs(hosts.len(), count);
        for (op, scale) in [(ReduceOp::Sum, 1.0), (ReduceOp::Average, 1.0 / hosts.len() as f64)] {
            let right = summed(InsideOp::Sum, &given, 3.0 * scale);
            let request = Request { prescale: 3.0, ..request(Collective::AllReduce { op }, DType::F64, &[count]) };
            for found in performed(hosts, &request, &given, 8) {
                close(&found, &right);
            }
        }
        let request = request(Collective::AllReduce { op: ReduceOp::Max }, DType::I64, &[count]);
        for found in performed(hosts, &request, &given, 8) {
            close(&found, &summed(InsideOp::Max, &given, 1.0));
        }
    }
}

#[test]
fn reduce_scatters_give_each_rank_its_rows() {
    for (hosts, rows) in HOSTS.iter().flat_map(|hosts| COUNTS.map(|rows| (*hosts, rows))) {
        let given = inputs(hosts.len(), rows * 3);
        let sum = summed(InsideOp::Sum, &given, 1.0);
        let request = request(Collective::ReduceScatter { op: ReduceOp::Sum }, DType::I64, &[rows, 3]);
        for (rank, found) in performed(hosts, &request, &given, 8).iter().enumerate() {
            let (start, end) = share(usize::try_from(rows).expect("small"), hosts.len(), rank);
            close(found, &sum[start * 3..end * 3]);
        }
    }
}

#[test]
fn all_gathers_are_in_the_order_of_ranks() {
    for (hosts, count) in HOSTS.iter().flat_map(|hosts| COUNTS.map(|count| (*hosts, count))) {
        let given = inputs(hosts.len(), count);
        for found in performed(hosts, &request(Collective::AllGather, DType::F64, &[count]), &given, 8) {
            close(&found, &given.concat());
        }
    }
}

#[test]
fn broadcasts_have_the_tensor_of_the_root() {
    for (hosts, count) in HOSTS.iter().flat_map(|hosts| COUNTS.map(|count| (*hosts, count))) {
        let given = inputs(hosts.len(), count);
        for root in 0..u32::try_from(hosts.len()).expect("small") {
            let collective = Collective::Broadcast { root: Rank(root) };
            for found in performed(hosts, &request(collective, DType::U8, &[count]), &given, 1) {
                close(&found, &given[root as usize]);
            }
        }
    }
}

#[test]
fn some_requests_have_one_level() {
    let all_reduce = |op| Collective::AllReduce { op };
    let plain = |op, dtype| request(all_reduce(op), dtype, &[4]);
    assert!(is_eligible(&plain(ReduceOp::Sum, DType::I32), 0));
    assert!(!is_eligible(&plain(ReduceOp::Sum, DType::I32), 17), "it is small");
    assert!(!is_eligible(&request(all_reduce(ReduceOp::Sum), DType::F32, &[0]), 0), "it is empty");
    assert!(!is_eligible(&plain(ReduceOp::Average, DType::I32), 0), "ronde truncates once");
    assert!(!is_eligible(&Request { prescale: 2.0, ..plain(ReduceOp::Sum, DType::I64) }, 0));
    assert!(!is_eligible(&Request { postscale: 2.0, ..plain(ReduceOp::Max, DType::F32) }, 0));
    assert!(!is_eligible(&plain(ReduceOp::Sum, DType::I16), 0), "NCCL has no such type");
    assert!(!is_eligible(&plain(ReduceOp::Adasum, DType::F32), 0));
    assert!(is_eligible(&request(Collective::AllGather, DType::Bool, &[0]), 0));
    assert!(!is_eligible(&request(Collective::AllGather, DType::F32, &[1 << 30]), 1), "lengths may differ");
    assert!(!is_eligible(&request(Collective::Barrier, DType::U8, &[1]), 0));
}
