//! What a Baggageclaim server is asked.

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

/// How long a client waits.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For a connection.
    pub connect: Duration,
    /// For an answer: from when the last of the request was sent, which an archive takes as long as it takes. Not for those to transfers between
    /// workers: their callers limit them.
    pub answer: Duration,
    /// For a volume to be made. It may be a copy of a large one.
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

/// A client of one Baggageclaim server. Copies share what they know.
#[derive(Clone)]
pub struct Client {
    authority: Arc<str>,
    timeouts: Timeouts,
    /// One creation of a handle at a time: see [`Client::create`].
    creating: Arc<Mutex<HashMap<Handle, Weak<tokio::sync::Mutex<()>>>>>,
}

/// How a creation went, which the worker remembers until it is told to forget it. Meanwhile nobody else makes a volume of this handle here.
#[must_use = "the worker remembers it until it is forgotten"]
pub struct Remembered {
    client: Client,
    handle: Handle,
    _alone: OwnedMutexGuard<()>,
}

impl Remembered {
    /// Has the worker forget it. To drop this call costs the worker a little memory.
    pub async fn forget(self) {
        self.client.drop_outcome(&self.handle).await;
    }
}

/// Copy-on-write volumes are made in a few milliseconds.
const FIRST_POLL: Duration = Duration::from_millis(2);
const SLOWEST_POLL: Duration = Duration::from_secs(1);
const MOST_MESSAGE: u64 = 64 * 1024;
const MOST_VOLUMES: u64 = 32 << 20;

impl Client {
    /// A client of the server at `authority`, which is a host and a port.
    pub fn new(authority: &str, timeouts: Timeouts) -> Self {
        Self { authority: authority.into(), timeouts, creating: Arc::default() }
    }

    /// All volumes with these properties. Those half made are left out.
    pub async fn list(&self, properties: &[(&str, &str)]) -> Result<Vec<Volume>, Error> {
        let mut target = "/volumes".to_owned();
        for (i, (name, value)) in properties.iter().enumerate() {
            if properties[..i].iter().any(|(other, _)| other == name) {
                return Err(Error::Invalid("a property is asked for once"));
            }
            let sign = if i == 0 { '?' } else { '&' };
            target += &format!("{sign}{}={}", escape(name), escape(value));
        }
        json(&self.call(Method::GET, &target, Vec::new(), MOST_VOLUMES).await?.1)
    }

    /// One volume.
    pub async fn get(&self, handle: &Handle) -> Result<Volume, Error> {
        json(&self.call(Method::GET, &format!("/volumes/{handle}"), Vec::new(), MOST_MESSAGE).await?.1)
    }

    /// Makes a volume, and waits for it.
    ///
    /// Creation over a volume that exists may destroy what is in it. So this client asks first whether there is one, creates no handle twice at a
    /// time, and after a lost answer asks again only for the outcome; that no other client creates the same handle is the caller's duty. A creation
    /// of this handle that an earlier call left behind is taken over, whatever it was asked to make: a handle is for one volume.
    ///
    /// To drop this call leaves the creation with the worker, to be taken over or given up with [`Client::cancel_creation`]. After
    /// [`Timeouts::creation`] the worker is told to cancel it; the handle is not to be used again then.
    pub async fn create(&self, request: &VolumeRequest) -> Result<Volume, Error> {
        let (volume, remembered) = self.create_remembered(request).await?;
        remembered.forget().await;
        Ok(volume)
    }

