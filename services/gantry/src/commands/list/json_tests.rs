//! Test that `docs/json-output.md` lists the fields of each JSON document.
//!
//! The test fills every field of a message, and reads the fields of the document that is made of
//! it. `GANTRY_BLESS=1` updates the page.

use std::collections::BTreeMap;
use std::path::PathBuf;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, Value};
use rpc::pb::scheduler;
use serde_json::Value as Json;

use super::caches;
use crate::render::json;

/// The list of fields begins after this line of the page.
const MARK: &str = "<!-- The rest of this page is made by a test: GANTRY_BLESS=1. -->\n";
/// Number of alternatives of a `oneof` that are tried.
const CHOICES: usize = 4;

#[test]
fn json_output_is_documented() {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json-output.md"));
    let page = std::fs::read_to_string(&path).expect("the page");
    let (text, listed) = page.split_once(MARK).expect("the mark");
    let made = fields_of_all();
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(&path, format!("{text}{MARK}{made}")).expect("written");
    } else {
        assert_eq!(listed, made, "run this test with GANTRY_BLESS=1");
    }
}

fn fields_of_all() -> String {
    let pool = DescriptorPool::decode(rpc::DESCRIPTORS).expect("descriptors");
    [
        section("workload", &pool, "scheduler.v1.Workload", json::workload),
        section("worker", &pool, "scheduler.v1.Worker", json::worker),
        section("lease", &pool, "scheduler.v1.Lease", json::lease),
        section("artifact", &pool, "artifacts.v1.Artifact", json::artifact),
        section("cache", &pool, "artifacts.v1.TaskCache", caches::json),
        section("volume", &pool, "artifacts.v1.Volume", json::volume),
        section("container", &pool, "artifacts.v1.Container", json::container),
        section("orphan", &pool, "artifacts.v1.Orphan", json::orphan),
        section("base type", &pool, "artifacts.v1.BaseResourceType", json::base_type),
        section("import", &pool, "artifacts.v1.Import", json::import),
        section(
            "finished event of a run",
            &pool,
            "scheduler.v1.Finished",
            |finished: &scheduler::Finished| json::finished(finished, 3),
        ),
    ]
    .concat()
}

/// Makes the list of the fields of one document.
fn section<M: Message + Default>(
    title: &str,
    pool: &DescriptorPool,
    message: &str,
    document: impl Fn(&M) -> Json,
) -> String {
    let descriptor = pool.get_message_by_name(&format!("gantry.{message}")).expect(message);
    let mut fields = BTreeMap::new();
    for choice in 0..CHOICES {
        let filled: M = filled(&descriptor, choice, 0).transcode_to().expect("the same message");
        collect(&document(&filled), "", &mut fields);
    }
    let mut empty = BTreeMap::new();
    collect(&document(&M::default()), "", &mut empty);
    let row = |(path, kind): (&String, &String)| {
        let or_null = if empty.get(path).is_some_and(|kind| kind == "null") && kind != "null" {
            " or null"
        } else {
            ""
        };
        format!("| `{path}` | {kind}{or_null} |\n")
    };
    let rows: String = fields.iter().map(row).collect();
    format!("\n## {title}\n\n| Field | Type |\n|---|---|\n{rows}")
}

/// Adds the types of all fields of a document. A known type wins over null.
fn collect(value: &Json, path: &str, fields: &mut BTreeMap<String, String>) {
    let mut add = |kind: &str| {
        let known = fields.entry(path.to_owned()).or_insert_with(|| kind.to_owned());
        if known == "null" {
            kind.clone_into(known);
        }
    };
    match value {
        Json::Null => add("null"),
        Json::Bool(_) => add("boolean"),
        Json::Number(_) => add("number"),
        Json::String(_) => add("string"),
        Json::Array(items) => {
            let of_scalars = !items.iter().any(|item| item.is_object() || item.is_array());
            add(if items.is_empty() || !of_scalars { "list" } else { "list of scalars" });
            for item in items.iter().filter(|_| !of_scalars) {
                collect(item, &format!("{path}[]"), fields);
            }
        }
        Json::Object(members) => {
            if !path.is_empty() {
                add("object");
            }
            for (name, member) in members {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                collect(member, &path, fields);
            }
        }
    }
}

/// Makes a message with every field. `choice` selects the alternative of each `oneof`.
fn filled(message: &MessageDescriptor, choice: usize, depth: usize) -> DynamicMessage {
    let mut made = DynamicMessage::new(message.clone());
    if depth > 6 {
        return made;
    }
    let chosen: Vec<_> =
        message.oneofs().filter_map(|one| one.fields().nth(choice % one.fields().len().max(1))).collect();
    for field in message.fields() {
        if field.containing_oneof().is_none() || chosen.contains(&field) {
            let value = value(&field, choice, depth);
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
        Kind::Message(message) => Value::Message(filled(&message, choice, depth + 1)),
    }
}
