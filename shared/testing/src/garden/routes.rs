//! HTTP routes of the simulated Garden server.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::backend::{Container, Failure, property_name};
use super::http::{Connection, Request};
use super::{Fault, Manner, State, lock};

const ROUTES: &[(&str, &str)] = &[
    ("GET", "/ping"),
    ("GET", "/capacity"),
    ("GET", "/containers"),
    ("POST", "/containers"),
    ("GET", "/containers/bulk_info"),
    ("GET", "/containers/bulk_metrics"),
    ("DELETE", "/containers/:"),
    ("GET", "/containers/:/info"),
    ("GET", "/containers/:/metrics"),
    ("PUT", "/containers/:/stop"),
    ("PUT", "/containers/:/files"),
    ("GET", "/containers/:/files"),
    ("GET", "/containers/:/limits/bandwidth"),
    ("GET", "/containers/:/limits/cpu"),
    ("GET", "/containers/:/limits/disk"),
    ("GET", "/containers/:/limits/memory"),
    ("POST", "/containers/:/net/in"),
    ("POST", "/containers/:/net/out"),
    ("POST", "/containers/:/net/out/bulk"),
    ("POST", "/containers/:/processes"),
    ("GET", "/containers/:/processes/:"),
    ("GET", "/containers/:/processes/:/attaches/:/stdout"),
    ("GET", "/containers/:/processes/:/attaches/:/stderr"),
    ("PUT", "/containers/:/grace_time"),
    ("GET", "/containers/:/properties"),
    ("GET", "/containers/:/properties/:"),
    ("PUT", "/containers/:/properties/:"),
    ("DELETE", "/containers/:/properties/:"),
];

const JSON: &str = "Content-Type: application/json\r\n";
const TEXT: &str = "Content-Type: text/plain; charset=utf-8\r\n";

/// Encodes JSON as Go does: with HTML characters escaped, and with a newline.
pub(super) fn go_json(value: &impl serde::Serialize) -> Vec<u8> {
    let text = serde_json::to_string(value).expect("a value is written");
    let text = text.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026");
    (text + "\n").into_bytes()
}

fn fits(pattern: &str, parts: &[String]) -> bool {
    let pattern: Vec<_> = pattern.split('/').skip(1).collect();
    pattern.len() == parts.len()
        && pattern
            .iter()
            .zip(parts)
            .all(|(wanted, part)| if *wanted == ":" { !part.is_empty() } else { wanted == part })
}

