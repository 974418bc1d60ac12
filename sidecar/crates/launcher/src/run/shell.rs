//! The remote shell: its command line, and the problems that its output indicates.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, ensure};
use ronde_bootstrap::codes::Code;

use crate::envelope::Status;

/// The default remote shell. It never prompts, as nobody could answer, and connects only to hosts whose keys it knows: an
/// impostor would get a certificate of the job.
pub(crate) const SSH: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15";

/// Splits `--remote-shell` into words as a shell does; quotes hold words with blanks together.
///
/// # Errors
/// When there are none, or a quote has no end.
fn words(command: &str) -> anyhow::Result<Vec<String>> {
    let words = shlex::split(command)
        .with_context(|| format!("--remote-shell {command:?} has a quote or a backslash without its other half"))?;
    ensure!(words.first().is_some_and(|word| !word.is_empty()), "--remote-shell is empty; give a command like ssh");
    Ok(words)
}

/// The command line that replaces the remote host's shell with ronde and these arguments.
///
/// # Errors
/// When the path contains a zero byte.
pub(crate) fn remote_command(ronde: &Path, arguments: &str) -> anyhow::Result<String> {
    let path = ronde.to_string_lossy();
    let quoted = shlex::try_quote(&path).with_context(|| format!("{path:?} is not a valid path for --remote-ronde"))?;
    Ok(format!("exec {quoted} {arguments}"))
}

/// A validated command that reaches other hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RemoteShell(Vec<String>);

impl RemoteShell {
    /// Parses `command` and adds `--ssh-port` and `--ssh-identity-file` to it when it is ssh.
    ///
    /// # Errors
    /// When it is empty, when it is not ssh and takes no port or file, and when the file cannot be read.
    pub(crate) fn new(command: &str, port: Option<u16>, identity: Option<&Path>) -> anyhow::Result<Self> {
        let mut words = words(command)?;
        let is_ssh = Path::new(&words[0]).file_name().is_some_and(|name| name == "ssh");
        let given = [("--ssh-port", port.is_some()), ("--ssh-identity-file", identity.is_some())];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given && !is_ssh) {
            anyhow::bail!(
                "{option} is for ssh, but --remote-shell is {command:?}; give the value in that command, or omit one of the two"
            );
        }
        if let Some(path) = identity {
            let file = File::open(path).and_then(|file| file.metadata());
            let file =
                file.with_context(|| format!("cannot read the key {} of --ssh-identity-file", path.display()))?;
            ensure!(file.is_file(), "--ssh-identity-file {} is no file; name a private key", path.display());
        }
        if is_ssh {
            // ssh uses the first value of an option, so later ones cannot override this.
            let first = words.get(1..3).is_some_and(|first| first == NEVER_ASK);
            let mut added: Vec<String> = if first { Vec::new() } else { NEVER_ASK.map(str::to_owned).to_vec() };
            if let Some(port) = port {
                added.extend(["-p".to_owned(), port.to_string()]);
            }
            if let Some(path) = identity {
                added.extend(["-i".to_owned(), path.to_string_lossy().into_owned()]);
            }
            words.splice(1..1, added);
        }
        Ok(Self(words))
    }

    /// The command that runs a command line on another host.
    pub(crate) fn command(&self, host: &str, line: &str) -> Vec<String> {
        let mut command = self.0.clone();
        command.extend([host.to_owned(), line.to_owned()]);
        command
    }
}

/// Why a remote shell could not start ronde, as far as its output shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The host's key is not known here, or is another one than is known.
    HostKey,
    /// The private key's file is open to others, so that ssh does not use it.
    KeyMode,
    /// The host rejects this user's log-in.
    LogIn,
    /// Nothing listens on the host's port for ssh.
    Refused,
    /// The host does not reply.
    Silent,
    /// The host's name cannot be resolved.
    Name,
    /// The host closes connections before the log-in.
    Closed,
    /// ronde is not at the expected path, or cannot be run.
    Ronde,
}

