//! The hello of a port, the checks of a peer's hello, and the frames that each kind of link accepts.

use ronde_wire::control::{Hello, Purpose, Transport};
use ronde_wire::frame::{ChunkHeader, FrameHeader, PLANNER_VERSION, WIRE_VERSION, WIRE_VERSION_MIN};
use ronde_wire::{Frame, FrameKind, Incarnation, JobName, SidecarIndex};

/// The fields of a port's hello that do not follow from the build's versions or from the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalHello {
    /// The job.
    pub job: JobName,
    /// Distinguishes this process from earlier ones of the same sidecar.
    pub incarnation: Incarnation,
    /// What the port is for. Links for another purpose are rejected.
    pub purpose: Purpose,
    /// Bytes of early chunks, of operations that are not admitted yet, that this side buffers for each peer; 0 on
    /// control ports.
    pub early_credit_bytes: u64,
    /// Number of lanes that this side offers.
    pub lanes: u16,
    /// The membership in which this side takes part, until [`NetworkPort::enter`](crate::NetworkPort::enter).
    pub membership: u64,
}

impl LocalHello {
    /// The hello that `sidecar` sends.
    #[must_use]
    pub fn hello(&self, sidecar: SidecarIndex) -> Hello {
        Hello {
            wire_versions: (WIRE_VERSION_MIN, WIRE_VERSION),
            planner_version: PLANNER_VERSION,
            job: self.job.clone(),
            sidecar,
            incarnation: self.incarnation,
            purpose: self.purpose,
            early_credit_bytes: self.early_credit_bytes,
            lanes: self.lanes,
            transport: Transport::default(),
            replaces: false,
            membership: self.membership,
        }
    }
}

/// Returns why a port whose hello is `own` rejects the peer's hello, or `None` if it accepts it. `known` is the peer's
/// incarnation in earlier hellos; `has_link` says whether there is a link whose connection can be replaced.
pub(crate) fn refusal(
    own: &Hello,
    theirs: &Hello,
    authenticated: SidecarIndex,
    known: Option<Incarnation>,
    has_link: bool,
) -> Option<String> {
    if let Some(refusal) = theirs.refusal(&own.job, authenticated) {
        return Some(refusal.reason);
    }
    if theirs.transport != own.transport {
        return Some(format!(
            "{authenticated} is set to transport = {}, but {} to transport = {}; give all sidecars of the job the same",
            theirs.transport, own.sidecar, own.transport
        ));
    }
    if theirs.membership != own.membership {
        return Some(format!(
            "{authenticated} takes part in membership {} of the job, but {} in membership {}",
            theirs.membership, own.sidecar, own.membership
        ));
    }
    if theirs.purpose != own.purpose {
        return Some(format!("the connection is for {:?}, but this port serves {:?}", theirs.purpose, own.purpose));
    }
    match known {
        Some(known) if known != theirs.incarnation => Some(format!(
            "{authenticated} was {known} before and is {} now; a restarted sidecar gets a new index",
            theirs.incarnation
        )),
        _ if theirs.replaces && !has_link => Some(NO_LINK.to_owned()),
        _ => None,
    }
}

/// Checks by its header whether a frame may follow the hellos on a link for `purpose`.
pub(crate) fn check_kind(header: &FrameHeader, purpose: Purpose) -> Result<(), String> {
    let allowed = match header.kind {
        FrameKind::Hello | FrameKind::Refusal | FrameKind::Close => false,
        FrameKind::Control => purpose == Purpose::Control,
        FrameKind::Chunk | FrameKind::Stream => purpose != Purpose::Control,
        FrameKind::Admitted | FrameKind::Renew => true,
    };
    if allowed { Ok(()) } else { Err(format!("a {:?} frame does not belong on a link for {purpose:?}", header.kind)) }
}

/// Checks that a chunk belongs to the lane of its link. Frames of other kinds pass.
pub(crate) fn check_lane(frame: &Frame, purpose: Purpose) -> Result<(), String> {
    let (FrameKind::Chunk, Purpose::Data(lane)) = (frame.header.kind, purpose) else { return Ok(()) };
    let (chunk, _) = ChunkHeader::split(frame.payload.clone()).map_err(|error| error.to_string())?;
    if chunk.lane == lane { Ok(()) } else { Err(format!("a chunk of {} arrived on {lane}", chunk.lane)) }
}

/// The refusal of a replacement when there is no link to replace.
pub(crate) const NO_LINK: &str = "there is no link whose connection could be replaced";
