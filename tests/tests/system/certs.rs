//! Jobs without the launcher: directories of keys and certificates, sidecars that run from them, and certificates that
//! are replaced while collectives run.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use ronde_tests::cluster::{Line, PATIENCE, Process, Sidecar, Worker, ronde_binary, sum};
use ronde_tests::script::Fill;
use ronde_transport::Identity;
use serde_json::Value;
use tempfile::TempDir;

use crate::WORKER;

/// A directory with an authority and certificates for two sidecars.
struct Job {
    directory: TempDir,
    number: u8,
}

impl Job {
    fn new(number: u8) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
        let job = Self { directory, number };
        job.certs(&["init", "--job", "night"], &["authority"])?;
        job.certs(&["issue", "--sidecars", "0-1", "--authority"], &["authority", "."])?;
        Ok(job)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The serial numbers of both sidecars' certificates.
    fn serials(&self) -> Result<[String; 2]> {
        let serial = |index: u32| -> Result<String> {
            let read = |name: &str| fs::read_to_string(self.path(&format!("sidecar-{index}/{name}")));
            let identity = Identity::from_pem(&read("cert.pem")?, &read("key.pem")?, &read("ca.pem")?)?;
            Ok(identity.serial().to_owned())
        };
        Ok([serial(0)?, serial(1)?])
    }

    /// Runs `ronde certs` with these words, followed by these paths of the job.
    fn certs(&self, words: &[&str], paths: &[&str]) -> Result<Output> {
        let mut command = Command::new(ronde_binary()?);
        command.arg("certs").args(words).args(paths.iter().map(|name| self.path(name)));
        let output = command.output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(output)
    }

    /// Makes `copy`, which has fresh certificates for sidecar 0.
    fn rotate_copy(&self) -> Result<()> {
        fs::create_dir(self.path("copy"))?;
        for name in ["cert.pem", "key.pem", "ca.pem"] {
            fs::copy(self.path("sidecar-0").join(name), self.path("copy").join(name))?;
        }
        self.certs(&["rotate", "--authority"], &["authority", "copy"])?;
        Ok(())
    }

    /// A directory with a secret instead of certificates.
    fn with_secret(number: u8) -> Result<Self> {
        let job = Self { directory: tempfile::Builder::new().prefix("ronde-test-").tempdir()?, number };
        job.certs(&["secret"], &["secret"])?;
        Ok(job)
    }

    /// Addresses of the loopback that no other test uses, so that ports need not be searched for.
    fn peers(&self) -> String {
        let process = std::process::id().to_be_bytes();
        let address =
            |index: u8| format!("127.{}.{}.{}:7400", 100 + (self.number * 2 + index), process[2], process[3].max(1));
        format!("{},{}", address(0), address(1))
    }

    fn sidecar(&self, index: u32) -> Result<Sidecar> {
        self.start(index, &["--certs".into(), self.path(&format!("sidecar-{index}")).into()])
    }

    fn sidecar_by_secret(&self, index: u32, job: &str, words: &[&str]) -> Result<Sidecar> {
        let secret = self.path(&format!("secret-{index}"));
        if !secret.exists() {
            // As on its own host.
            fs::copy(self.path("secret"), &secret)?;
        }
        let index_text = index.to_string();
        let own = ["--job", job, "--index", &index_text].into_iter().chain(words.iter().copied());
        let words: Vec<OsString> = own.map(OsString::from).chain(["--job-secret-file".into(), secret.into()]).collect();
        self.start(index, &words)
    }

    fn start(&self, index: u32, words: &[OsString]) -> Result<Sidecar> {
        let mut command = Command::new(ronde_binary()?);
        command.args(["sidecar", "--lanes", "1", "--peers", &self.peers()]).args(words);
        command.arg("--runtime-dir").arg(self.directory.path());
        let process = Process::start(format!("sidecar {index}"), command.env("RONDE_LOG", "info"))?;
        Ok(Sidecar { process, index, bound: Value::Null, serving: Value::Null })
    }
}

