//! How long one small all-reduce takes: `ronde run -np 2 target/release/examples/latency [ROUNDS [BYTES]]`.
//!
//! Blocks of operations over the ring and on the gRPC stream would need two sessions of one rank, so run it twice, in turns:
//! with and without `RONDE_RING=0`. Rank 0 prints the median, the 10th and the 90th percentile in microseconds.

use std::time::Instant;

use ronde::blocking::Client;
use ronde::{Options, ReduceOp, TensorRef};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| arguments.next().map_or(Ok(default), |text| text.parse());
    let (rounds, bytes) = (number(2_000)?, number(4)?);
    let client = Client::connect(Options::from_env()?)?;
    let mine = vec![1.0_f32; bytes.div_ceil(4)];
    let shape = [mine.len() as u64];
    let tensor = TensorRef::of(&shape, &mine)?;
    let mut times = Vec::with_capacity(rounds);
    for round in 0..rounds + WARM_UP {
        let begin = Instant::now();
        let sum = client.allreduce("latency", tensor, ReduceOp::Sum)?;
        if round >= WARM_UP {
            times.push(begin.elapsed());
        }
        anyhow::ensure!(sum.to_vec::<f32>()?.first() == Some(&(client.size() as f32)), "the sum is wrong");
    }
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_micros();
    if client.rank() == 0 {
        println!(
            "{} {bytes} B: median {} us, 10 % {} us, 90 % {} us",
            client.submission_path(),
            at(50),
            at(10),
            at(90)
        );
    }
    Ok(())
}

const WARM_UP: usize = 200;
