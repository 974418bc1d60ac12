//! The average of one tensor over all ranks: `ronde run -np 4 target/debug/examples/allreduce`.

use ronde::{Client, Options, ReduceOp, TensorRef};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let client = Client::connect(Options::from_env()?).await?;
    let (rank, size) = (client.rank(), client.size());

    let mine: Vec<f32> = (0..8_u8).map(|i| f32::from(i) + rank as f32).collect();
    let mean = client.allreduce("mine", TensorRef::of(&[2, 4], &mine)?, ReduceOp::Average).await?;
    println!("rank {rank} of {size}: {:?} -> {:?}", mine, mean.to_vec::<f32>()?);

    let ranks = client.allgather("ranks", TensorRef::of(&[1], &[i64::from(rank)])?).await?;
    println!("rank {rank} of {size}: all ranks {:?}", ranks.to_vec::<i64>()?);

    client.barrier("done").await?;
    client.close().await;
    Ok(())
}
