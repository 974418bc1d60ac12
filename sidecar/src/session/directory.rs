//! The session directory: two sockets, a token file for each local rank, and the address of the admin pages. A worker's
//! container shares nothing else with its sidecar.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use ronde_rpc::convert::TOKEN_BYTES;
use ronde_rpc::{RankToken, paths};
use ronde_wire::{JobName, Rank, SidecarIndex};

use ronde_bootstrap::codes::Code;
use ronde_bootstrap::directory::{ADMIN_FILE, default_base};
use ronde_bootstrap::messages::TokenFile;

/// Where the directory is, and who may use it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectoryOptions<'a> {
    /// Where a new directory is made; `None` for the default.
    pub(crate) base: Option<&'a Path>,
    /// The directory itself, instead of a new one: a volume shared with a worker's container.
    pub(crate) exact: Option<&'a Path>,
    /// Whether the sidecar's group may use the directory, as workers of other users need.
    pub(crate) for_group: bool,
}

/// The directory while the sidecar lives. Dropping it removes the directory with its contents; of a directory that was
/// given, only the sidecar's files.
pub(crate) struct RuntimeDir {
    dir: Owned,
    for_group: bool,
}

impl RuntimeDir {
    /// Creates `<base>/ronde-<job>-<sidecar>-<random>`, or takes the given one, and opens it to this uid only, or also
    /// to its group.
    ///
    /// # Errors
    /// When it cannot be created, another sidecar serves there, or its path is too long for a Unix socket (107 bytes).
    pub(crate) fn create(options: DirectoryOptions<'_>, job: &JobName, sidecar: SidecarIndex) -> anyhow::Result<Self> {
        Self::make(options, job, sidecar).context(Code::SocketDirectory)
    }

    fn make(options: DirectoryOptions<'_>, job: &JobName, sidecar: SidecarIndex) -> anyhow::Result<Self> {
        let DirectoryOptions { base, exact, for_group } = options;
        let dir = match exact {
            Some(path) => Owned::take(path)?,
            None => {
                let base = base.map_or_else(default_base, Path::to_path_buf);
                Owned::create(&base, &format!("ronde-{job}-{}-", sidecar.0))?
            }
        };
        let made = Self { dir, for_group };
        made.restrict(made.path(), 0o700, 0o750)?;
        let longest = paths::mem_socket(made.path()).as_os_str().len();
        ensure!(
            longest <= SOCKET_PATH_BYTES_MAX,
            "the path of a socket in {} is {longest} bytes long, but a Unix socket's may have {SOCKET_PATH_BYTES_MAX}; give a shorter directory with --runtime-dir or XDG_RUNTIME_DIR, or a shorter job name",
            made.path().display()
        );
        Ok(made)
    }

    /// Lets workers of the group connect, if they may; other users cannot reach the sockets in either case.
    ///
    /// # Errors
    /// When a socket does not exist.
    pub(crate) fn open_sockets(&self) -> anyhow::Result<()> {
        let sockets = [paths::rpc_socket(self.path()), paths::mem_socket(self.path())];
        sockets.iter().try_for_each(|socket| self.restrict(socket, 0o700, 0o770)).context(Code::SocketDirectory)
    }

