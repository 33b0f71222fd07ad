//! Error messages: one sentence with the operation, the cause and the remedy.
//!
//! Functions return `anyhow::Error`. [`describe`] turns it into the sentence, and only `main`
//! prints that.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use rpc::{Reason, Refusal};
use tonic::{Code, Status};

/// Ends the command with an exit code, after a signal or because standard output is closed.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted(pub(crate) u8);

/// Remedy for an error that its reason alone does not imply. Its text is empty, so it does not
/// appear among the causes.
#[derive(Debug, Clone)]
struct Advice(String);

impl fmt::Display for Advice {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

/// Adds a remedy to an error.
pub(crate) fn with_advice(error: anyhow::Error, advice: impl Into<String>) -> anyhow::Error {
    error.context(Advice(advice.into()))
}

/// Messages of the HTTP library for an answer that is not HTTP/2.
const NOT_HTTP2: [&str; 2] = ["frame with invalid size", "invalid preface"];

/// Reason of errors that no service returned, for programs.
pub(crate) const LOCAL_REASON: &str = "CLIENT";

/// Call that was rejected or failed.
#[derive(Debug, Clone)]
pub(crate) struct Refused {
    refusal: Refusal,
    /// Service that was called, with its address.
    service: Option<String>,
    /// Cause why no service answered, if none did.
    unreachable: Option<String>,
    /// The operating system denies access to the socket.
    denied: bool,
    /// Another program than Gantry listens at the address.
    foreign: bool,
}

impl Refused {
    /// Returns whether the service gave this reason.
    pub(crate) fn is(&self, reason: Reason) -> bool {
        self.refusal.is(reason)
    }

    /// Returns whether the message of the service contains this id.
    pub(crate) fn names(&self, id: &str) -> bool {
        self.refusal.message.contains(id)
    }

    /// Returns whether the same call may be repeated and may then succeed.
    pub(crate) fn is_transient(&self) -> bool {
        self.refusal.is_transient() && !self.denied
    }

    /// Returns whether a repeated transfer may succeed: the call may be repeated, no gateway
    /// attends a worker at the moment, or a service was away for so long that the transfer lost its
    /// claim.
    pub(crate) fn may_pass(&self) -> bool {
        let reasons =
            [Reason::NotAttended, Reason::WorkerUnreachable, Reason::AllWorkersBusy, Reason::ClaimLost];
        self.is_transient() || reasons.into_iter().any(|reason| self.is(reason))
    }

    /// Names the service that was called, with its address.
    pub(crate) fn by(self, service: String) -> Self {
        Self { service: Some(service), ..self }
    }

    /// Describes an outage for a message: the service that does not answer, and the cause.
    pub(crate) fn outage(&self) -> String {
        let service = self.service.as_deref().unwrap_or("the cluster");
        match &self.unreachable {
            Some(cause) => format!("{service} does not answer ({cause})"),
            None => format!("{service} answers: {}", self.refusal.message),
        }
    }

    /// Returns the cause alone, for messages that already name the service.
    pub(crate) fn cause(&self) -> String {
        self.unreachable.clone().unwrap_or_else(|| self.refusal.message.clone())
    }

    /// Error for a stream that ended before its final message.
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
            unreachable.as_ref().is_some_and(|cause| NOT_HTTP2.iter().any(|message| cause.contains(message)));
        Self { refusal, service: None, unreachable, denied, foreign }
    }
}

impl Refused {
    /// Writes the refusal of each worker, if the error is about placement.
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
            return write!(f, "this user may not access the cluster: Permission denied (PERMISSION_DENIED)");
        }
        match (&self.unreachable, &self.refusal.reason) {
            (Some(_), _) if self.foreign => {
                write!(
                    f,
                    "the program at this address is not a Gantry service, or requires TLS (UNAVAILABLE)"
                )
            }
            (Some(cause), _) => {
                let service = self.service.as_deref().unwrap_or("the cluster");
                write!(f, "{service} does not answer: {cause} (UNAVAILABLE)")
            }
            (None, Some(reason)) => {
                write!(f, "{}", self.refusal.message)?;
                self.fmt_workers(f)?;
                write!(f, " ({reason})")
            }
            (None, None) if self.refusal.code == Code::Unimplemented => {
                write!(f, "the service at this address does not support this call (UNIMPLEMENTED)")
            }
            (None, None) => write!(f, "{} ({})", self.refusal.message, code_name(self.refusal.code)),
        }
    }
}

