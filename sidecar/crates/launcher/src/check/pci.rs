//! Where devices are on the PCI bus, as `/sys` describes it, and findings about GPUs from that.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::judge::{Finding, Gpu, ok, warn};

/// A device's place on the bus; `None` where `/sys` does not say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slot {
    /// The NUMA node.
    pub(super) numa_node: Option<u32>,
    /// The speed of the link now and at most, in hundreds of megatransfers per second and lane.
    pub(super) speed: (Option<u32>, Option<u32>),
    /// The lanes of the link now and at most.
    pub(super) width: (Option<u32>, Option<u32>),
    /// The host bridge, such as `pci0000:00`.
    pub(super) root: Option<String>,
}

/// A network interface on the bus.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NetworkDevice {
    pub(super) name: String,
    pub(super) slot: Slot,
}

/// Reads the slot of a device at a place such as `00000000:01:00.0`, below `/sys` or a copy of it.
pub(super) fn slot(sys: &Path, bus_id: &str) -> Slot {
    slot_at(&sys.join("bus/pci/devices").join(short(bus_id)))
}

/// Reads the interfaces that are devices on the bus.
pub(super) fn network_devices(sys: &Path) -> Vec<NetworkDevice> {
    let Ok(entries) = fs::read_dir(sys.join("class/net")) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let with_slot = |name: String| {
        let slot = slot_at(&sys.join("class/net").join(&name).join("device"));
        slot.root.is_some().then_some(NetworkDevice { name, slot })
    };
    let mut found: Vec<_> = names.filter_map(with_slot).collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

fn slot_at(device: &Path) -> Slot {
    let text = |name: &str| fs::read_to_string(device.join(name)).ok();
    let number = |name: &str| text(name)?.trim().parse::<u32>().ok();
    let speed = |name: &str| parse_speed(&text(name)?);
    let path = fs::canonicalize(device).unwrap_or_default();
    let is_root = |part: &&str| part.strip_prefix("pci").is_some_and(|rest| rest.contains(':'));
    let root = path.iter().filter_map(|part| part.to_str()).find(is_root).map(str::to_owned);
    Slot {
        // -1, which is no number here: the machine has one node.
        numa_node: number("numa_node"),
        speed: (speed("current_link_speed"), speed("max_link_speed")),
        width: (number("current_link_width"), number("max_link_width")),
        root,
    }
}

/// The domain has eight digits in the driver's places and four in `/sys`.
fn short(bus_id: &str) -> String {
    let lower = bus_id.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 => format!("{}:{rest}", &domain[domain.len() - 4..]),
        _ => lower,
    }
}

/// `16.0 GT/s PCIe`, in hundreds of megatransfers: 160.
fn parse_speed(text: &str) -> Option<u32> {
    let (number, _) = text.trim().split_once(" GT/s")?;
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let tenths: u32 = tenths.get(..1)?.parse().ok()?;
    whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(tenths)
}

/// Findings about the links of GPUs and where the network is; none where `/sys` says nothing.
pub(super) fn judge(gpus: &[Gpu], network: &[NetworkDevice]) -> Vec<Finding> {
    links(gpus).into_iter().chain(nodes(gpus)).chain(near(gpus, network)).collect()
}

fn links(gpus: &[Gpu]) -> Option<Finding> {
    let described = |(number, gpu): (usize, &Gpu)| {
        let ((speed, speed_max), (width, width_max)) = (gpu.slot.speed, gpu.slot.width);
        let (speed, width) = (speed?, width?);
        let text = format!("{number}: {}.{} GT/s x{width}", speed / 10, speed % 10);
        let is_narrow = width_max.is_some_and(|most| width < most);
        // Idle GPUs lower the speed of their links, not the width.
        let most = speed_max.filter(|most| speed < *most).map(|most| format!(" (at most {}.{})", most / 10, most % 10));
        let narrow = width_max.filter(|_| is_narrow).map(|most| format!(", of x{most}"));
        Some((text + &most.unwrap_or_default() + &narrow.unwrap_or_default(), is_narrow))
    };
    let found: Vec<(String, bool)> = gpus.iter().enumerate().filter_map(described).collect();
    if found.is_empty() {
        return None;
    }
    let text = found.iter().map(|(text, _)| text.as_str()).collect::<Vec<_>>().join("; ");
    if found.iter().any(|(_, is_narrow)| *is_narrow) {
        let fix = "copies have a part of the bandwidth; see whether the card is in a slot with fewer lanes";
        return Some(warn("PCIe", text, fix));
    }
    Some(ok("PCIe", text))
}

fn nodes(gpus: &[Gpu]) -> Option<Finding> {
    let known: Vec<String> = gpus
        .iter()
        .enumerate()
        .filter_map(|(number, gpu)| Some(format!("GPU {number} on node {}", gpu.slot.numa_node?)))
        .collect();
    (!known.is_empty()).then(|| ok("NUMA", known.join(", ")))
}

