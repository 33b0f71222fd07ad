//! Questions to the person at the terminal.

use std::io::{self, IsTerminal};

use anyhow::{Context, bail};
use tokio::sync::oneshot;

use crate::render::stdout::print;

/// Says what will be deleted, and returns whether the person agrees. Without a terminal, the
/// command fails.
pub(crate) async fn confirmed(what: &str) -> anyhow::Result<bool> {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        bail!("cannot delete {what}: there is no terminal for a question; use --yes");
    }
    print(&format!("This deletes {what}.\nDelete? [y/N] "))?;
    let (sender, answer) = oneshot::channel();
    // A separate thread, because a read from a terminal cannot be interrupted.
    std::thread::spawn(move || {
        let mut line = String::new();
        // The receiver is gone if the command was interrupted.
        _ = sender.send(io::stdin().read_line(&mut line).map(|_| line));
    });
    let line = answer.await.context("cannot read the answer")?.context("cannot read the answer")?;
    Ok(agrees(&line))
}

fn agrees(line: &str) -> bool {
    matches!(line.trim().to_lowercase().as_str(), "y" | "yes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_yes_agrees() {
        assert!(agrees("y\n") && agrees(" YES\n"));
        assert!(!agrees("") && !agrees("\n") && !agrees("n\n") && !agrees("yesterday\n"));
    }
}
