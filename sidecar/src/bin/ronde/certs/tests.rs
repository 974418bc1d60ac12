use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use clap::Parser;
use tempfile::TempDir;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    args: CertsArgs,
}

/// Runs `certs` with these words, in which `@` is the directory.
fn certs(directory: &TempDir, words: &str) -> Result<String, String> {
    let root = directory.path().display().to_string();
    let words = format!("certs {}", words.replace('@', &root));
    let line = Line::try_parse_from(words.split(' ')).map_err(|error| error.to_string())?;
    let done = perform(&line.args.command);
    done.map(|text| text.replace(&root, "@")).map_err(|error| coded(&error, Code::CertificateFiles).replace(&root, "@"))
}

/// An authority with sidecars 0 and 1.
fn job() -> TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    certs(&directory, "init --job night @/ca").expect("a fresh authority");
    certs(&directory, "issue --authority @/ca --sidecars 0-1 @").expect("fresh certificates");
    directory
}

fn contents(directory: &TempDir, name: &str) -> String {
    fs::read_to_string(directory.path().join(name)).expect("it was made")
}

fn fails(result: Result<String, String>, with: &[&str]) {
    let error = result.expect_err("refused");
    for words in with {
        assert!(error.contains(words), "{error:?} lacks {words:?}");
    }
}

#[test]
fn issued_certificates_are_valid_and_keys_are_private() {
    let directory = job();
    let text = certs(&directory, "inspect @/ca @/sidecar-0 @/sidecar-1").expect("all good");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "ok    @/ca: the authority of job night of ronde.local");
    assert!(
        lines[2].starts_with("ok    @/sidecar-1: spiffe://ronde.local/job/night/sidecar/1, valid from 20"),
        "{text}"
    );
    assert!(lines[2].ends_with("(for 29 days)") || lines[2].ends_with("(for 30 days)"), "{text}");
    for key in ["ca/ca-key.pem", "sidecar-0/key.pem"] {
        let mode = fs::metadata(directory.path().join(key)).expect("it was made").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{key}");
    }
}

#[test]
fn nothing_is_overwritten() {
    let directory = job();
    let before = contents(&directory, "sidecar-1/key.pem");
    fails(certs(&directory, "init --job night @/ca"), &["@/ca/ca-key.pem exists", "RONDE-E508"]);
    fails(certs(&directory, "issue --authority @/ca --sidecars 1,2 @"), &["sidecar-1/ca.pem exists", "rotate"]);
    assert_eq!(contents(&directory, "sidecar-1/key.pem"), before);
    assert!(!directory.path().join("sidecar-2").exists(), "half of it was made");
}

#[test]
fn rotation_replaces_key_and_certificate_of_the_same_sidecar() {
    let directory = job();
    let before = [contents(&directory, "sidecar-0/key.pem"), contents(&directory, "sidecar-0/cert.pem")];
    let text = certs(&directory, "rotate --authority @/ca --days 7 @/sidecar-0").expect("of this authority");
    assert_eq!(text, "@/sidecar-0: spiffe://ronde.local/job/night/sidecar/0, valid for 7 days\n");
    assert_ne!(contents(&directory, "sidecar-0/key.pem"), before[0]);
    assert_ne!(contents(&directory, "sidecar-0/cert.pem"), before[1]);
    let left = fs::read_dir(directory.path().join("sidecar-0")).expect("it was made").count();
    assert_eq!(left, 3, "nothing but the three files");
}

#[test]
fn a_directory_of_another_authority_is_not_rotated() {
    let directory = job();
    certs(&directory, "init --job day @/other").expect("a fresh authority");
    let before = contents(&directory, "sidecar-0/key.pem");
    fails(
        certs(&directory, "rotate --authority @/other @/sidecar-1 @/sidecar-0"),
        &["@/sidecar-1 belongs to spiffe://ronde.local/job/night/sidecar/1", "job/day/sidecar/1", "RONDE-E507"],
    );
    assert_eq!(contents(&directory, "sidecar-0/key.pem"), before);
}

