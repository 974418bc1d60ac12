//! Instances: running plugins that a thread uses for many calls.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ronde_plugin_abi::{Call, Kind, Stage, limits};
use ronde_wire::DType;
use sha2::{Digest as _, Sha256};

use crate::codec::{CodecFacts, Codecs};
use crate::copying::copy;
use crate::error::{Fault, FaultKind};
use crate::guest::Guest;
use crate::manifest::Parameters;
use crate::plugin::{Operation, Plugin};

/// The position of a call's elements within a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The element type.
    pub dtype: DType,
    /// Whether a contribution or a result is encoded.
    pub stage: Stage,
    /// The first element.
    pub offset: u64,
    /// Number of elements of the whole tensor.
    pub tensor_elements: u64,
    /// How often this tensor was reduced with this plugin before.
    pub round: u64,
    /// A number that identifies the tensor.
    pub tensor: u64,
}

/// A plugin that runs with given parameters. One thread at a time uses it, for many calls. After a fault, the next call
/// starts a new module.
pub struct Instance {
    plugin: Arc<Plugin>,
    parameters: Parameters,
    guest: Option<Guest>,
    codecs: Codecs,
    /// The operation that calls belong to.
    operation: Option<Operation>,
}

impl Instance {
    pub(crate) fn start(
        plugin: Arc<Plugin>,
        parameters: &Parameters,
        operation: Option<Operation>,
    ) -> Result<Self, Fault> {
        let guest = Some(plugin.start(parameters, operation)?);
        let codecs = Codecs::default();
        let mut instance = Self { plugin, parameters: parameters.clone(), guest, codecs, operation };
        if let Some(codec) = instance.plugin.manifest().codec.clone() {
            instance.codecs = instance.attempt(|guest| Codecs::query(guest, &codec))?;
        }
        Ok(instance)
    }

    /// The plugin that runs.
    #[must_use]
    pub fn plugin(&self) -> &Arc<Plugin> {
        &self.plugin
    }

    /// Sets the operation that the following calls belong to. Other instances may work on it too: all their failures
    /// count as one fault.
    pub fn work_on(&mut self, operation: Operation) {
        self.operation = Some(operation);
    }

    /// The parameters.
    #[must_use]
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// How tensors of a type are split for the codec. This depends on module and parameters only, so all sidecars
    /// agree.
    ///
    /// # Errors
    /// [`Fault`] if the plugin is not a codec or does not support the type.
    pub fn codec_facts(&self, dtype: DType) -> Result<CodecFacts, Fault> {
        let facts = match &self.plugin.manifest().codec {
            None => Err("it is a reducer, not a codec".to_owned()),
            Some(codec) if !codec.dtypes.contains(&dtype) => Err(unsupported_dtype("encodes", dtype, &codec.dtypes)),
            Some(_) => self.codecs.facts(dtype).ok_or_else(|| "its block is not known".to_owned()),
        };
        facts.map_err(|problem| self.refused(problem))
    }

    /// Runs `work` on the running module, or on a new one after a fault.
    pub(crate) fn attempt<T>(&mut self, work: impl FnOnce(&mut Guest) -> Result<T, FaultKind>) -> Result<T, Fault> {
        self.plugin.check_enabled().map_err(|kind| self.plugin.fault(self.operation, kind, Vec::new()))?;
        let guest = match &mut self.guest {
            Some(guest) => guest,
            none => none.insert(self.plugin.start(&self.parameters, self.operation)?),
        };
        guest.begin_attempt();
        let result = work(guest);
        let log = if guest.has_logged() { guest.take_log() } else { Vec::new() };
        match result {
            Ok(value) => {
                for message in &log {
                    tracing::debug!(plugin = %self.plugin.label(), "{message}");
                }
                Ok(value)
            }
            Err(kind) => {
                if !matches!(kind, FaultKind::Refused(_)) {
                    self.guest = None;
                }
                Err(self.plugin.fault(self.operation, kind, log))
            }
        }
    }

    /// A fault caused by the caller.
    pub(crate) fn refused(&self, problem: String) -> Fault {
        self.plugin.fault(self.operation, FaultKind::Refused(problem), Vec::new())
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Instance");
        debug.field("plugin", self.plugin.label()).field("parameters", &self.parameters).finish_non_exhaustive()
    }
}

