//! Ports on loopback, over QUIC and TLS, and in memory: one list of tests for all, and what belongs to each.

mod addresses;
mod harness;
mod hostile;
mod memory_controls;
mod port_list;
mod refusals;
mod replacement;
mod shutdown;
mod tls;
