//! The admin pages, on a loopback port by default: the page for people at `/`, with its stream `/events`, then `/healthz`,
//! `/status` (JSON), `/metrics` (Prometheus) and `/flight` (the flight record, JSON).
//! [`Exporter`] sends the same metrics to a collector of OpenTelemetry.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::get;
use ronde_bootstrap::codes::Code;
use ronde_wire::JobName;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use crate::driver::command::ControlCommand;
use crate::driver::snapshot::Snapshot;
use crate::flight::FlightSnapshot;

mod export;
mod flight;
mod listener;
mod live;
mod metrics;
mod page;
mod snapshots;

pub(crate) use export::Exporter;

/// The state of the pages: the channel to the driver, which is asked for one snapshot or record at a time.
#[derive(Clone)]
pub(crate) struct Pages {
    commands: mpsc::Sender<ControlCommand>,
    job: JobName,
    snapshots: snapshots::Snapshots,
    viewers: live::Viewers,
    readers: flight::Readers,
}

impl Pages {
    /// Creates the pages of the driver of this job.
    pub(crate) fn new(commands: mpsc::Sender<ControlCommand>, job: JobName) -> Self {
        let (viewers, readers) = (live::Viewers::default(), flight::Readers::default());
        Self { snapshots: snapshots::Snapshots::new(commands.clone()), commands, job, viewers, readers }
    }

    /// Builds `/status`; `None` when the sidecar is ending.
    pub(crate) async fn status(&self) -> Option<impl Serialize + use<>> {
        self.snapshot().await.map(|snapshot| page::StatusPage::new(self.job.clone(), &snapshot))
    }

    /// Requests what the flight recorder has, one at a time; `None` when the sidecar is ending, and within it when the
    /// recorder is off.
    async fn flight(&self) -> Option<Option<FlightSnapshot>> {
        let _turn = self.snapshots.turn().await;
        let (reply, answer) = oneshot::channel();
        self.commands.send(ControlCommand::Flight(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Requests a snapshot; `None` when the sidecar is ending.
    async fn snapshot(&self) -> Option<Arc<Snapshot>> {
        self.snapshots.take().await
    }

    /// Waits until the control thread answers; returns whether it does, as it does not when the sidecar is ending. No lane is
    /// waited for.
    async fn is_served(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        self.commands.send(ControlCommand::Ping(reply)).await.is_ok() && answer.await.is_ok()
    }
}

/// Binds the pages to an address and serves them in a task of the current runtime.
///
/// # Errors
/// When the address cannot be bound.
pub(crate) async fn serve(pages: Pages, address: SocketAddr) -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await;
    let listener =
        listener.with_context(|| format!("cannot bind {address} for the admin pages")).context(Code::PortBind)?;
    let address = listener.local_addr().context("the admin port has no address")?;
    let router = Router::new()
        .route("/", get(live::page))
        .route("/events", get(live::events))
        .route("/healthz", get(healthz))
        .route("/status", get(status))
        .route("/metrics", get(metrics_page))
        .route("/flight", get(flight::page))
        .with_state(pages);
    tokio::spawn(listener::run(listener, router));
    Ok(address)
}

async fn healthz(State(pages): State<Pages>) -> impl IntoResponse {
    match pages.is_served().await {
        true => (StatusCode::OK, "ok\n"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "the sidecar is ending\n"),
    }
}

async fn status(State(pages): State<Pages>) -> impl IntoResponse {
    match pages.status().await {
        Some(page) => axum::Json(page).into_response(),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

async fn metrics_page(State(pages): State<Pages>) -> impl IntoResponse {
    let Some(snapshot) = pages.snapshot().await else {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    };
    match metrics::render(&snapshot) {
        Ok(text) => ([("content-type", "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn the_health_of_a_sidecar_needs_no_snapshot_however_many_idle_connections_there_are() {
        let (commands, mut driver) = mpsc::channel(8);
        let pages = Pages::new(commands, JobName::new("job").expect("a name"));
        let address = serve(pages, SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a free port");
        let mut idle = Vec::new();
        for _ in 0..200 {
            idle.push(TcpStream::connect(address).await.expect("it accepts"));
        }
        let control = tokio::spawn(async move {
            let Some(ControlCommand::Ping(reply)) = driver.recv().await else { panic!("it asks for more") };
            reply.send(()).expect("it is awaited");
        });
        let mut reader = TcpStream::connect(address).await.expect("it accepts");
        reader.write_all(b"GET /healthz HTTP/1.1\r\nHost: sidecar\r\n\r\n").await.expect("it reads");
        let mut answer = String::new();
        reader.read_to_string(&mut answer).await.expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\nok\n"), "{answer}");
        control.await.expect("one command");
        drop(idle);
    }
}