fn check_sum(workers: &mut [Worker], name: &str) -> Result<()> {
    let fill = Fill::Whole { seed: 7 };
    let ids: Vec<u64> =
        workers.iter_mut().map(|worker| worker.submit(sum(name, 100_000, fill))).collect::<Result<_>>()?;
    for (worker, id) in workers.iter_mut().zip(ids) {
        ensure!(worker.digest(id, PATIENCE)? == fill.digest_of_sum(&[0, 1], 400_000), "{name} of rank {}", worker.rank);
    }
    Ok(())
}

/// Sums until a condition holds; none may fail or be wrong.
fn sum_until(job: &mut Running, what: &str, seen: impl Fn(&Running) -> Result<bool>) -> Result<()> {
    sum_within(PATIENCE, job, what, seen)
}

fn sum_within(within: Duration, job: &mut Running, what: &str, seen: impl Fn(&Running) -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + within;
    loop {
        check_sum(&mut job.workers, &format!("{what} {}", job.sums))?;
        job.sums += 1;
        if seen(job)? {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{what}: not within {within:?}\n{}", job.describe());
    }
}

/// Two sidecars with a worker each.
struct Running {
    sidecars: Vec<Sidecar>,
    workers: Vec<Worker>,
    sums: u32,
}

impl Running {
    fn of(mut sidecars: Vec<Sidecar>) -> Result<Self> {
        sidecars.iter_mut().try_for_each(Sidecar::await_serving)?;
        let mut workers = Vec::new();
        for (rank, sidecar) in (0..).zip(&sidecars) {
            workers.push(Worker::start(Path::new(WORKER), "night", rank, sidecar)?);
        }
        workers.iter_mut().try_for_each(Worker::await_connected)?;
        Ok(Self { sidecars, workers, sums: 0 })
    }

    /// The control link's part of a status page.
    fn link(&self, of: usize) -> Result<Value> {
        let page: Value = self.sidecars[of].status()?;
        Ok(page["paths"][0].clone())
    }

    /// Returns whether both sidecars report that their link uses these two certificates.
    fn shows(&self, serials: &[String; 2]) -> Result<bool> {
        for of in 0..2 {
            let link = self.link(of)?;
            ensure!(link["cipher"] == "TLS_AES_128_GCM_SHA256" && link["key_exchange"] == "X25519MLKEM768", "{link}");
            if link["certificate"]["serial"] != *serials[of] || link["peer_certificate"]["serial"] != *serials[1 - of] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns how often connections of a port of both sidecars were replaced, the lesser number.
    fn replaced(&self, port: &str) -> Result<u64> {
        let name = format!("ronde_links_replaced_total{{port=\"{port}\"}} ");
        let mut least = u64::MAX;
        for sidecar in &self.sidecars {
            let page = sidecar.page("/metrics")?.1;
            let value = page.lines().find_map(|line| line.strip_prefix(&name)).context("the metric is there")?;
            least = least.min(value.parse()?);
        }
        Ok(least)
    }

    fn describe(&mut self) -> String {
        let links = [self.link(0), self.link(1)];
        let logs: String = self.sidecars.iter_mut().map(|sidecar| sidecar.process.log()).collect();
        format!("{links:?}\n{logs}")
    }
}

fn wait_for_log(sidecar: &mut Sidecar, words: &str) -> Result<()> {
    let find = |line: &Line| line.text.contains(words).then_some(());
    sidecar.process.await_log(words, PATIENCE, find)
}

#[test]
fn sidecars_run_from_directories_and_take_fresh_certificates_while_they_serve() -> Result<()> {
    let job = Job::new(1)?;
    let mut sidecars = vec![job.sidecar(0)?, job.sidecar(1)?];
    sidecars.iter_mut().try_for_each(Sidecar::await_serving)?;
    let mut workers = Vec::new();
    for (rank, sidecar) in (0..).zip(&sidecars) {
        workers.push(Worker::start(Path::new(WORKER), "night", rank, sidecar)?);
    }
    workers.iter_mut().try_for_each(Worker::await_connected)?;
    check_sum(&mut workers, "before")?;

    job.certs(&["rotate", "--authority"], &["authority", "sidecar-0", "sidecar-1"])?;
    for sidecar in &mut sidecars {
        check_sum(&mut workers, "during")?;
        wait_for_log(sidecar, "links use the new certificate")?;
    }
    check_sum(&mut workers, "after")?;

    fs::write(job.path("sidecar-0/cert.pem"), "no certificate")?;
    wait_for_log(&mut sidecars[0], "the changed credentials cannot be used, the old ones stay")?;
    check_sum(&mut workers, "with a broken file")?;

    drop(workers);
    for sidecar in &mut sidecars {
        sidecar.process.signal(Signal::SIGTERM)?;
    }
    for sidecar in &mut sidecars {
        ensure!(sidecar.process.await_exit(PATIENCE)?.success(), "{}", sidecar.process.log());
    }
    Ok(())
}

#[test]
fn a_sidecar_of_another_authority_is_refused_with_the_reason() -> Result<()> {
    let (job, other) = (Job::new(2)?, Job::new(3)?);
    for name in ["cert.pem", "key.pem", "ca.pem"] {
        fs::copy(other.path("sidecar-1").join(name), job.path("sidecar-1").join(name))?;
    }
    let _first = job.sidecar(0)?;
    let mut second = job.sidecar(1)?;
    let reason = second.await_fatal(PATIENCE)?;
    ensure!(reason.contains("the certificate is not signed by an authority of this job"), "{reason}");
    ensure!(reason.contains("sidecar 0 did not connect") && reason.contains("[RONDE-E406]"), "{reason}");
    ensure!(!second.process.await_exit(PATIENCE)?.success());
    Ok(())
}

#[test]
fn without_credentials_one_line_names_the_alternatives() -> Result<()> {
    let output = Command::new(ronde_binary()?).arg("sidecar").output()?;
    let text = String::from_utf8(output.stderr).context("words")?;
    ensure!(!output.status.success() && text.lines().count() == 1, "{text}");
    for words in [
        "ronde run",
        "--certs DIR",
        "ronde certs issue",
        "--job-secret-file FILE",
        "ronde certs secret",
        "[RONDE-E502]",
    ] {
        ensure!(text.contains(words), "{text:?} lacks {words:?}");
    }
    Ok(())
}

#[test]
fn a_key_that_others_can_read_is_refused_with_the_fix() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let job = Job::new(4)?;
    fs::set_permissions(job.path("sidecar-0/key.pem"), fs::Permissions::from_mode(0o644))?;
    let reason = job.sidecar(0)?.await_fatal(PATIENCE)?;
    ensure!(reason.contains("has mode 0644, others may read it; run: chmod 600 /"), "{reason}");
    ensure!(reason.contains("[RONDE-E503]"), "{reason}");
    Ok(())
}

#[test]
fn certificates_that_others_can_change_are_refused_at_the_start_and_later() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let job = Job::new(12)?;
    let mode = |name: &str, mode| fs::set_permissions(job.path(name), fs::Permissions::from_mode(mode));
    for name in ["sidecar-0/ca.pem", "sidecar-0/cert.pem"] {
        mode(name, 0o646)?;
        let reason = job.sidecar(0)?.await_fatal(PATIENCE)?;
        ensure!(reason.contains("has mode 0646, others may change it; run: chmod go-w /"), "{reason}");
        ensure!(reason.contains("[RONDE-E503]"), "{reason}");
        mode(name, 0o644)?;
    }
    let mut sidecar = job.sidecar(0)?;
    sidecar.await_serving()?;
    // A sidecar takes new files when two polls, a second apart, have seen them: the one that it must refuse comes first.
    job.rotate_copy()?;
    mode("copy/ca.pem", 0o666)?;
    for name in ["ca.pem", "key.pem", "cert.pem"] {
        fs::rename(job.path("copy").join(name), job.path("sidecar-0").join(name))?;
    }
    wait_for_log(&mut sidecar, "the old ones stay: the certificate /")?;
    ensure!(!sidecar.process.log().contains("links use the new certificate"), "it took them");
    mode("sidecar-0/ca.pem", 0o644)?;
    wait_for_log(&mut sidecar, "links use the new certificate")
}

#[test]
fn sidecars_with_the_secret_issue_for_themselves() -> Result<()> {
    let job = Job::with_secret(5)?;
    let mut sidecars = vec![job.sidecar_by_secret(0, "night", &[])?, job.sidecar_by_secret(1, "night", &[])?];
    sidecars.iter_mut().try_for_each(Sidecar::await_serving)?;
    let mut workers = Vec::new();
    for (rank, sidecar) in (0..).zip(&sidecars) {
        workers.push(Worker::start(Path::new(WORKER), "night", rank, sidecar)?);
    }
    workers.iter_mut().try_for_each(Worker::await_connected)?;
    check_sum(&mut workers, "by secret")?;
    let secret = fs::read_to_string(job.path("secret"))?;
    let digits = secret.lines().nth(1).context("two lines")?;
    drop(workers);
    for sidecar in &mut sidecars {
        sidecar.process.signal(Signal::SIGTERM)?;
        ensure!(sidecar.process.await_exit(PATIENCE)?.success(), "{}", sidecar.process.log());
        ensure!(!sidecar.process.log().contains(digits), "the secret is in the log");
    }
    Ok(())
}

#[test]
fn a_sidecar_with_another_secret_or_of_another_job_is_refused() -> Result<()> {
    let (one, two) = (Job::with_secret(6)?, Job::with_secret(7)?);
    fs::copy(two.path("secret"), one.path("secret-1"))?;
    let _first = one.sidecar_by_secret(0, "night", &[])?;
    let reason = one.sidecar_by_secret(1, "night", &[])?.await_fatal(PATIENCE)?;
    ensure!(reason.contains("the certificate is not signed by an authority of this job"), "{reason}");
    let _third = two.sidecar_by_secret(0, "night", &[])?;
    let reason = two.sidecar_by_secret(1, "day", &[])?.await_fatal(PATIENCE)?;
    ensure!(reason.contains("the certificate is not signed by an authority of this job"), "{reason}");
    Ok(())
}

#[test]
fn a_secret_that_cannot_be_used_is_refused_with_the_fix() -> Result<()> {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let job = Job::with_secret(8)?;
    let refused = |words: &[&str], expected: &[&str]| -> Result<()> {
        let reason = job.sidecar_by_secret(0, "night", words)?.await_fatal(PATIENCE)?;
        ensure!(expected.iter().all(|words| reason.contains(words)), "{reason:?} lacks {expected:?}");
        Ok(())
    };
    refused(&["--certs", "somewhere"], &["--certs and --job-secret-file exclude each other", "[RONDE-E403]"])?;
    let file = job.path("secret-0");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640))?;
    refused(&[], &["has mode 0640", "run: chmod 600 /", "[RONDE-E503]"])?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
    fs::write(&file, "ronde job secret 1\n0123456789abcdef\n")?;
    refused(&[], &["the secret has 16 digits, not 64", "[RONDE-E510]"])?;
    fs::write(&file, "a password\n")?;
    refused(&[], &["its first line is not", "ronde certs secret FILE", "[RONDE-E510]"])?;
    fs::remove_file(&file)?;
    let elsewhere = tempfile::tempdir()?;
    fs::copy(job.path("secret"), elsewhere.path().join("secret"))?;
    symlink(elsewhere.path().join("secret"), &file)?;
    refused(&[], &["is a link to", "in another directory", "[RONDE-E503]"])?;
    fs::remove_file(&file)?;
    fs::create_dir(&file)?;
    refused(&[], &["is not a file", "[RONDE-E504]"])?;
    for (words, expected) in [
        (&["--job-secret-file", "none"][..], "needs --job NAME"),
        (&["--job-secret-file", "none", "--job", "night"], "needs --index I"),
        (&["--job-secret-file", "none", "--job", "night", "--index", "0"], "cannot read none"),
    ] {
        let output = Command::new(ronde_binary()?).arg("sidecar").args(words).output()?;
        let text = String::from_utf8(output.stderr).context("words")?;
        ensure!(!output.status.success() && text.contains(expected), "{text:?} lacks {expected:?}");
    }
    Ok(())
}