impl Error for Refused {}

/// Makes a function for `map_err` that describes a rejected call, such as "cannot list workers".
pub(crate) fn refused(operation: impl Into<String>) -> impl FnOnce(Status) -> anyhow::Error {
    move |status| anyhow::Error::new(Refused::from(status)).context(operation.into())
}

/// Finds the rejected call among the causes of `error`.
pub(crate) fn refusal(error: &anyhow::Error) -> Option<&Refused> {
    error.chain().find_map(|cause| cause.downcast_ref())
}

/// Finds the rejected call among the causes of `error`, if the transfer that made it may succeed
/// later.
pub(crate) fn may_pass(error: &anyhow::Error) -> Option<&Refused> {
    refusal(error).filter(|refused| refused.may_pass())
}

/// Returns the refusal if a repeated read of an artifact may succeed. Its replica may have been
/// missing or damaged, and another one may exist.
pub(crate) fn may_be_read(error: &anyhow::Error) -> Option<&Refused> {
    let is_lost =
        |refused: &Refused| refused.is(Reason::VolumeNotFound) || refused.is(Reason::DigestMismatch);
    refusal(error).filter(|refused| refused.may_pass() || is_lost(refused))
}

/// Returns the reason of an error, for programs.
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

/// Describes `error` in one sentence, with a remedy if one is known.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    describe_with(error, |_| None)
}

/// Describes `error` as [`describe`] does. The remedy that `advise` returns for a reason replaces
/// the general one.
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

/// Returns the remedy for a workload that asks for something that no operator of a worker allows.
fn needs_permission(text: &str) -> Option<&'static str> {
    let lacks = |permission: &str| text.contains(&format!("its runtime lacks {permission}"));
    (lacks("privileged") || lacks("network-host")).then_some(
        "the operator of a worker must allow it with --allow; for the cluster on this machine, run `gantry down`, then \
         `gantry up --allow host-image,host-network,privileged` with the permissions that you need",
    )
}

/// Returns the general remedy for a reason.
pub(crate) fn advice(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "UNAUTHENTICATED" => "give the token file of the cluster with --token-file",
        "UNAVAILABLE" => "try again, or check `gantry status`",
        "INPUT_UNAVAILABLE" => "upload the input again; `gantry run` does that with a directory",
        "INPUT_DAMAGED" => "run the command again; the input is then copied from another place",
        "INPUT_UNREACHABLE" => "check that the gateways of the named workers can reach each other",
        "WORKER_UNREACHABLE" => {
            "check the address of the worker in `gantry show worker`, and the network to it"
        }
        "NO_COMPATIBLE_WORKER" => "change the requirements, or see `gantry list workers`",
        "ALL_WORKERS_BUSY" => "try again later, or see `gantry list workers`",
        "INVALID_IMAGE" => {
            "an image needs a directory rootfs and a command, from its metadata.json or after --"
        }
        "OUTPUT_INVALID" => "write fewer files into the output, or pack them into one file",
        "DISK_FULL" => {
            "delete artifacts with `gantry delete`, or free space on the worker; `gantry gc` says what else holds space"
        }
        "WORKLOAD_NOT_FOUND" => "see `gantry list workloads`",
        "UNKNOWN_ID" => "see `gantry list artifacts`, `gantry list volumes` and the other lists",
        "NOT_ORPHANED" => "see `gantry explain`",
        "NOT_ADOPTABLE" => "the orphan can only be purged; see `gantry list volumes --orphans`",
        "BYTES_GONE" => "upload or produce the artifact again",
        "ARTIFACT_NOT_FOUND" => "see `gantry list artifacts`",
        "VOLUME_NOT_FOUND" => "see `gantry list volumes`",
        "CONTAINER_NOT_FOUND" => "see `gantry list containers`",
        "WORKER_IN_CONTACT" => "retire the worker, or stop its gateway and wait until the worker is stalled",
        "LAST_REPLICA" => {
            "`gantry retire WORKER --evacuate` copies such artifacts to other workers, and --force gives them up"
        }
        "INTERRUPTED" => "run the command again; use --interruptible if the command may run twice",
        "WORKER_NOT_FOUND" => "see `gantry list workers`",
        "NO_REPLICA" => "produce the artifact again; its bytes are lost",
        "PROGRAM_NOT_FOUND" => "give the path of the program in the container, or set PATH with --env",
        "USER_NOT_FOUND" => "check the name, or give a number to --user",
        "WORKING_DIRECTORY_MISSING" => "check the path of --dir (in `gantry exec`: --workdir)",
        "PROGRAM_NOT_EXECUTABLE" => {
            "make the program executable, or run it with an interpreter that the image has"
        }
        "WORKER_LOST" | "START_UNKNOWN" | "EXIT_UNKNOWN" | "CONTACT_LOST" => {
            "run the command again if it may run twice, or let --retries do that"
        }
        "SETTLE_FAILED" => "run the command again",
        "START_TIMEOUT" => "allow more time with --start-timeout, or use --retries",
        "QUEUE_TIMEOUT" => "allow more time with --queue-timeout, or see `gantry list workers`",
        _ => return None,
    })
}

