//! Every bound of the protocol, by name. docs/PROTOCOL.md shows the same table.

/// Ranks of one job.
pub const RANKS_MAX: usize = 4_096;
/// Sidecars of one job.
pub const SIDECARS_MAX: usize = 1_024;
/// Workers that one sidecar serves.
pub const LOCAL_RANKS_MAX: usize = 64;
/// Process sets alive at once.
pub const SETS_MAX: usize = 1_024;
/// Ranks in the pending requests of one rank for process sets; a list counts as
/// [`SET_OF_MEMBERS_RANKS_MIN`] ranks at least. So the coordinator keeps at most 1,024 lists for a rank.
pub const SETS_OF_MEMBERS_PENDING_MAX: usize = 1 << 18;
/// The least ranks as which the list of one such request counts.
pub const SET_OF_MEMBERS_RANKS_MIN: usize = 256;
/// Ranks in failed requests for process sets of their members for which other ranks have yet to ask, over all names; a
/// request counts as [`SET_OF_MEMBERS_RANKS_MIN`] ranks at least.
pub const SETS_OF_MEMBERS_FAILED_MAX: usize = 1 << 22;
/// The same in those whose failure names one rank.
pub const SETS_OF_MEMBERS_FAILED_OF_RANK_MAX: usize = 1 << 20;
/// Process sets alive at once that ranks of one sidecar formed alone, in a job with several sidecars.
pub const SETS_OF_ONE_SIDECAR_MAX: usize = 256;
/// Bytes of a tensor's name.
pub const NAME_BYTES_MAX: usize = 512;
/// Bytes of a job's name: it becomes part of a URI and of paths of Unix sockets, which are short.
pub const JOB_NAME_BYTES_MAX: usize = 63;
/// Dimensions of a tensor.
pub const DIMENSIONS_MAX: usize = 32;
/// Payload of a control frame, in bytes.
pub const CONTROL_FRAME_BYTES_MAX: usize = 1 << 20;
/// Payload of the frame that ends a connection over TCP, in bytes.
pub const CLOSE_FRAME_BYTES_MAX: usize = 2 << 10;
/// Bytes of a control message that sidecars relay for others: with its header it fits a frame.
pub const ENCLOSED_BYTES_MAX: usize = CONTROL_FRAME_BYTES_MAX - 512;
/// Children of one sidecar in the tree of control links. Up to this many sidecars link to the coordinator directly.
pub const CONTROL_FAN_OUT: usize = 8;
/// Payload of a chunk frame, in bytes: the largest chunk plus its own header.
pub const CHUNK_FRAME_BYTES_MAX: usize = CHUNK_BYTES_MAX + crate::frame::CHUNK_HEADER_BYTES;
/// Largest chunk that a plan may use, in bytes.
pub const CHUNK_BYTES_MAX: usize = 1 << 20;
/// Smallest chunk that a tuning may name, in bytes.
pub const CHUNK_BYTES_MIN: usize = 4 << 10;
/// Bytes of a tensor that may travel inside a gRPC message instead of shared memory.
pub const INLINE_BYTES_MAX: usize = 1 << 20;
/// Requests that one session may have pending.
pub const PENDING_PER_SESSION_MAX: usize = 65_536;
/// Bytes that a sidecar holds in its own memory for one session: its pending requests with the inputs that came inside
/// messages, and results that wait to be sent inside messages.
pub const MESSAGE_BYTES_PER_SESSION_MAX: u64 = 64 << 20;
/// Bytes of a call over gRPC-Web, whose tensors travel inside: one of the greatest length, with names and shapes.
pub const WEB_BODY_BYTES_MAX: usize = INLINE_BYTES_MAX + (64 << 10);
/// Bytes of the head of a call over gRPC-Web.
pub const WEB_HEAD_BYTES_MAX: usize = 16 << 10;
/// Messages of a worker in one call over gRPC-Web.
pub const WEB_MESSAGES_MAX: usize = 1_024;
/// Requests that a session over gRPC-Web may have pending.
pub const WEB_PENDING_MAX: usize = 1_024;
/// Connections to a sidecar's listener for gRPC-Web that have carried a token: each rank has an equal share of them.
pub const WEB_CONNECTIONS_MAX: usize = 256;
/// Further connections, which have not carried a token yet, at a time.
pub const WEB_UNAUTHENTICATED_MAX: usize = 128;
/// Calls over gRPC-Web of one rank whose bodies a sidecar reads at the same time; further ones wait.
pub const WEB_BODIES_PER_RANK_MAX: usize = 4;
/// Bodies of calls over gRPC-Web that a sidecar decodes at the same time; further ones wait.
pub const WEB_BODIES_MAX: usize = 16;
/// Bytes of each direction of the ring of a session.
pub const RING_BYTES: usize = 256 << 10;
/// Smallest capacity of each direction of a stream's ring, in bytes.
pub const STREAM_RING_BYTES_MIN: u64 = 64 << 10;
/// Largest capacity of each direction of a stream's ring, in bytes.
pub const STREAM_RING_BYTES_MAX: u64 = 1 << 20;
/// Bytes of a receiver's ring that are never granted as credit, so that other messages than data have room.
pub const STREAM_RING_RESERVE_BYTES: u64 = 4 << 10;
/// Payload of a frame of a stream, in bytes: the longest message of a ring and its header.
pub const STREAM_FRAME_BYTES_MAX: usize = (512 << 10) + 16;
/// The text of a reason why a stream is over, in bytes; more is cut off.
pub const STREAM_TEXT_BYTES_MAX: usize = 600;
/// Streams and listeners of one worker.
pub const STREAMS_PER_WORKER_MAX: usize = 2_048;
/// Streams that wait until their listener's worker takes them.
pub const STREAMS_WAITING_MAX: usize = 64;
/// Bytes of streams that a lane has queued for one peer and that the connection has not accepted.
pub const STREAM_WINDOW_BYTES: usize = 2 << 20;
/// Bytes of chunks for operations not yet admitted that a receiver holds for one peer, over all lanes.
pub const EARLY_BUFFER_BYTES: usize = 4 << 20;
/// Lanes between two sidecars.
pub const LANES_MAX: usize = 16;
/// Addresses of one sidecar that its peers try.
pub const ADDRESSES_MAX: usize = 16;
/// Sub-schedules of one plan that may be in flight at once on one lane.
pub const WINDOW_MAX: usize = 64;
/// Tensors in one group.
pub const GROUP_TENSORS_MAX: usize = 16_384;
/// Requests in the request cache of a sidecar; a repeated request is announced by its slot.
pub const ANNOUNCE_SLOTS_MAX: usize = 1_024;
/// Ranks of a set that performs an all-to-all: an order carries the rows of every pair.
pub const ALL_TO_ALL_RANKS_MAX: usize = 256;
/// Ranks of a set whose values an n-ary reduction needs at once: Adasum, median, clipped mean.
pub const NARY_RANKS_MAX: usize = 256;
/// Bytes of a plugin's name.
pub const PLUGIN_NAME_BYTES_MAX: usize = 64;
/// Bytes of a plugin's version.
pub const PLUGIN_VERSION_BYTES_MAX: usize = 32;
/// Parameters of a plugin.
pub const PLUGIN_PARAMETERS_MAX: usize = 16;
/// Bytes of the elements of one call of a codec plugin, and of their encoding: less than a chunk.
pub const PLUGIN_BLOCK_BYTES_MAX: usize = CHUNK_BYTES_MAX - 64;
/// Numbers that a two-pass reducer measures for each rank.
pub const PLUGIN_MEASURES_MAX: usize = 64;
/// Plugins that one sidecar has loaded.
pub const PLUGINS_MAX: usize = 256;
/// Bytes of state that codec plugins keep between operations on one sidecar: residuals and the like (the default of
/// `plugin_state_bytes_max`).
pub const PLUGIN_STATE_BYTES: u64 = 8 << 30;
/// Tensors in one bucket; with names of the greatest length an order still fits a control frame.
pub const BUCKET_TENSORS_MAX: usize = 1_024;
/// Bytes of one bucket unless a single tensor is larger.
pub const FUSION_THRESHOLD_BYTES: u64 = 64 << 20;
/// Bytes of a contribution that may travel eagerly, in the announcement and in the order.
pub const EAGER_BYTES_MAX: usize = 4 << 10;
/// Bytes of all contributions that one order carries.
pub const EAGER_ORDER_BYTES_MAX: usize = 64 << 10;
/// Buckets of a schedule.
pub const SCHEDULE_BUCKETS_MAX: usize = 1_024;
/// Tensors of a schedule.
pub const SCHEDULE_TENSORS_MAX: usize = 4_096;
/// Process sets with operations in one schedule.
pub const SCHEDULE_SETS_MAX: usize = 64;
/// Operations of a schedule that a sidecar has admitted and not performed.
pub const SCHEDULED_IN_FLIGHT_MAX: usize = 32;
/// Bytes of tensors of such operations, when there are more than [`BUCKETS_IN_FLIGHT`].
pub const SCHEDULED_IN_FLIGHT_BYTES: u64 = 8 << 20;
/// Buckets of one process set that the coordinator keeps ordered ahead.
pub const BUCKETS_IN_FLIGHT: usize = 2;
/// Bytes of a reason in a [`crate::Failure`]; longer texts are truncated at a character boundary.
pub const REASON_BYTES_MAX: usize = 4_096;
/// Bytes of text in a [`crate::Record`] of a first failure.
pub const RECORD_BYTES_MAX: usize = 8 << 10;
/// Lines of standard error in such a record.
pub const RECORD_LINES_MAX: usize = 20;
/// Bytes of a call site in a program; longer ones keep their end.
pub const CALL_SITE_BYTES_MAX: usize = 256;
/// Ranks listed in one report of missing ranks, and asked for their last calls.
pub const REPORT_RANKS_MAX: usize = 16;
/// Names listed in one report of missing ranks.
pub const REPORT_NAMES_MAX: usize = 6;

/// Time between two heartbeats on a control link, in milliseconds.
pub const HEARTBEAT_MS: u64 = 100;
/// The same for a worker's session: a host has many of them, and each heartbeat wakes the sidecar.
pub const SESSION_HEARTBEAT_MS: u64 = 250;
/// Silence after which a peer is named as suspect, in milliseconds; nothing fails yet.
pub const SUSPECT_MS: u64 = 1_000;
/// Silence after which a peer is dead and its epoch ends, in milliseconds (the default of `peer_timeout`).
pub const PEER_TIMEOUT_MS: u64 = 5_000;
