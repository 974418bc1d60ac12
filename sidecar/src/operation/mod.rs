//! Operations that the engine has admitted: their memory, their execution on the lanes, and their results.

pub(crate) mod delivery;
pub(crate) mod device;
pub(crate) mod lanes;
pub(crate) mod memory;
pub(crate) mod results;
pub(crate) mod table;
