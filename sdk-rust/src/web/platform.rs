//! Tasks and time: of the page's or Node's event loop in WebAssembly, of tokio's local tasks elsewhere, which is for tests.
//! There is no clock in WebAssembly, so that waits are counted and not measured.

use std::time::Duration;

/// Runs a task on this thread.
#[cfg(target_arch = "wasm32")]
pub(super) fn spawn(task: impl Future<Output = ()> + 'static) {
    wasm_bindgen_futures::spawn_local(task);
}

/// Runs a task on this thread, which is in a `LocalSet`.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn spawn(task: impl Future<Output = ()> + 'static) {
    // Ends by itself, with its session.
    drop(tokio::task::spawn_local(task));
}

/// Lets time pass.
#[cfg(target_arch = "wasm32")]
pub(super) async fn sleep(time: Duration) {
    // The longest that setTimeout takes is 24 days.
    let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs());
    gloo_timers::future::TimeoutFuture::new(milliseconds).await;
}

/// Lets time pass.
#[cfg(not(target_arch = "wasm32"))]
pub(super) async fn sleep(time: Duration) {
    tokio::time::sleep(time).await;
}

/// What something gives, unless it takes longer.
pub(super) async fn within<T>(time: Duration, something: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        given = something => Some(given),
        () = sleep(time) => None,
    }
}
