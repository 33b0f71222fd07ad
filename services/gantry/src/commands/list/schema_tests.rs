//! Test that `docs/json-schema.json` has the schema of each JSON document.
//!
//! The test makes documents from messages whose fields are filled to different depths, and derives
//! the schema that all these documents satisfy. `GANTRY_BLESS=1` updates the file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, Value};
use rpc::pb::artifacts::{ResourceCache, TaskCache};
use rpc::pb::scheduler::{Finished, WatchResponse};
use serde_json::{Value as Json, json};

use super::images::ShownImage;
use super::{caches, images};
use crate::client::caches::{JOB, PATH};
use crate::client::transfers::transfer_document;
use crate::commands::{status, top};
use crate::follow::narrate::describe_event;
use crate::render::json;

/// Number of alternatives of a `oneof` that are tried.
const CHOICES: usize = 8;
/// Number of levels of messages in messages.
const DEPTH: usize = 7;
/// Beginning of every instant in a filled message.
const DAY: &str = "1970-01-01T";

#[test]
fn json_schema_is_current() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json-schema.json"));
    let made = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "JSON documents of gantry",
        "$comment": "Documents that `gantry --json` prints. Later versions add fields and words.",
        "$defs": documents(),
    });
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(&path, format!("{made:#}\n")).expect("written");
    } else {
        let known = std::fs::read_to_string(&path).expect("the schema");
        let known: Json = serde_json::from_str(&known).expect("JSON");
        assert!(known == made, "run this test with GANTRY_BLESS=1");
    }
}

fn documents() -> BTreeMap<&'static str, Json> {
    let pool = &DescriptorPool::decode(rpc::DESCRIPTORS).expect("descriptors");
    let of_run = TaskCache { job: JOB.to_owned(), path: PATH.to_owned(), ..TaskCache::default() };
    let mut of_caches = all(pool, "artifacts.v1.TaskCache", caches::json);
    of_caches.push(caches::json(&of_run));
    let mut of_images = all(pool, "artifacts.v1.ResourceCache", images::json);
    let metadata = json!({
        "entrypoint": ["sh"], "cmd": ["sh"], "user": "", "workdir": "", "stop_signal": "", "env": ["A=1"], "labels": {},
    });
    for (size_bytes, metadata) in [(None, Json::Null), (Some(1), json!({})), (Some(1), metadata)] {
        of_images.push(ShownImage { image: ResourceCache::default(), size_bytes, metadata }.json());
    }
    let none_runs = || json!({ "type": "object", "required": ["running"], "properties": { "running": { "const": false } } });
    let mut snapshot = schema(&top::samples());
    snapshot["properties"]["workers"] = list_of("worker");
    snapshot["properties"]["queue"] = list_of("workload");
    snapshot["properties"]["transfers"] = list_of("transfer");
    let mut state = schema(&status::samples());
    state["properties"]["workers"] = list_of("worker");
    state["properties"]["transfers"] = list_of("transfer");
    state["properties"]["workloads"] =
        json!({ "type": "object", "additionalProperties": { "type": "integer" } });
    let mut overview = schema(&[json!({ "workers": [], "workloads": [], "truncated": false })]);
    overview["properties"]["workers"] = list_of("worker");
    overview["properties"]["workloads"] = list_of("workload");
    let failed = schema(&[json!({ "error": "text" })]);
    let documents = [
        ("workload", schema(&all(pool, "scheduler.v1.Workload", json::workload))),
        ("worker", schema(&all(pool, "scheduler.v1.Worker", json::worker))),
        ("lease", schema(&all(pool, "scheduler.v1.Lease", json::lease))),
        ("artifact", schema(&all(pool, "artifacts.v1.Artifact", json::artifact))),
        ("cache", schema(&of_caches)),
        ("image", schema(&of_images)),
        ("volume", schema(&all(pool, "artifacts.v1.Volume", json::volume))),
        ("container", schema(&all(pool, "artifacts.v1.Container", json::container))),
        ("orphan", schema(&all(pool, "artifacts.v1.Orphan", json::orphan))),
        ("base-type", schema(&all(pool, "artifacts.v1.BaseResourceType", json::base_type))),
        ("import", schema(&all(pool, "artifacts.v1.Import", json::import))),
        ("transfer", schema(&all(pool, "streamer.v1.Transfer", transfer_document))),
        ("overview", overview),
        ("top", json!({ "anyOf": [snapshot, none_runs()] })),
        ("status", json!({ "anyOf": [state, none_runs(), failed] })),
        ("event", events(pool)),
    ];
    documents.into()
}