/// Removes the error number from the text of an I/O error.
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
    fn error_has_cause_reason_and_remedy() {
        let status = Reason::InputUnavailable.status("gantry.scheduler", "input \"src\" has no replica left");
        let error = refused("cannot submit the workload")(status);
        assert_eq!(
            describe(&error),
            "cannot submit the workload: input \"src\" has no replica left (INPUT_UNAVAILABLE); upload the input \
             again; `gantry run` does that with a directory"
        );
        assert_eq!(reason(&error), "INPUT_UNAVAILABLE");
        assert!(may_pass(&error).is_none());
    }

    #[test]
    fn placement_error_names_refusal_of_each_worker() {
        let about = [("b", "is full".to_owned()), ("a", "has no tag \"x\"".to_owned())];
        let status = Reason::NoCompatibleWorker.status_about("gantry.scheduler", "no worker could", about);
        let message = Refused::from(status).to_string();
        assert_eq!(message, "no worker could: a: has no tag \"x\", b: is full (NO_COMPATIBLE_WORKER)");
    }

    #[test]
    fn missing_permission_has_remedy() {
        let about = [("local", "its runtime lacks network-host".to_owned())];
        let status = Reason::NoCompatibleWorker.status_about("gantry.scheduler", "no worker could", about);
        let printed = describe(&refused("cannot submit the workload")(status));
        assert!(printed.contains("gantry up --allow host-image,host-network,privileged"), "{printed}");
    }

    #[test]
    fn silent_cluster_is_described_without_internals() {
        let error = refused("cannot list workers")(Status::new(Code::Unknown, "transport error"));
        assert_eq!(
            describe(&error),
            "cannot list workers: the cluster does not answer: transport error (UNAVAILABLE); try again, or check \
             `gantry status`"
        );
        assert!(may_pass(&error).is_some());
    }

    #[test]
    fn missing_token_has_remedy() {
        let error =
            refused("cannot list workers")(Reason::Unauthenticated.status("gantry", "present the token"));
        assert!(describe(&error).ends_with("with --token-file"));
    }

    #[test]
    fn specific_remedy_replaces_general_one() {
        let status = Reason::VolumeNotFound.status("gantry.artifacts", "no volume 7");
        let error = with_advice(refused("cannot adopt 7")(status), "look there").context("sorry");
        assert_eq!(describe(&error), "sorry: cannot adopt 7: no volume 7 (VOLUME_NOT_FOUND); look there");
        assert_eq!(reason(&error), "VOLUME_NOT_FOUND");
    }

    #[test]
    fn io_error_number_is_removed() {
        let error = Err::<(), _>(std::io::Error::from_raw_os_error(2))
            .context("cannot read x")
            .expect_err("it is one");
        assert_eq!(describe(&error), "cannot read x: No such file or directory");
        assert_eq!(reason(&error), LOCAL_REASON);
    }
}
