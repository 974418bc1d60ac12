//! The library behind the tests of whole systems: real processes in the test's hands.

#![forbid(unsafe_code)]

pub mod cluster;
pub mod crew;
pub mod harness;
pub mod left_out;
pub mod programs;
pub mod raw;
pub mod regression;
pub mod script;
pub mod sim;
pub mod web;
