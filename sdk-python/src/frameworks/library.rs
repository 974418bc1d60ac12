//! A library that the process has loaded already, and the addresses of its functions.

#![allow(unsafe_code, reason = "dlopen and dlsym take and return addresses")]

use std::ffi::{CStr, CString, c_void};
use std::ptr::NonNull;

/// A library of the process. It stays loaded until the process ends.
pub(super) struct Library {
    handle: NonNull<c_void>,
    path: String,
}

impl Library {
    /// Finds a library that has been loaded from this path.
    ///
    /// # Errors
    /// Why it is not there, as a sentence.
    pub(super) fn loaded(path: &str) -> Result<Self, String> {
        let name = CString::new(path).map_err(|_| format!("the path {path:?} contains a NUL"))?;
        // SAFETY: the name is a C string. RTLD_NOLOAD runs no code of the library.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        let handle = NonNull::new(handle).ok_or_else(|| format!("the process has not loaded {path}"))?;
        Ok(Self { handle, path: path.to_owned() })
    }

    /// The address of a function.
    ///
    /// # Errors
    /// That the library has none of this name, as a sentence.
    pub(super) fn function(&self, name: &CStr) -> Result<NonNull<c_void>, String> {
        // SAFETY: the handle is of `dlopen` and never closed; the name is a C string.
        let address = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        NonNull::new(address).ok_or_else(|| format!("{} has no function {}", self.path, name.to_string_lossy()))
    }
}

/// Whether an address is in the code or data of a library that the process has loaded.
pub(super) fn is_in_a_library(address: usize) -> bool {
    // SAFETY: all fields of the structure are pointers, for which zeros are valid.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `dladdr` only compares the address with those of loaded libraries, and writes to the structure.
    unsafe { libc::dladdr(address as *const c_void, &raw mut found) != 0 }
}
