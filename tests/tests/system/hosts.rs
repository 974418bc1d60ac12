//! Jobs on several hosts as users have them: odd interfaces, closed ports, ssh that does not let one in. Hosts are
//! network namespaces, which need root.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ronde_tests::cluster::{Network, Shape};
use ronde_tests::harness::{DEADLINE, Ended, Job, RemoteShell, Run, ronde_binary, with_start_timeouts};

use crate::WORKER;

/// Names that no DNS has.
const NAMES: [&str; 2] = ["alpha.invalid", "beta.invalid"];

fn sh(script: &str) -> [&str; 3] {
    ["sh", "-c", script]
}

/// Two workers that train for some steps, so that links, lanes and reductions are used, and end when both have.
struct Training(tempfile::TempDir);

impl Training {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    fn script(&self) -> String {
        let meet = self.0.path().display();
        let asks = "echo '{\"ask\":\"train\",\"steps\":5,\"identity\":false}'";
        format!(
            "{{ {asks}; until [ -e {meet}/0 ] && [ -e {meet}/1 ]; do sleep 0.01; done; }} | {WORKER} | while read -r line; do
                echo \"$line\"; case $line in *trained*) : > {meet}/$RANK;; esac; done"
        )
    }
}

/// A job of one rank on each of the two named hosts.
fn pair(shell: &RemoteShell) -> Run {
    let hosts = format!("{}:1,{}:1", NAMES[0], NAMES[1]);
    Run::new(2).options(["-H", &hosts, "--remote-shell"]).options([shell.path()])
}

fn assert_trained(ended: &Ended) {
    assert_eq!(ended.code, Some(0), "{ended}");
    let weights: Vec<&str> =
        ended.stdout.lines().filter_map(|line| line.split_once("\"weights\"")).map(|at| at.1).collect();
    assert!(weights.len() == 2 && weights[0] == weights[1], "{ended}");
}

/// Waits for the end of everything, and returns how the launcher ended.
fn ended_cleanly(mut job: Job) -> Ended {
    job.wait_for_nothing_left(DEADLINE);
    assert_eq!(job.runtime_files(), Vec::<std::path::PathBuf>::new());
    job.wait(DEADLINE)
}

fn odd_hosts() -> Network {
    let shape = Shape { links: &["ens5", "enp1s0"], dead_ends: true, ..Shape::default() };
    Network::shaped(2, shape).expect("hosts")
}

#[test]
fn differently_named_interfaces_and_dead_ones_connect_without_any_option() {
    if Network::is_left_out("differently_named_interfaces_and_dead_ones_connect_without_any_option") {
        return;
    }
    let network = odd_hosts();
    let shell = RemoteShell::by_name(&network, &NAMES);
    let training = Training::new();
    let ended = pair(&shell).start(sh(&training.script())).wait(DEADLINE);
    assert_trained(&ended);
    for line in [
        "sidecar 0 (alpha.invalid) at 10.77.0.1 over ens5; not used: 10.99.0.1 aux0, 172.17.0.1 docker0",
        "sidecar 1 (beta.invalid) at 10.77.0.2 over enp1s0; not used: 10.99.0.2 aux0, 172.17.0.1 docker0",
    ] {
        assert!(ended.stderr.contains(line), "{line}: {ended}");
    }
}

#[test]
fn named_interfaces_and_networks_are_used_and_no_others() {
    if Network::is_left_out("named_interfaces_and_networks_are_used_and_no_others") {
        return;
    }
    let network = odd_hosts();
    let shell = RemoteShell::by_name(&network, &NAMES);
    for list in ["ens5,enp1s0", "10.77.0.0/16"] {
        let training = Training::new();
        let run = pair(&shell).options(["--network-interface", list]);
        let ended = run.start(sh(&training.script())).wait(DEADLINE);
        assert_trained(&ended);
        assert!(!ended.stderr.contains("not used"), "there is no choice: {ended}");
    }
    let words = "rank 1 on host beta.invalid: sidecar 1 does not reach sidecar 0 on host alpha.invalid at 172.17.0.1:";
    let attempt = |timeout: &str| {
        let bridge = ["--network-interfaces", "docker0", "--start-timeout", timeout];
        ended_cleanly(pair(&shell).options(bridge).start(["true"]))
    };
    let (ended, _) = with_start_timeouts(15, attempt, |ended| ended.stderr.contains(words));
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(ended.stderr.contains("Timed out waiting for sidecars to reach each other"), "{ended}");
    assert!(ended.stderr.contains(words), "{ended}");
    assert!(ended.stderr.contains(" (docker0); is UDP between the two blocked?"), "{ended}");
}

