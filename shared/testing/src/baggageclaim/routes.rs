//! HTTP routes of the simulated Baggageclaim server.

use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use super::{Faults, State, archives, lock};

/// Capacity of the channel for pieces of an archive.
const PIECES: usize = 4;

type Answer = Response<BoxBody<Bytes, io::Error>>;

/// The error that closes the connection without an answer.
#[derive(Debug, thiserror::Error)]
#[error("no answer")]
pub(super) struct NoAnswer;

fn answer(status: u16, kind: Option<&str>, body: impl Into<Bytes>) -> Answer {
    let body = Full::new(body.into()).map_err(|never: Infallible| match never {}).boxed();
    let mut answer = Response::new(body);
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    if let Some(kind) = kind {
        answer.headers_mut().insert(header::CONTENT_TYPE, kind.parse().expect("a header"));
    }
    answer
}

fn nothing(status: u16) -> Answer {
    answer(status, None, "")
}

fn object(status: u16, value: &Value) -> Answer {
    answer(status, Some("application/json"), format!("{value}\n"))
}

/// A JSON error with the content type of plain text, as the genuine server sends it.
fn error(status: u16, text: &str) -> Answer {
    answer(status, Some("text/plain; charset=utf-8"), format!("{}\n", json!({ "error": text })))
}

fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        let code = after.get(..2).filter(|_| *byte == b'%');
        let code = code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        bytes.push(code.unwrap_or(*byte));
        if code.is_some() {
            rest = &after[2..];
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Query(Vec<(String, String)>);

impl Query {
    fn of(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let plain = |text: &str| unescape(&text.replace('+', " "));
        Self(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(k, v)| (plain(k), plain(v)))
                .collect(),
        )
    }

    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value)
    }
}

pub(super) async fn serve(state: Arc<State>, request: Request<Incoming>) -> Result<Answer, NoAnswer> {
    let asked = format!("{} {}", request.method(), request.uri());
    lock(&state.requests).push(asked.clone());
    let stalled = lock(&state.faults).stalls.as_ref().is_some_and(|prefix| asked.starts_with(prefix));
    if stalled {
        // Waits until the client is gone.
        std::future::pending::<()>().await;
    }
    let answer = route(&state, request).await?;
    let mut faults = lock(&state.faults);
    match &mut faults.lose_answers {
        Some((prefix, left)) if *left > 0 && asked.starts_with(&*prefix) => {
            *left -= 1;
            Err(NoAnswer)
        }
        _ => Ok(answer),
    }
}

