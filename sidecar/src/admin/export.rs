//! Sends the metrics to a collector of OpenTelemetry, from a thread of its own.
//!
//! The thread asks for a snapshot as a scrape does, and converts and sends it, so that a collector which is slow, or is not
//! there, costs the control thread nothing. What is not delivered is not kept: the next export has newer values of the same
//! counters. The first of several exports that fail is reported, and the first one that succeeds after them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::client::conn::http1::handshake;
use hyper::header::{CONTENT_TYPE, HOST, USER_AGENT};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceResponse;
use prost::Message;
use ronde_bootstrap::otlp::{Endpoint, OtlpSettings};
use ronde_transport::ServerTls;
use ronde_wire::{Failure, SidecarIndex};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Pages;
use super::metrics::otlp::{Origin, request};
use crate::driver::snapshot::Snapshot;

/// A collector, and what of this sidecar is sent there.
struct Target {
    endpoint: Endpoint,
    tls: Option<ServerTls>,
    origin: Origin,
    interval: Duration,
}

/// The handle of the thread that sends.
pub(crate) struct Exporter {
    last: oneshot::Sender<Snapshot>,
    done: oneshot::Receiver<()>,
    /// Whether the newest export has succeeded.
    is_delivered: Arc<AtomicBool>,
}

impl Exporter {
    /// Starts the thread, if metrics are to be sent. It ends with the process.
    ///
    /// # Errors
    /// When the authorities of the collector's certificate cannot be read: nothing is sent without them.
    pub(crate) fn start(
        settings: Option<OtlpSettings>,
        pages: Pages,
        (me, host): (SidecarIndex, String),
    ) -> anyhow::Result<Option<Self>> {
        let Some(settings) = settings else { return Ok(None) };
        let trusted = |pem: String| {
            let tls = ServerTls::trusting(&pem);
            tls.map_err(|reason| anyhow::anyhow!("the file of --otlp-ca cannot be used: {reason}"))
        };
        let tls = settings.read_ca()?.map(trusted).transpose()?;
        ensure!(
            tls.is_some() == settings.endpoint.is_tls,
            "--otlp-endpoint with https:// needs --otlp-ca, and http:// does not allow it"
        );
        let origin = Origin { job: pages.job.to_string(), sidecar: me.0, host, since_ns: now_ns() };
        let target = Target { endpoint: settings.endpoint, tls, origin, interval: settings.interval };
        let (last, ending) = oneshot::channel();
        let (finished, done) = oneshot::channel();
        let is_delivered = Arc::new(AtomicBool::new(false));
        let delivered = Arc::clone(&is_delivered);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("cannot start the runtime that sends metrics")?;
        let run = move || {
            runtime.block_on(run(&target, &pages, ending, &delivered));
            // A look-up of a name may still run.
            runtime.shutdown_background();
            let _ = finished.send(());
        };
        let named = std::thread::Builder::new().name("otlp".to_owned());
        named.spawn(run).context("cannot start the thread that sends metrics")?;
        Ok(Some(Self { last, done, is_delivered }))
    }

    /// Sends the last state, for a bounded time, if the collector has answered before.
    pub(crate) async fn finish(self, snapshot: Snapshot) {
        let Self { last, done, is_delivered } = self;
        if last.send(snapshot).is_ok() && is_delivered.load(Ordering::Relaxed) {
            let _ = timeout(LAST_TIMEOUT, done).await;
        }
    }
}

