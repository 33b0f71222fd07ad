//! Limits of incoming messages: their transfer time, and the memory of partial messages.
//!
//! tonic buffers a message until it is complete. A service bounds the length of one message, but
//! not the number of partial messages.

use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

use crate::caller::{BUDGET_UNIT, Caller, MAX_PARTIAL_BYTES, MessageBudget};

/// Maximum time in which the next [`STEP_BYTES`] bytes of a message arrive, or the rest of the
/// message.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a step. The first step of a message does not count toward the budget, because the
/// number of calls bounds it.
const STEP_BYTES: usize = 64 << 10;

#[derive(Debug, Clone, Copy)]
pub(crate) struct ArrivalLayer;

impl<S> Layer<S> for ArrivalLayer {
    type Service = Arrival<S>;

    fn layer(&self, inner: S) -> Arrival<S> {
        Arrival(inner)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Arrival<S>(S);

impl<S> Service<Request<Body>> for Arrival<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let budget = request.extensions().get::<Caller>().map(Caller::budget).unwrap_or_default();
        self.0.call(request.map(|body| if body.is_end_stream() { body } else { bounded(body, budget) }))
    }
}

/// The incoming messages of one call.
struct MessageStream {
    body: Body,
    budget: MessageBudget,
    progress: Progress,
    /// The rest of [`STEP_TIMEOUT`] for the current step.
    left: Duration,
    /// Bytes of the message that had arrived at the start of the current step.
    since: usize,
    /// Share of the budget that the message takes.
    share: Option<OwnedSemaphorePermit>,
}

fn bounded(body: Body, budget: MessageBudget) -> Body {
    let messages = MessageStream {
        body,
        budget,
        progress: Progress::default(),
        left: STEP_TIMEOUT,
        since: 0,
        share: None,
    };
    let frames = futures::stream::unfold(Some(messages), |messages| async {
        let mut messages = messages?;
        let frame = messages.next().await.transpose()?;
        let rest = frame.is_ok().then_some(messages);
        Some((frame, rest))
    });
    Body::new(StreamBody::new(frames))
}

impl MessageStream {
    async fn next(&mut self) -> Result<Option<Frame<Bytes>>, Status> {
        let frame = if self.progress.is_partial() {
            let began = Instant::now();
            let arrived = tokio::time::timeout(self.left, self.body.frame()).await;
            self.left = self.left.saturating_sub(began.elapsed());
            arrived.map_err(|_| late())?
        } else {
            self.body.frame().await
        };
        let Some(frame) = frame.transpose()? else { return Ok(None) };
        if let Some(data) = frame.data_ref() {
            let before = self.progress.number;
            self.progress.pass(data);
            if self.progress.number != before || !self.progress.is_partial() {
                (self.left, self.since, self.share) = (STEP_TIMEOUT, 0, None);
            }
            self.count(self.progress.arrived())?;
        }
        Ok(Some(frame))
    }

    /// Updates the step and the share of the budget after `arrived` bytes of the current message.
    fn count(&mut self, arrived: usize) -> Result<(), Status> {
        if arrived.saturating_sub(self.since) >= STEP_BYTES {
            (self.left, self.since) = (STEP_TIMEOUT, arrived);
        }
        let counted = self.share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        let more = (arrived.saturating_sub(STEP_BYTES) / BUDGET_UNIT).saturating_sub(counted);
        if more == 0 {
            return Ok(());
        }
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        let taken = self.budget.0.clone().try_acquire_many_owned(more).map_err(|_| full())?;
        match &mut self.share {
            Some(share) => share.merge(taken),
            None => self.share = Some(taken),
        }
        Ok(())
    }
}

fn late() -> Status {
    let message =
        format!("cannot receive a message of the call: it stalled for {} s", STEP_TIMEOUT.as_secs());
    rpc::Reason::DeadlineExceeded.status("gantry", message)
}

fn full() -> Status {
    let message =
        format!("{} MiB of messages on this connection have arrived in part", MAX_PARTIAL_BYTES >> 20);
    rpc::Reason::Unavailable.status("gantry", message)
}

/// Position in the messages of a call. Each message has a head: one byte for the compression and
/// four for the length.
#[derive(Debug, Default)]
struct Progress {
    head: [u8; 5],
    /// Number of received bytes of an incomplete head.
    head_arrived: usize,
    length: usize,
    /// Number of missing bytes of the current message.
    rest: usize,
    /// Number of messages that have begun.
    number: u64,
}

