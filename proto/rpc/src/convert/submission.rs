//! Conversion of submissions: the requested operation, and where its bytes are.

use bytes::Bytes;
use ronde_wire::{
    Call, Codec, Collective, DType, Group, PluginCall, Rank, Request, RequestId, SetId, Shape, TensorName, limits,
};

use super::collective::{self, collective_from, dtype_from};
use super::plugin;
use super::{ConvertError, printable};
use crate::v1;
use crate::v1::place::Place as PlaceKind;

/// A checked request of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// The worker's number of the request.
    pub request: RequestId,
    /// The operation. Type and shape are `uint8` and `[0]` for a rank without an input.
    pub what: Request,
    /// The requested plugin. The request names it once its module is known.
    pub plugin: Option<PluginCall>,
    /// Where the input is; its length matches type and shape. Without an input it is [`Place::None`], or empty inline
    /// bytes to request the result inside messages.
    pub place: Place,
    /// Where the result should be written; `None` leaves the choice to the sidecar.
    pub output: Option<OutputPlace>,
    /// The location in the worker's program that submitted the operation; truncated.
    pub site: Option<String>,
}

/// Where the bytes of a tensor are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a segment of shared memory.
    Arena {
        /// The segment's number within its session and direction.
        segment: u32,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// In a segment of device memory that the session has passed to the sidecar.
    Device {
        /// The segment's number among the session's segments of device memory.
        segment: u32,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// In the message itself; at most [`limits::INLINE_BYTES_MAX`] bytes in a submission.
    Inline(Bytes),
    /// Nowhere: the operation has no input, or the result was sent in parts.
    None,
}

/// Which memory a segment of a session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// Shared memory.
    Arena,
    /// Device memory.
    Device,
}

/// A range of a segment of the session to which a result should be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputPlace {
    /// The segment's memory.
    pub kind: SegmentKind,
    /// The segment's number within its session.
    pub segment: u32,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub bytes: u64,
}

/// A rejected submission, with what is needed to notify all other ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    /// The worker's number of the request.
    pub request: RequestId,
    /// The requested process set.
    pub set: SetId,
    /// The operation's name, if it is valid; without it other ranks cannot be notified.
    pub name: Option<TensorName>,
    /// The group of the operation's tensor, which continues without it.
    pub group: Option<Group>,
    /// The ranks of the process set that was to be formed by its members, as far as they are valid; empty for other
    /// requests.
    pub members: Vec<Rank>,
    /// The problem and its solution.
    pub reason: String,
}

impl Refused {
    /// The rejection of a parsed request.
    #[must_use]
    pub fn of(request: RequestId, what: Request, reason: String) -> Self {
        let Request { set, name, group, collective, .. } = what;
        let members = match collective {
            Collective::AddSetOfMembers { ranks } => ranks,
            _ => Vec::new(),
        };
        Self { request, set, name: Some(name), group, members, reason }
    }
}

impl Submission {
    /// Parses a message of the worker with rank `me`.
    ///
    /// # Errors
    /// [`Refused`] with the first problem.
    pub fn parse(message: v1::Submit, me: Rank) -> Result<Self, Refused> {
        let request = RequestId(message.request);
        let set = SetId(message.process_set);
        let name = TensorName::new(message.name.as_str());
        let known_name = name.as_ref().ok().cloned();
        let group = message.group.clone().and_then(|group| group_from(group).ok());
        let members = message.collective.as_ref().map(collective::members).unwrap_or_default();
        name.map_err(ConvertError::from).and_then(|name| parse_named(message, name, me)).map_err(|error| Refused {
            request,
            set,
            name: known_name,
            group,
            members,
            reason: error.to_string(),
        })
    }

    /// Checks a submission for a session without shared memory, whose bytes travel inside messages in both directions.
    ///
    /// # Errors
    /// [`Refused`] if the input or the result would be in shared memory.
    pub fn inline_only(self, me: Rank) -> Result<Self, Refused> {
        let in_memory = match &self.place {
            Place::Arena { .. } => Some("the input is in an arena"),
            Place::Device { .. } => Some("the input is in device memory"),
            _ if self.output.is_some() => Some("the output is in an arena"),
            Place::None if self.what.collective.has_result(me) => Some("a result without a place goes to an arena"),
            _ => None,
        };
        let Some(what) = in_memory else { return Ok(self) };
        let reason = format!(
            "{what}, in shared memory, which a session over gRPC-Web does not have; send the bytes inline, none where there is no input"
        );
        Err(Refused::of(self.request, self.what, reason))
    }

