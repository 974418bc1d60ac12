//! Pages of a job of four ranks on two sidecars, for tests.

use std::time::Duration;

use serde_json::json;

use super::model::{Model, Sample, View, update};
use super::page::Page;

/// The page of a sidecar, so many seconds after the first one.
pub(super) fn page(sidecar: u32, second: u64) -> Page {
    let peer = 1 - sidecar;
    let ranks = [sidecar * 2, sidecar * 2 + 1];
    let coordinates = sidecar == 0;
    let page = json!({
        "job": "night", "version": "0.2.0", "up_ms": 60_000 + second * 1_000, "transport": "auto",
        "traffic": {
            "sealed_bytes": second * 2_000_000_000, "opened_bytes": second * 1_500_000_000, "operations": second * 120,
            "contributed_bytes": second * 3_000_000_000_u64, "published_bytes": second * 3_000_000_000_u64,
        },
        "sessions": { "live": 2, "over_ring": 2 },
        "plugins": { "spans": second * 40, "faults": 0, "time_us": second * 250_000, "state_bytes": 4_000_000 },
        "paths": [{
            "peer": peer, "carrier": "QUIC", "data_carrier": "TLS over TCP", "address": format!("10.0.0.{}:7400", peer + 1),
            "sent_bytes": second * 2_000_000_000, "received_bytes": second * 1_500_000_000, "packets_lost": 3,
            "packets_sent": 900, "cipher": "TLS_AES_128_GCM_SHA256", "key_exchange": "X25519",
            "certificate": { "until": "2026-11-28 10:00 UTC" }, "peer_certificate": { "until": "2026-11-28 11:00 UTC" },
        }],
        "sidecar": sidecar, "coordinator": 0, "phase": "active", "epoch": 2, "world_size": 4,
        "placement": [0, 0, 1, 1], "ranks_in_epoch": ranks, "sets": 1, "pending": 2,
        "pending_requests": [
            { "rank": ranks[0], "name": "allreduce.layer4.weight", "collective": "ALLREDUCE", "ordered": false, "age_ms": 3_100 },
        ],
        "negotiating": u32::from(coordinates),
        "waiting_tensors": if coordinates { json!([
            { "name": "allreduce.layer4.weight", "collective": "ALLREDUCE", "missing": [3], "age_ms": 3_100 },
        ]) } else { json!([]) },
        "last_to_be_ready": if coordinates { json!([1, 0, 2, 40]) } else { json!([]) },
        "waited_for_us": if coordinates { json!([9_000, 0, 4_000, second * 400_000]) } else { json!([]) },
        "schedule": { "operations": 12, "tensors": 161, "steps": 40 }, "in_flight": 1,
        "links": [{ "peer": peer, "up": true, "round_trip_us": 120 }],
        "stats": {
            "tensors_executed": second * 1_600, "executed": second * 120, "epochs": 2, "ordered_operations": 1_000,
            "ordered_tensors": 13_000, "fused_tensors": 12_500, "failed": 1, "mismatches": 0,
        },
    });
    serde_json::from_value(page).expect("a page")
}

/// An answer at a port.
pub(super) fn answered(port: u16, page: Page) -> (String, Result<Box<Page>, String>) {
    (address(port), Ok(Box::new(page)))
}

fn address(port: u16) -> String {
    format!("127.0.0.1:{}", 41_000 + port)
}

/// Why a sidecar that was killed does not answer.
pub(super) fn lost(port: u16) -> String {
    format!("no sidecar answers at {}; it may have ended", address(port))
}

/// Both sidecars.
pub(super) fn sample(second: u64) -> Sample {
    Sample { answers: vec![answered(0, page(0, second)), answered(1, page(1, second))], ..Sample::default() }
}

/// All sidecars but one, which was killed.
pub(super) fn sample_without(second: u64, port: u16) -> Sample {
    let mut sample = sample(second);
    sample.answers[usize::from(port)].1 = Err(lost(port));
    sample
}

/// A view after two samples.
pub(super) fn model(view: View) -> Model {
    let mut model = Model::new(view, true);
    for second in [0, 1] {
        update(&mut model, sample(second), Duration::from_secs(second));
    }
    model
}