    /// The same, but that the worker still remembers how it went when this returns: forgetting it need not be waited for.
    pub async fn create_remembered(&self, request: &VolumeRequest) -> Result<(Volume, Remembered), Error> {
        let handle = &request.handle;
        let alone = self.creation_of(handle).lock_owned().await;
        let remembered = Remembered { client: self.clone(), handle: handle.clone(), _alone: alone };
        match self.get(handle).await {
            Err(Error::NotFound) => {}
            Err(error) => return Err(error),
            // It may be that of an earlier call, whose outcome nobody has dropped yet.
            Ok(volume) => match self.outcome(handle).await {
                Ok(Some(_)) => return Ok((volume, remembered)),
                _ => return Err(Error::AlreadyExists),
            },
        }

        let body = serde_json::to_vec(request).map_err(|error| Error::Protocol(error.to_string()))?;
        match self.call(Method::POST, "/volumes-async", body, MOST_MESSAGE).await {
            // Lost: it may have arrived. Failed: there may be one already. The outcome tells.
            Ok(_) | Err(Error::Lost(_)) => {}
            Err(Error::Failed { message, .. }) if message == "promise already exists in list" => {}
            Err(error) => return Err(error),
        }
        let waited = tokio::time::timeout(self.timeouts.creation, self.wait_for(handle)).await;
        match waited.unwrap_or_else(|late| Err(Error::Lost(late.into()))) {
            Ok(volume) => Ok((volume, remembered)),
            Err(error) => {
                remembered.forget().await;
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
                // The worker was restarted, or was never asked.
                Err(Error::NotFound) => match self.get(handle).await {
                    Err(Error::NotFound) => {
                        let text = "the worker knows nothing of the creation";
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

    /// The volume that was to be made, or none while it is being made.
    async fn outcome(&self, handle: &Handle) -> Result<Option<Volume>, Error> {
        let target = format!("/volumes-async/{handle}");
        match self.call(Method::GET, &target, Vec::new(), MOST_MESSAGE).await? {
            (StatusCode::NO_CONTENT, _) => Ok(None),
            (_, body) => json(&body).map(Some),
        }
    }

    /// An outcome that stays costs the worker a little memory, and nothing else: no failure of the creation.
    async fn drop_outcome(&self, handle: &Handle) {
        let until = Instant::now() + self.timeouts.answer;
        while let Err(Error::Lost(_) | Error::Unreachable(_)) = self.cancel_creation(handle).await {
            if Instant::now() > until {
                return;
            }
            tokio::time::sleep(SLOWEST_POLL).await;
        }
    }

    /// Drops what the worker remembers of a creation. One that is under way is cancelled: the worker destroys the volume when it is made.
    pub async fn cancel_creation(&self, handle: &Handle) -> Result<(), Error> {
        self.call(Method::DELETE, &format!("/volumes-async/{handle}"), Vec::new(), MOST_MESSAGE)
            .await
            .map(drop)
    }

    /// Marks a volume.
    pub async fn set_property(&self, handle: &Handle, name: &str, value: &str) -> Result<(), Error> {
        if matches!(name, "" | "." | "..") {
            return Err(Error::Invalid("a property has a name"));
        }
        let target = format!("/volumes/{handle}/properties/{}", escape(name));
        let body = serde_json::json!({ "value": value }).to_string().into_bytes();
        self.call(Method::PUT, &target, body, MOST_MESSAGE).await.map(drop)
    }

    /// Whether ids in a volume are those of the host.
    pub async fn privileged(&self, handle: &Handle) -> Result<bool, Error> {
        let target = format!("/volumes/{handle}/privileged");
        json(&self.call(Method::GET, &target, Vec::new(), MOST_MESSAGE).await?.1)
    }

    /// Changes that. The worker walks the whole volume.
    pub async fn set_privileged(&self, handle: &Handle, privileged: bool) -> Result<(), Error> {
        let target = format!("/volumes/{handle}/privileged");
        let body = serde_json::json!({ "value": privileged }).to_string().into_bytes();
        self.call(Method::PUT, &target, body, MOST_MESSAGE).await.map(drop)
    }

    /// Destroys a volume. Children go first, which is the caller's duty: those that are left may become empty.
    pub async fn destroy(&self, handle: &Handle) -> Result<(), Error> {
        self.call(Method::DELETE, &format!("/volumes/{handle}"), Vec::new(), MOST_MESSAGE).await.map(drop)
    }

    /// Destroys volumes, all at the same time: no children together with their parents. Those unknown are no error, and after an error others may
    /// have been destroyed.
    pub async fn destroy_many(&self, handles: &[Handle]) -> Result<(), Error> {
        let body = serde_json::to_vec(handles).map_err(|error| Error::Protocol(error.to_string()))?;
        self.call(Method::DELETE, "/volumes/destroy", body, MOST_MESSAGE).await.map(drop)
    }

    /// Has leftovers of volumes removed. Workers before 8.1 cannot, which is no error.
    pub async fn clean_up(&self) -> Result<(), Error> {
        match self.call(Method::POST, "/volumes/cleanup-orphans", Vec::new(), MOST_MESSAGE).await {
            Ok(_) => Ok(()),
            Err(Error::Refused { status: StatusCode::METHOD_NOT_ALLOWED, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Unpacks an archive, already encoded as `how` says, into a volume. Nothing there is removed first, and after any failure, or when this call
    /// is dropped, part of the archive may stay.
    pub async fn stream_in(
        &self,
        handle: &Handle,
        how: &StreamIn,
        archive: impl AsyncRead + Send + 'static,
    ) -> Result<(), Error> {
        let target = format!("/volumes/{handle}/stream-in?{}", how.query()?);
        let request = Request::put(target).header(header::CONTENT_ENCODING, how.encoding.as_str());
        let sent = Arc::new(Notify::new());
        let archive = Sent { archive: Box::pin(archive), at_its_end: sent.clone() };
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
            _ => tokio::time::timeout(self.timeouts.answer, success(answer, MOST_MESSAGE))
                .await
                .map_err(late)?
                .and_then(|(status, _)| Err(unexpected(status))),
        }
    }

    /// The archive of a directory in a volume, or of one file. An empty path is the whole volume.
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
                _ => success(answer, MOST_MESSAGE).await.and_then(|(status, _)| Err(unexpected(status))),
            }
        };
        let body: AnswerBody = tokio::time::timeout(self.timeouts.answer, head).await.map_err(late)??;
        Ok(Archive::new(encoding, body))
    }

    /// Where other workers reach this one, as far as it knows: it need not listen there.
    pub async fn p2p_url(&self) -> Result<P2pUrl, Error> {
        let (_, body) = self.call(Method::GET, "/p2p-url", Vec::new(), MOST_MESSAGE).await?;
        P2pUrl::parse(&String::from_utf8_lossy(&body))
    }

    /// Has this worker send a directory of a volume to another worker, whose [`P2pUrl::stream_in`] is the destination. To drop this call does not
    /// stop the transfer.
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
        let (_, body) = success(answer, MOST_MESSAGE).await?;
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
        tokio::time::timeout(self.timeouts.answer, call).await.map_err(late)?
    }

    async fn send(&self, request: http::request::Builder, payload: Payload) -> Result<Answer, Error> {
        let request = request.body(payload).map_err(|_| Error::Invalid("this makes no request"))?;
        let connected = exchange::connect(&self.authority, self.timeouts.connect).await;
        Ok(exchange::send(connected.map_err(Error::Unreachable)?, &self.authority, request).await?)
    }
}

/// An archive that says when all of it was read.
struct Sent<A> {
    archive: A,
    at_its_end: Arc<Notify>,
}

impl<A: AsyncRead + Unpin> AsyncRead for Sent<A> {
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

fn late(late: tokio::time::error::Elapsed) -> Error {
    Error::Lost(late.into())
}

fn unexpected(status: StatusCode) -> Error {
    Error::Protocol(format!("status {status} where none such is"))
}

/// The worker does not confine paths to the volume.
fn confined(path: &str) -> Result<&str, Error> {
    if path.starts_with('/') || path.contains('\0') || path.split('/').any(|part| part == "..") {
        return Err(Error::Invalid("a path must stay in its volume"));
    }
    Ok(path_or_root(path))
}

fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| Error::Protocol(error.to_string()))
}

/// The body of a good answer, or what a bad one means: by its status, since its content type is mostly wrong and its body may be missing.
async fn success(answer: Answer, most: u64) -> Result<(StatusCode, Vec<u8>), Error> {
    #[derive(serde::Deserialize)]
    struct Message {
        error: String,
    }
    let status = answer.status;
    if status.is_success() {
        return Ok((status, answer.body.whole(most).await?));
    }
    // A status is known even if its explanation is cut off.
    let body = answer.body.whole(MOST_MESSAGE).await.unwrap_or_default();
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