#[test]
fn an_authority_is_changed_in_three_steps_and_not_in_fewer() {
    let directory = job();
    certs(&directory, "init --job night @/next").expect("another authority of the same job");
    certs(&directory, "init --job day @/day").expect("an authority of another job");
    let before = contents(&directory, "sidecar-0/cert.pem");
    let both = "@/sidecar-0 @/sidecar-1";
    let rotate = |words: &str| certs(&directory, &format!("rotate {words} {both}"));
    fails(rotate("--authority @/next"), &["@/sidecar-0 does not know this authority yet", "--trust", "RONDE-E511"]);
    fails(rotate("--authority @/next --trust @/ca/ca.pem"), &["does not know this authority yet"]);
    fails(rotate("--authority @/ca --trust @/day/ca.pem"), &["an authority of --trust cannot be used", "job/day"]);
    fails(rotate("--authority @/ca --trust @/sidecar-1/cert.pem"), &["names no spiffe://<trust domain>/job/<job>"]);
    assert_eq!(contents(&directory, "sidecar-0/cert.pem"), before, "something was changed by a refused rotation");

    rotate("--authority @/ca --trust @/next/ca.pem").expect("the first step");
    let text = certs(&directory, "inspect @/sidecar-0").expect("good");
    assert!(text.ends_with(", accepts 2 authorities\n"), "{text}");
    fails(
        rotate("--authority @/next"),
        &["would no longer be accepted", "keep accepting it with --trust", "RONDE-E511"],
    );
    rotate("--authority @/next --trust @/ca/ca.pem").expect("the second step");
    rotate("--authority @/next").expect("the third step");
    let text = certs(&directory, "inspect @/sidecar-0 @/sidecar-1").expect("good");
    assert!(!text.contains("accepts"), "{text}");
    assert_eq!(contents(&directory, "sidecar-1/ca.pem"), contents(&directory, "next/ca.pem"));

    rotate("--authority @/ca --at-once").expect("for sidecars that do not run");
    assert_eq!(contents(&directory, "sidecar-1/ca.pem"), contents(&directory, "ca/ca.pem"));
}

#[test]
fn a_bundle_has_a_bound() {
    let directory = job();
    let mut words = "rotate --authority @/ca".to_owned();
    for number in 0..8 {
        certs(&directory, &format!("init --job night @/next-{number}")).expect("another authority of the same job");
        words.push_str(&format!(" --trust @/next-{number}/ca.pem"));
    }
    certs(&directory, &format!("{words} --at-once @/sidecar-0")).expect("it can be written");
    fails(certs(&directory, "inspect @/sidecar-0"), &["RONDE-E509"]);
    let error = directory::load(&directory.path().join("sidecar-0")).expect_err("too many");
    assert!(format!("{error:#}").contains("the list of authorities has 9 certificates; 8 are allowed"), "{error:#}");
}

#[test]
fn a_secret_is_made_once_and_for_its_owner_only() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let output = certs(&directory, "secret @/keys/secret").expect("a fresh file");
    let text = contents(&directory, "keys/secret");
    assert!(text.starts_with("ronde job secret 1\n") && !output.contains(text.lines().nth(1).expect("two lines")));
    let mode = fs::metadata(directory.path().join("keys/secret")).expect("it was made").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    fails(certs(&directory, "secret @/keys/secret"), &["@/keys/secret exists", "RONDE-E508"]);
    assert_eq!(contents(&directory, "keys/secret"), text);
}

#[test]
fn an_open_key_is_refused_with_the_command_that_closes_it() {
    let directory = job();
    for (key, words) in
        [("sidecar-0/key.pem", "inspect @/sidecar-0"), ("ca/ca-key.pem", "issue --authority @/ca --sidecars 7 @")]
    {
        let path = directory.path().join(key);
        for mode in [0o640, 0o604, 0o620, 0o602] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("the file is ours");
            let error = match private_file::read(&path) {
                Ok(_) => panic!("mode {mode:o} is taken"),
                Err(error) => coded(&error, Code::CertificateFiles),
            };
            assert!(error.contains(&format!("has mode {mode:04o}")), "{error}");
            assert!(error.contains("run: chmod 600 /") && error.contains("RONDE-E503"), "{error}");
        }
        assert!(certs(&directory, words).is_err(), "{words}");
        fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("the file is ours");
        certs(&directory, words).expect("closed again");
    }
}

#[test]
fn mismatched_keys_and_certificates_are_rejected() {
    let directory = job();
    let copy = |from: &str, to: &str| fs::copy(directory.path().join(from), directory.path().join(to)).expect("ours");
    copy("sidecar-1/cert.pem", "sidecar-0/cert.pem");
    let error = directory::load(&directory.path().join("sidecar-0")).expect_err("another's key");
    let error = coded(&error, Code::NoCredentials);
    assert!(error.contains("the key does not serve the certificate") && error.contains("RONDE-E504"), "{error}");
    certs(&directory, "init --job night @/other").expect("a fresh authority of the same name");
    copy("other/ca.pem", "sidecar-1/ca.pem");
    let error = directory::load(&directory.path().join("sidecar-1")).expect_err("another authority's");
    let error = coded(&error, Code::NoCredentials);
    assert!(error.contains("not signed by an authority of this job") && error.contains("RONDE-E507"), "{error}");
    fs::remove_file(directory.path().join("sidecar-1/key.pem")).expect("ours");
    fails(certs(&directory, "inspect @/sidecar-1"), &["1 of 1 directories cannot be used", "RONDE-E509"]);
}