/// Whether each GPU has an interface at its host bridge or on its NUMA node.
fn near(gpus: &[Gpu], network: &[NetworkDevice]) -> Option<Finding> {
    let placed: Vec<(usize, &Slot)> = gpus
        .iter()
        .enumerate()
        .map(|(number, gpu)| (number, &gpu.slot))
        .filter(|(_, slot)| slot.root.is_some())
        .collect();
    if placed.is_empty() || network.is_empty() {
        return None;
    }
    let is_near = |slot: &Slot, other: &Slot| {
        slot.root == other.root || (slot.numa_node.is_some() && slot.numa_node == other.numa_node)
    };
    let nearest = |slot: &Slot| network.iter().find(|device| is_near(slot, &device.slot));
    let (with, without): (Vec<_>, Vec<_>) = placed.iter().partition(|(_, slot)| nearest(slot).is_some());
    if without.is_empty() {
        let pairs = with.iter().filter_map(|(number, slot)| Some(format!("GPU {number} and {}", nearest(slot)?.name)));
        return Some(ok("GPU and network", format!("near each other: {}", pairs.collect::<Vec<_>>().join(", "))));
    }
    let numbers = without.iter().map(|(number, _)| number.to_string()).collect::<Vec<_>>().join(", ");
    let fix = "traffic between hosts crosses the processors' interconnect; see `nvidia-smi topo -m`";
    Some(warn(
        "GPU and network",
        format!("no interface is at the host bridge or on the NUMA node of GPU {numbers}"),
        fix,
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::check::judge::Mark;

    /// A copy of `/sys` with a GPU and an interface.
    fn sys(name: &str, network_root: &str) -> std::path::PathBuf {
        let sys = std::env::temp_dir().join(format!("ronde-pci-{}-{name}", std::process::id()));
        let device = |path: String, files: &[(&str, &str)]| {
            let path = sys.join(path);
            fs::create_dir_all(&path).expect("a folder");
            for (name, content) in files {
                fs::write(path.join(name), content).expect("a file");
            }
            path
        };
        let gpu = device(
            "devices/pci0000:00/0000:00:01.0/0000:01:00.0".to_owned(),
            &[
                ("numa_node", "0\n"),
                ("current_link_speed", "2.5 GT/s PCIe\n"),
                ("max_link_speed", "16.0 GT/s PCIe\n"),
                ("current_link_width", "8\n"),
                ("max_link_width", "16\n"),
            ],
        );
        let nic = device(format!("devices/{network_root}/0000:40:00.0"), &[("numa_node", "-1\n")]);
        for folder in ["bus/pci/devices", "class/net/eth0", "class/net/lo"] {
            fs::create_dir_all(sys.join(folder)).expect("a folder");
        }
        symlink(gpu, sys.join("bus/pci/devices/0000:01:00.0")).expect("a link");
        symlink(nic, sys.join("class/net/eth0/device")).expect("a link");
        sys
    }

    fn gpu(slot: Slot) -> Gpu {
        Gpu { name: String::new(), bus_id: String::new(), memory_bytes: 0, peers: Vec::new(), slot }
    }

    #[test]
    fn slots_are_read_as_the_kernel_writes_them() {
        let sys = sys("read", "pci0000:40");
        let found = slot(&sys, "00000000:01:00.0");
        let expected = Slot {
            numa_node: Some(0),
            speed: (Some(25), Some(160)),
            width: (Some(8), Some(16)),
            root: Some("pci0000:00".to_owned()),
        };
        assert_eq!(found, expected);
        assert_eq!(slot(&sys, "0000:02:00.0"), Slot::default(), "there is none");
        let network = network_devices(&sys);
        assert_eq!(network.len(), 1, "the loopback is no device");
        assert_eq!((network[0].slot.numa_node, network[0].slot.root.as_deref()), (None, Some("pci0000:40")));
        fs::remove_dir_all(sys).expect("it is removed");
    }

    #[test]
    fn narrow_links_and_far_interfaces_are_found() {
        for (root, mark) in [("pci0000:40", Mark::Warn), ("pci0000:00", Mark::Ok)] {
            let sys = sys(root, root);
            let findings = judge(&[gpu(slot(&sys, "0000:01:00.0"))], &network_devices(&sys));
            let marks: Vec<_> = findings.iter().map(|finding| (finding.topic, finding.mark)).collect();
            assert_eq!(marks, [("PCIe", Mark::Warn), ("NUMA", Mark::Ok), ("GPU and network", mark)]);
            assert_eq!(findings[0].found, "0: 2.5 GT/s x8 (at most 16.0), of x16");
            fs::remove_dir_all(sys).expect("it is removed");
        }
    }

    #[test]
    fn an_unknown_bus_has_no_findings() {
        assert_eq!(judge(&[gpu(Slot::default())], &[]), []);
        assert_eq!(parse_speed("Unknown"), None);
        assert_eq!(parse_speed("32.0 GT/s PCIe"), Some(320));
        assert_eq!(short("00000000:AF:00.0"), "0000:af:00.0");
    }
}
