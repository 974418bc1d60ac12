//! Sends and receives one line of text with at most one descriptor over a Unix stream socket.
//!
//! Receiving uses the C structures directly: the safe wrappers do not close the descriptors of a truncated control
//! message, so that a hostile peer could exhaust this process's descriptors.

use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use crate::error::{ProtocolError, ShmError};

/// What was received.
#[derive(Debug)]
pub enum Received {
    /// A line without its newline, and the descriptor that came with it.
    Line {
        /// The text: printable ASCII.
        line: String,
        /// The descriptor, closed on exec.
        fd: Option<OwnedFd>,
    },
    /// The peer closed its end between two lines.
    Closed,
    /// The read timeout expired without a single byte.
    Idle,
}

/// Sends `line`, which must end in a newline, together with `fd`: both or neither.
///
/// Waits for room for at most the socket's write timeout.
///
/// # Errors
///
/// [`ShmError::TimedOut`], [`ShmError::PeerClosed`], [`ShmError::System`], and [`ShmError::Protocol`] for a line longer
/// than [`LINE_BYTES_MAX`], which the peer would reject.
pub fn send_with_fd(stream: &UnixStream, line: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), ShmError> {
    if line.len() > LINE_BYTES_MAX {
        return Err(ProtocolError::LineTooLong { limit: LINE_BYTES_MAX }.into());
    }
    let fds = fd.map(|fd| [fd.as_raw_fd()]);
    let rights = fds.as_ref().map(|fds| ControlMessage::ScmRights(fds));
    let text = [IoSlice::new(line)];
    loop {
        match sendmsg::<()>(stream.as_raw_fd(), &text, rights.as_slice(), MsgFlags::MSG_NOSIGNAL, None) {
            Ok(sent) if sent == line.len() => return Ok(()),
            // A line fits one kernel buffer, which accepts it completely or not at all.
            Ok(_) => return Err(ShmError::system("sendmsg", "mem.sock", io::Error::from(io::ErrorKind::WriteZero))),
            // Each retry handles one signal to this thread.
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => return Err(ShmError::TimedOut { waiting_for: "sending a line" }),
            Err(Errno::EPIPE | Errno::ECONNRESET) => {
                return Err(ShmError::PeerClosed { waiting_for: "sending a line" });
            }
            Err(errno) => return Err(ShmError::system("sendmsg", "mem.sock", errno)),
        }
    }
}

/// Receives one line and at most one descriptor.
///
/// Waits for at most the socket's read timeout for each of at most [`LINE_READS_MAX`] fragments. Without a read timeout
/// it waits as long as the peer lives; a nonblocking socket without data returns [`Received::Idle`].
///
/// # Errors
///
/// [`ShmError::Protocol`] for an invalid line or control data, [`ShmError::PeerClosed`] and [`ShmError::TimedOut`] for
/// an incomplete line, [`ShmError::System`]. All received descriptors are closed then; close the connection as well,
/// because its further contents are undefined.
pub fn recv_with_fd(stream: &UnixStream) -> Result<Received, ShmError> {
    let mut buffer = [0; LINE_BYTES_MAX];
    let mut filled = 0;
    let mut fds = Vec::new();
    for _ in 0..LINE_READS_MAX {
        let room = buffer.get_mut(filled..).unwrap_or_default();
        match receive_some(stream, room, &mut fds) {
            Ok(0) if filled == 0 && fds.is_empty() => return Ok(Received::Closed),
            Ok(0) => return Err(ShmError::PeerClosed { waiting_for: RECEIVING }),
            Ok(received) => filled += received,
            Err(ShmError::TimedOut { .. }) if filled == 0 => return Ok(Received::Idle),
            Err(error) => return Err(error),
        }
        let text = buffer.get(..filled).unwrap_or_default();
        if let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line = whole_line(text, end)?;
            return Ok(Received::Line { line, fd: at_most_one(fds)? });
        }
        if filled == LINE_BYTES_MAX {
            return Err(ProtocolError::LineTooLong { limit: LINE_BYTES_MAX }.into());
        }
    }
    Err(ProtocolError::LineFragmented { limit: LINE_READS_MAX }.into())
}

/// The line before the newline at `end`, which must be the last byte received.
fn whole_line(text: &[u8], end: usize) -> Result<String, ProtocolError> {
    if end + 1 != text.len() {
        return Err(ProtocolError::TrailingBytes);
    }
    let line = text.get(..end).unwrap_or_default();
    if !line.iter().all(|byte| matches!(byte, b' '..=b'~')) {
        return Err(ProtocolError::NotText);
    }
    String::from_utf8(line.to_vec()).map_err(|_| ProtocolError::NotText)
}

