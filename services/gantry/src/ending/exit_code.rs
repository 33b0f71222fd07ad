//! Exit codes of `gantry`.
//!
//! `run`, `attach` and `watch` end with the exit code of the workload. Codes from 124 on have the
//! meaning that `gantry help run` lists.

use rpc::pb::scheduler::{Exit, Failure, Finished, Outcome, exit::Status};

use crate::ending::error::advice;

/// Exit code for a failure of Gantry itself.
pub(crate) const GANTRY_FAILED: u8 = 125;
/// Exit code after Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;
/// Exit code after SIGPIPE: standard output is closed.
pub(crate) const PIPE: u8 = 141;
/// Exit code after SIGTERM, or if another caller cancelled the workload.
pub(crate) const TERMINATED: u8 = 143;

const TIMEOUT: u8 = 124;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
const OUT_OF_MEMORY: u8 = 137;

/// Exit code and final message of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    /// Exit code of `gantry`.
    pub(crate) code: u8,
    /// Message for people, if the exit code alone is not enough.
    pub(crate) message: Option<String>,
}

/// Returns the end of the command for a finished workload. `cancel_code` is the exit code of the
/// event because of which `gantry` cancelled the workload.
pub(crate) fn end(finished: &Finished, cancel_code: Option<u8>) -> End {
    let mut end = end_without_notes(finished, cancel_code);
    let lines = end.message.into_iter().chain(finished.notes.iter().cloned()).collect::<Vec<_>>();
    end.message = (!lines.is_empty()).then(|| lines.join("\n"));
    end
}

fn end_without_notes(finished: &Finished, cancel_code: Option<u8>) -> End {
    let failure = finished.failure.as_ref();
    match (cancel_code, finished.outcome()) {
        (Some(code), Outcome::Aborted) => End { code, message: None },
        (None, Outcome::Aborted) => {
            End { code: TERMINATED, message: Some("the workload was cancelled".to_owned()) }
        }
        // The command succeeded, but its output could not be written. A pipeline must not take the
        // output for complete.
        (Some(code @ (PIPE | GANTRY_FAILED)), Outcome::Succeeded) => End { code, message: None },
        (_, Outcome::Errored | Outcome::Unspecified) => errored(failure, finished.exit.as_ref()),
        (_, Outcome::Succeeded | Outcome::Failed) => {
            let mut end = exited(finished.exit.as_ref());
            if let Some(failure) = failure {
                let message = with_exit(failure, finished.exit.as_ref());
                end.message =
                    Some(end.message.map_or_else(|| message.clone(), |how| format!("{how}\n{message}")));
            }
            end
        }
    }
}

fn errored(failure: Option<&Failure>, exit: Option<&Exit>) -> End {
    let Some(failure) = failure else {
        return match exit {
            Some(_) => exited(exit),
            None => End {
                code: GANTRY_FAILED,
                message: Some("the workload failed for an unknown reason".to_owned()),
            },
        };
    };
    let code = match failure.reason.as_str() {
        "RUN_TIMEOUT" => TIMEOUT,
        "PROGRAM_NOT_EXECUTABLE" => NOT_EXECUTABLE,
        "PROGRAM_NOT_FOUND" => NOT_FOUND,
        _ => GANTRY_FAILED,
    };
    End { code, message: Some(with_exit(failure, exit)) }
}

/// Describes the failure, and adds the command's own exit code.
fn with_exit(failure: &Failure, exit: Option<&Exit>) -> String {
    let message = sentence(failure);
    match exit.and_then(|exit| exit.status.as_ref()) {
        Some(Status::Code(code)) => format!("{message}; the command itself ended with exit code {code}"),
        _ => message,
    }
}

/// Returns the end of the command for a process that is not the command of a workload.
pub(crate) fn process_end(exit: &Exit, failure: Option<&Failure>) -> End {
    match failure {
        Some(_) => errored(failure, Some(exit)),
        None => exited(Some(exit)),
    }
}

fn exited(exit: Option<&Exit>) -> End {
    let byte = |number: u32| u8::try_from(number).unwrap_or(GANTRY_FAILED);
    match exit.and_then(|exit| exit.status.as_ref()) {
        Some(Status::Code(code)) => End { code: byte(*code), message: None },
        Some(Status::Signal(signal)) => End {
            code: byte(signal.saturating_add(128)),
            message: Some(format!("the command was ended by signal {}", signal_name(*signal))),
        },
        Some(Status::OutOfMemory(_)) => End {
            code: OUT_OF_MEMORY,
            message: Some(
                "the command was killed: it ran out of memory; allow more with --memory".to_owned(),
            ),
        },
        None => End { code: GANTRY_FAILED, message: Some("it is unknown how the command ended".to_owned()) },
    }
}

fn sentence(failure: &Failure) -> String {
    let Failure { reason, message } = failure;
    match advice(reason) {
        Some(advice) => format!("{message} ({reason}); {advice}"),
        None => format!("{message} ({reason})"),
    }
}

