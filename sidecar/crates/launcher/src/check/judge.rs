//! Findings from the facts about a host: one each, with the fix if needed. Pure.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::pci::{self, NetworkDevice, Slot};

/// The facts about a host; `None` where they could not be read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Facts {
    /// The version of ronde.
    pub(super) version: String,
    /// The kernel's release.
    pub(super) kernel: Option<String>,
    /// The wall clock, milliseconds since 1970.
    pub(super) clock_unix_ms: u64,
    /// `net.core.rmem_max`, bytes.
    pub(super) receive_buffer_bytes_max: Option<u64>,
    /// `net.core.wmem_max`, bytes.
    pub(super) send_buffer_bytes_max: Option<u64>,
    /// Interfaces that are up, without the loopback.
    pub(super) interfaces: Vec<Interface>,
    /// Files that a process may have open.
    pub(super) open_files_max: Option<Limit>,
    /// Bytes that a process may lock in memory.
    pub(super) locked_bytes_max: Option<Limit>,
    /// Whether shared memory can be made and sealed; why not.
    pub(super) shared_memory: Result<(), String>,
    /// Where sockets are made.
    pub(super) socket_base: PathBuf,
    /// Whether that directory can be written to; why not.
    pub(super) socket_base_usable: Result<(), String>,
    /// Whether a UDP socket can be bound; why not.
    pub(super) udp: Result<(), String>,
    /// The host's addresses, those of the loopback last.
    pub(super) addresses: Vec<IpAddr>,
    /// The port on which it echoes datagrams and takes connections while it is asked.
    pub(super) echo_port: Option<u16>,
    /// NVIDIA's device files.
    pub(super) gpu_files: usize,
    /// The GPUs; why none can be used.
    pub(super) gpus: Result<Gpus, String>,
    /// NCCL's version and file; why it cannot be used. Asked only where there are GPUs.
    pub(super) nccl: Result<String, String>,
    /// Interfaces on the PCI bus.
    #[serde(default)]
    pub(super) network_devices: Vec<NetworkDevice>,
}

/// The GPUs of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Gpus {
    /// The newest CUDA that the driver supports.
    pub(super) cuda: (u32, u32),
    /// Each of them, by number.
    pub(super) devices: Vec<Gpu>,
}

/// A GPU.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Gpu {
    /// The maker's name.
    pub(super) name: String,
    /// Its place on the bus.
    pub(super) bus_id: String,
    /// Its memory.
    pub(super) memory_bytes: u64,
    /// The numbers of the GPUs whose memory it can read directly.
    pub(super) peers: Vec<u32>,
    /// What `/sys` says about its place.
    #[serde(default)]
    pub(super) slot: Slot,
}

/// A network interface.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Interface {
    /// Its name.
    pub(super) name: String,
    /// The largest packet, bytes.
    pub(super) mtu_bytes: u64,
}

/// A limit of the system on a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Limit {
    /// None.
    Unlimited,
    /// At most this.
    AtMost(u64),
}

/// How good a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    /// As it should be.
    Ok,
    /// It works, but not well or not for everything.
    Warn,
    /// Jobs will not run.
    Fail,
}

/// One line of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// How good it is.
    pub(super) mark: Mark,
    /// The subject.
    pub(super) topic: &'static str,
    /// What was found.
    pub(super) found: String,
    /// What to do about it.
    pub(super) fix: Option<String>,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<5} {}: {}", self.mark, self.topic, self.found)?;
        self.fix.as_ref().map_or(Ok(()), |fix| write!(f, "; {fix}"))
    }
}

/// All findings about a host by itself.
pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        ok("version", format!("ronde {}, Linux {}", facts.version, facts.kernel.as_deref().unwrap_or("unknown"))),
        buffer("UDP receive buffer", "net.core.rmem_max", facts.receive_buffer_bytes_max, RECEIVE_BUFFER_BYTES_GOOD),
        buffer("UDP send buffer", "net.core.wmem_max", facts.send_buffer_bytes_max, SEND_BUFFER_BYTES_GOOD),
        needed("UDP", "sockets can be bound", &facts.udp, "see that no policy (seccomp, SELinux) forbids UDP sockets"),
    ];
    findings.extend(network(&facts.interfaces));
    findings.extend([
        open_files(facts.open_files_max),
        locked_memory(facts.locked_bytes_max),
        needed(
            "shared memory",
            "memfd_create with seals works",
            &facts.shared_memory,
            "allow memfd_create in the container's seccomp profile; Linux 5.1 or newer is needed",
        ),
        sockets(facts),
        clock(facts.clock_unix_ms),
    ]);
    findings.extend(gpus(facts));
    findings
}

