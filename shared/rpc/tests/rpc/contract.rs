//! Comments of the RPCs in `proto/`, read as the contract of each RPC.
//!
//! The comment of an RPC ends with four entries: `Idempotent:`, `Deadline:`, `Caller:` and
//! `Errors:`. Other tests compare the entries with the code. [`contracts`] panics when an entry is
//! missing or malformed.

use std::path::{Path, PathBuf};

use prost::Message;
use prost_types::FileDescriptorSet;

/// Contract of one RPC, as its comment states it.
pub(crate) struct Contract {
    /// Package of the proto, such as `gantry.scheduler.v1`.
    pub(crate) package: String,
    pub(crate) service: String,
    pub(crate) rpc: String,
    /// Whether the request is a stream.
    pub(crate) streams_requests: bool,
    /// Whether a caller may repeat the call.
    pub(crate) idempotent: bool,
    /// Recommended deadline in seconds. `None`: no deadline.
    pub(crate) deadline: Option<u32>,
    /// Principals that may call, the main one first.
    pub(crate) callers: Vec<String>,
}

/// Entries at the end of each comment, in their order.
const ENTRIES: [&str; 4] = ["Idempotent:", "Deadline:", "Caller:", "Errors:"];

/// Kinds of principals. `any` stands for all of them.
const PRINCIPALS: [&str; 5] = ["caller", "gateway", "service", "operator", "any"];

/// The folder of the protos.
pub(crate) fn proto() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../proto")
}

/// The contracts of all RPCs.
pub(crate) fn contracts() -> Vec<Contract> {
    let descriptors = FileDescriptorSet::decode(gantry_rpc::DESCRIPTORS).expect("descriptors");
    let mut contracts = Vec::new();
    for file in descriptors.file.iter().filter(|file| file.package().starts_with("gantry.")) {
        let text = std::fs::read_to_string(proto().join(file.name())).expect("a proto");
        for service in &file.service {
            for method in &service.method {
                let name = format!("{}.{}", service.name(), method.name());
                let comment = comment(&text, service.name(), method.name());
                let [idempotent, deadline, callers, errors] = entries(&name, &comment);
                check_errors(&name, &errors);
                contracts.push(Contract {
                    package: file.package().to_owned(),
                    service: service.name().to_owned(),
                    rpc: method.name().to_owned(),
                    streams_requests: method.client_streaming(),
                    idempotent: parse_idempotent(&name, &idempotent),
                    deadline: parse_deadline(&name, &deadline),
                    callers: parse_callers(&name, &callers),
                });
            }
        }
    }
    contracts
}

/// The lines of the comment before `rpc NAME(` in the service.
fn comment(text: &str, service: &str, rpc: &str) -> Vec<String> {
    let service = text.split(&format!("\nservice {service} {{")).nth(1).expect("a service");
    let before = service.split(&format!("rpc {rpc}(")).next().expect("the text before the RPC");
    let lines = before.lines().rev().skip(1).map(str::trim).take_while(|line| line.starts_with("//"));
    let mut lines: Vec<_> = lines.map(|line| line.trim_start_matches('/').trim().to_owned()).collect();
    lines.reverse();
    lines
}

/// The texts of the four entries. A description and an empty line must precede them.
fn entries(rpc: &str, comment: &[String]) -> [String; 4] {
    let starts = ENTRIES.map(|entry| {
        let mut found = (0..comment.len()).filter(|line| comment[*line].starts_with(entry));
        let start = found.next().unwrap_or_else(|| panic!("{rpc} has no line {entry:?}"));
        assert!(found.next().is_none(), "{rpc} has more than one line {entry:?}");
        start
    });
    assert!(starts.is_sorted(), "{rpc}: the order is {}", ENTRIES.join(" "));
    let first = starts[0];
    assert!(first >= 2 && comment[first - 1].is_empty(), "{rpc}: an empty line precedes {:?}", ENTRIES[0]);
    assert!(comment[first..].iter().all(|line| !line.is_empty()), "{rpc}: the entries have an empty line");
    std::array::from_fn(|index| {
        let end = starts.get(index + 1).copied().unwrap_or(comment.len());
        let separator = if index == 3 { "\n" } else { " " };
        let text = comment[starts[index]..end].join(separator);
        text[ENTRIES[index].len()..].trim().to_owned()
    })
}

fn parse_idempotent(rpc: &str, text: &str) -> bool {
    match text.split([',', '.']).next() {
        Some("yes") => true,
        Some("no") => false,
        _ => panic!("{rpc}: Idempotent is yes or no, not {text:?}"),
    }
}

fn parse_deadline(rpc: &str, text: &str) -> Option<u32> {
    let text = text.split([',', '.']).next().unwrap_or_default();
    if text == "none" {
        return None;
    }
    let seconds = text.strip_suffix(" s").and_then(|seconds| seconds.parse().ok());
    Some(seconds.unwrap_or_else(|| panic!("{rpc}: Deadline is `N s` or `none`, not {text:?}")))
}

fn parse_callers(rpc: &str, text: &str) -> Vec<String> {
    let parse = |part: &str| {
        let principal = part.trim().split([' ', ',']).next().unwrap_or_default();
        assert!(PRINCIPALS.contains(&principal), "{rpc}: {principal:?} is not a principal");
        principal.to_owned()
    };
    text.split(';').map(parse).collect()
}

/// Requires a sentence, or a list of bullets `- CODE (REASON): text`.
fn check_errors(rpc: &str, text: &str) {
    if text.starts_with("only those ") {
        return;
    }
    assert!(text.starts_with("- "), "{rpc}: Errors has neither a list nor `only those …`");
    for line in text.lines().filter(|line| line.starts_with("- ")) {
        assert!(bullet(line).is_some(), "{rpc}: {line:?} is not `- CODE (REASON): text`");
    }
}

/// Code and reasons of a line `- CODE (REASON, …): text`.
pub(crate) fn bullet(line: &str) -> Option<(&str, Vec<&str>)> {
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|letter| letter.is_ascii_uppercase() || letter == '_')
    };
    let (code, rest) = line.strip_prefix("- ")?.split_once(" (")?;
    let (reasons, _) = rest.split_once("): ")?;
    let reasons: Vec<_> = reasons.split(", ").collect();
    (is_name(code) && reasons.iter().all(|reason| is_name(reason))).then_some((code, reasons))
}

#[test]
fn rpc_comment_has_all_entries() {
    let contracts = contracts();
    assert!(contracts.len() > 80, "only {} RPCs were found", contracts.len());
}