fn signal_name(signal: u32) -> String {
    let name = match signal {
        1 => "HUP",
        2 => "INT",
        3 => "QUIT",
        4 => "ILL",
        6 => "ABRT",
        7 => "BUS",
        8 => "FPE",
        9 => "KILL",
        11 => "SEGV",
        13 => "PIPE",
        14 => "ALRM",
        15 => "TERM",
        24 => "XCPU",
        31 => "SYS",
        _ => return signal.to_string(),
    };
    format!("{signal} ({name})")
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::OutOfMemory;

    use super::*;

    fn finished(outcome: Outcome, how: Option<Status>, reason: Option<&str>) -> Finished {
        Finished {
            outcome: outcome.into(),
            exit: how.map(|how| Exit { status: Some(how) }),
            failure: reason
                .map(|reason| Failure { reason: reason.to_owned(), message: "it went wrong".to_owned() }),
            ..Finished::default()
        }
    }

    fn code(outcome: Outcome, how: Option<Status>, reason: Option<&str>, cancel_code: Option<u8>) -> u8 {
        end(&finished(outcome, how, reason), cancel_code).code
    }

    #[test]
    fn exit_code_is_that_of_process() {
        assert_eq!(
            end(&finished(Outcome::Succeeded, Some(Status::Code(0)), None), None),
            End { code: 0, message: None }
        );
        assert_eq!(code(Outcome::Failed, Some(Status::Code(3)), None, None), 3);
        assert_eq!(code(Outcome::Failed, Some(Status::Code(255)), None, None), 255);
        assert_eq!(code(Outcome::Failed, Some(Status::Signal(9)), None, None), 137);
        assert_eq!(code(Outcome::Failed, Some(Status::Signal(11)), None, None), 139);
        let killed = end(&finished(Outcome::Failed, Some(Status::OutOfMemory(OutOfMemory {})), None), None);
        assert_eq!(killed.code, 137);
        assert!(killed.message.expect("a message").contains("out of memory"));
    }

    #[test]
    fn failure_outside_process_has_own_exit_code() {
        assert_eq!(code(Outcome::Errored, None, Some("PROGRAM_NOT_EXECUTABLE"), None), 126);
        assert_eq!(code(Outcome::Errored, None, Some("PROGRAM_NOT_FOUND"), None), 127);
        assert_eq!(code(Outcome::Errored, Some(Status::Signal(15)), Some("RUN_TIMEOUT"), None), 124);
        assert_eq!(code(Outcome::Errored, None, Some("QUEUE_TIMEOUT"), None), 125);
        assert_eq!(code(Outcome::Errored, Some(Status::Code(0)), Some("OUTPUT_MISSING"), None), 125);
        assert_eq!(code(Outcome::Errored, None, None, None), 125);
        assert_eq!(code(Outcome::Unspecified, None, None, None), 125);
    }

    #[test]
    fn exit_code_wins_over_failure() {
        let ended = end(&finished(Outcome::Failed, Some(Status::Code(3)), Some("OUTPUT_MISSING")), None);
        let message = "it went wrong (OUTPUT_MISSING); the command itself ended with exit code 3";
        assert_eq!(ended, End { code: 3, message: Some(message.to_owned()) });
        let killed = end(&finished(Outcome::Failed, Some(Status::Signal(9)), Some("OUTPUT_MISSING")), None);
        let message = killed.message.expect("a message");
        assert!(message.contains("signal 9 (KILL)") && message.contains("OUTPUT_MISSING"), "{message}");
    }

    #[test]
    fn message_has_exit_code_when_output_fails() {
        let ended = end(&finished(Outcome::Errored, Some(Status::Code(0)), Some("PUBLISH_FAILED")), None);
        let message = ended.message.expect("a message");
        assert!(message.ends_with("the command itself ended with exit code 0"), "{message}");
        assert_eq!(ended.code, GANTRY_FAILED);
    }

    #[test]
    fn notes_are_in_message_of_success() {
        let notes = vec!["output \"o\": left out: \"s\" is a socket".to_owned()];
        let finished = Finished { notes, ..finished(Outcome::Succeeded, Some(Status::Code(0)), None) };
        let message = "output \"o\": left out: \"s\" is a socket".to_owned();
        assert_eq!(end(&finished, None), End { code: 0, message: Some(message) });
    }

    #[test]
    fn cancelled_workload_ends_with_code_of_cancellation() {
        assert_eq!(code(Outcome::Aborted, Some(Status::Signal(15)), None, Some(INTERRUPTED)), 130);
        assert_eq!(code(Outcome::Aborted, Some(Status::Code(0)), None, Some(PIPE)), 141);
        assert_eq!(code(Outcome::Aborted, None, None, None), 143);
        // The workload ended before it was cancelled.
        assert_eq!(code(Outcome::Succeeded, Some(Status::Code(0)), None, Some(INTERRUPTED)), 0);
        assert_eq!(code(Outcome::Failed, Some(Status::Code(3)), None, Some(PIPE)), 3);
    }

    #[test]
    fn unwritten_output_is_not_success() {
        for cancel_code in [PIPE, GANTRY_FAILED] {
            assert_eq!(code(Outcome::Succeeded, Some(Status::Code(0)), None, Some(cancel_code)), cancel_code);
        }
    }
}
