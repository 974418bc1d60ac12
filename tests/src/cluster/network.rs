//! Hosts as network namespaces on one bridge, each with its own address. Needs root.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns};

/// A network of hosts; dropping it removes them.
#[derive(Debug)]
pub struct Network {
    prefix: String,
    hosts: u32,
    shape: Shape,
}

/// The network configuration of hosts.
#[derive(Clone, Debug, Default)]
pub struct Shape {
    /// The names of the links, by host; `v0`, `v1` and so on when absent.
    pub links: &'static [&'static str],
    /// Whether hosts have IPv6 addresses and no IPv4.
    pub ipv6: bool,
    /// Whether each host has a bridge `docker0` with the same address, and an interface `aux0` in a network without
    /// peers; both are up.
    pub dead_ends: bool,
}

impl Network {
    /// Makes hosts 0 to `hosts - 1`, connected by links with an MTU of 1,500 bytes.
    ///
    /// # Errors
    /// When this user lacks the permission, with what to do.
    pub fn up(hosts: u32) -> Result<Self> {
        Self::shaped(hosts, Shape::default())
    }

    /// The same with another configuration.
    ///
    /// # Errors
    /// As [`Self::up`].
    pub fn shaped(hosts: u32, shape: Shape) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("ronde{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let network = Self { prefix, hosts, shape };
        network.make().context(
            "tests with hosts of their own need root and iproute2 (`ip netns`); run them as root, or set RONDE_NO_NETNS=1 to leave them out",
        )?;
        Ok(network)
    }

    /// Returns whether the user has asked to skip tests with hosts, and prints so.
    #[must_use]
    pub fn is_left_out(test: &str) -> bool {
        let left_out = std::env::var_os("RONDE_NO_NETNS").is_some_and(|value| value == "1");
        if left_out {
            crate::left_out::note("netns", test, "RONDE_NO_NETNS=1");
        }
        left_out
    }

    /// The name of a host's namespace.
    #[must_use]
    pub fn host(&self, index: u32) -> String {
        format!("{}-h{index}", self.prefix)
    }

    /// A host's address.
    #[must_use]
    pub fn address(&self, index: u32) -> String {
        if self.shape.ipv6 { format!("fd77::{:x}", index + 1) } else { format!("10.77.0.{}", index + 1) }
    }

    /// The name of a host's link, inside its namespace.
    #[must_use]
    pub fn link(&self, index: u32) -> String {
        self.shape.links.get(index as usize).map_or_else(|| format!("v{index}"), |name| (*name).to_owned())
    }

    /// Blocks all outgoing UDP of a host.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn block_udp(&self, index: u32) -> Result<()> {
        ip(&["-n", &self.host(index), "rule", "add", "ipproto", "udp", "blackhole"])
    }

    /// Cuts a host's link, or restores it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_link(&self, index: u32, up: bool) -> Result<()> {
        // Cut at the switch's end: the host keeps its address and routes.
        ip(&["-n", &self.switch(), "link", "set", &format!("p{index}"), if up { "up" } else { "down" }])
    }

    /// Builds a command that runs on a host.
    #[must_use]
    pub fn command(&self, index: u32, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host(index), program]);
        command
    }

    /// Runs a closure on a separate thread whose sockets are the host's.
    ///
    /// The thread fails when it cannot enter the host, and with the error of `run`.
    pub fn run_on<T: Send + 'static>(
        &self,
        index: u32,
        run: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> JoinHandle<Result<T>> {
        let path = Path::new("/run/netns").join(self.host(index));
        std::thread::spawn(move || {
            let namespace = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
            setns(namespace, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")?;
            run()
        })
    }

    fn switch(&self) -> String {
        format!("{}-sw", self.prefix)
    }

    fn make(&self) -> Result<()> {
        let switch = self.switch();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", "br0", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "br0", "up"])?;
        for index in 0..self.hosts {
            let (host, link, port) = (self.host(index), self.link(index), format!("p{index}"));
            ip(&["netns", "add", &host])?;
            // Added first, because interfaces of real hosts are tried in this order.
            if self.shape.dead_ends {
                self.make_dead_ends(index)?;
            }
            ip(&["-n", &switch, "link", "add", &port, "type", "veth", "peer", "name", &link, "netns", &host])?;
            ip(&["-n", &switch, "link", "set", &port, "master", "br0", "up"])?;
            let prefix_length = if self.shape.ipv6 { 64 } else { 24 };
            // An IPv6 address is not usable during duplicate address detection.
            let no_search: &[&str] = if self.shape.ipv6 { &["nodad"] } else { &[] };
            let address = format!("{}/{prefix_length}", self.address(index));
            ip(&[&["-n", &host, "addr", "add", &address, "dev", &link], no_search].concat())?;
            ip(&["-n", &host, "link", "set", &link, "up"])?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }

    /// Packets into `aux0` arrive nowhere.
    fn make_dead_ends(&self, index: u32) -> Result<()> {
        let (host, switch, end) = (self.host(index), self.switch(), format!("aux{index}"));
        ip(&["-n", &host, "link", "add", "aux0", "type", "veth", "peer", "name", &end, "netns", &switch])?;
        ip(&["-n", &switch, "link", "set", &end, "up"])?;
        ip(&["-n", &host, "link", "add", "docker0", "type", "bridge"])?;
        for (name, address) in [("aux0", format!("10.99.0.{}/24", index + 1)), ("docker0", DOCKER.to_owned())] {
            ip(&["-n", &host, "addr", "add", &address, "dev", name])?;
            ip(&["-n", &host, "link", "set", name, "up"])?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in (0..self.hosts).map(|index| self.host(index)).chain([self.switch()]) {
            // Namespaces that were not created cannot be removed.
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

/// The bridge's default address.
const DOCKER: &str = "172.17.0.1/16";

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("`ip` cannot be started")?;
    ensure!(
        output.status.success(),
        "`ip {}`: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}