impl Trouble {
    /// Recognizes a problem by the status and last lines of a remote shell: OpenSSH's texts, and exit codes of any shell.
    pub(super) fn of(status: Option<Status>, lines: &[String]) -> Option<Self> {
        let matches = lines.iter().flat_map(|line| TEXTS.iter().map(move |text| (line, text)));
        let known = matches.filter(|(line, (text, _))| line.contains(text)).map(|(_, (_, trouble))| *trouble).next();
        // After a successful log-in the output may be anything.
        match status {
            Some(Status::Code(126 | 127)) => Some(Self::Ronde),
            _ => known,
        }
    }

    /// The error code that `ronde explain` explains.
    pub(super) fn code(self) -> Code {
        match self {
            Self::HostKey => Code::HostKey,
            Self::KeyMode | Self::LogIn => Code::LogIn,
            Self::Refused | Self::Silent | Self::Name | Self::Closed => Code::HostSilent,
            Self::Ronde => Code::RondeMissing,
        }
    }

    /// What to do, as the end of a line that names the host.
    pub(super) fn advice(self) -> &'static str {
        match self {
            Self::HostKey => {
                "this host does not know that host's key, or knows another one; log in once by hand (`ssh HOST true`) and \
                 compare the fingerprint, or put a key from a source that you trust into ~/.ssh/known_hosts \
                 (`ssh-keyscan HOST` prints it); if the host was reinstalled, remove its old key with \
                 `ssh-keygen -R HOST`"
            }
            Self::KeyMode => "the private key may be read by others, so ssh does not use it: chmod 600 the file",
            Self::LogIn => {
                "that host rejects this user's log-in without a password; put the key there with `ssh-copy-id HOST`, name \
                 another with -i FILE, or load it into the agent with `ssh-add`"
            }
            Self::Refused => "nothing listens on its port; start sshd on that host, or give its port with --ssh-port",
            Self::Silent => "it does not reply; is the host up, and does a firewall let ssh through (--ssh-port)?",
            Self::Name => {
                "the host name cannot be resolved; correct it in -H or --hostfile, or give it one in DNS or /etc/hosts"
            }
            Self::Closed => "it closes connections before the log-in; see its sshd's log, and MaxStartups there",
            Self::Ronde => "install ronde on that host, or give its path there with --remote-ronde",
        }
    }
}

