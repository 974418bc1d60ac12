//! Computes contributions and expected results with whole numbers, so that nothing is shared with the kernels.

use fastrand::Rng;
use ronde_wire::{DType, Rank, ReduceOp};

use super::fake_plugins::{FakePlugin, greatest};
use super::item::{Item, Kind};
use super::workload::Workload;

impl Workload {
    /// Returns the bytes that a rank contributes to an item.
    pub(super) fn input(&self, index: usize, rank: Rank) -> Vec<u8> {
        let item = &self.items[index];
        let count = item.elements_of(rank);
        if self.any_floats && item.dtype.is_float() {
            return noise(item.dtype, item.salt ^ (u64::from(rank.0) << 32), count);
        }
        encode_all(item.dtype, (0..count).map(|element| item.value(rank, element) * UNIT))
    }

    /// Returns a rank's result; `None` where only equality, between ranks or between runs, can be checked.
    pub(super) fn expected(&self, index: usize, rank: Rank) -> Option<Vec<u8>> {
        let item = &self.items[index];
        if item.reduction().is_some() && !item.is_exact(self.any_floats) {
            return None;
        }
        let reduced =
            |from: u64, count: u64| encode_all(item.dtype, (from..from + count).map(|element| item.reduced(element)));
        let all = || item.ranks.iter().flat_map(|rank| self.input(index, *rank)).collect();
        let rows = item.rows[0];
        Some(match &item.kind {
            Kind::AllReduce(_) if item.plugin == Some(FakePlugin::Pairwise) => {
                let mut inputs = item.ranks.iter().map(|rank| self.input(index, *rank));
                let first = inputs.next()?;
                inputs.fold(first, |mut reduced, other| {
                    greatest(&mut reduced, &other);
                    reduced
                })
            }
            // The other ones return the last rank's values.
            Kind::AllReduce(ReduceOp::Plugin) => self.input(index, *item.ranks.last()?),
            Kind::AllReduce(_) => reduced(0, rows * item.columns),
            Kind::Reduce(_, root) if *root == rank => reduced(0, rows * item.columns),
            Kind::ReduceScatter(_) => {
                let (first, count) = item.share(rows, item.position(rank));
                reduced(first * item.columns, count * item.columns)
            }
            Kind::Broadcast(root) => self.input(index, *root),
            Kind::AllGather => all(),
            Kind::Gather(root) if *root == rank => all(),
            Kind::Scatter(root) => {
                let (first, count) = item.share(item.rows[item.position(*root)], item.position(rank));
                item.rows_of(&self.input(index, *root), first, count)
            }
            Kind::AllToAll => self.exchanged(index, rank),
            Kind::Message(pair, _) if pair.to == rank => self.input(index, pair.from),
            _ => Vec::new(),
        })
    }

    fn exchanged(&self, index: usize, rank: Rank) -> Vec<u8> {
        let item = &self.items[index];
        let position = item.position(rank);
        let from = |(sender, splits): (&Rank, &Vec<u64>)| {
            let first = splits[..position].iter().sum();
            item.rows_of(&self.input(index, *sender), first, splits[position])
        };
        item.ranks.iter().zip(&item.splits).flat_map(from).collect()
    }
}

/// Whole numbers are counted in sixteenths, so that medians and means of few ranks are whole, too.
const UNIT: i64 = 16;

impl Item {
    /// Whether the whole-number reference has the exact result.
    fn is_exact(&self, any_floats: bool) -> bool {
        let rounds = self.kind == Kind::AllReduce(ReduceOp::ClippedMean)
            && self.dtype == DType::F64
            && !self.ranks.len().is_power_of_two();
        !(any_floats && self.dtype.is_float() || rounds)
    }

    fn rows_of(&self, bytes: &[u8], first: u64, count: u64) -> Vec<u8> {
        let row = self.columns * self.dtype.size_bytes() as u64;
        let place = |rows: u64| usize::try_from(rows * row).expect("small tensors");
        bytes[place(first)..place(first + count)].to_vec()
    }

