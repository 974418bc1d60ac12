//! The conformance list: what every plugin has to do whatever it computes, as `ronde plugin test` runs it.
//!
//! | check | what |
//! |---|---|
//! | bounds | of a codec: never fall as elements rise, and are the same when asked again |
//! | lengths | no elements, one, lines that are not full, a whole block |
//! | places | both stages, spans far into a long tensor, late rounds |
//! | extremes | denormals, the largest and smallest numbers, signed zeros: no fault |
//! | overflow | NaN and infinity: no fault, and a codec lets whoever decodes see that there were any |
//! | recovery | a codec with a state: behind all of these, ordinary values decode to finite ones |
//! | any bytes | a codec decodes cut off, extended, changed and random bytes, or refuses them; it never traps |
//! | lossless, elementwise | a codec that says so gives the same bits; encodes each element by itself |
//! | cuts | a reducer's result does not depend on where spans are cut |
//! | order | a reducer that says that it is commutative gives the same bits for every order of ranks |
//! | ranks | a reducer takes as many ranks as its manifest says |
//! | equal output | for equal input, on fresh and used instances, in any order |

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

/// One entry of the list, for one type of elements, with what came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Which one.
    pub check: &'static str,
    /// The type of elements, where the check is about one.
    pub dtype: Option<DType>,
    /// What is wrong, if anything is.
    pub problem: Option<String>,
}

/// Runs the list and reports each entry when it is done. The host should not disable plugins, so that one failure does not
/// become all others.
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

/// What a check is about.
struct Subject<'a> {
    plugin: &'a Arc<Plugin>,
    parameters: &'a Parameters,
    dtype: DType,
}

impl Subject<'_> {
    fn instance(&self) -> Result<Instance, Problem> {
        Ok(self.plugin.instance(self.parameters)?)
    }

    /// The first elements of a tensor that has no others.
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

/// What is wrong, for people.
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