/// Exports again and again, until the sidecar ends.
async fn run(target: &Target, pages: &Pages, mut ending: oneshot::Receiver<Snapshot>, is_delivered: &AtomicBool) {
    let mut ticks = interval(target.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut reported = ExportErrorReported::default();
    loop {
        let next = async {
            ticks.tick().await;
            pages.snapshot().await
        };
        let (snapshot, is_last) = tokio::select! {
            last = &mut ending => (last.ok().map(Arc::new), true),
            next = next => (next, false),
        };
        // The driver ends before the last snapshot arrives.
        let Some(snapshot) = snapshot else {
            if is_last {
                return;
            }
            continue;
        };
        let sent = export(target, &snapshot).await;
        is_delivered.store(sent.is_ok(), Ordering::Relaxed);
        reported.note(&target.endpoint, sent);
        if is_last {
            return;
        }
    }
}

/// Whether the log says that exports fail.
#[derive(Default)]
struct ExportErrorReported(bool);

impl ExportErrorReported {
    fn note(&mut self, endpoint: &Endpoint, sent: anyhow::Result<()>) {
        let was_reported = std::mem::replace(&mut self.0, sent.is_err());
        let authority = endpoint.authority();
        match sent {
            // As visible as the warning that it ends.
            Ok(()) if was_reported => tracing::warn!("metrics are sent to the collector at {authority} again"),
            Err(error) if !was_reported => {
                let reason = Failure::line(&format!("{error:#}"));
                tracing::warn!(
                    "metrics are not sent to the collector at {authority}: {reason}. The job continues, each export is tried, and \
                     this is reported once; check that a collector runs there and receives OTLP over HTTP"
                );
            }
            Ok(()) | Err(_) => {}
        }
    }
}

/// Sends one message, within a bound.
async fn export(target: &Target, snapshot: &Snapshot) -> anyhow::Result<()> {
    let message = request(snapshot, &target.origin, now_ns()).encode_to_vec();
    let sent = timeout(EXPORT_TIMEOUT, send(target, message.into())).await;
    sent.with_context(|| format!("it has not answered within {} s", EXPORT_TIMEOUT.as_secs()))?
}

async fn send(target: &Target, message: Bytes) -> anyhow::Result<()> {
    let Endpoint { host, port, .. } = &target.endpoint;
    let stream = TcpStream::connect((host.as_str(), *port)).await.context("it cannot be reached")?;
    // In one packet each: what is written is whole.
    stream.set_nodelay(true)?;
    match &target.tls {
        Some(tls) => {
            let stream = tls.connect(stream, host).await.context("the TLS handshake failed; check that --otlp-ca has the authority of its certificate, which has to name the host of the URL")?;
            post(&target.endpoint, stream, message).await
        }
        None => post(&target.endpoint, stream, message).await,
    }
}

/// Posts a message over a connection of its own, and reads the answer.
async fn post(
    endpoint: &Endpoint,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    message: Bytes,
) -> anyhow::Result<()> {
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.context("it does not answer")?;
    let request = Request::post(&endpoint.path)
        .header(HOST, endpoint.authority())
        .header(CONTENT_TYPE, PROTOBUF)
        .header(USER_AGENT, concat!("ronde/", env!("CARGO_PKG_VERSION")))
        .body(Full::new(message))?;
    let answer = async {
        let answer = sender.send_request(request).await.context("it does not answer")?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!("its answer cannot be read: {error}"))?.to_bytes();
        ensure!(status.is_success(), "it answers {status}: {}", shortened(&body));
        accepted(&body)
    };
    tokio::pin!(answer);
    // The connection is driven beside the request. What it has read before its end is still to be taken.
    tokio::select! {
        answer = &mut answer => answer,
        _ = connection => answer.await,
    }
}

/// Reads the answer of a collector that may have rejected some of the values.
fn accepted(body: &[u8]) -> anyhow::Result<()> {
    let answer = ExportMetricsServiceResponse::decode(body)
        .context("the answer is not an OTLP message; check that the URL is an OTLP/HTTP receiver")?;
    let Some(partial) = answer.partial_success.filter(|partial| partial.rejected_data_points > 0) else {
        return Ok(());
    };
    bail!("it has rejected {} values: {}", partial.rejected_data_points, shortened(partial.error_message.as_bytes()))
}

/// The begin of a text of the collector, as one line without control characters.
fn shortened(text: &[u8]) -> String {
    Failure::line(&String::from_utf8_lossy(text)).chars().take(REASON_CHARS_MAX).collect()
}

fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// How long an export may take.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of the sidecar waits for the last export, as long as for a flight record, which is written meanwhile. An
/// agent kills a sidecar that has not ended 10 s after it was asked to.
const LAST_TIMEOUT: Duration = Duration::from_secs(3);
/// The longest answer.
const ANSWER_BYTES_MAX: usize = 64 << 10;
/// How much of a collector's text is reported, its control characters escaped.
const REASON_CHARS_MAX: usize = 200;
const PROTOBUF: &str = "application/x-protobuf";

#[cfg(test)]
mod tests;
