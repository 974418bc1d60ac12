//! Conformance checks of codecs.

use ronde_plugin_abi::Stage;

use super::values::{Random, extremes, is_overflow, overflows};
use super::{Named, Problem, Subject, ensure};
use crate::codec::CodecFacts;
use crate::determinism::values;
use crate::error::FaultKind;
use crate::instance::{Instance, Span};

/// The checks that apply to the codec and element type.
pub(super) fn checks(subject: &Subject<'_>) -> impl Iterator<Item = Named> + use<> {
    let codec = subject.plugin.manifest().codec.as_ref();
    let (lossless, elementwise) = codec.map_or((false, false), |codec| (codec.lossless, codec.elementwise));
    let state_bytes = codec.map_or(0, |codec| codec.state_bytes);
    let all: [(bool, Named); 9] = [
        (true, ("bounds", bounds)),
        (true, ("lengths", lengths)),
        (true, ("places", places)),
        (true, ("extremes", extremes_pass)),
        (subject.dtype.is_float(), ("overflow", overflow_stays_visible)),
        (subject.dtype.is_float() && state_bytes > 0, ("recovery", later_rounds_are_finite)),
        (true, ("any bytes", any_bytes)),
        (lossless, ("lossless", same_bits)),
        (elementwise, ("elementwise", each_by_itself)),
    ];
    all.into_iter().filter(|(asked, _)| *asked).map(|(_, check)| check)
}

fn bounds(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let block = instance.codec_facts(subject.dtype)?.block_elements;
    let steps = (0..=200).chain((200..block).step_by((block / 400).max(1))).chain([block]);
    let (mut last, mut last_elements) = (0, 0);
    for elements in steps.filter(|elements| *elements <= block) {
        let bound = instance.bound_of(subject.dtype, elements)?;
        ensure(bound >= last, || {
            format!("ronde_bound says {bound} bytes for {elements} elements, but {last} for {last_elements}")
        })?;
        let again = instance.bound_of(subject.dtype, elements)?;
        ensure(again == bound, || format!("ronde_bound says {bound} for {elements} elements, then {again}"))?;
        (last, last_elements) = (bound, elements);
    }
    Ok(())
}

fn lengths(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let mut encoded = Vec::new();
    for elements in [0, 1, 2, 7, 63, 64, 65, 127, 1_000, facts.block_elements - 1, facts.block_elements] {
        let elements = elements.min(facts.block_elements);
        let values = values(subject.dtype, elements, 3);
        let trip = trip(&mut instance, &facts, &subject.whole(elements), &values, &mut encoded);
        trip.map_err(|problem| problem.during(format!("{elements} elements")))?;
    }
    Ok(())
}

fn places(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let values = values(subject.dtype, 200.min(facts.block_elements), 4);
    let mut encoded = Vec::new();
    for stage in [Stage::Contribution, Stage::Result] {
        for (offset, round) in [(0, 0), (1 << 40, 1), ((1 << 60) - 64, u64::MAX)] {
            let span = Span { stage, offset, round, tensor_elements: 1 << 61, tensor: u64::MAX, ..subject.whole(0) };
            let trip = trip(&mut instance, &facts, &span, &values, &mut encoded);
            trip.map_err(|problem| problem.during(format!("stage {stage:?}, offset {offset}, round {round}")))?;
        }
    }
    Ok(())
}

fn extremes_pass(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let edges = extremes(subject.dtype);
    let mut encoded = Vec::new();
    // All of them together, each alone, and each repeated.
    let alone = edges.chunks(subject.dtype.size_bytes()).map(<[u8]>::to_vec);
    let rows = edges.chunks(subject.dtype.size_bytes()).map(|edge| edge.repeat(64));
    for values in [edges.clone()].into_iter().chain(alone).chain(rows) {
        let elements = values.len() / subject.dtype.size_bytes();
        let trip = trip(&mut instance, &facts, &subject.whole(elements), &values, &mut encoded);
        trip.map_err(|problem| problem.during(format!("values with the bytes {}", shown(&values))))?;
    }
    Ok(())
}

/// A gradient scaler must be able to detect an overflow anywhere in the block.
fn overflow_stays_visible(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let (size, elements) = (subject.dtype.size_bytes(), 1_000.min(facts.block_elements));
    let mut encoded = Vec::new();
    for special in overflows(subject.dtype) {
        for place in [0, 1, elements / 2, elements - 1] {
            let mut values = values(subject.dtype, elements, 6);
            values[place * size..(place + 1) * size].copy_from_slice(&special);
            let decoded = trip(&mut instance, &facts, &subject.whole(elements), &values, &mut encoded)?;
            ensure(decoded.chunks(size).any(|element| is_overflow(subject.dtype, element)), || {
                format!(
                    "element {place} of {elements} has the bytes {}, a NaN or infinity, but all decoded values are \
                     finite; let at least one be NaN, so that whoever decodes sees the overflow",
                    shown(&special)
                )
            })?;
        }
    }
    Ok(())
}

