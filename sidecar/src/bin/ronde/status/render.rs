//! Renders a status page as text.

use std::fmt::Write;
use std::net::SocketAddr;

use ronde_wire::Failure;
use serde_json::Value;

/// Renders two status pages of the sidecar whose admin pages are at an address, taken `seconds` apart. Fields that another
/// version lacks are left out.
pub(super) fn render(address: SocketAddr, before: &Value, now: &Value, seconds: f64) -> String {
    let mut text = String::new();
    // A string cannot fail to be written to. Anything may serve at the port of a sidecar, and the text goes to a terminal.
    let mut line = |words: String| {
        let _ = writeln!(text, "{}", printable(&words));
    };
    line(head(now));
    line(format!("  page: http://{address}/"));
    let ranks = |name: &str| list(&now[name]);
    line(format!("  ranks here: {} in the epoch, {} wait for it", ranks("ranks_in_epoch"), ranks("ranks_waiting")));
    if let (Some(live), Some(ring)) = (now["sessions"]["live"].as_u64(), now["sessions"]["over_ring"].as_u64()) {
        line(format!("  workers attached: {live}, {ring} of them submit over a ring in shared memory"));
    }
    if let Some(words) = nccl(&now["nccl"]) {
        line(words);
    }
    if now["gpu"].is_object() {
        line(gpu(&now["gpu"]));
    }
    entries(&now["gpu_levels"]).for_each(|used| line(gpu_levels(used)));
    if has_entries(&now["ranks_missing"]) {
        line(format!("  not attached yet: ranks {}", ranks("ranks_missing")));
    }
    if has_entries(&now["suspect_ranks"]) || has_entries(&now["suspect_sidecars"]) {
        line(format!("  silent: ranks {}, sidecars {}", ranks("suspect_ranks"), ranks("suspect_sidecars")));
    }
    entries(&now["links"]).for_each(|link| link_lines(link, now).into_iter().for_each(&mut line));
    contributed(before, now, seconds).into_iter().for_each(&mut line);
    line(traffic(before, now, seconds));
    if let (Some(operations), Some(steps)) = (now["schedule"]["operations"].as_u64(), now["schedule"]["steps"].as_u64())
    {
        let tensors = now["schedule"]["tensors"].as_u64().unwrap_or_default();
        line(format!(
            "  runs ahead: {tensors} tensors in {operations} operations a step, {steps} steps without negotiation so far"
        ));
    }
    if now["autotune"].is_object() {
        line(autotune_line(&now["autotune"]));
    }
    entries(&now["waiting_tensors"]).for_each(|waiting| {
        let missing = list(&waiting["missing"]);
        line(format!(
            "  {} {} has waited {} for ranks {missing}",
            lower(&waiting["collective"]),
            word(&waiting["name"]),
            age(waiting)
        ));
    });
    // A schedule admits requests that ranks of other sidecars may not have submitted.
    let may_lack_ranks = |request: &&Value| request["ordered"] == false || request["scheduled"] == true;
    let waiting = entries(&now["pending_requests"]).filter(may_lack_ranks);
    waiting.take(PENDING_SHOWN_MAX).for_each(|request| {
        let (rank, name) = (&request["rank"], word(&request["name"]));
        line(format!("  rank {rank} has waited in {} {name} for {}", lower(&request["collective"]), age(request)));
    });
    if let Some(reason) = now["last_failure"]["reason"].as_str() {
        line(format!("  the last epoch ended: {reason}"));
    }
    text
}

fn gpu(gpu: &Value) -> String {
    if let Some(reason) = gpu["unavailable"].as_str() {
        return format!("  GPUs are not used, so workers copy their tensors: {reason}");
    }
    let number = |name: &str| gpu[name].as_u64().unwrap_or_default();
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    let imported = bytes(number("imported_bytes") as f64);
    format!(
        "  GPUs: {} with NCCL {}, {imported} of workers' memory; operations: {} by NCCL, {} in two levels, {} copied to the host",
        number("gpus"),
        word(&gpu["nccl"]),
        number("nccl_operations"),
        number("two_level_operations"),
        number("copied_operations")
    )
}

