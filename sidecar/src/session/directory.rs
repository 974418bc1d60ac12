//! The session directory: two sockets, a token file for each local rank, and the address of the admin pages. A worker's
//! container shares nothing else with its sidecar.
//!
//! The directory is opened once, without following a link, and everything but the sockets is made relative to that
//! descriptor: whoever exchanges the path meanwhile changes nothing. (The kernel binds sockets to paths only; whether they
//! came into this directory is checked afterwards.) Only this user may enter it until everything in it is made.

use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmod, fchmodat, fstat, fstatat};
use nix::unistd::{Uid, UnlinkatFlags, fchown, unlinkat};
use ronde_rpc::convert::TOKEN_BYTES;
use ronde_rpc::{RankToken, paths};
use ronde_wire::{JobName, SidecarIndex, WorkerNumber};

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

/// The directory while the sidecar lives. Dropping it removes the directory with its files; of a directory that was
/// given, only the sidecar's files.
pub(crate) struct RuntimeDir {
    path: PathBuf,
    directory: OwnedFd,
    /// Whether it existed, or was named, so that it stays.
    is_given: bool,
    for_group: bool,
}

impl RuntimeDir {
    /// Creates `<base>/ronde-<job>-<sidecar>-<random>`, or takes the given one. Only this uid may enter it until
    /// [`Self::open_to_workers`].
    ///
    /// # Errors
    /// When it cannot be created, belongs to another user, another sidecar serves there, or its path is too long for a
    /// Unix socket (107 bytes).
    pub(crate) fn create(options: DirectoryOptions<'_>, job: &JobName, sidecar: SidecarIndex) -> anyhow::Result<Self> {
        Self::make(options, job, sidecar).context(Code::SocketDirectory)
    }

    fn make(options: DirectoryOptions<'_>, job: &JobName, sidecar: SidecarIndex) -> anyhow::Result<Self> {
        let DirectoryOptions { base, exact, for_group } = options;
        let path = match exact {
            Some(path) => make_given(path)?,
            None => {
                let base = base.map_or_else(default_base, Path::to_path_buf);
                make_fresh(&base, &format!("ronde-{job}-{}-", sidecar.0))?
            }
        };
        let directory = open_own(&path)?;
        let made = Self { path, directory, is_given: exact.is_some(), for_group };
        if made.is_given {
            made.take_over()?;
        }
        let longest = paths::mem_socket(made.path()).as_os_str().len();
        ensure!(
            longest <= SOCKET_PATH_BYTES_MAX,
            "the path of a socket in {} is {longest} bytes long, but a Unix socket's may have {SOCKET_PATH_BYTES_MAX}; give a shorter directory with --runtime-dir or XDG_RUNTIME_DIR, or a shorter job name",
            made.path().display()
        );
        Ok(made)
    }

    /// Removes the files of a sidecar that was killed.
    fn take_over(&self) -> anyhow::Result<()> {
        ensure!(
            UnixStream::connect(paths::rpc_socket(&self.path)).is_err(),
            "another sidecar serves in {}; give each its own directory",
            self.path.display()
        );
        self.remove_files().with_context(|| format!("cannot use the directory {}", self.path.display()))
    }

    /// Lets workers of the group connect, if they may; other users cannot reach the sockets in either case. Call it when
    /// all files are made.
    ///
    /// # Errors
    /// When a socket does not exist in this directory.
    pub(crate) fn open_to_workers(&self) -> anyhow::Result<()> {
        self.open_sockets().context(Code::SocketDirectory)
    }

