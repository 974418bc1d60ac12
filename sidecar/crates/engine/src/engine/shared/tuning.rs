//! Applies the values of a search to the settings of the coordinator.

use ronde_wire::TensorName;

use super::config::EngineConfig;
use super::context::Context;
use crate::autotune::{Autotune, AutotuneStatus, Bounds, Knobs};
use crate::event::{Action, Time};

/// The search of the coordinator, if it was asked for one; nothing elsewhere.
#[derive(Debug, Default)]
pub(crate) struct Tuner {
    autotune: Option<Autotune>,
    /// Bytes of a contribution up to which the coordinator orders it as eager; at most those that announcements carry.
    eager_bytes: Option<u32>,
    /// The settings before any search that mean something else, or nothing, on a single sidecar. A search leaves its values in
    /// the configuration, which are no start for the other kind of membership.
    given: Given,
}

#[derive(Clone, Copy, Debug, Default)]
struct Given {
    lanes_used_max: u16,
    threads_used_max: u16,
    hierarchical_allreduce: bool,
    alpha_us: f64,
}

impl Tuner {
    pub(crate) fn new(config: &EngineConfig, is_coordinator: bool) -> Self {
        let settings = config.autotune.clone().filter(|_| is_coordinator);
        let autotune = settings.map(|settings| Autotune::new(settings, knobs_of(config), bounds(config)));
        Self { autotune, eager_bytes: None, given: Given::of(config) }
    }

    /// The search in another membership, whose settings begin with its best values. Without one if another sidecar is the
    /// coordinator there.
    pub(crate) fn restarted(self, config: &mut EngineConfig) -> Self {
        let given = self.given;
        let Some(autotune) = self.autotune else {
            return Self { given, ..Self::new(config, is_coordinator(config)) };
        };
        given.restore(config);
        let autotune = autotune.restarted(bounds(config), &knobs_of(config));
        let mut tuner = Self { autotune: None, eager_bytes: self.eager_bytes, given };
        tuner.apply(config, autotune.knobs());
        tuner.autotune = is_coordinator(config).then_some(autotune);
        tuner
    }

    /// Records an operation that was performed here.
    pub(crate) fn performed<'a>(&mut self, now: Time, names: impl Iterator<Item = &'a TensorName>, bytes: u64) {
        if let Some(autotune) = &mut self.autotune {
            autotune.performed(now, names, bytes);
        }
    }

    /// An epoch has begun.
    pub(crate) fn restart_sample(&mut self) {
        if let Some(autotune) = &mut self.autotune {
            autotune.restart_sample();
        }
    }

    /// Bytes of a contribution up to which an operation is ordered as eager.
    pub(crate) fn eager_bytes(&self, config: &EngineConfig) -> u32 {
        self.eager_bytes.map_or(config.eager_bytes, |limit| limit.min(config.eager_bytes))
    }

    /// For status pages.
    pub(crate) fn status(&self) -> Option<AutotuneStatus> {
        self.autotune.as_ref().map(Autotune::status)
    }

    fn apply(&mut self, config: &mut EngineConfig, knobs: Knobs) {
        config.fusion_threshold_bytes = knobs.fusion_threshold_bytes;
        config.chunk_bytes = knobs.chunk_bytes;
        if is_single(config) {
            config.threads_used_max = knobs.lanes;
        } else {
            config.lanes_used_max = knobs.lanes;
        }
        config.hierarchical_allreduce = knobs.hierarchical_allreduce;
        config.cost.alpha_us = knobs.alpha_us;
        // Announcements carry contributions up to the limit of the epoch's begin.
        self.eager_bytes = Some(knobs.eager_bytes);
    }
}

impl Given {
    fn of(config: &EngineConfig) -> Self {
        Self {
            lanes_used_max: config.lanes_used_max,
            threads_used_max: config.threads_used_max,
            hierarchical_allreduce: config.hierarchical_allreduce,
            alpha_us: config.cost.alpha_us,
        }
    }

    fn restore(self, config: &mut EngineConfig) {
        config.lanes_used_max = self.lanes_used_max;
        config.threads_used_max = self.threads_used_max;
        config.hierarchical_allreduce = self.hierarchical_allreduce;
        config.cost.alpha_us = self.alpha_us;
    }
}

