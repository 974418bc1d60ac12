//! Errors that stay: after work of a device has failed, each call there returns its code, as in CUDA after an illegal access.
//!
//! Off unless a test asks for it, so that other tests see only the stream that failed.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use crate::control::Code;
use crate::lock;

#[derive(Default)]
struct Sticky {
    is_on: bool,
    /// By device: the first failure.
    codes: HashMap<i32, Code>,
}

static STICKY: LazyLock<Mutex<Sticky>> = LazyLock::new(Mutex::default);

/// Turns the mode on or off, and forgets all errors.
pub(crate) fn set(is_on: bool) {
    *lock(&STICKY) = Sticky { is_on, codes: HashMap::new() };
}

/// Work of a device has ended with this code.
pub(crate) fn add(device: i32, code: Code) {
    let mut sticky = lock(&STICKY);
    if sticky.is_on && code != 0 {
        sticky.codes.entry(device).or_insert(code);
    }
}

/// The code that each call on a device returns; 0 if there is none.
pub(crate) fn of(device: i32) -> Code {
    lock(&STICKY).codes.get(&device).copied().unwrap_or_default()
}