    fn open_sockets(&self) -> anyhow::Result<()> {
        let mode = self.mode(0o700, 0o770);
        for socket in [paths::rpc_socket(&self.path), paths::mem_socket(&self.path)] {
            let name = socket.file_name().context("a socket has a name")?;
            let found = fstatat(&self.directory, name, AtFlags::AT_SYMLINK_NOFOLLOW);
            let is_socket =
                found.is_ok_and(|found| SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT == SFlag::S_IFSOCK);
            ensure!(
                is_socket,
                "{} is not in the directory that this sidecar made; another user has exchanged the path; give a directory in which only this user may write",
                socket.display()
            );
            fchmodat(&self.directory, name, mode, FchmodatFlags::FollowSymlink)
                .with_context(|| format!("cannot set the mode of {}", socket.display()))?;
        }
        let opened = fchmod(&self.directory, self.mode(0o700, 0o750));
        opened.with_context(|| format!("cannot set the mode of {}", self.path.display()))
    }

    fn mode(&self, alone: u32, with_group: u32) -> Mode {
        Mode::from_bits_truncate(if self.for_group { with_group } else { alone })
    }

    /// Returns the path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the address of the admin pages, for `ronde status`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_admin(&self, admin: SocketAddr) -> anyhow::Result<()> {
        // Written atomically, so that a reader never sees a part of it.
        let written = self.new_file(FRESH_ADMIN_FILE, Mode::from_bits_truncate(0o644)).and_then(|mut file| {
            writeln!(file, "{admin}")?;
            Ok(renameat(&self.directory, FRESH_ADMIN_FILE, &self.directory, ADMIN_FILE)?)
        });
        written.with_context(|| format!("cannot write {}", self.path.join(ADMIN_FILE).display()))
    }

    /// Draws a token for a worker and writes it to a file that only this uid can read, or also its group. With an `owner`,
    /// the one user whose processes may claim its number, only that user can read it, if this process may give files away.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn write_token(
        &self,
        worker: WorkerNumber,
        owner: Option<u32>,
    ) -> anyhow::Result<(RankToken, TokenFile)> {
        let token: [u8; TOKEN_BYTES] = random_bytes()?;
        let path = paths::token_file(&self.path, worker);
        let write = || -> anyhow::Result<()> {
            let name = path.file_name().context("a token file has a name")?;
            let mut file = self.new_file(name, Mode::from_bits_truncate(0o400))?;
            file.write_all(&token)?;
            let is_given = match owner.map(|owner| fchown(&file, Some(Uid::from_raw(owner)), None)) {
                Some(Ok(())) => true,
                // Only root may give files away. The kernel reports the uid of whoever claims the rank.
                Some(Err(Errno::EPERM)) | None => false,
                Some(Err(error)) => bail!(error),
            };
            if !is_given {
                fchmod(&file, self.mode(0o400, 0o440))?;
            }
            Ok(())
        };
        write().with_context(|| format!("cannot write the token file {}", path.display()))?;
        Ok((RankToken::new(&token)?, TokenFile { worker: worker.0, path }))
    }

    /// Removes the token file of a worker that will not come any more.
    pub(crate) fn remove_token(&self, worker: WorkerNumber) {
        let path = paths::token_file(&self.path, worker);
        let Some(name) = path.file_name() else { return };
        if let Err(error) = unlinkat(&self.directory, name, UnlinkatFlags::NoRemoveDir) {
            tracing::warn!(file = %path.display(), %error, "cannot remove a token file");
        }
    }

    fn new_file(&self, name: &(impl nix::NixPath + ?Sized), mode: Mode) -> anyhow::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(File::from(openat(&self.directory, name, flags, mode)?))
    }

    /// Removes the sidecar's files: of a given directory no others, because they belong to someone else.
    fn remove_files(&self) -> anyhow::Result<()> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let mut entries = Dir::openat(self.directory.as_fd(), ".", flags, Mode::empty())?;
        for entry in entries.iter() {
            let entry = entry?;
            let name = entry.file_name().to_str().unwrap_or_default();
            if is_ours(name) || (!self.is_given && ![".", ".."].contains(&name)) {
                match unlinkat(&self.directory, entry.file_name(), UnlinkatFlags::NoRemoveDir) {
                    // Whose directory it is, is not known.
                    Ok(()) | Err(Errno::EISDIR) => {}
                    Err(error) => bail!(error),
                }
            }
        }
        Ok(())
    }
}

