//! Conformance checks of reducers.

use ronde_collectives::kernels::add_products;

use super::values::{extremes, overflows};
use super::{Named, Problem, Subject, ensure};
use crate::determinism::values;
use crate::instance::{Instance, Span};
use crate::manifest::Shape;

/// The checks that apply to the reducer.
pub(super) fn checks(subject: &Subject<'_>) -> impl Iterator<Item = Named> + use<> {
    let commutative = subject.plugin.manifest().reducer.as_ref().is_some_and(|reducer| reducer.commutative);
    let all: [(bool, Named); 6] = [
        (true, ("lengths", lengths)),
        (true, ("extremes", extremes_pass)),
        (subject.dtype.is_float(), ("overflow", overflows_pass)),
        (true, ("cuts", cuts)),
        (commutative, ("order", order)),
        (true, ("ranks", all_ranks)),
    ];
    all.into_iter().filter(|(asked, _)| *asked).map(|(_, check)| check)
}

fn lengths(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    for ranks in ranks(subject) {
        for elements in [0, 1, 2, 63, 64, 65, 1_000, 100_000] {
            let reduced = reduce(subject, &mut instance, &ordinary(subject, ranks, elements));
            reduced.map_err(|problem| problem.during(format!("{elements} elements of {ranks} ranks")))?;
        }
    }
    Ok(())
}

fn extremes_pass(subject: &Subject<'_>) -> Result<(), Problem> {
    let edges = extremes(subject.dtype);
    every_pairing(subject, &edges.chunks(subject.dtype.size_bytes()).map(<[u8]>::to_vec).collect::<Vec<_>>())
}

fn overflows_pass(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut edges = overflows(subject.dtype);
    edges.push(values(subject.dtype, 1, 9));
    every_pairing(subject, &edges)
}

/// The first rank has one of the values, all others another one.
fn every_pairing(subject: &Subject<'_>, edges: &[Vec<u8>]) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    for ranks in ranks(subject) {
        for (one, first) in edges.iter().enumerate() {
            for (other, rest) in edges.iter().enumerate() {
                let operands = (0..ranks).map(|rank| if rank == 0 { first.repeat(70) } else { rest.repeat(70) });
                let reduced = reduce(subject, &mut instance, &operands.collect::<Vec<_>>());
                reduced.map_err(|problem| problem.during(format!("values {one} and {other} of {ranks} ranks")))?;
            }
        }
    }
    Ok(())
}

fn cuts(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let ranks = ranks(subject).next_back().unwrap_or(2);
    let elements = 5_000;
    let operands = ordinary(subject, ranks, elements);
    let measures = concluded(subject, &mut instance, &operands)?;
    let whole = reduce_with(subject, &mut instance, &operands, &measures, 0)?;
    for part in [1_usize, 64, 1_111, 4_096] {
        let mut joined = Vec::new();
        for start in (0..elements).step_by(part).take(PARTS) {
            let range = subject.bytes(start)..subject.bytes((start + part).min(elements));
            let operands: Vec<Vec<u8>> = operands.iter().map(|operand| operand[range.clone()].to_vec()).collect();
            joined.extend(reduce_with(subject, &mut instance, &operands, &measures, start as u64)?);
        }
        let differs = joined.iter().zip(&whole).position(|(joined, whole)| joined != whole);
        ensure(differs.is_none(), || {
            let element = differs.unwrap_or_default() / subject.dtype.size_bytes();
            format!(
                "element {element} of {elements} is another one when spans of {part} elements are reduced; element i of \
                 the output may depend on element i of the operands only"
            )
        })?;
    }
    Ok(())
}

fn order(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    for ranks in ranks(subject) {
        let mut operands = ordinary(subject, ranks, 1_000);
        let expected = reduce(subject, &mut instance, &operands)?;
        for _ in 0..ranks.min(5) {
            operands.rotate_left(1);
            let (first, second) = (0, ranks.min(2) - 1);
            operands.swap(first, second);
            ensure(reduce(subject, &mut instance, &operands)? == expected, || {
                format!("the manifest says commutative, but another order of {ranks} ranks gives other bits")
            })?;
        }
    }
    Ok(())
}

fn all_ranks(subject: &Subject<'_>) -> Result<(), Problem> {
    let mut instance = subject.instance()?;
    let max = if shape(subject) == Shape::Pairwise { 2 } else { subject.plugin.manifest().limits.ranks };
    for ranks in [max, max.saturating_sub(1).max(2).min(max)] {
        let reduced = reduce(subject, &mut instance, &ordinary(subject, ranks, 300));
        reduced.map_err(|problem| problem.during(format!("{ranks} ranks")))?;
    }
    Ok(())
}

/// Measures, concludes and reduces.
fn reduce(subject: &Subject<'_>, instance: &mut Instance, operands: &[Vec<u8>]) -> Result<Vec<u8>, Problem> {
    let measures = concluded(subject, instance, operands)?;
    reduce_with(subject, instance, operands, &measures, 0)
}

fn reduce_with(
    subject: &Subject<'_>,
    instance: &mut Instance,
    operands: &[Vec<u8>],
    measures: &[f64],
    offset: u64,
) -> Result<Vec<u8>, Problem> {
    let mut into = vec![0; operands[0].len()];
    let elements = (into.len() / subject.dtype.size_bytes()) as u64;
    let span = Span { offset, tensor_elements: offset + elements, ..subject.whole(0) };
    let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
    instance.reduce(&span, &operands, measures, &mut into)?;
    Ok(into)
}

/// Concludes from all ranks' values, as sidecars do.
fn concluded(subject: &Subject<'_>, instance: &mut Instance, operands: &[Vec<u8>]) -> Result<Vec<f64>, Problem> {
    let span = subject.whole(operands[0].len() / subject.dtype.size_bytes());
    let mut measures = match shape(subject) {
        Shape::Pairwise | Shape::Nary => return Ok(Vec::new()),
        Shape::TwoPass { measures } => {
            let mut all = vec![0.0; operands.len() * measures];
            for (operand, own) in operands.iter().zip(all.chunks_mut(measures)) {
                instance.measure(&span, operand, own)?;
            }
            all
        }
        Shape::Adaptive => {
            let mut gram = vec![0.0; operands.len() * (operands.len() + 1) / 2];
            let operands: Vec<&[u8]> = operands.iter().map(Vec::as_slice).collect();
            let measured = add_products(subject.dtype, &operands, &mut gram);
            measured.map_err(|_| Problem::new("the host measures inner products of floating-point types only"))?;
            gram
        }
    };
    instance.conclude(&span, operands.len(), &mut measures)?;
    Ok(measures)
}

fn ordinary(subject: &Subject<'_>, ranks: usize, elements: usize) -> Vec<Vec<u8>> {
    (0..ranks as u64).map(|rank| values(subject.dtype, elements, 20 + rank)).collect()
}

/// Numbers of ranks for which everything is tried.
fn ranks(subject: &Subject<'_>) -> impl DoubleEndedIterator<Item = usize> + use<> {
    let pairwise = shape(subject) == Shape::Pairwise;
    let max = subject.plugin.manifest().limits.ranks;
    [1, 2, 3, 5].into_iter().filter(move |ranks| if pairwise { *ranks == 2 } else { *ranks <= max })
}

fn shape(subject: &Subject<'_>) -> Shape {
    subject.plugin.manifest().reducer.as_ref().map_or(Shape::Nary, |reducer| reducer.shape)
}

/// Limit for the parts of a tensor that are reduced separately.
const PARTS: usize = 300;
