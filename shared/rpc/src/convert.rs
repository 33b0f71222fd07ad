//! Conversions and field checks that all handlers use.

use std::borrow::Cow;
use std::str::FromStr;
use std::time::Duration;

use domain::workload::{
    Exit, Failure, FailureReason, MAX_RESULT_BYTES, Outcome, PublishedCache, PublishedOutput, Usage,
};
use domain::{Digest, Timestamp};
use tonic::Status;

use crate::invalid_field;
use crate::pb::scheduler as pb;

/// Parses a required id.
pub fn parse_id<T: FromStr>(field: &str, text: &str) -> Result<T, Status>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error: T::Err| invalid_field(field, error.to_string()))
}

/// Parses an optional id. The empty string means absent.
pub fn parse_optional_id<T: FromStr>(field: &str, text: &str) -> Result<Option<T>, Status>
where
    T::Err: std::fmt::Display,
{
    if text.is_empty() { Ok(None) } else { parse_id(field, text).map(Some) }
}

/// Parses a digest.
pub fn parse_digest(field: &str, bytes: &[u8]) -> Result<Digest, Status> {
    Digest::try_from(bytes).map_err(|error| invalid_field(field, error.to_string()))
}

/// Parses a team: 1 to 64 characters of `a-z 0-9 - _`.
pub fn parse_team(field: &str, team: String) -> Result<String, Status> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
    if team.is_empty() || team.len() > 64 || !team.chars().all(allowed) {
        return Err(invalid_field(field, "must be 1 to 64 characters of a-z 0-9 - _"));
    }
    Ok(team)
}

/// Maximum size of a label, in bytes.
const MAX_LABEL_BYTES: usize = 1024;

/// Parses a label for people, which may be empty: at most 1024 bytes, without NUL, which databases
/// cannot store.
pub fn parse_label(field: &str, label: String) -> Result<String, Status> {
    check_label(field, &label).map(|()| label)
}

/// Checks a label: at most 1024 bytes, without NUL.
pub fn check_label(field: &str, label: &str) -> Result<(), Status> {
    if label.len() > MAX_LABEL_BYTES || label.contains('\0') {
        return Err(invalid_field(field, format!("must be at most {MAX_LABEL_BYTES} bytes, without NUL")));
    }
    Ok(())
}

/// Parses a label of a worker: at most 1024 bytes, without control characters.
pub fn parse_printable(field: &str, label: String) -> Result<String, Status> {
    check_printable(field, &label).map(|()| label)
}

fn check_printable(field: &str, label: &str) -> Result<(), Status> {
    if label.contains(char::is_control) {
        return Err(invalid_field(field, "must have no control characters"));
    }
    check_label(field, label)
}

/// Maximum total size of the tags or capabilities of a request, in bytes. Lists return many
/// requests in one message.
const MAX_TAGS_BYTES: usize = 16 << 10;

/// Checks required tags: each is not empty and has no control characters.
pub fn check_tags(field: &str, tags: &[String]) -> Result<(), Status> {
    if tags.iter().any(String::is_empty) {
        return Err(invalid_field(field, "a tag must not be empty"));
    }
    check_labels(field, tags)
}

/// Checks required labels: none has control characters, and their total size is limited.
pub fn check_labels(field: &str, labels: &[String]) -> Result<(), Status> {
    labels.iter().try_for_each(|label| check_printable(field, label))?;
    if labels.iter().map(String::len).sum::<usize>() > MAX_TAGS_BYTES {
        return Err(invalid_field(field, format!("must be at most {MAX_TAGS_BYTES} bytes together")));
    }
    Ok(())
}

/// Maximum size of a name, in bytes.
const MAX_NAME_BYTES: usize = 255;

/// Parses a required name: 1 to 255 bytes, without control characters.
pub fn parse_name(field: &str, name: String) -> Result<String, Status> {
    check_name(field, &name).map(|()| name)
}

/// Checks a name: 1 to 255 bytes, without control characters.
pub fn check_name(field: &str, name: &str) -> Result<(), Status> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains(char::is_control) {
        let message = format!("must be 1 to {MAX_NAME_BYTES} bytes, without control characters");
        return Err(invalid_field(field, message));
    }
    Ok(())
}

