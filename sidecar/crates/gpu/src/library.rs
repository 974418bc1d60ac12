//! A shared library that is opened at run time, and tables of its functions.

#![allow(unsafe_code, reason = "opening libraries and their functions")]

use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use crate::error::GpuError;

/// An open library. It stays open: its own threads may outlive any value of this process.
#[derive(Debug)]
pub(crate) struct Library {
    inner: ManuallyDrop<libloading::Library>,
    name: &'static str,
    path: PathBuf,
}

impl Library {
    /// Opens the first of `candidates` that the loader accepts.
    ///
    /// # Errors
    /// [`GpuError::NoLibrary`] with the loader's last error.
    pub(crate) fn open(name: &'static str, candidates: Vec<PathBuf>) -> Result<Self, GpuError> {
        let mut reason = "no path to try".to_owned();
        for path in &candidates {
            // SAFETY: the constructors of NVIDIA's libraries, and of those that take their place, have no preconditions.
            match unsafe { libloading::Library::new(path) } {
                Ok(inner) => return Ok(Self { inner: ManuallyDrop::new(inner), name, path: path.clone() }),
                Err(error) => reason = with_cause(&error),
            }
        }
        Err(GpuError::NoLibrary { library: name, tried: candidates, reason })
    }

    /// The path or name that the loader accepted.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `F` is the type of a function pointer with the signature of the function.
    ///
    /// # Errors
    /// [`GpuError::NoFunction`].
    pub(crate) unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, GpuError> {
        // SAFETY: by this function's contract. The library stays open, so a copy of the pointer stays valid.
        let found = unsafe { self.inner.get::<F>(name.as_bytes()) };
        found.map(|symbol| *symbol).map_err(|_| GpuError::NoFunction { library: self.name, function: name })
    }
}

/// An error with the loader's text, which is its cause.
fn with_cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// Defines a table of function pointers that return the library's code as a number, and how it is loaded. Codes are
/// numbers, because a newer library returns codes that an enum of this build does not have.
macro_rules! function_table {
    ($(#[$documentation:meta])* $table:ident { $($function:ident($($argument:ty),* $(,)?);)* }) => {
        $(#[$documentation])*
        #[expect(non_snake_case, reason = "the library's names")]
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct $table {
            $(pub(crate) $function: unsafe extern "C" fn($($argument),*) -> ::std::ffi::c_int,)*
        }

        impl $table {
            /// Finds all functions.
            ///
            /// # Errors
            /// [`GpuError::NoFunction`](crate::GpuError::NoFunction) for the first that is missing.
            pub(crate) fn load(library: &$crate::library::Library) -> Result<Self, $crate::error::GpuError> {
                Ok(Self {
                    $(
                        // SAFETY: the signature is that of the library's header, as the table's author has checked.
                        $function: unsafe { library.function(stringify!($function))? },
                    )*
                })
            }
        }
    };
}

pub(crate) use function_table;
