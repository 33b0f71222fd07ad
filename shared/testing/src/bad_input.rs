//! Tests of invalid requests: every RPC of a package, with every kind of invalid field.
//!
//! A table has a valid request for each RPC, and a list of changes to it. Each change names a
//! field, a value and the answer that the proto documents. An invalid request must not change a row
//! of any database table. The test fails if an RPC or a request field is missing from the table.

pub mod wrong;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::future::Future;
use std::time::Duration;

use prost::Message;
use prost_reflect::{
    DescriptorPool, DynamicMessage, Kind, MessageDescriptor, MethodDescriptor, ReflectMessage, Value,
};
use rpc::{Peer, Reason};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tonic_types::StatusExt;

use crate::tables::{Tables, unchanged};

/// Timeout of one RPC.
const PATIENCE: Duration = Duration::from_secs(30);

/// An RPC, a valid request for it, and invalid variants.
pub struct Call {
    name: &'static str,
    /// The encoded request. A streaming request has several messages.
    good: Vec<Vec<u8>>,
    bad: Vec<Bad>,
    is_silent: bool,
}

impl Call {
    /// Describes the RPC `name`, such as `Pins.Settle`. `good` has one message, or all messages of
    /// a streaming request.
    pub fn new<M: Message>(
        name: &'static str,
        good: impl IntoIterator<Item = M>,
        bad: impl IntoIterator<Item = Vec<Bad>>,
    ) -> Self {
        Self {
            name,
            good: good.into_iter().map(|message| message.encode_to_vec()).collect(),
            bad: bad.into_iter().flatten().collect(),
            is_silent: false,
        }
    }

    /// Marks a response stream that may stay empty for long. The test then waits only for the start
    /// of the stream, unless it expects an error.
    #[must_use]
    pub fn silent(self) -> Self {
        Self { is_silent: true, ..self }
    }
}

/// An invalid variant of a request.
pub struct Bad {
    /// The path of the field, such as `outputs.digest`.
    field: String,
    what: String,
    change: Change,
    expected: Expected,
    /// Number of stream messages that are accepted before the invalid one. The test ignores the
    /// changes that they make.
    answered: usize,
}

/// Changes the messages of a valid request at the given field path.
type Change = Box<dyn Fn(&mut Vec<DynamicMessage>, &str) + Send + Sync>;

/// The expected answer to an invalid request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// This error, with the field that it names, or an empty name.
    Refused(Reason, String),
    /// The answer that the request would get if the resource did not exist.
    Nothing,
    /// Success, because the value is unusual but valid. The test does not check what changes.
    Taken,
}