/// What two hosts' facts say together: `midway_unix_ms` is this host's clock in the middle of the question, which took
/// `round_trip_ms`.
pub(super) fn compare(own: &Facts, other: &Facts, midway_unix_ms: u64, round_trip_ms: u64) -> Vec<Finding> {
    let version = if own.version == other.version {
        ok("version", format!("ronde {} on both", own.version))
    } else {
        let found = format!("ronde {} there, {} here", other.version, own.version);
        fail("version", found, "install the same version on all hosts, or name it with --remote-ronde")
    };
    // The clock was read at some moment of the round trip.
    let apart_ms = other.clock_unix_ms.abs_diff(midway_unix_ms).saturating_sub(round_trip_ms / 2);
    let found = format!("the clocks are at least {:.1} s apart", Milliseconds(apart_ms).seconds());
    let fix = "set both by NTP (`timedatectl set-ntp true`)";
    let clock = match apart_ms {
        CLOCK_APART_MS_MAX.. => fail("clocks", format!("{found}; fresh certificates are not valid there"), fix),
        CLOCK_APART_MS_GOOD.. => warn("clocks", found, fix),
        _ => ok("clocks", "they agree".to_owned()),
    };
    vec![version, clock]
}

struct Milliseconds(u64);

impl Milliseconds {
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    fn seconds(&self) -> f64 {
        self.0 as f64 / 1_000.0
    }
}

fn buffer(topic: &'static str, sysctl: &str, bytes: Option<u64>, good_bytes: u64) -> Finding {
    let fix = format!("run: sysctl -w {sysctl}={good_bytes} (and keep it in /etc/sysctl.d/)");
    match bytes {
        None => warn(topic, format!("{sysctl} cannot be read"), "run `ronde check` outside of the container too"),
        Some(bytes) if bytes >= good_bytes => ok(topic, format!("{sysctl} is {bytes}")),
        Some(bytes) => warn(topic, format!("{sysctl} is {bytes}, packets may be lost in bursts"), &fix),
    }
}

fn network(interfaces: &[Interface]) -> Vec<Finding> {
    if interfaces.is_empty() {
        let fix = "bring an interface up for jobs on several hosts";
        return vec![warn("network", "no interface but the loopback is up".to_owned(), fix)];
    }
    interfaces
        .iter()
        .map(|Interface { name, mtu_bytes }| {
            let found = format!("{name} has an MTU of {mtu_bytes}");
            let fix = format!("run: ip link set dev {name} mtu 1500, or more where the network takes it");
            match *mtu_bytes {
                MTU_BYTES_GOOD.. => ok("network", found),
                MTU_BYTES_MIN.. => warn("network", format!("{found}, each packet carries little"), &fix),
                _ => fail("network", format!("{found}; QUIC needs {MTU_BYTES_MIN}"), &fix),
            }
        })
        .collect()
}

fn open_files(limit: Option<Limit>) -> Finding {
    let topic = "open files";
    let fix = format!("run: ulimit -n {OPEN_FILES_GOOD} (or LimitNOFILE= in the service's unit)");
    match limit {
        None => warn(topic, "the limit cannot be read".to_owned(), "check `ulimit -n`"),
        Some(Limit::Unlimited) => ok(topic, "no limit".to_owned()),
        Some(Limit::AtMost(files @ OPEN_FILES_GOOD..)) => ok(topic, format!("at most {files}")),
        Some(Limit::AtMost(files @ OPEN_FILES_MIN..)) => {
            warn(topic, format!("at most {files}, few for large jobs"), &fix)
        }
        Some(Limit::AtMost(files)) => fail(topic, format!("at most {files}, jobs need {OPEN_FILES_MIN}"), &fix),
    }
}

fn locked_memory(limit: Option<Limit>) -> Finding {
    let topic = "locked memory";
    match limit {
        None => warn(topic, "the limit cannot be read".to_owned(), "check `ulimit -l`"),
        Some(Limit::Unlimited) => ok(topic, "no limit".to_owned()),
        Some(Limit::AtMost(bytes @ LOCKED_BYTES_GOOD..)) => ok(topic, format!("at most {bytes} bytes")),
        Some(Limit::AtMost(bytes)) => warn(
            topic,
            format!("at most {bytes} bytes; workers cannot pin much memory for GPUs"),
            "run: ulimit -l unlimited (or LimitMEMLOCK=infinity in the service's unit)",
        ),
    }
}

