//! Plans, proofs and kernels, over all small worlds and against plain arithmetic.

mod averages;
mod direct;
mod drawing;
mod exhaustive;
mod figures;
mod formats;
mod independence;
mod interleaving;
mod kernels;
mod mutated;
mod mutations;
mod mutations_of_kinds;
mod nary;
mod performed;
mod planning;
mod rules;
mod worlds;
