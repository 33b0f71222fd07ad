//! The heartbeats of a stream: which message of the gateway the scheduler has received.
//!
//! The scheduler also sends unasked, so a message from it is no proof of contact. Only the number of a message
//! that the scheduler says it received is. Contact counts from when the gateway sent that message, which is before
//! the scheduler noted it.
//!
//! Invariant: contact is never later than the scheduler knows. So when the `stop_after` of a supervisor has passed,
//! the `lost_after` of the scheduler, which is longer, has not.

use std::collections::VecDeque;
use std::time::Duration;

/// What was sent on one stream, and when, by `CLOCK_BOOTTIME`.
#[derive(Debug)]
pub(crate) struct Heartbeats {
    /// Messages that the scheduler has not said to have heard, oldest first.
    unheard: VecDeque<(u64, Duration)>,
    last: u64,
    told: Option<Duration>,
}

/// The scheduler says that it heard what was never sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NeverSent;

impl Heartbeats {
    /// Of a stream whose hello, which is number 0, was sent at `hello`.
    pub(crate) fn new(hello: Duration) -> Self {
        Self { unheard: VecDeque::from([(0, hello)]), last: 0, told: None }
    }

    /// A message is about to be sent. Answers its number.
    pub(crate) fn sending(&mut self, now: Duration) -> u64 {
        self.last += 1;
        self.unheard.push_back((self.last, now));
        self.last
    }

    /// The scheduler has heard message `number`. Answers since when contact may be counted, if that is news: `every` so often.
    pub(crate) fn received(&mut self, number: u64, every: Duration) -> Result<Option<Duration>, NeverSent> {
        if number > self.last {
            return Err(NeverSent);
        }
        while self.unheard.front().is_some_and(|(earlier, _)| *earlier < number) {
            self.unheard.pop_front();
        }
        let Some((_, sent)) = self.unheard.front().filter(|(sent, _)| *sent == number) else {
            return Ok(None);
        };
        let news = self.told.is_none_or(|told| *sent > told && sent.saturating_sub(told) >= every);
        if news {
            self.told = Some(*sent);
        }
        Ok(self.told.filter(|_| news))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn contact_counts_from_when_the_message_was_sent_that_was_heard() {
        let mut contact = Heartbeats::new(at(100));
        assert_eq!(contact.received(0, at(5)), Ok(Some(at(100))), "the hello was");
        assert_eq!((contact.sending(at(110)), contact.sending(at(120)), contact.sending(at(130))), (1, 2, 3));
        assert_eq!(contact.received(2, at(5)), Ok(Some(at(120))));
        assert_eq!(contact.received(1, at(5)), Ok(None), "an older one is no news");
        assert_eq!(contact.received(4, at(5)), Err(NeverSent));
    }

    #[test]
    fn what_the_scheduler_says_unasked_is_no_contact() {
        let mut contact = Heartbeats::new(at(100));
        assert_eq!(contact.received(0, at(5)), Ok(Some(at(100))));
        for sent in 101..200 {
            contact.sending(at(sent));
            assert_eq!(contact.received(0, at(5)), Ok(None), "it has heard nothing since the hello");
        }
        assert_eq!(contact.received(7, at(5)), Ok(Some(at(107))));
    }

    #[test]
    fn the_worker_is_not_told_of_each_message() {
        let mut contact = Heartbeats::new(at(100));
        let mut told = Vec::new();
        for sent in 100..120 {
            let number = contact.sending(at(sent));
            told.extend(contact.received(number, at(5)).expect("it was sent"));
        }
        assert_eq!(told, [at(100), at(105), at(110), at(115)]);
    }
}