/// How a worker uses a GPU.
fn gpu_levels(used: &Value) -> String {
    let level = |level: &Value| {
        let number = |name: &str| level[name].as_u64().unwrap_or_default();
        #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
        let bytes = bytes(number("bytes") as f64);
        let levels = if number("level") == 2 { "two levels" } else { "one level" };
        format!("{levels}, {}: {} operations, {bytes}", word(&level["transport"]), number("operations"))
    };
    let levels: Vec<String> = entries(&used["levels"]).map(level).collect();
    format!("  GPU {} of rank {}: {}", word(&used["gpu"]), used["rank"], levels.join("; "))
}

fn head(now: &Value) -> String {
    let number = |name: &str| now[name].as_u64().unwrap_or_default();
    let role = if now["sidecar"] == now["coordinator"] { " (coordinator)" } else { "" };
    let version = now["version"].as_str().map(|version| format!(", ronde {version}")).unwrap_or_default();
    format!(
        "job {}: sidecar {}{role} of {} ranks, epoch {} {}, up {}{version}",
        now["job"].as_str().unwrap_or("?"),
        number("sidecar"),
        number("world_size"),
        number("epoch"),
        now["phase"].as_str().unwrap_or("?"),
        duration(number("up_ms"))
    )
}

/// The state of the search for better settings.
fn autotune_line(search: &Value) -> String {
    let number = |name: &str| search[name].as_u64().unwrap_or_default();
    let knobs = |of: &Value| {
        let chunk = of["chunk_bytes"].as_u64().map_or_else(|| "any".to_owned(), |bytes| bytes.to_string());
        let values = ["fusion_threshold_bytes", "lanes", "eager_bytes", "hierarchical_allreduce"].map(|name| &of[name]);
        let [threshold, lanes, eager, hierarchical] = values;
        let alpha = of["alpha_us"].as_f64().map(|alpha| format!(", alpha {alpha:.1} us")).unwrap_or_default();
        format!(
            "fusion threshold {threshold} bytes, chunk {chunk} bytes, lanes {lanes}, eager up to {eager} bytes, \
             hierarchical {hierarchical}{alpha}"
        )
    };
    let (best, stage) = (&search["best"], word(&search["stage"]));
    let gain = best["gain"].as_f64().map(|gain| format!("; {gain:.2} times the start")).unwrap_or_default();
    let samples = format!("{} of {} samples", number("samples"), number("samples_max"));
    match stage {
        "finished" => {
            format!("  autotune: finished after {} samples, {}{gain}", number("samples"), knobs(&search["knobs"]))
        }
        "warm_up" => format!("  autotune: warms up, {samples}"),
        _ if best.is_object() => format!("  autotune: {samples}, best so far {}{gain}", knobs(&best["knobs"])),
        _ => format!("  autotune: {samples}"),
    }
}

fn link_lines(link: &Value, now: &Value) -> Vec<String> {
    let peer = link["peer"].as_u64().unwrap_or_default();
    if link["up"] != true {
        return vec![format!("  link to sidecar {peer}: down")];
    }
    let mut text = format!("  link to sidecar {peer}: ");
    let mut certificates = None;
    if let Some(path) = entries(&now["paths"]).find(|path| path["peer"] == peer) {
        let (control, data) = (word(&path["carrier"]), word(&path["data_carrier"]));
        // A string cannot fail to be written to.
        let _ = match control == data {
            true => write!(text, "{control}"),
            false => write!(text, "{control} for control, {data} for data"),
        };
        let number = |name: &str| path[name].as_u64().unwrap_or_default();
        let (cipher, exchange) = (word(&path["cipher"]), word(&path["key_exchange"]));
        let until = |name: &str| word(&path[name]["until"]);
        let _ = write!(text, ", {cipher}, {exchange}");
        if let Some(address) = path["address"].as_str() {
            let _ = write!(text, ", at {address}");
        }
        if path["round_trip_us"].is_u64() {
            let (bytes, lost, sent) = (number("datagram_bytes"), number("packets_lost"), number("packets_sent"));
            let _ = write!(text, ", round trip {} us, datagrams of {bytes} bytes", number("round_trip_us"));
            let _ = write!(text, ", {lost} of {sent} packets lost");
        }
        let (own, of_peer) = (until("certificate"), until("peer_certificate"));
        certificates = Some(format!("    certificate until {own}, the peer's until {of_peer}"));
    }
    std::iter::once(text).chain(certificates).collect()
}