impl Progress {
    fn pass(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let wanted = if self.rest > 0 { self.rest } else { self.head.len() - self.head_arrived };
            let (taken, after) = data.split_at(wanted.min(data.len()));
            data = after;
            if self.rest > 0 {
                self.rest -= taken.len();
                continue;
            }
            if self.head_arrived == 0 {
                self.number += 1;
            }
            self.head[self.head_arrived..][..taken.len()].copy_from_slice(taken);
            self.head_arrived += taken.len();
            if let [_, a, b, c, d] = self.head
                && self.head_arrived == self.head.len()
            {
                self.length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
                (self.rest, self.head_arrived) = (self.length, 0);
            }
        }
    }

    /// Whether a message has begun and is incomplete.
    fn is_partial(&self) -> bool {
        self.rest > 0 || self.head_arrived > 0
    }

    /// Returns the number of received bytes of an incomplete message, without its head.
    fn arrived(&self) -> usize {
        if self.rest > 0 { self.length - self.rest } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    /// A call whose bytes the test sends.
    fn call(budget: &MessageBudget) -> (mpsc::Sender<Vec<u8>>, Body) {
        let (send, sent) = mpsc::channel::<Vec<u8>>(8);
        let frames = ReceiverStream::new(sent).map(|data| Ok::<_, Status>(Frame::data(Bytes::from(data))));
        (send, bounded(Body::new(StreamBody::new(frames)), budget.clone()))
    }

    /// The head of a message of `length` bytes, and the first `sent` bytes of it.
    fn message(length: usize, sent: usize) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend(u32::try_from(length).expect("a length").to_be_bytes());
        bytes.resize(5 + sent, 7);
        bytes
    }

    async fn arrived(body: &mut Body) -> usize {
        let frame = body.frame().await.expect("more").expect("no refusal");
        frame.data_ref().expect("data").len()
    }

    #[tokio::test(start_paused = true)]
    async fn call_ends_when_message_stalls() {
        for begun in [message(10, 9), vec![0, 0], message(STEP_BYTES * 9, STEP_BYTES * 2)] {
            let (send, mut body) = call(&MessageBudget::default());
            tokio::time::sleep(STEP_TIMEOUT * 10).await;
            let length = begun.len();
            send.send(begun).await.expect("read");
            assert_eq!(arrived(&mut body).await, length, "a call may be silent before a message");
            // Empty frames do not extend the timeout.
            let began = Instant::now();
            let refused = loop {
                match tokio::time::timeout(Duration::from_secs(50), body.frame()).await {
                    Err(_) => send.send(Vec::new()).await.expect("read"),
                    Ok(frame) => match frame.expect("more") {
                        Ok(_) => {}
                        Err(status) => break status,
                    },
                }
            };
            assert!(rpc::Refusal::from(refused).is(rpc::Reason::DeadlineExceeded));
            assert!(began.elapsed() <= STEP_TIMEOUT * 2, "{:?}", began.elapsed());
            assert!(body.frame().await.is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_message_arrives() {
        let (send, mut body) = call(&MessageBudget::default());
        for _ in 0..3 {
            send.send(message(STEP_BYTES * 5, STEP_BYTES)).await.expect("read");
            assert_eq!(arrived(&mut body).await, STEP_BYTES + 5);
            for _ in 0..4 {
                assert!(
                    tokio::time::timeout(STEP_TIMEOUT - Duration::from_secs(1), body.frame()).await.is_err()
                );
                send.send(vec![7; STEP_BYTES]).await.expect("read");
                assert_eq!(arrived(&mut body).await, STEP_BYTES);
            }
            assert!(
                tokio::time::timeout(STEP_TIMEOUT * 2, body.frame()).await.is_err(),
                "there is no next message yet"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn partial_messages_are_bounded_per_connection() {
        const LARGE: usize = 16 << 20;
        let budget = MessageBudget::default();
        let free = || budget.0.available_permits() * BUDGET_UNIT;
        let mut calls = Vec::new();
        let refused = loop {
            let (send, mut body) = call(&budget);
            send.send(message(LARGE, LARGE - 1)).await.expect("read");
            match body.frame().await.expect("more") {
                Ok(_) => calls.push((send, body)),
                Err(status) => break status,
            }
        };
        assert!(rpc::Refusal::from(refused).is(rpc::Reason::Unavailable));
        assert!(
            (MAX_PARTIAL_BYTES / LARGE..=MAX_PARTIAL_BYTES / LARGE + 1).contains(&calls.len()),
            "{}",
            calls.len()
        );
        let (small, mut body) = call(&budget);
        small.send(message(LARGE, STEP_BYTES)).await.expect("read");
        assert_eq!(arrived(&mut body).await, STEP_BYTES + 5, "the first step does not count");
        let before = free();
        let (send, body) = &mut calls[0];
        send.send(message(LARGE, LARGE - 1)[..1].to_vec()).await.expect("read");
        assert_eq!(arrived(body).await, 1, "the last byte of the message arrives");
        assert!(free() > before, "a complete message does not count");
        drop(calls);
        assert_eq!(free(), MAX_PARTIAL_BYTES, "messages of ended calls do not count");
    }

    #[test]
    fn progress_does_not_depend_on_frames() {
        let all = [message(0, 0), message(3, 3), message(70_000, 70_000), message(9, 2)].concat();
        for size in [1, 2, 5, 7, 4096, all.len()] {
            let mut progress = Progress::default();
            all.chunks(size).for_each(|piece| progress.pass(piece));
            assert_eq!((progress.is_partial(), progress.number, progress.arrived()), (true, 4, 2), "{size}");
        }
    }
}
