//! The feed of what rounds of collection mark, for callers that look on: as it is committed, and no
//! more than they take.

use std::sync::Arc;

use tokio::sync::broadcast;

use crate::policy::garbage::Collected;

/// How many things are in one message.
const BATCH: usize = 1000;

/// How many messages wait for the slowest.
const AHEAD: usize = 64;

/// The callers that look on.
#[derive(Debug)]
pub(crate) struct CollectionFeed(broadcast::Sender<Arc<[Collected]>>);

impl Default for CollectionFeed {
    fn default() -> Self {
        Self(broadcast::Sender::new(AHEAD))
    }
}

impl CollectionFeed {
    /// What is marked from now on. A caller that is too slow is told how many messages it missed.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<[Collected]>> {
        self.0.subscribe()
    }

    /// These were marked, and it is committed.
    pub(crate) fn tell(&self, collected: &[Collected]) {
        if self.0.receiver_count() == 0 {
            return;
        }
        for some in collected.chunks(BATCH) {
            // The callers may have left.
            self.0.send(some.into()).ok();
        }
    }
}
