//! How a call fails, told apart by what a caller may do about it.

use std::io;

use serde::Deserialize;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such container. A guardian worker never says so: it acts on any name.
    #[error("no such container: {0}")]
    ContainerNotFound(String),
    /// There is no such process, or it has ended and was forgotten.
    #[error("no such process: {0}")]
    ProcessNotFound(String),
    /// The process has ended, and the worker has not learned how yet. It may never: ask again, and not for ever.
    #[error("it has ended, and the worker does not know how: {0}")]
    EndedUnreaped(String),
    /// What was to be stopped does not end, not even by SIGKILL. It may later.
    #[error("it does not end: {0}")]
    DoesNotEnd(String),
    /// The container has no such program, or not where it should start.
    #[error("no such program: {0}")]
    ExecutableNotFound(String),
    /// A container or process of that name exists.
    #[error("exists already: {0}")]
    Exists(String),
    /// Someone is destroying the container: wait until it is gone from the list.
    #[error("{0}")]
    BeingDestroyed(String),
    /// The worker has as many containers as it takes.
    #[error("{0}")]
    Full(String),
    /// Not by this kind of worker.
    #[error("the worker does not implement it")]
    NotImplemented,
    /// The worker asks to try later.
    #[error("the worker is not available: {0}")]
    ServiceUnavailable(String),
    /// The worker is broken for good.
    #[error("the worker is broken: {0}")]
    Unrecoverable(String),
    /// The worker refused, in its own words.
    #[error("the worker answered {status}: {message}")]
    Other {
        /// The HTTP status.
        status: u16,
        /// The words.
        message: String,
    },
    /// The connection failed.
    #[error("the connection to the worker failed")]
    Connection {
        /// Whether the worker may have got the request, and may be acting on it.
        sent: bool,
        /// How.
        #[source]
        source: io::Error,
    },
    /// What came back is not what such a server sends.
    #[error("not what a Garden server answers: {0}")]
    Protocol(String),
    /// The call was not made, since it would not do what it says.
    #[error("refused: {0}")]
    Refused(&'static str),
}

impl Error {
    /// Whether the worker cannot have got the request, so that any call may be made again.
    pub fn is_safe_to_repeat(&self) -> bool {
        matches!(self, Self::Connection { sent: false, .. })
    }

    /// Whether the worker itself said that it did not do it. What it is said to have tried may have left something.
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
        let source = io::Error::new(io::ErrorKind::TimedOut, "the worker did not answer in time");
        Self::Connection { sent, source }
    }

    /// Of an answer with a status that is no success.
    pub(super) fn from_answer(status: u16, body: &[u8]) -> Self {
        match serde_json::from_slice::<ErrorBody>(body) {
            Ok(error) => error.into_error(status),
            // The router's own answers are text.
            Err(_) => Self::Other { status, message: String::from_utf8_lossy(body).trim().to_owned() },
        }
    }
}

/// An error as it stands on the wire, in answers and in bulk answers.
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
            _ => from_words(status, self.message),
        }
    }
}

/// Workers that run containerd give most errors no type; their words have not changed in years.
fn from_words(status: u16, message: String) -> Error {
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
    fn words_of_workers_without_types_are_recognized() {
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
        // A property that is not found is no container that is not found.
        assert!(matches!(of("not found: user"), Error::Other { status: 500, .. }));
    }

    #[test]
    fn an_answer_that_is_no_json_is_told_in_its_words() {
        let Error::Other { status: 405, message } = Error::from_answer(405, b"Method Not Allowed\n") else {
            panic!("not told")
        };
        assert_eq!(message, "Method Not Allowed");
    }
}
