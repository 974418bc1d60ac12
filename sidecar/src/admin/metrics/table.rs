//! All metrics, in the order of the document.

use ronde_bootstrap::streams::LostLines;
use ronde_engine::{AutotuneStage, AutotuneStatus, CostStatus};
use ronde_wire::Invalidation;

use crate::operation::lanes::GpuStats;
use crate::session::gpu_use::LevelUse;

use super::{Kind, Metric, Sample, Snapshot, by_rank, count, lanes, links, number, one, ports, quic_links};

/// All metrics.
pub(super) const METRICS: &[Metric] = &[
    // === The sidecar ===
    gauge("ronde_build_info", "Always 1; the label is the version.", &["version"], |_| {
        vec![(vec![env!("CARGO_PKG_VERSION").to_owned()], 1.0)]
    }),
    gauge("ronde_uptime_seconds", "Time since the sidecar began to serve.", &[], |s| one(s.up.as_secs_f64())),
    gauge("ronde_epoch", "The number of the newest epoch; 0 before the first.", &[], |s| one(number(s.status.epoch.0))),
    counter("ronde_epochs_total", "Epochs that began.", &[], |s| one(number(s.engine.epochs))),
    gauge("ronde_plugin_state_bytes", "State that codecs keep between operations, such as residuals.", &[], |s| {
        one(number(s.plugins.state_bytes))
    }),
    counter("ronde_plugin_spans_total", "Spans of tensors that plugins worked on.", &[], |s| {
        one(number(s.plugins.spans))
    }),
    counter("ronde_plugin_faults_total", "Spans that plugins failed on.", &[], |s| one(number(s.plugins.faults))),
    counter("ronde_plugin_seconds_total", "Time of all lanes in plugins, copies included.", &[], |s| {
        one(s.plugins.time.as_secs_f64())
    }),
    gauge("ronde_sessions", "Live sessions of local workers.", &[], |s| one(count(s.sessions))),
    gauge("ronde_gpu_imported_bytes", "Device memory that live sessions share with the sidecar.", &[], |s| {
        one(number(s.device_bytes))
    }),
    counter(
        "ronde_gpu_operations_total",
        "Operations on tensors in device memory: performed by NCCL (`nccl`), by NCCL within the host and ronde between hosts \
         (`two_levels`), or copied to the host (`copied`).",
        &["path"],
        |s| {
            let GpuStats { nccl, two_levels, copied, .. } = s.gpu_stats();
            [("copied", copied), ("nccl", nccl), ("two_levels", two_levels)]
                .map(|(path, operations)| (vec![path.to_owned()], number(operations)))
                .into()
        },
    ),
    counter("ronde_gpu_level_operations_total", GPU_LEVEL_OPERATIONS, &["level"], |s| {
        gpu_levels(s, |used| used.operations)
    }),
    counter("ronde_gpu_level_bytes_total", GPU_LEVEL_BYTES, &["level"], |s| gpu_levels(s, |used| used.bytes)),
    counter("ronde_gpu_nccl_bytes_total", "Bytes of contributions to collectives of NCCL.", &[], |s| {
        one(number(s.gpu_stats().bytes))
    }),
    counter(
        "ronde_gpu_failures_total",
        "Operations on tensors in device memory that failed there, or whose collective was ended with their epoch.",
        &[],
        |s| one(number(s.gpu_stats().failed)),
    ),
    counter(
        "ronde_gpu_aborts_total",
        "Collectives of NCCL whose communicators were aborted, or could not be made.",
        &[],
        |s| one(number(s.gpu_stats().aborted)),
    ),
    gauge("ronde_suspect_sidecars", "Sidecars that are silent, as far as this sidecar knows.", &[], |s| {
        one(count(s.status.suspect_sidecars.len()))
    }),
    gauge("ronde_suspect_ranks", "Ranks that are silent, as far as this sidecar knows.", &[], |s| {
        one(count(s.status.suspect_ranks.len()))
    }),
    counter("ronde_pauses_total", "Times that this process did not run for a second or more.", &[], |s| {
        one(number(s.engine.pauses))
    }),
    counter(
        "ronde_protocol_violations_total",
        "Control messages that broke the protocol; their sender was disconnected.",
        &[],
        |s| one(number(s.engine.protocol_violations)),
    ),
    counter("ronde_stale_frames_total", "Control frames of other epochs, dropped.", &[], |s| {
        one(number(s.engine.stale_frames))
    }),
    counter("ronde_relayed_messages_total", "Control messages forwarded for other sidecars.", &[], |s| {
        one(number(s.engine.relayed))
    }),
    counter(
        "ronde_log_lines_lost_total",
        "Log lines that were not written: standard error was not read or could not be written (`unread`), or too many came from one place (`limited`).",
        &["reason"],
        |s| {
            let LostLines { unread, limited } = s.lost_log_lines;
            [("limited", limited), ("unread", unread)]
                .map(|(reason, lines)| (vec![reason.to_owned()], number(lines)))
                .into()
        },
    ),
    // === Requests ===
    counter("ronde_requests_submitted_total", "Requests that workers submitted here.", &[], |s| {
        one(number(s.engine.submitted))
    }),
    counter("ronde_requests_completed_total", "Requests that completed.", &[], |s| one(number(s.engine.completed))),
    counter("ronde_requests_failed_total", "Requests that failed, refused ones included.", &[], |s| {
        one(number(s.engine.failed))
    }),
    counter("ronde_requests_refused_total", "Requests that were refused here.", &[], |s| one(number(s.engine.refused))),
    counter("ronde_requests_withdrawn_total", "Requests that ranks stopped waiting for.", &[], |s| {
        one(number(s.engine.withdrawn))
    }),
    counter(
        "ronde_requests_announced_again_total",
        "Requests announced by their number in the request cache.",
        &[],
        |s| one(number(s.engine.announced_again)),
    ),
    counter("ronde_cache_evictions_total", "Requests evicted from the request cache.", &[], |s| {
        one(number(s.engine.cache_evictions))
    }),
    counter(
        "ronde_schedules_issued_total",
        "Schedules that this coordinator issued for steps that repeat.",
        &[],
        |s| one(number(s.engine.schedules_issued)),
    ),
    counter(
        "ronde_schedules_withdrawn_total",
        "Schedules that this coordinator invalidated, by reason.",
        &["reason"],
        |s| {
            let counts = Invalidation::ALL.into_iter().zip(s.engine.schedules_withdrawn);
            counts.map(|(reason, count)| (vec![reason.name().to_owned()], number(count))).collect()
        },
    ),
    counter(
        "ronde_operations_scheduled_total",
        "Operations admitted from a schedule, without negotiation.",
        &[],
        |s| one(number(s.engine.scheduled_operations)),
    ),
    counter(
        "ronde_operations_cancelled_total",
        "Scheduled operations that were dropped and negotiated instead.",
        &[],
        |s| one(number(s.engine.cancelled_operations)),
    ),
    counter(
        "ronde_names_rejected_total",
        "Operations that failed on all ranks, as the coordinator reported.",
        &[],
        |s| one(number(s.engine.rejected)),
    ),
    gauge("ronde_requests_pending", "Requests of local ranks without an answer.", &[], |s| {
        one(count(s.status.pending))
    }),
    gauge("ronde_process_sets", "Process sets that exist.", &[], |s| one(count(s.status.sets))),
    gauge("ronde_ranks_joined", "Ranks known to have joined.", &[], |s| one(count(s.status.ranks_joined.len()))),
    // === Who waits for whom; at the coordinator ===
    gauge("ronde_names_waiting", "Coordinator: names that some ranks have submitted and others have not.", &[], |s| {
        one(count(s.status.negotiating))
    }),
    counter(
        "ronde_last_to_be_ready_total",
        "Coordinator: how often the rank was the last to submit an operation.",
        &["rank"],
        |s| by_rank(&s.status.last_to_be_ready, 1.0),
    ),
    counter(
        "ronde_waited_for_seconds_total",
        "Coordinator: time between the first rank's submission and this rank's, where it was the last, in operations that are \
         negotiated. Tensors that wait at the same time count once.",
        &["rank"],
        |s| by_rank(&s.status.waited_for_us, MICROSECOND),
    ),
    counter(
        "ronde_waited_for_local_seconds_total",
        "Time between the first submission of a rank of this sidecar and this rank's, where it was the last of them, in steps that \
         repeat and run by a schedule. Tensors that wait at the same time count once.",
        &["rank"],
        |s| {
            let ranks = s.engine.waited_here_us.iter();
            ranks.map(|(rank, us)| (vec![rank.to_string()], number(*us) * MICROSECOND)).collect()
        },
    ),
    counter("ronde_mismatches_total", "Coordinator: operations on which ranks disagreed.", &[], |s| {
        one(number(s.engine.mismatches))
    }),
    // === Search for better settings, and the cost model ===
    gauge(
        "ronde_autotune_samples",
        "Coordinator: samples that the search for better settings has taken; absent without a search.",
        &[],
        |s| autotune(s, |found| Some(count(found.samples))),
    ),
    gauge(
        "ronde_autotune_finished",
        "Coordinator: 1 when the search is over and its best settings stay, 0 before; absent without a search.",
        &[],
        |s| autotune(s, |found| Some(f64::from(u8::from(found.stage == AutotuneStage::Finished)))),
    ),
    gauge(
        "ronde_autotune_gain",
        "Coordinator: how many times as fast as the start the best settings so far are; absent before the first sample.",
        &[],
        |s| autotune(s, |found| found.best.map(|best| best.gain)),
    ),
    gauge(
        "ronde_cost_round_seconds",
        "Coordinator: the latency of a round in the cost model that selects algorithms (alpha).",
        &[],
        |s| one(s.status.cost.alpha_us * MICROSECOND),
    ),
    gauge(
        "ronde_cost_sent_byte_seconds",
        "Coordinator: the time of a byte that is sent in the cost model (beta).",
        &[],
        |s| one(s.status.cost.beta_us_per_byte * MICROSECOND),
    ),
    gauge(
        "ronde_cost_reduced_byte_seconds",
        "Coordinator: the time of a byte that is reduced in the cost model (gamma).",
        &[],
        |s| one(s.status.cost.gamma_us_per_byte * MICROSECOND),
    ),
    gauge(
        "ronde_measured_round_seconds",
        "Coordinator: the latency of a round as measured (`--measure-cost`); absent before enough operations.",
        &[],
        |s| measured(s, |cost| cost.alpha_us),
    ),
    gauge(
        "ronde_measured_sent_byte_seconds",
        "Coordinator: the time of a byte that is sent, as measured; absent before enough operations.",
        &[],
        |s| measured(s, |cost| cost.beta_us_per_byte),
    ),
    // === Operations and fusion ===
    counter(
        "ronde_operations_total",
        "Operations performed here; tensors fused into one bucket are one operation.",
        &[],
        |s| one(number(s.engine.executed)),
    ),
    counter("ronde_tensors_total", "Tensors in the operations performed here.", &[], |s| {
        one(number(s.engine.tensors_executed))
    }),
    gauge("ronde_operations_in_flight", "Operations admitted here and not finished.", &[], |s| {
        one(count(s.status.in_flight))
    }),
    counter("ronde_ordered_operations_total", "Coordinator: operations ordered.", &[], |s| {
        one(number(s.engine.ordered_operations))
    }),
    counter("ronde_ordered_tensors_total", "Coordinator: tensors in them.", &[], |s| {
        one(number(s.engine.ordered_tensors))
    }),
    counter("ronde_fused_tensors_total", "Coordinator: tensors that shared a bucket with others.", &[], |s| {
        one(number(s.engine.fused_tensors))
    }),
    counter("ronde_inline_operations_total", "Small operations that the control thread executed inline.", &[], |s| {
        one(number(s.inline.operations_done))
    }),
    // === Bytes of tensors ===
    counter("ronde_contributed_bytes_total", "Bytes read from local contributions.", &[], |s| {
        lanes(s, |e| e.contributed_bytes)
    }),
    counter("ronde_reduced_bytes_total", "Bytes that reductions read and combined.", &[], |s| {
        lanes(s, |e| e.reduced_bytes)
    }),
    counter("ronde_encoded_bytes_total", "Bytes of elements that a codec encoded.", &[], |s| {
        lanes(s, |e| e.encoded_bytes)
    }),
    counter("ronde_decoded_bytes_total", "Bytes of elements that a codec decoded.", &[], |s| {
        lanes(s, |e| e.decoded_bytes)
    }),
    counter(
        "ronde_measured_bytes_total",
        "Bytes of contributions that a reduction measured before it started.",
        &[],
        |s| lanes(s, |e| e.measured_bytes),
    ),
    counter("ronde_published_bytes_total", "Bytes of results written.", &[], |s| lanes(s, |e| e.published_bytes)),
    counter("ronde_private_copies_bytes_total", "Private bytes copied because they were shared.", &[], |s| {
        lanes(s, |e| e.copied_bytes)
    }),
    counter("ronde_chunks_sent_total", "Chunks of tensors given to the transport.", &[], |s| {
        lanes(s, |e| e.chunks_sent)
    }),
    counter("ronde_chunks_received_total", "Chunks of tensors received from the transport.", &[], |s| {
        lanes(s, |e| e.chunks_received)
    }),
    counter("ronde_early_chunks_total", "Chunks held before their operation was admitted.", &[], |s| {
        lanes(s, |e| e.chunks_held)
    }),
    counter("ronde_dropped_chunks_total", "Chunks of other epochs, dropped.", &[], |s| lanes(s, |e| e.chunks_dropped)),
    // === NCCL's net plugin ===
    gauge("ronde_nccl_connections", "Connections and listeners that NCCL has open in local workers.", &[], |s| {
        one(count(s.streams().open))
    }),
    counter("ronde_nccl_connected_total", "Ends of NCCL's connections that were connected here.", &[], |s| {
        one(number(s.streams().connected))
    }),
    counter(
        "ronde_nccl_refused_total",
        "NCCL's connections that were refused here, or closed because a worker broke the rules.",
        &[],
        |s| one(number(s.streams().refused)),
    ),
    counter("ronde_nccl_sent_bytes_total", "Bytes of NCCL's messages that local workers sent.", &[], |s| {
        one(number(s.streams().sent_bytes))
    }),
    counter("ronde_nccl_received_bytes_total", "Bytes of NCCL's messages for local workers.", &[], |s| {
        one(number(s.streams().received_bytes))
    }),
    // === Shared memory ===
    gauge("ronde_input_mapped_bytes", "Shared memory of the live sessions' inputs.", &[], |s| {
        one(number(s.inputs_mapped_bytes))
    }),
    gauge("ronde_result_mapped_bytes", "Shared memory of result segments.", &[], |s| {
        one(number(s.results.mapped_bytes))
    }),
    gauge("ronde_result_in_use_bytes", "Shared memory of results not yet released.", &[], |s| {
        one(number(s.results.in_use_bytes))
    }),
    // === Ports ===
    counter("ronde_sealed_bytes_total", "Bytes encrypted.", &["port"], |s| ports(s, |p| p.sealed_bytes)),
    counter("ronde_opened_bytes_total", "Bytes decrypted.", &["port"], |s| ports(s, |p| p.opened_bytes)),
    counter("ronde_frames_sent_total", "Frames sent.", &["port"], |s| ports(s, |p| p.frames_sent)),
    counter("ronde_frames_received_total", "Frames received.", &["port"], |s| ports(s, |p| p.frames_received)),
    counter("ronde_links_opened_total", "Links that were opened.", &["port"], |s| ports(s, |p| p.links_opened)),
    counter("ronde_links_replaced_total", "Connections replaced because a certificate was.", &["port"], |s| {
        ports(s, |p| p.links_replaced)
    }),
    counter("ronde_refusals_total", "Connections and hellos that were refused.", &["port"], |s| {
        ports(s, |p| p.refusals)
    }),
    // === Links that are up; what only QUIC measures is not there over TCP ===
    link_counter(
        "ronde_link_sent_bytes_total",
        "Bytes sent since the link's connection was made.",
        PEER_AND_PORT,
        |s| links(s, |p| number(p.sent_bytes)),
    ),
    link_counter(
        "ronde_link_received_bytes_total",
        "Bytes received since the link's connection was made.",
        PEER_AND_PORT,
        |s| links(s, |p| number(p.received_bytes)),
    ),
    link_counter(
        "ronde_link_packets_sent_total",
        "Packets sent since the link's connection was made.",
        PEER_AND_PORT,
        |s| quic_links(s, |p| number(p.packets_sent)),
    ),
    link_counter(
        "ronde_link_packets_lost_total",
        "Packets lost since the link came up; their contents are retransmitted.",
        PEER_AND_PORT,
        |s| quic_links(s, |p| number(p.packets_lost)),
    ),
    link_counter("ronde_link_lost_bytes_total", "Bytes in the packets that were lost.", PEER_AND_PORT, |s| {
        quic_links(s, |p| number(p.lost_bytes))
    }),
    gauge("ronde_link_round_trip_seconds", "The smoothed round trip.", PEER_AND_PORT, |s| {
        quic_links(s, |p| p.round_trip.as_secs_f64())
    }),
    gauge("ronde_link_datagram_bytes", "The path MTU.", PEER_AND_PORT, |s| {
        quic_links(s, |p| f64::from(p.datagram_bytes))
    }),
    gauge("ronde_link_window_bytes", "The congestion window.", PEER_AND_PORT, |s| {
        quic_links(s, |p| number(p.window_bytes))
    }),
];

