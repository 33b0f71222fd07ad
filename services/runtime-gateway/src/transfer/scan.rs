//! The manifest of a volume, as it is found by reading all of it, and the problems that are met.

use std::io;
use std::path::Path;

use domain::error_chain;
use runtime::RuntimeError;
use transfer::{InvalidManifest, Limits, Problem, ProblemKind, ScanError, ScanOptions};

/// Most paths that a message about a volume names.
const NAMED: usize = 3;

/// Reads everything in a volume. A volume that no manifest can describe is the fault of the process that wrote it.
pub(crate) fn scan(root: &Path) -> Result<transfer::Scan, RuntimeError> {
    let options = ScanOptions { limits: Limits::of_process(), ..ScanOptions::default() };
    let scanned = transfer::scan(root, &options, None).map_err(|error| match error {
        ScanError::Manifest(error) if !matches!(error, InvalidManifest::NoMemory) => {
            RuntimeError::InvalidOutput(error.to_string())
        }
        error => RuntimeError::Other(format!("cannot read a volume: {}", error_chain(&error))),
    })?;
    let (invalid, others) = scanned.problems.iter().partition::<Vec<_>, _>(|problem| cannot_travel(problem));
    let unreadable: Vec<_> = others.into_iter().filter(|problem| is_unread(problem)).collect();
    // Any of these is no less a part of the volume than what was read.
    if let Some(invalid) = named(&invalid) {
        return Err(RuntimeError::InvalidOutput(invalid));
    }
    if let Some(unreadable) = named(&unreadable) {
        return Err(RuntimeError::UnreadableOutput(unreadable));
    }
    Ok(scanned)
}

/// Whether no manifest can hold what is at a path.
fn cannot_travel(problem: &Problem) -> bool {
    match &problem.what {
        ProblemKind::PathTooLong => true,
        // Attributes together are too large.
        ProblemKind::Unreadable(error) => error.kind() == io::ErrorKind::ArgumentListTooLong,
        // Overlays over the volume would act on it.
        ProblemKind::SkippedXattr(name) => name.starts_with("trusted.overlay."),
        ProblemKind::ChangedWhileRead | ProblemKind::SkippedSocket => false,
    }
}

/// Whether what is at a path could not be read as a whole.
fn is_unread(problem: &Problem) -> bool {
    match &problem.what {
        ProblemKind::Unreadable(_) | ProblemKind::ChangedWhileRead => true,
        ProblemKind::PathTooLong | ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_) => false,
    }
}

/// The first problems, and how many more there are. `None`: there is none.
fn named(problems: &[&Problem]) -> Option<String> {
    let first: Vec<_> = problems.iter().take(NAMED).map(|problem| shortened(problem)).collect();
    let more = problems.len().saturating_sub(first.len());
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    (!first.is_empty()).then(|| first.join(", ") + &more)
}

/// What was left out of a manifest: sockets and extended attributes, with the first paths. `None`: nothing.
pub(super) fn left_out(problems: &[Problem]) -> Option<String> {
    let is_left_out = |problem: &&Problem| {
        matches!(problem.what, ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_))
    };
    named(&problems.iter().filter(is_left_out).collect::<Vec<_>>())
}

/// A problem with the beginning of its path.
fn shortened(problem: &Problem) -> String {
    const SHOWN: usize = 200;
    let path = problem.path.to_string_lossy();
    let (shown, more) = match path.floor_char_boundary(SHOWN) {
        end if end < path.len() => (&path[..end], "…"),
        _ => (&*path, ""),
    };
    format!("{shown:?}{more} {}", error_chain(&problem.what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_that_no_manifest_describes_is_an_invalid_output() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut descent = transfer::Descent::open(directory.path()).expect("opened");
        for _ in 0..3000 {
            rustix::fs::mkdirat(descent.directory(), "d", rustix::fs::Mode::RWXU).expect("made");
            descent.enter(b"d").expect("entered");
        }
        let refused = scan(directory.path()).expect_err("too deep");
        assert_eq!(refused.reason(), domain::workload::FailureReason::OutputInvalid);
        let said = refused.to_string();
        assert!(said.starts_with("cannot store the directory: \"d/d/") && said.len() < 400, "{said}");
        assert!(said.ends_with("has a path of more than 4096 bytes, which cannot travel"), "{said}");
        transfer::remove_tree(&directory.path().join("d")).expect("removed");
    }

    #[test]
    fn sockets_are_named_and_left_out() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let bind = |name: &str| std::os::unix::net::UnixListener::bind(directory.path().join(name));
        let _sockets: Vec<_> =
            (0..5).map(|number| bind(&number.to_string())).collect::<Result<_, _>>().expect("bound");
        let scanned = scan(directory.path()).expect("scanned");
        assert_eq!(scanned.manifest.entries().len(), 1);
        let expected = "\"0\" is a socket, \"1\" is a socket, \"2\" is a socket, and 2 more";
        assert_eq!(left_out(&scanned.problems).as_deref(), Some(expected));
    }

    #[test]
    fn unread_files_fail_the_output() {
        let problem = |what| Problem { path: "a/b".into(), what };
        let unread =
            [ProblemKind::ChangedWhileRead, ProblemKind::Unreadable(io::ErrorKind::PermissionDenied.into())];
        assert!(
            unread.into_iter().map(problem).all(|problem| is_unread(&problem) && !cannot_travel(&problem))
        );
        let invalid =
            [ProblemKind::PathTooLong, ProblemKind::SkippedXattr("trusted.overlay.opaque".to_owned())];
        assert!(invalid.into_iter().map(problem).all(|problem| cannot_travel(&problem)));
        let left = problem(ProblemKind::SkippedXattr("trusted.own".to_owned()));
        assert!(!is_unread(&left) && !cannot_travel(&left));
    }
}
