//! Ordered operations: admitted in order, completed in any order.

use std::sync::Arc;

use ronde_wire::control::Order;
use ronde_wire::{Cause, Control, Epoch, Failure, Seq, SetId};

use super::admission;
use super::{Participant, Phase, Running};
use crate::engine::shared::RequestKey;
use crate::engine::shared::context::Context;
use crate::event::{Action, Completion};
use crate::trace::Trace;

impl Participant {
    /// Handles an order of the coordinator.
    pub(crate) fn order(&mut self, cx: &mut Context, seq: Seq, order: &Order) {
        if !self.is_active() || self.broken {
            cx.stats.stale_frames += 1;
            return;
        }
        match self.admission(cx, seq, order) {
            Ok(running) => self.admit(cx, running),
            Err(reason) => {
                let reason = format!("{seq} of {} cannot be admitted: {reason}", self.epoch);
                let mut failure = Failure::new(Cause::Bug, reason);
                failure.tensor = order.tensors.first().map(|tensor| tensor.name.clone());
                self.fail(cx, seq, &failure);
            }
        }
    }

    /// Starts an operation.
    pub(super) fn admit(&mut self, cx: &mut Context, running: Running) {
        cx.stats.admitted += 1;
        if let Some(calibration) = &mut cx.calibration {
            let admission = &running.admission;
            let element_bytes = admission.arithmetic.dtype.size_bytes() as u64;
            // A schedule admits when the local ranks have submitted: such an operation may wait for ranks of other sidecars.
            let alone = self.admitted.is_empty() && !admission.scheduled;
            calibration.admitted(cx.now, admission.seq, &admission.plan, element_bytes, alone);
        }
        cx.act(Action::Admit(Arc::clone(&running.admission)));
        self.admitted.insert(running.admission.seq, running);
    }

    /// All lanes have performed an operation.
    pub(crate) fn executed(&mut self, cx: &mut Context, epoch: Epoch, seq: Seq) {
        let current = epoch == self.epoch && !self.is_idle();
        if current && (self.hold(seq) || self.await_commit(cx, seq)) {
            return;
        }
        let Some(running) = self.take_admitted(cx, epoch, seq) else { return };
        self.performed(cx, running);
        self.advance(cx);
    }

    /// Completes the requests of an operation, and reports it as done if this sidecar is its reporter.
    pub(super) fn performed(&mut self, cx: &mut Context, Running { admission, reports, .. }: Running) {
        let (epoch, seq) = (admission.epoch, admission.seq);
        cx.stats.executed += 1;
        if let Some(calibration) = &mut cx.calibration {
            calibration.performed(cx.now, seq);
        }
        cx.traces.note(|| Trace::Over { seq, dropped: false });
        cx.stats.tensors_executed += admission.tensors.len() as u64;
        if admission.topology.set == SetId::WORLD {
            let bytes = admission.plan.layout.elements.saturating_mul(admission.arithmetic.dtype.size_bytes() as u64);
            cx.tuner.performed(cx.now, admission.tensors.iter().map(|tensor| &tensor.name), bytes);
        }
        for (tensor, admitted) in (0..).zip(&admission.tensors) {
            for answered in &admitted.requests {
                let key = RequestKey { rank: answered.rank, request: answered.request };
                if self.requests.remove(key) {
                    let completion = Completion {
                        epoch,
                        seq,
                        tensor,
                        dtype: admission.arithmetic.dtype,
                        shape: answered.output.clone(),
                        own: admitted.own,
                        detail: answered.detail.clone(),
                    };
                    self.complete(cx, key, Ok(completion));
                }
            }
        }
        if reports && self.is_active() {
            self.to_coordinator(cx, seq, Control::Done);
        }
        self.conclude(cx);
    }

    /// An operation is over: releases removed sets, and ends the epoch if it waits for this.
    pub(super) fn conclude(&mut self, cx: &mut Context) {
        if self.is_active() {
            self.forget_sets(cx);
        }
        if let (Phase::Closing(failure), true) = (&self.phase, self.admitted.is_empty()) {
            let failure = failure.clone();
            self.end(cx, &failure);
        }
    }

    /// An admitted operation cannot be performed here.
    pub(crate) fn execution_failed(&mut self, cx: &mut Context, epoch: Epoch, seq: Seq, reason: &str) {
        if epoch != self.epoch || self.is_idle() || !self.admitted.contains_key(&seq) {
            cx.stats.stale_frames += 1;
            return;
        }
        let failure = Failure::new(Cause::Bug, format!("{seq} of {epoch} cannot be performed: {reason}"));
        self.fail(cx, seq, &failure);
    }

    fn admission(&mut self, cx: &mut Context, seq: Seq, order: &Order) -> Result<Running, String> {
        if seq <= self.last_seq {
            return Err(format!("it follows {}", self.last_seq));
        }
        let view = self.sets.view(cx, order.set).ok_or_else(|| format!("{} does not exist here", order.set))?;
        let view = match order.pair {
            None => view,
            Some(pair) => {
                let (from, to) = (pair.from, pair.to);
                let no_pair = || format!("{from} and {to} exchange no messages in {}", order.set);
                view.pair(cx.me(), pair).map(Arc::new).ok_or_else(no_pair)?
            }
        };
        let admission = admission::prepare(&view, &mut self.requests, self.epoch, seq, order)?;
        self.last_seq = seq;
        let reports = view.first_member() == cx.me() && !admission.is_eager() && admission.plugin.is_none();
        Ok(Running { admission: Arc::new(admission), reports, held: false, reported: false })
    }

    fn take_admitted(&mut self, cx: &mut Context, epoch: Epoch, seq: Seq) -> Option<Running> {
        let current = epoch == self.epoch && !self.is_idle();
        let running = if current { self.admitted.remove(&seq) } else { None };
        if running.is_none() {
            cx.stats.stale_frames += 1;
        }
        running
    }
}
