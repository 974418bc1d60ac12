//! Which connections of a port there are, so that they can be ended together and waited for.

use std::sync::Arc;

use tokio::sync::watch;

/// Counts connections.
#[derive(Clone)]
pub(super) struct ConnectionCounter(Arc<watch::Sender<usize>>);

impl ConnectionCounter {
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// To be held by a connection for as long as it is there.
    pub(super) fn register(&self) -> ConnectionGuard {
        self.0.send_modify(|count| *count += 1);
        ConnectionGuard(self.0.clone())
    }

    /// Waits until no connection is left.
    pub(super) async fn wait_zero(&self) {
        // The sender is held here, so that this cannot fail.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// One connection that is there.
pub(super) struct ConnectionGuard(Arc<watch::Sender<usize>>);

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
