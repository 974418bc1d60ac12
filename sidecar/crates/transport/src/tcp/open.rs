//! Which connections of a port there are, so that they can be ended together and waited for.

use std::sync::Arc;

use tokio::sync::watch;

/// Counts connections.
#[derive(Clone)]
pub(super) struct Census(Arc<watch::Sender<usize>>);

impl Census {
    pub(super) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// To be held by a connection for as long as it is there.
    pub(super) fn enter(&self) -> Open {
        self.0.send_modify(|count| *count += 1);
        Open(self.0.clone())
    }

    /// Waits until no connection is left.
    pub(super) async fn until_empty(&self) {
        // The sender is held here, so that this cannot fail.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// One connection that is there.
pub(super) struct Open(Arc<watch::Sender<usize>>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