    /// Converts back to a message.
    #[must_use]
    pub fn into_message(self) -> v1::Submit {
        let Request { set, name, collective, dtype, shape, prescale, postscale, codec, group, .. } = self.what;
        v1::Submit {
            request: self.request.0,
            name: name.into(),
            process_set: set.0,
            collective: Some(collective.into()),
            dtype: v1::DType::from(dtype).into(),
            shape: shape.into(),
            prescale,
            postscale,
            input: self.place.into_message(),
            codec: if codec == Codec::Plugin { String::new() } else { codec.name().to_owned() },
            group: group.map(v1::Group::from),
            call_site: self.site,
            output: self.output.and_then(|output| Place::from(output).into_message()),
            plugin: self.plugin.map(v1::Plugin::from),
        }
    }
}

impl Place {
    /// Parses a message; an unset one is [`Place::None`].
    ///
    /// # Errors
    /// [`ConvertError::Device`] for device memory of an unknown kind, [`ConvertError::PlaceOverflow`], [`ConvertError::Inline`].
    pub fn parse(message: Option<v1::Place>) -> Result<Self, ConvertError> {
        match message.and_then(|m| m.place) {
            None => Ok(Self::None),
            Some(PlaceKind::Device(m)) if m.kind != DEVICE_KIND => {
                Err(ConvertError::Device { kind: printable(&m.kind) })
            }
            Some(PlaceKind::Device(m)) if m.offset.checked_add(m.bytes).is_none() => {
                Err(ConvertError::PlaceOverflow { offset: m.offset, bytes: m.bytes })
            }
            Some(PlaceKind::Device(m)) => Ok(Self::Device { segment: m.segment, offset: m.offset, bytes: m.bytes }),
            Some(PlaceKind::Inline(data)) if data.len() > limits::INLINE_BYTES_MAX => {
                Err(ConvertError::Inline { given: data.len() })
            }
            Some(PlaceKind::Inline(data)) => Ok(Self::Inline(data)),
            Some(PlaceKind::Arena(m)) if m.offset.checked_add(m.bytes).is_none() => {
                Err(ConvertError::PlaceOverflow { offset: m.offset, bytes: m.bytes })
            }
            Some(PlaceKind::Arena(m)) => Ok(Self::Arena { segment: m.segment, offset: m.offset, bytes: m.bytes }),
        }
    }

    /// Converts back to a message.
    #[must_use]
    pub fn into_message(self) -> Option<v1::Place> {
        let place = match self {
            Self::Arena { segment, offset, bytes } => PlaceKind::Arena(v1::place::Arena { segment, offset, bytes }),
            Self::Device { segment, offset, bytes } => {
                let kind = DEVICE_KIND.to_owned();
                PlaceKind::Device(v1::place::Device { kind, segment, offset, bytes, ..Default::default() })
            }
            Self::Inline(data) => PlaceKind::Inline(data),
            Self::None => return None,
        };
        Some(v1::Place { place: Some(place) })
    }

    /// The number of bytes; `None` for [`Place::None`].
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::Arena { bytes, .. } | Self::Device { bytes, .. } => Some(*bytes),
            Self::Inline(data) => Some(data.len() as u64),
            Self::None => None,
        }
    }
}

impl From<OutputPlace> for Place {
    fn from(OutputPlace { kind, segment, offset, bytes }: OutputPlace) -> Self {
        match kind {
            SegmentKind::Arena => Self::Arena { segment, offset, bytes },
            SegmentKind::Device => Self::Device { segment, offset, bytes },
        }
    }
}

impl OutputPlace {
    /// Whether the range overlaps another place.
    #[must_use]
    pub fn overlaps(&self, other: &Place) -> bool {
        let (kind, segment, offset, bytes) = match *other {
            Place::Arena { segment, offset, bytes } => (SegmentKind::Arena, segment, offset, bytes),
            Place::Device { segment, offset, bytes } => (SegmentKind::Device, segment, offset, bytes),
            Place::Inline(_) | Place::None => return false,
        };
        // Parsed ranges cannot overflow.
        (kind, segment) == (self.kind, self.segment)
            && offset < self.offset + self.bytes
            && self.offset < offset + bytes
    }

    fn parse(message: v1::Place, input: &Place, collective: &Collective, me: Rank) -> Result<Self, ConvertError> {
        let output = match Place::parse(Some(message))? {
            Place::Arena { segment, offset, bytes } => Self { kind: SegmentKind::Arena, segment, offset, bytes },
            Place::Device { segment, offset, bytes } => Self { kind: SegmentKind::Device, segment, offset, bytes },
            Place::Inline(_) | Place::None => {
                return Err(ConvertError::Output { what: "is in no segment; name an arena place" });
            }
        };
        let bytes = output.bytes;
        if matches!(input, Place::Inline(_)) {
            return Err(ConvertError::Output { what: "belongs to an inline request, whose result comes in messages" });
        }
        if !collective.has_result(me) {
            return Err(ConvertError::Output { what: "belongs to an operation that gives this rank no result" });
        }
        if bytes == 0 || output.overlaps(input) {
            return Err(ConvertError::Output { what: "has no bytes, or some of the input's" });
        }
        Ok(output)
    }
}