#[test]
fn an_authority_is_changed_while_collectives_run() -> Result<()> {
    let job = Job::new(9)?;
    let mut running = Running::of(vec![job.sidecar(0)?, job.sidecar(1)?])?;
    sum_until(&mut running, "before", |running| running.shows(&job.serials()?))?;
    job.certs(&["init", "--job", "night"], &["next"])?;
    let rotate = |authority: &str, trust: Option<&str>| -> Result<()> {
        let trusted = trust.map(|name| job.path(name).display().to_string());
        let words: Vec<&str> = trusted.as_deref().map_or(vec![], |path| vec!["--trust", path]);
        job.certs(&[&["rotate"], &words[..], &["--authority"]].concat(), &[authority, "sidecar-0", "sidecar-1"])?;
        Ok(())
    };
    for (step, (authority, trust)) in
        [("authority", Some("next/ca.pem")), ("next", Some("authority/ca.pem")), ("next", None)].into_iter().enumerate()
    {
        let before = running.replaced("lane0")?;
        rotate(authority, trust)?;
        let serials = job.serials()?;
        // A lane that was not replaced before the next step is replaced once for both.
        sum_until(&mut running, &format!("step {step}"), |running| {
            Ok(running.shows(&serials)? && running.replaced("lane0")? > before)
        })?;
    }
    println!("{} sums, none failed", running.sums);
    // Certificates of the old authority are rejected now.
    job.certs(&["rotate", "--at-once", "--authority"], &["authority", "sidecar-1"])?;
    wait_for_log(&mut running.sidecars[0], "link refused")?;
    Ok(())
}

