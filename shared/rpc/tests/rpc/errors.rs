//! `docs/errors.md`, the protos and the code name the same reasons.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use domain::workload::{Failure, FailureReason};
use gantry_rpc::Reason;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The rows of a table whose first column is a reason: the columns, by reason.
fn rows(document: &str, heading: &str) -> BTreeMap<String, Vec<String>> {
    let section = document.split("\n## ").find(|section| section.starts_with(heading)).expect("the section");
    let mut rows = BTreeMap::new();
    for line in section.lines().filter(|line| line.starts_with("| `")) {
        let columns: Vec<_> =
            line.trim_matches('|').split('|').map(|column| column.trim().to_owned()).collect();
        let reason = columns[0].trim_matches('`').to_owned();
        assert!(columns.iter().all(|column| !column.is_empty()), "an empty column: {line}");
        assert!(rows.insert(reason, columns).is_none(), "twice: {line}");
    }
    rows
}

#[test]
fn the_document_lists_every_reason_with_its_code() {
    let document = std::fs::read_to_string(root().join("docs/errors.md")).expect("docs/errors.md");
    let rows = rows(&document, "Reasons of calls");
    let documented: BTreeSet<_> = rows.keys().map(String::as_str).collect();
    let known: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(documented, known);
    for reason in Reason::ALL {
        let row = &rows[reason.as_str()];
        let code = format!("{:?}", reason.code());
        let said = row[1].trim_matches('`').replace('_', "");
        assert!(said.eq_ignore_ascii_case(&code), "{reason} is {code}, not {said}");
        assert!(
            ["caller", "infrastructure", "capacity", "configuration"].contains(&row[2].as_str()),
            "{row:?}"
        );
        assert!(["none", "possible", "happened"].contains(&row[3].as_str()), "{row:?}");
    }
}

#[test]
fn the_document_lists_every_failure_of_a_workload() {
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
fn a_failure_that_is_not_listed_becomes_one_that_is() {
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
    let kept: Failure = serde_json::from_str(r#"{"reason":"NEWER","message":"why"}"#).expect("a failure");
    assert_eq!(kept.reason, FailureReason::WorkerFailed);
}

#[test]
fn the_protos_name_only_reasons_that_exist_and_with_their_code() {
    let mut seen = 0;
    for path in protos(&root().join("proto")) {
        let text = std::fs::read_to_string(&path).expect("a proto");
        for line in text.lines().filter_map(|line| line.trim().strip_prefix("// - `")) {
            let Some((code, rest)) = line.split_once("` (`") else { continue };
            let Some((reasons, _)) = rest.split_once(')') else { continue };
            for reason in reasons.split(", ").map(|reason| reason.trim_matches('`')) {
                let known = Reason::ALL.iter().find(|known| known.as_str() == reason);
                let known = known.unwrap_or_else(|| panic!("{}: {reason} is unknown", path.display()));
                let expected = format!("{:?}", known.code());
                assert!(
                    code.replace('_', "").eq_ignore_ascii_case(&expected),
                    "{}: {reason} comes with {expected}, not {code}",
                    path.display()
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 40, "only {seen} reasons found: the comments have another form now");
}

fn protos(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(protos(&path));
        } else {
            found.push(path);
        }
    }
    found
}