#[test]
fn an_interface_that_a_host_does_not_have_is_named_with_what_it_has() {
    if Network::is_left_out("an_interface_that_a_host_does_not_have_is_named_with_what_it_has") {
        return;
    }
    let network = odd_hosts();
    let shell = RemoteShell::by_name(&network, &NAMES);
    let start = |list: &str| ended_cleanly(pair(&shell).options(["--network-interfaces", list]).start(["true"]));
    let ended = start("ib0,eth7");
    assert_eq!(ended.code, Some(69), "{ended}");
    let first = "ronde: no interface or network of --network-interfaces ib0,eth7 exists on hosts alpha.invalid, beta.invalid [RONDE-E214]";
    assert!(ended.stderr.contains(first), "{ended}");
    for line in [
        "\nhost alpha.invalid has 10.99.0.1 aux0, 10.77.0.1 ens5, 172.17.0.1 docker0, 127.0.0.1 lo",
        "\nhost beta.invalid has ",
    ] {
        assert!(ended.stderr.contains(line), "{line}: {ended}");
    }
    let ended = start("ens5");
    assert!(
        ended.stderr.contains("interfaces ens5 exists on host beta.invalid [RONDE-E214]\nhost beta.invalid has "),
        "{ended}"
    );
    assert!(!ended.stderr.contains("host alpha.invalid"), "{ended}");
    let ended = Run::new(1).options(["--network-interfaces", "10.0.0.0/40"]).start(["true"]).wait(DEADLINE);
    assert!(ended.code == Some(64) && ended.stderr.contains("is no network, for example"), "{ended}");
}

#[test]
fn a_job_needs_no_ipv4() {
    if Network::is_left_out("a_job_needs_no_ipv4") {
        return;
    }
    let network = Network::shaped(2, Shape { ipv6: true, ..Shape::default() }).expect("hosts");
    let shell = RemoteShell::into_network(&network, 2);
    let hosts = format!("[{}]:1,[{}]:1", network.address(0), network.address(1));
    let run = Run::new(2).options(["-H", &hosts, "--verbose", "--remote-shell"]).options([shell.path()]);
    let training = Training::new();
    let ended = run.start(sh(&format!("echo at $MASTER_ADDR; {}", training.script()))).wait(DEADLINE);
    assert_trained(&ended);
    assert_eq!(ended.stdout_of(1).first(), Some(&"at fd77::1"), "{ended}");
    assert!(ended.stderr.contains("sidecar 1 (fd77::2) at fd77::2 over v1"), "{ended}");
}

#[test]
fn jobs_of_one_host_share_a_range_of_ports_until_it_is_full() {
    if Network::is_left_out("jobs_of_one_host_share_a_range_of_ports_until_it_is_full") {
        return;
    }
    // A separate host, whose ports nothing else uses.
    let network = Network::up(1).expect("a host");
    let options = ["--ports", "7400-7407", "--lanes", "1", "--sidecars", "2"];
    let trainings = [Training::new(), Training::new()];
    let waits =
        |training: &Training| format!("{}; echo ready; until [ -e \"$GO\" ]; do sleep 0.01; done", training.script());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let go = directory.path().join("go");
    let start = |training: &Training| {
        Run::new(2).options(options).env("GO", &go).on_host(&network, 0).start(sh(&waits(training)))
    };
    let mut jobs: Vec<Job> = trainings.iter().map(start).collect();
    for job in &mut jobs {
        (0..2).for_each(|rank| drop(job.wait_for_line(&format!("[{rank}]<stdout>:ready"), DEADLINE)));
    }
    let ended = Run::new(2).options(options).on_host(&network, 0).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(69), "{ended}");
    let words =
        "only 0 of the 2 ports that this sidecar needs (one for control, one for each lane) are free in 7400-7407";
    assert!(ended.stderr.contains(words) && ended.stderr.contains("[RONDE-E404]"), "{ended}");
    fs::write(&go, "").expect("a temporary directory is writable");
    for job in jobs {
        let ended = job.wait(DEADLINE);
        assert_trained(&ended);
    }
}