const NEVER_ASK: [&str; 2] = ["-o", "BatchMode=yes"];
/// Messages of OpenSSH; of several in one line the first counts.
const TEXTS: [(&str, Trouble); 18] = [
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", Trouble::HostKey),
    ("Host key verification failed", Trouble::HostKey),
    ("host key is known for", Trouble::HostKey),
    ("UNPROTECTED PRIVATE KEY FILE", Trouble::KeyMode),
    ("bad permissions", Trouble::KeyMode),
    ("Too many authentication failures", Trouble::LogIn),
    ("Permission denied (", Trouble::LogIn),
    ("Permission denied, please try again", Trouble::LogIn),
    (": Connection refused", Trouble::Refused),
    (": Connection timed out", Trouble::Silent),
    (": Operation timed out", Trouble::Silent),
    (": No route to host", Trouble::Silent),
    (": Network is unreachable", Trouble::Silent),
    ("timed out during banner exchange", Trouble::Silent),
    ("Could not resolve hostname", Trouble::Name),
    ("Connection closed by", Trouble::Closed),
    ("Connection reset by", Trouble::Closed),
    ("kex_exchange_identification", Trouble::Closed),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &str, port: Option<u16>, identity: Option<&Path>) -> Result<String, String> {
        let shell = RemoteShell::new(command, port, identity).map_err(|error| format!("{error:#}"))?;
        Ok(shell.0.join(" "))
    }

    #[test]
    fn ssh_never_asks_and_takes_port_and_key() {
        let key = tempfile::NamedTempFile::new().expect("a temporary file");
        let path = key.path().display();
        assert_eq!(
            words("/usr/bin/ssh -o BatchMode=no", Some(2_222), Some(key.path())),
            Ok(format!("/usr/bin/ssh -o BatchMode=yes -p 2222 -i {path} -o BatchMode=no"))
        );
        assert_eq!(words(SSH, Some(22), None), Ok(SSH.replace("ssh ", "ssh -p 22 ")));
        assert_eq!(words("kubectl exec", None, None), Ok("kubectl exec".to_owned()));
        for (command, port, identity, text) in [
            (" ", None, None, "--remote-shell is empty"),
            ("rsh", Some(22), None, "--ssh-port is for ssh, but --remote-shell is \"rsh\""),
            ("sshpass ssh", None, Some(key.path()), "--ssh-identity-file is for ssh"),
            (
                "ssh",
                None,
                Some(Path::new("/no/such/key")),
                "cannot read the key /no/such/key of --ssh-identity-file: No ",
            ),
            ("ssh", None, Some(Path::new("/")), "--ssh-identity-file / is no file"),
        ] {
            let error = words(command, port, identity).expect_err(text);
            assert!(error.starts_with(text), "{error}");
        }
    }

    #[test]
    fn the_path_survives_the_remote_shell() {
        let line = remote_command(Path::new("/opt/it's $HOME here/ronde"), "agent").expect("no zero byte");
        let command = RemoteShell::new("rsh", None, None).expect("good").command("beta", &line);
        assert_eq!(command, ["rsh", "beta", line.as_str()]);
        let echoed = std::process::Command::new("sh").args(["-c", &line.replacen("exec", "echo", 1)]).output();
        assert_eq!(echoed.expect("sh exists").stdout, b"/opt/it's $HOME here/ronde agent\n");
        let error = remote_command(Path::new("a\0b"), "agent").expect_err("no shell takes it").to_string();
        assert!(error.contains("--remote-ronde"), "{error}");
    }

    #[test]
    fn quotes_hold_the_words_of_a_remote_shell_together() {
        let given = r#"ssh -o "ProxyCommand=nc %h %p" -i '/home/me/my key' a\ b"#;
        let expected = ["ssh", "-o", "ProxyCommand=nc %h %p", "-i", "/home/me/my key", "a b"];
        assert_eq!(super::words(given).expect("good"), expected);
        for (command, text) in
            [("ssh 'a", "has a quote"), ("ssh a\\", "has a quote or a backslash"), ("''", "is empty")]
        {
            let error = super::words(command).expect_err(command).to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn messages_of_openssh_are_recognized() {
        for (line, trouble) in [
            ("Host key verification failed.", Trouble::HostKey),
            ("No ED25519 host key is known for beta and you have requested strict checking.", Trouble::HostKey),
            ("@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @", Trouble::HostKey),
            ("@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @", Trouble::KeyMode),
            ("me@beta: Permission denied (publickey,password).", Trouble::LogIn),
            ("ssh: connect to host beta port 22: Connection refused", Trouble::Refused),
            ("ssh: connect to host beta port 22: Connection timed out", Trouble::Silent),
            ("ssh: connect to host beta port 22: No route to host", Trouble::Silent),
            ("ssh: Could not resolve hostname beta: Name or service not known", Trouble::Name),
            ("kex_exchange_identification: Connection closed by remote host", Trouble::Closed),
        ] {
            let lines = ["Welcome".to_owned(), line.to_owned()];
            assert_eq!(Trouble::of(Some(Status::Code(255)), &lines), Some(trouble), "{line}");
        }
        let denied = ["sh: 1: exec: /opt/ronde: Permission denied".to_owned()];
        assert_eq!(Trouble::of(Some(Status::Code(126)), &denied), Some(Trouble::Ronde));
        assert_eq!(Trouble::of(Some(Status::Code(127)), &[]), Some(Trouble::Ronde));
        assert_eq!(Trouble::of(Some(Status::Code(255)), &["no".to_owned()]), None);
    }
}