/// Parses an optional duration.
pub fn parse_duration(
    field: &str,
    duration: Option<prost_types::Duration>,
) -> Result<Option<Duration>, Status> {
    duration
        .map(|duration| {
            let seconds = u64::try_from(duration.seconds);
            let nanos = u32::try_from(duration.nanos).ok().filter(|nanos| *nanos < 1_000_000_000);
            match (seconds, nanos) {
                (Ok(seconds), Some(nanos)) => Ok(Duration::new(seconds, nanos)),
                _ => Err(invalid_field(field, "must not be negative, and its nanos less than a second")),
            }
        })
        .transpose()
}

/// Parses an enum value. Unknown values and `…_UNSPECIFIED` are rejected.
pub fn parse_enum<E: TryFrom<i32>>(field: &str, value: i32) -> Result<E, Status> {
    if value == 0 {
        return Err(invalid_field(field, "is required"));
    }
    E::try_from(value).map_err(|_| invalid_field(field, format!("{value} is not a value of this enum")))
}

/// Returns the value of a required field.
pub fn required<T>(field: &str, value: Option<T>) -> Result<T, Status> {
    value.ok_or_else(|| invalid_field(field, "is required"))
}

/// Converts a time to its protobuf form.
#[must_use]
pub fn timestamp(at: Timestamp) -> prost_types::Timestamp {
    let nanos = i32::try_from(at.0.rem_euclid(1_000_000) * 1_000).unwrap_or(0);
    prost_types::Timestamp { seconds: at.0.div_euclid(1_000_000), nanos }
}

/// Converts a protobuf time to whole microseconds.
#[must_use]
pub fn from_timestamp(at: &prost_types::Timestamp) -> Timestamp {
    Timestamp(at.seconds.saturating_mul(1_000_000).saturating_add(i64::from(at.nanos) / 1_000))
}

/// First second that protobuf timestamps cannot represent. They end with the year 9999.
const BEYOND_TIMESTAMPS: i64 = 253_402_300_800;

/// Parses a time from 1970 to 9999, in whole microseconds.
pub fn parse_timestamp(field: &str, at: &prost_types::Timestamp) -> Result<Timestamp, Status> {
    if !(0..BEYOND_TIMESTAMPS).contains(&at.seconds) || !(0..1_000_000_000).contains(&at.nanos) {
        return Err(invalid_field(field, "must be from 1970 to 9999, and its nanos less than a second"));
    }
    Ok(from_timestamp(at))
}

/// Converts a duration to its protobuf form.
#[must_use]
pub fn duration(duration: Duration) -> prost_types::Duration {
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(duration.subsec_nanos()).unwrap_or(0),
    }
}

/// Converts the exit of a process to its protobuf form.
#[must_use]
pub fn exit(exit: Exit) -> pb::Exit {
    let how = match exit {
        Exit::Code(code) => pb::exit::Status::Code(code.into()),
        Exit::Signal(signal) => pb::exit::Status::Signal(signal.into()),
        Exit::OutOfMemory => pb::exit::Status::OutOfMemory(pb::OutOfMemory {}),
    };
    pb::Exit { status: Some(how) }
}

/// Parses the exit of a process.
pub fn parse_exit(field: &str, exit: &pb::Exit) -> Result<Exit, Status> {
    let byte = |name: &str, n: u32| {
        u8::try_from(n).map_err(|_| invalid_field(format!("{field}.{name}"), "must be 0 to 255"))
    };
    match exit.status {
        Some(pb::exit::Status::Code(code)) => byte("code", code).map(Exit::Code),
        Some(pb::exit::Status::Signal(signal)) => byte("signal", signal).map(Exit::Signal),
        Some(pb::exit::Status::OutOfMemory(_)) => Ok(Exit::OutOfMemory),
        None => Err(invalid_field(field, "is required")),
    }
}

/// Converts a failure to its protobuf form.
#[must_use]
pub fn failure(failure: &Failure) -> pb::Failure {
    pb::Failure { reason: failure.reason.as_str().to_owned(), message: failure.message.clone() }
}

/// Maximum size of the message of a failure, in bytes.
const MAX_FAILURE_BYTES: usize = 4096;

