//! Counts the open connections of a port, so that a shutdown can wait for them.

use std::sync::Arc;

use tokio::sync::watch;

/// A shared count of connections.
#[derive(Clone)]
pub(super) struct ConnectionCounter(Arc<watch::Sender<usize>>);

impl ConnectionCounter {
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// Counts a connection until the guard is dropped.
    pub(super) fn register(&self) -> ConnectionGuard {
        self.0.send_modify(|count| *count += 1);
        ConnectionGuard(self.0.clone())
    }

    /// Waits until no connection is open.
    pub(super) async fn wait_zero(&self) {
        // This cannot fail, because this value holds the sender.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// Counts one open connection.
pub(super) struct ConnectionGuard(Arc<watch::Sender<usize>>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
