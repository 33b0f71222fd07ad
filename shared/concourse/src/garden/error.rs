//! Errors of calls to a Garden server, grouped by what the caller can do.

use std::io;

use serde::Deserialize;

/// Error of a call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The container does not exist. A guardian worker never reports this, because it accepts any
    /// name.
    #[error("the container does not exist: {0}")]
    ContainerNotFound(String),
    /// The process does not exist, or it has ended and was forgotten.
    #[error("the process does not exist: {0}")]
    ProcessNotFound(String),
    /// The process has ended, but the worker has not reaped it yet. It may never do so: the caller
    /// should retry for a limited time.
    #[error("the process has ended, and the worker has no exit of it yet: {0}")]
    EndedUnreaped(String),
    /// The processes do not end, not even by SIGKILL. They may end later.
    #[error("the processes do not end: {0}")]
    DoesNotEnd(String),
    /// The program or its working directory does not exist in the container.
    #[error("the program does not exist: {0}")]
    ExecutableNotFound(String),
    /// A container or process of that name already exists.
    #[error("the name is in use: {0}")]
    Exists(String),
    /// The container is being destroyed. The caller should wait until it is no longer listed.
    #[error("{0}")]
    BeingDestroyed(String),
    /// The worker has reached its number of containers.
    #[error("{0}")]
    Full(String),
    /// This kind of worker does not implement the call.
    #[error("the worker does not implement the call")]
    NotImplemented,
    /// The worker is temporarily unavailable.
    #[error("the worker is unavailable: {0}")]
    ServiceUnavailable(String),
    /// The worker has failed permanently.
    #[error("the worker has failed permanently: {0}")]
    Unrecoverable(String),
    /// The worker rejected the call with its own message.
    #[error("the worker answered {status}: {message}")]
    Other {
        /// The HTTP status.
        status: u16,
        /// The message.
        message: String,
    },
    /// The connection failed.
    #[error("the connection to the worker failed")]
    Connection {
        /// Whether the worker may have received the request, and may be executing it.
        sent: bool,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The response does not follow the protocol of Garden.
    #[error("the response is not valid for a Garden server: {0}")]
    Protocol(String),
    /// The call was not made, because its arguments are invalid.
    #[error("invalid argument: {0}")]
    Refused(&'static str),
}

impl Error {
    /// Whether the worker cannot have received the request, so that any call may be repeated.
    pub fn is_safe_to_repeat(&self) -> bool {
        matches!(self, Self::Connection { sent: false, .. })
    }

    /// Whether the worker itself reported the failure. A failed attempt may have left something
    /// behind.
    pub fn is_answer(&self) -> bool {
        !matches!(self, Self::Connection { .. } | Self::Protocol(_) | Self::Refused(_))
    }

    pub(super) fn unsent(source: io::Error) -> Self {
        Self::Connection { sent: false, source }
    }

    pub(super) fn broken(source: io::Error) -> Self {
        Self::Connection { sent: true, source }
    }

    pub(super) fn timed_out(sent: bool) -> Self {
        let source = io::Error::new(io::ErrorKind::TimedOut, "timeout while waiting for the worker");
        Self::Connection { sent, source }
    }

    /// Maps a response with an error status.
    pub(super) fn from_answer(status: u16, body: &[u8]) -> Self {
        match serde_json::from_slice::<ErrorBody>(body) {
            Ok(error) => error.into_error(status),
            // The HTTP router answers with plain text.
            Err(_) => Self::Other { status, message: String::from_utf8_lossy(body).trim().to_owned() },
        }
    }
}

/// An error on the wire, in responses and in bulk responses.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct ErrorBody {
    r#type: String,
    message: String,
    handle: String,
    #[serde(rename = "ProcessID")]
    process_id: String,
}

