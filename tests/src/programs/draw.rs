//! Draws random programs.

use fastrand::Rng;
use ronde::{Codec, DType, ReduceOp};

use super::{Grouping, Kind, Program, Step};
use crate::PAIRWISE;

/// Draws programs for so many ranks.
#[derive(Debug)]
pub struct Drawing {
    rng: Rng,
    ranks: u32,
    sets: Vec<Vec<u32>>,
    ids: u32,
}

impl Drawing {
    /// Draws the program of a seed.
    #[must_use]
    pub fn program(seed: u64, ranks: u32) -> Program {
        let mut drawing = Self { rng: Rng::with_seed(seed), ranks, sets: Vec::new(), ids: 0 };
        drawing.sets = drawing.sets();
        let phases = drawing.rng.usize(1..=3);
        let phases = (0..phases).map(|_| drawing.phase()).collect();
        Program { seed, sets: drawing.sets, phases }
    }

    /// Draws different sets, with ranks in any order, none with all ranks.
    fn sets(&mut self) -> Vec<Vec<u32>> {
        let mut sets: Vec<Vec<u32>> = Vec::new();
        for _ in 0..self.rng.usize(..4) {
            let set: Vec<u32> = (0..self.ranks).filter(|_| self.rng.bool()).collect();
            if !set.is_empty() && set.len() < self.ranks as usize && !sets.contains(&set) {
                sets.push(set);
            }
        }
        sets
    }

    fn phase(&mut self) -> Vec<Step> {
        let steps = [1, 4, 16, 40][self.rng.usize(..4)];
        (0..steps).map(|_| self.step()).collect()
    }

    fn step(&mut self) -> Step {
        self.ids += 1;
        let set = self.rng.usize(..=self.sets.len());
        let ranks = if set == 0 { self.ranks as usize } else { self.sets[set - 1].len() };
        let kind = self.kind(ranks);
        let reduction = kind.reduction();
        let dtype = self.dtype(reduction);
        let columns = [1, 1, 3, 40, 900][self.rng.usize(..5)];
        let most = if self.rng.u8(..16) == 0 { 300 } else { 7 };
        let ragged = matches!(kind, Kind::AllGather | Kind::Gather(_));
        let rows = self.rng.u64(..=most);
        let rows = match &kind {
            Kind::AllToAll(splits) => splits.iter().map(|splits| splits.iter().sum()).collect(),
            _ => (0..ranks).map(|_| if ragged { self.rng.u64(..=most) } else { rows }).collect(),
        };
        let plain = matches!(kind, Kind::AllReduce(ReduceOp::Sum | ReduceOp::Average, _)) && dtype == DType::F32;
        let codec = match self.rng.u8(..4) {
            0 if plain => Codec::F16,
            1 if plain => Codec::Bf16,
            _ => Codec::None,
        };
        let scaled = reduction.is_some() && dtype != DType::Bool && dtype.is_float() && self.rng.u8(..4) == 0;
        let scales =
            if scaled { ([0.5, 2.0][self.rng.usize(..2)], [0.5, 4.0][self.rng.usize(..2)]) } else { (1.0, 1.0) };
        Step { id: self.ids, set, kind, dtype, columns, rows, scales, codec }
    }

    fn kind(&mut self, ranks: usize) -> Kind {
        let (one, op) = (self.rng.usize(..ranks), self.op());
        let other = if ranks > 1 { (one + self.rng.usize(1..ranks)) % ranks } else { one };
        match self.rng.u8(..16) {
            0 => Kind::ReduceScatter(op),
            1 => Kind::Reduce(op, one),
            2 => Kind::AllGather,
            3 => Kind::Gather(one),
            4 => Kind::Broadcast(one),
            5 => Kind::Scatter(one),
            6 => Kind::AllToAll((0..ranks).map(|_| (0..ranks).map(|_| self.rng.u64(..4)).collect()).collect()),
            7 if ranks > 1 => Kind::Message(one, other),
            8 if ranks > 1 => Kind::FromAny(one),
            9 => Kind::Barrier,
            10 => Kind::AllReduce([ReduceOp::Median, ReduceOp::ClippedMean][self.rng.usize(..2)], Grouping::Alone),
            11 => Kind::AllReduce(op, Grouping::Of(self.rng.u64(1..=5))),
            _ => Kind::AllReduce(op, Grouping::Alone),
        }
    }

    fn op(&mut self) -> ReduceOp {
        PAIRWISE[self.rng.usize(..PAIRWISE.len())]
    }

    /// A type that the reduction has.
    fn dtype(&mut self, reduction: Option<ReduceOp>) -> DType {
        let floats = [DType::F16, DType::Bf16, DType::F32, DType::F64];
        let dtype = DType::ALL[self.rng.usize(..DType::ALL.len())];
        match reduction {
            Some(ReduceOp::Median | ReduceOp::ClippedMean) => floats[self.rng.usize(..4)],
            Some(ReduceOp::Average) if dtype == DType::Bool => DType::F32,
            Some(op) if op.is_bitwise() && dtype.is_float() => [DType::U8, DType::I32, DType::I64][self.rng.usize(..3)],
            _ => dtype,
        }
    }
}

impl Kind {
    /// The reduction, where there is one.
    #[must_use]
    pub fn reduction(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op, _) | Self::ReduceScatter(op) | Self::Reduce(op, _) => Some(*op),
            _ => None,
        }
    }
}