impl Context {
    /// Handles a complete sample of the search. Returns whether other values are in use now.
    pub(crate) fn tune(&mut self) -> bool {
        let Some(autotune) = &mut self.tuner.autotune else { return false };
        let before = autotune.knobs();
        let Some((sample, outcome)) = autotune.advance() else { return false };
        let knobs = autotune.knobs();
        for sample in [Some(sample), outcome].into_iter().flatten() {
            self.actions.push_back(Action::Autotuned(sample));
        }
        self.tuner.apply(&mut self.config, knobs);
        if let (true, Some(calibration)) = (knobs != before, &mut self.calibration) {
            calibration.restart();
        }
        knobs != before
    }
}

fn is_coordinator(config: &EngineConfig) -> bool {
    config.me == config.world.coordinator()
}

fn knobs_of(config: &EngineConfig) -> Knobs {
    Knobs {
        fusion_threshold_bytes: config.fusion_threshold_bytes,
        chunk_bytes: config.chunk_bytes,
        lanes: if is_single(config) {
            config.threads.min(config.threads_used_max)
        } else {
            config.lanes.min(config.lanes_used_max)
        },
        eager_bytes: config.eager_bytes,
        hierarchical_allreduce: config.hierarchical_allreduce,
        alpha_us: config.cost.alpha_us,
    }
}

fn is_single(config: &EngineConfig) -> bool {
    config.world.sidecars().len() == 1
}

fn bounds(config: &EngineConfig) -> Bounds {
    let is_single = is_single(config);
    let lanes = if is_single { config.threads } else { config.lanes };
    Bounds { lanes, is_single, eager_bytes: config.eager_bytes }
}

#[cfg(test)]
mod tests {
    use ronde_wire::{SidecarIndex, TuningParameter, World};

    use super::*;
    use crate::autotune::AutotuneSettings;

    /// A search between sidecars tries values when the membership changes to a single sidecar, and then back.
    #[test]
    fn a_value_that_a_search_was_trying_is_no_setting_of_a_later_membership() {
        let world = |sidecars: u32| World::new((0..sidecars).map(SidecarIndex).collect()).expect("a world");
        let autotune = Some(AutotuneSettings { parameters: vec![TuningParameter::Lanes], ..Default::default() });
        let several = EngineConfig {
            lanes: 4,
            threads: 8,
            threads_used_max: 6,
            autotune,
            ..EngineConfig::new(SidecarIndex(0), world(2))
        };
        let mut tuner = Tuner::new(&several, true);
        let mut config = several;
        let given = knobs_of(&config);
        let tried = Knobs { lanes: 1, hierarchical_allreduce: false, alpha_us: 7.5, eager_bytes: 64, ..given };
        tuner.apply(&mut config, tried);
        assert_eq!(config.lanes_used_max, 1);
        for (sidecars, lanes) in [(1, 6), (2, 4), (1, 6)] {
            config = EngineConfig { world: world(sidecars), ..config };
            tuner = tuner.restarted(&mut config);
            assert_eq!(knobs_of(&config), Knobs { lanes, ..given }, "{sidecars} sidecars");
            assert_eq!(tuner.eager_bytes(&config), given.eager_bytes, "{sidecars} sidecars");
            tuner.apply(&mut config, tried);
        }
    }

    #[test]
    fn lanes_between_sidecars_and_lanes_of_a_single_sidecar_are_different_settings() {
        let of = |sidecars: u32| {
            let world = World::new((0..sidecars).map(SidecarIndex).collect()).expect("a world");
            EngineConfig { lanes: 2, threads: 4, ..EngineConfig::new(SidecarIndex(0), world) }
        };
        for (sidecars, most, expected) in [(1, 4, (1, u16::MAX)), (2, 2, (u16::MAX, 1))] {
            let mut config = of(sidecars);
            assert_eq!((knobs_of(&config).lanes, bounds(&config).lanes), (most, most));
            let knobs = Knobs { lanes: 1, ..knobs_of(&config) };
            Tuner::default().apply(&mut config, knobs);
            assert_eq!((config.threads_used_max, config.lanes_used_max), expected, "{sidecars} sidecars");
        }
    }
}
