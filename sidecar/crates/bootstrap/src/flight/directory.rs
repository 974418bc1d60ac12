//! The files of flight records: private to their user, and a bounded number of them.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use nix::unistd::geteuid;

use super::{FILE_SUFFIX, FlightRecord};

/// The files that one sidecar of a job leaves in a directory.
const FILES_OF_SIDECAR_MAX: usize = 4;
/// The files that sidecars with the same index leave in a directory, of all jobs that wrote there.
const FILES_OF_INDEX_MAX: usize = 16;
/// The jobs whose records are kept in the default directory.
const JOBS_MAX: usize = 16;
/// The end of the name of a file that is being written, or whose writer was killed.
const UNFINISHED_SUFFIX: &str = ".flight.new";
/// The files of that name that stay, because sidecars of other jobs may be writing them.
const UNFINISHED_MAX: usize = 4;

/// The directory with a directory for each job whose records are not written elsewhere: `ronde.flight-UID` in the system's
/// temporary directory, which outlives the job. Its name does not begin as those of sidecars do, whose directories end with them.
#[must_use]
pub fn default_directory() -> PathBuf {
    std::env::temp_dir().join(format!("ronde.flight-{}", geteuid().as_raw()))
}

/// Writes a record into a directory, which is made if needed, with mode 0700. Then the oldest files of this sidecar, and of
/// those with its index in other jobs, are removed when there are too many.
///
/// # Errors
/// When it cannot be written, or a directory that this made before now belongs to another user.
pub fn write(directory: &Path, record: &FlightRecord) -> anyhow::Result<PathBuf> {
    write_below(&default_directory(), directory, record)
}

/// Writes a record into a directory like [`write()`], and removes no file: a directory that a user has named can contain records
/// that the user wants to keep.
///
/// # Errors
/// As those of [`write()`].
pub fn add(directory: &Path, record: &FlightRecord) -> anyhow::Result<PathBuf> {
    add_below(&default_directory(), directory, record)
}

/// [`write()`], with the default directory.
pub(super) fn write_below(default: &Path, directory: &Path, record: &FlightRecord) -> anyhow::Result<PathBuf> {
    let path = add_below(default, directory, record)?;
    prune(default, directory, record, &path);
    Ok(path)
}

fn add_below(default: &Path, directory: &Path, record: &FlightRecord) -> anyhow::Result<PathBuf> {
    if directory.parent() == Some(default) {
        make_private(default)?;
        make_private(directory)?;
    } else {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(directory);
        made.with_context(|| format!("cannot make the directory {}", directory.display()))?;
    }
    let path = directory.join(format!("{}{}{}{FILE_SUFFIX}", record.job, index(record), record.made_us));
    write_new(&path, record).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// The part of the names of files that shows the sidecar.
fn index(record: &FlightRecord) -> String {
    format!(".sidecar-{}.", record.sidecar)
}

/// Removes the oldest files beyond the limits, and of the default directory the oldest jobs.
fn prune(default: &Path, directory: &Path, record: &FlightRecord, path: &Path) {
    let index = index(record);
    let prefix = format!("{}{index}", record.job);
    // The new one stays, whatever the clock says.
    let own = path.file_name().unwrap_or_default().to_string_lossy();
    let is_other = |name: &str| name != own && name.ends_with(FILE_SUFFIX);
    remove_oldest(directory, FILES_OF_SIDECAR_MAX - 1, |name| name.starts_with(&prefix) && is_other(name));
    remove_oldest(directory, FILES_OF_INDEX_MAX - 1, |name| name.contains(&index) && is_other(name));
    remove_oldest(directory, UNFINISHED_MAX, |name| name.contains(&index) && name.ends_with(UNFINISHED_SUFFIX));
    if directory.parent() == Some(default) {
        // The directory of this job is not the oldest one, though it may have been made first.
        let job = directory.file_name().unwrap_or_default().to_string_lossy();
        remove_oldest(default, JOBS_MAX - 1, |name| name != job);
    }
}

/// Writes a new file with mode 0600. A reader never finds a part of it under its name.
fn write_new(path: &Path, record: &FlightRecord) -> anyhow::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    let text = serde_json::to_vec(record)?;
    let written = file.write_all(&text).and_then(|()| fs::rename(&fresh, path));
    if written.is_err() {
        // The disk may be full; a part of a file is of no use.
        let _ = fs::remove_file(&fresh);
    }
    Ok(written?)
}

/// Makes a directory in a place where other users may write, too. One that exists must be this user's alone.
pub(super) fn make_private(path: &Path) -> anyhow::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        made => made.with_context(|| format!("cannot make the directory {}", path.display()))?,
    }
    let found =
        fs::symlink_metadata(path).with_context(|| format!("cannot read the owner and mode of {}", path.display()))?;
    ensure!(
        found.is_dir() && found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0,
        "{} is not a directory of this user alone; remove it, or give another one with --flight-dir",
        path.display()
    );
    Ok(())
}

/// Removes the oldest entries that `counts` selects beyond the limit. What cannot be removed stays.
fn remove_oldest(directory: &Path, most: usize, counts: impl Fn(&str) -> bool) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let entries = entries.flatten().filter(|entry| counts(&entry.file_name().to_string_lossy()));
    let modified = |entry: fs::DirEntry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()));
    let mut entries: Vec<_> = entries.filter_map(modified).collect();
    entries.sort();
    let excess = entries.len().saturating_sub(most);
    for (_, path) in entries.into_iter().take(excess) {
        let _ = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
    }
}