async fn route(state: &Arc<State>, request: Request<Incoming>) -> Result<Answer, NoAnswer> {
    let (head, mut body) = request.into_parts();
    let query = Query::of(head.uri.query().unwrap_or_default());
    let path = head.uri.path().to_owned();
    let parts: Vec<String> = path.trim_start_matches('/').split('/').map(unescape).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let method = head.method.as_str();
    let faults = lock(&state.faults).clone();
    if let ("PUT", ["volumes", handle, "stream-in"]) = (method, &parts[..]) {
        return stream_in(state, handle, &query, &head.headers, (&mut body, &faults)).await;
    }

    let body = body.collect().await.map_err(|_| NoAnswer)?.to_bytes();
    let value = serde_json::from_slice::<Value>(&body);
    Ok(match (method, &parts[..]) {
        ("GET", ["volumes"]) => list(state, &query),
        ("POST", ["volumes"]) => match value {
            Ok(value) if value.is_object() => match state.create(&handle_of(&value), &value) {
                Ok(volume) => object(201, &volume),
                Err(status) => error(status, "failed to create volume"),
            },
            _ => error(400, "failed to create volume"),
        },
        ("POST", ["volumes-async"]) => match value {
            Ok(value) if value.is_object() => begin(state, value, &faults),
            _ => error(400, "failed to create volume"),
        },
        ("GET", ["volumes-async", handle]) => match lock(&state.volumes).futures.get(*handle) {
            None => nothing(404),
            Some(_) if state.is_pending() => nothing(204),
            Some(None) => nothing(204),
            Some(Some(Ok(volume))) => object(200, volume),
            Some(Some(Err(status))) => error(*status, "failed to create volume"),
        },
        ("DELETE", ["volumes-async", handle]) => match lock(&state.volumes).futures.remove(*handle) {
            None => nothing(404),
            Some(_) => nothing(204),
        },
        ("DELETE", ["volumes", "destroy"]) if !faults.no_destroy_many => {
            let text = "failed to destroy volume";
            match serde_json::from_slice::<Vec<String>>(&body) {
                Ok(handles) => {
                    // A failed destruction does not prevent the others.
                    let destroyed: Vec<_> = handles.iter().map(|handle| state.destroy(handle)).collect();
                    if destroyed.contains(&Err(500)) { error(500, text) } else { nothing(204) }
                }
                Err(_) => error(400, text),
            }
        }
        ("POST", ["volumes", "cleanup-orphans"]) if !faults.no_cleanup => {
            state.clean_up();
            nothing(204)
        }
        ("GET", ["volumes", handle]) => match lock(&state.volumes).live.get(*handle) {
            Some(volume) => object(200, &state.describe(handle, volume)),
            None => error(404, "failed to get volume"),
        },
        ("DELETE", ["volumes", handle]) => match state.destroy(handle) {
            Ok(()) => nothing(204),
            Err(status) => error(status, "failed to destroy volume"),
        },
        ("PUT", ["volumes", handle, "properties", name]) => {
            let text = "failed to set property on volume";
            let mut volumes = lock(&state.volumes);
            match (
                value.ok().and_then(|value| Some(value["value"].as_str()?.to_owned())),
                volumes.live.get_mut(*handle),
            ) {
                (None, _) => error(400, text),
                (_, None) => error(404, text),
                (Some(value), Some(volume)) => {
                    // Properties that are null crash the genuine handler.
                    volume.properties.as_mut().ok_or(NoAnswer)?.insert((*name).to_owned(), value.into());
                    nothing(204)
                }
            }
        }
        ("GET", ["volumes", handle, "privileged"]) => match lock(&state.volumes).live.get(*handle) {
            Some(volume) => object(200, &volume.privileged.into()),
            None => error(404, "failed to get privileged status of volume"),
        },
        ("PUT", ["volumes", handle, "privileged"]) => {
            let text = "failed to change privileged status of volume";
            let mut volumes = lock(&state.volumes);
            match (value.ok().and_then(|value| value["value"].as_bool()), volumes.live.get_mut(*handle)) {
                (None, _) => error(400, text),
                (_, None) => error(404, text),
                (Some(value), Some(volume)) => {
                    volume.privileged = value;
                    state.align(handle, value);
                    nothing(204)
                }
            }
        }
        ("PUT", ["volumes", handle, "stream-out"]) => {
            stream_out(state, handle, &query, &head.headers, &faults)
        }
        ("PUT", ["volumes", handle, "stream-p2p-out"]) => stream_p2p_out(state, handle, &query).await,
        ("GET", ["p2p-url"]) => {
            let url = faults.p2p_url.unwrap_or_else(|| format!("http://{}", state.address));
            answer(200, Some("text/plain; charset=utf-8"), url)
        }
        (_, ["volumes" | "p2p-url" | "volumes-async", ..]) => {
            let mut refused = answer(405, Some("text/plain; charset=utf-8"), "Method Not Allowed\n");
            refused.headers_mut().insert(header::ALLOW, "GET, PUT, POST, DELETE".parse().expect("a header"));
            refused
        }
        _ => answer(404, Some("text/plain; charset=utf-8"), "404 page not found\n"),
    })
}

fn handle_of(value: &Value) -> String {
    let given = value["handle"].as_str().filter(|handle| !handle.is_empty());
    given.map_or_else(|| uuid::Uuid::new_v4().to_string(), str::to_owned)
}

fn list(state: &State, query: &Query) -> Answer {
    for (name, _) in &query.0 {
        let values: Vec<_> =
            query.0.iter().filter(|(other, _)| other == name).map(|(_, value)| &**value).collect();
        if values.len() > 1 {
            let text =
                format!("a property may only have a single value: {name} has many ({})", values.join(", "));
            return error(422, &text);
        }
    }
    let volumes = lock(&state.volumes);
    let has = |volume: &super::volumes::Volume, (name, value): &(String, String)| {
        volume.properties.as_ref().and_then(|all| all.get(name)).and_then(Value::as_str) == Some(value)
    };
    let chosen = volumes.live.iter().filter(|(_, volume)| query.0.iter().all(|pair| has(volume, pair)));
    object(200, &chosen.map(|(handle, volume)| state.describe(handle, volume)).collect())
}

fn begin(state: &State, value: Value, faults: &Faults) -> Answer {
    let handle = handle_of(&value);
    let known = matches!(value["strategy"]["type"].as_str(), Some("empty" | "cow" | "import"));
    if !known || (value["strategy"]["type"] == "cow" && !value["strategy"]["volume"].is_string()) {
        return error(422, "failed to create volume");
    }
    {
        let mut volumes = lock(&state.volumes);
        if volumes.futures.contains_key(&handle) {
            return error(500, "promise already exists in list");
        }
        volumes.futures.insert(handle.clone(), None);
    }
    if !faults.never_create {
        let outcome = state.create(&handle, &value);
        lock(&state.volumes).futures.insert(handle.clone(), Some(outcome));
    }
    object(201, &json!({ "handle": handle }))
}

