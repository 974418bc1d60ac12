//! How fast the kernels go through bytes, beside `memcpy`: `cargo run --release -p ronde-collectives --example kernels`.
//!
//! Every figure is the best of some repetitions on blocks that stay in the second-level cache, in bytes of operands read in
//! a second.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ronde_collectives::kernels::{
    BLOCK_BYTES_MAX, BlockReducer, KernelError, Side, add_products, add_sum_of_squares, decode, encode, reduce_into,
    reduce_n,
};
use ronde_wire::{Codec, DType, ReduceOp};

fn main() -> Result<(), KernelError> {
    let values: Vec<u8> = (0_u32..).map(|n| n as f32 * 0.37 - 900.0).flat_map(f32::to_le_bytes).take(BLOCK).collect();
    let mut copy = vec![0; BLOCK];
    print("memcpy", BLOCK, || {
        copy.copy_from_slice(black_box(&values));
        Ok(())
    })?;
    print("reduce f32 sum", BLOCK, || {
        reduce_into(DType::F32, ReduceOp::Sum, &mut copy, black_box(&values), Side::AccumulatorLeft)
    })?;
    codecs(&values)?;
    for dtype in [DType::F16, DType::Bf16, DType::F32, DType::F64] {
        let mut sum = 0.0;
        print(&format!("sum of squares {dtype}"), BLOCK, || add_sum_of_squares(dtype, black_box(&values), &mut sum))?;
        black_box(sum);
        for ranks in [2, 4, 8, 16, 64] {
            several(dtype, ranks, &values)?;
        }
    }
    for dtype in [DType::F16, DType::Bf16] {
        let mut reducer = BlockReducer::new(dtype, ReduceOp::Sum, 1.0)?;
        let (block, mut sum) = (&values[..BLOCK_BYTES_MAX], vec![0; BLOCK_BYTES_MAX]);
        print(&format!("block reducer {dtype}, 2 ranks"), 2 * block.len(), || {
            reducer.reduce(2, &mut sum, |_, start, part| {
                part.copy_from_slice(&black_box(block)[start..][..part.len()]);
                Ok::<(), KernelError>(())
            })
        })?;
    }
    Ok(())
}

fn codecs(values: &[u8]) -> Result<(), KernelError> {
    for codec in [Codec::F16, Codec::Bf16] {
        let (mut encoded, mut decoded) = (vec![0; values.len() / 2], vec![0; values.len()]);
        let name = codec.name();
        print(&format!("encode {name}"), values.len(), || encode(codec, DType::F32, black_box(values), &mut encoded))?;
        print(&format!("decode {name}, f32 written"), values.len(), || {
            decode(codec, DType::F32, black_box(&encoded), &mut decoded)
        })?;
    }
    Ok(())
}

fn several(dtype: DType, ranks: usize, values: &[u8]) -> Result<(), KernelError> {
    let each = (BLOCK / ranks).next_multiple_of(64);
    let blocks: Vec<Vec<u8>> =
        (0..ranks).map(|rank| values[rank * 64 % 4_096..][..each.min(BLOCK / 2)].to_vec()).collect();
    let operands: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    let bytes = operands.iter().map(|operand| operand.len()).sum();
    let mut into = vec![0; operands[0].len()];
    let weights = vec![1.0 / ranks as f64; ranks];
    print(&format!("median {dtype}, {ranks} ranks"), bytes, || {
        reduce_n(dtype, ReduceOp::Median, black_box(&operands), &[], &mut into)
    })?;
    print(&format!("weighted sum {dtype}, {ranks} ranks"), bytes, || {
        reduce_n(dtype, ReduceOp::Adasum, black_box(&operands), &weights, &mut into)
    })?;
    let mut gram = vec![0.0; ranks * (ranks + 1) / 2];
    print(&format!("inner products {dtype}, {ranks} ranks"), bytes, || {
        add_products(dtype, black_box(&operands), &mut gram)
    })
}

fn print(name: &str, bytes: usize, mut work: impl FnMut() -> Result<(), KernelError>) -> Result<(), KernelError> {
    let mut best = Duration::MAX;
    for _ in 0..REPETITIONS {
        let start = Instant::now();
        for _ in 0..INNER {
            work()?;
        }
        best = best.min(start.elapsed());
    }
    println!("{name:<34} {:7.2} GB/s", (bytes * INNER) as f64 / best.as_secs_f64() / 1e9);
    Ok(())
}

const BLOCK: usize = 256 << 10;
const REPETITIONS: usize = 30;
const INNER: usize = 4;
