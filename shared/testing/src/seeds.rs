//! Where random tests begin: a seed is printed by whoever draws from it, and a run is repeated with it.
//!
//! `GANTRY_SEED` is the one seed that a test draws from. Without it, `GANTRY_FIRST_SEED` is the first of several, each one more than the last:
//! who derives it from a commit runs the same for it wherever it is checked. Without both they are new each time.

use std::env;

/// The seed of the first run of a test.
pub fn seed() -> u64 {
    repeated().unwrap_or_else(|| nth(0))
}

/// The one seed that shall be run again.
pub fn repeated() -> Option<u64> {
    setting("GANTRY_SEED")
}

/// The seed of run `run` of a test that makes several, from 0.
pub fn nth(run: u64) -> u64 {
    match setting("GANTRY_FIRST_SEED") {
        Some(first) => first.wrapping_add(run),
        // Short enough to be read aloud.
        None => rand::random_range(0..u64::MAX >> 16),
    }
}

/// A number from the environment.
pub fn setting(name: &str) -> Option<u64> {
    env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}