#[test]
fn a_certificate_out_of_its_time_is_refused() {
    let directory = job();
    let ca = authority(&directory.path().join("ca")).expect("good");
    let now = SystemTime::now();
    let day = Duration::from_secs(SECONDS_PER_DAY);
    for (not_before, not_after, words, code) in [
        (now - day * 2, now - day, "the certificate expired at 20", "RONDE-E505"),
        (now + day, now + day * 2, "the certificate is not valid before 20", "RONDE-E506"),
    ] {
        let key = KeyRequest::generate().expect("a key");
        let validity = Validity { not_before, not_after };
        let certificate = ca.issue(key.request_pem(), SidecarIndex(0), validity).expect("a certificate");
        let sidecar = directory.path().join("sidecar-0");
        fs::write(sidecar.join(KEY_FILE), key.key_pem()).expect("ours");
        fs::write(sidecar.join(CERTIFICATE_FILE), certificate).expect("ours");
        let error = coded(&directory::load(&sidecar).expect_err("out of its time"), Code::NoCredentials);
        assert!(error.contains(words) && error.contains(code), "{error}");
    }
}

#[test]
fn indices_are_read() {
    let read =
        |text| indices(text).map(|found| found.into_iter().collect::<Vec<_>>()).map_err(|error| error.to_string());
    assert_eq!(read("3"), Ok(vec![3]));
    assert_eq!(read("0-2,1,5"), Ok(vec![0, 1, 2, 5]));
    for (text, words) in [("", "is not INDEX"), ("2-1", "is empty"), ("0-1024", "0 to 1023"), ("a", "is not INDEX")] {
        assert!(read(text).is_err_and(|error| error.contains(words)), "{text:?}");
    }
}

#[test]
fn once_leaves_no_authority_that_could_issue_again() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let text = certs(&directory, "once --job night --sidecars 0-2 --days 1 @").expect("fresh certificates");
    assert_eq!(text.lines().count(), 3, "{text}");
    certs(&directory, "inspect @/sidecar-0 @/sidecar-1 @/sidecar-2").expect("all good");
    let mut names: Vec<String> = Vec::new();
    for place in fs::read_dir(directory.path()).expect("it can be listed").flatten() {
        let files = fs::read_dir(place.path()).expect("all are directories").flatten();
        names.extend(files.map(|file| file.file_name().to_string_lossy().into_owned()));
    }
    names.sort();
    assert_eq!(names.join(" "), "ca.pem ca.pem ca.pem cert.pem cert.pem cert.pem key.pem key.pem key.pem");
    assert_eq!(contents(&directory, "sidecar-0/ca.pem"), contents(&directory, "sidecar-2/ca.pem"));
}

#[test]
fn once_keeps_valid_certificates_and_overwrites_nothing_without_force() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let words = "once --job night --sidecars 0-1 --days 2 @";
    certs(&directory, words).expect("fresh certificates");
    let before = contents(&directory, "sidecar-0/key.pem");
    fails(certs(&directory, words), &["exists and is not overwritten", "[RONDE-E508]"]);
    let kept = certs(&directory, "once --job night --sidecars 0-1 --days 2 --keep @").expect("they are good");
    assert_eq!(kept, "@: the existing certificates are valid and kept\n");
    assert_eq!(contents(&directory, "sidecar-0/key.pem"), before);
}

#[test]
fn once_issues_all_certificates_again_when_one_of_them_is_unusable() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    certs(&directory, "once --job night --sidecars 0-1 --days 2 @").expect("fresh certificates");
    let mut before = contents(&directory, "sidecar-0/key.pem");
    // More time than is left, another job, one more sidecar, and a missing file.
    let changed = ["--job night --sidecars 0-1 --days 9", "--job day --sidecars 0-1", "--job day --sidecars 0-2", ""];
    for words in changed {
        let words = if words.is_empty() {
            fs::remove_file(directory.path().join("sidecar-1/cert.pem")).expect("it is there");
            changed[2]
        } else {
            words
        };
        certs(&directory, &format!("once {words} --keep @")).expect("others in their place");
        let fresh = contents(&directory, "sidecar-0/key.pem");
        assert_ne!(fresh, before, "{words}");
        before = fresh;
    }
    certs(&directory, "inspect @/sidecar-0 @/sidecar-1 @/sidecar-2").expect("they fit together");
}