async fn stream_in(
    state: &Arc<State>,
    handle: &str,
    query: &Query,
    headers: &HeaderMap,
    (body, faults): (&mut Incoming, &Faults),
) -> Result<Answer, NoAnswer> {
    let text = "failed to stream in to volume";
    let limit = match query.get("limit") {
        "" => 0.0,
        limit => match limit.parse::<f64>() {
            Ok(limit) if limit >= 0.0 => limit,
            _ => return Ok(error(400, &format!("invalid limit {limit}"))),
        },
    };
    let limit = (limit * 1024.0 * 1024.0) as usize;
    let Some(privileged) = state.privilege(handle) else { return Ok(error(404, text)) };
    let encoding =
        headers.get(header::CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if !faults.supports(encoding) {
        return Ok(error(400, text));
    }
    let root = state.path(handle);
    let into = root.join(query.get("path").replace("..", "").trim_start_matches('/'));
    if std::fs::create_dir_all(&into).is_err() {
        return Ok(error(500, text));
    }

    let (pieces, incoming) = mpsc::channel(PIECES);
    let encoding = encoding.to_owned();
    let unpacking = tokio::task::spawn_blocking(move || {
        archives::unpack(&encoding, archives::Incoming::new(incoming), &into)
    });
    let (mut received, mut over, mut cut) = (0, false, false);
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            cut = true;
            break;
        };
        let mut bytes = frame.into_data().unwrap_or_default();
        received += bytes.len();
        over = limit > 0 && received > limit;
        if over {
            bytes.truncate(bytes.len() - (received - limit));
        }
        // The receiver has ended, and knows the reason.
        if pieces.send(Ok(bytes)).await.is_err() || over {
            break;
        }
    }
    if cut {
        _ = pieces.send(Err(io::ErrorKind::ConnectionReset.into())).await;
    }
    drop(pieces);
    let whole = unpacking.await.expect("unpacking does not panic");
    state.align(handle, privileged);
    if cut {
        return Err(NoAnswer);
    }
    let refused = {
        let mut faults = lock(&state.faults);
        if let Some((path, left @ 1..)) = &mut faults.spoil_archives
            && let Ok(contents) = std::fs::read(root.join(&*path))
        {
            *left -= 1;
            let other: Vec<u8> = contents.iter().map(|byte| !byte).collect();
            std::fs::write(root.join(&*path), other).expect("a file that can be written");
        }
        let refused = faults.refuse_archives > 0;
        faults.refuse_archives = faults.refuse_archives.saturating_sub(1);
        refused
    };
    Ok(if over {
        let size = if limit < 1 << 20 { format!("{limit}B") } else { format!("{}MB", limit >> 20) };
        let mut refused = error(403, &format!("exceeded volume streaming limit of {size}"));
        refused.headers_mut().insert(header::CONNECTION, "close".parse().expect("a header"));
        refused
    } else if refused {
        error(500, text)
    } else if whole {
        nothing(204)
    } else {
        error(400, text)
    })
}

fn stream_out(state: &State, handle: &str, query: &Query, headers: &HeaderMap, faults: &Faults) -> Answer {
    let text = "failed to stream out from volume";
    let encoding =
        headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let Some(privileged) = state.privilege(handle) else { return error(404, text) };
    if !faults.supports(encoding) {
        return error(400, text);
    }
    // The path is not confined, as in the genuine server.
    let path = state.path(handle).join(query.get("path").trim_start_matches('/'));
    if !path.exists() {
        return error(404, "no such file or directory");
    }
    let (pieces, outgoing) = mpsc::channel(PIECES);
    let (encoding, cut, fail) = (encoding.to_owned(), faults.cut_archives, faults.fail_archives);
    let owners = state.owners(privileged);
    tokio::task::spawn_blocking(move || {
        let whole = if cut {
            let mut archive = Vec::new();
            archives::pack(&encoding, &path, owners.as_deref(), &mut archive).expect("memory");
            archive.truncate(archive.len() / 2);
            _ = pieces.blocking_send(Ok(archive.into()));
            _ = pieces.blocking_send(Err(io::Error::other("cut")));
            return;
        } else {
            archives::pack(&encoding, &path, owners.as_deref(), archives::Outgoing(pieces.clone()))
        };
        if fail || !whole.unwrap_or(false) {
            let text = format!("{}\n", json!({ "error": text }));
            _ = pieces.blocking_send(Ok(text.into()));
        }
    });
    let mut answer = Response::new(body_of(outgoing));
    answer.headers_mut().insert(header::CONTENT_TYPE, "application/octet-stream".parse().expect("a header"));
    answer
}

