//! [`GpuError`]: every failure of a device or a library, as data.

use std::path::PathBuf;

/// A failure of a GPU, its driver or NCCL. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The library is not on this machine.
    #[error("{library} cannot be opened (tried {}): {reason}. {}", paths(.tried), install(.library))]
    NoLibrary {
        /// Its file name.
        library: &'static str,
        /// Where it was looked for.
        tried: Vec<PathBuf>,
        /// The error of the loader.
        reason: String,
    },
    /// The library lacks a function.
    #[error("{library} has no function {function}: it is too old or another library; {}", install(.library))]
    NoFunction {
        /// Its file name.
        library: &'static str,
        /// The function.
        function: &'static str,
    },
    /// The library is there, but its driver does not work or has no device.
    #[error(
        "libcuda.so.1 is there, but no GPU can be used: {reason}. See whether nvidia-smi lists one, and CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// The driver's error.
        reason: String,
    },
    /// The library's version is not supported.
    #[error("{library} is of version {found}, and ronde needs {needed} or later; {}", install(.library))]
    TooOld {
        /// Its file name.
        library: &'static str,
        /// Its version.
        found: String,
        /// The first supported version.
        needed: &'static str,
    },
    /// The device has no memory left.
    #[error("the GPU is out of memory: {function} failed ({name}); free memory there, or use smaller tensors")]
    OutOfMemory {
        /// The function that failed.
        function: &'static str,
        /// The library's name of the error.
        name: String,
    },
    /// A function failed.
    #[error("{function} failed with {name} ({code}): {text}")]
    Call {
        /// The function.
        function: &'static str,
        /// The library's code.
        code: i32,
        /// The library's name of the code.
        name: String,
        /// The library's text.
        text: String,
    },
    /// An argument is wrong; nothing was done.
    #[error("{reason}")]
    Argument {
        /// The cause and what to do.
        reason: String,
    },
    /// An NCCL communicator was aborted, because it failed or its time was up.
    #[error("the NCCL communicator was aborted: {reason}")]
    Aborted {
        /// Why.
        reason: String,
    },
    /// Collectives in two levels were demanded, and a rank cannot perform them.
    #[error("two levels cannot be used, which RONDE_GPU_LEVELS=2 demands: {reason}. Set it to auto or 1 to do without")]
    Unavailable {
        /// The rank and its cause.
        reason: String,
    },
    /// This process was forked from the one that uses the GPU.
    #[error(
        "a GPU cannot be used after fork: this process inherited its use from process {parent}. Start workers with spawn"
    )]
    UsedAfterFork {
        /// The process that opened the driver.
        parent: u32,
    },
    /// The thread that copies has ended, or could not be started.
    #[error("the thread that copies from GPUs is gone: {reason}")]
    Thread {
        /// Why.
        reason: String,
    },
}

impl GpuError {
    pub(crate) fn argument(reason: impl Into<String>) -> Self {
        Self::Argument { reason: reason.into() }
    }

    /// Whether the caller's arguments are wrong, rather than the machine.
    #[must_use]
    pub fn is_callers(&self) -> bool {
        matches!(self, Self::Argument { .. } | Self::UsedAfterFork { .. })
    }
}

fn paths(tried: &[PathBuf]) -> String {
    let names: Vec<_> = tried.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

fn install(library: &str) -> &'static str {
    if library.starts_with("libnccl") {
        "Install the package nvidia-nccl-cu12 of PyPI, which PyTorch for CUDA brings, or set RONDE_NCCL_LIBRARY to the file"
    } else {
        "Install NVIDIA's driver, or start the container with its GPUs"
    }
}
