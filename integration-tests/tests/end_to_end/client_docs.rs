//! Excerpts in `docs/clients.md`: they match the sources of the clients between `docs:NAME` and
//! `docs:end`.
//!
//! `GANTRY_BLESS=1 cargo test -p integration-tests --test end_to_end client_docs` copies the
//! excerpts into the document.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const SOURCES: [(&str, &str, &str); 5] = [
    ("go", "go", "go/main.go"),
    ("python", "python", "python/client.py"),
    ("typescript", "ts", "typescript/src/client.ts"),
    ("java", "java", "java/src/main/java/gantry/example/Client.java"),
    ("rust", "rust", "rust/src/main.rs"),
];

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
    let path = root().join("docs/clients.md");
    let document = read(&path);
    let (mut renewed, mut rest, mut count) = (String::new(), document.as_str(), 0);
    while let Some((before, after)) = rest.split_once("<!-- excerpt ") {
        let (what, after) = after.split_once(" -->").expect("a marker");
        let (_, after) = after.split_once("<!-- end -->").expect("its end");
        let (language, name) = what.split_once(' ').expect("language and name");
        let (_, fence, source) = SOURCES.iter().find(|(key, ..)| *key == language).expect("a client");
        let text = excerpt(&read(&root().join("integration-tests/clients").join(source)), name);
        write!(renewed, "{before}<!-- excerpt {what} -->\n```{fence}\n{text}\n```\n<!-- end -->")
            .expect("it is a string");
        rest = after;
        count += 1;
    }
    renewed.push_str(rest);
    assert_eq!(count % SOURCES.len(), 0, "each step in each language");
    assert!(count >= 40, "only {count} excerpts");
    if std::env::var_os("GANTRY_BLESS").is_some() {
        std::fs::write(&path, &renewed).expect("written");
    }
    assert!(read(&path) == renewed, "docs/clients.md is behind the clients: see the head of this test");
}
