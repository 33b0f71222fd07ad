//! What went wrong, in one sentence: what failed, why, and what to do about it.
//!
//! Everything travels as `anyhow::Error`; [`describe`] makes the sentence, and only `main` prints it.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use rpc::{Reason, Refusal};
use tonic::{Code, Status};

/// Ends the command with this exit code, after a signal or a closed standard output.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted(pub(crate) u8);

/// What to do about an error, where its reason alone does not say it. Nothing of it stands among the causes.
#[derive(Debug, Clone)]
struct Advice(String);

impl fmt::Display for Advice {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

/// The same error, and what to do about it.
pub(crate) fn advised(error: anyhow::Error, advice: impl Into<String>) -> anyhow::Error {
    error.context(Advice(advice.into()))
}

/// How the library says that what came from the other side is not HTTP/2.
const NO_HTTP2: [&str; 2] = ["frame with invalid size", "invalid preface"];

/// The reason for programs where a service gave none.
pub(crate) const LOCAL_REASON: &str = "CLIENT";

/// A call was refused or failed.
#[derive(Debug, Clone)]
pub(crate) struct Refused {
    refusal: Refusal,
    /// Why nobody answered, where nobody did.
    unreachable: Option<String>,
    /// The system does not let us call it.
    denied: bool,
    /// Somebody listens there, who does not understand us.
    foreign: bool,
}

impl Refused {
    pub(crate) fn is(&self, reason: Reason) -> bool {
        self.refusal.is(reason)
    }

    /// Whether what was said of it names this id.
    pub(crate) fn names(&self, id: &str) -> bool {
        self.refusal.message.contains(id)
    }

    /// Whether the same call may succeed later and may be repeated blindly.
    pub(crate) fn is_transient(&self) -> bool {
        self.refusal.is_transient() && !self.denied
    }

    /// What is behind it, for who knows already that it is about a service that should answer.
    pub(crate) fn why(&self) -> String {
        self.unreachable.clone().unwrap_or_else(|| self.refusal.message.clone())
    }

    /// A stream ended before the message that says that it is whole.
    pub(crate) fn cut() -> Self {
        Self::from(Status::unavailable("the connection was cut"))
    }
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        let (mut deepest, mut denied) = (None, false);
        let mut next = status.source();
        while let Some(error) = next {
            deepest = Some(without_number(&error.to_string()));
            let io = error.downcast_ref::<std::io::Error>();
            denied |= io.is_some_and(|error| error.kind() == std::io::ErrorKind::PermissionDenied);
            next = error.source();
        }
        let refusal = Refusal::from(status);
        let silent = refusal.reason.is_none() && refusal.is_transient();
        let denied = denied && silent;
        let unreachable = silent.then(|| deepest.unwrap_or_else(|| refusal.message.clone()));
        let foreign =
            unreachable.as_ref().is_some_and(|cause| NO_HTTP2.iter().any(|what| cause.contains(what)));
        Self { refusal, unreachable, denied, foreign }
    }
}

impl Refused {
    /// What each worker lacks, where that is what it is about.
    fn fmt_workers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.is(Reason::NoCompatibleWorker) && !self.is(Reason::AllWorkersBusy) {
            return Ok(());
        }
        let workers: BTreeMap<_, _> = self.refusal.about.iter().collect();
        let mut separator = ": ";
        for (worker, why) in workers {
            write!(f, "{separator}{worker}: {why}")?;
            separator = ", ";
        }
        Ok(())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.denied {
            return write!(f, "we may not use this cluster: Permission denied (PERMISSION_DENIED)");
        }
        match (&self.unreachable, &self.refusal.reason) {
            (Some(_), _) if self.foreign => {
                write!(f, "what listens there is no Gantry service, or wants TLS (UNAVAILABLE)")
            }
            (Some(cause), _) => write!(f, "the cluster does not answer: {cause} (UNAVAILABLE)"),
            (None, Some(reason)) => {
                write!(f, "{}", self.refusal.message)?;
                self.fmt_workers(f)?;
                write!(f, " ({reason})")
            }
            (None, None) if self.refusal.code == Code::Unimplemented => {
                write!(f, "the other side is no Gantry service that offers this (UNIMPLEMENTED)")
            }
            (None, None) => write!(f, "{} ({})", self.refusal.message, code_name(self.refusal.code)),
        }
    }
}

