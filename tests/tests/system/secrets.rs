//! No secret is visible: while jobs run, no process of this host carries a private key, a token or a job's secret in
//! its arguments or environment, where other users and crash reports find them.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ronde_tests::cluster::{PATIENCE, Process, Sidecar};
use ronde_tests::harness::{DEADLINE, RemoteShell, Run, ronde_binary};
use serde_json::Value;

/// Texts and bytes that no process may show, each with what it reveals.
#[derive(Default)]
struct Detector(Vec<(String, Vec<u8>)>);

impl Detector {
    /// Knows the form of every private key.
    fn new() -> Self {
        let marks: [(&str, &[u8]); 7] = [
            ("a key's PEM", b"PRIVATE KEY"),
            ("the beginning of a P-256 key, base64", b"MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEH"),
            ("the beginning of an Ed25519 key, base64", b"CAQAwBQYDK2Vw"),
            ("the beginning of a P-256 key, hex", b"020100301306072a8648ce3d020106082a8648ce3d030107"),
            ("the beginning of an Ed25519 key, hex", b"020100300506032b6570"),
            ("the beginning of a P-256 key", &[2, 1, 0, 0x30, 0x13, 6, 7, 0x2A, 0x86, 0x48, 0xCE, 0x3D, 2, 1, 6, 8]),
            ("the header of a job's secret", b"ronde job secret"),
        ];
        Self(marks.into_iter().map(|(what, mark)| (what.to_owned(), mark.to_vec())).collect())
    }

    /// Adds this secret, in all usual encodings.
    fn know(&mut self, what: &str, secret: &[u8]) {
        let hex = secret.iter().fold(String::new(), |mut text, byte| {
            // A string cannot fail to be written to.
            let _ = write!(text, "{byte:02x}");
            text
        });
        for (how, form) in [
            ("as it is", secret.to_vec()),
            ("hex", hex.clone().into_bytes()),
            ("capital hex", hex.to_ascii_uppercase().into_bytes()),
            ("base64", base64(secret).into_bytes()),
        ] {
            self.0.push((format!("{what}, {how}"), form));
        }
    }

    /// Adds every line of a key's file, and the bytes that they encode.
    fn know_key(&mut self, what: &str, pem: &str) {
        let lines: Vec<&str> = pem.lines().filter(|line| !line.starts_with("-----")).collect();
        for line in lines.iter().filter(|line| line.len() > 16) {
            self.0.push((format!("{what}, a line of it"), line.as_bytes().to_vec()));
        }
        self.0.push((format!("{what}, in one line"), lines.concat().into_bytes()));
    }

    /// Returns the findings in the arguments and environments of all processes of this host.
    fn findings(&self) -> Result<Vec<String>> {
        let (mut found, mut read) = (Vec::new(), 0);
        for entry in fs::read_dir("/proc")? {
            let pid = entry?.file_name().to_string_lossy().into_owned();
            if pid.parse::<u32>().is_err() {
                continue;
            }
            for file in ["cmdline", "environ"] {
                // It may have ended, or be a process of the kernel's or another user's.
                let Ok(text) = fs::read(Path::new("/proc").join(&pid).join(file)) else { continue };
                read += usize::from(!text.is_empty());
                let seen = self.0.iter().filter(|(_, secret)| text.windows(secret.len()).any(|part| part == secret));
                found.extend(seen.map(|(what, _)| format!("{pid}/{file}: {what}")));
            }
        }
        ensure!(read > 4, "only {read} files of /proc could be read; the detector sees nothing");
        Ok(found)
    }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let value = group.iter().fold(0, |value, byte| value << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for place in 0..=group.len() {
            text.push(char::from(DIGITS[(value >> (18 - 6 * place) & 63) as usize]));
        }
    }
    text
}

/// A process that shows something in its arguments or its environment, and is found.
fn shows(detector: &Detector, argument: &str, variable: &str, what: &str) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", "echo ready; read line", "sh", argument]).env("KEPT", variable);
    let mut process = Process::start("control", &mut command)?;
    process.await_line("its word", PATIENCE, |line| (line.text == "ready").then_some(()))?;
    let found = detector.findings()?;
    let own = format!("{}/", process.pid());
    ensure!(found.iter().any(|finding| finding.starts_with(&own) && finding.contains(what)), "{found:?}");
    Ok(())
}

