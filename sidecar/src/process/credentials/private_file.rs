//! Reads files that contain a secret, only if nobody else can read or replace them.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use ronde_bootstrap::codes::Code;
use zeroize::Zeroizing;

use super::named;

/// Reads a text file that nobody else can read or write: of mode 0600 or stricter, owned by this process's user, in the
/// directory that `path` names. (A symbolic link within that directory is followed: mounted secrets are such links.)
///
/// # Errors
/// What is wrong, with the command that corrects it.
pub fn read(path: &Path) -> anyhow::Result<Zeroizing<String>> {
    let unreadable = || format!("cannot read {}", path.display());
    let real = fs::canonicalize(path).with_context(unreadable).context(Code::CertificateFiles)?;
    check_place(path, &real).context(Code::KeyMode)?;
    // The checks use the opened file, so nobody can exchange it afterwards. A pipe would block.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&real);
    let file = file.with_context(unreadable).context(Code::CertificateFiles)?;
    let text = check_owner(path, &file).and_then(|()| read_bounded(path, file))?;
    Ok(text)
}

fn check_place(path: &Path, real: &Path) -> anyhow::Result<()> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let directory = fs::canonicalize(&directory).with_context(|| format!("cannot read {}", named(&directory)))?;
    ensure!(
        real.starts_with(&directory),
        "{} is a link to {} in another directory; name that file itself, or replace the link by a copy",
        path.display(),
        real.display()
    );
    Ok(())
}

fn check_owner(path: &Path, file: &File) -> anyhow::Result<()> {
    let metadata = file.metadata().with_context(|| format!("cannot read {}", path.display()));
    let metadata = metadata.context(Code::CertificateFiles)?;
    let path = path.display();
    if !metadata.is_file() {
        return Err(anyhow!("{path} is not a file")).context(Code::CertificateFiles);
    }
    let (owner, user) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if owner != user {
        let text = format!("{path} belongs to uid {owner}, and this is uid {user}; run: chown {user} {path}");
        return Err(anyhow!(text)).context(Code::KeyMode);
    }
    let mode = metadata.mode() & 0o777;
    if mode & 0o077 != 0 {
        let text = format!("the key {path} has mode {mode:04o}, others may read it; run: chmod 600 {path}");
        return Err(anyhow!(text)).context(Code::KeyMode);
    }
    Ok(())
}

fn read_bounded(path: &Path, file: File) -> anyhow::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::with_capacity(FILE_BYTES_MAX + 1));
    let read = file.take(FILE_BYTES_MAX as u64 + 1).read_to_string(&mut text);
    read.with_context(|| format!("cannot read {}", path.display())).context(Code::CertificateFiles)?;
    if text.len() > FILE_BYTES_MAX {
        let text = format!("{} is longer than {FILE_BYTES_MAX} bytes; it is not a key", path.display());
        return Err(anyhow!(text)).context(Code::CertificateFiles);
    }
    Ok(text)
}

/// Larger than any key or secret. The text is read into this buffer at once: a growing one would leave copies in
/// memory.
const FILE_BYTES_MAX: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use ronde_bootstrap::codes::coded;

    fn refused(path: &Path) -> String {
        coded(&read(path).map(drop).expect_err("it is refused"), Code::NotExplained)
    }

    fn private(path: &Path, text: &str) {
        fs::write(path, text).expect("a temporary directory");
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("it is ours");
    }

    #[test]
    fn only_a_file_of_our_own_in_its_place_is_read() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("mounted")).expect("a temporary directory");
        private(&at("key"), "text");
        assert_eq!(*read(&at("key")).expect("private"), "text");
        assert!(refused(&at("none")).contains("cannot read"));
        assert!(refused(&at("mounted")).contains("is not a file"));
        // Like a secret mounted by Kubernetes: a link within its directory.
        private(&at("mounted/behind"), "mounted");
        symlink("behind", at("mounted/key")).expect("a temporary directory");
        assert_eq!(*read(&at("mounted/key")).expect("its own directory"), "mounted");
        symlink(at("key"), at("mounted/away")).expect("a temporary directory");
        let reason = refused(&at("mounted/away"));
        assert!(reason.contains("in another directory") && reason.contains("RONDE-E503"), "{reason}");
        for mode in [0o640, 0o604, 0o620, 0o602] {
            fs::set_permissions(at("key"), fs::Permissions::from_mode(mode)).expect("it is ours");
            let reason = refused(&at("key"));
            assert!(reason.contains("chmod 600") && reason.contains("RONDE-E503"), "{reason}");
        }
        private(&at("long"), &"x".repeat(FILE_BYTES_MAX + 1));
        assert!(refused(&at("long")).contains("longer than"));
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("left out: a_file_of_another_user_is_refused needs root");
            return;
        }
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("key");
        private(&path, "text");
        std::os::unix::fs::chown(&path, Some(65_534), None).expect("root may");
        let reason = refused(&path);
        assert!(reason.contains("belongs to uid 65534, and this is uid 0; run: chown 0 /"), "{reason}");
    }
}