/// Converts a failure from its protobuf form. An unknown reason becomes `WORKER_FAILED` and is put
/// into the message.
///
/// The conversion never fails, because a gateway repeats the report of an attempt until it is
/// accepted. A long message is cut off, and NUL, which databases cannot store, is replaced.
#[must_use]
pub fn parse_failure(failure: pb::Failure) -> Failure {
    let pb::Failure { reason, message } = failure;
    let (reason, message) = match reason.parse() {
        Ok(reason) => (reason, message),
        Err(_) => (FailureReason::WorkerFailed, format!("{reason}: {message}")),
    };
    let message = clipped(&message, MAX_FAILURE_BYTES).replace('\0', "\u{fffd}");
    Failure { reason, message }
}

/// Maximum number of stored notes of an attempt.
const MAX_NOTES: usize = 32;
/// Maximum size of a note, in bytes.
const MAX_NOTE_BYTES: usize = 1024;

/// Converts the notes of an attempt from their protobuf form. The conversion never fails; long
/// notes are cut off.
#[must_use]
pub fn parse_notes(notes: Vec<String>) -> Vec<String> {
    let parse = |note: String| clipped(&note, MAX_NOTE_BYTES).replace('\0', "\u{fffd}");
    notes.into_iter().take(MAX_NOTES).map(parse).collect()
}

/// Checks the size of the result of a workload.
pub fn parse_result(field: &str, result: Option<bytes::Bytes>) -> Result<Option<bytes::Bytes>, Status> {
    match result {
        Some(result) if result.len() > MAX_RESULT_BYTES => {
            Err(invalid_field(field, format!("is larger than {MAX_RESULT_BYTES} bytes")))
        }
        result => Ok(result),
    }
}

/// Cuts `text` off after `most` bytes and appends an ellipsis. Returns a shorter text unchanged.
#[must_use]
pub fn clipped(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    Cow::Owned(format!("{}…", &text[..text.floor_char_boundary(most)]))
}

/// Converts the outcome of a workload to its protobuf form.
#[must_use]
pub fn outcome(outcome: Outcome) -> pb::Outcome {
    match outcome {
        Outcome::Succeeded => pb::Outcome::Succeeded,
        Outcome::Failed => pb::Outcome::Failed,
        Outcome::Errored => pb::Outcome::Errored,
        Outcome::Aborted => pb::Outcome::Aborted,
    }
}

/// Converts a published output to its protobuf form.
#[must_use]
pub fn published_output(output: &PublishedOutput) -> pb::PublishedOutput {
    pb::PublishedOutput {
        name: output.name.clone(),
        artifact_id: output.artifact.to_string(),
        size_bytes: output.size_bytes,
        digest: output.digest.as_bytes().to_vec().into(),
        entries: output.entries,
    }
}

/// Converts the resource usage of an attempt to its protobuf form.
#[must_use]
pub fn usage(usage: &Usage) -> pb::Usage {
    pb::Usage {
        queued: usage.queued.map(duration),
        preparing: usage.preparing.map(duration),
        running: usage.running.map(duration),
        cpu_time: usage.cpu_time.map(duration),
        peak_memory_bytes: usage.peak_memory_bytes,
        bytes_in: usage.bytes_in,
        bytes_out: usage.bytes_out,
    }
}

/// Parses the resource usage of an attempt.
pub fn parse_usage(field: &str, usage: pb::Usage) -> Result<Usage, Status> {
    let parse = |name: &str, duration| parse_duration(&format!("{field}.{name}"), duration);
    Ok(Usage {
        queued: parse("queued", usage.queued)?,
        preparing: parse("preparing", usage.preparing)?,
        running: parse("running", usage.running)?,
        cpu_time: parse("cpu_time", usage.cpu_time)?,
        peak_memory_bytes: usage.peak_memory_bytes,
        bytes_in: usage.bytes_in,
        bytes_out: usage.bytes_out,
    })
}

/// Converts a published version of a task cache to its protobuf form.
#[must_use]
pub fn published_cache(cache: &PublishedCache) -> pb::PublishedCache {
    pb::PublishedCache {
        task_cache_id: cache.cache.to_string(),
        artifact_id: cache.artifact.to_string(),
        digest: cache.digest.as_bytes().to_vec().into(),
    }
}

/// Parses a published version of a task cache.
pub fn parse_published_cache(field: &str, cache: pb::PublishedCache) -> Result<PublishedCache, Status> {
    Ok(PublishedCache {
        cache: parse_id(&format!("{field}.task_cache_id"), &cache.task_cache_id)?,
        artifact: parse_id(&format!("{field}.artifact_id"), &cache.artifact_id)?,
        digest: parse_digest(&format!("{field}.digest"), &cache.digest)?,
    })
}