impl Drop for RuntimeDir {
    fn drop(&mut self) {
        let removed = self.remove_files().and_then(|()| match self.is_given {
            true => Ok(()),
            false => Ok(fs::remove_dir(&self.path)?),
        });
        if let Err(error) = removed {
            tracing::warn!(directory = %self.path.display(), %error, "cannot remove the session directory");
        }
    }
}

/// Creates a directory that does not exist yet.
fn make_fresh(base: &Path, prefix: &str) -> anyhow::Result<PathBuf> {
    let suffix: [u8; 4] = random_bytes()?;
    let path = base.join(format!("{prefix}{:08x}", u32::from_le_bytes(suffix)));
    let made = DirBuilder::new().mode(PRIVATE).create(&path);
    made.with_context(|| format!("cannot create the directory {}", path.display()))?;
    Ok(path)
}

/// Creates the named directory, and those that contain it, if it does not exist.
fn make_given(path: &Path) -> anyhow::Result<PathBuf> {
    let make = || match DirBuilder::new().mode(PRIVATE).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            fs::create_dir_all(path.parent().unwrap_or(path))?;
            DirBuilder::new().mode(PRIVATE).create(path)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    };
    make().with_context(|| format!("cannot create the directory {}", path.display()))?;
    // A slash at the end would make the kernel follow a link.
    Ok(path.components().collect())
}

/// Opens a directory of this user, and keeps everybody else out.
fn open_own(path: &Path) -> anyhow::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let directory = match open(path, flags, Mode::empty()) {
        // Linux reports ENOTDIR for a link, because of O_DIRECTORY.
        Err(Errno::ELOOP | Errno::ENOTDIR) => {
            bail!("{} is a link or no directory; name the directory itself", path.display())
        }
        other => other.with_context(|| format!("cannot use the directory {}", path.display()))?,
    };
    let (owner, user) = (fstat(&directory)?.st_uid, Uid::effective().as_raw());
    ensure!(
        owner == user,
        "the directory {} belongs to uid {owner}, and this sidecar runs as uid {user}; give a directory within it, or run: chown {user} {}",
        path.display(),
        path.display()
    );
    let restricted = fchmod(&directory, Mode::from_bits_truncate(PRIVATE));
    restricted.with_context(|| format!("cannot restrict {} to uid {user}", path.display()))?;
    Ok(directory)
}

