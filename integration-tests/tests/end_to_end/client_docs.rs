//! Excerpts in `docs/clients.md` and `docs/ci-core.md`: they match the sources of the clients
//! between `docs:NAME` and `docs:end`.
//!
//! `GANTRY_BLESS=1 cargo test -p integration-tests --test end_to_end client_docs` copies the
//! excerpts into the documents.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const CLIENTS: [(&str, &str, &str); 5] = [
    ("go", "go", "go/main.go"),
    ("python", "python", "python/client.py"),
    ("typescript", "ts", "typescript/src/client.ts"),
    ("java", "java", "java/src/main/java/gantry/example/Client.java"),
    ("rust", "rust", "rust/src/main.rs"),
];
const CI_CORE: [(&str, &str, &str); 1] = [("ci", "python", "python/ci_core.py")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Returns the lines of `source` that are marked with `name`, with the common indentation removed.
fn excerpt(source: &str, name: &str) -> String {
    let marker =
        |line: &str| line.trim_start_matches([' ', '\t', '/', '#']).strip_prefix("docs:").map(str::to_owned);
    let marked = source.lines().skip_while(|line| marker(line).is_none_or(|found| found != name));
    let lines: Vec<_> = marked.skip(1).take_while(|line| marker(line).is_none()).collect();
    let text = lines.join("\n");
    let text = text.trim_matches('\n');
    assert!(!text.is_empty(), "nothing is marked with docs:{name}");
    let indent = |line: &&str| line.len() - line.trim_start().len();
    let margin = text.lines().filter(|line| !line.trim().is_empty()).map(|line| indent(&line)).min();
    let lines: Vec<_> = text.lines().map(|line| line.get(margin.unwrap_or(0)..).unwrap_or("")).collect();
    lines.join("\n")
}

#[test]
fn excerpts_match_clients() {
    let count = check_excerpts("docs/clients.md", &CLIENTS);
    assert_eq!(count % CLIENTS.len(), 0, "each step in each language");
    assert!(count >= 40, "only {count} excerpts");
}

#[test]
fn excerpts_match_ci_core() {
    let count = check_excerpts("docs/ci-core.md", &CI_CORE);
    assert!(count >= 10, "only {count} excerpts");
}

/// Compares the excerpts of a document with their sources, and returns their number.
fn check_excerpts(name: &str, sources: &[(&str, &str, &str)]) -> usize {
    let path = root().join(name);
    let document = read(&path);
    let (mut renewed, mut rest, mut count) = (String::new(), document.as_str(), 0);
    while let Some((before, after)) = rest.split_once("<!-- excerpt ") {
        let (what, after) = after.split_once(" -->").expect("a marker");
        let (_, after) = after.split_once("<!-- end -->").expect("its end");
        let (client, mark) = what.split_once(' ').expect("client and mark");
        let (_, fence, source) = sources.iter().find(|(key, ..)| *key == client).expect("a client");
        let text = excerpt(&read(&root().join("integration-tests/clients").join(source)), mark);
        write!(renewed, "{before}<!-- excerpt {what} -->\n```{fence}\n{text}\n```\n<!-- end -->")
            .expect("it is a string");
        rest = after;
        count += 1;
    }
    renewed.push_str(rest);
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(&path, &renewed).expect("written");
    }
    assert!(read(&path) == renewed, "{name} is behind the clients: see the head of this test");
    count
}
