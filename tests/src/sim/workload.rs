//! What the ranks ask for in one epoch, as a function of seed and epoch, and what they must get: computed in whole
//! numbers, so that it shares nothing with the kernels.

use fastrand::Rng;
use ronde_wire::{Collective, DType, Epoch, ProcessSet, Rank, ReduceOp, Request, SetId, Shape, TensorName, World};

/// What one epoch is for.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) epoch: Epoch,
    pub(super) items: Vec<Item>,
    /// Says goodbye when it has all its answers, which ends the epoch.
    pub(super) leaver: Option<Rank>,
    /// Values are any floats, whose sums depend on the order of addition.
    pub(super) any_floats: bool,
}

/// One named request of all ranks of a set.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) set: SetId,
    /// The set's ranks.
    pub(super) ranks: Vec<Rank>,
    pub(super) name: TensorName,
    pub(super) collective: Collective,
    pub(super) dtype: DType,
    /// Elements of a row.
    columns: u64,
    /// Rows, for each rank of the set.
    rows: Vec<u64>,
    prescale: f64,
    postscale: f64,
    pub(super) mischief: Mischief,
    /// An item by the same name that must be over first.
    pub(super) follows: Option<usize>,
    /// Makes the values of different items and epochs differ.
    salt: u64,
}

/// What goes wrong with an item by intent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mischief {
    None,
    /// This rank asks for another element type.
    Mismatch(Rank),
    /// This rank's request is refused by its service.
    Refused(Rank),
    /// This rank withdraws its request soon.
    Withdrawn(Rank),
}

/// How workloads are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recipe {
    pub(super) seed: u64,
    /// Epochs up to this one end with a goodbye.
    pub(super) leavers_until: Epoch,
    pub(super) any_floats: bool,
    pub(super) mischief: bool,
}

impl Workload {
    pub(super) fn new(recipe: &Recipe, world: &World, epoch: Epoch) -> Self {
        let mut rng = Rng::with_seed(recipe.seed.wrapping_mul(0x9E37_79B9) ^ epoch.0);
        let most = [3, 12, 40][rng.usize(..3)];
        let count = rng.usize(1..=most);
        let mut items: Vec<Item> = Vec::new();
        for index in 0..count {
            let set = &world.sets()[rng.usize(..world.sets().len())];
            let earlier = items.iter().rposition(|item| item.mischief == Mischief::None && item.set == set.id);
            let follows = earlier.filter(|_| rng.u8(..4) == 0);
            let taken = |e: usize, items: &[Item]| items.iter().any(|item| item.follows == Some(e));
            let follows = follows.filter(|e| !taken(*e, &items));
            let mut item = item(&mut rng, recipe, set, index);
            if let Some(earlier) = follows {
                (item.name, item.mischief) = (items[earlier].name.clone(), Mischief::None);
            }
            items.push(Item { follows, ..item });
        }
        let leaver = (epoch <= recipe.leavers_until).then(|| world.sets()[0].ranks[rng.usize(..world.size())]);
        Self { epoch, items, leaver, any_floats: recipe.any_floats }
    }

    /// The bytes that a rank contributes to an item.
    pub(super) fn input(&self, index: usize, rank: Rank) -> Vec<u8> {
        let item = &self.items[index];
        let count = item.elements_of(rank);
        if self.any_floats && item.dtype.is_float() {
            let seed = item.salt ^ (u64::from(rank.0) << 32);
            return noise(item.dtype, seed, count);
        }
        encode_all(item.dtype, (0..count).map(|element| item.value(rank, element)))
    }

