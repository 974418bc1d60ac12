//! What a search has found, and the profile of it.

use std::path::Path;

use anyhow::Context;
use ronde_bootstrap::profile::{Cost, Profile};
use ronde_wire::control::Transport;
use serde_json::Value;

use super::log::{Row, Search};

/// What a job's report says about it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reported {
    /// The number of its sidecars.
    pub(super) sidecars: usize,
    /// Its cost model; `None` when it had too few operations of different sizes between sidecars.
    pub(super) cost: Option<Cost>,
}

impl Reported {
    /// Reads a report.
    ///
    /// # Errors
    /// When it cannot be read, or is not complete.
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let report: Value = serde_json::from_str(&text).context("the report is no JSON")?;
        let sidecars = report["sidecars"].as_array().context("the report names no sidecars")?;
        let cost = sidecars.iter().map(|sidecar| &sidecar["summary"]["cost"]).find(|cost| cost.is_object());
        let cost: Option<Cost> = cost.map(|cost| serde_json::from_value(cost.clone())).transpose()?;
        cost.as_ref().map_or(Ok(()), Cost::check)?;
        Ok(Self { sidecars: sidecars.len(), cost })
    }
}

/// The outcome of a search.
pub(super) struct Found {
    /// The transport between the sidecars; `None` in a job of one.
    transport: Option<Transport>,
    pub(super) search: Search,
    /// The cost model as measured.
    cost: Option<Cost>,
}

impl Found {
    pub(super) fn new(transport: Transport, search: Search, reported: &Reported) -> Self {
        let transport = Some(transport).filter(|_| reported.sidecars > 1);
        Self { transport, search, cost: reported.cost }
    }

    /// The name of the search.
    pub(super) fn name(&self) -> &'static str {
        self.transport.map_or("one sidecar", |transport| transport.as_str())
    }

    /// A line of the summary.
    pub(super) fn line(&self) -> String {
        let (name, search) = (self.name(), &self.search);
        let (score, gain, samples) = (search.outcome.score, search.gain(), search.samples.len());
        format!("{name}: {score:.1} MB/s, {gain:.2} times the start, after {samples} samples")
    }

    /// The settings that were found. `is_alpha_searched`: the search has changed alpha.
    pub(super) fn profile(&self, is_alpha_searched: bool) -> Profile {
        let found = &self.search.outcome;
        let has_peers = self.transport.is_some();
        Profile {
            fusion_threshold_bytes: Some(found.fusion_threshold_bytes),
            chunk_bytes: found.chunk_bytes,
            // Without a peer lanes are data threads, and the rest has no effect: it is not searched.
            lanes: Some(found.lanes).filter(|_| has_peers),
            local_lanes: Some(found.lanes).filter(|_| !has_peers),
            eager_bytes: Some(found.eager_bytes).filter(|_| has_peers),
            hierarchical_allreduce: Some(found.hierarchical_allreduce).filter(|_| has_peers),
            transport: self.transport.filter(|transport| *transport != Transport::Auto),
            cost: cost(found, self.cost, is_alpha_searched && has_peers),
        }
    }

    /// What is missing in the profile.
    pub(super) fn note(&self, is_alpha_searched: bool) -> Option<String> {
        let is_missing = self.transport.is_some() && self.cost.is_none();
        let written = if is_alpha_searched {
            "[cost] has the alpha that the search found, beside the costs of a byte that the job assumed"
        } else {
            "the profile has no [cost]"
        };
        is_missing.then(|| {
            format!(
                "Latency and bandwidth were not measured, because too few operations were performed alone: {written}. \
                 `ronde tune` without a command measures them."
            )
        })
    }
}