/// The row of NCCL's net plugin, if it was used.
fn nccl(streams: &Value) -> Option<String> {
    let number = |name: &str| streams[name].as_u64().unwrap_or_default();
    let (connections, sent, received) = (number("connections"), number("sent_bytes"), number("received_bytes"));
    if [connections, sent, received] == [0; 3] {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    let bytes = |count: u64| bytes(count as f64);
    Some(format!("  NCCL: {connections} connections, {} sent and {} received", bytes(sent), bytes(received)))
}

/// What the ranks of this sidecar have put into operations, also where nothing leaves the host.
fn contributed(before: &Value, now: &Value, seconds: f64) -> Option<String> {
    let name = "contributed_bytes";
    now["traffic"][name].as_u64()?;
    let (rate, all) = (rate(before, now, seconds, name), all(now, name));
    Some(format!("  contributed by the ranks here: {rate}/s; {all} so far"))
}

/// What this sidecar and others have sent each other.
fn traffic(before: &Value, now: &Value, seconds: f64) -> String {
    let rate = |name: &str| rate(before, now, seconds, name);
    let operations = total(now, "operations").saturating_sub(total(before, "operations"));
    format!(
        "  traffic: {}/s out, {}/s in, {operations} operations in {seconds:.1} s; {} out and {} in so far",
        rate("sealed_bytes"),
        rate("opened_bytes"),
        all(now, "sealed_bytes"),
        all(now, "opened_bytes")
    )
}

fn total(page: &Value, name: &str) -> u64 {
    page["traffic"][name].as_u64().unwrap_or_default()
}

fn rate(before: &Value, now: &Value, seconds: f64, name: &str) -> String {
    let grown = total(now, name).saturating_sub(total(before, name));
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    let per_second = grown as f64 / seconds.max(f64::EPSILON);
    bytes(per_second)
}

#[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
fn all(page: &Value, name: &str) -> String {
    bytes(total(page, name) as f64)
}

/// Formats three digits and a unit.
pub(crate) fn bytes(count: f64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut scaled = count;
    let mut unit = 0;
    while scaled >= 999.5 && unit + 1 < units.len() {
        scaled /= 1_000.0;
        unit += 1;
    }
    let digits = if unit == 0 || scaled >= 99.95 { 0 } else { 1 };
    format!("{scaled:.digits$} {}", units[unit])
}

fn age(entry: &Value) -> String {
    duration(entry["age_ms"].as_u64().unwrap_or_default())
}

/// Formats a time in words.
pub(crate) fn duration(milliseconds: u64) -> String {
    let seconds = milliseconds / 1_000;
    match seconds {
        0 => format!("{milliseconds} ms"),
        1..=119 => format!("{seconds} s"),
        120..=7_199 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3_600),
    }
}

