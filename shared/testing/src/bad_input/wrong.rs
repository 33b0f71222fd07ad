//! Invalid variants of requests, by kind of field.

use domain::WorkloadId;
use prost_reflect::{DynamicMessage, Value};
use rpc::Reason::{self, *};

use super::{Bad, Expected, inner, set};

fn change_by(
    field: &str,
    what: &str,
    expected: Expected,
    change: impl Fn(&mut Vec<DynamicMessage>, &str) + Send + Sync + 'static,
) -> Bad {
    Bad { field: field.to_owned(), what: what.to_owned(), change: Box::new(change), expected, answered: 0 }
}

/// The first message of a request that has `field`, or the first message.
fn message_with<'m>(messages: &'m mut [DynamicMessage], field: &str) -> &'m mut DynamicMessage {
    let has_it = messages.iter().position(|message| message.has_field_by_name(field));
    &mut messages[has_it.unwrap_or(0)]
}

/// Sets `value` at `path`, in the message that has this field.
pub fn put(messages: &mut [DynamicMessage], path: &str, value: Option<&Value>) {
    let path: Vec<_> = path.split('.').collect();
    set(message_with(messages, path[0]), &path, value);
}

/// Sets `field` to `value`.
fn bad(field: &str, what: &str, value: Option<Value>, expected: Expected) -> Bad {
    change_by(field, what, expected, move |messages, path| put(messages, path, value.as_ref()))
}

/// Sets `field` to `value`, and expects `expected`.
#[must_use]
pub fn change(field: &str, what: &str, value: Value, expected: Expected) -> Vec<Bad> {
    vec![bad(field, what, Some(value), expected)]
}

/// A text that is rejected with `reason`. The error names no field.
#[must_use]
pub fn but(field: &str, what: &str, value: impl ToString, reason: Reason) -> Vec<Bad> {
    change(field, what, text(value), Expected::Refused(reason, String::new()))
}

/// A value that is rejected with an error that names `named`.
#[must_use]
pub fn invalid(field: &str, what: &str, value: Value, named: &str) -> Vec<Bad> {
    change(field, what, value, refused(named))
}

/// A value with the same answer as if the resource did not exist.
#[must_use]
pub fn nothing(field: &str, what: &str, value: Value) -> Vec<Bad> {
    change(field, what, value, Expected::Nothing)
}

/// A value that is unusual but valid.
#[must_use]
pub fn taken(field: &str, what: &str, value: Value) -> Vec<Bad> {
    change(field, what, value, Expected::Taken)
}

/// Clears a required field.
#[must_use]
pub fn cleared(field: &str, named: &str) -> Bad {
    bad(field, "missing", None, refused(named))
}

/// An invalid variant that is not a value of `field` alone.
#[must_use]
pub fn otherwise(
    field: &str,
    what: &str,
    expected: Expected,
    change: impl Fn(&mut Vec<DynamicMessage>) + Send + Sync + 'static,
) -> Vec<Bad> {
    vec![change_by(field, what, expected, move |messages, _| change(messages))]
}

/// An invalid variant of the messages of a streaming request.
#[must_use]
pub fn messages(
    what: &str,
    expected: Expected,
    change: impl Fn(&mut Vec<DynamicMessage>) + Send + Sync + 'static,
) -> Vec<Bad> {
    otherwise("messages", what, expected, change)
}

/// An error that names the missing or malformed field `named`.
#[must_use]
pub fn refused(named: &str) -> Expected {
    Expected::Refused(InvalidField, named.to_owned())
}

/// The variants `bad` of requests that were changed by another function before.
#[must_use]
pub fn given(
    before: impl Fn(&mut Vec<DynamicMessage>) + Clone + Send + Sync + 'static,
    bad: impl IntoIterator<Item = Vec<Bad>>,
) -> Vec<Bad> {
    let changed = bad.into_iter().flatten().map(|bad| {
        let (before, change) = (before.clone(), bad.change);
        let change = move |messages: &mut Vec<DynamicMessage>, path: &str| {
            before(messages);
            change(messages, path);
        };
        Bad { change: Box::new(change), ..bad }
    });
    changed.collect()
}

/// The variants of a nested message: `field` is its path in requests, and `named` its name in
/// errors.
#[must_use]
pub fn within(field: &str, named: &str, bad: impl IntoIterator<Item = Vec<Bad>>) -> Vec<Bad> {
    let of_it = bad.into_iter().flatten().map(|bad| {
        let expected = match bad.expected {
            Expected::Refused(reason, name) if !name.is_empty() => {
                Expected::Refused(reason, format!("{named}.{name}"))
            }
            expected => expected,
        };
        Bad { field: format!("{field}.{}", bad.field), expected, ..bad }
    });
    of_it.collect()
}

/// The variants are sent after the first message of a stream was answered.
#[must_use]
pub fn later(bad: impl IntoIterator<Item = Vec<Bad>>) -> Vec<Bad> {
    bad.into_iter().flatten().map(|bad| Bad { answered: 1, ..bad }).collect()
}

/// Variants in a list whose other elements get separate answers. A rejection becomes
/// [`Expected::Nothing`].
#[must_use]
pub fn of_several(bad: Vec<Bad>) -> Vec<Bad> {
    let answered = bad.into_iter().map(|bad| match bad.expected {
        Expected::Refused(reason, _) if reason != InvalidField => Bad { expected: Expected::Nothing, ..bad },
        _ => bad,
    });
    answered.collect()
}

