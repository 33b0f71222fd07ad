//! Simulated transfers: a queue of four messages, a buffer behind it, and a link.

use std::collections::VecDeque;

use super::*;

/// Bytes of content in a message.
const MESSAGE: f64 = 1048576.0;
/// Messages that the queue holds.
const QUEUE: usize = 4;
/// Bytes of content that the compressor reads in a second.
const COMPRESSOR: f64 = 400e6;

/// A transfer with a simulated clock.
struct Simulation {
    choice: Choice,
    /// Bytes of the link in a second.
    link: f64,
    /// Bytes that the sender reads from its disk in a second.
    disk: f64,
    /// Bytes that the buffer holds, such as those of HTTP/2 windows.
    buffer: f64,
    /// Bytes of the messages that have not left.
    waiting: VecDeque<f64>,
    seconds: f64,
    last_sent: f64,
}

/// What happened to some messages.
#[derive(Debug, Default)]
struct Outcome {
    compressions: u32,
    compressed: u32,
    seconds: f64,
}

impl Simulation {
    fn new(link: f64, buffer: f64) -> Self {
        let waiting = VecDeque::new();
        Self { choice: Choice::new(), link, disk: 2e9, buffer, waiting, seconds: 0.0, last_sent: 0.0 }
    }

    /// Lets time pass while the link sends.
    fn pass(&mut self, seconds: f64) {
        self.seconds += seconds;
        let mut bytes = seconds * self.link;
        while let Some(first) = self.waiting.front_mut() {
            if *first > bytes {
                *first -= bytes;
                return;
            }
            bytes -= *first;
            self.waiting.pop_front();
        }
    }

    /// Returns the time until the queue has room.
    fn full_for(&self) -> f64 {
        let in_front = self.waiting.len().saturating_sub(QUEUE - 1);
        let bytes: f64 = self.waiting.iter().take(in_front).sum();
        ((bytes - self.buffer) / self.link).max(0.0)
    }

    /// Sends messages that compression would shrink to `ratio`.
    fn send(&mut self, messages: u32, ratio: f64) -> Outcome {
        let (begin, mut outcome) = (self.seconds, Outcome::default());
        for _ in 0..messages {
            self.pass(MESSAGE / self.disk);
            let mut bytes = MESSAGE;
            if self.choice.compresses_next() {
                let time = MESSAGE / COMPRESSOR;
                self.pass(time);
                let shrank = ratio <= 0.9;
                self.choice.record_compression(MESSAGE as usize, Duration::from_secs_f64(time), shrank);
                outcome.compressions += 1;
                if shrank {
                    outcome.compressed += 1;
                    bytes *= ratio;
                }
            }
            let wait = self.full_for();
            self.pass(wait);
            self.waiting.push_back(bytes);
            let since = Duration::from_secs_f64(self.seconds - self.last_sent);
            self.choice.record_sent(bytes as usize, since, QUEUE, wait > 0.0);
            self.last_sent = self.seconds;
        }
        outcome.seconds = self.seconds - begin;
        outcome
    }
}

/// Buffers of different sizes, in bytes.
const BUFFERS: [f64; 3] = [0.0, 2e6, 8e6];

#[test]
fn slow_link_carries_compressed_content_faster() {
    for buffer in BUFFERS {
        let outcome = Simulation::new(12.5e6, buffer).send(200, 0.25);
        assert_eq!(outcome.compressed, 200, "{buffer}");
        let rate = 200.0 * MESSAGE / outcome.seconds;
        assert!(rate > 3.5 * 12.5e6, "{buffer}: {rate}");
    }
}

#[test]
fn content_that_does_not_shrink_is_rarely_compressed() {
    for buffer in BUFFERS {
        let outcome = Simulation::new(12.5e6, buffer).send(300, 1.0);
        assert!(outcome.compressions < 300 / 7, "{buffer}: {outcome:?}");
    }
}

#[test]
fn fast_link_carries_raw_content_soon() {
    for buffer in BUFFERS {
        let mut simulation = Simulation::new(1.2e9, buffer);
        simulation.send(60, 0.25);
        assert_eq!(simulation.send(1000, 0.25).compressions, 0, "{buffer}");
    }
}

#[test]
fn slow_source_does_not_make_link_look_fast() {
    for buffer in BUFFERS {
        let mut simulation = Simulation::new(12.5e6, buffer);
        simulation.disk = 40e6;
        assert_eq!(simulation.send(300, 0.25).compressed, 300, "{buffer}");
    }
}

#[test]
fn link_near_the_compressor_is_not_measured_again() {
    for buffer in BUFFERS {
        let outcome = Simulation::new(110e6, buffer).send(1000, 0.25);
        assert!(outcome.compressed > 950, "{buffer}: {outcome:?}");
        let outcome = Simulation::new(250e6, buffer).send(1000, 0.25);
        assert!(outcome.compressed < 50, "{buffer}: {outcome:?}");
    }
}

#[test]
fn choice_follows_the_content() {
    for buffer in BUFFERS {
        let mut simulation = Simulation::new(12.5e6, buffer);
        simulation.send(100, 1.0);
        let outcome = simulation.send(100, 0.25);
        assert!(outcome.compressed >= 100 - MAX_SKIPPED, "{buffer}: {outcome:?}");
    }
}

#[test]
fn choice_follows_the_link() {
    for buffer in BUFFERS {
        let mut simulation = Simulation::new(1.2e9, buffer);
        simulation.send(500, 0.25);
        simulation.link = 12.5e6;
        let slow = simulation.send(100, 0.25);
        assert!(slow.compressed > 80, "{buffer}: {slow:?}");
        simulation.link = 1.2e9;
        simulation.send(100, 0.25);
        let fast = simulation.send(500, 0.25);
        assert_eq!(fast.compressions, 0, "{buffer}");
    }
}