fn sockets(facts: &Facts) -> Finding {
    let (topic, base) = ("sockets", facts.socket_base.display());
    let bytes = facts.socket_base.as_os_str().len();
    let fix = "name a short directory of your own, with mode 0700, in XDG_RUNTIME_DIR";
    if bytes > SOCKET_BASE_BYTES_MAX {
        let found = format!("{base} has {bytes} bytes, so paths of a job's sockets in it would be too long");
        return fail(topic, found, fix);
    }
    match &facts.socket_base_usable {
        Ok(()) => ok(topic, format!("they are created in {base}")),
        Err(reason) => fail(topic, format!("they would be created in {base}, which cannot be used: {reason}"), fix),
    }
}

fn clock(unix_ms: u64) -> Finding {
    match unix_ms {
        CLOCK_UNIX_MS_MIN..=CLOCK_UNIX_MS_MAX => ok("clock", "the year is plausible".to_owned()),
        _ => fail(
            "clock",
            format!("it is at {unix_ms} ms since 1970, so certificates are not valid"),
            "set it (`timedatectl set-ntp true`)",
        ),
    }
}

fn gpus(facts: &Facts) -> Vec<Finding> {
    let found = match (&facts.gpus, facts.gpu_files) {
        (Ok(found), _) => found,
        (Err(_), 0) => return vec![ok("GPU", "none; ronde takes tensors in host memory".to_owned())],
        (Err(reason), files) => {
            let fix = "until then ronde takes tensors in host memory only";
            return vec![warn("GPU", format!("{files} device files, but {reason}"), fix)];
        }
    };
    let described = found
        .devices
        .iter()
        .enumerate()
        .map(|(number, gpu)| format!("{number}: {} at {}, {} GiB", gpu.name, gpu.bus_id, gpu.memory_bytes >> 30));
    let (major, minor) = found.cuda;
    let text = format!("{}; the driver supports CUDA {major}.{minor}", described.collect::<Vec<_>>().join("; "));
    let mut findings = vec![cuda(text, found.cuda)];
    findings.push(match &facts.nccl {
        Ok(nccl) => ok("NCCL", nccl.clone()),
        Err(reason) => {
            warn("NCCL", reason.clone(), "ronde copies tensors of GPUs without it; PyTorch for CUDA brings its own")
        }
    });
    findings.extend(peer_access(&found.devices));
    findings.extend(pci::judge(&found.devices, &facts.network_devices));
    findings
}

fn cuda(text: String, version: (u32, u32)) -> Finding {
    if version >= CUDA_MIN {
        return ok("GPU", text);
    }
    let (major, minor) = CUDA_MIN;
    warn("GPU", text, &format!("install a driver for CUDA {major}.{minor} or later; ronde is made for these"))
}

/// Whether GPUs read each other's memory; nothing to find with one.
fn peer_access(devices: &[Gpu]) -> Option<Finding> {
    let without = |one: usize, gpu: &Gpu| {
        let others = (0..devices.len()).filter(move |other| *other != one);
        let missing = others.filter(|other| !gpu.peers.iter().any(|peer| *peer as usize == *other));
        missing.map(|other| format!("{one} to {other}")).collect::<Vec<_>>()
    };
    let missing: Vec<_> = devices.iter().enumerate().flat_map(|(one, gpu)| without(one, gpu)).collect();
    match (devices.len(), missing.is_empty()) {
        (0 | 1, _) => None,
        (_, true) => Some(ok("peer access", "each GPU reads the others' memory directly".to_owned())),
        (_, false) => {
            let fix = "NCCL copies between these through host memory; see `nvidia-smi topo -m`";
            Some(warn("peer access", format!("missing from GPU {}", missing.join(", ")), fix))
        }
    }
}

fn needed(topic: &'static str, found: &str, is: &Result<(), String>, fix: &str) -> Finding {
    match is {
        Ok(()) => ok(topic, found.to_owned()),
        Err(reason) => fail(topic, reason.clone(), fix),
    }
}

/// A finding that is as it should be.
pub(super) fn ok(topic: &'static str, found: String) -> Finding {
    Finding { mark: Mark::Ok, topic, found, fix: None }
}

/// A finding that works, but not well.
pub(super) fn warn(topic: &'static str, found: String, fix: &str) -> Finding {
    Finding { mark: Mark::Warn, topic, found, fix: Some(fix.to_owned()) }
}

/// A finding under which jobs will not run.
pub(super) fn fail(topic: &'static str, found: String, fix: &str) -> Finding {
    Finding { mark: Mark::Fail, topic, found, fix: Some(fix.to_owned()) }
}

