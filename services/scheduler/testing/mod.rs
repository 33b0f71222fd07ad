//! Harnesses that check the scheduler as a whole: a model, and concurrent random operations.

pub(crate) mod concurrent;
mod model;
