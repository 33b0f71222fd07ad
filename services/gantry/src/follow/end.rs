//! End of a command that followed a workload: final messages and exit code.

use crate::ending::exit_code;
use crate::follow::FollowResult;
use crate::render::ui::Ui;

/// Result of the downloads of all outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// All outputs are in their directories as the command left them.
    Whole,
    /// Some entries were written beside local changes.
    WithConflicts,
}

/// Prints how the workload ended, and returns the exit code. A failure of the command itself wins
/// over a problem with its outputs.
pub(crate) fn end(ui: &Ui, followed: &FollowResult, downloaded: &anyhow::Result<Delivery>) -> u8 {
    let mut end = exit_code::end(&followed.finished, followed.cancel_code);
    // An interrupted command may exit with 0 although its work is not complete.
    if let (0, Some(code)) = (end.code, followed.cancel_code.or(followed.closed_code)) {
        end.code = code;
    }
    if let Some(message) = &end.message {
        ui.warn(message);
    }
    match downloaded {
        Err(error) => {
            ui.error(&crate::ending::error::describe(error));
            if followed.finished.exit.is_some() {
                ui.warn(&format!("the command itself ended with exit code {}", end.code));
            }
            return exit_code::GANTRY_FAILED;
        }
        Ok(Delivery::WithConflicts) if end.code == 0 => {
            ui.warn("the command succeeded, but some of its results conflict with your changes");
            return exit_code::GANTRY_FAILED;
        }
        Ok(Delivery::WithConflicts | Delivery::Whole) => {}
    }
    if followed.output_lost && end.code == 0 {
        ui.warn("the command succeeded, but some of its output is missing");
        return exit_code::GANTRY_FAILED;
    }
    end.code
}
