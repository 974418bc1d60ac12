//! The UDP socket of a port: large buffers, and batches that the kernel accepts.

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

/// Binds a socket and requests the configured buffer sizes. Returns the size of the receive buffer that the system
/// granted, as the kernel accounts it.
pub(crate) fn bind(addr: SocketAddr, options: &SocketOptions) -> io::Result<(UdpSocket, usize)> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    // The forced variants need a privilege; the plain ones are limited by net.core.rmem_max and wmem_max.
    if setsockopt(&socket, sockopt::RcvBufForce, &options.receive_buffer_bytes).is_err() {
        socket.set_recv_buffer_size(options.receive_buffer_bytes)?;
    }
    if setsockopt(&socket, sockopt::SndBufForce, &options.send_buffer_bytes).is_err() {
        socket.set_send_buffer_size(options.send_buffer_bytes)?;
    }
    if addr.is_ipv6() && addr.ip().is_unspecified() {
        // Dual-stack, regardless of net.ipv6.bindv6only.
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

/// A socket that limits the size of batches. quinn passes up to ten datagrams of any size to one system call; the
/// kernel accepts 65,507 bytes at most and rejects the rest with an error that quinn ignores.
pub(super) struct BatchLimitedSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    /// Datagram size of the last batch, as an estimate for the next one.
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
        // This happens only just after the datagrams have grown. If sending would block, quinn repeats the whole batch;
        // QUIC ignores duplicates.
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

    /// One, because quinn multiplies its receive buffers by this number, and one buffer of 64 KiB holds any batch that
    /// the kernel delivers.
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

/// How many datagrams of a size fit one batch.
fn segments_max(segment_bytes: usize) -> usize {
    (BATCH_BYTES_MAX / segment_bytes.max(1)).clamp(1, SEGMENTS_MAX)
}

/// Limit for received batches, of up to 64 KiB each, in one system call. With quinn's 32, a port with a backlog
/// receives 2 MiB for every 180 KiB that it sends, so that one of two peers that send to each other starves. Measured
/// on loopback, in GB per second of processor time, both directions summed: 32: 1.0 (the slower direction has a fifth
/// of the faster); 8: 1.7; 4: 1.8; 2: 1.9 (both equal); 1: 2.0, but a quarter less in one direction alone.
const RECEIVE_MESSAGES_MAX: usize = 2;
/// The largest payload of an IPv4 UDP packet.
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