/// The kind of device memory that is supported: segments of CUDA's virtual memory management.
const DEVICE_KIND: &str = "cuda-vmm";

fn parse_named(message: v1::Submit, name: TensorName, me: Rank) -> Result<Submission, ConvertError> {
    let codec = Codec::from_name(&message.codec);
    let codec = codec.ok_or_else(|| ConvertError::Codec { codec: printable(&message.codec) })?;
    let collective = collective_from(message.collective)?;
    let plugin = message.plugin.map(plugin::plugin_from).transpose()?;
    let codec = plugin::codec(codec, &collective, plugin.is_some())?;
    let group = message.group.map(group_from).transpose()?;
    check_scale("prescale", message.prescale, &collective)?;
    check_scale("postscale", message.postscale, &collective)?;
    let place = Place::parse(message.input)?;
    let site = message.call_site.and_then(Call::fit_site);
    let output = message.output.map(|output| OutputPlace::parse(output, &place, &collective, me)).transpose()?;
    let (dtype, shape) = if collective.has_input(me) {
        let (dtype, shape) = (dtype_from(message.dtype)?, Shape::new(message.shape)?);
        check_place(dtype, &shape, &place)?;
        (dtype, shape)
    } else if place != Place::None && place != Place::Inline(Bytes::new()) {
        return Err(ConvertError::UnexpectedInput { collective: collective.name() });
    } else {
        (DType::U8, Shape::new(vec![0])?)
    };
    check_splits(&collective, &shape)?;
    let is_on_device =
        matches!(place, Place::Device { .. }) || output.is_some_and(|output| output.kind == SegmentKind::Device);
    if is_on_device && !matches!(collective, Collective::AllReduce { .. } | Collective::Broadcast { .. }) {
        return Err(ConvertError::DeviceCollective { collective: collective.name() });
    }
    let what = Request {
        set: SetId(message.process_set),
        name,
        collective,
        dtype,
        shape,
        prescale: message.prescale,
        postscale: message.postscale,
        codec,
        plugin: None,
        group,
    };
    Ok(Submission { request: RequestId(message.request), what, plugin, place, output, site })
}

/// Parses a group.
///
/// # Errors
/// [`ConvertError::Missing`] and [`ConvertError::TooLarge`] for its size, [`ConvertError::Name`].
pub fn group_from(message: v1::Group) -> Result<Group, ConvertError> {
    let (given, max) = (u64::from(message.size), limits::GROUP_TENSORS_MAX as u64);
    if given == 0 {
        return Err(ConvertError::Missing { field: "group size", hint: "a group has at least one tensor" });
    }
    if given > max {
        return Err(ConvertError::TooLarge { field: "group size", given, max });
    }
    Ok(Group { name: TensorName::new(message.name)?, size: message.size })
}

impl From<Group> for v1::Group {
    fn from(group: Group) -> Self {
        Self { name: group.name.into(), size: group.size }
    }
}

fn check_scale(field: &'static str, given: f64, collective: &Collective) -> Result<(), ConvertError> {
    if !given.is_finite() || given == 0.0 {
        return Err(ConvertError::Scale { field, given });
    }
    // Exactly 1 means "no scaling".
    if collective.reduce_op().is_none() && given.to_bits() != 1.0_f64.to_bits() {
        return Err(ConvertError::ScaleWithoutReduction { field, given, collective: collective.name() });
    }
    Ok(())
}

/// Checks that the length of the input matches type and shape.
fn check_place(dtype: DType, shape: &Shape, place: &Place) -> Result<(), ConvertError> {
    let wanted = shape.elements() * dtype.size_bytes() as u64;
    match place.bytes() {
        None => Err(ConvertError::Missing { field: "input", hint: "say where the tensor's bytes lie" }),
        Some(given) if given != wanted => Err(ConvertError::ByteLength { dtype, shape: shape.clone(), wanted, given }),
        Some(_) => Ok(()),
    }
}

fn check_splits(collective: &Collective, shape: &Shape) -> Result<(), ConvertError> {
    let Collective::AllToAll { splits } = collective else { return Ok(()) };
    let rows = shape.dimensions().first().copied().unwrap_or(1);
    let sum = splits.iter().try_fold(0_u64, |sum, split| sum.checked_add(*split));
    if splits.is_empty() || splits.len() > limits::RANKS_MAX || sum != Some(rows) {
        Err(ConvertError::Splits { rows })
    } else {
        Ok(())
    }
}