impl ErrorBody {
    pub(super) fn into_error(self, status: u16) -> Error {
        let named = |name: String| if name.is_empty() { self.message.clone() } else { name };
        match self.r#type.as_str() {
            "ContainerNotFoundError" => Error::ContainerNotFound(named(self.handle)),
            "ProcessNotFoundError" => Error::ProcessNotFound(named(self.process_id)),
            "ExecutableNotFoundError" => Error::ExecutableNotFound(self.message),
            "ServiceUnavailableError" => Error::ServiceUnavailable(self.message),
            "UnrecoverableError" => Error::Unrecoverable(self.message),
            _ => from_message(status, self.message),
        }
    }
}

/// Maps the message of an error without a type. Containerd workers send no type for most errors.
/// Their messages have been stable for years.
fn from_message(status: u16, message: String) -> Error {
    let has = |words: &str| message.contains(words);
    let ends = |words: &str| message.ends_with(words);
    if message == "not implemented" {
        Error::NotImplemented
    } else if message.starts_with("proc not running: ") {
        Error::EndedUnreaped(message)
    } else if ends("grace period timeout") {
        Error::DoesNotEnd(message)
    } else if has("process does not exist") || message.starts_with("unknown process: ") {
        Error::ProcessNotFound(message)
    } else if message.starts_with("unknown handle: ")
        || (has("container \"") && has(" in namespace \"") && ends(": not found"))
    {
        Error::ContainerNotFound(message)
    } else if has("executable file not found in $PATH")
        || (has("stat ") && ends(": no such file or directory"))
        || (has("exec: \"") && has(": no such file or directory"))
    {
        Error::ExecutableNotFound(message)
    } else if ends(": already exists") || ends("' already in use") {
        Error::Exists(message)
    } else if message == "container already being destroyed" {
        Error::BeingDestroyed(message)
    } else if message == "max containers reached" {
        Error::Full(message)
    } else {
        Error::Other { status, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(message: &str) -> Error {
        let body =
            serde_json::json!({"Type": "", "Message": message, "Handle": "", "ProcessID": "", "Binary": ""});
        Error::from_answer(500, body.to_string().as_bytes())
    }

    #[test]
    fn untyped_error_messages_are_recognized() {
        let missing = of("get container: container \"c-42\" in namespace \"concourse\": not found");
        assert!(matches!(missing, Error::ContainerNotFound(_)), "{missing:?}");
        let missing = of("load proc: no running process found: process does not exist p9: not found");
        assert!(matches!(missing, Error::ProcessNotFound(_)), "{missing:?}");
        assert!(matches!(of("unknown process: p9"), Error::ProcessNotFound(_)));
        let missing = of("start: exec: \"nope\": executable file not found in $PATH: unknown");
        assert!(matches!(missing, Error::ExecutableNotFound(_)), "{missing:?}");
        let missing =
            of("OCI runtime exec failed: exec: \"/no\": stat /no: no such file or directory: unknown");
        assert!(matches!(missing, Error::ExecutableNotFound(_)), "{missing:?}");
        for taken in [
            "container \"c-42\": already exists",
            "Handle 'c-42' already in use",
            "task exec: id p1: already exists",
            "process ID 'p1' already in use",
        ] {
            assert!(matches!(of(taken), Error::Exists(_)), "{taken}");
        }
        assert!(matches!(of("proc not running: status = stopped"), Error::EndedUnreaped(_)));
        assert!(matches!(of("stop: kill: grace period timeout"), Error::DoesNotEnd(_)));
        assert!(matches!(of("not implemented"), Error::NotImplemented));
        assert!(matches!(of("max containers reached"), Error::Full(_)));
        assert!(matches!(of("container already being destroyed"), Error::BeingDestroyed(_)));
        // A missing property is not a missing container.
        assert!(matches!(of("not found: user"), Error::Other { status: 500, .. }));
    }

    #[test]
    fn plain_text_error_keeps_its_message() {
        let Error::Other { status: 405, message } = Error::from_answer(405, b"Method Not Allowed\n") else {
            panic!("not told")
        };
        assert_eq!(message, "Method Not Allowed");
    }
}
