//! The screens in docs/screens.md: what a terminal shows after the commands of each.
//!
//! With `GANTRY_BLESS=1`, the test writes the document.

use std::fs;
use std::num::NonZero;
use std::path::PathBuf;

use integration_tests::registry::{Access, Registry};
use integration_tests::terminal::Terminal;
use integration_tests::{Cluster, gantry_binary, may_run_containers, wait_for, write};

use crate::registries::app;

/// Size of the terminal.
const ROWS: u16 = 50;
const COLUMNS: u16 = 100;
/// Start and end of a screen in the document.
const START: &str = "```text\n";
const END: &str = "```\n";
/// The registry in the document.
const REGISTRY: &str = "localhost:5000";
/// Words after a number that make it a time.
const UNITS: [&str; 5] = ["ms", "s", "min", "h", "d"];

/// Returns the words of each line, without what differs between two runs: ids, times, and the width
/// of columns.
fn words(screen: &str) -> Vec<Vec<String>> {
    let is_id = |word: &str| {
        let word = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        word.len() >= 8
            && word.chars().all(|c| c.is_ascii_hexdigit() || c == '-')
            && word.contains(|c: char| c.is_ascii_digit())
    };
    let is_instant = |word: &str| word.starts_with("20") && word.contains("T") && word.ends_with('Z');
    let line = |line: &str| {
        let mut words: Vec<String> = Vec::new();
        for word in line.split_whitespace() {
            let unit = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
            match words.last_mut() {
                Some(last) if UNITS.contains(&unit) && last.starts_with(|c: char| c.is_ascii_digit()) => {
                    *last = "TIME".to_owned();
                }
                _ if is_id(word) => words.push("ID".to_owned()),
                _ if is_instant(word) => words.push("INSTANT".to_owned()),
                _ => words.push(word.to_owned()),
            }
        }
        words
    };
    screen.trim_end().lines().map(line).collect()
}

/// Whether a line says that a step is complete. Such lines appear if the command takes more than a
/// second, which depends on the machine.
fn is_step(line: &str) -> bool {
    let steps = [": pulled sha256:", "gantry: placed on ", " sent in ", "gantry: waiting until "];
    line.starts_with("gantry: ") && steps.iter().any(|step| line.contains(step))
}

/// Types commands into a shell, and returns the screen when all of them have ended.
fn shown(terminal: &Terminal, commands: &[&str]) -> String {
    let screen = || {
        let [rows, columns] = [ROWS, COLUMNS].map(|size| NonZero::new(size).expect("a size"));
        let mut emulator = vt100::Parser::new(rows, columns, 0);
        emulator.process(terminal.text().as_bytes());
        emulator.screen().contents()
    };
    let cleared = || terminal.text().matches("\u{1b}[2J").count();
    let before = cleared();
    terminal.press("clear\n");
    wait_for("an empty screen", || (cleared() > before && screen().trim() == "$").then_some(()));
    let mut lines = 1;
    for command in commands {
        terminal.press(&format!("{command}\n"));
        lines = wait_for(&format!("the end of {command:?}"), || {
            let screen = screen();
            let now = screen.lines().count();
            (now > lines && screen.lines().last()?.trim() == "$").then_some(now)
        });
    }
    let screen = screen();
    let lines = screen.trim_end().trim_end_matches('$').lines().filter(|line| !is_step(line));
    lines.map(|line| format!("{line}\n")).collect()
}

#[test]
fn screens_of_document_are_those_of_a_terminal() {
    if !may_run_containers() {
        return;
    }
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/screens.md"));
    let document = fs::read_to_string(&path).expect("docs/screens.md");
    let (registry, layout) = (Registry::start(Access::Open), app());
    layout.configure("app", &["--config.user", "root", "--config.workingdir", "/"]);
    layout.configure("app", &["--clear", "config.entrypoint", "--config.cmd", "/bin/sh"]);
    registry.push(&layout, "app", "app:1");
    let address = registry.reference("app").replace("/app", "");
    let cluster = Cluster::new();
    let home = cluster.path("project").display().to_string();
    write(&cluster.path("project/src/main.c"), "int main(void) { return 0; }\n");
    let command = cluster.gantry(["version"]);
    let mut bash = std::process::Command::new("bash");
    bash.args(["--norc", "--noprofile", "-i"]).env_clear().current_dir(cluster.path("project"));
    bash.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let programs = gantry_binary().parent().expect("a directory").display().to_string();
    bash.env("PATH", format!("{programs}:/usr/bin:/bin")).env("PS1", "$ ").env("TERM", "xterm");
    let terminal = Terminal::run(&bash, ROWS, COLUMNS);
    terminal.wait_for("$ ");

    let mut written = String::new();
    let mut rest = document.as_str();
    while let Some((text, from_start)) = rest.split_once(START) {
        let (screen, after) = from_start.split_once(END).expect("the end of a screen");
        rest = after;
        let commands: Vec<_> = screen.lines().filter_map(|line| line.strip_prefix("$ ")).collect();
        let typed: Vec<_> = commands.iter().map(|command| command.replace(REGISTRY, &address)).collect();
        let typed: Vec<_> = typed.iter().map(String::as_str).collect();
        let real = shown(&terminal, &typed).replace(&address, REGISTRY).replace(&home, "~/project");
        let state = cluster.path(".").display().to_string();
        let real = real.replace(state.trim_end_matches("/."), "~");
        written += &format!("{text}{START}{real}{END}");
        if std::env::var_os("GANTRY_BLESS").is_none() {
            assert_eq!(words(screen), words(&real), "write it again with GANTRY_BLESS=1: {real}");
        }
    }
    written += rest;
    assert_ne!(written, rest, "there are screens");
    if std::env::var_os("GANTRY_BLESS").is_some() {
        fs::write(&path, written).expect("written");
    }
    terminal.press("exit 0\n");
    terminal.ended(0);
}