#[test]
fn no_secret_is_visible_while_jobs_run() -> Result<()> {
    let mut detector = Detector::new();

    // A launcher with two other hosts: keys and the authority are in memory only, tokens in files.
    let shell = RemoteShell::here();
    let run = Run::new(3).options(["-H", "alpha.invalid:2,beta.invalid:1", "--remote-shell"]).options([shell.path()]);
    let mut job = run.start(["sh", "-c", "echo ready; sleep 1000"]);
    (0..3).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    let mut tokens = Vec::new();
    for directory in job.runtime_files() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "token") {
                tokens.push(fs::read(&path)?);
            }
        }
    }
    ensure!(tokens.len() == 3, "{} tokens instead of one for each rank", tokens.len());
    tokens.iter().for_each(|token| detector.know("a rank's token", token));

    // Sidecars by certificates, and by a secret.
    let directory = tempfile::Builder::new().prefix("ronde-test-").tempdir()?;
    let at = |name: &str| directory.path().join(name);
    certs(&["init", "--job", "night"], &[at("authority")])?;
    certs(&["issue", "--sidecars", "0", "--authority"], &[at("authority"), directory.path().to_owned()])?;
    certs(&["secret"], &[at("secret")])?;
    let key = fs::read_to_string(at("sidecar-0/key.pem"))?;
    let authority = fs::read_to_string(at("authority/ca-key.pem"))?;
    detector.know_key("a sidecar's key", &key);
    detector.know_key("an authority's key", &authority);
    let secret = fs::read_to_string(at("secret"))?;
    let digits = secret.lines().nth(1).context("a secret has two lines")?;
    let bytes: Vec<u8> =
        (0..32).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16)).collect::<Result<_, _>>()?;
    detector.know("the job's secret", &bytes);
    let number = std::process::id().to_be_bytes();
    let address = |last: u8| format!("127.{}.{}.{last}:7400", 90 + number[2] % 100, number[3].max(1));
    let mut running = Vec::new();
    for words in [
        vec!["--certs".into(), at("sidecar-0"), "--peers".into(), address(1).into()],
        vec![
            "--job-secret-file".into(),
            at("secret"),
            "--job".into(),
            "night".into(),
            "--index".into(),
            "0".into(),
            "--peers".into(),
            address(2).into(),
        ],
    ] {
        running.push(sidecar(&words, directory.path())?);
    }

    let found = detector.findings()?;
    ensure!(found.is_empty(), "{found:?}");

    // The same detector finds each of them in the wrong places.
    let base64_of_key: String = key.lines().filter(|line| !line.starts_with("-----")).collect();
    shows(&detector, &key, "", "a key's PEM")?;
    shows(&detector, "", &base64_of_key, "the beginning of a P-256 key, base64")?;
    shows(&detector, "", &format!("key={base64_of_key}"), "a sidecar's key, in one line")?;
    shows(&detector, digits, "", "the job's secret, hex")?;
    shows(&detector, "", &base64(&tokens[0]), "a rank's token, base64")?;
    shows(&detector, "", &base64(&bytes), "the job's secret, base64")?;
    drop((job, running));
    Ok(())
}

fn certs(words: &[&str], paths: &[PathBuf]) -> Result<()> {
    let output = Command::new(ronde_binary()).arg("certs").args(words).args(paths).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn sidecar(words: &[PathBuf], runtime_dir: &Path) -> Result<Sidecar> {
    let mut command = Command::new(ronde_binary());
    command.args(["sidecar", "--lanes", "1", "--runtime-dir"]).arg(runtime_dir).args(words);
    let process = Process::start("a sidecar", &mut command)?;
    let mut sidecar = Sidecar { process, index: 0, bound: Value::Null, serving: Value::Null };
    sidecar.await_serving()?;
    Ok(sidecar)
}