    fn restrict(&self, path: &Path, alone: u32, with_group: u32) -> anyhow::Result<()> {
        let mode = if self.for_group { with_group } else { alone };
        fs::set_permissions(path, Permissions::from_mode(mode)).with_context(|| {
            let uid = nix::unistd::geteuid();
            format!(
                "cannot restrict {} to uid {uid}; if it is another user's, give a directory within it",
                path.display()
            )
        })
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Writes the address of the admin pages, for `ronde status`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_admin(&self, admin: SocketAddr) -> anyhow::Result<()> {
        let (fresh, path) = (self.path().join(FRESH_ADMIN_FILE), self.path().join(ADMIN_FILE));
        // Written atomically, so that a reader never sees a part of it.
        let written = fs::write(&fresh, format!("{admin}\n")).and_then(|()| fs::rename(&fresh, &path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Draws a token for a rank and writes it to a file that only this uid can read, or also its group.
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
        self.restrict(&path, 0o400, 0o440)?;
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

/// The name of that file while it is written.
const FRESH_ADMIN_FILE: &str = "admin.new";
/// `sun_path` has 108 bytes, including the final zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// A directory whose files are the sidecar's.
enum Owned {
    /// One that was created, and is removed when dropped.
    Fresh(PathBuf),
    /// One that existed; only the files are removed.
    Given(PathBuf),
}

impl Owned {
    fn create(base: &Path, prefix: &str) -> anyhow::Result<Self> {
        let suffix: [u8; 4] = random_bytes()?;
        let path = base.join(format!("{prefix}{:08x}", u32::from_le_bytes(suffix)));
        fs::create_dir(&path).with_context(|| format!("cannot create the directory {}", path.display()))?;
        Ok(Self::Fresh(path))
    }

    /// Takes a directory that exists, and removes files of a sidecar that was killed.
    fn take(path: &Path) -> anyhow::Result<Self> {
        let unusable = || format!("cannot use the directory {}", path.display());
        fs::create_dir_all(path).with_context(unusable)?;
        ensure!(
            UnixStream::connect(paths::rpc_socket(path)).is_err(),
            "another sidecar serves in {}; give each its own directory",
            path.display()
        );
        remove_files(path).with_context(unusable)?;
        Ok(Self::Given(path.to_path_buf()))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Fresh(path) | Self::Given(path) => path,
        }
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let removed = match self {
            Self::Fresh(path) => fs::remove_dir_all(path),
            Self::Given(path) => remove_files(path),
        };
        if let Err(error) = removed {
            tracing::warn!(directory = %self.path().display(), %error, "cannot remove the session directory");
        }
    }
}

/// Removes sockets, tokens and the address of the admin pages, and nothing else: the directory belongs to someone else.
fn remove_files(directory: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_token = name.starts_with("rank-") && name.ends_with(".token");
        let is_socket = path == paths::rpc_socket(directory) || path == paths::mem_socket(directory);
        if is_token || is_socket || [ADMIN_FILE, FRESH_ADMIN_FILE].contains(&name) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(path: &Path, for_group: bool) -> anyhow::Result<RuntimeDir> {
        let job = JobName::new("night").expect("a good name");
        RuntimeDir::create(DirectoryOptions { base: None, exact: Some(path), for_group }, &job, SidecarIndex(0))
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o777
    }

    #[test]
    fn a_given_directory_stays_and_loses_only_what_a_sidecar_makes() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let path = base.path().join("sockets");
        fs::create_dir(&path).expect("it can be made");
        for name in ["report.json", "admin", "admin.new", "rank-3.token"] {
            fs::write(path.join(name), "old").expect("it can be written");
        }
        let directory = taken(&path, false).expect("it is this user's");
        assert!(!path.join("rank-3.token").exists(), "a killed sidecar's token is of no use");
        assert!(!path.join("admin.new").exists(), "nor is what it had begun to write");
        directory.write_admin(SocketAddr::from(([127, 0, 0, 1], 9))).expect("it can be written");
        assert_eq!(fs::read_to_string(path.join("admin")).expect("it is there"), "127.0.0.1:9\n");
        assert!(!path.join("admin.new").exists());
        directory.write_token(Rank(3)).expect("it can be written");
        assert_eq!((mode(&path), mode(&path.join("rank-3.token"))), (0o700, 0o400));
        drop(directory);
        let left: Vec<_> = fs::read_dir(&path).expect("it stays").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["report.json"]);
    }

    #[test]
    fn workers_of_other_users_connect_by_the_group() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let path = base.path().join("sockets");
        let directory = taken(&path, true).expect("it can be made");
        directory.write_token(Rank(0)).expect("it can be written");
        let sockets = [paths::rpc_socket(&path), paths::mem_socket(&path)];
        let _listening = sockets.each_ref().map(std::os::unix::net::UnixListener::bind);
        directory.open_sockets().expect("they are there");
        assert_eq!((mode(&path), mode(&path.join("rank-0.token"))), (0o750, 0o440));
        assert_eq!(sockets.each_ref().map(|socket| mode(socket)), [0o770, 0o770]);
    }

    #[test]
    fn a_directory_in_which_another_sidecar_serves_is_refused() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let _other = std::os::unix::net::UnixListener::bind(paths::rpc_socket(base.path())).expect("a socket");
        let error = taken(base.path(), false).err().expect("refused");
        assert!(format!("{error:#}").contains("another sidecar serves in"), "{error:#}");
    }
}
