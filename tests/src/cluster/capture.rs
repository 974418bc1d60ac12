//! Captures a host's link with tcpdump, as an eavesdropper would, and searches the capture.

use std::collections::HashSet;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::network::Network;
use super::process::Process;

/// A running capture of all packets of a host's link.
#[derive(Debug)]
pub struct Capture {
    process: Process,
    file: PathBuf,
    /// A socket of the captured host, connected to another one.
    towards_another: UdpSocket,
}

/// Packets that were captured.
#[derive(Debug, Default)]
pub struct Captured {
    /// Whole frames, one after the other.
    pub frames: Vec<Vec<u8>>,
}

impl Capture {
    /// Starts tcpdump and waits until it listens.
    ///
    /// # Errors
    /// When it does not, with what to do.
    pub fn start(network: &Network, host: u32, directory: &Path) -> Result<Self> {
        let file = directory.join(format!("capture-{host}.pcap"));
        let mut command = network.command(host, "tcpdump");
        // A large kernel buffer, so that nothing is lost on a busy machine; no address look-ups; no change of user.
        command.args(["-i", &network.link(host), "-s", "0", "-B", "262144", "-n", "-U", "-Z", "root", "-w"]).arg(&file);
        let mut process = Process::start("tcpdump", &mut command)?;
        let listens = |line: &super::Line| line.text.contains("listening on").then_some(());
        process
            .await_log("its start", super::PATIENCE, listens)
            .context("tcpdump is needed (Debian: apt-get install tcpdump)")?;
        let (here, there) = (network.address(host), network.address(u32::from(host == 0)));
        let socket = network.run_on(host, move || {
            let socket = UdpSocket::bind((here.as_str(), 0))?;
            socket.connect((there.as_str(), DISCARD_PORT))?;
            Ok(socket)
        });
        let towards_another = socket.join().expect("binding does not panic")?;
        Ok(Self { process, file, towards_another })
    }

    /// Ends the capture.
    ///
    /// # Errors
    /// When tcpdump fails or has lost packets, or its file cannot be read.
    pub fn finish(mut self) -> Result<Captured> {
        self.await_everything()?;
        self.process.signal(Signal::SIGINT)?;
        ensure!(self.process.await_exit(Duration::from_secs(30))?.success(), "tcpdump failed:\n{}", self.process.log());
        let lost = |line: &super::Line| line.text.strip_suffix(" packets dropped by kernel").map(str::to_owned);
        let lost = self.process.await_log("its counters", Duration::from_secs(5), lost)?;
        ensure!(lost == "0", "tcpdump has lost {lost} packets");
        let mut captured = Captured::parse(&std::fs::read(&self.file)?)?;
        let end = captured.frames.iter().position(|frame| is_in(frame, END_MARK)).context("the end mark is gone")?;
        captured.frames.truncate(end);
        Ok(captured)
    }

    /// Sends a packet after all others and waits until it is in the file: tcpdump drops what the kernel has not handed
    /// over yet when it ends, and the kernel hands packets out in blocks.
    fn await_everything(&mut self) -> Result<()> {
        let deadline = Instant::now() + super::PATIENCE;
        self.towards_another.send(END_MARK).context("cannot send the packet that ends a capture")?;
        loop {
            let written = std::fs::read(&self.file)?;
            // Few packets follow it.
            if is_in(&written[written.len().saturating_sub(END_BYTES)..], END_MARK) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "tcpdump did not write its last packet:\n{}", self.process.log());
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

fn is_in(bytes: &[u8], piece: &[u8]) -> bool {
    bytes.windows(piece.len()).any(|window| window == piece)
}

impl Captured {
    /// Reads the classic format of libpcap, little-endian, link type Ethernet.
    fn parse(file: &[u8]) -> Result<Self> {
        let number = |at: usize| -> Option<usize> {
            let bytes: [u8; 4] = file.get(at..at + 4)?.try_into().ok()?;
            usize::try_from(u32::from_le_bytes(bytes)).ok()
        };
        ensure!(number(0) == Some(0xA1B2_C3D4) && number(20) == Some(1), "not a capture of Ethernet frames");
        let mut frames = Vec::new();
        let mut at = FILE_HEADER_BYTES;
        while let Some(length) = number(at + 8) {
            at += PACKET_HEADER_BYTES;
            frames.push(file.get(at..at + length).context("the capture ends within a packet")?.to_vec());
            at += length;
        }
        Ok(Self { frames })
    }

    /// Counts the bytes that IPv4 packets carry after their UDP headers, and after their TCP headers.
    #[must_use]
    pub fn payload_bytes(&self) -> (u64, u64) {
        let of = |protocol| {
            let payloads = self.frames.iter().filter_map(|frame| payload(frame, protocol));
            payloads.map(|payload| payload.len() as u64).sum()
        };
        (of(UDP), of(TCP))
    }

    /// Counts the positions in all packets that contain one of the 16-byte pieces of `pattern`, repeated.
    #[must_use]
    pub fn places_of(&self, pattern: &[u8]) -> usize {
        let repeated: Vec<u8> = pattern.iter().chain(pattern).copied().collect();
        let pieces: HashSet<&[u8]> = repeated.windows(PIECE_BYTES).collect();
        self.frames
            .iter()
            .map(|frame| frame.windows(PIECE_BYTES).filter(|window| pieces.contains(window)).count())
            .sum()
    }
}

fn payload(frame: &[u8], protocol: u8) -> Option<&[u8]> {
    let ip = frame.get(ETHERNET_HEADER_BYTES..).filter(|_| frame.get(12..14) == Some(&[0x08, 0x00]))?;
    let packet = ip.get(usize::from(ip.first()? & 0x0F) * 4..).filter(|_| ip.get(9) == Some(&protocol))?;
    let header = if protocol == UDP { UDP_HEADER_BYTES } else { usize::from(packet.get(12)? >> 4) * 4 };
    packet.get(header..)
}

/// Content that no other packet has.
const END_MARK: &[u8] = b"the last packet of this capture";
const END_BYTES: usize = 1 << 20;
/// A port without a listener (RFC 863).
const DISCARD_PORT: u16 = 9;
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const FILE_HEADER_BYTES: usize = 24;
const PACKET_HEADER_BYTES: usize = 16;
const ETHERNET_HEADER_BYTES: usize = 14;
const UDP_HEADER_BYTES: usize = 8;
const UDP: u8 = 17;
const TCP: u8 = 6;
/// Chance does not produce so many equal bytes.
const PIECE_BYTES: usize = 16;
