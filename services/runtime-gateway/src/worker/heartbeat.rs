//! Heartbeats of a stream: the messages of the gateway that the scheduler has acknowledged.
//!
//! The scheduler also sends messages that answer nothing, so a message from it is no proof of
//! contact. Proof is the number of a message that the scheduler acknowledges. Contact counts from
//! the time at which the gateway sent that message.
//!
//! Invariant: the gateway never dates contact later than the scheduler does. So a supervisor stops
//! its process (`stop_after`) before the scheduler gives the worker up (`lost_after`, which is
//! longer).

use std::collections::VecDeque;
use std::time::Duration;

/// Messages of one stream, with the time of sending by `CLOCK_BOOTTIME`.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    /// Messages that the scheduler has not acknowledged, oldest first.
    unacknowledged: VecDeque<(u64, Duration)>,
    last: u64,
    reported: Option<Duration>,
}

/// The scheduler acknowledged a message that was never sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NeverSent;

impl Heartbeats {
    /// Starts with the registration, which is message 0 and was sent at `registered_at`.
    pub(crate) fn new(registered_at: Duration) -> Self {
        Self { unacknowledged: VecDeque::from([(0, registered_at)]), last: 0, reported: None }
    }

    /// Records a message that is about to be sent, and returns its number.
    pub(crate) fn record_sent(&mut self, now: Duration) -> u64 {
        self.last += 1;
        self.unacknowledged.push_back((self.last, now));
        self.last
    }

    /// Records that the scheduler acknowledged message `number`. Returns the time of contact, at
    /// most once per `every`.
    pub(crate) fn acknowledge(
        &mut self,
        number: u64,
        every: Duration,
    ) -> Result<Option<Duration>, NeverSent> {
        if number > self.last {
            return Err(NeverSent);
        }
        while self.unacknowledged.front().is_some_and(|(earlier, _)| *earlier < number) {
            self.unacknowledged.pop_front();
        }
        let Some((_, sent)) = self.unacknowledged.front().filter(|(sent, _)| *sent == number) else {
            return Ok(None);
        };
        let news =
            self.reported.is_none_or(|reported| *sent > reported && sent.saturating_sub(reported) >= every);
        if news {
            self.reported = Some(*sent);
        }
        Ok(self.reported.filter(|_| news))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn contact_counts_from_the_acknowledged_message() {
        let mut contact = Heartbeats::new(at(100));
        assert_eq!(contact.acknowledge(0, at(5)), Ok(Some(at(100))), "the registration is acknowledged");
        assert_eq!(
            (contact.record_sent(at(110)), contact.record_sent(at(120)), contact.record_sent(at(130))),
            (1, 2, 3)
        );
        assert_eq!(contact.acknowledge(2, at(5)), Ok(Some(at(120))));
        assert_eq!(contact.acknowledge(1, at(5)), Ok(None), "an older message is not reported");
        assert_eq!(contact.acknowledge(4, at(5)), Err(NeverSent));
    }

    #[test]
    fn unsolicited_message_is_no_contact() {
        let mut contact = Heartbeats::new(at(100));
        assert_eq!(contact.acknowledge(0, at(5)), Ok(Some(at(100))));
        for sent in 101..200 {
            contact.record_sent(at(sent));
            assert_eq!(contact.acknowledge(0, at(5)), Ok(None), "only the registration is acknowledged");
        }
        assert_eq!(contact.acknowledge(7, at(5)), Ok(Some(at(107))));
    }

    #[test]
    fn contact_is_reported_once_per_interval() {
        let mut contact = Heartbeats::new(at(100));
        let mut reported = Vec::new();
        for sent in 100..120 {
            let number = contact.record_sent(at(sent));
            reported.extend(contact.acknowledge(number, at(5)).expect("it was sent"));
        }
        assert_eq!(reported, [at(100), at(105), at(110), at(115)]);
    }
}
