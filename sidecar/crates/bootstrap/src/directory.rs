//! Where the directories with workers' sockets are.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

/// The directory in which each sidecar makes its own, unless it is given another one: `XDG_RUNTIME_DIR` if it is a private
/// directory of this user, else the system's temporary directory.
pub fn default_base() -> PathBuf {
    base(std::env::var_os("XDG_RUNTIME_DIR"), std::env::temp_dir())
}

/// Schedulers copy the variable from a login node to hosts where this user has no such directory.
fn base(runtime: Option<OsString>, temporary: PathBuf) -> PathBuf {
    runtime.map(PathBuf::from).filter(|path| is_private(path)).unwrap_or(temporary)
}

fn is_private(path: &Path) -> bool {
    let is_own = |found: fs::Metadata| {
        found.is_dir() && found.uid() == geteuid().as_raw() && found.permissions().mode() & OTHERS == 0
    };
    path.is_absolute() && fs::metadata(path).is_ok_and(is_own)
}

/// Bits of a mode that give rights to other users.
const OTHERS: u32 = 0o077;

/// The file in a sidecar's directory that holds the address of its admin pages.
pub const ADMIN_FILE: &str = "admin";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_directory_that_is_not_this_users_alone_is_not_used() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let (own, temporary) = (folder.path().join("own"), PathBuf::from("/temporary"));
        let chosen = |runtime: &Path| base(Some(runtime.into()), temporary.clone());
        assert_eq!(chosen(&own), temporary, "it does not exist");
        fs::create_dir(&own).expect("it can be made");
        for (mode, expected) in [(0o755, &temporary), (0o710, &temporary), (0o700, &own)] {
            fs::set_permissions(&own, fs::Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(&chosen(&own), expected, "mode {mode:o}");
        }
        fs::write(own.join("file"), "").expect("it can be written");
        assert_eq!(chosen(&own.join("file")), temporary);
        assert_eq!((base(None, temporary.clone()), chosen(Path::new(""))), (temporary.clone(), temporary.clone()));
        if geteuid().is_root() {
            std::os::unix::fs::chown(&own, Some(65_534), None).expect("root may");
            assert_eq!(chosen(&own), temporary, "it belongs to another user");
        }
    }
}