/// The cost model of a profile. Algorithms depend on alpha in relation to beta. The search's relation is the better one: it was
/// tried. Without a measurement the costs of a byte are those beside which it was tried.
fn cost(found: &Row, measured: Option<Cost>, is_alpha_searched: bool) -> Option<Cost> {
    let Row { alpha_us, beta_us_per_byte, gamma_us_per_byte, .. } = *found;
    if !is_alpha_searched {
        return measured;
    }
    let scaled = |cost: Cost| Cost { alpha_us: alpha_us * cost.beta_us_per_byte / beta_us_per_byte, ..cost };
    Some(measured.map_or(Cost { alpha_us, beta_us_per_byte, gamma_us_per_byte }, scaled))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUND: Row = Row {
        fusion_threshold_bytes: 1,
        chunk_bytes: None,
        lanes: 2,
        eager_bytes: 0,
        hierarchical_allreduce: true,
        alpha_us: 120.0,
        beta_us_per_byte: 1e-3,
        gamma_us_per_byte: 2e-4,
        score: 1.0,
    };

    fn found(transport: Transport, outcome: Row, sidecars: usize, cost: Option<Cost>) -> Found {
        Found::new(transport, Search { samples: vec![outcome], outcome }, &Reported { sidecars, cost })
    }

    #[test]
    fn a_profile_has_the_measured_model_in_which_a_search_changes_the_relation_of_alpha_to_beta() {
        let cost = Cost { alpha_us: 7.0, beta_us_per_byte: 5e-4, gamma_us_per_byte: 1e-4 };
        let of = |outcome, searched| found(Transport::Tls, outcome, 2, Some(cost)).profile(searched).cost;
        assert_eq!(of(FOUND, false), Some(cost));
        assert_eq!(of(FOUND, true), Some(Cost { alpha_us: 60.0, ..cost }));
        // The job had a beta of its own.
        assert_eq!(of(Row { beta_us_per_byte: 2e-3, ..FOUND }, true), Some(Cost { alpha_us: 30.0, ..cost }));
        assert_eq!(found(Transport::Tls, FOUND, 2, Some(cost)).note(true), None);
    }

    #[test]
    fn an_alpha_that_was_searched_is_not_lost_without_a_measurement() {
        let found = |sidecars| found(Transport::Tls, FOUND, sidecars, None);
        let tried = Cost { alpha_us: 120.0, beta_us_per_byte: 1e-3, gamma_us_per_byte: 2e-4 };
        assert_eq!((found(2).profile(true).cost, found(2).profile(false).cost), (Some(tried), None));
        let note = |searched| found(2).note(searched).expect("something is missing");
        assert!(note(true).contains("the alpha that the search found"), "{}", note(true));
        assert!(note(false).contains("the profile has no [cost]"), "{}", note(false));
        assert_eq!((found(1).profile(true).cost, found(1).note(true)), (None, None));
    }

    #[test]
    fn a_job_of_one_sidecar_gives_only_settings_that_have_an_effect_there() {
        let single = found(Transport::Tls, FOUND, 1, None);
        let expected = Profile { fusion_threshold_bytes: Some(1), local_lanes: Some(2), ..Profile::default() };
        assert_eq!((single.profile(true), single.name()), (expected, "one sidecar"));
        let several = found(Transport::Tls, FOUND, 2, None).profile(true);
        assert_eq!((several.transport, several.lanes, several.local_lanes), (Some(Transport::Tls), Some(2), None));
        assert_eq!((several.eager_bytes, several.hierarchical_allreduce), (Some(0), Some(true)));
        assert_eq!(found(Transport::Auto, FOUND, 2, None).profile(true).transport, None);
    }

    #[test]
    fn a_report_has_the_sidecars_and_the_cost_model_of_the_coordinator_or_none() {
        let file = tempfile::NamedTempFile::new().expect("a file can be made");
        let of = |text: &str| {
            std::fs::write(file.path(), text).expect("ours");
            Reported::read(file.path()).map_err(|error| format!("{error:#}"))
        };
        let cost = r#"{"alpha_us":30.0,"beta_us_per_byte":0.001,"gamma_us_per_byte":0.0001}"#;
        let found =
            of(&format!(r#"{{"sidecars":[{{"summary":{{}}}},{{"summary":{{"cost":{cost}}}}}]}}"#)).expect("good");
        assert_eq!((found.sidecars, found.cost.expect("measured").alpha_us), (2, 30.0));
        assert_eq!(of(r#"{"sidecars":[{"summary":null}]}"#), Ok(Reported { sidecars: 1, cost: None }));
        assert!(of("{").expect_err("no JSON").contains("no JSON"));
        assert!(of("{}").expect_err("no sidecars").contains("names no sidecars"));
        let negative = cost.replace("30.0", "-1.0");
        let error = of(&format!(r#"{{"sidecars":[{{"summary":{{"cost":{negative}}}}}]}}"#)).expect_err("negative");
        assert!(error.contains("alpha-us = -1 is out of range"), "{error}");
    }
}
