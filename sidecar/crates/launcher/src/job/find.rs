//! Finds the socket of an elastic job on this host.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use nix::unistd::geteuid;
use ronde_bootstrap::codes::Code;
use ronde_bootstrap::directory::ADMIN_FILE;
use ronde_wire::JobName;

use super::messages::{Answer, Request};
use super::socket::{self, NAME_FILE, PREFIX, SOCKET_FILE};

/// A job that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    directory: PathBuf,
    owner: u32,
    name: String,
}

impl Found {
    /// Sends the job's launcher a request.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn ask(&self, request: &Request) -> anyhow::Result<Answer> {
        socket::ask(&self.directory, self.owner, request)
    }
}

/// Finds the named job, or the only one, below `base`.
///
/// # Errors
/// When there is no such job, when there are several, or when the job is not elastic.
pub(super) fn find(base: &Path, name: Option<&JobName>) -> anyhow::Result<Found> {
    let entries = fs::read_dir(base).with_context(|| format!("cannot read {}", base.display()));
    let entries: Vec<PathBuf> = entries.context(Code::JobNotFound)?.flatten().map(|entry| entry.path()).collect();
    let mut jobs: Vec<Found> = entries.iter().filter_map(|path| job_in(path)).collect();
    jobs.sort_by(|one, other| (&one.name, &one.directory).cmp(&(&other.name, &other.directory)));
    let names: Vec<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
    let names = names.join(", ");
    if let Some(name) = name {
        jobs.retain(|job| job.name == name.to_string());
    }
    if jobs.len() > 1 {
        let text = format!("several elastic jobs run on this host ({names}); name one with --job NAME");
        return Err(anyhow!(text).context(Code::JobAmbiguous));
    }
    jobs.pop().ok_or_else(|| none(base, &entries, name, &names))
}

/// The job of a directory, if it is one of a launcher of this user. Links are not followed, and directories that others
/// may enter are not used. Root sees those of all users.
fn job_in(path: &Path) -> Option<Found> {
    let user = geteuid().as_raw();
    let is_named = path.file_name()?.to_str()?.starts_with(PREFIX);
    let found = fs::symlink_metadata(path).ok().filter(|_| is_named)?;
    let is_private = found.is_dir() && found.permissions().mode() & OTHERS == 0;
    if !is_private || !(found.uid() == user || user == 0) || !path.join(SOCKET_FILE).exists() {
        return None;
    }
    let name = fs::read_to_string(path.join(NAME_FILE)).ok()?;
    // A launcher that was killed leaves its directory.
    std::os::unix::net::UnixStream::connect(path.join(SOCKET_FILE)).ok()?;
    Some(Found { directory: path.to_owned(), owner: found.uid(), name: name.trim().to_owned() })
}

fn none(base: &Path, entries: &[PathBuf], name: Option<&JobName>, names: &str) -> anyhow::Error {
    let Some(name) = name else {
        let base = base.display();
        let text = format!(
            "no elastic job of this user runs on this host (there is no launcher's socket below {base}); run `ronde job` \
             on the host of the launcher, as its user and with the same XDG_RUNTIME_DIR"
        );
        return anyhow!(text).context(Code::JobNotFound);
    };
    let has_sidecar = |path: &&PathBuf| {
        let directory = path.file_name().and_then(|found| found.to_str()).unwrap_or_default();
        directory.starts_with(&format!("ronde-{name}-")) && path.join(ADMIN_FILE).exists()
    };
    if entries.iter().any(|path| has_sidecar(&path)) {
        let text = format!(
            "job {name} has sidecars on this host, but no launcher of an elastic job: either it is not elastic (start it \
             with --min-np), or its launcher runs on another host (run `ronde job` there)"
        );
        return anyhow!(text).context(Code::JobNotElastic);
    }
    let others = if names.is_empty() { "there are none".to_owned() } else { format!("there are: {names}") };
    anyhow!("no elastic job named {name} runs on this host; {others}").context(Code::JobNotFound)
}

/// Bits of a mode that give rights to other users.
const OTHERS: u32 = 0o077;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use ronde_bootstrap::codes::coded;

    use super::*;

    struct Base(tempfile::TempDir, Vec<UnixListener>);

    impl Base {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a temporary directory"), Vec::new())
        }

        fn add(&mut self, directory: &str, name: &str, mode: u32) {
            let path = self.0.path().join(directory);
            fs::create_dir(&path).expect("ours");
            fs::write(path.join(NAME_FILE), format!("{name}\n")).expect("ours");
            self.1.push(UnixListener::bind(path.join(SOCKET_FILE)).expect("ours"));
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("ours");
        }

        fn find(&self, name: Option<&str>) -> Result<String, String> {
            let name = name.map(|name| JobName::new(name).expect("a name"));
            let found = find(self.0.path(), name.as_ref());
            found.map(|job| job.name).map_err(|error| coded(&error, Code::JobUnreachable))
        }
    }

    #[test]
    fn the_only_job_or_the_named_one_is_found() {
        let mut base = Base::new();
        base.add("ronde-job-1-0", "digits", 0o700);
        assert_eq!(base.find(None), Ok("digits".to_owned()));
        base.add("ronde-job-2-0", "words", 0o700);
        assert_eq!(base.find(Some("words")), Ok("words".to_owned()));
        let error = base.find(None).expect_err("two");
        assert!(error.contains("(digits, words); name one with --job NAME [RONDE-E605]"), "{error}");
    }

    #[test]
    fn a_missing_job_is_an_error_that_names_the_others() {
        let mut base = Base::new();
        let error = base.find(None).expect_err("none");
        assert!(
            error.contains("no elastic job of this user runs on this host") && error.contains("[RONDE-E604]"),
            "{error}"
        );
        base.add("ronde-job-1-0", "digits", 0o700);
        let error = base.find(Some("words")).expect_err("another one");
        assert_eq!(error, "no elastic job named words runs on this host; there are: digits [RONDE-E604]");
    }

    #[test]
    fn directories_that_others_may_enter_and_dead_launchers_are_not_used() {
        let mut base = Base::new();
        base.add("ronde-job-1-0", "open", 0o750);
        base.add("ronde-job-2-0", "dead", 0o700);
        base.1.pop();
        base.add("elsewhere", "linked", 0o700);
        std::os::unix::fs::symlink(base.0.path().join("elsewhere"), base.0.path().join("ronde-job-3-0")).expect("ours");
        assert!(base.find(None).expect_err("none can be used").contains("[RONDE-E604]"));
    }

    #[test]
    fn a_job_that_is_not_elastic_is_recognised_by_its_sidecars() {
        let base = Base::new();
        let sidecar = base.0.path().join("ronde-digits-0-ab");
        fs::create_dir(&sidecar).expect("ours");
        fs::write(sidecar.join(ADMIN_FILE), "127.0.0.1:1\n").expect("ours");
        let error = base.find(Some("digits")).expect_err("it is not elastic");
        assert!(error.contains("not elastic (start it with --min-np)") && error.contains("[RONDE-E606]"), "{error}");
    }
}
