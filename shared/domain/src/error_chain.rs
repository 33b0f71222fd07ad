//! Formatting of errors for logs and messages.

use std::error::Error;

/// Formats an error and all its causes in one line, with colons between them.
#[must_use]
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // The errors of some libraries already contain their cause.
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}