/// Makes all calls of `package` in `table`, and fails if an answer differs from the expectation.
/// `tables` are the database tables of the service behind `peer`. `is_quiet` tells whether the
/// service, with these rows, makes no more changes in the background.
pub async fn check(
    package: &str,
    peer: &Peer,
    tables: &Tables,
    is_quiet: impl Fn(&BTreeSet<String>) -> bool,
    table: &[Call],
) {
    let pool = DescriptorPool::decode(rpc::DESCRIPTORS).expect("descriptors");
    let methods: Vec<_> = pool
        .services()
        .filter(|service| service.package_name() == package)
        .flat_map(|service| service.methods().collect::<Vec<_>>())
        .collect();
    let known: BTreeSet<_> = methods.iter().map(name).collect();
    let tried: BTreeSet<_> = table.iter().map(|call| call.name.to_owned()).collect();
    assert_eq!(known, tried, "the table has exactly the RPCs of the package");

    let quiet = || quiet(tables, &is_quiet);
    let mut wrong = 0;
    // Printed at once, because it may explain a later timeout.
    let mut complain = |what: String| {
        eprintln!("{what}");
        wrong += 1;
    };
    let mut before = quiet().await;
    for call in table {
        let method = methods.iter().find(|method| name(method) == call.name).expect("a call");
        let tried: BTreeSet<_> = call.bad.iter().map(|bad| bad.field.as_str()).collect();
        let mut untried = leaves(&method.input());
        untried.retain(|field| !tried.contains(field.as_str()));
        assert!(untried.is_empty(), "{}: the table has no invalid value for {untried:?}", call.name);

        let good: Vec<_> = call.good.iter().map(|message| decoded(&method.input(), message)).collect();
        for bad in &call.bad {
            let what = format!("{} with {} {}", call.name, bad.field, bad.what);
            let mut messages = good.clone();
            (bad.change)(&mut messages, &bad.field);
            let rest = messages.split_off(bad.answered);
            let mut open = None;
            if bad.answered > 0 {
                let begun = within(&what, Open::begin(peer, method, messages)).await;
                open = Some(begun.unwrap_or_else(|status| panic!("{what}: {status:?}")));
                before = quiet().await;
            }
            let is_silent = call.is_silent && !matches!(bad.expected, Expected::Refused(..));
            let answer = within(&what, send(peer, method, open, rest, is_silent)).await;
            if let Err(why) = is_as_expected(&bad.expected, answer) {
                complain(format!("{what}: {why}"));
            }
            if bad.expected == Expected::Taken {
                before = quiet().await;
            } else if let Err(changes) = unchanged(&before, &tables.rows().await) {
                complain(format!("{what} {changes}"));
                before = quiet().await;
            }
        }
        // The valid request succeeds, so the invalid field was the reason for the rejection.
        let answer = within(call.name, send(peer, method, None, good, call.is_silent)).await;
        if let Err(status) = answer {
            complain(format!("{}: {status:?}", call.name));
        }
        before = quiet().await;
    }
    assert_eq!(wrong, 0, "number of unexpected answers, printed above");
    let count: usize = table.iter().map(|call| call.bad.len()).sum();
    eprintln!("{package}: {} calls, {count} invalid requests", table.len());
}

/// The service and method name, such as `Pins.Settle`.
fn name(method: &MethodDescriptor) -> String {
    format!("{}.{}", method.parent_service().name(), method.name())
}

fn decoded(descriptor: &MessageDescriptor, encoded: &[u8]) -> DynamicMessage {
    DynamicMessage::decode(descriptor.clone(), encoded).expect("the request of this call")
}

/// The paths of the fields of a message, including those of nested messages of the same package.
fn leaves(message: &MessageDescriptor) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for field in message.fields() {
        match field.kind() {
            Kind::Message(inner) if inner.package_name() == message.package_name() => {
                paths.extend(leaves(&inner).iter().map(|path| format!("{}.{path}", field.name())));
            }
            _ => _ = paths.insert(field.name().to_owned()),
        }
    }
    paths
}

async fn within<T>(what: impl Display, answer: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, answer).await {
        Ok(answer) => answer,
        Err(_) => panic!("{what}: timeout while waiting for an answer"),
    }
}

