//! Tasks and timers: of the event loop of the page or Node in WebAssembly, of Tokio's local tasks in tests. WebAssembly has no
//! clock, so waits are counted and not measured.

use std::time::Duration;

/// Spawns a task on this thread.
#[cfg(target_arch = "wasm32")]
pub(super) fn spawn(task: impl Future<Output = ()> + 'static) {
    wasm_bindgen_futures::spawn_local(task);
}

/// Spawns a task on this thread, which runs a `LocalSet`.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn spawn(task: impl Future<Output = ()> + 'static) {
    // The task ends with its session.
    drop(tokio::task::spawn_local(task));
}

/// Waits for some time.
#[cfg(target_arch = "wasm32")]
pub(super) async fn sleep(time: Duration) {
    // The longest that setTimeout takes is 24 days.
    let milliseconds = u32::try_from(time.as_millis()).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs());
    gloo_timers::future::TimeoutFuture::new(milliseconds).await;
}

/// Waits for some time.
#[cfg(not(target_arch = "wasm32"))]
pub(super) async fn sleep(time: Duration) {
    tokio::time::sleep(time).await;
}

/// The output of a future; `None` when it takes longer than `time`.
pub(super) async fn within<T>(time: Duration, future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        output = future => Some(output),
        () = sleep(time) => None,
    }
}
