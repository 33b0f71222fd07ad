//! What may be wrong with a request, by the kinds of fields that requests have.

use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{GatewayInstance, WorkloadId};
use prost_reflect::{DynamicMessage, Value};
use rpc::Reason::{self, *};
use rpc::token::TokenSigner;

use super::{Bad, Expected, set};
use crate::{Gateway, Suite};

/// `value` in `field` of the message that has it.
fn bad(field: &str, what: &str, value: Option<Value>, expected: Expected) -> Bad {
    let path = field.to_owned();
    let change = move |messages: &mut Vec<DynamicMessage>| {
        let path: Vec<_> = path.split('.').collect();
        let has_it = messages.iter().position(|message| message.has_field_by_name(path[0]));
        set(&mut messages[has_it.unwrap_or(0)], &path, value.as_ref());
    };
    Bad { field: field.to_owned(), what: what.to_owned(), change: Box::new(change), expected }
}

pub(super) fn change(field: &str, what: &str, value: Value, expected: Expected) -> Vec<Bad> {
    vec![bad(field, what, Some(value), expected)]
}

/// A text that is refused for `reason`, which names no field.
pub(super) fn but(field: &str, what: &str, value: impl ToString, reason: Reason) -> Vec<Bad> {
    change(field, what, text(value), Expected::Refused(reason, String::new()))
}

/// A value that is refused because of `named`.
pub(super) fn invalid(field: &str, what: &str, value: Value, named: &str) -> Vec<Bad> {
    change(field, what, value, Expected::Refused(InvalidField, named.to_owned()))
}

/// A value of which nothing comes.
pub(super) fn nothing(field: &str, what: &str, value: Value) -> Vec<Bad> {
    change(field, what, value, Expected::Nothing)
}

pub(super) fn cleared(field: &str, named: &str) -> Bad {
    bad(field, "missing", None, Expected::Refused(InvalidField, named.to_owned()))
}

/// The messages of a call whose caller streams are not those that they should be.
pub(super) fn messages(
    what: &str,
    expected: Expected,
    change: impl Fn(&mut Vec<DynamicMessage>) + Send + Sync + 'static,
) -> Vec<Bad> {
    vec![Bad { field: "messages".to_owned(), what: what.to_owned(), change: Box::new(change), expected }]
}

pub(super) fn refused_message() -> Expected {
    Expected::Refused(InvalidField, "message".to_owned())
}

/// What is no UUID: some text, and very much of it, which no answer may repeat.
pub(super) fn malformed(field: &str) -> Vec<Bad> {
    let mut bad = invalid(field, "malformed", text("x"), field);
    bad.extend(invalid(field, "overlong", text("0".repeat(100_000)), field));
    bad
}

pub(super) fn optional_id(field: &str) -> Vec<Bad> {
    malformed(field)
}

pub(super) fn id(field: &str) -> Vec<Bad> {
    let mut bad = malformed(field);
    bad.extend(invalid(field, "missing", text(""), field));
    bad
}

pub(super) fn ids(field: &str) -> Vec<Bad> {
    let mut bad = id(field);
    let many = (0..1001).map(|_| text(WorkloadId::new())).collect();
    bad.extend(invalid(field, "1001 of them", Value::List(many), field));
    bad
}

/// Too many of what a good request has one of.
pub(super) fn many(field: &'static str, count: usize) -> Vec<Bad> {
    let expected = Expected::Refused(InvalidField, field.to_owned());
    vec![repeated(field, format!("{count} times"), count, expected)]
}

/// The same twice.
pub(super) fn twice(field: &'static str, named: &str) -> Vec<Bad> {
    vec![repeated(field, "twice".to_owned(), 2, Expected::Refused(InvalidField, named.to_owned()))]
}

fn repeated(field: &'static str, what: String, count: usize, expected: Expected) -> Bad {
    let change = move |messages: &mut Vec<DynamicMessage>| {
        let items = messages[0].get_field_by_name(field).expect("a field").into_owned();
        let first = items.as_list().expect("a list")[0].clone();
        messages[0].set_field_by_name(field, Value::List(vec![first; count]));
    };
    Bad { field: field.to_owned(), what, change: Box::new(change), expected }
}

pub(super) fn team(field: &str) -> Vec<Bad> {
    let texts = ["", "No Team", "a\0", &"a".repeat(65), &"a".repeat(100_000)];
    texts.into_iter().flat_map(|team| invalid(field, "malformed", text(team), field)).collect()
}

pub(super) fn digests(field: &str) -> Vec<Bad> {
    let bytes = |length: usize| Value::Bytes(vec![1; length].into());
    [0, 31, 33, 100_000]
        .into_iter()
        .flat_map(|length| invalid(field, "malformed", bytes(length), field))
        .collect()
}

pub(super) fn label(field: &str) -> Vec<Bad> {
    let mut bad = invalid(field, "overlong", text("x".repeat(1025)), field);
    bad.extend(invalid(field, "with NUL", text("a\0b"), field));
    bad
}

/// A reason for people.
pub(super) fn why(field: &str) -> Vec<Bad> {
    let mut bad = invalid(field, "missing", text(""), field);
    bad.extend(invalid(field, "overlong", text("x".repeat(1001)), field));
    bad.extend(invalid(field, "with NUL", text("a\0b"), field));
    bad
}

/// The credential of a gateway where an operator needs none.
pub(super) fn optional_credential(field: &str, suite: &Suite, gateway: &Gateway) -> Vec<Bad> {
    let mut bad = credential(field, suite, gateway);
    bad.retain(|bad| bad.what != "missing");
    bad
}

/// A value that is none of the enum's.
pub(super) fn filter(field: &str) -> Vec<Bad> {
    [-1, 99]
        .into_iter()
        .flat_map(|value| invalid(field, "unknown", Value::EnumNumber(value), field))
        .collect()
}

/// The same, or none at all.
pub(super) fn choice(field: &str) -> Vec<Bad> {
    let mut bad = filter(field);
    bad.extend(invalid(field, "missing", Value::EnumNumber(0), field));
    bad
}

/// Less than no time, and more than `most` seconds.
pub(super) fn seconds(field: &'static str, most: i64) -> Vec<Bad> {
    let with = |seconds: i64| {
        let change = move |messages: &mut Vec<DynamicMessage>| {
            set(&mut messages[0], &[field, "seconds"], Some(&Value::I64(seconds)));
        };
        let expected = Expected::Refused(InvalidField, field.to_owned());
        Bad { field: field.to_owned(), what: format!("{seconds} s"), change: Box::new(change), expected }
    };
    [-1, i64::MIN, most + 1, i64::MAX].map(with).into()
}

/// Credentials that nobody signed, and those of who spoke before `gateway`, whose incarnation and session are the second.
pub(super) fn credential(field: &str, suite: &Suite, gateway: &Gateway) -> Vec<Bad> {
    let claims = SessionClaims {
        worker: gateway.worker,
        incarnation: Incarnation(2),
        session: Session(2),
        instance: GatewayInstance::new(),
    };
    let forged = TokenSigner::from_seed(&[8; 32]).sign(&claims);
    let of = |incarnation, session| suite.silent_gateway(gateway.worker, incarnation, session).credential;
    [
        but(field, "missing", "", InvalidToken),
        but(field, "malformed", "x", InvalidToken),
        but(field, "overlong", "x".repeat(100_000), InvalidToken),
        but(field, "forged", forged, InvalidToken),
        but(field, "of a session before", of(2, 1), StaleSession),
        but(field, "of an incarnation before", of(1, 3), StaleIncarnation),
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(super) fn text(value: impl ToString) -> Value {
    Value::String(value.to_string())
}