/// Figures of local workers' GPUs by level.
fn gpu_levels(snapshot: &Snapshot, of: fn(LevelUse) -> u64) -> Vec<Sample> {
    let (_, total) = &snapshot.gpu_uses;
    let levels = [("one", total.copied), ("sidecar", total.shared), ("two", total.two_levels)];
    levels.map(|(level, used)| (vec![level.to_owned()], number(of(used)))).into()
}

const GPU_LEVEL_OPERATIONS: &str = "Operations to which local workers contributed tensors on GPUs: copied to shared memory \
    by the worker (`one`), in two levels (`two`), or given to the sidecar in device memory (`sidecar`). Those that PyTorch \
    copies are not among them.";
const GPU_LEVEL_BYTES: &str = "Bytes of these contributions.";
/// A value of the search for better settings, if there is one.
fn autotune(snapshot: &Snapshot, read: impl Fn(&AutotuneStatus) -> Option<f64>) -> Vec<Sample> {
    snapshot.status.autotune.as_ref().and_then(read).map_or_else(Vec::new, one)
}

/// A value of the measured cost model, if there is one.
fn measured(snapshot: &Snapshot, read: fn(&CostStatus) -> f64) -> Vec<Sample> {
    snapshot.status.measured_cost.as_ref().map_or_else(Vec::new, |cost| one(read(cost) * MICROSECOND))
}

const fn counter(
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    read: fn(&Snapshot) -> Vec<Sample>,
) -> Metric {
    Metric { name, help, kind: Kind::Counter, labels, read }
}

const fn link_counter(
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    read: fn(&Snapshot) -> Vec<Sample>,
) -> Metric {
    Metric { kind: Kind::LinkCounter, ..counter(name, help, labels, read) }
}

const fn gauge(
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    read: fn(&Snapshot) -> Vec<Sample>,
) -> Metric {
    Metric { kind: Kind::Gauge, ..counter(name, help, labels, read) }
}

const PEER_AND_PORT: &[&str] = &["peer", "port"];
const MICROSECOND: f64 = 1e-6;
