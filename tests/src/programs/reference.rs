//! The sequential interpreter: computes each rank's contribution and result of a step, in f64 and without the kernels.

#![allow(clippy::cast_possible_truncation, reason = "values are small whole numbers that every type holds exactly")]

use anyhow::{Result, ensure};
use ronde::{DType, ReduceOp, Tensor};

use super::{Kind, Step};

/// The expected result of a rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expected {
    pub(super) shape: Vec<u64>,
    pub(super) values: Vec<f64>,
    /// The tolerance, relative to the largest value.
    pub(super) tolerance: f64,
}

impl Step {
    /// Returns the tensor of the rank at a position of the set, with `longer` rows added.
    pub(super) fn input(&self, seed: u64, place: usize, longer: u64) -> Result<Tensor> {
        let rows = self.rows[place] + longer;
        let values = (0..rows * self.columns).map(|element| self.value(seed, place, element));
        let bytes = values.flat_map(|value| encode(self.dtype, value)).collect();
        Ok(Tensor { dtype: self.dtype, shape: self.shape(rows), bytes })
    }

    /// Small whole numbers: most reductions are exact in every type.
    fn value(&self, seed: u64, place: usize, element: u64) -> f64 {
        let mut mixed = seed ^ (u64::from(self.id) << 32) ^ ((place as u64) << 16) ^ element;
        for _ in 0..2 {
            mixed = (mixed ^ (mixed >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        let number = (mixed >> 40) % 8;
        match self.kind.reduction() {
            _ if self.dtype == DType::Bool => (number % 2) as f64,
            Some(ReduceOp::Product) => (1 + number % 2) as f64,
            _ => number as f64,
        }
    }

    fn shape(&self, rows: u64) -> Vec<u64> {
        if self.columns == 1 { vec![rows] } else { vec![rows, self.columns] }
    }

    fn all(&self, seed: u64, place: usize, longer: u64) -> Vec<f64> {
        let elements = (self.rows[place] + longer) * self.columns;
        (0..elements).map(|element| self.value(seed, place, element)).collect()
    }

    /// Returns the result of the rank at a position; `None` for none.
    pub(super) fn expected(&self, seed: u64, place: usize, longer: u64) -> Option<Expected> {
        let ranks = self.rows.len();
        let exact = |rows: u64, values| Some(Expected { shape: self.shape(rows), values, tolerance: 0.0 });
        let cut = |values: Vec<f64>, first: u64, rows: u64| {
            let range = (first * self.columns) as usize..((first + rows) * self.columns) as usize;
            values[range].to_vec()
        };
        match &self.kind {
            Kind::AllReduce(op, _) => Some(self.reduced(seed, *op, longer)),
            Kind::Reduce(op, root) => (*root == place).then(|| self.reduced(seed, *op, 0)),
            Kind::ReduceScatter(op) => {
                let (first, rows) = share(self.rows[0], ranks, place);
                let Expected { values, tolerance, .. } = self.reduced(seed, *op, 0);
                Some(Expected { shape: self.shape(rows), values: cut(values, first, rows), tolerance })
            }
            Kind::AllGather => exact(self.rows.iter().sum(), self.gathered(seed)),
            Kind::Gather(root) if *root == place => exact(self.rows.iter().sum(), self.gathered(seed)),
            Kind::Broadcast(root) => exact(self.rows[*root], self.all(seed, *root, 0)),
            Kind::Scatter(root) => {
                let (first, rows) = share(self.rows[*root], ranks, place);
                exact(rows, cut(self.all(seed, *root, 0), first, rows))
            }
            Kind::AllToAll(splits) => {
                let from = |sender: usize| {
                    let first = splits[sender][..place].iter().sum();
                    cut(self.all(seed, sender, 0), first, splits[sender][place])
                };
                exact(splits.iter().map(|splits| splits[place]).sum(), (0..ranks).flat_map(from).collect())
            }
            Kind::Message(from, to) if *to == place => exact(self.rows[*from], self.all(seed, *from, 0)),
            Kind::Gather(_) | Kind::Message(..) | Kind::FromAny(_) | Kind::Barrier => None,
        }
    }

    /// Returns what the receiver gets from one of the others.
    pub(super) fn sent_by(&self, seed: u64, place: usize) -> Expected {
        Expected { shape: self.shape(self.rows[place]), values: self.all(seed, place, 0), tolerance: 0.0 }
    }

    fn gathered(&self, seed: u64) -> Vec<f64> {
        (0..self.rows.len()).flat_map(|place| self.all(seed, place, 0)).collect()
    }

    fn reduced(&self, seed: u64, op: ReduceOp, longer: u64) -> Expected {
        let (before, after) = self.scales;
        let ranks: Vec<Vec<f64>> = (0..self.rows.len())
            .map(|place| self.all(seed, place, longer).into_iter().map(|value| value * before).collect())
            .collect();
        let weights = if op == ReduceOp::ClippedMean { clipped(&ranks) } else { Vec::new() };
        let column = |element: usize| ranks.iter().map(move |rank| rank[element]);
        let values = (0..ranks[0].len()).map(|element| {
            let value = match op {
                ReduceOp::ClippedMean => column(element).zip(&weights).map(|(value, weight)| value * weight).sum(),
                _ => combine(self.dtype, op, &column(element).collect::<Vec<f64>>()),
            };
            value * after
        });
        let inexact =
            matches!(op, ReduceOp::Average | ReduceOp::Median | ReduceOp::ClippedMean) && self.dtype.is_float();
        let tolerance = if inexact { tolerance(self.dtype, self.codec) } else { 0.0 };
        Expected { shape: self.shape(self.rows[0] + longer), values: values.collect(), tolerance }
    }
}

impl Expected {
    /// Compares a result.
    ///
    /// # Errors
    /// The first difference.
    pub(super) fn compare(&self, found: &Tensor, dtype: DType) -> Result<()> {
        ensure!(found.dtype == dtype, "the result is of {}, not {dtype}", found.dtype);
        ensure!(found.shape == self.shape, "the result is of shape {:?}, not {:?}", found.shape, self.shape);
        let largest = self.values.iter().fold(1e-3, |largest: f64, value| largest.max(value.abs()));
        let elements = found.bytes.chunks(dtype.size_bytes()).zip(&self.values).enumerate();
        for (element, (bytes, expected)) in elements {
            let value = decode(dtype, bytes);
            let off = (value - expected).abs();
            ensure!(off <= self.tolerance * largest, "element {element} is {value}, not {expected}");
        }
        Ok(())
    }
}

fn combine(dtype: DType, op: ReduceOp, column: &[f64]) -> f64 {
    let boolean = dtype == DType::Bool;
    let bits =
        |combine: fn(u64, u64) -> u64| column.iter().map(|value| *value as u64).reduce(combine).unwrap_or(0) as f64;
    let least = column.iter().copied().fold(f64::INFINITY, f64::min);
    let most = column.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum = column.iter().sum::<f64>();
    match op {
        ReduceOp::Sum if boolean => most,
        ReduceOp::Product if boolean => least,
        ReduceOp::Sum => sum,
        ReduceOp::Average if dtype.is_float() => sum / column.len() as f64,
        ReduceOp::Average => (sum / column.len() as f64).trunc(),
        ReduceOp::Min => least,
        ReduceOp::Max => most,
        ReduceOp::Product => column.iter().product(),
        ReduceOp::BitAnd => bits(|a, b| a & b),
        ReduceOp::BitOr => bits(|a, b| a | b),
        ReduceOp::BitXor => bits(|a, b| a ^ b),
        _ => {
            let mut sorted = column.to_vec();
            sorted.sort_by(f64::total_cmp);
            (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0
        }
    }
}

/// The weights of a clipped mean.
fn clipped(ranks: &[Vec<f64>]) -> Vec<f64> {
    let norms: Vec<f64> = ranks.iter().map(|rank| rank.iter().map(|value| value * value).sum::<f64>().sqrt()).collect();
    let mut sorted = norms.clone();
    sorted.sort_by(f64::total_cmp);
    let middle = (sorted[(sorted.len() - 1) / 2] + sorted[sorted.len() / 2]) / 2.0;
    let weight = |norm: &f64| if *norm > 0.0 { (middle / norm).min(1.0) } else { 1.0 };
    norms.iter().map(|norm| weight(norm) / ranks.len() as f64).collect()
}

/// A few roundings of the type, and of the codec.
fn tolerance(dtype: DType, codec: ronde::Codec) -> f64 {
    let unit = |digits: i32| 2_f64.powi(-digits);
    let own = match dtype {
        DType::F16 => unit(9),
        DType::Bf16 => unit(6),
        DType::F32 => unit(22),
        _ => unit(50),
    };
    match codec {
        ronde::Codec::F16 => unit(9),
        ronde::Codec::Bf16 => unit(6),
        _ => own,
    }
}

/// The first row and the number of rows of a rank's share.
fn share(rows: u64, ranks: usize, place: usize) -> (u64, u64) {
    let (ranks, place) = (ranks as u64, place as u64);
    let (each, longer) = (rows / ranks, rows % ranks);
    (place * each + place.min(longer), each + u64::from(place < longer))
}

/// A small whole number in any type.
fn encode(dtype: DType, value: f64) -> Vec<u8> {
    let single = value as f32;
    match dtype {
        DType::F64 => value.to_le_bytes().to_vec(),
        DType::F32 => single.to_le_bytes().to_vec(),
        DType::Bf16 => single.to_le_bytes()[2..].to_vec(),
        DType::F16 if value == 0.0 => vec![0, 0],
        DType::F16 => {
            let exponent = (single.to_bits() >> 23) + 15 - 127;
            (exponent << 10 | (single.to_bits() >> 13) & 0x3ff).to_le_bytes()[..2].to_vec()
        }
        _ => (value as i64).to_le_bytes()[..dtype.size_bytes()].to_vec(),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    let half = |bits: u64| {
        let (exponent, fraction) = ((bits >> 10 & 0x1f) as i32, (bits & 0x3ff) as f64);
        let magnitude = match exponent {
            0 => fraction * 2_f64.powi(-24),
            31 => f64::INFINITY,
            _ => (1_024.0 + fraction) * 2_f64.powi(exponent - 25),
        };
        if bits & 0x8000 == 0 { magnitude } else { -magnitude }
    };
    let signed = |width: u32| ((bits << (64 - width)) as i64 >> (64 - width)) as f64;
    match dtype {
        DType::F64 => f64::from_bits(bits),
        DType::F32 => f64::from(f32::from_bits(bits as u32)),
        DType::Bf16 => f64::from(f32::from_bits((bits as u32) << 16)),
        DType::F16 => half(bits),
        DType::I8 => signed(8),
        DType::I16 => signed(16),
        DType::I32 => signed(32),
        DType::I64 => bits as i64 as f64,
        _ => bits as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Drawing, Grouping};
    use super::*;

    /// Results that are right but for one element, its type or its shape.
    #[test]
    fn every_difference_is_noticed() -> Result<()> {
        let mut step = Drawing::program(0, 2).phases.remove(0).remove(0);
        (step.kind, step.set, step.columns, step.rows) =
            (Kind::AllReduce(ReduceOp::Sum, Grouping::Alone), 0, 3, vec![5, 5]);
        (step.scales, step.codec) = ((1.0, 1.0), ronde::Codec::None);
        for dtype in DType::ALL {
            step.dtype = dtype;
            let expected = step.expected(7, 0, 0).expect("every rank has a result");
            let bytes: Vec<u8> = expected.values.iter().flat_map(|value| encode(dtype, *value)).collect();
            let right = Tensor { dtype, shape: vec![5, 3], bytes };
            expected.compare(&right, dtype)?;
            for element in 0..15 {
                let mut wrong = right.clone();
                let place = element * dtype.size_bytes()..(element + 1) * dtype.size_bytes();
                let other = encode(dtype, if expected.values[element] == 1.0 { 0.0 } else { 1.0 });
                wrong.bytes[place].copy_from_slice(&other);
                assert!(expected.compare(&wrong, dtype).is_err(), "{dtype}, element {element}");
            }
            assert!(expected.compare(&Tensor { shape: vec![15], ..right.clone() }, dtype).is_err());
        }
        Ok(())
    }

    #[test]
    fn inputs_of_every_type_decode_to_their_values() -> Result<()> {
        let mut program = Drawing::program(1, 3);
        let step = &mut program.phases[0][0];
        for dtype in DType::ALL {
            (step.dtype, step.kind) = (dtype, Kind::AllGather);
            let input = step.input(1, 0, 2)?;
            let values: Vec<f64> = input.bytes.chunks(dtype.size_bytes()).map(|bytes| decode(dtype, bytes)).collect();
            assert_eq!(values, step.all(1, 0, 2), "{dtype}");
        }
        Ok(())
    }
}