/// Values that are not a UUID: a short text, and a very long one, which no answer may repeat.
#[must_use]
pub fn malformed(field: &str) -> Vec<Bad> {
    let mut bad = invalid(field, "malformed", text("x"), field);
    bad.extend(invalid(field, "overlong", text("0".repeat(100_000)), field));
    bad
}

/// Invalid values of an optional id.
#[must_use]
pub fn optional_id(field: &str) -> Vec<Bad> {
    malformed(field)
}

/// Invalid values of a required id.
#[must_use]
pub fn id(field: &str) -> Vec<Bad> {
    let mut bad = malformed(field);
    bad.extend(invalid(field, "missing", text(""), field));
    bad
}

/// Invalid lists of at most 1000 ids.
#[must_use]
pub fn ids(field: &str) -> Vec<Bad> {
    ids_at_most(field, 1000)
}

/// Invalid lists of at most `most` ids.
#[must_use]
pub fn ids_at_most(field: &str, most: usize) -> Vec<Bad> {
    let mut bad = id(field);
    let many = (0..=most).map(|_| text(WorkloadId::new())).collect();
    bad.extend(invalid(field, &format!("{} of them", most + 1), Value::List(many), field));
    bad
}

/// Repeats the single element of a valid request `count` times.
#[must_use]
pub fn many(field: &str, count: usize) -> Vec<Bad> {
    vec![repeated(field, &format!("{count} times"), count, refused(field))]
}

/// Repeats an element.
#[must_use]
pub fn twice(field: &str, named: &str) -> Vec<Bad> {
    vec![repeated(field, "twice", 2, refused(named))]
}

fn repeated(field: &str, what: &str, count: usize, expected: Expected) -> Bad {
    change_by(field, what, expected, move |messages, path| {
        let path: Vec<_> = path.split('.').collect();
        let (field, around) = path.split_last().expect("a path");
        let mut message = message_with(messages, path[0]);
        for name in around {
            message = inner(message, name);
        }
        let items = message.get_field_by_name(field).expect("a field").into_owned();
        let first = items.as_list().expect("a list")[0].clone();
        message.set_field_by_name(field, Value::List(vec![first; count]));
    })
}

/// Invalid values of a team.
#[must_use]
pub fn team(field: &str) -> Vec<Bad> {
    let texts = ["", "No Team", "a\0", &"a".repeat(65), &"a".repeat(100_000)];
    texts.into_iter().flat_map(|team| invalid(field, "malformed", text(team), field)).collect()
}

/// Invalid values of a digest.
#[must_use]
pub fn digests(field: &str) -> Vec<Bad> {
    let bytes = |length: usize| Value::Bytes(vec![1; length].into());
    [0, 31, 33, 100_000]
        .into_iter()
        .flat_map(|length| invalid(field, "malformed", bytes(length), field))
        .collect()
}

/// Invalid values of an optional display name.
#[must_use]
pub fn label(field: &str) -> Vec<Bad> {
    longest(field, 1024)
}

/// Invalid values of an optional text of at most `most` bytes.
#[must_use]
pub fn longest(field: &str, most: usize) -> Vec<Bad> {
    let mut bad = invalid(field, "overlong", text("x".repeat(most + 1)), field);
    bad.extend(invalid(field, "with NUL", text("a\0b"), field));
    bad
}

/// Invalid values of a required text of at most `most` bytes.
#[must_use]
pub fn named(field: &str, most: usize) -> Vec<Bad> {
    let mut bad = longest(field, most);
    bad.extend(invalid(field, "missing", text(""), field));
    bad
}

/// A value that the enum does not have.
#[must_use]
pub fn filter(field: &str) -> Vec<Bad> {
    [-1, 99]
        .into_iter()
        .flat_map(|value| invalid(field, "unknown", Value::EnumNumber(value), field))
        .collect()
}

/// A value that the enum does not have, and no value.
#[must_use]
pub fn choice(field: &str) -> Vec<Bad> {
    let mut bad = filter(field);
    bad.extend(invalid(field, "missing", Value::EnumNumber(0), field));
    bad
}

/// A negative duration, and one of more than `most` seconds.
#[must_use]
pub fn seconds(field: &str, most: i64) -> Vec<Bad> {
    let mut bad = negative(field);
    bad.extend([most + 1, i64::MAX].map(|seconds| time(field, seconds, 0, refused(field))));
    bad
}

/// A negative duration, and an invalid fraction of a second.
#[must_use]
pub fn negative(field: &str) -> Vec<Bad> {
    [(-1, 0), (i64::MIN, 0), (0, -1), (0, i32::MIN), (0, 1_000_000_000)]
        .map(|(seconds, nanos)| time(field, seconds, nanos, refused(field)))
        .into()
}

/// Sets a duration or a timestamp.
#[must_use]
pub fn time(field: &str, seconds: i64, nanos: i32, expected: Expected) -> Bad {
    change_by(field, &format!("{seconds} s and {nanos} ns"), expected, move |messages, path| {
        put(messages, &format!("{path}.seconds"), Some(&Value::I64(seconds)));
        put(messages, &format!("{path}.nanos"), Some(&Value::I32(nanos)));
    })
}

/// A text as a field value.
#[must_use]
pub fn text(value: impl ToString) -> Value {
    Value::String(value.to_string())
}
