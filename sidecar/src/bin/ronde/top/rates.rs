//! What changes in a second, from two status pages of one sidecar.

use std::collections::BTreeMap;

use super::page::Page;

/// Rates between two pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Bytes encrypted, a second.
    pub(super) sealed: f64,
    /// Bytes decrypted, a second.
    pub(super) opened: f64,
    /// Operations, a second.
    pub(super) operations: f64,
    /// Tensors, a second.
    pub(super) tensors: f64,
    /// Bytes of local contributions, a second.
    pub(super) contributed: f64,
    /// Seconds of all lanes in plugins, a second.
    pub(super) in_plugins: f64,
    /// For each peer, the bytes sent and received, a second.
    pub(super) links: BTreeMap<u32, (f64, f64)>,
    /// For each rank, the share of the time for which the others waited for it. A wait counts when it is over, so that it may
    /// have begun before the first page: the share is 1 at most.
    pub(super) waited_for: Vec<f64>,
    /// For each rank of the sidecar, the same in steps that run by a schedule, among the ranks of the sidecar.
    pub(super) waited_here: BTreeMap<u32, f64>,
}

impl Rates {
    /// The rates between two pages; `None` if no time has passed on the sidecar's clock, or it was started again.
    pub(super) fn between(before: &Page, now: &Page) -> Option<Self> {
        let milliseconds = now.up_ms.checked_sub(before.up_ms).filter(|passed| *passed > 0)?;
        let seconds = number(milliseconds) / 1_000.0;
        let rate = |of: fn(&Page) -> u64| grown(of(before), of(now)) / seconds;
        let share = |before: u64, now: u64| (grown(before, now) / 1_000_000.0 / seconds).min(1.0);
        let link = |path: &super::page::Path| {
            let earlier = before.paths.iter().find(|other| other.peer == path.peer)?;
            let sent = grown(earlier.sent_bytes, path.sent_bytes) / seconds;
            Some((path.peer, (sent, grown(earlier.received_bytes, path.received_bytes) / seconds)))
        };
        let waited = now.waited_for_us.iter().enumerate().map(|(rank, us)| {
            let earlier = before.waited_for_us.get(rank).copied().unwrap_or_default();
            share(earlier, *us)
        });
        let earlier = &before.stats.waited_here_us;
        let waited_here = now
            .stats
            .waited_here_us
            .iter()
            .map(|(rank, us)| (*rank, share(earlier.get(rank).copied().unwrap_or_default(), *us)));
        Some(Self {
            sealed: rate(|page| page.traffic.sealed_bytes),
            opened: rate(|page| page.traffic.opened_bytes),
            operations: rate(|page| page.traffic.operations),
            tensors: rate(|page| page.stats.tensors_executed),
            contributed: rate(|page| page.traffic.contributed_bytes),
            in_plugins: rate(|page| page.plugins.time_us) / 1_000_000.0,
            links: now.paths.iter().filter_map(link).collect(),
            waited_for: waited.collect(),
            waited_here: waited_here.collect(),
        })
    }
}

/// How much a counter has grown. A connection that was made again counts from zero, and so does its rate.
fn grown(before: u64, now: u64) -> f64 {
    number(now.saturating_sub(before))
}

/// A number for a quotient that is shown with three digits.
#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
pub(super) fn number(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn page(up_ms: u64, bytes: u64, waited_us: u64) -> Page {
        let page = json!({
            "up_ms": up_ms, "traffic": { "sealed_bytes": bytes, "opened_bytes": bytes / 2, "operations": bytes / 100 },
            "stats": { "tensors_executed": bytes / 50, "waited_here_us": { "5": waited_us / 5 } }, "plugins": { "time_us": waited_us },
            "paths": [{ "peer": 1, "sent_bytes": bytes, "received_bytes": 7 }], "waited_for_us": [0, waited_us],
        });
        serde_json::from_value(page).expect("a page")
    }

    #[test]
    fn rates_are_differences_by_the_sidecars_clock() {
        let rates = Rates::between(&page(1_000, 0, 0), &page(3_000, 4_000, 500_000)).expect("2 s");
        assert_eq!((rates.sealed, rates.opened, rates.operations, rates.tensors), (2_000.0, 1_000.0, 20.0, 40.0));
        assert_eq!(rates.links, BTreeMap::from([(1, (2_000.0, 0.0))]));
        assert_eq!((rates.waited_for, rates.in_plugins), (vec![0.0, 0.25], 0.25));
        assert_eq!(rates.waited_here, BTreeMap::from([(5, 0.05)]));
    }

    #[test]
    fn a_wait_that_ends_in_the_interval_is_all_of_it_at_most() {
        let rates = Rates::between(&page(1_000, 0, 0), &page(2_000, 4_000, 10_000_000)).expect("1 s");
        assert_eq!((rates.waited_for, rates.waited_here), (vec![0.0, 1.0], BTreeMap::from([(5, 1.0)])));
    }

    #[test]
    fn a_sidecar_that_started_again_has_no_rates_and_a_connection_that_did_has_zero() {
        assert_eq!(Rates::between(&page(3_000, 9, 0), &page(3_000, 9, 0)), None);
        assert_eq!(Rates::between(&page(3_000, 9, 0), &page(10, 99, 0)), None);
        let rates = Rates::between(&page(1_000, 4_000, 9), &page(2_000, 100, 0)).expect("1 s");
        assert_eq!((rates.links[&1], rates.waited_for), ((0.0, 0.0), vec![0.0, 0.0]));
        let rates = Rates::between(&Page::default(), &page(1_000, 4_000, 0)).expect("1 s");
        assert!(rates.links.is_empty(), "a link that has just come up has no rate yet");
    }
}
