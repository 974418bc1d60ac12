//! `ronde certs`: keys and certificates of jobs that are started without the launcher.
//!
//! The authority's directory (`ca.pem`, `ca-key.pem`) stays with the issuer; each sidecar's (`cert.pem`, `key.pem`,
//! `ca.pem`) goes to its host. A secret's file replaces all of that on each host that has it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, ensure};
use clap::{Args, Subcommand};
use ronde_transport::{CaError, Identity, JobCa, JobSecret, KeyRequest, TrustDomain, Validity, bundle, utc};
use ronde_wire::{JobName, SidecarIndex, limits};

use files::{NewFile, create_all, replace, replace_all};
use ronde_bootstrap::codes::{Code, coded};
use ronde_bootstrap::exit::{answer, fail_with, print};
use ronde_bootstrap::numbers::whole;
use ronde_sidecar::process::credentials::{
    AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, code_of, directory, private_file,
};

mod files;

/// Arguments of `ronde certs`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct CertsArgs {
    #[command(subcommand)]
    command: CertsCommand,
}

#[derive(Subcommand, Debug)]
enum CertsCommand {
    /// Make the authority of a job.
    Init(InitArgs),
    /// Make a key and a certificate for each of some sidecars.
    Issue(IssueArgs),
    /// Make an authority in memory only, issue to all sidecars of a job, and forget it.
    Once(OnceArgs),
    /// Replace the key and the certificate of sidecars; running ones use them for new links.
    Rotate(RotateArgs),
    /// Make a file with a secret from which all sidecars of a job issue their own certificates.
    Secret(SecretArgs),
    /// Show what directories contain and whether it can be used.
    Inspect(InspectArgs),
}

#[derive(Args, Debug)]
#[command(after_help = INIT_EXAMPLES)]
struct InitArgs {
    /// The job's name: 1 to 63 characters of a-z, 0-9, '-', '_' and '.'.
    #[arg(long, value_name = "NAME", value_parser = |name: &str| JobName::new(name))]
    job: JobName,
    /// The trust domain, a name for whoever runs jobs here.
    #[arg(long, value_name = "NAME", default_value = "ronde.local", value_parser = |name: &str| TrustDomain::new(name))]
    trust_domain: TrustDomain,
    /// The authority's directory; it is made.
    directory: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = ISSUE_EXAMPLES)]
struct IssueArgs {
    /// The authority's directory.
    #[arg(long, value_name = "DIR")]
    authority: PathBuf,
    /// The indices of the sidecars: 0, 0,1 or 0-15.
    #[arg(long, value_name = "INDICES", value_parser = indices)]
    sidecars: Indices,
    /// How long the certificates are valid.
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = whole::<u64>(1..=DAYS_MAX))]
    days: u64,
    /// Where the directories sidecar-INDEX are made.
    directory: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = ONCE_EXAMPLES)]
struct OnceArgs {
    /// The job's name: 1 to 63 characters of a-z, 0-9, '-', '_' and '.'.
    #[arg(long, value_name = "NAME", value_parser = |name: &str| JobName::new(name))]
    job: JobName,
    /// The trust domain, a name for whoever runs jobs here.
    #[arg(long, value_name = "NAME", default_value = "ronde.local", value_parser = |name: &str| TrustDomain::new(name))]
    trust_domain: TrustDomain,
    /// The indices of all sidecars of the job: no certificate can be issued to another one later.
    #[arg(long, value_name = "INDICES", value_parser = indices)]
    sidecars: Indices,
    /// How long the certificates are valid.
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = whole::<u64>(1..=DAYS_MAX))]
    days: u64,
    /// Keep the certificates of an earlier call if half of their time is left, so that a running job keeps them;
    /// otherwise issue all of them again.
    #[arg(long)]
    keep: bool,
    /// Where the directories sidecar-INDEX are made.
    directory: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = ROTATE_EXAMPLES)]
struct RotateArgs {
    /// The authority's directory.
    #[arg(long, value_name = "DIR")]
    authority: PathBuf,
    /// How long the certificates are valid.
    #[arg(long, value_name = "DAYS", default_value_t = 30, value_parser = whole::<u64>(1..=DAYS_MAX))]
    days: u64,
    /// The ca.pem of another authority of the same job to accept as well: the next one, or the previous one. Without
    /// it, only --authority is accepted.
    #[arg(long, value_name = "FILE")]
    trust: Vec<PathBuf>,
    /// Change the authority without the steps that a running job needs.
    #[arg(long)]
    at_once: bool,
    /// The sidecars' directories.
    #[arg(required = true)]
    directories: Vec<PathBuf>,
}

