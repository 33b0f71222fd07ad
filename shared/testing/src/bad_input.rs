//! Bad input: every call of a package, with everything that may be wrong with what it is told.
//!
//! A table has a request that is fine for each call, and beside it what is wrong with another: a field, a value for it, and the answer that
//! the protos list. Nothing of that may change a row of any table. A call, or a field of a request, that the table does not name fails the
//! test: what callers may say about it, and what comes of it, has to be decided first.

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

/// How long a call may take to be answered.
const PATIENCE: Duration = Duration::from_secs(30);

/// A call, a request that is fine, and what may be wrong with others.
pub struct Call {
    name: &'static str,
    /// Encoded; more than one message where the caller streams.
    good: Vec<Vec<u8>>,
    bad: Vec<Bad>,
    is_silent: bool,
}

impl Call {
    /// `name`: such as `Pins.Settle`. `good`: one message, or all that the caller streams.
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

    /// Its stream may have nothing to say for long: that it begins is all that is waited for, unless it shall be refused.
    #[must_use]
    pub fn silent(self) -> Self {
        Self { is_silent: true, ..self }
    }
}

/// What is wrong with a request.
pub struct Bad {
    /// Its field, such as `outputs.digest`.
    field: String,
    what: String,
    change: Change,
    expected: Expected,
    /// How many messages of a stream are taken and answered before it goes wrong. What they change is none of its business.
    answered: usize,
}

/// Makes the messages of a good request those of a bad one, in the field that is named.
type Change = Box<dyn Fn(&mut Vec<DynamicMessage>, &str) + Send + Sync>;

/// What comes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// This error, and the field that it names, for those that name one.
    Refused(Reason, String),
    /// The same answer as if there were no such thing, and nothing else.
    Nothing,
    /// It is strange and all the same fine. What is changed then is for other tests.
    Taken,
}

/// Makes all calls of `package` as `table` says, and fails with all of which something else comes than that. `tables`: of the service behind
/// `peer`. `is_quiet`: with these rows it changes nothing by itself, and otherwise it will have done so soon.
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
    assert_eq!(known, tried, "the table has every call, and no more");

    let quiet = || quiet(tables, &is_quiet);
    let mut wrong = 0;
    // Said at once: it may be why nothing is answered later.
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
        assert!(untried.is_empty(), "{}: nobody tried what is wrong with {untried:?}", call.name);

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
        // So it was indeed what was wrong that was refused.
        let answer = within(call.name, send(peer, method, None, good, call.is_silent)).await;
        if let Err(status) = answer {
            complain(format!("{}: {status:?}", call.name));
        }
        before = quiet().await;
    }
    assert_eq!(wrong, 0, "so many times something else came of it, as is said above");
    let count: usize = table.iter().map(|call| call.bad.len()).sum();
    eprintln!("{package}: {} calls, {count} requests with something wrong", table.len());
}

/// Such as `Pins.Settle`.
fn name(method: &MethodDescriptor) -> String {
    format!("{}.{}", method.parent_service().name(), method.name())
}

fn decoded(descriptor: &MessageDescriptor, encoded: &[u8]) -> DynamicMessage {
    DynamicMessage::decode(descriptor.clone(), encoded).expect("the request of this call")
}

/// The fields of a message and of those in it that are of its package, by their paths.
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
        Err(_) => panic!("{what}: waited in vain for an answer"),
    }
}

/// The rows of a service once it changes nothing by itself any more.
async fn quiet(tables: &Tables, is_quiet: &impl Fn(&BTreeSet<String>) -> bool) -> BTreeSet<String> {
    within("nothing is changed any more", async {
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

/// What is answered is none of this test's business.
type Answers = Streaming<()>;

/// A call both sides of which stream, and whose caller has not said all yet.
struct Open {
    said: mpsc::Sender<DynamicMessage>,
    answers: Answers,
}

impl Open {
    /// Says `messages`, of which each is answered.
    async fn begin(
        peer: &Peer,
        method: &MethodDescriptor,
        messages: Vec<DynamicMessage>,
    ) -> Result<Self, Status> {
        let (said, heard) = mpsc::channel(16);
        let answers = call(peer, method, ReceiverStream::new(heard)).await?;
        let mut open = Self { said, answers };
        for message in messages {
            open.say(message).await;
            let answer = open.answers.message().await?;
            assert!(answer.is_some(), "the stream has ended");
        }
        Ok(open)
    }

    /// Who was refused already does not listen any more.
    async fn say(&self, message: DynamicMessage) {
        self.said.send(message).await.ok();
    }

    /// Says the rest, and answers how it ended.
    async fn end(mut self, messages: Vec<DynamicMessage>) -> Result<(), Status> {
        for message in messages {
            self.say(message).await;
        }
        drop(self.said);
        while self.answers.message().await?.is_some() {}
        Ok(())
    }
}

/// Makes the call, or goes on with one that is open. Answers how it went: up to its first answer, or to its end where both sides stream.
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

/// Or what is answered instead.
fn is_as_expected(expected: &Expected, answer: Result<(), Status>) -> Result<(), String> {
    let (reason, field, status) = match (expected, answer) {
        (Expected::Refused(reason, _), Ok(())) => return Err(format!("expected {reason}, and it was taken")),
        (Expected::Refused(reason, field), Err(status)) => (reason, field, status),
        (Expected::Nothing | Expected::Taken, answer) => {
            return answer.map_err(|status| format!("it was refused: {status:?}"));
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
        return Err(format!("names {named:?} and not {field:?}: {status:?}"));
    }
    Ok(())
}

/// Sets a field, or clears it. Of what is repeated, the first one's; a single value is all that is left of a repeated field.
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

/// The message in a field, or the first of those in it.
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
