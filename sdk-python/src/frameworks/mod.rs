//! What the runtimes of frameworks call from their own threads, without Python. Nothing here is linked to a framework.

pub(crate) mod jax;
