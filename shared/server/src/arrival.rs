//! Messages that are on their way: each that has begun arrives soon, and the large ones take a share of one budget meanwhile.
//!
//! tonic keeps what has arrived of a message until all of it is there. A service bounds the length of one message, and nothing else bounds how
//! many there are.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// How long the server waits for the rest of a message, all pauses together.
const WITHIN: Duration = Duration::from_secs(60);
/// Bytes from which on a message takes its length from the budget. Smaller ones are bounded by the number of calls.
const LARGE: usize = 64 << 10;
/// Bytes of all large messages that have arrived in part.
const BUDGET: usize = 256 << 20;
/// The most that one message takes from the budget, in bytes: no service reads a longer one.
const LONGEST: usize = 16 << 20;
/// The budget is counted in pieces of so many bytes.
const PIECE: usize = 1 << 10;

#[derive(Debug, Clone)]
pub(crate) struct ArrivalLayer(Arc<Semaphore>);

impl Default for ArrivalLayer {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BUDGET / PIECE)))
    }
}

impl<S> Layer<S> for ArrivalLayer {
    type Service = Arrival<S>;

    fn layer(&self, inner: S) -> Arrival<S> {
        Arrival { inner, budget: self.0.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Arrival<S> {
    inner: S,
    budget: Arc<Semaphore>,
}

impl<S> Service<Request<Body>> for Arrival<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        let budget = self.budget.clone();
        self.inner.call(request.map(|body| if body.is_end_stream() { body } else { bounded(body, budget) }))
    }
}

/// The messages of a call, as they arrive.
struct Arriving {
    body: Body,
    budget: Arc<Semaphore>,
    progress: Progress,
    /// What is left of [`WITHIN`] for the message that has begun.
    left: Duration,
    /// Its share of the budget, where it is large.
    share: Option<OwnedSemaphorePermit>,
}

fn bounded(body: Body, budget: Arc<Semaphore>) -> Body {
    let arriving = Arriving { body, budget, progress: Progress::default(), left: WITHIN, share: None };
    let frames = futures::stream::unfold(Some(arriving), |arriving| async {
        let mut arriving = arriving?;
        let frame = arriving.next().await.transpose()?;
        let rest = frame.is_ok().then_some(arriving);
        Some((frame, rest))
    });
    Body::new(StreamBody::new(frames))
}

impl Arriving {
    async fn next(&mut self) -> Result<Option<Frame<Bytes>>, Status> {
        let frame = match self.progress.unfinished() {
            Some(_) => within(&mut self.left, self.body.frame()).await?,
            None => self.body.frame().await,
        };
        let Some(frame) = frame.transpose()? else { return Ok(None) };
        let Some(data) = frame.data_ref() else { return Ok(Some(frame)) };
        let before = self.progress.number;
        self.progress.pass(data);
        if self.progress.number != before || self.progress.unfinished().is_none() {
            (self.left, self.share) = (WITHIN, None);
        }
        if let Some(length) = self.progress.unfinished().filter(|length| *length > LARGE)
            && self.share.is_none()
        {
            let pieces = u32::try_from(length.min(LONGEST) / PIECE).unwrap_or(u32::MAX);
            let share = within(&mut self.left, self.budget.clone().acquire_many_owned(pieces)).await?;
            self.share = share.ok();
        }
        Ok(Some(frame))
    }
}

/// Waits for `awaited` as long as is `left`, and takes from that what it took.
async fn within<T>(left: &mut Duration, awaited: impl Future<Output = T>) -> Result<T, Status> {
    let began = Instant::now();
    let arrived = tokio::time::timeout(*left, awaited).await;
    *left = left.saturating_sub(began.elapsed());
    arrived.map_err(|_| {
        let message = format!("a message did not arrive within {} s of its beginning", WITHIN.as_secs());
        rpc::Reason::DeadlineExceeded.status("gantry", message)
    })
}

/// How far the messages of a call have arrived. Each begins with a byte for its compression and four for its length.
#[derive(Debug, Default)]
struct Progress {
    head: [u8; 5],
    /// Bytes of the head that have arrived, while it is not whole.
    of_head: usize,
    length: usize,
    /// Bytes of the message that have not arrived.
    rest: usize,
    /// How many messages have begun.
    number: u64,
}

impl Progress {
    fn pass(&mut self, mut data: &[u8]) {
        while !data.is_empty() {
            let wanted = if self.rest > 0 { self.rest } else { self.head.len() - self.of_head };
            let (taken, after) = data.split_at(wanted.min(data.len()));
            data = after;
            if self.rest > 0 {
                self.rest -= taken.len();
                continue;
            }
            if self.of_head == 0 {
                self.number += 1;
            }
            self.head[self.of_head..][..taken.len()].copy_from_slice(taken);
            self.of_head += taken.len();
            if let [_, a, b, c, d] = self.head
                && self.of_head == self.head.len()
            {
                self.length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
                (self.rest, self.of_head) = (self.length, 0);
            }
        }
    }

