//! From the end of a workload to the exit code of the command.

use rpc::pb::scheduler::{Exit, Failure, Finished, Outcome, exit::How};

use crate::ending::error::advice;

/// Anything of ours failed.
pub(crate) const OURS: u8 = 125;
/// Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;
/// Standard output was closed: SIGPIPE.
pub(crate) const PIPE: u8 = 141;
/// SIGTERM, or cancelled by somebody else.
pub(crate) const TERMINATED: u8 = 143;

const TIMEOUT: u8 = 124;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;
const OUT_OF_MEMORY: u8 = 137;

/// How the command ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    /// The exit code.
    pub(crate) code: u8,
    /// What a person should be told, unless the exit code says it all.
    pub(crate) said: Option<String>,
}

/// How the command ends when the workload ended like this. `asked` is the exit code of whatever made us cancel it.
pub(crate) fn end(finished: &Finished, asked: Option<u8>) -> End {
    let mut end = end_without_notes(finished, asked);
    let said = end.said.into_iter().chain(finished.notes.iter().cloned()).collect::<Vec<_>>();
    end.said = (!said.is_empty()).then(|| said.join("\n"));
    end
}

fn end_without_notes(finished: &Finished, asked: Option<u8>) -> End {
    let failure = finished.failure.as_ref();
    match (asked, finished.outcome()) {
        (Some(code), Outcome::Aborted) => End { code, said: None },
        (None, Outcome::Aborted) => {
            End { code: TERMINATED, said: Some("the workload was cancelled".to_owned()) }
        }
        // It succeeded, but what it said could not be written: a pipeline must not take that for all of it.
        (Some(code @ (PIPE | OURS)), Outcome::Succeeded) => End { code, said: None },
        (_, Outcome::Errored | Outcome::Unspecified) => errored(failure, finished.exit.as_ref()),
        (_, Outcome::Succeeded | Outcome::Failed) => {
            let mut end = exited(finished.exit.as_ref());
            if let Some(failure) = failure {
                let said = with_exit(failure, finished.exit.as_ref());
                end.said = Some(end.said.map_or_else(|| said.clone(), |how| format!("{how}\n{said}")));
            }
            end
        }
    }
}

fn errored(failure: Option<&Failure>, exit: Option<&Exit>) -> End {
    let Some(failure) = failure else {
        return match exit {
            Some(_) => exited(exit),
            None => {
                End { code: OURS, said: Some("the workload failed, and nothing is known of why".to_owned()) }
            }
        };
    };
    let code = match failure.reason.as_str() {
        "RUN_TIMEOUT" => TIMEOUT,
        "PROGRAM_NOT_EXECUTABLE" => NOT_EXECUTABLE,
        "PROGRAM_NOT_FOUND" => NOT_FOUND,
        _ => OURS,
    };
    End { code, said: Some(with_exit(failure, exit)) }
}

/// What went wrong, and the command's own exit code, which is not lost for that.
fn with_exit(failure: &Failure, exit: Option<&Exit>) -> String {
    let said = sentence(failure);
    match exit.and_then(|exit| exit.how.as_ref()) {
        Some(How::Code(code)) => format!("{said}; the command itself ended with exit code {code}"),
        _ => said,
    }
}