#[derive(Args, Debug)]
#[command(after_help = SECRET_EXAMPLES)]
struct SecretArgs {
    /// The file to make, with mode 0600.
    file: PathBuf,
}

#[derive(Args, Debug)]
#[command(after_help = INSPECT_EXAMPLES)]
struct InspectArgs {
    /// Directories of sidecars or authorities.
    #[arg(required = true)]
    directories: Vec<PathBuf>,
}

/// Indices of sidecars, each once.
type Indices = BTreeSet<u32>;

/// Runs the subcommand; prints what was made or found.
pub(super) fn main(args: &CertsArgs) -> ExitCode {
    match perform(&args.command) {
        Ok(text) => answer(&text),
        Err(error) => fail_with(&error, Code::CertificateFiles),
    }
}

fn perform(command: &CertsCommand) -> anyhow::Result<String> {
    match command {
        CertsCommand::Init(args) => init(args),
        CertsCommand::Issue(args) => issue(args),
        CertsCommand::Once(args) => once(args),
        CertsCommand::Rotate(args) => rotate(args),
        CertsCommand::Secret(args) => secret(args),
        CertsCommand::Inspect(args) => inspect(args),
    }
}

fn init(args: &InitArgs) -> anyhow::Result<String> {
    let InitArgs { job, trust_domain, directory } = args;
    let validity = Validity::starting(SystemTime::now(), AUTHORITY_VALIDITY);
    let ca = JobCa::generate(job.clone(), trust_domain.clone(), validity).context(Code::CertificateNotIssued)?;
    create_all(&[
        NewFile::secret(directory.join(AUTHORITY_KEY_FILE), ca.key_pem().into()),
        NewFile::public(directory.join(AUTHORITY_FILE), ca.ca_certificate_pem().to_owned()),
    ])?;
    let directory = directory.display();
    Ok(format!("{directory}: the authority of job {job} of {trust_domain}; keep {AUTHORITY_KEY_FILE} to yourself\n"))
}

fn issue(args: &IssueArgs) -> anyhow::Result<String> {
    let ca = authority(&args.authority)?;
    let (files, text) = issued(&ca, &args.sidecars, args.days, &args.directory)?;
    create_all(&files)?;
    Ok(text)
}

fn once(args: &OnceArgs) -> anyhow::Result<String> {
    let life = Duration::from_secs(args.days * SECONDS_PER_DAY);
    if args.keep && is_issued(args, SystemTime::now() + life / 2) {
        return Ok(format!("{}: the existing certificates are valid and kept\n", args.directory.display()));
    }
    let validity = Validity::starting(SystemTime::now(), life);
    let ca = JobCa::generate(args.job.clone(), args.trust_domain.clone(), validity);
    let (files, text) = issued(&ca.context(Code::CertificateNotIssued)?, &args.sidecars, args.days, &args.directory)?;
    if args.keep {
        replace_all(&files)?;
    } else {
        create_all(&files)?;
    }
    Ok(text)
}

/// Returns whether all sidecars have certificates of one authority that are valid until some time.
fn is_issued(args: &OnceArgs, until: SystemTime) -> bool {
    let until = until.duration_since(SystemTime::UNIX_EPOCH).map_or(u64::MAX, |since| since.as_secs());
    let authority_of = |index: &u32| {
        let directory = args.directory.join(format!("sidecar-{index}"));
        let identity = directory::load(&directory).ok()?;
        let id = identity.id();
        let fits = (&id.job, &id.trust_domain, id.sidecar.0) == (&args.job, &args.trust_domain, *index);
        let authority = private_file::read_public(&directory.join(AUTHORITY_FILE)).ok()?;
        (fits && identity.not_after().as_secs() >= until).then_some(authority)
    };
    let authorities: Option<BTreeSet<String>> = args.sidecars.iter().map(authority_of).collect();
    authorities.is_some_and(|authorities| authorities.len() == 1)
}

/// Builds the files for these sidecars in directories below one, and the text about them.
fn issued(ca: &JobCa, sidecars: &Indices, days: u64, below: &Path) -> anyhow::Result<(Vec<NewFile>, String)> {
    let (mut files, mut text) = (Vec::new(), String::new());
    for index in sidecars {
        let directory = below.join(format!("sidecar-{index}"));
        let fresh = Fresh::issue(ca, SidecarIndex(*index), days)?;
        text.push_str(&format!("{}: {}\n", directory.display(), fresh.describe()));
        files.extend(fresh.files(&directory, ca.ca_certificate_pem()));
    }
    Ok((files, text))
}

