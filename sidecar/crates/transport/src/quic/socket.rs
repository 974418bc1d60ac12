//! The UDP socket of a port: large buffers, and batches that the kernel takes.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use nix::sys::socket::{setsockopt, sockopt};
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use socket2::{Domain, Protocol, Socket, Type};

use crate::links::SocketOptions;

/// Binds a socket with buffers as large as asked for, or as large as the system lets them be; how large the one for
/// receiving is, in bytes as the system accounts them.
pub(crate) fn bind(addr: SocketAddr, options: &SocketOptions) -> io::Result<(UdpSocket, usize)> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    // Forced sizes need a privilege; without it the system's limit (net.core.rmem_max) cuts the plain request.
    if setsockopt(&socket, sockopt::RcvBufForce, &options.receive_buffer_bytes).is_err() {
        socket.set_recv_buffer_size(options.receive_buffer_bytes)?;
    }
    if setsockopt(&socket, sockopt::SndBufForce, &options.send_buffer_bytes).is_err() {
        socket.set_send_buffer_size(options.send_buffer_bytes)?;
    }
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        // The wildcard is for both families, whatever net.ipv6.bindv6only says.
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    let receive_buffer_bytes = socket.recv_buffer_size()?;
    if receive_buffer_bytes < options.receive_buffer_bytes {
        tracing::info!(
            granted = receive_buffer_bytes,
            wanted = options.receive_buffer_bytes,
            "the receive buffer is smaller than asked for; net.core.rmem_max limits it"
        );
    }
    Ok((UdpSocket::from(socket), receive_buffer_bytes))
}

/// The runtime's socket with batches that fit. Sending, quinn gives up to ten datagrams to one call whatever their size, and the
/// kernel takes 65,507 bytes at most, refusing the rest with an error that quinn swallows.
pub(super) struct BatchLimitedSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    /// The size of the datagrams in the last batch: what the next ones will have, or nearly.
    segment_bytes: AtomicUsize,
}

impl BatchLimitedSocket {
    pub(super) fn new(inner: Arc<dyn AsyncUdpSocket>) -> Self {
        Self { inner, segment_bytes: AtomicUsize::new(1) }
    }
}

impl AsyncUdpSocket for BatchLimitedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let Some(segment_bytes) = transmit.segment_size else { return self.inner.try_send(transmit) };
        self.segment_bytes.store(segment_bytes, Ordering::Relaxed);
        let batch_bytes = segments_max(segment_bytes) * segment_bytes;
        if transmit.contents.len() <= batch_bytes {
            return self.inner.try_send(transmit);
        }
        // Only when the datagrams have just grown. A batch that would block is given again whole: what was sent of it
        // arrives twice, which QUIC ignores.
        for contents in transmit.contents.chunks(batch_bytes) {
            let segment_size = (contents.len() > segment_bytes).then_some(segment_bytes);
            let Transmit { destination, ecn, src_ip, .. } = *transmit;
            self.inner.try_send(&Transmit { destination, ecn, contents, segment_size, src_ip })?;
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let messages = bufs.len().min(RECEIVE_MESSAGES_MAX);
        self.inner.poll_recv(cx, &mut bufs[..messages], &mut meta[..messages])
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        let limit = segments_max(self.segment_bytes.load(Ordering::Relaxed));
        self.inner.max_transmit_segments().min(limit)
    }

    /// One: quinn makes its receive buffers this many times as large as the largest datagram, which is 64 KiB here and
    /// thereby as large as any batch that the kernel delivers.
    fn max_receive_segments(&self) -> usize {
        1
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

impl fmt::Debug for BatchLimitedSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchLimitedSocket").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// How many datagrams of a size fit one call.
fn segments_max(segment_bytes: usize) -> usize {
    (BATCH_BYTES_MAX / segment_bytes.max(1)).clamp(1, SEGMENTS_MAX)
}

/// Kernel batches, of up to 64 KiB each, that one call takes. quinn's 32 let a port with a backlog receive 2 MiB for each
/// 180 KiB that it sends, so of two that send at once one starves: both ways on loopback, GB per second of processor
/// summed, and the slower direction's share of the faster: 32: 1.0, a fifth; 8: 1.7; 4: 1.8; 2: 1.9, even; 1: 2.0, but
/// one way loses a quarter.
const RECEIVE_MESSAGES_MAX: usize = 2;
/// What fits an IPv4 packet behind its headers.
const BATCH_BYTES_MAX: usize = 65_507;
/// UDP_MAX_SEGMENTS of Linux.
const SEGMENTS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_fits_a_packet() {
        for segment_bytes in [1, 1_200, 1_452, 6_500, 8_952, 32_753, 32_754, 65_507, 65_527] {
            let segments = segments_max(segment_bytes);
            assert!((1..=SEGMENTS_MAX).contains(&segments));
            assert!(segments == 1 || segments * segment_bytes <= BATCH_BYTES_MAX, "{segments} of {segment_bytes}");
        }
    }
}
