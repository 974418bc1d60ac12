//! Where the directories with workers' sockets are.

use std::path::PathBuf;

/// The directory in which each sidecar makes its own, unless it is given another one: `XDG_RUNTIME_DIR`, or the system's
/// temporary directory.
pub fn default_base() -> PathBuf {
    std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()).map_or_else(std::env::temp_dir, PathBuf::from)
}

/// The file in a sidecar's directory that holds the address of its admin pages.
pub const ADMIN_FILE: &str = "admin";