impl Error for Refused {}

/// For `map_err`: the call that did `doing` was refused.
pub(crate) fn refused(doing: impl Into<String>) -> impl FnOnce(Status) -> anyhow::Error {
    move |status| anyhow::Error::new(Refused::from(status)).context(doing.into())
}

/// The refusal among the causes of `error`.
pub(crate) fn refusal(error: &anyhow::Error) -> Option<&Refused> {
    error.chain().find_map(|cause| cause.downcast_ref())
}

/// Whether the same may succeed later.
pub(crate) fn is_transient(error: &anyhow::Error) -> bool {
    refusal(error).is_some_and(Refused::is_transient)
}

/// The reason, for programs.
pub(crate) fn reason(error: &anyhow::Error) -> String {
    match refusal(error) {
        Some(Refused { denied: true, .. }) => code_name(Code::PermissionDenied).to_owned(),
        Some(Refused { unreachable: Some(_), .. }) => Reason::Unavailable.to_string(),
        Some(Refused { refusal, .. }) => {
            refusal.reason.clone().unwrap_or_else(|| code_name(refusal.code).to_owned())
        }
        None => LOCAL_REASON.to_owned(),
    }
}

/// One sentence about `error`, and one about what to do where we know.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    describe_with(error, |_| None)
}

/// The same. `advise` says what to do about a reason, before what mostly helps.
pub(crate) fn describe_with(error: &anyhow::Error, advise: impl Fn(&str) -> Option<String>) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = without_number(&cause.to_string());
        if text.ends_with(&cause) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&cause);
    }
    let advice = error.downcast_ref().map(|Advice(text)| text.clone());
    if let Some(advice) = advice
        .or_else(|| needs_permission(&text).map(str::to_owned))
        .or_else(|| advise(&reason(error)))
        .or_else(|| self::advice(&reason(error)).map(str::to_owned))
    {
        text.push_str("; ");
        text.push_str(&advice);
    }
    text
}

/// What to do where no worker's operator allows what a workload asks for.
fn needs_permission(text: &str) -> Option<&'static str> {
    let lacks = |permission: &str| text.contains(&format!("its runtime lacks {permission}"));
    (lacks("privileged") || lacks("network-host")).then_some(
        "an operator allows it with --allow; for a cluster on this machine: `gantry down`, then \
         `gantry up --allow host-image,host-network,privileged` with what you need of these",
    )
}

/// What to do about a reason, where it is more than the message says.
pub(crate) fn advice(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "UNAUTHENTICATED" => "name the cluster's token file with --token-file",
        "UNAVAILABLE" => "try again, or look at `gantry status`",
        "INPUT_UNAVAILABLE" => "upload it again",
        "INPUT_DAMAGED" => "run it again: inputs are brought from elsewhere then",
        "NO_COMPATIBLE_WORKER" => "change what you ask for, or see `gantry list workers`",
        "ALL_WORKERS_BUSY" => "try again later, or see `gantry list workers`",
        "INVALID_IMAGE" => "an image has a directory rootfs, and may have a metadata.json with env and user",
        "OUTPUT_INVALID" => "leave less there, or pack it into one file",
        "DISK_FULL" => {
            "`gantry gc` lets go of what is only kept for a time, `gantry delete` of more; or free space on the worker"
        }
        "WORKLOAD_NOT_FOUND" => "see `gantry list workloads`",
        "UNKNOWN_ID" => "see `gantry list artifacts`, `gantry list volumes` and so on",
        "NOT_ORPHANED" => "see `gantry explain`",
        "NOT_ADOPTABLE" => "it can only be purged; see `gantry list volumes --orphans`",
        "BYTES_GONE" => "upload or make it again",
        "ARTIFACT_NOT_FOUND" => "see `gantry list artifacts`",
        "VOLUME_NOT_FOUND" => "see `gantry list volumes`",
        "CONTAINER_NOT_FOUND" => "see `gantry list containers`",
        "WORKER_IN_CONTACT" => "retire it, or stop its gateway and wait until it is stalled",
        "LAST_REPLICA" => {
            "have a run on another worker take it as an input, which copies it there, or lose it with --force"
        }
        "INTERRUPTED" => "run it again; if it may run twice, with --interruptible",
        "WORKER_NOT_FOUND" => "see `gantry list workers`",
        "NO_REPLICA" => "make it again, its bytes are lost",
        "PROGRAM_NOT_FOUND" => "give the path that it has there, or set PATH with --env",
        "USER_NOT_FOUND" => "check the name, or give a number with --user",
        "WORKING_DIRECTORY_MISSING" => "check the path given with --dir",
        "PROGRAM_NOT_EXECUTABLE" => "make it executable, or name an interpreter that the image has",
        "WORKER_LOST" | "START_UNKNOWN" | "EXIT_UNKNOWN" | "CONTACT_LOST" => {
            "run it again if it may run twice, or have that done with --retries, or with more of them"
        }
        "SETTLE_FAILED" => "run it again",
        "START_TIMEOUT" => "allow more time with --start-timeout, or tries with --retries",
        "QUEUE_TIMEOUT" => "allow more time with --queue-timeout, or see `gantry list workers`",
        _ => return None,
    })
}

