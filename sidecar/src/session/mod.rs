//! Sessions of local workers: how workers connect, what they submit, and the memory that they share with the sidecar.

pub(crate) mod command;
pub(crate) mod directory;
pub(crate) mod gate;
pub(crate) mod gpu_use;
pub(crate) mod gpus;
pub(crate) mod memory_service;
pub(crate) mod outgoing;
pub(crate) mod request;
pub(crate) mod ring;
pub(crate) mod segments;
pub(crate) mod service;
pub(crate) mod table;
pub(crate) mod worker_uids;