/// Waits until the service makes no more changes in the background, and returns its rows.
async fn quiet(tables: &Tables, is_quiet: &impl Fn(&BTreeSet<String>) -> bool) -> BTreeSet<String> {
    within("the service becomes quiet", async {
        loop {
            let rows = tables.rows().await;
            if is_quiet(&rows) {
                return rows;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// The content of the answers is ignored.
type Answers = Streaming<()>;

/// A bidirectional call whose request stream is still open.
struct Open {
    requests: mpsc::Sender<DynamicMessage>,
    answers: Answers,
}

impl Open {
    /// Sends `messages`, and waits for one answer to each.
    async fn begin(
        peer: &Peer,
        method: &MethodDescriptor,
        messages: Vec<DynamicMessage>,
    ) -> Result<Self, Status> {
        let (requests, receiver) = mpsc::channel(16);
        let answers = call(peer, method, ReceiverStream::new(receiver)).await?;
        let mut open = Self { requests, answers };
        for message in messages {
            open.say(message).await;
            let answer = open.answers.message().await?;
            assert!(answer.is_some(), "the stream has ended");
        }
        Ok(open)
    }

    /// Sends a message. A call that was rejected no longer receives it.
    async fn say(&self, message: DynamicMessage) {
        self.requests.send(message).await.ok();
    }

    /// Sends the remaining messages, and returns the result of the call.
    async fn end(mut self, messages: Vec<DynamicMessage>) -> Result<(), Status> {
        for message in messages {
            self.say(message).await;
        }
        drop(self.requests);
        while self.answers.message().await?.is_some() {}
        Ok(())
    }
}

/// Makes a call, or continues an open one. Returns the result up to the first answer, or up to the
/// end of a bidirectional call.
async fn send(
    peer: &Peer,
    method: &MethodDescriptor,
    open: Option<Open>,
    messages: Vec<DynamicMessage>,
    is_silent: bool,
) -> Result<(), Status> {
    if method.is_client_streaming() && method.is_server_streaming() {
        let open = match open {
            Some(open) => open,
            None => Open::begin(peer, method, Vec::new()).await?,
        };
        return open.end(messages).await;
    }
    let mut answers = call(peer, method, tokio_stream::iter(messages)).await?;
    if is_silent {
        return Ok(());
    }
    answers.message().await.map(|_| ())
}

async fn call(
    peer: &Peer,
    method: &MethodDescriptor,
    messages: impl tokio_stream::Stream<Item = DynamicMessage> + Send + 'static,
) -> Result<Answers, Status> {
    let mut client = tonic::client::Grpc::new(peer.clone());
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
    let path: PathAndQuery = path.parse().expect("a path");
    let codec = ProstCodec::<DynamicMessage, ()>::default();
    Ok(client.streaming(Request::new(messages), path, codec).await?.into_inner())
}

/// Compares an answer with the expectation. The error describes the difference.
fn is_as_expected(expected: &Expected, answer: Result<(), Status>) -> Result<(), String> {
    let (reason, field, status) = match (expected, answer) {
        (Expected::Refused(reason, _), Ok(())) => {
            return Err(format!("expected {reason}, and the request was accepted"));
        }
        (Expected::Refused(reason, field), Err(status)) => (reason, field, status),
        (Expected::Nothing | Expected::Taken, answer) => {
            return answer.map_err(|status| format!("the request was rejected: {status:?}"));
        }
    };
    let info = status.get_details_error_info().ok_or_else(|| format!("no reason: {status:?}"))?;
    if (status.code(), info.reason.as_str()) != (reason.code(), reason.as_str()) {
        return Err(format!("expected {reason}: {status:?}"));
    }
    let named = status.get_details_bad_request();
    let named = named.and_then(|request| Some(request.field_violations.first()?.field.clone()));
    let named = named.unwrap_or_default();
    if named != *field {
        return Err(format!("expected field {field:?}, found {named:?}: {status:?}"));
    }
    Ok(())
}

/// Sets or clears a field. In a repeated message field, changes the first element. A single value
/// replaces all elements of a repeated field.
pub fn set(message: &mut DynamicMessage, path: &[&str], value: Option<&Value>) {
    let (name, rest) = path.split_first().expect("a path");
    let field = message.descriptor().get_field_by_name(name).unwrap_or_else(|| panic!("no field {name}"));
    if !rest.is_empty() {
        return set(inner(message, name), rest, value);
    }
    match value {
        None => message.clear_field(&field),
        Some(value) if field.is_list() && value.as_list().is_none() => {
            message.set_field(&field, Value::List(vec![value.clone()]));
        }
        Some(value) => message.set_field(&field, value.clone()),
    }
}

/// The message in a field, or the first message of a repeated field.
fn inner<'m>(message: &'m mut DynamicMessage, name: &str) -> &'m mut DynamicMessage {
    match message.get_field_by_name_mut(name) {
        Some(Value::Message(inner)) => inner,
        Some(Value::List(items)) => match items.first_mut() {
            Some(Value::Message(inner)) => inner,
            other => panic!("{name} is {other:?}"),
        },
        other => panic!("{name} is {other:?}"),
    }
}