fn list_of(document: &str) -> Json {
    json!({ "type": "array", "items": { "$ref": format!("#/$defs/{document}") } })
}

/// Makes the schema of all events of `run`, `attach`, `exec`, `logs` and `watch`. Unknown events
/// satisfy it.
fn events(pool: &DescriptorPool) -> Json {
    let mut details = BTreeMap::<&str, Vec<Json>>::new();
    let filled = all(pool, "scheduler.v1.WatchResponse", |watched: &WatchResponse| {
        let described = watched.event.as_ref().map(describe_event);
        described.map_or(Json::Null, |event| json!([event.name, event.details]))
    });
    let watched = ["queued", "placed", "preparing", "materializing", "running", "publishing"];
    for name in watched {
        let of_name = filled.iter().filter(|event| event[0] == name).map(|event| event[1].clone());
        details.insert(name, of_name.collect());
    }
    let finished = all(pool, "scheduler.v1.Finished", |finished: &Finished| json::finished(finished, 3));
    // Events that are not made of one message.
    let changed =
        json!({ "count": 1, "first": [{ "path": "a", "result": "b" }, { "path": "a", "result": null }] });
    let failure = json!({ "reason": "R", "message": "text" });
    let exit = finished.iter().map(|finished| finished["exit"].clone());
    let process = exit.map(|exit| json!({ "process_id": "id", "exit": exit, "failure": null, "status": 3 }));
    let process: Vec<_> = process.collect();
    let others = [
        ("submitted", json!({ "workload_id": "id" })),
        ("waiting", json!({ "queue_position": 1, "reason": "text", "expected_wait_seconds": 1.5 })),
        ("waiting", json!({ "queue_position": 1, "reason": "text", "expected_wait_seconds": null })),
        ("waiting", json!({ "reasons": ["text"] })),
        (
            "uploaded",
            json!({ "name": "a", "artifact_id": "id", "entries": 1, "size_bytes": 1, "sent_bytes": 1 }),
        ),
        ("pulled", json!({ "reference": "a", "digest": "b", "artifact_id": "id", "existed": true })),
        ("output", json!({ "stream": "stdout", "offset": 1, "data": "base64" })),
        ("truncated", json!({ "stream": "stdout", "bytes": 1 })),
        ("truncated", json!({ "stream": "stdout" })),
        (
            "downloaded",
            json!({
                "name": "a", "artifact_id": "id", "directory": "b", "entries": 1, "size_bytes": 1,
                "fetched_bytes": 1, "not_written": { "count": 1, "first": [{ "path": "a", "what": "device" }] },
                "conflicts": changed, "removed_entries": 1,
            }),
        ),
        ("starting", json!({ "process_id": "id" })),
        ("finished", json!({ "outcome": "interrupted", "status": 1 })),
        ("finished", json!({ "outcome": "errored", "failure": failure, "status": 1 })),
        ("finished", json!({ "process_id": "id", "exit": null, "failure": failure, "status": 1 })),
    ];
    let others = others.into_iter().chain(finished.into_iter().chain(process).map(|one| ("finished", one)));
    for (name, one) in others {
        details.entry(name).or_default().push(one);
    }
    let of_event = |(name, details): (&str, Vec<Json>)| json!({ "if": { "properties": { "event": { "const": name } } }, "then": schema(&details) });
    let at = json!({ "type": "string", "format": "date-time" });
    json!({
        "type": "object",
        "required": ["event"],
        "properties": { "event": { "type": "string" }, "at": at },
        "allOf": details.into_iter().map(of_event).collect::<Vec<_>>(),
    })
}

