//! The worker's script.

use ronde::web::{Client, Options};
use ronde::{Error, ReduceOp, TensorRef};
use wasm_bindgen::JsError;
use wasm_bindgen::prelude::wasm_bindgen;

/// Takes part in a job as a rank: each kind of tensor once, a refusal, the job's status. Returns lines of text.
///
/// # Errors
/// The first failure; the text is the reason.
#[wasm_bindgen]
pub async fn work(url: String, job: String, rank: u32, token: Vec<u8>, pid: u32) -> Result<String, JsError> {
    let mut options = Options::new(url, &job, rank, &token)?;
    options.pid = pid;
    let client = Client::connect(options).await?;
    let mut lines = vec![format!("rank {} of {}", client.rank(), client.size())];
    lines.extend(collectives(&client).await?);
    lines.push(format!("status {}", client.status().await?));
    client.close().await;
    Ok(lines.join("\n"))
}

async fn collectives(client: &Client) -> Result<Vec<String>, Error> {
    let rank = client.rank();
    let own = [1.0_f32, 10.0, 100.0].map(|number| number * (rank + 1) as f32);
    let sum = client.allreduce("weights", TensorRef::of(&[3], &own)?, ReduceOp::Sum).await?;
    let rows = client.allgather("rows", TensorRef::of(&[1, 2], &[rank, rank + 7].map(i64::from))?).await?;
    let root = client.broadcast("root", TensorRef::of(&[2], &[f64::from(rank), 0.5])?, 0).await?;
    // As large as a message may be, so that it fills a call by itself.
    let large = vec![rank as f32 + 1.0; LARGE_ELEMENTS];
    let shape = [LARGE_ELEMENTS as u64];
    let large = client.allreduce("large", TensorRef::of(&shape, &large)?, ReduceOp::Sum).await?.to_vec::<f32>()?;
    let refused = client.broadcast("too large", TensorRef::of(&[1 << 19], &vec![0.0_f64; 1 << 19])?, 0).await;
    // The other ranks submit it, and fail because this one did not.
    let refused = refused.err().map_or_else(|| "not refused".to_owned(), |error| error.to_string());
    client.barrier(None).await?;
    Ok(vec![
        format!("sum {:?}", sum.to_vec::<f32>()?),
        format!("rows {:?} {:?}", rows.shape, rows.to_vec::<i64>()?),
        format!("root {:?}", root.to_vec::<f64>()?),
        format!("large {} {:?}", large.len(), large.iter().copied().reduce(f32::max)),
        format!("refused {refused}"),
    ])
}

/// 1 MiB.
const LARGE_ELEMENTS: usize = 1 << 18;
