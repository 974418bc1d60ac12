//! Hosts as network namespaces on one bridge, each with an address of its own. Needs root.

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
}

impl Network {
    /// Makes hosts 0 to `hosts - 1`, connected by links with an MTU of 1,500 bytes.
    ///
    /// # Errors
    /// When this user may not, with what to do.
    pub fn up(hosts: u32) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let prefix = format!("ronde{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let network = Self { prefix, hosts };
        network.make().context(
            "tests with hosts of their own need root and iproute2 (`ip netns`); run them as root, or set RONDE_NO_NETNS=1 to leave them out",
        )?;
        Ok(network)
    }

    /// Whether the user has asked to leave tests with hosts out; says so.
    #[must_use]
    pub fn is_left_out(test: &str) -> bool {
        let left_out = std::env::var_os("RONDE_NO_NETNS").is_some_and(|value| value == "1");
        if left_out {
            eprintln!("LEFT OUT: {test}, because RONDE_NO_NETNS=1");
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
        format!("10.77.0.{}", index + 1)
    }

    /// The name of a host's link, inside its namespace.
    #[must_use]
    pub fn link(&self, index: u32) -> String {
        format!("v{index}")
    }

    /// Cuts a host's link, or mends it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn set_link(&self, index: u32, up: bool) -> Result<()> {
        // The switch's end: the host keeps its address and routes.
        ip(&["-n", &self.switch(), "link", "set", &format!("p{index}"), if up { "up" } else { "down" }])
    }

    /// A command that runs on a host.
    #[must_use]
    pub fn command(&self, index: u32, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host(index), program]);
        command
    }

    /// Runs something on a thread of its own whose sockets are the host's.
    ///
    /// The thread fails when it cannot enter the host, and with what `run` fails with.
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
            ip(&["-n", &switch, "link", "add", &port, "type", "veth", "peer", "name", &link, "netns", &host])?;
            ip(&["-n", &switch, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &host, "addr", "add", &format!("{}/24", self.address(index)), "dev", &link])?;
            ip(&["-n", &host, "link", "set", &link, "up"])?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in (0..self.hosts).map(|index| self.host(index)).chain([self.switch()]) {
            // Those that were not made cannot be removed.
            let _ = Command::new("ip").args(["netns", "del", &name]).output();
        }
    }
}

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
