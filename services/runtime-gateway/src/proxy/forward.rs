//! The forwarding of one call, frame by frame in both directions.
//!
//! - *Back pressure*: the proxy reads a frame from one side when the other side asks for it. HTTP/2
//!   windows bound the bytes in flight. Each call has its own connection to the gateway, so a slow
//!   reader delays no other call.
//! - *Cancellation*: the response to the caller owns the call to the gateway. Dropping one drops
//!   the other.
//! - *Deadline*: the gateway receives the remaining time as `grpc-timeout`. The proxy enforces the
//!   deadline too.
//! - *Status*: trailers are forwarded unchanged. The proxy reads only the status `NOT_ATTENDED`. It
//!   then asks the scheduler again, and repeats the call if it still has all messages of the
//!   caller.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use domain::WorkerId;
use http::{HeaderMap, HeaderValue, Request, Response, Uri};
use http_body::{Body as HttpBody, Frame};
use http_body_util::StreamBody;
use rpc::client::{Outgoing, PROXY_TICKET_HEADER, TICKET_HEADER};
use rpc::{Reason, Refusal};
use tokio::time::Instant;
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

use super::Proxy;
use super::directory::Destination;
use super::route;
use crate::SERVICE;
use crate::util::keyed_locks::lock;

/// Most bytes of the first message, which contains at most a ticket or a process id, and a path.
const MAX_FIRST_MESSAGE: usize = 256 << 10;
/// Most bytes of the caller's messages that the proxy keeps to repeat a call.
const MAX_KEPT_BYTES: usize = 1 << 20;
/// Bytes of the compression flag and the length before each message.
const PREFIX: usize = 5;
/// Headers that are meant for the proxy only.
const PROXY_HEADERS: [&str; 7] = [
    "authorization",
    "proxy-authorization",
    "cookie",
    "host",
    "grpc-timeout",
    PROXY_TICKET_HEADER,
    TICKET_HEADER,
];

/// Forwards a call to the gateway of its worker, and returns the response.
pub(super) async fn forward(proxy: Arc<Proxy>, request: Request<Body>) -> Result<Response<Body>, Status> {
    let deadline = server::deadline(request.headers());
    let (parts, body) = request.into_parts();
    let mut requests =
        CallerStream { body, frames: Vec::new(), frame_bytes: 0, is_replayable: true, round: 0, waker: None };
    let worker = within(deadline, async {
        let first = requests.first_message().await?;
        route::worker_of_call(parts.uri.path(), first, &proxy.keys).await
    })
    .await?;
    let call = Call {
        proxy,
        worker,
        path: parts.uri,
        headers: parts.headers,
        deadline,
        requests: Arc::new(Mutex::new(requests)),
    };
    let answer = within(deadline, call.begin()).await?;
    let (parts, body) = answer.into_parts();
    Ok(Response::from_parts(parts, Body::new(StreamBody::new(forward_response(call, body)))))
}

/// A call that is being forwarded.
struct Call {
    proxy: Arc<Proxy>,
    worker: WorkerId,
    path: Uri,
    headers: HeaderMap,
    deadline: Option<Instant>,
    requests: Arc<Mutex<CallerStream>>,
}

impl Call {
    /// Makes the call. If the first gateway does not answer or does not attend the worker, the call
    /// is repeated once.
    async fn begin(&self) -> Result<Response<Body>, Status> {
        let destination = self.find(false).await?;
        match self.send(&destination).await {
            Ok(answer) if !is_not_attended(answer.headers()) => Ok(answer),
            _ => self.retry().await,
        }
    }

    /// Asks the scheduler for the gateway again, and makes the call there.
    async fn retry(&self) -> Result<Response<Body>, Status> {
        let destination = self.find(true).await?;
        self.send(&destination).await.map_err(|error| {
            tracing::debug!(worker.id = %self.worker, endpoint = destination.endpoint, %error, "cannot forward a call: the gateway does not answer");
            gateway_unreachable()
        })
    }

    async fn find(&self, refresh: bool) -> Result<Destination, Status> {
        let destination = self.proxy.directory.find(self.worker, refresh).await;
        destination.map_err(|refusal: Refusal| refusal.pass_on(SERVICE))
    }