#[test]
fn a_port_in_use_is_named_to_a_sidecar_without_a_launcher() {
    let taken = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = taken.local_addr().expect("bound").port();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| directory.path().join(name);
    let ronde = |words: &[&str], paths: &[&str]| {
        let output = Command::new(ronde_binary()).args(words).args(paths.iter().map(|name| at(name))).output();
        output.expect("the ronde binary can be started")
    };
    assert!(ronde(&["certs", "init", "--job", "night"], &["authority"]).status.success());
    assert!(ronde(&["certs", "issue", "--sidecars", "0", "--authority"], &["authority", "."]).status.success());
    let peers = format!("127.0.0.1:{port}");
    let output = ronde(&["sidecar", "--lanes", "1", "--peers", &peers, "--certs"], &["sidecar-0"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let words = format!(
        "UDP port {port} at 127.0.0.1 is in use; end the process that uses it (`ss -tulpn 'sport = :{port}'` shows it)"
    );
    assert!(text.contains(&words) && text.contains("[RONDE-E404]"), "{text}");
}

#[test]
fn hosts_between_which_udp_is_blocked_are_named() {
    if Network::is_left_out("hosts_between_which_udp_is_blocked_are_named") {
        return;
    }
    let network = Network::up(2).expect("hosts");
    network.block_udp(1).expect("the kernel has rules by protocol");
    let shell = RemoteShell::by_name(&network, &NAMES);
    let words = "rank 1 on host beta.invalid: sidecar 1 does not reach sidecar 0 on host alpha.invalid at 10.77.0.1:";
    let attempt = |timeout: &str| ended_cleanly(pair(&shell).options(["--start-timeout", timeout]).start(["true"]));
    let (ended, timeout) = with_start_timeouts(15, attempt, |ended| ended.stderr.contains(words));
    assert_eq!(ended.code, Some(69), "{ended}");
    let first = format!(
        "ronde: Timed out waiting for sidecars to reach each other: not everything started within {timeout} s (--start-timeout): [RONDE-E208]"
    );
    assert!(ended.stderr.contains(&first), "{ended}");
    assert!(ended.stderr.contains(words) && ended.stderr.contains(" (v0); is UDP between the two blocked?"), "{ended}");
}

#[test]
fn ranks_that_never_join_are_named_while_others_wait() {
    let script = format!("case $RANK in 1) exit 0;; 2) exec sleep 1000;; esac; exec {WORKER}");
    let lines = [
        "\nrank 1 on host localhost: its process exited with code 0 and never joined the job",
        "\nrank 2 on host localhost: its process runs, but has not joined the job (`ronde.init`), while others wait for it",
    ];
    let attempt = |timeout: &str| ended_cleanly(Run::new(3).options(["--start-timeout", timeout]).start(sh(&script)));
    let (ended, _) = with_start_timeouts(15, attempt, |ended| lines.iter().all(|line| ended.stderr.contains(line)));
    assert_eq!(ended.code, Some(69), "{ended}");
    assert!(ended.stderr.contains("ronde: Timed out waiting for all ranks to join"), "{ended}");
    for line in lines {
        assert!(ended.stderr.contains(line), "{line}: {ended}");
    }
    assert!(!ended.stderr.contains("\nrank 0 on host localhost:"), "{ended}");
}

/// The messages of OpenSSH, with the code and some words of the fix that must be shown with them.
const SSH_TROUBLES: [(&str, &str, &str); 8] = [
    ("Host key verification failed.", "[RONDE-E215]", "log in once by hand (`ssh HOST true`)"),
    ("@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @", "[RONDE-E215]", "`ssh-keygen -R HOST`"),
    ("me@beta: Permission denied (publickey,password).", "[RONDE-E216]", "`ssh-copy-id HOST`"),
    ("@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @", "[RONDE-E216]", "chmod 600"),
    ("ssh: connect to host beta port 22: Connection refused", "[RONDE-E217]", "--ssh-port"),
    ("ssh: connect to host beta port 22: No route to host", "[RONDE-E217]", "is the host up"),
    ("ssh: Could not resolve hostname beta: Name or service not known", "[RONDE-E217]", "/etc/hosts"),
    ("kex_exchange_identification: Connection closed by remote host", "[RONDE-E217]", "MaxStartups"),
];

fn with_ssh(shell: &RemoteShell, run: Run) -> Run {
    let path = std::env::var("PATH").unwrap_or_default();
    run.env("PATH", format!("{}:{path}", shell.directory().display()))
}

#[test]
fn errors_of_ssh_are_shown_with_the_fix() {
    for (text, code, fix) in SSH_TROUBLES {
        let shell = RemoteShell::as_ssh(&format!("echo '{text}' >&2; exit 255"));
        let ended = ended_cleanly(with_ssh(&shell, Run::new(1).options(["-H", "beta:1"])).start(["true"]));
        assert_eq!(ended.code, Some(69), "{ended}");
        let first = ended.stderr.lines().next().unwrap_or_default();
        let begins = "ronde: cannot start ronde on host beta (rank 0): the remote shell exited with code 255; ";
        assert!(first.starts_with(begins) && first.contains(fix) && first.ends_with(code), "{text}: {ended}");
        assert!(ended.stderr.contains(&format!("  {text}\n")), "{ended}");
    }
    let shell = RemoteShell::as_ssh("echo 'sh: 1: exec: ronde: not found' >&2; exit 127");
    let ended = ended_cleanly(with_ssh(&shell, Run::new(1).options(["-H", "beta:1"])).start(["true"]));
    assert!(ended.stderr.contains("--remote-ronde [RONDE-E218]"), "{ended}");
    // ssh that hangs is ended with the start timeout, and its output until then counts.
    let shell =
        RemoteShell::as_ssh("echo \"ssh: connect to host beta port 22: Connection timed out\" >&2; exec sleep 1000");
    let attempt = |timeout: &str| {
        let run = Run::new(2).options(["-H", "beta:2", "--start-timeout", timeout]);
        ended_cleanly(with_ssh(&shell, run).start(["true"]))
    };
    let words =
        "ranks 0-1 on host beta: the remote shell has not started ronde there; it does not reply; is the host up";
    let (ended, _) = with_start_timeouts(2, attempt, |ended| ended.stderr.contains(words));
    assert!(ended.stderr.contains(words), "{ended}");
}

#[test]
fn ssh_gets_port_and_key_and_never_asks() {
    let shell = RemoteShell::as_ssh("exec sh -c \"$command\"");
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    let path = key.path().to_str().expect("a temporary path is text");
    let run = Run::new(1).options(["-H", "beta:1", "-p", "2222", "-i", path]);
    let ended = with_ssh(&shell, run).start(["true"]).wait(DEADLINE);
    assert_eq!(ended.code, Some(0), "{ended}");
    let calls = shell.calls();
    assert!(calls[0].starts_with(&format!("-p 2222 -i {path} -o BatchMode=yes ")), "{calls:?}");
    assert!(!calls[0].contains("StrictHostKeyChecking"), "the user's configuration decides: {calls:?}");
    let refused = |options: &[&str]| {
        let ended = Run::new(1).options(["-H", "beta:1"]).options(options).start(["true"]).wait(DEADLINE);
        assert_eq!(ended.code, Some(64), "{ended}");
        ended.stderr
    };
    let text = refused(&["-i", "/no/such/key"]);
    assert!(text.contains("cannot read the key /no/such/key of --ssh-identity-file: No such file"), "{text}");
    let text = refused(&["-p", "2222", "--remote-shell", "rsh"]);
    assert!(text.contains("--ssh-port is for ssh, but --remote-shell is \"rsh\""), "{text}");
    assert_eq!(shell.calls().len(), 1, "nothing was started");
}

/// sshd on a host of a network, with its own keys; ended when dropped.
struct Sshd {
    process: Child,
    directory: tempfile::TempDir,
}

impl Sshd {
    fn start(network: &Network, index: u32) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let at = |name: &str| directory.path().join(name);
        for key in ["host", "user", "other"] {
            let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(at(key)).status();
            assert!(made.expect("openssh-client is installed").success());
        }
        let text = |name: &str| fs::read_to_string(at(name)).expect("ssh-keygen made it");
        fs::write(at("authorized"), text("user.pub")).expect("a temporary directory is writable");
        let host = format!("[{}]:2222 {}", network.address(index), text("host.pub"));
        fs::write(at("known"), host).expect("a temporary directory is writable");
        let lines = [
            format!("HostKey {}", at("host").display()),
            format!("AuthorizedKeysFile {}", at("authorized").display()),
            "Port 2222\nPidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password".to_owned(),
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nAcceptEnv RONDE_* XDG_*".to_owned(),
        ];
        fs::write(at("config"), lines.join("\n")).expect("a temporary directory is writable");
        // The privilege separation directory of sshd; the package's service makes it at boot.
        fs::create_dir_all("/run/sshd").expect("tests with hosts run as root");
        let mut command = network.command(index, "/usr/sbin/sshd");
        command.args(["-D", "-e", "-f"]).arg(at("config")).stdin(Stdio::null()).stderr(Stdio::null());
        let process = command.spawn().expect("openssh-server is installed");
        Self { process, directory }
    }

    /// The remote shell that knows these hosts.
    fn shell(&self, known: &Path) -> String {
        let options = [
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "ConnectTimeout=60",
            "SendEnv=RONDE_TEST_JOB",
            "SendEnv=XDG_RUNTIME_DIR",
        ];
        let options: Vec<String> = options.iter().map(|option| format!("-o {option}")).collect();
        format!("ssh -F none {} -o UserKnownHostsFile={}", options.join(" "), known.display())
    }

    fn at(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        // That it has ended is as well.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn openssh_reaches_a_host_and_its_refusals_are_explained() {
    if Network::is_left_out("openssh_reaches_a_host_and_its_refusals_are_explained") {
        return;
    }
    let network = Network::up(2).expect("hosts");
    let sshd = Sshd::start(&network, 1);
    let hosts = format!("{}:1,{}:1", network.address(0), network.address(1));
    let run = |port: &str, key: &str, known: &Path| {
        let run = Run::new(2).options(["-H", &hosts, "-p", port, "--remote-shell", &sshd.shell(known), "-i"]);
        run.options([sshd.at(key)]).on_host(&network, 0)
    };
    let trained = || {
        let training = Training::new();
        run("2222", "user", &sshd.at("known")).start(sh(&training.script())).wait(DEADLINE)
    };
    // sshd may still be starting: the first refusals are what a user would see too.
    let mut ended = trained();
    for _ in 0..20 {
        if !ended.stderr.contains("Connection refused") {
            break;
        }
        assert!(ended.stderr.contains("[RONDE-E217]"), "{ended}");
        ended = trained();
    }
    assert_trained(&ended);
    for (port, key, known, code) in [
        ("2222", "other", sshd.at("known"), "[RONDE-E216]"),
        ("2222", "user", sshd.at("unknown"), "[RONDE-E215]"),
        ("2223", "user", sshd.at("known"), "[RONDE-E217]"),
    ] {
        let ended = ended_cleanly(run(port, key, &known).start(["true"]));
        assert!(ended.code == Some(69) && ended.stderr.contains(code), "{code}: {ended}");
    }
    // Another key than the known one.
    let changed = sshd.at("changed");
    let other = fs::read_to_string(sshd.at("other.pub")).expect("ssh-keygen made it");
    fs::write(&changed, format!("[{}]:2222 {other}", network.address(1))).expect("a temporary directory is writable");
    let ended = ended_cleanly(run("2222", "user", &changed).start(["true"]));
    assert!(ended.stderr.contains("IDENTIFICATION HAS CHANGED") && ended.stderr.contains("[RONDE-E215]"), "{ended}");
    assert!(!sshd.at("unknown").exists(), "no key is ever taken unseen");
}

/// As containers on one machine have them, whose sshds have ports of their own.
#[test]
fn a_name_in_the_configuration_of_ssh_is_a_host() {
    if Network::is_left_out("a_name_in_the_configuration_of_ssh_is_a_host") {
        return;
    }
    let network = Network::up(2).expect("hosts");
    let sshd = Sshd::start(&network, 1);
    let configuration = sshd.at("ssh_config");
    let lines = [
        format!("Host {}\nHostName {}\nPort 2222", NAMES[1], network.address(1)),
        format!("IdentityFile {}\nUserKnownHostsFile {}", sshd.at("user").display(), sshd.at("known").display()),
        "IdentitiesOnly yes\nIdentityAgent none\nSendEnv RONDE_TEST_JOB XDG_RUNTIME_DIR".to_owned(),
        // sshd may still be starting: an attempt each second.
        "ConnectTimeout 60\nConnectionAttempts 20".to_owned(),
    ];
    fs::write(&configuration, lines.join("\n")).expect("a temporary directory is writable");
    let hosts = format!("{}:1,{}:1", network.address(0), NAMES[1]);
    let shell = format!("ssh -F {}", configuration.display());
    let run = Run::new(2).options(["-H", &hosts, "--remote-shell", &shell]).on_host(&network, 0);
    let training = Training::new();
    assert_trained(&run.start(sh(&training.script())).wait(DEADLINE));
}
