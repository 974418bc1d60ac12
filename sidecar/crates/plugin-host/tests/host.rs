//! Tests of plugins in a host: what they receive, what they may not do, and that the host survives them.

#![forbid(unsafe_code)]

#[path = "host/conformance.rs"]
mod conformance;
#[path = "host/faults.rs"]
mod faults;
#[path = "host/fuzz.rs"]
mod fuzz;
#[path = "host/manifests.rs"]
mod manifests;
#[path = "host/modules.rs"]
mod modules;
#[path = "host/mutations.rs"]
mod mutations;
#[path = "host/refused.rs"]
mod refused;
#[path = "host/shapes.rs"]
mod shapes;
#[path = "host/support.rs"]
mod support;
#[path = "host/text.rs"]
mod text;
#[path = "host/trust.rs"]
mod trust;
