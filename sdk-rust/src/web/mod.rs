//! The client of workers that have neither Unix sockets nor shared memory: WebAssembly in a browser or in Node. It uses
//! gRPC-Web to a sidecar with a listener (`--web-listen`). Tensors travel inside messages, each of at most 1 MiB.
//!
//! ```no_run
//! # async fn run(token: &[u8]) -> Result<(), ronde::Error> {
//! use ronde::web::{Client, Options};
//! use ronde::{ReduceOp, TensorRef};
//!
//! let client = Client::connect(Options::new("http://127.0.0.1:7600", "night", 1, token)?).await?;
//! let sum = client.allreduce("gradient", TensorRef::of(&[3], &[1.0_f32, 2.0, 3.0])?, ReduceOp::Sum).await?;
//! println!("rank {} of {}: {:?}, in {}", client.rank(), client.size(), sum.to_vec::<f32>()?, client.status().await?);
//! client.close().await;
//! # Ok(()) }
//! ```
//!
//! Rules and methods are those of the [crate's other clients](crate). A client belongs to one thread, and its tasks run in that
//! thread's event loop. If a program blocks the event loop for longer than the job's peer timeout, the sidecar ends its session.

mod channel;
mod client;
mod handle;
mod link;
mod options;
mod platform;
mod session;

pub use client::Client;
pub use handle::Handle;
pub use options::Options;

#[cfg(test)]
mod tests;