fn rotate(args: &RotateArgs) -> anyhow::Result<String> {
    let ca = authority(&args.authority)?;
    let bundle = accepted(args, &ca)?;
    let mut fresh = Vec::new();
    // Check all of them before replacing any.
    for path in &args.directories {
        let old = directory::read(path)?;
        let expected = ca.id_of(old.id().sidecar);
        let found = old.id();
        if *found != expected {
            let text = format!("{} belongs to {found}, not to this authority's {expected}", path.display());
            return Err(anyhow!(text)).context(Code::CertificateForeign);
        }
        if !args.at_once {
            check_step(path, &old, &ca, &bundle).context(Code::AuthorityStep)?;
        }
        fresh.push((path, Fresh::issue(&ca, expected.sidecar, args.days)?));
    }
    let mut text = String::new();
    for (directory, fresh) in &fresh {
        // The certificate comes last: a sidecar that polls in between finds a mismatched pair and waits.
        fresh.files(directory, &bundle).iter().try_for_each(replace)?;
        text.push_str(&format!("{}: {}\n", directory.display(), fresh.describe()));
    }
    Ok(text)
}

/// Returns the certificates of all authorities to accept from now on.
fn accepted(args: &RotateArgs, ca: &JobCa) -> anyhow::Result<String> {
    let others: Vec<String> =
        args.trust.iter().map(|path| private_file::read_public(path)).collect::<anyhow::Result<_>>()?;
    let pems: Vec<&str> = [ca.ca_certificate_pem()].into_iter().chain(others.iter().map(String::as_str)).collect();
    bundle(&pems, &ca.id_of(SidecarIndex(0)))
        .map_err(|error| {
            let code = match &error {
                CaError::Identity(error) => code_of(error),
                _ => Code::CertificateFiles,
            };
            anyhow!(error).context(code)
        })
        .context("an authority of --trust cannot be used")
}

/// Checks that sidecars before and after their rotation accept each other, because they rotate one after another.
fn check_step(directory: &Path, old: &Identity, ca: &JobCa, bundle: &str) -> anyhow::Result<()> {
    let directory = directory.display();
    ensure!(
        old.accepts(ca.ca_certificate_pem())?,
        "{directory} does not know this authority yet; first run `ronde certs rotate` with the previous authority and --trust for this one's ca.pem"
    );
    ensure!(
        old.is_accepted_by(bundle)?,
        "the certificate in {directory} is of an authority that would no longer be accepted; keep accepting it with --trust until all sidecars have new certificates"
    );
    Ok(())
}

fn secret(args: &SecretArgs) -> anyhow::Result<String> {
    let secret = JobSecret::generate().context(Code::CertificateNotIssued)?;
    create_all(&[NewFile::secret(args.file.clone(), secret.to_text())])?;
    let file = args.file.display();
    Ok(format!("{file}: a job's secret; copy it to the hosts of the job over a channel that nobody else reads\n"))
}

fn inspect(args: &InspectArgs) -> anyhow::Result<String> {
    let (mut text, mut bad) = (String::new(), 0);
    for directory in &args.directories {
        let name = directory.display();
        match describe(directory) {
            Ok(found) => text.push_str(&format!("ok    {name}: {found}\n")),
            Err(error) => {
                bad += 1;
                text.push_str(&format!("fail  {name}: {}\n", coded(&error, Code::CertificateFiles)));
            }
        }
    }
    if bad > 0 {
        print(&text)?;
        return Err(anyhow!("{bad} of {} directories cannot be used", args.directories.len()))
            .context(Code::CertificatesUnusable);
    }
    Ok(text)
}

fn describe(path: &Path) -> anyhow::Result<String> {
    if path.join(AUTHORITY_KEY_FILE).exists() {
        let id = authority(path)?.id_of(SidecarIndex(0));
        return Ok(format!("the authority of job {} of {}", id.job, id.trust_domain));
    }
    Ok(describe_identity(&directory::load(path)?, SystemTime::now()))
}

