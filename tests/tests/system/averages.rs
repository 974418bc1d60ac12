//! Averages of f16 and bf16: no intermediate overflow, on any number of sidecars, by any algorithm, and no error that a
//! sum in the type does not have.

use anyhow::{Result, ensure};
use ronde::blocking::Client;
use ronde::{DType, Operation, ReduceOp, Tensor, TensorRef};
use ronde_tests::cluster::Plan;
use ronde_tests::crew::{Crew, DATA_PATHS};

/// On one, two and four sidecars; alike and not.
const PLACEMENTS: [&[u32]; 5] = [&[0, 0, 0], &[0, 1], &[0, 0, 0, 1], &[0, 1, 2, 3], &[0, 0, 1, 1, 2, 3]];
/// Sizes that travel eagerly, by recursive doubling or halving, and by a ring.
const ELEMENTS: [usize; 3] = [40, 3_000, 400_000];

#[test]
fn averages_of_large_numbers_are_large_numbers() -> Result<()> {
    for placement in PLACEMENTS {
        let crew = Crew::start(Plan::of(placement), DATA_PATHS[0])?;
        for (dtype, largest) in [(DType::F16, 60_000.0), (DType::Bf16, 3e38)] {
            for elements in ELEMENTS {
                crew.all(|client| check(client, dtype, elements, largest))?;
            }
        }
    }
    Ok(())
}

/// Where sums do not leave f16, they have the bits of sums of f16: small numbers keep their digits.
#[test]
fn averages_of_small_numbers_have_small_errors() -> Result<()> {
    for placement in PLACEMENTS {
        let crew = Crew::start(Plan::of(placement), DATA_PATHS[0])?;
        for scale in [1e-6, 1e-5, 1e-3, 1.0, 1e3] {
            crew.all(|client| {
                let values = |rank: u32| -> Vec<f32> { (0..3_000).map(|i| scale * wave(rank, i)).collect() };
                let mean = client.allreduce("small", &tensor(DType::F16, &values(client.rank())), ReduceOp::Average)?;
                let inputs: Vec<Vec<f64>> =
                    (0..client.size()).map(|rank| numbers(&tensor(DType::F16, &values(rank)))).collect();
                let found = numbers(&mean);
                for (element, found) in found.iter().enumerate() {
                    let exact = inputs.iter().map(|rank| rank[element]).sum::<f64>() / inputs.len() as f64;
                    // Half a last place for each addition between sidecars and one for the result.
                    let largest = inputs.iter().map(|rank| rank[element].abs()).sum::<f64>();
                    let bound = 6.0 * (largest * 2_f64.powi(-11) / inputs.len() as f64 + 2_f64.powi(-25));
                    ensure!((found - exact).abs() <= bound, "element {element}: {found}, not {exact}");
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// The average of equal numbers, of numbers of which some are small, and of infinity.
fn check(client: &Client, dtype: DType, elements: usize, largest: f32) -> Result<()> {
    let size = f64::from(client.size());
    let equal = tensor(dtype, &vec![largest; elements]);
    let expected = numbers(&equal)[0];
    let near = |found: &Tensor, expected: f64, what: &str| {
        let off = numbers(found).into_iter().map(|found| (found - expected).abs() / expected).fold(0.0, f64::max);
        ensure!(off <= 1.0 / 32.0, "{what} of {elements} {dtype} is off by {off:.4} of {expected}");
        Ok(())
    };
    near(&client.allreduce("all", &equal, ReduceOp::Average)?, expected, "all-reduce")?;
    near(&client.reduce_scatter("shares", &equal, ReduceOp::Average)?, expected, "reduce-scatter")?;
    if let Some(reduced) = client.reduce("one", &equal, client.size() - 1, ReduceOp::Average)? {
        near(&reduced, expected, "reduce")?;
    }
    let operation = Operation { postscale: 0.5, ..Operation::allreduce("half", &equal, ReduceOp::Average) };
    if let Some(half) = client.submit_from(&operation)?.wait()?.tensor {
        near(&half, expected / 2.0, "half")?;
    }
    let one = tensor(dtype, &vec![if client.rank() == 0 { largest } else { 1.0 }; elements]);
    let two = [TensorRef::from(&equal), TensorRef::from(&one)];
    let grouped = client.grouped_allreduce("two", &two, ReduceOp::Average)?;
    near(&grouped[0], expected, "group")?;
    near(&grouped[1], (expected + size - 1.0) / size, "group of different numbers")?;
    let infinite = tensor(dtype, &vec![if client.rank() == 0 { f32::INFINITY } else { largest }; elements]);
    let infinite = numbers(&client.allreduce("infinite", &infinite, ReduceOp::Average)?);
    ensure!(infinite.iter().all(|found| *found == f64::INFINITY), "infinity stays: {:?}", infinite[0]);
    let nan = tensor(dtype, &vec![if client.rank() == 0 { f32::NAN } else { 1.0 }; elements]);
    let nan = numbers(&client.allreduce("nan", &nan, ReduceOp::Average)?);
    ensure!(nan.iter().all(|found| found.is_nan()), "NaN stays: {:?}", nan[0]);
    Ok(())
}

/// Numbers of both signs from about -2 to 2.
fn wave(rank: u32, i: u32) -> f32 {
    let mixed = (rank * 7_919 + i * 31).wrapping_mul(2_654_435_761) >> 16;
    mixed as f32 / 16_384.0 - 2.0
}

/// The nearest numbers of the type, ties away from zero.
fn tensor(dtype: DType, values: &[f32]) -> Tensor {
    let bits = |value: f32| match dtype {
        DType::Bf16 => {
            if value.is_nan() {
                0x7fc0
            } else {
                ((value.to_bits() + 0x8000) >> 16) as u16
            }
        }
        _ => half(value),
    };
    let bytes = values.iter().flat_map(|value| bits(*value).to_le_bytes()).collect();
    Tensor { dtype, shape: vec![values.len() as u64], bytes }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the ranges are checked above each cast")]
fn half(value: f32) -> u16 {
    let sign = if value < 0.0 { 0x8000 } else { 0 };
    let magnitude = f64::from(value.abs());
    sign | if value.is_nan() {
        0x7e00
    } else if magnitude >= 65_520.0 {
        0x7c00
    } else if magnitude < 2_f64.powi(-14) {
        (magnitude * 2_f64.powi(24)).round() as u16
    } else {
        let exponent = magnitude.log2().floor() as i32;
        let digits = (magnitude * 2_f64.powi(10 - exponent)).round() as u16;
        // A carry goes into the exponent.
        ((exponent + 14) as u16) * 1_024 + digits
    }
}

/// The values of a tensor.
fn numbers(tensor: &Tensor) -> Vec<f64> {
    let number = |bits: u16| match tensor.dtype {
        DType::Bf16 => f64::from(f32::from_bits(u32::from(bits) << 16)),
        _ => {
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
            let magnitude = match exponent {
                0 => fraction * 2_f64.powi(-24),
                31 if fraction > 0.0 => f64::NAN,
                31 => f64::INFINITY,
                _ => (1_024.0 + fraction) * 2_f64.powi(exponent - 25),
            };
            if bits & 0x8000 == 0 { magnitude } else { -magnitude }
        }
    };
    tensor.bytes.as_chunks::<2>().0.iter().map(|bytes| number(u16::from_le_bytes(*bytes))).collect()
}
