//! Bad input: every call of the store, with everything that may be wrong with what it is told.
//!
//! The table has a request that is fine for each call, and beside it what is wrong with another: a field, a value for it, and the answer that
//! the protos list. Nothing of that may change a row of any table. A call, or a field of a request, that the table does not name fails the
//! test: what callers may say about it, and what comes of it, has to be decided first.

mod table;
mod wrong;

use std::collections::BTreeSet;

use prost_reflect::{
    DescriptorPool, DynamicMessage, Kind, MessageDescriptor, MethodDescriptor, ReflectMessage, Value,
};
use rpc::{Peer, Reason};
use testing::databases::TestDatabase;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt;

use crate::{Suite, Tables, on_both_databases};

on_both_databases! {
    bad_input_gets_its_error_and_changes_nothing,
}

const PACKAGE: &str = "gantry.artifacts.v1";

async fn bad_input_gets_its_error_and_changes_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let table = table::table(&suite).await;
    let pool = DescriptorPool::decode(rpc::DESCRIPTORS).expect("descriptors");
    let methods: Vec<_> = pool
        .services()
        .filter(|service| service.package_name() == PACKAGE)
        .flat_map(|service| service.methods().collect::<Vec<_>>())
        .collect();
    let known: BTreeSet<_> = methods.iter().map(name).collect();
    let tried: BTreeSet<_> = table.iter().map(|call| call.name.to_owned()).collect();
    assert_eq!(known, tried, "the table has every call, and no more");

    let tables = Tables::open(&suite.url()).await;
    let mut before = tables.rows().await;
    for call in &table {
        let method = methods.iter().find(|method| name(method) == call.name).expect("a call");
        let tried: BTreeSet<_> = call.bad.iter().map(|bad| bad.field.clone()).collect();
        let mut untried = leaves(&method.input());
        untried.retain(|field| !tried.contains(field));
        assert!(untried.is_empty(), "{}: nobody tried what is wrong with {untried:?}", call.name);

        let good: Vec<_> = call.good.iter().map(|message| decoded(&method.input(), message)).collect();
        for bad in &call.bad {
            let what = format!("{} with {} {}", call.name, bad.field, bad.what);
            let mut messages = good.clone();
            (bad.change)(&mut messages);
            let answer = send(&suite.peer, method, messages).await;
            match &bad.expected {
                Expected::Refused(reason, field) => assert_refusal(&what, &answer, *reason, field),
                Expected::Nothing => answer.unwrap_or_else(|status| panic!("{what}: {status:?}")),
            }
            let after = tables.rows().await;
            Tables::assert_unchanged(&before, &after, &what);
        }
        // So it was indeed what was wrong that was refused.
        let answer = send(&suite.peer, method, good).await;
        answer.unwrap_or_else(|status| panic!("{}: {status:?}", call.name));
        before = tables.rows().await;
    }
    suite.stop().await;
}

/// A call, a request that is fine, and what may be wrong with others.
struct Call {
    /// Such as `Pins.Settle`.
    name: &'static str,
    /// Encoded; more than one message where the caller streams.
    good: Vec<Vec<u8>>,
    bad: Vec<Bad>,
}

/// What is wrong with a request.
struct Bad {
    /// Its field, such as `outputs.digest`.
    field: String,
    what: String,
    change: Change,
    expected: Expected,
}

/// Makes the messages of a good request those of a bad one.
type Change = Box<dyn Fn(&mut Vec<DynamicMessage>) + Send + Sync>;

/// What comes of it.
enum Expected {
    /// This error, and the field that it names, for those that name one.
    Refused(Reason, String),
    /// The same answer as if there were no such thing, and nothing else.
    Nothing,
}

/// Such as `Pins.Settle`.
fn name(method: &MethodDescriptor) -> String {
    format!("{}.{}", method.parent_service().name(), method.name())
}

fn decoded(descriptor: &MessageDescriptor, encoded: &[u8]) -> DynamicMessage {
    DynamicMessage::decode(descriptor.clone(), encoded).expect("the request of this call")
}

/// The fields of a message and of those in it, by their paths.
fn leaves(message: &MessageDescriptor) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for field in message.fields() {
        match field.kind() {
            Kind::Message(inner) if inner.package_name() == PACKAGE => {
                paths.extend(leaves(&inner).iter().map(|path| format!("{}.{path}", field.name())));
            }
            _ => _ = paths.insert(field.name().to_owned()),
        }
    }
    paths
}

/// Makes the call, whichever side of it streams, and answers how it went up to its first answer.
async fn send(peer: &Peer, method: &MethodDescriptor, messages: Vec<DynamicMessage>) -> Result<(), Status> {
    let mut client = tonic::client::Grpc::new(peer.clone());
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let path: PathAndQuery = path.parse().expect("a path");
    // What is answered is none of this test's business.
    let codec = ProstCodec::<DynamicMessage, ()>::default();
    let answer = client.streaming(Request::new(tokio_stream::iter(messages)), path, codec).await?;
    if method.is_server_streaming() {
        return Ok(());
    }
    answer.into_inner().message().await.map(|_| ())
}

#[track_caller]
fn assert_refusal(what: &str, answer: &Result<(), Status>, reason: Reason, field: &str) {
    let Err(status) = answer else { panic!("{what}: expected {reason}, but it was accepted") };
    let info = status.get_details_error_info().unwrap_or_else(|| panic!("{what}: no reason: {status:?}"));
    assert_eq!((status.code(), info.reason.as_str()), (reason.code(), reason.as_str()), "{what}: {status:?}");
    let named = status.get_details_bad_request();
    let named = named.and_then(|request| Some(request.field_violations.first()?.field.clone()));
    assert_eq!(named.unwrap_or_default(), field, "{what}: {status:?}");
}

/// Sets a field, or clears it. Of what is repeated, the first one's; a single value is all that is left of a repeated field.
fn set(message: &mut DynamicMessage, path: &[&str], value: Option<&Value>) {
    let (name, rest) = path.split_first().expect("a path");
    let field = message.descriptor().get_field_by_name(name).unwrap_or_else(|| panic!("no field {name}"));
    if rest.is_empty() {
        match value {
            None => message.clear_field(&field),
            Some(value) if field.is_list() && value.as_list().is_none() => {
                message.set_field(&field, Value::List(vec![value.clone()]));
            }
            Some(value) => message.set_field(&field, value.clone()),
        }
        return;
    }
    match message.get_field_mut(&field) {
        Value::Message(inner) => set(inner, rest, value),
        Value::List(items) => match items.first_mut() {
            Some(Value::Message(inner)) => set(inner, rest, value),
            other => panic!("{name} is {other:?}"),
        },
        other => panic!("{name} is {other:?}"),
    }
}
