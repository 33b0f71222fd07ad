//! Requests to a Baggageclaim server.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Method, Request, StatusCode, header};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::time::Instant;

use super::Error;
use super::archive::Archive;
use super::encoding::Encoding;
use super::messages::{Handle, P2pUrl, StreamIn, Volume, VolumeRequest, escape, path_or_root};
use crate::exchange::{self, Answer, AnswerBody, Payload};

/// Timeouts of a client.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Timeout of a connection attempt.
    pub connect: Duration,
    /// Timeout of an answer, counted from the end of the request. Sending an archive has no
    /// timeout. Callers limit transfers between workers themselves.
    pub answer: Duration,
    /// Timeout of the creation of a volume, which may copy a large one.
    pub creation: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            answer: Duration::from_secs(60),
            creation: Duration::from_secs(30 * 60),
        }
    }
}

/// A client of one Baggageclaim server. Clones share their state.
#[derive(Clone)]
pub struct Client {
    authority: Arc<str>,
    timeouts: Timeouts,
    /// Locks that serialize the creations of each handle: see [`Client::create`].
    creating: Arc<Mutex<HashMap<Handle, Weak<tokio::sync::Mutex<()>>>>>,
}

/// The outcome of a creation, which the worker keeps until it is deleted. Until then this client
/// creates no other volume of this handle.
#[must_use = "the worker keeps the outcome until it is deleted"]
pub struct CreationOutcome {
    client: Client,
    handle: Handle,
    _alone: OwnedMutexGuard<()>,
}

impl CreationOutcome {
    /// Deletes the outcome on the worker. If the call is dropped, the worker keeps a small amount
    /// of memory.
    pub async fn delete(self) {
        self.client.drop_outcome(&self.handle).await;
    }
}

/// First poll interval of a creation. Copy-on-write volumes take a few milliseconds.
const FIRST_POLL: Duration = Duration::from_millis(2);
const SLOWEST_POLL: Duration = Duration::from_secs(1);
const MAX_MESSAGE: u64 = 64 * 1024;
const MAX_VOLUMES: u64 = 32 << 20;

impl Client {
    /// Creates a client of the server at `authority`, a host and a port.
    pub fn new(authority: &str, timeouts: Timeouts) -> Self {
        Self { authority: authority.into(), timeouts, creating: Arc::default() }
    }

    /// Lists the volumes with these properties. Incomplete volumes are not listed.
    pub async fn list(&self, properties: &[(&str, &str)]) -> Result<Vec<Volume>, Error> {
        let mut target = "/volumes".to_owned();
        for (i, (name, value)) in properties.iter().enumerate() {
            if properties[..i].iter().any(|(other, _)| other == name) {
                return Err(Error::Invalid("each property may appear only once in a query"));
            }
            let sign = if i == 0 { '?' } else { '&' };
            target += &format!("{sign}{}={}", escape(name), escape(value));
        }
        json(&self.call(Method::GET, &target, Vec::new(), MAX_VOLUMES).await?.1)
    }

    /// Returns one volume.
    pub async fn get(&self, handle: &Handle) -> Result<Volume, Error> {
        json(&self.call(Method::GET, &format!("/volumes/{handle}"), Vec::new(), MAX_MESSAGE).await?.1)
    }

    /// Creates a volume, and waits for its completion.
    ///
    /// Creation over an existing volume may destroy its contents. Therefore the client first checks
    /// that the volume does not exist, and runs one creation per handle at a time. After a lost
    /// answer it queries only the outcome. The caller must ensure that no other client creates the
    /// same handle. The client adopts an earlier pending creation of the handle with any
    /// request, because a handle names one volume only.
    ///
    /// Dropping this call leaves the creation pending on the worker. A later call can adopt it or
    /// cancel it with [`Client::cancel_creation`]. After [`Timeouts::creation`] the client cancels
    /// the creation. The handle must not be used again then.
    pub async fn create(&self, request: &VolumeRequest) -> Result<Volume, Error> {
        let (volume, outcome) = self.create_with_outcome(request).await?;
        outcome.delete().await;
        Ok(volume)
    }