fn entries(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

fn has_entries(list: &Value) -> bool {
    entries(list).next().is_some()
}

fn list(numbers: &Value) -> String {
    let numbers: Vec<String> = entries(numbers).map(ToString::to_string).collect();
    if numbers.is_empty() { "none".to_owned() } else { numbers.join(" ") }
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

fn lower(value: &Value) -> String {
    word(value).to_ascii_lowercase()
}

/// A line without characters that move the cursor, end the line or change the writing direction, whatever its length.
fn printable(line: &str) -> String {
    let mut shown = String::with_capacity(line.len());
    let mut bytes = [0; 4];
    line.chars().for_each(|c| match c {
        ' '..='~' => shown.push(c),
        other => shown.push_str(&Failure::line(other.encode_utf8(&mut bytes))),
    });
    shown
}

const PENDING_SHOWN_MAX: usize = 10;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The pages of a sidecar on this host.
    fn render(before: &Value, now: &Value, seconds: f64) -> String {
        super::render(SocketAddr::from(([127, 0, 0, 1], 41_234)), before, now, seconds)
    }

    #[test]
    fn a_status_page_is_rendered_as_lines_of_text() {
        let mut now = json!({
            "job": "night", "version": "0.1.0", "sidecar": 0, "coordinator": 0, "world_size": 4, "epoch": 2,
            "phase": "active", "up_ms": 125_000, "ranks_in_epoch": [0, 1], "ranks_waiting": [], "ranks_missing": [],
            "suspect_ranks": [3], "suspect_sidecars": [1], "transport": "auto",
            "links": [{ "peer": 1, "up": true }, { "peer": 2, "up": false }],
            "paths": [{ "peer": 1, "carrier": "QUIC", "data_carrier": "TLS over TCP", "address": "10.0.1.2:7400", "round_trip_us": 120, "datagram_bytes": 1452, "packets_lost": 1, "packets_sent": 9,
                "cipher": "TLS_X", "key_exchange": "KX", "certificate": { "serial": "01", "until": "then" },
                "peer_certificate": { "serial": "02", "until": "later" } }],
            "nccl": { "connections": 4, "sent_bytes": 2_000_000, "received_bytes": 500 },
            "gpu": { "gpus": 2, "nccl": "2.23.4", "imported_bytes": 64_000_000, "nccl_operations": 7,
                "two_level_operations": 120, "copied_operations": 3 },
            "gpu_levels": [{ "rank": 1, "gpu": "0000:02:00.0", "levels": [
                { "level": 1, "transport": "host memory", "operations": 3, "bytes": 1_500 },
                { "level": 2, "transport": "NCCL 2.23.4 within the host", "operations": 9, "bytes": 4_000_000 },
            ] }],
            "schedule": { "number": 1, "operations": 12, "tensors": 161, "steps": 40 },
            "waiting_tensors": [{ "name": "allreduce.w", "collective": "ALLREDUCE", "missing": [2, 3], "age_ms": 3_100 }],
            "pending_requests": [
                { "rank": 1, "name": "allreduce.w", "collective": "ALLREDUCE", "ordered": false, "age_ms": 900 },
                { "rank": 0, "name": "allreduce.v", "collective": "ALLREDUCE", "ordered": true, "age_ms": 900 },
            ],
            "last_failure": { "reason": "rank 3 is gone" },
            "traffic": { "sealed_bytes": 1_000, "opened_bytes": 0, "operations": 1, "contributed_bytes": 0 },
        });
        let before = now.clone();
        now["traffic"] = json!({ "sealed_bytes": 5_001_000, "opened_bytes": 4_000, "operations": 8, "contributed_bytes": 6_000_000 });
        let expected = "\
job night: sidecar 0 (coordinator) of 4 ranks, epoch 2 active, up 2 min, ronde 0.1.0
  page: http://127.0.0.1:41234/
  ranks here: 0 1 in the epoch, none wait for it
  NCCL: 4 connections, 2.0 MB sent and 500 B received
  GPUs: 2 with NCCL 2.23.4, 64.0 MB of workers' memory; operations: 7 by NCCL, 120 in two levels, 3 copied to the host
  GPU 0000:02:00.0 of rank 1: one level, host memory: 3 operations, 1.5 kB; two levels, NCCL 2.23.4 within the host: 9 operations, 4.0 MB
  silent: ranks 3, sidecars 1
  link to sidecar 1: QUIC for control, TLS over TCP for data, TLS_X, KX, at 10.0.1.2:7400, round trip 120 us, datagrams of 1452 bytes, 1 of 9 packets lost
    certificate until then, the peer's until later
  link to sidecar 2: down
  contributed by the ranks here: 3.0 MB/s; 6.0 MB so far
  traffic: 2.5 MB/s out, 2.0 kB/s in, 7 operations in 2.0 s; 5.0 MB out and 4.0 kB in so far
  runs ahead: 161 tensors in 12 operations a step, 40 steps without negotiation so far
  allreduce allreduce.w has waited 3 s for ranks 2 3
  rank 1 has waited in allreduce allreduce.w for 900 ms
  the last epoch ended: rank 3 is gone
";
        assert_eq!(render(&before, &now, 2.0), expected);
    }

    #[test]
    fn a_page_of_another_version_does_not_make_it_panic() {
        for page in
            [json!(null), json!({}), json!([1]), json!({ "links": 3, "traffic": [], "paths": [{}], "sidecar": "x" })]
        {
            assert!(render(&page, &page, 0.0).starts_with("job ?: sidecar 0"));
        }
    }

    #[test]
    fn texts_of_a_page_cannot_control_a_terminal() {
        let text = "\u{1b}]0;x\u{7}\n\u{202e}é";
        let page = json!({
            "job": text, "version": text, "phase": text, "sidecar": 0,
            "links": [{ "peer": 1, "up": true }],
            "paths": [{ "peer": 1, "carrier": text, "address": text, "certificate": { "until": text } }],
            "gpu": { "unavailable": text }, "gpu_levels": [{ "rank": text, "gpu": text }],
            "ranks_missing": [text],
            "waiting_tensors": [{ "name": text, "collective": text, "missing": [text] }],
            "pending_requests": [{ "rank": text, "name": text, "collective": text, "ordered": false }],
            "last_failure": { "reason": format!("{text}{}", "x".repeat(10_000)) },
        });
        let shown = render(&page, &page, 1.0);
        assert!(!shown.contains(|c: char| (c.is_control() && c != '\n') || c == '\u{202e}'), "{shown:?}");
        assert!(shown.starts_with("job \\u{1b}]0;x\\u{7}\\n\\u{202e}é: sidecar 0"), "{shown}");
        assert!(shown.trim_end().ends_with(&"x".repeat(10_000)), "no line is cut");
        assert_eq!(shown.lines().count(), 12, "a page cannot add lines: {shown}");
    }

    #[test]
    fn a_request_that_a_schedule_has_admitted_is_shown_as_waiting() {
        let request = |name: &str, scheduled: bool| json!({ "rank": 1, "name": name, "collective": "ALLREDUCE", "ordered": true, "scheduled": scheduled, "age_ms": 5_000 });
        let page = json!({ "pending_requests": [request("allreduce.w", true), request("allreduce.v", false)] });
        let shown = render(&page, &page, 1.0);
        assert!(shown.contains("  rank 1 has waited in allreduce allreduce.w for 5 s\n"), "{shown}");
        assert!(!shown.contains("allreduce.v"), "all ranks have submitted it: {shown}");
    }

    #[test]
    fn a_search_is_shown_with_all_values_that_it_changes() {
        let knobs = |alpha_us: Value| {
            json!({ "fusion_threshold_bytes": 1_048_576, "chunk_bytes": null, "lanes": 2, "eager_bytes": 64,
                "hierarchical_allreduce": false, "alpha_us": alpha_us })
        };
        let search = |stage: &str| {
            json!({ "stage": stage, "samples": 7, "samples_max": 20, "knobs": knobs(json!(30.0)),
                "best": { "knobs": knobs(json!(7.5)), "gain": 1.5 } })
        };
        let values =
            "fusion threshold 1048576 bytes, chunk any bytes, lanes 2, eager up to 64 bytes, hierarchical false";
        let finished = format!("  autotune: finished after 7 samples, {values}, alpha 30.0 us; 1.50 times the start");
        assert_eq!(autotune_line(&search("finished")), finished);
        let searching =
            format!("  autotune: 7 of 20 samples, best so far {values}, alpha 7.5 us; 1.50 times the start");
        assert_eq!(autotune_line(&search("searching")), searching);
        assert_eq!(autotune_line(&search("warm_up")), "  autotune: warms up, 7 of 20 samples");
        let other_version = json!({ "stage": "finished", "samples": 7, "knobs": knobs(json!(null)) });
        assert_eq!(autotune_line(&other_version), format!("  autotune: finished after 7 samples, {values}"));
    }

    #[test]
    fn amounts_have_two_or_three_digits() {
        let shown = [0.0, 999.0, 1_000.0, 99_940.0, 999_400.0, 1.5e9, 2e15].map(bytes);
        assert_eq!(shown, ["0 B", "999 B", "1.0 kB", "99.9 kB", "999 kB", "1.5 GB", "2000 TB"]);
    }

    /// Whatever answers at the port of a sidecar is rendered or refused.
    #[test]
    fn fuzz_status_pages() {
        use ronde_fuzz::{Outcome, fuzz};

        let page = json!({
            "job": "night", "version": "0.1.0", "sidecar": 0, "coordinator": 0, "world_size": 4, "epoch": 2,
            "up_ms": 125_000, "ranks_in_epoch": [0, 1], "ranks_missing": [3], "links": [{ "peer": 1, "up": true }],
            "paths": [{ "peer": 1, "round_trip_us": 120, "packets_lost": 1, "certificate": { "serial": "01" } }],
            "waiting_tensors": [{ "name": "w", "collective": "ALLREDUCE", "missing": [2, 3], "age_ms": 3_100 }],
            "pending_requests": [{ "rank": 1, "name": "w", "ordered": false, "age_ms": 900 }],
            "traffic": { "sealed_bytes": 1_000, "opened_bytes": 7, "operations": 1 },
        });
        let seeds = vec![page.to_string().into_bytes()];
        fuzz("status_pages", seeds, |bytes| {
            let now = serde_json::from_slice::<Value>(bytes);
            if let Ok(now) = &now {
                let rendered = [render(&page, now, 2.0), render(now, &page, 0.0)];
                assert!(rendered.iter().all(|rendered| rendered.starts_with("job ")));
            }
            Outcome::of(&now)
        });
    }
}
