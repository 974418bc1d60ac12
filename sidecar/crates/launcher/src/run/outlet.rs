//! The way of output from connections and starters to the thread that writes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{mpsc, watch};

use super::output::Item;

/// Sends output; clones share the decision to wait no longer.
#[derive(Clone)]
pub(super) struct Outlet {
    queue: mpsc::Sender<Item>,
    closed: Arc<watch::Sender<bool>>,
    left_out: Arc<AtomicU64>,
}

impl Outlet {
    pub(super) fn new(queue: mpsc::Sender<Item>) -> Self {
        Self { queue, closed: Arc::new(watch::channel(false).0), left_out: Arc::default() }
    }

    /// Waits until the queue has room. After [`Outlet::close`] an item for which it has none is left out and counted.
    pub(super) async fn send(&self, item: Item) {
        let mut closed = self.closed.subscribe();
        tokio::select! {
            biased;
            // The thread lives as long as the launcher, so this fails only at its very end.
            _ = self.queue.send(item) => {}
            Ok(_) = closed.wait_for(|closed| *closed) => drop(self.left_out.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Lets nothing wait for the queue any more: the job ends, and what happens is behind output that nobody reads.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
    }

    /// What the user is told about texts that were left out.
    pub(super) fn notice(&self) -> Option<String> {
        let count = self.left_out.load(Ordering::Relaxed);
        (count > 0).then(|| {
            format!("{count} texts of the workers' output were left out, as nobody read it while the job ended")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_that_waits_is_left_out_when_the_outlet_closes() {
        let (queue, mut items) = mpsc::channel(1);
        let outlet = Outlet::new(queue);
        outlet.send(Item::Entered).await;
        let waiting = tokio::spawn({
            let outlet = outlet.clone();
            async move { outlet.send(Item::Notice("waits".to_owned())).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished() && outlet.notice().is_none(), "it waits for room");
        outlet.close();
        waiting.await.expect("it ends");
        assert!(outlet.notice().is_some_and(|text| text.starts_with("1 text")));
        assert!(matches!(items.recv().await, Some(Item::Entered)));
        // What has room is still written.
        outlet.send(Item::Block).await;
        assert!(matches!(items.recv().await, Some(Item::Block)));
    }
}