impl Span {
    /// The number that identifies a tensor: the same on all ranks, and different for other tensors and sets.
    #[must_use]
    pub fn tensor_number(set: u32, name: &str) -> u64 {
        let digest: [u8; 32] = Sha256::new().chain_update(set.to_le_bytes()).chain_update(name).finalize().into();
        digest.iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// Builds the call for `elements` elements, after the first `skipped` ones of this span.
    pub(crate) fn call(&self, kind: Kind, skipped: usize, elements: usize) -> Result<Call, FaultKind> {
        let outside = || FaultKind::Refused(format!("{elements} elements do not lie within their tensor"));
        let offset = self.offset.checked_add(skipped as u64).ok_or_else(outside)?;
        let end = offset.checked_add(elements as u64).ok_or_else(outside)?;
        if end > self.tensor_elements {
            return Err(outside());
        }
        Ok(Call {
            kind: kind.number(),
            dtype: number(self.dtype),
            stage: self.stage.number(),
            elements: u32::try_from(elements).map_err(|_| outside())?,
            offset,
            tensor_elements: self.tensor_elements,
            round: self.round,
            tensor: self.tensor,
            ..Call::default()
        })
    }
}

/// The number of elements in `bytes` bytes, which must be whole.
pub(crate) fn elements(dtype: DType, bytes: usize) -> Result<usize, FaultKind> {
    let size = dtype.size_bytes();
    if bytes.is_multiple_of(size) {
        return Ok(bytes / size);
    }
    Err(FaultKind::Refused(format!("{bytes} bytes are not a whole number of {dtype} elements")))
}

/// Copies into the plugin's memory and clears the rest of the last cache line, so that nothing is left of an earlier
/// call.
pub(crate) fn fill(memory: &mut [u8], buffer: &Range<usize>, bytes: &[u8]) {
    let end = buffer.start + bytes.len();
    copy(&mut memory[buffer.start..end], bytes);
    clear_line(memory, buffer, end);
}

/// Clears the bytes from `end` to the end of its cache line, within a buffer.
pub(crate) fn clear_line(memory: &mut [u8], buffer: &Range<usize>, end: usize) {
    let line = end.next_multiple_of(limits::BUFFER_ALIGN).min(buffer.end);
    // Even an empty fill costs time: with 512-bit vectors the C library executes a masked store.
    if end < line {
        memory[end..line].fill(0);
    }
}

/// The problem text for an unsupported type.
pub(crate) fn unsupported_dtype(does: &str, dtype: DType, taken: &[DType]) -> String {
    let taken: Vec<&str> = taken.iter().map(|dtype| dtype.name()).collect();
    format!("it {does} {}, not {dtype}", taken.join(", "))
}

/// The number of a type in a call. Both tables have the same order, which a test checks.
fn number(dtype: DType) -> u32 {
    let place = DType::ALL.iter().position(|known| *known == dtype);
    place.and_then(|place| u32::try_from(place).ok()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_numbers_of_the_interface() {
        assert_eq!(DType::ALL.len(), ronde_plugin_abi::DType::ALL.len());
        for (ours, theirs) in DType::ALL.into_iter().zip(ronde_plugin_abi::DType::ALL) {
            assert_eq!(
                (number(ours), ours.name(), ours.size_bytes()),
                (theirs.number(), theirs.name(), theirs.size_bytes())
            );
        }
    }

    #[test]
    fn an_instance_moves_between_threads() {
        fn moves<T: Send>() {}
        moves::<Instance>();
    }

    /// The digest of four zeros and `a`, by `printf '\0\0\0\0a' | sha256sum`, begins with these bytes.
    #[test]
    fn tensors_have_numbers() {
        assert_eq!(Span::tensor_number(0, "a").to_le_bytes()[..4], [0x63, 0x58, 0xcc, 0xdd]);
        assert_ne!(Span::tensor_number(1, "a"), Span::tensor_number(0, "a"));
    }

    #[test]
    fn a_span_stays_within_its_tensor() {
        let span =
            Span { dtype: DType::F32, stage: Stage::Result, offset: 10, tensor_elements: 20, round: 3, tensor: 4 };
        let call = span.call(Kind::Encode, 4, 6).expect("the last six");
        assert_eq!((call.kind, call.dtype, call.stage), (1, 8, 1));
        assert_eq!((call.offset, call.elements, call.tensor_elements), (14, 6, 20));
        assert!(span.call(Kind::Encode, 4, 7).is_err());
        assert!(Span { offset: u64::MAX, ..span }.call(Kind::Encode, 1, 0).is_err());
    }
}