fn describe_identity(identity: &Identity, now: SystemTime) -> String {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let left = identity.not_after().as_secs().saturating_sub(now);
    let left = match left / SECONDS_PER_DAY {
        0 => format!("{} hours", left / 3_600),
        days => format!("{days} days"),
    };
    let (from, until) = (utc(identity.not_before()), utc(identity.not_after()));
    let accepts = match identity.authorities() {
        1 => String::new(),
        several => format!(", accepts {several} authorities"),
    };
    format!("{}, valid from {from} until {until} (for {left}){accepts}", identity.id())
}

fn authority(path: &Path) -> anyhow::Result<JobCa> {
    let key = private_file::read(&path.join(AUTHORITY_KEY_FILE))?;
    let certificate = private_file::read_public(&path.join(AUTHORITY_FILE))?;
    let ca = JobCa::from_pem(&certificate, &key);
    ca.with_context(|| format!("the authority in {} cannot be used", path.display())).context(Code::CertificateFiles)
}

/// A new key with its certificate.
struct Fresh {
    key: KeyRequest,
    certificate: String,
    description: String,
}

impl Fresh {
    fn issue(ca: &JobCa, sidecar: SidecarIndex, days: u64) -> anyhow::Result<Self> {
        let validity = Validity::starting(SystemTime::now(), Duration::from_secs(days * SECONDS_PER_DAY));
        let make = || {
            let key = KeyRequest::generate()?;
            let certificate = ca.issue(key.request_pem(), sidecar, validity)?;
            Ok::<_, ronde_transport::CaError>((key, certificate))
        };
        let (key, certificate) = make().context(Code::CertificateNotIssued)?;
        let description = format!("{}, valid for {days} days", ca.id_of(sidecar));
        Ok(Self { key, certificate, description })
    }

    fn describe(&self) -> &str {
        &self.description
    }

    /// Returns the files, the certificate last.
    fn files(&self, directory: &Path, authorities: &str) -> [NewFile; 3] {
        [
            NewFile::public(directory.join(AUTHORITY_FILE), authorities.to_owned()),
            NewFile::secret(directory.join(KEY_FILE), self.key.key_pem().into()),
            NewFile::public(directory.join(CERTIFICATE_FILE), self.certificate.clone()),
        ]
    }
}

/// Parses `0`, `0,2` or `0-15`.
fn indices(text: &str) -> anyhow::Result<Indices> {
    let mut found = Indices::new();
    for item in text.split(',') {
        let (first, last) = item.split_once('-').unwrap_or((item, item));
        let number =
            |text: &str| text.trim().parse::<u32>().with_context(|| format!("{item:?} is not INDEX or FIRST-LAST"));
        let (first, last) = (number(first)?, number(last)?);
        ensure!(first <= last, "{item:?} is empty; give FIRST-LAST");
        let max = limits::SIDECARS_MAX - 1;
        ensure!((last as usize) <= max, "{item:?} is out of range; indices are 0 to {max}");
        found.extend(first..=last);
    }
    Ok(found)
}

/// The authority's private key.
const AUTHORITY_KEY_FILE: &str = "ca-key.pem";
const SECONDS_PER_DAY: u64 = 86_400;
const DAYS_MAX: u64 = 3_650;
const AUTHORITY_VALIDITY: Duration = Duration::from_secs(DAYS_MAX * SECONDS_PER_DAY);

const EXAMPLES: &str = "Examples:
  ronde certs init --job nightly authority
  ronde certs issue --authority authority --sidecars 0-3 certs";
const INIT_EXAMPLES: &str = "Examples:
  ronde certs init --job nightly authority
  ronde certs init --job nightly --trust-domain cluster.example authority";
const ISSUE_EXAMPLES: &str = "Examples:
  ronde certs issue --authority authority --sidecars 0-3 certs
  ronde certs issue --authority authority --sidecars 4 --days 7 certs";
const ONCE_EXAMPLES: &str = "Examples:
  ronde certs once --job nightly --sidecars 0-3 certs
  ronde certs once --job nightly --sidecars 0-3 --days 1 --keep certs";
const ROTATE_EXAMPLES: &str = "Examples:
  ronde certs rotate --authority authority certs/sidecar-0
  ronde certs rotate --authority authority --trust next/ca.pem certs/sidecar-0 certs/sidecar-1";
const SECRET_EXAMPLES: &str = "Examples:
  ronde certs secret /etc/ronde/secret
  ronde certs secret secret";
const INSPECT_EXAMPLES: &str = "Examples:
  ronde certs inspect certs/sidecar-0
  ronde certs inspect authority certs/sidecar-0 certs/sidecar-1";

#[cfg(test)]
mod tests;