    /// Small whole numbers, whose sums, products and averages are exact in every type.
    fn value(&self, rank: Rank, element: u64) -> i64 {
        let mixed = self.mixed(rank, element);
        let same = self.mixed(Rank(0), element) % 8;
        let (size, position) = (self.size(), self.position(rank));
        match self.reduction() {
            _ if self.dtype == DType::Bool => mixed & 1,
            Some(ReduceOp::Product) => 1 + i64::from(mixed % 5 == 0 && rank.0 < 6),
            // Averages of floats are whole numbers, those of integers are cut.
            Some(ReduceOp::Average) if self.dtype.is_float() => (mixed & 1) * size,
            Some(ReduceOp::Adasum) if self.is_alike() => same,
            Some(ReduceOp::Adasum) if element % size.unsigned_abs() == position as u64 => same,
            Some(ReduceOp::Adasum) => 0,
            Some(ReduceOp::ClippedMean) => self.length(rank) * self.sign(rank, element) * same,
            _ => mixed % 8,
        }
    }

    /// An element of the result, in sixteenths.
    fn reduced(&self, element: u64) -> i64 {
        let mut values: Vec<i64> = self.askers.iter().map(|rank| self.value(*rank, element)).collect();
        let boolean = self.dtype == DType::Bool;
        let (least, most) = (values.iter().min().copied(), values.iter().max().copied());
        let sum: i64 = values.iter().sum();
        match self.reduction() {
            Some(ReduceOp::Min) => UNIT * least.unwrap_or(0),
            Some(ReduceOp::Max) => UNIT * most.unwrap_or(0),
            Some(ReduceOp::Product) if boolean => UNIT * least.unwrap_or(0),
            Some(ReduceOp::Product) => UNIT * values.iter().product::<i64>(),
            Some(ReduceOp::BitAnd) => UNIT * values.iter().fold(-1, |all, value| all & value),
            Some(ReduceOp::BitOr) => UNIT * values.iter().fold(0, |any, value| any | value),
            Some(ReduceOp::BitXor) => UNIT * values.iter().fold(0, |odd, value| odd ^ value),
            Some(ReduceOp::Average) => UNIT * (sum / self.size()),
            Some(ReduceOp::Median) => {
                values.sort_unstable();
                let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
                UNIT / 2 * (low + high)
            }
            // Equal vectors stay what they are, orthogonal ones are added.
            Some(ReduceOp::Adasum) if self.is_alike() => UNIT * values[0],
            Some(ReduceOp::ClippedMean) => {
                let clipped = |rank: &Rank| self.value(*rank, element) / self.length(*rank);
                UNIT * self.askers.iter().map(clipped).sum::<i64>() / self.size()
            }
            _ if boolean => UNIT * most.unwrap_or(0),
            _ => UNIT * sum,
        }
    }

    fn mixed(&self, rank: Rank, element: u64) -> i64 {
        let mixed = element.wrapping_mul(31).wrapping_add(self.salt).wrapping_add(u64::from(rank.0) * 13);
        i64::try_from((mixed ^ (mixed >> 7)) & 0xffff).expect("16 bits")
    }

    fn size(&self) -> i64 {
        i64::try_from(self.ranks.len()).expect("a small world")
    }

    fn is_alike(&self) -> bool {
        self.salt & 1 == 0
    }

    /// One rank's vector is twice as long as those of all others, and is clipped to their length, which is the median.
    fn length(&self, rank: Rank) -> i64 {
        let longer = self.ranks.len() > 2 && rank == self.ranks[0] && self.salt & 2 == 0;
        1 + i64::from(longer)
    }

    /// Signs change no length. Where the number of ranks is no power of two, only equal values have an exact mean.
    fn sign(&self, rank: Rank, element: u64) -> i64 {
        if self.ranks.len().is_power_of_two() && self.mixed(rank, element) & 16 != 0 { -1 } else { 1 }
    }
}

/// Small numbers, given in sixteenths, in any type.
fn encode_all(dtype: DType, values: impl Iterator<Item = i64>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        let small = f32::from(i16::try_from(value).expect("values are small")) / 16.0;
        match dtype {
            DType::F64 => bytes.extend(f64::from(small).to_le_bytes()),
            DType::F32 => bytes.extend(small.to_le_bytes()),
            DType::Bf16 => bytes.extend(&small.to_le_bytes()[2..]),
            DType::F16 if value == 0 => bytes.extend([0, 0]),
            DType::F16 => {
                let (sign, exponent) = (small.to_bits() >> 31, (small.to_bits() >> 23) & 0xff);
                let fraction = (small.to_bits() >> 13) & 0x3ff;
                bytes.extend(&((sign << 15) | ((exponent + 15 - 127) << 10) | fraction).to_le_bytes()[..2]);
            }
            _ => bytes.extend(&(value / UNIT).to_le_bytes()[..dtype.size_bytes()]),
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