fn exited(exit: Option<&Exit>) -> End {
    let byte = |number: u32| u8::try_from(number).unwrap_or(OURS);
    match exit.and_then(|exit| exit.how.as_ref()) {
        Some(How::Code(code)) => End { code: byte(*code), said: None },
        Some(How::Signal(signal)) => End {
            code: byte(signal.saturating_add(128)),
            said: Some(format!("the process was ended by signal {}", signal_name(*signal))),
        },
        Some(How::OutOfMemory(_)) => End {
            code: OUT_OF_MEMORY,
            said: Some("the process was killed: it ran out of memory; allow more with --memory".to_owned()),
        },
        None => End { code: OURS, said: Some("how the process ended is not known".to_owned()) },
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

    fn finished(outcome: Outcome, how: Option<How>, reason: Option<&str>) -> Finished {
        Finished {
            outcome: outcome.into(),
            exit: how.map(|how| Exit { how: Some(how) }),
            failure: reason
                .map(|reason| Failure { reason: reason.to_owned(), message: "it went wrong".to_owned() }),
            ..Finished::default()
        }
    }

    fn code(outcome: Outcome, how: Option<How>, reason: Option<&str>, asked: Option<u8>) -> u8 {
        end(&finished(outcome, how, reason), asked).code
    }

    #[test]
    fn the_command_ends_as_its_process_did() {
        assert_eq!(
            end(&finished(Outcome::Succeeded, Some(How::Code(0)), None), None),
            End { code: 0, said: None }
        );
        assert_eq!(code(Outcome::Failed, Some(How::Code(3)), None, None), 3);
        assert_eq!(code(Outcome::Failed, Some(How::Code(255)), None, None), 255);
        assert_eq!(code(Outcome::Failed, Some(How::Signal(9)), None, None), 137);
        assert_eq!(code(Outcome::Failed, Some(How::Signal(11)), None, None), 139);
        let killed = end(&finished(Outcome::Failed, Some(How::OutOfMemory(OutOfMemory {})), None), None);
        assert_eq!(killed.code, 137);
        assert!(killed.said.expect("said").contains("out of memory"));
    }

    #[test]
    fn what_is_not_the_process_has_codes_of_its_own() {
        assert_eq!(code(Outcome::Errored, None, Some("PROGRAM_NOT_EXECUTABLE"), None), 126);
        assert_eq!(code(Outcome::Errored, None, Some("PROGRAM_NOT_FOUND"), None), 127);
        assert_eq!(code(Outcome::Errored, Some(How::Signal(15)), Some("RUN_TIMEOUT"), None), 124);
        assert_eq!(code(Outcome::Errored, None, Some("QUEUE_TIMEOUT"), None), 125);
        assert_eq!(code(Outcome::Errored, Some(How::Code(0)), Some("OUTPUT_MISSING"), None), 125);
        assert_eq!(code(Outcome::Errored, None, None, None), 125);
        assert_eq!(code(Outcome::Unspecified, None, None, None), 125);
    }

    #[test]
    fn a_failure_beside_an_exit_is_said_and_the_exit_counts() {
        let ended = end(&finished(Outcome::Failed, Some(How::Code(3)), Some("OUTPUT_MISSING")), None);
        let said = "it went wrong (OUTPUT_MISSING); the command itself ended with exit code 3";
        assert_eq!(ended, End { code: 3, said: Some(said.to_owned()) });
        let killed = end(&finished(Outcome::Failed, Some(How::Signal(9)), Some("OUTPUT_MISSING")), None);
        let said = killed.said.expect("said");
        assert!(said.contains("signal 9 (KILL)") && said.contains("OUTPUT_MISSING"), "{said}");
    }

    #[test]
    fn exit_code_is_told_when_an_output_fails() {
        let ended = end(&finished(Outcome::Errored, Some(How::Code(0)), Some("PUBLISH_FAILED")), None);
        let said = ended.said.expect("said");
        assert!(said.ends_with("the command itself ended with exit code 0"), "{said}");
        assert_eq!(ended.code, OURS);
    }

    #[test]
    fn notes_are_told_beside_a_success() {
        let notes = vec!["output \"o\": left out: \"s\" is a socket".to_owned()];
        let finished = Finished { notes, ..finished(Outcome::Succeeded, Some(How::Code(0)), None) };
        let said = "output \"o\": left out: \"s\" is a socket".to_owned();
        assert_eq!(end(&finished, None), End { code: 0, said: Some(said) });
    }

    #[test]
    fn a_cancelled_workload_ends_with_the_code_of_who_asked() {
        assert_eq!(code(Outcome::Aborted, Some(How::Signal(15)), None, Some(INTERRUPTED)), 130);
        assert_eq!(code(Outcome::Aborted, Some(How::Code(0)), None, Some(PIPE)), 141);
        assert_eq!(code(Outcome::Aborted, None, None, None), 143);
        // It was over before it was cancelled: what became of it counts.
        assert_eq!(code(Outcome::Succeeded, Some(How::Code(0)), None, Some(INTERRUPTED)), 0);
        assert_eq!(code(Outcome::Failed, Some(How::Code(3)), None, Some(PIPE)), 3);
    }

    #[test]
    fn output_that_could_not_be_written_is_no_success() {
        for asked in [PIPE, OURS] {
            assert_eq!(code(Outcome::Succeeded, Some(How::Code(0)), None, Some(asked)), asked);
        }
    }
}