    /// What every rank gets; `None` where only equality between ranks can be asked for.
    pub(super) fn expected(&self, index: usize) -> Option<Vec<u8>> {
        let item = &self.items[index];
        match &item.collective {
            Collective::AllReduce { op } => {
                if self.any_floats && item.dtype.is_float() {
                    return None;
                }
                let count = item.elements_of(item.ranks[0]);
                Some(encode_all(item.dtype, (0..count).map(|element| item.reduced(*op, element))))
            }
            Collective::Broadcast { root } => Some(self.input(index, *root)),
            Collective::AllGather => Some(item.ranks.iter().flat_map(|rank| self.input(index, *rank)).collect()),
            _ => Some(Vec::new()),
        }
    }
}

impl Item {
    /// What a rank asks for.
    pub(super) fn request(&self, rank: Rank) -> Request {
        let other = if self.dtype == DType::F32 { DType::I32 } else { DType::F32 };
        let dtype = if self.mischief == Mischief::Mismatch(rank) { other } else { self.dtype };
        Request {
            set: self.set,
            name: self.name.clone(),
            collective: self.collective.clone(),
            dtype,
            shape: self.shape(self.rows[self.position(rank)]),
            prescale: self.prescale,
            postscale: self.postscale,
            codec: ronde_wire::Codec::None,
            group: None,
        }
    }

    /// The shape of the result.
    pub(super) fn output(&self) -> Shape {
        match self.collective {
            Collective::AllGather => self.shape(self.rows.iter().sum()),
            _ => self.shape(self.rows[0]),
        }
    }

    /// Whether the ranks disagree on purpose, so that the request fails on all of them.
    pub(super) fn must_fail(&self) -> bool {
        matches!(self.mischief, Mischief::Mismatch(_) | Mischief::Refused(_))
    }

    fn shape(&self, rows: u64) -> Shape {
        let dimensions = if self.collective == Collective::Barrier { vec![0] } else { vec![rows, self.columns] };
        Shape::new(dimensions).expect("small tensors")
    }

    fn elements_of(&self, rank: Rank) -> u64 {
        self.rows[self.position(rank)] * self.columns
    }

    fn position(&self, rank: Rank) -> usize {
        self.ranks.iter().position(|r| *r == rank).expect("only members of the set ask")
    }

    /// Small whole numbers, whose sums, products and averages are exact in every type.
    fn value(&self, rank: Rank, element: u64) -> i64 {
        let mixed = element.wrapping_mul(31).wrapping_add(self.salt).wrapping_add(u64::from(rank.0) * 13);
        let mixed = i64::try_from((mixed ^ (mixed >> 7)) & 0xffff).expect("16 bits");
        let size = i64::try_from(self.ranks.len()).expect("a small world");
        match self.collective.reduce_op() {
            _ if self.dtype == DType::Bool => mixed & 1,
            Some(ReduceOp::Product) => 1 + i64::from(mixed % 5 == 0 && rank.0 < 6),
            Some(ReduceOp::Average) => (mixed & 1) * size,
            _ => mixed % 8,
        }
    }

    fn reduced(&self, op: ReduceOp, element: u64) -> i64 {
        let values = self.ranks.iter().map(|rank| self.value(*rank, element));
        let boolean = self.dtype == DType::Bool;
        match op {
            ReduceOp::Min => values.min().unwrap_or(0),
            ReduceOp::Max => values.max().unwrap_or(0),
            ReduceOp::Product if boolean => values.min().unwrap_or(0),
            ReduceOp::Product => values.product(),
            ReduceOp::Average => values.sum::<i64>() / i64::try_from(self.ranks.len()).expect("a small world"),
            _ if boolean => values.max().unwrap_or(0),
            _ => values.sum(),
        }
    }
}

