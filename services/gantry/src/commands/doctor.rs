//! `gantry doctor`: what this machine allows for a cluster on it, and what to change.

use runtime_gateway::host::{self, Check, Verdict};
use serde_json::{Value, json};

use crate::cluster::Paths;
use crate::render::stdout::{print, print_json};
use crate::render::table::{count, plain, render};

/// Exit code if no container can run.
const CANNOT_RUN: u8 = 1;

/// Executes `gantry doctor`, and returns the exit code. Must be called before any thread exists.
pub(crate) fn doctor(as_json: bool) -> anyhow::Result<u8> {
    let checks = host::checks(&Paths::find()?.state);
    let code = if number(&checks, Verdict::Failed) > 0 { CANNOT_RUN } else { 0 };
    if as_json {
        let checks: Vec<_> = checks.iter().map(document).collect();
        print_json(&json!({ "ready": code == 0, "checks": checks }))?;
    } else {
        print(&text(&checks))?;
    }
    Ok(code)
}

fn number(checks: &[Check], verdict: Verdict) -> u64 {
    checks.iter().filter(|check| check.verdict == verdict).count() as u64
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "ok",
        Verdict::Limited => "limited",
        Verdict::Failed => "missing",
    }
}

fn document(check: &Check) -> Value {
    json!({
        "name": check.name,
        "result": word(check.verdict),
        "found": check.found,
        "remedy": (!check.remedy.is_empty()).then_some(&check.remedy),
    })
}

fn text(checks: &[Check]) -> String {
    let row =
        |check: &Check| vec![check.name.to_owned(), word(check.verdict).to_owned(), plain(&check.found, 200)];
    let mut text = render(&["CHECK", "RESULT", "FOUND"], &checks.iter().map(row).collect::<Vec<_>>());
    let remedies = checks.iter().filter(|check| !check.remedy.is_empty());
    let remedies: String =
        remedies.map(|check| format!("  {}: {}\n", check.name, plain(&check.remedy, 400))).collect();
    if !remedies.is_empty() {
        text.push_str(&format!("\nTo change:\n{remedies}"));
    }
    text.push_str(&match (number(checks, Verdict::Failed), number(checks, Verdict::Limited)) {
        (0, 0) => "\nContainers run on this machine, with all features\n".to_owned(),
        (0, limited) => format!("\nContainers run on this machine, without {}\n", count(limited, "feature")),
        _ => "\nContainers cannot run on this machine\n".to_owned(),
    });
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_follow_the_table() {
        let check = |name, verdict, remedy: &str| Check {
            name,
            verdict,
            found: "found".to_owned(),
            remedy: remedy.to_owned(),
        };
        let passed = check("user", Verdict::Passed, "");
        let shown = text(&[passed.clone(), check("disk", Verdict::Limited, "free some")]);
        assert_eq!(
            shown,
            "CHECK  RESULT   FOUND\nuser   ok       found\ndisk   limited  found\n\nTo change:\n  disk: free some\n\n\
             Containers run on this machine, without 1 feature\n"
        );
        assert!(text(&[passed]).ends_with("with all features\n"));
        let failed = text(&[check("user", Verdict::Failed, "be root")]);
        assert!(failed.ends_with("\nContainers cannot run on this machine\n"), "{failed}");
    }
}
