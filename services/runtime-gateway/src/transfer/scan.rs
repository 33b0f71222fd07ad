//! The scan of a volume, and the problems that are found.

use std::io;
use std::path::Path;

use domain::error_chain;
use runtime::RuntimeError;
use transfer::{InvalidManifest, Limits, Problem, ProblemKind, ScanError, ScanOptions};

/// Most paths in a message about a volume.
const MAX_LISTED: usize = 3;

/// Scans a volume. A volume that no manifest can describe is an error of the process that wrote it.
pub(crate) fn scan(root: &Path) -> Result<transfer::Scan, RuntimeError> {
    scan_layer(root, None)
}

/// Scans a volume whose upper layer is `layer`, if the tree below is known.
pub(super) fn scan_layer(
    root: &Path,
    layer: Option<transfer::Layer<'_>>,
) -> Result<transfer::Scan, RuntimeError> {
    let limits = Limits::of_process();
    let options = ScanOptions { limits, shared_files: true, layer, ..ScanOptions::default() };
    let scanned = transfer::scan(root, &options, None).map_err(|error| match error {
        ScanError::Manifest(error) if !matches!(error, InvalidManifest::NoMemory) => {
            RuntimeError::InvalidOutput(error.to_string())
        }
        error => RuntimeError::Other(format!("cannot read a volume: {}", error_chain(&error))),
    })?;
    let (invalid, others) =
        scanned.problems.iter().partition::<Vec<_>, _>(|problem| is_undescribable(problem));
    let unreadable: Vec<_> = others.into_iter().filter(|problem| is_unreadable(problem)).collect();
    // Omitting such an entry would lose a part of the volume.
    if let Some(invalid) = format_problems(&invalid) {
        return Err(RuntimeError::InvalidOutput(invalid));
    }
    if let Some(unreadable) = format_problems(&unreadable) {
        return Err(RuntimeError::UnreadableOutput(unreadable));
    }
    Ok(scanned)
}

/// Whether a problem makes the volume impossible to describe.
fn is_undescribable(problem: &Problem) -> bool {
    match &problem.what {
        ProblemKind::PathTooLong => true,
        // All attributes of the entry are too large together.
        ProblemKind::Unreadable(error) => error.kind() == io::ErrorKind::ArgumentListTooLong,
        // An overlay above the volume would interpret these attributes.
        ProblemKind::SkippedXattr(name) => name.starts_with("trusted.overlay."),
        ProblemKind::ChangedWhileRead | ProblemKind::SkippedSocket => false,
    }
}

/// Whether an entry could not be read completely.
fn is_unreadable(problem: &Problem) -> bool {
    match &problem.what {
        ProblemKind::Unreadable(_) | ProblemKind::ChangedWhileRead => true,
        ProblemKind::PathTooLong | ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_) => false,
    }
}

/// Formats the first problems, and the number of others. `None`: there are none.
fn format_problems(problems: &[&Problem]) -> Option<String> {
    let first: Vec<_> = problems.iter().take(MAX_LISTED).map(|problem| format_problem(problem)).collect();
    let more = problems.len().saturating_sub(first.len());
    let more = if more > 0 { format!(", and {more} more") } else { String::new() };
    (!first.is_empty()).then(|| first.join(", ") + &more)
}

/// Formats the sockets and extended attributes that a manifest omits. `None`: there are none.
pub(super) fn omitted(problems: &[Problem]) -> Option<String> {
    let is_omitted = |problem: &&Problem| {
        matches!(problem.what, ProblemKind::SkippedSocket | ProblemKind::SkippedXattr(_))
    };
    format_problems(&problems.iter().filter(is_omitted).collect::<Vec<_>>())
}

/// Formats a problem with a shortened path.
fn format_problem(problem: &Problem) -> String {
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
    fn undescribable_volume_is_an_invalid_output() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut descent = transfer::Descent::open(directory.path()).expect("opened");
        for _ in 0..3000 {
            rustix::fs::mkdirat(descent.directory(), "d", rustix::fs::Mode::RWXU).expect("made");
            descent.enter(b"d").expect("entered");
        }
        let refused = scan(directory.path()).expect_err("too deep");
        assert_eq!(refused.reason(), domain::workload::FailureReason::OutputInvalid);
        let message = refused.to_string();
        assert!(
            message.starts_with("cannot store the directory: \"d/d/") && message.len() < 400,
            "{message}"
        );
        assert!(message.ends_with("has a path of more than 4096 bytes, which is not supported"), "{message}");
        transfer::remove_tree(&directory.path().join("d")).expect("removed");
    }

    #[test]
    fn sockets_are_omitted_and_listed() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let bind = |name: &str| std::os::unix::net::UnixListener::bind(directory.path().join(name));
        let _sockets: Vec<_> =
            (0..5).map(|number| bind(&number.to_string())).collect::<Result<_, _>>().expect("bound");
        let scanned = scan(directory.path()).expect("scanned");
        assert_eq!(scanned.manifest.entries().len(), 1);
        let expected = "\"0\" is a socket, \"1\" is a socket, \"2\" is a socket, and 2 more";
        assert_eq!(omitted(&scanned.problems).as_deref(), Some(expected));
    }

    #[test]
    fn unread_files_fail_the_output() {
        let problem = |what| Problem { path: "a/b".into(), what };
        let unread =
            [ProblemKind::ChangedWhileRead, ProblemKind::Unreadable(io::ErrorKind::PermissionDenied.into())];
        assert!(
            unread
                .into_iter()
                .map(problem)
                .all(|problem| is_unreadable(&problem) && !is_undescribable(&problem))
        );
        let invalid =
            [ProblemKind::PathTooLong, ProblemKind::SkippedXattr("trusted.overlay.opaque".to_owned())];
        assert!(invalid.into_iter().map(problem).all(|problem| is_undescribable(&problem)));
        let left = problem(ProblemKind::SkippedXattr("trusted.own".to_owned()));
        assert!(!is_unreadable(&left) && !is_undescribable(&left));
    }
}