    /// Creates a volume as [`Client::create`] does, but leaves the outcome on the worker. The
    /// caller deletes the outcome separately.
    pub async fn create_with_outcome(
        &self,
        request: &VolumeRequest,
    ) -> Result<(Volume, CreationOutcome), Error> {
        let handle = &request.handle;
        let alone = self.creation_of(handle).lock_owned().await;
        let outcome = CreationOutcome { client: self.clone(), handle: handle.clone(), _alone: alone };
        match self.get(handle).await {
            Err(Error::NotFound) => {}
            Err(error) => return Err(error),
            // The volume may come from an earlier call that did not delete the outcome.
            Ok(volume) => match self.outcome(handle).await {
                Ok(Some(_)) => return Ok((volume, outcome)),
                _ => return Err(Error::AlreadyExists),
            },
        }

        let body = serde_json::to_vec(request).map_err(|error| Error::Protocol(error.to_string()))?;
        match self.call(Method::POST, "/volumes-async", body, MAX_MESSAGE).await {
            // After a lost answer the request may have arrived. After a failure a creation may be
            // pending. The outcome tells.
            Ok(_) | Err(Error::Lost(_)) => {}
            Err(Error::Failed { message, .. }) if message == "promise already exists in list" => {}
            Err(error) => return Err(error),
        }
        let waited = tokio::time::timeout(self.timeouts.creation, self.wait_for(handle)).await;
        match waited.unwrap_or_else(|late| Err(Error::Lost(late.into()))) {
            Ok(volume) => Ok((volume, outcome)),
            Err(error) => {
                outcome.delete().await;
                Err(error)
            }
        }
    }

    fn creation_of(&self, handle: &Handle) -> Arc<tokio::sync::Mutex<()>> {
        let mut creating = self.creating.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(creation) = creating.get(handle).and_then(Weak::upgrade) {
            return creation;
        }
        creating.retain(|_, creation| creation.strong_count() > 0);
        let creation = Arc::default();
        creating.insert(handle.clone(), Arc::downgrade(&creation));
        creation
    }

