//! What each error code means and what to do about it.

use super::{Code, Entry};

/// All codes, by number.
pub(crate) const TABLE: &[Entry] = &[
    Entry {
        code: Code::CommandLine,
        title: "the command line cannot be used",
        meaning: "An option is unknown, lacks its value, or has a value out of its range. Nothing was started.",
        remedy: "Read the usage below the message, or `ronde COMMAND --help`. Options of ronde stand in front of the worker's command; everything behind its first word belongs to it.",
    },
    Entry {
        code: Code::Hosts,
        title: "the list of hosts cannot be used",
        meaning: "An item of -H is not HOST:SLOTS, a line of the host file is not `HOST slots=N`, a host is named twice, or the file cannot be read. Nothing was started.",
        remedy: "Correct the item or line that the message names: `-H alpha:4,beta:4`, or a file with `alpha slots=4`. IPv6 addresses stand in brackets.",
    },
    Entry {
        code: Code::Placement,
        title: "the processes do not fit the hosts",
        meaning: "There are more processes than slots, more processes on a host than a sidecar serves, or a number of sidecars that cannot be filled. Nothing was started.",
        remedy: "Give fewer processes with -np, more slots or hosts with -H, or another --sidecars; the message has the numbers.",
    },
    Entry {
        code: Code::NotExplained,
        title: "there is no such error code",
        meaning: "`ronde explain` was asked for a code that this version does not have.",
        remedy: "See all codes with `ronde explain --list`; a code of a newer release is explained by that release.",
    },
    Entry {
        code: Code::LauncherStart,
        title: "the launcher cannot begin",
        meaning: "The system refuses something that every start needs: the path of the ronde binary, the working directory, a thread, or a signal handler.",
        remedy: "The message has the system's reason. Usual ones: the working directory was deleted, the binary was replaced while it ran, or a limit on processes or descriptors (`ulimit -u`, `ulimit -n`) is reached.",
    },
    Entry {
        code: Code::RemoteShellStart,
        title: "the program that reaches a host cannot be started",
        meaning: "The remote shell (ssh unless --remote-shell says otherwise), or for this host ronde itself, is not installed or not executable.",
        remedy: "Install the program that the message names, or give another with --remote-shell.",
    },
    Entry {
        code: Code::HostUnreachable,
        title: "ronde could not be started on a host",
        meaning: "The remote shell ended before ronde on that host answered: the host is unknown or down, the log-in failed, or the binary is not where it was looked for. What the remote shell said is below the message.",
        remedy: "Try `ssh HOST true`: it must work without a password or question. Then `ssh HOST PATH/ronde version`; when that fails, install ronde there or give its place with --remote-ronde.",
    },
    Entry {
        code: Code::HostLost,
        title: "the connection to a host was lost",
        meaning: "The remote shell, or the agent behind it, ended while ranks of that host still ran. Those ranks were ended, because nobody watches over them any more.",
        remedy: "See whether the host is up and why the connection ended: a reboot, the out-of-memory killer (`dmesg` there), or a firewall that drops idle connections (ServerAliveInterval in the ssh configuration).",
    },
    Entry {
        code: Code::VersionDiffers,
        title: "two hosts run different versions",
        meaning: "A job's plans and messages are those of one release; the launcher and all hosts must run it.",
        remedy: "Install the same version on all hosts, or name the right binary with --remote-ronde.",
    },
    Entry {
        code: Code::HostRefused,
        title: "a host cannot do what it was told",
        meaning: "The agent on the host could not start a process, change to the working directory, or read an answer. The message has its reason.",
        remedy: "Do what the reason says. Often the working directory of the launcher does not exist on that host.",
    },
    Entry {
        code: Code::NoAddress,
        title: "a host has no address for the others",
        meaning: "All interfaces of the host that are up have loopback or link-local addresses only, so other hosts cannot reach its sidecar.",
        remedy: "Bring an interface up and give it an address (`ip address` shows them), or name the host by the address that it has.",
    },
    Entry {
        code: Code::StartTimeout,
        title: "not everything started in time",
        meaning: "A host, sidecar or worker did not answer within --start-timeout. The message names each with its ranks and what was awaited.",
        remedy: "When the named host is merely slow, give more seconds with --start-timeout. When sidecars wait for each other, UDP between the hosts is blocked: `ronde check` tells.",
    },
    Entry {
        code: Code::OutputLost,
        title: "the workers' output cannot be written",
        meaning: "Standard output or a file of --output-filename does not take what the workers write: the pipe's reader has ended, or the disk is full.",
        remedy: "Keep the reader of the pipe running, or make room on the disk.",
    },
    Entry {
        code: Code::Interrupted,
        title: "the job was ended by a signal",
        meaning: "The launcher got SIGINT, SIGTERM or SIGHUP and ended all ranks in order.",
        remedy: "Nothing, when it was you. A batch system sends SIGTERM at the end of the time it gives; `nohup` keeps SIGHUP away.",
    },
    Entry {
        code: Code::ReportUnwritable,
        title: "the report cannot be written",
        meaning: "The job has ended, but the file of --report cannot be made or written.",
        remedy: "Give a path in a directory that exists and that you may write to.",
    },
    Entry {
        code: Code::OutputFiles,
        title: "the files for the workers' output cannot be made",
        meaning: "The directory of --output-filename, or a file in it, cannot be created. Nothing was started.",
        remedy: "Give a directory that you may write to, on a disk with room.",
    },
    Entry {
        code: Code::AgentFailed,
        title: "the launcher's hand on a host cannot go on",
        meaning: "The hidden command `ronde agent` could not begin, or got a line that it does not understand.",
        remedy: "When you have started it yourself: do not, `ronde run` does. Otherwise install the same version on all hosts, and see that nothing in the shell's start files on that host writes to standard output.",
    },
    Entry {
        code: Code::WorkerFailed,
        title: "a worker failed",
        meaning: "The named rank ended with a code other than 0 or by a signal, and all other ranks were ended because of it. Ranks that failed later, because this one was missing, are not reported.",
        remedy: "The last lines of its standard error are below the message. SIGKILL that nobody sent is most often the out-of-memory killer: see `dmesg` on the host. SIGSEGV: run it with PYTHONFAULTHANDLER=1.",
    },
    Entry {
        code: Code::WorkerNotRun,
        title: "the worker's command cannot be run",
        meaning: "The program is not in PATH of the host, or is not executable, or the host refuses to tie its life to the launcher's.",
        remedy: "Give the program's path, or see that PATH is right on the host: variables come from the launcher's environment, and `-x PATH` is not needed.",
    },
    Entry {
        code: Code::SidecarEnded,
        title: "a sidecar ended while it was needed",
        meaning: "The process that serves the named ranks ended without saying why: it was killed, or it crashed. The last lines of its log are below the message.",
        remedy: "SIGKILL that nobody sent is most often the out-of-memory killer: see `dmesg`, and lower --arena-mb. Anything else is worth a report with the lines of the log; RONDE_LOG=debug gives more of them.",
    },
    Entry {
        code: Code::SidecarCannotGoOn,
        title: "a sidecar cannot go on",
        meaning: "The sidecar met a condition that it cannot serve its ranks under, and said so; the message has its reason.",
        remedy: "Do what the reason says; RONDE_LOG=debug on that host gives the lines before it.",
    },
    Entry {
        code: Code::SidecarSettings,
        title: "a sidecar's settings cannot be used",
        meaning: "A number is out of its range, or the placement of ranks, the list of peers and the sidecar's own index do not fit each other.",
        remedy: "Correct the value that the message names; docs/CONFIG.md has the ranges.",
    },
    Entry {
        code: Code::PortBind,
        title: "a port cannot be bound",
        meaning: "The address is not one of this host's, or another process has the UDP port.",
        remedy: "See the host's addresses with `ip address` and who has the port with `ss -ulpn`; give another address or port.",
    },
    Entry {
        code: Code::SocketDirectory,
        title: "the directory for the workers' sockets cannot be made",
        meaning: "The directory under XDG_RUNTIME_DIR, or the system's temporary directory, cannot be created, or its path is longer than a Unix socket's may be (107 bytes).",
        remedy: "Give a short path that you may write to in XDG_RUNTIME_DIR, or a shorter --job.",
    },
    Entry {
        code: Code::PeerMissing,
        title: "another sidecar did not come",
        meaning: "The link to a sidecar of the job was refused, or was not there in time. Nothing has been computed yet.",
        remedy: "A refusal names its reason, for example an expired certificate. Silence means that UDP is blocked between the two hosts or that the address is wrong: open the port in the firewall.",
    },
    Entry {
        code: Code::LauncherLine,
        title: "a sidecar does not understand who started it",
        meaning: "With --bootstrap, a sidecar takes its orders from a launcher on standard input, and got something else or nothing.",
        remedy: "Start jobs with `ronde run`. When that is what happened, install the same version on all hosts.",
    },
    Entry {
        code: Code::CertificateNotIssued,
        title: "a sidecar gets no certificate",
        meaning: "The launcher's authority could not make the certificate: the sidecar's request cannot be read or is not signed by its own key.",
        remedy: "Install the same version on all hosts; when it is, this is worth a report.",
    },
    Entry {
        code: Code::NoCredentials,
        title: "nothing proves who this sidecar is",
        meaning: "A sidecar talks to others over mutually authenticated TLS only; it needs a key and a certificate, and never takes either from an unauthenticated channel.",
        remedy: "Start the job with `ronde run`, which gives each sidecar its certificate.",
    },
];
