//! Reads the facts about this host.

use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::time::SystemTime;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::net::if_::InterfaceFlags;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{AccessFlags, access};
use ronde_bootstrap::directory;
use ronde_bootstrap::interfaces;
use ronde_gpu::nccl::Nccl;
use ronde_gpu::{DeviceInfo, Driver, GpuError};

use super::judge::{Facts, Gpu, Gpus, Interface, Limit};
use super::pci;

/// Reads all facts.
pub(super) fn probe() -> Facts {
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    let base = directory::default_base();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let gpus = gpus().map_err(|error| error.to_string());
    Facts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: text("/proc/sys/kernel/osrelease"),
        clock_unix_ms: u64::try_from(now.as_millis()).unwrap_or(u64::MAX),
        receive_buffer_bytes_max: number("/proc/sys/net/core/rmem_max"),
        send_buffer_bytes_max: number("/proc/sys/net/core/wmem_max"),
        interfaces: interfaces(),
        open_files_max: limit(&limits, "Max open files"),
        locked_bytes_max: limit(&limits, "Max locked memory"),
        shared_memory: shared_memory(),
        socket_base_usable: access(&base, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|error| error.to_string()),
        socket_base: base,
        udp: UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).map(drop).map_err(|error| error.to_string()),
        addresses: interfaces::of_this_host().into_iter().map(|found| found.address).collect(),
        echo_port: None,
        gpu_files: gpu_files(),
        nccl: if gpus.is_ok() { nccl() } else { Err("no GPU needs it".to_owned()) },
        gpus,
        network_devices: pci::network_devices(Path::new("/sys")),
    }
}

/// The soft limit of a line of `/proc/<pid>/limits`.
fn limit(limits: &str, name: &str) -> Option<Limit> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(Limit::Unlimited),
        number => number.parse().ok().map(Limit::AtMost),
    }
}

fn interfaces() -> Vec<Interface> {
    let Ok(addresses) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let is_up =
        |flags: InterfaceFlags| flags.contains(InterfaceFlags::IFF_UP) && !flags.contains(InterfaceFlags::IFF_LOOPBACK);
    let has_address = |address: &nix::ifaddrs::InterfaceAddress| {
        address.address.as_ref().is_some_and(|at| at.as_sockaddr_in().is_some() || at.as_sockaddr_in6().is_some())
    };
    let names: std::collections::BTreeSet<String> = addresses
        .filter(|address| is_up(address.flags) && has_address(address))
        .map(|address| address.interface_name)
        .collect();
    let with_mtu = |name: String| {
        let mtu_bytes = number(format!("/sys/class/net/{name}/mtu"))?;
        Some(Interface { name, mtu_bytes })
    };
    names.into_iter().filter_map(with_mtu).collect()
}

/// Creates and seals an empty memfd, as an arena does.
fn shared_memory() -> Result<(), String> {
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    let made = memfd_create("ronde-check", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING);
    let made = made.map_err(|error| format!("memfd_create fails: {error}"))?;
    fcntl(&made, FcntlArg::F_ADD_SEALS(seals)).map(drop).map_err(|error| format!("a memfd cannot be sealed: {error}"))
}

/// The number of `/dev/nvidia0` and so on.
fn gpu_files() -> usize {
    let is_gpu = |name: &str| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let Ok(devices) = fs::read_dir("/dev") else { return 0 };
    devices.flatten().filter(|device| device.file_name().to_str().is_some_and(is_gpu)).count()
}

/// What the driver says.
fn gpus() -> Result<Gpus, GpuError> {
    let driver = Driver::get()?;
    let device = |ordinal| driver.info(ordinal);
    let devices = (0..driver.devices()).map(|ordinal| device(ordinal).map(described)).collect::<Result<_, _>>()?;
    Ok(Gpus { cuda: driver.version(), devices })
}

fn described(info: DeviceInfo) -> Gpu {
    let DeviceInfo { name, bus_id, memory_bytes, peers, .. } = info;
    let slot = pci::slot(Path::new("/sys"), &bus_id);
    Gpu { name, bus_id, memory_bytes, peers, slot }
}

/// NCCL's version and file.
fn nccl() -> Result<String, String> {
    let nccl = Nccl::find(&[]).map_err(|error| error.to_string())?;
    let (major, minor, patch) = nccl.version();
    Ok(format!("{major}.{minor}.{patch}, {}", nccl.path().display()))
}

fn text(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    text(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max open files            1024                 524288               files     \n\
                      Max locked memory         unlimited            unlimited            bytes     \n";
        assert_eq!(limit(limits, "Max open files"), Some(Limit::AtMost(1_024)));
        assert_eq!(limit(limits, "Max locked memory"), Some(Limit::Unlimited));
        assert_eq!(limit(limits, "Max processes"), None);
        assert_eq!(limit("Max open files  many", "Max open files"), None);
    }

    #[test]
    fn the_facts_of_this_host_can_be_read() {
        let facts = probe();
        assert!(facts.open_files_max.is_some() && facts.kernel.is_some(), "{facts:?}");
        assert_eq!(facts.shared_memory, Ok(()));
        let text = serde_json::to_string(&facts).expect("facts are JSON");
        let back: Facts = serde_json::from_str(&text).expect("what was written is read");
        assert_eq!(format!("{back:?}"), format!("{facts:?}"));
    }
}
