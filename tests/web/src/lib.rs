//! A worker in WebAssembly: `tests/tests/system/web/node.rs` runs it in Node, by `tests/web/worker.cjs`. `make web-worker` builds it.

#![forbid(unsafe_code)]

#[cfg(target_arch = "wasm32")]
pub mod worker;
