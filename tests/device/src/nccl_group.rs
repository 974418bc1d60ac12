//! Groups of NCCL's calls. Each call returns at once here, so a group has nothing to put off.

#![expect(unsafe_code, reason = "functions of the C ABI")]

use crate::control::{Code, injected};

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> Code {
    injected("ncclGroupStart")
}

// SAFETY: the name is that of the library that this one takes the place of.
#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> Code {
    injected("ncclGroupEnd")
}
