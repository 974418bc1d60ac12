//! The session directory: two sockets, a token file for each local rank, and the address of the admin pages. It is all that
//! a worker's container shares with its sidecar.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use ronde_rpc::convert::TOKEN_BYTES;
use ronde_rpc::{RankToken, paths};
use ronde_wire::{JobName, Rank, SidecarIndex};

use crate::bootstrap::TokenFile;
use crate::cli::codes::Code;

/// The directory while the sidecar lives; removed with all that is in it when dropped.
pub(crate) struct RuntimeDir {
    dir: tempdir::Owned,
}

impl RuntimeDir {
    /// Makes `<base>/ronde-<job>-<sidecar>-<random>`, open to this uid only.
    ///
    /// # Errors
    /// When it cannot be made, or its path is too long for a Unix socket (107 bytes).
    pub(crate) fn create(base: Option<&Path>, job: &JobName, sidecar: SidecarIndex) -> anyhow::Result<Self> {
        Self::make(base, job, sidecar).context(Code::SocketDirectory)
    }

    fn make(base: Option<&Path>, job: &JobName, sidecar: SidecarIndex) -> anyhow::Result<Self> {
        let base = base.map_or_else(default_base, Path::to_path_buf);
        let prefix = format!("ronde-{job}-{}-", sidecar.0);
        let dir = tempdir::Owned::create(&base, &prefix)?;
        let longest = paths::mem_socket(dir.path()).as_os_str().len();
        ensure!(
            longest <= SOCKET_PATH_BYTES_MAX,
            "the path of a socket in {} is {longest} bytes long, but a Unix socket's may have {SOCKET_PATH_BYTES_MAX}; give a shorter directory with --runtime-dir or XDG_RUNTIME_DIR, or a shorter job name",
            dir.path().display()
        );
        Ok(Self { dir })
    }

    /// The directory.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes where the admin pages are, for `ronde status`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_admin(&self, admin: SocketAddr) -> anyhow::Result<()> {
        let path = self.path().join(ADMIN_FILE);
        fs::write(&path, format!("{admin}\n")).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Draws a token for a rank and writes it to a file that only this uid can read.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_token(&self, rank: Rank) -> anyhow::Result<(RankToken, TokenFile)> {
        let token: [u8; TOKEN_BYTES] = random_bytes()?;
        let path = paths::token_file(self.path(), rank);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o400)
            .open(&path)
            .with_context(|| format!("cannot create the token file {}", path.display()))?;
        file.write_all(&token).with_context(|| format!("cannot write the token file {}", path.display()))?;
        Ok((RankToken::new(&token)?, TokenFile { rank: rank.0, path }))
    }
}

/// Random bytes from the system's generator.
///
/// # Errors
/// When the generator fails, which no working system does.
pub(crate) fn random_bytes<const N: usize>() -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| anyhow::anyhow!("the system's random generator failed"))?;
    Ok(bytes)
}

/// Where session directories are made when nobody says otherwise.
pub(crate) fn default_base() -> PathBuf {
    std::env::var_os("XDG_RUNTIME_DIR").map_or_else(std::env::temp_dir, PathBuf::from)
}

/// The file with the address of the admin pages.
pub(crate) const ADMIN_FILE: &str = "admin";
/// `sun_path` has 108 bytes with its final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// A directory that removes itself.
mod tempdir {
    use super::{Context, Path, PathBuf, Permissions, PermissionsExt, fs, random_bytes};

    pub(super) struct Owned(PathBuf);

    impl Owned {
        pub(super) fn create(base: &Path, prefix: &str) -> anyhow::Result<Self> {
            let suffix: [u8; 4] = random_bytes()?;
            let path = base.join(format!("{prefix}{:08x}", u32::from_le_bytes(suffix)));
            fs::create_dir(&path).with_context(|| format!("cannot create the directory {}", path.display()))?;
            let owned = Self(path);
            fs::set_permissions(owned.path(), Permissions::from_mode(0o700))
                .with_context(|| format!("cannot restrict {}", owned.path().display()))?;
            Ok(owned)
        }

        pub(super) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Owned {
        fn drop(&mut self) {
            if let Err(error) = fs::remove_dir_all(&self.0) {
                tracing::warn!(directory = %self.0.display(), %error, "cannot remove the session directory");
            }
        }
    }
}