    /// Makes the call at one gateway. Returns when the response begins.
    async fn send(&self, to: &Destination) -> Result<Response<Body>, Status> {
        let mut peer = rpc::client::peer(&to.endpoint, Outgoing::default())
            .map_err(|error| rpc::unavailable(SERVICE, "reach a worker's gateway", &error))?;
        let mut request = Request::new(Body::new(ReplayBody::new(&self.requests)));
        *request.method_mut() = http::Method::POST;
        *request.version_mut() = http::Version::HTTP_2;
        *request.uri_mut() =
            self.path.path().parse().map_err(|_| rpc::invalid_field("path", "is malformed"))?;
        let headers = request.headers_mut();
        for (name, value) in &self.headers {
            if !PROXY_HEADERS.contains(&name.as_str()) {
                headers.append(name, value.clone());
            }
        }
        let mut ticket = HeaderValue::try_from(&to.ticket)
            .map_err(|error| rpc::unavailable(SERVICE, "send a ticket", &error))?;
        ticket.set_sensitive(true);
        headers.insert(PROXY_TICKET_HEADER, ticket);
        if let Some(deadline) = self.deadline {
            headers.insert("grpc-timeout", timeout(deadline.saturating_duration_since(Instant::now())));
        }
        let ready = std::future::poll_fn(|cx| Service::<Request<Body>>::poll_ready(&mut peer, cx)).await;
        let answer = match ready {
            Ok(()) => peer.call(request).await,
            Err(error) => Err(error),
        };
        let answer = answer.map_err(|error| {
            tracing::debug!(
                endpoint = to.endpoint,
                error = domain::error_chain(&error),
                "cannot forward a call: the gateway does not answer"
            );
            gateway_unreachable()
        })?;
        Ok(answer.map(Body::new))
    }

    fn requests(&self) -> MutexGuard<'_, CallerStream> {
        lock(&self.requests)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // Ends the request stream, because the gateway would otherwise wait for more messages.
        self.requests().end_round();
    }
}

fn gateway_unreachable() -> Status {
    Reason::Unavailable
        .status(SERVICE, "cannot forward the call: the worker's gateway does not answer; call again")
}

fn is_not_attended(headers: &HeaderMap) -> bool {
    Status::from_header_map(headers).is_some_and(|status| Refusal::from(status).is(Reason::NotAttended))
}

/// Forwards the response of the gateway, frame by frame.
fn forward_response(
    call: Call,
    body: Body,
) -> impl futures::Stream<Item = Result<Frame<Bytes>, Status>> + Send {
    let stream = ResponseStream { call, body, is_first: true, ended: false };
    futures::stream::unfold(stream, |mut stream| async move {
        let frame = stream.next().await?;
        Some((Ok(frame), stream))
    })
}

struct ResponseStream {
    call: Call,
    body: Body,
    /// Whether no frame was forwarded yet.
    is_first: bool,
    ended: bool,
}

impl ResponseStream {
    async fn next(&mut self) -> Option<Frame<Bytes>> {
        if self.ended {
            return None;
        }
        let (stopping, deadline) = (self.call.proxy.stopping.clone(), self.call.deadline);
        let next = tokio::select! {
            next = within(deadline, self.next_frame_or_retry()) => next,
            () = stopping.cancelled() => {
                Err(Reason::Unavailable.status(SERVICE, "the proxy is stopping; call again"))
            }
        };
        let frame = match next {
            Ok(frame) => frame,
            Err(status) => Some(trailers(&status)),
        };
        self.ended = frame.as_ref().is_none_or(Frame::is_trailers);
        if self.ended {
            // The call has ended for the caller, so the call to the gateway is cancelled.
            self.body = Body::empty();
            self.call.requests().end_round();
        }
        frame
    }

    async fn next_frame_or_retry(&mut self) -> Result<Option<Frame<Bytes>>, Status> {
        let Some(frame) = next_frame(&mut self.body).await else { return Ok(None) };
        let frame = frame.map_err(|error| {
            tracing::debug!(worker.id = %self.call.worker, %error, "cannot forward a call: the response of the gateway broke off");
            Reason::Unavailable.status(SERVICE, "the response of the worker's gateway broke off; call again")
        })?;
        if !std::mem::take(&mut self.is_first) {
            return Ok(Some(frame));
        }
        let is_moved = frame.trailers_ref().is_some_and(is_not_attended);
        if !is_moved || !self.call.requests().replay() {
            self.call.requests().is_replayable = false;
            return Ok(Some(frame));
        }
        let (parts, body) = self.call.retry().await?.into_parts();
        self.call.requests().is_replayable = false;
        self.body = body;
        // A response without a body has its status in the headers.
        if parts.headers.contains_key(Status::GRPC_STATUS) {
            return Ok(Some(Frame::trailers(parts.headers)));
        }
        next_frame(&mut self.body).await.transpose().map_err(|error| {
            tracing::debug!(worker.id = %self.call.worker, %error, "cannot forward a call: the response of the gateway broke off");
            Reason::Unavailable.status(SERVICE, "the response of the worker's gateway broke off; call again")
        })
    }
}

