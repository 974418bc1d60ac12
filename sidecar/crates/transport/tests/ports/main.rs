//! Tests of ports over QUIC, over TLS, and in memory: one list for every transport, and tests of each.

mod addresses;
mod harness;
mod hostile;
mod memberships;
mod memory_controls;
mod port_list;
mod refusals;
mod replacement;
mod shutdown;
mod tls;
