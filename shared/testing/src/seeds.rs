//! Seeds of random tests. Each test prints its seed, so that a run can be repeated.
//!
//! `GANTRY_SEED` sets the one seed of a test. Without it, `GANTRY_FIRST_SEED` sets the first of
//! several consecutive seeds, for example derived from a commit. Without both, the seeds are
//! random.

use std::env;

/// The seed of the first run of a test.
pub fn seed() -> u64 {
    repeated().unwrap_or_else(|| nth(0))
}

/// The seed of the run to repeat, if `GANTRY_SEED` is set.
pub fn repeated() -> Option<u64> {
    setting("GANTRY_SEED")
}

/// The seed of run `run`, counted from 0, of a test with several runs.
pub fn nth(run: u64) -> u64 {
    match setting("GANTRY_FIRST_SEED") {
        Some(first) => first.wrapping_add(run),
        // Short enough to be typed.
        None => rand::random_range(0..u64::MAX >> 16),
    }
}

/// A number from the environment.
pub fn setting(name: &str) -> Option<u64> {
    env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}
