//! The page for people: `/`, one document without anything from elsewhere, and `/events`, the status page each second as
//! server-sent events. Nothing can be changed through either.

use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderName, StatusCode, header};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;

use super::Pages;
use super::listener::Streamed;

const PAGE: &str = include_str!("page.html");
/// The streams that are open at a time; each costs a snapshot a second.
const VIEWERS_MAX: usize = 32;
/// The time between two snapshots of a stream.
const PERIOD: Duration = Duration::from_secs(1);
/// How long a viewer may take to read what was sent; then its stream ends, and its place is free.
const UNREAD_MAX: Duration = Duration::from_secs(30);

/// The places of viewers.
#[derive(Clone)]
pub(super) struct Viewers(Arc<Semaphore>);

impl Default for Viewers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(VIEWERS_MAX)))
    }
}

/// The policy for browsers: the styles and the script of this very page, its stream, and nothing from elsewhere.
static POLICY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'",
        fingerprint(PAGE, "script"),
        fingerprint(PAGE, "style")
    )
});

/// The digest of an element's contents, as a policy names it (Content Security Policy Level 3, section 2.3.1).
fn fingerprint(page: &str, element: &str) -> String {
    let (_, rest) = page.split_once(&format!("<{element}>")).unwrap_or_default();
    let (contents, _) = rest.split_once(&format!("</{element}>")).unwrap_or_default();
    format!("sha256-{}", BASE64_STANDARD.encode(digest(&SHA256, contents.as_bytes())))
}

/// Answers with the page.
pub(super) async fn page() -> impl IntoResponse {
    let headers: [(HeaderName, &str); 5] = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY.as_str()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    (headers, PAGE)
}

/// Answers with the stream: an event `status` each second, to the sidecar's end.
pub(super) async fn events(State(pages): State<Pages>) -> Response {
    let Ok(place) = pages.viewers.0.clone().try_acquire_owned() else {
        let words = format!("{VIEWERS_MAX} viewers have this page open already; close one of them\n");
        return (StatusCode::SERVICE_UNAVAILABLE, words).into_response();
    };
    let (sender, receiver) = mpsc::channel(1);
    let (lasts, ended) = watch::channel(());
    tokio::spawn(async move {
        // Until then, the stream is no part of the connections that the listener bounds.
        let _lasts = lasts;
        send_all(pages, sender, place).await;
    });
    // Proxies would wait for more before they pass an event on.
    let unbuffered = [(HeaderName::from_static("x-accel-buffering"), "no")];
    (Extension(Streamed(ended)), unbuffered, Sse::new(ReceiverStream::new(receiver))).into_response()
}

/// Sends snapshots until the viewer or the sidecar is gone.
async fn send_all(pages: Pages, viewer: mpsc::Sender<Result<Event, Infallible>>, _place: OwnedSemaphorePermit) {
    let mut turns = interval(PERIOD);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = turns.tick() => {}
            () = viewer.closed() => return,
        }
        let Some(status) = pages.status().await else {
            return;
        };
        let event = match Event::default().event("status").json_data(status) {
            Ok(event) => event,
            Err(error) => return tracing::error!(%error, "a status page cannot be written as JSON"),
        };
        if !matches!(timeout(UNREAD_MAX, viewer.send(Ok(event))).await, Ok(Ok(()))) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_one_document_with_one_style_and_one_script() {
        for element in ["style", "script"] {
            assert_eq!(PAGE.matches(&format!("<{element}")).count(), 1, "the policy names one {element}");
        }
        let addresses = ["http://", "https://", "//cdn", "src=", "@import", "url("];
        assert_eq!(addresses.into_iter().find(|part| PAGE.contains(part)), None, "nothing is loaded from elsewhere");
        let markup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("];
        assert_eq!(markup.into_iter().find(|part| PAGE.contains(part)), None, "names are shown as text");
        assert!(!PAGE.contains(" style="), "the policy forbids styles in attributes");
    }

    #[test]
    fn the_policy_names_digests() {
        // The digest of nothing is what an element that is not found would give.
        let nothing = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=";
        assert_eq!(fingerprint("<style></style>", "style"), nothing);
        assert_ne!(fingerprint(PAGE, "style"), nothing);
        assert_ne!(fingerprint(PAGE, "script"), nothing);
    }
}