/// The buffer size that a port requests (`ronde_transport::SocketOptions`).
const RECEIVE_BUFFER_BYTES_GOOD: u64 = 32 << 20;
const SEND_BUFFER_BYTES_GOOD: u64 = 8 << 20;
/// The smallest packet that every path of QUIC must carry, with its headers (RFC 9000, section 14).
const MTU_BYTES_MIN: u64 = 1_280;
const MTU_BYTES_GOOD: u64 = 1_500;
/// A sidecar has a socket for each worker and lane, and segments of shared memory.
const OPEN_FILES_MIN: u64 = 256;
const OPEN_FILES_GOOD: u64 = 4_096;
const LOCKED_BYTES_GOOD: u64 = 64 << 20;
/// 107 bytes less the path that a job with a name of 20 characters appends.
const SOCKET_BASE_BYTES_MAX: usize = 60;
/// The first with all functions that ronde calls.
const CUDA_MIN: (u32, u32) = (11, 4);
/// 2025-01-01 and 2100-01-01.
const CLOCK_UNIX_MS_MIN: u64 = 1_735_689_600_000;
const CLOCK_UNIX_MS_MAX: u64 = 4_102_444_800_000;
/// Certificates are valid from five minutes before they are issued.
const CLOCK_APART_MS_MAX: u64 = 300_000;
const CLOCK_APART_MS_GOOD: u64 = 1_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Facts {
        Facts {
            version: "1".to_owned(),
            kernel: Some("6.1".to_owned()),
            clock_unix_ms: CLOCK_UNIX_MS_MIN + 1,
            receive_buffer_bytes_max: Some(RECEIVE_BUFFER_BYTES_GOOD),
            send_buffer_bytes_max: Some(SEND_BUFFER_BYTES_GOOD),
            interfaces: vec![Interface { name: "eth0".to_owned(), mtu_bytes: 9_000 }],
            open_files_max: Some(Limit::AtMost(65_536)),
            locked_bytes_max: Some(Limit::Unlimited),
            shared_memory: Ok(()),
            socket_base: "/run/user/1000".into(),
            socket_base_usable: Ok(()),
            udp: Ok(()),
            addresses: vec![],
            echo_port: None,
            gpu_files: 0,
            gpus: Err("libcuda.so.1 cannot be opened".to_owned()),
            nccl: Err("not asked".to_owned()),
            network_devices: Vec::new(),
        }
    }

    /// GPUs, each of which reads the memory of these others.
    fn with_gpus(facts: &mut Facts, peers: &[&[u32]]) {
        let gpu = |peers: &&[u32]| Gpu {
            name: "A GPU".to_owned(),
            bus_id: "0000:01:00.0".to_owned(),
            memory_bytes: 80 << 30,
            peers: peers.to_vec(),
            slot: Slot::default(),
        };
        facts.gpu_files = peers.len();
        facts.gpus = Ok(Gpus { cuda: (12, 4), devices: peers.iter().map(gpu).collect() });
        facts.nccl = Ok("2.23.4, /lib/libnccl.so.2".to_owned());
    }

    /// The lines that are not ok after a change of good facts.
    fn bad(change: impl FnOnce(&mut Facts)) -> Vec<String> {
        let mut facts = good();
        change(&mut facts);
        judge(&facts).iter().filter(|finding| finding.mark != Mark::Ok).map(ToString::to_string).collect()
    }

    #[test]
    fn every_finding_of_a_good_host_is_ok() {
        assert_eq!(bad(|_| {}), Vec::<String>::new());
        assert!(judge(&good()).iter().all(|finding| finding.to_string().starts_with("ok    ")));
    }

    #[test]
    fn each_wrong_fact_gives_one_line_with_its_fix() {
        let one = |change: fn(&mut Facts), mark: &str, words: &[&str]| {
            let lines = bad(change);
            let [line] = &lines[..] else { panic!("not one line: {lines:?}") };
            assert!(line.starts_with(mark) && words.iter().all(|words| line.contains(words)), "{line}");
        };
        one(
            |f| f.receive_buffer_bytes_max = Some(212_992),
            "warn",
            &["is 212992", "sysctl -w net.core.rmem_max=33554432"],
        );
        one(|f| f.send_buffer_bytes_max = Some(0), "warn", &["net.core.wmem_max=8388608"]);
        one(|f| f.send_buffer_bytes_max = None, "warn", &["cannot be read"]);
        one(|f| f.interfaces[0].mtu_bytes = 1_400, "warn", &["eth0", "ip link set dev eth0 mtu 1500"]);
        one(|f| f.interfaces[0].mtu_bytes = 1_279, "fail", &["eth0", "QUIC needs 1280"]);
        one(|f| f.interfaces.clear(), "warn", &["no interface but the loopback"]);
        one(|f| f.open_files_max = Some(Limit::AtMost(1_024)), "warn", &["at most 1024", "ulimit -n 4096"]);
        one(|f| f.open_files_max = Some(Limit::AtMost(64)), "fail", &["at most 64", "ulimit -n"]);
        one(|f| f.locked_bytes_max = Some(Limit::AtMost(65_536)), "warn", &["65536 bytes", "ulimit -l"]);
        one(|f| f.shared_memory = Err("EPERM".to_owned()), "fail", &["shared memory: EPERM", "seccomp"]);
        one(|f| f.udp = Err("EACCES".to_owned()), "fail", &["UDP: EACCES"]);
        one(|f| f.socket_base_usable = Err("it is read-only".to_owned()), "fail", &["read-only", "XDG_RUNTIME_DIR"]);
        one(|f| f.socket_base = "x".repeat(61).into(), "fail", &["61 bytes", "XDG_RUNTIME_DIR"]);
        one(|f| f.clock_unix_ms = 0, "fail", &["since 1970", "timedatectl"]);
        one(|f| f.clock_unix_ms = u64::MAX, "fail", &["certificates"]);
        one(|f| f.gpu_files = 4, "warn", &["GPU: 4 device files, but libcuda.so.1 cannot be opened"]);
        one(
            |f| {
                with_gpus(f, &[&[]]);
                f.nccl = Err("libnccl.so.2 is of version 2.17.3".to_owned());
            },
            "warn",
            &["NCCL: libnccl.so.2 is of version 2.17.3"],
        );
        one(|f| with_gpus(f, &[&[1], &[]]), "warn", &["peer access: missing from GPU 1 to 0", "nvidia-smi topo -m"]);
        one(
            |f| {
                with_gpus(f, &[&[]]);
                f.gpus.as_mut().expect("set above").cuda = (11, 3);
            },
            "warn",
            &["CUDA 11.3", "CUDA 11.4 or later"],
        );
    }

    #[test]
    fn good_gpus_are_described() {
        let mut facts = good();
        with_gpus(&mut facts, &[&[1], &[0]]);
        let lines: Vec<_> = judge(&facts).iter().map(ToString::to_string).collect();
        let described = "ok    GPU: 0: A GPU at 0000:01:00.0, 80 GiB; 1: A GPU at 0000:01:00.0, 80 GiB; the driver supports CUDA 12.4";
        assert!(lines.iter().any(|line| line == described), "{lines:?}");
        assert!(lines.iter().any(|line| line == "ok    NCCL: 2.23.4, /lib/libnccl.so.2"), "{lines:?}");
        assert!(
            lines.iter().any(|line| line == "ok    peer access: each GPU reads the others' memory directly"),
            "{lines:?}"
        );
    }

    #[test]
    fn hosts_are_compared_by_version_and_clock() {
        let marks = |version: &str, clock_ms: u64, round_trip_ms: u64| {
            let other = Facts { version: version.to_owned(), clock_unix_ms: clock_ms, ..good() };
            let findings = compare(&good(), &other, 1_000_000, round_trip_ms);
            [findings[0].mark, findings[1].mark]
        };
        assert_eq!(marks("1", 1_000_000, 0), [Mark::Ok, Mark::Ok]);
        assert_eq!(marks("2", 1_000_999, 0), [Mark::Fail, Mark::Ok]);
        assert_eq!(marks("1", 1_001_000, 0), [Mark::Ok, Mark::Warn]);
        assert_eq!(marks("1", 998_500, 1_200), [Mark::Ok, Mark::Ok]);
        assert_eq!(marks("1", 700_000, 0), [Mark::Ok, Mark::Fail]);
    }

    /// Facts from another host are untrusted input.
    #[test]
    fn fuzz_facts() {
        use ronde_fuzz::{Outcome, fuzz};

        let seeds = vec![serde_json::to_vec(&good()).expect("facts are JSON")];
        fuzz("facts", seeds, |bytes| {
            let facts = serde_json::from_slice::<Facts>(bytes);
            if let Ok(facts) = &facts {
                let findings = [judge(facts), compare(&good(), facts, u64::MAX / 2, u64::MAX)].concat();
                assert!(findings.len() > 5 && findings.iter().all(|finding| !finding.to_string().is_empty()));
                let marks = |mark| findings.iter().filter(|finding| finding.mark == mark).count();
                return Outcome::read(&["x".repeat(marks(Mark::Warn)), "x".repeat(marks(Mark::Fail))]);
            }
            Outcome::of(&facts)
        });
    }
}
