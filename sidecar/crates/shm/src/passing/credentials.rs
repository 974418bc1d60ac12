//! The credentials of a Unix socket's peer.

use std::os::unix::net::UnixStream;

use nix::sys::socket::{getsockopt, sockopt};

use crate::error::ShmError;

/// The peer's credentials at the time it connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Effective user id. The overflow uid (65534) if the peer's id is not mapped in this user namespace.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
    /// Process id; zero if the peer is not visible in this pid namespace. It proves nothing, because ids are reused.
    pub pid: i32,
}

/// Reads SO_PEERCRED of a connected stream.
///
/// # Errors
///
/// [`ShmError::System`].
pub fn peer_credentials(stream: &UnixStream) -> Result<Credentials, ShmError> {
    let credentials = getsockopt(stream, sockopt::PeerCredentials)
        .map_err(|errno| ShmError::system("reading SO_PEERCRED", "a Unix socket", errno))?;
    Ok(Credentials { uid: credentials.uid(), gid: credentials.gid(), pid: credentials.pid() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_of_sockets_sees_this_process() {
        let (here, _there) = UnixStream::pair().expect("sockets");
        let credentials = peer_credentials(&here).expect("credentials");
        assert_eq!(credentials.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(credentials.gid, nix::unistd::getegid().as_raw());
        assert_eq!(credentials.pid, nix::unistd::getpid().as_raw());
    }
}
