//! Tests that look at the machine as a whole: one at a time.

mod bad;
mod leaks;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The right to look at the machine.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