fn body_of(pieces: mpsc::Receiver<io::Result<Bytes>>) -> BoxBody<Bytes, io::Error> {
    let pieces = futures::stream::unfold(pieces, async |mut pieces| Some((pieces.recv().await?, pieces)));
    BodyExt::boxed(StreamBody::new(pieces.map(|piece| piece.map(Frame::data))))
}

async fn stream_p2p_out(state: &Arc<State>, handle: &str, query: &Query) -> Answer {
    let text = "failed to stream p2p out from volume";
    let (path, url, encoding) = (query.get("path"), query.get("streamInURL"), query.get("encoding"));
    if path.is_empty() || url.is_empty() || encoding.is_empty() {
        return error(400, text);
    }
    let (told, outcome) = oneshot::channel();
    let sending = state.clone();
    let [handle, path, url, encoding] = [handle, path, url, encoding].map(str::to_owned);
    // Like the genuine server, the transfer continues after the client has gone.
    lock(&state.transfers).spawn(async move {
        _ = told.send(transfer(&sending, &handle, &path, &url, &encoding).await);
    });
    let outcome = outcome.await.unwrap_or_else(|_| Err("it broke off".to_owned()));
    let result = outcome.map_or_else(|cause| format!("{text}: {cause}"), |()| "ok".to_owned());
    // The genuine server sends newlines while it works.
    let frames = ["\n".to_owned(), "\n".to_owned(), result].map(|text| Ok(Frame::data(Bytes::from(text))));
    let mut answer = Response::new(BodyExt::boxed(StreamBody::new(futures::stream::iter(frames))));
    answer.headers_mut().insert(header::CONTENT_TYPE, "plain/text".parse().expect("a header"));
    answer.headers_mut().insert("x-content-type-options", "nosniff".parse().expect("a header"));
    answer
}

async fn transfer(
    state: &Arc<State>,
    handle: &str,
    path: &str,
    url: &str,
    encoding: &str,
) -> Result<(), String> {
    let privileged = state.privilege(handle).ok_or("volume does not exist")?;
    let (authority, target) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .ok_or_else(|| format!("parse {url:?}: missing protocol scheme"))?;
    let put = |cause: &dyn std::fmt::Display| format!("Put {url:?}: {cause}");
    let source = state.path(handle).join(path);
    if !source.exists() {
        let text =
            format!("failed to compress source volume: stat {}: no such file or directory", source.display());
        return Err(put(&text));
    }
    if !archives::ENCODINGS.contains(&encoding) {
        return Err(put(&"failed to compress source volume: unsupported stream encoding"));
    }

    let stream = TcpStream::connect(authority).await.map_err(|error| put(&error))?;
    let connecting = hyper::client::conn::http1::handshake(TokioIo::new(stream));
    let (mut sender, connection) = connecting.await.map_err(|error| put(&error))?;
    let request = Request::builder()
        .method(Method::PUT)
        .uri(format!("/{target}"))
        .header(header::HOST, authority)
        .header(header::CONTENT_ENCODING, encoding)
        .body(sent(state, source, state.owners(privileged), encoding.to_owned()))
        .map_err(|error| put(&error))?;
    let exchange = async move {
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        Ok::<_, hyper::Error>((status, answer.into_body().collect().await?.to_bytes()))
    };
    let (exchanged, _) = tokio::join!(exchange, connection);
    let (status, body) = exchanged.map_err(|error| put(&error))?;
    if status == StatusCode::NO_CONTENT {
        return Ok(());
    }
    let message = serde_json::from_slice::<Value>(&body)
        .ok()
        .and_then(|value| Some(value["error"].as_str()?.to_owned()));
    let message = message.unwrap_or_else(|| "json: cannot unmarshal".to_owned());
    Err(format!("p2p-stream-in {}: {message}", status.as_u16()))
}

/// The archive of a directory. It pauses after its first piece while transfers are held.
fn sent(
    state: &Arc<State>,
    source: PathBuf,
    owners: Option<PathBuf>,
    encoding: String,
) -> BoxBody<Bytes, io::Error> {
    let (pieces, mut made) = mpsc::channel(PIECES);
    let (passed, outgoing) = mpsc::channel(1);
    tokio::task::spawn_blocking(move || {
        archives::pack(&encoding, &source, owners.as_deref(), archives::Outgoing(pieces))
    });
    let held = state.clone();
    lock(&state.transfers).spawn(async move {
        while let Some(piece) = made.recv().await {
            if passed.send(piece).await.is_err() {
                return;
            }
            while lock(&held.faults).hold_transfers {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        }
    });
    body_of(outgoing)
}
