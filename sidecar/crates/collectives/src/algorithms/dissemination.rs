//! Barrier by dissemination. D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", IJPP 17
//! (1988).
//!
//! A *token* is a transfer of an empty span. It notifies the receiver that the sender has arrived, and all members that the
//! sender knows of. In round `k` member `m` sends a token to `m + 2^k` and waits for one from `m - 2^k`. So after round `k` it
//! knows that the `2^(k+1)` members up to itself have arrived.
//!
//! Closed form: `ceil(log2 n)` rounds, one token sent by each member in each of them, 0 bytes.

use ronde_wire::Member;

use super::{Predicted, member};
use crate::inputs::Inputs;
use crate::plan::{Form, Layout, Plan, Register, Round, Span, Step, Transfer};

const TOKEN: Register = Register(0);
const RECEIVED: Register = Register(1);
const EMPTY: Span = Span { start: 0, len: 0 };

pub(crate) fn plan(me: Member, inputs: &Inputs<'_>) -> Plan {
    let members = inputs.members();
    let me = me.index();
    let mut rounds = Vec::new();
    for round in 0..depth(members) {
        let distance = 1 << round;
        let to = member((me + distance) % members);
        let from = member((me + members - distance) % members);
        let transfers = vec![
            Transfer::Send { to, from: TOKEN, span: EMPTY, form: Form::Values },
            Transfer::Receive { from, into: RECEIVED, span: EMPTY, form: Form::Values },
        ];
        let steps = if round == 0 { vec![Step::Contribute { into: TOKEN, span: EMPTY }] } else { Vec::new() };
        rounds.push(Round { steps, transfers });
    }
    let sub_schedules = inputs.sub_schedules(1, |_| rounds.clone());
    Plan { layout: Layout::default(), sub_schedules, window: inputs.window(), prelude: false }
}

pub(crate) fn predicted(inputs: &Inputs<'_>) -> Predicted {
    let members = inputs.members();
    Predicted { rounds: depth(members), longest_block: 1, chunk_transfers: depth(members), ..Predicted::idle(members) }
}

/// `ceil(log2 n)`. A token counts as one element when sub-schedules are counted: there is one sub-schedule.
fn depth(members: usize) -> u32 {
    members.next_power_of_two().ilog2()
}
