//! The planner: checks the inputs and calls the algorithm that the table names for them.

use ronde_wire::{Member, SetTopology, Tuning};

use crate::algorithms::{Entry, Predicted, find};
use crate::inputs::{Inputs, PlanError};
use crate::plan::{Plan, Work};

/// Returns one member's part of the schedule for a bucket.
///
/// This is a pure function. All members that pass the same topology, work and tuning get parts that fit together;
/// [`crate::digest_input`] lets them verify that they did. An element's order of reduction depends on topology, algorithm
/// and its tensor's element count only: not on chunk size, lanes, window or the other tensors of the bucket.
///
/// # Errors
/// [`PlanError`] when the inputs contradict each other or break a limit.
pub fn plan(me: Member, topology: &SetTopology, work: &Work, tuning: &Tuning) -> Result<Plan, PlanError> {
    let members = topology.len();
    if me.index() >= members {
        return Err(PlanError::Member { me, members });
    }
    let inputs = Inputs::new(topology, work, tuning)?;
    Ok((entry(&inputs)?.plan)(me, &inputs))
}

/// Returns what the algorithm's closed form predicts of the plans of all members: rounds, bytes sent and bytes reduced.
///
/// # Errors
/// [`PlanError`] when the inputs contradict each other or break a limit.
pub fn predicted(topology: &SetTopology, work: &Work, tuning: &Tuning) -> Result<Predicted, PlanError> {
    let inputs = Inputs::new(topology, work, tuning)?;
    Ok((entry(&inputs)?.predicted)(&inputs))
}

fn entry(inputs: &Inputs<'_>) -> Result<&'static Entry, PlanError> {
    let (algorithm, kind, members) = (inputs.tuning.algorithm, &inputs.work.kind, inputs.members());
    find(algorithm, kind, members).ok_or(PlanError::Combination { algorithm, kind: kind.name(), members })
}
