//! The end of a command that followed a workload: what is said, and the exit code.

use crate::ending::exit_code;
use crate::follow::FollowResult;
use crate::render::ui::Ui;

/// How outputs came into their directories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// As the command left them.
    Whole,
    /// Some of them beside what was changed there meanwhile.
    WithConflicts,
}

/// Says how it ended, and answers the exit code. What the command itself says by its exit code goes before what is wrong with its outputs.
pub(crate) fn end(ui: &Ui, followed: &FollowResult, downloaded: &anyhow::Result<Delivery>) -> u8 {
    let mut end = exit_code::end(&followed.finished, followed.asked);
    // A command that was interrupted may end well, and has not done all that it was to do.
    if let (0, Some(asked)) = (end.code, followed.asked.or(followed.unread)) {
        end.code = asked;
    }
    if let Some(said) = &end.said {
        ui.warn(said);
    }
    match downloaded {
        Err(error) => {
            ui.error(&crate::ending::error::describe(error));
            if followed.finished.exit.is_some() {
                ui.warn(&format!("the command itself ended with exit code {}", end.code));
            }
            return exit_code::OURS;
        }
        Ok(Delivery::WithConflicts) if end.code == 0 => {
            ui.warn(
                "the command succeeded, but some of its results conflict with changes made here meanwhile",
            );
            return exit_code::OURS;
        }
        Ok(Delivery::WithConflicts | Delivery::Whole) => {}
    }
    if followed.output_lost && end.code == 0 {
        ui.warn("the command succeeded, but some of its output is missing");
        return exit_code::OURS;
    }
    end.code
}
