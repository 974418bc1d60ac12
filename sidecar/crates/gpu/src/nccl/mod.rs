//! NCCL: collectives among the GPUs of a host.
//!
//! Communicators are non-blocking: no call waits for another rank longer than its bound. When a rank fails or its time is
//! up, the communicator is aborted, also by a drop, and the error has the reason.

pub mod collective;
mod communicator;
mod local;
mod table;

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::GpuError;
use crate::library::Library;
use local::GroupTable;
use table::NcclTable;

pub use communicator::{Communicator, ReduceOp, UniqueId};
pub use local::{Buffers, LocalCommunicators, Step};

/// NCCL, of a supported version.
#[derive(Debug)]
pub struct Nccl {
    table: NcclTable,
    group: GroupTable,
    path: PathBuf,
    version: (u32, u32, u32),
}

impl Nccl {
    /// Opens NCCL: the file that RONDE_NCCL_LIBRARY names; else the one of the package `nvidia-nccl` below one of `folders`,
    /// which are Python's search path; else the system's. So a process that uses PyTorch uses PyTorch's.
    ///
    /// # Errors
    /// [`GpuError::NoLibrary`], [`GpuError::NoFunction`], or [`GpuError::TooOld`].
    pub fn find(folders: &[PathBuf]) -> Result<Arc<Self>, GpuError> {
        match std::env::var_os(VARIABLE) {
            Some(chosen) => Self::open(vec![PathBuf::from(chosen)]),
            None => Self::open(candidates(folders)),
        }
    }

    /// Opens the first of these files that exists.
    ///
    /// # Errors
    /// Those of [`Nccl::find`].
    pub fn open(files: Vec<PathBuf>) -> Result<Arc<Self>, GpuError> {
        let library = Library::open(LIBRARY, files)?;
        let (table, group) = (NcclTable::load(&library)?, GroupTable::load(&library)?);
        let mut nccl = Self { table, group, path: library.path().to_owned(), version: (0, 0, 0) };
        let number = nccl.number()?;
        nccl.version = (number / 10_000, number / 100 % 100, number % 100);
        let (major, minor, patch) = nccl.version;
        if number < OLDEST {
            let found = format!("{major}.{minor}.{patch}, in {}", nccl.path.display());
            return Err(GpuError::TooOld { library: LIBRARY, found, needed: "2.18" });
        }
        Ok(Arc::new(nccl))
    }

    /// Its version, such as 2.27.3.
    #[must_use]
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// Its version as one number, such as 22703.
    #[must_use]
    pub fn version_number(&self) -> u32 {
        let (major, minor, patch) = self.version;
        major * 10_000 + minor * 100 + patch
    }

    /// The file that was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version's number. Versions before 2.9 number differently, and below all of these.
    fn number(&self) -> Result<u32, GpuError> {
        self.check("ncclGetVersion", self.table.version()).map(|number| u32::try_from(number).unwrap_or_default())
    }

    /// The value, or the error of a code.
    fn check<T>(&self, function: &'static str, called: Result<T, i32>) -> Result<T, GpuError> {
        called.map_err(|code| {
            let text = self.table.error_text(code).map_or_else(|| "no text".into(), CStr::to_string_lossy).into_owned();
            GpuError::Call { function, code, name: table::name_of(code).to_owned(), text }
        })
    }
}

/// Where NCCL is looked for, in order.
fn candidates(folders: &[PathBuf]) -> Vec<PathBuf> {
    let packaged = folders.iter().map(|folder| folder.join("nvidia/nccl/lib").join(LIBRARY));
    packaged.filter(|file| file.is_file()).chain([PathBuf::from(LIBRARY)]).collect()
}

/// The name by which NCCL is installed.
const LIBRARY: &str = "libnccl.so.2";
/// Names another file.
const VARIABLE: &str = "RONDE_NCCL_LIBRARY";
/// 2.18.0, the first with `ncclCommSplit` and with non-blocking communicators that can be aborted while they are made.
const OLDEST: u32 = 21_800;