    /// The length of the message that has arrived in part, in bytes. 0: not known yet.
    fn unfinished(&self) -> Option<usize> {
        if self.rest > 0 { Some(self.length) } else { (self.of_head > 0).then_some(0) }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;

    use super::*;

    /// A call whose bytes are sent by the test.
    fn call(budget: &Arc<Semaphore>) -> (mpsc::Sender<Vec<u8>>, Body) {
        let (send, sent) = mpsc::channel::<Vec<u8>>(8);
        let frames = ReceiverStream::new(sent).map(|data| Ok::<_, Status>(Frame::data(Bytes::from(data))));
        (send, bounded(Body::new(StreamBody::new(frames)), budget.clone()))
    }

    /// A message with so many bytes, and as many of them as `there`.
    fn message(length: usize, there: usize) -> Vec<u8> {
        let mut bytes = vec![0];
        bytes.extend(u32::try_from(length).expect("a length").to_be_bytes());
        bytes.resize(5 + there, 7);
        bytes
    }

    async fn arrived(body: &mut Body) -> usize {
        let frame = body.frame().await.expect("more").expect("no refusal");
        frame.data_ref().expect("data").len()
    }

    fn budget(bytes: usize) -> Arc<Semaphore> {
        Arc::new(Semaphore::new(bytes / PIECE))
    }

    #[tokio::test(start_paused = true)]
    async fn message_that_has_begun_arrives_in_time_or_the_call_ends() {
        for begun in [message(10, 9), vec![0, 0]] {
            let (send, mut body) = call(&budget(BUDGET));
            tokio::time::sleep(WITHIN * 10).await;
            let length = begun.len();
            send.send(begun).await.expect("read");
            assert_eq!(arrived(&mut body).await, length, "a call may be silent before a message");
            // What comes byte by byte gets no more time.
            let began = Instant::now();
            let refused = loop {
                let next = tokio::time::timeout(Duration::from_secs(50), body.frame()).await;
                match next {
                    Err(_) => send.send(Vec::new()).await.expect("read"),
                    Ok(frame) => match frame.expect("more") {
                        Ok(_) => {}
                        Err(status) => break status,
                    },
                }
            };
            assert!(rpc::Refusal::from(refused).is(rpc::Reason::DeadlineExceeded));
            assert!(began.elapsed() <= WITHIN * 2, "{:?}", began.elapsed());
            assert!(body.frame().await.is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_between_messages_have_no_limit() {
        let (send, mut body) = call(&budget(BUDGET));
        for _ in 0..3 {
            send.send(message(10, 4)).await.expect("read");
            send.send(vec![7; 6]).await.expect("read");
            assert_eq!(arrived(&mut body).await + arrived(&mut body).await, 15);
            assert!(tokio::time::timeout(WITHIN * 2, body.frame()).await.is_err());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn large_messages_wait_for_each_other_and_small_ones_do_not() {
        let all = budget(LONGEST);
        let (send, mut first) = call(&all);
        send.send(message(LONGEST, 1)).await.expect("read");
        assert_eq!(arrived(&mut first).await, 6);
        let (more, mut second) = call(&all);
        more.send(message(LARGE + 1, 1)).await.expect("read");
        let waits = tokio::time::timeout(WITHIN / 2, second.frame()).await;
        assert!(waits.is_err(), "the first has the whole budget");
        let (small, mut third) = call(&all);
        small.send(message(LARGE, 1)).await.expect("read");
        assert_eq!(arrived(&mut third).await, 6);
        // All of it: its share is free again.
        send.send(vec![7; LONGEST - 1]).await.expect("read");
        assert_eq!(arrived(&mut first).await, LONGEST - 1);
        assert_eq!(arrived(&mut second).await, 6);
        drop((first, second));
        let (again, mut fourth) = call(&all);
        again.send([message(1, 1), message(LARGE + 1, 1)].concat()).await.expect("read");
        assert_eq!(arrived(&mut fourth).await, 12);
        assert!(all.available_permits() < LONGEST / PIECE, "it is after another in one frame");
        drop(fourth);
        assert_eq!(all.available_permits(), LONGEST / PIECE, "and its share is free when its call has ended");
    }

    #[test]
    fn progress_is_the_same_whatever_the_pieces_are() {
        let all = [message(0, 0), message(3, 3), message(70_000, 70_000), message(9, 2)].concat();
        for size in [1, 2, 5, 7, 4096, all.len()] {
            let mut progress = Progress::default();
            all.chunks(size).for_each(|piece| progress.pass(piece));
            assert_eq!((progress.unfinished(), progress.number, progress.rest), (Some(9), 4, 7), "{size}");
        }
    }
}
