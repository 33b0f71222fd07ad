//! Choice between raw and compressed messages of one transfer, from the measured link.
//!
//! [`super::Packer`] reports each compression and each message that it hands over, and asks before
//! the next one. Sizes and times are arguments, so the choice depends on nothing else.
//!
//! - *The link.* Messages wait in a queue of limited length. If the queue was full when a message
//!   was added and when the next one was added, the oldest message left it in between. Only this is
//!   measured, so buffers behind the queue, such as HTTP/2 windows, do not distort the rate.
//! - *The start.* The link is unknown at first, and the transfer begins compressed. If
//!   [`FREE_BYTES`] leave without a wait, and most of the time is that of the compressor, the link
//!   counts as fast, and messages are sent raw.
//! - *The content.* A message that does not shrink is sent raw. So are the next ones, whose number
//!   doubles up to [`MAX_SKIPPED`].

use std::collections::VecDeque;
use std::time::Duration;

/// Bytes that are sent without a wait before the link counts as fast. Queues and buffers between
/// the sender and the link may hold this much.
const FREE_BYTES: u64 = 12 << 20;
/// Times by which compression must be faster than the link.
const SPEED_MARGIN: f64 = 2.0;
/// Times by which bytes must leave faster than measured before the link is measured again.
const FASTER: f64 = 1.25;
/// Time after which a measurement of a rate has half of its weight.
const HALF_TIME: Duration = Duration::from_millis(500);
/// Most messages that are sent raw after one that does not shrink.
const MAX_SKIPPED: u32 = 8;

/// Rate in bytes per second, in which older measurements have less weight.
#[derive(Debug, Default)]
struct Rate {
    bytes: f64,
    time: f64,
}

impl Rate {
    fn add(&mut self, bytes: usize, time: Duration) {
        self.bytes += bytes as f64;
        self.time += time.as_secs_f64();
        if self.time > HALF_TIME.as_secs_f64() {
            self.bytes /= 2.0;
            self.time /= 2.0;
        }
    }

    /// Returns the rate. `None`: nothing was measured.
    fn per_second(&self) -> Option<f64> {
        (self.bytes > 0.0).then(|| self.bytes / self.time.max(f64::EPSILON))
    }
}

/// Knowledge about the link of a transfer.
#[derive(Debug)]
enum Link {
    /// Nothing was measured yet.
    Unknown,
    /// The link is faster than the sender, as far as known.
    Fast,
    /// The link slows the sender down.
    Slow(Rate),
}

/// Messages that did not wait for the link.
#[derive(Debug, Default)]
struct FreeRun {
    bytes: u64,
    time: Duration,
    /// Part of the time in which the compressor worked.
    compressing: Duration,
}

/// The state of one transfer.
#[derive(Debug)]
pub(super) struct Choice {
    link: Link,
    /// Content per second that the compressor reads.
    compressor: Rate,
    /// Bytes of the last messages, as many as the queue holds.
    queued: VecDeque<usize>,
    /// Whether the queue was full when the last message was added.
    was_full: bool,
    /// Messages since the queue was full.
    free: FreeRun,
    /// Messages to send raw before the next one is compressed.
    skip: u32,
    /// Number of messages to skip after the next one that does not shrink.
    next_skip: u32,
}

impl Choice {
    pub(super) fn new() -> Self {
        Self {
            link: Link::Unknown,
            compressor: Rate::default(),
            queued: VecDeque::new(),
            was_full: false,
            free: FreeRun::default(),
            skip: 0,
            next_skip: 1,
        }
    }

    /// Decides whether the next message is to be compressed.
    pub(super) fn compresses_next(&mut self) -> bool {
        let is_slow = match &self.link {
            Link::Unknown => true,
            Link::Fast => false,
            Link::Slow(rate) => match (rate.per_second(), self.compressor.per_second()) {
                (Some(link), Some(compressor)) => link * SPEED_MARGIN < compressor,
                _ => true,
            },
        };
        if is_slow && self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        is_slow
    }

    /// Records a compression of `bytes` that took `time`, and whether they shrank.
    pub(super) fn record_compression(&mut self, bytes: usize, time: Duration, shrank: bool) {
        self.compressor.add(bytes, time);
        self.free.compressing += time;
        if shrank {
            self.next_skip = 1;
        } else {
            self.skip = self.next_skip;
            self.next_skip = (self.next_skip * 2).min(MAX_SKIPPED);
        }
    }

    /// Records a message of `bytes` that was added to a queue for `capacity` messages, `time` after
    /// the previous one. `was_full`: the message had to wait for another one to leave.
    pub(super) fn record_sent(&mut self, bytes: usize, time: Duration, capacity: usize, was_full: bool) {
        self.queued.push_back(bytes);
        let left = if self.queued.len() > capacity { self.queued.pop_front() } else { None };
        if was_full {
            if let Some(left) = left.filter(|_| self.was_full) {
                if !matches!(self.link, Link::Slow(_)) {
                    self.link = Link::Slow(Rate::default());
                }
                if let Link::Slow(rate) = &mut self.link {
                    rate.add(left, time);
                }
            }
            self.free = FreeRun::default();
        } else {
            self.free.bytes += bytes as u64;
            self.free.time += time;
            if self.free.bytes >= FREE_BYTES {
                self.end_free_run();
            }
        }
        self.was_full = was_full;
    }

    /// Judges the link after many bytes have left without a wait.
    fn end_free_run(&mut self) {
        let FreeRun { bytes, time, compressing } = std::mem::take(&mut self.free);
        if compressing < time / 2 {
            // The source of the contents is the limit, so raw messages would not be faster.
            return;
        }
        let rate = bytes as f64 / time.as_secs_f64().max(f64::EPSILON);
        // The compressor may be the limit. The link is only known to be at least that fast.
        let is_as_measured = match &self.link {
            Link::Slow(measured) => measured.per_second().is_some_and(|measured| rate <= measured * FASTER),
            Link::Unknown | Link::Fast => false,
        };
        if !is_as_measured {
            self.link = Link::Fast;
        }
    }
}

#[cfg(test)]
mod tests;
