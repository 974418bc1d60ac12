//! What a port says of itself, what it makes of a peer's hello, and which frames it lets in.

use ronde_wire::control::{Hello, Purpose, Transport};
use ronde_wire::frame::{ChunkHeader, FrameHeader, PLANNER_VERSION, WIRE_VERSION, WIRE_VERSION_MIN};
use ronde_wire::{Frame, FrameKind, Incarnation, JobName, SidecarIndex};

/// What a port says in its hello, besides the versions of this build and the index in its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalHello {
    /// The job.
    pub job: JobName,
    /// Which life of this sidecar.
    pub incarnation: Incarnation,
    /// What the port is for; links of another purpose are refused.
    pub purpose: Purpose,
    /// Bytes of chunks for operations not yet admitted that this side holds for each peer; 0 on control ports.
    pub early_credit_bytes: u64,
    /// How many lanes this side offers.
    pub lanes: u16,
}

impl LocalHello {
    /// The hello that a sidecar says with it.
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
        }
    }
}

/// Why a port that says `own` does not accept a peer's hello; `known` is the peer's incarnation as seen before, and
/// `has_link` whether there is a link whose connection can be replaced.
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

/// Whether a frame may travel on a link of this purpose behind the hellos, judged by its header alone.
pub(crate) fn check_kind(header: &FrameHeader, purpose: Purpose) -> Result<(), String> {
    let allowed = match header.kind {
        FrameKind::Hello | FrameKind::Refusal | FrameKind::Close => false,
        FrameKind::Control => purpose == Purpose::Control,
        FrameKind::Chunk => purpose != Purpose::Control,
        FrameKind::Admitted | FrameKind::Renew => true,
    };
    if allowed { Ok(()) } else { Err(format!("a {:?} frame does not belong on a link for {purpose:?}", header.kind)) }
}

/// Whether a chunk belongs to the lane of its link; other kinds pass.
pub(crate) fn check_lane(frame: &Frame, purpose: Purpose) -> Result<(), String> {
    let (FrameKind::Chunk, Purpose::Data(lane)) = (frame.header.kind, purpose) else { return Ok(()) };
    let (chunk, _) = ChunkHeader::split(frame.payload.clone()).map_err(|error| error.to_string())?;
    if chunk.lane == lane { Ok(()) } else { Err(format!("a chunk of {} arrived on {lane}", chunk.lane)) }
}

/// What is answered to a replacement of nothing.
pub(crate) const NO_LINK: &str = "there is no link whose connection could be replaced";