#[test]
fn a_half_replaced_directory_is_retried_and_logged_once() -> Result<()> {
    let job = Job::new(10)?;
    let mut running = Running::of(vec![job.sidecar(0)?, job.sidecar(1)?])?;
    let before = job.serials()?;
    // As in a copy by hand, one file after another.
    job.rotate_copy()?;
    fs::rename(job.path("copy/key.pem"), job.path("sidecar-0/key.pem"))?;
    let words = "the changed credentials cannot be used, the old ones stay";
    wait_for_log(&mut running.sidecars[0], words)?;
    // Long enough for more polls of the same half.
    let until = Instant::now() + Duration::from_secs(4);
    sum_until(&mut running, "with half", |running| Ok(running.shows(&before)? && Instant::now() > until))?;
    ensure!(!running.sidecars[0].process.log().contains(words), "logged twice");
    fs::rename(job.path("copy/cert.pem"), job.path("sidecar-0/cert.pem"))?;
    let after = job.serials()?;
    ensure!(after != before, "a fresh certificate has a fresh number");
    sum_until(&mut running, "with both", |running| running.shows(&after))
}

#[test]
fn certificates_of_a_secret_are_renewed_before_they_end() -> Result<()> {
    let job = Job::with_secret(11)?;
    let life = LIFE.as_secs().to_string();
    let brief = ["--certificate-life", &life];
    let sidecars = vec![job.sidecar_by_secret(0, "night", &brief)?, job.sidecar_by_secret(1, "night", &brief)?];
    let mut running = Running::of(sidecars)?;
    sum_within(10 * LIFE, &mut running, "renewed", |running| {
        Ok(running.replaced("control")? >= 4 && running.replaced("lane0")? >= 4)
    })?;
    println!("{} sums, none failed", running.sums);
    Ok(())
}

/// A certificate's life that a busy machine does not miss.
const LIFE: Duration = Duration::from_secs(15);
