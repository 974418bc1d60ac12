//! Reads files of keys, secrets and certificates: only if nobody else can change them, and a secret only if nobody else
//! can read it.

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
    let file = open(path, &SECRET)?;
    read_bounded(path, file, &SECRET)
}

/// Reads a text file that everybody may read and nobody else can write: without write permission for group and others,
/// owned by this process's user or by root, in the directory that `path` names.
///
/// # Errors
/// What is wrong, with the command that corrects it.
pub fn read_public(path: &Path) -> anyhow::Result<String> {
    let file = open(path, &CERTIFICATES)?;
    read_bounded(path, file, &CERTIFICATES).map(|text| text.to_string())
}

/// What a file contains, and what follows from that.
struct Kind {
    name: &'static str,
    /// Permissions that nobody but the owner may have.
    forbidden: u32,
    /// What these permissions allow to others.
    open_to: &'static str,
    /// The mode that corrects the file.
    correction: &'static str,
    /// Whether root may own it. What root writes, this user trusts; a secret of root's is not meant for this user.
    may_be_roots: bool,
    /// Larger than any content. The text is read into a buffer of this size at once: a growing one would leave copies of a
    /// secret in memory.
    bytes_max: usize,
}

const SECRET: Kind = Kind {
    name: "key",
    forbidden: 0o077,
    open_to: "read it",
    correction: "600",
    may_be_roots: false,
    bytes_max: 16 << 10,
};

const CERTIFICATES: Kind = Kind {
    name: "certificate",
    forbidden: 0o022,
    open_to: "change it",
    correction: "go-w",
    may_be_roots: true,
    bytes_max: 256 << 10,
};

fn open(path: &Path, kind: &Kind) -> anyhow::Result<File> {
    let unreadable = || format!("cannot read {}", path.display());
    let real = fs::canonicalize(path).with_context(unreadable).context(Code::CertificateFiles)?;
    check_place(path, &real).context(Code::KeyMode)?;
    // The checks use the opened file, so nobody can exchange it afterwards. A pipe would block.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(&real);
    let file = file.with_context(unreadable).context(Code::CertificateFiles)?;
    check_owner(path, &file, kind)?;
    Ok(file)
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

fn check_owner(path: &Path, file: &File, kind: &Kind) -> anyhow::Result<()> {
    let metadata = file.metadata().with_context(|| format!("cannot read {}", path.display()));
    let metadata = metadata.context(Code::CertificateFiles)?;
    let path = path.display();
    if !metadata.is_file() {
        return Err(anyhow!("{path} is not a file")).context(Code::CertificateFiles);
    }
    let (owner, user) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if owner != user && !(kind.may_be_roots && owner == 0) {
        let text = format!("{path} belongs to uid {owner}, and this is uid {user}; run: chown {user} {path}");
        return Err(anyhow!(text)).context(Code::KeyMode);
    }
    let mode = metadata.mode() & 0o777;
    if mode & kind.forbidden != 0 {
        let Kind { name, open_to, correction, .. } = kind;
        let text =
            format!("the {name} {path} has mode {mode:04o}, others may {open_to}; run: chmod {correction} {path}");
        return Err(anyhow!(text)).context(Code::KeyMode);
    }
    Ok(())
}

fn read_bounded(path: &Path, file: File, kind: &Kind) -> anyhow::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::with_capacity(kind.bytes_max + 1));
    let read = file.take(kind.bytes_max as u64 + 1).read_to_string(&mut text);
    read.with_context(|| format!("cannot read {}", path.display())).context(Code::CertificateFiles)?;
    if text.len() > kind.bytes_max {
        let text = format!("{} is longer than {} bytes; it is not a {}", path.display(), kind.bytes_max, kind.name);
        return Err(anyhow!(text)).context(Code::CertificateFiles);
    }
    Ok(text)
}

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
        private(&at("long"), &"x".repeat(SECRET.bytes_max + 1));
        assert!(refused(&at("long")).contains("longer than"));
    }

    #[test]
    fn certificates_that_others_can_change_are_refused() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = directory.path().join("ca.pem");
        fs::write(&path, "text").expect("a temporary directory");
        for mode in [0o644, 0o444, 0o640, 0o600] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
            assert_eq!(read_public(&path).expect("others can read it at most"), "text");
        }
        for mode in [0o664, 0o646, 0o620, 0o602] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is ours");
            let reason = coded(&read_public(&path).expect_err("refused"), Code::NotExplained);
            assert!(reason.contains("others may change it; run: chmod go-w /"), "{reason}");
            assert!(reason.contains("RONDE-E503"), "{reason}");
        }
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
        let reason = coded(&read_public(&path).expect_err("refused"), Code::NotExplained);
        assert!(reason.contains("belongs to uid 65534"), "{reason}");
    }
}
