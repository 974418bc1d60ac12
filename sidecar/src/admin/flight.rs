//! `/flight`: what the flight recorder has, as JSON, for a bounded number of readers at a time.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;

use super::Pages;

/// The records that are made or sent at a time: each takes some megabytes, and anybody who reaches the port may ask.
const READERS_MAX: usize = 2;
/// How long a reader may take to read its answer, of which it gets some ten megabytes at most in a job of eight ranks; then
/// the answer ends, and its place is free.
const READ_MAX: Duration = Duration::from_secs(30);
/// The bytes that are sent at once.
const PART_BYTES: usize = 64 << 10;
/// The answer when nothing is recorded.
const OFF: &str = "the flight recorder of this sidecar is off: its flight_dir is `off`\n";
const BUSY: &str = "others read the flight record of this sidecar; try again in some seconds\n";

/// The places of readers.
#[derive(Clone)]
pub(super) struct Readers(Arc<Semaphore>);

impl Default for Readers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(READERS_MAX)))
    }
}

/// Answers with the record. A task makes it: a reader that closes its connection meanwhile keeps its place until the work
/// that it has caused has ended, so that no number of such readers causes more.
pub(super) async fn page(State(pages): State<Pages>) -> Response {
    let Ok(place) = pages.readers.0.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, BUSY).into_response();
    };
    match tokio::spawn(make(pages, place)).await {
        Ok(Made::Record(record, place)) => answer(record, place),
        Ok(Made::Off) => (StatusCode::NOT_FOUND, OFF).into_response(),
        Ok(Made::Ending) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Ok(Made::Failed(reason)) => (StatusCode::INTERNAL_SERVER_ERROR, reason).into_response(),
        Err(failed) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{failed}\n")).into_response(),
    }
}

/// What there is to send.
enum Made {
    /// The record, and the place of its reader.
    Record(Bytes, OwnedSemaphorePermit),
    /// Nothing is recorded.
    Off,
    /// The sidecar is ending.
    Ending,
    /// The record cannot be made, for this reason.
    Failed(String),
}

async fn make(pages: Pages, place: OwnedSemaphorePermit) -> Made {
    let snapshot = match pages.flight().await {
        Some(Some(snapshot)) => snapshot,
        Some(None) => return Made::Off,
        None => return Made::Ending,
    };
    // The conversion of all notes is not for the control thread, on which this runs.
    match tokio::task::spawn_blocking(move || serde_json::to_vec(&snapshot.into_record())).await {
        Ok(Ok(record)) => Made::Record(record.into(), place),
        failed => Made::Failed(format!("{failed:?}\n")),
    }
}

/// Sends a record in parts. The place is free again when all of it is sent, or the reader is gone or too slow.
fn answer(record: Bytes, place: OwnedSemaphorePermit) -> Response {
    let (sender, receiver) = mpsc::channel(1);
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
        (header::CONTENT_LENGTH, record.len().to_string()),
    ];
    tokio::spawn(async move {
        // The body is shorter than its length then, so that the reader sees that it is not complete.
        let _ = timeout(READ_MAX, send(record, sender)).await;
        drop(place);
    });
    (headers, Body::from_stream(ReceiverStream::new(receiver))).into_response()
}

async fn send(mut record: Bytes, reader: mpsc::Sender<Result<Bytes, Infallible>>) {
    while !record.is_empty() {
        // A copy: a reader that stalls with a part keeps that part, not the record.
        let part = Bytes::copy_from_slice(&record.split_to(record.len().min(PART_BYTES)));
        if reader.send(Ok(part)).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use ronde_wire::JobName;

    use super::*;
    use crate::driver::command::ControlCommand;

    #[tokio::test(start_paused = true)]
    async fn readers_beyond_a_few_are_refused_until_another_one_has_read() {
        let (commands, _driver) = mpsc::channel(1);
        let pages = Pages::new(commands, JobName::new("job").expect("a name"));
        let record = Bytes::from(vec![b'1'; 5 * PART_BYTES + 1]);
        let place = || pages.readers.0.clone().try_acquire_owned();
        let first = answer(record.clone(), place().expect("the first"));
        let second = answer(record.clone(), place().expect("the second"));
        assert_eq!(first.headers()[header::CONTENT_LENGTH], record.len().to_string());
        let refused = page(State(pages.clone())).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        let words = refused.into_body().collect().await.expect("it is short").to_bytes();
        assert_eq!(words, BUSY);
        let read = first.into_body().collect().await.expect("all of it").to_bytes();
        assert!(read == record);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let next = place().expect("the first one has read");
        assert!(place().is_err(), "the second one has not");
        tokio::time::sleep(READ_MAX).await;
        drop((next, place().expect("the second one has lost its place")));
        let part = second.into_body().collect().await.expect("what was sent").to_bytes();
        assert!(part.len() < record.len());
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_reads_slowly_loses_its_place_and_one_that_closes_frees_it() {
        let readers = Readers::default();
        let free = || readers.0.available_permits();
        let place = || readers.0.clone().try_acquire_owned().expect("a place");
        let slow = answer(Bytes::from(vec![b'1'; 100 * PART_BYTES]), place());
        let closed = answer(Bytes::from(vec![b'1'; 100 * PART_BYTES]), place());
        drop(closed);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(free(), 1, "nobody reads the second one");
        let mut body = slow.into_body();
        for _ in 0..3 {
            body.frame().await.expect("it is not complete").expect("no error can occur");
            tokio::time::sleep(READ_MAX * 2 / 5).await;
        }
        assert_eq!(free(), READERS_MAX, "each part was read soon, and all of them too slowly");
    }

    #[tokio::test]
    async fn a_reader_that_closes_keeps_its_place_until_the_control_thread_has_answered() {
        let (commands, mut driver) = mpsc::channel(1);
        let pages = Pages::new(commands, JobName::new("job").expect("a name"));
        let reader = tokio::spawn(page(State(pages.clone())));
        let Some(ControlCommand::Flight(reply)) = driver.recv().await else { panic!("not a request of a record") };
        reader.abort();
        assert!(reader.await.is_err_and(|error| error.is_cancelled()));
        assert_eq!(pages.readers.0.available_permits(), READERS_MAX - 1, "the control thread is not ready yet");
        reply.send(None).ok().expect("it is still awaited");
        let all = pages.readers.0.acquire_many(u32::try_from(READERS_MAX).expect("a few"));
        drop(timeout(Duration::from_secs(5), all).await.expect("the place is free then").expect("it is open"));
    }
}