/// Serves a connection until it ends or is hijacked.
pub(super) fn serve(state: &Arc<State>, mut connection: Connection) {
    while let Ok(Some(request)) = connection.request() {
        let line = format!("{} {}", request.method, request.target);
        lock(&state.requests).push(line.clone());
        let fault = {
            let mut faults = lock(&state.faults);
            faults
                .iter()
                .position(|(pattern, _)| line.contains(pattern.as_str()))
                .map(|at| faults.remove(at).1)
        };
        match fault {
            Some(Fault::Drop) => return,
            Some(Fault::Reset) => return connection.reset(),
            Some(Fault::Delay(by)) => std::thread::sleep(by),
            Some(Fault::Answer(text)) => {
                if connection.answer(500, JSON, &go_json(&Failure::plain(text))).is_err() {
                    return;
                }
                continue;
            }
            Some(Fault::AnswerAs(r#type, text)) => {
                if connection.answer(500, JSON, &go_json(&Failure::of_type(r#type, text))).is_err() {
                    return;
                }
                continue;
            }
            Some(Fault::LoseAnswer) => connection.mute = true,
            Some(Fault::FailAfter(text)) => connection.failing = Some(text),
            Some(Fault::Dribble) => connection.dribble = true,
            None => {}
        }
        let close = request.close || connection.mute;
        match route(state, connection, &request) {
            Ok(Some(open)) if !close => connection = open,
            _ => return,
        }
        connection.dribble = false;
    }
}

/// Answers one request. Returns the connection unless it was hijacked.
fn route(
    state: &Arc<State>,
    mut connection: Connection,
    request: &Request,
) -> io::Result<Option<Connection>> {
    let known: Vec<_> = ROUTES.iter().filter(|(_, pattern)| fits(pattern, &request.parts)).collect();
    if known.is_empty() {
        connection.answer(404, TEXT, b"404 page not found\n")?;
        return Ok(Some(connection));
    }
    let Some((method, pattern)) = known.iter().find(|(method, _)| *method == request.method) else {
        let allowed = known.iter().map(|(method, _)| *method).collect::<Vec<_>>().join(", ");
        connection.answer(405, &format!("Allow: {allowed}\r\n{TEXT}"), b"Method Not Allowed\n")?;
        return Ok(Some(connection));
    };
    let part = |at: usize| request.parts.get(at).map_or("", String::as_str);
    let is_output = pattern.ends_with("/stdout") || pattern.ends_with("/stderr");
    let answer = match (*method, *pattern) {
        _ if is_output => {
            state.output_connection(&connection, part(5), pattern.ends_with("/stderr"))?;
            return Ok(None);
        }
        ("POST", "/containers/:/processes") => match run(state, part(1), &request.body) {
            Err(failure) => Err(failure),
            Ok((container, (stream, attachment), process)) => {
                let _call = container.call();
                state.main_connection(connection, 201, &process, stream, &attachment)?;
                return Ok(None);
            }
        },
        ("GET", "/containers/:/processes/:") => match attach(state, part(1), part(3)) {
            Err(failure) => Err(failure),
            Ok((container, Ok(process))) => {
                let _call = container.call();
                let (stream, attachment) = state.new_attachment();
                process.attach(Arc::clone(&attachment));
                state.main_connection(connection, 200, &process, stream, &attachment)?;
                return Ok(None);
            }
            Ok((_, Err(exit))) => {
                let (stream, attachment) = state.new_attachment();
                attachment.close();
                let first = go_json(&json!({"process_id": part(3), "stream_id": stream.to_string()}));
                let last = super::attach::last(part(3), Some(exit), None);
                connection.raw_head(200, JSON, &[first, last].concat())?;
                return Ok(None);
            }
        },
        ("GET", "/containers/bulk_info" | "/containers/bulk_metrics") => {
            let Some((_, handles)) = request.query.iter().find(|(key, _)| key == "handles") else {
                // The genuine handler panics, and the connection ends.
                return Ok(None);
            };
            bulk(state, handles, pattern.ends_with("info"))
        }
        _ => ordinary(state, method, pattern, request),
    };
    let failing = connection.failing.take();
    match failing.map_or(answer, |text| Err(Failure::plain(text))) {
        Ok(answer) => connection.answer(200, JSON, &go_json(&answer))?,
        Err(failure) => connection.answer(failure.status, JSON, &go_json(&failure))?,
    }
    Ok(Some(connection))
}

/// Parses the first value of a body and ignores the rest.
fn body(bytes: &[u8]) -> Result<Value, Failure> {
    match serde_json::Deserializer::from_slice(bytes).into_iter().next() {
        None => Err(Failure::plain("EOF")),
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) if error.is_eof() => Err(Failure::plain("unexpected EOF")),
        Some(Err(error)) => Err(Failure::plain(error.to_string())),
    }
}

type Started = (Arc<Container>, (u64, Arc<super::process::Attachment>), Arc<super::process::Process>);

fn run(state: &Arc<State>, handle: &str, bytes: &[u8]) -> Result<Started, Failure> {
    let spec = body(bytes)?;
    let container = state.lookup_to_run(handle)?;
    let _call = container.call();
    let (stream, attachment) = state.new_attachment();
    let process = container.run(state, &spec, Arc::clone(&attachment)).inspect_err(|_| attachment.close())?;
    Ok((container, (stream, attachment), process))
}

type Attached = (Arc<Container>, Result<Arc<super::process::Process>, i32>);

fn attach(state: &State, handle: &str, id: &str) -> Result<Attached, Failure> {
    let container = state.lookup_to_run(handle)?;
    let found = container.process(id, state)?;
    Ok((container, found))
}

fn bulk(state: &State, handles: &str, info: bool) -> Result<Value, Failure> {
    if state.manner == Manner::Containerd {
        return Err(Failure::plain("not implemented"));
    }
    let handles = handles.split(',').filter(|handle| !handle.is_empty());
    let entries = handles.map(|handle| {
        let found = state.lookup(handle);
        let name = if info { "Info" } else { "Metrics" };
        let value = found
            .as_ref()
            .map_or_else(|_| json!({}), |found| if info { container_info(found) } else { json!({}) });
        let error = found.err().map_or(Value::Null, |failure| json!(failure));
        (handle.to_owned(), json!({name: value, "Err": error}))
    });
    Ok(Value::Object(entries.collect()))
}

fn container_info(container: &Container) -> Value {
    let properties = lock(&container.properties).clone();
    let events = container.groups.ran_out_of_memory().then_some(["oom"]);
    json!({"State": "active", "Events": events, "HostIP": "", "ContainerIP": "", "ContainerIPv6": "", "ExternalIP": "",
           "ContainerPath": "", "ProcessIDs": null, "Properties": properties, "MappedPorts": null})
}

fn ordinary(state: &Arc<State>, method: &str, pattern: &str, request: &Request) -> Result<Value, Failure> {
    let containerd = state.manner == Manner::Containerd;
    let part = |at: usize| request.parts.get(at).map_or("", String::as_str);
    match (method, pattern) {
        ("GET", "/ping") => return Ok(json!({})),
        ("GET", "/capacity") if containerd => return Err(Failure::plain("not implemented")),
        ("GET", "/capacity") if state.manner == Manner::Houdini => return Ok(json!({})),
        ("GET", "/capacity") => {
            return Ok(json!({"memory_in_bytes": 1 << 30, "disk_in_bytes": 1 << 30, "max_containers": 250}));
        }
        ("GET", "/containers") => return Ok(json!({"Handles": state.list(&request.query)?})),
        ("POST", "/containers") => return Ok(json!({"Handle": state.create(&body(&request.body)?)?})),
        ("DELETE", "/containers/:") => return state.destroy(part(1)).map(|()| json!({})),
        _ => {}
    }
    // guardian accepts a name, whether or not the container exists.
    if state.manner == Manner::Guardian && state.lookup(part(1)).is_err() {
        match (method, pattern) {
            ("GET", "/containers/:/properties") => return Ok(Value::Null),
            ("PUT", "/containers/:/properties/:") => return Ok(json!({})),
            ("PUT", "/containers/:/stop") => {
                return Err(Failure::plain("stop: pid not found for container: does not exist"));
            }
            _ => {}
        }
    }
    let container = state.lookup(part(1))?;
    if pattern.ends_with("/grace_time") {
        let grace = body(&request.body)?.as_u64().ok_or_else(|| Failure::plain("no duration"))?;
        container.set_grace(Duration::from_nanos(grace));
        if grace == 0 {
            state.destroy(part(1))?;
        }
        return Ok(json!({}));
    }
    let _call = container.call();
    let key = part(3);
    match (method, pattern) {
        ("PUT", "/containers/:/stop") => {
            let kill = body(&request.body)?["kill"].as_bool().unwrap_or(false);
            container.stop(kill, state.times.stop).map(|()| json!({}))
        }
        ("GET", "/containers/:/properties") => {
            let properties = lock(&container.properties).clone();
            Ok(properties.into_iter().filter(|(_, value)| !(containerd && value.is_empty())).collect())
        }
        ("GET", "/containers/:/properties/:") => {
            let value = lock(&container.properties).get(key).cloned();
            match value.filter(|value| !(containerd && value.is_empty())) {
                Some(value) => Ok(json!({"value": value})),
                None if containerd => Err(Failure::plain(format!("not found: {key}"))),
                None => Err(Failure::plain(format!("property does not exist: {key}"))),
            }
        }
        ("PUT", "/containers/:/properties/:") => {
            let value = body(&request.body)?["value"].as_str().unwrap_or_default().to_owned();
            property_name(key, state.manner)?;
            lock(&container.properties).insert(key.to_owned(), value);
            Ok(json!({}))
        }
        ("DELETE", "/containers/:/properties/:") if !containerd => {
            let removed = lock(&container.properties).remove(key);
            match removed {
                None if state.manner == Manner::Houdini => {
                    Err(Failure::plain(format!("property does not exist: {key}")))
                }
                _ => Ok(json!({})),
            }
        }
        ("GET", "/containers/:/info") if !containerd => Ok(container_info(&container)),
        ("GET", "/containers/:/metrics") if !containerd => Ok(json!({})),
        ("GET", _) if pattern.starts_with("/containers/:/limits/") => {
            let limits = &container.limits[format!("{key}_limits")];
            let set = limits.is_object() && state.manner != Manner::Houdini;
            Ok(if set { limits.clone() } else { json!({}) })
        }
        ("POST", _) if state.manner == Manner::Houdini && pattern.starts_with("/containers/:/net/") => {
            Ok(json!({}))
        }
        _ => Err(Failure::plain("not implemented")),
    }
}
