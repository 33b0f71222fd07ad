//! The feed of collected items, for callers that watch the collector.
//!
//! It publishes only committed marks, and buffers a limited number of messages.

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::policy::garbage::CollectedItem;

/// Maximum number of items per message.
const BATCH: usize = 1000;

/// Maximum number of messages buffered for the slowest subscriber.
const BUFFERED_MESSAGES: usize = 64;

/// Broadcast of collected items to subscribers.
#[derive(Debug)]
pub(crate) struct CollectionFeed(broadcast::Sender<Arc<[CollectedItem]>>);

impl Default for CollectionFeed {
    fn default() -> Self {
        Self(broadcast::Sender::new(BUFFERED_MESSAGES))
    }
}

impl CollectionFeed {
    /// Subscribes to items marked from now on. A slow subscriber receives the number of messages
    /// that it missed.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<[CollectedItem]>> {
        self.0.subscribe()
    }

    /// Publishes items whose marks are committed.
    pub(crate) fn publish(&self, collected: &[CollectedItem]) {
        if self.0.receiver_count() == 0 {
            return;
        }
        for some in collected.chunks(BATCH) {
            // Send fails if all subscribers have left.
            self.0.send(some.into()).ok();
        }
    }
}