fn at_most_one(mut fds: Vec<OwnedFd>) -> Result<Option<OwnedFd>, ProtocolError> {
    let fd = fds.pop();
    if fds.is_empty() { Ok(fd) } else { Err(ProtocolError::TooManyDescriptors) }
}

/// Calls `recvmsg` once: bytes go to `room` and descriptors to `fds`, whose owner closes them in every case.
fn receive_some(stream: &UnixStream, room: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, ShmError> {
    let mut control = ControlBuffer::new();
    let mut bytes = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    let mut header = control.header(&mut bytes);
    let received = loop {
        // SAFETY: the header describes `room` and `control`, both borrowed mutably here and alive beyond the call.
        let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
        match usize::try_from(received) {
            Ok(received) => break received,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(ShmError::TimedOut { waiting_for: RECEIVING });
                }
                error if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(ShmError::PeerClosed { waiting_for: RECEIVING });
                }
                error => return Err(ShmError::system("recvmsg", "mem.sock", error)),
            },
        }
    };
    // SAFETY: recvmsg has just succeeded with this header, and its control buffer is alive.
    let only_rights = unsafe { take_descriptors(&header, fds) };
    if header.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(ProtocolError::ControlTruncated.into());
    }
    if !only_rights {
        return Err(ProtocolError::ControlKind.into());
    }
    Ok(received)
}

/// Takes ownership of all descriptors in the control data of `header`. Returns whether it contained nothing else.
///
/// # Safety
///
/// `recvmsg` has just succeeded with `header`, whose control buffer is still alive, and nobody has taken its descriptors.
unsafe fn take_descriptors(header: &libc::msghdr, fds: &mut Vec<OwnedFd>) -> bool {
    let mut only_rights = true;
    // SAFETY: the kernel has filled the control buffer with well-formed messages and set its length.
    let mut message = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !message.is_null() {
        // SAFETY: the CMSG functions return null or a whole header inside the control buffer, which is aligned for it.
        let (level, kind, length) = unsafe { ((*message).cmsg_level, (*message).cmsg_type, (*message).cmsg_len) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: CMSG_LEN computes on its argument alone; CMSG_DATA points to the bytes after the header, inside the buffer.
            let (data, prefix) = unsafe { (libc::CMSG_DATA(message), libc::CMSG_LEN(0) as usize) };
            let count = widen(length).saturating_sub(prefix) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: cmsg_len covers `count` descriptors from `data` on. They are new in this process, open, and ours:
                // the caller promises that this is the first time they are taken.
                fds.push(unsafe { OwnedFd::from_raw_fd(ptr::read_unaligned(data.cast::<RawFd>().add(index))) });
            }
        } else {
            only_rights = false;
        }
        // SAFETY: as for CMSG_FIRSTHDR; `message` is one of this header's.
        message = unsafe { libc::CMSG_NXTHDR(header, message) };
    }
    only_rights
}

/// The length of a control message is a `size_t` in one C library and a `socklen_t` in another.
fn widen<N: TryInto<usize>>(length: N) -> usize {
    length.try_into().unwrap_or(0)
}

/// Room for control data, aligned as its headers are.
#[repr(C)]
union ControlBuffer {
    bytes: [u8; CONTROL_BYTES],
    _alignment: [libc::cmsghdr; 0],
}

impl ControlBuffer {
    fn new() -> Self {
        Self { bytes: [0; CONTROL_BYTES] }
    }

    /// A message header for this buffer and `bytes`. It is valid while both live and do not move.
    fn header(&mut self, bytes: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: msghdr is a C structure of integers and pointers, for all of which zero is a value.
        let mut header: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        header.msg_iov = bytes;
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut *self).cast();
        header.msg_controllen = CONTROL_BYTES as _;
        header
    }
}

/// The longest line in bytes, including the newline. The longest request has 74 bytes.
pub const LINE_BYTES_MAX: usize = 256;

/// Limit for the fragments of a line. A line is sent by one call and normally arrives in one fragment.
pub const LINE_READS_MAX: usize = 8;

/// Room for a header and several descriptors, enough to detect too many; the kernel truncates and closes the rest.
const CONTROL_BYTES: usize = 64;

const RECEIVING: &str = "waiting for a line";

const _: () = assert!(CONTROL_BYTES >= size_of::<libc::cmsghdr>() + 2 * size_of::<RawFd>());
const _: () = assert!(CONTROL_BYTES.is_multiple_of(align_of::<libc::cmsghdr>()));
