//! The conformance checks that every plugin must pass, whatever it computes. `ronde plugin test` runs them.
//!
//! | check | requirement |
//! |---|---|
//! | bounds | a codec's bounds never decrease as elements increase, and repeated queries agree |
//! | lengths | works for no elements, one, partial cache lines, a whole block |
//! | places | works for both stages, spans far into a long tensor, late rounds |
//! | extremes | denormals, the largest and smallest numbers, and signed zeros cause no fault |
//! | overflow | NaN and infinity cause no fault, and a codec's decoder lets the receiver detect them |
//! | recovery | after all of these, a codec with a state decodes ordinary values to finite ones |
//! | any bytes | a codec decodes or rejects truncated, extended, changed and random bytes, without trapping |
//! | lossless, elementwise | a codec with this property restores the same bits; encodes elements independently |
//! | cuts | a reducer's result does not depend on where spans are split |
//! | order | a commutative reducer gives the same bits for every order of ranks |
//! | ranks | a reducer supports as many ranks as its manifest says |
//! | equal output | equal input gives equal output, on new and used instances, in any order |

mod codec;
mod reducer;
mod values;

use std::fmt;
use std::sync::Arc;

use ronde_plugin_abi::Stage;
use ronde_wire::DType;

use crate::determinism;
use crate::error::Fault;
use crate::instance::{Instance, Span};
use crate::manifest::Parameters;
use crate::plugin::Plugin;

/// The result of one check for one element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The name of the check.
    pub check: &'static str,
    /// The element type, for checks that concern one.
    pub dtype: Option<DType>,
    /// The problem, if the check failed.
    pub problem: Option<String>,
}

/// Runs all checks and reports each result. The host should not disable plugins, or one failure would make all later
/// checks fail.
pub fn run(plugin: &Arc<Plugin>, parameters: &Parameters, mut report: impl FnMut(Outcome)) {
    let manifest = plugin.manifest();
    let mut note = |check, dtype, result: Result<(), Problem>| {
        report(Outcome { check, dtype, problem: result.err().map(|problem| problem.0) });
    };
    for dtype in manifest.codec.iter().flat_map(|codec| codec.dtypes.clone()) {
        let subject = Subject { plugin, parameters, dtype };
        codec::checks(&subject).for_each(|(name, check)| note(name, Some(dtype), check(&subject)));
    }
    for dtype in manifest.reducer.iter().flat_map(|reducer| reducer.dtypes.clone()) {
        let subject = Subject { plugin, parameters, dtype };
        reducer::checks(&subject).for_each(|(name, check)| note(name, Some(dtype), check(&subject)));
    }
    let found = determinism::check(plugin, parameters).map_err(|finding| Problem(finding.to_string()));
    note("equal output", None, found);
}

/// A check, by name.
type Named = (&'static str, fn(&Subject<'_>) -> Result<(), Problem>);

/// The plugin under test.
struct Subject<'a> {
    plugin: &'a Arc<Plugin>,
    parameters: &'a Parameters,
    dtype: DType,
}

impl Subject<'_> {
    fn instance(&self) -> Result<Instance, Problem> {
        Ok(self.plugin.instance(self.parameters)?)
    }

    /// A span of a tensor that has no other elements.
    fn whole(&self, elements: usize) -> Span {
        Span {
            dtype: self.dtype,
            stage: Stage::Contribution,
            offset: 0,
            tensor_elements: elements as u64,
            round: 0,
            tensor: 1,
        }
    }

    fn bytes(&self, elements: usize) -> usize {
        elements * self.dtype.size_bytes()
    }
}

/// The text of a problem.
struct Problem(String);

impl Problem {
    fn new(text: impl fmt::Display) -> Self {
        Self(text.to_string())
    }

    /// What was being done.
    fn during(self, what: impl fmt::Display) -> Self {
        Self(format!("{what}: {}", self.0))
    }
}

impl From<Fault> for Problem {
    fn from(fault: Fault) -> Self {
        Self(fault.to_string())
    }
}

/// Fails with a text when something is not so.
fn ensure(holds: bool, text: impl FnOnce() -> String) -> Result<(), Problem> {
    if holds { Ok(()) } else { Err(Problem(text())) }
}