/// Parses a published output.
pub fn parse_published_output(field: &str, output: pb::PublishedOutput) -> Result<PublishedOutput, Status> {
    Ok(PublishedOutput {
        artifact: parse_id(&format!("{field}.artifact_id"), &output.artifact_id)?,
        digest: parse_digest(&format!("{field}.digest"), &output.digest)?,
        name: output.name,
        size_bytes: output.size_bytes,
        entries: output.entries,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_cut_off_without_nul() {
        let notes = parse_notes(vec!["a\0".repeat(5000); 100]);
        assert_eq!(notes.len(), MAX_NOTES);
        assert!(notes.iter().all(|note| !note.contains('\0') && note.chars().count() == MAX_NOTE_BYTES + 1));
    }

    #[test]
    fn negative_duration_is_rejected() {
        let parse = |seconds, nanos| parse_duration("term", Some(prost_types::Duration { seconds, nanos }));
        assert_eq!(parse_duration("term", None).ok(), Some(None));
        assert_eq!(parse(1, 500_000_000).ok(), Some(Some(Duration::from_millis(1500))));
        assert_eq!(
            parse(i64::MAX, 999_999_999).ok(),
            Some(Some(Duration::new(i64::MAX.unsigned_abs(), 999_999_999)))
        );
        for (seconds, nanos) in [(-1, 0), (0, -1), (1, -1), (i64::MIN, 0), (0, i32::MIN), (0, 1_000_000_000)]
        {
            parse(seconds, nanos).expect_err("an invalid duration");
        }
    }

    #[test]
    fn failure_message_is_cut_off_without_nul() {
        let of = |reason: &str, message: &str| {
            let failure = pb::Failure { reason: reason.to_owned(), message: message.to_owned() };
            let Failure { reason, message } = parse_failure(failure);
            (reason, message)
        };
        assert_eq!(of("DISK_FULL", "no space"), (FailureReason::DiskFull, "no space".to_owned()));
        assert_eq!(of("NEW", "a\0b"), (FailureReason::WorkerFailed, "NEW: a\u{fffd}b".to_owned()));
        let (_, long) = of("DISK_FULL", &"ü".repeat(5000));
        assert_eq!(long, format!("{}…", "ü".repeat(2048)));
    }

    #[test]
    fn time_outside_1970_to_9999_is_rejected() {
        let parse = |seconds, nanos| parse_timestamp("at", &prost_types::Timestamp { seconds, nanos }).ok();
        assert_eq!(parse(1, 2_000), Some(Timestamp(1_000_002)));
        assert_eq!(parse(BEYOND_TIMESTAMPS - 1, 0), Some(Timestamp((BEYOND_TIMESTAMPS - 1) * 1_000_000)));
        for (seconds, nanos) in
            [(-1, 0), (i64::MIN, 0), (BEYOND_TIMESTAMPS, 0), (i64::MAX, 0), (0, -1), (0, 1_000_000_000)]
        {
            assert_eq!(parse(seconds, nanos), None);
        }
    }

    #[test]
    fn long_label_is_rejected() {
        assert_eq!(parse_label("label", String::new()).ok(), Some(String::new()));
        assert!(parse_label("label", "x".repeat(1024)).is_ok());
        for label in ["x".repeat(1025), "ü".repeat(513), "a\0b".to_owned()] {
            parse_label("label", label).expect_err("an invalid text");
        }
    }

    #[test]
    fn control_characters_are_rejected() {
        assert!(check_name("name", "wörker 1").is_ok());
        assert!(parse_printable("label", String::new()).is_ok());
        for text in ["a\0b", "a\nb", "\u{1b}[2J", "a\u{7f}", "a\u{9b}b"] {
            check_name("name", text).expect_err("an invalid text");
            parse_printable("label", text.to_owned()).expect_err("an invalid text");
            check_tags("tags", &[text.to_owned()]).expect_err("an invalid text");
        }
    }

    #[test]
    fn total_size_of_tags_is_limited() {
        let tags = |count: usize| vec!["x".repeat(1024); count];
        assert!(check_tags("tags", &tags(16)).is_ok());
        check_tags("tags", &tags(17)).expect_err("an invalid text");
        check_tags("tags", &[String::new()]).expect_err("an invalid text");
    }
}