/// Makes the documents of messages that are filled to every depth, with every alternative of each
/// `oneof`.
fn all<M: Message + Default>(
    pool: &DescriptorPool,
    message: &str,
    document: impl Fn(&M) -> Json,
) -> Vec<Json> {
    let descriptor = pool.get_message_by_name(&format!("gantry.{message}")).expect(message);
    let choices = (0..CHOICES).flat_map(|choice| (0..=DEPTH).map(move |depth| (choice, depth)));
    let filled = choices.map(|(choice, depth)| filled(&descriptor, choice, depth));
    filled.map(|filled| document(&filled.transcode_to().expect("the same message"))).collect()
}

/// Makes the schema that all these documents satisfy.
fn schema(documents: &[Json]) -> Json {
    schema_of(&documents.iter().collect::<Vec<_>>())
}

fn schema_of(values: &[&Json]) -> Json {
    let word = |value: &Json| match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(number) if number.is_f64() => "number",
        Json::Number(_) => "integer",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    };
    let mut types: BTreeSet<_> = values.iter().map(|value| word(value)).collect();
    if types.contains("number") {
        types.remove("integer");
    }
    let mut made = json!({ "type": types });
    if let Some(one) = types.first().filter(|_| types.len() == 1) {
        made["type"] = (*one).into();
    }
    if values.iter().any(|value| value.as_str().is_some_and(|text| text.starts_with(DAY))) {
        made["format"] = "date-time".into();
    }
    let items: Vec<_> = values.iter().filter_map(|value| value.as_array()).flatten().collect();
    if !items.is_empty() {
        made["items"] = schema_of(&items);
    }
    let objects: Vec<_> = values.iter().filter_map(|value| value.as_object()).collect();
    let names: BTreeSet<_> = objects.iter().flat_map(|object| object.keys()).collect();
    let property = |name: &&String| {
        schema_of(&objects.iter().filter_map(|object| object.get(*name)).collect::<Vec<_>>())
    };
    let properties: BTreeMap<_, _> = names.iter().map(|name| (*name, property(name))).collect();
    let is_required = |name: &&&String| objects.iter().all(|object| object.contains_key(**name));
    let required: Vec<_> = names.iter().filter(is_required).collect();
    if !properties.is_empty() {
        made["properties"] = json!(properties);
    }
    if !required.is_empty() {
        made["required"] = json!(required);
    }
    made
}

/// Makes a message with every field down to a depth. `choice` selects the alternative of each
/// `oneof`.
fn filled(message: &MessageDescriptor, choice: usize, depth: usize) -> DynamicMessage {
    let mut made = DynamicMessage::new(message.clone());
    let Some(below) = depth.checked_sub(1) else { return made };
    let chosen: Vec<_> =
        message.oneofs().filter_map(|one| one.fields().nth(choice % one.fields().len().max(1))).collect();
    for field in message.fields() {
        if field.containing_oneof().is_none() || chosen.contains(&field) {
            let value = value(&field, choice, below);
            let value = match (field.is_map(), field.is_list()) {
                (true, _) => continue,
                (_, true) => Value::List(vec![value]),
                _ => value,
            };
            made.set_field(&field, value);
        }
    }
    made
}

fn value(field: &FieldDescriptor, choice: usize, depth: usize) -> Value {
    match field.kind() {
        Kind::Double => Value::F64(1.5),
        Kind::Float => Value::F32(1.5),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(1),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(1),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(1),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(1),
        Kind::Bool => Value::Bool(true),
        Kind::String => Value::String("text".to_owned()),
        Kind::Bytes => Value::Bytes(b"bytes".as_slice().into()),
        Kind::Enum(_) => Value::EnumNumber(1),
        Kind::Message(message) => Value::Message(filled(&message, choice, depth)),
    }
}