/// The state that a round leaves must not turn later ordinary values into infinities: neither after extreme values,
/// once or twice, nor after NaN and infinity.
fn later_rounds_are_finite(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let size = subject.dtype.size_bytes();
    let edges = extremes(subject.dtype);
    // The last two extreme values are 1 and -1.
    let ones = edges[edges.len() - 2 * size..].repeat(32);
    let overflows = overflows(subject.dtype);
    let rows = edges.chunks(size).chain(overflows.iter().map(Vec::as_slice)).map(|edge| edge.repeat(64));
    let all_edges = edges.iter().copied().cycle().take(ones.len()).collect();
    for edge in rows.chain([all_edges]) {
        for times in 1..=2 {
            let mut state = vec![0; 64 * facts.state_bytes_per_element];
            let (mut encoded, mut decoded) = (Vec::new(), vec![0; ones.len()]);
            for round in 0..times + 2 {
                let span = Span { round, ..subject.whole(64) };
                instance.encode(&span, if round < times { &edge } else { &ones }, &mut state, &mut encoded)?;
                instance.decode(&span, &encoded, &mut decoded)?;
                let overflow = decoded.chunks(size).any(|element| is_overflow(subject.dtype, element));
                ensure(round < times || !overflow, || {
                    format!(
                        "values of 1 and -1 decode to NaN or infinity in round {round}, after {times} rounds with values \
                         of the bytes {}; leave neither in the state, and send what is beyond the type in parts",
                        shown(&edge)
                    )
                })?;
            }
        }
    }
    Ok(())
}

/// Received bytes may be arbitrary. Returning an error code is allowed; trapping or exceeding the deadline is not.
fn any_bytes(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let mut random = Random(11);
    for elements in [0, 1, 64, 1_000.min(facts.block_elements)] {
        let (values, span) = (values(subject.dtype, elements, 5), subject.whole(elements));
        let mut encoded = Vec::new();
        let expected = trip(&mut instance, &facts, &span, &values, &mut encoded)?;
        let bound = instance.bound_of(subject.dtype, elements)?;
        for bytes in hostile(&mut random, &encoded, bound) {
            let mut decoded = vec![0; subject.bytes(elements)];
            if let Err(fault) = instance.decode(&span, &bytes, &mut decoded)
                && !matches!(fault.kind, FaultKind::Code { .. })
            {
                let what = format!("decoding {elements} elements from {} bytes {}", bytes.len(), shown(&bytes));
                return Err(Problem::from(fault).during(what));
            }
        }
        let mut decoded = vec![0; subject.bytes(elements)];
        instance.decode(&span, &encoded, &mut decoded)?;
        ensure(decoded == expected, || "after malformed bytes, the same bytes decode to other values".to_owned())?;
    }
    Ok(())
}

/// Truncated at up to [`CUTS`] lengths; extended up to the bound; with changed bytes; random.
fn hostile(random: &mut Random, encoded: &[u8], bound: usize) -> Vec<Vec<u8>> {
    let cuts = (0..encoded.len()).step_by((encoded.len() / CUTS).max(1));
    let mut all: Vec<Vec<u8>> = cuts.map(|length| encoded[..length].to_vec()).collect();
    for length in (encoded.len()..=bound).step_by((bound.saturating_sub(encoded.len()) / CUTS).max(1)) {
        all.push([encoded, &vec![0xff; length - encoded.len()]].concat());
    }
    for _ in 0..TRIES {
        let mut changed = encoded.to_vec();
        for _ in 0..=random.below(4) {
            let at = random.below(changed.len());
            if let Some(byte) = changed.get_mut(at) {
                *byte = random.byte();
            }
        }
        all.push(changed);
        let length = random.below(bound + 1);
        all.push(random.bytes(length));
        all.push(vec![0xff; length]);
        // The right length with random contents.
        all.push(random.bytes(encoded.len()));
    }
    all
}

fn same_bits(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let mut encoded = Vec::new();
    let edges = extremes(subject.dtype).into_iter().chain(overflows(subject.dtype).concat()).collect();
    for given in [values(subject.dtype, facts.block_elements, 7), edges] {
        let elements = given.len() / subject.dtype.size_bytes();
        let decoded = trip(&mut instance, &facts, &subject.whole(elements), &given, &mut encoded)?;
        let differs = decoded.iter().zip(&given).position(|(decoded, given)| decoded != given);
        ensure(differs.is_none(), || {
            let element = differs.unwrap_or_default() / subject.dtype.size_bytes();
            format!("the manifest says lossless, but element {element} of {elements} decodes to other bits")
        })?;
    }
    Ok(())
}

fn each_by_itself(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let facts = instance.codec_facts(subject.dtype)?;
    let elements = 600.min(facts.block_elements);
    let given = values(subject.dtype, elements, 8);
    let (mut whole, mut part, mut joined) = (Vec::new(), Vec::new(), Vec::new());
    let span = subject.whole(elements);
    trip(&mut instance, &facts, &span, &given, &mut whole)?;
    for (index, values) in given.chunks(subject.bytes(PART)).enumerate() {
        let span = Span { offset: (index * PART) as u64, ..span };
        trip(&mut instance, &facts, &span, values, &mut part)?;
        joined.extend_from_slice(&part);
    }
    ensure(whole == joined, || {
        format!(
            "the manifest says elementwise, but {elements} elements encode to other bytes than their parts of {PART}"
        )
    })
}

/// Encodes with a new state, decodes, and returns the decoded values.
fn trip(
    instance: &mut Instance,
    facts: &CodecFacts,
    span: &Span,
    values: &[u8],
    encoded: &mut Vec<u8>,
) -> Result<Vec<u8>, Problem> {
    let elements = values.len() / span.dtype.size_bytes();
    let mut state = vec![0; elements * facts.state_bytes_per_element];
    instance.encode(span, values, &mut state, encoded)?;
    let mut decoded = vec![0; values.len()];
    instance.decode(span, encoded, &mut decoded)?;
    Ok(decoded)
}

/// The first bytes in hexadecimal.
fn shown(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    if bytes.len() > 8 { format!("{digits}...") } else { digits }
}

/// Number of lengths at which encoded bytes are truncated.
const CUTS: usize = 100;
/// Number of sets of changed and random bytes.
const TRIES: usize = 100;
/// Elements of a part that is encoded separately.
const PART: usize = 200;
