//! Tests that check the state of the whole machine, one at a time.

mod bad;
mod leaks;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Guard that lets only one test check the machine.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