/// Whether a sidecar makes files of this name.
fn is_ours(name: &str) -> bool {
    let is_token = name.starts_with("rank-") && name.ends_with(".token");
    let nowhere = Path::new("");
    let sockets = [paths::rpc_socket(nowhere), paths::mem_socket(nowhere)];
    is_token || [ADMIN_FILE, FRESH_ADMIN_FILE].contains(&name) || sockets.iter().any(|socket| socket == Path::new(name))
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
/// The mode of a directory that only this user may enter.
const PRIVATE: u32 = 0o700;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn taken(path: &Path, for_group: bool) -> anyhow::Result<RuntimeDir> {
        let job = JobName::new("night").expect("a good name");
        RuntimeDir::create(DirectoryOptions { base: None, exact: Some(path), for_group }, &job, SidecarIndex(0))
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o777
    }

    fn refused(path: &Path) -> String {
        taken(path, false).err().map(|error| format!("{error:#}")).expect("it is refused")
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
        directory.write_token(WorkerNumber(3), None).expect("it can be written");
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
        directory.write_token(WorkerNumber(0), None).expect("it can be written");
        let sockets = [paths::rpc_socket(&path), paths::mem_socket(&path)];
        let _listening = sockets.each_ref().map(std::os::unix::net::UnixListener::bind);
        assert_eq!(mode(&path), 0o700, "nobody else may enter before everything is made");
        directory.open_to_workers().expect("they are there");
        assert_eq!((mode(&path), mode(&path.join("rank-0.token"))), (0o750, 0o440));
        assert_eq!(sockets.each_ref().map(|socket| mode(socket)), [0o770, 0o770]);
    }

    #[test]
    fn a_directory_in_which_another_sidecar_serves_is_refused() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let _other = std::os::unix::net::UnixListener::bind(paths::rpc_socket(base.path())).expect("a socket");
        let error = refused(base.path());
        assert!(error.contains("another sidecar serves in"), "{error}");
    }

    #[test]
    fn a_link_to_a_directory_is_refused_and_what_it_points_to_stays_as_it_is() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let (real, link) = (base.path().join("real"), base.path().join("link"));
        fs::create_dir(&real).expect("it can be made");
        fs::write(real.join("rank-0.token"), "another's").expect("it can be written");
        fs::set_permissions(&real, fs::Permissions::from_mode(0o755)).expect("it is ours");
        std::os::unix::fs::symlink(&real, &link).expect("it can be made");
        let error = refused(&link);
        assert!(error.contains("name the directory itself"), "{error}");
        assert_eq!((mode(&real), real.join("rank-0.token").exists()), (0o755, true));
    }

    #[test]
    fn a_directory_of_another_user_is_refused_even_by_root() {
        if !Uid::effective().is_root() {
            eprintln!("LEFT OUT: a_directory_of_another_user_is_refused_even_by_root needs root");
            return;
        }
        let base = tempfile::tempdir().expect("a temporary directory");
        std::os::unix::fs::chown(base.path(), Some(65_534), None).expect("root may");
        let error = refused(base.path());
        assert!(error.contains("belongs to uid 65534, and this sidecar runs as uid 0"), "{error}");
    }

    #[test]
    fn a_path_that_is_exchanged_receives_no_token_and_no_worker() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let (path, moved) = (base.path().join("sockets"), base.path().join("moved"));
        let directory = taken(&path, false).expect("it can be made");
        fs::rename(&path, &moved).expect("it is ours");
        fs::create_dir(&path).expect("it can be made");
        directory.write_token(WorkerNumber(0), None).expect("it can be written");
        directory.write_admin(SocketAddr::from(([127, 0, 0, 1], 9))).expect("it can be written");
        assert_eq!((mode(&moved.join("rank-0.token")), fs::read_dir(&path).expect("it is there").count()), (0o400, 0));
        let sockets = [paths::rpc_socket(&path), paths::mem_socket(&path)];
        let _listening = sockets.each_ref().map(std::os::unix::net::UnixListener::bind);
        let error = directory.open_to_workers().expect_err("the sockets are elsewhere");
        assert!(format!("{error:#}").contains("another user has exchanged the path"), "{error:#}");
    }

    #[test]
    fn a_new_directory_is_private_from_the_start_and_is_removed_with_its_files() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let job = JobName::new("night").expect("a good name");
        let options = DirectoryOptions { base: Some(base.path()), exact: None, for_group: true };
        let directory = RuntimeDir::create(options, &job, SidecarIndex(3)).expect("it can be made");
        let path = directory.path().to_owned();
        assert_eq!(mode(&path), 0o700);
        directory.write_token(WorkerNumber(0), None).expect("it can be written");
        fs::write(path.join("core"), "left by somebody").expect("it can be written");
        drop(directory);
        assert!(!path.exists());
    }

    #[test]
    fn the_token_of_a_rank_with_one_user_is_that_users() {
        if !Uid::effective().is_root() {
            eprintln!("LEFT OUT: the_token_of_a_rank_with_one_user_is_that_users needs root to give files away");
            return;
        }
        let base = tempfile::tempdir().expect("a temporary directory");
        let directory = taken(&base.path().join("sockets"), true).expect("it can be made");
        let (_, file) = directory.write_token(WorkerNumber(0), Some(10_002)).expect("it can be written");
        let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(&file.path).expect("it is there"));
        assert_eq!((owner, mode(&file.path)), (10_002, 0o400));
    }
}