    async fn wait_for(&self, handle: &Handle) -> Result<Volume, Error> {
        let mut pause = FIRST_POLL;
        loop {
            match self.outcome(handle).await {
                Ok(Some(volume)) => return Ok(volume),
                Ok(None) | Err(Error::Lost(_) | Error::Unreachable(_)) => {}
                // The worker was restarted, or did not receive the request.
                Err(Error::NotFound) => match self.get(handle).await {
                    Err(Error::NotFound) => {
                        let text = "the worker has no record of the creation";
                        return Err(Error::Lost(io::Error::other(text)));
                    }
                    Err(Error::Lost(_) | Error::Unreachable(_)) => {}
                    found => return found,
                },
                Err(error) => return Err(error),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(SLOWEST_POLL);
        }
    }

    /// Returns the created volume, or `None` while the creation is pending.
    async fn outcome(&self, handle: &Handle) -> Result<Option<Volume>, Error> {
        let target = format!("/volumes-async/{handle}");
        match self.call(Method::GET, &target, Vec::new(), MAX_MESSAGE).await? {
            (StatusCode::NO_CONTENT, _) => Ok(None),
            (_, body) => json(&body).map(Some),
        }
    }

    /// Deletes an outcome. A failure is ignored, because an outcome costs the worker only a small
    /// amount of memory.
    async fn drop_outcome(&self, handle: &Handle) {
        let until = Instant::now() + self.timeouts.answer;
        while let Err(Error::Lost(_) | Error::Unreachable(_)) = self.cancel_creation(handle).await {
            if Instant::now() > until {
                return;
            }
            tokio::time::sleep(SLOWEST_POLL).await;
        }
    }

    /// Deletes the outcome of a creation. If the creation is pending, the worker cancels it and
    /// destroys the volume when it is complete.
    pub async fn cancel_creation(&self, handle: &Handle) -> Result<(), Error> {
        self.call(Method::DELETE, &format!("/volumes-async/{handle}"), Vec::new(), MAX_MESSAGE)
            .await
            .map(drop)
    }

    /// Sets a property of a volume.
    pub async fn set_property(&self, handle: &Handle, name: &str, value: &str) -> Result<(), Error> {
        if matches!(name, "" | "." | "..") {
            return Err(Error::Invalid("the name of a property must not be empty, `.` or `..`"));
        }
        let target = format!("/volumes/{handle}/properties/{}", escape(name));
        let body = serde_json::json!({ "value": value }).to_string().into_bytes();
        self.call(Method::PUT, &target, body, MAX_MESSAGE).await.map(drop)
    }

    /// Whether ids in a volume are those of the host.
    pub async fn privileged(&self, handle: &Handle) -> Result<bool, Error> {
        let target = format!("/volumes/{handle}/privileged");
        json(&self.call(Method::GET, &target, Vec::new(), MAX_MESSAGE).await?.1)
    }

    /// Sets whether ids in a volume are those of the host. The worker changes every file of the
    /// volume.
    pub async fn set_privileged(&self, handle: &Handle, privileged: bool) -> Result<(), Error> {
        let target = format!("/volumes/{handle}/privileged");
        let body = serde_json::json!({ "value": privileged }).to_string().into_bytes();
        self.call(Method::PUT, &target, body, MAX_MESSAGE).await.map(drop)
    }

    /// Destroys a volume. The caller must destroy its children first, because remaining children
    /// may become empty.
    pub async fn destroy(&self, handle: &Handle) -> Result<(), Error> {
        self.call(Method::DELETE, &format!("/volumes/{handle}"), Vec::new(), MAX_MESSAGE).await.map(drop)
    }

    /// Destroys volumes concurrently, so `handles` must not contain children together with their
    /// parents. Unknown volumes are ignored. After an error, other volumes may have been destroyed.
    pub async fn destroy_many(&self, handles: &[Handle]) -> Result<(), Error> {
        let body = serde_json::to_vec(handles).map_err(|error| Error::Protocol(error.to_string()))?;
        self.call(Method::DELETE, "/volumes/destroy", body, MAX_MESSAGE).await.map(drop)
    }

    /// Requests the removal of leftovers of volumes. Workers before 8.1 do not support this, which
    /// is not an error.
    pub async fn clean_up(&self) -> Result<(), Error> {
        match self.call(Method::POST, "/volumes/cleanup-orphans", Vec::new(), MAX_MESSAGE).await {
            Ok(_) => Ok(()),
            Err(Error::Refused { status: StatusCode::METHOD_NOT_ALLOWED, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Unpacks an archive that is encoded as `how` says into a volume. Existing files are not
    /// removed first. After a failure, or if the call is dropped, a part of the archive may stay.
    pub async fn stream_in(
        &self,
        handle: &Handle,
        how: &StreamIn,
        archive: impl AsyncRead + Send + 'static,
    ) -> Result<(), Error> {
        let target = format!("/volumes/{handle}/stream-in?{}", how.query()?);
        let request = Request::put(target).header(header::CONTENT_ENCODING, how.encoding.as_str());
        let sent = Arc::new(Notify::new());
        let archive = CompletionReader { archive: Box::pin(archive), at_its_end: sent.clone() };
        let is_late = async {
            sent.notified().await;
            tokio::time::sleep(self.timeouts.answer).await;
        };
        let answer = tokio::select! {
            answer = self.send(request, Payload::Stream(Box::pin(archive))) => answer?,
            () = is_late => return Err(Error::Lost(io::ErrorKind::TimedOut.into())),
        };
        match answer.status {
            StatusCode::NO_CONTENT => Ok(()),
            _ => tokio::time::timeout(self.timeouts.answer, success(answer, MAX_MESSAGE))
                .await
                .map_err(timeout_error)?
                .and_then(|(status, _)| Err(unexpected(status))),
        }
    }

    /// Returns the archive of a directory in a volume, or of one file. An empty path is the whole
    /// volume.
    pub async fn stream_out(
        &self,
        handle: &Handle,
        path: &str,
        encoding: Encoding,
    ) -> Result<Archive<impl AsyncRead + Send + Unpin + use<>>, Error> {
        let target = format!("/volumes/{handle}/stream-out?path={}", escape(confined(path)?));
        let request = Request::put(target).header(header::ACCEPT_ENCODING, encoding.as_str());
        let head = async {
            let answer = self.send(request, Payload::Whole(Default::default())).await?;
            match answer.status {
                StatusCode::OK => Ok(answer.body),
                _ => success(answer, MAX_MESSAGE).await.and_then(|(status, _)| Err(unexpected(status))),
            }
        };
        let body: AnswerBody =
            tokio::time::timeout(self.timeouts.answer, head).await.map_err(timeout_error)??;
        Ok(Archive::new(encoding, body))
    }

    /// Returns the address at which other workers reach this worker, as configured. The worker may
    /// not listen there.
    pub async fn p2p_url(&self) -> Result<P2pUrl, Error> {
        let (_, body) = self.call(Method::GET, "/p2p-url", Vec::new(), MAX_MESSAGE).await?;
        P2pUrl::parse(&String::from_utf8_lossy(&body))
    }

    /// Requests that this worker sends a directory of a volume to another worker. The destination
    /// is [`P2pUrl::stream_in`] of that worker. Dropping this call does not stop the transfer.
    pub async fn stream_p2p_out(
        &self,
        handle: &Handle,
        path: &str,
        destination: &str,
        encoding: Encoding,
    ) -> Result<(), Error> {
        let (path, destination) = (escape(confined(path)?), escape(destination));
        let encoding = encoding.as_str();
        let query = format!("path={path}&streamInURL={destination}&encoding={encoding}");
        let request = Request::put(format!("/volumes/{handle}/stream-p2p-out?{query}"));
        let answer = self.send(request, Payload::Whole(Default::default())).await?;
        let (_, body) = success(answer, MAX_MESSAGE).await?;
        match String::from_utf8_lossy(&body).trim() {
            "ok" => Ok(()),
            text => Err(Error::Transfer(text.to_owned())),
        }
    }

    async fn call(
        &self,
        method: Method,
        target: &str,
        body: Vec<u8>,
        most: u64,
    ) -> Result<(StatusCode, Vec<u8>), Error> {
        let mut request = Request::builder().method(method).uri(target);
        if !body.is_empty() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let call = async { success(self.send(request, Payload::Whole(body.into())).await?, most).await };
        tokio::time::timeout(self.timeouts.answer, call).await.map_err(timeout_error)?
    }

    async fn send(&self, request: http::request::Builder, payload: Payload) -> Result<Answer, Error> {
        let request = request
            .body(payload)
            .map_err(|_| Error::Invalid("the method, path and headers form no valid request"))?;
        let connected = exchange::connect(&self.authority, self.timeouts.connect).await;
        Ok(exchange::send(connected.map_err(Error::Unreachable)?, &self.authority, request).await?)
    }
}

/// A reader that signals when the whole archive was read.
struct CompletionReader<A> {
    archive: A,
    at_its_end: Arc<Notify>,
}

impl<A: AsyncRead + Unpin> AsyncRead for CompletionReader<A> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let polled = Pin::new(&mut self.archive).poll_read(cx, into);
        if matches!(polled, Poll::Ready(Ok(()))) && into.filled().len() == before && into.remaining() > 0 {
            self.at_its_end.notify_one();
        }
        polled
    }
}

fn timeout_error(late: tokio::time::error::Elapsed) -> Error {
    Error::Lost(late.into())
}

fn unexpected(status: StatusCode) -> Error {
    Error::Protocol(format!("status {status} is unexpected"))
}

/// Checks that a path stays inside the volume, which the worker does not.
fn confined(path: &str) -> Result<&str, Error> {
    if path.starts_with('/') || path.contains('\0') || path.split('/').any(|part| part == "..") {
        return Err(Error::Invalid("the path must stay inside its volume"));
    }
    Ok(path_or_root(path))
}

fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| Error::Protocol(error.to_string()))
}

/// Returns the body of a success, or maps a failure to an error. The status decides, because the
/// content type is mostly wrong and the body may be missing.
async fn success(answer: Answer, most: u64) -> Result<(StatusCode, Vec<u8>), Error> {
    #[derive(serde::Deserialize)]
    struct Message {
        error: String,
    }
    let status = answer.status;
    if status.is_success() {
        return Ok((status, answer.body.whole(most).await?));
    }
    // A truncated explanation does not hide the status.
    let body = answer.body.whole(MAX_MESSAGE).await.unwrap_or_default();
    let message = match serde_json::from_slice::<Message>(&body) {
        Ok(message) => message.error,
        Err(_) => String::from_utf8_lossy(&body).trim().to_owned(),
    };
    Err(match status {
        StatusCode::NOT_FOUND if message == "no such file or directory" => Error::NoSuchPath,
        StatusCode::NOT_FOUND => Error::NotFound,
        StatusCode::FORBIDDEN => Error::LimitExceeded(message),
        _ if status.is_client_error() => Error::Refused { status, message },
        _ => Error::Failed { status, message },
    })
}
