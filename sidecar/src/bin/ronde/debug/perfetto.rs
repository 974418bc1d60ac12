//! Draws merged records with the writer of timelines (docs/TIMELINE.md). Pure.

use std::collections::BTreeMap;

use ronde_bootstrap::flight::RequestRecord;
use ronde_rpc::v1;
use ronde_rpc::v1::timeline_event::{Event, Ordered, Over, Ready, Settled, Tensor};

use super::view::View;

/// An ordered operation, from the requests that it completed.
struct Operation<'a> {
    set: u32,
    collective: &'a str,
    tensors: Vec<&'a str>,
    ordered_us: u64,
    last_submitted_us: u64,
    ended_us: Option<u64>,
}

/// The contents of a timeline's file.
pub(super) fn timeline(view: &View<'_>) -> String {
    let mut events: Vec<(u64, Event)> = Vec::new();
    let mut operations: BTreeMap<(u64, u64), Operation<'_>> = BTreeMap::new();
    for (rank, of) in &view.ranks {
        for request in &of.requests.requests {
            let collective = request.collective.to_ascii_uppercase();
            let (name, process_set) = (request.name.clone(), request.set);
            events.push((
                request.submitted_us,
                Event::Ready(Ready { name: name.clone(), process_set, collective, rank: *rank }),
            ));
            match (&request.ordered, &request.ended) {
                (Some(ordered), _) => add(&mut operations, (request.epoch, ordered.seq), ordered.at_us, request),
                (None, Some(end)) => {
                    let (collective, failed) = (String::new(), end.failed.is_some());
                    events.push((end.at_us, Event::Settled(Settled { name, process_set, failed, collective })));
                }
                (None, None) => {}
            }
        }
    }
    for (seq, operation) in (1..).zip(operations.into_values()) {
        let tensors = operation.tensors.into_iter();
        let tensors = tensors.map(|name| Tensor { name: name.to_owned(), shape: Vec::new() }).collect();
        let (process_set, collective) = (operation.set, operation.collective.to_ascii_uppercase());
        let ordered = Ordered { seq, process_set, collective, dtype: 0, tensors, ahead: false };
        // Clocks of hosts may differ: no operation is ordered before its last rank submitted it, nor ends before its order.
        let ordered_us = operation.ordered_us.max(operation.last_submitted_us);
        events.push((ordered_us, Event::Ordered(ordered)));
        let ended_us = operation.ended_us.map(|at| at.max(ordered_us));
        events.extend(ended_us.map(|at| (at, Event::Over(Over { seq, dropped: false }))));
    }
    let began = events.iter().map(|(at, _)| *at).min().unwrap_or(0);
    events.sort_by_key(|(at, event)| (*at, order_of(event)));
    let event = |(at, event)| v1::TimelineEvent { at_us: at - began, event: Some(event) };
    ronde::timeline_text(began, v1::TimelineBatch { events: events.into_iter().map(event).collect(), dropped: 0 })
}

/// Adds a request to its operation. Sidecars order an operation at slightly different times: the first one counts, and the
/// last end.
fn add<'a>(
    operations: &mut BTreeMap<(u64, u64), Operation<'a>>,
    key: (u64, u64),
    ordered_us: u64,
    request: &'a RequestRecord,
) {
    let (set, collective) = (request.set, request.collective.as_str());
    let new = || Operation { set, collective, tensors: Vec::new(), ordered_us, last_submitted_us: 0, ended_us: None };
    let operation = operations.entry(key).or_insert_with(new);
    operation.ordered_us = operation.ordered_us.min(ordered_us);
    operation.last_submitted_us = operation.last_submitted_us.max(request.submitted_us);
    operation.ended_us = operation.ended_us.max(request.ended.as_ref().map(|end| end.at_us));
    if !operation.tensors.contains(&request.name.as_str()) {
        operation.tensors.push(&request.name);
    }
}

/// Events of one moment are in the order of an operation's life.
const fn order_of(event: &Event) -> u8 {
    match event {
        Event::Ready(_) => 0,
        Event::Ordered(_) => 1,
        _ => 2,
    }
}
