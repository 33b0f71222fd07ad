//! `docs/errors.md`, the protos and the code must name the same reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use domain::workload::{Failure, FailureReason};
use gantry_rpc::Reason;

use crate::contract::bullet;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Columns of each row of the table under `heading`, by the reason in the first column.
fn rows(document: &str, heading: &str) -> BTreeMap<String, Vec<String>> {
    let section = document.split("\n## ").find(|section| section.starts_with(heading)).expect("the section");
    let mut rows = BTreeMap::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let columns: Vec<_> =
            line.trim_matches('|').split('|').map(|column| column.trim().to_owned()).collect();
        let reason = columns[0].trim_matches('`').to_owned();
        assert!(columns.iter().all(|column| !column.is_empty()), "a column is empty: {line}");
        assert!(rows.insert(reason, columns).is_none(), "a reason occurs twice: {line}");
    }
    rows
}

#[test]
fn document_lists_every_reason_with_its_code() {
    let document = std::fs::read_to_string(root().join("docs/errors.md")).expect("docs/errors.md");
    let rows = rows(&document, "Reasons of calls");
    let documented: BTreeSet<_> = rows.keys().map(String::as_str).collect();
    let known: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(documented, known);
    for reason in Reason::ALL {
        let row = &rows[reason.as_str()];
        let code = format!("{:?}", reason.code());
        let documented = row[1].trim_matches('`').replace('_', "");
        assert!(documented.eq_ignore_ascii_case(&code), "the code of {reason} is {code}, not {documented}");
        assert!(
            ["caller", "infrastructure", "capacity", "configuration"].contains(&row[2].as_str()),
            "{row:?}"
        );
        assert!(["none", "possible", "happened"].contains(&row[3].as_str()), "{row:?}");
    }
}

#[test]
fn document_lists_every_workload_failure() {
    let document = std::fs::read_to_string(root().join("docs/errors.md")).expect("docs/errors.md");
    let rows = rows(&document, "Failures of workloads");
    let documented: BTreeSet<_> = rows.keys().map(String::as_str).collect();
    let known: BTreeSet<_> = FailureReason::ALL.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(documented, known);
    for row in rows.values() {
        assert!(
            ["caller", "infrastructure", "capacity", "configuration"].contains(&row[1].as_str()),
            "{row:?}"
        );
        assert!(["none", "possible", "happened"].contains(&row[2].as_str()), "{row:?}");
    }
}

#[test]
fn unknown_failure_becomes_worker_failed() {
    for reason in FailureReason::ALL {
        let failure = Failure { reason: *reason, message: "why".to_owned() };
        assert_eq!(gantry_rpc::parse_failure(gantry_rpc::failure(&failure)), failure);
        let text = serde_json::to_string(&failure).expect("text");
        assert_eq!(text, format!(r#"{{"reason":"{reason}","message":"why"}}"#));
        assert_eq!(serde_json::from_str::<Failure>(&text).expect("a failure"), failure);
    }
    let newer = gantry_rpc::pb::scheduler::Failure { reason: "NEWER".to_owned(), message: "why".to_owned() };
    let parsed = gantry_rpc::parse_failure(newer);
    assert_eq!(parsed, Failure { reason: FailureReason::WorkerFailed, message: "NEWER: why".to_owned() });
    let stored: Failure = serde_json::from_str(r#"{"reason":"NEWER","message":"why"}"#).expect("a failure");
    assert_eq!(stored.reason, FailureReason::WorkerFailed);
}

#[test]
fn protos_name_only_known_reasons() {
    let mut seen = 0;
    for path in protos(&root().join("proto")) {
        let text = std::fs::read_to_string(&path).expect("a proto");
        for line in text.lines().filter_map(|line| line.trim().strip_prefix("// ")) {
            let Some((code, reasons)) = bullet(line) else { continue };
            for reason in reasons {
                let known = Reason::ALL.iter().find(|known| known.as_str() == reason);
                let known = known.unwrap_or_else(|| panic!("{}: {reason} is unknown", path.display()));
                let expected = format!("{:?}", known.code());
                assert!(
                    code.replace('_', "").eq_ignore_ascii_case(&expected),
                    "{}: the code of {reason} is {expected}, not {code}",
                    path.display()
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 150, "only {seen} reasons were found, so the comments have another shape");
}

fn protos(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(protos(&path));
        } else {
            files.push(path);
        }
    }
    files
}