fn item(rng: &mut Rng, recipe: &Recipe, set: &ProcessSet, index: usize) -> Item {
    let ranks = set.ranks.clone();
    let member = |rng: &mut Rng| ranks[rng.usize(..ranks.len())];
    let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    let collective = match rng.u8(..10) {
        _ if recipe.any_floats => Collective::AllReduce { op: ReduceOp::Sum },
        0 => Collective::Barrier,
        1 | 2 => Collective::Broadcast { root: member(rng) },
        3 | 4 => Collective::AllGather,
        5 | 6 => Collective::AllReduce { op: ops[rng.usize(..ops.len())] },
        // Most traffic is alike, so that there is something to fuse.
        _ => Collective::AllReduce { op: ReduceOp::Sum },
    };
    let reduces = collective.reduce_op().is_some();
    let dtype = match DType::ALL[rng.usize(..DType::ALL.len())] {
        _ if recipe.any_floats => [DType::F32, DType::F16, DType::Bf16, DType::F64][rng.usize(..4)],
        DType::Bool if collective.reduce_op() == Some(ReduceOp::Average) => DType::F32,
        other if rng.u8(..3) == 0 => other,
        _ => DType::F32,
    };
    // Now and then a tensor of a megabyte, which travels in many chunks.
    let (columns, most) = match rng.u8(..40) {
        0 => (900, 400),
        _ => ([1, 1, 3, 40, 900][rng.usize(..5)], 8),
    };
    let rows = match collective {
        Collective::AllGather => ranks.iter().map(|_| rng.u64(..=most)).collect(),
        Collective::Barrier => vec![0; ranks.len()],
        _ => vec![rng.u64(..=most); ranks.len()],
    };
    let scaled = reduces && collective.reduce_op() == Some(ReduceOp::Sum) && dtype == DType::F32 && rng.u8(..4) == 0;
    let (prescale, postscale) = if scaled && !recipe.any_floats { (2.0, 0.5) } else { (1.0, 1.0) };
    let culprit = member(rng);
    let mischief = match rng.u8(..16) {
        _ if !recipe.mischief || ranks.len() < 2 => Mischief::None,
        0 if collective != Collective::Barrier => Mischief::Mismatch(culprit),
        1 => Mischief::Refused(culprit),
        2 => Mischief::Withdrawn(culprit),
        _ => Mischief::None,
    };
    let name = TensorName::new(format!("tensor.{index}")).expect("a short name");
    let (set, salt) = (set.id, rng.u64(..));
    Item { set, ranks, name, collective, dtype, columns, rows, prescale, postscale, mischief, follows: None, salt }
}

/// Small whole numbers in any type; written out by hand, so that it shares nothing with the kernels.
fn encode_all(dtype: DType, values: impl Iterator<Item = i64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        let small = u16::try_from(value).expect("values are small");
        match dtype {
            DType::F64 => bytes.extend(f64::from(small).to_le_bytes()),
            DType::F32 => bytes.extend(f32::from(small).to_le_bytes()),
            DType::Bf16 => bytes.extend(&f32::from(small).to_le_bytes()[2..]),
            DType::F16 if small == 0 => bytes.extend([0, 0]),
            DType::F16 => {
                let exponent = small.ilog2();
                let fraction = (u32::from(small) << 10 >> exponent) & 0x3ff;
                bytes.extend(&(((exponent + 15) << 10) | fraction).to_le_bytes()[..2]);
            }
            _ => bytes.extend(&value.to_le_bytes()[..dtype.size_bytes()]),
        }
    }
    bytes
}

/// Floats of very different sizes and both signs.
fn noise(dtype: DType, seed: u64, count: u64) -> Vec<u8> {
    let mut rng = Rng::with_seed(seed);
    let mut bytes = Vec::new();
    for _ in 0..count {
        let value = (rng.f32() - 0.5) * 2.0_f32.powi(-rng.i32(0..12));
        match dtype {
            DType::F64 => bytes.extend((f64::from(value) * rng.f64()).to_le_bytes()),
            DType::Bf16 => bytes.extend(&value.to_le_bytes()[2..]),
            // Any sign and fraction, exponents from -7 to 2.
            DType::F16 => {
                let bits = (rng.u16(..2) << 15) | (rng.u16(8..=17) << 10) | rng.u16(..1 << 10);
                bytes.extend(bits.to_le_bytes());
            }
            _ => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}
