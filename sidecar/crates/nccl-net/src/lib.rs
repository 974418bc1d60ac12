//! `libnccl-net-ronde.so`: a net plugin for NCCL, with which sidecars carry and encrypt the traffic between hosts.
//!
//! NCCL loads it by `NCCL_NET_PLUGIN=ronde` and calls the functions of one of its tables. The process connects to the
//! sidecar on its host, as a worker of ronde does, and has a ring in shared memory for each connection. A send is complete
//! when its bytes are in the ring; a receive is complete when its bytes have been copied from the ring to NCCL's buffer.
//! The threads of NCCL do all of this when they call; the library has no thread.
//!
//! | module | contents |
//! |---|---|
//! | `abi` | NCCL's types and tables, declared by their documented layout |
//! | `exports` | the tables and their functions; **all unsafe code but that of `buffer`** |
//! | `buffer` | NCCL's buffers |
//! | `plugin` | what the functions do, in safe code: settings, pending connections |
//! | `connection` | rings that are being connected, senders and receivers |
//! | `settings` | the sidecar and the worker's token, from the environment |
//! | `error` | errors, with NCCL's code for each |

#![deny(unsafe_code)]

mod abi;
mod buffer;
mod connection;
mod error;
mod exports;
mod plugin;
mod settings;