/// The text of an I/O error without its number.
pub(crate) fn without_number(text: &str) -> String {
    match text.rfind(" (os error ") {
        Some(at) if text.ends_with(')') => text[..at].to_owned(),
        _ => text.to_owned(),
    }
}

fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_refusal_is_one_sentence_with_its_reason_and_what_to_do() {
        let status = Reason::InputUnavailable.status("gantry.scheduler", "input \"src\" has no replica left");
        let error = refused("cannot submit the workload")(status);
        assert_eq!(
            describe(&error),
            "cannot submit the workload: input \"src\" has no replica left (INPUT_UNAVAILABLE); upload it again"
        );
        assert_eq!(reason(&error), "INPUT_UNAVAILABLE");
        assert!(!is_transient(&error));
    }

    #[test]
    fn what_each_worker_lacks_is_said() {
        let about = [("b", "is full".to_owned()), ("a", "has no tag \"x\"".to_owned())];
        let status = Reason::NoCompatibleWorker.status_about("gantry.scheduler", "no worker could", about);
        let said = Refused::from(status).to_string();
        assert_eq!(said, "no worker could: a: has no tag \"x\", b: is full (NO_COMPATIBLE_WORKER)");
    }

    #[test]
    fn missing_permission_is_explained() {
        let about = [("local", "its runtime lacks network-host".to_owned())];
        let status = Reason::NoCompatibleWorker.status_about("gantry.scheduler", "no worker could", about);
        let said = describe(&refused("cannot submit the workload")(status));
        assert!(said.contains("gantry up --allow host-image,host-network,privileged"), "{said}");
    }

    #[test]
    fn nobody_who_answers_is_said_without_our_insides() {
        let error = refused("cannot list workers")(Status::new(Code::Unknown, "transport error"));
        assert_eq!(
            describe(&error),
            "cannot list workers: the cluster does not answer: transport error (UNAVAILABLE); try again, or look at \
             `gantry status`"
        );
        assert!(is_transient(&error));
    }

    #[test]
    fn a_token_that_was_given_and_is_wrong_is_named() {
        let error =
            refused("cannot list workers")(Reason::Unauthenticated.status("gantry", "present the token"));
        assert!(describe(&error).ends_with("with --token-file"));
    }

    #[test]
    fn what_is_known_to_help_stands_in_the_place_of_what_mostly_does() {
        let status = Reason::VolumeNotFound.status("gantry.artifacts", "no volume 7");
        let error = advised(refused("cannot adopt 7")(status), "look there").context("sorry");
        assert_eq!(describe(&error), "sorry: cannot adopt 7: no volume 7 (VOLUME_NOT_FOUND); look there");
        assert_eq!(reason(&error), "VOLUME_NOT_FOUND");
    }

    #[test]
    fn io_errors_lose_their_number() {
        let error = Err::<(), _>(std::io::Error::from_raw_os_error(2))
            .context("cannot read x")
            .expect_err("it is one");
        assert_eq!(describe(&error), "cannot read x: No such file or directory");
        assert_eq!(reason(&error), LOCAL_REASON);
    }
}