fn trailers(status: &Status) -> Frame<Bytes> {
    let mut headers = HeaderMap::new();
    if status.add_header(&mut headers).is_err() {
        headers.insert(Status::GRPC_STATUS, HeaderValue::from(i32::from(status.code())));
    }
    Frame::trailers(headers)
}

async fn next_frame(body: &mut Body) -> Option<Result<Frame<Bytes>, Status>> {
    std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

/// The request stream of the caller.
struct CallerStream {
    body: Body,
    /// The frames from the beginning of the stream, while the call may have to be repeated.
    frames: Vec<Bytes>,
    frame_bytes: usize,
    is_replayable: bool,
    /// Number of the current try. Earlier tries receive no more frames.
    round: u64,
    /// The task that waits for the next frame.
    waker: Option<Waker>,
}

impl CallerStream {
    /// Waits for the first message, which is kept and forwarded later.
    async fn first_message(&mut self) -> Result<Bytes, Status> {
        let mut first = BytesMut::new();
        loop {
            if let Some(message) = parse_message(&first)? {
                return Ok(message);
            }
            let frame = next_frame(&mut self.body).await.transpose()?;
            let data = frame.and_then(|frame| frame.into_data().ok());
            let data = data.ok_or_else(|| rpc::invalid_field("message", "the first message is missing"))?;
            first.extend_from_slice(&data);
            self.frame_bytes += data.len();
            self.frames.push(data);
        }
    }

    /// Starts the stream again for a new try. Returns false if its beginning is no longer kept.
    fn replay(&mut self) -> bool {
        if self.is_replayable {
            self.end_round();
        }
        self.is_replayable
    }

    /// Ends the stream of the current try with a cancellation.
    fn end_round(&mut self) {
        self.round += 1;
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Returns the message at the beginning of `bytes`, if it is complete.
fn parse_message(bytes: &[u8]) -> Result<Option<Bytes>, Status> {
    let Some((mut prefix, rest)) = bytes.split_at_checked(PREFIX) else { return Ok(None) };
    if prefix.get_u8() != 0 {
        return Err(Status::unimplemented("messages must not be compressed"));
    }
    let length = usize::try_from(prefix.get_u32()).unwrap_or(usize::MAX);
    if length > MAX_FIRST_MESSAGE {
        return Err(rpc::invalid_field("message", "the first message is too long"));
    }
    Ok(rest.get(..length).map(Bytes::copy_from_slice))
}

/// The request stream for one try of the call.
struct ReplayBody {
    requests: Arc<Mutex<CallerStream>>,
    round: u64,
    next: usize,
}

impl ReplayBody {
    fn new(requests: &Arc<Mutex<CallerStream>>) -> Self {
        let round = lock(requests).round;
        Self { requests: requests.clone(), round, next: 0 }
    }
}

impl HttpBody for ReplayBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let mut requests = lock(&this.requests);
        if requests.round != this.round {
            return Poll::Ready(Some(Err(Status::cancelled("the call has ended"))));
        }
        if let Some(data) = requests.frames.get(this.next) {
            this.next += 1;
            return Poll::Ready(Some(Ok(Frame::data(data.clone()))));
        }
        let Poll::Ready(frame) = Pin::new(&mut requests.body).poll_frame(cx) else {
            requests.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            requests.frame_bytes += data.len();
            requests.is_replayable &= requests.frame_bytes <= MAX_KEPT_BYTES;
            if requests.is_replayable {
                requests.frames.push(data.clone());
                this.next += 1;
            }
        }
        if !requests.is_replayable {
            requests.frames = Vec::new();
        }
        Poll::Ready(frame)
    }
}

/// Formats a duration for `grpc-timeout`, which allows at most eight digits.
fn timeout(remaining: Duration) -> HeaderValue {
    let text = match (remaining.as_micros(), remaining.as_millis()) {
        (micros @ 0..100_000_000, _) => format!("{micros}u"),
        (_, millis @ 0..100_000_000) => format!("{millis}m"),
        _ => format!("{}S", remaining.as_secs().min(99_999_999)),
    };
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static("0u"))
}

async fn within<T>(
    deadline: Option<Instant>,
    work: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let Some(deadline) = deadline else { return work.await };
    let late = || {
        let message = "the deadline passed before the worker's gateway answered";
        Reason::DeadlineExceeded.status(SERVICE, message)
    };
    tokio::time::timeout_at(deadline, work).await.unwrap_or_else(|_| Err(late()))
}
